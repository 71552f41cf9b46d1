"""Pictures of masks, drawn with matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.problem.tile import block_sizes

# Colours of masked and visible pairs, and of empty, partial and full blocks. More visible pairs are
# darker, so that the colours differ in black and white, too.
_PAIRS = ("#f2f2f2", "#0072B2")
_BLOCKS = ("#f2f2f2", "#E69F00", "#0072B2")
_MEANINGS = ("empty", "partial", "full")


def block_classes(seen: NDArray[np.bool_], block: tuple[int, int]) -> NDArray[np.int64]:
    """Return the class of each block of a mask.

    Parameters
    ----------
    seen : bool array, (seqlen_q, seqlen_k)
        Visibility of each pair.
    block
        Rows and keys of a block.

    Returns
    -------
    array, (row blocks, key blocks)
        0 if no pair of the block is visible, 1 if some pairs are, 2 if all are.
    """
    rows, keys = (np.arange(0, n, size) for n, size in zip(seen.shape, block, strict=True))

    def of_blocks(pairs: NDArray[np.bool_]) -> NDArray[np.bool_]:
        reduced = np.logical_or.reduceat(np.logical_or.reduceat(pairs, rows, 0), keys, 1)
        return np.asarray(reduced)

    some, hides = of_blocks(seen), of_blocks(~seen)
    return some.astype(np.int64) + (some & ~hides)


def draw(seen: NDArray[np.bool_], block: tuple[int, int] | None, ax: Any | None) -> Any:
    """Draw a mask, queries from the top down and keys to the right.

    Parameters
    ----------
    seen : bool array, (seqlen_q, seqlen_k)
        Visibility of each pair.
    block
        Rows and keys of the blocks to draw, coloured by their class (`block_classes`); None draws
        pairs.
    ax
        Axes of matplotlib; None creates new axes.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError, ValueError
        If `block` is not a pair of positive integers.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        message = "matplotlib is not installed; pip install 'cupy_flash[plot]'"
        raise ImportError(message) from error
    if ax is None:
        ax = Figure(layout="constrained").subplots()
    seqlen_q, seqlen_k = seen.shape
    extent = (0, seqlen_k, seqlen_q, 0)
    if block is None:
        ax.imshow(seen, cmap=ListedColormap(_PAIRS), vmin=0, vmax=1, extent=extent)
    else:
        rows, keys = block_sizes(block)
        classes = block_classes(seen, (rows, keys))
        of_pairs = np.repeat(np.repeat(classes, rows, 0), keys, 1)[:seqlen_q, :seqlen_k]
        ax.imshow(of_pairs, cmap=ListedColormap(_BLOCKS), vmin=0, vmax=2, extent=extent)
        patches = [Patch(color=_BLOCKS[kind], label=_MEANINGS[kind]) for kind in np.unique(classes)]
        ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), title="blocks")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    return ax
