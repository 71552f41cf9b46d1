"""Sizes of a block mask and layout of its arrays in device memory.

The kernels read them as `BlockMask` in `kernels_cu/block_mask/block_mask.cuh`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cupy_flash.families.contract import QueryTileLists, ceil_div, round_up

# Value of an absent bound: no two positions are further apart.
UNBOUNDED = 2**31 - 1

# Number of KV blocks per word of a bit array, and bytes of a word.
_BITS, _WORD = 32, 4
# Size in bytes of `MaskedTile` in block_mask.cuh.
_TILE = 16
# Alignment in bytes of the arrays in one allocation.
_ALIGNMENT = 512
# Layout of the stored visible pairs of a block (`VisiblePairs` in block_mask.cuh): query rows,
# threads that read them, and keys per word.
_KEPT_ROWS, _KEPT_THREADS, _KEPT_KEYS = 64, 128, 128
# Largest number of partial blocks per row group whose visible pairs are stored, and bytes for all.
# Document masks rarely have more than two; a million tokens have space for two.
_MOST_SLOTS, _SLOTS_BYTES = 16, 40_000_000


@dataclass(frozen=True)
class MaskSource:
    """Generated CUDA source of a mask.

    Attributes
    ----------
    text
        C++ of ``ModArguments``, ``Mods`` and ``MaskBounds``.
    headers
        Headers to include before the text.
    row_ranges, key_ranges
        Upper bounds of the bytes that ``MaskBounds`` stores per row group and per KV block.
    of_batch, of_head
        Whether the mask differs between sequences, and between query heads.
    """

    text: str
    headers: tuple[str, ...]
    row_ranges: int
    key_ranges: int
    of_batch: bool
    of_head: bool


class BatchLayout(NamedTuple):
    """Layout of the sequences of a batch, as far as a block mask depends on it.

    Attributes
    ----------
    kind
        Kind of batch: "dense", "padded" or "varlen", see `cupy_flash.problem.layout.Layout`.
    total_q, total_k
        Number of rows of packed queries, and of packed keys; 0 if they are not packed.
    """

    kind: str = "dense"
    total_q: int = 0
    total_k: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether all sequences have the same length."""
        return self.kind == "dense"


class BlockMaskSpec(NamedTuple):
    """Sizes and tile of a block mask.

    In a dense batch, they are all that it depends on besides the mask and the device.

    Attributes
    ----------
    Br, Bc
        Number of rows of a query tile, and of keys of a KV block.
    parts
        Number of equal row groups of a query tile, which have different KV blocks.
    batch, heads_q, seqlen_q, seqlen_k
        Sizes of the call; none is 0.
    q_offset
        Position of the first query among the keys.
    causal, left, right
        Band of visible keys. If `causal`, a query attends to no key after its position. It attends
        to no key more than `left` before or more than `right` after it; None means no bound.
    lists
        Lists of query tiles, for the backward pass. `parts` is then 1.
    layout
        Layout of the batch. Unless it is dense, sequences have lengths of their own, and `seqlen_q`
        and `seqlen_k` are the largest ones. If it is packed, `q_offset` is ignored.
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
    lists: QueryTileLists | None = None
    layout: BatchLayout = BatchLayout()

    @property
    def row_tiles(self) -> int:
        """Number of query tiles of a sequence."""
        return ceil_div(self.seqlen_q, self.Br)

    @property
    def key_blocks(self) -> int:
        """Number of KV blocks of a sequence."""
        return ceil_div(self.seqlen_k, self.Bc)

    @property
    def words(self) -> int:
        """Number of words of a row group in each of the two bit arrays."""
        return ceil_div(self.key_blocks, _BITS)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the stored visible pairs of a block; 0 if its size does not support storing."""
        if self.lists or self.Br != self.parts * _KEPT_ROWS or self.Bc > 2 * _KEPT_KEYS:
            return 0
        return _KEPT_THREADS * 2 * ceil_div(self.Bc, _KEPT_KEYS) * _WORD

    @property
    def band(self) -> tuple[int, int]:
        """Distances from a query to the first and to the last key in its band."""
        left, right = (
            UNBOUNDED if bound is None else min(bound, UNBOUNDED)
            for bound in (self.left, self.right)
        )
        return left, min(right, 0) if self.causal else right

    def maps(self, mask: MaskSource) -> tuple[int, int]:
        """Return the number of sequences, and of heads, that have different block masks."""
        of_batch = mask.of_batch or not self.layout.is_dense
        return self.batch if of_batch else 1, self.heads_q if mask.of_head else 1

    def heads_per_list(self, mask: MaskSource) -> int:
        """Return the number of block masks, one per head, that a list covers; 0 without lists."""
        if self.lists is None:
            return 0
        return self.lists.group if mask.of_head else 1

    def list_count(self, mask: MaskSource) -> int:
        """Return the number of lists of query tiles."""
        batches, heads = self.maps(mask)
        per_list = self.heads_per_list(mask)
        return batches * heads // per_list * self.key_blocks if per_list else 0

    def entries(self, mask: MaskSource) -> int:
        """Return the number of entries of all lists; each list has space for all query tiles."""
        return self.list_count(mask) * self.row_tiles


