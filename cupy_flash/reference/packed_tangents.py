"""Formula of the tangents of varlen calls, computed sequence by sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_flash.arrays.kinds import result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module
from cupy_flash.opaque import opaque
from cupy_flash.reference.eight_bits import widened
from cupy_flash.reference.packed import packed_modifications, packed_sequences
from cupy_flash.reference.rows import precision_of
from cupy_flash.reference.tangents import Tangents, read_all, tangent_formula

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import PackedModifications


@opaque
def attention_varlen_jvp_reference(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    q_tangent: Any = None,
    k_tangent: Any = None,
    v_tangent: Any = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute attention on packed sequences and its tangent in float64 by the plain formula.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `cupy_flash.attention_varlen_reference`; pages are not supported.
    q_tangent, k_tangent, v_tangent : arrays, optional
        Tangents of q, k and v, with the shapes and the array type of these arrays and any float
        dtype. A missing tangent counts as zeros, and takes no time.
    causal, softmax_scale, seqused_k, stream
        See `cupy_flash.attention_varlen_reference`.
    return_lse : bool
        Whether to return the log-sum-exp of each query row and its tangent, too.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`; without seqlens_k. They have
        no tangents.

    Returns
    -------
    out : float64 array, shape (total_q, heads_q, head_dim_v)
        Output. Rows that belong to no sequence are 0.
    out_tangent : float64 array, shape (total_q, heads_q, head_dim_v)
        Tangent of the output. Rows that belong to no sequence are 0.
    lse : float64 array, shape (heads_q, total_q)
        Log-sum-exp, natural logarithm; only with ``return_lse``. It is -inf in rows that belong to
        no sequence.
    lse_tangent : float64 array, shape (heads_q, total_q)
        Tangent of the log-sum-exp; only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `cupy_flash.attention_jvp_reference`.
    """
    return _packed_call(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        Tangents(q_tangent, k_tangent, v_tangent),
        exact=True,
        causal=causal,
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        return_lse=return_lse,
        stream=stream,
        modifications=modifications,
    )


def packed_in_precision_of_inputs(*arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Compute `attention_varlen_jvp_reference` in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    *arguments
        Arguments up to max_seqlen_k, and `Tangents`. q, k, v and the tangents have one dtype, which
        is that of out and its tangent.
    **options
        Other arguments, with `modifications` as a mapping.

    Raises
    ------
    TypeError
        If the dtypes differ, or are not those of `cupy_flash.flash_attention`.
    """
    return _packed_call(*arguments, exact=False, **options)


def _packed_call(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    tangents: Tangents,
    *,
    exact: bool,
    causal: bool,
    softmax_scale: float | None,
    seqused_k: Any,
    return_lse: bool,
    stream: Any,
    modifications: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Return the results of a public function; `exact` tells that they are float64."""
    with on_stream(stream, q):
        convert = result_converter("q", q)
        arrays, moving = read_all({"q": q, "k": k, "v": v}, tangents._asdict(), exact=exact)
        dtype = np.dtype(np.float64) if exact else arrays["q"].dtype
        compute, xp = precision_of(dtype), array_module(arrays["q"])
        q, k, v = map(widened, arrays.values())
        moving = {name: None if x is None else widened(x) for name, x in moving.items()}
        shapes = (*q.shape[:2], v.shape[-1]), (q.shape[1], q.shape[0])
        out, out_tangent = (xp.zeros(shapes[0], compute) for _ in range(2))
        lse, lse_tangent = xp.full(shapes[1], -np.inf, compute), xp.zeros(shapes[1], compute)
        bound_mods = packed_modifications(
            modifications, q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, causal=causal
        )
        for rows, keys, sequence in packed_sequences(
            *(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), seqused_k=seqused_k
        ):
            moved = {
                name: None if x is None else _of_sequence(x, rows if name == "q" else keys)
                for name, x in moving.items()
            }
            results = tangent_formula(
                _of_sequence(q, rows),
                _of_sequence(k, keys),
                _of_sequence(v, keys),
                Tangents(**moved),
                compute=compute,
                causal=causal,
                softmax_scale=softmax_scale,
                q_offset=None,
                bound_mods=bound_mods,
                sequence=sequence,
            )
            out[rows], out_tangent[rows] = (x[0].swapaxes(0, 1) for x in results[:2])
            lse[:, rows], lse_tangent[:, rows] = (x[0] for x in results[2:])
        with np.errstate(all="ignore"):
            found = [x.astype(dtype, copy=False) for x in (out, out_tangent)]
        if return_lse:
            found += [lse, lse_tangent]
        return tuple(map(convert, found))


def _of_sequence(x: Any, rows: slice) -> Any:
    """Return the rows of one sequence as a view of shape (1, heads, seqlen, dim)."""
    return x[rows][None].swapaxes(1, 2)
