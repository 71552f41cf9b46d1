"""Picture of attention weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.strided import convert_to, kind_of
from cupy_flash.mods.picture import draw_weights
from cupy_flash.opaque import opaque
from cupy_flash.problem.values import check_bool, finite
from cupy_flash.reference.eight_bits import widened


@opaque
def plot_attention(
    weights: Any,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    vmax: float | None = None,
    colorbar: bool = True,
    ax: Any | None = None,
) -> Any:
    """Draw the attention weights of one head as a heat map; requires matplotlib.

    Parameters
    ----------
    weights : array, shape (rows, keys)
        Weights, such as ``attention_weights(q, k)[0, 0]``: an array of any library, in host memory
        or on a GPU, of which a copy is drawn.
    queries, keys : sequences of str, optional
        Labels of the rows and of the keys, such as their tokens; by default their indices.
    vmax : float, optional
        Weight with the darkest color, by default the largest one. Give pictures that are compared
        the same number.
    colorbar : bool
        Whether to draw the scale of colors next to the picture.
    ax : matplotlib.axes.Axes, optional
        Axes to draw in. The default creates new ones.

    Returns
    -------
    matplotlib.axes.Axes
        Axes with the picture. ``ax.figure.savefig("weights.png")`` writes it to a file.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    TypeError
        If `weights` is not an array of real numbers, a label is not a str, or another argument has
        a wrong type.
    ValueError
        If `weights` does not have two axes with at least one row and one key, the number of labels
        is wrong, or `vmax` is not positive.
    """
    array = widened(convert_to(np, read("weights", weights)))
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"weights has shape {array.shape}; expected (rows, keys), such as weights[0, 0] of the "
            "first head, with at least one row and one key"
        )
    if not np.can_cast(array.dtype, np.float64, "same_kind"):
        raise TypeError(f"weights has dtype {array.dtype}; expected real numbers")
    rows, columns = array.shape
    labels = _labels("queries", queries, rows), _labels("keys", keys, columns)
    check_bool("colorbar", colorbar)
    if vmax is not None:
        vmax = finite("vmax", vmax)
        if vmax <= 0:
            raise ValueError(f"vmax is {vmax:g}; expected a number above 0")
    return draw_weights(array.astype(np.float64), labels, vmax, ax, colorbar=colorbar)


def _labels(name: str, labels: Sequence[str] | None, length: int) -> list[str] | None:
    """Return the labels along an axis; raise TypeError or ValueError unless there are `length`."""
    if labels is None:
        return None
    if isinstance(labels, str):
        raise TypeError(f"{name} is one str; expected a list of strings, the labels")
    found = list(labels)
    for label in found:
        if not isinstance(label, str):
            raise TypeError(f"{name} contains {kind_of(label)}; expected strings, the labels")
    if len(found) != length:
        raise ValueError(f"{name} has length {len(found)}; expected {length}, as weights has")
    return found
