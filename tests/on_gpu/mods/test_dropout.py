"""Dropout on a GPU: all families drop the pairs of `dropout_mask`, with any tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES, current_device

import cupy_flash
from cupy_flash import Plan, UnsupportedError, attention_backward_reference
from cupy_flash.families import FAMILIES
from cupy_flash.reference.gradients import backward_naive

pytestmark = pytest.mark.gpu

FAMILY_NAMES = ("hopper", "mma", "simt")
TESTS = 60


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A call whose weights are all equal, because q is 0, so that results show dropped pairs."""

    family: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    head_dim: int
    dropout_p: float
    seed: tuple[int, int]

    @classmethod
    def draw(cls, test: int) -> Sizes:
        """Return random sizes."""
        rng = np.random.default_rng(test)
        family = FAMILY_NAMES[test % len(FAMILY_NAMES)]
        dtypes = ("float16", "bfloat16") if family == "hopper" else tuple(DTYPES)
        return cls(
            family,
            str(rng.choice(dtypes if family != "mma" else dtypes[:3])),
            int(rng.integers(1, 3)),
            int(rng.integers(1, 300)),
            int(rng.integers(1, 400)),
            int(rng.integers(1, 4)),
            int(rng.choice((16, 40, 64, 96, 128, 192, 256))),
            float(rng.choice((0.004, 0.1, 0.5, 0.51, 0.9, 0.996))),
            tuple(int(x) for x in rng.integers(-(2**63), 2**63, 2)),
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "dropout_p": self.dropout_p,
            "dropout_seed": cupy.asarray(np.array(self.seed, np.int64)),
        }

    def zeros(self, rows: int) -> Any:
        """Return an array of `rows` rows, all 0."""
        return cupy.zeros((self.batch, rows, self.heads, self.head_dim), DTYPES[self.dtype])

    def units(self, rows: int) -> Iterator[tuple[slice, Any]]:
        """Yield slices of rows, and arrays that have a 1 in one column of each of these rows."""
        for first in range(0, rows, self.head_dim):
            stop = min(rows, first + self.head_dim)
            array = self.zeros(rows)
            array[:, first:stop, :, : stop - first] = unit(stop - first, array.dtype)
            yield slice(first, stop), array

    def expected(self) -> np.ndarray:
        mask = cupy_flash.dropout_mask(
            *(self.batch, self.heads, self.seqlen_q, self.seqlen_k, self.dropout_p),
            np.array(self.seed, np.int64),
        )
        return np.asarray(mask)


def unit(count: int, dtype: Any) -> Any:
    """Return the unit matrix with an axis of heads, (count, 1, count)."""
    return cupy.asarray(np.eye(count).astype(dtype))[:, None]


def tile_of(sizes: Sizes, test: int, planned: Callable[[], Plan]) -> dict[str, Any]:
    """Return the family, and a random legal tile in half of the tests; skip if it has none."""
    try:
        plan = planned()
    except UnsupportedError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng((test, 1))
    if rng.integers(2):
        return {"family": sizes.family}
    family: Any = FAMILIES[plan.problem.direction][sizes.family]
    tiles = list(family.tiles(plan.problem, current_device()))
    return {"family": sizes.family, "tile": tiles[rng.integers(len(tiles))]}


def transposed(columns: Any) -> np.ndarray:
    """Return (batch, rows, heads, columns) as (batch, heads, rows, columns), on the host."""
    return np.asarray(cupy.asnumpy(columns.astype(np.float64))).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("test", range(TESTS))
