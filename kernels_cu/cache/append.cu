// Appends new keys and values to a KV cache before attention. With a rotary embedding (Su et al.
// 2021, RoFormer, section 3.4) the new keys are rotated by their positions before they are written.
// The queries are rotated by their positions, too, and written to a workspace.
//
// Unless new rows are packed, blockIdx.x is the index of a query and of a new key and value in a
// sequence. The CTAs along blockIdx.y divide the 16-byte chunks of all heads of this row: first
// those of q, then those of k and of v. A decoding step has few rows, so latency dominates: a
// thread issues its loads before it computes where the data goes.
//
// For MLA caches (`Config::head_dim_v` is 0), V is a prefix of K's columns, and only K is written.
//
// With `Config::packed_new`, the new rows of all sequences are packed, and `cu_seqlens_k_new` holds
// the first row of each sequence. Then blockIdx.x counts the query rows first and the packed rows
// after them. The kernel also writes the lengths after the append, which attention reads.
//
// The cache may be sharded: stripes of keys are assigned to the ranks round-robin. Lengths are
// global, and new rows in another rank's stripe are skipped.
//
// For an 8-bit cache, one warp quantizes the new row of one head of k or v. It divides the row by a
// scale, which the caller passes or the warp computes from the row's maximum magnitude.
//
// Lengths, cache indices and page numbers come from the caller's device arrays, which are not
// validated. New rows whose position lies outside of the cache are dropped.
#include "tile/element.cuh"
#include "tile/access.cuh"
#include "cache/quantize.cuh"
#include "params.cuh"
#include "scheduler/pages.cuh"
#include "scheduler/sequences.cuh"

// Arguments: those of attention over the cache before the append, and the new rows. With a rotary
// embedding, rotated queries are written to `out`, which is contiguous; without, seqlen_q is 0.
struct AppendParams : Params {
  Tensor new_k;     // (batch, seqlen_new, heads_kv, head_dim)
  Tensor new_v;     // (batch, seqlen_new, heads_kv, head_dim_v)
  const void* cos;  // (rotary_rows, rotary_dim / 2)
  const void* sin;
  const int* rotary_seqlens;  // (batch) positions of the first new keys; null for cache lengths
  int64 rotary_stride;  // row stride of cos and sin, in elements
  int seqlen_new;
  int rotary_rows;  // number of rows of cos and sin, at least 1 with a rotary embedding
  int q_advances;   // 1 if query i has new key i's position, 0 if all queries have new key 0's
  int rank;         // rank whose stripes are in the cache, if it is sharded
  Tensor k_scale;   // scales of an 8-bit cache: (caches or pages, rows, heads_kv), or null `data`
  Tensor v_scale;
  const int* cu_seqlens_k_new;  // (batch + 1) offsets of the sequences among packed new rows
  int* lengths_after;           // (batch) lengths of the sequences after the append
  int total_new;                // number of packed new rows
};

namespace append {

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Returns the largest power of two that divides `alignment`, a power of two, and `bytes`.
__host__ __device__ constexpr int common_alignment(int alignment, int bytes) {
  return bytes % alignment == 0 ? alignment : bytes & -bytes;
}

template <class Element>
constexpr int chunk_elements = 16 / int(sizeof(Element));

template <class Element>
using Chunk = Vector<Element, chunk_elements<Element>>;

// One 16-byte chunk of a row that is copied unchanged.
template <class Element, int Columns, int Alignment>
struct CopiedRow {
  static constexpr int width = chunk_elements<Element>;
  static constexpr int chunks = ceil_div(Columns, width);
  static constexpr int step = width;  // every run starts at a column that is a multiple of `step`

  Chunk<Element> x;
  int column, elements;

  __device__ CopiedRow(const Element* row, int chunk) {
    column = chunk * width;
    elements = min(width, Columns - column);
    x = load_elements<width, Alignment>(row + column, elements);
  }
  __device__ void store(Element* row) const {
    store_chunk<Element, Alignment>(row + column, x, elements);
  }
  template <class Function>
  __device__ void for_each_run(Function function) const {
    function(column, x, elements);
  }
};

// One 16-byte chunk of a row whose first rotary_dim columns are rotated in pairs. If the pairs are
// not interleaved, column i pairs with column i + rotary_dim / 2, and `partner` is the chunk of the
// latter. FromAlignment and ToAlignment are the alignments of source and target rows in bytes.
template <class Config, int FromAlignment, int ToAlignment>
struct RotatedRow {
  using Element = typename Config::Element;
  using Angle = typename Config::RotaryElement;
  using T = Accumulator<Element>;
  static constexpr int width = chunk_elements<Element>;
  static constexpr bool interleaved = Config::rotary_interleaved;
  static constexpr int half = Config::rotary_dim / 2;
  static constexpr int half_bytes = half * int(sizeof(Element));
  static constexpr int pairs = interleaved ? width / 2 : width;
  static constexpr int rotated_chunks = ceil_div(half, pairs);
  // If pairs are interleaved, the last rotated chunk may end with columns that are only copied.
  static constexpr int rest_begin = interleaved ? rotated_chunks * width : Config::rotary_dim;
  static constexpr int rest = Config::head_dim > rest_begin ? Config::head_dim - rest_begin : 0;
  static constexpr int chunks = rotated_chunks + ceil_div(rest, width);
  static constexpr int step = interleaved ? width : common_alignment(width, half);
  // Alignment of the partner chunks, and of the columns after them.
  static constexpr int from_alignment =
      interleaved ? FromAlignment : common_alignment(FromAlignment, half_bytes);
  static constexpr int to_alignment =
      interleaved ? ToAlignment : common_alignment(ToAlignment, half_bytes);

