"""Public function for attention over a KV cache, to which new keys and values are appended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls import dispatch, shared_prefix
from cupy_flash.calls.arguments import Arguments, given_lengths
from cupy_flash.calls.key_lists.forward import attention_to_lists, require_lists
from cupy_flash.calls.options import Options, with_statistics
from cupy_flash.opaque import marked
from cupy_flash.problem.tile import TileRequest, freeze_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import CacheModifications


@marked
def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any | None,
    k: Any | None = None,
    v: Any | None = None,
    *,
    cache_seqlens: Any,
    cu_seqlens_k_new: Any | None = None,
    cache_batch_idx: Any | None = None,
    block_table: Any | None = None,
    shared_prefix_len: int = 0,
    key_indices: Any | None = None,
    key_indices_in: str = "sequence",
    rotary_cos: Any | None = None,
    rotary_sin: Any | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    compute_scales: bool = False,
    head_dim_v: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    out: Any | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    **modifications: Unpack[CacheModifications],
) -> Any:
    """Compute a decoding step: append to a KV cache, then attend to it.

    The keys of a sequence may be split over thread blocks, whose results are merged by their
    log-sum-exp (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023). A GPU is then busy even with
    few queries over many keys.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, usually one per sequence. float16, bfloat16, float32 or float64; NumPy, CuPy, or
        any array that supports DLPack. Read in place if the last axis is contiguous, else copied.
    k_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim)
        Keys; with block_table (pages, page_size, heads_kv, head_dim), page_size 1 or more. Array
        type and dtype of q, or 8 bits: int8 or float8_e4m3fn (ml_dtypes; in CuPy a view of bytes).
        On a GPU q is 16-bit for an 8-bit cache. The last axis is contiguous. The cache is written
        in place if k is given. heads_q is a multiple of heads_kv; query head h uses KV head
        h // (heads_q // heads_kv).
    v_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim_v)
        Values; with block_table (pages, page_size, heads_kv, head_dim_v). Head dims are 1 to 576;
        head_dim_v may differ from head_dim. None if k_cache holds the values, see `head_dim_v`.
    k : array, shape (batch, seqlen_new, heads_kv, head_dim), optional
        New keys; with cu_seqlens_k_new packed, (total_new, heads_kv, head_dim). Row j of sequence b
        becomes row cache_seqlens[b] + j of its cache before attention is computed. Given together
        with v, or alone if k_cache holds the values.
    v : array, shape (batch, seqlen_new, heads_kv, head_dim_v), optional
        New values; with cu_seqlens_k_new packed, (total_new, heads_kv, head_dim_v).
    cache_seqlens : int or array of integers, shape (batch,)
        Lengths of the cached sequences before new rows are appended: one integer for all, an array
        of the array type of q, or a list, which is copied to the device of q. Integer dtypes other
        than int32 are converted in each call. Attention uses the first cache_seqlens + seqlen_new
        rows. The array is not written.
    cu_seqlens_k_new : array of integers, shape (batch + 1,), optional
        Offsets of each sequence's rows in packed k and v, for sequences with different numbers of
        new rows: sequence b has the rows from cu_seqlens_k_new[b] to cu_seqlens_k_new[b + 1] - 1.
    cache_batch_idx : array of integers, shape (batch,), optional
        Index of the cache of each sequence; by default sequence b uses cache b. If two sequences
        append to the same cache, which of their rows it then holds is undefined.
    block_table : array of integers, shape (batch, max_pages), optional
        Row j of sequence b's cache is row j % page_size of page block_table[b, j // page_size]. Its
        capacity is max_pages * page_size. Entries past the pages in use are not read.
    shared_prefix_len : int
        Number of keys with which all sequences begin, in the same pages: the first entries of all
        rows of block_table are equal. These keys are then read once for all sequences, see
        docs/guide/key_lists.md. Each sequence has at least shared_prefix_len keys. After an append,
        at least seqlen_q - 1 keys follow them in a causal call, and seqlen_q with a tree_mask. On a
        GPU, results of a sequence without these keys or pages are undefined. 0 shares nothing.
    key_indices : array of integers, (batch, seqlen_q or 1, heads_kv or 1, n), optional
        Lists of the keys that each query attends to: indices in its sequence, with -1 for entries
        that count for nothing. A key that is listed twice counts twice. Masks by position, lengths
        and arrays hide listed keys. See docs/guide/key_lists.md.
    key_indices_in : {"sequence", "pages"}
        Meaning of an index: its key's index in the sequence, or with a block_table its row in all
        pages, page * page_size + row. A row of a page counts whatever the lengths are. The only
        modifications are then softcap and sinks, because the position of such a key is unknown.
    rotary_cos, rotary_sin : arrays, shape (seqlen_ro, rotary_dim / 2), optional
        Cosine and sine of the angles of a rotary embedding at each position (Su et al., 2021), of
        q's dtype or float32, for float64 inputs float64. The first rotary_dim columns are rotated.
        New key j is at position cache_seqlens[b] + j. Query i is at cache_seqlens[b] + i if the
        call is causal or has a window_size, otherwise at cache_seqlens[b]. Requires k and v; the
        arrays q and k are not written.
    rotary_interleaved : bool
        Whether columns 2i and 2i + 1 form a pair; otherwise columns i and i + rotary_dim / 2 do.
    rotary_seqlens : array of integers, shape (batch,), optional
        Position of the first new row of each sequence, for the rotation; by default cache_seqlens.
        Pass it if the first rows of a cache are padding, or were dropped.
    k_scale, v_scale : float32 arrays, or numbers, optional
        Scales of 8-bit caches: a stored number times its scale is the key or value; by default 1.
        On a GPU, each call writes a scale that is a number to GPU memory. Arrays broadcast to
        (caches, seqlen_cache, heads_kv) or (pages, page_size, heads_kv): shape () is one scale,
        (heads_kv,) one per head, (pages, 1, heads_kv) one per page and head. New rows are rotated
        and rounded to their dtype, divided by their scales in float32, rounded to nearest even, and
        clamped to the largest number of the cache's dtype. A scale of 0 stores 0, and int8 stores
        NaN as 0.
    compute_scales : bool
        Whether the append computes the scale of each new row and head from its largest magnitude,
        and writes it to k_scale and v_scale, which then have one scale per row and head.
    head_dim_v : int, optional
        Number of columns of the values, if v_cache, v and v_scale are None: each value is then the
        first head_dim_v columns of its key. This is multi-head latent attention (MLA, DeepSeek-V2,
        2024), where one KV head of 576 columns holds the keys of all query heads, and its first 512
        columns are the values. The `decode` family reads them once.
    causal : bool
        Whether query i attends only to the keys j <= i + seqlen_k - seqlen_q, where seqlen_k is the
        length after the append: the last query attends to every key. With a `q_offset` the keys are
        j <= i + q_offset[b].
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). It may be an array of one number, which
        is read in each call; the call then waits for the GPU if the array is there.
    num_splits : int
        Number of parts that the keys of each sequence are split into; the parts are computed in
        parallel and merged. 0 lets the planner choose. The CPU backend ignores it.
    return_lse : bool
        Whether to return the log-sum-exp of the scaled scores of each query row, too.
    return_max_logits, return_entropy : bool
        Whether to return the largest score of each query row, and the entropy of its weights, too.
    out : array, optional
        Array that the result is written to; same array type, dtype and shape as the result. Its
        last axis is contiguous, and it does not overlap the inputs.
    batch_invariant : bool
        Whether the bits of a result row depend only on its own sequence: neither on the rest of the
        batch, nor on how the sequence was split into chunks of queries. Excludes num_splits > 1. It
        costs time: on a GPU every number of queries uses the same family and tile (`mma`, or `simt`
        if `mma` does not support the call; `decode` for 8-bit caches), and keys are not split. With
        few sequences and heads, most of the GPU is idle while the longest sequence is read.
    backend : {"auto", "gpu", "cpu"}
        Backend for NumPy arrays. "auto" uses a GPU that supports the call, to which each
        call copies the whole cache; keep a cache that is used again in GPU memory.
    family : str, optional
        Kernel family to use instead of the planner's choice.
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.
    stream : stream, optional
        Stream to run on instead of the current one, see `flash_attention`.
    **modifications
        Masks and changes of scores, see `Modifications`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, with the array type and dtype of q. A fully masked row is 0.
    lse : array, shape (batch, heads_q, seqlen_q)
        Log-sum-exp, natural logarithm, only with return_lse. float32, for float64 inputs float64.
        It is -inf for a fully masked row without a sink.
    max_logits : array, shape (batch, heads_q, seqlen_q)
        Largest score of each row over its keys, after all modifications, only with
        return_max_logits. Dtype of lse. It is -inf for a fully masked row, and NaN if lse is NaN.
    entropy : array, shape (batch, heads_q, seqlen_q)
        Entropy of each row's weights, -sum(w * log(w)) over the keys, only with return_entropy.
        Dtype of lse. It is 0 for a fully masked row. See docs/guide/weights.md for sinks.

    Raises
    ------
    TypeError
        If an argument has a wrong array type or dtype; cache_seqlens, cu_seqlens_k_new,
        cache_batch_idx, block_table and rotary_seqlens are integers. Also for an append to JAX
        arrays, which are immutable: the function in `cupy_flash.jax` returns the updated caches.
    ValueError
        If shapes do not match, a value is wrong, or the family or tile does not fit; if a cache is
        read-only, overlaps another array, or has no contiguous last axis; and if lengths, cache or
        page indices, or rotary positions are out of range, as far as they are Python integers or
        NumPy arrays. The cache is then unchanged.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    The call uses the current device and stream and does not synchronize, except to return NumPy
    arrays. It enqueues the append, if any, and then attention.

    The step can be captured in a CUDA graph. The graph reads an array `cache_seqlens` at each
    launch, so one graph serves a growing cache; an integer is captured with its value. Lists cannot
    be captured: pass arrays. The workspace of a captured call, including the rotated queries, is
    allocated from CuPy's current pool and returned to it after the call, although the graph keeps
    writing to it: warm up and capture under a `cupy.cuda.MemoryPool` that lives as long as the
    graph and serves nothing else. Counters, at most 8 bytes per thread block or per split of a
    query tile, are kept for a captured call until the process ends.

    The contents of arrays on a GPU are not checked on the host. They cannot cause an access outside
    the arrays:

    - A length is clamped to [0, capacity], where capacity is seqlen_cache or max_pages *
      page_size. New rows past the capacity are dropped, as are rows for a page outside
      [0, pages).
    - Entries of cu_seqlens_k_new are clamped to [0, total_new]. Rows of no sequence are not
      appended. If entries decrease, which new rows a sequence gets is undefined.
    - If an entry of cache_batch_idx is out of range, its sequence has no keys and appends nothing.
    - The rows of a page outside [0, pages) read as zeros.
    - A rotary position outside the tables uses the nearest row.

    The same inputs give the same bits, on one GPU model with one version of the library. 16-bit
    inputs are accumulated in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_with_kvcache
    >>> k_cache, v_cache = np.zeros((2, 1, 16, 2, 8), np.float32)
    >>> q = k = v = np.ones((1, 1, 2, 8), np.float32)
    >>> out = flash_attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=[5])
    >>> out.shape, float(k_cache[0, 5, 0, 0])
    ((1, 1, 2, 8), 1.0)
    """
    keys, lengths = given_lengths(cache_seqlens)
    # Positional, because keyword arguments would cost half a microsecond.
    arguments = Arguments(
        q,
        k,
        v,
        out,
        None,
        block_table,
        None,
        None,
        None,
        k_scale,
        v_scale,
        k_cache,
        v_cache,
        lengths,
        cache_batch_idx,
        rotary_cos,
        rotary_sin,
        rotary_seqlens,
        cu_seqlens_k_new,
    )
    options = Options(
        "kvcache",
        causal,
        softmax_scale,
        return_lse,
        family,
        freeze_tile(tile),
        None,
        "bshd",
        num_splits,
        batch_invariant,
        None,
        None,
        rotary_interleaved,
        compute_scales,
        head_dim_v,
    )
    if return_max_logits is not False or return_entropy is not False:
        options = with_statistics(options, return_max_logits, return_entropy)
    call = (arguments, options, backend, keys, modifications, stream)
    if key_indices is not None:
        if shared_prefix_len.__class__ is not int or shared_prefix_len:
            raise ValueError("shared_prefix_len and key_indices are given; pass only one of them")
        return attention_to_lists(*call, key_indices, key_indices_in)
    require_lists(key_indices_in)
    # Most calls pass the integer 0; any other value is checked.
    if shared_prefix_len.__class__ is int and shared_prefix_len == 0:
        return dispatch.attention(*call)
    return shared_prefix.attention(*call, shared_prefix_len)
