"""Counters of one call from Nsight Compute: find `ncu`, run it on a child process, read its table.

Run as a module, this file is that child.
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

# Where the CUDA toolkit and Nsight Compute's own package put it.
PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)
# Calls before the profiled one: the first compiles, the second is as every later one.
_WARMUP = 2
_OPTIONS = (
    *("--csv", "--page", "raw", "--print-units", "base", "--kernel-name-base", "function"),
    *("--profile-from-start", "off", "--target-processes", "all"),
    # Every kernel starts with cold caches, as in the model, and at the clocks that `bench` times.
    *("--cache-control", "all", "--clock-control", "none"),
)


class ProfilerError(click.ClickException):
    """Nothing was measured; the message says why in one line."""


@dataclass(frozen=True)
class Kernel:
    """One launch, with the metrics that the profiler had a number for."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Call:
    """The call that the child makes; `family` and `tile` as in `flash_attention`."""

    case: Case
    family: str | None = None
    tile: Mapping[str, int] | None = None
    seed: int = 0

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self) | {"case": self.case.as_record()})

    @classmethod
    def from_json(cls, text: str) -> Call:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"case": Case.of_record(fields["case"])})


def find_ncu() -> str | None:
    """Path of `ncu`: the one on PATH, else the newest in a usual place, or None."""
    if found := shutil.which("ncu"):
        return found
    for place in PLACES:
        if paths := [path for path in glob.glob(place) if shutil.which(path)]:
            return max(paths, key=_version)
    return None


def _version(path: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path)]


def profile_call(call: Call, metrics: Sequence[str]) -> list[Kernel]:
    """The kernels that a call launches, in order, each with its metrics.

    Parameters
    ----------
    call
        Made in a process of its own, where it was made before.
    metrics
        Names as `ncu --metrics` takes them. Those that this GPU does not have are left out.

    Raises
    ------
    ProfilerError
        If `ncu` is missing, is not permitted to read counters, or measured nothing.
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
    """Those that `ncu` lists for this GPU: it refuses a run that names any other."""
    lines = _run([ncu, "--query-metrics"]).stdout.splitlines()
    listed = {line.split()[0] for line in lines if "__" in line}
    if not listed:
        return list(metrics)
    # The list has names without the suffix that says how units are summed up, and lacks what is
    # known of a launch without counting.
    return [m for m in metrics if m.startswith("launch__") or m.partition(".")[0] in listed]


def parse_raw_page(text: str, metrics: Sequence[str]) -> list[Kernel]:
    """Read what `ncu --csv --page raw` prints.

    Parameters
    ----------
    text
        Lines of the profiled program and of the profiler (``==PROF==``) may stand around the
        table: a line of headings, one of units, then one for each kernel.
    metrics
        Columns to read. A kernel lacks those that are not there or hold no number.
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
            # "1,234.5": ncu groups thousands, in files too.
            numbers[name] = float(fields.get(name, "").replace(",", ""))
        except ValueError:  # "n/a", or nothing
            continue
    return {name: number for name, number in numbers.items() if number == number}


def _what_failed(done: subprocess.CompletedProcess[str]) -> str:
    """One line of what the child or the profiler said."""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if "Traceback" in done.stderr:
        # It ends in what matters; the profiler then only adds that the child failed.
        return next(line for line in reversed(said) if not line.startswith("=="))
    lines = [*done.stdout.splitlines(), *said]
    errors = [line.removeprefix("==ERROR== ") for line in lines if line.startswith("==ERROR==")]
    return (errors or said[-1:] or ["it saw no kernel"])[0]


def _child(text: str) -> None:
    """Make the call once for the profiler, and before that for what only the first call does."""
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
