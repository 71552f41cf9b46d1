"""Attention to a key/value cache, which new keys and values are first appended to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls import run
from cupy_flash.calls.arguments import Arguments, given_lengths
from cupy_flash.calls.options import Options
from cupy_flash.problem.tile import TileRequest, freeze_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import CacheModifications


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
    out: Any | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    **modifications: Unpack[CacheModifications],
) -> Any:
    """One step of generation: append to a key/value cache, then attend to it.

    The keys of a sequence may be split over thread blocks and the shares merged by their
    log-sum-exp (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023), so that few queries over many
    keys fill a GPU.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, usually one for each sequence. float16, bfloat16, float32 or float64; NumPy, CuPy,
        or any array that speaks DLPack. Read in place with a contiguous last axis, else copied.
    k_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim)
        Keys, of the same dtype and kind, or of 8 bits: int8, or float8_e4m3fn of ml_dtypes, which
        CuPy has as a view of bytes; on a GPU q is then of 16 bits. With
        block_table (pages, page_size, heads_kv, head_dim), of any page_size from 1 up. Written in
        place if k is given. Its last axis is contiguous. heads_q is a multiple of heads_kv; query
        head h reads head h // (heads_q // heads_kv).
    v_cache : array, shape (caches, seqlen_cache, heads_kv, head_dim_v)
        Values; or (pages, page_size, heads_kv, head_dim_v). Head dims are 1 to 576, head_dim_v may
        differ from head_dim. None where k_cache holds the values, see head_dim_v.
    k : array, shape (batch, seqlen_new, heads_kv, head_dim), optional
        New keys; with cu_seqlens_k_new packed, (total_new, heads_kv, head_dim). Row j of sequence b
        becomes row cache_seqlens[b] + j of its cache, and is attended to. Together with v, or
        neither; alone where k_cache holds the values.
    v : array, shape (batch, seqlen_new, heads_kv, head_dim_v), optional
        New values; with cu_seqlens_k_new (total_new, heads_kv, head_dim_v).
    cache_seqlens : int or array of integers, shape (batch,)
        Lengths in the cache before new rows are appended; an array of the same kind as q, or a
        list, which is copied to where q lies. Arrays of other integers than int32 are converted in
        each call. What is attended to has the length cache_seqlens + seqlen_new. The array is not
        written.
    cu_seqlens_k_new : array of integers, shape (batch + 1,), optional
        Offsets of each sequence's rows in packed k and v, for sequences with different numbers of
        new rows: sequence b has the rows from cu_seqlens_k_new[b] to cu_seqlens_k_new[b + 1] - 1.
    cache_batch_idx : array of integers, shape (batch,), optional
        Which cache each sequence has; by default sequence b has cache b. If two share one that is
        appended to, either's rows are left there.
    block_table : array of integers, shape (batch, max_pages), optional
        Row j of sequence b's cache is row j % page_size of page block_table[b, j // page_size]. Its
        capacity is max_pages * page_size; entries behind the pages that it needs are not read.
    rotary_cos, rotary_sin : arrays, shape (seqlen_ro, rotary_dim / 2), optional
        Cosine and sine of the angles of a rotary embedding at each position (Su et al., 2021), of
        q's dtype or float32, for float64 float64. The first rotary_dim columns are rotated: of new
        key j at position cache_seqlens[b] + j, and of query i at cache_seqlens[b] + i if the call
        is causal or has a window_size, else all at cache_seqlens[b]. Needs k and v; q and k
        themselves are not written.
    rotary_interleaved : bool
        Whether columns 2i and 2i + 1 are a pair; else i and i + rotary_dim / 2 are.
    rotary_seqlens : array of integers, shape (batch,), optional
        Position of the first new row of each sequence, from which rows are rotated; cache_seqlens
        by default. Pass it if the first rows of a cache are padding, or were dropped.
    k_scale, v_scale : arrays of float32, or numbers, optional
        Of caches of 8 bits, whose numbers stand for themselves times their scale; 1 if not given. A
        number is copied to a GPU in the first call that has it. Arrays broadcast to (caches,
        seqlen_cache, heads_kv), or (pages, page_size, heads_kv): () for one scale, (heads_kv,) for
        each head's, (pages, 1, heads_kv) for each page's, or one for each row and head. New rows,
        turned and rounded to their dtype, are divided by them in float32, rounded to nearest even,
        and limited to the largest number that the cache holds; NaN becomes 0 in int8, and all is 0
        where the scale is.
    compute_scales : bool
        Whether the append computes the scales of new rows, from the largest magnitude that each
        head has, and writes them to k_scale and v_scale: arrays with one for each row and head.
    head_dim_v : int, optional
        With v_cache, v and v_scale None: each value is the first head_dim_v columns of its key, as
        in multi-head latent attention (DeepSeek-V2, 2024), where 576 columns of one head are the
        keys of all query heads and 512 of them the values. `decode` reads them once.
    causal : bool
        Query i sees the keys j <= i + seqlen_k - seqlen_q, seqlen_k being the length after the
        append: the last query sees every key. With a `q_offset` it sees the keys j <= i +
        q_offset[b].
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). An array of one number is read in
        each call, which waits for it where it lies on a GPU.
    num_splits : int
        Shares of each sequence's keys that are computed side by side and merged; 0 leaves it to
        the planner. The CPU backend has no use for it.
    return_lse : bool
        Also return the log-sum-exp of each row's scaled scores.
    out : array, optional
        Where to write the result; same kind, dtype and shape as the result, contiguous last
        axis, no overlap with the inputs.
    batch_invariant : bool
        The bits of a row's result depend on nothing but its own sequence: not on what else is in
        the batch, and not on how the sequence was split into chunks of queries. Excludes
        num_splits > 1. It costs time: on a GPU any number of queries goes to one family and tile,
        `mma` or, where that cannot serve, `simt`, over caches of 8 bits `decode`; and keys are not
        split, so that with few sequences and heads most of the GPU is idle while the longest
        sequence is read.
    backend : {"auto", "gpu", "cpu"}
        Where NumPy arrays are computed. "auto": on the GPU where there is one that can, to which
        the whole cache is copied in each call; a cache that lives on is better kept there.
    family : str, optional
        Kernel family to use instead of the planner's choice.
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.
    **modifications
        Masks, and what becomes of scores: see `Modifications`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Of the inputs' kind and dtype. A row that sees no key is 0.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with return_lse. Natural logarithm; float32, for float64 inputs float64. -inf for a
        row that sees no key.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype; cache_seqlens, cu_seqlens_k_new, cache_batch_idx,
        block_table and rotary_seqlens are integers. For arrays of JAX to append to, which are
        immutable.
    ValueError
        For shapes that do not go together, a wrong value, a family or tile that does not fit; for
        caches that are read-only, overlap the other arrays, or have no contiguous last axis; and
        for lengths, caches, pages and rotary positions that lie outside of the arrays, where they
        are Python integers or stand in NumPy arrays. The cache is then as it was.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    Runs on the current device and stream and does not synchronize (NumPy results apart). The
    kernels are enqueued one after the other: an append, if there is one, then attention.

    The step can be captured in a CUDA graph. With an array of cache_seqlens the graph reads the
    lengths anew at each launch, so that one graph serves a growing cache; an integer is captured as
    it is. Lists cannot be captured: pass arrays. The workspace of a captured call, rotated queries
    included, comes from CuPy's current pool and goes back to it when the call returns, though the
    graph goes on writing to it: warm up and capture under a `cupy.cuda.MemoryPool` of the graph's
    own, kept as long as the graph. Counters, at most 8 bytes for each thread block or split of a
    query tile, stay with a captured call for the life of the process.

    What stands in arrays on a GPU is not known on the host, and is not checked. It cannot lead a
    kernel outside of the arrays:

    - a length is taken to be within [0, capacity], capacity being seqlen_cache or max_pages *
      page_size; new rows beyond the capacity are dropped, and so are those for a page outside of
      [0, pages);
    - an entry of cu_seqlens_k_new is taken to be within [0, total_new], and rows of no sequence
      are not appended; if entries decrease, it is not defined which new rows a sequence has;
    - a sequence whose entry in cache_batch_idx is no cache has no keys, and nothing is appended;
    - the rows of a page outside of [0, pages) are zeros;
    - a rotary position outside of the table takes its nearest row.

    Same inputs give the same bits, on one GPU model with one version. 16-bit inputs are
    accumulated in float32.

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
    # By position, as names would cost half a microsecond.
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
        "cached",
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
    return run.attention(arguments, options, backend, keys, modifications)
