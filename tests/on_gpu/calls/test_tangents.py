"""Tangents by kernels: the error rule and edge cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_equal
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES
from support.gradients.directions import moving_modifications, tangents_of
from support.gradients.gradient_calls import ROWS, random_gradient_call
from support.gradients.tangent_rule import (
    check_packed_tangents,
    check_tangents,
    packed_call,
)

from cupy_flash import (
    UnsupportedError,
    flash_attention_hvp,
    flash_attention_jvp,
    flash_attention_varlen_hvp,
    flash_attention_varlen_jvp,
)
from cupy_flash.calls import dispatch_tangents
from cupy_flash.calls.options import Options
from cupy_flash.cli.measure.check import why_no_matmul
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu

FAMILY_NAMES = tuple(FAMILIES["tangent"])
_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout")


def poison(*arrays: Any) -> None:
    """Fill free memory that results may receive with NaN."""
    for array in arrays:
        cupy.full(array.shape, np.nan, array.dtype)
        cupy.full(array.shape, np.nan, np.float32)


def by_kernel(
    family: str, inputs: Any, direction: Any, options: dict[str, Any]
) -> list[np.ndarray]:
    """Return out, its tangent, lse and its tangent, computed by a family."""
    plain = {name: options[name] for name in _OPTIONS if name in options}
    mods = {name: value for name, value in options.items() if name not in plain}
    poison(*inputs)
    results = dispatch_tangents.on_gpu(
        tuple(inputs), tuple(direction), Options(family=family, **plain), mods
    )
    assert results is not None
    return [cupy.asnumpy(x) for x in results]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("number", range(20))
def test_tangents_obey_the_error_rule(
    family: str, dtype: str, kind: str, number: int, rng: Any
) -> None:
    longest = (330, 450) if family == "mma" else (90, 150)
    call = random_gradient_call(rng, dtype, kind, longest=longest)
    inputs, host_options = call.forward.given(np)
    moved = rng.integers(1, 8)
    direction = [x if moved >> i & 1 else None for i, x in enumerate(tangents_of(inputs, rng))]
    on_gpu, options = call.forward.given(cupy)
    its_direction = [None if x is None else cupy.asarray(x) for x in direction]
    try:
        results = by_kernel(family, on_gpu, its_direction, options)
    except UnsupportedError:
        pytest.skip(f"{family} does not serve this call")
    call.forward.compare(results[0], results[2])
    check_tangents(results, inputs, direction, host_options, call)


def arrays_of(rng: Any, dtype: str, seqlens: tuple[int, int], dim: int = 40) -> list[Any]:
    """Return q, k, v and their tangents: batch 2, 4 query heads, 2 KV heads, head_dim_v 24."""
    shapes = [(seqlens[0], 4, dim), (seqlens[1], 2, dim), (seqlens[1], 2, 24)] * 2
    return [
        cupy.asarray(rng.standard_normal((2, *shape)).astype(DTYPES[dtype])) for shape in shapes
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_one_key_has_the_tangent_of_its_value(dtype: str, rng: Any) -> None:
    arrays = arrays_of(rng, dtype, (150, 150))
    out, out_tangent = flash_attention_jvp(*arrays, window_size=(0, 0), softcap=5.0)
    for found, i in ((out, 2), (out_tangent, 5)):
        np.testing.assert_array_equal(found.get(), arrays[i].get().repeat(2, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_pairs_affect_no_tangent(dtype: str, rng: Any) -> None:
    arrays = arrays_of(rng, dtype, (75, 130))
    mask = rng.random((75, 130)) < 0.7
    # The first rows attend to no key, and no row attends to key 7 or to the keys 90 to 129.
    mask[:3] = mask[:, 7] = mask[:, 90:] = False
    options = {"mask": cupy.asarray(mask), "return_lse": True}
    expected = [cupy.asnumpy(x) for x in flash_attention_jvp(*arrays, **options)]
    for i in (0, 3):
        arrays[i][:, :3] = np.nan
    for i in (1, 4):
        arrays[i][:, 7] = -np.inf
        arrays[i][:, 90:] = np.nan
    poison(*arrays)
    found = [cupy.asnumpy(x) for x in flash_attention_jvp(*arrays, **options)]
    assert_all_equal(found, expected)
    assert not found[1][:, :3].any()
    assert not found[3][..., :3].any()
    assert all(x.any() for x in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(8))
def test_packed_sequences_obey_the_error_rule(dtype: str, number: int, rng: Any) -> None:
    inputs, direction, lengths, options = packed_call(rng, DTYPES[dtype])
    on_gpu = [cupy.asarray(x) for x in (*inputs, *lengths[:2], *direction)]
    poison(*on_gpu[:3])
    moved = {
        name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    results = flash_attention_varlen_jvp(
        *on_gpu[:5], *lengths[2:], *on_gpu[5:], return_lse=True, **moved
    )
    found = [cupy.asnumpy(x) for x in results]
    check_packed_tangents(found, inputs, direction, lengths, options)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_products_of_all_inputs_are_those_of_host_arrays(kind: str, rng: Any) -> None:
    """Array operations compute them, in float64 with the same formula as on the host."""
    if reason := why_no_matmul():
        pytest.skip(reason)
    call = random_gradient_call(rng, "float64", kind, longest=(60, 90), dropout=False)
    inputs, host_options = call.forward.given(np)
    on_gpu, options = call.forward.given(cupy)
    moving = moving_modifications(host_options)
    names = (*ROWS, *moving)
    direction = tangents_of(inputs[:3], rng)
    tangents = dict(zip(moving, tangents_of(moving.values(), rng), strict=True))
    jvp, hvp = flash_attention_jvp, flash_attention_hvp
    if kind == "varlen":
        jvp, hvp = flash_attention_varlen_jvp, flash_attention_varlen_hvp
    found, expected = [], []
    for xp, given, its_options, results in (
        (np, inputs, host_options, expected),
        (cupy, on_gpu, options, found),
    ):
        rows, of_mods = [xp.asarray(x) for x in direction], dict(its_options)
        of_mods["modification_tangents"] = {n: xp.asarray(x) for n, x in tangents.items()}
        results += jvp(*given, *rows, return_lse=True, **of_mods)
        results += hvp(xp.asarray(call.dout), *given, *rows, wrt=names, **of_mods)
    for one, other in zip(found, expected, strict=True):
        size = np.abs(other[np.isfinite(other)]).max(initial=1)
        np.testing.assert_allclose(cupy.asnumpy(one), other, rtol=0, atol=1e-9 * size)
