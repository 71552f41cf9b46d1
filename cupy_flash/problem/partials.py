"""What merging partial results asks for, with no arrays and no addresses in it."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_flash.problem.arrays import ITEMSIZE, MAX_ALIGNMENT, Strides


@dataclass(frozen=True)
class CombineSpec:
    """What merging depends on besides addresses; packed arrays are one sequence.

    Attributes
    ----------
    dtype
        Of out_partial and out.
    num_splits, batch, seqlen_q, heads_q, head_dim_v
        Shape of out_partial.
    split_stride
        Between the splits of out_partial, in elements.
    partial_strides, out_strides
        Of batch, row and head, in elements.
    alignment, out_alignment
        Bytes (a power of two, at most 16) that every row of out_partial and of out starts at a
        multiple of.
    sinks
        Dtype of an array of sinks; None where there is none.
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
        """Rows of the result."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def lanes(self) -> int:
        """Threads that merge one row: as many of a warp as have columns, a power of two."""
        pieces = -(-self.head_dim_v // (MAX_ALIGNMENT // ITEMSIZE[self.dtype]))
        return min(32, 1 << max(0, pieces - 1).bit_length())
