// Enough of CUDA to run a thread block's code on the host, a thread for each of its threads. Not
// the memory model: every exchange between lanes and every __syncthreads is a barrier.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
using std::max;
using std::min;

struct Index {
  unsigned x, y, z;
};

struct Warp {
  std::barrier<> barrier{32};
  unsigned values[32];
};

struct Block {
  std::barrier<> barrier;
  std::vector<std::unique_ptr<Warp>> warps;
};

inline thread_local Index threadIdx;
inline thread_local Index blockIdx;
inline Index blockDim;
inline Index gridDim;
inline thread_local Block* the_block;

inline Warp& the_warp() { return *the_block->warps[threadIdx.x / 32]; }

inline void __syncthreads() { the_block->barrier.arrive_and_wait(); }

// What each lane reads of all lanes' values.
template <class Read>
auto among_lanes(unsigned value, Read read) {
  Warp& warp = the_warp();
  warp.values[threadIdx.x % 32] = value;
  warp.barrier.arrive_and_wait();
  const auto result = read(warp.values);
  warp.barrier.arrive_and_wait();
  return result;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return T(among_lanes(unsigned(value), [=](const unsigned* all) { return all[lane]; }));
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = int(threadIdx.x % 32) - distance;
  const unsigned own = unsigned(value);
  return T(among_lanes(own, [=](const unsigned* all) { return lane < 0 ? own : all[lane]; }));
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32 ^ mask;
  return T(among_lanes(unsigned(value), [=](const unsigned* all) { return all[lane]; }));
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  return among_lanes(predicate, [](const unsigned* all) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= all[lane] << lane;
    return votes;
  });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }

inline int __float_as_int(float x) {
  int result;
  std::memcpy(&result, &x, sizeof result);
  return result;
}

template <class T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

// Runs `body` on the threads of one block.
inline void run_block(int threads, const std::function<void()>& body) {
  Block block{std::barrier<>(threads), {}};
  for (int i = 0; i < threads / 32; ++i) block.warps.push_back(std::make_unique<Warp>());
  blockDim.x = threads;
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      threadIdx.x = i;
      the_block = &block;
      body();
    });
  }
  for (std::thread& thread : running) thread.join();
}
