"""Run providers on one case: refuse what cannot run, check results, then time calls alternately."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from ..cases.cases import Case
from ..cases.inputs import Inputs
from ..cases.sequences import sequence_of
from ..providers import providers
from ..providers.contract import Prepared, Provider
from .check import Check, Coverage
from .gradient_check import GradientCheck, check_of
from .timing import (
    GpuTimer,
    HostTimer,
    Spread,
    Timed,
    Timer,
    call_milliseconds,
    host_microseconds,
    repeats_within,
    spread,
)

# Largest and smallest number of calls whose host time is measured, and a limit of their total time,
# which reduces the number of long calls.
_HOST_TIME_CALLS = 200
_FEWEST_HOST_TIME_CALLS = 20
_HOST_TIME_SECONDS = 2.0
# A cell on the CPU with more operations than this is first tried on a part of its rows and heads,
# with about this many. That takes a few tenths of a second, enough to keep several cores busy.
_PROBE_FLOPS = 4e9
_PROBE_ROWS = 1024
# Factors by which an estimate may be too long: an estimate from a part of the case, and one from
# another case with the same head_dim. A case is refused only if the estimate divided by its factor
# is over the limit.
_PART_MARGIN = 2
_CASE_MARGIN = 4
# With at least this many query rows, the FLOP rate is about constant; with fewer, reading K and V
# takes much of the time.
_RATE_ROWS = 256
# Calls with more memory are not captured in a CUDA graph, which would hold that memory. They last
# so long that the host's overhead does not matter.
_GRAPH_BYTES = 1 << 30
# Exceptions by which a provider refuses a case in `prepare`.
_REFUSALS = (ValueError, RuntimeError, MemoryError)
# Exceptions whose message is a sentence. For others, the type is printed before the message.
_PLAIN_ERRORS = (ValueError, RuntimeError, MemoryError, OSError)


@dataclass
class Cell:
    """Result of one provider on one case.

    Attributes
    ----------
    reason
        Reason why the cell was not timed.
    one_call
        Approximate seconds of a call.
    time
        Milliseconds of a call.
    timed_by
        Method of `time`: "graph" is GPU time of replays of a CUDA graph, "events" is GPU time of
        calls, and "clock" is wall time of calls on the CPU.
    call
        Wall time in milliseconds of a call from an idle GPU to its end; None on the CPU.
    peak_bytes
        Peak memory of a call in addition to its inputs.
    needs_bytes
        Estimate of that memory, if there was too little.
    coverage
        Extent of the cell's check, if it was checked with inputs of its own.
    """

    provider: Provider
    case: Case
    reason: str | None = None
    prepared: Prepared | None = None
    max_error: float | None = None
    passed: bool | None = None
    one_call: float = 0.0
    time: Spread | None = None
    timed_by: str | None = None
    call: Spread | None = None
    host: Spread | None = None
    speedup: float | None = None
    peak_bytes: int | None = None
    needs_bytes: int | None = None
    coverage: Coverage | None = None

    def release(self) -> None:
        """Release the inputs that the call holds, but keep the plan."""
        if self.prepared:
            self.prepared = dataclasses.replace(
                self.prepared, call=_gone, to_result=_gone, anew=None, inputs=None
            )

    def refuse(self, error: Exception) -> None:
        """Store the reason why the cell is not timed."""
        self.reason = first_line(error)
        if is_out_of_memory(error):
            self.needs_bytes = needed_bytes(self.provider, self.case)

    def fail(self, error: Exception) -> None:
        """Store an error; if the provider is part of this project, its check counts as failed."""
        self.refuse(error)
        if self.provider.ours and not is_out_of_memory(error):
            click.echo(_text(error), err=True)
            self.passed, self.max_error = False, None


@dataclass(frozen=True)
class Settings:
    """Settings for the timing of a row."""

    warmup: int
    repeats: int
    cell_seconds: float
    seed: int
    check: bool
    host_time: bool
    memory: bool = False


@dataclass
class Runner:
    """Runner of one case after another; it keeps its timers and the rates measured on the CPU."""

    settings: Settings
    _timers: dict[bool, Timer] = field(default_factory=dict)
    _rates: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def run(
        self, case: Case, chosen: Sequence[Provider], draw: Callable[[], Inputs | str]
    ) -> tuple[list[Cell], Coverage | None]:
        """Return the cells of one case, and the coverage of its check.

        `draw` returns the inputs, or the reason why there are none. It is not called if every
        provider refuses the case.
        """
        cells = [Cell(provider, case) for provider in chosen]
        check = None
        left = [cell for cell in cells if self._may_run(cell)]
        if not left:
            return cells, None
        inputs = draw()
        if isinstance(inputs, str):
            for cell in left:
                cell.reason = inputs
            return cells, None
        ready = [cell for cell in left if self._prepare(cell, inputs)]
        # The check computes some heads and rows of a call, whose random numbers are others if they
        # are a call of their own.
        if ready and self.settings.check and case.mods.dropout is None:
            on_gpu = any(cell.provider.on_gpu for cell in ready)
            try:
                check = check_of(inputs, self.settings.seed, on_gpu=on_gpu)
            except (RuntimeError, MemoryError) as error:
                for cell in ready:
                    cell.reason = f"no reference to check its result with: {first_line(error)}"
                return cells, None
        for cell in ready:
            self._try(cell, check)
        for on_gpu in (True, False):
            self._time([c for c in ready if c.reason is None and c.provider.on_gpu == on_gpu])
        return cells, check.coverage if check else None

    def _timer(self, provider: Provider) -> Timer:
        if provider.on_gpu not in self._timers:
            self._timers[provider.on_gpu] = GpuTimer() if provider.on_gpu else HostTimer()
        return self._timers[provider.on_gpu]

    def _may_run(self, cell: Cell) -> bool:
        """Return whether a cell may run; refuse it if that can be decided without inputs."""
        try:
            cell.reason = cell.provider.why_not(cell.case)
            if cell.reason is None:
                cell.reason = self._too_slow_by_rate(cell.provider, cell.case, _CASE_MARGIN)
        except Exception as error:
            cell.fail(error)
        return cell.reason is None

    def _prepare(self, cell: Cell, inputs: Inputs) -> bool:
        provider, case = cell.provider, cell.case
        try:
            needed = provider.scratch_bytes(case)
            if reason := too_large(needed, on_gpu=provider.on_gpu):
                cell.reason, cell.needs_bytes = reason, needed_bytes(provider, case)
            if cell.reason is None and not provider.on_gpu:
                cell.reason = self._too_slow_on_host(provider, inputs)
            if cell.reason is None:
                cell.prepared = _prepared(provider, inputs)
        except _Refusal as refusal:
            cell.refuse(refusal.error)
        except Exception as error:
            cell.fail(error)
        return cell.reason is None

    def _too_slow_on_host(self, provider: Provider, inputs: Inputs) -> str | None:
        """Time a part of the rows if the whole may take long; return why to refuse it, or None."""
        case = inputs.case
        if case.flops() < _PROBE_FLOPS or _rate_key(provider, case) in self._rates:
            return None
        part = _part(inputs)
        if not case.is_dense and provider.why_not(part.case):
            return None
        prepared = _prepared(provider, part)
        seconds = self._timer(provider).once(prepared.timed)
        self._learn(provider, part.case, seconds)
        return self._too_slow_by_rate(provider, case, _PART_MARGIN)

    def _too_slow_by_rate(self, provider: Provider, case: Case, margin: int) -> str | None:
        """Return a reason to refuse the case by a rate that was measured before, or None."""
        rate = self._rates.get(_rate_key(provider, case))
        if rate is None:
            return None
        return self._over_limit(provider, case.flops() / rate, margin)

    def _learn(self, provider: Provider, case: Case, seconds: float) -> None:
        """Store the best rate on the CPU, so that estimates are rather too short than too long."""
        flops = case.flops()
        if provider.on_gpu or not flops or not seconds:
            return
        key = _rate_key(provider, case)
        self._rates[key] = max(flops / seconds, self._rates.get(key, 0.0))

    def _repeats(self, provider: Provider, one_call: float) -> int:
        """Return the number of timed repeats; 0 if --cell-seconds allows too few."""
        s = self.settings
        one_repeat = one_call + self._timer(provider).pause
        return repeats_within(s.cell_seconds, one_repeat, s.warmup, s.repeats)

    def _over_limit(self, provider: Provider, one_call: float, margin: int = 1) -> str | None:
        """Return why a call is too long to be repeated, or None if it is not.

        `one_call` may be an estimate that is too long by the factor `margin`.
        """
        if self._repeats(provider, one_call / margin):
            return None
        pause = self._timer(provider).pause
        after = f" after a pause of {_seconds(pause)}" if pause > one_call else ""
        return f"one call takes about {_seconds(one_call)}{after}, too long for --cell-seconds"

    def _try(self, cell: Cell, check: Check | GradientCheck | None) -> None:
        """Make the first call, which may compile; check its result; measure its time and memory."""
        prepared = cell.prepared
        assert prepared is not None
        try:
            if check is not None and prepared.inputs is not None:
                own = prepared.inputs
                check = check_of(own, self.settings.seed, on_gpu=cell.provider.on_gpu)
                cell.coverage = check.coverage
            with prepared.scope():
                result = prepared.call()
            if check is not None and (check.coverage.rows or not check.coverage.not_finite):
                cell.max_error = check.error(prepared.to_result(result))
                cell.passed = cell.max_error <= check.coverage.bound
            del result
            cell.one_call = self._timer(cell.provider).once(prepared.timed)
            if cell.case.flops() >= _PROBE_FLOPS:
                self._learn(cell.provider, cell.case, cell.one_call)
            cell.reason = self._over_limit(cell.provider, cell.one_call)
            if cell.reason is None:
                cell.peak_bytes = cell.provider.peak_bytes(prepared)
        except Exception as error:
            # Other libraries refuse with any exception. An error of this library must not prevent
            # the timing of other cells, either.
            cell.fail(error)

    def _time(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        on_gpu = cells[0].provider.on_gpu
        timer = self._timer(cells[0].provider)
        # The graphs, and with them their memory, are freed when this returns.
        self._time_alternately(timer, cells, self._replays(cells) if on_gpu else {})
        if not on_gpu:
            return
        for cell in cells:
            if cell.prepared is None or cell.time is None:
                continue
            try:
                cell.call = call_milliseconds(timer, cell.prepared.timed, cell.one_call).scaled(
                    cell.prepared.scale
                )
                if self.settings.host_time:
                    cell.host = _host_time(cell.prepared.timed, cell.one_call)
            except Exception as error:
                cell.time = None
                cell.fail(error)

    def _replays(self, cells: Sequence[Cell]) -> dict[int, Timed]:
        """Return the calls that a CUDA graph can replay, by the index of their cell."""
        result = {}
        for index, cell in enumerate(cells):
            if cell.prepared is None or (cell.peak_bytes or 0) >= _GRAPH_BYTES:
                continue
            # A call that cannot be captured is timed without a graph.
            with contextlib.suppress(Exception):
                if (replay := cell.provider.replayed(cell.prepared)) is not None:
                    result[index] = replay
        return result

    def _time_alternately(
        self, timer: Timer, cells: Sequence[Cell], replays: Mapping[int, Timed]
    ) -> None:
        """Time the cells alternately; if a call fails, drop its cell, and restart the others."""
        s = self.settings
        calls = []
        for index, cell in enumerate(cells):
            if cell.prepared is not None and cell.reason is None:
                calls.append((cell, _noting_failure(cell, replays.get(index, cell.prepared.timed))))
                kind = "graph" if index in replays else "events"
                cell.timed_by = kind if cell.provider.on_gpu else "clock"
        while calls:
            repeats = [self._repeats(cell.provider, cell.one_call) for cell, _ in calls]
            try:
                times = timer.interleaved([timed for _, timed in calls], s.warmup, repeats)
            except Exception as error:
                if not any(cell.reason for cell, _ in calls):
                    # The GPU reports some errors late, so it is unknown which call failed.
                    for cell, _ in calls:
                        cell.fail(error)
                calls = [(cell, timed) for cell, timed in calls if cell.reason is None]
                continue
            for (cell, _), taken in zip(calls, times, strict=True):
                assert cell.prepared is not None
                cell.time = spread(taken).scaled(cell.prepared.scale)
            return


def _noting_failure(cell: Cell, timed: Timed) -> Timed:
    """Return the call with a wrapper that stores the reason of a failure in the cell."""

    def call() -> Any:
        try:
            return timed.call()
        except Exception as error:
            cell.fail(error)
            raise

    return dataclasses.replace(timed, call=call)


def _host_time(timed: Timed, one_call: float) -> Spread:
    import cupy

    affordable = int(_HOST_TIME_SECONDS / max(one_call, 1e-6))
    count = min(_HOST_TIME_CALLS, max(_FEWEST_HOST_TIME_CALLS, affordable))
    return host_microseconds(timed, cupy.cuda.get_current_stream().synchronize, calls=count)


class _Refusal(Exception):
    """Refusal of a case by a provider's `prepare`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _prepared(provider: Provider, inputs: Inputs) -> Prepared:
    try:
        return provider.prepare(inputs)
    except _REFUSALS as error:
        raise _Refusal(error) from error


