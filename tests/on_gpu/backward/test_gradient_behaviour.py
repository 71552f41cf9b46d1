"""Behaviour of backward calls: reproducible bits, graphs, memory, large arrays."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES, bits, capture_call, require_free_memory

from cupy_flash import (
    UnsupportedError,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
)
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu

KINDS = ("dense", "padded", "varlen")
Kernel = tuple[str, str, str, int]  # family, dtype, kind and head_dim of a call
# Calls of every family and dtype. Two families accumulate dq in a fixed order, and also have calls
# of all kinds and several head dims.
CALLS = [(family, dtype, "dense", 64) for family in FAMILIES["backward"] for dtype in DTYPES]
CALLS += [
    (family, dtype, kind, head_dim)
    for family, dtypes in (("hopper", ("bfloat16",)), ("mma", ("float16", "float32")))
    for dtype in dtypes
    for kind in KINDS
    for head_dim in (64, 96, 128, 192, 256)
    if (kind, head_dim) != ("dense", 64)
]
CALLS += [("mma", dtype, kind, 512) for dtype in ("float16", "float32") for kind in KINDS]
CALLS += [("hopper", "bfloat16", "dense", head_dim) for head_dim in (320, 512)]


@pytest.fixture(params=CALLS, ids=lambda call: "-".join(map(str, call)))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


class Pass:
    """Causal GQA call with its gradients, on the GPU."""

    def __init__(
        self,
        family: str,
        dtype: str,
        kind: str = "dense",
        head_dim: int = 64,
        *,
        seqlen: int = 333,
        heads: int = 6,
    ) -> None:
        rng = np.random.default_rng(3)
        rows = (2 * seqlen,) if kind == "varlen" else (2, seqlen)
        shapes = {"q": heads, "k": heads // 2, "v": heads // 2, "dout": heads}
        self.family = family
        self.arrays = {
            name: cupy.asarray(rng.standard_normal((*rows, n, head_dim)).astype(DTYPES[dtype]))
            for name, n in shapes.items()
        }
        self._lengths: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {"causal": True}
        self._functions: tuple[Any, ...] = (flash_attention, flash_attention_backward)
        if kind == "padded":
            lengths = np.array([seqlen - 50, seqlen // 2], np.int32)
            self._options["seqlens_k"] = cupy.asarray(lengths)
        elif kind == "varlen":
            # Sequence 0 is short, sequence 2 is empty, and the last 9 rows belong to no sequence.
            starts = np.array([0, 5, seqlen, seqlen, 2 * seqlen - 9], np.int32)
            self._lengths = (cupy.asarray(starts), cupy.asarray(starts), seqlen, seqlen)
            self._functions = (flash_attention_varlen, flash_attention_varlen_backward)

    def run(self, **options: Any) -> tuple[Any, ...]:
        """Return dq, dk and dv; skip the test if the family does not support the call."""
        dout, q, k, v = (self.arrays[name] for name in ("dout", *"qkv"))
        forward, backward = self._functions
        out, lse = forward(q, k, v, *self._lengths, return_lse=True, **self._options)
        options |= self._options | {"family": self.family}
        try:
            found: tuple[Any, ...] = backward(dout, q, k, v, out, lse, *self._lengths, **options)
        except UnsupportedError as error:
            pytest.skip(str(error))
        return found


def bits_of(gradients: tuple[Any, ...]) -> list[np.ndarray]:
    return [bits(gradient.get()) for gradient in gradients]


def assert_equal_bits(found: tuple[Any, ...], expected: list[np.ndarray]) -> None:
    for gradient, of_first in zip(bits_of(found), expected, strict=True):
        np.testing.assert_array_equal(gradient, of_first)


def test_a_thousand_passes_give_the_same_bits(kernel: Kernel) -> None:
    # Each head has several KV tiles, whose thread blocks run at the same time.
    call = Pass(*kernel, seqlen=777, heads=8)
    first = [gradient.copy() for gradient in call.run()]
    unequal = cupy.zeros((), np.int64)
    for _ in range(1000):
        for gradient, of_first in zip(call.run(), first, strict=True):
            unequal += (gradient.view(np.uint8) != of_first.view(np.uint8)).any()
    assert int(unequal) == 0


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("short_sequences", [9, 1200])
def test_the_order_of_packed_sequences_does_not_change_a_bit(
    short_sequences: int, head_dim: int, rng: np.random.Generator
) -> None:
    # The grid processes the sequences in the order of their lengths, unless there are more than
    # 1024. Some queries of sequences with more queries than keys attend to no key.
    lengths = [(700, 700), (300, 0), (0, 90), (64, 128), (129, 40), (400, 129)]
    lengths += [(n, n) for n in rng.integers(0, 200, short_sequences).tolist()]
    shapes = {"q": (0, 4), "k": (1, 2), "v": (1, 2), "dout": (0, 4)}
    sequences = [
        {
            name: rng.standard_normal((rows[side], heads, head_dim)).astype(DTYPES["bfloat16"])
            for name, (side, heads) in shapes.items()
        }
        for rows in lengths
    ]

    def gradients(order: np.ndarray) -> list[list[np.ndarray]]:
        """Return the bits of dq, dk and dv of each sequence, packed in this order."""
        dout, q, k, v = (
            cupy.asarray(np.concatenate([sequences[i][name] for i in order]))
            for name in ("dout", *"qkv")
        )
        of_order = np.array([lengths[i] for i in order], np.int32)
        ends = np.concatenate([[[0, 0]], np.cumsum(of_order, axis=0, dtype=np.int32)])
        starts = [cupy.asarray(np.ascontiguousarray(x.astype(np.int32))) for x in ends.T]
        call = (*starts, 700, 700)
        out, lse = flash_attention_varlen(q, k, v, *call, return_lse=True, causal=True)
        found = flash_attention_varlen_backward(
            dout, q, k, v, out, lse, *call, causal=True, family="hopper"
        )
        parts = [
            np.split(bits(x.get()), of_side[1:-1])
            for x, of_side in zip(found, (ends[:, 0], ends[:, 1], ends[:, 1]), strict=True)
        ]
        position = np.argsort(order)
        return [[part[place] for part in parts] for place in position]

    try:
        expected = gradients(np.arange(len(lengths)))
    except UnsupportedError as error:
        pytest.skip(str(error))
    for order in (np.arange(len(lengths))[::-1], rng.permutation(len(lengths))):
        for found, right in zip(gradients(order), expected, strict=True):
            for one, other in zip(found, right, strict=True):
                np.testing.assert_array_equal(one, other)


def test_what_the_memory_held_before_does_not_matter(kernel: Kernel) -> None:
    call = Pass(*kernel)
    expected = bits_of(call.run())
    for value in (np.nan, np.inf, 1.0):
        # The memory pool reuses this memory for workspaces and results.
        cupy.get_default_memory_pool().free_all_blocks()
        dirty = cupy.full(2**22, value, np.float32)
        del dirty
        assert_equal_bits(call.run(), expected)


def test_a_captured_pass_replays_on_new_contents(kernel: Kernel) -> None:
    call = Pass(*kernel)
    values = {name: array.copy() for name, array in call.arrays.items()}
    expected = bits_of(call.run())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for array in call.arrays.values():
            array[...] = 0
        graph, gradients = capture_call(stream, call.run)
        for name, array in call.arrays.items():
            array[...] = values[name]
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            assert_equal_bits(gradients, expected)


def test_passes_on_streams_that_run_at_once_do_not_disturb_each_other(kernel: Kernel) -> None:
    call = Pass(*kernel)
    expected = bits_of(call.run())
    cupy.cuda.Device().synchronize()
    found = []
    for _ in range(12):
        # The stream is destroyed while its kernels run. The next one may get its handle and memory.
        with cupy.cuda.Stream(non_blocking=True):
            found += [call.run() for _ in range(2)]
    cupy.cuda.Device().synchronize()
    for gradients in found:
        assert_equal_bits(gradients, expected)


def test_repeated_calls_of_threads_give_the_bits_of_the_general_path() -> None:
    """Threads on streams of their own repeat calls that differ in shape, dtype and options."""
    calls = []
    for dtype, seqlen, heads, causal in (
        ("float16", 128, 4, True),
        ("float16", 128, 4, False),
        ("bfloat16", 128, 4, True),
        ("float16", 77, 2, True),
        ("float32", 128, 4, True),
    ):
        rng = np.random.default_rng(seqlen)
        values = rng.standard_normal((4, 1, seqlen, heads, 64)).astype(DTYPES[dtype])
        q, k, v, dout = (cupy.asarray(x) for x in values)
        out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
        calls.append(((dout, q, k, v, out, lse), causal))
    # A call with `wrt` takes the general path.
    names = ("q", "k", "v")
    expected = [
        bits_of(flash_attention_backward(*arrays, causal=causal, wrt=names))
        for arrays, causal in calls
    ]
    cupy.cuda.Device().synchronize()

    def repeat(first: int) -> list[tuple[int, tuple[Any, ...]]]:
        found = []
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for n in range(first, first + 100):
                index = n % len(calls)
                arrays, causal = calls[index]
                found.append((index, flash_attention_backward(*arrays, causal=causal)))
            stream.synchronize()
        return found

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in pool.map(repeat, range(8)):
            for index, gradients in found:
                assert_equal_bits(gradients, expected[index])


def test_repeated_calls_use_the_allocator_that_is_current() -> None:
    q, k, v, dout = (cupy.ones((1, 64, 2, 64), np.float16) for _ in range(4))
    out, lse = flash_attention(q, k, v, return_lse=True)
    first = bits_of(flash_attention_backward(dout, q, k, v, out, lse))
    sizes: list[int] = []

    def alloc(size: int) -> Any:
        sizes.append(size)
        return cupy.get_default_memory_pool().malloc(size)

    with cupy.cuda.using_allocator(alloc):
        gradients = flash_attention_backward(dout, q, k, v, out, lse)
    # One allocation holds the gradients, and also the workspace unless it is much larger.
    assert 1 <= len(sizes) <= 2
    assert_equal_bits(gradients, first)
    assert all(gradient.flags.owndata and gradient.base is None for gradient in gradients)
    gradients[0][...] = 7
    assert_equal_bits(gradients[1:], first[1:])


@pytest.mark.parametrize("family", FAMILIES["backward"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_arrays_of_more_than_2_to_the_31_elements_are_right(family: str, dtype: str) -> None:
    batch, seqlen, heads, dim = 2050, 128, 128, 64
    assert batch * seqlen * heads * dim > 2**31
    size = DTYPES[dtype].itemsize
    # This is the memory of q, out, dout and dq, and of the float32 accumulator of dq.
    require_free_memory((4 * size + 5) * batch * seqlen * heads * dim)
    shapes = {"q": heads, "k": 1, "v": 1, "dout": heads}
    arrays = {
        name: cupy.zeros((batch, seqlen, n, dim), DTYPES[dtype]) for name, n in shapes.items()
    }
    rng = np.random.default_rng(4)
    sampled = (0, 1024, batch - 1)
    for b in sampled:
        for array in arrays.values():
            array[b] = cupy.asarray(rng.standard_normal(array.shape[1:]).astype(array.dtype))

    def run(at: slice) -> tuple[Any, ...]:
        dout, q, k, v = (arrays[name][at] for name in ("dout", *"qkv"))
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        try:
            return flash_attention_backward(dout, q, k, v, out, lse, causal=True, family=family)
        except UnsupportedError as error:
            pytest.skip(str(error))

    found = run(slice(None))
    for b in sampled:
        # dq is accumulated in the same order as in a call for this sequence alone. In that call,
        # thread blocks divide the query heads of a KV head, which changes the order of the float32
        # sums of dk and dv. A sum of 2^14 terms is then rounded differently by about 2^-17 of the
        # largest sums, and the result by up to one unit in the last place of its dtype.
        expected = run(slice(b, b + 1))
        assert_equal_bits((found[0][b : b + 1],), bits_of(expected[:1]))
        for whole, alone in zip(found[1:], expected[1:], strict=True):
            one, other = (x.get().astype(np.float64) for x in (whole[b : b + 1], alone))
            last_place = 2.0**-10 if dtype == "float16" else 2.0**-22
            atol = 2.0**-17 * float(np.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=last_place, atol=atol)
    assert not any(x[1 : sampled[1] : 100].any() for x in found)
