"""Error rule of gradients, which `check_gradients` asserts for all gradients of a call.

The allowed error of a gradient g is the sum below. Maxima are over one sequence, because short
sequences have large gradients, whose bound would hide errors in those of long sequences.

    2 max|naive - g| + 4 ulp(max|g|) + (4 + 2 max|lse|) ulp'(max S)
        + n/3 ulp'(max S), of n equal addends + errors of scores

- *Twice the naive error*, as for all results. The naive formula rounds P, dX, the output and the
  result to the inputs' dtype, as separate kernels do. Kernels round the same numbers.
- *4 ulps* of the gradient's dtype, or of q's if that is coarser, see `error_bound`. One of them is
  for the rounding of a result if the naive one happens to be exact.
- *Ulps of S*: S is the size of the gradient if nothing cancels, and ulp' is an ulp of the compute
  precision. A kernel's P = exp(t - lse) uses a rounded lse and a rounded t of the same size. So P
  has a relative error of about |lse| ulp'. The naive formula divides by its own sum, and need not
  have this error. Also dP - D has an error of about one ulp' of |dP| + |D|, which is all of the
  result if a query attends to a single key.
- *Equal addends* occur if all scores are 0 and all rows of dout are equal. Then each addition has
  the same error as long as the sum has the same exponent. Of n additions, half have the last
  exponent and an error of at most half an ulp, a quarter have the exponent before with half this
  ulp, and so on: n/3 ulp'(max S). Naive sums of fewer addends show less of this error.
- *Errors of scores*, see `GradientCall.score_errors`: the relative errors of P and dT of a pair are
  the error of its score, and the slope has its own error; all are summed as if nothing cancelled.
  In float64 the naive result has the errors of the reference, and shows none of them.

Keys that no query attends to, and queries that attend to no key, have gradients of exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_flash.cpu.forward_pass import compute_dtype
from cupy_flash.reference.dense import max_error
from cupy_flash.reference.gradients import gradient_bound
from support.calls.modified_calls import DTYPES
from support.gpu import cupy
from support.gradients.gradient_calls import UNSPLIT, GradientCall


def check_gradients(call: GradientCall, got: Mapping[str, Any] | Sequence[Any]) -> None:
    """Fail unless gradients are as close to the reference as the error rule requires.

    `got` are gradients in host memory, by the names of the inputs or in the order of `call.names`.
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
        for part in call.parts if name in call.parts[0].of else [UNSPLIT]:
            _check_part(call, name, gradient, part.of.get(name, ...), part.lse)


def check_repeatedly(call: GradientCall, xp: Any = cupy, **how: Any) -> dict[str, np.ndarray]:
    """Check the gradients, and that further calls give the same bits; return the gradients."""
    found = call.run(xp, **how)
    check_gradients(call, found)
    for _ in range(3):
        again = call.run(xp, **how)
        for name, gradient in found.items():
            np.testing.assert_array_equal(gradient.view(np.uint8), again[name].view(np.uint8))
    return found


def allowed_error(call: GradientCall, name: str, at: Any, lse: Any) -> float:
    """Return the allowed error of part `at` of a gradient, whose queries have part `lse` of lse."""
    truth = call.truth
    bound = gradient_bound(
        truth.naive[name][at],
        truth.exact[name][at],
        truth.sizes[name][at],
        DTYPES[call.forward.dtype],
        lse=truth.lse[lse],
        result=call.dtype_of(name),
    )
    # The gradient of a sink has no error of scores, because it is computed from given out and lse.
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
    """Return a description of the largest error: its index and the values there."""
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
