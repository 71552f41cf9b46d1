"""MLA cases: the values are columns of the keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupy_flash.cli.cases.cases import Case, describe
from cupy_flash.cli.cases.inputs import random_inputs
from cupy_flash.cli.measure.check import Check
from cupy_flash.cli.records import records

LATENT = Case(
    *("float16", 2, 1, 48, 4, 1, 24, 16), kind="cache", softmax_scale=0.25, values_in_keys=True
)


def test_a_latent_counts_once():
    apart = dataclasses.replace(LATENT, values_in_keys=False)
    assert LATENT.kv_bytes == LATENT.key_value_bytes == 2 * 48 * 24 * 2
    assert apart.kv_bytes == 2 * 48 * (24 + 16) * 2
    assert LATENT.flops() == apart.flops() == 2 * 2 * 4 * 48 * (24 + 16)
    problem = LATENT.problem()
    assert problem.values_in_keys
    assert problem.tensors["v"].strides == problem.tensors["k"].strides


@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_values_are_read_where_the_keys_are(page_size: int, cache_dtype: str | None) -> None:
    inputs = random_inputs(LATENT, 3, on_gpu=False)
    if page_size:
        inputs = inputs.with_pages_of(page_size)
    if cache_dtype:
        inputs = inputs.with_cache_of(cache_dtype)
    _, k, v = inputs.host
    assert np.shares_memory(k, v)
    assert v.shape[-1] == 16
    call = inputs.call(on_gpu=False, backend="cpu")
    assert call.args[2] is None
    assert call.keywords["head_dim_v"] == 16
    out = call()
    assert out.shape == (2, 1, 4, 16)
    check = Check(inputs, 0, on_gpu=False)
    assert check.error(out) <= check.coverage.bound


def test_a_record_tells_it_apart():
    assert records.optional_fields(LATENT)["values_in_keys"] is True
    assert describe([LATENT])[0].startswith("fp16 latent cache")
    apart = dataclasses.replace(LATENT, values_in_keys=False)
    assert records.optional_fields(apart)["values_in_keys"] is None


@pytest.mark.parametrize("change", [{"append": True}, {"kind": "varlen", "seqlen_q": 48}])
def test_only_a_cache_that_nothing_is_appended_to_has_them(change):
    with pytest.raises(ValueError, match="values_in_keys needs"):
        dataclasses.replace(LATENT, **change).problem()
