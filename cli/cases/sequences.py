"""Arrays that calls on caches and packed sequences take in addition to q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.arrays.rotary import rotated
from cupy_flash.arrays.strided import array_module
from cupy_flash.mods.keywords import Window
from cupy_flash.reference.packed import attention_with_kvcache_reference

from .cases import Case
from .mod_arguments import numpy_dtype
from .quantized import restored

Arrays = tuple[Any, Any, Any]

# Length of the shortest sequence in a long-tailed batch.
SHORTEST = 16
# Base of the rotary embedding's wavelengths (RoFormer, section 3.2.2).
_ROTARY_BASE = 10000.0


def long_tail(batch: int, longest: int, seed: int, *, least: int = 1) -> tuple[int, ...]:
    """Return many short lengths and few long ones; their logarithms are drawn uniformly.

    Parameters
    ----------
    batch
        Number of lengths. If there are several, both ends of the range are among them.
    longest
        Upper end of the range, which begins at 16, or at `longest` if that is smaller.
    seed
        Seed of the draw.
    least
        Lower bound of all lengths.
    """
    shortest = max(least, min(SHORTEST, longest))
    draws = np.random.default_rng(seed).random(batch)
    if batch > 1:
        draws[draws.argmin()], draws[draws.argmax()] = 0.0, 1.0
    return tuple(round(shortest * (longest / shortest) ** draw) for draw in draws.tolist())


def equal_length_case(case: Case) -> Case:
    """Return a batch of equal lengths with about as many rows and FLOPs as a varlen batch.

    Its length is a multiple of 128, so that no tile is partial.
    """
    rows = case.total_keys
    pairs = sum(length * length for length in case.key_lengths)
    seqlen = max(1, round(pairs / max(rows, 1) / 128)) * 128
    return case.as_dense(max(1, round(pairs / seqlen**2)), seqlen, seqlen)


def arrays_of(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Return the arrays other than q, k and v (or the caches), by argument name."""
    if case.is_dense:
        return {}
    if case.kind == "varlen":
        ends = np.cumsum((0, *case.key_lengths), dtype=np.int32)
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    # Another seed than that of q, so that the rows of a cache do not depend on its page size.
    rng = np.random.default_rng([seed, 1])
    new = case.seqlen_q if case.append else 0
    result = {"cache_seqlens": np.asarray(case.key_lengths, np.int32) - np.int32(new)}
    if case.page_size:
        table = rng.permutation(case.batch * case.pages_per_sequence).astype(np.int32)
        result["block_table"] = table.reshape(case.batch, case.pages_per_sequence)
    dtype = numpy_dtype(case.dtype)
    if case.append:
        rows = (case.batch, case.seqlen_q, case.heads_kv)
        result["k"] = rng.standard_normal((*rows, case.head_dim)).astype(dtype)
        result["v"] = rng.standard_normal((*rows, case.head_dim_v)).astype(dtype)
    if case.rotary:
        half = case.head_dim // 2
        wavelengths = _ROTARY_BASE ** (np.arange(half) / half)
        angles = np.arange(case.seqlen_k)[:, None] / wavelengths
        table_dtype = np.float64 if case.dtype == "float64" else np.float32
        result["rotary_cos"] = np.cos(angles).astype(table_dtype)
        result["rotary_sin"] = np.sin(angles).astype(table_dtype)
    return result


@dataclass(frozen=True)
class Head:
    """q, k and v of one query head of one sequence, including the rows that the call appends.

    Attributes
    ----------
    q, k, v
        Arrays of shape (1, seqlen, 1, dim), in the precision of the inputs.
    first_query
        Position of the first query among the keys.
    """

    q: Any
    k: Any
    v: Any
    first_query: int


def sequence_of(
    case: Case,
    arrays: Arrays,
    more: Mapping[str, np.ndarray],
    batch: int,
    heads: slice = slice(None),
    kv_heads: slice = slice(None),
) -> Arrays:
    """Return q, k and v of one sequence, (1, seqlen, heads, dim), before the call appends rows.

    Parameters
    ----------
    case, arrays, more
        Case and arrays of the call. `more` is in host memory; `arrays` may be on the GPU.
    batch
        Index of the sequence.
    heads, kv_heads
        Query heads and KV heads to return.
    """
    q, k, v = arrays
    if case.kind == "varlen":
        first, last = more["cu_seqlens_q"][batch : batch + 2].tolist()
        rows = slice(first, last)
        return q[:, rows, heads], k[:, rows, kv_heads], v[:, rows, kv_heads]
    if case.is_dense:
        q, k, v = (_to_bshd(x, case) for x in arrays)
    k, v = (_keys_or_values(x, case, more, batch, kv_heads) for x in (k, v))
    q = q[batch : batch + 1, :, heads]
    return _dequantized(q, case) if case.is_dense else q, k, v


