"""Row statistics of random calls, and their comparison with the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash import (
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
)
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu.gpu_support import tanh_error

#: Arguments that request all results per row.
ALL = {"return_lse": True, "return_max_logits": True, "return_entropy": True}
#: Arguments of a call that are not modifications.
_PLAIN = {
    *("q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens"),
    *("block_table", "causal", "softmax_scale", "max_seqlen_q", "max_seqlen_k"),
}
Rows = dict[str, np.ndarray]


def without_modifications(call: ModifiedCall) -> ModifiedCall:
    """Return the call without its modifications; padded sequences become dense ones."""
    arrays = {name: x for name, x in call.arrays.items() if name in _PLAIN}
    options = {name: x for name, x in call.options.items() if name in _PLAIN}
    kind = "dense" if call.kind == "padded" else call.kind
    return ModifiedCall(kind, call.dtype, arrays, options)


def run(call: ModifiedCall, xp: Any, **how: Any) -> Rows:
    """Return all results of the call by name, in host memory."""
    positional, named = call.given(xp)
    q, v = call.arrays["q"], call.arrays.get("v", call.arrays.get("v_cache"))
    assert v is not None
    out = xp.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    results = call.function(*positional, **named, **ALL, out=out, **how)
    assert results[0] is out
    names = ("out", "lse", "max_logits", "entropy")
    return {name: x if xp is np else xp.asnumpy(x) for name, x in zip(names, results, strict=True)}


def truth(call: ModifiedCall) -> Rows:
    """Return the results per row of the float64 reference."""
    positional, named = call.given(np)
    for name in ("num_splits", "batch_invariant"):
        named.pop(name, None)
    statistics = {"return_max_logits": True, "return_entropy": True}
    if call.kind in ("dense", "padded"):
        rows = attention_reference(*positional, **named, **ALL)[1:]
    elif call.kind == "varlen":
        rows = attention_varlen_reference(*positional, **named, **statistics)[1:]
    else:
        result, *of_rows = attention_with_kvcache_reference(*positional, **named, **statistics)
        rows = (result.lse, *of_rows)
    return dict(zip(("lse", "max_logits", "entropy"), rows, strict=True))


def check(call: ModifiedCall, xp: Any, **how: Any) -> Rows:
    """Fail unless the statistics of the call agree with the reference; return its results."""
    found = run(call, xp, **how)
    compare(found, truth(call), str(call), cap=cap_error(call))
    return found


def cap_error(call: ModifiedCall) -> float:
    """Return the largest error of a score that a softcap causes."""
    return tanh_error(DTYPES[call.dtype], call.caps())


def compare(found: Rows, expected: Rows, what: str, *, cap: float = 0.0, more: float = 0.0) -> None:
    """Fail unless statistics agree with those of the reference.

    The bound is that of the log-sum-exp in `ModifiedCall.compare`: a score has the same error.
    `cap` is the error of a softcap, and `more` that of scores of 8-bit products.
    """
    real = np.finfo(found["lse"].dtype)
    for name in ("max_logits", "entropy"):
        x, true = found[name], expected[name]
        assert x.dtype == found["lse"].dtype, f"{name} has dtype {x.dtype}: {what}"
        assert x.shape == found["lse"].shape, f"{name} has shape {x.shape}: {what}"
        # Kernels store scores times log2(e), so scores below this bound count as equal to it.
        least = -np.log(2) * float(real.max)
        x, true = (np.where(np.isfinite(y), np.maximum(y, least), y) for y in (x, true))
        finite = np.isfinite(true)
        np.testing.assert_array_equal(x[~finite], true[~finite], f"{name} of {what}")
        numbers = (np.abs(x[np.isfinite(x)]).max(initial=0) for x in (expected["lse"], true))
        largest = max(30.0, *numbers)
        tolerance = 64 * real.eps * largest + cap + more
        if name == "entropy":
            # A relative error e of the weights changes the entropy by up to e times their spread.
            tolerance += 8 * (cap + more)
        off = np.abs(x[finite].astype(np.float64) - true[finite]).max(initial=0)
        assert off <= tolerance, f"{name} off by {off:.3g}, allowed {tolerance:.3g}: {what}"
