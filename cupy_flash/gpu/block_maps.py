"""Block maps: which blocks of the score matrix a mask hides or shows wholly, found on the GPU.

The host's side of `kernels_cu/blocks/block_map.cu`. Nothing here waits for the GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import (
    MAX_GRID,
    TranslationUnit,
    ceil_div,
    round_up,
    source_digest,
)
from cupy_flash.families.params import BLOCK_MAP_DTYPE, assertions
from cupy_flash.gpu.by_value import ByValue
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.environment import cupy_module

SOURCE = "blocks/block_map.cu"
FIND_RANGES, BUILD, ORDER = "find_ranges", "build_block_map", "order_tiles"
# Bound of a band that has none: no two positions are further apart.
UNBOUNDED = 2**31 - 1

# As in block_map.cu.
_THREADS, _WARPS = 256, 8
# Key blocks of a word, and its bytes.
_BITS, _WORD = 32, 4
# `MappedTile` of map.cuh.
_TILE = 16
# Parts of one allocation begin as allocations do.
_ALIGNMENT = 512
# Rows of a part whose pairs are kept, by how many threads, and keys of a word of theirs: as
# `ShownPairs` of map.cuh.
_KEPT_ROWS, _KEPT_THREADS, _KEPT_KEYS = 64, 128, 128
# How many blocks of a part have their pairs kept at most, and bytes for those of all parts. Of
# documents few parts see more than two in part. A million tokens have room for two.
_MOST_SLOTS, _SLOTS_BYTES = 16, 40_000_000
# CUDA's handles of the legacy default stream, which cannot be captured, and must not be asked.
_LEGACY_STREAMS = (0, 1)


def params_dtype(mods: np.dtype) -> np.dtype:
    """The argument struct of block_map.cu, at whose end is what the mask reads."""
    numbers = (
        *("batches", "heads", "seqlen_q", "seqlen_k", "q_offset"),
        *("part_rows", "Bc", "row_tiles", "parts"),
    )
    fields: list[tuple[str, Any]] = [
        ("map", BLOCK_MAP_DTYPE),
        ("row_ranges", np.uint64),
        ("key_ranges", np.uint64),
        *((name, np.int32) for name in (*numbers, "left", "right")),
    ]
    head = np.dtype(fields)
    names, formats = zip(*fields, strict=True)
    assert head.fields is not None
    offsets = [head.fields[name][1] for name in names]
    at_mods = round_up(head.itemsize, 8)
    layout: Any = {
        "names": [*names, "mods"],
        "formats": [*formats, mods],
        "offsets": [*offsets, at_mods],
        "itemsize": at_mods + round_up(mods.itemsize, 8),
    }
    return np.dtype(layout)


@dataclass(frozen=True)
class MaskText:
    """A mask as device text.

    Attributes
    ----------
    text
        C++ of ``ModArguments``, ``Mods`` and ``MaskBounds``.
    headers
        What that is to stand behind.
    row_ranges, key_ranges
        Bytes, or more, of what the bounds keep of a part of a row tile and of a key block.
    of_batch, of_head
        Whether it is another one for each sequence, and for each query head.
    """

    text: str
    headers: tuple[str, ...]
    row_ranges: int
    key_ranges: int
    of_batch: bool
    of_head: bool


class MapSpec(NamedTuple):
    """What a map of a given mask depends on, besides the device and what the mask captures.

    Attributes
    ----------
    Br, Bc
        Rows of a row tile, of one sequence and head, and keys of a key block.
    parts
        Of a row tile, in equal shares of its rows, each of which visits blocks of its own.
    batch, heads_q, seqlen_q, seqlen_k
        Sizes of the call; none is 0.
    q_offset
        Position of the first query among the keys.
    causal, left, right
        The band: a query sees no key behind its position, none more than `left` before it, none
        more than `right` behind it; None has no bound.
    """

    Br: int
    Bc: int
    batch: int
    heads_q: int
    seqlen_q: int
    seqlen_k: int
    q_offset: int = 0
    causal: bool = False
    left: int | None = None
    right: int | None = None
    parts: int = 1

    @property
    def row_tiles(self) -> int:
        """Of a sequence."""
        return ceil_div(self.seqlen_q, self.Br)

    @property
    def key_blocks(self) -> int:
        """Of a sequence."""
        return ceil_div(self.seqlen_k, self.Bc)

    @property
    def words(self) -> int:
        """Of a part of a row tile, in each of the two bit arrays."""
        return ceil_div(self.key_blocks, _BITS)

    @property
    def slot_bytes(self) -> int:
        """Of a part's block whose pairs are kept; 0 where parts are of other sizes."""
        if self.Br != self.parts * _KEPT_ROWS or self.Bc > 2 * _KEPT_KEYS:
            return 0
        return _KEPT_THREADS * 2 * ceil_div(self.Bc, _KEPT_KEYS) * _WORD

    @property
    def band(self) -> tuple[int, int]:
        """Distances to the first and to the last key that a query sees."""
        left, right = (
            UNBOUNDED if bound is None else min(bound, UNBOUNDED)
            for bound in (self.left, self.right)
        )
        return left, min(right, 0) if self.causal else right

    def maps(self, mask: MaskText) -> tuple[int, int]:
        """Sequences and heads that have maps of their own."""
        return self.batch if mask.of_batch else 1, self.heads_q if mask.of_head else 1


