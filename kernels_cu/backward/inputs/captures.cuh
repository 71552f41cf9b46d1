// Gradients of arrays that a score modification captures. Each (query, key) pair adds to the
// elements that its score reads, which may be anywhere in the array. Contributions are added as
// integers (inputs/fixed_point.cuh), so that their order does not affect the result.
//
// One kernel computes the largest contribution M to each array, which determines the unit of the
// integers. The next computes all contributions again and adds them. The last converts the sums.
// For n < 2^b contributions and 2^(e - 1) <= M < 2^e, a sum is off by at most n 2^(e + 2b - 126),
// which is less than M 2^(3b - 125): for b = 33 by M 2^-26, an eighth of float32's eps, even if all
// are rounded the same way. The typical error, sqrt(n) M 2^(2b - 125), is below half of float32's
// eps for b up to 40, and of float64's for b up to 28. Subnormal numbers may count as 0.
//
// An infinite or NaN contribution sets flags of its element, and affects no other element.
//
// If consecutive contributions of a thread go to the same element, the thread first sums them in
// order, and then adds their sum, rounded to half an ulp, as one contribution.
#pragma once

#include "backward/inputs/compensated_sum.cuh"
#include "backward/inputs/fixed_point.cuh"
#include "backward/params.cuh"
#include "backward/inputs/score_gradients.cuh"
#include "scheduler/tile_coord.cuh"
#include "score/capture.cuh"

template <class Input, class Offset, int Rank, bool ContiguousLast>
__device__ int64 size_of(const Capture<Input, Offset, Rank, ContiguousLast>& capture) {
  int64 size = 1;
  if constexpr (Rank > 0) {
    for (int length : capture.shape) size *= length;
  }
  return size;
}

// Workspace for the captured arrays that need gradients. input_gradients.py computes its size.
template <class Config>
struct CaptureSums {
  using T = Accumulator<typename Config::Element>;
  using Mods = typename Config::Mods;
  static constexpr int count = Mods::differentiable;
  // Each element has two flag bits: +inf was added, and -inf was added. NaN sets both.
  static constexpr int flags_per_word = 16;

  int64 first[count];  // index in `sums` of each array's first element
  int64 elements = 0;
  Fixed* sums;
  T* largest;  // shape (CTAs, count): largest contribution of each CTA to each array
  unsigned* flags;

  __device__ explicit CaptureSums(const GradientParams& p) {
    Mods::for_each_differentiable(p.mods, [&](int number, const auto& capture) {
      first[number] = elements;
      if (p.dcaptures[number] != nullptr) elements += size_of(capture);
    });
    sums = static_cast<Fixed*>(p.capture_sums);
    largest = reinterpret_cast<T*>(sums + elements);
    flags = reinterpret_cast<unsigned*>(largest + int64(gridDim.x) * count);
  }

  __device__ void clear() const {
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
      sums[i] = {0, 0};
      if (i % flags_per_word == 0) flags[i / flags_per_word] = 0;
    }
  }

  __device__ void flag(int64 element, T x) const {
    const unsigned bits = x > 0 ? 1 : x < 0 ? 2 : 3;
    atomicOr(&flags[element / flags_per_word], bits << element % flags_per_word * 2);
  }

  __device__ double value(int64 element, const FixedUnit<T>& unit) const {
    const double infinity = SoftmaxMath<double>::infinity();
    switch (flags[element / flags_per_word] >> element % flags_per_word * 2 & 3) {
      case 0: return unit.value(sums[element]);
      case 1: return infinity;
      case 2: return -infinity;
      default: return infinity - infinity;
    }
  }
};

// Maximum over the threads of a CTA, separately for each captured array.
template <class T, int Count>
struct CtaMaximum {
  static constexpr int warps = 8;
  T warp_maxima[warps][Count];

  __device__ void reduce(T (&x)[Count]) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int number = 0; number < Count; ++number) {
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) {
        x[number] = max(x[number], __shfl_xor_sync(~0u, x[number], bit));
      }
      if (threadIdx.x % 32 == 0) warp_maxima[warp][number] = x[number];
    }
    __syncthreads();
#pragma unroll
    for (int number = 0; number < Count; ++number) {
      for (int i = 0; i < warps; ++i) x[number] = max(x[number], warp_maxima[i][number]);
    }
  }
};

// Fixed-point unit of each captured array. Each thread holds a copy.
template <class Config>
struct CaptureUnits {
  using Sums = CaptureSums<Config>;
  using T = typename Sums::T;
  static constexpr int count = Sums::count;
  using Shared = CtaMaximum<T, count>;
  FixedUnit<T> units[count];

  __device__ CaptureUnits(const GradientParams& p, const Sums& captures, Shared& shared) {
    T largest[count] = {};
    for (int block = threadIdx.x; block < int(gridDim.x); block += blockDim.x) {
#pragma unroll
      for (int number = 0; number < count; ++number) {
        largest[number] = max(largest[number], captures.largest[block * count + number]);
      }
    }
    shared.reduce(largest);
    const int64 rows = Config::packed ? int64(p.total_q) : int64(p.batch) * p.seqlen_q;
    const int64 contributions = rows * p.heads_q * p.seqlen_k * Config::Mods::loads;
    const int bits = 64 - __clzll(contributions);
#pragma unroll
    for (int number = 0; number < count; ++number) units[number] = {largest[number], bits};
  }
};

template <class Config, class Input, class Offset, int Rank, bool ContiguousLast>
__device__ void write_capture(void* result,
                              const Capture<Input, Offset, Rank, ContiguousLast>& capture,
                              const CaptureSums<Config>& captures, int number,
                              const FixedUnit<typename CaptureSums<Config>::T>& unit) {
  using Gradient = typename GradientType<Config, Input>::type;
  const int64 size = size_of(capture), step = int64(gridDim.x) * blockDim.x;
  for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const double value = captures.value(captures.first[number] + i, unit);
    static_cast<Gradient*>(result)[i] = narrow<Gradient>(Accumulator<Gradient>(value));
  }
}

