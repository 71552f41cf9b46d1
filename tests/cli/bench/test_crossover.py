"""`cupy-flash crossover` on providers that take as long as they are told to."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cupy_flash.cli.bench import crossover as crossover_module
from cupy_flash.cli.bench.crossover import Duel, Referee, Series, WorkAhead, all_series, crossover
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs
from cupy_flash.cli.measure.timing import HostTimer, Spread
from cupy_flash.cli.providers import providers
from cupy_flash.cli.providers.providers import Prepared, Provider
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch

H100 = device_for_arch("sm_90")
LENGTHS = (16, 32, 64, 128)
Seconds = Callable[[Case], float]


class Bench:
    """A clock that only fake calls move; they take longer where the host is part of the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.host = 0.0
        self.behind_work = False
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        self.behind_work = True
        yield
        self.behind_work = False

    def timer(self) -> HostTimer:
        return HostTimer(self, lambda _: None)


class Fake(Provider):
    """A provider whose call takes `seconds(case)`."""

    on_gpu = False
    ours = True

    def __init__(self, name: str, bench: Bench, seconds: Seconds) -> None:
        self.name, self.bench, self.seconds = name, bench, seconds

    def why_not(self, case: Case) -> str | None:
        return None

    def scratch_bytes(self, case: Case) -> int:
        return 0

    def prepare(self, inputs: Inputs) -> Prepared:
        plan = make_plan(inputs.case.problem(), H100) if self.name == "cupy_flash" else None

        # Quartiles differ, in the same way for everyone.
        jitter = itertools.cycle([1.0, 1.0, 1.01, 1.04])

        def call() -> None:
            self.bench.log.append(self.name)
            host = 0.0 if self.bench.behind_work else self.bench.host
            self.bench.now += next(jitter) * (self.seconds(inputs.case) + host)

        return Prepared(call, plan=plan)


def case(seqlen: int = 16, **changes: Any) -> Case:
    sizes = {"dtype": "float32", "batch": 1, "heads_q": 16, "heads_kv": 16}
    sizes |= {"head_dim": 64, "head_dim_v": 64}
    return Case(**sizes | {"seqlen_q": seqlen, "seqlen_k": seqlen} | changes)


def by_length(seconds: Callable[[int], float]) -> Seconds:
    return lambda case: seconds(case.seqlen_q)


# Wins below 64: a fixed millisecond, against one that grows.
LIBRARY = by_length(lambda n: n / 16 * 1e-3)
FUSED = by_length(lambda n: 3.5e-3)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Bench:
    """The command finds an H100, on which the providers are the fakes."""
    timings = {"cupy-library": LIBRARY, "cupy_flash": FUSED}
    monkeypatch.setattr(crossover_module, "gpu_unavailable", lambda: None)
    monkeypatch.setattr(crossover_module, "GpuTimer", bench.timer)
    work = SimpleNamespace(late=0)
    monkeypatch.setattr(crossover_module, "WorkAhead", lambda: WithLate(bench.ahead, work))
    monkeypatch.setattr(crossover_module, "random_inputs", lambda case, *_, **__: Inputs(case))
    monkeypatch.setattr(crossover_module, "too_large", lambda *_, **__: None)
    monkeypatch.setattr(providers, "provider", lambda name: Fake(name, bench, timings[name]))
    monkeypatch.setattr(providers, "current_device", lambda: H100)
    return bench


class WithLate:
    """A scope that also says how many calls came late, as `WorkAhead` does."""

    def __init__(self, scope: Callable[[], Any], work: SimpleNamespace) -> None:
        self.scope, self.work = scope, work

    def __call__(self) -> Any:
        return self.scope()

    @property
    def late(self) -> int:
        return int(self.work.late)


def run(*arguments: str, columns: int = 80) -> Result:
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(crossover, arguments, env=environment)


def referee(bench: Bench, theirs: Seconds, ours: Seconds) -> Referee:
    return Referee(
        Fake("cupy-library", bench, theirs),
        Fake("cupy_flash", bench, ours),
        bench.timer(),
        bench.ahead,
        warmup=2,
        repeats=8,
    )


