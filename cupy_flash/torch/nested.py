"""Calls on nested tensors with the jagged layout, as calls on packed sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_flash.differentiable import DifferentiableCall, varlen_call

# Modifications whose shapes depend on the padded lengths of a dense batch.
_DENSE = {
    "bias": "score_mod",
    "mask": "mask_mod",
    "tree_mask": "mask_mod",
    "seqlens_k": "nested keys and values of these lengths",
}


class PackedCall(NamedTuple):
    """Call on the packed rows of nested tensors.

    Attributes
    ----------
    call, inputs
        Call of `flash_attention_varlen` and its differentiable inputs.
    like
        Nested queries (batch, seqlen, heads, head_dim), whose lengths those of the results are.
    layout
        Layout of the nested tensors, "bshd" or "bhsd".
    """

    call: DifferentiableCall
    inputs: tuple[Any, ...]
    like: Any
    layout: str

    def nested(self, results: Any) -> Any:
        """Return the results of the packed call, one or a tuple, as nested tensors."""
        out, *rows = results if isinstance(results, tuple) else (results,)
        out = _nested(out, self.like, 1)
        out = out if self.layout == "bshd" else out.transpose(1, 2)
        return (out, *(_nested(x, self.like, 2) for x in rows)) if rows else out


def packed_call(call: DifferentiableCall, inputs: tuple[Any, ...]) -> PackedCall:
    """Return a call of `flash_attention` on nested tensors as a call on their rows.

    Raises
    ------
    TypeError
        If q, k and v are not all nested tensors with the jagged layout.
    ValueError
        For shapes that do not match, and for a modification that needs a dense batch.
    """
    options = call.options
    if call.key_indices is not None:
        raise ValueError(
            "key_indices are given with nested tensors; pass flash_attention_varlen the packed rows"
        )
    names = dict(zip(call.names, inputs, strict=True))
    modifications = {n: x for n, x in {**call.modifications, **names}.items() if x is not None}
    q, k, v = (
        _rows_first(name, modifications.pop(name), options.layout) for name in ("q", "k", "v")
    )
    for name, instead in _DENSE.items():
        if name in modifications:
            raise ValueError(f"{name} is given with nested tensors; pass {instead} instead")
    if not _have_equal_lengths(k, v):
        raise ValueError(
            "v has other lengths than k; create both by nested_tensor_from_jagged with the same "
            "offsets"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k has {k.shape[0]} sequences; expected {q.shape[0]}, as q has")
    # By default, the last query of a sequence is at the position of its last key.
    is_default = options.q_offset is None or (options.q_offset == 0 and _have_equal_lengths(q, k))
    if not is_default and (options.causal or modifications):
        offsets = torch.full((q.shape[0],), options.q_offset, dtype=torch.int32, device=q.device)
        modifications["q_offset"] = offsets
    if q.lengths() is not None:
        modifications["seqused_q"] = q.lengths().int()
    used = None if k.lengths() is None else k.lengths().int()
    ends = q.offsets().int(), k.offsets().int()
    most = _longest(q), _longest(k)
    packed, others = varlen_call(
        *(*ends, *most, used, options.causal, options.softmax_scale, modifications)
    )
    rows = q.values(), k.values(), v.values()
    return PackedCall(packed, (*rows, *others), q, options.layout)


def unbound(qkv: Any) -> tuple[Any, ...]:
    """Return nested q, k and v, given a nested tensor (batch, seqlen, 3, heads, head_dim).

    Raises
    ------
    TypeError, ValueError
        Unless the tensor has the jagged layout, and seqlen is its ragged axis.
    """
    _require_jagged("qkv", qkv)
    if qkv.ndim != 5 or qkv._ragged_idx != 1 or qkv.shape[2] != 3:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; expected (batch, seqlen, 3, heads, head_dim) with "
            "a ragged seqlen"
        )
    return tuple(_nested(rows, qkv, 1) for rows in qkv.values().unbind(1))


def longest_shape(name: str, nested: Any) -> tuple[int, ...]:
    """Return the shape of a nested tensor with the largest length in place of the ragged axis.

    Raises
    ------
    TypeError
        Unless the tensor has the jagged layout.
    """
    _require_jagged(name, nested)
    sizes = enumerate(nested.shape)
    return tuple(nested._get_max_seqlen() if n == nested._ragged_idx else int(x) for n, x in sizes)


def _require_jagged(name: str, tensor: Any) -> None:
    if not tensor.is_nested:
        raise TypeError(f"{name} is not nested, but another of q, k and v is; pass nested tensors")
    if tensor.layout is not torch.jagged:
        raise TypeError(
            f"{name} is a nested tensor with the layout {tensor.layout}; expected torch.jagged: "
            "torch.nested.nested_tensor(..., layout=torch.jagged)"
        )


def _rows_first(name: str, tensor: Any, layout: str) -> Any:
    """Return a nested tensor as (batch, seqlen, heads, head_dim)."""
    _require_jagged(name, tensor)
    axis, order = (2, "batch, heads, seqlen, head_dim")
    if layout == "bshd":
        axis, order = (1, "batch, seqlen, heads, head_dim")
    if tensor.ndim != 4 or tensor._ragged_idx != axis:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected ({order}) with a ragged seqlen, as "
            f"layout is {layout!r}"
        )
    return tensor if layout == "bshd" else tensor.transpose(1, 2)


def _longest(tensor: Any) -> int:
    """Return the largest number of rows from one sequence to the next, with the gap after it."""
    if tensor.lengths() is None:
        return int(tensor._get_max_seqlen())
    return int(tensor.offsets().diff().max())


def _have_equal_lengths(x: Any, y: Any) -> bool:
    """Return whether the sequences of two nested tensors have the same places and lengths."""
    return _are_equal(x.offsets(), y.offsets()) and _are_equal(x.lengths(), y.lengths())


def _are_equal(x: Tensor | None, y: Tensor | None) -> bool:
    # Tensors that are made from one another share these objects, and need no comparison.
    return x is y or (x is not None and y is not None and torch.equal(x, y))


def _nested(rows: Tensor, like: Any, axis: int) -> Any:
    """Return packed rows as a nested tensor with the lengths of another one."""
    return torch.nested.nested_tensor_from_jagged(
        *(rows, like.offsets(), like.lengths()),
        jagged_dim=axis,
        min_seqlen=like._maybe_min_seqlen,
        max_seqlen=like._maybe_max_seqlen,
    )
