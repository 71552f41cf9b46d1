"""What calls on caches and packed sequences take besides q, k and v, and what they attend to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.host.rotary import rotated
from cupy_flash.mods.keywords import Window
from cupy_flash.reference.packed import attention_with_kvcache_reference

from .cases import Case
from .mod_arguments import numpy_dtype
from .quantized import restored

Arrays = tuple[Any, Any, Any]

# Of the shortest sequence of a long-tailed batch.
SHORTEST = 16
# The usual base of the rotary embedding's wavelengths (RoFormer, section 3.2.2).
_ROTARY_BASE = 10000.0


def long_tail(batch: int, longest: int, seed: int, *, least: int = 1) -> tuple[int, ...]:
    """Many short lengths and few long ones: their logarithms are spread evenly.

    Parameters
    ----------
    batch
        How many. Of two or more, one is the shortest and one the longest.
    longest
        The range is from 16, or from `longest` where that is less, to this.
    seed
        Of the draw.
    least
        No length is below this.
    """
    shortest = max(least, min(SHORTEST, longest))
    draws = np.random.default_rng(seed).random(batch)
    if batch > 1:
        draws[draws.argmin()], draws[draws.argmax()] = 0.0, 1.0
    return tuple(round(shortest * (longest / shortest) ** draw) for draw in draws.tolist())


def uniform_twin(case: Case) -> Case:
    """A batch of equal lengths with about as many rows and FLOPs as a varlen batch.

    Its length is a multiple of 128: no tile of it is cut.
    """
    rows = case.total_keys
    pairs = sum(length * length for length in case.key_lengths)
    seqlen = max(1, round(pairs / max(rows, 1) / 128)) * 128
    return Case(
        case.dtype,
        max(1, round(pairs / seqlen**2)),
        seqlen,
        seqlen,
        case.heads_q,
        case.heads_kv,
        case.head_dim,
        case.head_dim_v,
        case.causal,
        softmax_scale=case.softmax_scale,
        mods=case.mods,
        direction=case.direction,
    )


def arrays_of(case: Case, seed: int) -> dict[str, np.ndarray]:
    """The arrays besides q, k and v, or the caches, by the names of the call's arguments."""
    if case.is_dense:
        return {}
    if case.kind == "varlen":
        ends = np.cumsum((0, *case.key_lengths), dtype=np.int32)
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    # Not the generator of q: the rows of a cache would depend on how it is paged.
    rng = np.random.default_rng([seed, 1])
    new = case.seqlen_q if case.append else 0
    found = {"cache_seqlens": np.asarray(case.key_lengths, np.int32) - np.int32(new)}
    if case.page_size:
        table = rng.permutation(case.batch * case.pages_per_sequence).astype(np.int32)
        found["block_table"] = table.reshape(case.batch, case.pages_per_sequence)
    dtype = numpy_dtype(case.dtype)
    if case.append:
        rows = (case.batch, case.seqlen_q, case.heads_kv)
        found["k"] = rng.standard_normal((*rows, case.head_dim)).astype(dtype)
        found["v"] = rng.standard_normal((*rows, case.head_dim_v)).astype(dtype)
    if case.rotary:
        half = case.head_dim // 2
        wavelengths = _ROTARY_BASE ** (np.arange(half) / half)
        angles = np.arange(case.seqlen_k)[:, None] / wavelengths
        kind = np.float64 if case.dtype == "float64" else np.float32
        found |= {"rotary_cos": np.cos(angles).astype(kind)}
        found |= {"rotary_sin": np.sin(angles).astype(kind)}
    return found