@dataclass(frozen=True)
class Layout:
    """Layout of the arrays of a block mask, and of the ranges from which it is built.

    Attributes
    ----------
    full, slots_after, tiles, visible_pairs, bytes
        Byte offsets of the arrays after the first one, `nonempty`, and total number of bytes. At
        `tiles`, a block mask for the backward pass has its lists of query tiles, and the bits of
        their keys.
    slots
        Largest number of blocks of a row group whose visible pairs are stored.
    lists
        Number of lists of query tiles.
    key_ranges, scratch
        Byte offset of the ranges of keys, which follow those of rows, and bytes of both.
    """

    full: int
    slots_after: int
    tiles: int
    visible_pairs: int
    bytes: int
    slots: int
    lists: int
    key_ranges: int
    scratch: int

    @classmethod
    def of(cls, spec: BlockMaskSpec, mask: MaskSource) -> Layout:
        """Return the layout of a block mask."""
        batches, heads = spec.maps(mask)
        row_tiles = batches * heads * spec.row_tiles
        parts = row_tiles * spec.parts
        bits = round_up(parts * spec.words * _WORD, _ALIGNMENT)
        tiles = 2 * bits + round_up(parts * spec.words, _ALIGNMENT)
        entries, lists = spec.entries(mask), spec.list_count(mask)
        of_lists = (entries + lists * spec.Bc // _BITS) * _WORD
        of_tiles = of_lists if spec.lists else row_tiles * _TILE
        visible_pairs = tiles + round_up(of_tiles, _ALIGNMENT)
        stored = entries * spec.Br * spec.Bc // 8 if spec.lists and spec.lists.stores_pairs else 0
        of_slot = parts * spec.slot_bytes
        slots = min(_MOST_SLOTS, _SLOTS_BYTES // of_slot, spec.key_blocks) if of_slot else 0
        key_ranges = round_up(parts * mask.row_ranges, _ALIGNMENT)
        of_keys = batches * heads * spec.key_blocks * mask.key_ranges
        return cls(
            full=bits,
            slots_after=2 * bits,
            tiles=tiles,
            visible_pairs=visible_pairs,
            bytes=visible_pairs + slots * of_slot + stored,
            slots=slots,
            lists=lists,
            key_ranges=key_ranges,
            scratch=key_ranges + of_keys,
        )


@dataclass(frozen=True)
class BlockMask:
    """Block mask in device memory (`BlockMask` in `kernels_cu/block_mask/block_mask.cuh`).

    Attributes
    ----------
    address, layout
        Address of the first array, and layout of all arrays.
    words, key_blocks
        Number of words, and of KV blocks, of a row group.
    batch_stride, head_stride
        Strides in query tiles; 0 if all sequences, or heads, have the same mask.
    memory
        Object that owns the memory.
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
        """Values of the struct for kernels, in the order of `BLOCK_MASK_DTYPE`."""
        layout = self.layout
        places = layout.full, layout.slots_after, layout.tiles, layout.visible_pairs
        strides = self.batch_stride, self.head_stride
        sizes = self.words, self.key_blocks, layout.slots, layout.lists
        return self.address, *places, *strides, *sizes


def block_mask_at(
    spec: BlockMaskSpec, mask: MaskSource, address: int = 0, memory: Any = None
) -> BlockMask:
    """Return a block mask that is, or will be, at an address, see `BlockMask`."""
    batches, heads = spec.maps(mask)
    return BlockMask(
        address=address,
        layout=Layout.of(spec, mask),
        words=spec.words,
        key_blocks=spec.key_blocks,
        batch_stride=heads * spec.row_tiles if batches > 1 else 0,
        head_stride=spec.row_tiles if mask.of_head else 0,
        memory=memory,
    )
