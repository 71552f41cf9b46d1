"""Rotary embedding for arrays of any type."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.rotary import rotated_at
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import (
    array_module,
    as_cupy,
    broadcasts,
    convert_to,
    dtype_name,
    require_float,
    require_shape,
)
from cupy_flash.calls.arguments import normalized
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.check.rotary_tables import require_tables
from cupy_flash.problem.values import check_bool


class Tables(NamedTuple):
    """Rows to rotate, and the tables of cosines and sines."""

    x: Any
    cos: Any
    sin: Any


class Gradient(NamedTuple):
    """Arrays of a gradient call: `dout` of the rotated rows, the rows, and the rotary tables."""

    dout: Any
    x: Any
    cos: Any
    sin: Any


def rotate(
    x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, stream: Any | None
) -> Any:
    """Return what `cupy_flash.apply_rotary` returns."""
    with on_stream(stream, x):
        given, convert = normalized(Tables(x, cos, sin))
        x, cos, sin = map(as_cupy, given)
        row_positions = _checked_positions(x, cos, sin, positions, interleaved)
        return convert(_rotated(x, cos, sin, row_positions, interleaved))


def pull_back(
    dout: Any,
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    interleaved: bool,
    stream: Any | None,
) -> Any:
    """Return the gradient of x, given the gradient of the rotated rows."""
    with on_stream(stream, x):
        given, convert = normalized(Gradient(dout, x, cos, sin))
        dout, x, cos, sin = map(as_cupy, given)
        row_positions = _checked_positions(x, cos, sin, positions, interleaved)
        require_shape("dout", dout, tuple(x.shape), "the shape of x")
        if dout.dtype != x.dtype:
            raise TypeError(f"dout has dtype {dout.dtype}; expected {x.dtype}, as x has")
        return convert(_rotated(dout, cos, sin, row_positions, interleaved, transposed=True))


@ignore_fp_errors
def _rotated(
    x: Any, cos: Any, sin: Any, row_positions: Any, interleaved: bool, *, transposed: bool = False
) -> Any:
    turned = rotated_at(
        *(x, cos, sin, row_positions),
        interleaved=bool(interleaved),
        compute=np.float64 if x.dtype == np.float64 else np.float32,
        transposed=transposed,
    )
    return turned.astype(x.dtype, copy=False)


def _checked_positions(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Return the position of each row.

    Raises
    ------
    TypeError, ValueError
        If `apply_rotary` does not accept an argument.
    """
    require_float("x", x)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"x has {x.ndim} axes, shape {tuple(x.shape)}; expected (batch, seqlen, heads, "
            "head_dim) or (total, heads, head_dim)"
        )
    check_bool("interleaved", interleaved)
    require_tables(("cos", cos), ("sin", sin), "x", dtype_name(x), x.shape[-1])
    return _read_positions(positions, x.shape[:-2], int(cos.shape[0]), array_module(x))


def _read_positions(positions: Any, shape: tuple[int, ...], rows: int, xp: Any) -> Any:
    """Return the position of each row as integers of module `xp` that broadcast to `shape`.

    Positions in host memory are checked. Positions on a GPU are checked only if `CUPY_FLASH_CHECK`
    is set; `rotated_at` clamps them to the rows of the tables.
    """
    if positions is None:
        if shape[-1] > rows:
            raise ValueError(
                f"cos has {rows} rows; expected at least {shape[-1]}, one for each position; "
                "otherwise pass positions"
            )
        return np.arange(shape[-1])
    if isinstance(positions, (int, np.integer, list, tuple)):
        try:
            array = np.asarray(positions)
        except ValueError as error:
            raise ValueError(f"positions is not an array of integers: {error}") from error
        positions = array if array.size else array.astype(np.int64)
    else:
        positions = read("positions", positions)
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions has dtype {positions.dtype}; expected integers")
    if xp is np and not isinstance(positions, np.ndarray):
        raise TypeError("x lies in host memory and positions on a GPU; move one of them")
    if not broadcasts(tuple(positions.shape), tuple(shape)):
        axes = "batch, seqlen" if len(shape) == 2 else "total,"
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}; expected one that broadcasts to "
            f"{tuple(shape)}, ({axes})"
        )
    known = positions if isinstance(positions, np.ndarray) else device_lengths.contents(positions)
    if known is not None:
        for place in np.argwhere((known < 0) | (known >= rows))[:1]:
            entry = f"positions[{', '.join(map(str, place))}]" if place.size else "positions"
            raise ValueError(
                f"{entry} is {known[tuple(place)]}; expected 0 to {rows - 1}, as cos has {rows} "
                "rows"
            )
    return convert_to(xp, positions)
