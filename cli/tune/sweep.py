"""Compile, check and time the tiles of the groups of cases, one group after another."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cupy_flash.gpu.compiler import CUBINS_VARIABLE
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.problem.device import Device
from cupy_flash.problem.tile import Tile

from ..build.build import Builder, Built, Job, write_cubin
from ..cases.inputs import Inputs, random_inputs
from ..cases.workload import Group
from ..measure.check import Check
from ..measure.gradient_check import GradientCheck, check_of
from ..measure.runner import first_line, too_large
from ..measure.timing import GpuTimer, HostTimer, Timed, Timer, spread
from ..providers.providers import release_memory
from .candidates import Candidate, Limits, cpu_candidates, gpu_candidates
from .live import Live
from .race import race, rounds

# The machine code for these two types differs only in the type of instructions. Tiles that are slow
# for one therefore need not be tried for the other.
_OTHER_16BIT_DTYPE = {"float16": "bfloat16", "bfloat16": "float16"}


# Query rows per case on which a tile's result is compared; few, as hundreds of tiles are checked.
_CHECKED_ROWS = 2048


@dataclass(frozen=True)
class Settings:
    """Settings for the timing of tiles."""

    seed: int
    warmup: int
    repeats: int


@dataclass
class Sweep:
    """A group of cases, and the tiles that are tried for it."""

    group: Group
    candidates: list[Candidate]

    @property
    def family(self) -> str:
        """Name of the kernel family, or "cpu"."""
        return self.candidates[0].plan.family

    @property
    def direction(self) -> str:
        """Direction of the cases."""
        return self.candidates[0].plan.problem.direction

    def finalists(self) -> list[Tile]:
        """Return the tiles that went past the first round."""
        return [candidate.tile for candidate in self.candidates if candidate.rounds > 1]


def plan_sweeps(
    groups: Sequence[Group], device: Device | None, family: str | None, limits: Limits
) -> list[Sweep]:
    """Return the sweeps of all groups, on the CPU if `device` is None."""
    return [
        Sweep(
            group,
            gpu_candidates(group.cases, device, family, limits)
            if device
            else cpu_candidates(group.cases, limits),
        )
        for group in groups
    ]


def too_large_for(sweep: Sweep) -> str | None:
    """Return why the arrays of a sweep's cases do not fit the free memory, or None if they do."""
    needed = sum(weighted.case.array_bytes for weighted in sweep.group.cases)
    return too_large(needed, on_gpu=sweep.candidates[0].plan.device is not None)


def other_16bit_class(problem_class: str) -> str | None:
    """Return the same class with the other 16-bit type; None for other types."""
    result = ProblemClass.parse(problem_class)
    if result is None or result.dtype not in _OTHER_16BIT_DTYPE:
        return None
    return str(dataclasses.replace(result, dtype=_OTHER_16BIT_DTYPE[result.dtype]))


def shorten(sweep: Sweep, finalists: Mapping[str, Sequence[Tile]]) -> None:
    """Keep only the tiles that did well for the other 16-bit type, if that was swept before."""
    best = finalists.get(other_16bit_class(sweep.group.problem_class) or "")
    if best:
        sweep.candidates = [c for c in sweep.candidates if c.tile in best or c.is_default]


@dataclass
class Compilation:
    """Compilation of the sweeps' candidates ahead of their use, each unit once."""

    builder: Builder
    folder: Path | None
    max_spills: int
    _futures: dict[str, Future[Built]] = field(default_factory=dict)
    _hashes: dict[str, str] = field(default_factory=dict)

    def start(self, candidates: Sequence[Candidate]) -> None:
        """Submit the candidates' translation units for compilation."""
        for candidate in candidates:
            for plan in candidate.plans:
                job = Job.of(plan)
                if job.unit.text not in self._futures:
                    self._futures[job.unit.text] = self.builder.submit(job)

    def finish(self, candidates: Sequence[Candidate], live: Live) -> None:
        """Wait for the candidates' units; store resources, and drop what fails or spills."""
        self.start(candidates)
        units = {job.unit.text: job for c in candidates for job in map(Job.of, c.plans)}
        waiting = {self._futures[text]: text for text in units}
        for done, future in enumerate(as_completed(waiting), 1):
            text = waiting[future]
            cubin = future.result().cubin
            if cubin is not None and text not in self._hashes:
                self._hashes[text] = hashlib.sha256(cubin.image).hexdigest()
                if self.folder is not None:
                    write_cubin(self.folder, units[text], cubin)
            live.compiled(done, len(waiting))
        for candidate in candidates:
            self._note(candidate)
        self._find_same_binaries(candidates)

    def _note(self, candidate: Candidate) -> None:
        built = [self._futures[plan.unit.text].result() for plan in candidate.plans if plan.unit]
        candidate.resources = built[0].resources
        if errors := [b.error for b in built if b.error]:
            candidate.dropped = "does not compile"
            click.echo(errors[0], err=True)
            return
        spilled = max(b.resources.spill_bytes for b in built if b.resources)
        # The default is never dropped for spills, because the others are compared with it.
        if spilled > self.max_spills and not candidate.is_default:
            candidate.dropped = f"spills {spilled} bytes per thread"

    def _find_same_binaries(self, candidates: Sequence[Candidate]) -> None:
        first: dict[tuple[Any, ...], Candidate] = {}
        # The default candidate comes first, so that it is always timed.
        for candidate in sorted(candidates, key=lambda c: not c.is_default):
            if candidate.dropped is None:
                key = tuple(
                    (self._hashes[plan.unit.text], plan.launches, plan.schedule.section_heads)
                    for plan in candidate.plans
                    if plan.unit
                )
                earlier = first.setdefault(key, candidate)
                candidate.same_binary = earlier if earlier is not candidate else None


