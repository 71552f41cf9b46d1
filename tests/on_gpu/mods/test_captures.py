"""Captures on a GPU: unusual names, arrays from enclosing scopes, and signed zeros."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.mods.mod_gallery import NEGATIONS

from cupy_flash import (
    MaskMod,
    ScoreMod,
    attention_reference,
    flash_attention,
    flash_attention_backward,
)

pytestmark = pytest.mark.gpu

NAMES = ("xor", "true", "typeid", "static_assert", "NULL", "Real", "x__y", "α")


def inputs(rng: np.random.Generator, seqlen: int = 300) -> list[Any]:
    shape = (2, seqlen, 2, 64)
    return [cupy.asarray(rng.standard_normal(shape, np.float32)) for _ in range(3)]


def documents(rng: np.random.Generator, seqlen: int = 300) -> Any:
    return cupy.asarray(np.sort(rng.integers(0, 4, (2, seqlen), np.int32), axis=1))


@pytest.mark.parametrize("name", NAMES)
def test_captures_of_any_name_reach_kernels_and_block_masks(name, rng) -> None:
    q, k, v = (x.astype(np.float16) for x in inputs(rng))
    array, factor = documents(rng), f"{name}_2"
    mask = MaskMod(eval(f"lambda b, i, j, {name}: {name}[b, i] == {name}[b, j]"), **{name: array})
    score = ScoreMod(eval(f"lambda score, {factor}: score * {factor}"), **{factor: 0.5})
    given = {"mask_mod": mask, "score_mod": score}
    out = flash_attention(q, k, v, **given)
    expected = attention_reference(q, k, v, **given)
    cupy.testing.assert_allclose(out.astype(float), expected, atol=4e-3)


def test_arrays_around_a_function_are_read_at_each_call(rng) -> None:
    q, k, v = (x.astype(np.float16) for x in inputs(rng))
    segment, bias = documents(rng), cupy.zeros((2, 300), np.float32)

    def same(b: Any, i: Any, j: Any) -> Any:
        return segment[b, i] == segment[b, j]

    mask = MaskMod(lambda b, i, j: same(b, i, j) & (j <= i))
    score = ScoreMod(lambda score, h, j: score + bias[h, j], differentiable=("bias",))
    given = {"mask_mod": mask, "score_mod": score}
    for _ in range(2):
        out, lse = flash_attention(q, k, v, return_lse=True, **given)
        expected = attention_reference(q, k, v, **given)
        cupy.testing.assert_allclose(out.astype(float), expected, atol=4e-3)
        *rest, dbias = flash_attention_backward(out, q, k, v, out, lse, **given)
        assert dbias.shape == bias.shape
        assert all(bool(cupy.isfinite(x).all()) for x in (*rest, dbias))
        segment[...] = documents(rng)
        bias[...] = cupy.asarray(rng.standard_normal((2, 300), np.float32))
        mask.refresh()


def test_zeros_of_both_signs_do_not_share_a_call(rng) -> None:
    q, k, v = inputs(rng)
    for value in (0.0, -0.0, 0.0):
        mod = ScoreMod(lambda score, c: np.where(1 / c > 0, score, -score), c=value)
        sign = -1 if np.signbit(value) else 1
        expected = attention_reference(q, k, v, softmax_scale=sign / 8)
        out = flash_attention(q, k, v, score_mod=mod)
        cupy.testing.assert_allclose(out, expected, atol=1e-4)


def test_device_arrays_are_equal_where_they_are_one(rng) -> None:
    segment = documents(rng)

    def make(array: Any) -> MaskMod:
        return MaskMod(lambda b, i, j: array[b, i] == array[b, j])

    assert make(segment) == make(segment) == make(segment[:])
    assert hash(make(segment)) == hash(make(segment.copy()))
    assert make(segment) != make(segment.copy())
    assert make(segment) != make(segment.get())


def test_a_pickled_mask_has_arrays_on_the_gpu(rng) -> None:
    q, k, v = (x.astype(np.float16) for x in inputs(rng))
    segment = documents(rng)
    mask = MaskMod(lambda b, i, j: segment[b, i] == segment[b, j])
    again = pickle.loads(pickle.dumps(mask))
    assert again.traced is mask.traced
    cupy.testing.assert_array_equal(
        flash_attention(q, k, v, mask_mod=again), flash_attention(q, k, v, mask_mod=mask)
    )


@pytest.mark.parametrize("negation", NEGATIONS)
@pytest.mark.parametrize("of_minima", [True, False])
def test_nested_minima_and_maxima_keep_the_signs_of_negations(of_minima, negation, rng) -> None:
    q, k, v = (x.astype(np.float16) for x in inputs(rng))
    t, negated = cupy.arange(300, dtype=np.int32), NEGATIONS[negation]

    def sees(i: Any, j: Any, t: Any) -> Any:
        if of_minima:
            return np.minimum(np.minimum(i + t[i], negated(j, t)), 60) > -120
        return np.maximum(np.maximum(t[i] - 300, negated(j, t)), -200) < -90

    mask = MaskMod(sees, t=t)
    out = flash_attention(q, k, v, mask_mod=mask)
    expected = attention_reference(q, k, v, mask_mod=mask)
    cupy.testing.assert_allclose(out.astype(float), expected, atol=4e-3)
    everything = attention_reference(q, k, v)
    assert float(abs(expected - everything).max()) > 0.1
