"""Random partial results for the tests of `combine`, and error bounds of merged results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash.reference.dense import max_error
from support.gpu.gpu_support import DTYPES

__all__ = ["DTYPES", "assert_merged", "random_parts", "random_sinks", "with_sinks"]


def lse_dtype(dtype: str) -> np.dtype:
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def random_parts(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...], *, unseen: float = 0.2
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out_partial, lse_partial); a fraction `unseen` of the rows has no key and is NaN."""
    out = rng.standard_normal(shape).astype(DTYPES[dtype])
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    lse = rng.normal(scale=4, size=lse_shape).astype(lse_dtype(dtype))
    lse[rng.random(lse_shape) < unseen] = -np.inf
    out[(lse == -np.inf).swapaxes(-1, -2)] = np.nan
    return out, lse


def random_sinks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return float64 sinks for parts of this shape, (heads_q,); some are -inf."""
    sinks = rng.normal(scale=4, size=shape[-2])
    sinks[rng.random(len(sinks)) < 0.2] = -np.inf
    return sinks


def with_sinks(
    out_partial: np.ndarray, lse_partial: np.ndarray, sinks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts with one more, which represents the sinks."""
    none = np.zeros_like(out_partial[:1])
    of_rows = np.broadcast_to(sinks.astype(lse_partial.dtype)[:, None], lse_partial[:1].shape)
    return np.concatenate([out_partial, none]), np.concatenate([lse_partial, of_rows])


def exact(out_partial: np.ndarray, lse_partial: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the merged results in float64, for finite values and parts without visible keys."""
    out64, lse64 = out_partial.astype(np.float64), lse_partial.astype(np.float64)
    largest = lse64.max(axis=0)
    base = np.where(largest == -np.inf, 0, largest)
    terms = np.exp(lse64 - base)
    with np.errstate(divide="ignore"):
        lse = base + np.log(terms.sum(axis=0))
    weights = terms / np.where(largest == -np.inf, 1, terms.sum(axis=0))
    by_row = weights.swapaxes(-1, -2)[..., None]
    return (by_row * np.where(by_row == 0, 0, out64)).sum(axis=0), lse


def assert_merged(out: Any, lse: Any, out_partial: np.ndarray, lse_partial: np.ndarray) -> None:
    """Fail unless (out, lse) are the merged parts, up to rounding.

    Let u be half the eps of lse's dtype. A weight's exponent d = lse_s - max has a relative error
    of 3u (the difference, log2 e, and their product), and its exponential of 4u more. The sum of S
    weights adds S u, its inverse and the product with it u each, and the weighted sum S u. The
    result is rounded once to its dtype.
    """
    expected, expected_lse = exact(out_partial, lse_partial)
    assert out.dtype == out_partial.dtype
    assert lse.dtype == lse_partial.dtype
    info: Any = ml_dtypes.finfo(out.dtype)  # type: ignore[no-untyped-call]
    u = float(np.finfo(lse.dtype).eps) / 2
    splits = len(lse_partial)

    lse64 = lse_partial.astype(np.float64)
    seen = lse64 > -np.inf
    largest = lse64.max(axis=0)
    depth = np.where(seen, np.where(largest == -np.inf, 0, largest) - np.where(seen, lse64, 0), 0)
    weights = np.where(seen, np.exp(-depth), 0)
    weights /= np.maximum(weights.sum(axis=0), 1)
    mean_depth = (weights * depth).sum(axis=0)
    relative = u * (3 * depth + 3 * mean_depth + 2 * splits + 12)
    magnitudes = np.where(seen.swapaxes(-1, -2)[..., None], np.abs(out_partial.astype(float)), 0)
    error = ((weights * relative).swapaxes(-1, -2)[..., None] * magnitudes).sum(axis=0)
    rounding = float(info.eps) / 2 * (np.abs(expected) + error) + float(info.smallest_subnormal)
    difference = np.abs(out.astype(np.float64) - expected)
    assert (difference <= error + rounding).all(), float((difference - error - rounding).max())

    sees_nothing = expected_lse == -np.inf
    assert (lse[sees_nothing] == -np.inf).all()
    assert not out[sees_nothing.swapaxes(-1, -2)].any(), "a row without keys is not exactly 0"
    finite = np.where(sees_nothing, 0, expected_lse)
    lse_error = u * (2 * np.abs(finite) + 3 * mean_depth + splits + 4 * np.log2(splits) + 12)
    off = np.abs(np.where(sees_nothing, 0, lse.astype(np.float64)) - finite)
    assert (off <= lse_error).all(), max_error(lse, expected_lse)
