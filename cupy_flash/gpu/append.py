"""Append of new keys and values to a KV cache, with rotary embedding, in one launch.

This is the host side of `kernels_cu/cache/append.cu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import (
    ELEMENT_TYPES,
    FLOAT8_ARCH,
    MAX_GRID,
    MAX_GRID_Y,
    STORED_TYPES,
    TranslationUnit,
    ceil_div,
    config_struct,
    round_up,
    source_digest,
)
from cupy_flash.families.params import PARAMS_DTYPE, TENSOR_DTYPE, assertions
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.launch import StructLaunch
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.problem.arrays import DTYPES, ITEMSIZE, MAX_ALIGNMENT, Scales, Strides
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_HEAD_DIM, MAX_SEQLEN
from cupy_flash.problem.values import MAX_COUNT

SOURCE = "cache/append.cu"
ENTRY = "append_new_rows"

# Argument struct, which mirrors append.cu: `Params` of attention over the cache, and new fields.
APPEND_DTYPE = np.dtype(
    [
        *((name, field[0]) for name, field in (PARAMS_DTYPE.fields or {}).items() if name != "_"),
        ("_", np.int32),
        ("new_k", TENSOR_DTYPE),
        ("new_v", TENSOR_DTYPE),
        ("cos", np.uint64),
        ("sin", np.uint64),
        ("rotary_seqlens", np.uint64),
        ("rotary_stride", np.int64),
        ("seqlen_new", np.int32),
        ("rotary_rows", np.int32),
        ("q_advances", np.int32),
        ("rank", np.int32),
        ("k_scale", TENSOR_DTYPE),
        ("v_scale", TENSOR_DTYPE),
        ("cu_seqlens_k_new", np.uint64),
        ("lengths_after", np.uint64),
        ("total_new", np.int32),
        ("_end", np.int32),
    ]
)

# Names of the values of the struct's pointers and of `keys`, by field.
_SOURCES = {
    "q": "q",
    "k": "k_cache",
    "v": "v_cache",
    "out": "q_rotated",
    "new_k": "k",
    "new_v": "v",
    "seqused_k": "cache_seqlens",
    "cos": "rotary_cos",
    "sin": "rotary_sin",
    "rotary_seqlens": "rotary_seqlens",
    **{name: name for name in ("keys", "cache_batch_idx", "block_table")},
    **{name: name for name in ("cu_seqlens_k_new", "lengths_after")},
}

# Number of threads of a thread block: few rows use many thread blocks, and 16 blocks fill an SM.
_THREADS = 128
_WARP = 32
# Largest number of 16-byte chunks of a row: indices are 32-bit, and may exceed it by one stride.
_MAX_CHUNKS = 2**28


@dataclass(frozen=True)
class AppendSpec:
    """Specification of an append: all that it depends on except addresses.

    Attributes
    ----------
    dtype
        Dtype of q, k and v.
    batch, seqlen_q, seqlen_new, heads_q, heads_kv, head_dim, head_dim_v
        Sizes of q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_new, heads_kv,
        head_dim or head_dim_v). A head_dim_v of 0 means that the keys contain the values (MLA).
    total_new
        Number of rows of k and v (1, total_new, heads_kv, head_dim or head_dim_v) if the new rows
        of all sequences are packed, and seqlen_new is 0; otherwise None.
    seqlen_cache
        Number of rows that a sequence may have in the cache, on all ranks together.
    q_strides, k_strides, v_strides
        Strides of batch, row and head, in elements.
    k_cache_strides, v_cache_strides
        Strides of the cache entry or page, the row and the head, in elements.
    caches
        Length of the first axis of a cache that is not paged.
    page_size, pages, max_pages, block_table_stride
        Number of rows of a page, number of pages, columns of block_table (batch, max_pages), and
        elements between its rows. All are 0 if the cache is not paged.
    rotary_dim
        Number of leading columns of q and k that are rotated; 0 for no rotary embedding, in which
        case q is not used.
    rotary_rows, rotary_stride, rotary_dtype
        Number of rows of cos and sin (rotary_rows, rotary_dim / 2), elements between the rows, and
        dtype: that of q, or float32 if q is 16-bit.
    rotary_interleaved
        Whether columns (2i, 2i + 1) are a pair; otherwise columns (i, i + rotary_dim / 2) are.
    queries_advance
        Whether query i has the position of new key i; otherwise all have that of new key 0.
    alignment
        Number of bytes (a power of two, at most 16) to which all rows of q, k and v are aligned,
        and those of the cache unless it is 8-bit.
    rotary_alignment
        Number of bytes to which all rows of cos and sin are aligned.
    cache_dtype, cache_alignment, scales
        Dtype and alignment of an 8-bit cache, and the layout of its scales.
    ranks, rank, stripe
        Number of ranks over which the cache is sharded, the rank that holds this part, and the
        number of consecutive keys that a rank holds before the next rank's keys.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_new: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    seqlen_cache: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    k_cache_strides: Strides
    v_cache_strides: Strides
    caches: int
    alignment: int
    page_size: int = 0
    pages: int = 0
    max_pages: int = 0
    block_table_stride: int = 0
    rotary_dim: int = 0
    rotary_rows: int = 0
    rotary_stride: int = 0
    rotary_dtype: str = "float32"
    rotary_interleaved: bool = False
    rotary_alignment: int = MAX_ALIGNMENT
    queries_advance: bool = False
    cache_dtype: str | None = None
    cache_alignment: int = MAX_ALIGNMENT
    scales: Scales | None = None
    total_new: int | None = None
    ranks: int = 1
    rank: int = 0
    stripe: int = 1

    @property
    def rows(self) -> int:
        """Number of thread blocks along the first axis: rows of queries and new keys.

        A row has a query and a new key. If new rows are packed, the query rows come first and the
        key rows follow; at least one thread block is needed to write the lengths.
        """
        queries = self.seqlen_q if self.rotary_dim else 0
        if self.total_new is None or not self.batch:
            return self.batch * max(queries, self.seqlen_new)
        return max(self.batch * queries + self.total_new, 1)

    @property
    def chunks(self) -> int:
        """Approximate number of 16-byte chunks of a row, with all of its heads.

        The kernel computes the exact number, and a thread moves several chunks if necessary.
        """
        width = MAX_ALIGNMENT // ITEMSIZE[self.dtype]
        # If the halves of the rotated columns form the pairs, one thread moves a chunk of each.
        paired = 0 if self.rotary_interleaved else self.rotary_dim // 2
        turned = ceil_div(self.head_dim - paired, width)
        queries = self.heads_q * turned if self.rotary_dim else 0
        if self.scales is not None:
            # A warp quantizes one row of one head.
            rows = 2 if self.head_dim_v else 1
            return max(queries, rows * self.heads_kv * _WARP)
        return queries + self.heads_kv * (turned + ceil_div(self.head_dim_v, width))

    def check(self) -> None:
        """Raise an error if the kernel does not support the specification.

        Raises
        ------
        TypeError
            If a dtype is not supported.
        ValueError
            If a size or alignment is not supported.
        """
        accumulator = "float64" if self.dtype == "float64" else "float32"
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype is {self.dtype}; expected one of {', '.join(DTYPES)}")
        if self.rotary_dim and self.rotary_dtype not in (self.dtype, accumulator):
            expected = " or ".join(dict.fromkeys((self.dtype, accumulator)))
            raise TypeError(
                f"rotary_cos and rotary_sin have dtype {self.rotary_dtype}; expected {expected}"
            )
        dims = ("head_dim", self.head_dim, 1), ("head_dim_v", self.head_dim_v, 0)
        for name, dim, least in dims:
            if not least <= dim <= MAX_HEAD_DIM:
                raise ValueError(f"{name} is {dim}; expected {least} to {MAX_HEAD_DIM}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; expected an even number, at most the head_dim "
                f"{self.head_dim}"
            )
        if self.rotary_dim and self.rotary_rows < 1:
            raise ValueError("rotary_cos and rotary_sin have no rows; expected at least 1")
        # The global position of a key, including new keys, must fit an int32.
        most_keys = MAX_SEQLEN if self.ranks == 1 else MAX_COUNT - self.seqlen_new
        for name, rows, most in (
            ("seqlen of q", self.seqlen_q, MAX_SEQLEN),
            ("seqlen of k and v", self.seqlen_new, MAX_SEQLEN),
            ("total length of k and v", self.total_new or 0, MAX_SEQLEN),
            ("seqlen of the cache", self.seqlen_cache, most_keys),
        ):
            if rows > most:
                raise ValueError(f"{name} is {rows}; expected at most {most}")
        if self.page_size and self.seqlen_cache > self.max_pages * self.page_size:
            raise ValueError(
                f"seqlen of the cache is {self.seqlen_cache}; expected at most the "
                f"{self.max_pages * self.page_size} rows of {self.max_pages} pages"
            )
        size, cache_size = ITEMSIZE[self.dtype], ITEMSIZE[self.cache_dtype or self.dtype]
        rotary_size = ITEMSIZE[self.rotary_dtype] if self.rotary_dim else 1
        for name, alignment, least in (
            ("alignment", self.alignment, size),
            ("cache_alignment", self.cache_alignment, cache_size),
            ("rotary_alignment", self.rotary_alignment, rotary_size),
        ):
            if not least <= alignment <= MAX_ALIGNMENT:
                raise ValueError(
                    f"{name} is {alignment}; expected {least} to {MAX_ALIGNMENT} bytes"
                )


