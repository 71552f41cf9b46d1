"""Attention for JAX: functions on JAX arrays, differentiable by JAX, also under `jax.jit`.

    from cupy_flash.jax import flash_attention
    jax.jit(jax.grad(lambda q: flash_attention(q, k, v, causal=True).sum()))(q)

The functions have the arguments of the functions of the same names in `cupy_flash`. Gradients reach
q, k, v, bias and sinks; numbers and lists are constants. Calls on arrays that have values are
computed at once, except those on caches, pages and float8 arrays, which are compiled. Arrays that
JAX traces, as under `jax.jit`, `jax.vmap`, `jax.lax.scan` and `jax.shard_map`, make the call an
operation of the compiled program, which runs on JAX's CPU and CUDA platforms. As usual in JAX, an
argument may be a NumPy array, which is copied to the device of the other arguments.
"""

from __future__ import annotations

from cupy_flash.jax.attention import (
    flash_attention,
    flash_attention_qkvpacked,
    flash_attention_varlen,
)
from cupy_flash.jax.dot_product import dot_product_attention, flax_attention
from cupy_flash.jax.kvcache import DecodingStep, flash_attention_with_kvcache
from cupy_flash.jax.targets import export_checks

__all__ = [
    "DecodingStep",
    "dot_product_attention",
    "export_checks",
    "flash_attention",
    "flash_attention_qkvpacked",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "flax_attention",
]
