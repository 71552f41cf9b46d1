"""What a backward call does besides computing: the same bits, graphs, memory, large arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gpu_support import DTYPES, bits, require_free_memory

from cupy_flash import UnsupportedError, flash_attention, flash_attention_backward
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu

FAMILIES_OF_DTYPES = [(family, dtype) for family in FAMILIES["backward"] for dtype in DTYPES]
of_families = pytest.mark.parametrize(("family", "dtype"), FAMILIES_OF_DTYPES)


class Pass:
    """A causal call of grouped heads with its gradients, on the GPU."""

    def __init__(
        self, family: str, dtype: str, *, seqlen: int = 333, heads: int = 6, head_dim: int = 64
    ) -> None:
        import cupy

        rng = np.random.default_rng(3)
        shapes = {"q": heads, "k": heads // 2, "v": heads // 2, "dout": heads}
        self.family = family
        self.arrays = {
            name: cupy.asarray(rng.standard_normal((2, seqlen, n, head_dim)).astype(DTYPES[dtype]))
            for name, n in shapes.items()
        }

    def run(self, **options: Any) -> tuple[Any, ...]:
        """dq, dk and dv; skips the test where the family does not serve the call."""
        q, k, v = (self.arrays[name] for name in "qkv")
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        options |= {"causal": True, "family": self.family}
        try:
            return flash_attention_backward(self.arrays["dout"], q, k, v, out, lse, **options)
        except UnsupportedError as error:
            pytest.skip(str(error))


def bits_of(gradients: tuple[Any, ...]) -> list[np.ndarray]:
    return [bits(gradient.get()) for gradient in gradients]


def assert_equal_bits(found: tuple[Any, ...], expected: list[np.ndarray]) -> None:
    for gradient, of_first in zip(bits_of(found), expected, strict=True):
        np.testing.assert_array_equal(gradient, of_first)


@of_families
def test_a_thousand_passes_give_the_same_bits(family: str, dtype: str) -> None:
    import cupy

    # Each head has several tiles of keys, whose blocks run at once.
    call = Pass(family, dtype, seqlen=777, heads=8)
    first = [gradient.copy() for gradient in call.run()]
    unequal = cupy.zeros((), np.int64)
    for _ in range(1000):
        for gradient, of_first in zip(call.run(), first, strict=True):
            unequal += (gradient.view(np.uint8) != of_first.view(np.uint8)).any()
    assert int(unequal) == 0


@of_families
def test_what_the_memory_held_before_does_not_matter(family: str, dtype: str) -> None:
    import cupy

    call = Pass(family, dtype)
    expected = bits_of(call.run())
    for value in (np.nan, np.inf, 1.0):
        # The pool hands this memory on, for workspaces and results.
        cupy.get_default_memory_pool().free_all_blocks()
        dirty = cupy.full(2**22, value, np.float32)
        del dirty
        assert_equal_bits(call.run(), expected)


@of_families
def test_a_captured_pass_replays_on_new_contents(family: str, dtype: str) -> None:
    import cupy

    call = Pass(family, dtype)
    values = {name: array.copy() for name, array in call.arrays.items()}
    expected = bits_of(call.run())
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for array in call.arrays.values():
            array[...] = 0
        call.run()
        stream.begin_capture()
        gradients = call.run()
        graph = stream.end_capture()
        for name, array in call.arrays.items():
            array[...] = values[name]
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            assert_equal_bits(gradients, expected)


@of_families
def test_arrays_of_more_than_2_to_the_31_elements_are_right(family: str, dtype: str) -> None:
    import cupy

    if dtype not in ("float16", "float32"):
        pytest.skip("as float16 and float32")
    batch, seqlen, heads, dim = 2050, 128, 128, 64
    assert batch * seqlen * heads * dim > 2**31
    size = DTYPES[dtype].itemsize
    # q, out, dout and dq, and the sums of dq.
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
        # Each row is summed up in the order that it has in a call of its own.
        expected = run(slice(b, b + 1))
        assert_equal_bits(tuple(x[b : b + 1] for x in found), bits_of(expected))
    assert not any(x[1 : sampled[1] : 100].any() for x in found)
