"""Block maps: the kernels that build them, run on the host here, and the cache of built maps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.mods.block_mask_cuda import (
    check_lists,
    check_map,
    compiled_masks,
    launched,
    map_of,
    random_spec,
)

from cupy_flash.calls.gpu import block_masks as calls_block_masks
from cupy_flash.calls.gpu.block_masks import mask_text, packed_captures, ready_block_mask
from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import QueryTileLists
from cupy_flash.gpu import block_masks
from cupy_flash.gpu.block_mask_layout import (
    UNBOUNDED,
    BatchLayout,
    BlockMask,
    BlockMaskSpec,
    Layout,
)
from cupy_flash.gpu.block_masks import (
    BLOCK_MASK_DTYPE,
    BlockMaskKey,
    block_mask_unit,
    packed_params,
    params_dtype,
)
from cupy_flash.gpu.compiler import compile_cubin, known_architectures, why_no_compiler
from cupy_flash.mods.block_list import BlockList
from cupy_flash.mods.modification import MaskMod
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import MAX_SEQLEN

SEED = np.random.default_rng(5)
KERNELS = ("find_ranges", "build_block_map", "order_tiles")
BATCH, HEADS = 2, 3
# Rows of a part, keys of a block, and bounds of offsets and windows, see `random_spec`.
SMALL = (8, 16, 24, 64, 64, 100), (8, 16, 80, 128, 160, 272), 100, 150
DOCUMENTS = np.sort(SEED.integers(0, 6, (BATCH, 260)).astype(np.int32))

# Masks that are decided by bounds alone, by captured values of rows or keys, or pair by pair.
MASKS = {
    "window": MaskMod(lambda i, j: (np.abs(i - j) < 70) | (j < 4)),
    "documents": MaskMod(lambda b, i, j, doc: doc[b, i] == doc[b, j], doc=DOCUMENTS),
    "sizes of heads": MaskMod(
        lambda h, i, j, size: np.abs(i - j) < size[h], size=np.array([3, 40, 200], np.int32)
    ),
    "padding": MaskMod(lambda j, on: on[j], on=SEED.integers(0, 9, 260) > 0),
    "dense": MaskMod(
        lambda b, i, j, seen: seen[b, i, j], seen=SEED.integers(0, 90, (2, 130, 200)) > 0
    ),
    "both": MaskMod(lambda b, h, i, j: (b + 1) * i <= (h + 1) * j),
    "a few pairs": MaskMod(lambda h, i, j: (i * 7919 + j * 104729 + h * 31) % 997 == 0),
    "not a number": MaskMod(
        lambda i, j, x: x[i] <= x[j], x=np.repeat(SEED.choice([0, 1, 2, np.nan], 20), 13)
    ),
    "blocks": BlockList(SEED.random((BATCH, 1, 4, 5)) < 0.5, block=(64, 48)),
    "text": MaskMod(lambda i, j: j <= i + 20, cuda="return j <= i + 20;"),
}


# ---- Block masks that the kernels build


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    built = compiled_masks(tmp_path_factory.mktemp("maps"), list(MASKS.values()), builds=True)
    return dict(zip(MASKS, built, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_says_of_every_block_what_its_pairs_say(name, hosts, rng) -> None:
    text = mask_text(MASKS[name], "float32")
    for _ in range(4):
        spec = random_spec(rng, (BATCH, HEADS, 260), *SMALL)
        # pytest shows this line if the block mask is wrong.
        print(spec)
        check_map(hosts[name].build(spec), MASKS[name], spec, spec.maps(text))


@pytest.mark.slow
@pytest.mark.parametrize("q_offset", [MAX_SEQLEN, -MAX_SEQLEN])
@pytest.mark.parametrize("name", MASKS)
def test_positions_may_be_as_far_apart_as_problems_have_them(name, q_offset, hosts, rng) -> None:
    for left, right in ((None, None), (2**30, None), (None, 2**30)):
        spec = random_spec(rng, (BATCH, HEADS, 260), *SMALL)._replace(
            q_offset=q_offset, left=left, right=right
        )
        print(spec)
        maps = spec.maps(mask_text(MASKS[name], "float32"))
        check_map(hosts[name].build(spec), MASKS[name], spec, maps)


def test_of_more_than_32_key_blocks_every_word_is_filled_in(hosts) -> None:
    spec = BlockMaskSpec(64, 8, BATCH, HEADS, 100, 8 * 65 + 3, causal=True, q_offset=440, parts=2)
    check_map(hosts["window"].build(spec), MASKS["window"], spec, (1, 1))
    assert spec.words == 3


@pytest.mark.parametrize("name", MASKS)
def test_lists_hold_the_query_tiles_that_have_a_visible_pair(name, hosts, rng) -> None:
    text = mask_text(MASKS[name], "float32")
    for _ in range(2):
        spec = random_spec(rng, (BATCH, HEADS, 260), (64, 128), (64, 128), 100, 150)
        Br, group = int(rng.choice([64, 128])), int(rng.choice([1, HEADS]))
        # Visible pairs are stored only if the query heads of a KV head have the same mask.
        lists = QueryTileLists(group, stores_pairs=group == 1 or not text.of_head)
        spec = spec._replace(Br=Br, parts=1, lists=lists)
        print(spec)
        check_lists(hosts[name].build(spec), MASKS[name], spec, spec.maps(text))


def test_a_list_counts_key_blocks_of_all_words(hosts) -> None:
    lists = QueryTileLists(1, stores_pairs=True)
    sizes = 200, 64 * 65 + 3
    spec = BlockMaskSpec(64, 64, BATCH, HEADS, *sizes, causal=True, q_offset=4000, lists=lists)
    check_lists(hosts["a few pairs"].build(spec), MASKS["a few pairs"], spec, (1, HEADS))
    assert spec.words == 3


@pytest.mark.parametrize("name", ["window", "documents", "both"])
def test_lists_have_the_tiles_of_the_mma_family(name, hosts, rng) -> None:
    for Br, Bc in ((16, 16), (32, 128), (128, 64), (64, 32)):
        spec = random_spec(rng, (BATCH, HEADS, 200), (Br,), (Bc,), 100, 150)
        lists = QueryTileLists(int(rng.choice([1, HEADS])), stores_pairs=False)
        spec = spec._replace(Br=Br, parts=1, lists=lists)
        print(spec)
        maps = spec.maps(mask_text(MASKS[name], "float32"))
        check_lists(hosts[name].build(spec), MASKS[name], spec, maps)


@pytest.mark.parametrize("kind", ["varlen", "padded"])
def test_lists_of_sequences_of_different_lengths(kind, tmp_path_factory, rng) -> None:
    folder = tmp_path_factory.mktemp(kind)
    compiled = compiled_masks(folder, list(MASKS.values()), builds=True, kind=kind)
    for name, host in zip(MASKS, compiled, strict=True):
        spec = random_spec(rng, (BATCH, HEADS, 260), (64, 128), (64, 128), 100, 150)
        queries, keys = (rng.integers(0, n + 1, BATCH) for n in (spec.seqlen_q, spec.seqlen_k))
        queries[rng.integers(BATCH)], keys[rng.integers(BATCH)] = 0, spec.seqlen_k
        starts = [np.append(0, np.cumsum(x)).astype(np.int32) for x in (queries, keys)]
        layout = BatchLayout(kind, int(starts[0][-1]) + 3, int(starts[1][-1]))
        arrays: list[np.ndarray | None] = [*starts, None]
        if kind == "padded":
            queries, layout = np.full(BATCH, spec.seqlen_q), BatchLayout(kind)
            arrays = [None, None, keys.astype(np.int32)]
        group = int(rng.choice([1, HEADS]))
        text = mask_text(MASKS[name], "float32")
        lists = QueryTileLists(group, stores_pairs=group == 1 or not text.of_head)
        spec = spec._replace(Br=int(rng.choice([64, 128])), parts=1, lists=lists, layout=layout)
        print(name, spec, queries, keys)
        lengths = list(zip(queries.tolist(), keys.tolist(), strict=True))
        check_lists(host.build(spec, arrays), MASKS[name], spec, spec.maps(text), lengths)


def test_kernels_read_of_a_block_mask_what_was_written_to_it(hosts, rng) -> None:
    batches, heads, tiles, blocks = 2, 3, 4, 75
    bits = rng.random((2, batches, heads, tiles, 2, 96)) < rng.choice([0.02, 0.5])
    bits[..., blocks:] = False
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
    order = rng.integers(0, tiles, (batches, heads, tiles, 4), np.int32)
    slots = int(rng.integers(0, 6))
    partial = (bits[0] & ~bits[1])[..., ::-1].cumsum(-1)[..., ::-1]
    stored = np.minimum(slots, partial[..., 32::32])  # after each word of 32 blocks
    stored = np.append(stored, np.zeros_like(stored[..., :1]), axis=-1).astype(np.uint8)
    parts = [words[0], words[1], stored, order]
    memory = np.concatenate([np.ascontiguousarray(x).view(np.uint8).ravel() for x in parts])
    ends = np.cumsum([part.nbytes for part in parts])
    strides = heads * tiles, tiles
    fields = (memory.ctypes.data, *ends, *strides, 3, blocks, slots, 0)
    block_mask = np.array(fields, BLOCK_MASK_DTYPE)
    for b, h, t in np.ndindex(batches, heads, tiles):
        nonempty, full = bits[:, b, h, t, :, :blocks] * np.array([[1], [2]])
        told = hosts["window"].read(block_mask, b, h, t)
        assert told[0] == order[b, h, t, 0]
        assert told[-1] == -1
        any_part = nonempty.any(0)
        before = np.maximum.accumulate(np.where(any_part, np.arange(blocks), -1))
        after = np.minimum.accumulate(np.where(any_part, np.arange(blocks), blocks)[::-1])[::-1]
        # Partial blocks among the last `slots` ones have a slot, counted from 1.
        slot = np.where((nonempty > 0) & (full == 0), partial[b, h, t, :, :blocks], 0)
        slot[slot > slots] = 0
        expected = [nonempty.sum(0), full.sum(0), before, after, *slot]
        np.testing.assert_array_equal(told[1:-1].reshape(-1, 6).T, expected)


# ---- The unit and its argument structs


def unit_of(mod: MaskMod, dtype: str) -> Any:
    return block_mask_unit(mask_text(mod, dtype), packed_captures(mod, dtype).dtype)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_units_compile_without_warnings_and_lie_as_they_are_packed(arch) -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)
    if arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know sm_{arch}")
    kinds = {"documents": "bfloat16"} if arch == 80 else {"window": "float16", "dense": "float64"}
    for name, dtype in kinds.items():
        unit = unit_of(MASKS[name], dtype)
        cubin = compile_cubin(unit, device_for_arch(arch))
        assert "warning" not in cubin.log
        assert set(cubin.resources) == set(unit.entries)
        assert all(resources.spill_bytes == 0 for resources in cubin.resources.values())


def test_a_mask_that_reads_nothing_by_one_position_has_one_kernel() -> None:
    assert unit_of(MASKS["window"], "float32").entries == ("build_block_map", "order_tiles")
    assert unit_of(MASKS["dense"], "float32").entries == ("build_block_map", "order_tiles")
    assert unit_of(MASKS["padding"], "float32").entries == KERNELS


@pytest.mark.parametrize("name", ["documents", "dense"])
def test_code_that_builds_lists_compiles(name: str) -> None:
    if why_no_compiler():
        pytest.skip("no NVRTC")
    mods = packed_captures(MASKS[name], "bfloat16").dtype
    unit = block_mask_unit(mask_text(MASKS[name], "bfloat16"), mods, has_lists=True)
    assert unit.entries[-3:] == ("build_block_map", "list_query_tiles", "store_pairs")
    cubin = compile_cubin(unit, device_for_arch("sm_90"))
    assert "warning" not in cubin.log
    assert all(resources.spill_bytes == 0 for resources in cubin.resources.values())


def test_tiles_lengths_and_values_share_a_unit() -> None:
    one, other = (
        MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=np.zeros(n, np.int32)) for n in (5, 9)
    )
    assert unit_of(one, "float16").text == unit_of(other, "float16").text


@pytest.mark.parametrize("dtype", [BLOCK_MASK_DTYPE, params_dtype(np.dtype([("x", np.int32)]))])
def test_fields_lie_as_a_c_compiler_aligns_them(dtype: np.dtype) -> None:
    assert dtype.names is not None
    # Nested structs begin at multiples of 8 bytes, whatever they contain.
    scalars = [name for name in dtype.names if dtype[name].fields is None]
    aligned = np.dtype([(name, dtype[name]) for name in scalars], align=True)
    assert aligned.fields is not None
    assert dtype.fields is not None
    first = dtype.fields[scalars[0]][1]
    for name in scalars:
        assert first + aligned.fields[name][1] == dtype.fields[name][1]
    assert all(dtype.fields[name][1] % 8 == 0 for name in set(dtype.names) - set(scalars))
    assert dtype.itemsize % 8 == 0


def test_packing_fills_every_field() -> None:
    mod, spec = MASKS["documents"], BlockMaskSpec(192, 128, 2, 3, 300, 260, -7, True, 5, 9, 3)
    text = mask_text(mod, "float32")
    mods = packed_captures(mod, "float32")
    layout = Layout.of(spec, text)
    block_mask = BlockMask(1, layout, 4, 5, 6, 7, None)
    packed = packed_params(spec, text, mods, block_mask, 0x1000)
    (record,) = np.frombuffer(bytes(packed), params_dtype(mods.dtype))
    places = layout.full, layout.slots_after, layout.tiles, layout.visible_pairs
    assert tuple(record["map"]) == (1, *places, 6, 7, 4, 5, layout.slots, 0)
    assert sorted({0, *places, layout.bytes}) == [0, *places, layout.bytes]
    # Visible pairs take 8 bytes in each of 128 threads, for 3 KV blocks of 6 parts, batch 2.
    assert layout.bytes - layout.visible_pairs == 2 * 6 * 3 * 128 * 8
    assert (record["row_ranges"], record["key_ranges"]) == (0x1000, 0x1200)
    names = ("batches", "heads", "seqlen_q", "seqlen_k", "q_offset")
    assert [record[name] for name in names] == [2, 1, 300, 260, -7]
    names = ("group_rows", "Bc", "query_tiles", "row_groups")
    assert [record[name] for name in names] == [64, 128, 2, 3]
    assert (record["left"], record["right"]) == (5, 0)
    assert record["mods"] == mods


# ---- Memory


def test_the_block_mask_of_a_million_tokens_takes_72_mb() -> None:
    spec = BlockMaskSpec(128, 128, 1, 32, 2**20, 2**20, causal=True, parts=2)
    text = mask_text(MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=np.zeros(9, np.int32)), "any")
    layout = Layout.of(spec, text)
    assert (spec.row_tiles, spec.key_blocks, spec.words) == (8192, 8192, 256)
    bits, tiles, shown = 16384 * 256 * 4, 8192 * 16, 16384 * 2 * 128 * 8
    assert layout.bytes == 2 * bits + bits // 4 + tiles + shown
    assert layout.bytes < 72e6
    assert layout.scratch == (16384 + 8192) * 24


def test_sequences_and_heads_have_block_masks_of_their_own_only_where_the_mask_names_them() -> None:
    spec = BlockMaskSpec(64, 64, 2, 3, 100, 100)
    shapes = {name: spec.maps(mask_text(MASKS[name], "float32")) for name in MASKS}
    assert shapes["window"] == (1, 1)
    assert shapes["documents"] == (2, 1)
    assert shapes["sizes of heads"] == (1, 3)
    assert shapes["both"] == (2, 3)


@pytest.mark.parametrize(
    ("name", "varies"),
    [("window", (1, 1)), ("documents", (2, 1)), ("sizes of heads", (1, 2)), ("both", (2, 2))],
)
def test_batches_and_kv_heads_have_lists_if_the_mask_names_them(
    name, varies, cuda: FakeCuda
) -> None:
    lists = QueryTileLists(2, stores_pairs=False)
    spec = BlockMaskSpec(64, 128, 2, 4, 300, 300, lists=lists)
    # Masks of 3 heads are built for 4 heads. This is safe, because no kernel runs.
    built = map_of(MASKS[name], spec, "float16").block_mask
    names = [what[0] for what in cuda.done]
    assert names[-4:-2] == ["build_block_map", "list_query_tiles"]
    assert "store_pairs" not in names
    entries = 3 * 5 * varies[0] * varies[1]
    assert spec.entries(mask_text(MASKS[name], "float16")) == entries
    layout = built.layout
    assert layout.visible_pairs - layout.tiles == -(-4 * entries // 512) * 512
    with_pairs = spec._replace(lists=lists._replace(stores_pairs=True))
    more = Layout.of(with_pairs, mask_text(MASKS[name], "float16"))
    assert more.bytes - layout.bytes == entries * 64 * 128 // 8
    map_of(MASKS[name], with_pairs, "float16")
    assert "store_pairs" in [what[0] for what in cuda.done]
    MASKS[name].refresh()


@pytest.mark.parametrize(
    ("options", "band"),
    [
        ({}, (UNBOUNDED, UNBOUNDED)),
        ({"causal": True}, (UNBOUNDED, 0)),
        ({"causal": True, "left": 5, "right": 9}, (5, 0)),
        ({"left": 2**31, "right": 9}, (UNBOUNDED, 9)),
    ],
)
def test_the_band_is_what_causality_and_window_both_allow(options, band) -> None:
    assert BlockMaskSpec(64, 64, 1, 1, 100, 100, **options).band == band


# ---- Kept maps, and streams


class FakeCuda:
    """Fake of CUDA's streams, events, memory and launches; it records all operations in order.

    Attributes
    ----------
    done
        Operations that were enqueued: names, events and streams.
    """

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.device, self.streams = 0, [0xA0]
        self.capturing: set[int] = set()
        self._next = 0xE0
        self.runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            streamIsCapturing=lambda stream: stream in self.capturing,
            eventRecord=lambda event, stream: self.done.append(("record", event, stream)),
            streamWaitEvent=lambda stream, event: self.done.append(("wait", stream, event)),
            memsetAsync=lambda *arguments: None,
        )

    def new(self) -> int:
        self._next += 1
        return self._next

    def get_current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.streams[-1])

    def Event(self, *, disable_timing: bool) -> SimpleNamespace:
        assert disable_timing
        return SimpleNamespace(ptr=self.new())

    def Stream(self, *, non_blocking: bool) -> FakeStream:
        assert non_blocking
        return FakeStream(self)

    def alloc(self, size: int) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.new() << 40)

    def get(self, unit: Any, shared_memory: dict[str, int]) -> dict[str, Any]:
        def kernel(name: str) -> Any:
            return lambda *arguments: self.done.append((name, self.streams[-1]))

        return {name: kernel(name) for name in shared_memory}

    @property
    def builds(self) -> int:
        return sum(what[0] == "build_block_map" for what in self.done)


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.ptr = cuda, cuda.new()

    def __enter__(self) -> None:
        self._cuda.streams.append(self.ptr)

    def __exit__(self, *_: object) -> None:
        self._cuda.streams.pop()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(block_masks, "cupy_module", lambda: SimpleNamespace(cuda=fake))
    monkeypatch.setattr(block_masks, "kernel_cache", fake)
    monkeypatch.setattr(block_masks, "ByValue", lambda memory: SimpleNamespace(pointer=memory))
    monkeypatch.setattr(block_masks, "_streams", {})
    return fake


SPEC = BlockMaskSpec(64, 64, 2, 3, 100, 100)


def documents(values: int = 0) -> MaskMod:
    return MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=np.full(100, values, np.int32))


def test_a_block_mask_is_built_once_for_the_same_array_keys(cuda: FakeCuda) -> None:
    mod = documents()
    maps = [
        map_of(mod, BlockMaskSpec(64, 64, 2, 3, 100, 100), "float16").block_mask for _ in range(3)
    ]
    assert cuda.builds == 1
    assert maps[0] is maps[1] is maps[2]


def test_other_array_keys_take_other_block_masks(cuda: FakeCuda) -> None:
    mod = documents()
    changes = (
        *(("Br", 32), ("Bc", 32), ("batch", 3), ("heads_q", 4), ("seqlen_q", 9)),
        *(("seqlen_k", 9), ("q_offset", 1), ("causal", True), ("left", 4)),
    )
    specs = [SPEC, *(SPEC._replace(**{name: value}) for name, value in changes)]
    for spec in specs:
        map_of(mod, spec, "float16")
    map_of(mod, SPEC, "float64")
    cuda.device = 1
    map_of(mod, SPEC, "float16")
    assert cuda.builds == len(specs) + 2


def test_equal_masks_with_other_values_do_not_share_a_block_mask(cuda: FakeCuda) -> None:
    one, other = documents(0), documents(1)
    assert one.traced is other.traced
    assert map_of(one, SPEC, "float16").block_mask is not map_of(other, SPEC, "float16").block_mask
    assert cuda.builds == 2


def test_refresh_forgets_the_block_masks_of_that_mask_alone(cuda: FakeCuda) -> None:
    one, other = documents(), documents()
    for _ in range(2):
        map_of(one, SPEC, "float16")
        map_of(other, SPEC, "float16")
        one.refresh()
    assert cuda.builds == 3
    assert len(other.kept_maps()) == 1


def test_a_mask_is_kept_by_nothing_but_its_user(cuda: FakeCuda) -> None:
    import gc
    import weakref

    mod = documents()
    gone = weakref.ref(map_of(mod, SPEC, "float16").block_mask)
    del mod
    gc.collect()
    assert gone() is None


def test_each_stream_waits_for_the_kernels_that_build_what_it_reads(cuda: FakeCuda) -> None:
    mod = documents()
    ready = map_of(mod, SPEC, "float16")
    built_on = next(stream for name, stream, *_ in cuda.done if name == "build_block_map")
    assert built_on != 0xA0
    names = [what[0] for what in cuda.done]
    assert names == ["record", "wait", *KERNELS, "record", "wait"]
    # The build waits for its inputs, from the current stream, which then waits for the block mask.
    (_, before, of_current), (_, waiting, event) = cuda.done[:2]
    assert (of_current, waiting, event) == (0xA0, built_on, before)
    (_, built, of_maps), (_, reader, awaited) = cuda.done[-2:]
    assert (of_maps, reader, awaited) == (built_on, 0xA0, built)

    cuda.done.clear()
    cuda.streams = [0xB0]
    launched(map_of(mod, SPEC, "float16"))
    assert cuda.done[0] == ("wait", 0xB0, built)
    # The stream of the builds reuses the memory, so it waits for the kernel that read the mask.
    (_, event, reader), (_, waiting, awaited) = cuda.done[1:]
    assert (reader, waiting, awaited) == (0xB0, built_on, event)
    del ready


def test_the_legacy_stream_waits_once_and_is_waited_for_by_the_next_build(cuda: FakeCuda) -> None:
    cuda.streams = [0]
    mod = documents()
    launched(map_of(mod, SPEC, "float16"))
    (_, waiting, _), *_ = (what for what in cuda.done if what[0] == "wait")
    assert cuda.done[-1][:2] == ("wait", 0)
    cuda.done.clear()
    launched(map_of(mod, SPEC, "float16"))
    assert cuda.done == []
    # The next build may reuse memory that the legacy stream still reads, so it waits for that.
    cuda.streams = [0xB0]
    map_of(documents(), SPEC, "float16")
    _, event, _ = cuda.done[0]
    waits = ("wait", waiting, event)
    assert cuda.done[:4] == [("record", event, 0xB0), waits, ("record", event, 0), waits]
    assert cuda.done[4][0] == "find_ranges"


def test_a_captured_call_builds_its_block_mask_in_the_graph_and_keeps_none(
    cuda: FakeCuda,
) -> None:
    mod = documents()
    kept = map_of(mod, SPEC, "float16").block_mask
    cuda.done.clear()
    cuda.capturing.add(0xA0)
    ready = map_of(mod, SPEC, "float16")
    launched(ready)
    assert ready.block_mask is not kept
    assert cuda.done == [(name, 0xA0) for name in KERNELS]
    cuda.capturing.clear()
    assert map_of(mod, SPEC, "float16").block_mask is kept


def test_the_block_mask_of_a_graph_of_torch_lies_in_torchs_memory(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph writes to its mask at each replay, and torch reserves the memory of its graphs."""
    made: list[int] = []

    def new_torch_memory(size: int) -> tuple[object, int]:
        made.append(size)
        return object(), len(made) << 50

    monkeypatch.setattr(calls_block_masks, "new_torch_memory", new_torch_memory)
    mod, key = documents(), BlockMaskKey(0, "float16", SPEC)
    kept = ready_block_mask(mod, key, 0xA0, uses_torch=True)
    assert not made, "a kept block mask lies on a stream of its own"
    cuda.capturing.add(0xA0)
    monkeypatch.setattr(cuda, "alloc", None)
    ready = ready_block_mask(mod, key, 0xA0, uses_torch=True)
    layout = Layout.of(SPEC, mask_text(mod, "float16"))
    assert made == [layout.bytes, layout.scratch]
    assert ready.address == 1 << 50
    cuda.capturing.clear()
    assert ready_block_mask(mod, key, 0xA0, uses_torch=True) is kept


