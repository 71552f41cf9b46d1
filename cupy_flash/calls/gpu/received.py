"""Prepared calls on a GPU that sum attention weights over queries."""

from __future__ import annotations

import numpy as np

from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.calls.arguments import IN_PLACE, ReceivedArguments
from cupy_flash.calls.check.lengths import length_limits
from cupy_flash.calls.check.received import check_received_call
from cupy_flash.calls.conversions import contiguous_copies, converted, readable_copies
from cupy_flash.calls.gpu.allocate import result_allocator
from cupy_flash.calls.gpu.backward import WORKSPACE, Call
from cupy_flash.calls.gpu.forward import loaded_launches, sources_of
from cupy_flash.calls.gpu.prepared_calls import Context, Operation
from cupy_flash.calls.options import Options
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.planning.planner import make_plan

_RESULT = "received"


def readable(arguments: ReceivedArguments, options: Options) -> ReceivedArguments:
    """Return the arrays, with copies of those that kernels cannot read in place."""
    arguments.require_given(options)
    arguments = converted(arguments, options)
    copied = readable_copies(arguments, options, IN_PLACE)
    return arguments._replace(**(copied | contiguous_copies(arguments, "lse")))


def prepare(arguments: ReceivedArguments, options: Options, context: Context) -> Call:
    """Check, plan, compile and load what calls with such CuPy arrays need."""
    fields = arguments._fields
    problem, mod_arrays = check_received_call(arguments, options)
    plan = make_plan(
        problem, context.device, family=options.family, tile=options.tile, explain=False
    )
    assert options.received is not None
    kind, first, last = options.received
    limits = length_limits(arguments.forward, problem) if options.kind == "kvcache" else None
    names = (*fields, _RESULT, WORKSPACE, *(("keys",) if limits else ()))
    of_forward = sources_of(arguments.forward, plan)
    sources = {field: name for field, name in of_forward.items() if name in names}
    sources[_RESULT] = _RESULT
    is_packed = problem.layout.packed_k
    heads = problem.heads_kv if kind == "groups" else problem.heads_q
    shape = (*arguments.q.shape[:-3], heads, problem.seqlen_k)
    if is_packed:
        shape = heads, problem.layout.total_k
    fixed = {"first_query": first, "last_query": last}
    return Call(
        allocate=result_allocator(
            ((shape, np.dtype(problem.lse_dtype)),), uses_torch=context.uses_torch, workspace=0
        ),
        given=(),
        overlap_check=require_no_overlap(fields, arguments, ()),
        uses_torch=context.uses_torch,
        workspace_offsets=(),
        device=cupy_module().cuda.runtime.getDevice(),
        launches=loaded_launches(*(plan, options, mod_arrays, fixed, sources, names)),
        # Without queries, no kernel runs. Kernels do not write keys that belong to no sequence.
        cleared=(0,) if problem.is_empty or is_packed else (),
        limits=limits,
    )


# Sums of attention weights. The options of a call are `Options` with `received`.
RECEIVED = Operation(readable, prepare, check_received_call)