def append_unit(spec: AppendSpec) -> TranslationUnit:
    """Return the translation unit of an append."""
    members: dict[str, int | bool] = {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "page_size": spec.page_size,
        "rotary_dim": spec.rotary_dim,
        # Without rotary embedding, this must not create another translation unit.
        "rotary_interleaved": bool(spec.rotary_dim and spec.rotary_interleaved),
        "rotary_alignment": spec.rotary_alignment if spec.rotary_dim else MAX_ALIGNMENT,
        "alignment": spec.alignment,
        "packed_new": spec.total_new is not None,
        "ranks": spec.ranks,
        "stripe": spec.stripe if spec.ranks > 1 else 1,
    }
    rotary_dtype = spec.rotary_dtype if spec.rotary_dim else spec.dtype
    types = {
        "Element": ELEMENT_TYPES[spec.dtype],
        "RotaryElement": ELEMENT_TYPES[rotary_dtype],
    }
    function, stored = "append", ""
    if spec.scales is not None:
        function, stored = "append_quantized", f" to {spec.cache_dtype}"
        types["CacheElement"] = STORED_TYPES[spec.cache_dtype or ""]
        members |= {
            "cache_alignment": spec.cache_alignment,
            "computes_scales": spec.scales.computed,
        }
    lines = [
        f"// cupy_flash append, sources {source_digest(SOURCE)}",
        f'#include "{SOURCE}"',
        assertions(("Tensor", TENSOR_DTYPE), ("AppendParams", APPEND_DTYPE)),
        config_struct(types, members),
        f'extern "C" __global__ void __launch_bounds__({_THREADS})',
        f"{ENTRY}(const __grid_constant__ AppendParams params) "
        f"{{ append::{function}<Config>(params); }}",
    ]
    pairs = "interleaved" if spec.rotary_interleaved else "halves"
    title = (
        f"append {spec.dtype}{stored} head_dim {spec.head_dim}"
        + (f"/{spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else "")
        + (f" page_size {spec.page_size}" if spec.page_size else "")
        + (f" rotary_dim {spec.rotary_dim} {pairs}" if spec.rotary_dim else "")
        + (" packed" if spec.total_new is not None else "")
        + (f" ranks {spec.ranks}" if spec.ranks > 1 else "")
    )
    return TranslationUnit("\n".join(lines) + "\n", (ENTRY,), title)


def append_launch(spec: AppendSpec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid and the block: rows along the first axis, chunks of a row along the second.

    Raises
    ------
    UnsupportedError
        If there are more rows or heads than a launch supports.
    """
    rows = spec.rows
    if rows > MAX_GRID:
        raise UnsupportedError(
            f"appending {rows} rows needs more than the {MAX_GRID} thread blocks of a launch"
        )
    if spec.chunks > _MAX_CHUNKS:
        raise UnsupportedError(
            f"a row of {spec.heads_q} query and {spec.heads_kv} KV heads is too large to append; "
            f"expected at most {_MAX_CHUNKS} chunks of 16 bytes"
        )
    threads = min(_THREADS, round_up(spec.chunks, _WARP))
    return (rows, min(MAX_GRID_Y, ceil_div(spec.chunks, threads)), 1), (threads, 1, 1)


class Append(StructLaunch):
    """Append that is ready to run on the device for which it was prepared.

    Notes
    -----
    Lengths are clamped to [0, seqlen_cache], and rotary positions to the rows of the table. Rows
    that would be beyond seqlen_cache or outside of the cache are not written. If two sequences use
    the same cache entry, it contains the rows of either.
    """

    def __init__(
        self,
        spec: AppendSpec,
        names: Sequence[str],
        kernel: Any | None = None,
        grid: tuple[int, int, int] = (0, 0, 0),
        block: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        numbers = (
            *("batch", "seqlen_new", "heads_q", "heads_kv", "caches", "rank", "rotary_stride"),
            *("block_table_stride", "pages", "max_pages", "rotary_rows"),
        )
        fixed: dict[str, Any] = {name: getattr(spec, name) for name in numbers} | {
            "q": spec.q_strides,
            "k": spec.k_cache_strides,
            "v": spec.v_cache_strides,
            "new_k": spec.k_strides,
            "new_v": spec.v_strides,
            "seqlen_q": spec.seqlen_q if spec.rotary_dim else 0,
            "seqlen_k": spec.seqlen_cache,
            "total_new": spec.total_new or 0,
            "q_advances": int(spec.queries_advance),
        }
        sources = {field: name for field, name in _SOURCES.items() if name in names}
        if spec.scales is not None:
            fixed |= spec.scales.given
            sources |= {name: name for name in spec.scales.given}
        super().__init__(PackedStruct(APPEND_DTYPE, fixed, sources, names), kernel, grid, block)


def prepare(spec: AppendSpec, device: Device, names: Sequence[str]) -> Append:
    """Check and compile an append for the current device.

    Parameters
    ----------
    spec
        Specification of the append.
    device
        Current device.
    names
        Names of the values that each run receives, in order: "q", "k", "v", "k_cache", "v_cache",
        "cache_seqlens", "keys" (the length of all sequences if "cache_seqlens" is 0),
        "cache_batch_idx", "block_table", "rotary_cos", "rotary_sin", "rotary_seqlens", "q_rotated"
        (the output for rotated queries, contiguous and aligned to 16 bytes), "k_scale", "v_scale",
        and for packed new rows "cu_seqlens_k_new" and "lengths_after" (the output for the int32
        lengths after the append). Absent arrays may be left out.

    Raises
    ------
    TypeError, ValueError
        If `AppendSpec.check` raises them.
    UnsupportedError
        If the GPU is older than sm_75, or if there are more rows than a launch supports.
    CompileError
        If the kernel does not compile.
    """
    spec.check()
    least = FLOAT8_ARCH if spec.cache_dtype == "float8_e4m3fn" else 75
    if device.arch < least:
        what = f"append to {spec.cache_dtype}" if spec.scales is not None else "append"
        raise UnsupportedError(
            f"{what} needs sm_{least} or later, and {device.name} is {device.sm}"
        )
    if spec.rows == 0:
        return Append(spec, names)
    grid, block = append_launch(spec)
    kernel = kernel_cache.get(append_unit(spec), {ENTRY: 0})[ENTRY]
    return Append(spec, names, kernel, grid, block)
