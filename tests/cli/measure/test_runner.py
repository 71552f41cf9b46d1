"""Runs of the cells of a case: what is timed, in which order, and what happens on errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.measure.runner import Cell, Runner, Settings
from cupy_flash.cli.measure.timing import Timed, alternate, call_milliseconds
from cupy_flash.cli.providers.contract import Prepared, Provider
from cupy_flash.cli.providers.providers import provider as provider_of_ours

CASE = Case("float32", 1, 113, 203, 2, 2, 24, 24)
OUTPUT_BYTES = 113 * 2 * 24 * 4
GIB = 1 << 30


class FakeTimer:
    """Fake timer that runs each call, and reports 3 ms for it."""

    pause = 0.0

    def __init__(self, one_call: float = 1e-3) -> None:
        self.one_call = one_call
        self.onces = 0
        self.orders: list[list[Any]] = []

    def once(self, timed: Timed) -> float:
        self.onces += 1
        with timed.scope():
            timed.call()
        return self.one_call

    def interleaved(
        self, calls: Sequence[Timed], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        order: list[Any] = []

        def measure(timed: Timed) -> float:
            with timed.scope():
                order.append(timed.call())
            return 3.0

        self.orders.append(order)
        return alternate(measure, calls, repeats)


class FakeProvider(Provider):
    """Provider on a fake GPU."""

    on_gpu = True

    def __init__(self, name: str = "theirs", call: Callable[[], Any] | None = None) -> None:
        self.name = name
        self.call = call or (lambda: "call")
        self.ours = name.startswith("cupy_flash")
        self.replay: Timed | None = None
        self.peak = 4096

    def why_not(self, case: Case) -> str | None:
        return None

    def scratch_bytes(self, case: Case) -> int:
        return 1000

    def prepare(self, inputs: Any) -> Prepared:
        return Prepared(self.call)

    def replayed(self, prepared: Prepared) -> Timed | None:
        return self.replay

    def peak_bytes(self, prepared: Prepared) -> int:
        return self.peak


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_flash.cli.providers.providers.free_bytes", lambda *, on_gpu: 80 * GIB)


SETTINGS = Settings(warmup=3, repeats=5, cell_seconds=20.0, seed=0, check=False, host_time=False)


draw = functools.partial(random_inputs, CASE, 0, on_gpu=False)


def run(*chosen: Provider, timer: FakeTimer | None = None, check: bool = False) -> list[Cell]:
    settings = dataclasses.replace(SETTINGS, check=check)
    return Runner(settings, {True: timer or FakeTimer()}).run(CASE, chosen, draw)[0]


def failing(error: BaseException, after: int = 0) -> Callable[[], Any]:
    """Return a call that raises `error` after `after` successful calls."""
    left = after

    def call() -> str:
        nonlocal left
        left -= 1
        if left < 0:
            raise error
        return "call"

    return call


def test_a_call_that_can_be_captured_is_timed_by_its_replay() -> None:
    captured, called = FakeProvider("captured"), FakeProvider("called")
    captured.replay = Timed(lambda: "replay")
    timer = FakeTimer()
    first, second = run(captured, called, timer=timer)

    assert (first.timed_by, second.timed_by) == ("graph", "events")
    assert timer.orders == [["replay", "call"] * 5]


def test_a_call_that_takes_a_gibibyte_is_not_captured() -> None:
    large = FakeProvider()
    large.replay = Timed(lambda: "replay")
    large.peak = GIB
    (cell,) = run(large)

    assert cell.timed_by == "events"
    assert cell.time is not None


def test_a_failure_to_capture_leaves_the_call_to_be_timed() -> None:
    class Uncapturable(FakeProvider):
        def replayed(self, prepared: Prepared) -> Timed | None:
            raise AttributeError("no graphs")

    (cell,) = run(Uncapturable())

    assert cell.timed_by == "events"
    assert cell.reason is None


def test_graphs_are_gone_when_the_case_has_run() -> None:
    class Replay:
        def __call__(self) -> str:
            return "replay"

    class Capturing(FakeProvider):
        graph: weakref.ref[Replay]

        def replayed(self, prepared: Prepared) -> Timed | None:
            replay = Replay()
            self.graph = weakref.ref(replay)
            return Timed(replay)

    provider = Capturing()
    gc.disable()
    try:
        (cell,) = run(provider)
        gone = provider.graph() is None
    finally:
        gc.enable()

    assert cell.timed_by == "graph"
    assert gone


def test_the_time_of_a_call_is_a_median_of_calls_from_an_idle_gpu() -> None:
    timer = FakeTimer(one_call=2e-3)
    (cell,) = run(FakeProvider(), timer=timer)

    assert cell.call is not None
    assert cell.call.median == pytest.approx(2.0)
    assert timer.onces == 1 + 20


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 20), (0.05, 20), (0.25, 4), (7.0, 1)])
def test_long_calls_are_timed_for_a_second_or_once(seconds: float, calls: int) -> None:
    timer = FakeTimer(seconds)
    call_milliseconds(timer, Timed(lambda: None), seconds)

    assert timer.onces == calls


def test_on_the_cpu_the_time_is_that_of_the_call_by_the_clock() -> None:
    provider = FakeProvider(call=lambda: np.zeros((1, 113, 2, 24), np.float32))
    provider.on_gpu = False
    cell = on_clock(provider, warmup=0, repeats=3)

    assert cell.timed_by == "clock"
    assert cell.time is not None
    assert cell.call is None


def on_clock(provider: Provider, **settings: Any) -> Cell:
    """Run a provider on the host, and return its cell."""
    runner = Runner(dataclasses.replace(SETTINGS, **settings), {False: FakeTimer()})
    return runner.run(CASE, [provider], draw)[0][0]


class OddError(Exception):
    """Exception type that no module knows."""


ERRORS = [
    (RuntimeError("no kernel\nfor this"), "no kernel"),
    (ValueError("head_dim is 24"), "head_dim is 24"),
    (NotImplementedError("not on this GPU"), "not on this GPU"),
    (OSError("libcudnn.so.9: cannot open"), "libcudnn.so.9: cannot open"),
    (ImportError("no module x"), "ImportError: no module x"),
    (TypeError("unexpected argument 'scale'"), "TypeError: unexpected argument 'scale'"),
    (AttributeError("no sdpa_kernel"), "AttributeError: no sdpa_kernel"),
    (KeyError("sm_90"), "KeyError: 'sm_90'"),
    (AssertionError(), "AssertionError"),
    (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    (StopIteration(), "StopIteration"),
    (subprocess.TimeoutExpired(["nvcc"], 60), "TimeoutExpired: Command '['nvcc']' timed out"),
    (OddError("strange"), "OddError: strange"),
]
OUT_OF_MEMORY = [(MemoryError("no room"), "no room"), (MemoryError(), "MemoryError")]


def kinds(errors: Sequence[tuple[Exception, str]]) -> list[str]:
    return [type(error).__name__ for error, _ in errors]


@pytest.mark.parametrize("calls_before", [0, 1, 2, 3, 7, 10])
@pytest.mark.parametrize(
    ("error", "says"), ERRORS + OUT_OF_MEMORY, ids=kinds(ERRORS + OUT_OF_MEMORY)
)
def test_whatever_a_call_raises_and_whenever_its_cell_says_why_and_the_others_are_timed(
    error: Exception, says: str, calls_before: int
) -> None:
    # The runner makes one trial call, one to estimate, 5 interleaved, then calls on an idle GPU.
    broken = FakeProvider("broken", failing(error, calls_before))
    cell, other = run(broken, FakeProvider())

    assert cell.reason is not None
    assert cell.reason.startswith(says)
    assert cell.time is None
    assert other.reason is None
    assert other.time is not None
    assert other.time.repeats == 5


@pytest.mark.parametrize("method", ["why_not", "scratch_bytes", "prepare", "peak_bytes"])
@pytest.mark.parametrize(("error", "says"), ERRORS, ids=kinds(ERRORS))
def test_whatever_else_of_a_provider_fails_its_cell_says_why(
    error: Exception, says: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    provider = FakeProvider()
    monkeypatch.setattr(provider, method, broken)
    cell, other = run(provider, FakeProvider())

    assert cell.reason is not None
    assert cell.reason.startswith(says)
    assert other.time is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_who_wants_to_end_the_run_ends_it(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(FakeProvider(call=failing(error)))


def test_an_error_that_the_gpu_reports_late_costs_all_who_were_timed_with_it() -> None:
    class Late(FakeTimer):
        def interleaved(self, *_: object) -> list[list[float]]:
            raise RuntimeError("an illegal memory access was encountered")

    cells = run(FakeProvider("one"), FakeProvider("two"), timer=Late())

    assert {cell.reason for cell in cells} == {"an illegal memory access was encountered"}


def test_a_failure_of_ours_counts_as_a_failed_check_and_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = (failing(TypeError("a defect")) for _ in range(2))
    ours, theirs = run(*map(FakeProvider, ("cupy_flash", "theirs"), failed))

    assert ours.passed is False
    assert theirs.passed is None
    assert capsys.readouterr().err == "TypeError: a defect\n"


def test_a_call_of_ours_that_fails_after_its_check_has_a_reason_and_no_error() -> None:
    calls = iter([np.zeros((1, 113, 2, 24), np.float32)])
    ours = FakeProvider("cupy_flash", lambda: next(calls))
    ours.on_gpu = False
    cell = on_clock(ours, check=True)

    assert cell.passed is False
    assert cell.max_error is None
    assert cell.reason == "StopIteration"


def test_a_refusal_of_ours_is_no_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such tile")

    ours = FakeProvider("cupy_flash")
    monkeypatch.setattr(ours, "prepare", refuse)
    (cell,) = run(ours)

    assert cell.reason == "no such tile"
    assert cell.passed is None


@pytest.mark.parametrize(
    "error", [MemoryError("out of memory allocating"), RuntimeError("CUDA out of memory. Tried")]
)
def test_where_memory_runs_out_that_is_nobodys_fault_and_the_need_is_kept(error: Exception) -> None:
    (cell,) = run(FakeProvider("cupy_flash", failing(error)))

    assert cell.passed is None
    assert cell.needs_bytes == 1000 + OUTPUT_BYTES


def test_a_case_that_does_not_fit_memory_keeps_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cupy_flash.cli.providers.providers.free_bytes", lambda *, on_gpu: 999)
    (cell,) = run(FakeProvider())

    assert cell.reason is not None
    assert "GiB of memory" in cell.reason
    assert cell.needs_bytes == 1000 + OUTPUT_BYTES


def test_without_memory_for_the_reference_the_case_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("cupy_flash.cli.measure.runner.check_of", no_room)
    (cell,) = run(FakeProvider(), check=True)

    assert cell.reason == "no reference to check its result with: no room"
    assert cell.time is None


def test_scopes_are_left_after_a_failure() -> None:
    entered = 0

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        nonlocal entered
        entered += 1
        try:
            yield
        finally:
            entered -= 1

    class Scoped(FakeProvider):
        def prepare(self, inputs: Any) -> Prepared:
            return Prepared(self.call, scope=scope)

    for calls_before in (0, 1, 4):
        run(Scoped(call=failing(RuntimeError("no"), calls_before)), FakeProvider())

    assert entered == 0


# A case of 4.3 GFLOP: large enough that the runner tries a part of it first.
LONG = Case("float32", 2, 1024, 1024, 8, 4, 64, 64, layout="bhsd")


class HostProvider(FakeProvider):
    """Provider on the host that records the cases which it prepares."""

    on_gpu = False

    def __init__(self, name: str = "theirs") -> None:
        super().__init__(name)
        self.seen: list[Case] = []

    def prepare(self, inputs: Any) -> Prepared:
        # The inputs have the shapes of their case.
        batch, seqlen, heads, dim = zip(*inputs.case.bshd_shapes, strict=True)
        order = (batch, heads, seqlen) if inputs.case.layout == "bhsd" else (batch, seqlen, heads)
        assert [x.shape for x in inputs.host] == list(zip(*order, dim, strict=True))
        self.seen.append(inputs.case)
        return super().prepare(inputs)


def on_host(one_call: float, **settings: Any) -> Runner:
    """Return a runner whose timer reports `one_call` seconds for any call."""
    settings = {"warmup": 0, "cell_seconds": 1.0} | settings
    return Runner(dataclasses.replace(SETTINGS, **settings), {False: FakeTimer(one_call)})


def reason(runner: Runner, provider: Provider, case: Case) -> str | None:
    inputs = functools.partial(random_inputs, case, 0, on_gpu=False)
    return runner.run(case, [provider], inputs)[0][0].reason


def never_drawn() -> Inputs:
    raise AssertionError("inputs were drawn")


def test_a_case_that_everyone_refuses_costs_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = FakeProvider()
    monkeypatch.setattr(provider, "why_not", lambda case: "not here")
    ((cell,), _) = Runner(SETTINGS).run(CASE, [provider], never_drawn)

    assert cell.reason == "not here"


def test_inputs_that_cannot_be_had_are_the_reason_of_those_who_would_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = FakeProvider("refusing")
    monkeypatch.setattr(refusing, "why_not", lambda case: "not here")
    cells, _ = Runner(SETTINGS).run(CASE, [refusing, FakeProvider()], lambda: "no inputs")

    assert [cell.reason for cell in cells] == ["not here", "no inputs"]


def test_a_long_case_on_the_host_is_tried_on_rows_of_several_heads() -> None:
    provider = HostProvider()
    tried = dataclasses.replace(LONG, batch=1, seqlen_q=1024)
    said = reason(on_host(100.0), provider, dataclasses.replace(LONG, batch=4))

    assert provider.seen == [tried]
    assert said == "one call takes about 400 s, too long for --cell-seconds"


def test_the_part_of_a_causal_case_is_its_last_rows() -> None:
    provider = HostProvider()
    case = Case("float32", 1, 4096, 4999, 2, 1, 64, 64, causal=True)
    reason(on_host(100.0), provider, case)

    assert [(part.seqlen_q, part.first_query) for part in provider.seen] == [(1024, 4999 - 1024)]


def test_a_provider_whose_rate_is_known_is_refused_without_inputs_or_a_call() -> None:
    runner, provider = on_host(100.0), HostProvider()
    reason(runner, provider, LONG)
    calls = len(provider.seen)
    longer = dataclasses.replace(LONG, seqlen_q=4096, seqlen_k=4096)
    ((cell,), _) = runner.run(longer, [provider], never_drawn)

    assert cell.reason == "one call takes about 3200 s, too long for --cell-seconds"
    assert len(provider.seen) == calls


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float64"}, {"head_dim": 128}, {"head_dim_v": 32}, {"seqlen_q": 16, "batch": 128}],
)
def test_a_rate_tells_nothing_of_cases_of_another_kind(change: dict[str, Any]) -> None:
    runner, provider = on_host(100.0), HostProvider()
    reason(runner, provider, LONG)
    calls = len(provider.seen)
    reason(runner, provider, dataclasses.replace(LONG, **change))

    assert len(provider.seen) > calls


def test_a_rate_tells_nothing_of_other_providers() -> None:
    runner, other = on_host(100.0), HostProvider("other")
    reason(runner, HostProvider("one"), LONG)
    reason(runner, other, LONG)

    assert other.seen


@pytest.mark.parametrize(("seconds", "is_timed"), [(0.25, True), (0.5, False)])
def test_a_case_that_may_fit_although_its_part_says_not_is_tried(
    seconds: float, is_timed: bool
) -> None:
    # Three calls must fit in 1 s; the whole case should take twice the time of its tried part.
    provider = HostProvider()
    said = reason(on_host(seconds), provider, LONG)

    assert (said is None) is is_timed
    assert (LONG in provider.seen) is is_timed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(119.6, "120 s"), (1234.5, "1200 s"), (1.84, "1.8 s"), (0.000012, "0.000012 s")],
)
def test_the_seconds_of_a_call_are_told_without_an_exponent(seconds: float, text: str) -> None:
    case = dataclasses.replace(CASE, layout="bhsd")
    said = reason(on_host(seconds, cell_seconds=1e-6), HostProvider(), case)

    assert said == f"one call takes about {text}, too long for --cell-seconds"


@pytest.mark.parametrize("kind", ["varlen", "cache"])
def test_a_long_batch_of_sequences_is_tried_on_the_longest_alone(kind: str) -> None:
    provider = HostProvider()
    lengths = (113, 2048, 700)
    case = Case("float32", 3, 2048, 2048, 8, 4, 64, 64, True, kind=kind, lengths=lengths)
    inputs = random_inputs(case, 0, on_gpu=False)
    ((cell,), _) = on_host(100.0).run(case, [provider], lambda: inputs)
    (tried,) = provider.seen

    assert (tried.kind, tried.batch, tried.seqlen_k) == ("dense", 1, max(lengths))
    # The part consists of the last query rows, which attend to every key.
    assert tried.first_query + tried.seqlen_q == tried.seqlen_k
    assert cell.reason is not None
    assert cell.reason.endswith("too long for --cell-seconds")


def test_a_released_cell_keeps_its_plan_and_calls_nothing_any_more() -> None:
    cell = on_clock(provider_of_ours("cupy_flash-cpu"), warmup=0)
    assert cell.prepared is not None
    tile = cell.prepared.tile
    cell.release()

    assert tile is not None
    assert cell.prepared.tile == tile
    with pytest.raises(AssertionError, match="arrays of this cell were released"):
        cell.prepared.call()
