"""How far gradients may be off: the error rule, asserted of all gradients of a call by name.

The error of a gradient g is allowed to be, with maxima over one sequence (short sequences have
large gradients: what they allow would hide errors in those of long ones),

    2 max|naive - g| + 4 ulp(max|g|) + (4 + 2 max|lse|) ulp'(max S)
        + n/3 ulp'(max S), of n equal addends + errors of scores

- *Twice the naive error*, the house rule: P, dX, the output and the result rounded to the inputs'
  dtype, as separate kernels would have it. Another order of sums rounds the same numbers.
- *4 ulps* of the gradient's dtype, or of q's if that is coarser: see `error_bound`. One of them is
  for the rounding of a result where the naive one happens to be exact.
- *Ulps of S*, what the gradient would be if nothing cancelled, in the precision that is computed
  in. A kernel's P = exp(t - lse) takes an lse that is rounded by half an ulp, and a t that is as
  large is too: an error of some |lse| ulp' in proportion to P, which the naive formula, that
  divides by its own sum, need not have. And dP - D loses an ulp' or so of |dP| + |D|, which is
  everything where a query sees a single key.
- *Equal addends*, where all scores are 0 and all rows of dout are one: what an addition rounds off
  is then the same as long as the sum's exponent is. Of n additions half come with the last
  exponent, half an ulp off at most, a quarter with the one before, whose ulp is half of that, and
  so on: n/3 ulp'(max S). Naive sums of few parts each show less of it.
- *Errors of scores*, see `GradientCall.score_errors`: each pair's P and dT are off by as much of
  themselves as its score is off, the slope besides by what that is; summed up as if nothing
  cancelled. For in float64 the naive result has the reference's own errors, and shows none of them.

What no query sees, and queries that see nothing, have gradients of exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_flash.host.passes import compute_dtype
from cupy_flash.reference.dense import max_error
from cupy_flash.reference.gradients import gradient_bound
from support.gradient_calls import WHOLE, GradientCall
from support.modified_calls import DTYPES


def check_gradients(call: GradientCall, got: Mapping[str, Any] | Sequence[Any]) -> None:
    """Fail unless gradients are as near to the reference as the rule asks for.

    Parameters
    ----------
    got
        Gradients in host memory, by the names of the inputs or in the order of `call.names`.
    """
    if not isinstance(got, Mapping):
        got = dict(zip(call.names, got, strict=True))
    assert tuple(got) == call.names
    for name, gradient in got.items():
        expected = call.inputs[name].shape, call.dtype_of(name)
        assert (gradient.shape, gradient.dtype) == expected, (
            f"d{name} is {gradient.dtype} {gradient.shape}, not {expected}: {call}"
        )
        if name in call.unseen:
            left = gradient[call.unseen[name]]
            assert not left.any(), f"d{name} of what is not seen is not 0: {call}"
        for part in call.parts if name in call.parts[0].of else [WHOLE]:
            _check_part(call, name, gradient, part.of.get(name, ...), part.lse)


def allowed_error(call: GradientCall, name: str, at: Any, lse: Any) -> float:
    """Error of a gradient's part, whose queries have a part of lse."""
    truth = call.truth
    bound = gradient_bound(
        truth.naive[name][at],
        truth.exact[name][at],
        truth.sizes[name][at],
        DTYPES[call.forward.dtype],
        lse=truth.lse[lse],
        result=call.dtype_of(name),
    )
    # The output and the log-sum-exp are given, so nothing that a sink's gradient is made of is off.
    off = 0.0 if name == "sinks" else float(truth.score_errors[name][at].max(initial=0))
    size = np.asarray(truth.sizes[name][at]).max(initial=0)
    ulp = np.spacing(size.astype(compute_dtype(np.dtype(DTYPES[call.forward.dtype]))))
    return bound + off + call.equal_addends / 3 * float(ulp)


def _check_part(call: GradientCall, name: str, gradient: np.ndarray, at: Any, lse: Any) -> None:
    truth = call.truth
    bound = allowed_error(call, name, at, lse)
    error = max_error(gradient[at], truth.exact[name][at])
    worst = error > bound and _worst(
        *(x[at] for x in (gradient, truth.exact[name], truth.naive[name], truth.sizes[name]))
    )
    assert error <= bound, f"d{name} is off by {error:.3g}, allowed {bound:.3g}; {worst}: {call}"


def _worst(found: np.ndarray, exact: np.ndarray, naive: np.ndarray, sizes: np.ndarray) -> str:
    """Where the largest error is, and what stands there."""
    found = found.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.where(found == exact, 0, np.abs(found - exact))
    off = np.where(np.isnan(off), np.where(np.isnan(found) & np.isnan(exact), 0, np.inf), off)
    at = np.unravel_index(int(off.argmax()), off.shape)
    place = ", ".join(map(str, at))
    wrong = int((off > off[at] / 2).sum())
    return (
        f"at [{place}] {found[at]:.6g} instead of {exact[at]:.6g} (naively {naive[at]:.6g}, of "
        f"{sizes[at]:.3g} summed up); {wrong} of {off.size} elements are off by half as much"
    )
