"""Error bounds for results of the calls of `every_array` on a GPU.

Let u be half the eps of the inputs, and w the largest magnitude of an element of v:

- *Output*: rounding of the probabilities and of their sums to the inputs' dtype costs at most
  2 u w. The GPU and the CPU backend each round the result once, by u w. If scores are off by d,
  the output is off by at most 2 d w.
- *Log-sum-exp*: `lse_bound` for the GPU, and once more for the CPU backend.
- *Gradients*: the error rule of the gradients, `gradient_bound`.
- *Tangents*: these calls sum at most a few hundred terms, of magnitudes up to ten times the largest
  tangent, in float32 or float64. A GPU rounds weights and their tangents to the inputs' dtype: by
  u w, and by u w times the sum of the magnitudes of these tangents. The result is rounded once.
- *Rotated rows*: GPU and CPU round each element once, and gradients of rotated rows twice.
- *8-bit numbers* and their scales: the same bits.
- *Attention weights*: GPU and CPU compute them in float64, and each round once to float32.
- *Sums of weights*: a GPU computes them in float32, or float64 for float64 inputs.
- *Keys that are rotated or have scales*, which are rounded before the product: the error rules of
  varlen and KV-cache calls and of float8.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash.reference.dense import max_error
from cupy_flash.reference.gradients import gradient_bound
from support.calls import sequence_support
from support.calls.every_array import (
    BATCH,
    DIM,
    HEADS,
    HEADS_KV,
    KEYS,
    ROWS,
    Call,
    Captured,
    kind_of,
)
from support.calls.float8_support import Float8Case, truth_of
from support.gpu.gpu_support import lse_bound
from support.gradients.gradient_calls import REFERENCES

# Arguments of packed and cached calls with which keys are rounded before the product.
_ROUNDED_KEYS = {"k_scale", "v_scale", "rotary_cos", "rotary_sin", "rotary_seqlens"}


def check_results(call: Call, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Fail unless results in host memory are right; `expected` are those of the CPU backend."""
    name, kind = call.function.__name__, kind_of(call.function)
    if kind == "scaled_dot_product":
        names = {"query": "q", "key": "k", "value": "v"}
        _check_forward({names.get(n, n): x for n, x in call.values.items()}, found, expected)
    elif kind == "rotary":
        _check_rotated(found, expected)
    elif "_weights" in name:
        _check_weights(found, expected)
    elif "_received" in name:
        # Scores of up to 30 and their sums have errors of a few ulps.
        (sums,), (right,) = found, expected
        bound = 64 * 30 * float(np.finfo(sums.dtype).eps) * max(1.0, float(right.max()))
        assert (error := max_error(sums, right)) <= bound, f"off by {error:.3g}, {bound:.3g}"
    elif kind in ("quantize", "dropout_mask"):
        for array, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(array, right)
    elif "_jvp" in name:
        _check_forward(call.values, found[::2], expected[::2])
        _check_tangents(found[1::2], expected[1::2])
    elif "_hvp" in name:
        _check_tangents(found, expected)
    elif "backward" in name:
        _check_gradients(call.values, found, is_exact=name.startswith("attention"))
    elif name.endswith("_vjp"):
        _check_forward(call.values, found[:1], expected[:1])
        # The call passes its output as the gradient of the output.
        values = {n: x for n, x in call.values.items() if n != "return_lse"}
        _check_gradients(values | {"dout": found[0]}, found[1:])
    elif (truth := _truth(call)) is not None:
        truth.check(*found)
    else:
        _check_forward(call.values, found[:2], expected[:2])
        for cache, right in zip(found[2:], expected[2:], strict=True):
            check_stored(cache, right)


