"""Random Hessian-vector products of attention, their true results and error bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_flash import (
    attention_backward_reference,
    attention_hvp_reference,
    attention_reference,
    attention_varlen_backward_reference,
    attention_varlen_hvp_reference,
    attention_weights,
)
from cupy_flash.reference.dense import error_bound, max_error
from support.gradients.directions import (
    largest_product,
    magnitudes,
    moved,
    moving_modifications,
    tangents_of,
)
from support.gradients.gradient_calls import GradientCall

WRT = ("q", "k", "v")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# References of gradients and of their tangents, by the kind of a call.
REFERENCES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **dict.fromkeys(("dense", "padded"), (attention_backward_reference, attention_hvp_reference)),
    "varlen": (attention_varlen_backward_reference, attention_varlen_hvp_reference),
}


class Direction:
    """A call's arrays with dout and dlse, and their tangents, by the names of arguments.

    With `of_mods`, its modifications have tangents, too.
    """

    def __init__(
        self, call: GradientCall, rng: np.random.Generator, *, of_mods: bool = False
    ) -> None:
        self.call = call
        given, self.options = call.forward.given(np)
        self.options |= zip(LENGTHS, given[3:], strict=False)
        self.arrays = dict(zip(WRT, given[:3], strict=True)) | {"dout": call.dout}
        # Some calls have no gradient of the log-sum-exp.
        if call.dlse is not None:
            self.arrays["dlse"] = call.dlse
        moving = tangents_of(self.arrays.values(), rng)
        self.tangents = dict(zip(self.arrays, moving, strict=True))
        modifications = moving_modifications(self.options) if of_mods else {}
        moving = tangents_of(modifications.values(), rng)
        self.of_mods = dict(zip(modifications, moving, strict=True))
        self.wrt: Sequence[str] = (*WRT, *modifications)
        self.gradients_of, self.reference = REFERENCES[call.forward.kind]

    def find(self, function: Callable[..., Any], xp: Any = np) -> list[np.ndarray]:
        """Return the tangents of the gradients, computed from arrays of `xp`, in host memory."""
        given = self.arrays | {f"{name}_tangent": x for name, x in self.tangents.items()}
        moving = {"modification_tangents": self.of_mods, "wrt": self.wrt}
        if xp is np:
            return list(function(**given, **moving, **self.options))
        lengths, options = self.call.forward.given(xp)
        options |= zip(LENGTHS, lengths[3:], strict=False)
        moving["modification_tangents"] = {n: xp.asarray(x) for n, x in self.of_mods.items()}
        results = function(
            **{name: xp.asarray(x) for name, x in given.items()}, **moving, **options
        )
        return [xp.asnumpy(x) for x in results]

    def gradients(self, step: float) -> tuple[np.ndarray, ...]:
        """Return the gradients after a step of all arrays along their tangents."""
        arrays = {name: x + step * self.tangents[name] for name, x in self.arrays.items()}
        found: tuple[np.ndarray, ...] = self.gradients_of(
            **arrays, wrt=self.wrt, **moved(self.options, self.of_mods, step)
        )
        return found


class ExactProduct(NamedTuple):
    """Tangent of a gradient in float64, and the allowed error of a result."""

    exact: np.ndarray
    bound: float


def exact_products(direction: Direction, compute: np.dtype[Any]) -> Iterator[ExactProduct]:
    """Yield the tangents of the gradients of q, k and v; `compute` is the precision of sums.

    The bound is that of tangents (`tangent_rule`): a few ulps of the result, and a few ulps of the
    sum of the magnitudes of its terms, which may cancel. Scores have errors of a few ulps of their
    products.
    """
    inputs, options = [direction.arrays[name] for name in WRT], direction.options
    # With sinks, the scores of keys may be larger than the log-sum-exp.
    _, lse = attention_reference(*inputs, **options | {"sinks": None}, return_lse=True)
    ulps = 4 * largest_product(inputs, options) * float(np.finfo(compute).eps)
    exact = direction.find(attention_hvp_reference)
    for right, size in zip(exact, sizes_of_results(direction), strict=True):
        bound = error_bound(right, right, inputs[0].dtype)
        bound += error_bound(size, size, compute, lse=lse) + ulps * size.max(initial=0)
        yield ExactProduct(right, bound)


def check_products(results: Sequence[np.ndarray], direction: Direction) -> None:
    """Assert that the tangents of the gradients of q, k and v obey the error rule."""
    dtype = direction.arrays["q"].dtype
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    for name, found, (exact, bound) in zip(
        WRT, results, exact_products(direction, compute), strict=True
    ):
        assert found.dtype == direction.arrays[name].dtype
        error = max_error(found, exact)
        assert error <= bound, (
            f"tangent of d{name} off by {error:.3g}, allowed {bound:.3g}: {direction.call}"
        )


def sizes_of_results(direction: Direction) -> list[np.ndarray]:
    """Return the sums of magnitudes of all terms of the results, with the layout of the inputs."""
    options, heads = direction.options, None

    def wide(name: str) -> np.ndarray:
        return magnitudes(direction.arrays[name], options, None if name in ("q", "dout") else heads)

    def moving(name: str) -> np.ndarray:
        given = direction.tangents.get(name, np.zeros_like(direction.arrays[name]))
        return magnitudes(given, options, None if name in ("q", "dout") else heads)

    heads = magnitudes(direction.arrays["q"], options).shape[1]
    q, k, v, dout = (wide(name) for name in (*WRT, "dout"))
    q_t, k_t, v_t, dout_t = (moving(name) for name in (*WRT, "dout"))
    dlse, dlse_t = (
        np.abs(x["dlse"])[..., None] if "dlse" in x else 0.0
        for x in (direction.arrays, direction.tangents)
    )
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    # The functions of the gallery have slopes of at most 1.5, and the softcap with the least cap
    # has second derivatives below 1.
    slope, curvature = 1.5, 1.0
    k_columns, v_columns, vt_columns = (x.swapaxes(2, 3) for x in (k, v, v_t))
    x_t = scale * (q_t @ k_columns + q @ k_t.swapaxes(2, 3))
    exact = [direction.arrays[name].astype(np.float64) for name in ("q", "k")]
    kept = attention_weights(*exact, **options)
    weights = attention_weights(*exact, **options | {"dropout_p": 0})
    factor = 1 / (1 - options.get("dropout_p", 0))

    def mean(x: np.ndarray) -> np.ndarray:
        return x.sum(axis=-1, keepdims=True)

    p_t = weights * (slope * x_t + mean(weights * slope * x_t))
    dp, dp_t = factor * (dout @ v_columns), factor * (dout_t @ v_columns + dout @ vt_columns)
    d = mean(weights * dp) + dlse
    d_t = mean(p_t * dp + weights * dp_t) + dlse_t
    dt = weights * (dp + d)
    dt_t = p_t * (dp + d) + weights * (dp_t + d_t)
    dx, dx_t = slope * dt, slope * dt_t + curvature * dt * x_t
    columns, columns_t, kept_t = dx.swapaxes(2, 3), dx_t.swapaxes(2, 3), factor * p_t
    dq = scale * (dx_t @ k + dx @ k_t)
    dk = scale * (columns_t @ q + columns @ q_t)
    dv = kept_t.swapaxes(2, 3) @ dout + kept.swapaxes(2, 3) @ dout_t
    found = [dq, grouped(dk, direction), grouped(dv, direction)]
    return found if options.get("layout") == "bhsd" else [x.swapaxes(1, 2) for x in found]


def grouped(x: np.ndarray, direction: Direction) -> np.ndarray:
    """Return the sums of (batch, heads_q, seqlen, dim) over the query heads of each KV head."""
    batch, heads_q, *rest = x.shape
    heads_kv = magnitudes(direction.arrays["k"], direction.options).shape[1]
    return x.reshape(batch, heads_kv, heads_q // max(heads_kv, 1), *rest).sum(axis=2)
