"""Prepared calls on a GPU that compute the tangents of out and lse."""

from __future__ import annotations

import numpy as np

from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.calls.arguments import TangentArguments
from cupy_flash.calls.check.problems import lse_shape
from cupy_flash.calls.check.tangents import check_tangent_call
from cupy_flash.calls.conversions import contiguous_copies, converted, readable_copies
from cupy_flash.calls.gpu.allocate import result_allocator
from cupy_flash.calls.gpu.backward import WORKSPACE, Call
from cupy_flash.calls.gpu.forward import loaded_launches
from cupy_flash.calls.gpu.prepared_calls import Context, Operation
from cupy_flash.calls.options import Options
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.gradient import tangent_of

_RESULTS = (tangent_of("out"), tangent_of("lse"))
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def readable(arguments: TangentArguments, options: Options) -> TangentArguments:
    """Return the arrays, with copies of those that kernels cannot read in place."""
    arguments = converted(arguments, options)
    copied = readable_copies(arguments, options, ())
    return arguments._replace(**(copied | contiguous_copies(arguments, "lse")))


def prepare(arguments: TangentArguments, options: Options, context: Context) -> Call:
    """Check, plan, compile and load what calls with such CuPy arrays need."""
    fields = arguments._fields
    problem, mod_arrays = check_tangent_call(arguments, options)
    plan = make_plan(
        problem, context.device, family=options.family, tile=options.tile, explain=False
    )
    names = (*fields, *_RESULTS, WORKSPACE)
    given = ("q", "k", "v", "out", "lse", *map(tangent_of, problem.moves), *_RESULTS)
    lengths = (name for name in _LENGTHS if getattr(arguments, name) is not None)
    sources = {name: name for name in (*given, *lengths)}
    if problem.layout.kind == "padded":
        sources["seqused_k"] = "seqlens_k"
    out = tuple(arguments.out.shape), np.dtype(problem.dtype)
    lse = lse_shape(arguments.q, problem), np.dtype(problem.lse_dtype)
    return Call(
        allocate=result_allocator((out, lse), uses_torch=context.uses_torch, workspace=0),
        given=(),
        overlap_check=require_no_overlap(fields, arguments, ()),
        uses_torch=context.uses_torch,
        workspace_offsets=(),
        device=cupy_module().cuda.runtime.getDevice(),
        launches=loaded_launches(plan, options, mod_arrays, {}, sources, names),
        # Kernels do not write rows that belong to no sequence.
        cleared=tuple(range(len(_RESULTS))) if problem.layout.packed_q else (),
    )


# Tangents of the results of attention. The options of a call are `Options` without `wrt`.
TANGENTS = Operation(readable, prepare, check_tangent_call)
