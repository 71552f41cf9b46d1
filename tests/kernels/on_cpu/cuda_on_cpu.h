// The parts of CUDA that are needed to run a CTA's code on the host. Each CUDA thread is a
// ucontext, since switching between contexts costs less than waking threads. The memory model is
// not emulated: every exchange between lanes and every __syncthreads is a barrier.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
using std::max;
using std::min;

struct Index {
  unsigned x, y, z;
};

class Barrier {
 public:
  explicit Barrier(int threads) : missing(threads), threads(threads) {}
  void arrive_and_wait();

 private:
  int missing, threads, passed = 0;
};

struct Warp {
  static constexpr int most_bytes = 32;  // of a lane
  Barrier barrier{32};
  alignas(8) unsigned char values[32 * most_bytes];
};

struct Thread {
  static constexpr int stack_bytes = 128 << 10;
  std::unique_ptr<char[]> stack{new char[stack_bytes]};
  ucontext_t context = {};
  bool ended = false;
};

struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  const std::function<void()>& body;
  ucontext_t context = {};
};

inline Index threadIdx, blockIdx, blockDim, gridDim;
inline Block* the_block;

inline Warp& the_warp() { return the_block->warps[threadIdx.x / 32]; }

// Switches to `run_block`, which continues with the next thread.
inline void let_others_run() {
  // Each lane loops over the CTAs of a grid, so lanes may have different values of blockIdx.
  const Index block = blockIdx;
  swapcontext(&the_block->threads[threadIdx.x].context, &the_block->context);
  blockIdx = block;
}

inline void Barrier::arrive_and_wait() {
  const int turn = passed;
  if (--missing == 0) {
    missing = threads;
    ++passed;
  }
  while (passed == turn) let_others_run();
}

inline void __syncthreads() { the_block->barrier.arrive_and_wait(); }

// Returns read(values), where `values` holds the `value` of every lane of the warp.
template <class T, class Read>
auto among_lanes(const T& value, Read read) {
  static_assert(sizeof(T) <= Warp::most_bytes && std::is_trivially_copyable_v<T>);
  Warp& warp = the_warp();
  T* values = reinterpret_cast<T*>(warp.values);
  std::memcpy(values + threadIdx.x % 32, &value, sizeof value);
  warp.barrier.arrive_and_wait();
  const auto result = read(static_cast<const T*>(values));
  warp.barrier.arrive_and_wait();
  return result;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return among_lanes(value, [=](const T* all) { return all[lane]; });
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = int(threadIdx.x % 32) - distance;
  return among_lanes(value, [=](const T* all) { return lane < 0 ? value : all[lane]; });
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32 ^ mask;
  return among_lanes(value, [=](const T* all) { return all[lane]; });
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  return among_lanes(unsigned(predicate), [](const unsigned* all) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= all[lane] << lane;
    return votes;
  });
}

inline unsigned __match_any_sync(unsigned, int value) {
  return among_lanes(unsigned(value), [=](const unsigned* all) {
    unsigned alike = 0;
    for (int lane = 0; lane < 32; ++lane) alike |= unsigned(all[lane] == unsigned(value)) << lane;
    return alike;
  });
}

inline void __syncwarp() { the_warp().barrier.arrive_and_wait(); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

inline int __float_as_int(float x) {
  int result;
  std::memcpy(&result, &x, sizeof result);
  return result;
}

template <class T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline void run_thread() {
  the_block->body();
  the_block->threads[threadIdx.x].ended = true;
}

// Runs `body` on the threads of one CTA.
inline void run_block(int threads, const std::function<void()>& body) {
  Block block{Barrier(threads), std::vector<Warp>(threads / 32), std::vector<Thread>(threads), body};
  the_block = &block;
  blockDim.x = threads;
  for (Thread& thread : block.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = Thread::stack_bytes;
    thread.context.uc_link = &block.context;
    makecontext(&thread.context, run_thread, 0);
  }
  for (int running = threads; running > 0;) {
    for (int i = 0; i < threads; ++i) {
      Thread& thread = block.threads[i];
      if (thread.ended) continue;
      threadIdx.x = i;
      swapcontext(&block.context, &thread.context);
      running -= thread.ended;
    }
  }
}
