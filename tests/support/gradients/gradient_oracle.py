"""Attention and its gradients by the plain formula, in NumPy, without any code of the library.

Let x = scale * q k', t the score after softcap, score function, ALiBi and bias, s the sink of a
head, and P = exp(t - lse), where lse = log(exp(s) + sum exp(t)) over the row's visible keys. Then

    out = (P * R) v                 dv = (P * R)' dout
    dP = dout v' * R                D = rowsum(dout * out) - dlse
    dT = P * (dP - D)               dX = dT * dt/dx
    dq = scale * dX k               dk = scale * dX' q
    dbias = sums of dT              dsink = -sum exp(s - lse) * D

The sums omit masked pairs. A row that attends to no key has out = 0, and lse = -inf or the sink.
Rows that belong to no sequence have out = 0 and lse = -inf. R are the factors of dropout, 0 or
256 / (256 - threshold), and 1 without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Captures = Mapping[str, Array]

# Score functions with hand-written derivatives, and masks


class At(NamedTuple):
    """Pairs of one sequence and head: positions are int64 arrays that broadcast to the scores."""

    b: int
    h: int
    i: Array  # position of the query among the keys, (rows, 1)
    j: Array  # position of the key, (1, keys)


class ScoreFunction(NamedTuple):
    """Functions of a score, its pair and captures: the new score `value`, and its derivatives.

    `slope` is the derivative with respect to the score. For each captured array that has a
    gradient, `by_captures` returns the derivative with respect to the element that a pair reads,
    and the index of that element.
    """

    value: Callable[[Array, At, Captures], Array]
    slope: Callable[[Array, At, Captures], Any]
    by_captures: Callable[[Array, At, Captures], dict[str, tuple[Any, tuple[Any, ...]]]]


def nearest(array: Array, *index: Any) -> tuple[Any, ...]:
    """Return an index clamped to the bounds of an array."""
    return tuple(np.clip(i, 0, n - 1) for i, n in zip(index, array.shape, strict=True))


def element(array: Array, *index: Any) -> Any:
    return array[nearest(array, *index)]


def distance(at: At, like: Array) -> Array:
    return abs(at.i - at.j).astype(like.dtype)


def _no_captures(x: Array, at: At, c: Captures) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    return {}


def _decayed(x: Array, at: At, c: Captures) -> Array:
    return np.exp(-element(c["rate"], at.h) * distance(at, x))


SCORE_FUNCTIONS = {
    "softer": ScoreFunction(
        lambda x, at, c: 20 * np.tanh(x / 20),
        lambda x, at, c: 1 - np.tanh(x / 20) ** 2,
        _no_captures,
    ),
    "square": ScoreFunction(
        lambda x, at, c: x + x * x / 16, lambda x, at, c: 1 + x / 8, _no_captures
    ),
    "logarithm": ScoreFunction(
        lambda x, at, c: np.log1p(x * x), lambda x, at, c: 2 * x / (1 + x * x), _no_captures
    ),
    "documents": ScoreFunction(
        lambda x, at, c: np.where(_same_document(at, c), x, x / 2),
        lambda x, at, c: np.where(_same_document(at, c), x.dtype.type(1), x.dtype.type(0.5)),
        _no_captures,
    ),
    "table": ScoreFunction(
        lambda x, at, c: x + element(c["table"], at.h, at.i - at.j + 8),
        lambda x, at, c: 1,
        lambda x, at, c: {"table": (1, nearest(c["table"], at.h, at.i - at.j + 8))},
    ),
    "gain": ScoreFunction(
        lambda x, at, c: x * element(c["gain"], at.h) + element(c["shift"], at.b, at.j),
        lambda x, at, c: element(c["gain"], at.h),
        lambda x, at, c: {
            "gain": (x, nearest(c["gain"], at.h)),
            "shift": (1, nearest(c["shift"], at.b, at.j)),
        },
    ),
    "distance": ScoreFunction(
        lambda x, at, c: x - element(c["rate"], at.h) * distance(at, x),
        lambda x, at, c: 1,
        lambda x, at, c: {"rate": (-distance(at, x), nearest(c["rate"], at.h))},
    ),
    "decay": ScoreFunction(
        lambda x, at, c: x + _decayed(x, at, c),
        lambda x, at, c: 1,
        lambda x, at, c: {
            "rate": (-distance(at, x) * _decayed(x, at, c), nearest(c["rate"], at.h))
        },
    ),
    "product": ScoreFunction(
        lambda x, at, c: x * element(c["of_head"], at.h) * element(c["of_key"], at.j),
        lambda x, at, c: element(c["of_head"], at.h) * element(c["of_key"], at.j),
        lambda x, at, c: {
            "of_head": (x * element(c["of_key"], at.j), nearest(c["of_head"], at.h)),
            "of_key": (x * element(c["of_head"], at.h), nearest(c["of_key"], at.j)),
        },
    ),
}


def _same_document(at: At, c: Captures) -> Array:
    return element(c["document"], at.b, at.i) == element(c["document"], at.b, at.j)


def _near_in_time(at: At, c: Captures) -> Array:
    # In general a difference of timestamps needs more than 32 bits, but not for these.
    return abs(element(c["time"], at.b, at.i) - element(c["time"], at.b, at.j)) <= 40


MASK_FUNCTIONS: dict[str, Callable[[At, Captures], Array]] = {
    "documents": _same_document,
    "strided": lambda at, c: (at.i - at.j) % 3 == 0,
    "blocks": lambda at, c: (at.i // 16 == at.j // 16) | (at.j < 4),
    "heads": lambda at, c: (at.j >= element(c["start"], at.h)) | (at.i < 0),
    "some rows": lambda at, c: (at.i % 5 != 0) & (at.j >= 0),
    "times": _near_in_time,
}

# Dropout


def random_bytes(at: At, seed: int, offset: int) -> Array:
    """Return the random bytes of pairs whose positions are indices in their sequence."""
    half, word = np.uint64(32), np.uint64(2**32 - 1)
    key = (seed ^ (offset * 0x9E3779B97F4A7C15)) % 2**64
    a, b, c, d = (
        np.array(x, np.uint64)
        for x in np.broadcast_arrays(
            at.i // 16 * 4 + at.i % 8 // 2, at.j // 16 * 4 + at.j % 8 // 2, at.h, at.b
        )
    )
    low, high = key % 2**32, key // 2**32
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (y >> half) ^ b ^ np.uint64(low), y & word, x >> half ^ d, x & word
        c ^= np.uint64(high)
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    words = np.stack([a, b, c, d])
    number = np.broadcast_to(2 * (at.i % 2) + at.j % 2, a.shape)
    chosen = np.take_along_axis(words, number[None], axis=0)[0]
    shift = 8 * (2 * (at.i // 8 % 2) + at.j // 8 % 2)
    return (chosen >> shift.astype(np.uint64)) % np.uint64(256)


# Calls


@dataclass
class OracleCall:
    """Arrays and options of one call, in host memory.

    q, k, v and dout are (batch, seqlen, heads, dim), and dlse is (batch, heads_q, seqlen_q). With
    `cu_seqlens_q` they are packed: (total, heads, dim) and (heads_q, total_q).

    bias and mask have four axes, each with the length of the scores' axis or 1. For packed
    sequences they have three axes, (1 or heads_q, total_q, max_seqlen_k).
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None = None
    causal: bool = False
    scale: float | None = None
    q_offset: int | None = None
    q_offsets: Array | None = None  # q_offset of each sequence, instead of `q_offset`
    window: tuple[int | None, int | None] = (None, None)  # left and right; None for no bound
    prefix_lens: Array | None = None
    seqlens_k: Array | None = None
    softcap: float | None = None
    alibi_slopes: Array | None = None
    bias: Array | None = None
    mask: Array | None = None
    tree_mask: Array | None = None
    sinks: Array | None = None
    dropout: tuple[float, int, int] | None = None  # probability, seed and offset
    score_function: str | None = None  # key of `SCORE_FUNCTIONS`
    captures: dict[str, Array] = field(default_factory=dict)  # arrays that the function reads
    mask_function: str | None = None  # key of `MASK_FUNCTIONS`
    mask_captures: dict[str, Array] = field(default_factory=dict)
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None

    @property
    def inputs(self) -> dict[str, Array]:
        """Arrays that may have gradients, by the names of the gradients."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "bias", "sinks")}
        named |= {f"score_mod.{name}": array for name, array in self.captures.items()}
        return {name: array for name, array in named.items() if array is not None}


class Arithmetic(NamedTuple):
    """Precision and kind of a computation.

    With `magnitudes`, results are sums of absolute values, to which rounding errors are
    proportional. For a log-sum-exp it is the largest absolute score.
    """

    compute: np.dtype[Any]  # dtype of products, sums and functions
    stored: np.dtype[Any]  # dtype that P, dX and out are rounded to before they are multiplied
    magnitudes: bool = False

    def rounded(self, x: Array) -> Array:
        return x.astype(self.stored).astype(self.compute)


def exact(dtype: Any) -> Arithmetic:
    """Return the oracle's arithmetic: float64, and long double to judge float64 calls."""
    compute = np.dtype(np.longdouble if dtype == np.float64 else np.float64)
    return Arithmetic(compute, compute)


