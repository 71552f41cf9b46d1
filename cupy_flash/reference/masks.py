"""Which query sees which key, as an array and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.mods.picture import draw
from cupy_flash.mods.scores import Pairs, Scores
from cupy_flash.problem.mask import Mask
from cupy_flash.reference.modifications import read_modifications

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


def seen_pairs(
    seqlen_q: int,
    seqlen_k: int,
    *,
    b: int = 0,
    h: int = 0,
    causal: bool = False,
    q_offset: int | None = None,
    **modifications: Unpack[Modifications],
) -> NDArray[np.bool_]:
    """Which query of a sequence sees which key.

    Parameters
    ----------
    seqlen_q, seqlen_k
        Queries and keys.
    b, h
        Sequence and query head, on which masks may depend.
    causal, q_offset, **modifications
        As of `flash_attention`; what only changes scores makes no difference.

    Returns
    -------
    bool array, (seqlen_q, seqlen_k)

    Raises
    ------
    TypeError, ValueError
        For modifications that `flash_attention` refuses, as far as they are looked at.

    Examples
    --------
    >>> from cupy_flash import seen_pairs
    >>> seen_pairs(2, 4, causal=True, window_size=(1, 0)).astype(int)
    array([[0, 1, 1, 0],
           [0, 0, 1, 1]])
    """
    modified = read_modifications(modifications)
    offset = seqlen_k - seqlen_q if q_offset is None else q_offset
    mask = modified.of_mask(Mask(seqlen_q, seqlen_k, causal, offset), b)
    rows, keys = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None]
    hidden = mask.hidden(0, seqlen_q, 0, seqlen_k) | (keys >= mask.seqlen_k)
    scores = modified.scores
    hides = Scores(mask_mod=scores.mask_mod, mask=scores.mask, tree_mask=scores.tree_mask)
    zeros = np.zeros((seqlen_q, seqlen_k), np.float32)
    left = hides.apply(zeros, Pairs(b, h, rows, keys, offset))
    return np.asarray(~hidden & (left == 0))


def plot_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    b: int = 0,
    h: int = 0,
    causal: bool = False,
    q_offset: int | None = None,
    block: tuple[int, int] | None = None,
    ax: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Draw which query of a sequence sees which key; needs matplotlib.

    Parameters
    ----------
    seqlen_q, seqlen_k, b, h, causal, q_offset, **modifications
        As of `seen_pairs`.
    block
        Rows and keys of a kernel's tile, `Br` and `Bc`: blocks that are left out, masked and seen
        whole then have a colour each. None draws pairs.
    ax
        Axes of matplotlib; None for new ones.

    Returns
    -------
    matplotlib.axes.Axes
        ``ax.figure.savefig("mask.png")`` writes the picture.

    Raises
    ------
    ImportError
        Without matplotlib.
    TypeError, ValueError
        As `seen_pairs`, and for a block of no such sizes.
    """
    seen = seen_pairs(
        seqlen_q, seqlen_k, b=b, h=h, causal=causal, q_offset=q_offset, **modifications
    )
    return draw(seen, block, ax)
