// Fused attention forward on CUDA cores (FlashAttention-2, Dao 2023, algorithm 1): one CTA iterates
// over the KV tiles of Bc keys, from the last to the first, for Br query rows of one head.
#include "forward/simt/layout.cuh"
#include "forward/simt/load.cuh"
#include "forward/simt/rows.cuh"
#include "params.cuh"
#include "ptx/base.cuh"
#include "score/dropout.cuh"
#include "score/mask.cuh"
#include "score/modify.cuh"
#include "score/softmax.cuh"
#include "tile/element.cuh"
#include "scheduler/sequence_view.cuh"
#include "scheduler/tile_coord.cuh"

namespace simt {

template <class Config>
__device__ void write(const Params& p, const TileCoord& coord, const SequenceView<Config>* view,
                      Rows<Config>& rows, typename Layout<Config>::T scale_log2) {
  using L = Layout<Config>;
  using Element = typename L::Element;
  using T = typename L::T;
  constexpr int dim = Config::head_dim_v;
#pragma unroll
  for (int i = 0; i < L::rows; ++i) {
    const int row = coord.q_begin + rows.first() + i * L::warp_rows;
    if (row >= p.seqlen_q) continue;
    const int64 index = index_of(p, coord, view, row);
    T* lse = static_cast<T*>(p.lse) + index;
    // If KV is split, the sink is applied when the splits are merged.
    const auto log_sum_exp = [&](T& factor) {
      T lse_value = rows.softmax[i].template log_sum_exp<L::headroom>(scale_log2);
      if constexpr (Config::sinks && !Config::split_keys) {
        factor = apply_sink<Config>(p, score_row(p, coord, view, row).head, lse_value);
      }
      return lse_value;
    };
    T factor = 1;
    if constexpr (Config::sinks && !Config::split_keys) {
      log_sum_exp(factor);
      rows.scale(i, factor);
    }
    if constexpr (Config::dropout) rows.scale(i, kept_weight<Config, T>(p));
    if constexpr (Config::split_keys) {
      constexpr int unit = dim % L::width == 0 ? L::width : 1;
      const auto partials = partials_of(p, view);
      rows.template store<unit>(partials.out_row(coord.split, index), i);
      lse = partials.lse_row(coord.split, index);
    } else {
      constexpr int most = Config::out_alignment / int(sizeof(Element));
      constexpr int unit = most < 1 ? 1 : most < L::width ? most : L::width;
      Element* head = p.out.head<Element>(coord.batch, coord.head);
      rows.template store<unit>(out_row(head, p, view, row), i);
    }
    if constexpr (Config::split_keys && Partials<Config>::lse_is_pair) {
      if (L::position() == 0) {
        partials_of(p, view).set(p, coord.split, index,
                                 rows.softmax[i].template exponent_sum<L::headroom>(scale_log2));
      }
    } else if (L::position() == 0 && (Config::split_keys || p.lse != nullptr)) {
      *lse = log_sum_exp(factor);
    }
    if (has_statistics<Config> && L::position() == 0) {
      RowSummary<T> summary =
          rows.softmax[i].template summary<L::headroom>(logit_unit<Config, T>(p));
      if constexpr (Config::split_keys) {
        partials_of(p, view).set_statistics(p, coord.split, index, summary);
      } else {
        summary.scale_weights(factor);
        write_statistics<Config>(p, index, summary);
      }
    }
  }
}

// Sequence of the CTA. In dense batches, `view` is a static null pointer, not a member: even an
// unused member would change the machine code of the loops.
template <class Config, bool HasView = Config::has_seqlens>
struct OptionalView {
  static constexpr const SequenceView<Config>* view = nullptr;
  __device__ explicit OptionalView(const SequenceView<Config>*) {}
};
template <class Config>
struct OptionalView<Config, true> {
  const SequenceView<Config>* view;
  __device__ explicit OptionalView(const SequenceView<Config>* view) : view(view) {}
};

template <class Config>
struct Kernel : OptionalView<Config> {
  using L = Layout<Config>;
  using Element = typename L::Element;
  using T = typename L::T;
  using OptionalView<Config>::view;

  const Params& p;
  const TileCoord coord;
  const Element* k_head;
  const Element* v_head;
  T* q;
  T* k;
  T* v;
  T* probabilities;
  Rows<Config> rows;

  __device__ Kernel(const Params& params, const TileCoord& coord, T* shared,
                    const SequenceView<Config>* view = nullptr)
      : OptionalView<Config>(view),
        p(params),
        coord(coord),
        k_head(params.k.head<const Element>(coord.batch, coord.head_kv)),
        v_head(params.v.head<const Element>(coord.batch, coord.head_kv)),
        q(shared),
        k(q + L::q_size),
        v(Config::share_kv ? k : k + L::k_size),
        probabilities(k + L::kv_size) {}

