"""Calls that sum attention weights: what their kernels are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu
from support.gpu.fake_gpu import FakeArray, FakeGpu

from cupy_flash import (
    attention_received,
    attention_received_varlen,
    attention_received_with_kvcache,
)
from cupy_flash.calls.arguments import ReceivedArguments
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.gpu.received import RECEIVED
from cupy_flash.calls.options import Options
from cupy_flash.families.params import _params_dtype

STRUCT = _params_dtype(None, None, False, (), "received")
BATCH, HEADS, HEADS_KV, DIM = 3, 4, 2, 32
END = 2**31 - 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return fake_gpu.install(monkeypatch)


def struct_of(gpu: FakeGpu) -> Any:
    """Return the argument struct of the last launch."""
    return np.frombuffer(gpu.structs[-1], STRUCT, 1)[0]


def address(array: Any) -> int:
    return int(array.data.ptr)


def dense_rows(gpu: FakeGpu, rows: int, heads: int, dtype: Any = np.float16) -> FakeArray:
    return gpu.array(BATCH, rows, heads, DIM, dtype=dtype)


def test_packed_sequences(gpu: FakeGpu) -> None:
    q, k = gpu.array(50, HEADS, DIM), gpu.array(80, HEADS_KV, DIM)
    starts, used = [gpu.lengths(BATCH + 1) for _ in range(2)], gpu.lengths(BATCH)
    lse = gpu.array(HEADS, 50, dtype=np.float32)
    found = attention_received_varlen(
        *(q, k, *starts, 20, 30), lse=lse, seqused_k=used, queries=slice(-32, None)
    )
    struct = struct_of(gpu)
    assert (found.shape, found.dtype) == ((HEADS, 80), np.float32)
    # Keys of no sequence have 0.
    assert found.filled == 0
    names = ("lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "received")
    assert [struct[name] for name in names] == [address(x) for x in (lse, *starts, used, found)]
    assert (struct["q"]["data"], struct["k"]["data"]) == (address(q), address(k))
    sizes = ("batch", "seqlen_q", "seqlen_k", "total_q", "total_k", "first_query", "last_query")
    assert [struct[name] for name in sizes] == [BATCH, 20, 30, 50, 80, -32, END]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_cache_of_arrays_of_lengths_and_caches(gpu: FakeGpu, grouped: bool) -> None:
    q, cache = dense_rows(gpu, 2, HEADS), gpu.array(7, 90, HEADS_KV, DIM)
    lengths, chosen = gpu.lengths(BATCH), gpu.lengths(BATCH)
    lse = gpu.array(BATCH, HEADS, 2, dtype=np.float32)
    found = attention_received_with_kvcache(
        *(q, cache), cache_seqlens=lengths, cache_batch_idx=chosen, lse=lse, grouped=grouped
    )
    struct = struct_of(gpu)
    assert found.shape == (BATCH, HEADS_KV if grouped else HEADS, 90)
    assert found.filled is None
    assert struct["k"]["data"] == address(cache)
    names = ("seqused_k", "cache_batch_idx", "received")
    assert [struct[name] for name in names] == [address(x) for x in (lengths, chosen, found)]
    assert [struct[name] for name in ("caches", "seqlen_k", "keys")] == [7, 90, 0]


def test_one_length_is_an_argument_of_the_launch(gpu: FakeGpu) -> None:
    q, cache = dense_rows(gpu, 1, HEADS), dense_rows(gpu, 90, HEADS_KV)
    lse = gpu.array(BATCH, HEADS, 1, dtype=np.float32)
    for length in (5, 6, 90):
        attention_received_with_kvcache(q, cache, cache_seqlens=length, lse=lse)
        assert struct_of(gpu)["keys"] == length
        assert struct_of(gpu)["seqused_k"] == 0
    # A growing cache needs no new plan.
    assert len(gpu.compiled) == 1
    for length in (-1, 91):
        with pytest.raises(ValueError, match=f"cache_seqlens is {length}; expected at"):
            attention_received_with_kvcache(q, cache, cache_seqlens=length, lse=lse)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_pages(gpu: FakeGpu, dtype: Any) -> None:
    q, pages = dense_rows(gpu, 1, HEADS, dtype), gpu.array(40, 16, HEADS_KV, DIM, dtype=dtype)
    table, lengths = gpu.lengths(BATCH, 9), gpu.lengths(BATCH)
    lse = gpu.array(BATCH, HEADS, 1, dtype=np.float32)
    found = attention_received_with_kvcache(
        q, pages, cache_seqlens=lengths, block_table=table, lse=lse
    )
    struct = struct_of(gpu)
    assert found.shape == (BATCH, HEADS, 9 * 16)
    assert struct["block_table"] == address(table)
    sizes = ("pages", "max_pages", "block_table_stride", "seqlen_k")
    assert [struct[name] for name in sizes] == [40, 9, 9, 9 * 16]
    assert struct["k"]["batch_stride"] == 16 * HEADS_KV * DIM


@pytest.mark.parametrize("kind", ["dense", "varlen", "kvcache"])
def test_a_call_without_lse_computes_it_first(gpu: FakeGpu, kind: str) -> None:
    lengths, starts = gpu.lengths(BATCH), gpu.lengths(BATCH + 1)
    if kind == "dense":
        attention_received(dense_rows(gpu, 9, HEADS), dense_rows(gpu, 9, HEADS_KV))
    elif kind == "varlen":
        q, k = gpu.array(50, HEADS, DIM), gpu.array(80, HEADS_KV, DIM)
        attention_received_varlen(q, k, starts, starts, 20, 30)
    else:
        q, cache = dense_rows(gpu, 1, HEADS), dense_rows(gpu, 90, HEADS_KV)
        attention_received_with_kvcache(q, cache, cache_seqlens=lengths)
    *_, (_, of_forward), _ = gpu.launches
    struct = struct_of(gpu)
    assert len(gpu.launches) >= 2
    assert struct["lse"] == of_forward["lse"] != 0
    assert struct["k"]["data"] == of_forward["k"]["data"]


def test_lengths_on_a_gpu_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lengths, "_is_capturing", lambda: False)
    assert RECEIVED.check is not None
    q, cache = np.ones((2, 1, HEADS, DIM)), np.ones((2, 9, HEADS_KV, DIM))
    cached = ReceivedArguments(q, k_cache=cache, cache_seqlens=np.array([3, 10], np.int32))
    options = Options("kvcache", received=("heads", 0, END))
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 10; expected at most 9"):
        device_lengths.check(cached, options, 0, RECEIVED.check)
    starts = np.array([0, 1, 3], np.int32)
    packed = ReceivedArguments(
        *(cache[0], cache[0]), cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_k=starts[1:]
    )
    options = Options("varlen", max_seqlen_q=9, max_seqlen_k=9, received=("heads", 0, END))
    with pytest.raises(ValueError, match="seqused_k gives sequence 1 3 keys; expected at most 2"):
        device_lengths.check(packed, options, 0, RECEIVED.check)