def steady(milliseconds: float, noise: float = 0.0) -> dict[str, Spread]:
    """The same time by both clocks."""
    time = Spread(milliseconds, milliseconds - noise, milliseconds + noise, 20)
    return {"gpu": time, "call": time}


def test_both_are_timed_in_turns_after_warming_up(bench: Bench) -> None:
    referee(bench, LIBRARY, FUSED).duel(Inputs(case()))

    # Each is called once to compile, warmed up twice, then timed in turns by one clock and the
    # other.
    assert bench.log[:2] == ["cupy-library", "cupy_flash"]
    assert bench.log[2:6] == ["cupy-library"] * 2 + ["cupy_flash"] * 2
    assert bench.log[6:] == ["cupy-library", "cupy_flash"] * (2 * 8)


def test_a_duel_lets_go_of_the_arrays(bench: Bench) -> None:
    inputs = Inputs(case())
    gone = weakref.ref(inputs)

    duel = referee(bench, LIBRARY, FUSED).duel(inputs)
    del inputs

    assert duel.plan is not None
    assert gone() is None


def test_gpu_time_leaves_the_host_out_and_call_time_does_not(bench: Bench) -> None:
    bench.host = 5e-3

    duel = referee(bench, lambda _: 1e-3, lambda _: 2e-3).duel(Inputs(case()))

    assert duel.theirs["gpu"].median == pytest.approx(1.0, rel=0.05)
    assert duel.ours["gpu"].median == pytest.approx(2.0, rel=0.05)
    assert duel.theirs["call"].median == pytest.approx(6.0, rel=0.05)
    assert duel.ours["call"].median == pytest.approx(7.0, rel=0.05)
    assert duel.ratio("gpu") == pytest.approx(0.5, rel=0.05)


def test_the_library_wins_only_where_the_quartiles_do_not_overlap() -> None:
    apart = Duel(case(), theirs=steady(1.0, 0.2), ours=steady(1.5, 0.2))
    overlapping = Duel(case(), theirs=steady(1.0, 0.3), ours=steady(1.5, 0.3))

    assert apart.theirs_win("gpu")
    assert not overlapping.theirs_win("gpu")


def series(*winners: bool | None) -> Series:
    """One duel per length: whether the library wins it, or None where it was not timed."""
    duels = [
        Duel(case(n), {}, {}, reason="no memory")
        if wins is None
        else Duel(case(n), steady(1.0), steady(2.0 if wins else 0.5))
        for n, wins in zip(LENGTHS, winners, strict=True)
    ]
    return Series("float32 full", duels)


@pytest.mark.parametrize(
    ("winners", "longest", "text"),
    [
        ((False, False, False, False), None, "never from 16 on"),
        ((True, True, False, False), 32, "up to 32"),
        ((True, False, True, False), 64, "up to 64"),
        ((True, True, True, True), 128, "up to 128 or beyond"),
        ((True, True, True, None), 64, "up to 64 or beyond"),
        ((None, False, False, False), None, "never from 32 on"),
        ((None, None, None, None), None, "not timed"),
    ],
)
def test_the_crossover_is_the_longest_sequence_at_which_the_library_wins(
    winners: tuple[bool | None, ...], longest: int | None, text: str
) -> None:
    assert series(*winners).crossover("gpu") == longest
    assert series(*winners).verdict("gpu") == text


def test_duels_are_put_together_by_head_dim_dtype_and_mask() -> None:
    duels = [
        Duel(case(n, dtype=dtype, head_dim=dim, head_dim_v=dim), steady(1.0), steady(1.0))
        for dtype, dim, n in itertools.product(("float32", "bfloat16"), (128, 32), (64, 16))
    ]

    found = all_series(duels)

    assert [(one.head_dim, one.label) for one in found] == [
        (32, "float32 full"),
        (32, "bfloat16 full"),
        (128, "float32 full"),
        (128, "bfloat16 full"),
    ]
    assert [[duel.case.seqlen_q for duel in one.duels] for one in found] == [[16, 64]] * 4


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("cuBLAS said no\nand more"), "cuBLAS said no"),
        (ValueError("no kernel"), "no kernel"),
    ],
)
def test_a_provider_that_fails_gives_the_duel_its_reason(
    bench: Bench, error: Exception, text: str
) -> None:
    def fail(_: Case) -> float:
        raise error

    duel = referee(bench, fail, FUSED).duel(Inputs(case()))

    assert duel.reason == f"cupy-library: {text}"
    assert duel.ratio("gpu") is None
    assert duel.row()["library_wins_gpu"] is None


