"""Sums of attention weights over queries, by kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.lse_calls import LseCall
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES
from support.gradients.gradient_calls import random_gradient_call

from cupy_flash import UnsupportedError, attention_received, flash_attention
from cupy_flash.calls import dispatch, dispatch_received
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.options import Options
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu

_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout")


@pytest.mark.parametrize("family", FAMILIES["received"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("number", range(12))
def test_sums_are_those_of_the_weights(
    family: str, dtype: str, kind: str, number: int, rng: Any
) -> None:
    call = random_gradient_call(rng, dtype, kind, longest=(330, 450), dropout=False)
    (q, k, _), given = call.forward.given(np)
    (q_gpu, k_gpu, v_gpu), options = call.forward.given(cupy)
    plain = {name: options[name] for name in _OPTIONS if name in options}
    mods = {name: x for name, x in options.items() if name not in plain}
    seqlen_q = q.shape[2 if plain.get("layout") == "bhsd" else 1]
    first, last = np.sort(rng.integers(0, seqlen_q + 1, 2)) if rng.integers(2) else (0, seqlen_q)
    grouped = bool(rng.integers(2))
    received = ("groups" if grouped else "heads", int(first), int(last))
    lse = flash_attention(q_gpu, k_gpu, v_gpu, return_lse=True, **options)[1]
    cupy.full(1 << 20, np.nan)
    try:
        found = dispatch_received.on_gpu(
            *(q_gpu, k_gpu, lse if rng.integers(2) else None),
            Options(family=family, received=received, **plain),
            mods,
        )
    except UnsupportedError:
        pytest.skip(f"{family} does not serve this call")
    expected = attention_received(
        *(q.astype(np.float64), k.astype(np.float64)),
        queries=slice(first, last),
        grouped=grouped,
        **given,
    )
    lse = lse.get()
    # A weight has the error of its score, times the weight.
    size = max(30.0, float(np.abs(lse[np.isfinite(lse)]).max(initial=0)))
    bound = 64 * float(np.finfo(lse.dtype).eps) * size * max(1.0, float(expected.max(initial=0)))
    np.testing.assert_allclose(cupy.asnumpy(found), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("number", range(40))
def test_log_sum_exp_without_output(dtype: str, number: int, rng: Any) -> None:
    call = LseCall.random(rng)
    q, k = (cupy.asarray(x, dtype) for x in (call.q, call.k))
    options = Options(**call.options, return_lse=True, discards_out=True, family="hopper_lse")
    cupy.full(q[..., 0].size, np.nan, np.float32)
    _, lse = dispatch.attention(Arguments(q, k, k[..., :8]), options, "auto")
    call.check(*(cupy.asnumpy(x.astype(np.float64)) for x in (q, k, lse)))