def _check_rotated(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    largest = max(float(np.abs(right.astype(np.float64)).max()) for right in expected)
    for array, right in zip(found, expected, strict=True):
        # A result is the sum of two products of rounded elements, with table entries of at most 4.
        bound = 8 * float(np.finfo(right.dtype).eps) * largest
        error = max_error(array, right)
        assert error <= bound, f"a rotated row is off by {error:.3g}, allowed {bound:.3g}"


def _check_weights(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    weights, *keys = found
    bound = float(np.finfo(np.float32).eps)
    error = max_error(weights, expected[0])
    assert error <= bound, f"a weight is off by {error:.3g}, allowed {bound:.3g}"
    for indices, right in zip(keys, expected[1:], strict=True):
        np.testing.assert_array_equal(indices, right)


def _check_tangents(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for array, right in zip(found, expected, strict=True):
        sums = np.float64 if array.dtype == np.float64 else np.float32
        largest = float(np.abs(right.astype(np.float64)).max())
        bound = 8 * float(np.finfo(array.dtype).eps) * max(largest, 1)
        bound += 1000 * float(np.finfo(sums).eps) * max(largest, 1)
        error = max_error(array, right)
        assert error <= bound, f"a tangent is off by {error:.3g}, allowed {bound:.3g}"


def check_stored(found: np.ndarray, expected: np.ndarray) -> None:
    """Fail unless a cache that was written is right: GPU and CPU round each element once."""
    if expected.dtype.itemsize == 1:
        # Libraries without float8 return bytes.
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))
    else:
        np.testing.assert_allclose(found, expected, rtol=float(np.finfo(expected.dtype).eps))


def _truth(call: Call) -> Any:
    """Return the truth of a call whose kernel rounds inputs before the product, or None."""
    values = call.values
    if not call.function.__name__.startswith("flash"):
        return None
    if "q_scale" in values:
        case = Float8Case(ROWS, KEYS, BATCH, HEADS, HEADS_KV, DIM, DIM)
        return truth_of(case, {n: x for n, x in values.items() if n != "return_lse"})
    if call.argument not in _ROUNDED_KEYS:
        return None
    is_packed = "cu_seqlens_q" in values
    reference: Callable[..., Any] = cupy_flash.attention_with_kvcache_reference
    if is_packed:
        reference = cupy_flash.attention_varlen_reference
    parameters = inspect.signature(reference).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    given |= {name: value for name, value in values.items() if name in given}
    of = sequence_support.Truth.of_varlen if is_packed else sequence_support.Truth.of_kvcache
    return of(given)


def _inputs(values: Mapping[str, Any]) -> list[np.ndarray]:
    """Return q, k and v, times their scales; new rows are followed by those of the cache."""
    if "qkv" in values:
        return [values["qkv"][:, :, i] for i in range(3)]
    found = []
    for name in "qkv":
        scale = values.get(f"{name}_scale", np.ones(()))[..., None]
        stored = [values[n].astype(np.float64) for n in (name, f"{name}_cache") if n in values]
        found.append(np.concatenate([(x * scale).reshape(-1, DIM) for x in stored]))
    return found


def _check_forward(
    values: Mapping[str, Any], found: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> None:
    """Fail unless an output, and its log-sum-exp if there is one, are right."""
    out, *lse = found
    of_lse = np.zeros(1) if len(expected) == 1 else expected[1]
    if "out_partial" in values:
        # Merging computes no products of queries and keys.
        q = k = np.zeros((1, 1))
        v = values["out_partial"]
    else:
        q, k, v = _inputs(values)
    sums = np.float64 if out.dtype == np.float64 else np.float32
    rows = (x.reshape(1, 1, -1, x.shape[-1]).astype(sums) for x in (q, k))
    of_scores = 2 * lse_bound(*rows, of_lse, None)
    eps = float(np.finfo(out.dtype).eps)
    bound = (2 * eps + 2 * of_scores) * float(np.abs(v).max())
    error = max_error(out, expected[0])
    assert error <= bound, f"the output is off by {error:.3g}, allowed {bound:.3g}"
    for result in lse:
        error = max_error(result, of_lse)
        assert error <= of_scores, f"lse is off by {error:.3g}, allowed {of_scores:.3g}"


def _check_gradients(
    values: Mapping[str, Any], found: Sequence[np.ndarray], *, is_exact: bool = False
) -> None:
    """Fail unless gradients are right; `is_exact` tells that they are computed in float64."""
    without = {"dq", "dk", "dv", "dqkv", "qkv", "out", "lse"}
    given = {
        name: x.make(lambda array: array) if isinstance(x, Captured) else x
        for name, x in values.items()
        if name not in without
    }
    if "qkv" in values:
        given |= dict(zip("qkv", _inputs(values), strict=True))
        (packed,) = found
        found = [packed[:, :, i] for i in range(3)]
    is_packed = "cu_seqlens_q" in values
    reference, naive, sizes = REFERENCES[is_packed]
    exact = reference(**given)
    of_naive = exact if is_exact else naive(**given, out=values.get("out"))
    # JAX may have no float64, so the dtype is that of the result.
    dtype = found[0].dtype if is_exact else given["q"].dtype
    forward = {n: x for n, x in given.items() if n not in ("dout", "dlse")}
    if is_packed:
        _, lse = cupy_flash.attention_varlen_reference(**forward)
    else:
        _, lse = cupy_flash.attention_reference(**forward, return_lse=True)
    truth = zip("qkv", found, exact, of_naive, sizes(**given), strict=True)
    for name, gradient, right, naively, size in truth:
        bound = gradient_bound(naively, right, size, dtype, lse=lse)
        error = max_error(gradient, right)
        assert error <= bound, f"d{name} is off by {error:.3g}, allowed {bound:.3g}"
