// Fused attention forward on the CUDA cores (FlashAttention-2, Dao 2023, algorithm 1): one thread
// block takes Br query rows of one head through the tiles of Bc keys, right to left.
//
// A thread owns rows_per_thread query rows; the row_threads lanes of its warp that own the same
// rows divide the tile's keys among them for S, and the columns for O. Both products are outer
// products in registers:
//   S[rows][keys]    = Q K^T, operands read as 128-bit vectors along head_dim;
//   O[rows][columns] += P V,  P read along the keys, V along head_dim_v.
// With r rows and c columns a step of w elements (16 bytes) reads r + c vectors and does w r c
// multiply-adds. An SM does 128 float FMAs (64 double) and reads 128 bytes of shared memory, one
// wavefront, per cycle; a warp's 128-bit read takes at least two wavefronts. For float at 8 x 8
// that is 32 wavefronts under 64 cycles of FMA, at 8 x 4 24 under 32, at 4 x 4 16 under 16: 8 x 8
// leaves the shared memory half idle and spends 16 of 272 issue slots on loads.
#include "params.cuh"
#include "ptx/base.cuh"
#include "score/mask.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "work/place.cuh"
#include "work/schedule.cuh"
#include "work/split.cuh"

namespace simt {

__host__ __device__ constexpr int round_up(int value, int multiple) {
  return ceil_div(value, multiple) * multiple;
}

template <class Config>
struct Layout {
  using Element = typename Config::Element;
  using T = Accumulator<Element>;

  static constexpr int headroom = ::headroom<Element>;
  static constexpr int width = 16 / sizeof(T);  // of a 128-bit shared access
  using Vec = Vector<T, width>;

  // Of a global access: as much of 128 bits as the alignment of rows allows.
  static constexpr int unit = Config::alignment > sizeof(Element)
                                  ? Config::alignment / int(sizeof(Element))
                                  : 1;

  static constexpr int rows = Config::rows_per_thread;
  static constexpr int row_threads = Config::threads * rows / Config::Br;
  static constexpr int warp_rows = 32 / row_threads;  // distinct rows a warp reads at once
  static constexpr int keys = Config::Bc / row_threads;
  static constexpr int columns = ceil_div(Config::head_dim_v, width* row_threads) * width;
  static_assert(Config::threads % 32 == 0);
  static_assert(row_threads == 4 || row_threads == 8 || row_threads == 16 || row_threads == 32);
  static_assert(row_threads * Config::Br == Config::threads * rows);
  static_assert(Config::Bc % row_threads == 0 && Config::Bc % width == 0);

  // Hardware serves a 128-bit read by half warps, in one wavefront each if lanes l and l ^ 1, or
  // l and l ^ 2, always agree on the address and the (then at most eight) distinct vectors lie in
  // distinct groups of four banks. So bit 0 of the lane goes to the row, and the next bits to the
  // position in it: neighbours agree on K and V, lanes two apart agree on Q and P.
  static constexpr int position_shift = row_threads < 32 ? 1 : 0;
  __device__ static int position() {
    return threadIdx.x % 32 >> position_shift & (row_threads - 1);
  }
  __device__ static int row_in_warp() {
    const int lane = threadIdx.x % 32;
    return (lane & position_shift) | (lane / (row_threads << position_shift) << position_shift);
  }

  // Eight neighbouring positions read eight neighbouring rows of K: an odd row length, counted in
  // vectors, puts them in distinct bank groups. The same serves the rows of Q.
  static constexpr int padded_dim = round_up(Config::head_dim, unit > width ? unit : width);
  static constexpr int qk_stride = (padded_dim / width | 1) * width;
  // Eight positions read consecutive vectors of one row of V: no padding needed.
  static constexpr int v_stride = round_up(columns * row_threads, unit > width ? unit : width);
  // A warp (for double, a half warp) writes one element of P per lane: row_threads neighbours in
  // each of several rows, which together cover the 128 bytes of banks once if the row length leaves
  // the remainder `span`.
  static constexpr int banks = 128 / sizeof(T);
  static constexpr int span = row_threads < banks / 2 ? row_threads : banks / 2;
  static constexpr int p_stride = Config::Bc + (span - Config::Bc % banks + banks) % banks;

