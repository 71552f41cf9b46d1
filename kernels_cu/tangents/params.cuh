// Argument struct of the tangent kernels. cupy_flash/families/params.py declares the same struct as
// a NumPy dtype and asserts at compile time that sizes and offsets agree.
#pragma once

#include "params.cuh"

// The inherited `out` and `lse` are results of the forward pass, and are only read. The `data` of
// an input's tangent is null if the tangent is zero.
struct TangentParams : Params {
  Tensor q_tangent;
  Tensor k_tangent;
  Tensor v_tangent;
  Tensor out_tangent;
  void* lse_tangent;  // tangent of lse, or null
};
