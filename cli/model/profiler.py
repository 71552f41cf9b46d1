"""Counters of one call by Nsight Compute: find `ncu`, run it on a child process, parse its table.

If this file is run as a module, it is that child process.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from ..cases.cases import Case

# Paths where the CUDA toolkit and Nsight Compute's own package install it.
PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)
# Calls before the profiled one. The first one compiles; the second is like every later one.
_WARMUP = 2
_OPTIONS = (
    *("--csv", "--page", "raw", "--print-units", "base", "--kernel-name-base", "function"),
    *("--profile-from-start", "off", "--target-processes", "all"),
    # As in the model, every kernel starts with cold caches; clocks are those that `bench` times at.
    *("--cache-control", "all", "--clock-control", "none"),
)


class ProfilerError(click.ClickException):
    """Error if nothing was measured; its message is the reason in one line."""


@dataclass(frozen=True)
class Kernel:
    """One launch, with the metrics for which the profiler printed a number."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Call:
    """Call that the child process makes; `family` and `tile` are as in `flash_attention`."""

    case: Case
    family: str | None = None
    tile: Mapping[str, int] | None = None
    seed: int = 0

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self) | {"case": self.case.as_record()})

    @classmethod
    def from_json(cls, text: str) -> Call:
        """Return the call of a text that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"case": Case.of_record(fields["case"])})


def find_ncu() -> str | None:
    """Return the path of `ncu`: on PATH, otherwise the newest in a usual place, or None."""
    if result := shutil.which("ncu"):
        return result
    for place in PLACES:
        if paths := [path for path in glob.glob(place) if shutil.which(path)]:
            return max(paths, key=_version)
    return None


def _version(path: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path)]


def profile_call(call: Call, metrics: Sequence[str]) -> list[Kernel]:
    """Return the kernels that a call launches, in order, each with its metrics.

    Raise ProfilerError if `ncu` is missing, may not read counters, or measures nothing.

    Parameters
    ----------
    call
        Call to make in a child process, after warm-up calls.
    metrics
        Names as `ncu --metrics` takes them. Metrics that this GPU does not have are left out.
    """
    ncu = find_ncu()
    if ncu is None:
        raise ProfilerError(
            "Nsight Compute is not installed: no ncu on PATH, in /usr/local/cuda*/bin or in "
            "/opt/nvidia/nsight-compute; install the package nsight-compute of NVIDIA's CUDA "
            "repository, or the CUDA toolkit"
        )
    chosen = _known_metrics(ncu, metrics)
    child = (sys.executable, "-m", "cupy_flash.cli.model.profiler", call.to_json())
    done = _run([ncu, *_OPTIONS, "--metrics", ",".join(chosen), *child])
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise ProfilerError(
            "the GPU's performance counters need permission (ERR_NVGPUCTRPERM): run as root, or "
            "load the driver's module with NVreg_RestrictProfilingToAdminUsers=0; a container "
            "needs --cap-add SYS_ADMIN"
        )
    kernels = parse_raw_page(done.stdout, chosen)
    if done.returncode or not kernels:
        raise ProfilerError(f"{ncu} measured nothing: {_what_failed(done)}")
    return kernels


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ProfilerError(f"{command[0]} does not run: {error}") from error


def _known_metrics(ncu: str, metrics: Sequence[str]) -> list[str]:
    """Return the metrics that `ncu` lists for this GPU; it refuses to run with any other."""
    lines = _run([ncu, "--query-metrics"]).stdout.splitlines()
    listed = {line.split()[0] for line in lines if "__" in line}
    if not listed:
        return list(metrics)
    # The list has names without the suffix for their aggregation, and lacks metrics of launches,
    # which are known without counting.
    return [m for m in metrics if m.startswith("launch__") or m.partition(".")[0] in listed]


def parse_raw_page(text: str, metrics: Sequence[str]) -> list[Kernel]:
    """Parse the output of `ncu --csv --page raw`.

    Parameters
    ----------
    text
        Output with a table: a line of headings, a line of units, then a line for each kernel.
        Lines of the profiled program and of the profiler (``==PROF==``) may surround it.
    metrics
        Columns to read. A kernel lacks columns that are missing or hold no number.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        return []
    heading, _, *launches = rows
    return [
        Kernel(fields["Kernel Name"], _numbers(fields, metrics))
        for fields in (dict(zip(heading, launch, strict=False)) for launch in launches)
    ]


def _numbers(fields: Mapping[str, str], metrics: Sequence[str]) -> dict[str, float]:
    numbers = {}
    for name in metrics:
        try:
            # ncu groups thousands, also in files: "1,234.5".
            numbers[name] = float(fields.get(name, "").replace(",", ""))
        except ValueError:  # "n/a", or nothing
            continue
    return {name: number for name, number in numbers.items() if number == number}


def _what_failed(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line of the child's or the profiler's output that says what failed."""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if "Traceback" in done.stderr:
        # A traceback ends in the error; the profiler then only adds that the child failed.
        return next(line for line in reversed(said) if not line.startswith("=="))
    lines = [*done.stdout.splitlines(), *said]
    errors = [line.removeprefix("==ERROR== ") for line in lines if line.startswith("==ERROR==")]
    return (errors or said[-1:] or ["it saw no kernel"])[0]


def _child(text: str) -> None:
    """Make the call for the profiler, after warm-up calls that do what only the first call does."""
    import cupy

    from ..cases.inputs import random_inputs
    from ..providers import providers

    call = Call.from_json(text)
    provider = providers.Dispatcher("profiled", call.family, call.tile)
    compute = provider.prepare(random_inputs(call.case, call.seed, on_gpu=True)).call
    for _ in range(_WARMUP):
        compute()
    device = cupy.cuda.Device()
    device.synchronize()
    cupy.cuda.profiler.start()
    compute()
    device.synchronize()
    cupy.cuda.profiler.stop()


if __name__ == "__main__":
    _child(sys.argv[1])