  static constexpr int q_size = Config::Br * qk_stride;
  static constexpr int k_size = Config::Bc * qk_stride;
  static constexpr int v_size = Config::Bc * v_stride;
  static constexpr int kv_size =
      Config::share_kv ? (k_size > v_size ? k_size : v_size) : k_size + v_size;
  static constexpr int p_size = Config::Br * p_stride;
  static_assert(int(sizeof(T)) * (q_size + kv_size + p_size) == Config::shared_memory);
};

// Copies the rows [begin, begin + Rows) of one head into shared memory, widened to T. Columns from
// Dim to the next whole unit, and with Checked the rows from end on, are zeros and are not read.
template <class Config, int Rows, int Dim, int Stride, bool Checked>
struct TileLoad {
  using L = Layout<Config>;
  using Element = typename L::Element;
  using T = typename L::T;

  static constexpr int unit = L::unit;
  static constexpr int row_units = ceil_div(round_up(Dim, L::width), unit);
  static constexpr int lanes = row_units < Config::threads ? row_units : Config::threads;
  static constexpr int rows_at_once = Config::threads / lanes;
  static constexpr int passes = ceil_div(Rows, rows_at_once);
  static constexpr bool whole = row_units * unit == Dim;
#if __CUDA_ARCH__ >= 800
  static constexpr bool async = sizeof(Element) == sizeof(T);
#else
  static constexpr bool async = false;
#endif
  static_assert(row_units * unit <= Stride);

  __device__ static void run(T* shared, const Element* head, int64 row_stride, int begin, int end) {
    const int first_row = threadIdx.x / lanes;
    if (Config::threads % lanes != 0 && first_row >= rows_at_once) return;
    const Element* source = head + (begin + first_row) * row_stride;
#pragma unroll 4
    for (int pass = 0; pass < passes; ++pass) {
      const int row = first_row + pass * rows_at_once;
      if (Rows % rows_at_once != 0 && row >= Rows) break;
      const bool inside = !Checked || begin + row < end;
#pragma unroll
      for (int first = 0; first < row_units; first += lanes) {
        const int index = first + threadIdx.x % lanes;
        if (row_units % lanes != 0 && index >= row_units) continue;
        const int column = index * unit;
        copy(shared + row * Stride + column, inside ? source + column : head, column, inside);
      }
      source += rows_at_once * row_stride;
    }
  }

  // The same of rows that lie anywhere, row_at() says where. A few are asked for before the first
  // is copied, for asking may be a read from memory.
  template <class RowAt>
  __device__ static void gather(T* shared, RowAt row_at) {
    constexpr int asked = passes < 4 ? passes : 4;
    const int first_row = threadIdx.x / lanes;
    if (Config::threads % lanes != 0 && first_row >= rows_at_once) return;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass += asked) {
      Row<Element> source[asked];
#pragma unroll
      for (int i = 0; i < asked; ++i) source[i] = row_at(first_row + (pass + i) * rows_at_once);
#pragma unroll
      for (int i = 0; i < asked; ++i) {
        const int row = first_row + (pass + i) * rows_at_once;
        if (Rows % (asked * rows_at_once) != 0 && row >= Rows) break;
#pragma unroll
        for (int first = 0; first < row_units; first += lanes) {
          const int index = first + threadIdx.x % lanes;
          if (row_units % lanes != 0 && index >= row_units) continue;
          const int column = index * unit;
          copy(shared + row * Stride + column, source[i].begin + column, column,
               source[i].is_there);
        }
      }
    }
  }

