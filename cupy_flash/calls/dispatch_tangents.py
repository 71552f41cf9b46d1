"""Tangents of attention on a GPU: the forward pass, and a kernel that reads its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import is_cupy
from cupy_flash.calls.arguments import Arguments, TangentArguments
from cupy_flash.calls.dispatch import Computation, attention, run
from cupy_flash.calls.gpu.tangents import TANGENTS
from cupy_flash.calls.options import Options

# There is no host function: the formula in `cupy_flash.reference` computes tangents of host arrays.
_TANGENTS = Computation(TANGENTS, None)


def on_gpu(
    inputs: tuple[Any, Any, Any],
    tangents: tuple[Any, Any, Any],
    options: Options,
    modifications: Mapping[str, Any],
    stream: Any | None = None,
    lengths: tuple[Any, Any, Any] = (None, None, None),
) -> tuple[Any, Any, Any, Any] | None:
    """Return out, its tangent, lse and its tangent.

    The result is None if q is not on a GPU or if no tangent is given. Kernels do not compute these
    calls.

    Parameters
    ----------
    inputs, tangents
        q, k and v, and their tangents in the same order; None for a tangent that is zero.
    options, modifications, stream
        See `cupy_flash.calls.dispatch.attention`.
    lengths
        Arrays `cu_seqlens_q`, `cu_seqlens_k` and `seqused_k` of a varlen call.
    """
    if stream is not None:
        with on_stream(stream, inputs[0]):
            return on_gpu(inputs, tangents, options, modifications, lengths=lengths)
    if all(x is None for x in tangents) or not is_cupy(read("q", inputs[0])):
        return None
    options = options._replace(return_lse=True)
    cu_seqlens_q, cu_seqlens_k, seqused_k = lengths
    forward = Arguments(
        *inputs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k
    )
    out, lse = attention(forward, options, "auto", 0, modifications)
    arguments = TangentArguments(*inputs, out, lse, *tangents, *lengths)
    out_tangent, lse_tangent = run(_TANGENTS, arguments, options, "auto", 0, modifications)
    return out, out_tangent, lse, lse_tangent