// Computes the contributions of all pairs. Query tiles are assigned to CTAs round-robin.
template <class Config>
struct Contributions {
  using Mods = typename Config::Mods;
  using Scores = ScoreGradients<Config>;
  using Sums = CaptureSums<Config>;
  using T = typename Scores::T;
  static constexpr int size = Scores::size;

  const GradientParams& p;
  const Sums& captures;
  unsigned char* const memory;  // shared memory for operands
  // For each array: the element that the thread added to last, and its pending sum.
  int64 last_element[Sums::count];
  CompensatedSum<T> pending[Sums::count];

  __device__ Contributions(const GradientParams& p, const Sums& captures, unsigned char* memory)
      : p(p), captures(captures), memory(memory) {
#pragma unroll
    for (int64& element : last_element) element = -1;
  }

  // Calls `function(number, element, x)` for each contribution x to array `number`. `element`
  // counts across the elements of all arrays. Calls `end_rows()` after each query tile.
  template <class Function, class EndRows>
  __device__ void for_each_contribution(Function function, EndRows end_rows) {
    const int tiles = ceil_div(p.seqlen_q, size);
    const int64 end = int64(p.batch) * p.heads_q * tiles;
    for (int64 number = blockIdx.x; number < end; number += gridDim.x) {
      const int batch_head = number / tiles;
      process_rows(batch_head / p.heads_q, batch_head % p.heads_q, number % tiles * size, function);
      end_rows();
    }
#pragma unroll
    for (int number = 0; number < Sums::count; ++number) flush(number, function);
  }

 private:
  template <class Function>
  __device__ void process_rows(int batch, int head, int row, Function function) {
    const Sequence sequence = sequence_of<Config>(p, batch);
    if (row >= sequence.seqlen_q) return;
    const Mask<Config> mask = mask_of<Config>(p, sequence, batch);
    const KvTileRange tiles =
        kv_tile_range<size, false>(mask, row, min(row + size, sequence.seqlen_q), 0, 1);
    Scores scores;
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      scores.compute(p, memory, sequence, mask, batch, head, row, tile * size);
      // Keys are the outer loop: if the element depends on the key alone, all rows of the inner
      // loop add to one element, which can stay in a register.
#pragma unroll
      for (int j = 0; j < Scores::keys_per_thread; ++j) {
#pragma unroll
        for (int i = 0; i < Scores::rows_per_thread; ++i) {
          if (scores.gradients[i][j] == 0) continue;
          const int query_row = row + Scores::row(i);
          const auto mod_row = Mods::row(p.mods, batch, head, query_row + mask.q_offset, query_row,
                                         sequence.q_first, sequence.k_first, T(0));
          Mods::scatter(p.mods, mod_row,
                        Mods::keys(p.mods, mod_row, tile * size + Scores::first_key()),
                        Scores::step(j), scores.products[i][j], scores.gradients[i][j],
                        [&](int number, int64 element, T x) { add(number, element, x, function); });
        }
      }
    }
  }

  template <class Function>
  __device__ void add(int number, int64 element, T x, Function function) {
    if (p.dcaptures[number] == nullptr) return;
    element += captures.first[number];
    if (!is_finite(x)) {
      function(number, element, x);
      return;
    }
    if (last_element[number] != element) {
      flush(number, function);
      last_element[number] = element;
    }
    pending[number].add(x);
  }

  template <class Function>
  __device__ void flush(int number, Function function) {
    if (last_element[number] >= 0) function(number, last_element[number], pending[number].total());
    pending[number] = {};
  }
};

template <class Config>
__device__ void measure_captures(const GradientParams& p) {
  using Kernel = Contributions<Config>;
  using T = typename Kernel::T;
  constexpr int count = Kernel::Sums::count;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ CtaMaximum<T, count> cta_maximum;
  const CaptureSums<Config> captures(p);
  captures.clear();
  T largest[count] = {};
  Kernel(p, captures, shared_memory)
      .for_each_contribution(
          [&](int number, int64, T x) {
            if (is_finite(x)) largest[number] = max(largest[number], x < 0 ? -x : x);
          },
          [] {});
  cta_maximum.reduce(largest);
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int number = 0; number < count; ++number) {
    captures.largest[blockIdx.x * count + number] = largest[number];
  }
}

template <class Config>
__device__ void add_captures(const GradientParams& p) {
  using Kernel = Contributions<Config>;
  using T = typename Kernel::T;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ typename CaptureUnits<Config>::Shared largest;
  __shared__ FixedSlots slots;
  const CaptureSums<Config> captures(p);
  const CaptureUnits<Config> units(p, captures, largest);
  slots.clear();
  Kernel(p, captures, shared_memory)
      .for_each_contribution(
          [&](int number, int64 element, T x) {
            if (is_finite(x)) {
              slots.add(captures.sums, element, units.units[number].to_fixed(x));
            } else {
              captures.flag(element, x);
            }
          },
          [&] { slots.flush(captures.sums); });
  slots.flush(captures.sums);
}

template <class Config>
__device__ void write_captures(const GradientParams& p) {
  using Units = CaptureUnits<Config>;
  __shared__ typename Units::Shared largest;
  const CaptureSums<Config> captures(p);
  const Units units(p, captures, largest);
  Config::Mods::for_each_differentiable(p.mods, [&](int number, const auto& capture) {
    if (p.dcaptures[number] != nullptr) {
      write_capture<Config>(p.dcaptures[number], capture, captures, number, units.units[number]);
    }
  });
}
