"""Fake timer and fake builder, by which `cupy-flash tune` runs without timing and compiling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from cupy_flash.cli.build.build import Built, Job
from cupy_flash.cli.measure.timing import Timed
from cupy_flash.cli.tune import job as job_module
from cupy_flash.cli.tune import sweep as sweep_module
from cupy_flash.gpu.compiler import Cubin
from cupy_flash.problem.device import Resources
from support.gpu import fake_cupy


class FakeTimer:
    """Fake timer that returns given times of tiles, and records what it times."""

    pause = 0.0

    def __init__(self, time_of: Callable[[dict[str, int], int], float]) -> None:
        self.time_of = time_of
        # The tile and the number of query rows of each timed call.
        self.timed: list[tuple[dict[str, int], int]] = []

    def once(self, timed: Timed) -> float:
        return 0.0

    def interleaved(
        self, calls: Sequence[Timed], warmup: int, repeats: Sequence[int]
    ) -> list[list[float]]:
        times = []
        for timed, count in zip(calls, repeats, strict=True):
            call: Any = timed.call
            what = (dict(call.keywords["tile"]), call.args[0].shape[1])
            times.append([self.time_of(*what)] * count)
            self.timed.append(what)
        return times

    def sizes(self) -> set[tuple[int, int]]:
        return {(tile["Br"], tile["Bc"]) for tile, _ in self.timed}


def text_of(job: Job) -> bytes:
    """Return machine code that differs between units."""
    return job.unit.text.encode()


class FakeBuilder:
    """Fake builder: `image_of` returns the machine code of a job, and submissions are counted."""

    def __init__(self, image_of: Callable[[Job], bytes] = text_of, spills: int = 0) -> None:
        self.image_of = image_of
        self.spills = spills
        self.submitted = 0

    def submit(self, job: Job) -> Future[Built]:
        self.submitted += 1
        resources = Resources(128, self.spills, 0)
        future: Future[Built] = Future()
        image = self.image_of(job)
        cubin = Cubin(image, {job.unit.main_entry: resources}, "", 0.0)
        future.set_result(Built(cubin, resources) if image else Built(error="no register left"))
        return future


def install_gpu(
    patch: pytest.MonkeyPatch,
    time_of: Callable[[dict[str, int], int], float],
    image_of: Callable[[Job], bytes] = text_of,
) -> None:
    """Make sweeps find a GPU, where `time_of` times tiles and `image_of` compiles them."""
    fake_cupy.install(patch)
    builder = contextlib.nullcontext(FakeBuilder(image_of))
    patch.setattr(job_module, "Builder", lambda workers: builder)
    patch.setattr(sweep_module, "GpuTimer", lambda: FakeTimer(time_of))
