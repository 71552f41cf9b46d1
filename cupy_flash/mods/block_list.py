"""Mask that is given by an array of blocks of the score matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.strided import dtype_name
from cupy_flash.mods.captures import prefixed
from cupy_flash.mods.modification import MaskMod
from cupy_flash.opaque import untraced
from cupy_flash.problem.problem import MAX_SEQLEN
from cupy_flash.problem.tile import block_sizes

# Name of the array of blocks among the arrays of a call.
BLOCKS = prefixed("mask_mod", "blocks")

# Mask functions, by whether blocks differ between sequences and between query heads.
_FUNCTIONS: dict[tuple[bool, bool], Callable[[int, int], Callable[..., Any]]] = {
    (False, False): lambda r, c: lambda i, j, blocks: blocks[0, 0, i // r, j // c],
    (True, False): lambda r, c: lambda b, i, j, blocks: blocks[b, 0, i // r, j // c],
    (False, True): lambda r, c: lambda h, i, j, blocks: blocks[0, h, i // r, j // c],
    (True, True): lambda r, c: lambda b, h, i, j, blocks: blocks[b, h, i // r, j // c],
}


class BlockList(MaskMod):
    """Mask of whole blocks of the score matrix, for masks that no function describes.

    The query at position i among the keys attends to key j if the element of their block is true:
    ``blocks[b, h, i // rows, j // keys]``. Pass causality and windows as other arguments.

    Parameters
    ----------
    blocks : bool array, (batch or 1, heads_q or 1, row blocks, key blocks)
        Array of NumPy, CuPy or a library with DLPack, stored where q is. Positions past the last
        block belong to the last block.
    block
        Rows and keys of a block. On Hopper, tiles are chosen that divide the block: it should have
        a multiple of 64 rows, and of 32, 48, 64, 80, 96 or 128 keys. If no tile divides it, pairs
        are tested along the edges of blocks, as the plan says.

    Raises
    ------
    TypeError
        If the array is not of bools, or `block` is not a pair of integers.
    ValueError
        If the array does not have four axes or has no elements, or if a size is below 1. In a call,
        also if the number of sequences or heads differs.

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

    @untraced
    def __init__(self, blocks: Any, block: tuple[int, int]) -> None:
        array = read("blocks", blocks)
        if dtype_name(array) != "bool":
            raise TypeError(f"blocks has dtype {array.dtype}; expected bool, such as x != 0")
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
        super().__init__(_FUNCTIONS[of_batch, of_head](rows, keys), blocks=blocks)

    def _block(self) -> tuple[int, int] | None:
        return self.block

    def _options(self) -> dict[str, Any]:
        return {"block": self.block}


def require_fit(blocks: Any, batch: int, heads_q: int) -> None:
    """Raise ValueError unless blocks fit a call of `batch` sequences and `heads_q` heads."""
    if blocks.shape[0] not in (1, batch) or blocks.shape[1] not in (1, heads_q):
        raise ValueError(
            f"mask_mod is a BlockList of blocks of shape {tuple(blocks.shape)}; expected "
            f"({batch} or 1, {heads_q} or 1, row blocks, key blocks)"
        )
