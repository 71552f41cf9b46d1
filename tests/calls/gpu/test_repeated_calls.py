"""Repeated calls with modifications: what is compiled again, and what calls keep in memory."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu
from support.gpu.fake_gpu import FakeGpu

from cupy_flash import (
    MaskMod,
    ScoreMod,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.sharded_append import AppendedRows, CacheSharding
from cupy_flash.calls.options import Options
from cupy_flash.gpu import append, block_masks, compiler, launch
from cupy_flash.mods import captures
from cupy_flash.planning import planner
from cupy_flash.problem.device import device_for_arch

BATCH, HEADS = 2, 4


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = fake_gpu.install(monkeypatch)
    # Without this patch, captured arrays would be read through DLPack.
    monkeypatch.setattr(captures, "read", lambda name, value, **_: value)
    return gpu


@pytest.fixture
def compiled(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the units passed to the compiler, in order."""
    titles: list[str] = []

    def load(unit: Any, device: Any, shared_memory: dict[str, int]) -> dict[str, Any]:
        titles.append(unit.title)
        return gpu.get(unit, shared_memory)

    monkeypatch.setattr(compiler, "_load", load)
    monkeypatch.setattr(compiler, "device_for_id", lambda _: device_for_arch("sm_90"))
    kernels = compiler.KernelCache()
    for module in (launch, append, block_masks):
        monkeypatch.setattr(module, "kernel_cache", kernels)
    return titles


def dense(gpu: FakeGpu, length: int = 512, **options: Any) -> None:
    arrays = (gpu.array(BATCH, length, HEADS, 64) for _ in range(3))
    flash_attention(*arrays, causal=True, **options)


def packed(gpu: FakeGpu, length: int = 512, **options: Any) -> None:
    arrays = (gpu.array(BATCH * length, HEADS, 64) for _ in range(3))
    places = gpu.lengths(BATCH + 1)
    flash_attention_varlen(*arrays, places, places, length, length, causal=True, **options)


def cached(gpu: FakeGpu, length: int = 512, **options: Any) -> None:
    q, *cache = (gpu.array(BATCH, n, HEADS, 64) for n in (1, length, length))
    lengths = gpu.lengths(BATCH)
    flash_attention_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True, **options)


Call = Callable[..., None]
KINDS = pytest.mark.parametrize("call", [dense, packed, cached])


def table(gpu: FakeGpu, entries: int, factor: float) -> ScoreMod:
    return ScoreMod(
        lambda score, h, i, j, table, factor: score + factor * table[h, i - j],
        table=gpu.array(HEADS, entries, dtype=np.float32),
        factor=factor,
    )


def documents(gpu: FakeGpu, length: int, step: int) -> MaskMod:
    return MaskMod(
        lambda b, i, j, doc, step: (doc[b, i] == doc[b, j]) & (j % step == 0),
        doc=gpu.lengths(BATCH, length),
        step=step,
    )


def variations(gpu: FakeGpu) -> Iterator[dict[str, Any]]:
    """Yield the same modifications with other numbers, arrays and functions."""
    for n in range(5):
        yield {
            "length": 500 + n,
            "softmax_scale": 0.1 + n,
            "window_size": (100 + n, n + 1),
            "softcap": 20.0 + n,
            "alibi_slopes": gpu.array(HEADS, dtype=np.float32),
            "sinks": gpu.array(HEADS, dtype=np.float32),
            "score_mod": table(gpu, 100 + n, 1.5 + n),
            "mask_mod": documents(gpu, 1000 + n, 2 + n),
        }


@KINDS
def test_values_lengths_and_equal_functions_do_not_compile_again(
    call: Call, gpu: FakeGpu, compiled: list[str]
) -> None:
    calls = variations(gpu)
    call(gpu, **next(calls))
    # The kernel and, if there is a block map, the kernel that builds it.
    expected = list(compiled)
    assert 1 <= len(expected) <= 2
    launched = len(gpu.launches)
    for modifications in calls:
        call(gpu, **modifications)
        # The order of keyword arguments must not matter.
        call(gpu, **dict(reversed(modifications.items())))
    assert compiled == expected
    assert len(gpu.launches) >= 9 * launched // 2


@KINDS
def test_another_text_compiles_again(call: Call, gpu: FakeGpu, compiled: list[str]) -> None:
    texts: list[dict[str, Any]] = [
        {},
        {"window_size": (5, None)},
        {"softcap": 5.0},
        {"score_mod": ScoreMod(lambda score: score * 2)},
        {"score_mod": ScoreMod(lambda score: score * 3)},
        {"score_mod": ScoreMod(lambda score, x: score * x, x=2)},
        {"score_mod": ScoreMod(lambda score, x: score * x, x=2.0)},
    ]
    for _ in range(2):
        for modifications in texts:
            call(gpu, **modifications)
    assert len(compiled) == len(texts)


@KINDS
def test_a_window_without_bounds_is_the_plain_call(
    call: Call, gpu: FakeGpu, compiled: list[str]
) -> None:
    for window in (None, (-1, -1), (None, None)):
        call(gpu, window_size=window, softcap=None)
    call(gpu)
    assert len(compiled) == 1
    assert len(prepared_calls._calls) == 1


def test_modifications_are_known_again(gpu: FakeGpu) -> None:
    for modifications in itertools.islice(variations(gpu), 2):
        for _ in range(3):
            dense(gpu, **modifications)
    assert len(prepared_calls._calls) == 2


