"""Reports of a GPU's clocks and load, from a fake nvidia-smi."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cupy_flash.cli.measure import gpu_state
from cupy_flash.cli.measure.gpu_state import CpuState, GpuState, busy_before, summary, watched

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the fake program is a shell script")

BUS_ID = "0000:1B:00.0"
NvidiaSmi = Callable[..., Path]
StateAfter = Callable[..., GpuState]
CAPPED, THERMAL, IDLE, SETTING = "0x4", "0x20", "0x1", "0x2"


def sample(clock: int = 1755, reasons: str = "0x0", watts: str = "650.25") -> str:
    """Return a line of nvidia-smi: clocks, power, temperature, reasons for reduced clocks."""
    return f"{clock}, 1980, {watts}, 61, 0x{int(reasons, 16):016x}"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaSmi:
    """Function that puts a fake nvidia-smi on PATH; it logs the arguments of each call."""

    def install(
        samples: Sequence[str] = (), busy: str = "0", pids: Sequence[int] = (1,), status: int = 0
    ) -> Path:
        log = tmp_path / "calls"
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!{sys.executable}\n"
            "import sys, time\n"
            f"open({str(log)!r}, 'a').write(repr(sys.argv[1:]) + '\\n')\n"
            "text = ' '.join(sys.argv)\n"
            f"if {status}: print('Unable to determine the device handle'); sys.exit({status})\n"
            "if 'utilization.gpu' in text:\n"
            f"    print({busy!r})\n"
            "elif 'compute-apps' in text:\n"
            f"    print('\\n'.join(map(str, {list(pids)})))\n"
            "else:\n"
            f"    print('\\n'.join({list(samples)}), flush=True)\n"
            f"    open({str(tmp_path / 'sampled')!r}, 'w').close()\n"
            "    time.sleep(60)\n",
            encoding="utf-8",
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return log

    return install


@pytest.fixture
def state_after(nvidia_smi: NvidiaSmi, tmp_path: Path) -> StateAfter:
    """Function that returns the GPU state of a run that lasts until the samples are printed."""

    def run(samples: Sequence[str], *more: Any) -> GpuState:
        nvidia_smi(samples, *more)
        with watched(BUS_ID) as watch:
            deadline = time.monotonic() + 30
            while not (tmp_path / "sampled").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return watch.state

    return run


def test_clocks_power_and_temperature_are_those_of_the_run(state_after: StateAfter) -> None:
    state = state_after([sample(1980), sample(1755), sample(1665, watts="699.50")])

    assert state.samples == 3
    assert state.sm_clock_mhz == (1755, 1665, 1980)
    assert state.max_sm_clock_mhz == 1980
    assert state.power_w == 699.5
    assert state.temperature_c == 61
    assert state.notes() == ["SM clock 1755 MHz (1665 to 1980) of at most 1980"]


def test_every_question_is_about_the_gpu_of_the_bus_id(
    state_after: StateAfter, tmp_path: Path
) -> None:
    state_after([sample()])
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()

    assert len(calls) == 3
    assert all(f"--id={BUS_ID}" in call for call in calls)


def test_samples_of_an_idle_gpu_do_not_count(state_after: StateAfter) -> None:
    state = state_after([sample(345, IDLE), sample(1980), sample(345, IDLE)])

    assert state.sm_clock_mhz == (1980, 1980, 1980)


def test_a_throttled_gpu_is_flagged_with_the_reason_and_its_share(state_after: StateAfter) -> None:
    state = state_after([sample(reasons=THERMAL), sample(), sample(), sample()])

    warning = "! thermal slowdown in 25% of the run: times are of a throttled GPU"
    assert warning in state.notes()


def test_the_power_cap_is_said_and_is_no_warning(state_after: StateAfter) -> None:
    (note,) = state_after([sample(reasons=CAPPED), sample()]).notes()

    assert note.endswith("at the power cap 50% of the time")
    assert not note.startswith("!")


def test_clocks_that_somebody_set_are_no_throttling() -> None:
    assert summary([sample(reasons=SETTING)], 0, 0).held_down == {}


@pytest.mark.parametrize(
    ("busy", "pids", "says"),
    [
        ("97", [1], "! the GPU was in use: 97% busy before the run, 0 other processes"),
        ("0", [1, 2, 3], "! the GPU was in use: 0% busy before the run, 2 other processes"),
    ],
)
def test_a_busy_gpu_is_flagged(
    state_after: StateAfter, busy: str, pids: list[int], says: str
) -> None:
    state = state_after([sample()], busy, pids)

    assert says in state.notes()
    is_busy = busy == "97"
    assert state.unreliable == ("the GPU was 97% busy before the run" if is_busy else None)


@pytest.mark.parametrize(
    ("busy", "says"), [("97", "the GPU was 97% busy before the run"), ("10", None)]
)
def test_before_anything_is_timed_a_busy_gpu_is_known(
    nvidia_smi: NvidiaSmi, busy: str, says: str | None
) -> None:
    # A process that only holds a CUDA context uses no GPU time.
    nvidia_smi(busy=busy, pids=[1, 2, 3])

    assert busy_before(BUS_ID) == says


def test_without_nvidia_smi_no_gpu_is_known_to_be_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert busy_before(BUS_ID) is None


def test_a_line_that_was_cut_short_or_holds_no_numbers_is_left_out() -> None:
    whole = sample()
    lines = [whole, whole[:17], "", "[N/A], 1980, 650.25, 61, 0x0", "No devices were found"]

    assert summary(lines, 0, 0).samples == 1


def test_an_nvidia_smi_that_refuses_leaves_the_state_empty(nvidia_smi: NvidiaSmi) -> None:
    nvidia_smi(status=6)
    with watched(BUS_ID) as watch:
        pass

    assert watch.state == GpuState()
    assert watch.state.notes() == []


def test_without_nvidia_smi_no_gpu_is_watched(
    nvidia_smi: NvidiaSmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = nvidia_smi([sample()])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with watched(BUS_ID) as missing:
        pass

    assert missing.state == GpuState()
    assert not log.exists()


def cpu_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, busy: float, own: float, seconds: float
) -> CpuState:
    """Return the state of a run in which two CPUs worked `busy` seconds, `own` for this process."""
    stat = tmp_path / "stat"
    ticks = os.sysconf("SC_CLK_TCK")
    clock = iter([100.0, 100.0 + seconds])
    works = iter([1.0, 1.0 + own])
    monkeypatch.setattr(gpu_state, "_STAT", stat)
    monkeypatch.setattr(gpu_state.os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(gpu_state, "available_cpus", lambda: 2)
    monkeypatch.setattr(gpu_state, "_own_seconds", lambda: next(works))
    monkeypatch.setattr(gpu_state.time, "monotonic", lambda: next(clock))

    def write(done: float) -> None:
        # user, nice, system, idle, iowait, irq, softirq, steal, and guest time, which user includes
        lines = [f"cpu{index} {int(done * ticks / 2)} 0 0 777 99 0 0 0 55 0" for index in (0, 2)]
        stat.write_text("\n".join([*lines, "cpu1 9999999 0 0 0 0 0 0 0 0 0", "intr 5"]))

    write(50)
    with watched(None) as watch:
        write(50 + busy)
    state = watch.state
    assert isinstance(state, CpuState)
    return state


def test_a_cpu_that_others_use_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = cpu_state(monkeypatch, tmp_path, busy=9.0, own=3.0, seconds=10.0)

    assert dataclasses.asdict(state) == {"others": 30.0}
    assert state.unreliable == "others used 30% of the CPU"
    assert state.notes() == ["! others used 30% of the CPU during the run; ratios are not reliable"]


@pytest.mark.parametrize(
    ("busy", "own", "seconds"), [(19.0, 18.5, 10.0), (3.0, 4.0, 10.0), (0.4, 0.0, 0.2)]
)
def test_of_a_cpu_that_is_ours_nothing_is_said(
    busy: float, own: float, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cpu_state(monkeypatch, tmp_path, busy=busy, own=own, seconds=seconds).notes() == []


def test_a_system_that_does_not_tell_of_its_cpus_has_no_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_state, "_STAT", tmp_path / "none")
    with watched(None) as watch:
        pass

    assert watch.state == CpuState()
    assert watch.state.notes() == []


def test_the_watch_ends_with_a_run_that_fails(nvidia_smi: NvidiaSmi) -> None:
    nvidia_smi([sample()])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the run"), watched(BUS_ID):
        raise RuntimeError("the run")

    assert time.monotonic() - started < 30


def test_the_state_goes_into_a_record(state_after: StateAfter) -> None:
    state = state_after([sample(reasons=CAPPED)])
    record = json.loads(json.dumps(dataclasses.asdict(state)))

    assert record["sm_clock_mhz"] == [1755, 1755, 1755]
    assert record["held_down"] == {"power cap": 1.0}
    assert record["busy_before"] == 0
