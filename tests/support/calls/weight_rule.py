"""True attention weights, and the error rule of weights and of their sums over queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash import attention_reference
from cupy_flash.reference.dense import attention_naive, error_bound, max_error
from support.calls.modified_calls import ModifiedCall
from support.calls.row_statistics import cap_error
from support.gradients.directions import largest_product


def by_identity(
    q: Any, k: Any, formula: Callable[..., Any] = attention_reference, **options: Any
) -> np.ndarray:
    """Return the weights as the output of a formula for values that form an identity matrix.

    The axes are those of `attention_weights`.
    """
    swaps = options.get("layout") == "bhsd"
    keys, heads = (k.shape[axis] for axis in ((-2, -3) if swaps else (-3, -2)))
    v = np.broadcast_to(np.eye(keys)[:, None], (*k.shape[:-3], keys, heads, keys))
    out = formula(q, k, v.swapaxes(-3, -2) if swaps else v, **options)
    return out if swaps else out.swapaxes(-3, -2)


def exponents_of_rows(call: ModifiedCall) -> np.ndarray:
    """Return the log-sum-exp of each row with sinks and without them.

    The exponents of weights are differences of scores, which are about as large as the latter, and
    of the former.
    """
    positional, named = call.given(np)
    both = (named, named | {"sinks": None})
    return np.stack([attention_reference(*positional, **x, return_lse=True)[1] for x in both])


def check_weights(
    call: ModifiedCall, chosen: dict[str, Any], weights: np.ndarray, keys: np.ndarray | None = None
) -> None:
    """Assert that weights of a dense call obey the error rule.

    Parameters
    ----------
    chosen
        Arguments `queries` and `heads` of `attention_weights`, as indices of NumPy.
    weights, keys
        Results; `keys` is None if the weights are those of all keys.
    """
    (q, k, _), options = call.given(np)
    exact = by_identity(q, k, **options)[:, chosen["heads"]][:, :, chosen["queries"]]
    bound = error_bound(
        exact.astype(weights.dtype), exact, weights.dtype, lse=exponents_of_rows(call)
    )
    bound += _relative_error(call, weights.dtype) * float(exact.max(initial=0))
    if keys is not None:
        assert (np.diff(np.sort(keys, axis=-1)) > 0).all(), f"equal keys: {call}"
        assert (np.diff(weights) <= 0).all(), f"weights that are not in descending order: {call}"
        largest = -np.sort(-exact, axis=-1)[..., : keys.shape[-1]]
        _require("largest weights", max_error(weights, largest), bound, call)
        exact = np.take_along_axis(exact, keys, -1)
    _require("weights", max_error(weights, exact), bound, call)


def check_received(call: ModifiedCall, queries: slice, grouped: bool, received: np.ndarray) -> None:
    """Assert that sums of the weights of a dense call over queries obey the error rule."""
    (q, k, _), options = call.given(np)
    compute = received.dtype
    exact, naive = (
        by_identity(q, k, formula, **options, **more)[:, :, queries].sum(axis=2)
        for formula, more in ((attention_reference, {}), (attention_naive, {"dtype": compute}))
    )
    if grouped:
        heads = k.shape[1 if options.get("layout") == "bhsd" else 2]
        shape = (len(exact), heads, exact.shape[1] // heads, exact.shape[2])
        exact, naive = (x.reshape(shape).sum(axis=2) for x in (exact, naive))
    bound = error_bound(naive, exact, compute, lse=exponents_of_rows(call))
    bound += _relative_error(call, compute) * float(exact.max(initial=0))
    _require("sums", max_error(received, exact), bound, call)


def _relative_error(call: ModifiedCall, compute: np.dtype[Any]) -> float:
    """Return the relative error of a weight that the errors of scores cause.

    A score has an error of a few ulps of its products, and that of the tanh of a softcap. Both the
    score and the log-sum-exp change the weight.
    """
    (q, k, _), options = call.given(np)
    products = largest_product([q, k], options)
    return 4 * products * float(np.finfo(compute).eps) + 2 * cap_error(call)


def _require(what: str, error: float, bound: float, call: ModifiedCall) -> None:
    assert error <= bound, f"{what} off by {error:.3g}, allowed {bound:.3g}: {call}"
