"""Formula of the tangents of gradients of varlen calls, computed sequence by sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cupy_flash.arrays.kinds import result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import require_shape
from cupy_flash.opaque import opaque
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference.hessian_products import gradients_of, hessian_formula, read_of_lse
from cupy_flash.reference.packed import part_of
from cupy_flash.reference.packed_tangents import PackedCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import PackedModifications


@opaque
def attention_varlen_hvp_reference(
    dout: Any,
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
    dout_tangent: Any = None,
    *,
    dlse: Any = None,
    dlse_tangent: Any = None,
    modification_tangents: Mapping[str, Any] | None = None,
    wrt: Iterable[str] = ROWS,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    stream: Any | None = None,
    **modifications: Unpack[PackedModifications],
) -> tuple[Any, ...]:
    """Compute the tangents of the gradients of packed sequences in float64 by the plain formula.

    Parameters
    ----------
    dout : array, shape (total_q, heads_q, head_dim_v)
        Gradient of the output, with the array type of q and any float dtype.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        See `cupy_flash.attention_varlen_reference`; pages are not supported.
    q_tangent, k_tangent, v_tangent, dout_tangent : arrays, optional
        Tangents of q, k, v and dout, with the shapes and the array type of these arrays and any
        float dtype. A missing tangent counts as zeros.
    dlse, dlse_tangent : arrays, shape (heads_q, total_q), optional
        Gradient of the log-sum-exp, and its tangent.
    modification_tangents, wrt
        See `cupy_flash.attention_hvp_reference`.
    causal, softmax_scale, seqused_k, stream
        See `cupy_flash.attention_varlen_reference`.
    **modifications
        Masks and changes of scores, see `cupy_flash.Modifications`; without seqlens_k.

    Returns
    -------
    tuple of float64 arrays
        Tangents of the gradients, with the shapes of the inputs, in the order of `wrt`. Rows that
        belong to no sequence have 0; rows of two sequences have the sum of both results.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        See `cupy_flash.attention_hvp_reference`.
    """
    return _packed_call(
        *(dout, q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)),
        {"q": q_tangent, "k": k_tangent, "v": v_tangent, "dout": dout_tangent},
        {"dlse": dlse, "dlse_tangent": dlse_tangent},
        wrt,
        stream,
        exact=True,
        causal=causal,
        softmax_scale=softmax_scale,
        seqused_k=seqused_k,
        modification_tangents=modification_tangents,
        modifications=modifications,
    )


def packed_in_precision_of_inputs(*arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Compute `attention_varlen_hvp_reference` in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    *arguments
        Arrays dout, q, k and v of one dtype; a tuple of cu_seqlens_q, cu_seqlens_k, max_seqlen_q
        and max_seqlen_k; and the arguments of `hessian_products.in_precision_of_inputs` after v.
    **options
        Other arguments, with `modifications` as a mapping.

    Raises
    ------
    TypeError
        If the dtypes differ, or are not those of `cupy_flash.flash_attention`.
    """
    return _packed_call(*arguments, exact=False, **options)


def _packed_call(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    lengths: tuple[Any, Any, int, int],
    tangents: Mapping[str, Any],
    of_lse: Mapping[str, Any],
    wrt: Iterable[str],
    stream: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the results of a public function; see `PackedCall.of` for the options."""
    with on_stream(stream, q):
        convert = result_converter("q", q)
        arrays = {"q": q, "k": k, "v": v, "dout": dout}
        call = PackedCall.of(arrays, tangents, wrt, lengths, **options)
        q, v = call.arrays["q"], call.arrays["v"]
        require_shape("dout", call.arrays["dout"], (*q.shape[:2], v.shape[-1]), "as the output")
        given = read_of_lse(of_lse, q, (q.shape[1], q.shape[0]))
        gradients = gradients_of(call.moving, call.inputs, exact=options["exact"])
        for rows, keys, sequence in call.sequences():
            own, moving = call.part(rows, keys)
            own |= {name: None if x is None else x[None, :, rows] for name, x in given.items()}
            hessian_formula(
                **own,
                **call.options,
                tangents=moving,
                sequence=sequence,
                into=gradients.parts(functools.partial(part_of, rows=rows, keys=keys)),
            )
        return gradients.results(convert)