@dataclass(frozen=True)
class Layout:
    """How the parts of a map, and the ranges that it is built with, lie in their memory.

    Attributes
    ----------
    full, behind, tiles, shown, bytes
        Where they begin, and the end of the map; `visited` lies first.
    slots
        Blocks of each part whose pairs are kept at most.
    key_ranges, scratch
        Where those of keys begin behind those of rows, and bytes of both.
    """

    full: int
    behind: int
    tiles: int
    shown: int
    bytes: int
    slots: int
    key_ranges: int
    scratch: int

    @classmethod
    def of(cls, spec: MapSpec, mask: MaskText) -> Layout:
        """The layout of a map."""
        batches, heads = spec.maps(mask)
        row_tiles = batches * heads * spec.row_tiles
        parts = row_tiles * spec.parts
        bits = round_up(parts * spec.words * _WORD, _ALIGNMENT)
        tiles = 2 * bits + round_up(parts * spec.words, _ALIGNMENT)
        shown = tiles + round_up(row_tiles * _TILE, _ALIGNMENT)
        of_slot = parts * spec.slot_bytes
        slots = min(_MOST_SLOTS, _SLOTS_BYTES // of_slot, spec.key_blocks) if of_slot else 0
        key_ranges = round_up(parts * mask.row_ranges, _ALIGNMENT)
        of_keys = batches * heads * spec.key_blocks * mask.key_ranges
        return cls(
            full=bits,
            behind=2 * bits,
            tiles=tiles,
            shown=shown,
            bytes=shown + slots * of_slot,
            slots=slots,
            key_ranges=key_ranges,
            scratch=key_ranges + of_keys,
        )


@dataclass(frozen=True)
class BlockMap:
    """Where a map lies, for kernels (`BlockMap` in `kernels_cu/blocks/map.cuh`).

    Attributes
    ----------
    address, layout
        Where it begins, and how its parts lie.
    words, key_blocks
        Of a part of a row tile.
    batch_stride, head_stride
        In row tiles; 0 where all sequences, or heads, share one.
    memory
        Keeps it.
    """

    address: int
    layout: Layout
    words: int
    key_blocks: int
    batch_stride: int
    head_stride: int
    memory: Any

    @property
    def fields(self) -> tuple[int, ...]:
        """In the order of `BLOCK_MAP_DTYPE`."""
        layout = self.layout
        places = layout.full, layout.behind, layout.tiles, layout.shown
        strides = self.batch_stride, self.head_stride
        return self.address, *places, *strides, self.words, self.key_blocks, layout.slots, 0


def block_map_unit(mask: MaskText, mods: np.dtype) -> TranslationUnit:
    """The translation unit that builds a mask's maps, for all sizes and tiles.

    Parameters
    ----------
    mask
        The mask.
    mods
        Layout of its ``ModArguments``.
    """
    entries = (FIND_RANGES,) * bool(mask.row_ranges or mask.key_ranges) + (BUILD, ORDER)
    functions = {FIND_RANGES: "find_ranges", BUILD: "build", ORDER: "order_tiles"}
    structs = ("BlockMap", BLOCK_MAP_DTYPE), ("BlockMapParams", params_dtype(mods))
    lines = [
        f"// cupy_flash block map, sources {source_digest(*mask.headers, SOURCE)}",
        *(f'#include "{header}"' for header in mask.headers),
        mask.text,
        f'#include "{SOURCE}"',
        assertions(*structs, ("ModArguments", mods)),
        f"static_assert(block_map::threads == {_THREADS});",
    ]
    for ranges, struct in ((mask.row_ranges, "Rows"), (mask.key_ranges, "Keys")):
        if ranges:
            lines.append(f"static_assert(sizeof(MaskBounds::{struct}) <= {ranges});")
    for entry in entries:
        # With any number of registers ptxas takes so few that some masks spill.
        lines.append(f'extern "C" __global__ void __launch_bounds__({_THREADS}, 4)')
        lines.append(
            f"{entry}(const __grid_constant__ BlockMapParams params) "
            f"{{ block_map::{functions[entry]}(params); }}"
        )
    return TranslationUnit("\n".join(lines) + "\n", entries, "block map of a mask")


class _Stream:
    """The stream that a device's maps are built on, and given back on.

    Their memory is used again in its order alone, and it waits for all launches that read a map:
    so a map may be forgotten while kernels of any stream still read it.
    """

    def __init__(self) -> None:
        cuda = cupy_module().cuda
        self.stream = cuda.Stream(non_blocking=True)
        self._event = cuda.Event(disable_timing=True)
        self._lock = threading.Lock()
        self._has_legacy_readers = False

    def before_build(self, current: int) -> None:
        """Order what comes behind what the current stream does, and behind readers of old maps."""
        self._wait_for(current)
        if self._has_legacy_readers and current not in _LEGACY_STREAMS:
            self._wait_for(_LEGACY_STREAMS[0])

    def after_reading(self, current: int) -> None:
        """Order builds behind all that was launched on the current stream."""
        if current in _LEGACY_STREAMS:
            # It is never destroyed: the next build asks it, and calls save 1 us.
            self._has_legacy_readers = True
        else:
            self._wait_for(current)

    def _wait_for(self, stream: int) -> None:
        runtime = cupy_module().cuda.runtime
        # Else another thread might record the event anew in between.
        with self._lock:
            runtime.eventRecord(self._event.ptr, stream)
            runtime.streamWaitEvent(self.stream.ptr, self._event.ptr)


# Largest number of maps that are kept for a mask. Each length has a map, which may take many MB.
_MAX_KEPT = 32
_streams: dict[int, _Stream] = {}
_lock = threading.Lock()


def _stream_of_maps(device: int) -> _Stream:
    stream = _streams.get(device)
    if stream is None:
        with _lock:
            stream = _streams.get(device) or _streams.setdefault(device, _Stream())
    return stream


class ReadyMap:
    """A map that kernels launched next on the current stream may read.

    Attributes
    ----------
    map
        The map.
    address
        Where it begins.
    legacy_has_waited
        Whether the legacy default stream waits for the kernels that build it.
    """

    def __init__(
        self, map: BlockMap, of_maps: _Stream | None = None, built: Any | None = None
    ) -> None:
        self.map = map
        self.address = map.address
        self._of_maps, self._built = of_maps, built
        self.legacy_has_waited = False

    def wait(self, current: int) -> None:
        """Have the current stream wait for the kernels that build it."""
        assert self._built is not None
        cupy_module().cuda.runtime.streamWaitEvent(current, self._built.ptr)

    def launched(self, current: int) -> None:
        """To be called on the same stream when the kernels that read it are enqueued."""
        if self._of_maps is not None:
            self._of_maps.after_reading(current)


class MapKey:
    """What a mask keeps a map under; hashed once, as every call looks one up.

    Attributes
    ----------
    device
        Its number.
    dtype
        Of queries and keys, on which the mask's text depends.
    spec
        Of which sizes and tile.
    """

    __slots__ = ("_hash", "device", "dtype", "spec")

    def __init__(self, device: int, dtype: str, spec: MapSpec) -> None:
        self.device, self.dtype, self.spec = device, dtype, spec
        self._hash = hash((device, dtype, spec))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MapKey) and (self.device, self.dtype, self.spec) == (
            other.device,
            other.dtype,
            other.spec,
        )


