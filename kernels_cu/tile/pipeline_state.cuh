// Position in a ring buffer: stage index and mbarrier phase parity, like a CUTLASS PipelineState.
#pragma once

template <int Stages>
struct PipelineState {
  int index = 0;
  int phase = 0;

  __device__ void advance() {
    if (++index == Stages) {
      index = 0;
      phase ^= 1;
    }
  }
};
