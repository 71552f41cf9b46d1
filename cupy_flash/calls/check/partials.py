"""Record of the arrays of a call that merges partial results, its checks, and its `CombineSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.strided import (
    address_of,
    array_module,
    dtype_name,
    is_cupy,
    kind_of,
    require_float,
    require_in_place,
    require_shape,
    spec_of,
)
from cupy_flash.problem.arrays import MAX_ALIGNMENT, ArraySpec, check_no_self_overlap
from cupy_flash.problem.partials import CombineSpec
from cupy_flash.problem.problem import MAX_SEQLEN


class Partials(NamedTuple):
    """Arrays of a call of `cupy_flash.combine`."""

    out_partial: Any
    lse_partial: Any
    out: Any = None
    sinks: Any = None

    @property
    def like(self) -> Any:
        """Array that determines the array type of the results."""
        return self.out_partial

    def written(self, options: None) -> dict[str, Any]:
        """Return the arrays that a merge writes."""
        return {"out": self.out}

    def key_arrays(self, options: None) -> Partials:
        """Return all arrays: the call key describes each of them."""
        return self


def stacked(partials: Partials) -> tuple[Partials, Callable[[Any], Any]]:
    """Return the partial results with the arrays of each list stacked into one new array.

    The second result is a function that converts an array to the library of the first part.

    Raises
    ------
    TypeError, ValueError
        If a list is empty, the lists have different lengths, or the parts differ in shape or dtype.
    """
    outs, lses = partials.out_partial, partials.lse_partial
    if not isinstance(lses, (list, tuple)):
        raise TypeError(f"out_partial is a list and lse_partial {kind_of(lses)}; pass two lists")
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            f"out_partial has {len(outs)} parts and lse_partial {len(lses)}; expected lists of "
            "equal length, with at least one part"
        )
    convert = result_converter("out_partial[0]", outs[0])
    out_partial, lse_partial = _stacked("out_partial", outs), _stacked("lse_partial", lses)
    return partials._replace(out_partial=out_partial, lse_partial=lse_partial), convert


def _stacked(name: str, parts: Sequence[Any]) -> Any:
    arrays = [read(f"{name}[{i}]", part) for i, part in enumerate(parts)]
    first = arrays[0]
    for i, array in enumerate(arrays):
        require_float(f"{name}[{i}]", array)
        if is_cupy(array) != is_cupy(first):
            raise TypeError(f"{name}[0] and {name}[{i}] lie on different devices; move one of them")
        if dtype_name(array) != dtype_name(first):
            raise TypeError(f"{name}[{i}] has dtype {array.dtype}; expected {first.dtype}")
        require_shape(f"{name}[{i}]", array, tuple(first.shape), f"as {name}[0] has")
    # Viewed as unsigned integers, because CuPy cannot copy float8 or bfloat16 arrays.
    bits = f"uint{8 * first.itemsize}"
    return array_module(first).stack([array.view(bits) for array in arrays]).view(first.dtype)


def spec_of_call(
    out_partial: Any, lse_partial: Any, out: Any | None, sinks: Any | None = None
) -> CombineSpec:
    """Return the spec of a merge of NumPy or CuPy arrays; out_partial has a contiguous last axis.

    Raises
    ------
    TypeError, ValueError
        If the arrays cannot be merged; the message names the argument.
    """
    dtype = _check(out_partial, lse_partial)
    if sinks is not None:
        _check_sinks(sinks, out_partial, lse_partial)
    spec = spec_of(out_partial[0], address_of(out_partial))
    if out is None:
        out_spec = ArraySpec.contiguous(spec.shape, dtype)
    else:
        _check_out(out, out_partial)
        out_spec = spec_of(out, address_of(out))
        check_no_self_overlap("out", out_spec)
    # Rows of out_partial must be aligned along the split axis as well.
    split_stride = out_partial.strides[0]
    along_splits = split_stride & -split_stride if len(out_partial) > 1 else 0
    num_splits, (batch, seqlen_q, heads_q, head_dim_v) = len(out_partial), spec.shape
    return CombineSpec(
        dtype=dtype,
        num_splits=num_splits,
        batch=batch,
        seqlen_q=seqlen_q,
        heads_q=heads_q,
        head_dim_v=head_dim_v,
        split_stride=split_stride // out_partial.itemsize,
        partial_strides=spec.strides,
        out_strides=out_spec.strides,
        alignment=min(spec.row_alignment(), along_splits or MAX_ALIGNMENT),
        out_alignment=out_spec.row_alignment(),
        sinks=None if sinks is None else dtype_name(sinks),
    )


def _check(out_partial: Any, lse_partial: Any) -> str:
    require_float("out_partial", out_partial)
    dtype = dtype_name(out_partial)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    if dtype_name(lse_partial) != lse_dtype:
        raise TypeError(
            f"lse_partial has dtype {lse_partial.dtype}; expected {lse_dtype} for an "
            f"out_partial of {dtype}"
        )
    require_float("lse_partial", lse_partial)
    shape = tuple(out_partial.shape)
    if len(shape) not in (4, 5):
        raise ValueError(
            f"out_partial has shape {shape}; expected (num_splits, batch, seqlen_q, heads_q, "
            "head_dim_v) or packed (num_splits, total_q, heads_q, head_dim_v)"
        )
    if shape[0] == 0:
        raise ValueError(f"out_partial has shape {shape}; expected at least 1 split")
    if max(shape) > MAX_SEQLEN:
        raise ValueError(f"out_partial has shape {shape}; expected lengths up to {MAX_SEQLEN}")
    expected = (*shape[:-3], shape[-2], shape[-3])
    require_shape("lse_partial", lse_partial, expected, f"for an out_partial of {shape}")
    return dtype


def _check_sinks(sinks: Any, out_partial: Any, lse_partial: Any) -> None:
    dtypes = tuple(dict.fromkeys(dtype_name(array) for array in (lse_partial, out_partial)))
    if dtype_name(sinks) not in dtypes or not sinks.dtype.isnative:
        raise TypeError(f"sinks has dtype {sinks.dtype}; expected {' or '.join(dtypes)}")
    heads = (out_partial.shape[-2],)
    require_shape("sinks", sinks, heads, "one sink for each query head")


def _check_out(out: Any, out_partial: Any) -> None:
    require_float("out", out)
    if dtype_name(out) != dtype_name(out_partial):
        raise TypeError(
            f"out has dtype {out.dtype}; expected {out_partial.dtype}, as out_partial has"
        )
    require_shape("out", out, tuple(out_partial.shape[1:]), "the shape of one split")
    require_in_place("out", out)
