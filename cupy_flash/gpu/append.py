"""New keys and values into a cache, keys and queries turned by their positions: one launch.

The host's side of `kernels_cu/cache/append.cu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import (
    MAX_GRID,
    MAX_GRID_Y,
    TranslationUnit,
    ceil_div,
    config_struct,
    round_up,
    source_digest,
)
from cupy_flash.gpu.by_value import thread_arguments
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.params import TENSOR_DTYPE, assertions, template
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import (
    DTYPES,
    ITEMSIZE,
    MAX_ALIGNMENT,
    MAX_HEAD_DIM,
    MAX_SEQLEN,
    Strides,
)

SOURCE = "cache/append.cu"
ENTRY = "append_new_rows"

# Mirrored in append.cu.
APPEND_DTYPE = np.dtype(
    [
        ("q", TENSOR_DTYPE),
        ("k", TENSOR_DTYPE),
        ("v", TENSOR_DTYPE),
        ("k_cache", TENSOR_DTYPE),
        ("v_cache", TENSOR_DTYPE),
        ("q_rotated", np.uint64),
        ("cache_seqlens", np.uint64),
        ("cache_batch_idx", np.uint64),
        ("block_table", np.uint64),
        ("cos", np.uint64),
        ("sin", np.uint64),
        ("block_table_stride", np.int64),
        ("rotary_stride", np.int64),
        ("seqlen_q", np.int32),
        ("seqlen_new", np.int32),
        ("heads_q", np.int32),
        ("heads_kv", np.int32),
        ("capacity", np.int32),
        ("caches", np.int32),
        ("pages", np.int32),
        ("rotary_rows", np.int32),
        ("keys", np.int32),
        ("q_advances", np.int32),
    ]
)

# Few rows are spread over many blocks that way, and many fill an SM with 16 of them.
_THREADS = 128
# A piece's index, and that of one a step of all threads past the last, are 32-bit.
_MAX_PIECES = 2**28


@dataclass(frozen=True)
class AppendSpec:
    """What an append depends on besides addresses.

    Attributes
    ----------
    dtype
        Of q, k, v and the caches.
    batch, seqlen_q, seqlen_new, heads_q, heads_kv, head_dim, head_dim_v
        Sizes of q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_new, heads_kv,
        head_dim or head_dim_v).
    seqlen_cache
        Rows that a sequence may have in the cache.
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
    causal
        Whether query i is at the position of new key i; else all are at that of the first.
    alignment
        Bytes (a power of two, at most 16) that every row of q, k, v and both caches starts at a
        multiple of.
    rotary_alignment
        The same of cos and sin.
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
    page_size: int
    pages: int
    max_pages: int
    block_table_stride: int
    rotary_dim: int
    rotary_rows: int
    rotary_stride: int
    rotary_dtype: str
    rotary_interleaved: bool
    causal: bool
    alignment: int
    rotary_alignment: int

    @property
    def rows(self) -> int:
        """Rows of a sequence that something is done with: queries and new keys side by side."""
        return max(self.seqlen_q if self.rotary_dim else 0, self.seqlen_new)

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
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if not 1 <= dim <= MAX_HEAD_DIM:
                raise ValueError(f"{name} is {dim}; expected 1 to {MAX_HEAD_DIM}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}; expected an even number, at most the head_dim "
                f"{self.head_dim}"
            )
        if self.rotary_dim and self.rotary_rows < 1:
            raise ValueError("rotary_cos and rotary_sin have no rows; expected at least 1")
        for name, rows in (
            ("seqlen of q", self.seqlen_q),
            ("seqlen of k and v", self.seqlen_new),
            ("seqlen of the cache", self.seqlen_cache),
        ):
            if rows > MAX_SEQLEN:
                raise ValueError(f"{name} is {rows}; expected at most {MAX_SEQLEN}")
        if self.page_size and self.seqlen_cache > self.max_pages * self.page_size:
            raise ValueError(
                f"seqlen of the cache is {self.seqlen_cache}; expected at most the "
                f"{self.max_pages * self.page_size} rows of {self.max_pages} pages"
            )
        size = ITEMSIZE[self.dtype]
        rotary_size = ITEMSIZE[self.rotary_dtype] if self.rotary_dim else 1
        for name, alignment, least in (
            ("alignment", self.alignment, size),
            ("rotary_alignment", self.rotary_alignment, rotary_size),
        ):
            if not least <= alignment <= MAX_ALIGNMENT:
                raise ValueError(
                    f"{name} is {alignment}; expected {least} to {MAX_ALIGNMENT} bytes"
                )


