"""Attention, or its gradients, of one block of the score matrix (`ScoreBlock`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import array_module, dtype_name, require_float
from cupy_flash.calls import dispatch, dispatch_backward
from cupy_flash.calls.arguments import Arguments, GradientArguments
from cupy_flash.calls.options import Options
from cupy_flash.parallel.score_blocks import Geometry, ScoreBlock
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

    If the exception were raised in the middle of a call, the other ranks would wait for this rank.
    """
    if 0 in (*arguments.q.shape[:2], *arguments.keys.shape[:2]):
        return
    if options.wrt is None:
        dispatch.plan(arguments, options, backend, None, modifications, compiles=False)
    else:
        inputs = GradientArguments(arguments.q, arguments.k, arguments.v)
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
    block: ScoreBlock,
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
    rows, keys = slice(*block.rows), slice(*block.keys)
    options, modifications = _options(block, geometry, scores, shares_gpu=shares_gpu)
    arguments = Arguments(q[:, rows], k[:, keys], v[:, keys], out[:, rows])
    if block.cu_seqlens is not None:
        arguments = _packed(arguments, block)
    _, result = dispatch.attention(arguments, options, scores.backend, 0, modifications)
    lse[:, :, rows] = result


def gradients(
    shard: Rows, k: Any, v: Any, block: ScoreBlock, geometry: Geometry, scores: Scores
) -> tuple[Any, Any, Any]:
    """Return a block's contributions to dq, dk and dv, in float32 or, for float64, in float64."""
    rows, keys = slice(*block.rows), slice(*block.keys)
    options, modifications = _options(
        block, geometry, scores, wrt=ROWS, grad_dtype=accumulated_dtype(k)
    )
    lse = array_module(k).ascontiguousarray(shard.lse[:, :, rows])
    arguments = GradientArguments(
        shard.q[:, rows], k[:, keys], v[:, keys], shard.out[:, rows], shard.dout[:, rows], lse
    )
    if block.cu_seqlens is not None:
        arguments = _packed(arguments, block)
    results = dispatch_backward.gradients(arguments, options, scores.backend, modifications)
    dq, dk, dv = results if block.cu_seqlens is None else (array[None] for array in results)
    return dq, dk, dv


def sink_gradients(shard: Rows, k: Any, v: Any, sinks: Any, scores: Scores) -> Any:
    """Return the gradients of sinks, (heads,). They depend on no key or value."""
    xp = array_module(k)
    key, value = (xp.zeros((array.shape[0], 1, *array.shape[2:]), array.dtype) for array in (k, v))
    options = Options(
        "dense",
        softmax_scale=scores.scale,
        return_lse=True,
        wrt=("sinks",),
        grad_dtype=accumulated_dtype(k),
    )
    arguments = GradientArguments(shard.q, key, value, shard.out, shard.dout, shard.lse)
    (gradient,) = dispatch_backward.gradients(arguments, options, scores.backend, {"sinks": sinks})
    return gradient


def accumulated_dtype(array: Any) -> str | None:
    """Return the `grad_dtype` with which partial gradients are summed without rounding."""
    return None if dtype_name(array) == "float64" else "float32"


def _options(
    block: ScoreBlock, geometry: Geometry, scores: Scores, **options: Any
) -> tuple[Options, dict[str, Any]]:
    """Return the options and the modifications of the call that computes a block."""
    given = {"softcap": scores.softcap, "alibi_slopes": scores.alibi_slopes}
    if block.is_masked and geometry.has_window:
        given["window_size"] = (geometry.left, geometry.right)
    modifications = {name: value for name, value in given.items() if value is not None}
    causal = geometry.causal and block.is_masked
    if block.cu_seqlens is not None:
        longest = max(stop - start for start, stop in itertools.pairwise(block.cu_seqlens))
        options |= {"kind": "varlen", "max_seqlen_q": longest, "max_seqlen_k": longest}
    elif causal or modifications:
        options["q_offset"] = block.q_offset
    made = Options(causal=causal, softmax_scale=scores.scale, return_lse=True, **options)
    return made, modifications


def _packed(arguments: Any, block: ScoreBlock) -> Any:
    """Return arguments of a batch of one as arguments of packed sequences."""
    boundaries = array_module(arguments.q).asarray(block.cu_seqlens, "int32")
    rows = {
        name: array[0]
        for name, array in zip(arguments._fields, arguments, strict=True)
        if array is not None
    }
    return arguments._replace(**rows, cu_seqlens_q=boundaries, cu_seqlens_k=boundaries)
