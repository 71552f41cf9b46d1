"""Checks of the shapes of modifications' arrays, and of which modifications go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import array_module, require_shape
from cupy_flash.mods.keywords import Window

MAX_TREE_QUERIES = 64


class Sizes(NamedTuple):
    """Sizes of a call that its modifications must fit; seqlen_k is the capacity of a KV cache."""

    dtype: str
    batch: int
    heads_q: int
    seqlen_q: int
    seqlen_k: int
    total_q: int | None = None  # number of rows of packed queries


def fitted(arrays: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return checked arrays by name; biases and masks become views of the shape of all scores.

    The captured arrays of user functions are returned unchanged.

    Raises
    ------
    ValueError
        If an array has a wrong shape.
    """
    batch, heads_q, seqlen_q = sizes.batch, sizes.heads_q, sizes.seqlen_q
    of_sequences = (batch,), "one for each sequence"
    of_heads = (heads_q,), "one for each query head"
    checks = {
        "alibi_slopes": of_heads,
        "sinks": of_heads,
        "prefix_lens": of_sequences,
        "tree_mask": ((batch, seqlen_q), "64 bits for each query"),
        "seqlens_k": of_sequences,
        "q_offset": of_sequences,
        "seqused_q": of_sequences,
        "cache_leftpad": of_sequences,
        "dropout_seed": ((2,), "the seed and the offset"),
    }
    result = dict(arrays)
    for name, array in arrays.items():
        if name in ("bias", "mask"):
            result[name] = _broadcast(name, array, sizes)
        elif name == "alibi_slopes" and array.ndim == 2:
            expected = "one for each sequence and query head; one for each head is (heads_q,)"
            require_shape(name, array, (batch, heads_q), expected)
        elif name in checks:
            require_shape(name, array, *checks[name])
    if "tree_mask" in result and seqlen_q > MAX_TREE_QUERIES:
        raise ValueError(
            f"tree_mask is for at most {MAX_TREE_QUERIES} queries per sequence, and this call has "
            f"{seqlen_q}; pass mask or mask_mod"
        )
    return result


def _broadcast(name: str, array: Any, sizes: Sizes) -> Any:
    packed = sizes.total_q is not None
    shape: tuple[int, ...] = (sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k)
    if sizes.total_q is not None:
        shape = (sizes.heads_q, sizes.total_q, sizes.seqlen_k)
    try:
        return array_module(array).broadcast_to(array, shape)
    except ValueError:
        axes = "heads_q, total_q, max_seqlen_k" if packed else "batch, heads_q, seqlen_q, seqlen_k"
        # Most libraries use this shape for padded keys.
        is_of_keys = not packed and tuple(array.shape) == (sizes.batch, sizes.seqlen_k)
        instead = f"; pass {name}[:, None, None]" if is_of_keys else ""
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; expected one that broadcasts to {shape}, "
            f"({axes}){instead}"
        ) from None


def require_limit(window: Window, *, causal: bool) -> None:
    """Raise ValueError if prefix_lens have no effect, without a causal mask or a window."""
    if not causal and window == Window():
        raise ValueError(
            "prefix_lens has no effect without a causal mask or a window; pass causal=True or "
            "window_size, or leave prefix_lens out"
        )


# Arguments with lengths that only one kind of batch has: the kind, its description, and advice for
# calls of the other kinds.
_SINGLE_KIND_LENGTHS: dict[str, tuple[str, str, dict[str, str]]] = {
    "seqlens_k": (
        "dense",
        "batches of equal lengths",
        {"varlen": "; pass seqused_k", "kvcache": "; pass cache_seqlens"},
    ),
    "seqused_q": (
        "varlen",
        "packed sequences",
        {"dense": "; pass mask_mod", "kvcache": "; pass mask_mod"},
    ),
    "cache_leftpad": (
        "kvcache",
        "KV caches",
        {"dense": "; pass mask", "varlen": "; pass mask_mod"},
    ),
}


def refuse_other_lengths(given: Callable[[str], Any], kind: str) -> None:
    """Raise ValueError for lengths that only calls of another kind have.

    `given` returns an argument of the call by name, or None if it is absent. `kind` is "dense",
    "varlen" or "kvcache".
    """
    for name, (own_kind, meaning, instead) in _SINGLE_KIND_LENGTHS.items():
        if kind != own_kind and given(name) is not None:
            raise ValueError(f"{name} is for {meaning}{instead.get(kind, '')}")