@pytest.mark.slow
@KINDS
def test_nothing_keeps_what_was_captured(call: Call, gpu: FakeGpu) -> None:
    modifications = next(variations(gpu))
    call(gpu, **modifications)
    mods = modifications["score_mod"], modifications["mask_mod"]
    arrays = [weakref.ref(array) for mod in mods for array in mod.arrays]
    assert len(arrays) == 2
    del mods, modifications
    gc.collect()
    assert [array() for array in arrays] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "count"), [(dense, 10_000), (packed, 5_000), (cached, 5_000)])
def test_new_functions_of_the_same_text_keep_no_memory(
    call: Call, count: int, gpu: FakeGpu, compiled: list[str]
) -> None:
    doc = gpu.lengths(BATCH, 600)
    gains = [gpu.array(HEADS, dtype=np.float32) for _ in range(2)]

    def blocks_after(calls: int) -> int:
        """Return the number of memory blocks that Python has allocated after `calls` more calls."""
        for n in range(calls):
            score_mod = ScoreMod(lambda score, h, gain: score * gain[h], gain=gains[n % 2])
            mask_mod = MaskMod(lambda b, i, j, doc: doc[b, i] == doc[b, j], doc=doc)
            call(gpu, score_mod=score_mod, mask_mod=mask_mod)
            gpu.forget()
        gc.collect()
        return sys.getallocatedblocks()

    # Fill all bounded caches first: those of traced functions have 256 entries.
    before = blocks_after(1_200)
    titles = len(compiled)
    after = blocks_after(count)
    # Counts blocks, since tracemalloc takes five times as long. A leak of one object per call would
    # add a block per call. Measured: 50 more blocks after 50,000 calls.
    assert after - before < count / 100
    assert len(compiled) == titles


def test_modifications_take_as_many_arguments_as_they_need(gpu: FakeGpu) -> None:
    # Each array of four axes takes 56 bytes of the argument struct.
    arrays = {name: gpu.array(2, 2, 2, 2, dtype=np.float32) for name in "vwxyz"}

    def sums(
        score: Any, b: Any, h: Any, i: Any, j: Any, v: Any, w: Any, x: Any, y: Any, z: Any
    ) -> Any:
        return score + sum(array[b, h, i, j] for array in (v, w, x, y, z))

    dense(gpu, score_mod=ScoreMod(sums, **arrays))
    assert len(gpu.launches) > 0


def test_a_grid_that_shares_the_gpu_has_a_block_for_each_tile(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shares_gpu` makes a separate plan of the same unit; calls without it keep their plan."""
    plans: list[Any] = []

    def make_plan(*arguments: Any, **options: Any) -> Any:
        plans.append(planner.make_plan(*arguments, **options))
        return plans[-1]

    monkeypatch.setattr(gpu_forward, "make_plan", make_plan)
    q, k, v = (gpu.array(BATCH, 16384, HEADS, 64) for _ in range(3))
    for shares_gpu in (False, True, False):
        dispatch.attention(Arguments(q, k, v), Options(causal=True, shares_gpu=shares_gpu), "auto")
    whole, shared = plans
    tiles = BATCH * HEADS * -(-16384 // whole.tile.Br)
    assert whole.schedule.main.grid == (device_for_arch("sm_90").sm_count, 1, 1)
    assert shared.schedule.main.grid == (tiles, 1, 1)
    assert whole.unit == shared.unit


def test_an_append_to_a_shard_is_one_launch(gpu: FakeGpu, compiled: list[str]) -> None:
    k_cache, v_cache = (gpu.array(BATCH, 512, HEADS, dim) for dim in (64, 40))
    k, v = (gpu.array(BATCH, 3, HEADS, dim) for dim in (64, 40))
    lengths = gpu.lengths(BATCH)
    rows, sharding = AppendedRows(k_cache, v_cache, k, v), CacheSharding(2, 1, 256, 1000)
    told = ((lengths, 0), (None, 700))
    for given, keys in told:
        for _ in range(2):
            dispatch.append(rows._replace(cache_seqlens=given), sharding, keys)
    assert compiled == ["append float16 head_dim 64/40 ranks 2"]
    assert len(gpu.launches) == 4
    for (_, struct), (given, keys) in zip(gpu.launches[1::2], told, strict=True):
        for name, array in (("k", k_cache), ("v", v_cache), ("new_k", k), ("new_v", v)):
            steps = tuple(stride // 2 for stride in array.strides[:3])
            assert struct[name].tolist() == (array.data.ptr, *steps), name
        assert struct["seqused_k"] == (0 if given is None else given.data.ptr)
        assert struct["cache_batch_idx"] == struct["block_table"] == struct["cos"] == 0
        found = tuple(struct[name] for name in ("keys", "seqlen_k", "seqlen_new", "rank", "batch"))
        assert found == (keys, 1000, 3, 1, BATCH)
        assert (struct["heads_kv"], struct["seqlen_q"]) == (HEADS, 0)


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (8, 8), (2, 2)])
def test_an_append_to_a_shard_is_made_for_the_alignment_of_its_rows(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, offset: int, alignment: int
) -> None:
    units: list[Any] = []
    unit = append.append_unit
    monkeypatch.setattr(append, "append_unit", lambda spec: units.append(spec) or unit(spec))
    caches = [gpu.array(1, 512, 1, 64) for _ in "kv"]
    k, v = (gpu.array(1, 1, 1, 64, address=gpu.address() + offset * i) for i in range(2))
    dispatch.append(AppendedRows(*caches, k, v, gpu.lengths(1)), CacheSharding(2, 0, 8, 1024), 0)
    assert [spec.alignment for spec in units] == [alignment]
