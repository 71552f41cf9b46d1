"""Compile many translation units in parallel, each in a process of its own.

NVRTC 13.0 runs one compilation at a time in a process: two threads take as long as two consecutive
compilations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash.errors import CompileError
from cupy_flash.families import TranslationUnit
from cupy_flash.gpu.compiler import (
    Cubin,
    compile_cubin,
    kernel_cache,
    loaded_resources,
    prebuilt_name,
    why_no_compiler,
)
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.device import Device, Resources

from ..records.environment import available_cpus
from ..records.report import write_whole

# Maximum number of workers: on a GPU, each holds a CUDA context of a few hundred MB.
MOST_WORKERS = 16


@dataclass(frozen=True)
class Job:
    """A unit to compile for a device.

    Attributes
    ----------
    shared_memory
        Dynamic shared memory in bytes of each entry, for loading.
    """

    unit: TranslationUnit
    device: Device
    shared_memory: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, plan: Plan) -> Job:
        """Return the job that builds a GPU plan's kernels."""
        assert plan.unit is not None
        assert plan.device is not None
        sizes = tuple((launch.entry, launch.shared_memory) for launch in plan.launches)
        return cls(plan.unit, plan.device, sizes)


@dataclass(frozen=True)
class Built:
    """Result of a job: machine code and resources, or an error.

    Attributes
    ----------
    cubin
        Machine code; None if the kernel was loaded instead, or does not compile.
    resources
        Resources of the main kernel, with the most spilled bytes of any of the kernels.
    error
        Message with the compiler's log; None if the job compiled.
    """

    cubin: Cubin | None = None
    resources: Resources | None = None
    error: str | None = None


def _compile(job: Job) -> Built:
    try:
        cubin = compile_cubin(job.unit, job.device)
    except CompileError as error:
        return Built(error=str(error))
    main = cubin.resources[job.unit.main_entry]
    spills = max(each.spill_bytes for each in cubin.resources.values())
    return Built(cubin, dataclasses.replace(main, spill_bytes=spills))


def _load(job: Job) -> Built:
    """Compile a job into CuPy's cache on disk, as a first call would."""
    try:
        kernel_cache.get(job.unit, dict(job.shared_memory))
    except CompileError as error:
        return Built(error=str(error))
    return Built(resources=loaded_resources(job.unit))


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT for a while; a process that is started meanwhile will never receive SIGINT."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize_worker() -> None:
    # Ctrl-C sends SIGINT to every process of the terminal. A worker that died while it held the
    # queue's lock would block the other workers and the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent that was killed cannot end its workers.
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


class Builder:
    """Pool of processes that build jobs; a context manager."""

    def __init__(self, workers: int | None = None) -> None:
        """Create the pool; its processes start with the first jobs.

        `workers` is the number of processes; None for the number of CPUs. At most MOST_WORKERS are
        used. Raise click.ClickException if there is no compiler.
        """
        if reason := why_no_compiler():
            raise click.ClickException(
                f"{reason}; pip install 'cupy_flash[cuda13]' or [cuda12] installs a compiler, "
                "no GPU is needed"
            )
        count = min(workers or available_cpus(), MOST_WORKERS)
        # Processes are spawned, because a CUDA context does not survive a fork.
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_initialize_worker,
        )

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # A kernel may take ten seconds to compile, and its result is no longer needed.
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, job: Job, *, load: bool = False) -> Future[Built]:
        """Submit a job to the pool.

        If `load`, its kernels are loaded on the current GPU, which leaves them in CuPy's cache, and
        their code is not returned.
        """
        with _interrupts_held():
            return self._pool.submit(_load if load else _compile, job)


def build(
    jobs: Sequence[Job], workers: int | None = None, *, load: bool = False
) -> Iterator[tuple[int, Built]]:
    """Build all jobs in parallel; yield the index and the result of each as soon as it ends.

    The arguments are those of `Builder` and of its `submit`.
    """
    with Builder(min(workers or available_cpus(), max(1, len(jobs)))) as builder:
        futures = {builder.submit(job, load=load): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def write_cubin(folder: Path, job: Job, cubin: Cubin) -> Path:
    """Write machine code to a file whose name the library expects in a folder of cubins."""
    path = folder / prebuilt_name(job.unit, job.device)
    # Written atomically, because an incomplete cubin would be loaded and fail.
    write_whole(path, cubin.image)
    return path