def naive(dtype: Any) -> Arithmetic:
    """Return the naive formula's arithmetic: float32 or float64, with arrays stored in `dtype`."""
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return Arithmetic(compute, np.dtype(dtype))


SIZES = Arithmetic(np.dtype(np.float64), np.dtype(np.float64), magnitudes=True)


class Sequence(NamedTuple):
    """One sequence: indices of its rows and keys, and the position of its first query."""

    b: int
    rows: tuple[Any, ...]  # into q, out and dout
    keys: tuple[Any, ...]  # into k and v
    seqlen_q: int
    seqlen_k: int
    q_offset: int
    first_row: int  # in the row axis of bias and mask

    def of_query(self, h: int) -> tuple[Any, ...]:
        """Return the index of a head's rows in q, out and dout."""
        return (*self.rows, ..., h, slice(None))

    def of_key(self, h: int) -> tuple[Any, ...]:
        """Return the index of a KV head's rows in k and v."""
        return (*self.keys, h, slice(None))

    def of_lse(self, h: int) -> tuple[Any, ...]:
        """Return the index of a head's rows in lse and dlse."""
        return (h, *self.rows) if isinstance(self.rows[0], slice) else (self.b, h)


def position_of_first(call: OracleCall, b: int, seqlen_q: int, seqlen_k: int) -> int:
    """Return the position of the first query of sequence b among its keys."""
    if call.q_offsets is not None:
        return int(call.q_offsets[b])
    return seqlen_k - seqlen_q if call.q_offset is None else call.q_offset


