"""Public functions for the rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_flash.calls import rotary
from cupy_flash.opaque import opaque


@opaque
def apply_rotary(
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any | None = None,
    interleaved: bool = False,
    *,
    stream: Any | None = None,
) -> Any:
    """Rotate queries or keys by the angles of their positions (rotary position embedding).

    Each pair (a, b) of columns becomes (a cos - b sin, a sin + b cos), as in Su et al. (2021,
    https://arxiv.org/abs/2104.09864). `flash_attention_with_kvcache` can rotate q and the new keys
    itself, see its `rotary_cos`.

    Parameters
    ----------
    x : array, shape (batch, seqlen, heads, head_dim) or (total, heads, head_dim)
        Queries or keys, dense or packed. float16, bfloat16, float32 or float64; NumPy, CuPy, or any
        array that supports DLPack. It is not written.
    cos, sin : arrays, shape (max_len, rotary_dim / 2)
        Cosine and sine of the angle of each position and pair, with the array type of x. The dtype
        is that of x or float32, or float64 if x is float64. The first rotary_dim columns are
        rotated; the others stay as they are.
    positions : array of integers, optional
        Position of each row: an index into the rows of cos and sin. It broadcasts to (batch,
        seqlen) or (total,), and has the array type of x, or is a NumPy array, a list or an integer.
        By default 0, 1, 2, ... along seqlen or total, so several packed sequences need positions.
    interleaved : bool
        Whether columns 2i and 2i + 1 form a pair; otherwise columns i and i + rotary_dim / 2 do, as
        in most models. `flash_attention_with_kvcache` has the same argument as `rotary_interleaved`
        with the default True.
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.

    Returns
    -------
    array, the shape of x
        New array with the array type and dtype of x.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype.
    ValueError
        If shapes do not match, or a position in host memory is not a row of cos and sin. A
        position on a GPU is not checked, and uses the nearest row.
    UnsupportedError
        If `stream` is given, and no GPU can be used.

    Notes
    -----
    Products and sums are computed in float32, for float64 in float64, and rounded once. Arrays on a
    GPU are computed there, on the current device and stream, without synchronizing; NumPy arrays
    are computed by NumPy.

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
    return rotary.rotate(x, cos, sin, positions, interleaved, stream)


@opaque
def apply_rotary_vjp(
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any | None = None,
    interleaved: bool = False,
    *,
    stream: Any | None = None,
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the result of `apply_rotary` and a pullback function for its gradient.

    Parameters
    ----------
    x, cos, sin, positions, interleaved, stream
        See `apply_rotary`. cos and sin have no gradients.

    Returns
    -------
    out : array, the shape of x
        The rotated rows.
    pullback : callable
        ``pullback(dout)`` returns the gradient of x, given the gradient of out, which has the
        shape, dtype and array type of x. It keeps references to the arguments, and reads their
        contents when it is called. It can be called any number of times.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `apply_rotary`.
    """

    def pullback(dout: Any) -> Any:
        return rotary.pull_back(dout, x, cos, sin, positions, interleaved, stream)

    return rotary.rotate(x, cos, sin, positions, interleaved, stream), pullback