@dataclass(frozen=True)
class Head:
    """One query head of one sequence, as attention sees it once the step has appended its rows.

    Attributes
    ----------
    q, k, v
        (1, seqlen, 1, dim), in the precision of the inputs.
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
    """q, k and v of one sequence, (1, seqlen, heads, dim), as they are before a step.

    Parameters
    ----------
    case, arrays, more
        The call's, on the host or the GPU; `more` on the host.
    batch
        Which sequence.
    heads, kv_heads
        Which heads of it.
    """
    q, k, v = arrays
    if case.kind == "varlen":
        first, last = more["cu_seqlens_q"][batch : batch + 2].tolist()
        rows = slice(first, last)
        return q[:, rows, heads], k[:, rows, kv_heads], v[:, rows, kv_heads]
    k, v = (_cached(x, case, more, batch, kv_heads) for x in (k, v))
    return q[batch : batch + 1, :, heads], k, v


def head_of(
    case: Case, arrays: Arrays, more: Mapping[str, np.ndarray], batch: int, head: int
) -> Head:
    """One query head of a sequence, as attention sees it; parameters as of `sequence_of`."""
    heads, kv_heads = _slices(case, head)
    q, k, v = sequence_of(case, arrays, more, batch, heads, kv_heads)
    seqlen_q, seqlen_k = case.query_lengths[batch], case.key_lengths[batch]
    if case.append:
        old = seqlen_k - seqlen_q
        new_k, new_v = (more[name][batch : batch + 1, :, kv_heads] for name in ("k", "v"))
        if case.rotary:
            new_k = _rotated(new_k, more, old, advance=True)
            q = _rotated(q, more, old, advance=case.causal or case.mods.window != Window())
        # Copies: the cache is not to be written to.
        k, v = k.copy(), v.copy()
        k[:, old:], v[:, old:] = _like(k, new_k), _like(v, new_v)
    return Head(q, k, v, seqlen_k - seqlen_q)


def _slices(case: Case, head: int) -> tuple[slice, slice]:
    """A query head, and the head of its keys."""
    kv_head = head // (case.heads_q // case.heads_kv)
    return slice(head, head + 1), slice(kv_head, kv_head + 1)


def _cached(
    cache: Any, case: Case, more: Mapping[str, np.ndarray], batch: int, heads: slice
) -> Any:
    """(1, seqlen_k, 1, dim) of a sequence's rows in the cache, or what they stand for."""
    seqlen_k = case.key_lengths[batch]
    if case.page_size:
        pages = cache[:, :, heads][_like(cache, more["block_table"][batch])]
        rows = pages.reshape(1, -1, *pages.shape[2:])[:, :seqlen_k]
    else:
        rows = cache[batch : batch + 1, :seqlen_k, heads]
    return restored(rows, numpy_dtype(case.dtype)) if case.cache_dtype else rows


def _rotated(x: Any, more: Mapping[str, np.ndarray], first: int, *, advance: bool) -> Any:
    """Rows (1, seqlen, 1, head_dim) turned as a kernel does, rounded to their dtype."""
    cos, sin = (_like(x, more[name]) for name in ("rotary_cos", "rotary_sin"))
    turned = rotated(
        x,
        cos,
        sin,
        np.array([first]),
        interleaved=True,
        advance=advance,
        compute=cos.dtype,
    )
    return turned.astype(x.dtype)


def _like(array: Any, small: np.ndarray) -> Any:
    """A small array beside another one, on the host or on the GPU."""
    if isinstance(array, np.ndarray):
        return small
    import cupy

    return cupy.asarray(small)


def appended_reference(
    case: Case,
    arrays: Arrays,
    more: Mapping[str, np.ndarray],
    batch: int,
    head: int,
    placed: Callable[[Any], Any],
    modifications: Mapping[str, Any],
) -> tuple[Any, Any]:
    """out (1, seqlen_q, 1, head_dim_v) and lse (1, 1, seqlen_q) of a step that appends, in float64.

    Parameters
    ----------
    case, arrays, more, batch, head
        As in `head_of`.
    placed
        Puts an array where the reference is computed.
    modifications
        Of this head alone, and there.
    """
    heads, kv_heads = _slices(case, head)
    q, k, v = sequence_of(case, arrays, more, batch, heads, kv_heads)
    new_k, new_v = (more[name][batch : batch + 1, :, kv_heads] for name in ("k", "v"))
    found = attention_with_kvcache_reference(
        *(placed(x) for x in (q, k, v)),
        *(placed(_like(q, x)) for x in (new_k, new_v)),
        cache_seqlens=case.key_lengths[batch] - case.seqlen_q,
        rotary_cos=placed(_like(q, more["rotary_cos"])) if case.rotary else None,
        rotary_sin=placed(_like(q, more["rotary_sin"])) if case.rotary else None,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        **modifications,
    )
    return found.out, found.lse


def rows_in_call(
    case: Case, more: Mapping[str, np.ndarray], batch: int, start: int = 0, stop: int | None = None
) -> slice:
    """Rows `start` to `stop` of a sequence, as biases and masks of the call have them."""
    first = int(more["cu_seqlens_q"][batch]) if case.kind == "varlen" else 0
    return slice(first + start, first + (case.query_lengths[batch] if stop is None else stop))


def rows_of(
    case: Case, array: Any, more: Mapping[str, np.ndarray], batch: int, heads: slice
) -> Any:
    """(1, seqlen, heads, dim): some heads of one sequence, of a result or of what is like one."""
    if case.kind == "varlen":
        return array[None, rows_in_call(case, more, batch), heads]
    bshd = array.swapaxes(1, 2) if case.layout == "bhsd" else array
    return bshd[batch : batch + 1, :, heads]


def repeatable(lengths: tuple[int, ...]) -> str:
    """Lengths as `--lengths` takes them."""
    return ",".join(map(str, lengths))