def test_memory_that_is_not_there_is_a_reason_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover_module, "too_large", lambda *_, **__: "needs 9 GiB of memory")

    duel = referee(bench, LIBRARY, FUSED).duel(Inputs(case()))

    assert duel.reason == "cupy-library: needs 9 GiB of memory"
    assert bench.log == []


@pytest.mark.usefixtures("fake_gpu")
def test_the_tables_show_both_ratios_and_where_the_library_wins() -> None:
    result = run(
        *("--head-dim", "64", "--dtype", "float32", "--causal", "no"), "--seqlen", "16,32,64,128"
    )

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["16", "0.29*", "0.29*"] in lines
    assert ["32", "0.57*", "0.57*"] in lines
    assert ["64", "1.14", "1.14"] in lines
    assert ["128", "2.29", "2.29"] in lines
    assert ["64", "float32", "full", "up", "to", "32", "up", "to", "32"] in lines
    assert any("loses by GPU time at seqlen 16, 32" in " ".join(pair) for pair in joined(lines))


def joined(lines: list[list[str]]) -> list[list[str]]:
    """Neighbouring lines together: notes are wrapped."""
    return [first + second for first, second in itertools.pairwise(lines)]


@pytest.mark.usefixtures("fake_gpu")
def test_the_host_may_move_the_crossover_of_calls_alone(fake_gpu: Bench) -> None:
    fake_gpu.host = 1.0

    result = run("--head-dim", "64", "--dtype", "float32", "--causal", "no", "--seqlen", "16,64")

    lines = [line.split() for line in result.output.splitlines()]
    # A second of the host's drowns the difference in noise.
    assert ["64", "float32", "full", "up", "to", "16", "never", "from", "16", "on"] in lines


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal_nor_coloured(columns: int) -> None:
    result = run("--seqlen", "16,4096", columns=columns)

    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= columns
    assert "\x1b" not in result.output


@pytest.mark.usefixtures("fake_gpu")
def test_more_combinations_than_fit_beside_each_other_go_into_another_table() -> None:
    result = run("--dtype", "float16,float32,float64", "--head-dim", "64", "--seqlen", "16")

    headings = [line.split() for line in result.output.splitlines() if "seqlen  " in line]
    assert [len(heading) for heading in headings] == [1 + 2 * 4, 1 + 2 * 2]


@pytest.mark.usefixtures("fake_gpu")
def test_a_record_has_a_row_for_each_case_and_the_crossovers(tmp_path: Path) -> None:
    path = tmp_path / "crossover.json"

    result = run("--head-dim", "64,128", "--seqlen", "16,64", "--output", str(path))

    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text(encoding="utf-8"))
    assert len(data["rows"]) == 2 * 2 * 2 * 2
    row = data["rows"][0]
    assert (row["seqlen"], row["head_dim"], row["dtype"]) == (16, 64, "float32")
    assert row["library_wins_gpu"] is True
    assert row["gpu_ratio"] == pytest.approx(1 / 3.5, rel=0.05)
    assert row["cupy_flash_gpu_low_quartile_ms"] <= row["cupy_flash_gpu_ms"]
    assert row["family"]
    assert data["metadata"]["crossover"]["head_dim 128 bfloat16 causal gpu"] == 16