def append_unit(spec: AppendSpec) -> TranslationUnit:
    """The translation unit of an append."""
    members = {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "page_size": spec.page_size,
        "rotary_dim": spec.rotary_dim,
        # Where nothing is rotated it makes no difference, and should make no unit of its own.
        "rotary_interleaved": bool(spec.rotary_dim and spec.rotary_interleaved),
        "rotary_alignment": spec.rotary_alignment if spec.rotary_dim else MAX_ALIGNMENT,
        "alignment": spec.alignment,
    }
    rotary_dtype = spec.rotary_dtype if spec.rotary_dim else spec.dtype
    lines = [
        f"// cupy_flash append, sources {source_digest(SOURCE)}",
        f'#include "{SOURCE}"',
        assertions(("Tensor", TENSOR_DTYPE), ("AppendParams", APPEND_DTYPE)),
        config_struct({"Element": spec.dtype, "RotaryElement": rotary_dtype}, members),
        f'extern "C" __global__ void __launch_bounds__({_THREADS})',
        f"{ENTRY}(const __grid_constant__ AppendParams params) "
        "{ append::append<Config>(params); }",
    ]
    pairs = "interleaved" if spec.rotary_interleaved else "halves"
    title = (
        f"append {spec.dtype} head_dim {spec.head_dim}"
        + (f"/{spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else "")
        + (f" page_size {spec.page_size}" if spec.page_size else "")
        + (f" rotary_dim {spec.rotary_dim} {pairs}" if spec.rotary_dim else "")
    )
    return TranslationUnit("\n".join(lines) + "\n", (ENTRY,), title)


def append_launch(spec: AppendSpec) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block: a row of a sequence along the first axis, its pieces along the second.

    Raises
    ------
    UnsupportedError
        For more rows, or more heads, than a launch takes.
    """
    rows = spec.batch * spec.rows
    if rows > MAX_GRID:
        raise UnsupportedError(
            f"appending {rows} rows needs more than the {MAX_GRID} thread blocks of a launch"
        )
    if spec.pieces > _MAX_PIECES:
        raise UnsupportedError(
            f"a row of {spec.heads_q} and {spec.heads_kv} heads is more than an append moves; "
            f"expected at most {_MAX_PIECES} pieces of 16 bytes"
        )
    threads = min(_THREADS, round_up(spec.pieces, 32))
    return (rows, min(MAX_GRID_Y, ceil_div(spec.pieces, threads)), 1), (threads, 1, 1)


class PackedAppend:
    """The argument struct of an append, all but the pointers and `keys` fixed."""

    def __init__(self, spec: AppendSpec) -> None:
        fixed = {
            "q": spec.q_strides,
            "k": spec.k_strides,
            "v": spec.v_strides,
            "k_cache": spec.k_cache_strides,
            "v_cache": spec.v_cache_strides,
            "block_table_stride": spec.block_table_stride,
            "rotary_stride": spec.rotary_stride,
            "seqlen_q": spec.seqlen_q if spec.rotary_dim else 0,
            "seqlen_new": spec.seqlen_new,
            "heads_q": spec.heads_q,
            "heads_kv": spec.heads_kv,
            "capacity": spec.seqlen_cache,
            "caches": spec.caches,
            "pages": spec.pages,
            "rotary_rows": spec.rotary_rows,
            "q_advances": int(spec.causal),
        }
        variable = [name for name in APPEND_DTYPE.names or () if name not in fixed]
        tensors = ["q", "k", "v", "k_cache", "v_cache"]
        self._struct, self._between = template(APPEND_DTYPE, fixed, tensors + variable)

    def pack_into(
        self,
        memory: bytearray,
        offset: int,
        *,
        q: int,
        q_rotated: int,
        k: int,
        v: int,
        k_cache: int,
        v_cache: int,
        cache_seqlens: int,
        keys: int,
        cache_batch_idx: int,
        block_table: int,
        cos: int,
        sin: int,
    ) -> None:
        """Write the struct.

        Parameters
        ----------
        memory, offset
            Where to write it.
        q, k, v, k_cache, v_cache
            Device addresses of arrays as the spec has them.
        q_rotated
            Where q (batch, seqlen_q, heads_q, head_dim) goes, contiguous, 16-byte aligned; 0
            without a rotary embedding.
        cache_seqlens
            Of int32 (batch), the rows of each sequence that are in the cache; 0 if `keys` says it.
        keys
            Rows of every sequence that are in the cache, where cache_seqlens is 0.
        cache_batch_idx
            Of int32 (batch), or 0 where sequence b has row b of the cache, or pages of it.
        block_table
            Of int32 (batch, max_pages), or 0 where the cache is not paged.
        cos, sin
            Of the tables, or 0 without a rotary embedding.
        """
        sq, sk, sv, sk_cache, sv_cache, sizes, rest = self._between
        arrays = (q, sq, k, sk, v, sv, k_cache, sk_cache, v_cache, sv_cache)
        pointers = (q_rotated, cache_seqlens, cache_batch_idx, block_table, cos, sin)
        self._struct.pack_into(memory, offset, *arrays, *pointers, sizes, keys, rest)


class Append:
    """An append that is ready to run on the device it was prepared on."""

    def __init__(
        self,
        spec: AppendSpec,
        kernel: Any | None,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
    ) -> None:
        self._params = PackedAppend(spec)
        self._kernel = kernel
        self._grid = grid
        self._block = block

    def run(self, **pointers: int) -> None:
        """Enqueue it on the current stream, with what `PackedAppend.pack_into` takes.

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
        self._params.pack_into(arguments.memory, 0, **pointers)
        self._kernel(self._grid, self._block, arguments.pointers[:1])


def prepare(spec: AppendSpec, device: Device) -> Append:
    """Check and compile an append for the current device.

    Parameters
    ----------
    spec
        What to append.
    device
        What the current device is.

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
    if device.arch < 75:
        raise UnsupportedError(f"append needs sm_75 or later, and {device.name} is {device.sm}")
    if spec.batch * spec.rows == 0:
        return Append(spec, None, (0, 0, 0), (0, 0, 0))
    grid, block = append_launch(spec)
    kernel = kernel_cache.get(append_unit(spec), {ENTRY: 0})[ENTRY]
    return Append(spec, kernel, grid, block)