  Chunk<Element> x, partner;
  int column, elements;
  int first_pair;  // column of cos and sin for the first pair; `half` if the chunk is not rotated

  __device__ RotatedRow(const Element* row, int chunk) {
    const bool rotated = chunk < rotated_chunks;
    first_pair = rotated ? chunk * pairs : half;
    column = rotated ? chunk * width : rest_begin + (chunk - rotated_chunks) * width;
    const int end = rotated && !interleaved ? half : Config::head_dim;
    elements = min(width, end - column);
    x = load_elements<width, from_alignment>(row + column, elements);
    if (has_partner()) {
      partner = load_elements<width, from_alignment>(row + half + column, elements);
    }
  }

  __device__ bool has_partner() const { return !interleaved && first_pair < half; }

  // Rotates the chunk by the angles of one position. With explicit fma() calls, the result does not
  // depend on which operations the compiler would contract, and so not on the row's alignment.
  __device__ void rotate(const Angle* cos, const Angle* sin) {
    const int count = min(pairs, half - first_pair);
    const auto c = load_elements<pairs, Config::rotary_alignment>(cos + first_pair, count);
    const auto s = load_elements<pairs, Config::rotary_alignment>(sin + first_pair, count);
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
      if (pair >= count) break;
      Element& first = interleaved ? x.data[2 * pair] : x.data[pair];
      Element& second = interleaved ? x.data[2 * pair + 1] : partner.data[pair];
      const T a = widen(first), b = widen(second);
      const T cosine = T(widen(c.data[pair])), sine = T(widen(s.data[pair]));
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
  template <class Function>
  __device__ void for_each_run(Function function) const {
    function(column, x, elements);
    if (has_partner()) function(half + column, partner, elements);
  }
};

// Returns the first packed row of sequence `index`, or the end of the last sequence if `index` is
// the batch size.
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

// One row of one sequence, and its position in the caller's arrays.
template <class Config>
struct Row {
  using Element = typename Config::Element;
  using Angle = typename Config::RotaryElement;

  const AppendParams& p;
  int batch;
  int row;         // index of the row in the sequence's queries and new keys
  bool has_query;  // whether the CTA rotates a query row
  bool has_new;    // whether the CTA appends a new row
  int packed_row;  // index of the new row among the packed new rows

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

  // The sequence before the append, and the number of keys that the cache can hold for it.
  struct Keys {
    Sequence sequence;
    int capacity;
  };
  __device__ Keys keys() const {
    Keys result;
    result.sequence = find_sequence<Config::page_size, false>(p, batch, result.capacity);
    return result;
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

  // Returns the address of the new row (or of its scale) in `cache`, or null if `cache` has no
  // place for it: past the capacity, in another rank's stripe, or on an invalid page.
  template <class Stored = Element>
  __device__ Stored* target(const Tensor& cache, int head, const Keys& keys) const {
    int key = keys.sequence.seqlen_k + row;
    if (key >= keys.capacity) return nullptr;
    if constexpr (Config::ranks > 1) {
      const int number = key / Config::stripe;
      if (number % Config::ranks != p.rank) return nullptr;
      key = number / Config::ranks * Config::stripe + key % Config::stripe;
    }
    if constexpr (Config::page_size > 0) {
      const int* table = p.block_table + batch * p.block_table_stride;
      const int page = table[key / Config::page_size];
      if (!is_valid_page(page, p.pages)) return nullptr;
      return cache.head<Stored>(page, head) + key % Config::page_size * cache.row_stride;
    } else {
      return cache.head<Stored>(keys.sequence.k_batch, head) + key * cache.row_stride;
    }
  }

  __device__ const Angle* angles(const void* table, const Keys& keys, bool advances) const {
    const int* first = p.rotary_seqlens;
    const int begin = first ? clamp(first[batch], 0, p.rotary_rows) : keys.sequence.seqlen_k;
    const int position = min(begin + (advances ? row : 0), p.rotary_rows - 1);
    return static_cast<const Angle*>(table) + position * p.rotary_stride;
  }
};

// Writes the lengths after the append. The threads of the grid divide the sequences.
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
  const int head = index / Query::chunks;
  Query chunk(row.query(head), index % Query::chunks);
  const auto keys = row.keys();
  const bool advances = p.q_advances != 0;
  chunk.rotate(row.angles(p.cos, keys, advances), row.angles(p.sin, keys, advances));
  chunk.store(row.rotated_query(head));
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
  static_assert(Config::rotary_dim % 2 == 0 && Config::rotary_dim <= dim,
                "rotary_dim must be even and at most head_dim");

