// What happens to a step's rows before they are attended to: new keys and values are written behind
// the old ones of a cache, and with a rotary embedding (Su et al. 2021, RoFormer, section 3.4) the
// new keys are turned by their positions on the way, and the queries into a workspace by theirs.
//
// Unless new rows are packed, blockIdx.x is a row of a sequence: its query and its new key and
// value. The threads along blockIdx.y divide the 16-byte vectors of all of its heads: first those
// of q, then those of k and of v. A step of decoding has few rows, and then only latency counts:
// a thread issues its loads before anything is known about where the data goes.
//
// Where keys hold the values (Config::head_dim_v is 0) there are no others to write.
//
// With Config::packed_new, the new rows of all sequences are packed, and cu_seqlens_k_new gives the
// first row of each sequence. Then blockIdx.x counts the query rows first and the packed rows after
// them. The kernel also writes the length of each sequence after the append, which attention reads.
//
// A cache may be one of several ranks', to which stripes of keys go in turns: lengths are those of
// all together, and new rows in other ranks' stripes have no place here.
//
// For a cache of 8 bits a warp has the new row of a head, of k or of v. Its numbers are divided by
// a scale, which the caller gives or the warp finds first: that of the row's largest magnitude.
//
// Lengths, rows of the cache and page numbers come from the caller's arrays on the device and
// nobody has checked them: what has no place of its own in the cache is dropped.
#include "tile/element.cuh"
#include "tile/access.cuh"
#include "cache/quantize.cuh"
#include "params.cuh"
#include "grid/pages.cuh"
#include "grid/sequences.cuh"

// The params of attention over the cache as it was: q goes to `out`, contiguous, where it
// is turned; seqlen_q is 0 where it is not. And what is new.
struct AppendParams : Params {
  Tensor new_k;     // (batch, seqlen_new, heads_kv, head_dim)
  Tensor new_v;     // (batch, seqlen_new, heads_kv, head_dim_v)
  const void* cos;  // (rotary_rows, rotary_dim / 2)
  const void* sin;
  const int* rotary_seqlens;  // (batch) positions of the first new keys, or null: cache lengths
  int64 rotary_stride;  // of cos and sin
  int seqlen_new;
  int rotary_rows;  // at least 1 where there is a rotary embedding
  int q_advances;   // whether query i is at the position of new key i; else all are at the first's
  int rank;         // whose stripes are in the cache, where it is shared out
  Tensor k_scale;   // of a cache of 8 bits: (caches or pages, rows, heads_kv), or without data
  Tensor v_scale;
  const int* cu_seqlens_k_new;  // (batch + 1) where the sequences of packed new rows begin and end
  int* lengths_after;           // (batch)
  int total_new;                // packed new rows
};

namespace append {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The largest power of two that divides both; the alignment is one.
__host__ __device__ constexpr int common_alignment(int alignment, int bytes) {
  return bytes % alignment == 0 ? alignment : bytes & -bytes;
}

template <class Element>
constexpr int piece_elements = 16 / int(sizeof(Element));

template <class Element>
using Piece = Vector<Element, piece_elements<Element>>;

// The pieces of a row that is copied as it is.
template <class Element, int Columns, int Alignment>
struct CopiedRow {
  static constexpr int width = piece_elements<Element>;
  static constexpr int pieces = ceil_div(Columns, width);
  static constexpr int step = width;  // all parts begin at a multiple of so many columns

  Piece<Element> x;
  int column, elements;

  __device__ CopiedRow(const Element* row, int piece) {
    column = piece * width;
    elements = min(width, Columns - column);
    x = load_elements<width, Alignment>(row + column, elements);
  }
  __device__ void store(Element* row) const {
    store_chunk<Element, Alignment>(row + column, x, elements);
  }
  template <class Visit>
  __device__ void for_each_part(Visit visit) const {
    visit(column, x, elements);
  }
};

// The pieces of a row whose first rotary_dim columns are turned in pairs. Where the halves of those
// columns are the pairs, a piece has a second one that belongs to it, half of the columns further.
// FromAlignment and ToAlignment are those of the rows that it comes from and goes to.
template <class Config, int FromAlignment, int ToAlignment>
struct RotatedRow {
  using Element = typename Config::Element;
  using Angle = typename Config::RotaryElement;
  using T = Accumulator<Element>;
  static constexpr int width = piece_elements<Element>;
  static constexpr bool interleaved = Config::rotary_interleaved;
  static constexpr int half = Config::rotary_dim / 2;
  static constexpr int half_bytes = half * int(sizeof(Element));
  static constexpr int pairs = interleaved ? width / 2 : width;
  static constexpr int rotated_pieces = ceil_div(half, pairs);
  // Interleaved, the last rotated piece may hold columns beyond, which it copies.
  static constexpr int rest_begin = interleaved ? rotated_pieces * width : Config::rotary_dim;
  static constexpr int rest = Config::head_dim > rest_begin ? Config::head_dim - rest_begin : 0;
  static constexpr int pieces = rotated_pieces + ceil_div(rest, width);
  static constexpr int step = interleaved ? width : common_alignment(width, half);
  // Of the second half, hence of the columns behind it too.
  static constexpr int from_alignment =
      interleaved ? FromAlignment : common_alignment(FromAlignment, half_bytes);
  static constexpr int to_alignment =
      interleaved ? ToAlignment : common_alignment(ToAlignment, half_bytes);

