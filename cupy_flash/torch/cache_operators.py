"""Operators of PyTorch for attention over a KV cache, which declare the tensors that they write."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cupy_flash.api import kvcache
from cupy_flash.torch import modifications as mods
from cupy_flash.torch.operators import define

# Optional tensors of a call, in the order of the schema, and those that are always or never given.
TENSORS = (
    "cu_seqlens_k_new",
    "cache_batch_idx",
    "block_table",
    "rotary_cos",
    "rotary_sin",
    "rotary_seqlens",
)
# Options that are no tensors, in the order of the schema.
OPTIONS = {
    "rotary_interleaved": "bool",
    "compute_scales": "bool",
    "head_dim_v": "SymInt?",
    "causal": "bool",
    "softmax_scale": "float?",
    "num_splits": "SymInt",
    "shared_prefix_len": "SymInt",
    "batch_invariant": "bool",
    "family": "str?",
}
_CACHES, SCALES = ("k_cache", "v_cache"), ("k_scale", "v_scale")


def _operator(name: str, written: tuple[str, ...]) -> Any:
    """Define an operator that writes these tensors, and return it."""
    marks = {x: f"({'abcd'[i]}!)" for i, x in enumerate((*_CACHES, *SCALES)) if x in written}
    optional = [f"Tensor{marks.get(x, '')}? {x}" for x in (*SCALES, *TENSORS)]
    options = [f"{kind} {x}" for x, kind in OPTIONS.items()]
    arguments = [
        "Tensor q",
        f"Tensor{marks.get('k_cache', '')} k_cache",
        f"Tensor{marks.get('v_cache', '')}? v_cache",
        *("Tensor? k", "Tensor? v", "SymInt keys", "Tensor? cache_seqlens"),
        *(*optional, mods.SCHEMA, *options),
    ]
    define(name, f"({', '.join(arguments)}) -> (Tensor, Tensor)", _run, _run_fake)
    return getattr(torch.ops.cupy_flash, name).default


def _run(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, keys: int, cache_seqlens: Any, *values: Any
) -> Any:
    """Compute a step; return out and lse."""
    count = len(SCALES) + len(TENSORS)
    options = dict(zip((*SCALES, *TENSORS), values[:count], strict=True))
    options |= zip(OPTIONS, values[count + mods.COUNT :], strict=True)
    options |= mods.unpacked(*values[count : count + mods.COUNT])
    lengths = keys if cache_seqlens is None else cache_seqlens
    step = functools.partial(kvcache.flash_attention_with_kvcache, q, k_cache, v_cache, k, v)
    return step(cache_seqlens=lengths, return_lse=True, **options)


def _run_fake(q: Any, k_cache: Any, v_cache: Any, *values: Any) -> Any:
    """Return empty tensors with the shapes of out and lse."""
    mods.keep_templates(*values[-len(OPTIONS) - mods.COUNT : -len(OPTIONS)])
    options = dict(zip(OPTIONS, values[-len(OPTIONS) :], strict=True))
    head_dim_v = options["head_dim_v"] if v_cache is None else v_cache.shape[-1]
    batch, rows, heads, _ = q.shape
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, rows, heads, head_dim_v))
    return out, q.new_empty((batch, heads, rows), dtype=accumulator)


ATTEND = _operator("attention_over_kvcache", ())
APPEND = _operator("attention_with_kvcache", _CACHES)
APPEND_WITH_SCALES = _operator("attention_with_kvcache_scales", (*_CACHES, *SCALES))
