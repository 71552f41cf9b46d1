// A slot of a ring of buffers in shared memory, and the parity of its barriers' phase.
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
