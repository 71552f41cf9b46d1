"""New keys and values into a cache, keys and queries turned by their positions: one launch.

The host's side of `kernels_cu/cache/append.cu`.
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
from cupy_flash.gpu.by_value import thread_arguments
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.problem.arrays import DTYPES, ITEMSIZE, MAX_ALIGNMENT, Scales, Strides
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import MAX_HEAD_DIM, MAX_SEQLEN
from cupy_flash.problem.values import MAX_COUNT

SOURCE = "cache/append.cu"
ENTRY = "append_new_rows"

# Mirrored in append.cu: the params of attention over the cache, and what is new.
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

# Under which names the values of its pointers come, and of `keys`.
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

# Few rows are spread over many blocks that way, and many fill an SM with 16 of them.
_THREADS = 128
_WARP = 32
# A piece's index, and that of one a step of all threads past the last, are 32-bit.
_MAX_PIECES = 2**28


@dataclass(frozen=True)
class AppendSpec:
    """What an append depends on besides addresses.

    Attributes
    ----------
    dtype
        Of q, k and v.
    batch, seqlen_q, seqlen_new, heads_q, heads_kv, head_dim, head_dim_v
        Sizes of q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_new, heads_kv,
        head_dim or head_dim_v). A head_dim_v of 0 is for keys that hold the values.
    total_new
        Rows of k and v (1, total_new, heads_kv, head_dim or head_dim_v) if the new rows of all
        sequences are packed; else None. Then seqlen_new is 0.
    seqlen_cache
        Rows that a sequence may have in the cache; on all ranks together.
    q_strides, k_strides, v_strides
        Of batch, row and head, in elements.
    k_cache_strides, v_cache_strides
        Of row of the cache or page, row and head, in elements.
    caches
        Length of the first axis of a cache that is not paged.
    page_size, pages, max_pages, block_table_stride
        Of a paged cache: rows of a page, pages, columns of block_table (batch, max_pages), and
        elements between its rows. All 0 where it is not paged.
    rotary_dim
        Leading columns of q and k that are turned; 0 for no rotary embedding, and then q is not
        touched.
    rotary_rows, rotary_stride, rotary_dtype
        Of cos and sin (rotary_rows, rotary_dim / 2): rows, elements between them, and dtype: that
        of q, or float32 with 16-bit ones.
    rotary_interleaved
        Whether columns (2i, 2i + 1) are a pair; else (i, i + rotary_dim / 2) are.
    queries_advance
        Whether query i is at the position of new key i; else all are at that of the first.
    alignment
        Bytes (a power of two, at most 16) that every row of q, k, v and, unless they are of 8 bits,
        both caches starts at a multiple of.
    rotary_alignment
        The same of cos and sin.
    cache_dtype, cache_alignment, scales
        Of caches of 8 bits: their dtype, alignment, and how their scales lie.
    ranks, rank, stripe
        Of a cache that is shared out: among how many, whose part it is, and how many neighbouring
        keys are one's before the next one's.
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
        """Thread blocks along the first axis: rows of queries and new keys.

        A row has a query and a new key; of packed new rows, which follow the query rows, only one
        of the two. Then there is at least one block, which writes the lengths after the append.
        """
        queries = self.seqlen_q if self.rotary_dim else 0
        if self.total_new is None or not self.batch:
            return self.batch * max(queries, self.seqlen_new)
        return max(self.batch * queries + self.total_new, 1)

    @property
    def pieces(self) -> int:
        """About how many threads have something to move of one row, all of its heads.

        The kernel counts for itself, and its threads move several pieces where they are too few.
        """
        width = MAX_ALIGNMENT // ITEMSIZE[self.dtype]
        # Where halves of the turned columns are the pairs, one thread moves both.
        paired = 0 if self.rotary_interleaved else self.rotary_dim // 2
        turned = ceil_div(self.head_dim - paired, width)
        queries = self.heads_q * turned if self.rotary_dim else 0
        if self.scales is not None:
            # A warp has a row of a head.
            rows = 2 if self.head_dim_v else 1
            return max(queries, rows * self.heads_kv * _WARP)
        return queries + self.heads_kv * (turned + ceil_div(self.head_dim_v, width))

    def check(self) -> None:
        """Raise for what the kernel does not compute, or could not do without reading astray.

        Raises
        ------
        TypeError
            For a dtype.
        ValueError
            For a size.
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
        # A position among the keys of all ranks is an int32, and so is that of a new one.
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
    """The translation unit of an append."""
    members: dict[str, int | bool] = {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "page_size": spec.page_size,
        "rotary_dim": spec.rotary_dim,
        # Where nothing is rotated it makes no difference, and should make no unit of its own.
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
    """Grid and block: a row along the first axis, its pieces along the second.

    Raises
    ------
    UnsupportedError
        For more rows, or more heads, than a launch takes.
    """
    rows = spec.rows
    if rows > MAX_GRID:
        raise UnsupportedError(
            f"appending {rows} rows needs more than the {MAX_GRID} thread blocks of a launch"
        )
    if spec.pieces > _MAX_PIECES:
        raise UnsupportedError(
            f"a row of {spec.heads_q} and {spec.heads_kv} heads is more than an append moves; "
            f"expected at most {_MAX_PIECES} pieces of 16 bytes"
        )
    threads = min(_THREADS, round_up(spec.pieces, _WARP))
    return (rows, min(MAX_GRID_Y, ceil_div(spec.pieces, threads)), 1), (threads, 1, 1)


class Append:
    """An append that is ready to run on the device it was prepared on."""

    def __init__(
        self,
        spec: AppendSpec,
        names: Sequence[str],
        kernel: Any | None = None,
        grid: tuple[int, int, int] = (0, 0, 0),
        block: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        fixed: dict[str, Any] = {
            "q": spec.q_strides,
            "k": spec.k_cache_strides,
            "v": spec.v_cache_strides,
            "new_k": spec.k_strides,
            "new_v": spec.v_strides,
            "block_table_stride": spec.block_table_stride,
            "rotary_stride": spec.rotary_stride,
            "batch": spec.batch,
            "seqlen_q": spec.seqlen_q if spec.rotary_dim else 0,
            "seqlen_k": spec.seqlen_cache,
            "seqlen_new": spec.seqlen_new,
            "total_new": spec.total_new or 0,
            "heads_q": spec.heads_q,
            "heads_kv": spec.heads_kv,
            "caches": spec.caches,
            "pages": spec.pages,
            "max_pages": spec.max_pages,
            "rotary_rows": spec.rotary_rows,
            "q_advances": int(spec.queries_advance),
            "rank": spec.rank,
        }
        sources = {field: name for field, name in _SOURCES.items() if name in names}
        if spec.scales is not None:
            fixed |= spec.scales.given
            sources |= {name: name for name in spec.scales.given}
        self._params = PackedStruct(APPEND_DTYPE, fixed, sources, names)
        self._kernel = kernel
        self._grid = grid
        self._block = block

    def run(self, values: tuple[int, ...]) -> None:
        """Enqueue it on the current stream.

        Parameters
        ----------
        values
            Addresses, and `keys`, by the names that it was prepared for; 0 for what is absent.

        Notes
        -----
        Lengths are taken to be within [0, seqlen_cache] and rotary positions within the table, at
        the nearest end of it. What would go beyond seqlen_cache, to a row outside of the cache or
        to a page outside of it is not written. Two sequences in one row of the cache leave there
        either's rows.
        """
        if self._kernel is None:
            return
        arguments = thread_arguments()
        self._params.pack_into(arguments.memory, values)
        self._kernel(self._grid, self._block, (arguments.pointer,))


def prepare(spec: AppendSpec, device: Device, names: Sequence[str]) -> Append:
    """Check and compile an append for the current device.

    Parameters
    ----------
    spec
        What to append.
    device
        What the current device is.
    names
        Of the values that each run is given, in order, as far as there are any: "q", "k", "v",
        "k_cache", "v_cache", "cache_seqlens" or, where that is 0, the rows that are in every cache,
        "keys", "cache_batch_idx", "block_table", "rotary_cos", "rotary_sin", "rotary_seqlens",
        where the turned queries go, contiguous and on 16 bytes, "q_rotated", and the scales that
        are given, "k_scale" and "v_scale". If new rows are packed, also "cu_seqlens_k_new" and
        where the int32 lengths after the append go, "lengths_after".

    Raises
    ------
    TypeError, ValueError
        As `AppendSpec.check`.
    UnsupportedError
        For a GPU before sm_75, or more rows than a launch takes.
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
