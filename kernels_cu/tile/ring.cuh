// Position in a ring buffer: stage index and mbarrier phase parity, like a CUTLASS PipelineState.
#pragma once

template <int Slots>
struct RingPosition {
  int slot = 0;
  int parity = 0;

  __device__ void advance() {
    if (++slot == Slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};