def test_the_legacy_stream_is_not_asked_whether_it_is_captured(cuda: FakeCuda) -> None:
    cuda.streams = [0]
    cuda.runtime.streamIsCapturing = None
    map_of(documents(), SPEC, "float16")
    assert cuda.builds == 1


def test_strides_are_0_where_block_masks_are_shared(cuda: FakeCuda) -> None:
    strides = {}
    for name in ("window", "documents", "sizes of heads", "both"):
        block_mask = map_of(MASKS[name], SPEC, "float16").block_mask
        strides[name] = (block_mask.batch_stride, block_mask.head_stride)
        MASKS[name].refresh()
    # Strides count row tiles, of which each head has 2.
    shared = {"window": (0, 0), "documents": (2, 0), "sizes of heads": (0, 2)}
    assert strides == shared | {"both": (6, 2)}


def test_more_blocks_than_a_grid_has_are_refused(cuda: FakeCuda) -> None:
    spec = BlockMaskSpec(8, 8, 64, 128, 2**22, 2**20)
    with pytest.raises(UnsupportedError, match="64 sequences, 128 heads"):
        map_of(MASKS["both"], spec, "float16")


def test_threads_that_ask_at_once_all_get_a_block_mask(cuda: FakeCuda) -> None:
    mod, found = documents(), []
    with ThreadPoolExecutor(4) as pool:
        found += pool.map(lambda _: map_of(mod, SPEC, "float16"), range(4))
    assert len(found) == 4
    assert len(mod.kept_maps()) == 1


