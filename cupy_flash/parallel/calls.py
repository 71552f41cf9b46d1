"""Attention, or its gradients, of one block of the score matrix (`Piece`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import array_module, require_float
from cupy_flash.calls import dispatch, dispatch_backward
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.backward_arguments import GradientArguments
from cupy_flash.calls.options import Options
from cupy_flash.parallel.score_blocks import Geometry, Piece
from cupy_flash.problem.gradient import ROWS


class Scores(NamedTuple):
    """Parameters of a call that do not depend on the positions of rows and keys.

    Attributes
    ----------
    scale
        Factor on the scores.
    softcap, alibi_slopes
        Softcap, and ALiBi slopes of this rank's heads; see `cupy_flash.Modifications`.
    backend
        Backend, see `cupy_flash.flash_attention`.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Any = None
    backend: str = "auto"


class Rows(NamedTuple):
    """Arrays of query rows, (batch, rows, heads, dim), and results of the forward pass for them.

    The shape of `lse` is (batch, heads, rows).
    """

    q: Any
    out: Any = None
    dout: Any = None
    lse: Any = None


def refuse_alone(
    arguments: Arguments, options: Options, backend: str, modifications: Mapping[str, Any]
) -> None:
    """Raise the exception that a single rank would raise for arrays of these shapes and dtypes.

    Raised later, in the middle of a call, it would leave the other ranks waiting.
    """
    if 0 in (*arguments.q.shape[:2], *arguments.keys.shape[:2]):
        return
    if options.wrt is None:
        dispatch.unloaded_plan(arguments, options, backend, None, modifications)
    else:
        inputs = GradientArguments(*arguments[:3])
        dispatch_backward.plan(inputs, options, backend, None, modifications)


def require_same_dtype(arrays: Mapping[str, Any]) -> None:
    """Raise TypeError unless all arrays have the same floating-point dtype, and it is supported."""
    first, like = next(iter(arrays.items()))
    for name, array in arrays.items():
        require_float(name, array)
        if array.dtype != like.dtype:
            raise TypeError(
                f"{name} has dtype {array.dtype}; expected {like.dtype}, as {first} has"
            )


def attend(
    q: Any,
    k: Any,
    v: Any,
    piece: Piece,
    geometry: Geometry,
    scores: Scores,
    out: Any,
    lse: Any,
    *,
    shares_gpu: bool,
) -> None:
    """Compute one block of the score matrix; write its rows of ``out`` and ``lse``.

    The arrays hold all rows, (batch, rows, heads, dim), and lse is (batch, heads, rows).
    """
    rows, keys = slice(*piece.rows), slice(*piece.keys)
    options = _options(piece, geometry, scores)._replace(shares_gpu=shares_gpu)
    modifications = _modifications(piece, geometry, scores)
    arguments = Arguments(q[:, rows], k[:, keys], v[:, keys], out[:, rows])
    if piece.cu_seqlens is not None:
        arguments = _packed(arguments, piece)
    _, found = dispatch.attention(arguments, options, scores.backend, 0, modifications)
    lse[:, :, rows] = found


def gradients(
    of: Rows, k: Any, v: Any, piece: Piece, geometry: Geometry, scores: Scores
) -> tuple[Any, Any, Any]:
    """Return a block's contributions to dq, dk and dv, in float32 or, for float64, in float64."""
    rows, keys = slice(*piece.rows), slice(*piece.keys)
    options = _options(piece, geometry, scores)._replace(
        wrt=ROWS,
        grad_dtype=None if k.dtype == "float64" else "float32",
    )
    modifications = _modifications(piece, geometry, scores)
    lse = array_module(k).ascontiguousarray(of.lse[:, :, rows])
    arguments = GradientArguments(
        of.q[:, rows], k[:, keys], v[:, keys], of.out[:, rows], of.dout[:, rows], lse
    )
    if piece.cu_seqlens is not None:
        arguments = _packed(arguments, piece)
    found = dispatch_backward.gradients(arguments, options, scores.backend, modifications)
    dq, dk, dv = found if piece.cu_seqlens is None else (array[None] for array in found)
    return dq, dk, dv


def sink_gradients(of: Rows, k: Any, v: Any, sinks: Any, scores: Scores) -> Any:
    """Return the gradients of sinks, (heads,), which need `of.lse` but no keys: zeros will do."""
    xp = array_module(k)
    key, value = (xp.zeros((array.shape[0], 1, *array.shape[2:]), array.dtype) for array in (k, v))
    options = Options(
        "dense",
        softmax_scale=scores.scale,
        return_lse=True,
        wrt=("sinks",),
        grad_dtype=None if k.dtype == "float64" else "float32",
    )
    arguments = GradientArguments(of.q, key, value, of.out, of.dout, of.lse)
    (found,) = dispatch_backward.gradients(arguments, options, scores.backend, {"sinks": sinks})
    return found


def _options(piece: Piece, geometry: Geometry, scores: Scores) -> Options:
    is_packed = piece.cu_seqlens is not None
    causal = geometry.causal and piece.is_masked
    longest = None
    if piece.cu_seqlens is not None:
        cuts = piece.cu_seqlens
        longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    places = causal or bool(_modifications(piece, geometry, scores))
    return Options(
        "varlen" if is_packed else "dense",
        causal=causal,
        softmax_scale=scores.scale,
        return_lse=True,
        q_offset=piece.q_offset if places and not is_packed else None,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )


def _modifications(piece: Piece, geometry: Geometry, scores: Scores) -> dict[str, Any]:
    found = {"softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes}
    if piece.is_masked and geometry.has_window:
        found["window_size"] = (geometry.left, geometry.right)
    return {name: value for name, value in found.items() if value is not None}


def _packed(arguments: Any, piece: Piece) -> Any:
    """Return arguments of a batch of one as arguments of packed sequences."""
    cuts = array_module(arguments.q).asarray(piece.cu_seqlens, "int32")
    rows = {
        name: array[0]
        for name, array in zip(arguments._fields, arguments, strict=True)
        if array is not None
    }
    return arguments._replace(**rows, cu_seqlens_q=cuts, cu_seqlens_k=cuts)