# Function that allocates a number of bytes on the current device and stream, and returns the memory
# and its address.
Allocator = Callable[[int], tuple[Any, int]]
# Maps that a mask keeps.
Kept = MutableMapping[MapKey, ReadyMap]


def kept_map(kept: Kept, key: MapKey, current: int) -> ReadyMap | None:
    """A map that is kept, for what is launched next; None where one is to be built.

    Parameters
    ----------
    kept
        Maps of the mask.
    key
        Which of them.
    current
        The current stream's handle.
    """
    # The legacy default stream is never captured, and never destroyed, so that it waits once.
    is_legacy = current in _LEGACY_STREAMS
    if not is_legacy and _is_capturing(current):
        return None
    found = kept.get(key)
    if found is not None and not (is_legacy and found.legacy_has_waited):
        found.wait(current)
        found.legacy_has_waited |= is_legacy
    return found


def new_map(
    kept: Kept,
    key: MapKey,
    current: int,
    mask: MaskText,
    mods: np.ndarray,
    allocate: Allocator | None = None,
) -> ReadyMap:
    """A map that is built now, and kept.

    While the current stream is being captured, the map is built in the graph from the values that
    the captured arrays have at each launch. It is not kept, because a later call could read it
    before any launch has built it. The graph does not read kept maps, because it may outlive them.

    Parameters
    ----------
    kept, key, current
        As of `kept_map`.
    mask, mods
        Its text, and its ``ModArguments`` filled in.
    allocate
        Function that allocates a map in a graph; by default CuPy's current pool does. Kept maps
        always come from CuPy's pool, on a stream of their own.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    UnsupportedError
        For more blocks than a grid has.
    """
    if _is_capturing(current):
        return ReadyMap(_build(key.spec, mask, mods, allocate or _allocate))
    cuda = cupy_module().cuda
    of_maps, built = _stream_of_maps(key.device), cuda.Event(disable_timing=True)
    # What the captured arrays hold may still be on its way.
    of_maps.before_build(current)
    with of_maps.stream:
        found = ReadyMap(_build(key.spec, mask, mods, _allocate), of_maps, built)
        cuda.runtime.eventRecord(built.ptr, of_maps.stream.ptr)
    with _lock:
        while len(kept) >= _MAX_KEPT:
            del kept[next(iter(kept))]
        kept[key] = found
    found.wait(current)
    found.legacy_has_waited = current in _LEGACY_STREAMS
    return found