  Piece<Element> x, partner;
  int column, elements;
  int first_pair;  // of cos and sin; none where the piece is not rotated

  __device__ RotatedRow(const Element* row, int piece) {
    const bool rotated = piece < rotated_pieces;
    first_pair = rotated ? piece * pairs : half;
    column = rotated ? piece * width : rest_begin + (piece - rotated_pieces) * width;
    const int end = rotated && !interleaved ? half : Config::head_dim;
    elements = min(width, end - column);
    x = load_elements<width, from_alignment>(row + column, elements);
    if (has_partner()) {
      partner = load_elements<width, from_alignment>(row + half + column, elements);
    }
  }

  __device__ bool has_partner() const { return !interleaved && first_pair < half; }

  // By the angles of one position. Products and sums are spelled out, so that the same row has the
  // same bits whatever its alignment makes of the code around it.
  __device__ void turn(const Angle* cos, const Angle* sin) {
    const int count = min(pairs, half - first_pair);
    const auto c = load_elements<pairs, Config::rotary_alignment>(cos + first_pair, count);
    const auto s = load_elements<pairs, Config::rotary_alignment>(sin + first_pair, count);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      if (pair >= count) break;
      Element& first = interleaved ? x.at[2 * pair] : x.at[pair];
      Element& second = interleaved ? x.at[2 * pair + 1] : partner.at[pair];
      const T a = widen(first), b = widen(second);
      const T cosine = T(widen(c.at[pair])), sine = T(widen(s.at[pair]));
      first = narrow<Element>(fma(a, cosine, -(b * sine)));
      second = narrow<Element>(fma(a, sine, b * cosine));
    }
  }

  __device__ void store(Element* row) const {
    store_chunk<Element, to_alignment>(row + column, x, elements);
    if (has_partner()) {
      store_chunk<Element, to_alignment>(row + half + column, partner, elements);
    }
  }
  template <class Visit>
  __device__ void for_each_part(Visit visit) const {
    visit(column, x, elements);
    if (has_partner()) visit(half + column, partner, elements);
  }
};

// Returns the first packed row of a sequence; for an index of `batch`, the end of the last one.
__device__ inline int packed_begin(const AppendParams& p, int index) {
  return clamp(p.cu_seqlens_k_new[index], 0, p.total_new);
}