def head_of(
    case: Case, arrays: Arrays, more: Mapping[str, np.ndarray], batch: int, head: int
) -> Head:
    """Return one query head after appending; `sequence_of` describes the parameters."""
    heads, kv_heads = _slices(case, head)
    q, k, v = sequence_of(case, arrays, more, batch, heads, kv_heads)
    seqlen_q, seqlen_k = case.query_lengths[batch], case.key_lengths[batch]
    if case.append:
        old = seqlen_k - seqlen_q
        new_k, new_v = (more[name][batch : batch + 1, :, kv_heads] for name in ("k", "v"))
        if case.rotary:
            new_k = _rotated(new_k, more, old, advance=True)
            q = _rotated(q, more, old, advance=case.causal or case.mods.window != Window())
        # Copies, because the cache must not be modified.
        k, v = k.copy(), v.copy()
        k[:, old:], v[:, old:] = _like(k, new_k), _like(v, new_v)
    return Head(q, k, v, case.first_query if case.is_dense else seqlen_k - seqlen_q)


def _slices(case: Case, head: int) -> tuple[slice, slice]:
    """Return the slices of one query head and of its KV head."""
    kv_head = head // (case.heads_q // case.heads_kv)
    return slice(head, head + 1), slice(kv_head, kv_head + 1)


def _keys_or_values(
    array: Any, case: Case, more: Mapping[str, np.ndarray], batch: int, heads: slice
) -> Any:
    """Return a sequence's rows of k, v or a cache, (1, seqlen_k, heads, dim), dequantized."""
    seqlen_k = case.key_lengths[batch]
    if case.page_size:
        pages = array[:, :, heads][_like(array, more["block_table"][batch])]
        rows = pages.reshape(1, -1, *pages.shape[2:])[:, :seqlen_k]
    else:
        rows = array[batch : batch + 1, :seqlen_k, heads]
    return _dequantized(rows, case)


def _to_bshd(array: Any, case: Case) -> Any:
    return array.swapaxes(1, 2) if case.layout == "bhsd" else array


def _dequantized(array: Any, case: Case) -> Any:
    return restored(array, numpy_dtype(case.dtype)) if case.cache_dtype else array


def _rotated(x: Any, more: Mapping[str, np.ndarray], first: int, *, advance: bool) -> Any:
    """Apply the rotary embedding to rows (1, seqlen, 1, head_dim), and round to their dtype."""
    cos, sin = (_like(x, more[name]) for name in ("rotary_cos", "rotary_sin"))
    options: dict[str, Any] = {"interleaved": True, "advance": advance, "compute": cos.dtype}
    return rotated(x, cos, sin, np.array([first]), **options).astype(x.dtype)


def _like(array: Any, small: np.ndarray) -> Any:
    """Return `small` in the memory that `array` is in: the host's or the GPU's."""
    return array_module(array).asarray(small)


def appended_reference(
    case: Case,
    arrays: Arrays,
    more: Mapping[str, np.ndarray],
    batch: int,
    head: int,
    placed: Callable[[Any], Any],
    modifications: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Return out (1, seqlen_q, 1, head_dim_v) and lse (1, 1, seqlen_q) after appending, in float64.

    Parameters
    ----------
    case, arrays, more, batch, head
        Parameters as in `head_of`.
    placed
        Function that moves an array to the memory where the reference is computed.
    modifications
        Keyword arguments of this head's modifications, with arrays in that memory.
    """
    heads, kv_heads = _slices(case, head)
    q, k, v = sequence_of(case, arrays, more, batch, heads, kv_heads)
    new_k, new_v = (more[name][batch : batch + 1, :, kv_heads] for name in ("k", "v"))
    result = attention_with_kvcache_reference(
        *(placed(x) for x in (q, k, v)),
        *(placed(_like(q, x)) for x in (new_k, new_v)),
        cache_seqlens=case.key_lengths[batch] - case.seqlen_q,
        rotary_cos=placed(_like(q, more["rotary_cos"])) if case.rotary else None,
        rotary_sin=placed(_like(q, more["rotary_sin"])) if case.rotary else None,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        **modifications,
    )
    return result.out, result.lse


def rows_in_call(
    case: Case, more: Mapping[str, np.ndarray], batch: int, start: int = 0, stop: int | None = None
) -> slice:
    """Return rows `start` to `stop` of a sequence as indices into the call's biases and masks."""
    first = int(more["cu_seqlens_q"][batch]) if case.kind == "varlen" else 0
    return slice(first + start, first + (case.query_lengths[batch] if stop is None else stop))


def rows_of(
    case: Case, array: Any, more: Mapping[str, np.ndarray], batch: int, heads: slice
) -> Any:
    """Return some heads of one sequence, (1, seqlen, heads, dim), of an output or gradient."""
    if case.kind == "varlen":
        return array[None, rows_in_call(case, more, batch), heads]
    return _to_bshd(array, case)[batch : batch + 1, :, heads]


def repeatable(lengths: tuple[int, ...]) -> str:
    """Return lengths in the form that `--lengths` takes."""
    return ",".join(map(str, lengths))