  __device__ void load_q() {
    using Load = TileLoad<Config, Config::Br, Config::head_dim, L::qk_stride, true>;
    if constexpr (Config::group > 1) {
      Load::gather(q, [&](int row) { return view->query(coord.q_begin + row); });
    } else {
      Load::run(q, p.q.head<const Element>(coord.batch, coord.head), p.q.row_stride, coord.q_begin,
                p.seqlen_q);
    }
  }
  __device__ void load_k(int tile) {
    if constexpr (Config::page_size > 0) {
      load_pages<Config::head_dim, L::qk_stride>(k, view->p.k, tile);
    } else {
      load_tile<Config::head_dim, L::qk_stride>(k, k_head, p.k.row_stride, tile);
    }
  }
  __device__ void load_v(int tile) {
    if constexpr (Config::page_size > 0) {
      load_pages<Config::head_dim_v, L::v_stride>(v, view->p.v, tile);
    } else {
      load_tile<Config::head_dim_v, L::v_stride>(v, v_head, p.v.row_stride, tile);
    }
  }
  template <int Dim, int Stride>
  __device__ void load_pages(T* shared, const Tensor& tensor, int tile) {
    const auto rows = view->pages(tensor);
    TileLoad<Config, Config::Bc, Dim, Stride, true>::gather(
        shared, [&](int row) { return rows.at(tile * Config::Bc + row); });
  }
  // One branch per tile keeps the bounds check of the last, partial KV tile out of the others.
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

  // Processes one KV tile. The copy of its K has been started before; on return, that of the next
  // K tile has been started. With separate buffers for K and V, V is copied during Q K^T, and the
  // next K during P V.
  __device__ void process_tile(const typename Rows<Config>::KeyMask& mask, int tile,
                               const KvTileRange& tiles, T scale_log2) {
    wait_for_copies();
    __syncthreads();
    if (!Config::share_kv) load_v(tile);
    rows.multiply_keys(q, k);
    const auto row_coord = [&](int row) { return score_row(p, coord, view, coord.q_begin + row); };
    rows.modify(p, row_coord, tile * Config::Bc);
    const bool is_left =
        Config::window_left && tile < mask.template first_full_tile<Config::Bc>(last_row());
    if (tile >= tiles.full_end || is_left) rows.mask(mask, coord.q_begin, tile * Config::Bc);
    exponentiate(tile * Config::Bc, scale_log2);
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

  __device__ void exponentiate(int key_begin, T scale_log2) {
    if constexpr (Config::dropout) {
      const DropoutNumbers numbers = dropout_numbers<Config>(p);
      const int row = coord.q_begin + Rows<Config>::first(), key = key_begin + L::position();
      rows.exponentiate(probabilities, scale_log2, [&](int i, int j) {
        return numbers.keeps(coord.batch, coord.head, row + i * L::warp_rows,
                             key + j * L::row_threads);
      });
    } else {
      rows.exponentiate(probabilities, scale_log2, [](int, int) { return true; });
    }
  }

  __device__ int last_row() const { return min(coord.q_begin + Config::Br, p.seqlen_q) - 1; }

  __device__ void run() {
    const typename Rows<Config>::KeyMask mask(p, coord.batch);
    const int q_end = last_row() + 1;
    const KvTileRange tiles = kv_tile_range<Config::Bc, Config::split_keys>(
        mask, coord.q_begin, q_end, coord.split, p.num_splits);
    const T scale_log2 = exponent_scale<Config, T>(p);
    rows.reset();
    if (tiles.begin < tiles.end) {
      load_q();
      load_k(tiles.end - 1);
    }
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
      process_tile(mask, tile, tiles, scale_log2);
    }
    rows.finish();
    write<Config>(p, coord, view, rows, scale_log2);
    if (Config::modified) return;
    if (mask.visible_end(coord.q_begin + first_of_warp()) > max_degenerate_keys<Element>) return;
    // The tile coordinates are recomputed. Keeping them until here would slow the loops by 2.5% in
    // causal calls at head_dim 256.
    if constexpr (Config::has_seqlens) {
      fix_rows(coord);
    } else {
      fix_rows(tile_coord<Config::Br>(p, ptx::cta_index()));
    }
  }

  // Number of query rows that a warp owns. They are consecutive.
  static constexpr int warp_rows = L::warp_rows * L::rows;
  __device__ static int first_of_warp() { return threadIdx.x / 32 * warp_rows; }

  __device__ void fix_rows(const TileCoord& coord) const {
    const int first = coord.q_begin + first_of_warp();
    fix_degenerate_rows<Config>(p, coord, view, first, min(first + warp_rows, p.seqlen_q));
  }
};

}  // namespace simt

template <class Config>
__device__ void simt_attention(const Params& p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using T = Accumulator<typename Config::Element>;
  T* const memory = reinterpret_cast<T*>(shared);
  if constexpr (Config::has_seqlens) {
    const SequenceView<Config> view(p, blockIdx.x);
    if (view.coord.q_begin < view.rows()) {
      const Params local = view.params();
      simt::Kernel<Config>(local, view.coord, memory, &view).run();
    }
    // `SequenceView` is built again: keeping `view` until here changes the loops' machine code.
    if (!Config::split_keys && p.cu_seqlens_q != nullptr) {
      SequenceView<Config>(p, ptx::cta_index()).clear_unowned_rows();
    }
  } else {
    simt::Kernel<Config>(p, tile_coord<Config::Br>(p, blockIdx.x), memory).run();
  }
}
