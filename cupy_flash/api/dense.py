"""Public functions for attention on dense batches, whose sequences all have the same length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.key_lists.forward import attention_to_lists
from cupy_flash.calls.options import Options, with_statistics
from cupy_flash.opaque import marked
from cupy_flash.problem.tile import TileRequest, freeze_tile
from cupy_flash.problem.values import named_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


@marked
def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    out: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    key_indices: Any | None = None,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    out_dtype: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute softmax(softmax_scale * q k^T) v exactly, without storing the score matrix.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The algorithm is FlashAttention-2's tiled online softmax (Dao 2023, section 3.1).

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries, of dtype float16, bfloat16, float32, float64, or float8_e4m3fn (ml_dtypes or torch;
        in CuPy a view of bytes). NumPy, CuPy, or any array that supports DLPack. Arrays with a
        contiguous last axis are read in place, whatever their other strides and their alignment
        (16-byte aligned rows are fastest); others are copied. There may be no batch axis or
        several, (..., seqlen_q, heads_q, head_dim), the same for q, k, v and the results. Arrays
        whose batch axes cannot be merged into one without a copy are copied. The arrays of
        `modifications` and the scales have one merged batch axis instead, in C order.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, with the dtype and array type of q. heads_q is a multiple of heads_kv; query head h
        uses KV head h // (heads_q // heads_kv).
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values. Head dims are 1 to 576; head_dim_v may differ from head_dim.
    causal : bool
        Whether query i attends only to the keys j <= i + q_offset.
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). It may be an array of one number, which
        is read in each call; the call then waits for the GPU if the array is there.
    q_offset : int or int32 array of shape (batch,), optional
        Position of the first query among the keys, for causal masks and modifications: one for all
        sequences, or one per sequence. By default seqlen_k - seqlen_q: the last query attends to
        every key. 0 aligns the mask at the top left. Lists and other integer dtypes are converted.
    layout : {"bshd", "bhsd"}
        Order of the axes of q, k, v and out; "bhsd" is (batch, heads, seqlen, dim).
    return_lse : bool
        Whether to return the log-sum-exp of the scaled scores of each query row, too.
    return_max_logits, return_entropy : bool
        Whether to return the largest score of each query row, and the entropy of its weights, too.
    out : array, optional
        Array that the result is written to; same array type, dtype and shape as the result. Its
        last axis is contiguous, and it does not overlap the inputs. Not for JAX (immutable arrays).
    backend : {"auto", "gpu", "cpu"}
        Backend for NumPy arrays. "auto" uses the GPU if there is one.
    family : str, optional
        Kernel family instead of the planner's choice: "decode", "hopper", "mma", "simt", "naive".
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.
    stream : stream, optional
        Stream of CuPy, PyTorch or Numba, or with ``__cuda_stream__``; by default the current one.
    key_indices : array of integers, (batch, seqlen_q or 1, heads_kv or 1, n), optional
        Lists of the keys that each query attends to: indices in its sequence, with -1 for entries
        that count for nothing. A key that is listed twice counts twice. Masks by position, lengths
        and arrays hide listed keys. See docs/guide/key_lists.md.
    q_scale, k_scale, v_scale : number or float32 array, optional
        Scales of float8 inputs: q, k and v are multiplied by them. They broadcast to (batch, 1,
        heads), whatever the layout: one for all, one per head, or one per head and sequence.
        By default 1.
    out_dtype : dtype or str, optional
        Dtype of the result for float8 inputs without `out`: bfloat16 (default) or float16.
    **modifications
        Masks and changes of scores, see `Modifications`. Not supported for float8 inputs.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output, with the array type and dtype of q (16-bit for float8). A fully masked row is 0.
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
        If an argument has a wrong array type or dtype.
    ValueError
        If shapes do not match, a value is wrong, or the family or tile does not fit.
    UnsupportedError
        If q is float8 and the GPU is not sm_90, there are no keys, head_dim exceeds 256, rows of q
        or k are not 16-byte aligned, or there are modifications. Also if `stream` is given, and no
        GPU can be used.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    The call uses the current device and stream and does not synchronize, except to return NumPy
    arrays. The same inputs give the same bits. 16-bit inputs are accumulated in float32. Hopper
    GPUs multiply in float8, probabilities included; the CPU computes float8 inputs in float32. NaN
    and inf propagate as in the naive formula, and masked keys do not affect the result. Exception:
    a NaN in a value row can reach rows of the same tile that mask its key, as 0 * NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> flash_attention(q, k, v, causal=True).shape
    (1, 4, 2, 8)
    """
    options = Options(
        "dense", causal, softmax_scale, return_lse, family, freeze_tile(tile), q_offset, layout
    )
    if return_max_logits is not False or return_entropy is not False:
        options = with_statistics(options, return_max_logits, return_entropy)
    arguments = Arguments(q, k, v, out)
    # A generator in any() would add half a microsecond to every call.
    is_plain = q_scale is None and k_scale is None and v_scale is None
    if not is_plain or out_dtype is not None:
        options = options._replace(kind="scaled", out_dtype=named_dtype(out_dtype))
        arguments = arguments._replace(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    call = (arguments, options, backend, 0, modifications, stream)
    if key_indices is not None:
        return attention_to_lists(*call, key_indices)
    return dispatch.attention(*call)


@marked
def flash_attention_qkvpacked(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    out: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    stream: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `flash_attention` for queries, keys and values stored in one array, read in place.

    The axes of each part are (batch, seqlen, heads, head_dim), with heads after seqlen.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis. There may be no batch axis or
        several, as in `flash_attention`.
    causal, softmax_scale, q_offset, layout, return_lse, return_max_logits, return_entropy, out,
    backend, family, tile, stream, **modifications
        See `flash_attention`; layout is "bshd".

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results, see `flash_attention`.

    Raises
    ------
    TypeError
        If qkv is not an array; also see `flash_attention`.
    ValueError
        If qkv has none of the documented shapes; also see `flash_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention_qkvpacked
    >>> qkv = np.ones((1, 4, 3, 2, 8), np.float32)
    >>> flash_attention_qkvpacked(qkv, causal=True).shape
    (1, 4, 2, 8)
    """
    options = Options(
        "qkvpacked", causal, softmax_scale, return_lse, family, freeze_tile(tile), q_offset, layout
    )
    if return_max_logits is not False or return_entropy is not False:
        options = with_statistics(options, return_max_logits, return_entropy)
    arguments = Arguments(None, None, None, out, qkv)
    return dispatch.attention(arguments, options, backend, 0, modifications, stream)