  // The unit from `column` on of a row, of which there are Dim, or zeros if the row is not there.
  __device__ static void copy(T* shared, const Element* source, int column, bool is_there) {
#if __CUDA_ARCH__ >= 800
    if constexpr (async) {
      const int count = !is_there ? 0 : whole ? unit : max(0, min(unit, Dim - column));
      ptx::cp_async<unit* int(sizeof(Element))>(ptx::shared_address(shared), source,
                                                count * int(sizeof(Element)));
      return;
    }
#endif
    // Asked of the column: where a count that max and min had clamped was compared, as it is above,
    // ptxas of CUDA 13.0 let the answer's predicate be overwritten before it was used.
    Vector<Element, unit> from = {};
    if (is_there && (whole || column + unit <= Dim)) {
      from = *reinterpret_cast<const Vector<Element, unit>*>(source);
    } else if (is_there && !whole) {
#pragma unroll
      for (int i = 0; i < unit; ++i) {
        if (column + i < Dim) from.at[i] = source[i];
      }
    }
    constexpr int part = unit < L::width ? unit : L::width;
    constexpr int parts = unit / part;
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      // Eight lanes write every other vector; the second four start with the odd one, so that
      // together they touch all bank groups.
      const int which = parts == 2 ? i ^ (threadIdx.x >> 2 & 1) : i;
      Vector<T, part> to;
#pragma unroll
      for (int j = 0; j < part; ++j) {
        to.at[j] =
            widen(parts == 2 && which != i ? from.at[(i ^ 1) * part + j] : from.at[i * part + j]);
      }
      *reinterpret_cast<Vector<T, part>*>(shared + which * part) = to;
    }
  }
};

// Until this thread's copies have landed; a barrier must follow for the others'.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
#endif
}

// The rows that a thread owns: row i is at warp's first row + row_in_warp + i * warp_rows.
template <class Config>
struct Rows {
  using L = Layout<Config>;
  using T = typename L::T;
  using Vec = typename L::Vec;
  using KeyMask = Mask<Config::causal, Config::group>;

  T scores[L::rows][L::keys];      // key j is at position + j * row_threads
  T out[L::rows][L::columns];      // vector j is at (position + j * row_threads) * width
  SoftmaxRow<T> softmax[L::rows];  // its sum is of this thread's keys only, until finish()

  __device__ static int first() {
    return threadIdx.x / 32 * (L::warp_rows * L::rows) + L::row_in_warp();
  }

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      softmax[i].reset();
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] = 0;
    }
  }

  __device__ void multiply_keys(const T* q, const T* k) {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int j = 0; j < L::keys; ++j) scores[i][j] = 0;
    }
    q += first() * L::qk_stride;
    k += L::position() * L::qk_stride;
#pragma unroll(Config::unroll)
    for (int d = 0; d < round_up(Config::head_dim, L::width); d += L::width) {
      Vec q_part[L::rows];
#pragma unroll
      for (int i = 0; i < L::rows; ++i) q_part[i] = read(q + i * L::warp_rows * L::qk_stride + d);
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        const Vec k_part = read(k + j * L::row_threads * L::qk_stride + d);
#pragma unroll
        for (int w = 0; w < L::width; ++w) {
#pragma unroll
          for (int i = 0; i < L::rows; ++i) {
            scores[i][j] = fma(q_part[i].at[w], k_part.at[w], scores[i][j]);
          }
        }
      }
    }
    if constexpr (score_factor<Config> != 1) {
#pragma unroll
      for (int i = 0; i < L::rows; ++i) {
#pragma unroll
        for (int j = 0; j < L::keys; ++j) scores[i][j] *= score_factor<Config>;
      }
    }
  }

  __device__ void mask(const KeyMask& mask, int q_begin, int key_begin) {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      const int row = q_begin + first() + i * L::warp_rows;
      const int end = mask.visible_end(row) - key_begin - L::position();
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        if (j * L::row_threads >= end) scores[i][j] = -SoftmaxMath<T>::infinity();
      }
    }
  }

  // Turns scores into probabilities in shared memory, and rescales what came before.
  __device__ void exponentiate(T* p, T scale_log2) {
    p += first() * L::p_stride + L::position();
    T tile_max[L::rows];
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      tile_max[i] = scores[i][0];
#pragma unroll
      for (int j = 1; j < L::keys; ++j) tile_max[i] = fmax(tile_max[i], scores[i][j]);
    }
