"""Gradients of packed sequences whose offsets in device memory are invalid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support.gpu import cupy
from support.wrong_numbers import VARLEN_CALLS, wrong_varlen

from cupy_flash import MaskMod, UnsupportedError, flash_attention_varlen_backward
from cupy_flash.arrays.sequences import find_packed_keys, find_queries
from cupy_flash.families import FAMILIES, backward_common

pytestmark = pytest.mark.gpu

CHANGES = [name for name, page_size in VARLEN_CALLS if page_size == 0]
# Relative rounding error of P and dS, which are operands of products, and of the gradients.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-9, "float32": 2.0**-24}


class Part(NamedTuple):
    """First row and number of rows of a sequence in the packed queries or keys."""

    first: int
    seqlen: int


def own_rows(starts: np.ndarray, total: int, sequence: int) -> tuple[int, int]:
    """Return begin and end of the rows of this sequence alone, as in `packed_tiles.cuh`."""
    at = np.clip(starts.astype(np.int64), 0, total)
    begin, end, low, high = int(at[0]), int(at[-1]), 0, len(starts) - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if middle <= sequence:
            low, begin = middle, max(begin, int(at[middle]))
        else:
            high, end = middle, min(end, int(at[middle]))
    return begin, end


def sequences(arguments: dict[str, Any]) -> Iterator[tuple[Part, Part]]:
    """Yield the query rows and the keys of each sequence."""
    starts_q, starts_k = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    total_q, total_k = len(arguments["q"]), len(arguments["k"])
    queries = find_queries(starts_q, total_q, arguments["max_seqlen_q"])
    keys = find_packed_keys(
        starts_k,
        arguments["max_seqlen_k"],
        batch=len(starts_q) - 1,
        total_k=total_k,
        page_size=0,
        seqused_k=arguments["seqused_k"],
        block_table=None,
    )
    for b, (of_q, of_k) in enumerate(zip(queries, keys, strict=True)):
        parts = []
        for found, starts, total in ((of_q, starts_q, total_q), (of_k, starts_k, total_k)):
            begin, end = own_rows(starts, total, b)
            parts.append(Part(begin, max(0, min(end - begin, found.seqlen))))
        yield parts[0], parts[1]


def formula(
    arguments: dict[str, Any], dout: np.ndarray, out: np.ndarray, lse: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return gradients in float64, given out and lse, and sums of the absolute values of terms."""
    q, k, v, dout, out, lse = (
        x.astype(np.float64) for x in (*(arguments[n] for n in "qkv"), dout, out, lse)
    )
    heads, group, scale = q.shape[1], q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    inputs = {"q": q, "k": k, "v": v}
    found = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in inputs.items()}
    for of_q, of_k in sequences(arguments):
        rows = slice(of_q.first, of_q.first + of_q.seqlen)
        own = slice(of_k.first, of_k.first + of_k.seqlen)
        i, j = np.arange(of_q.seqlen)[:, None], np.arange(of_k.seqlen)
        seen = j <= i + of_k.seqlen - of_q.seqlen
        for h in range(heads):
            kv = h // group
            s = scale * q[rows, h] @ k[own, kv].T
            p = np.where(seen, np.exp(s - lse[h, rows, None]), 0)
            dp = dout[rows, h] @ v[own, kv].T
            delta = (dout[rows, h] * out[rows, h]).sum(axis=1, keepdims=True)
            dp_size = abs(dout[rows, h]) @ abs(v[own, kv]).T
            dp_size += abs(dout[rows, h] * out[rows, h]).sum(axis=1, keepdims=True)
            # The relative error of p is the absolute error of its exponent.
            p_size = p * (1 + abs(s) + abs(lse[h, rows, None]))
            ways = ((p, p * (dp - delta), np.asarray), (p_size, p_size * dp_size, np.abs))
            for part, (weights, ds, of) in enumerate(ways):
                found["q"][part][rows, h] += scale * ds @ of(k[own, kv])
                found["k"][part][own, kv] += scale * ds.T @ of(q[rows, h])
                found["v"][part][own, kv] += weights.T @ of(dout[rows, h])
    return found


@pytest.mark.parametrize("has_function", [False, True])
@pytest.mark.parametrize("family", FAMILIES["backward"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_lengths_there_are_each_row_is_of_one_sequence_and_is_written(
    change: str,
    dtype: str,
    family: str,
    has_function: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = wrong_varlen(change, 0, dtype)
    del arguments["block_table"]
    how: dict[str, Any] = {}
    if has_function:
        # The function masks what causality does, and kernels read lists of query tiles.
        assert arguments.pop("causal")
        how["mask_mod"] = MaskMod(lambda i, j: j <= i)
        monkeypatch.setattr(backward_common, "_LEAST_LISTED_KV_TILES", 1)
    on_gpu = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    # out and lse are random, because the forward results of such lengths may be undefined.
    shape, real = arguments["q"].shape, arguments["q"].dtype
    dout, out = (rng.standard_normal(shape).astype(real) for _ in range(2))
    # lse exceeds all scores, as a true log-sum-exp does, so p is at most 1.
    lse = rng.uniform(6, 8, shape[1::-1]).astype(np.float32)
    given = {f"d{n}": cupy.full(on_gpu[n].shape, np.nan, arguments[n].dtype) for n in "qkv"}
    try:
        results = {"out": cupy.asarray(out), "lse": cupy.asarray(lse)}
        rows = cupy.asarray(dout)
        flash_attention_varlen_backward(rows, **on_gpu, **results, **given, **how, family=family)
    except UnsupportedError as error:
        pytest.skip(str(error))
    expected = formula(arguments, dout, out, lse)
    for name, (exact, size) in expected.items():
        off = abs(given[f"d{name}"].get().astype(np.float64) - exact)
        assert not off[size == 0].any(), name
        # P, dS and the result are rounded once each. The second term bounds the float32 sums.
        allowed = 4 * ROUNDING[dtype] * size + 2.0**-24 * 64 * size
        if dtype == "float32":
            # An operand is the sum of two float16 components, with an error of up to 2^-40
            # relative to the largest element of its tile.
            allowed = allowed + 2.0**-39 * size.max(initial=0)
        least = float(ml_dtypes.finfo(arguments[name].dtype).smallest_subnormal)
        assert (off <= allowed + least).all(), name