def test_a_mask_keeps_the_latest_block_masks_and_no_more(cuda: FakeCuda) -> None:
    mod = documents()
    specs = [SPEC._replace(q_offset=n) for n in range(block_masks._MAX_KEPT + 3)]
    for spec in specs:
        map_of(mod, spec, "float16")
    assert [key.spec for key in mod.kept_maps()] == specs[3:]
    built = cuda.builds
    map_of(mod, specs[-1], "float16")
    assert cuda.builds == built
    map_of(mod, specs[0], "float16")
    assert cuda.builds == built + 1


def test_a_mask_keeps_a_bounded_number_of_bytes(cuda: FakeCuda, monkeypatch) -> None:
    mod = documents()
    specs = [SPEC._replace(q_offset=n) for n in range(5)]
    size = map_of(mod, specs[0], "float16").block_mask.layout.bytes
    monkeypatch.setattr(block_masks, "_MAX_KEPT_BYTES", 2 * size + 1)
    for spec in specs:
        map_of(mod, spec, "float16")
    assert [key.spec for key in mod.kept_maps()] == specs[3:]
    monkeypatch.setattr(block_masks, "_MAX_KEPT_BYTES", 0)
    map_of(mod, specs[0], "float16")
    assert [key.spec for key in mod.kept_maps()] == specs[:1]