def needed_bytes(provider: Provider, case: Case) -> int:
    """Estimate the memory that a call needs in addition to its inputs."""
    return provider.scratch_bytes(case) + case.result_bytes


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, which CUDA and torch report by their own RuntimeErrors."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower()


def _text(error: Exception) -> str:
    kind, text = type(error).__name__, str(error).strip()
    if isinstance(error, _PLAIN_ERRORS):
        return text or kind
    return f"{kind}: {text}" if text else kind


def first_line(error: Exception) -> str:
    return _text(error).splitlines()[0]


def too_large(needed: int, *, on_gpu: bool) -> str | None:
    free = providers.free_bytes(on_gpu=on_gpu)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def _rate_key(provider: Provider, case: Case) -> tuple[Any, ...]:
    """Return the key of the cases that a provider computes at about the same rate."""
    rows = min(case.seqlen_q, _RATE_ROWS)
    kind = provider.name, case.direction, case.dtype
    return *kind, case.head_dim, case.head_dim_v, case.mods, rows


def _seconds(value: float) -> str:
    """Return seconds with two significant digits and without an exponent."""
    digits = np.format_float_positional(
        value, precision=2, unique=False, fractional=False, trim="-"
    )
    return f"{digits} s"


def _part(inputs: Inputs) -> Inputs:
    """Return the inputs of the last query rows of some heads, with at most the work of a probe."""
    if not inputs.case.is_dense:
        inputs = _longest_alone(inputs)
    case = inputs.case
    rows, group = min(_PROBE_ROWS, case.seqlen_q), case.heads_q // case.heads_kv
    offset = case.first_query + case.seqlen_q - rows if case.causal or case.mods else None
    one = dataclasses.replace(
        case, batch=1, heads_q=group, heads_kv=1, seqlen_q=rows, q_offset=offset
    )
    kv = min(case.heads_kv, max(1, int(_PROBE_FLOPS / one.flops())))
    part = dataclasses.replace(one, heads_q=kv * group, heads_kv=kv)
    q, k, v = inputs.host
    if case.layout == "bshd":
        q, k, v = q[:1, -rows:, : kv * group], k[:1, :, :kv], v[:1, :, :kv]
    else:
        q, k, v = q[:1, : kv * group, -rows:], k[:1, :kv], v[:1, :kv]
    return Inputs(part, _host=(q, k, v))


def _longest_alone(inputs: Inputs) -> Inputs:
    """Return the inputs of the longest sequence as a batch of one."""
    case = inputs.case
    batch = max(range(case.batch), key=case.key_lengths.__getitem__)
    alone = case.as_dense(1, case.query_lengths[batch], case.key_lengths[batch])
    return Inputs(alone, _host=sequence_of(case, inputs.host, inputs.more, batch))


def set_speedups(cells: Sequence[Cell], baseline: Sequence[str]) -> None:
    """Set the speedup of each cell of a case, relative to the fastest baseline provider."""
    times = [c.time.median for c in cells if c.time and c.provider.name in baseline]
    base = min(times, default=None)
    for cell in cells:
        if base is not None and cell.time and cell.time.median:
            cell.speedup = base / cell.time.median


def _gone(*_: Any) -> Any:
    raise AssertionError("the arrays of this cell were released")
