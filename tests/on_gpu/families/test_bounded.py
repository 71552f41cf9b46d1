"""Scores with a small upper bound, for which the Hopper softmax needs no row maximum."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall, random_call
from support.gpu import cupy
from support.gpu.gpu_support import Case

from cupy_flash import ScoreMod, attention_reference, flash_attention, plan
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not Case("hopper", "bfloat16").is_supported():
        pytest.skip("the hopper family does not run here")


# The cases cover skipped KV tiles, split KV, sequences and fully masked rows.
@pytest.mark.parametrize("cap", [2.0, 30.0])
@pytest.mark.parametrize("kind", ["dense", "padded", "varlen", "kvcache"])
def test_softcap_with_windows_and_whatever_else_is_right(
    kind: str, cap: float, rng: np.random.Generator
) -> None:
    for _ in range(3):
        call = random_call(rng, "bfloat16", kind, few_rows=False)
        kept = ("q_offset", "causal", "softmax_scale", "max_seqlen_q", "max_seqlen_k")
        options = {name: call.options[name] for name in kept if name in call.options}
        window = tuple(int(n) for n in rng.choice([0, 20, 70, 300], 2))
        options |= {"softcap": cap, "window_size": window}
        names = ("q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k")
        lengths = ("cache_seqlens", "seqlens_k")
        arrays = {n: x for n, x in call.arrays.items() if n in (*names, *lengths)}
        call = dataclasses.replace(call, arrays=arrays, options=options, mods={})
        # pytest shows this output if the result differs.
        print(call)
        call.check(cupy, family="hopper")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_shares_of_the_keys_and_large_scores_are_right(
    head_dim: int, rng: np.random.Generator
) -> None:
    real = DTYPES["bfloat16"]
    arrays = {
        name: rng.standard_normal((1, rows, 2, head_dim)).astype(real)
        for name, rows in (("q", 133), ("k", 1999), ("v", 1999))
    }
    # These queries and keys have large scores of either sign.
    arrays["q"][:, :50] = 30 * np.sign(rng.standard_normal(head_dim))
    arrays["k"][:, ::7] = 30
    call = ModifiedCall("dense", "bfloat16", arrays, {"softcap": 50.0})
    given, named = call.given(cupy)
    assert plan(flash_attention, *given, **named, family="hopper").schedule.split.parts > 1
    call.check(cupy, family="hopper")


def test_a_captured_cap_may_grow_beyond_what_is_known_to_be_small(rng: np.random.Generator) -> None:
    real = DTYPES["bfloat16"]
    arrays = [rng.standard_normal((1, 200, 2, 64)).astype(real) for _ in range(3)]
    arrays[0] *= real.type(40)
    for cap in (50.0, 60.0, 50.0):
        mod = ScoreMod(lambda score, cap: cap * np.tanh(score / cap), cap=cap)
        true = attention_reference(*arrays, score_mod=mod)
        out = flash_attention(*map(cupy.asarray, arrays), score_mod=mod, family="hopper")
        bound = error_bound(attention_naive(*arrays, score_mod=mod), true, real)
        assert max_error(cupy.asnumpy(out), true) <= bound
