// Host versions of the instructions in kernels_cu/ptx/sm90a.cuh. Asynchronous copies complete
// immediately; only barriers make threads wait.
#pragma once

#include "ptx/base.cuh"

// Description of an array for the copies below, which emulated_kernels.py writes. Strides are in
// bytes, sizes of the box in elements.
struct alignas(64) TensorMap {
  unsigned long long address;
  unsigned long long shape[4];
  unsigned long long strides[3];
  unsigned long long box_columns;
  unsigned long long box_rows;
  unsigned long long itemsize;
  unsigned long long unused[5];
};
static_assert(sizeof(TensorMap) == 128);

namespace ptx {

template <int Registers>
void setmaxnreg_inc() {}
template <int Registers>
void setmaxnreg_dec() {}
inline void fence_proxy_async() {}
inline void fence_mbarrier_init() {}
inline void prefetch_tensormap(const TensorMap*) {}

// An mbarrier. Its phase completes when no arrivals and no bytes are pending.
struct Mbarrier {
  short count, missing;
  int bytes : 31;
  unsigned phase : 1;

  void complete_if_done() {
    if (missing == 0 && bytes == 0) {
      missing = count;
      phase ^= 1;
    }
  }
};
static_assert(sizeof(Mbarrier) == 8);

inline Mbarrier& mbarrier_at(unsigned shared) {
  if (shared % 8 != 0) std::abort();
  return *reinterpret_cast<Mbarrier*>(shared_memory + shared);
}
inline void mbarrier_init(unsigned barrier, int count) {
  mbarrier_at(barrier) = {short(count), short(count), 0, 0};
}
inline void mbarrier_arrive(unsigned barrier) {
  Mbarrier& it = mbarrier_at(barrier);
  if (it.missing-- <= 0) std::abort();
  it.complete_if_done();
}
inline void mbarrier_expect_tx(unsigned barrier, int bytes) { mbarrier_at(barrier).bytes += bytes; }
inline void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
  mbarrier_expect_tx(barrier, bytes);
  mbarrier_arrive(barrier);
}
inline void complete_tx(unsigned barrier, int bytes) {
  Mbarrier& it = mbarrier_at(barrier);
  it.bytes -= bytes;
  it.complete_if_done();
}
inline bool mbarrier_test_wait(unsigned barrier, int parity) {
  return int(mbarrier_at(barrier).phase) != parity;
}
inline void mbarrier_wait(unsigned barrier, int parity) {
  while (!mbarrier_test_wait(barrier, parity)) let_others_run();
}

constexpr unsigned long long l2_evict_first = 0;
constexpr unsigned long long l2_evict_last = 0;
constexpr unsigned long long l2_evict_normal = 0;

// Returns the address after the swizzle of rows of `row_bytes` (64 or 128) bytes: the number of the
// row modifies that of the 16-byte chunk. Tiles are aligned to the pattern's size.
inline unsigned swizzled(unsigned address, int row_bytes) {
  return address ^ (row_bytes == 128 ? (address >> 7 & 7) << 4 : (address >> 7 & 3) << 4);
}

inline void cp_async_bulk_tensor_4d(unsigned shared, const TensorMap* map, int c0, int c1, int c2,
                                    int c3, unsigned barrier, unsigned long long) {
  const int row_bytes = map->box_columns * map->itemsize;
  if (shared % (8 * row_bytes) != 0) std::abort();
  const auto is_inside = [&](int index, int axis) {
    return index >= 0 && index < int(map->shape[axis]);
  };
  for (int row = 0; row < int(map->box_rows); ++row) {
    for (int column = 0; column < int(map->box_columns); ++column) {
      const unsigned offset = row * row_bytes + column * map->itemsize;
      unsigned char* target = shared_memory + swizzled(shared + offset, row_bytes);
      const bool exists = is_inside(c0 + column, 0) && is_inside(c1 + row, 1) &&
                          is_inside(c2, 2) && is_inside(c3, 3);
      std::memset(target, 0, map->itemsize);
      if (!exists) continue;
      std::memcpy(target,
                  reinterpret_cast<const char*>(map->address) + (c0 + column) * map->itemsize +
                      (c1 + row) * map->strides[0] + c2 * map->strides[1] + c3 * map->strides[2],
                  map->itemsize);
    }
  }
  complete_tx(barrier, map->box_rows * row_bytes);
}

inline void cp_async_bulk(unsigned shared, const void* source, int bytes, unsigned barrier) {
  std::memcpy(shared_memory + shared, source, bytes);
  complete_tx(barrier, bytes);
}

// A named barrier. Each kernel completes the phases that it begins.
struct NamedBarrierState {
  int arrived, phase;
};
inline NamedBarrierState named_barriers[16];

inline void bar_arrive(int barrier, int threads) {
  NamedBarrierState& it = named_barriers[barrier];
  if (++it.arrived == threads) it = {0, it.phase + 1};
}
inline void bar_sync(int barrier, int threads) {
  const int phase = named_barriers[barrier].phase;
  bar_arrive(barrier, threads);
  while (named_barriers[barrier].phase == phase) let_others_run();
}

// Products are computed when they are issued.
inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int Pending>
void wgmma_wait_group() {}

}  // namespace ptx