  if constexpr (Config::packed_new) write_lengths<Config>(p);
  const Row<Config> row(p);
  const int q_chunks = rotates ? p.heads_q * RotatedQuery<Config>::chunks : 0;
  const int k_chunks = p.heads_kv * (rotates ? RotatedKey::chunks : Key::chunks);
  const int v_chunks = p.heads_kv * Value::chunks;

  for (int index = blockIdx.y * blockDim.x + threadIdx.x; index < q_chunks + k_chunks + v_chunks;
       index += gridDim.y * blockDim.x) {
    if (index < q_chunks) {
      if constexpr (rotates) {
        if (row.has_query) rotate_query(row, index);
      }
      continue;
    }
    if (!row.has_new) continue;
    const int k_index = index - q_chunks;
    const int v_index = k_index - k_chunks;
    if (v_index >= 0) {
      if constexpr (Config::head_dim_v > 0) {
        const int head = v_index / Value::chunks;
        const Value chunk(row.new_row(p.new_v, head), v_index % Value::chunks);
        if (Element* target = row.target(p.v, head, row.keys())) chunk.store(target);
      }
    } else if constexpr (rotates) {
      const int head = k_index / RotatedKey::chunks;
      RotatedKey chunk(row.new_row(p.new_k, head), k_index % RotatedKey::chunks);
      const auto keys = row.keys();
      chunk.rotate(row.angles(p.cos, keys, true), row.angles(p.sin, keys, true));
      if (Element* target = row.target(p.k, head, keys)) chunk.store(target);
    } else {
      const int head = k_index / Key::chunks;
      const Key chunk(row.new_row(p.new_k, head), k_index % Key::chunks);
      if (Element* target = row.target(p.k, head, row.keys())) chunk.store(target);
    }
  }
}

// Called by one warp: quantizes the new row of one head, and appends it to the cache.
template <class Config, class NewRow, class Rotate>
__device__ void quantize_row(const Row<Config>& row, const Tensor& new_rows, const Tensor& cache,
                             const Tensor& scales, int head, Rotate rotate) {
  using Stored = typename Config::CacheElement;
  constexpr int alignment = common_alignment(Config::cache_alignment, NewRow::step);
  const int lane = threadIdx.x % 32;
  const auto keys = row.keys();
  Stored* target = row.template target<Stored>(cache, head, keys);
  if (target == nullptr) return;
  const auto* source = row.new_row(new_rows, head);
  // The row is read once for its scale and again for the store; the second read hits L1.
  const auto for_each_chunk = [&](auto function) {
    for (int chunk = lane; chunk < NewRow::chunks; chunk += 32) {
      NewRow part(source, chunk);
      rotate(part, keys);
      part.for_each_run(function);
    }
  };
  float scale = 1;
  if constexpr (Config::computes_scales) {
    LargestMagnitude largest;
    for_each_chunk([&](int, const auto& x, int elements) { largest.update(x.data, elements); });
    scale = ptx::div_rn(largest.warp_maximum(), largest_number<Stored>());
    if (lane == 0) *row.template target<float>(scales, head, keys) = scale;
  } else if (scales.data != nullptr) {
    scale = *row.template target<float>(scales, head, keys);
  }
  for_each_chunk([&](int column, const auto& x, int elements) {
    store_quantized<alignment>(target + column, x.data, elements, scale);
  });
}

// Like `append()`, for an 8-bit cache.
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
    const int chunks = row.has_query ? p.heads_q * RotatedQuery<Config>::chunks : 0;
    for (int index = thread; index < chunks; index += threads) rotate_query(row, index);
  }
  if (!row.has_new) return;
  constexpr int sides = Config::head_dim_v > 0 ? 2 : 1;
  for (int index = thread / 32; index < sides * p.heads_kv; index += threads / 32) {
    const int head = index / sides;
    const auto no_rotation = [](auto&, const auto&) {};
    if (index % sides == 1) {
      quantize_row<Config, Value>(row, p.new_v, p.v, p.v_scale, head, no_rotation);
    } else if constexpr (rotates) {
      quantize_row<Config, RotatedKey>(
          row, p.new_k, p.k, p.k_scale, head, [&](RotatedKey& chunk, const auto& keys) {
            chunk.rotate(row.angles(p.cos, keys, true), row.angles(p.sin, keys, true));
          });
    } else {
      quantize_row<Config, Key>(row, p.new_k, p.k, p.k_scale, head, no_rotation);
    }
  }
}

}  // namespace append
