"""Bounds and block masks of mask functions, by generated code run on the CPU and by NumPy."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_flash.calls.gpu.block_masks import mask_text, packed_captures, ready_block_mask
from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.gpu import block_masks
from cupy_flash.gpu.block_mask_layout import BlockMask, BlockMaskSpec, Layout, MaskSource
from cupy_flash.gpu.block_masks import BlockMaskKey, ReadyBlockMask, config_text, packed_params
from cupy_flash.mods.modification import MaskMod
from support.mods.generated_cuda import COMPILER, FOLDER

KERNELS_ON_CPU = Path(__file__).resolve().parents[2] / "kernels" / "on_cpu"
NONE, SOME, ALL = range(3)

# Definitions for the kernel that builds block masks, in addition to those of cuda_on_host.h.
_BLOCK = """
#include "cuda_on_cpu.h"
#define __shared__ static
#define __launch_bounds__(threads)
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
template <class T>
T atomicOr(T* address, T value) { return __atomic_fetch_or(address, value, __ATOMIC_RELAXED); }
"""

# Definitions for code that reads block masks, if `_BLOCK` is not part of the source.
_READING = """
#define __device__
#include <algorithm>
using std::min;
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
"""

_BOUNDS = """
namespace mask{number} {{
{text}
extern "C" void classify{number}(const ModArguments* a, int b, int h, int count, const int* ends,
                                 int* seen) {{
  for (; count > 0; --count, ends += 4) {{
    MaskBounds::Rows rows = MaskBounds::rows_at(*a, b, h, ends[0], 0, 0);
    for (int i = ends[0] + 1; i <= ends[1]; ++i) {{
      MaskBounds::join(rows, MaskBounds::rows_at(*a, b, h, i, 0, 0));
    }}
    MaskBounds::Keys keys = MaskBounds::keys_at(*a, b, h, ends[2], 0, 0);
    for (int j = ends[2] + 1; j <= ends[3]; ++j) {{
      MaskBounds::join(keys, MaskBounds::keys_at(*a, b, h, j, 0, 0));
    }}
    *seen++ = int(MaskBounds::classify(*a, b, h, ends[0], ends[1], ends[2], ends[3], 0, 0, rows,
                                       keys));
  }}
}}
}}
"""

_BUILDER = """
namespace mask{number} {{
{config}
#include "block_mask/build_lists.cu"

extern "C" void read{number}(const BlockMask* map, int batch, int head, int tile, int* answers) {{
  const MaskedBlocks<2> blocks(*map, batch, head, tile);
  *answers++ = map->sorted_tile(batch, head, tile).tile;
  for (int k = 0; k < map->key_blocks; ++k) {{
    *answers++ = blocks.is_nonempty(0, k) + 2 * blocks.is_nonempty(1, k);
    *answers++ = blocks.is_full(0, k) + 2 * blocks.is_full(1, k);
    *answers++ = blocks.last_nonempty_before(k + 1);
    *answers++ = blocks.first_nonempty(k, map->key_blocks);
    *answers++ = blocks.slot_of(0, k);
    *answers++ = blocks.slot_of(1, k);
  }}
  *answers = blocks.last_nonempty_before(0);
}}

extern "C" void build{number}(const BlockMaskParams* p, int range_warps, int thread_blocks,
                              int heads, int lists, int entries) {{
  for (int block = 0; block < (range_warps + 7) / 8; ++block) {{
    run_block(256, [&] {{ blockIdx.x = block; block_mask::find_ranges(*p); }});
  }}
  for (int block = 0; block < thread_blocks; ++block) {{
    run_block(256, [&] {{ blockIdx.x = block; block_mask::build(*p); }});
  }}
  for (int head = 0; head < heads && lists == 0; ++head) {{
    run_block(256, [&] {{ blockIdx.x = head; block_mask::order_tiles(*p); }});
  }}
  for (int block = 0; block < (lists + 7) / 8; ++block) {{
    run_block(256, [&] {{ blockIdx.x = block; block_mask::list_query_tiles(*p); }});
  }}
  for (int entry = 0; entry < entries; ++entry) {{
    run_block(256, [&] {{ blockIdx.x = entry; block_mask::store_pairs(*p); }});
  }}
}}
}}
"""


class FoundMap(NamedTuple):
    """Contents of a block mask, whose row tiles have parts; shapes begin with batches and heads."""

    nonempty: np.ndarray  # whether a block is non-empty, (parts, key blocks)
    full: np.ndarray  # whether a block is full, (parts, key blocks)
    tiles: np.ndarray  # row tile, first and end key block in launch order, (row tiles, 3)
    stored_after: np.ndarray  # partial blocks stored after each word of 32 blocks, (parts, words)
    shown: np.ndarray  # bits of stored visible pairs, (parts, slots, threads, halves, words)


class FoundLists(NamedTuple):
    """Lists of query tiles of a block mask. All shapes begin with (batches, KV heads)."""

    lists: np.ndarray  # words of `QueryTileEntry`, (key blocks, query tiles)
    # Bits of visible pairs, (key blocks, query tiles, blocks of a tile, words); None if not stored.
    pairs: np.ndarray | None
    keys: np.ndarray  # whether a key has a visible pair, (key blocks, keys); False if not stored


class HostMask(NamedTuple):
    """Functions of a mask whose generated code is compiled for the CPU.

    `classify` takes b, h and rows (i_low, i_high, j_low, j_high), and returns NONE, SOME or ALL for
    each row. `build` builds the block mask of a `BlockMaskSpec`, given the arrays of lengths unless
    the batch is dense. `read` takes a `BLOCK_MASK_DTYPE`
    record, batch, head and row tile, and returns what a kernel reads for this row tile, which has
    two parts.
    """

    classify: Callable[[int, int, np.ndarray], np.ndarray]
    build: Callable[..., FoundMap | FoundLists]
    read: Callable[[np.ndarray, int, int, int], np.ndarray]


def compiled_masks(
    folder: Path,
    mods: Sequence[MaskMod],
    dtype: str = "float32",
    *,
    builds: bool = False,
    kind: str = "dense",
) -> list[HostMask]:
    """Compile the code of masks together, with or without the code that builds block masks.

    `kind` is the kind of the batches for which block masks are built.
    """
    if COMPILER is None:
        pytest.skip("no g++ to compile device text with")
    texts = [mask_text(mod, dtype) for mod in mods]
    headers = ["cuda.h", *texts[0].headers, "block_mask/query_tile_lists.cuh"]
    headers += ["scheduler/packed_tiles.cuh"] * builds
    unit, config = _BOUNDS + _BUILDER * builds, config_text(kind)
    source, library = folder / f"{kind}_masks.cpp", folder / f"{kind}_masks.so"
    units = [unit.format(number=n, text=text.text, config=config) for n, text in enumerate(texts)]
    includes = "".join(f'#include "{header}"\n' for header in headers)
    first = _BLOCK if builds else _READING
    source.write_text(first + includes + "".join(units), encoding="utf-8")
    options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fwrapv"]
    options += [f"-I{path}" for path in (FOLDER, KERNELS_ON_CPU, KERNEL_DIR)]
    command = [COMPILER, *options, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    found = []
    for n, (mod, text) in enumerate(zip(mods, texts, strict=True)):
        names = ("build", "read") if builds else ()
        functions = [getattr(loaded, f"{name}{n}") for name in ("classify", *names)]
        found.append(_host_mask(mod, text, dtype, *functions))
    return found


def _host_mask(
    mod: MaskMod, text: MaskSource, dtype: str, classify: Any, build: Any = None, read: Any = None
) -> HostMask:
    def packed() -> np.ndarray:
        return packed_captures(mod, dtype)

    def classified(b: int, h: int, ends: np.ndarray) -> np.ndarray:
        ends, seen = np.ascontiguousarray(ends, np.int32), np.empty(len(ends), np.int32)
        classify(pointer(packed()), b, h, len(ends), pointer(ends), pointer(seen))
        return seen

    def built(
        spec: BlockMaskSpec, lengths: Sequence[np.ndarray | None] = (None, None, None)
    ) -> FoundMap | FoundLists:
        layout, (batches, heads) = Layout.of(spec, text), spec.maps(text)
        # The memory starts with garbage, so that a read of unwritten bytes changes the result.
        memory = np.full(layout.bytes, 0xA5, np.uint8)
        scratch = np.full(layout.scratch + 8, 0xA5, np.uint8)
        sizes = {"layout": layout, "words": spec.words, "key_blocks": spec.key_blocks}
        address, strides = memory.ctypes.data, {"batch_stride": 0, "head_stride": 0}
        map = BlockMask(address=address, memory=memory, **sizes, **strides)
        addresses = tuple(0 if array is None else array.ctypes.data for array in lengths)
        packed_bytes = packed_params(spec, text, packed(), map, scratch.ctypes.data, addresses)
        params = np.frombuffer(packed_bytes, np.uint8)
        parts = spec.row_tiles * spec.parts
        of_rows = parts if text.row_ranges else 0
        of_keys = spec.key_blocks if text.key_ranges else 0
        thread_blocks = batches * heads * parts
        warps = batches * heads * (of_rows + of_keys)
        stored = spec.entries(text) if spec.lists and spec.lists.stores_pairs else 0
        build(pointer(params), warps, thread_blocks, batches * heads, layout.lists, stored)
        if spec.lists:
            return read_lists(spec, (batches, heads), memory, layout)
        return read_map(spec, (batches, heads), memory, layout)

    def told(map: np.ndarray, batch: int, head: int, tile: int) -> np.ndarray:
        answers = np.empty(2 + 6 * int(map["key_blocks"]), np.int32)
        read(pointer(map), batch, head, tile, pointer(answers))
        return answers

    return HostMask(classified, built, told)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def random_spec(
    rng: np.random.Generator,
    sizes: tuple[int, int, int],
    rows: Sequence[int],
    keys: Sequence[int],
    most_offset: int,
    most_window: int,
) -> BlockMaskSpec:
    """Return a spec of few blocks; `sizes` are batch, heads and the bound of sequence lengths."""

    def maybe(bound: int) -> int | None:
        return None if rng.integers(2) else int(rng.integers(0, bound))

    batch, heads, longest = sizes
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, longest, 2))
    parts = int(rng.choice([1, 2, 3]))
    Br, Bc = parts * int(rng.choice(rows)), int(rng.choice(keys))
    offset = int(rng.choice([0, seqlen_k - seqlen_q, rng.integers(-50, most_offset)]))
    band = offset, bool(rng.integers(2)), maybe(most_window), maybe(most_window)
    return BlockMaskSpec(Br, Bc, batch, heads, seqlen_q, seqlen_k, *band, parts)


def map_of(mod: MaskMod, spec: BlockMaskSpec, dtype: str) -> ReadyBlockMask:
    """Return the block mask of a mask on the current device and stream, as calls do."""
    cuda = block_masks.cupy_module().cuda
    key = BlockMaskKey(cuda.runtime.getDevice(), dtype, spec)
    return ready_block_mask(mod, key, cuda.get_current_stream().ptr)


def launched(ready: ReadyBlockMask) -> None:
    """Report a launch that reads the block mask, as calls do after their launches."""
    ready.launched(block_masks.cupy_module().cuda.get_current_stream().ptr)


def read_map(
    spec: BlockMaskSpec, maps: tuple[int, int], memory: np.ndarray, layout: Layout
) -> FoundMap:
    """Return the contents of a block mask from its bytes."""
    shape = (*maps, spec.row_tiles * spec.parts)

    def part(begin: int, dtype: type, *lengths: int) -> np.ndarray:
        size = int(np.prod(lengths)) * np.dtype(dtype).itemsize
        return memory[begin : begin + size].view(dtype).reshape(lengths)

    bits = []
    for begin in (0, layout.full):
        words = part(begin, np.uint8, *shape, spec.words * 4)
        # No bit is set after the last block.
        blocks = np.unpackbits(words, axis=-1, bitorder="little").astype(bool)
        assert not blocks[..., spec.key_blocks :].any()
        bits.append(blocks[..., : spec.key_blocks])
    return FoundMap(
        *bits,
        part(layout.tiles, np.int32, *maps, spec.row_tiles, 4)[..., :3],
        part(layout.slots_after, np.uint8, *shape, spec.words),
        part(
            layout.visible_pairs, np.uint32, *shape, layout.slots, 128, 2, spec.slot_bytes // 1024
        ),
    )


def read_lists(
    spec: BlockMaskSpec, maps: tuple[int, int], memory: np.ndarray, layout: Layout
) -> FoundLists:
    """Return the lists of a block mask from its bytes."""
    assert spec.lists is not None
    batches, heads = maps
    kv_heads = heads // spec.lists.group if heads > 1 else 1
    shape = batches, kv_heads, spec.key_blocks, spec.row_tiles
    words = memory[layout.tiles : layout.visible_pairs].view(np.uint32)
    entries, of_list = int(np.prod(shape)), spec.Bc // 32
    key_words = words[entries:][: layout.lists * of_list].reshape(*shape[:3], of_list)
    keys = np.unpackbits(key_words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    pairs = None
    if spec.lists.stores_pairs:
        pairs = memory[layout.visible_pairs :].view(np.uint32).reshape(*shape, -1, 128)
    return FoundLists(words[:entries].reshape(shape), pairs, keys)


def check_lists(
    found: FoundLists,
    mod: MaskMod,
    spec: BlockMaskSpec,
    maps: tuple[int, int],
    lengths: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Fail unless the lists of query tiles, and the pairs of their entries, agree with the mask.

    `lengths` are the numbers of queries and of keys of each sequence, by default those of `spec`.
    """
    assert spec.lists is not None
    batches, kv_heads = found.lists.shape[:2]
    seen = visible_pairs(mod, spec, maps)
    if lengths is not None:
        seen = np.stack(
            [_pairs_of_sequence(mod, spec, maps, b, *counts) for b, counts in enumerate(lengths)]
        )
    seen = seen.reshape(batches, kv_heads, -1, *seen.shape[-2:])  # the heads of each KV head
    for b, h in np.ndindex(batches, kv_heads):
        keys = found.keys[b, h].ravel()
        if found.pairs is None:
            assert not keys.any()
        else:
            np.testing.assert_array_equal(keys[: spec.seqlen_k], seen[b, h].any((0, 1)))
            assert not keys[spec.seqlen_k :].any()
        nonempty = of_blocks(seen[b, h : h + 1], spec).any((0, 1))
        missing = of_blocks(~seen[b, h : h + 1], spec).any((0, 1))
        for k, words in enumerate(found.lists[b, h]):
            tiles = np.flatnonzero(nonempty[:, k])
            assert (words[len(tiles) :] == 0xFFFFFFFF).all()
            entries = words[: len(tiles)]
            np.testing.assert_array_equal(entries & 0xFFFF, tiles)
            later = nonempty[tiles, k + 1 :].sum(-1)
            np.testing.assert_array_equal(entries >> 16 & 0x1FFF, later)
            exist = (tiles + 1) * spec.Br <= spec.seqlen_q
            exist &= (k + 1) * spec.Bc <= spec.seqlen_k
            full = ~missing[tiles, k] & exist
            np.testing.assert_array_equal(entries >> 29 & 1, full)
            np.testing.assert_array_equal(entries >> 30 & 1, ~nonempty[tiles, :k].any(-1))
            np.testing.assert_array_equal(entries >> 31, tiles == max(tiles, default=0))
            for position in np.flatnonzero(~full) if found.pairs is not None else ():
                stored = found.pairs[b, h, k, position]
                _check_stored_pairs(stored, seen[b, h, 0], int(tiles[position]), k, spec)