def test_the_forward_pass_drops_the_pairs_of_the_mask(test: int) -> None:
    sizes = Sizes.draw(test)
    q, k = sizes.zeros(sizes.seqlen_q), sizes.zeros(sizes.seqlen_k)
    planned = lambda: cupy_flash.plan(  # noqa: E731
        cupy_flash.flash_attention, q, k, k, family=sizes.family, **sizes.options
    )
    how = tile_of(sizes, test, planned)
    expected = sizes.expected()
    for keys, v in sizes.units(sizes.seqlen_k):
        out, lse = cupy_flash.flash_attention(
            q, k, v, return_lse=True, out=cupy.full_like(q, np.nan), **how, **sizes.options
        )
        found = transposed(out)[..., : keys.stop - keys.start]
        np.testing.assert_array_equal(found != 0, expected[..., keys])
        threshold = round(256 * sizes.dropout_p)
        weight = 256 / (256 - threshold) / sizes.seqlen_k
        np.testing.assert_allclose(found[found != 0], weight, rtol=2**-7)
        np.testing.assert_allclose(cupy.asnumpy(lse), np.log(sizes.seqlen_k), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("test", range(TESTS))
def test_the_backward_pass_drops_the_pairs_of_the_mask(test: int) -> None:
    sizes = Sizes.draw(test)
    q, k = sizes.zeros(sizes.seqlen_q), sizes.zeros(sizes.seqlen_k)
    v = sizes.zeros(sizes.seqlen_k)
    v[..., 0] = 1
    out, lse = cupy_flash.flash_attention(q, k, v, return_lse=True, **sizes.options)
    dout = sizes.zeros(sizes.seqlen_q)
    dout[..., 0] = 1
    planned = lambda: cupy_flash.plan(  # noqa: E731
        *(cupy_flash.flash_attention_backward, dout, q, k, v, out, lse),
        family=sizes.family,
        **sizes.options,
    )
    how = tile_of(sizes, test, planned)
    expected = sizes.expected()
    # dv is the sum over queries of weights times dout.
    for rows, each in sizes.units(sizes.seqlen_q):
        _, _, dv = cupy_flash.flash_attention_backward(
            each, q, k, v, out, lse, **how, **sizes.options
        )
        found = transposed(dv)[..., : rows.stop - rows.start].swapaxes(2, 3)
        np.testing.assert_array_equal(found != 0, expected[:, :, rows])
    # dP is 1 of kept and 0 of dropped pairs, and delta is between these two, times a factor, unless
    # all pairs of a row are alike. So dS is positive of kept and negative of dropped pairs.
    is_mixed = expected.any(-1) & ~expected.all(-1)
    for keys, each in sizes.units(sizes.seqlen_k):
        dq, _, _ = cupy_flash.flash_attention_backward(
            dout, q, each, v, out, lse, **how, **sizes.options
        )
        found = transposed(dq)[..., : keys.stop - keys.start]
        np.testing.assert_array_equal((found > 0)[is_mixed], expected[..., keys][is_mixed])
        assert (found[is_mixed] != 0).all()


@pytest.mark.parametrize("test", range(12))
def test_packed_sequences_drop_the_pairs_of_the_mask(test: int) -> None:
    rng = np.random.default_rng(test)
    sizes = dataclasses.replace(Sizes.draw(test), batch=4)
    queries, keys = (rng.integers(0, n + 1, 4) for n in (sizes.seqlen_q, sizes.seqlen_k))
    keys[queries > 0] = np.maximum(keys[queries > 0], 1)
    ends_q, ends_k = (np.cumsum([0, *x]).astype(np.int32) for x in (queries, keys))
    lengths = int(queries.max()), int(keys.max())
    if not min(lengths):
        pytest.skip("no pairs")
    expected = sizes.expected()
    q, k = (
        cupy.zeros((int(n[-1]), sizes.heads, sizes.head_dim), DTYPES[sizes.dtype])
        for n in (ends_q, ends_k)
    )
    for first in range(0, lengths[1], sizes.head_dim):
        v = cupy.zeros_like(k)
        for begin, count in zip(ends_k, keys, strict=False):
            stop = min(int(count), first + sizes.head_dim)
            if stop > first:
                v[begin + first : begin + stop, :, : stop - first] = unit(stop - first, v.dtype)
        try:
            out = cupy_flash.flash_attention_varlen(
                *(q, k, v, cupy.asarray(ends_q), cupy.asarray(ends_k), *lengths),
                family=sizes.family,
                **sizes.options,
            )
        except UnsupportedError as error:
            pytest.skip(str(error))
        host = cupy.asnumpy(out.astype(np.float64))
        for b in range(4):
            columns = slice(first, min(int(keys[b]), first + sizes.head_dim))
            if columns.stop <= columns.start:
                continue
            found = host[ends_q[b] : ends_q[b + 1], :, : columns.stop - columns.start]
            mask = expected[b, :, : queries[b], columns].swapaxes(0, 1)
            np.testing.assert_array_equal(found != 0, mask)


@pytest.mark.parametrize("dropout_p", [0.1, 0.9, 0.996])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_dropped_dominant_keys_have_gradients(
    kind: str, family: str, head_dim: int, dropout_p: float
) -> None:
    rng = np.random.default_rng((head_dim, round(256 * dropout_p)))
    queries, keys, heads = 70, 90, 2
    q, k, v, dout = rng.standard_normal((4, 1, keys, heads, head_dim)).astype(np.float16)
    q, dout = q[:, :queries], dout[:, :queries]
    # Each query has a key with a weight of 0.999, and many weights of the others are dropped.
    k[:, :queries] += (3.5 * q / np.sqrt(head_dim / 64)).astype(np.float16)
    options: dict[str, Any] = {
        "score_mod": cupy_flash.ScoreMod(lambda score, i, j: 0.5 * score),
        "mask_mod": cupy_flash.MaskMod(lambda i, j: j + 90 > i),
    }
    options = {kind: options[kind], "dropout_p": dropout_p, "dropout_seed": [5, 6]}
    on_gpu = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = cupy_flash.flash_attention(*on_gpu, return_lse=True, **options)
    found = cupy_flash.flash_attention_backward(
        cupy.asarray(dout), *on_gpu, out, lse, family=family, grad_dtype="float32", **options
    )
    exact = attention_backward_reference(dout, q, k, v, **options)
    naive = backward_naive(dout, q, k, v, out=cupy.asnumpy(out), **options)
    # Gradients of rows that keep a weight near 1 are below the rounding errors of `out`, and may
    # be 0 (`p_of_one_key`). The other rows of dq and dk are small compared with the whole arrays.
    mask = cupy_flash.dropout_mask(1, heads, queries, keys, dropout_p, (5, 6))
    is_dropped = ~np.diagonal(mask, axis1=2, axis2=3).swapaxes(1, 2)
    assert is_dropped.any()
    for name, got, right, other in zip("qkv", found, exact, naive, strict=True):
        # Kernels round P and dS to 16 bits: the errors are a few times 2^-11 of a row's size.
        error, bound = (
            np.abs(cupy.asnumpy(x).astype(np.float64) - right).max(-1) for x in (got, other)
        )
        size = np.abs(right).max(-1)
        is_right = error <= 4 * bound + 2**-8 * size + 1e-5
        assert (is_right if name == "v" else is_right[:, :queries][is_dropped]).all()


def test_a_captured_graph_replays_with_new_numbers() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal((1, 200, 2, 64)).astype(np.float16)) for _ in "qkv")
    seed = cupy.asarray(np.array([1, 0], np.int64))
    options = {"dropout_p": 0.3, "dropout_seed": seed}
    out = cupy.empty_like(q)
    cupy_flash.flash_attention(q, k, v, out=out, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupy_flash.flash_attention(q, k, v, out=out, **options)
        graph = stream.end_capture()
    results = []
    for offset in range(3):
        seed[1] = offset
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        results.append(cupy.asnumpy(out))
        again = cupy_flash.flash_attention(q, k, v, dropout_p=0.3, dropout_seed=[1, offset])
        assert results[-1].tobytes() == cupy.asnumpy(again).tobytes()
    assert results[0].tobytes() != results[1].tobytes() != results[2].tobytes()
