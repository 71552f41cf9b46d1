"""Checks of the cosine and sine tables of rotary embeddings."""

from __future__ import annotations

from typing import Any

from cupy_flash.arrays.strided import dtype_name, require_axes, require_shape
from cupy_flash.problem.values import check_count


def require_tables(
    cos: tuple[str, Any], sin: tuple[str, Any], whose: str, dtype: str, head_dim: int
) -> None:
    """Raise TypeError or ValueError unless the cosine and sine tables fit the rotated rows.

    Parameters
    ----------
    cos, sin
        Name and array of each table.
    whose
        Name of the rotated rows, for messages.
    dtype, head_dim
        Dtype of the rotated rows, and number of their columns.
    """
    accumulator = "float64" if dtype == "float64" else "float32"
    dtypes = tuple(dict.fromkeys((dtype, accumulator)))
    for name, array in (cos, sin):
        require_axes(name, array, 2, "positions and rotary_dim / 2")
        if dtype_name(array) not in dtypes or not array.dtype.isnative:
            raise TypeError(
                f"{name} has dtype {array.dtype}; expected {' or '.join(dtypes)}, as {whose} is "
                f"{dtype}"
            )
    (cos_name, cosines), (sin_name, sines) = cos, sin
    require_shape(sin_name, sines, tuple(cosines.shape), f"as {cos_name} has")
    if cosines.dtype != sines.dtype:
        raise TypeError(
            f"{sin_name} has dtype {sines.dtype}; expected {cosines.dtype}, as {cos_name} has"
        )
    rows, half = cosines.shape
    check_count(f"number of rows of {cos_name}", rows)
    if not 2 <= 2 * half <= head_dim:
        raise ValueError(
            f"{cos_name} has {half} columns for a rotary_dim of {2 * half}; expected a rotary_dim "
            f"of 2 to {head_dim}, the head_dim"
        )