def _is_capturing(stream: int) -> bool:
    return stream not in _LEGACY_STREAMS and bool(
        cupy_module().cuda.runtime.streamIsCapturing(stream)
    )


@functools.lru_cache(maxsize=256)
def _unit(mask: MaskText, mods: np.dtype) -> TranslationUnit:
    return block_map_unit(mask, mods)


def _allocate(size: int) -> tuple[Any, int]:
    memory = cupy_module().cuda.alloc(size)
    return memory, memory.ptr


def _build(spec: MapSpec, mask: MaskText, mods: np.ndarray, allocate: Allocator) -> BlockMap:
    """Enqueue the kernels on the current stream."""
    unit, layout = _unit(mask, mods.dtype), Layout.of(spec, mask)
    batches, heads = spec.maps(mask)
    parts = spec.row_tiles * spec.parts
    thread_blocks = batches * heads * parts
    if thread_blocks > MAX_GRID:
        raise UnsupportedError(
            f"the block map of a mask of {batches} sequences, {heads} heads, {spec.seqlen_q} "
            f"queries and {spec.seqlen_k} keys takes {thread_blocks} thread blocks; a grid has at "
            f"most {MAX_GRID}"
        )
    kernels = kernel_cache.get(unit, dict.fromkeys(unit.entries, 0))
    memory, address = allocate(layout.bytes)
    # Named until the launches are made: then the pool may hand it on, to what runs later.
    _scratch, ranges = allocate(layout.scratch) if layout.scratch else (None, 0)
    built = BlockMap(
        address=address,
        layout=layout,
        words=spec.words,
        key_blocks=spec.key_blocks,
        batch_stride=heads * spec.row_tiles if mask.of_batch else 0,
        head_stride=spec.row_tiles if mask.of_head else 0,
        memory=memory,
    )
    given = ByValue(packed_params(spec, mask, mods, built, ranges))
    if FIND_RANGES in kernels:
        of_rows = parts if mask.row_ranges else 0
        of_keys = spec.key_blocks if mask.key_ranges else 0
        warps = batches * heads * (of_rows + of_keys)
        kernels[FIND_RANGES]((ceil_div(warps, _WARPS), 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    kernels[BUILD]((thread_blocks, 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    kernels[ORDER]((batches * heads, 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    return built


def packed_params(
    spec: MapSpec, mask: MaskText, mods: np.ndarray, map: BlockMap, ranges: int
) -> bytearray:
    """The argument struct of the kernels, of a map that is to be built.

    Parameters
    ----------
    spec, mask, mods
        Of which sizes and tile, and what `new_map` is given of the mask.
    map
        Where it is to lie.
    ranges
        Address of the scratch memory; 0 where there is none.
    """
    batches, heads = spec.maps(mask)
    left, right = spec.band
    record = np.zeros((), params_dtype(mods.dtype))
    record["map"] = map.fields
    record["row_ranges"] = ranges
    record["key_ranges"] = ranges + Layout.of(spec, mask).key_ranges
    record["batches"], record["heads"] = batches, heads
    for name in ("seqlen_q", "seqlen_k", "q_offset", "Bc", "row_tiles", "parts"):
        record[name] = getattr(spec, name)
    record["part_rows"] = spec.Br // spec.parts
    record["left"], record["right"] = left, right
    record["mods"] = mods
    return bytearray(record.tobytes())
