"""Block masks built on a GPU, against NumPy, and their order relative to streams and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.mods.block_mask_cuda import check_map, launched, map_of, random_spec, read_map

from cupy_flash.calls.gpu.block_masks import mask_text
from cupy_flash.gpu.block_mask_layout import BlockMask, BlockMaskSpec, Layout
from cupy_flash.mods.modification import MaskMod

pytestmark = pytest.mark.gpu

BATCH, HEADS, KEYS = 2, 3, 1500
Arrays = dict[str, np.ndarray]


def documents(rng: np.random.Generator, *shape: int, count: int = 12) -> np.ndarray:
    return np.sort(rng.integers(0, count, shape).astype(np.int32))


def same(i: Any, j: Any, doc: Any) -> Any:
    return doc[i] == doc[j]


def arrays_of(rng: np.random.Generator) -> dict[str, tuple[Callable[..., Any], Arrays]]:
    """Return masks of all kinds, by bounds, one position or pair, each with its captures."""
    nan = np.repeat(rng.choice([0.0, 1.0, 2.0, np.nan], KEYS // 50), 50).astype(np.float32)
    return {
        "window and first keys": (lambda i, j: ((i - j < 300) & (j <= i)) | (j < 4), {}),
        "documents": (
            lambda b, i, j, doc: (doc[b, i] == doc[b, j]) & (j <= i),
            {"doc": documents(rng, BATCH, KEYS)},
        ),
        "documents out of order": (same, {"doc": rng.integers(0, 3, KEYS).astype(np.uint8)}),
        "heads": (
            lambda h, i, j, size: np.abs(i - j) < size[h],
            {"size": np.array([3, 90, 700], np.int32)},
        ),
        "few pairs": (lambda h, i, j: (i * 7919 + j * 104729 + h * 31) % 9973 == 0, {}),
        "few hidden": (
            lambda b, h, i, j, hidden: ~hidden[b, h, i, j],
            {"hidden": rng.integers(0, 20_000, (BATCH, HEADS, 700, 900)) == 0},
        ),
        "not a number": (lambda i, j, x: x[i] <= x[j], {"x": nan}),
        "words": (
            lambda i, j, words: (words[i] >> (j // 32).astype(np.uint64)) & 1 != 0,
            {"words": rng.integers(0, 2**64, KEYS, np.uint64)},
        ),
    }


NAMES = tuple(arrays_of(np.random.default_rng(0)))


def both(function: Callable[..., Any], arrays: Arrays) -> tuple[MaskMod, MaskMod]:
    """Return the mask with captures on the GPU, and the mask with captures in NumPy arrays."""
    on_gpu = {name: cupy.asarray(array) for name, array in arrays.items()}
    return MaskMod(function, **on_gpu), MaskMod(function, **arrays)


def bytes_of(block_mask: BlockMask) -> Any:
    return cupy.ndarray((block_mask.layout.bytes,), np.uint8, memptr=block_mask.memory)


def check(mod: MaskMod, on_host: MaskMod, spec: BlockMaskSpec, memory: np.ndarray) -> None:
    text = mask_text(mod, "float16")
    maps = spec.maps(text)
    check_map(read_map(spec, maps, memory, Layout.of(spec, text)), on_host, spec, maps)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_mask_says_of_every_block_what_its_pairs_say(
    rng: np.random.Generator, name: str
) -> None:
    mod, on_host = both(*arrays_of(rng)[name])
    for _ in range(8):
        spec = random_spec(rng, (BATCH, HEADS, KEYS), (16, 64), (16, 64, 80, 128, 176), 500, 500)
        # pytest shows this output if the block masks differ.
        print(spec)
        ready = map_of(mod, spec, "float16")
        memory = bytes_of(ready.block_mask).get()
        check(mod, on_host, spec, memory)


@pytest.mark.parametrize("name", ["documents", "few pairs", "window and first keys"])
def test_the_same_block_mask_comes_out_every_time(rng: np.random.Generator, name: str) -> None:
    mod, _ = both(*arrays_of(rng)[name])
    spec = BlockMaskSpec(128, 64, BATCH, HEADS, KEYS, KEYS, causal=True)
    found = set()
    for _ in range(5):
        memory = bytes_of(map_of(mod, spec, "float16").block_mask).get()
        text = mask_text(mod, "float16")
        built = read_map(spec, spec.maps(text), memory, Layout.of(spec, text))
        found.add(b"".join(x.tobytes() for x in (built.nonempty, built.full, built.stored_after)))
        mod.refresh()
    assert len(found) == 1


def test_refresh_sees_what_was_written_to_a_captured_array(rng: np.random.Generator) -> None:
    first, second = documents(rng, KEYS), documents(rng, KEYS)
    array = cupy.asarray(first)
    spec = BlockMaskSpec(128, 64, 1, 1, KEYS, KEYS)

    mod = MaskMod(same, doc=array)
    check(
        mod, MaskMod(same, doc=first), spec, bytes_of(map_of(mod, spec, "float16").block_mask).get()
    )
    array.set(second)
    kept = bytes_of(map_of(mod, spec, "float16").block_mask).get()
    check(mod, MaskMod(same, doc=first), spec, kept)
    mod.refresh()
    anew = bytes_of(map_of(mod, spec, "float16").block_mask).get()
    check(mod, MaskMod(same, doc=second), spec, anew)


def keep_busy(array: Any) -> None:
    """Enqueue about 10 ms of work on the current stream."""
    for _ in range(64):
        array += 1


def test_a_block_mask_is_built_after_what_is_written_and_read_after_what_builds_it(
    rng: np.random.Generator,
) -> None:
    first, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    ids = documents(rng, KEYS)
    uploaded = cupy.asarray(ids)
    array, busy = cupy.zeros(KEYS, np.int32), cupy.zeros(1 << 26, np.float32)

    mod, spec = MaskMod(same, doc=array), BlockMaskSpec(64, 64, 1, 1, KEYS, KEYS)
    # Compile everything now: a compilation below would give the GPU time to finish its work.
    map_of(MaskMod(same, doc=array), spec, "float16")
    copy = cupy.empty_like(bytes_of(map_of(MaskMod(same, doc=array), spec, "float16").block_mask))
    cupy.cuda.Device().synchronize()
    with first:
        keep_busy(busy)
        array[...] = uploaded
        on_first = map_of(mod, spec, "float16")
        launched(on_first)
    with other:
        on_other = map_of(mod, spec, "float16")
        cupy.copyto(copy, bytes_of(on_other.block_mask))
        launched(on_other)
    assert on_first.block_mask is on_other.block_mask
    other.synchronize()
    check(mod, MaskMod(same, doc=ids), spec, copy.get())


@pytest.mark.parametrize("reads_on_default", [False, True])
def test_a_forgotten_block_mask_stays_as_long_as_a_stream_reads_it(
    reads_on_default: bool, rng: np.random.Generator
) -> None:
    reader, builder = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null
    if reads_on_default:
        reader, builder = builder, reader
    ids, others = documents(rng, KEYS), documents(rng, KEYS)
    busy = cupy.zeros(1 << 26, np.float32)

    mod, spec = MaskMod(same, doc=cupy.asarray(ids)), BlockMaskSpec(64, 64, 1, 1, KEYS, KEYS)
    next_ids = cupy.asarray(others)
    ready = map_of(mod, spec, "float16")
    copy = cupy.empty_like(bytes_of(ready.block_mask))
    launched(ready)
    cupy.cuda.Device().synchronize()
    with reader:
        ready = map_of(mod, spec, "float16")
        keep_busy(busy)
        cupy.copyto(copy, bytes_of(ready.block_mask))
        launched(ready)
    address = ready.block_mask.address
    mod.refresh()
    del ready
    # New block masks have the same size, so one is soon allocated at the forgotten one's address.
    after = []
    with builder:
        while not after or (after[-1].block_mask.address != address and len(after) < 500):
            next_mod = MaskMod(same, doc=next_ids)
            after.append(map_of(next_mod, spec, "float16"))
    assert after[-1].block_mask.address == address
    reader.synchronize()
    builder.synchronize()
    check(mod, MaskMod(same, doc=ids), spec, copy.get())
    check(next_mod, MaskMod(same, doc=others), spec, bytes_of(after[-1].block_mask).get())


def test_a_graph_builds_its_block_mask_from_what_the_arrays_hold_at_each_launch(
    rng: np.random.Generator,
) -> None:
    def causal(i: Any, j: Any, doc: Any) -> Any:
        return (doc[i] == doc[j]) & (j <= i)

    values = [documents(rng, KEYS) for _ in range(3)]
    array = cupy.asarray(values[0])
    mod, spec = MaskMod(causal, doc=array), BlockMaskSpec(192, 128, 1, 1, KEYS, KEYS, causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        kept = map_of(mod, spec, "float16")
        stream.synchronize()
        stream.begin_capture()
        captured = map_of(mod, spec, "float16")
        launched(captured)
        graph = stream.end_capture()
        assert captured.block_mask is not kept.block_mask
        for ids in values:
            array.set(ids, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            check(mod, MaskMod(causal, doc=ids), spec, bytes_of(captured.block_mask).get())
        assert map_of(mod, spec, "float16").block_mask is kept.block_mask
        check(mod, MaskMod(causal, doc=values[0]), spec, bytes_of(kept.block_mask).get())
