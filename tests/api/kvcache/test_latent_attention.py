"""KV caches whose keys contain the values, as in multi-head latent attention (MLA)."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support import refusals
from support.comparisons import with_arrays
from support.foreign import Foreign

from cupy_flash import flash_attention_with_kvcache, plan
from cupy_flash.reference.packed import attention_with_kvcache_reference

assert_refused = functools.partial(refusals.assert_refused, flash_attention_with_kvcache)


def latents(rng, **more):
    """Return a call of 2 sequences: 40 keys of 72 columns, 48 of them values, and 2 new keys."""
    return {
        "q": rng.standard_normal((2, 3, 4, 72)).astype(np.float32),
        "k_cache": rng.standard_normal((2, 40, 1, 72)).astype(np.float32),
        "v_cache": None,
        "k": rng.standard_normal((2, 2, 1, 72)).astype(np.float32),
        "cache_seqlens": np.array([31, 0], np.int32),
        "head_dim_v": 48,
    } | more


def separate(arguments):
    """Return the same call with the values in a separate cache."""
    given = {name: value for name, value in arguments.items() if name != "head_dim_v"}
    columns = arguments["head_dim_v"]
    given["v_cache"] = given["k_cache"][..., :columns].copy()
    given["v"] = given["k"][..., :columns]
    if "k_scale" in given:
        given["v_scale"] = given["k_scale"].copy()
    return given


@pytest.mark.parametrize("columns", [1, 48, 72])
@pytest.mark.parametrize("causal", [False, True])
def test_values_in_keys_give_what_values_of_their_own_give(rng, causal, columns):
    arguments = latents(rng, causal=causal, head_dim_v=columns)
    others = separate(arguments)
    out = flash_attention_with_kvcache(**arguments, backend="cpu")
    np.testing.assert_array_equal(out, flash_attention_with_kvcache(**others, backend="cpu"))
    assert out.shape == (2, 3, 4, columns)
    np.testing.assert_array_equal(arguments["k_cache"], others["k_cache"])
    np.testing.assert_array_equal(arguments["k_cache"][0, 31:33], arguments["k"][0])


def test_they_are_the_columns_of_the_keys_of_the_formula(rng):
    arguments = latents(rng)
    others = separate(arguments)
    expected = attention_with_kvcache_reference(**others).out
    out = flash_attention_with_kvcache(**arguments, backend="cpu")
    np.testing.assert_allclose(out, expected, rtol=0, atol=4e-6)


def test_a_cache_of_8_bits_has_one_scale_for_both(rng):
    arguments = latents(rng, compute_scales=True)
    arguments["k_cache"] = rng.integers(-127, 128, (2, 40, 1, 72)).astype(np.int8)
    arguments["k_scale"] = rng.uniform(0.01, 0.02, (2, 40, 1)).astype(np.float32)
    others = separate(arguments)
    del others["compute_scales"]
    out = flash_attention_with_kvcache(**arguments, backend="cpu")
    # The scale belongs to the key's largest magnitude, which may lie outside the value columns.
    scale = np.abs(arguments["k"][0]).max(axis=-1) / np.float32(127)
    np.testing.assert_array_equal(arguments["k_scale"][0, 31:33], scale)
    others["k_scale"], others["v_scale"] = (arguments["k_scale"].copy() for _ in range(2))
    np.testing.assert_array_equal(out, flash_attention_with_kvcache(**others, backend="cpu"))


def test_arrays_of_another_library_are_answered_in_kind(rng):
    arguments = latents(rng)
    foreign = with_arrays(lambda array: Foreign(array.copy()), arguments)
    expected = flash_attention_with_kvcache(**arguments, backend="cpu")
    out = flash_attention_with_kvcache(**foreign, backend="cpu")
    assert isinstance(out, Foreign)
    np.testing.assert_array_equal(np.from_dlpack(out), expected)


def test_what_does_not_go_with_values_in_keys_is_refused_by_name(rng):
    arguments = latents(rng)
    values = np.zeros((2, 40, 1, 48), np.float32)
    both = "is given, but with head_dim_v k_cache holds the values; pass only one"
    assert_refused(ValueError, f"v_cache {both}", arguments | {"v_cache": values})
    assert_refused(ValueError, f"v {both}", arguments | {"v": values[:, :2]})
    assert_refused(ValueError, f"v_scale {both}", arguments | {"v_scale": np.ones(1, np.float32)})
    hint = "v_cache is a NoneType.*the first columns of the keys, pass .* head_dim_v"
    assert_refused(TypeError, hint, arguments | {"head_dim_v": None})
    assert_refused(ValueError, "head_dim_v is 73; expected 1 to 72", arguments | {"head_dim_v": 73})
    assert_refused(ValueError, "head_dim_v is 0; expected 1 to 72", arguments | {"head_dim_v": 0})
    assert_refused(TypeError, "head_dim_v is 4.5", arguments | {"head_dim_v": 4.5})


def on(gpu, **changes):
    caches = {"k_cache": gpu.array(4, 61, 1, 72), "v_cache": None, "cache_seqlens": gpu.lengths(3)}
    return {"q": gpu.array(3, 1, 16, 72), **caches, "head_dim_v": 48, **changes}


@pytest.mark.parametrize("family", ["decode", "mma", "simt", "hopper"])
def test_kernels_are_told_that_the_values_lie_where_the_keys_do(gpu, family):
    arguments = on(gpu)
    out = flash_attention_with_kvcache(**arguments, family=family)
    assert out.shape == (3, 1, 16, 48)
    _, params = gpu.launches[-1]
    address = arguments["k_cache"].data.ptr
    assert params["k"]["data"] == params["v"]["data"] == address
    assert params["k"]["row_stride"] == params["v"]["row_stride"] == 72
    for specs, addresses in gpu.maps:
        assert [spec.shape[0] for spec in specs] == [72, 72, 48]
        assert addresses[1:] == (address, address)


def test_the_append_knows_of_keys_only(gpu):
    arguments = on(gpu, k=gpu.array(3, 2, 1, 72))
    flash_attention_with_kvcache(**arguments)
    (first, new), (second, params) = gpu.launches
    assert (first, second) == ("append_new_rows", "attention")
    assert new["new_k"]["data"] == arguments["k"].data.ptr
    assert new["new_v"]["data"] == new["v"]["data"] == 0
    assert params["new_keys"] == 2


def test_a_call_with_values_of_their_own_is_another_call(gpu):
    arguments = on(gpu)
    flash_attention_with_kvcache(**arguments)
    flash_attention_with_kvcache(**arguments | {"head_dim_v": 40})
    own = gpu.array(4, 61, 1, 48)
    flash_attention_with_kvcache(**arguments | {"head_dim_v": None, "v_cache": own})
    values = [params["v"]["data"] for _, params in gpu.launches]
    latent = arguments["k_cache"].data.ptr
    assert values == [latent, latent, own.data.ptr]


def test_the_plan_says_so_in_its_problem(rng):
    arguments = latents(rng)
    for call, expected in ((arguments, True), (separate(arguments), False)):
        problem = plan(flash_attention_with_kvcache, **call, arch="sm_90").problem
        assert bool(problem.values_in_keys) == expected
