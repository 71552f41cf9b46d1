"""Run providers on one case: refuse, check, then time in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from . import providers
from .cases import Case
from .check import Check, Coverage
from .inputs import Inputs
from .providers import Prepared, Provider
from .timing import GpuTimer, HostTimer, Spread, Timer, host_microseconds, repeats_within, spread

# Calls whose host time is taken: fewer, within reason, where each keeps the GPU for long.
_HOST_TIME_CALLS = 200
_FEWEST_HOST_TIME_CALLS = 20
_HOST_TIME_SECONDS = 2.0
# A cell on the host that takes more operations than this is first tried on a part of its rows.
_PROBE_FLOPS = 4e9


@dataclass
class Cell:
    """One provider on one case: what came of it."""

    provider: Provider
    case: Case
    reason: str | None = None
    prepared: Prepared | None = None
    max_error: float | None = None
    passed: bool | None = None
    one_call: float = 0.0
    time: Spread | None = None
    host: Spread | None = None
    speedup: float | None = None

    def release(self) -> None:
        """Let go of the inputs that the call holds; the plan stays."""
        if self.prepared:
            self.prepared = dataclasses.replace(self.prepared, call=_gone, to_array=_gone)


@dataclass(frozen=True)
class Settings:
    """How a row is timed."""

    warmup: int
    repeats: int
    cell_seconds: float
    seed: int
    check: bool
    host_time: bool


@dataclass
class Runner:
    """Runs cases one after the other; timers are made once."""

    settings: Settings
    _timers: dict[bool, Timer] = field(default_factory=dict)

    def run(self, inputs: Inputs, chosen: Sequence[Provider]) -> tuple[list[Cell], Coverage | None]:
        """The cells of one case."""
        cells = [Cell(provider, inputs.case) for provider in chosen]
        check = None
        ready = [cell for cell in cells if self._prepare(cell, inputs)]
        if ready and self.settings.check:
            on_gpu = any(cell.provider.on_gpu for cell in ready)
            check = Check(inputs, self.settings.seed, on_gpu=on_gpu)
        for cell in ready:
            self._try(cell, check)
        for on_gpu in (True, False):
            self._time([c for c in ready if c.reason is None and c.provider.on_gpu == on_gpu])
        return cells, check.coverage if check else None

    def _timer(self, provider: Provider) -> Timer:
        if provider.on_gpu not in self._timers:
            self._timers[provider.on_gpu] = GpuTimer() if provider.on_gpu else HostTimer()
        return self._timers[provider.on_gpu]

    def _prepare(self, cell: Cell, inputs: Inputs) -> bool:
        provider, case = cell.provider, cell.case
        cell.reason = provider.why_not(case) or too_large(
            provider.scratch_bytes(case), on_gpu=provider.on_gpu
        )
        if cell.reason is None and not provider.on_gpu:
            cell.reason = self._too_slow_on_host(provider, inputs)
        if cell.reason is None:
            try:
                cell.prepared = provider.prepare(inputs)
            except (ValueError, RuntimeError, MemoryError) as error:
                cell.reason = _first_line(error)
        return cell.reason is None

    def _too_slow_on_host(self, provider: Provider, inputs: Inputs) -> str | None:
        """Time a part of the rows, where the whole would keep the user waiting for a refusal."""
        case = inputs.case
        if case.problem().flops() < _PROBE_FLOPS:
            return None
        part = _first_rows(inputs)
        try:
            prepared = provider.prepare(part)
        except (ValueError, RuntimeError, MemoryError) as error:
            return _first_line(error)
        seconds = self._timer(provider).once(prepared.timed)
        rows, part_rows = (c.batch * c.seqlen_q * c.heads_q for c in (case, part.case))
        return self._over_limit(seconds * rows / part_rows)

    def _over_limit(self, one_call: float) -> str | None:
        s = self.settings
        if repeats_within(s.cell_seconds, one_call, s.warmup, s.repeats):
            return None
        return f"one call takes about {one_call:.2g} s, too long for --cell-seconds"

    def _try(self, cell: Cell, check: Check | None) -> None:
        """The first call, which may compile; its check; and a second one to estimate by."""
        assert cell.prepared is not None
        try:
            with cell.prepared.scope():
                result = cell.prepared.call()
            if check is not None:
                cell.max_error = check.error(cell.prepared.to_array(result))
                cell.passed = cell.max_error <= check.coverage.bound
            del result
            cell.one_call = self._timer(cell.provider).once(cell.prepared.timed)
        except (RuntimeError, MemoryError) as error:
            # Other libraries refuse and memory runs out; anything else is ours to answer for, but
            # no reason to lose the other cells.
            if cell.provider.ours and isinstance(error, RuntimeError):
                click.echo(str(error), err=True)
                cell.passed = False
            cell.reason = _first_line(error)
            return
        cell.reason = self._over_limit(cell.one_call)

    def _time(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        s = self.settings
        timer = self._timer(cells[0].provider)
        calls = [cell.prepared.timed for cell in cells if cell.prepared]
        repeats = [
            repeats_within(s.cell_seconds, cell.one_call, s.warmup, s.repeats) for cell in cells
        ]
        for cell, times in zip(cells, timer.interleaved(calls, s.warmup, repeats), strict=True):
            cell.time = spread(times)
        if s.host_time and cells[0].provider.on_gpu:
            import cupy

            synchronize = cupy.cuda.get_current_stream().synchronize
            for cell, timed in zip(cells, calls, strict=True):
                affordable = int(_HOST_TIME_SECONDS / max(cell.one_call, 1e-6))
                count = min(_HOST_TIME_CALLS, max(_FEWEST_HOST_TIME_CALLS, affordable))
                cell.host = host_microseconds(timed, synchronize, calls=count)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def too_large(needed: int, *, on_gpu: bool) -> str | None:
    free = providers.free_bytes(on_gpu=on_gpu)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def _first_rows(inputs: Inputs) -> Inputs:
    """The first 256 query rows of the heads that share the first key and value head."""
    case = inputs.case
    rows, heads = min(256, case.seqlen_q), case.heads_q // case.heads_kv
    q, k, v = inputs.host
    if case.layout == "bshd":
        q, k, v = q[:1, -rows:, :heads], k[:1, :, :1], v[:1, :, :1]
    else:
        q, k, v = q[:1, :heads, -rows:], k[:1, :1], v[:1, :1]
    offset = case.first_query + case.seqlen_q - rows if case.causal else None
    part = dataclasses.replace(
        case, batch=1, heads_q=heads, heads_kv=1, seqlen_q=rows, q_offset=offset
    )
    return Inputs(part, _host=(q, k, v))


def set_speedups(cells: Sequence[Cell], baseline: Sequence[str]) -> None:
    """Relate the cells of a case to the fastest of the baseline providers."""
    times = [c.time.median for c in cells if c.time and c.provider.name in baseline]
    base = min(times, default=None)
    for cell in cells:
        if base is not None and cell.time and cell.time.median:
            cell.speedup = base / cell.time.median


def _gone(*_: Any) -> Any:
    raise AssertionError("the arrays of this cell were released")
