"""Block masks, built on the GPU: which blocks of the score matrix are empty, partial or full.

This is the host side of `build.cu` and `build_lists.cu` in `kernels_cu/block_mask`. No function
here waits for the GPU.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import (
    MAX_GRID,
    TranslationUnit,
    ceil_div,
    source_digest,
)
from cupy_flash.families.params import BLOCK_MASK_DTYPE, assertions
from cupy_flash.gpu.block_mask_layout import (
    BlockMask,
    BlockMaskSpec,
    Layout,
    MaskSource,
    block_mask_at,
)
from cupy_flash.gpu.by_value import ByValue
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.gpu.params import struct_with_mods

SOURCE, LISTS_SOURCE = "block_mask/build.cu", "block_mask/build_lists.cu"
FIND_RANGES, BUILD, ORDER = "find_ranges", "build_block_map", "order_tiles"
LIST, STORE_PAIRS = "list_query_tiles", "store_pairs"
# Names of the struct fields that hold the addresses of arrays of lengths.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")

# Number of threads, and of warps, of a thread block (as in build.cu).
_THREADS, _WARPS = 256, 8
# CUDA's handles of the legacy default stream: it cannot be captured, so it is never queried.
_LEGACY_STREAMS = (0, 1)


def params_dtype(mods: np.dtype) -> np.dtype:
    """Return the dtype of the argument struct, which ends with what the mask reads."""
    numbers = (
        *("batches", "heads", "seqlen_q", "seqlen_k", "q_offset"),
        *("group_rows", "Bc", "query_tiles", "row_groups", "heads_per_list", "total_q", "total_k"),
    )
    fields: list[tuple[str, Any]] = [
        ("map", BLOCK_MASK_DTYPE),
        ("row_ranges", np.uint64),
        ("key_ranges", np.uint64),
        *((name, np.int32) for name in numbers),
        *((name, np.uint64) for name in LENGTHS),
        ("left", np.int32),
        ("right", np.int32),
    ]
    return struct_with_mods(fields, mods)


def config_text(kind: str) -> str:
    """Return the C++ of ``BlockMaskConfig`` for a kind of batch, see `BatchLayout`."""
    members = {"has_seqlens": kind != "dense", "packed": kind == "varlen"}
    lines = [f"  static constexpr bool {name} = {json.dumps(x)};" for name, x in members.items()]
    return "\n".join(("struct BlockMaskConfig {", *lines, "};"))


def block_mask_unit(
    mask: MaskSource, mods: np.dtype, *, has_lists: bool = False, kind: str = "dense"
) -> TranslationUnit:
    """Return the translation unit that builds block masks of a mask, for all sizes and tiles.

    Parameters
    ----------
    mask
        Generated CUDA source of the mask.
    mods
        Dtype of its ``ModArguments``.
    has_lists
        Whether the block masks have lists of query tiles, for the backward pass.
    kind
        Kind of batch, see `BatchLayout`.
    """
    last = (LIST, STORE_PAIRS) if has_lists else (ORDER,)
    entries = (FIND_RANGES,) * bool(mask.row_ranges or mask.key_ranges) + (BUILD, *last)
    functions = {entry: entry for entry in entries} | {BUILD: "build"}
    source = LISTS_SOURCE if has_lists else SOURCE
    structs = ("BlockMask", BLOCK_MASK_DTYPE), ("BlockMaskParams", params_dtype(mods))
    lines = [
        f"// cupy_flash block map, sources {source_digest(*mask.headers, source)}",
        *(f'#include "{header}"' for header in mask.headers),
        mask.text,
        config_text(kind),
        f'#include "{source}"',
        assertions(*structs, ("ModArguments", mods)),
        f"static_assert(block_mask::threads == {_THREADS});",
    ]
    for ranges, struct in ((mask.row_ranges, "Rows"), (mask.key_ranges, "Keys")):
        if ranges:
            lines.append(f"static_assert(sizeof(MaskBounds::{struct}) <= {ranges});")
    for entry in entries:
        # Without a minimum number of blocks, ptxas takes so few registers that some masks spill.
        lines.append(f'extern "C" __global__ void __launch_bounds__({_THREADS}, 4)')
        lines.append(
            f"{entry}(const __grid_constant__ BlockMaskParams params) "
            f"{{ block_mask::{functions[entry]}(params); }}"
        )
    return TranslationUnit("\n".join(lines) + "\n", entries, "block mask")


class _Stream:
    """Stream on which the block masks of a device are built, and in whose order memory is reused.

    The stream waits for all launches that read a block mask. So a block mask may be released while
    kernels of any stream still read it.
    """

    def __init__(self) -> None:
        cuda = cupy_module().cuda
        self.stream = cuda.Stream(non_blocking=True)
        self._event = cuda.Event(disable_timing=True)
        self._lock = threading.Lock()
        self._has_legacy_readers = False

    def before_build(self, current: int) -> None:
        """Make the next build wait for the current stream and for all readers of block masks."""
        self._wait_for(current)
        if self._has_legacy_readers and current not in _LEGACY_STREAMS:
            self._wait_for(_LEGACY_STREAMS[0])

    def after_reading(self, current: int) -> None:
        """Make later builds wait for all launches so far on the current stream."""
        if current in _LEGACY_STREAMS:
            # This stream is never destroyed, so only the next build waits for it: calls save 1 us.
            self._has_legacy_readers = True
        else:
            self._wait_for(current)

    def _wait_for(self, stream: int) -> None:
        runtime = cupy_module().cuda.runtime
        # The lock keeps other threads from recording the event again between the two calls.
        with self._lock:
            runtime.eventRecord(self._event.ptr, stream)
            runtime.streamWaitEvent(self.stream.ptr, self._event.ptr)


# Largest number of cached block masks per mask, and of their bytes. Each length has one, which may
# take 150 MB in the backward pass. The newest one is kept whatever its size.
_MAX_KEPT, _MAX_KEPT_BYTES = 32, 500_000_000
_streams: dict[int, _Stream] = {}
_lock = threading.Lock()


def _build_stream(device: int) -> _Stream:
    stream = _streams.get(device)
    if stream is None:
        with _lock:
            stream = _streams.get(device) or _streams.setdefault(device, _Stream())
    return stream


class ReadyBlockMask:
    """Block mask that the next kernels on the current stream may read.

    Attributes
    ----------
    block_mask
        Block mask.
    address
        Address of its first array.
    legacy_has_waited
        Whether the legacy default stream already waits for the kernels that build the block mask.
    """

    def __init__(
        self, block_mask: BlockMask, build_stream: _Stream | None = None, built: Any | None = None
    ) -> None:
        self.block_mask = block_mask
        self.address = block_mask.address
        self._build_stream, self._built = build_stream, built
        self.legacy_has_waited = False

    def wait(self, current: int) -> None:
        """Make the current stream wait for the kernels that build the block mask."""
        assert self._built is not None
        cupy_module().cuda.runtime.streamWaitEvent(current, self._built.ptr)

    def launched(self, current: int) -> None:
        """Record a launch; call this on the same stream after the kernels that read the mask."""
        if self._build_stream is not None:
            self._build_stream.after_reading(current)


class BlockMaskKey:
    """Key of a cached block mask; its hash is computed once, because every call needs it.

    Attributes
    ----------
    device
        Number of the device.
    dtype
        Dtype of queries and keys, on which the source of the mask depends.
    spec
        Sizes and tile of the block mask.
    """

    __slots__ = ("_hash", "device", "dtype", "spec")

    def __init__(self, device: int, dtype: str, spec: BlockMaskSpec) -> None:
        self.device, self.dtype, self.spec = device, dtype, spec
        self._hash = hash((device, dtype, spec))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMaskKey) and (self.device, self.dtype, self.spec) == (
            other.device,
            other.dtype,
            other.spec,
        )


# Addresses of the arrays `LENGTHS`, each 0 if it is not given.
Lengths = tuple[int, int, int]
NO_LENGTHS: Lengths = (0, 0, 0)
# Function that allocates a number of bytes on the current device and stream, and returns the memory
# and its address.
Allocator = Callable[[int], tuple[Any, int]]
# Cache of the block masks of a mask.
Kept = MutableMapping[BlockMaskKey, ReadyBlockMask]


def find_kept_mask(kept: Kept, key: BlockMaskKey, current: int) -> ReadyBlockMask | None:
    """Return a cached block mask for the next launch, or None if it must be built.

    Parameters
    ----------
    kept
        Cache of the block masks.
    key
        Key of the block mask.
    current
        Handle of the current stream.
    """
    # The legacy default stream is never captured and never destroyed, so it waits only once.
    is_legacy = current in _LEGACY_STREAMS
    if not is_legacy and _is_capturing(current):
        return None
    result = kept.get(key)
    if result is not None and not (is_legacy and result.legacy_has_waited):
        result.wait(current)
        result.legacy_has_waited |= is_legacy
    return result


def build_mask(
    kept: Kept,
    key: BlockMaskKey,
    current: int,
    mask: MaskSource,
    mods: np.ndarray,
    allocate: Allocator | None = None,
    lengths: Lengths = NO_LENGTHS,
) -> ReadyBlockMask:
    """Build a block mask, add it to the cache, and return it.

    A block mask of sequences with lengths of their own is built on the current stream and is not
    cached, because a later call may have other lengths in the same arrays.

    While the current stream is being captured, the block mask is built in the graph from the values
    that the mask's arrays have at each launch. It is not cached, because a later call could read it
    before any launch has built it. The graph does not read cached ones, as it may outlive them.

    Parameters
    ----------
    kept, key, current
        See `find_kept_mask`.
    mask, mods
        Source of the mask, and the values of its ``ModArguments``.
    allocate
        Function that allocates memory on the current stream; by default, CuPy's current pool does.
        Memory of cached block masks always comes from CuPy's pool, on a separate stream.
    lengths
        Addresses of the lengths of the sequences, unless the batch is dense.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    UnsupportedError
        If more thread blocks are needed than a grid may have.
    """
    if not key.spec.layout.is_dense or _is_capturing(current):
        return ReadyBlockMask(_build(key.spec, mask, mods, allocate or _allocate, lengths))
    cuda = cupy_module().cuda
    build_stream, built = _build_stream(key.device), cuda.Event(disable_timing=True)
    # Kernels on the current stream may still write the arrays that the mask reads.
    build_stream.before_build(current)
    with build_stream.stream:
        result = ReadyBlockMask(_build(key.spec, mask, mods, _allocate), build_stream, built)
        cuda.runtime.eventRecord(built.ptr, build_stream.stream.ptr)
    with _lock:
        kept.pop(key, None)
        left = _MAX_KEPT_BYTES - result.block_mask.layout.bytes
        left -= sum(each.block_mask.layout.bytes for each in kept.values())
        while kept and (len(kept) >= _MAX_KEPT or left < 0):
            left += kept.pop(next(iter(kept))).block_mask.layout.bytes
        kept[key] = result
    result.wait(current)
    result.legacy_has_waited = current in _LEGACY_STREAMS
    return result


def _is_capturing(stream: int) -> bool:
    return stream not in _LEGACY_STREAMS and bool(
        cupy_module().cuda.runtime.streamIsCapturing(stream)
    )


@functools.lru_cache(maxsize=256)
def _unit(mask: MaskSource, mods: np.dtype, has_lists: bool, kind: str) -> TranslationUnit:
    return block_mask_unit(mask, mods, has_lists=has_lists, kind=kind)


def _allocate(size: int) -> tuple[Any, int]:
    memory = cupy_module().cuda.alloc(size)
    return memory, memory.ptr


def _build(
    spec: BlockMaskSpec,
    mask: MaskSource,
    mods: np.ndarray,
    allocate: Allocator,
    lengths: Lengths = NO_LENGTHS,
) -> BlockMask:
    """Enqueue the kernels that build a block mask on the current stream."""
    unit = _unit(mask, mods.dtype, spec.lists is not None, spec.layout.kind)
    layout = Layout.of(spec, mask)
    batches, heads = spec.maps(mask)
    parts = spec.row_tiles * spec.parts
    thread_blocks = batches * heads * parts
    if thread_blocks > MAX_GRID:
        raise UnsupportedError(
            f"the block mask of {batches} sequences, {heads} heads, {spec.seqlen_q} queries and "
            f"{spec.seqlen_k} keys needs {thread_blocks} thread blocks, more than the {MAX_GRID} "
            "of a launch"
        )
    kernels = kernel_cache.get(unit, dict.fromkeys(unit.entries, 0))
    memory, address = allocate(layout.bytes)
    # `_scratch` keeps the memory until the launches are enqueued. Then the pool may reuse it.
    _scratch, ranges = allocate(layout.scratch) if layout.scratch else (None, 0)
    built = block_mask_at(spec, mask, address, memory)
    given = ByValue(packed_params(spec, mask, mods, built, ranges, lengths))
    if FIND_RANGES in kernels:
        of_rows = parts if mask.row_ranges else 0
        of_keys = spec.key_blocks if mask.key_ranges else 0
        warps = batches * heads * (of_rows + of_keys)
        kernels[FIND_RANGES]((ceil_div(warps, _WARPS), 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    kernels[BUILD]((thread_blocks, 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    if spec.lists is None:
        kernels[ORDER]((batches * heads, 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
        return built
    lists = ceil_div(layout.lists, _WARPS)
    kernels[LIST]((lists, 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    if spec.lists.stores_pairs:
        kernels[STORE_PAIRS]((spec.entries(mask), 1, 1), (_THREADS, 1, 1), (given.pointer,), 0)
    return built


def packed_params(
    spec: BlockMaskSpec,
    mask: MaskSource,
    mods: np.ndarray,
    block_mask: BlockMask,
    ranges: int,
    lengths: Lengths = NO_LENGTHS,
) -> bytearray:
    """Return the argument struct of the kernels that build a block mask.

    Parameters
    ----------
    spec, mask, mods
        Sizes and tile; source and arguments of the mask, see `build_mask`.
    block_mask
        Block mask to build, whose memory is allocated.
    ranges
        Address of the scratch memory; 0 if there is none.
    lengths
        Addresses of the lengths of the sequences.
    """
    batches, heads = spec.maps(mask)
    left, right = spec.band
    record = np.zeros((), params_dtype(mods.dtype))
    record["map"] = block_mask.fields
    record["row_ranges"] = ranges
    record["key_ranges"] = ranges + Layout.of(spec, mask).key_ranges
    record["batches"], record["heads"] = batches, heads
    for name in ("seqlen_q", "seqlen_k", "q_offset", "Bc"):
        record[name] = getattr(spec, name)
    record["query_tiles"] = spec.row_tiles
    record["row_groups"], record["group_rows"] = spec.parts, spec.Br // spec.parts
    record["heads_per_list"] = spec.heads_per_list(mask)
    record["total_q"], record["total_k"] = spec.layout.total_q, spec.layout.total_k
    for name, address in zip(LENGTHS, lengths, strict=True):
        record[name] = address
    record["left"], record["right"] = left, right
    record["mods"] = mods
    return bytearray(record.tobytes())