def _check_stored_pairs(
    stored: np.ndarray, seen: np.ndarray, tile: int, key_block: int, spec: BlockMaskSpec
) -> None:
    """Fail unless the stored pairs of a tile are those that are visible."""
    padded = np.zeros((spec.Br, spec.Bc), bool)
    part = seen[tile * spec.Br :, key_block * spec.Bc :][: spec.Br, : spec.Bc]
    padded[: part.shape[0], : part.shape[1]] = part
    threads, bits = np.ogrid[:128, :32]
    rows = threads % 4 * 2 + bits // 4 * 8 + bits % 2
    keys = threads // 32 * 16 + threads % 32 // 4 + bits // 2 % 2 * 8
    blocks = padded.reshape(spec.Br // 64, 64, spec.Bc // 64, 64).swapaxes(1, 2)
    expected = blocks[:, :, rows, keys].reshape(-1, 128, 32)
    found = np.unpackbits(stored.view(np.uint8).reshape(-1, 128, 4), axis=-1, bitorder="little")
    np.testing.assert_array_equal(found.astype(bool), expected)


def check_map(found: FoundMap, mod: MaskMod, spec: BlockMaskSpec, maps: tuple[int, int]) -> None:
    """Fail unless a block mask agrees with the pairs of the mask."""
    nonempty, full, tiles = found[:3]
    expected_nonempty, expected_full = _expected_map(mod, spec, maps)
    np.testing.assert_array_equal(nonempty, expected_nonempty)
    np.testing.assert_array_equal(full, expected_full)
    # All tiles occur, those with the most blocks first; nearly equal tiles may be in any order.
    order = tiles[..., 0]
    np.testing.assert_array_equal(
        np.sort(order), np.broadcast_to(range(spec.row_tiles), order.shape)
    )
    of_tiles = nonempty.reshape(*maps, spec.row_tiles, spec.parts, spec.key_blocks).any(-2)
    of_tiles = np.take_along_axis(of_tiles, order[..., None], -2)
    counts, any_nonempty = of_tiles.sum(-1), of_tiles.any(-1)
    begin, end = of_tiles.argmax(-1), spec.key_blocks - of_tiles[..., ::-1].argmax(-1)
    np.testing.assert_array_equal(tiles[..., 1], np.where(any_nonempty, begin, 0))
    np.testing.assert_array_equal(tiles[..., 2], np.where(any_nonempty, end, 0))
    assert (counts[..., 1:] - counts[..., :-1] <= spec.key_blocks // 255).all()
    _check_kept_pairs(found, mod, spec, maps)


def _check_kept_pairs(
    found: FoundMap, mod: MaskMod, spec: BlockMaskSpec, maps: tuple[int, int]
) -> None:
    """Fail unless the stored pairs of the last partial blocks of each part are right."""
    slots = found.shown.shape[3]
    partial = found.nonempty & ~found.full
    of_words = np.pad(partial, [(0, 0)] * 3 + [(0, -spec.key_blocks % 32)])
    counts = of_words.reshape(*partial.shape[:3], spec.words, 32).sum(-1)
    stored_after = counts[..., ::-1].cumsum(-1)[..., ::-1] - counts
    np.testing.assert_array_equal(found.stored_after, np.minimum(stored_after, slots))
    for kept in kept_pairs(found, spec):
        b, h, row, j = kept.at
        args = b, h, row + spec.q_offset, j
        seen = mod.evaluate(*(np.asarray(x, np.int32) for x in args))
        expected = np.broadcast_to(seen, kept.there.shape)
        np.testing.assert_array_equal(kept.shown[kept.there], expected[kept.there])


class KeptPairs(NamedTuple):
    """Pairs of a block whose visibility a block mask stores, shape (threads, halves, keys)."""

    part: int
    block: int
    at: tuple[Any, ...]  # batch, head, row and key, clamped to the lengths
    there: np.ndarray  # which pairs are within the lengths
    shown: np.ndarray  # which pairs are stored as visible


def kept_pairs(found: FoundMap, spec: BlockMaskSpec) -> Iterator[KeptPairs]:
    """Yield the pairs that a block mask stores, those of the last partial blocks of each part."""
    slots = found.shown.shape[3]
    partial = found.nonempty & ~found.full
    threads, halves, keys = np.ogrid[:128, :2, : spec.Bc // 4]
    rows = threads // 32 * 16 + threads % 32 // 4 + 8 * halves
    columns = threads % 4 * 2 + keys // 2 * 8 + keys % 2
    for b, h, part in np.ndindex(partial.shape[:3]):
        kept = np.flatnonzero(partial[b, h, part])[::-1][:slots]
        for slot, block in enumerate(kept):
            row, j = part * 64 + rows, block * spec.Bc + columns
            there = (row < spec.seqlen_q) & (j < spec.seqlen_k)
            at = b, h, np.minimum(row, spec.seqlen_q - 1), np.minimum(j, spec.seqlen_k - 1)
            words = found.shown[b, h, part, slot]
            bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
            yield KeptPairs(part, block, at, there, bits[..., : spec.Bc // 4].astype(bool))


def _expected_map(
    mod: MaskMod, spec: BlockMaskSpec, maps: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks are non-empty, and which are full, computed pair by pair."""
    seen, inside = _pairs(mod, spec, maps)
    some_seen = of_blocks(seen & inside, spec)
    return some_seen, some_seen & ~of_blocks(~seen & inside, spec)


def _pairs(
    mod: MaskMod, spec: BlockMaskSpec, maps: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return which pairs the mask function shows, and which are inside the band."""
    left, right = spec.band
    i = np.arange(spec.seqlen_q, dtype=np.int32)[:, None] + np.int32(spec.q_offset)
    j = np.arange(spec.seqlen_k, dtype=np.int32)
    distance = j - i.astype(np.int64)
    inside = (distance >= -left) & (distance <= right)
    b = np.arange(maps[0], dtype=np.int32)[:, None, None, None]
    h = np.arange(maps[1], dtype=np.int32)[:, None, None]
    return np.broadcast_to(mod.evaluate(b, h, i, j), (*maps, *inside.shape)), inside


def visible_pairs(mod: MaskMod, spec: BlockMaskSpec, maps: tuple[int, int]) -> np.ndarray:
    """Return whether pairs are visible, in an array of (batches, heads, queries, keys)."""
    seen, inside = _pairs(mod, spec, maps)
    return seen & inside


def _pairs_of_sequence(
    mod: MaskMod, spec: BlockMaskSpec, maps: tuple[int, int], b: int, queries: int, keys: int
) -> np.ndarray:
    """Return the visible pairs of one sequence; pairs past its end are not visible."""
    offset = keys - queries if spec.layout.kind == "varlen" else spec.q_offset
    of_sequence = spec._replace(seqlen_q=queries, seqlen_k=keys, q_offset=offset)
    seen = np.zeros((maps[1], spec.seqlen_q, spec.seqlen_k), bool)
    seen[:, :queries, :keys] = visible_pairs(mod, of_sequence, (b + 1, maps[1]))[b]
    return seen


def of_blocks(pairs: np.ndarray, spec: BlockMaskSpec) -> np.ndarray:
    """Return whether any pair of each block is true; False for parts without rows."""
    rows = np.arange(0, spec.seqlen_q, spec.Br // spec.parts)
    keys = np.arange(0, spec.seqlen_k, spec.Bc)
    blocks = np.logical_or.reduceat(np.logical_or.reduceat(pairs, rows, -2), keys, -1)
    missing = spec.row_tiles * spec.parts - len(rows)
    return np.pad(blocks, [(0, 0), (0, 0), (0, missing), (0, 0)])
