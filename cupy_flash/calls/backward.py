"""Gradients on a GPU for one key of calls: plan, kernels and packed arguments, and the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_flash.arrays.overlap import OverlapCheck
from cupy_flash.arrays.strided import address_of, as_cupy, is_aligned, readable_in_place
from cupy_flash.calls.arguments import sizes_of
from cupy_flash.calls.attention import fixed_fields
from cupy_flash.calls.gradients import (
    WRITTEN,
    GradientArguments,
    gradient_problem,
    result_spec,
)
from cupy_flash.calls.modifiers import Functions, canonical, packed_arguments
from cupy_flash.calls.options import Options
from cupy_flash.calls.results import ResultSpec, empty
from cupy_flash.families.params import params_dtype
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.gpu.launch import Launches
from cupy_flash.gpu.params import PackedStruct
from cupy_flash.gpu.tensor_map import TensorMaps
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import Device

# Behind the addresses of a call's arguments: where results and scratch lie.
_RESULTS = tuple(f"new_{name}" for name in WRITTEN)
_VALUES = (*_RESULTS, "workspace")


@dataclass(frozen=True)
class Call:
    """Everything about a backward call that does not change while its key stays the same.

    Attributes
    ----------
    results
        Shape and dtype of dq, dk and dv; None of one that is not wanted.
    places
        Of dq, dk and dv among the addresses.
    order
        Which of them are returned, in order.
    of_torch
        Whether results are tensors.
    apart
        Of all arrays of the call.
    scratch
        Bytes of the plan's workspace.
    launches
        None where there is no query.
    is_cleared
        Whether results are zeros first: rows of no sequence have no kernel, nor have keys without
        queries.
    """

    results: tuple[ResultSpec | None, ...]
    places: tuple[int, ...]
    order: tuple[int, ...]
    of_torch: bool
    apart: OverlapCheck
    scratch: int
    launches: Launches
    is_cleared: bool

    def run(
        self, arguments: GradientArguments, addresses: tuple[int, ...], *_: Any
    ) -> tuple[Any, ...]:
        """Enqueue the launches for arrays at these addresses; the gradients."""
        self.apart.check(addresses)
        found: list[Any] = []
        values = addresses
        for place, spec in zip(self.places, self.results, strict=True):
            array, at = arguments[place], addresses[place]
            if array is None and spec is not None:
                array, at = empty(arguments.q, spec, of_torch=self.of_torch)
            found.append(array)
            values += (at,)
            if self.is_cleared and array is not None:
                as_cupy(array).fill(0)
        memory = cupy_module().cuda.alloc(self.scratch) if self.scratch else None
        values += (0 if memory is None else memory.ptr,)
        if self.launches:
            self.launches.run(values)
        return tuple([found[i] for i in self.order])


def readable(arguments: GradientArguments, options: Options) -> GradientArguments:
    """The arrays, copied where kernels cannot read them as they lie."""
    copied: dict[str, Any] = {
        name: readable_in_place(array)
        for name, array in zip(arguments._fields, arguments, strict=True)
        if array is not None and name not in WRITTEN and name in GradientArguments._fields
    }
    for name in ("lse", "dlse"):
        array = as_cupy(getattr(arguments, name))
        if array is not None and not (array.flags.c_contiguous and is_aligned(array)):
            copied[name] = cupy_module().ascontiguousarray(readable_in_place(array))
    return arguments._replace(**copied)


def prepare(
    arguments: GradientArguments,
    options: Options,
    device: Device,
    functions: Functions,
    *,
    of_torch: bool,
) -> Call:
    """Check, plan, compile and load what calls with CuPy arrays like these need."""
    assert options.wrt is not None
    fields = arguments._fields
    problem = gradient_problem(arguments, options)
    apart = OverlapCheck(fields, arguments, WRITTEN)
    apart.check(tuple(0 if array is None else address_of(array) for array in arguments))
    plan = make_plan(problem, device, family=options.family, tile=options.tile)
    sources = {name: name for name in ("q", "k", "v", "out", "lse", "dout", "workspace")}
    sources |= {name: new for name, new in zip(WRITTEN, _RESULTS, strict=True)}
    optional = ("dlse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    sources |= {name: name for name in optional if getattr(arguments, name) is not None}
    if problem.layout.kind == "padded":
        sources["seqused_k"] = "seqlens_k"
    fixed = fixed_fields(plan)
    if options.modifiers is not None:
        sizes = sizes_of(problem)
        arrays = canonical(options.modifiers, arguments.of_modifiers, sizes)
        fixed["mods"], captured = packed_arguments(
            options.modifiers, arrays, sizes, problem.softmax_scale
        )
        sources |= {f"mods.{name}.data": name for name in captured}
    wanted = tuple(f"d{name}" for name in options.wrt)
    names, maps = (*fields, *_VALUES), plan.schedule.tensor_maps
    return Call(
        results=tuple(
            result_spec(arguments, options, name[1:]) if name in wanted else None
            for name in WRITTEN
        ),
        places=tuple(fields.index(name) for name in WRITTEN),
        order=tuple(WRITTEN.index(name) for name in wanted),
        of_torch=of_torch,
        apart=apart,
        scratch=plan.workspace,
        launches=Launches(
            plan,
            PackedStruct(params_dtype(problem), fixed, sources, names),
            TensorMaps(maps, names) if maps else None,
        ),
        is_cleared=problem.is_empty or not problem.layout.is_equal,
    )