def sequences(call: OracleCall) -> Iterator[Sequence]:
    if call.cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = *call.q.shape[:2], call.k.shape[1]
        for b in range(batch):
            offset = position_of_first(call, b, seqlen_q, seqlen_k)
            keys = seqlen_k if call.seqlens_k is None else int(call.seqlens_k[b])
            own = b, slice(0, keys)
            yield Sequence(b, (b,), own, seqlen_q, keys, offset, 0)
        return
    assert call.cu_seqlens_k is not None
    for b in range(len(call.cu_seqlens_q) - 1):
        begin, end = (int(n) for n in call.cu_seqlens_q[b : b + 2])
        first, stop = (int(n) for n in call.cu_seqlens_k[b : b + 2])
        keys = stop - first if call.seqused_k is None else int(call.seqused_k[b])
        rows, own = (slice(begin, end),), (slice(first, first + keys),)
        offset = position_of_first(call, b, end - begin, keys)
        yield Sequence(b, rows, own, end - begin, keys, offset, begin)


class Results(NamedTuple):
    """Results of a call: output, log-sum-exp, and gradients by the names of the inputs."""

    out: Array
    lse: Array
    gradients: dict[str, Array]

    def by_name(self) -> dict[str, Array]:
        return {"out": self.out, "lse": self.lse, **self.gradients}


