"""State of the GPU (by nvidia-smi) or the CPUs during a run: clocks, and load by others."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..records.environment import available_cpus

_FIELDS = (
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)
_SAMPLE_MILLISECONDS = 100
# NVML's bits for reasons that lower the clocks ("Clocks Event Reasons"). Bits for an idle GPU, for
# settings that a user chose and for the display's clocks are not errors and are left out.
_IDLE = 0x1
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# A GPU at full load normally runs at its power cap; the other reasons indicate a problem.
_USUAL = "power cap"
# Fraction of the samples above which a reason that indicates a problem is reported.
_SELDOM = 0.05
# Percentage of time in which other processes may use the GPU before a run, or the CPUs during it,
# without a warning.
_BUSY = 10


@dataclass(frozen=True)
class GpuState:
    """State of a GPU during a run.

    Attributes
    ----------
    samples
        Number of samples taken while the GPU was not idle.
    sm_clock_mhz
        Median, lowest and highest SM clock; empty without samples.
    max_sm_clock_mhz
        Highest SM clock that the GPU supports.
    power_w, temperature_c
        Highest power and temperature.
    held_down
        Fraction of samples in which the clocks were lowered, by reason.
    busy_before
        Percentage of time in which the GPU was busy before the run.
    other_processes
        Number of other processes that were computing on the GPU before the run.
    """

    samples: int = 0
    sm_clock_mhz: tuple[float, ...] = ()
    max_sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    held_down: dict[str, float] = field(default_factory=dict)
    busy_before: float = 0
    other_processes: int = 0

    @property
    def unreliable(self) -> str | None:
        """Reason why ratios of times are not reliable; None if they are reliable."""
        if self.busy_before <= _BUSY:
            return None
        return f"the GPU was {self.busy_before:.0f}% busy before the run"

    def notes(self) -> list[str]:
        """Return notes for readers of the measurements; warnings begin with "!"."""
        result = []
        if self.sm_clock_mhz:
            median, low, high = self.sm_clock_mhz
            clock = f"SM clock {median:.0f} MHz ({low:.0f} to {high:.0f})"
            if self.max_sm_clock_mhz:
                clock += f" of at most {self.max_sm_clock_mhz:.0f}"
            capped = self.held_down.get(_USUAL, 0)
            result.append(
                clock + (f", at the power cap {capped:.0%} of the time" if capped else "")
            )
        result += [
            f"! {reason} in {share:.0%} of the run: times are of a throttled GPU"
            for reason, share in self.held_down.items()
            if reason != _USUAL and share > _SELDOM
        ]
        if self.busy_before > _BUSY or self.other_processes:
            result.append(
                f"! the GPU was in use: {self.busy_before:.0f}% busy before the run, "
                f"{self.other_processes} other processes"
            )
        return result


@dataclass(frozen=True)
class CpuState:
    """Load of the CPUs by other processes during a run.

    Attributes
    ----------
    others
        Percentage of the time of the CPUs that this process may run on; None if the system does
        not report it.
    """

    others: float | None = None

    @property
    def unreliable(self) -> str | None:
        """Reason why ratios of times are not reliable; None if they are reliable."""
        if self.others is None or self.others <= _BUSY:
            return None
        return f"others used {self.others:.0f}% of the CPU"

    def notes(self) -> list[str]:
        """Return a warning, which begins with "!", if others used much of the CPU time."""
        if self.unreliable is None:
            return []
        return [f"! {self.unreliable} during the run; ratios are not reliable"]


class CpuWatch:
    """Meter of the CPU time that other processes use from the meter's creation on."""

    def __init__(self) -> None:
        self._start = (time.monotonic(), _busy_seconds(), _own_seconds())

    @property
    def state(self) -> CpuState:
        """CPU load from the creation of this object until now."""
        start, busy, own = self._start
        passed, busy_now = time.monotonic() - start, _busy_seconds()
        if busy is None or busy_now is None or passed < _LEAST_SECONDS:
            return CpuState()
        others = max(0.0, busy_now - busy - (_own_seconds() - own))
        return CpuState(round(100 * others / passed / available_cpus(), 1))


