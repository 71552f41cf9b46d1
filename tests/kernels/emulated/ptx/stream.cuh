// Host versions of the copies in kernels_cu/ptx/stream.cuh.
#pragma once

#include "ptx/base.cuh"

namespace ptx {

template <int Bytes>
void cp_async(unsigned shared, const void* global, int source_bytes, unsigned long long) {
  cp_async<Bytes>(shared, global, source_bytes);
}

}  // namespace ptx
