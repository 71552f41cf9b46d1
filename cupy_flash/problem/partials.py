"""Description of a merge of partial results, without arrays and addresses."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_flash.problem.arrays import ITEMSIZE, MAX_ALIGNMENT, Strides


@dataclass(frozen=True)
class CombineSpec:
    """Sizes, strides and dtypes that a merge depends on; packed arrays count as one sequence.

    Attributes
    ----------
    dtype
        Name of the dtype of out_partial and out.
    num_splits, batch, seqlen_q, heads_q, head_dim_v
        Lengths of the axes of out_partial.
    split_stride
        Stride between the splits of out_partial, in elements.
    partial_strides, out_strides
        Strides of the batch, row and head axes, in elements.
    alignment, out_alignment
        Alignment in bytes of every row of out_partial, and of out: a power of two, at most 16.
    sinks
        Name of the dtype of the array of sinks, or None if there is none.
    """

    dtype: str
    num_splits: int
    batch: int
    seqlen_q: int
    heads_q: int
    head_dim_v: int
    split_stride: int
    partial_strides: Strides
    out_strides: Strides
    alignment: int
    out_alignment: int
    sinks: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the result, over the whole batch and all heads."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def lanes(self) -> int:
        """Number of threads that merge one row: a power of two, at most a warp."""
        chunks = -(-self.head_dim_v // (MAX_ALIGNMENT // ITEMSIZE[self.dtype]))
        return min(32, 1 << max(0, chunks - 1).bit_length())