# The system counts CPU time in units of 10 ms, too coarse for shorter runs.
_LEAST_SECONDS = 0.5
_STAT = Path("/proc/stat")


def _busy_seconds() -> float | None:
    """Return the total busy time since boot of the CPUs that this process may run on."""
    try:
        lines = _STAT.read_text(encoding="utf-8").splitlines()
        own = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    # Fields: user, nice, system, idle, iowait, irq, softirq, steal. Later ones are part of user.
    fields = [line.split() for line in lines]
    counts = [list(map(int, f[1:9])) for f in fields if f and f[0] in own]
    ticks = sum(sum(count) - count[3] - count[4] for count in counts)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the CPU time of this process and of child processes that it has waited for."""
    return sum(os.times()[:4])


class GpuWatch:
    """Holder of a GPU's state, which is empty until the watch ends."""

    def __init__(self) -> None:
        self.state = GpuState()


@contextlib.contextmanager
def watched(bus_id: str | None) -> Iterator[GpuWatch | CpuWatch]:
    """Watch the GPU with this PCI bus id, or the CPUs if it is None, while the block runs.

    Without nvidia-smi, the state of a GPU stays empty.
    """
    if bus_id is None:
        yield CpuWatch()
        return
    watch = GpuWatch()
    program = shutil.which("nvidia-smi")
    if program is None:
        yield watch
        return
    select = [program, f"--id={bus_id}"]
    busy, others = _load_before(select)
    query = [*select, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    # The samples go to a file: nothing reads them before the end of the block, and a pipe would be
    # full after two minutes.
    with tempfile.TemporaryFile("w+") as samples:
        with subprocess.Popen(
            [*query, f"--loop-ms={_SAMPLE_MILLISECONDS}"],
            stdout=samples,
            stderr=subprocess.DEVNULL,
        ) as sampler:
            try:
                yield watch
            finally:
                sampler.terminate()
        samples.seek(0)
        watch.state = summary(samples.read().splitlines(), busy, others)


def bus_id() -> str:
    """Return the PCI bus id of the current GPU."""
    import cupy

    return str(cupy.cuda.Device().pci_bus_id)


def busy_before(gpu: str) -> str | None:
    """Return why times measured from now on are not reliable; `gpu` is the GPU's PCI bus id.

    Return None if the GPU is idle or nvidia-smi is not installed.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    busy, others = _load_before([program, f"--id={gpu}"])
    return GpuState(busy_before=busy, other_processes=others).unreliable


def _load_before(select: Sequence[str]) -> tuple[float, int]:
    def ask(query: str) -> list[str]:
        command = [*select, query, "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except subprocess.TimeoutExpired:
            return []
        return done.stdout.split() if done.returncode == 0 else []

    busy = ask("--query-gpu=utilization.gpu")
    # This process is in the list, because it has a CUDA context by now.
    others = max(0, len(ask("--query-compute-apps=pid")) - 1)
    return float(busy[0]) if busy and busy[0].isdigit() else 0.0, others


def summary(lines: Sequence[str], busy_before: float, other_processes: int) -> GpuState:
    """Return the state from lines of nvidia-smi's output; incomplete lines are skipped."""
    samples = []
    for line in lines:
        values = line.split(", ")
        try:
            *numbers, reasons = (*map(float, values[:-1]), int(values[-1], 16))
        except ValueError:
            continue
        if len(numbers) == len(_FIELDS) - 1 and not reasons & _IDLE:
            samples.append((numbers, reasons))
    if not samples:
        return GpuState(busy_before=busy_before, other_processes=other_processes)
    clocks = [numbers[0] for numbers, _ in samples]
    shares = {
        name: sum(bool(reasons & bit) for _, reasons in samples) / len(samples)
        for bit, name in _REASONS.items()
    }
    return GpuState(
        samples=len(samples),
        sm_clock_mhz=(statistics.median(clocks), min(clocks), max(clocks)),
        max_sm_clock_mhz=samples[0][0][1],
        power_w=max(numbers[2] for numbers, _ in samples),
        temperature_c=max(numbers[3] for numbers, _ in samples),
        held_down={name: round(share, 3) for name, share in shares.items() if share},
        busy_before=busy_before,
        other_processes=other_processes,
    )