#pragma unroll
    for (int bit = 1; bit < L::row_threads; bit *= 2) {
#pragma unroll
      for (int i = 0; i < L::rows; ++i) tile_max[i] = fmax(tile_max[i], exchange(tile_max[i], bit));
    }
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
      const T rescale = softmax[i].update_max(tile_max[i], scale_log2);
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] *= rescale;
      const T base = softmax[i].base(scale_log2);
#pragma unroll
      for (int j = 0; j < L::keys; ++j) {
        // Of 32 bits and more, a power of two costs no precision where the sum of the exponents
        // would.
        const T probability = SoftmaxRow<T>::probability(scores[i][j], scale_log2, base) *
                              T(power_of_half(L::headroom));
        softmax[i].sum += probability;
        p[i * L::warp_rows * L::p_stride + j * L::row_threads] = probability;
      }
    }
  }

  // out += P V. The tile's share is summed alone, in the registers that the scores have left: a sum
  // over thousands of keys in one go would lose more to rounding than a library's blocked product.
  __device__ void multiply_values(const T* p, const T* v) {
    T sums[L::rows][L::columns] = {};
    p += first() * L::p_stride;
    v += L::position() * L::width;
#pragma unroll(Config::unroll)
    for (int key = 0; key < Config::Bc; key += L::width) {
      Vec p_part[L::rows];
#pragma unroll
      for (int i = 0; i < L::rows; ++i) p_part[i] = read(p + i * L::warp_rows * L::p_stride + key);
#pragma unroll
      for (int w = 0; w < L::width; ++w) {
#pragma unroll
        for (int j = 0; j < L::columns; j += L::width) {
          const Vec v_part = read(v + (key + w) * L::v_stride + j * L::row_threads);
#pragma unroll
          for (int i = 0; i < L::rows; ++i) {
#pragma unroll
            for (int x = 0; x < L::width; ++x) {
              sums[i][j + x] = fma(p_part[i].at[w], v_part.at[x], sums[i][j + x]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] += sums[i][j];
    }
  }

  // Sums over the threads of each row and divides by it: the normalization, put off until here.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < L::rows; ++i) {
#pragma unroll
      for (int bit = 1; bit < L::row_threads; bit *= 2) {
        softmax[i].sum += exchange(softmax[i].sum, bit);
      }
      const T normalizer = softmax[i].normalizer();
#pragma unroll
      for (int j = 0; j < L::columns; ++j) out[i][j] *= normalizer;
    }
  }

  // Row i's columns of the result, Unit at a time.
  template <int Unit, class Out>
  __device__ void store(Out* row, int i) const {
#pragma unroll
    for (int j = 0; j < L::columns; j += Unit) {
      const int column = (L::position() + j / L::width * L::row_threads) * L::width + j % L::width;
      if (column + Unit <= Config::head_dim_v) {
        Vector<Out, Unit> vector;
#pragma unroll
        for (int x = 0; x < Unit; ++x) vector.at[x] = narrow<Out>(out[i][j + x]);
        *reinterpret_cast<Vector<Out, Unit>*>(row + column) = vector;
      } else if (Config::head_dim_v % Unit != 0) {
#pragma unroll
        for (int x = 0; x < Unit; ++x) {
          if (column + x < Config::head_dim_v) row[column + x] = narrow<Out>(out[i][j + x]);
        }
      }
    }
  }

 private:
  __device__ static Vec read(const T* shared) { return *reinterpret_cast<const Vec*>(shared); }

  // The value of the thread whose position in the row differs in one bit.
  __device__ static T exchange(T value, int bit) {
    return __shfl_xor_sync(0xffffffffu, value, bit << L::position_shift);
  }
};

template <class Config>
__device__ void write(const Params& p, const Work& work, const Place<Config>* place,
                      const Rows<Config>& rows, typename Layout<Config>::T scale_log2) {
  using L = Layout<Config>;
  using Element = typename L::Element;
  using T = typename L::T;
  constexpr int dim = Config::head_dim_v;
#pragma unroll
  for (int i = 0; i < L::rows; ++i) {
    const int row = work.q_begin + rows.first() + i * L::warp_rows;
    if (row >= p.seqlen_q) continue;
    const int64 index = index_of(p, work, place, row);
    T* lse = static_cast<T*>(p.lse) + index;
    if constexpr (Config::split_keys) {
      constexpr int unit = dim % L::width == 0 ? L::width : 1;
      const auto partials = partials_of(p, place);
      rows.template store<unit>(partials.out_row(work.split, index), i);
      lse = partials.lse_row(work.split, index);
    } else {
      constexpr int most = Config::out_alignment / int(sizeof(Element));
      constexpr int unit = most < 1 ? 1 : most < L::width ? most : L::width;
      Element* head = p.out.head<Element>(work.batch, work.head);
      rows.template store<unit>(out_row(head, p, place, row), i);
    }
    if (L::position() == 0 && (Config::split_keys || p.lse != nullptr)) {
      *lse = rows.softmax[i].template log_sum_exp<L::headroom>(scale_log2);
    }
  }
}

// The place of a kernel's sequence. Null needs no member: even one that nobody reads changes what
// the compiler makes of the loops.
template <class Config, bool HasPlace = Config::sequences>
struct InPlace {
  static constexpr const Place<Config>* place = nullptr;
  __device__ explicit InPlace(const Place<Config>*) {}
};
template <class Config>
struct InPlace<Config, true> {
  const Place<Config>* place;
  __device__ explicit InPlace(const Place<Config>* place) : place(place) {}
};

template <class Config>
struct Kernel : InPlace<Config> {
  using L = Layout<Config>;
  using Element = typename L::Element;
  using T = typename L::T;
  using InPlace<Config>::place;

  const Params& p;
  const Work work;
  const Element* k_head;
  const Element* v_head;
  T* q;
  T* k;
  T* v;
  T* probabilities;
  Rows<Config> rows;

  __device__ Kernel(const Params& params, const Work& work, T* shared,
                    const Place<Config>* place = nullptr)
      : InPlace<Config>(place),
        p(params),
        work(work),
        k_head(params.k.head<const Element>(work.batch, work.head_kv)),
        v_head(params.v.head<const Element>(work.batch, work.head_kv)),
        q(shared),
        k(q + L::q_size),
        v(Config::share_kv ? k : k + L::k_size),
        probabilities(k + L::kv_size) {}

  __device__ void load_q() {
    using Load = TileLoad<Config, Config::Br, Config::head_dim, L::qk_stride, true>;
    if constexpr (Config::group > 1) {
      Load::gather(q, [&](int row) { return place->query(work.q_begin + row); });
    } else {
      Load::run(q, p.q.head<const Element>(work.batch, work.head), p.q.row_stride, work.q_begin,
                p.seqlen_q);
    }
  }
  __device__ void load_k(int tile) {
    if constexpr (Config::page_size > 0) {
      load_pages<Config::head_dim, L::qk_stride>(k, place->p.k, tile);
    } else {
      load_tile<Config::head_dim, L::qk_stride>(k, k_head, p.k.row_stride, tile);
    }
  }
  __device__ void load_v(int tile) {
    if constexpr (Config::page_size > 0) {
      load_pages<Config::head_dim_v, L::v_stride>(v, place->p.v, tile);
    } else {
      load_tile<Config::head_dim_v, L::v_stride>(v, v_head, p.v.row_stride, tile);
    }
  }
  template <int Dim, int Stride>
  __device__ void load_pages(T* shared, const Tensor& tensor, int tile) {
    const auto rows = place->pages(tensor);
    TileLoad<Config, Config::Bc, Dim, Stride, true>::gather(
        shared, [&](int row) { return rows.at(tile * Config::Bc + row); });
  }
  // One branch for a whole tile keeps the bounds check of the last, ragged one out of the others.
  template <int Dim, int Stride>
  __device__ void load_tile(T* shared, const Element* head, int64 row_stride, int tile) {
    const int begin = tile * Config::Bc;
    if (begin + Config::Bc <= p.seqlen_k) {
      TileLoad<Config, Config::Bc, Dim, Stride, false>::run(shared, head, row_stride, begin,
                                                            p.seqlen_k);
    } else {
      TileLoad<Config, Config::Bc, Dim, Stride, true>::run(shared, head, row_stride, begin,
                                                           p.seqlen_k);
    }
  }

  // One tile of keys. Its K is on its way, and that of the next tile is when it returns. With
  // buffers of their own, V travels under Q K^T and the next K under P V.
  __device__ void visit(const typename Rows<Config>::KeyMask& mask, int tile, const KeyTiles& tiles,
                        T scale_log2) {
    wait_for_copies();
    __syncthreads();
    if (!Config::share_kv) load_v(tile);
    rows.multiply_keys(q, k);
    if (tile >= tiles.full_end) rows.mask(mask, work.q_begin, tile * Config::Bc);
    rows.exponentiate(probabilities, scale_log2);
    if (Config::share_kv) {
      __syncthreads();
      load_v(tile);
    }
    wait_for_copies();
    __syncthreads();
    if (!Config::share_kv && tile > tiles.begin) load_k(tile - 1);
    rows.multiply_values(probabilities, v);
    if (Config::share_kv && tile > tiles.begin) {
      __syncthreads();
      load_k(tile - 1);
    }
  }

  __device__ void run() {
    const typename Rows<Config>::KeyMask mask(p);
    const int q_end = min(work.q_begin + Config::Br, p.seqlen_q);
    const KeyTiles tiles = find_key_tiles<Config::Bc, Config::split_keys>(mask, work.q_begin, q_end,
                                                                          work.split, p.num_splits);
    const T scale_log2 = scale_to_log2<T>(p.softmax_scale);
    rows.reset();
    if (tiles.begin < tiles.end) {
      load_q();
      load_k(tiles.end - 1);
    }
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      visit(mask, tile, tiles, scale_log2);
    }
    rows.finish();
    write<Config>(p, work, place, rows, scale_log2);
    if (mask.visible_end(work.q_begin + first_of_warp()) > few_keys<Element>) return;
    // Found anew, as what is kept for the end changes the loops: 2.5% in causal calls of head_dim
    // 256.
    if constexpr (Config::sequences) {
      settle(work);
    } else {
      settle(find_work<Config::Br>(p, ptx::block_index()));
    }
  }

  // Of a warp's rows, which follow one another.
  static constexpr int warp_rows = L::warp_rows * L::rows;
  __device__ static int first_of_warp() { return threadIdx.x / 32 * warp_rows; }

  __device__ void settle(const Work& work) const {
    const int first = work.q_begin + first_of_warp();
    settle_few_seen<Config>(p, work, place, first, min(first + warp_rows, p.seqlen_q));
  }
};

}  // namespace simt

template <class Config>
__device__ void simt_attention(const Params& p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using T = Accumulator<typename Config::Element>;
  simt::Kernel<Config>(p, find_work<Config::Br>(p, blockIdx.x), reinterpret_cast<T*>(shared)).run();
}

template <class Config>
__device__ void simt_attention(const Params& p, const Sequences& sequences) {
  extern __shared__ __align__(16) unsigned char shared[];
  using T = Accumulator<typename Config::Element>;
  const Place<Config> place(p, sequences, blockIdx.x);
  if (place.work.q_begin >= place.rows()) return;
  const Params own = place.params();
  simt::Kernel<Config>(own, place.work, reinterpret_cast<T*>(shared), &place).run();
}
