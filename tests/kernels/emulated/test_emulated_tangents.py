"""Tangent kernels, run on the host: the error rule on random calls."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES
from support.comparisons import assert_all_equal
from support.draws import few_then_slow
from support.emulated_kernels import run_on_host
from support.gradients.directions import tangents_of
from support.gradients.gradient_calls import random_gradient_call
from support.gradients.tangent_rule import (
    check_packed_tangents,
    check_tangents,
    packed_call,
)

from cupy_flash import attention_jvp_reference, flash_attention, flash_attention_varlen
from cupy_flash.calls.arguments import TangentArguments, normalized, with_modifications
from cupy_flash.calls.check.tangents import check_tangent_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import Options, plain_options, with_offsets
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import tangent_of

DEVICE = device_for_arch("sm_90")
# Families that compute tangents of packed and padded sequences.
PACKED_FAMILIES = [name for name, family in FAMILIES["tangent"].items() if family.serves_sequences]
_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def tangents_on_host(
    family: str,
    inputs: Any,
    direction: Any,
    options: dict[str, Any],
    folder: Path,
    lengths: tuple[Any, ...] = (),
) -> list[np.ndarray]:
    """Return out, its tangent, lse and its tangent; the tangents are computed by a kernel."""
    plain = {name: options[name] for name in _OPTIONS if name in options}
    mods = {name: value for name, value in options.items() if name not in plain}
    its_options, mods = with_offsets(Options(**plain), mods)
    if lengths:
        longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), lengths[2:], strict=True))
        its_options = its_options._replace(kind="varlen", **longest)
        forward = functools.partial(flash_attention_varlen, *inputs, *lengths)
    else:
        forward = functools.partial(flash_attention, *inputs)
    out, lse = forward(**options, return_lse=True, backend="cpu")
    arguments = TangentArguments(*inputs, out, lse, *direction, *lengths[:2])
    arguments, mod_key, _ = with_modifications(arguments, mods, backward=True)
    its_options = plain_options(its_options._replace(mod_key=mod_key))
    arguments, _ = normalized(arguments, ())
    arguments = converted(arguments, its_options)
    problem, mod_arrays = check_tangent_call(arguments, its_options)
    plan = make_plan(problem, DEVICE, family=family)
    # The call clears rows that may belong to no sequence.
    results = [np.full(x.shape, 0 if lengths else np.nan, x.dtype) for x in (out, lse)]
    arrays = dict(zip(("q", "k", "v", "out", "lse"), (*inputs, out, lse), strict=True))
    arrays |= {tangent_of(n): x for n, x in zip("qkv", direction, strict=True) if x is not None}
    arrays |= {tangent_of(n): x for n, x in zip(("out", "lse"), results, strict=True)}
    arrays |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=False))
    if problem.layout.kind == "padded":
        arrays["seqused_k"] = arguments.seqlens_k
    run_on_host(plan, its_options, mod_arrays, arrays, folder)
    return [out, results[0], lse, results[1]]


@pytest.mark.parametrize(
    ("family", "kind"),
    [*itertools.product(PACKED_FAMILIES, ("dense", "padded")), ("hopper", "dense")],
)
@pytest.mark.parametrize("number", few_then_slow(range(3), 1))
def test_tangents_obey_the_error_rule(
    family: str, kind: str, number: int, folder: Path, rng: Any
) -> None:
    dtypes = ("float32", "float64", "float16") if family == "simt" else ("float16", "bfloat16")
    dtype = str(rng.choice(dtypes))
    # TMA needs aligned rows.
    head_dims = (8, 24, 64, 80) if family == "hopper" else (5, 24, 64)
    call = random_gradient_call(rng, dtype, kind, head_dims=head_dims, longest=(90, 150))
    inputs, options = call.forward.given(np)
    inputs = [np.ascontiguousarray(x) for x in inputs]
    moved = rng.integers(1, 8)
    direction = [x if moved >> i & 1 else None for i, x in enumerate(tangents_of(inputs, rng))]
    results = tangents_on_host(family, inputs, direction, options, folder)
    check_tangents(results, inputs, direction, options, call)


@pytest.mark.parametrize("family", PACKED_FAMILIES)
@pytest.mark.parametrize("number", few_then_slow(range(3), 1))
def test_packed_sequences_obey_the_error_rule(
    family: str, number: int, folder: Path, rng: Any
) -> None:
    dtype = np.dtype(np.float16 if family == "mma" else rng.choice(("float32", "float64")))
    inputs, direction, lengths, options = packed_call(rng, dtype)
    results = tangents_on_host(family, inputs, direction, options, folder, lengths)
    check_packed_tangents(results, inputs, direction, lengths, options)


def arrays_of(rng: Any, dtype: str, seqlens: tuple[int, int]) -> list[np.ndarray]:
    """Return q, k, v and their tangents: batch 1, 4 query heads, 2 KV heads, dims 40 and 24."""
    shapes = [(seqlens[0], 4, 40), (seqlens[1], 2, 40), (seqlens[1], 2, 24)] * 2
    return [rng.standard_normal((1, *shape)).astype(dtype) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("hopper", "float16"), ("mma", "float16"), ("simt", "float32")]
)
def test_a_row_with_one_key_has_the_tangent_of_its_value(
    family: str, dtype: str, folder: Path, rng: Any
) -> None:
    arrays = arrays_of(rng, dtype, (150, 150))
    options = {"window_size": (0, 0), "softcap": 5.0}
    results = tangents_on_host(family, arrays[:3], arrays[3:], options, folder)
    np.testing.assert_array_equal(results[1], arrays[5].repeat(2, 2))
    # A mask may leave one key in any KV tile.
    mask = np.zeros((150, 150), bool)
    mask[np.arange(150), rng.permutation(150)] = True
    results = tangents_on_host(family, arrays[:3], arrays[3:], {"mask": mask}, folder)
    np.testing.assert_array_equal(results[1], arrays[5][:, mask.argmax(1)].repeat(2, 2))


@pytest.mark.parametrize(
    ("family", "dtype"), [("hopper", "float16"), ("mma", "float16"), ("simt", "float32")]
)
def test_masked_pairs_affect_no_tangent(family: str, dtype: str, folder: Path, rng: Any) -> None:
    arrays = arrays_of(rng, dtype, (75, 130))
    mask = rng.random((75, 130)) < 0.7
    # The first rows attend to no key, and no row attends to key 7 or to the keys 90 to 129.
    mask[:3] = mask[:, 7] = mask[:, 90:] = False
    expected = tangents_on_host(family, arrays[:3], arrays[3:], {"mask": mask}, folder)
    for i in (0, 3):
        arrays[i][:, :3] = np.nan
    for i in (1, 4):
        arrays[i][:, 7] = -np.inf
        arrays[i][:, 90:] = np.nan
    found = tangents_on_host(family, arrays[:3], arrays[3:], {"mask": mask}, folder)
    assert_all_equal(found, expected)
    assert not found[1][:, :3].any()
    assert not found[3][..., :3].any()
    assert all(x.any() for x in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("hopper", "float16"),
        ("hopper", "bfloat16"),
        ("mma", "float16"),
        ("mma", "bfloat16"),
        ("simt", "float16"),
        ("simt", "float32"),
    ],
)
@pytest.mark.parametrize("key", few_then_slow((0, 149), 1))
@pytest.mark.parametrize("boost", few_then_slow((12.0, 3.0), 1))
def test_a_key_with_most_of_the_weight_costs_no_accuracy(
    family: str, dtype: str, key: int, boost: float, folder: Path, rng: Any
) -> None:
    """The tangent of the scores in the first KV tile says nothing about the row then."""
    arrays = arrays_of(rng, DTYPES[dtype], (40, 150))
    for x in arrays[:2]:
        x[..., 0] = 0
    arrays[0][..., 0] = boost
    arrays[1][:, key, :, 0] = 40**0.5
    results = tangents_on_host(family, arrays[:3], arrays[3:], {}, folder)
    check_tangents(results, arrays[:3], arrays[3:], {}, (key, boost))
    sinks = {"sinks": np.array([-2.0, boost, 0.5, boost + 3], np.float32)}
    results = tangents_on_host(family, arrays[:3], arrays[3:], sinks, folder)
    check_tangents(results, arrays[:3], arrays[3:], sinks, (key, boost, "sinks"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hopper", "mma"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])
def test_small_and_large_tangents_of_float16_keep_their_digits(
    family: str, size: float, folder: Path, rng: Any
) -> None:
    arrays = arrays_of(rng, np.float16, (20, 600))
    arrays[3] = (arrays[3] * size).astype(np.float16)
    arrays[4] = (arrays[4] * size).astype(np.float16)
    arrays[5][:] = 0
    _, found, _, _ = tangents_on_host(family, arrays[:3], arrays[3:], {}, folder)
    _, exact = attention_jvp_reference(*arrays)
    # Each of 600 terms is rounded twice, by 2^-11, and the output itself. Their signs are random.
    assert np.abs(found - exact).max() <= 2.0**-9 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("hopper", "float16"), ("mma", "float16"), ("simt", "float32")]
)
def test_huge_scores_of_a_row_with_one_key_cost_no_accuracy(
    family: str, dtype: str, folder: Path, rng: Any
) -> None:
    arrays = arrays_of(rng, DTYPES[dtype], (90, 90))
    arrays[0] *= 1000
    options = {"window_size": (0, 0), "softmax_scale": 1.0}
    _, found, _, _ = tangents_on_host(family, arrays[:3], arrays[3:], options, folder)
    np.testing.assert_array_equal(found, arrays[5].repeat(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [("hopper", "bfloat16"), ("mma", "float16"), ("simt", "float32")]
)
def test_a_sink_with_most_of_the_weight_costs_no_accuracy(
    family: str, dtype: str, folder: Path, rng: Any
) -> None:
    arrays = arrays_of(rng, DTYPES[dtype], (20, 40))
    options = {"sinks": np.array([15, 16, 18, 20], np.float32)}
    results = tangents_on_host(family, arrays[:3], arrays[3:], options, folder)
    check_tangents(results, arrays[:3], arrays[3:], options, dtype)
