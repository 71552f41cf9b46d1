"""Rows that attend to one key return its value exactly, whatever masks the other keys or modifies
the scores, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import to_numpy
from support.gpu.gpu_sequences import Target, cubins, everywhere
from support.gpu.gpu_support import DTYPES
from support.prebuilt import use_cubins

import cupy_flash

__all__ = ["cubins", "use_cubins"]  # fixtures

HEADS_Q, HEADS_KV = 4, 2
# Numbers of rows and keys: full and ragged tiles, and few rows over many keys.
LENGTHS = ((200, 330), (3, 500))
HEAD_DIMS = ((64, 64), (128, 128), (40, 33), (320, 320))


def only_keys(rows: int, keys: int) -> np.ndarray:
    """Return the only visible key of each row; keys of neighbouring rows are far apart."""
    return (np.arange(rows) * 77 + 5) % keys


def hidden(rows: int, keys: int) -> np.ndarray:
    return np.arange(keys) != only_keys(rows, keys)[:, None]


def by_mask_mod(rows: int, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"mask_mod": cupy_flash.MaskMod(lambda i, j, n: (i * 77 + 5) % n == j, n=keys)}


def by_score_mod(rows: int, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    def only(score: Any, i: Any, j: Any, n: Any) -> Any:
        return np.where((i * 77 + 5) % n == j, 1.7 * score, -np.inf)

    return {"score_mod": cupy_flash.ScoreMod(only, n=keys)}


def by_mask(rows: int, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"mask": ~hidden(rows, keys)[None, None]}


def by_bias(rows: int, keys: int, rng: np.random.Generator) -> dict[str, Any]:
    bias = 3 * rng.standard_normal((1, HEADS_Q, rows, keys))
    return {"bias": np.where(hidden(rows, keys), -np.inf, bias).astype(np.float32)}


Hider = Callable[[int, int, np.random.Generator], dict[str, Any]]
HIDERS: dict[str, Hider] = {
    "mask_mod": by_mask_mod,
    "score_mod": by_score_mod,
    "mask": by_mask,
    "bias": by_bias,
}
# Further modifications of the scores.
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi_slopes": np.array([0.5, 0.03, 0.01, 0.001], np.float32)},
}


def arrays_of(
    rng: np.random.Generator, dtype: str, rows: int, keys: int, dims: tuple[int, int]
) -> tuple[np.ndarray, ...]:
    shapes = (
        (2, rows, HEADS_Q, dims[0]),
        (2, keys, HEADS_KV, dims[0]),
        (2, keys, HEADS_KV, dims[1]),
    )
    return tuple((2 * rng.standard_normal(s)).astype(DTYPES[dtype]) for s in shapes)


def on(target: Target, options: dict[str, Any], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the options with arrays on the device of `target`, float64 if the queries are."""

    def array(x: np.ndarray) -> Any:
        return target.xp.asarray(x.astype(dtype) if (x.dtype, dtype) == ("f4", "f8") else x)

    return {name: array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def values_of(v: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the value of each row's key, for all query heads."""
    return np.repeat(v[:, keys], HEADS_Q // HEADS_KV, axis=2)


def check(
    target: Target,
    arrays: tuple[np.ndarray, ...],
    keys: np.ndarray,
    options: dict[str, Any],
    rows: slice = slice(None),
) -> None:
    """Fail unless the given rows of the output are exactly the values of these keys."""
    options = on(target, options, arrays[0].dtype)
    given = map(target.xp.asarray, arrays)
    out, lse = target.call(cupy_flash.flash_attention, *given, return_lse=True, **options)
    np.testing.assert_array_equal(
        to_numpy(out)[:, rows].astype(np.float64),
        values_of(arrays[2], keys)[:, rows].astype(np.float64),
    )
    assert np.isfinite(to_numpy(lse)[:, :, rows]).all()


@everywhere
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("hider", HIDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_that_is_not_hidden(
    target: Target, dtype: str, hider: str, change: str, rng: np.random.Generator
) -> None:
    dims = HEAD_DIMS[int(rng.integers(len(HEAD_DIMS)))]
    for rows, keys in LENGTHS:
        options = {"q_offset": 0} | HIDERS[hider](rows, keys, rng) | CHANGES[change]
        arrays = arrays_of(rng, dtype, rows, keys, dims)
        check(target, arrays, only_keys(rows, keys), options)


@everywhere
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_of_one_key(
    target: Target, dtype: str, causal: bool, change: str, rng: np.random.Generator
) -> None:
    dims = HEAD_DIMS[int(rng.integers(len(HEAD_DIMS)))]
    for rows, keys in LENGTHS:
        offset = keys - rows
        options = {"window_size": (0, 0), "causal": causal, "q_offset": offset} | CHANGES[change]
        arrays = arrays_of(rng, dtype, rows, keys, dims)
        check(target, arrays, np.arange(rows) + offset, options)


@everywhere
@pytest.mark.parametrize("change", ["softcap", "alibi", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_row_of_a_causal_call(
    target: Target, dtype: str, change: str, rng: np.random.Generator
) -> None:
    rows, keys = 200, 330
    bias = rng.standard_normal((1, 1, rows, keys)).astype(np.float32)
    options = {"causal": True, "q_offset": 0} | CHANGES.get(change, {"bias": bias})
    arrays = arrays_of(rng, dtype, rows, keys, (64, 64))
    check(target, arrays, np.zeros(rows, int), options, slice(0, 1))


# Bounds on the relative error of p * v / (p + sink). In 16 bits, p and the result are rounded; in
# float32 and float64, p has the error of its score, which is up to about 40.
SINK_ERRORS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-14, "float64": 2**-40}


@everywhere
@pytest.mark.parametrize("change", ["plain", "alibi"])
@pytest.mark.parametrize("window", [None, (31, 0), (0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_its_share_of_a_row_with_one_key(
    target: Target, dtype: str, window: Any, change: str, rng: np.random.Generator
) -> None:
    dims = HEAD_DIMS[int(rng.integers(len(HEAD_DIMS)))]
    for rows in (60, 200):
        arrays = arrays_of(rng, dtype, rows, rows, dims)
        sinks = 3 * rng.standard_normal(HEADS_Q)
        options = CHANGES[change] | {"sinks": sinks.astype(np.float32), "window_size": window}
        options = on(target, options | {"causal": True}, arrays[0].dtype)
        given = [*map(target.xp.asarray, arrays)]
        out = target.call(cupy_flash.flash_attention, *given, **options)
        expected = cupy_flash.attention_reference(*given, **options)
        lone = slice(None) if window == (0, 0) else slice(1)
        np.testing.assert_allclose(
            to_numpy(out)[:, lone].astype(np.float64),
            to_numpy(expected)[:, lone],
            rtol=SINK_ERRORS[dtype],
            atol=2.0**-20,
        )


@everywhere
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_with_a_window_of_one_key(
    target: Target, dtype: str, change: str, num_splits: int, rng: np.random.Generator
) -> None:
    ends = np.array([0, 70, 71, 400], np.int32)
    q, k, v = (x[0, :400] for x in arrays_of(rng, dtype, 400, 400, (64, 64)))
    given = map(target.xp.asarray, (q, k, v, ends, ends))
    options = {"causal": True, "window_size": (0, 0), "num_splits": num_splits}
    options |= on(target, CHANGES[change], q.dtype)
    out = target.call(cupy_flash.flash_attention_varlen, *given, 329, 329, **options)
    expected = values_of(v[None], np.arange(400))[0]
    np.testing.assert_array_equal(to_numpy(out).astype(np.float64), expected.astype(np.float64))
