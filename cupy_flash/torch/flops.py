"""Numbers of floating-point operations of the operators, for `torch.utils.flop_counter`.

As in PyTorch's formulas, masks do not reduce the count, and the backward pass counts five products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cupy_flash.torch import cache_operators
from cupy_flash.torch.operators import LEADING, VARLEN_SCHEMA

# Number of arguments of packed calls after the modifications.
_TRAILING = VARLEN_SCHEMA.count(",") + 1


def _attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: Any = None) -> int:
    """Return the number of operations of `attention`."""
    return _products(1, 1, _dense_pairs(q, k, *others[-2:]), q, v)


def _attention_gradients(*values: Any, out_val: Any = None) -> int:
    """Return the number of operations of `attention_gradients`."""
    q, k, v, *others = values[LEADING:]
    return _products(3, 2, _dense_pairs(q, k, *others[-2:]), q, v)


def _attention_varlen(*values: Any, out_val: Any = None) -> int:
    """Return the number of operations of `attention_varlen`."""
    q, _, v, *_ = values
    return _products(1, 1, _varlen_pairs(values), q, v)


def _attention_varlen_gradients(*values: Any, out_val: Any = None) -> int:
    """Return the number of operations of `attention_varlen_gradients`."""
    q, _, v, *_ = values[LEADING:]
    return _products(3, 2, _varlen_pairs(values[LEADING:]), q, v)


def _attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    keys: int,
    cache_seqlens: Tensor | None,
    *others: Any,
    out_val: Any = None,
) -> int:
    """Return the number of operations of a cached call."""
    batch, rows, heads, _ = q.shape
    out, *_ = out_val
    names = (*cache_operators.SCALES, *cache_operators.TENSORS)
    table = others[names.index("block_table")]
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    # Packed new rows have no axis of sequences; the average of a sequence is counted.
    new = 0 if k is None else k.shape[1] if k.ndim == q.ndim else k.shape[0] // max(batch, 1)
    if cache_seqlens is None:
        lengths = [keys] * batch
    else:
        lengths = cache_seqlens.tolist() if _has_values(cache_seqlens) else [capacity] * batch
    pairs = heads * rows * sum(min(n + new, capacity) for n in lengths)
    return _products(1, 1, pairs, q, out)


def _products(of_keys: int, of_values: int, pairs: int, q: Tensor, v: Tensor) -> int:
    """Return the operations of products over head_dim and over head_dim_v, for all pairs."""
    return int(2 * pairs * (of_keys * q.shape[-1] + of_values * v.shape[-1]))


def _dense_pairs(q: Tensor, k: Tensor, layout: str, key_indices: Tensor | None) -> int:
    """Return the number of pairs of a query row of a head and a key."""
    keys = k.shape[-3 if layout == "bshd" else -2]
    if key_indices is not None:
        keys = key_indices.shape[-1]
    return (q.numel() // max(q.shape[-1], 1)) * keys


def _varlen_pairs(values: tuple[Any, ...]) -> int:
    q = values[0]
    ends_q, ends_k, most_q, most_k, used_k, *_, key_indices = values[-_TRAILING:]
    if key_indices is not None:
        return int(q.shape[0] * q.shape[1] * key_indices.shape[-1])
    rows = _lengths(ends_q, most_q)
    keys = _lengths(ends_k, most_k)
    if used_k is not None and _has_values(used_k):
        keys = used_k.tolist()
    return int(q.shape[1]) * sum(m * n for m, n in zip(rows, keys, strict=True))


def _lengths(ends: Tensor, most: int) -> list[int]:
    """Return the lengths of sequences, or the largest one for each if they are unknown."""
    return ends.diff().tolist() if _has_values(ends) else [most] * (ends.shape[0] - 1)


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor is neither fake nor traced."""
    return tensor.__class__ is Tensor and tensor.device.type != "meta"


_FORMULAS: dict[str, Callable[..., int]] = {
    "attention": _attention,
    "attention_gradients": _attention_gradients,
    "attention_varlen": _attention_varlen,
    "attention_varlen_gradients": _attention_varlen_gradients,
    "attention_over_kvcache": _attention_with_kvcache,
    "attention_with_kvcache": _attention_with_kvcache,
    "attention_with_kvcache_scales": _attention_with_kvcache,
}


def register() -> None:
    """Register the formulas, which are given tensors instead of their shapes."""
    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(torch.ops.cupy_flash, name), get_raw=True)(formula)