// Returns the sequence that a packed new row belongs to, or -1 if it belongs to none.
__device__ inline int sequence_of_packed(const AppendParams& p, int row) {
  int first = 0, count = p.batch;
  while (count > 1) {
    const int half = count / 2;
    if (packed_begin(p, first + half) <= row) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return packed_begin(p, first) <= row && row < packed_begin(p, first + 1) ? first : -1;
}

// One row of one sequence, and what the caller's arrays say about it.
template <class Config>
struct Row {
  using Element = typename Config::Element;
  using Angle = typename Config::RotaryElement;

  const AppendParams& p;
  int batch;
  int row;         // among the queries and among the new keys of the sequence
  bool has_query;  // whether the block rotates a query row
  bool has_new;    // whether the block appends a new row
  int packed_row;  // the index of the new row among the packed rows

  __device__ explicit Row(const AppendParams& params) : p(params) {
    if constexpr (Config::packed_new) {
      const int queries = p.batch * p.seqlen_q;
      packed_row = int(blockIdx.x) - queries;
      has_query = packed_row < 0;
      if (has_query) {
        batch = blockIdx.x / p.seqlen_q;
        row = blockIdx.x % p.seqlen_q;
        has_new = false;
      } else {
        batch = packed_row < p.total_new ? sequence_of_packed(p, packed_row) : -1;
        has_new = batch >= 0;
        row = has_new ? packed_row - packed_begin(p, batch) : 0;
      }
    } else {
      const unsigned rows = max(p.seqlen_q, p.seqlen_new);
      batch = blockIdx.x / rows;
      row = blockIdx.x % rows;
      has_query = row < p.seqlen_q;
      has_new = row < p.seqlen_new;
    }
  }

  // Its keys before the append, and how many there may be.
  struct Keys {
    Sequence at;
    int capacity;
  };
  __device__ Keys keys() const {
    Keys found;
    found.at = find_sequence<Config::page_size, false>(p, batch, found.capacity);
    return found;
  }

  __device__ const Element* query(int head) const {
    return p.q.head<const Element>(batch, head) + row * p.q.row_stride;
  }

  __device__ const Element* new_row(const Tensor& tensor, int head) const {
    if constexpr (Config::packed_new) {
      return tensor.head<const Element>(0, head) + packed_row * tensor.row_stride;
    } else {
      return tensor.head<const Element>(batch, head) + row * tensor.row_stride;
    }
  }

  __device__ Element* rotated_query(int head) const {
    const int64 index = (int64(batch) * p.seqlen_q + row) * p.heads_q + head;
    return static_cast<Element*>(p.out.data) + index * Config::head_dim;
  }

  // Where it goes in a cache, or null if it has no place there; or where its scale is.
  template <class Stored = Element>
  __device__ Stored* target(const Tensor& cache, int head, const Keys& keys) const {
    int key = keys.at.seqlen_k + row;
    if (key >= keys.capacity) return nullptr;
    if constexpr (Config::ranks > 1) {
      const int number = key / Config::stripe;
      if (number % Config::ranks != p.rank) return nullptr;
      key = number / Config::ranks * Config::stripe + key % Config::stripe;
    }
    if constexpr (Config::page_size > 0) {
      const int* table = p.block_table + batch * p.block_table_stride;
      const int page = table[key / Config::page_size];
      if (!is_page(page, p.pages)) return nullptr;
      return cache.head<Stored>(page, head) + key % Config::page_size * cache.row_stride;
    } else {
      return cache.head<Stored>(keys.at.k_batch, head) + key * cache.row_stride;
    }
  }

  __device__ const Angle* angles(const void* table, const Keys& keys, bool advances) const {
    const int* first = p.rotary_seqlens;
    const int begin = first ? clamp(first[batch], 0, p.rotary_rows) : keys.at.seqlen_k;
    const int position = min(begin + (advances ? row : 0), p.rotary_rows - 1);
    return static_cast<const Angle*>(table) + position * p.rotary_stride;
  }
};

// Writes the lengths after the append. Each thread of the grid writes those of other sequences.
template <class Config>
__device__ void write_lengths(const AppendParams& p) {
  if (blockIdx.y != 0) return;
  const int64 step = int64(gridDim.x) * blockDim.x;
  for (int64 index = int64(blockIdx.x) * blockDim.x + threadIdx.x; index < p.batch; index += step) {
    const int batch = int(index);
    int capacity;
    const int before = find_sequence<Config::page_size, false>(p, batch, capacity).seqlen_k;
    const int count = packed_begin(p, batch + 1) - packed_begin(p, batch);
    p.lengths_after[batch] = clamp(before + max(count, 0), 0, capacity);
  }
}

template <class Config>
using RotatedQuery = RotatedRow<
    Config, Config::alignment,
    common_alignment(Config::alignment, Config::head_dim * int(sizeof(typename Config::Element)))>;

template <class Config>
__device__ void rotate_query(const Row<Config>& row, int index) {
  using Query = RotatedQuery<Config>;
  const AppendParams& p = row.p;
  const int head = index / Query::pieces;
  Query piece(row.query(head), index % Query::pieces);
  const auto keys = row.keys();
  const bool advances = p.q_advances != 0;
  piece.turn(row.angles(p.cos, keys, advances), row.angles(p.sin, keys, advances));
  piece.store(row.rotated_query(head));
}

template <class Config>
__device__ void append(const AppendParams& p) {
  using Element = typename Config::Element;
  constexpr bool rotates = Config::rotary_dim > 0;
  constexpr int alignment = Config::alignment;
  constexpr int dim = Config::head_dim;
  using Key = CopiedRow<Element, dim, alignment>;
  using RotatedKey = RotatedRow<Config, alignment, alignment>;
  using Value = CopiedRow<Element, Config::head_dim_v, alignment>;
  static_assert(Config::rotary_dim % 2 == 0 && Config::rotary_dim <= dim, "pairs within a row");

  if constexpr (Config::packed_new) write_lengths<Config>(p);
  const Row<Config> row(p);
  const int q_pieces = rotates ? p.heads_q * RotatedQuery<Config>::pieces : 0;
  const int k_pieces = p.heads_kv * (rotates ? RotatedKey::pieces : Key::pieces);
  const int v_pieces = p.heads_kv * Value::pieces;

  for (int index = blockIdx.y * blockDim.x + threadIdx.x; index < q_pieces + k_pieces + v_pieces;
       index += gridDim.y * blockDim.x) {
    if (index < q_pieces) {
      if constexpr (rotates) {
        if (row.has_query) rotate_query(row, index);
      }
      continue;
    }
    if (!row.has_new) continue;
    const int k_index = index - q_pieces;
    const int v_index = k_index - k_pieces;
    if (v_index >= 0) {
      if constexpr (Config::head_dim_v > 0) {
        const int head = v_index / Value::pieces;
        const Value piece(row.new_row(p.new_v, head), v_index % Value::pieces);
        if (Element* target = row.target(p.v, head, row.keys())) piece.store(target);
      }
    } else if constexpr (rotates) {
      const int head = k_index / RotatedKey::pieces;
      RotatedKey piece(row.new_row(p.new_k, head), k_index % RotatedKey::pieces);
      const auto keys = row.keys();
      piece.turn(row.angles(p.cos, keys, true), row.angles(p.sin, keys, true));
      if (Element* target = row.target(p.k, head, keys)) piece.store(target);
    } else {
      const int head = k_index / Key::pieces;
      const Key piece(row.new_row(p.new_k, head), k_index % Key::pieces);
      if (Element* target = row.target(p.k, head, row.keys())) piece.store(target);
    }
  }
}

// A warp's.
template <class Config, class NewRow, class Turn>
__device__ void quantize_row(const Row<Config>& row, const Tensor& new_rows, const Tensor& cache,
                             const Tensor& scales, int head, Turn turn) {
  using Stored = typename Config::CacheElement;
  constexpr int alignment = common_alignment(Config::cache_alignment, NewRow::step);
  const int lane = threadIdx.x % 32;
  const auto keys = row.keys();
  Stored* target = row.template target<Stored>(cache, head, keys);
  if (target == nullptr) return;
  const auto* source = row.new_row(new_rows, head);
  // Read again by those who write it, from L1.
  const auto for_each_piece = [&](auto visit) {
    for (int piece = lane; piece < NewRow::pieces; piece += 32) {
      NewRow part(source, piece);
      turn(part, keys);
      part.for_each_part(visit);
    }
  };
  float scale = 1;
  if constexpr (Config::computes_scales) {
    LargestMagnitude largest;
    for_each_piece([&](int, const auto& x, int elements) { largest.look_at(x.at, elements); });
    scale = ptx::div_rn(largest.of_warp(), largest_number<Stored>());
    if (lane == 0) *row.template target<float>(scales, head, keys) = scale;
  } else if (scales.data != nullptr) {
    scale = *row.template target<float>(scales, head, keys);
  }
  for_each_piece([&](int column, const auto& x, int elements) {
    store_quantized<alignment>(target + column, x.at, elements, scale);
  });
}

// To a cache of 8 bits.
template <class Config>
__device__ void append_quantized(const AppendParams& p) {
  using Element = typename Config::Element;
  constexpr bool rotates = Config::rotary_dim > 0;
  constexpr int alignment = Config::alignment;
  using Key = CopiedRow<Element, Config::head_dim, alignment>;
  using RotatedKey = RotatedRow<Config, alignment, alignment>;
  using Value = CopiedRow<Element, Config::head_dim_v, alignment>;

  if constexpr (Config::packed_new) write_lengths<Config>(p);
  const Row<Config> row(p);
  const int thread = blockIdx.y * blockDim.x + threadIdx.x, threads = gridDim.y * blockDim.x;
  if constexpr (rotates) {
    const int pieces = row.has_query ? p.heads_q * RotatedQuery<Config>::pieces : 0;
    for (int index = thread; index < pieces; index += threads) rotate_query(row, index);
  }
  if (!row.has_new) return;
  constexpr int sides = Config::head_dim_v > 0 ? 2 : 1;
  for (int index = thread / 32; index < sides * p.heads_kv; index += threads / 32) {
    const int head = index / sides;
    const auto leave = [](auto&, const auto&) {};
    if (index % sides == 1) {
      quantize_row<Config, Value>(row, p.new_v, p.v, p.v_scale, head, leave);
    } else if constexpr (rotates) {
      quantize_row<Config, RotatedKey>(
          row, p.new_k, p.k, p.k_scale, head, [&](RotatedKey& piece, const auto& keys) {
            piece.turn(row.angles(p.cos, keys, true), row.angles(p.sin, keys, true));
          });
    } else {
      quantize_row<Config, Key>(row, p.new_k, p.k, p.k_scale, head, leave);
    }
  }
}

}  // namespace append
