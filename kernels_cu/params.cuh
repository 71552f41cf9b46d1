// The argument of every kernel. cupy_flash/gpu/params.py declares the same struct as a NumPy dtype and
// asserts at compile time that sizes and offsets agree.
#pragma once

using int64 = long long;

// A (batch, seqlen, heads, dim) array whose last axis is contiguous. Strides count elements.
struct Tensor {
  void* data;
  int64 batch_stride;
  int64 row_stride;
  int64 head_stride;

  template <class Element>
  __device__ Element* head(int batch, int head) const {
    return static_cast<Element*>(data) + batch * batch_stride + head * head_stride;
  }
};

struct Params {
  Tensor q;              // (batch, seqlen_q, heads_q, head_dim)
  Tensor k;              // (batch, seqlen_k, heads_kv, head_dim)
  Tensor v;              // (batch, seqlen_k, heads_kv, head_dim_v)
  Tensor out;            // (batch, seqlen_q, heads_q, head_dim_v)
  void* lse;             // (batch, heads_q, seqlen_q), contiguous, or null
  void* workspace;       // what the family asked for, or null
  double softmax_scale;  // > 0, and without what score_factor has of it
  int batch;
  int seqlen_q;
  int seqlen_k;
  int heads_q;
  int heads_kv;
  int q_offset;       // query i sees keys j <= i + q_offset when causal
  int num_splits;     // thread blocks that share one query tile's keys
  int section_heads;  // heads whose query tiles are interleaved, see schedule.cuh
};
