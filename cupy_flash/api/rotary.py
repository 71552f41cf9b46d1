"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_flash.calls import rotary


def apply_rotary(
    x: Any, cos: Any, sin: Any, positions: Any | None = None, interleaved: bool = False
) -> Any:
    """Rotate queries or keys by the angles of their positions.

    The rotary position embedding of Su et al. (2021, https://arxiv.org/abs/2104.09864): each pair
    (a, b) of columns becomes (a cos - b sin, a sin + b cos). `flash_attention_with_kvcache` rotates
    what it appends by itself, see its `rotary_cos`.

    Parameters
    ----------
    x : array, shape (batch, seqlen, heads, head_dim) or (total, heads, head_dim)
        Queries or keys, dense or packed. float16, bfloat16, float32 or float64; NumPy, CuPy, or any
        array that speaks DLPack. It is not written.
    cos, sin : arrays, shape (max_len, rotary_dim / 2)
        Cosine and sine of the angle of each position and pair, of the same kind. The dtype is that
        of x or float32, for float64 float64. The first rotary_dim columns are rotated, and the
        others stay as they are.
    positions : array of integers, optional
        Position of each row: a row of cos and sin. Broadcasts to (batch, seqlen), or (total,); of
        the kind of x, or NumPy's, a list or an integer. By default 0, 1, 2, ... along seqlen or
        total, so several packed sequences need positions.
    interleaved : bool
        Whether columns 2i and 2i + 1 are a pair; otherwise i and i + rotary_dim / 2 are, as in most
        models. The argument `rotary_interleaved` of `flash_attention_with_kvcache` is the same, but
        True by default.

    Returns
    -------
    array, the shape of x
        A new array of the kind and dtype of x.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, and for a position in host memory without a row in the
        tables. A position on a GPU takes the nearest row.

    Notes
    -----
    Products and sums are computed in float32, for float64 in float64, and rounded once. Arrays on a
    GPU are computed there, on the current device and stream, without synchronizing; NumPy arrays by
    NumPy.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import apply_rotary
    >>> angles = np.arange(3, dtype=np.float32)[:, None] * np.pi / 2
    >>> x = np.ones((1, 3, 1, 2), np.float32)
    >>> apply_rotary(x, np.cos(angles), np.sin(angles)).round()[0, :, 0]
    array([[ 1.,  1.],
           [-1.,  1.],
           [-1., -1.]], dtype=float32)
    """
    return rotary.rotate(x, cos, sin, positions, interleaved)


def apply_rotary_vjp(
    x: Any, cos: Any, sin: Any, positions: Any | None = None, interleaved: bool = False
) -> tuple[Any, Callable[[Any], Any]]:
    """`apply_rotary`, and the function that pulls gradients back through it.

    Parameters
    ----------
    x, cos, sin, positions, interleaved
        See `apply_rotary`. The tables have no gradients.

    Returns
    -------
    out : array, the shape of x
        The rotated rows.
    pullback : callable
        ``pullback(dout)`` returns the gradient of x, given that of out, which has the shape, dtype
        and kind of x. It holds on to the arguments, and reads them as they are when it is called;
        call it as often as you like.

    Raises
    ------
    TypeError, ValueError
        As `apply_rotary`.
    """

    def pullback(dout: Any) -> Any:
        return rotary.pull_back(dout, x, cos, sin, positions, interleaved)

    return rotary.rotate(x, cos, sin, positions, interleaved), pullback
