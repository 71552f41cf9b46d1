"""Pictures of masks and of attention weights, drawn with matplotlib."""

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
    matplotlib = _matplotlib()
    colormap, patch = matplotlib.colors.ListedColormap, matplotlib.patches.Patch
    ax = _axes(ax)
    seqlen_q, seqlen_k = seen.shape
    extent = (0, seqlen_k, seqlen_q, 0)
    if block is None:
        ax.imshow(seen, cmap=colormap(_PAIRS), vmin=0, vmax=1, extent=extent)
    else:
        rows, keys = block_sizes(block)
        classes = block_classes(seen, (rows, keys))
        of_pairs = np.repeat(np.repeat(classes, rows, 0), keys, 1)[:seqlen_q, :seqlen_k]
        ax.imshow(of_pairs, cmap=colormap(_BLOCKS), vmin=0, vmax=2, extent=extent)
        patches = [patch(color=_BLOCKS[kind], label=_MEANINGS[kind]) for kind in np.unique(classes)]
        ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), title="blocks")
    return ax


def draw_weights(
    weights: NDArray[np.float64],
    labels: tuple[list[str] | None, list[str] | None],
    vmax: float | None,
    ax: Any | None,
    *,
    colorbar: bool,
) -> Any:
    """Draw attention weights as a heat map, queries from the top down and keys to the right.

    Parameters
    ----------
    weights : array, (rows, keys)
        Weights; NaN is left blank.
    labels
        Labels of the rows and labels of the keys; None shows indices.
    vmax
        Weight of the darkest color; None for the largest weight.
    ax
        Axes of matplotlib; None creates new axes.
    colorbar
        Whether to draw the scale of colors.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    ax = _axes(ax)
    colors = matplotlib.colors.LinearSegmentedColormap.from_list("weights", _PAIRS)
    # Without aspect="auto", a few rows of many keys would be too low to see.
    image = ax.imshow(weights, cmap=colors, vmin=0, vmax=vmax, aspect="auto")
    queries, keys = labels
    # A token such as "$" is text, not the beginning of a formula.
    if queries is not None:
        ax.set_yticks(range(len(queries)), queries, parse_math=False)
    if keys is not None:
        ax.set_xticks(range(len(keys)), keys, rotation=90, parse_math=False)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, label="weight")
    return ax


def _axes(ax: Any | None) -> Any:
    """Return axes for queries and keys, whose ticks are integers; None creates new axes."""
    matplotlib = _matplotlib()
    if ax is None:
        ax = matplotlib.figure.Figure(layout="constrained").subplots()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    return ax


def _matplotlib() -> Any:
    """Return matplotlib with the modules that pictures need.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    try:
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
        import matplotlib.ticker
    except ImportError as error:
        message = "matplotlib is not installed; pip install 'cupy_flash[plot]'"
        raise ImportError(message) from error
    return matplotlib
