"""Providers by name: the library, the plain formula in CuPy and NumPy, and torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
import re
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu.backward import gradients as cpu_backward
from cupy_flash.cpu.plan import choose_cpu_tile, make_cpu_plan
from cupy_flash.families import FAMILIES
from cupy_flash.families.schedule import Schedule
from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan, tile_fields
from cupy_flash.problem.arrays import FLOAT8, FLOAT8_OUTPUTS
from cupy_flash.problem.problem import STATISTICS
from cupy_flash.problem.tile import Tile, freeze_tile
from cupy_flash.reference.dense import attention_naive
from cupy_flash.reference.gradients import backward_naive
from cupy_flash.reference.packed_gradients import backward_varlen_naive
from cupy_flash.reference.rows import CHUNK_BYTES

from ..cases.cases import DIRECTIONS, Case
from ..cases.inputs import Inputs, can_share_pages, random_inputs
from ..cases.mod_arguments import restricted
from ..cases.sequences import equal_length_case, rows_in_call, sequence_of
from ..measure import check
from ..measure.timing import Timed
from ..records import environment
from . import flash_attention, flashinfer, torch_flex, torch_providers
from .contract import Prepared, Provider, TileFields

# Page sizes of the providers that put a case's cache into pages.
PAGE_SIZES = (1, 16, 64)
# 8-bit dtypes of caches, and their short names in the names of providers.
CACHE_DTYPES = {"float8_e4m3fn": "float8", "int8": "int8"}
# Names of the kernel families of the directions that cases have.
FAMILY_NAMES = tuple(dict.fromkeys(name for way in DIRECTIONS for name in FAMILIES[way]))
# Number of temporary arrays in the naive formula of gradients, each as large as a chunk of scores.
_GRADIENT_TEMPORARIES = 10


class Dispatcher(Provider):
    """The library, with its own choice of kernel family or with a given one."""

    ours = True

    def __init__(self, name: str, family: str | None, tile: TileFields) -> None:
        self.name = name
        self.family = family
        self.tile = dict(tile) if tile else None
        # Without a GPU, the library chooses the CPU backend.
        self.on_gpu = family is not None or gpu_unavailable() is None
        # Argument `backend` of the calls; "auto" chooses by the arrays.
        self.backend = "auto"

    def plan(self, case: Case) -> Plan:
        """Return the plan of the call; raise ValueError if the library refuses the case."""
        if not self.on_gpu:
            return cpu_plan(case, self.tile)
        return make_plan(
            case.problem(), current_device(), family=self.family, tile=freeze_tile(self.tile)
        )

    def why_not(self, case: Case) -> str | None:
        if reason := self.missing():
            return reason
        try:
            self.plan(case)
        except ValueError as error:
            return str(error)
        return None

    def scratch_bytes(self, case: Case) -> int:
        return self.plan(case).workspace

    def prepare(self, inputs: Inputs) -> Prepared:
        plan = self.plan(inputs.case)
        digest = environment.digest_of(plan.family, inputs.case.direction)
        forced = {"backend": self.backend, "family": self.family, "tile": self.tile}
        call = inputs.call(on_gpu=self.on_gpu, **forced)
        return Prepared(call, plan=plan, kernel_digest=digest)

    def replayed(self, prepared: Prepared) -> Timed | None:
        # A graph's replays would rebuild the block mask, which repeated calls reuse.
        assert prepared.plan is not None
        return None if _reads_block_mask(prepared.plan) else super().replayed(prepared)


class WithStatistic(Dispatcher):
    """The library, returning a row statistic in addition to the output."""

    def __init__(self, statistic: str, tile: TileFields) -> None:
        super().__init__(f"cupy_flash-{statistic}", None, tile)
        self.statistic = statistic

    def plan(self, case: Case) -> Plan:
        if case.is_backward:
            raise ValueError(f"{self.statistic} is a result of forward calls")
        if not self.on_gpu:
            return cpu_plan(case, self.tile)
        problem = dataclasses.replace(case.problem(), statistics=(self.statistic,))
        return make_plan(problem, current_device(), tile=freeze_tile(self.tile))

    def prepare(self, inputs: Inputs) -> Prepared:
        made = super().prepare(inputs)
        call = functools.partial(made.call, **{f"return_{self.statistic}": True})
        return dataclasses.replace(made, call=call, to_result=operator.itemgetter(0))


class CpuBackend(Dispatcher):
    """CPU backend of the library, also if there is a GPU."""

    def __init__(self, tile: TileFields) -> None:
        super().__init__("cupy_flash-cpu", None, tile)
        self.on_gpu = False
        self.backend = "cpu"


def _reads_block_mask(plan: Plan) -> bool:
    family = FAMILIES[plan.problem.direction].get(plan.family)
    return family is not None and family.uses_block_mask(plan.problem, plan.tile)


class _Variant(Provider):
    """The library, computing a case in another form."""

    ours = True

    def __init__(self, name: str, tile: TileFields) -> None:
        self.name = name
        self.dispatcher = Dispatcher(name, None, tile)
        self.on_gpu = self.dispatcher.on_gpu

    @abstractmethod
    def served(self, case: Case) -> Case | str:
        """Return the case that is computed instead, or the reason why there is none."""

    @abstractmethod
    def inputs_of(self, inputs: Inputs) -> Inputs:
        """Return the inputs of the case that is computed."""

    def scale(self, case: Case) -> float:
        """Return the factor on the times of the case that is computed."""
        return 1.0

    def why_not(self, case: Case) -> str | None:
        served = self.served(case)
        return served if isinstance(served, str) else self.dispatcher.why_not(served)

    def _served(self, case: Case) -> Case:
        served = self.served(case)
        if isinstance(served, str):
            raise ValueError(served)
        return served

    def scratch_bytes(self, case: Case) -> int:
        return self.dispatcher.scratch_bytes(self._served(case))

    def prepare(self, inputs: Inputs) -> Prepared:
        own = self.inputs_of(inputs)
        return dataclasses.replace(
            self.dispatcher.prepare(own), inputs=own, scale=self.scale(inputs.case)
        )


class OnPages(_Variant):
    """The library on the same cache, in pages with shuffled order."""

    def __init__(self, page_size: int, tile: TileFields) -> None:
        super().__init__(f"cupy_flash-page{page_size}", tile)
        self.page_size = page_size

    def served(self, case: Case) -> Case | str:
        if not case.is_cached or case.page_size:
            return "it needs a contiguous cache, which it divides into pages"
        return dataclasses.replace(case, page_size=self.page_size)

    def scratch_bytes(self, case: Case) -> int:
        served = self._served(case)
        new = 0 if can_share_pages(case, self.page_size) else served.array_bytes
        return self.dispatcher.scratch_bytes(served) + new

    def inputs_of(self, inputs: Inputs) -> Inputs:
        return inputs.with_pages_of(self.page_size)


class InEightBits(_Variant):
    """The library on the same cache, or dense inputs, in 8 bits with one scale per head."""

    def __init__(self, cache_dtype: str, tile: TileFields) -> None:
        super().__init__(f"cupy_flash-{CACHE_DTYPES[cache_dtype]}", tile)
        self.cache_dtype = cache_dtype

    def served(self, case: Case) -> Case | str:
        if case.is_dense:
            if self.cache_dtype != FLOAT8 or case.dtype not in FLOAT8_OUTPUTS or case.is_backward:
                return "it takes dense cases only forward, with 16-bit dtypes, and in float8"
        elif not case.is_cached or case.append:
            return "it takes caches only without append"
        return dataclasses.replace(case, cache_dtype=self.cache_dtype)

    def scratch_bytes(self, case: Case) -> int:
        served = self._served(case)
        stored = served.key_value_bytes + (served.query_bytes if case.is_dense else 0)
        return self.dispatcher.scratch_bytes(served) + stored

    def inputs_of(self, inputs: Inputs) -> Inputs:
        return inputs.with_cache_of(self.cache_dtype)


class Anew(_Variant):
    """The library in a CUDA graph, whose replays rebuild the block mask of a mask function."""

    def __init__(self, tile: TileFields) -> None:
        super().__init__("cupy_flash-anew", tile)

    def served(self, case: Case) -> Case | str:
        if self.on_gpu and case.mods.mod and _reads_block_mask(self.dispatcher.plan(case)):
            return case
        return "there is no block mask to rebuild"

    def inputs_of(self, inputs: Inputs) -> Inputs:
        return inputs


class Uniform(_Variant):
    """`flash_attention` on a batch of equal lengths, for comparison with a varlen batch."""

    def __init__(self, tile: TileFields) -> None:
        super().__init__("cupy_flash-uniform", tile)

    def served(self, case: Case) -> Case | str:
        if case.kind != "varlen":
            return "it is compared with varlen batches only"
        return equal_length_case(case)

    def scratch_bytes(self, case: Case) -> int:
        served = self._served(case)
        return self.dispatcher.scratch_bytes(served) + served.array_bytes

    def scale(self, case: Case) -> float:
        return case.flops() / self._served(case).flops()

    def inputs_of(self, inputs: Inputs) -> Inputs:
        return random_inputs(self._served(inputs.case), 0, on_gpu=self.on_gpu)

    def prepare(self, inputs: Inputs) -> Prepared:
        dense_case = self._served(inputs.case)
        made = super().prepare(inputs)
        return dataclasses.replace(
            made,
            note=f"flash_attention of {dense_case.batch} x {dense_case.seqlen_q}; its times are "
            f"multiplied by {made.scale:.4f}, for the FLOPs of the case",
        )


def cpu_plan(case: Case, tile: TileFields) -> Plan:
    """Return the CPU backend's plan of a case; raise ValueError if it does not accept the tile."""
    problem, request = case.problem(), freeze_tile(tile)
    if case.is_backward:
        default = cpu_backward.default_tile(problem)
        chosen = dataclasses.replace(default, **tile_fields(Tile, request))
        schedule = Schedule((), workspace=cpu_backward.scratch_bytes(problem, chosen))
        plan = make_cpu_plan(problem, chosen, gpu_unavailable())
        return _within_limit(dataclasses.replace(plan, schedule=schedule))
    chosen = choose_cpu_tile(problem, request)
    # As in the backend, the tile is clipped to the query rows of a KV head's group and to the keys.
    rows = case.seqlen_q * (case.heads_q // case.heads_kv)
    clipped = Tile(min(chosen.Br, max(rows, 1)), min(chosen.Bc, max(case.seqlen_k, 1)))
    return _within_limit(make_cpu_plan(problem, clipped, gpu_unavailable()))


def _within_limit(plan: Plan) -> Plan:
    """Return the plan; raise ValueError if it needs more scratch than a worker may use."""
    if plan.workspace > cpu_forward.SCRATCH_LIMIT:
        raise ValueError(
            f"tile {plan.tile} needs {plan.workspace / 2**20:.1f} MiB of scratch per worker, more "
            f"than {cpu_forward.SCRATCH_LIMIT / 2**20:.1f} MiB; choose a smaller Br or Bc"
        )
    return plan


class Formula(Provider):
    """`attention_naive`: matmul, softmax, matmul on the whole score matrix.

    16-bit inputs are computed in float32, because NumPy has no 16-bit matmul. Gradients are
    computed by `backward_naive`: these products and four more, one head after another.
    """

    def __init__(self, name: str, *, on_gpu: bool) -> None:
        self.name = name
        self.on_gpu = on_gpu

    def missing(self) -> str | None:
        return super().missing() or (check.why_no_matmul() if self.on_gpu else None)

    def why_not(self, case: Case) -> str | None:
        return self.missing() or ("the plain formula does not append" if case.append else None)

    def scratch_bytes(self, case: Case) -> int:
        # These are scores, a temporary of their size in softmax, and rounded probabilities, if any.
        itemsize = 8 if case.dtype == "float64" else 4
        if case.is_backward:
            of_chunk = min(case.seqlen_q * case.seqlen_k, CHUNK_BYTES // 8 + case.seqlen_k)
            # The last term is for the gradients before they are rounded.
            return _GRADIENT_TEMPORARIES * itemsize * of_chunk + 2 * case.result_bytes
        rounded = 0 if case.dtype in ("float32", "float64") else 2 + itemsize
        changed = itemsize if case.mods else 0
        return case.scores * (2 * itemsize + rounded + changed)

    def prepare(self, inputs: Inputs) -> Prepared:
        arrays = inputs.gpu if self.on_gpu else inputs.host
        case = inputs.case
        scope: Callable[[], AbstractContextManager[Any]] = (
            contextlib.nullcontext if self.on_gpu else _as_many_threads_as_ours
        )
        if case.is_backward:
            naive = backward_naive if case.is_dense else backward_varlen_naive
            return Prepared(inputs.gradient_call(naive, on_gpu=self.on_gpu), scope=scope)
        modifications = inputs.modifications(on_gpu=self.on_gpu)
        if case.is_dense:
            arguments = {**case.arguments, **modifications}
            return Prepared(functools.partial(attention_naive, *arrays, **arguments), scope=scope)

        def one_by_one() -> Any:
            result = [
                attention_naive(
                    *sequence_of(case, arrays, inputs.more, batch),
                    causal=case.causal,
                    softmax_scale=case.softmax_scale,
                    **restricted(
                        modifications,
                        case.mods,
                        batch=batch,
                        keys=case.key_lengths[batch],
                        rows=rows_in_call(case, inputs.more, batch),
                    ),
                )
                for batch in range(case.batch)
            ]
            if case.is_cached:
                return module.concatenate(result)
            return module.concatenate([out[0] for out in result])

        module: Any = importlib.import_module("cupy") if self.on_gpu else np
        return Prepared(one_by_one, scope=scope, note="one sequence after another")


def _as_many_threads_as_ours() -> AbstractContextManager[Any]:
    """Let BLAS use as many CPUs as the CPU backend, whatever its environment variables say."""
    limits: AbstractContextManager[Any] = threadpool_limits(
        environment.available_cpus(), user_api="blas"
    )
    return limits


# Makers of the library's own providers, which take a forced tile.
_OURS: dict[str, Callable[[TileFields], Provider]] = {
    "cupy_flash": functools.partial(Dispatcher, "cupy_flash", None),
    **{
        f"cupy_flash-{family}": functools.partial(Dispatcher, f"cupy_flash-{family}", family)
        for family in FAMILY_NAMES
    },
    **{f"cupy_flash-page{size}": functools.partial(OnPages, size) for size in PAGE_SIZES},
    **{
        f"cupy_flash-{short}": functools.partial(InEightBits, name)
        for name, short in CACHE_DTYPES.items()
    },
    **{f"cupy_flash-{name}": functools.partial(WithStatistic, name) for name in STATISTICS},
    "cupy_flash-uniform": Uniform,
    "cupy_flash-anew": Anew,
    "cupy_flash-cpu": CpuBackend,
}
_OTHERS: dict[str, Provider] = {
    each.name: each
    for each in (
        Formula("cupy-library", on_gpu=True),
        Formula("numpy-naive", on_gpu=False),
        *torch_providers.ALL,
        torch_flex.FLEX,
        *flash_attention.ALL,
        *flashinfer.ALL,
    )
}


def names() -> tuple[str, ...]:
    """Return the names of all providers, also of those that cannot run here."""
    return (*_OURS, *_OTHERS)


def provider(name: str, tile: TileFields = None) -> Provider:
    """Return a provider by name; `tile` forces the tile of the library's own providers."""
    return _OURS[name](tile) if name in _OURS else _OTHERS[name]


def free_bytes(*, on_gpu: bool) -> int | None:
    """Return the bytes that can still be allocated, or None if the system does not report them."""
    if on_gpu:
        import cupy

        free = int(cupy.cuda.runtime.memGetInfo()[0])
        return free + cupy.get_default_memory_pool().free_bytes() + torch_providers.idle_bytes()
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    result = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(result[1]) * 1024 if result else None


def release_memory() -> None:
    """Free cached device memory, so that every provider starts with the same amount."""
    if gpu_unavailable() is None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        torch_providers.release_memory()
