"""A mask that is given by blocks of the score matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.strided import dtype_name
from cupy_flash.mods.modification import MaskMod, prefixed
from cupy_flash.problem.problem import MAX_SEQLEN
from cupy_flash.problem.tile import block_sizes

# What its blocks are called among the arrays of a call.
BLOCKS = prefixed("mask_mod", "blocks")

# By whether sequences, and query heads, have blocks of their own.
_FUNCTIONS: dict[tuple[bool, bool], Callable[[int, int], Callable[..., Any]]] = {
    (False, False): lambda r, c: lambda i, j, blocks: blocks[0, 0, i // r, j // c],
    (True, False): lambda r, c: lambda b, i, j, blocks: blocks[b, 0, i // r, j // c],
    (False, True): lambda r, c: lambda h, i, j, blocks: blocks[0, h, i // r, j // c],
    (True, True): lambda r, c: lambda b, h, i, j, blocks: blocks[b, h, i // r, j // c],
}


class BlockList(MaskMod):
    """A mask of whole blocks of the score matrix, for what no function describes.

    Query i, by its position among the keys, sees key j if its block is on:
    ``blocks[b, h, i // rows, j // keys]``. Combine it with causality and windows by their own
    arguments.

    Parameters
    ----------
    blocks : bool array, (batch or 1, heads_q or 1, row blocks, key blocks)
        NumPy's, CuPy's or what speaks DLPack; of the kind that q is. Positions beyond the last
        block are as in the last.
    block
        Rows and keys of a block. On Hopper, tiles are chosen that divide it: multiples of 64 rows,
        and of 32, 48, 64, 80, 96 or 128 keys. Where none does, pairs are looked at along the edges
        of blocks, as the plan says.

    Raises
    ------
    TypeError
        For an array that is not of bools, or sizes that are no pair of integers.
    ValueError
        For an array of other than four axes, or without elements, and for sizes below 1; in a call,
        for another number of sequences or heads.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import BlockList
    >>> checkers = BlockList(np.eye(2, dtype=bool)[None, None], block=(2, 3))
    >>> checkers.evaluate(b=0, h=0, i=2, j=np.arange(6, dtype=np.int32)).astype(int)
    array([0, 0, 0, 1, 1, 1])
    """

    __slots__ = ("block",)

    block: tuple[int, int]

    def __init__(self, blocks: Any, block: tuple[int, int]) -> None:
        array = read("blocks", blocks)
        if dtype_name(array) != "bool":
            raise TypeError(f"blocks has dtype {array.dtype}; expected bool: compare it, as x != 0")
        if array.ndim != 4:
            raise ValueError(
                f"blocks has shape {tuple(array.shape)}; expected (batch or 1, heads_q or 1, row "
                "blocks, key blocks)"
            )
        rows, keys = block_sizes(block)
        if max(rows, keys) > MAX_SEQLEN:
            raise ValueError(f"block is {block}; expected at most {MAX_SEQLEN} rows and keys")
        object.__setattr__(self, "block", (rows, keys))
        of_batch, of_head = (n > 1 for n in array.shape[:2])
        super().__init__(_FUNCTIONS[of_batch, of_head](rows, keys), blocks=array)

    def _block(self) -> tuple[int, int] | None:
        return self.block

    def _options(self) -> dict[str, Any]:
        return {"block": self.block}


def require_fit(blocks: Any, batch: int, heads_q: int) -> None:
    """Raise ValueError unless a call of so many sequences and query heads may have these blocks."""
    if blocks.shape[0] not in (1, batch) or blocks.shape[1] not in (1, heads_q):
        raise ValueError(
            f"mask_mod is a BlockList of blocks of shape {tuple(blocks.shape)}; expected "
            f"({batch} or 1, {heads_q} or 1, row blocks, key blocks)"
        )
