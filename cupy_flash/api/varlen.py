"""Public function for attention on sequences of different lengths, packed consecutively."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.key_lists.forward import attention_to_lists, require_lists
from cupy_flash.calls.options import Options, with_statistics
from cupy_flash.opaque import marked
from cupy_flash.problem.tile import TileRequest, freeze_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import PackedModifications


@marked
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
    return_max_logits: bool = False,
    return_entropy: bool = False,
    out: Any | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    key_indices_in: str = "sequence",
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `flash_attention` for sequences of different lengths, packed without padding.

    Sequence b has the queries q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]] and the keys and values
    k[cu_seqlens_k[b]:cu_seqlens_k[b + 1]]. It attends only to its own keys. Any length may be 0.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim)
        Queries of all sequences. float16, bfloat16, float32 or float64; NumPy, CuPy, or any array
        that supports DLPack. Read in place if the last axis is contiguous, otherwise copied.
    k : array, shape (total_k, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
        Keys; in pages if block_table is given. Array type and dtype of q, or 8 bits (int8 or
        float8_e4m3fn); on a GPU q is then 16-bit. heads_q is a multiple of heads_kv; query head h
        uses KV head h // (heads_q // heads_kv).
    v : array, shape (total_k, heads_kv, head_dim_v) or (pages, page_size, heads_kv, head_dim_v)
        Values. Head dims are 1 to 576; head_dim_v may differ from head_dim.
    cu_seqlens_q : array of integers, shape (batch + 1,)
        Offset in q at which each sequence begins, then the end of the last: cumulative lengths. An
        array with the array type of q, or a list, which is copied to the device of q. Integer
        dtypes other than int32 are converted in each call. Rows of q before the first offset, and
        from the last one on, belong to no sequence.
    cu_seqlens_k : array of integers, shape (batch + 1,)
        Offsets in k, like cu_seqlens_q. With block_table only their differences are used. With
        block_table and seqused_k it is not read, and may be None.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths, which determine the grid and the kernel. They need not be
        tight. On a GPU, calls reuse a plan while these bounds and all shapes, including total_q and
        total_k, stay the same. A new plan takes about a millisecond on the host.
    causal : bool
        Whether each sequence has a causal mask, aligned at the bottom right: query i attends only
        to the keys j <= i + seqlen_k - seqlen_q, or with a `q_offset` to j <= i + q_offset[b].
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). It may be an array of one number, which
        is read in each call; the call then waits for the GPU if the array is there.
    seqused_k : array of integers, shape (batch,), optional
        Number of keys of each sequence, instead of the differences in cu_seqlens_k. It may be a
        list.
    block_table : array of integers, shape (batch, max_pages), optional
        Key j of sequence b is row j % page_size of page block_table[b, j // page_size]. Entries
        past the pages that a sequence needs are not read.
    k_scale, v_scale : arrays of float32, or numbers, optional
        Scales of 8-bit keys and values: a stored number times its scale is the key or value; by
        default 1. Arrays broadcast to (total_k, heads_kv) or (pages, page_size, heads_kv), see
        `flash_attention_with_kvcache`.
    return_lse : bool
        Whether to return the log-sum-exp of the scaled scores of each query row, too.
    return_max_logits, return_entropy : bool
        Whether to return the largest score of each query row, and the entropy of its weights, too.
    out : array, optional
        Array that the result is written to; same array type, dtype and shape as the result. Its
        last axis is contiguous, and it does not overlap the inputs.
    num_splits : int
        Number of parts that the keys of each sequence are split into; the parts are computed in
        parallel and merged. 0 lets the planner choose. The CPU backend ignores it.
    batch_invariant : bool
        Whether the bits of a result row depend only on its own sequence: neither on the rest of the
        batch, nor on how many of the sequence's queries the call holds. Excludes num_splits > 1. It
        costs time: on a GPU all lengths use the same family and tile (`mma`, or `simt` if `mma`
        does not support the call; `decode` for 8-bit keys), and keys are not split, even if the
        batch has too few query tiles to fill the GPU.
    backend : {"auto", "gpu", "cpu"}
        Backend for NumPy arrays. "auto" uses a GPU if there is one that supports the call.
    family : str, optional
        Kernel family to use instead of the planner's choice.
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.
    key_indices : array of integers, (total_q, heads_kv or 1, n), optional
        Lists of the keys that each query attends to: indices in its sequence, with -1 for entries
        that count for nothing. A key that is listed twice counts twice. Masks by position, lengths
        and arrays hide listed keys. See docs/guide/key_lists.md.
    key_indices_in : {"sequence", "pages"}
        Meaning of an index: its key's index in the sequence, or with a block_table its row in all
        pages, page * page_size + row. A row of a page counts whatever the lengths are. The only
        modifications are then softcap and sinks, because the position of such a key is unknown.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output, with the array type and dtype of q. Fully masked rows, and rows that belong to no
        sequence, are 0.
    lse : array, shape (heads_q, total_q)
        Log-sum-exp, natural logarithm, only with return_lse. float32, for float64 inputs float64.
        It is -inf for rows that belong to no sequence, and for fully masked rows without a sink.
    max_logits : array, shape (heads_q, total_q)
        Largest score of each row over its keys, after all modifications, only with
        return_max_logits. Dtype of lse. It is -inf for a fully masked row, and NaN if lse is NaN.
    entropy : array, shape (heads_q, total_q)
        Entropy of each row's weights, -sum(w * log(w)) over the keys, only with return_entropy.
        Dtype of lse. It is 0 for a fully masked row. See docs/guide/weights.md for sinks.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype; cu_seqlens_q, cu_seqlens_k, seqused_k and
        block_table are integers.
    ValueError
        If shapes do not match, a value is wrong, or the family or tile does not fit; and if NumPy
        arrays hold lengths, offsets or page indices that are out of range or exceed max_seqlen_q or
        max_seqlen_k.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    The call uses the current device and stream and does not synchronize, except to return NumPy
    arrays. It can be captured in a CUDA graph, which reads lengths, offsets and page indices at
    each launch. The workspace of a captured call is allocated from CuPy's current pool and returned
    to it after the call, although the graph keeps writing to it: warm up and capture under a
    `cupy.cuda.MemoryPool` that lives as long as the graph and serves nothing else. Counters, 4
    bytes per split of a query tile, are kept for a captured call until the process ends.

    The contents of arrays on a GPU are not checked on the host. They cannot cause an access outside
    the arrays:

    - Entries of cu_seqlens_q and cu_seqlens_k are clamped to [0, total_q] and [0, total_k]. If an
      entry is smaller than the one before it, the sequence between them is empty.
    - A sequence has at most max_seqlen_q queries, and at most max_seqlen_k keys, the remaining rows
      of k, or the rows of its pages. Further query rows are not computed.
    - The rows of a page outside [0, pages) read as zeros.

    The same inputs give the same bits, on one GPU model with one version of the library. 16-bit
    inputs are accumulated in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_varlen
    >>> q = k = v = np.ones((7, 2, 8), np.float32)
    >>> flash_attention_varlen(q, k, v, [0, 3, 7], [0, 3, 7], 4, 4, causal=True).shape
    (7, 2, 8)
    """
    options = Options(
        "varlen",
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
    )
    call = (
        Arguments(
            q,
            k,
            v,
            out,
            None,
            block_table,
            cu_seqlens_q,
            has_key_positions(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table),
            seqused_k,
            k_scale,
            v_scale,
        ),
        with_statistics(options, return_max_logits, return_entropy),
        backend,
        0,
        modifications,
        stream,
    )
    if key_indices is not None:
        return attention_to_lists(*call, key_indices, key_indices_in)
    require_lists(key_indices_in)
    return dispatch.attention(*call)


def has_key_positions(
    cu_seqlens_q: Any, cu_seqlens_k: Any | None, seqused_k: Any | None, block_table: Any | None
) -> Any | None:
    """Return cu_seqlens_k. If it is None and not read, return cu_seqlens_q as a placeholder."""
    is_read = seqused_k is None or block_table is None
    return cu_seqlens_q if cu_seqlens_k is None and not is_read else cu_seqlens_k
