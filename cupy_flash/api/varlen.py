"""Attention of sequences of different lengths, packed one behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls import run
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.options import Options
from cupy_flash.problem.tile import TileRequest, freeze_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import PackedModifications


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any | None = None,
    block_table: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    return_lse: bool = False,
    out: Any | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """`flash_attention` of sequences of different lengths, packed without padding.

    Sequence b has the queries q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]] and the keys and values
    k[cu_seqlens_k[b]:cu_seqlens_k[b + 1]], and attends to those alone. Any length may be 0.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array
        that speaks DLPack. Read in place with a contiguous last axis, else copied.
    k : array, shape (total_k, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
        Keys, of the same dtype and kind, or of 8 bits: int8 or float8_e4m3fn, for which q is of 16
        bits on a GPU. In pages with block_table. heads_q is a multiple of heads_kv; query head h
        reads head h // (heads_q // heads_kv).
    v : array, shape (total_k, heads_kv, head_dim_v) or (pages, page_size, heads_kv, head_dim_v)
        Values. Head dims are 1 to 576, head_dim_v may differ from head_dim.
    cu_seqlens_q : array of integers, shape (batch + 1,)
        Where in q each sequence begins, and where the last one ends: running totals of the
        lengths. An array of the same kind as q, or a list. Rows of q before the first position and
        from the last one on belong to no sequence. Arrays of other integers than int32 are
        converted in each call, and lists are copied to where q lies.
    cu_seqlens_k : array of integers, shape (batch + 1,)
        The same in k; with block_table only the differences count. With block_table and seqused_k
        it is not read, and may be None.
    max_seqlen_q, max_seqlen_k : int
        Bounds of the lengths, which the grid and the kernel are chosen by. They need not be
        tight. On a GPU calls share a plan while these and the arrays' shapes stay the same,
        total_q and total_k included; planning anew costs about a millisecond on the host.
    causal : bool
        Each sequence has a mask of its own, aligned bottom right: query i sees the keys j <= i +
        seqlen_k - seqlen_q, or j <= i + q_offset[b] with a `q_offset`.
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). An array of one number is read in
        each call, which waits for it where it lies on a GPU.
    seqused_k : array of integers, shape (batch,), optional
        Number of keys of each sequence, instead of the differences in cu_seqlens_k. As
        cu_seqlens_q, it may be a list.
    block_table : array of integers, shape (batch, max_pages), optional
        Key j of sequence b is row j % page_size of page block_table[b, j // page_size]. Entries
        behind the pages that a sequence needs are not read.
    k_scale, v_scale : arrays of float32, or numbers, optional
        Of keys and values of 8 bits, whose numbers stand for themselves times their scale; 1 if not
        given. Arrays broadcast to (total_k, heads_kv), or to (pages, page_size, heads_kv): see
        `flash_attention_with_kvcache`.
    return_lse : bool
        Also return the log-sum-exp of each row's scaled scores.
    out : array, optional
        Where to write the result; same kind, dtype and shape as the result, contiguous last
        axis, no overlap with the inputs. Rows that belong to no sequence become 0.
    num_splits : int
        Shares of each sequence's keys that are computed side by side and merged; 0 leaves it to
        the planner. The CPU backend has no use for it.
    batch_invariant : bool
        The bits of a row's result depend on nothing but its own sequence: not on what else is in
        the batch, and not on how many of the sequence's queries the call holds. Excludes
        num_splits > 1. It costs time: on a GPU sequences of all lengths go to one family and tile,
        `mma` or, where that cannot serve, `simt`, with keys of 8 bits `decode`; and keys are not
        split where the batch has too few query tiles for the GPU.
    backend : {"auto", "gpu", "cpu"}
        Where NumPy arrays are computed. "auto": on the GPU where there is one that
        can.
    family : str, optional
        Kernel family to use instead of the planner's choice.
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.
    **modifications
        Masks, and what becomes of scores: see `Modifications`.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output, of the inputs' kind and dtype. A row that sees no key, or belongs to no sequence, is
        0.
    lse : array, shape (heads_q, total_q)
        Only with return_lse. Natural logarithm; float32, for float64 inputs float64. -inf for a
        row that sees no key, or belongs to no sequence.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype; cu_seqlens_q, cu_seqlens_k, seqused_k and block_table
        are integers.
    ValueError
        For shapes that do not go together, a wrong value, a family or tile that does not fit; and
        in NumPy arrays for lengths, places and pages that lie outside of the arrays or beyond
        max_seqlen_q and max_seqlen_k.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    Runs on the current device and stream and does not synchronize (NumPy results apart), so that
    it can be captured in a CUDA graph, which then reads lengths, places and pages anew at each
    launch. The workspace of a captured call comes from CuPy's current pool and goes back to it
    when the call returns, though the graph goes on writing to it: warm up and capture under a
    `cupy.cuda.MemoryPool` of the graph's own, kept as long as the graph. Counters, 4 bytes for
    each split of a query tile's keys, stay with a captured call for the life of the process.

    What stands in arrays on a GPU is not known on the host, and is not checked. It cannot lead a
    kernel outside of the arrays:

    - what cu_seqlens_q and cu_seqlens_k say is taken to be within [0, total_q] and [0, total_k],
      and a pair that decreases is an empty sequence;
    - a sequence has at most max_seqlen_q queries, and at most max_seqlen_k keys, the rows left in
      k, or what its pages hold; query rows beyond are not computed;
    - the rows of a page outside of [0, pages) are zeros.

    Same inputs give the same bits, on one GPU model with one version. 16-bit inputs are
    accumulated in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_varlen
    >>> q = k = v = np.ones((7, 2, 8), np.float32)
    >>> flash_attention_varlen(q, k, v, [0, 3, 7], [0, 3, 7], 4, 4, causal=True).shape
    (7, 2, 8)
    """
    return run.attention(
        Arguments(
            q,
            k,
            v,
            out,
            None,
            block_table,
            cu_seqlens_q,
            places_of_keys(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table),
            seqused_k,
            k_scale,
            v_scale,
        ),
        Options(
            "packed",
            causal,
            softmax_scale,
            return_lse,
            family,
            freeze_tile(tile),
            None,
            "bshd",
            num_splits,
            batch_invariant,
            max_seqlen_q,
            max_seqlen_k,
        ),
        backend,
        0,
        modifications,
    )


def places_of_keys(
    cu_seqlens_q: Any, cu_seqlens_k: Any | None, seqused_k: Any | None, block_table: Any | None
) -> Any | None:
    """Return cu_seqlens_k. If it is None and not read, return cu_seqlens_q as a placeholder."""
    is_read = seqused_k is None or block_table is None
    return cu_seqlens_q if cu_seqlens_k is None and not is_read else cu_seqlens_k
