"""Attention of batches of equal lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupy_flash.calls import run
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.options import Options
from cupy_flash.problem.tile import TileRequest, freeze_tile
from cupy_flash.problem.values import named_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications


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
    out: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    q_scale: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    out_dtype: Any | None = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """Exact attention, softmax(softmax_scale * q k^T) v, without the score matrix in memory.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    The tiled online-softmax algorithm of FlashAttention-2 (Dao 2023, section 3.1).

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries. float16, bfloat16, float32 or float64, or float8_e4m3fn of ml_dtypes, which CuPy's
        arrays view bytes as, or of torch; NumPy, CuPy, or any array that speaks DLPack. Arrays with
        a contiguous last axis are read in place whatever their other strides and their alignment
        (16-byte aligned rows are fastest); others are copied. There may be no batch axis or
        several, (..., seqlen_q, heads_q, head_dim), the same for all these arrays and for results.
        Arrays whose batch axes cannot be merged into one without a copy are copied. Arrays of
        `modifications` and scales have one batch axis instead of several, in C order.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys, of the same dtype and kind. heads_q is a multiple of heads_kv; query head h reads
        head h // (heads_q // heads_kv).
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values. Head dims are 1 to 576, head_dim_v may differ from head_dim.
    causal : bool
        Query i sees only the keys j <= i + q_offset.
    softmax_scale : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim). An array of one number is read in
        each call, which waits for it where it lies on a GPU.
    q_offset : int or int32 array of shape (batch,), optional
        Position of the first query among the keys, for causal masks and modifications: one for all
        sequences, or one for each. By default seqlen_k - seqlen_q: the last query sees every key. 0
        aligns the mask at the top left. A list, or an array of another integer dtype, is converted
        in each call.
    layout : {"bshd", "bhsd"}
        Order of the axes; "bhsd" is (batch, heads, seqlen, dim), for the output too.
    return_lse : bool
        Also return the log-sum-exp of each row's scaled scores.
    out : array, optional
        Where to write the result; same kind, dtype and shape as the result, contiguous last
        axis, no overlap with the inputs. Not of JAX, whose arrays are immutable.
    backend : {"auto", "gpu", "cpu"}
        Where NumPy arrays are computed. "auto": on the GPU where there is one.
    family : str, optional
        Kernel family to use instead of the planner's choice: "decode", "hopper", "mma", "simt",
        "naive".
    tile : Tile, mapping or (Br, Bc), optional
        Tile to use instead of the tuned or default one.
    q_scale, k_scale, v_scale : number or float32 array, optional
        Of float8: what the numbers of q, k and v are multiplied by. They broadcast to (batch, 1,
        heads), whatever the layout: one for all, or one for each head, or for each head of each
        batch. By default 1.
    out_dtype : dtype or str, optional
        The dtype of the result for float8 inputs, bfloat16 or float16, if `out` is not given. By
        default bfloat16.
    **modifications
        Masks, and what becomes of scores: see `Modifications`. Not of float8.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Of the inputs' kind and dtype, of float8 in 16 bits. A row that sees no key is 0.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with return_lse. Natural logarithm; float32, for float64 inputs float64. -inf for a
        row that sees no key.

    Raises
    ------
    TypeError
        For a wrong kind of array or dtype.
    ValueError
        For shapes that do not go together, a wrong value, or a family or tile that does not fit.
    UnsupportedError
        For arrays of float8 on another GPU than sm_90, without keys, of head_dim above 256, with
        rows of q or k that do not begin on 16 bytes, or with modifications.
    CompileError
        If a kernel does not compile.

    Notes
    -----
    Runs on the current device and stream and does not synchronize (NumPy results apart). Same
    inputs give the same bits. 16-bit inputs are accumulated in float32. float8 is multiplied on
    Hopper GPUs, with probabilities in it, too; the CPU computes in float32. NaN and
    inf propagate as in the naive formula, and masked keys leave no trace; a NaN in a value row that
    causality masks for some rows of its tile can reach them as 0 * NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> flash_attention(q, k, v, causal=True).shape
    (1, 4, 2, 8)
    """
    options = Options(
        "equal", causal, softmax_scale, return_lse, family, freeze_tile(tile), q_offset, layout
    )
    arguments = Arguments(q, k, v, out)
    # Not any() of a generator, which takes every call half a microsecond.
    is_plain = q_scale is None and k_scale is None and v_scale is None
    if not is_plain or out_dtype is not None:
        options = options._replace(kind="scaled", out_dtype=named_dtype(out_dtype))
        arguments = arguments._replace(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    return run.attention(arguments, options, backend, 0, modifications)


def flash_attention_qkvpacked(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any | None = None,
    backend: str = "auto",
    family: str | None = None,
    tile: TileRequest = None,
    **modifications: Unpack[Modifications],
) -> Any:
    """`flash_attention` of queries, keys and values that lie in one array, read in place.

    The axes of each are (batch, seqlen, heads, head_dim), with heads after seqlen.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis. There may be no batch axis or
        several, as in `flash_attention`.
    causal, softmax_scale, q_offset, layout, return_lse, out, backend, family, tile, **modifications
        As in `flash_attention`; layout is "bshd".

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        And lse with return_lse.

    Raises
    ------
    TypeError
        If qkv is no array, and as `flash_attention`.
    ValueError
        If qkv is not of that shape, and as `flash_attention`.
    """
    options = Options(
        "qkvpacked", causal, softmax_scale, return_lse, family, freeze_tile(tile), q_offset, layout
    )
    arguments = Arguments(None, None, None, out, qkv)
    return run.attention(arguments, options, backend, 0, modifications)