@contextlib.contextmanager
def prebuilt_from(folder: Path) -> Iterator[None]:
    """Let the library load kernels from a folder of cubins while the block runs."""
    before = os.environ.get(CUBINS_VARIABLE)
    os.environ[CUBINS_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CUBINS_VARIABLE]
        else:
            os.environ[CUBINS_VARIABLE] = before


CallOf = Callable[[Candidate, int], Callable[[], Any]]
Note = Callable[[Sequence[Candidate]], None]


def measure(sweep: Sweep, settings: Settings, live: Live, note: Note) -> None:
    """Check every candidate that was not dropped, then race those that passed.

    Tiles that an interrupted sweep measured are not measured again. `note` is called with
    candidates as soon as their check or their time is known.
    """
    on_gpu = sweep.candidates[0].plan.device is not None
    cases = [weighted.case for weighted in sweep.group.cases]
    try:
        inputs = [random_inputs(case, settings.seed, on_gpu=on_gpu) for case in cases]
        checks = [
            check_of(each, settings.seed, on_gpu=on_gpu, most_rows=_CHECKED_ROWS) for each in inputs
        ]
    except MemoryError as error:
        for candidate in sweep.candidates:
            candidate.dropped = first_line(error)
        click.echo(f"{sweep.group.problem_class}: {first_line(error)}", err=True)
        release_memory()
        return
    timer: Timer = GpuTimer() if on_gpu else HostTimer()
    call_of = functools.partial(_call, inputs, on_gpu)
    time_all(sweep.candidates, call_of, checks, timer, settings, live, note)
    release_memory()


def _call(
    inputs: Sequence[Inputs], on_gpu: bool, candidate: Candidate, case: int
) -> Callable[[], Any]:
    return inputs[case].call(
        on_gpu=on_gpu,
        backend="auto" if on_gpu else "cpu",
        family=candidate.plan.family,
        tile=dataclasses.asdict(candidate.tile),
    )


def time_all(
    candidates: Sequence[Candidate],
    call_of: CallOf,
    checks: Sequence[Check | GradientCheck],
    timer: Timer,
    settings: Settings,
    live: Live,
    note: Note,
) -> None:
    """Check the candidates that were not dropped, and race those that passed."""
    running = [c for c in candidates if c.dropped is None and c.same_binary is None]
    for done, candidate in enumerate(running, 1):
        if candidate.max_error is None:
            _check(candidate, call_of, checks)
            note([candidate])
        live.checked(done, len(running))
    passed = [c for c in running if c.dropped is None and not c.failed]
    cases = range(len(checks))

    def time_lot(lot: Sequence[Candidate], repeats: int) -> None:
        calls = [Timed(call_of(candidate, case)) for candidate in lot for case in cases]
        times = iter(timer.interleaved(calls, settings.warmup, [repeats] * len(calls)))
        for candidate in lot:
            candidate.medians_ms = [spread(next(times)).median for _ in cases]

    def advance(lot: Sequence[Candidate]) -> None:
        note(lot)
        live.timed(lot)

    race(passed, rounds(settings.repeats), time_lot, advance)
    for candidate in candidates:
        if candidate.same_binary is not None:
            candidate.take(candidate.same_binary.result)


def _check(candidate: Candidate, call_of: CallOf, checks: Sequence[Check | GradientCheck]) -> None:
    errors = []
    for case, check in enumerate(checks):
        try:
            errors.append(check.error(call_of(candidate, case)()))
        except (RuntimeError, MemoryError) as error:
            candidate.dropped = first_line(error)
            return
        candidate.failed |= not errors[-1] <= check.coverage.bound
    candidate.max_error = max(errors)
