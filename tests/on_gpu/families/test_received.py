"""Sums of attention weights over queries, by kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.lse_calls import LseCall
from support.calls.modified_calls import ModifiedCall
from support.calls.received_calls import KINDS, ReceivedCall, random_received_call
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES

from cupy_flash import (
    UnsupportedError,
    attention_received_varlen,
    attention_received_with_kvcache,
)
from cupy_flash.calls import dispatch, dispatch_received
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.options import Options
from cupy_flash.families import FAMILIES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES["received"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(12))
def test_sums_are_those_of_the_weights(
    family: str, dtype: str, kind: str, number: int, rng: Any
) -> None:
    call = random_received_call(rng, dtype, kind, longest=(330, 450), dropout=False)
    lse = cupy.asarray(call.lse) if rng.integers(2) else None
    arguments, options, mods = call.prepared(cupy, lse, family)
    cupy.full(1 << 20, np.nan)
    try:
        found = dispatch_received.on_gpu(arguments, options, mods)
    except UnsupportedError:
        pytest.skip(f"{family} does not serve this call")
    call.check(cupy.asnumpy(found))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("grouped", [False, True])
def test_thread_blocks_take_several_work_items(
    causal: bool, head_dim: int, grouped: bool, rng: Any
) -> None:
    q = rng.standard_normal((2, 140, 160, head_dim)).astype(np.float16)
    k = rng.standard_normal((2, 270, 80, head_dim)).astype(np.float16)
    forward = ModifiedCall("dense", "float16", {"q": q, "k": k, "v": k}, {"causal": causal})
    # Kernels take indices of dense calls as the public function resolves them.
    call = ReceivedCall(forward, slice(20, 140), grouped)
    arguments, options, mods = call.prepared(cupy, cupy.asarray(call.lse), "hopper")
    call.check(cupy.asnumpy(dispatch_received.on_gpu(arguments, options, mods)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(6))
def test_public_functions_compute_them(kind: str, number: int, rng: Any) -> None:
    call = random_received_call(rng, str(rng.choice(list(DTYPES))), kind, longest=(90, 150))
    cupy.full(1 << 20, np.nan)
    call.check(call.run(cupy))


def cached(rng: Any, dtype: Any, rows: int, heads_kv: int = 2) -> tuple[Any, Any]:
    """Return queries of three sequences, and caches of `rows` keys."""
    q = rng.standard_normal((3, 1, 4, 64)).astype(dtype)
    return q, rng.standard_normal((3, rows, heads_kv, 64)).astype(dtype)


@pytest.mark.parametrize(("dtype", "page_size"), [("float16", 5), ("float32", 5), ("float32", 48)])
def test_pages_of_any_size(dtype: str, page_size: int, rng: Any) -> None:
    q, cache = cached(rng, dtype, 240)
    lengths = [240, 101, 0]
    pages = cache.reshape(-1, page_size, 2, 64)
    order = rng.permutation(len(pages))
    table = np.argsort(order).reshape(3, -1)
    found = attention_received_with_kvcache(
        *(cupy.asarray(q), cupy.asarray(pages[order])),
        cache_seqlens=lengths,
        block_table=cupy.asarray(table),
    )
    expected = attention_received_with_kvcache(q, cache, cache_seqlens=lengths)
    np.testing.assert_allclose(found.get(), expected, rtol=0, atol=1e-3)


def test_one_length_and_chosen_caches(rng: Any) -> None:
    q, cache = cached(rng, np.float16, 240)
    for length in (7, 240, 131):
        found = attention_received_with_kvcache(
            *(cupy.asarray(q), cupy.asarray(cache)),
            cache_seqlens=length,
            cache_batch_idx=[2, 0, 1],
            grouped=True,
        )
        expected = attention_received_with_kvcache(
            q, cache[[2, 0, 1]], cache_seqlens=length, grouped=True
        )
        np.testing.assert_allclose(found.get(), expected, rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="cache_seqlens is 241; expected at most 240"):
        attention_received_with_kvcache(
            cupy.asarray(q), cupy.asarray(cache), cache_seqlens=241, lse=cupy.zeros((3, 4, 1), "f")
        )


def test_keys_of_8_bits_are_multiplied_by_their_scales(rng: Any) -> None:
    q, cache = cached(rng, np.float16, 50)
    stored = (20 * cache).astype(np.int8)
    given: dict[str, Any] = {"cache_seqlens": [50, 0, 33], "k_scale": 0.05}
    found = attention_received_with_kvcache(cupy.asarray(q), cupy.asarray(stored), **given)
    expected = attention_received_with_kvcache(q, stored, **given)
    np.testing.assert_allclose(found.get(), expected, rtol=1e-6)


def test_a_captured_call_reads_new_lengths(rng: Any) -> None:
    """A graph of a decoding step serves a growing cache."""
    q, cache = (cupy.asarray(x) for x in cached(rng, np.float16, 240))
    lengths = cupy.asarray([5, 0, 99], np.int32)
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), cupy.cuda.Stream(non_blocking=True) as stream:
        attention_received_with_kvcache(q, cache, cache_seqlens=lengths)
        stream.synchronize()
        stream.begin_capture()
        found = attention_received_with_kvcache(q, cache, cache_seqlens=lengths)
        graph = stream.end_capture()
        for new in ([5, 0, 99], [240, 17, 3]):
            lengths[:] = cupy.asarray(new, np.int32)
            graph.launch()
            stream.synchronize()
            expected = attention_received_with_kvcache(q.get(), cache.get(), cache_seqlens=new)
            np.testing.assert_allclose(found.get(), expected, rtol=0, atol=1e-3)


def test_offsets_of_any_contents_are_safe(rng: Any) -> None:
    """Keys that belong to no sequence have 0, whatever the offsets are."""
    q, k = cupy.ones((9, 2, 64), np.float16), cupy.ones((30, 2, 64), np.float16)
    for starts in ([0, 40, 10], [-5, 7, 2**31 - 1], [12, 3, 9]):
        ends = cupy.asarray(starts, np.int32)
        found = attention_received_varlen(q, k, ends, ends, 9, 30).get()
        assert np.isfinite(found).all()
        assert (found >= 0).all()


# With 80 KV heads, thread blocks of the persistent grid take several work items.
@pytest.mark.parametrize("heads_kv", [80, None])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("number", range(20))
def test_log_sum_exp_without_output(
    dtype: str, number: int, heads_kv: int | None, rng: Any
) -> None:
    call = LseCall.random(rng, heads_kv)
    q, k = (cupy.asarray(x, dtype) for x in (call.q, call.k))
    options = Options(**call.options, return_lse=True, discards_out=True, family="hopper_lse")
    cupy.full(q[..., 0].size, np.nan, np.float32)
    _, lse = dispatch.attention(Arguments(q, k, k[..., :8]), options, "auto")
    call.check(*(cupy.asnumpy(x.astype(np.float64)) for x in (q, k, lse)))
