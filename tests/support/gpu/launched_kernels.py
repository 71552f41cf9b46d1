"""Record of the kernels that passing tests launch on a GPU: the pytest option --support-json."""

from __future__ import annotations

import datetime
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from cupy_flash.calls import shared_prefix
from cupy_flash.calls.key_lists import backward, forward
from cupy_flash.cli.records import environment
from cupy_flash.gpu import append, launch
from cupy_flash.gpu.environment import device_for_id
from support.cli.benchmark_scripts import CHECKOUT, script

runs = script("support_matrix/support_runs")

# Functions whose calls launch kernels that plans describe without the feature.
_FEATURES = (
    (forward._Inner, "compute", "key_indices"),
    (backward._Passes, "compute", "key_indices"),
    (shared_prefix, "_shared", "shared_prefix_len"),
)
# Largest handle of a stream that cannot capture: the default streams of CUDA.
_DEFAULT_STREAMS = 2
# Key of the rows among the outputs of an xdist worker.
_OUTPUT = "launched_kernels"


def describe_run() -> dict[str, Any]:
    """Return the metadata of a test run on the current GPU."""
    device = device_for_id(0)
    return {
        "commit": _git("rev-parse", "HEAD"),
        # The file itself, which an earlier part of the run may have written, does not count.
        "dirty": bool(_git("status", "--porcelain", "--", ".", f":!{runs.FILE}")),
        "gpu": device.name,
        "sm": device.sm,
        "versions": environment.versions(),
    }


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the checkout; None if there is no repository."""
    try:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _is_capturing(stream: int) -> bool:
    # The launch has imported CuPy.
    return bool(sys.modules["cupy"].cuda.runtime.streamIsCapturing(stream))


class Recorder:
    """Plugin that notes which kernels tests marked `gpu` launch, and keeps those of passing tests.

    Each process of xdist notes its own tests. The controlling process writes the file.

    Parameters
    ----------
    config
        Configuration of the process.
    file
        Path of the file, see `benchmarks/support_matrix/support_runs.py`.
    describe
        Function that returns the metadata of the run.
    """

    def __init__(
        self,
        config: pytest.Config,
        file: Path,
        describe: Callable[[], dict[str, Any]] = describe_run,
    ) -> None:
        self._config, self._file, self._describe = config, file, describe
        self._is_worker = hasattr(config, "workeroutput")
        self._rows: Any = {}
        self._tests = 0
        # Kernels of the present test; None if it is not marked `gpu`.
        self._launched: Any = None
        self._passes = True
        # Features of the calls that are running, by thread.
        self._thread = threading.local()
        self._patch = pytest.MonkeyPatch()
        self._install()

    def _install(self) -> None:
        recorder = self
        create, run = launch.Launches.__init__, launch.Launches.run
        run_struct, prepare = launch.StructLaunch.run, append.prepare

        @functools.wraps(create)
        def create_and_describe(launches: Any, plan: Any, *arguments: Any) -> None:
            create(launches, plan, *arguments)
            launches.described = runs.kernel_of(plan), runs.features_of(plan.problem)

        @functools.wraps(run)
        def run_and_note(launches: Any, values: Any, stream: int) -> None:
            run(launches, values, stream)
            if launches:
                recorder._note(*launches.described, stream)

        @functools.wraps(prepare)
        def prepare_and_describe(spec: Any, device: Any, names: Any) -> Any:
            prepared = prepare(spec, device, names)
            kernel = runs.Kernel(device.arch, runs.APPEND, spec.dtype, runs.range_of(spec))
            prepared.described = kernel, {"rotary"} if spec.rotary_dim else set()
            return prepared

        @functools.wraps(run_struct)
        def run_struct_and_note(launched: Any, values: Any) -> None:
            run_struct(launched, values)
            if launched._kernel is not None and hasattr(launched, "described"):
                recorder._note(*launched.described)

        self._patch.setattr(launch.Launches, "__init__", create_and_describe)
        self._patch.setattr(launch.Launches, "run", run_and_note)
        self._patch.setattr(launch.StructLaunch, "run", run_struct_and_note)
        self._patch.setattr(append, "prepare", prepare_and_describe)
        for module, name, feature in _FEATURES:
            self._patch.setattr(module, name, self._within(getattr(module, name), feature))

    def _within(self, function: Callable[..., Any], feature: str) -> Callable[..., Any]:
        """Return a function that adds a feature to its launches."""

        @functools.wraps(function)
        def calling(*arguments: Any, **options: Any) -> Any:
            before = getattr(self._thread, "features", frozenset())
            self._thread.features = before | {feature}
            try:
                return function(*arguments, **options)
            finally:
                self._thread.features = before

        return calling

    def _note(self, kernel: Any, features: set[str], stream: int = 0) -> None:
        # A test may end while its thread still runs.
        launched = self._launched
        if launched is None:
            return
        runs.add(launched, kernel, features)
        runs.add(launched, kernel, getattr(self._thread, "features", ()))
        if stream > _DEFAULT_STREAMS and _is_capturing(stream):
            runs.add(launched, kernel, (runs.CAPTURED,))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        launched: Any = {} if item.get_closest_marker("gpu") else None
        self._launched, self._passes = launched, True
        result = yield
        self._launched = None
        if launched and self._passes:
            self._tests += 1
            compared = {runs.SAME_BITS} if "same_bits" in item.name else set()
            self._add({kernel: found | compared for kernel, found in launched.items()})
        return result

    def _add(self, rows: Any) -> None:
        for kernel, features in rows.items():
            runs.add(self._rows, kernel, features)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        self._passes = self._passes and report.passed
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the rows of an xdist worker, which has none if it crashed."""
        output = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if output is not None:
            self._tests += output["tests"]
            self._add(runs.from_lists(output["rows"]))

    def pytest_sessionfinish(self) -> None:
        if self._is_worker:
            rows = runs.as_lists(self._rows)
            self._config.workeroutput[_OUTPUT] = {"tests": self._tests, "rows": rows}
        elif self._rows:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            run = self._describe() | {"date": now, "tests": self._tests}
            runs.write(self._file, run, self._rows)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._is_worker:
            text = f"{self._tests} passing tests launched kernels"
            terminalreporter.write_line(f"{text}; {self._file} names them" if self._rows else text)

    def pytest_unconfigure(self) -> None:
        self._patch.undo()