@pytest.mark.usefixtures("fake_gpu")
def test_the_plot_has_a_panel_for_each_head_dim(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "crossover.svg"

    result = run("--head-dim", "32,64,128", "--seqlen", "16,64", "--plot", str(path))

    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    assert [f">head_dim {dim}<" in text for dim in (32, 64, 128)] == [True] * 3
    assert ">bfloat16 causal, call time<" in text


@pytest.mark.usefixtures("fake_gpu")
def test_a_case_too_large_for_memory_is_skipped_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 16 * 64 * 64 * 4 * 4
    monkeypatch.setattr(
        crossover_module,
        "too_large",
        lambda needed, **_: "needs too much memory" if needed > limit else None,
    )

    result = run("--head-dim", "64", "--dtype", "float32", "--seqlen", "64,128")

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["128", "-", "-"] in lines
    assert "not timed: needs too much memory (2 times)" in result.output


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover_module, "gpu_unavailable", lambda: "the driver reports no GPU")

    result = run()

    assert result.exit_code == 1
    assert result.output == (
        "Error: the crossover is measured on a GPU: the driver reports no GPU\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--head-dim", "300"), "expected 1 to 256"),
        (("--dtype", "int8"), "'int8' is not a dtype"),
        (("--seqlen", "0"), "'0' is not a whole number from 1"),
        (("--repeats", "2"), "2 is not in the range x>=3"),
        (("--seed", "-1"), "-1 is not in the range x>=0"),
        (("--batch", "1,2"), "'1,2' is not one whole number from 1"),
        (("--heads", "many"), "'many' is not one whole number from 1"),
        (("--plot", "x.jpg"), "expected one of .png, .svg"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


class FakeStream:
    """Counts passes of work, and says of an event what it is told."""

    def __init__(self, *, done_after_call: bool) -> None:
        self.passes = 0
        self.done_after_call = done_after_call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def memset_async(value: int, size: int, stream: Any) -> None:
            self.passes += 1

        event = SimpleNamespace(record=lambda _: None, done=self.done_after_call)
        cuda = SimpleNamespace(get_current_stream=lambda: self, Event=lambda **_: event)
        buffer = SimpleNamespace(data=SimpleNamespace(memset_async=memset_async))
        fake = SimpleNamespace(cuda=cuda, empty=lambda *_: buffer)
        monkeypatch.setitem(sys.modules, "cupy", fake)


@pytest.mark.parametrize("late", [False, True])
def test_a_call_is_late_if_the_work_before_it_ended_while_the_host_still_launched(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    stream = FakeStream(done_after_call=late)
    stream.install(monkeypatch)
    ahead = WorkAhead()

    with ahead():
        passes_before_the_call = stream.passes

    assert passes_before_the_call == stream.passes > 0
    assert ahead.late == int(late)


@pytest.mark.usefixtures("fake_gpu")
def test_late_calls_are_told(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    work = SimpleNamespace(late=7)
    monkeypatch.setattr(crossover_module, "WorkAhead", lambda: WithLate(bench.ahead, work))

    result = run("--head-dim", "64", "--seqlen", "16")

    assert "7 calls kept the host longer than the work ahead" in result.output


def test_an_interrupt_leaves_the_tables_of_what_was_timed(
    fake_gpu: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duel = Referee.duel

    def interrupted(self: Referee, inputs: Inputs) -> Duel:
        if inputs.case.seqlen_q == 64 and inputs.case.causal:
            raise KeyboardInterrupt
        return duel(self, inputs)

    monkeypatch.setattr(Referee, "duel", interrupted)
    path = tmp_path / "rows.json"
    options = ("--head-dim", "64", "--dtype", "fp32", "--seqlen", "16,64", "--output", str(path))
    result = run(*options)
    data = json.loads(path.read_text(encoding="utf-8"))
    lines = [line.split() for line in result.stdout.splitlines()]

    assert [(row["causal"], row["seqlen"]) for row in data["rows"]] == [
        (False, 16),
        (False, 64),
        (True, 16),
    ]
    assert next(line[-1] for line in lines if line and line[0] == "64") == "-"


def test_a_duel_that_fails_while_it_is_timed_costs_itself_alone(
    fake_gpu: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duel = Referee.duel

    def fails(self: Referee, inputs: Inputs) -> Duel:
        if inputs.case.seqlen_q == 16:
            raise RuntimeError("the GPU fell off the bus\nat some place")
        return duel(self, inputs)

    monkeypatch.setattr(Referee, "duel", fails)
    path = tmp_path / "rows.json"
    options = ("--head-dim", "64", "--dtype", "fp32", "--causal", "no", "--seqlen", "16,64")
    result = run(*options, "--output", str(path))
    first, second = json.loads(path.read_text(encoding="utf-8"))["rows"]

    assert result.exit_code == 0
    assert first["reason"] == "the GPU fell off the bus"
    assert second["gpu_ratio"] is not None
