"""Visible (query, key) pairs of a call, as an array and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.mods.keywords import with_offsets
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.scores import Pairs
from cupy_flash.mods.picture import draw
from cupy_flash.mods.shapes import require_limit
from cupy_flash.opaque import untraced
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.values import count, integer
from cupy_flash.reference.modifications import read_modifications

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


@untraced
def seen_pairs(
    seqlen_q: int,
    seqlen_k: int,
    *,
    b: int = 0,
    h: int = 0,
    causal: bool = False,
    q_offset: Any = None,
    **modifications: Unpack[Modifications],
) -> NDArray[np.bool_]:
    """Return which (query, key) pairs of a sequence are visible.

    Parameters
    ----------
    seqlen_q, seqlen_k
        Number of queries and number of keys.
    b, h
        Index of the sequence and of the query head, on which masks may depend.
    causal, q_offset, **modifications
        See `flash_attention`. Modifications that only change scores have no effect.

    Returns
    -------
    bool array, shape (seqlen_q, seqlen_k)
        True where the query attends to the key.

    Raises
    ------
    TypeError, ValueError
        If a size or index is not a nonnegative integer, or the shape of an array that masks keys
        does not fit these sizes and indices.

    Examples
    --------
    >>> from cupy_flash import seen_pairs
    >>> seen_pairs(2, 4, causal=True, window_size=(1, 0)).astype(int)
    array([[0, 1, 1, 0],
           [0, 0, 1, 1]])
    """
    seqlen_q, seqlen_k = count("seqlen_q", seqlen_q), count("seqlen_k", seqlen_k)
    b, h = count("b", b), count("h", h)
    q_offset, others = with_offsets(q_offset, modifications)
    bound_mods = read_modifications(others)
    _require_fit(bound_mods, seqlen_q, seqlen_k, b, h)
    if bound_mods.prefix_lens is not None:
        require_limit(bound_mods.window, causal=causal)
    offset = seqlen_k - seqlen_q if q_offset is None else integer("q_offset", q_offset)
    mask = bound_mods.mask_with(Mask(seqlen_q, seqlen_k, causal, offset), b)
    rows, keys = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None]
    hidden = mask.masked(0, seqlen_q, 0, seqlen_k) | (keys >= mask.seqlen_k)
    scores = bound_mods.scores
    hides = scores._replace(softcap=None, score_mod=None, alibi_slopes=None, bias=None)
    zeros = np.zeros((seqlen_q, seqlen_k), np.float32)
    left = hides.apply(zeros, Pairs(b, h, rows, keys, mask.q_offset))
    return np.asarray(~hidden & (left == 0))


def _require_fit(
    bound_mods: BoundModifications, seqlen_q: int, seqlen_k: int, b: int, h: int
) -> None:
    """Raise ValueError for an array that masks keys and does not fit the sizes and indices."""
    scores = bound_mods.scores
    # For each axis of an array: an index, which the axis must include, or the length of the axis.
    sequence, head = ("b", b), ("h", h)
    queries, keys = ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)
    arrays = {
        "mask": (scores.mask, (sequence, head, queries, keys)),
        "tree_mask": (scores.tree_mask, (sequence, queries)),
        "prefix_lens": (bound_mods.prefix_lens, (sequence,)),
        "seqlens_k": (bound_mods.seqlens_k, (sequence,)),
        "q_offset": (bound_mods.q_offset, (sequence,)),
        "seqused_q": (scores.seqused_q, (sequence,)),
        "cache_leftpad": (scores.cache_leftpad, (sequence,)),
    }
    for name, (array, axes) in arrays.items():
        if array is None:
            continue
        if array.ndim != len(axes):
            raise ValueError(f"{name} has shape {array.shape}; expected {len(axes)} axes")
        for size, (axis, number) in zip(array.shape, axes, strict=True):
            fits = size > number if axis in ("b", "h") else size == number
            if not fits and not (name == "mask" and size == 1):
                raise ValueError(f"{name} has shape {array.shape}, but {axis} is {number}")


@untraced
def plot_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    b: int = 0,
    h: int = 0,
    causal: bool = False,
    q_offset: Any = None,
    block: tuple[int, int] | None = None,
    ax: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Draw which (query, key) pairs of a sequence are visible; requires matplotlib.

    Parameters
    ----------
    seqlen_q, seqlen_k, b, h, causal, q_offset, **modifications
        See `seen_pairs`.
    block
        Number of rows and keys of a kernel's tile, `Br` and `Bc`. The picture then shows blocks
        instead of pairs, with one color each for empty, partially visible and full blocks.
    ax
        Axes of matplotlib to draw in; None creates new ones.

    Returns
    -------
    matplotlib.axes.Axes
        Axes with the picture. ``ax.figure.savefig("mask.png")`` writes it to a file.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError, ValueError
        See `seen_pairs`; also if `block` is not a pair of positive integers.
    """
    seen = seen_pairs(
        seqlen_q, seqlen_k, b=b, h=h, causal=causal, q_offset=q_offset, **modifications
    )
    return draw(seen, block, ax)
