"""Calls of attention with random functions, and their true results.

Queries and keys are small integers, and the scale is a power of two. So every score, and every
decision of a function, is exact. Pairs that the evaluator cannot decide are masked by an additional
mask array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash import flash_attention, flash_attention_backward
from cupy_flash.reference.dense import error_bound, max_error
from support.calls.modified_calls import DTYPES
from support.mods.function_oracle import REAL, Expr, Oracle
from support.mods.function_runs import modification
from support.mods.random_functions import Function, random_function

SCALE = 0.125
HEAD_DIM = 64
# If the score errors of a row exceed this, only finiteness of the row is checked.
_VAGUE = 0.1
_MOST_OPEN = 0.3


@dataclass
class FunctionCall:
    """Call of attention with a random function, a mask or a score function."""

    function: Function
    arrays: dict[str, np.ndarray]  # q, k, v and dout of one sequence, (rows, heads, head_dim)
    q_offset: int  # position of the first query
    scores: np.ndarray  # true scores, float64 (heads, seqlen_q, seqlen_k)
    errors: np.ndarray  # bounds of the errors of a kernel's scores
    seen: np.ndarray  # pairs that are visible and decided
    closed: np.ndarray  # pairs that are decided; the mask array hides all others

    def __str__(self) -> str:
        shapes = {name: x.shape for name, x in self.arrays.items()}
        return f"{self.function}{shapes}, q_offset {self.q_offset}"

    # ---- True results

    @property
    def row_errors(self) -> np.ndarray:
        """Largest error bound among those scores of a row that contribute to its output."""
        scores = np.where(self.seen, self.scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        counts = self.seen & (scores + self.errors >= top - 60)
        return np.where(counts, self.errors, 0).max(-1, initial=0)

    def formula(self, dtype: Any, real: Any) -> tuple[np.ndarray, ...]:
        """Return probabilities, output (rows, heads, head_dim) and log-sum-exp by the formula."""
        scores = np.where(self.seen, self.scores, -np.inf).astype(real)
        top = scores.max(-1, keepdims=True)
        # Differences of scores near the ends of the range overflow to -inf, whose weight is 0.
        with np.errstate(all="ignore"):
            weights = np.exp(scores - np.where(np.isfinite(top), top, 0)).astype(real)
            total = weights.sum(-1, keepdims=True)
            p = np.where(total > 0, weights / total, 0).astype(dtype).astype(real)
            lse = (top + np.log(total))[..., 0]
        out = np.einsum("hij,jhd->ihd", p, self.arrays["v"].astype(real)).astype(dtype)
        return p, out, lse

    # ---- Calls

    def options(self, xp: Any) -> dict[str, Any]:
        captured = {
            name: xp.asarray(x) if isinstance(x, np.ndarray) and xp is not np else x
            for name, x in self.function.captures.items()
        }
        made = modification(self.function, captured)
        options: dict[str, Any] = {
            "softmax_scale": SCALE,
            "q_offset": self.q_offset,
            "mask_mod" if self.function.kind == "mask" else "score_mod": made,
        }
        if not self.closed.all():
            options["mask"] = xp.asarray(np.ascontiguousarray(self.closed[None]))
        return options

    def check(self, xp: Any, family: str | None = None, backward: str | None = None) -> None:
        """Call forward and backward, and compare with the true results."""
        q, k, v = (xp.asarray(self.arrays[name][None]) for name in "qkv")
        options = self.options(xp)
        poisoned = xp.full(q.shape, np.nan, q.dtype)
        out, lse = flash_attention(q, k, v, **options, return_lse=True, out=poisoned, family=family)
        self._check_forward(*(np.asarray(_host(x))[0] for x in (out, lse)))
        dout = self.dout()
        gradients = flash_attention_backward(
            xp.asarray(dout[None]), q, k, v, out, lse, **options, family=backward
        )
        dq, dk, dv = (np.asarray(_host(x))[0] for x in gradients[:3])
        self._check_dv(dv, dout)
        if self.function.kind == "mask":
            self._check_dq_and_dk(dq, dk, dout)

    def _check_forward(self, out: np.ndarray, lse: np.ndarray) -> None:
        dtype = DTYPES[self.function.inputs]
        _, right, right_lse = self.formula(np.float64, np.float64)
        _, naive, _ = self.formula(dtype, self.function.real)
        errors = self.row_errors
        seen = np.isfinite(right_lse)
        assert np.array_equal(np.isfinite(lse), seen), f"rows that see nothing: {self}"
        assert (lse[~seen] == -np.inf).all(), f"lse of rows that see nothing: {self}"
        rows = np.swapaxes(seen, 0, 1)
        assert not out[~rows].any(), f"output of rows that see nothing: {self}"
        assert np.isfinite(out.astype(np.float64)).all(), f"output is not finite: {self}"
        clear = errors <= _VAGUE
        tolerance = 64 * np.finfo(lse.dtype).eps * np.maximum(30, np.abs(right_lse)) + errors
        off = np.abs(np.where(seen, lse.astype(np.float64), 0) - np.where(seen, right_lse, 0))
        wrong = clear & seen & ~(off <= tolerance)
        assert not wrong.any(), f"lse of {wrong.sum()} rows, by {off[wrong].max():.3g}: {self}"
        bound = error_bound(naive, right, dtype, lse=np.where(clear & seen, right_lse, 0))
        size = np.abs(self.arrays["v"].astype(np.float64)).max()
        allowed = bound + 4 * np.where(clear, errors, np.inf).T[..., None] * size
        # For any weights, the output of a row is within the range of the values.
        allowed = np.where(np.isnan(allowed), bound, np.minimum(allowed, 2 * size))
        off = np.abs(out.astype(np.float64) - right)
        wrong = ~(off <= allowed)
        assert not wrong.any(), (
            f"{wrong.any(-1).sum()} rows of out, by {off.max():.3g}, allowed {bound:.3g}: {self}"
        )

    def dout(self) -> np.ndarray:
        """Return the gradient of the output; 0 in rows whose score errors exceed `_VAGUE`."""
        vague = (self.row_errors > _VAGUE).T[..., None]
        return np.where(vague, 0, self.arrays["dout"]).astype(self.arrays["dout"].dtype)

    def _check_dv(self, dv: np.ndarray, dout: np.ndarray) -> None:
        dtype = DTYPES[self.function.inputs]
        p, _, lse = self.formula(np.float64, np.float64)
        rounded, *_ = self.formula(dtype, self.function.real)
        wide = dout.astype(np.float64)
        right = np.einsum("hij,ihd->jhd", p, wide)
        real = self.function.real
        naive = np.einsum("hij,ihd->jhd", rounded, dout.astype(real)).astype(dtype)
        errors = np.minimum(self.row_errors, _VAGUE)
        carried = 4 * np.einsum("hij,hi,ihd->jhd", p, errors, np.abs(wide))
        clear = np.where(self.row_errors <= _VAGUE, lse, 0)
        allowed = error_bound(naive, right, dtype, lse=clear) + carried
        off = np.abs(dv.astype(np.float64) - right)
        assert (off <= allowed).all(), (
            f"dv of {(~(off <= allowed)).any(-1).sum()} keys, by {off.max():.3g}, allowed "
            f"{allowed.min():.3g} (dv itself {max_error(dv, right):.3g}): {self}"
        )
        # Keys that no query attends to have gradients of exactly 0.
        unseen = ~self.seen.any(-2).T
        assert not dv[unseen].any(), f"dv of keys that no query sees: {self}"

    def _check_dq_and_dk(self, dq: np.ndarray, dk: np.ndarray, dout: np.ndarray) -> None:
        """Compare dq and dk of a call with a mask, for which no derivative is needed."""
        dtype = DTYPES[self.function.inputs]
        _, _, lse = self.formula(np.float64, np.float64)
        right = self._mask_gradients(dout, np.float64, np.float64)
        naive = self._mask_gradients(dout, dtype, self.function.real)
        for name, found, exact, rounded in zip(("dq", "dk"), (dq, dk), right, naive, strict=True):
            allowed = error_bound(rounded, exact, dtype, lse=lse)
            off = np.abs(found.astype(np.float64) - exact)
            assert (off <= allowed).all(), (
                f"{name} of {(~(off <= allowed)).any(-1).sum()} rows, by {off.max():.3g}, allowed "
                f"{allowed:.3g}: {self}"
            )
        # The output of a row with one visible key does not depend on its score.
        alone = (self.seen.sum(-1) <= 1).T
        assert not dq[alone].any(), f"dq of rows that see one key or none: {self}"
        unseen = ~(self.seen & (self.seen.sum(-1, keepdims=True) > 1)).any(-2).T
        assert not dk[unseen].any(), f"dk of keys that no query sees among others: {self}"

    def _mask_gradients(self, dout: np.ndarray, dtype: Any, real: Any) -> tuple[Any, Any]:
        """Return dq and dk by the plain formula, in the precision of `real`."""
        p, out, _ = self.formula(dtype, real)
        q, k, v = (self.arrays[name].astype(real) for name in "qkv")
        wide = dout.astype(real)
        dp = np.einsum("ihd,jhd->hij", wide, v)
        delta = np.einsum("ihd,ihd->hi", wide, out.astype(real))
        ds = (p * (dp - delta[..., None])).astype(dtype).astype(real)
        dq, dk = np.einsum("hij,jhd->ihd", ds, k), np.einsum("hij,ihd->jhd", ds, q)
        return (SCALE * dq).astype(dtype), (SCALE * dk).astype(dtype)


def _host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def function_calls(seed: int, inputs: str | None = None) -> Iterator[FunctionCall]:
    """Yield calls with random functions endlessly, except those with too many undecided pairs.

    `inputs` is the dtype of queries and keys; by default that of each function.
    """
    for number in itertools.count(seed * 100_000):
        call = _call(random_function(number, inputs=inputs))
        if call is not None:
            yield call


def _call(function: Function) -> FunctionCall | None:
    rng = np.random.default_rng([47, function.number])
    dtype = DTYPES[function.inputs]
    heads = int(rng.integers(1, 3))
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(70, 201, 2))
    shapes = {"q": seqlen_q, "k": seqlen_k, "v": seqlen_k, "dout": seqlen_q}
    arrays = {n: rng.standard_normal((x, heads, HEAD_DIM)).astype(dtype) for n, x in shapes.items()}
    for name in "qk":
        arrays[name] = rng.integers(-1, 2, arrays[name].shape).astype(dtype)
    if function.kind == "mask" and rng.integers(2):
        # With queries of 0 the log-sum-exp is the logarithm of the number of visible keys.
        arrays["q"] = np.zeros_like(arrays["q"])
    q_offset = int(rng.choice([0, seqlen_k - seqlen_q, 17, 1000, 2**24 - 50, 2**30 - 1024]))
    q, k = (arrays[name].astype(np.float64) for name in "qk")
    plain = SCALE * np.einsum("ihd,jhd->hij", q, k)
    zero = np.int32(0)
    symbols = {
        "b": zero,
        "h": np.arange(heads, dtype=np.int32)[:, None, None],
        "i": np.arange(seqlen_q, dtype=np.int32)[:, None] + np.int32(q_offset),
        "j": np.arange(seqlen_k, dtype=np.int32),
        "q_start": zero,
        "k_start": zero,
        "score": plain.astype(function.real),
    }
    root = function.root
    if function.kind == "score" and root.type != REAL:
        root = Expr("astype", REAL, (root,))
    found = Oracle(symbols, function.captures, function.real, function.inputs).value(root)
    v, e, s = (np.broadcast_to(x, plain.shape) for x in (found.v, found.e, found.s))
    if function.kind == "mask":
        closed, seen, scores, errors = e == 0, v, plain, np.zeros_like(plain)
    else:
        v = v.astype(np.float64)
        closed = np.isfinite(s) & (v < np.inf)
        unit = 4 * np.finfo(function.real).eps
        scores, seen = np.where(closed, v, 0), v > -np.inf
        errors = np.where(closed & seen, s + unit * np.abs(scores), 0)
    if closed.mean() < 1 - _MOST_OPEN:
        return None
    return FunctionCall(function, arrays, q_offset, scores, errors, seen & closed, closed)