def attention(
    call: OracleCall, arithmetic: Arithmetic, given: tuple[Array, Array] | None = None
) -> Results:
    """Compute the output, log-sum-exp and all gradients in `arithmetic.compute`.

    As in the functions under test, gradients are computed from `given`, a rounded output and
    log-sum-exp. By default, those of this function are used.
    """
    compute = arithmetic.compute
    heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
    group = heads_q // heads_kv
    out = np.zeros((*call.q.shape[:-1], call.v.shape[-1]), compute)
    lse = np.full(lse_shape(call), -np.inf, compute)
    grads = {n: np.zeros(x.shape, compute) for n, x in call.inputs.items() if x.dtype.kind != "i"}
    for sequence in sequences(call):
        for h in range(heads_q):
            one, of_lse = _Head(call, sequence, h, arithmetic), sequence.of_lse(h)
            of_query, of_key = sequence.of_query(h), sequence.of_key(h // group)
            q, dout = (a[of_query].astype(compute) for a in (call.q, call.dout))
            k, v = (a[of_key].astype(compute) for a in (call.k, call.v))
            dlse = None if call.dlse is None else call.dlse[of_lse].astype(compute)
            own = None
            if given is not None:
                own = given[0][of_query].astype(compute), given[1][of_lse].astype(compute)
            found = one.run(q, k, v, dout, dlse, own)
            out[of_query], lse[of_lse] = found.out, found.lse
            grads["q"][of_query] += found.dq
            grads["k"][of_key] += found.dk
            grads["v"][of_key] += found.dv
            if call.bias is not None:
                one.add_to_bias(grads["bias"], found.dt)
            if call.sinks is not None:
                grads["sinks"][h] += found.dsink
            for name, (by, index) in found.by_captures.items():
                weights = np.broadcast_to(by * found.dt, found.dt.shape)
                np.add.at(grads[f"score_mod.{name}"], index, _summed(weights, index))
    return Results(out, lse, grads)


def lse_shape(call: OracleCall) -> tuple[int, ...]:
    *outer, seqlen, heads, _ = call.q.shape
    return (*outer, heads, seqlen)


def unseen(call: OracleCall) -> tuple[Array, Array]:
    """Return which rows have no visible key, of `lse_shape`, and which keys no row attends to."""
    blind, hidden = np.ones(lse_shape(call), bool), np.ones(call.k.shape[:-1], bool)
    heads_q, heads_kv = call.q.shape[-2], call.k.shape[-2]
    for sequence in sequences(call):
        for h in range(heads_q):
            seen = _Head(call, sequence, h, exact(np.float32)).seen()
            blind[sequence.of_lse(h)] = ~seen.any(axis=1)
            hidden[sequence.of_key(h // (heads_q // heads_kv))[:-1]] &= ~seen.any(axis=0)
    return blind, hidden


def _summed(weights: Array, index: tuple[Any, ...]) -> Array:
    """Return weights summed to the shape of an index, for `np.add.at`."""
    shape = np.broadcast_shapes(*(np.shape(i) for i in index))
    of_all = (1,) * (weights.ndim - len(shape)) + shape
    axes = tuple(axis for axis in range(weights.ndim) if of_all[axis] == 1)
    return weights.sum(axis=axes, keepdims=True).reshape(shape)


class _OfHead(NamedTuple):
    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dt: Array
    dsink: Any
    by_captures: dict[str, tuple[Any, tuple[Any, ...]]]


@dataclass
class _Head:
    """One query head of one sequence."""

    call: OracleCall
    sequence: Sequence
    h: int
    arithmetic: Arithmetic

    @property
    def at(self) -> At:
        rows, keys = np.arange(self.sequence.seqlen_q), np.arange(self.sequence.seqlen_k)
        i = rows + self.sequence.q_offset
        return At(self.sequence.b, self.h, i[:, None], keys[None])

    def of_pairs(self, array: Array) -> Array:
        """Return the part of a bias or a mask for these pairs; each axis has their length or 1."""
        b, seqlen_q, seqlen_k = self.sequence.b, self.sequence.seqlen_q, self.sequence.seqlen_k
        part = array if array.ndim == 3 else array[b if array.shape[0] > 1 else 0]
        part = part[self.h if part.shape[0] > 1 else 0]
        if part.shape[0] > 1 or array.ndim == 3:
            part = part[self.sequence.first_row : self.sequence.first_row + seqlen_q]
        return part[:, :seqlen_k] if part.shape[1] > 1 else part

    def add_to_bias(self, total: Array, dt: Array) -> None:
        part = self.of_pairs(total)
        axes = tuple(n for n in (0, 1) if part.shape[n] == 1)
        part += dt.sum(axis=axes, keepdims=True)

    def seen(self) -> Array:
        """Return which pairs are visible, shape (rows, keys)."""
        call, at, b = self.call, self.at, self.sequence.b
        left, right = call.window
        seen = np.ones((self.sequence.seqlen_q, self.sequence.seqlen_k), bool)
        if call.causal:
            seen &= at.j <= at.i
        if left is not None:
            seen &= at.j >= at.i - left
        if right is not None:
            seen &= at.j <= at.i + right
        if call.prefix_lens is not None:
            seen |= at.j < int(call.prefix_lens[b])
        if call.mask is not None:
            seen &= self.of_pairs(call.mask)
        if call.tree_mask is not None:
            node = at.j - self.sequence.q_offset
            words = call.tree_mask[b][:, None]
            bit = (words >> np.clip(node, 0, 63).astype(np.uint64)) & np.uint64(1)
            seen &= (node < 0) | ((node < 64) & (bit == 1))
        if call.mask_function is not None:
            seen &= MASK_FUNCTIONS[call.mask_function](at, call.mask_captures)
        return seen

    def changed(self, x: Array) -> tuple[Array, Array, dict[str, tuple[Any, tuple[Any, ...]]]]:
        """Return new scores, and their derivatives with respect to the old scores and captures."""
        call, at, real = self.call, self.at, x.dtype.type
        t, slope, by_captures = x, np.ones_like(x), {}
        if call.softcap is not None:
            cap = real(call.softcap)
            tanh = np.tanh(x / cap)
            t, slope = cap * tanh, 1 - tanh * tanh
        if call.score_function is not None:
            function = SCORE_FUNCTIONS[call.score_function]
            captures = {
                name: array if array.dtype.kind == "i" else array.astype(x.dtype)
                for name, array in call.captures.items()
            }
            slope = slope * function.slope(t, at, captures)
            by_captures = function.by_captures(t, at, captures)
            t = function.value(t, at, captures)
        if call.alibi_slopes is not None:
            slopes = call.alibi_slopes
            of_head = slopes[self.h] if slopes.ndim == 1 else slopes[at.b, self.h]
            t = t - real(of_head) * distance(at, x)
        if call.bias is not None:
            t = t + self.of_pairs(call.bias).astype(x.dtype)
        return t, slope, by_captures

    def factors(self, dtype: np.dtype[Any]) -> Array:
        """Return the factors of dropout on the weights, shape (rows, keys)."""
        shape = self.sequence.seqlen_q, self.sequence.seqlen_k
        if self.call.dropout is None:
            return np.ones(shape, dtype)
        p, seed, offset = self.call.dropout
        threshold = min(max(round(256 * p), 1), 255)
        rows, keys = np.arange(shape[0])[:, None], np.arange(shape[1])[None]
        kept = random_bytes(At(self.sequence.b, self.h, rows, keys), seed, offset) >= threshold
        return np.where(kept, dtype.type(256) / dtype.type(256 - threshold), dtype.type(0))

    def run(
        self, q: Array, k: Array, v: Array, dout: Array, dlse: Array | None, given: Any
    ) -> _OfHead:
        compute, rounded, scale = self.arithmetic.compute, self.arithmetic.rounded, self.call.scale
        scale = compute.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        sink = compute.type(-np.inf if self.call.sinks is None else self.call.sinks[self.h])
        seen = self.seen()
        sees, is_seen = seen.any(axis=1), seen.any(axis=0)
        # These rows are replaced by 0, not multiplied by 0, because they may hold NaN.
        q, dout = (np.where(sees[:, None], a, 0) for a in (q, dout))
        k, v = (np.where(is_seen[:, None], a, 0) for a in (k, v))
        x = scale * (q @ k.T)
        t, slope, by_captures = self.changed(x)
        with np.errstate(invalid="ignore", divide="ignore"):
            t = np.where(seen, t, -np.inf)
            base = np.maximum(t.max(axis=1, initial=-np.inf), sink)
            base = np.where(base == -np.inf, 0, base)
            p = np.exp(t - base[:, None])
            total = p.sum(axis=1) + np.exp(sink - base)
            p = p / np.where(total == 0, 1, total)[:, None]
            lse = base + np.log(total)
        factors = self.factors(compute)
        out = rounded(rounded(p * factors) @ v)
        if given is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                p = np.where(seen, np.exp(t - given[1][:, None]), 0)
        size: Callable[[Any], Any] = abs if self.arithmetic.magnitudes else lambda x: x
        minus = np.add if self.arithmetic.magnitudes else np.subtract
        q, k, v, dout, scale = map(size, (q, k, v, dout, scale))
        d = (dout * size(out if given is None else given[0])).sum(axis=1)
        if dlse is not None:
            d = minus(d, size(dlse))
        dt = np.where(seen, p * minus(dout @ v.T * factors, d[:, None]), 0)
        dx = rounded(np.where(seen, dt * size(slope), 0))
        dsink = compute.type(0)
        if sink != -np.inf:
            dsink = size(-(np.exp(sink - (lse if given is None else given[1])) * d).sum())
        if self.arithmetic.magnitudes:
            # A log-sum-exp has the errors of the scores. Here q and k are absolute values.
            scores = scale * (q @ k.T) + abs(t)
            out, lse = (p * factors) @ v, np.where(seen, scores, 0).max(axis=1, initial=0)
        by_captures = {name: (size(by), index) for name, (by, index) in by_captures.items()}
        dq, dk, dv = scale * (dx @ k), scale * (dx.T @ q), rounded(p * factors).T @ dout
        return _OfHead(out, lse, dq, dk, dv, dt, dsink, by_captures)
