"""Compile many translation units at once, in processes: NVRTC runs one compilation in each.

Measured with NVRTC 13.0: two threads take as long as one after the other.
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

# A worker on a GPU holds a CUDA context of some hundred MB.
_MOST_WORKERS = 16


@dataclass(frozen=True)
class Job:
    """A unit to compile for a device.

    Attributes
    ----------
    shared_memory
        Dynamic shared memory of each entry, for loading.
    """

    unit: TranslationUnit
    device: Device
    shared_memory: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, plan: Plan) -> Job:
        """The job that builds a GPU plan's kernels."""
        assert plan.unit is not None
        assert plan.device is not None
        sizes = tuple((launch.entry, launch.shared_memory) for launch in plan.launches)
        return cls(plan.unit, plan.device, sizes)


@dataclass(frozen=True)
class Built:
    """What came of a job: machine code and resources, or the compiler's words.

    Attributes
    ----------
    cubin
        None where the kernel was loaded instead, or does not compile.
    resources
        Of the main kernel, but for the bytes that any of the kernels spills.
    error
        With the compiler's log; None if it compiled.
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
    """Compile into CuPy's cache on disk, as a first call would."""
    try:
        kernel_cache.get(job.unit, dict(job.shared_memory))
    except CompileError as error:
        return Built(error=str(error))
    return Built(resources=loaded_resources(job.unit))


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back; a process that is started meanwhile never sees one, from its first line."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _live_and_die_with_the_parent() -> None:
    # Ctrl-C reaches all processes of a terminal's group; a worker that dies while it holds the
    # queue's lock would leave the others, and the parent, waiting.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent that was killed cannot tell its workers to end.
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


class Builder:
    """Processes that build jobs; a context manager."""

    def __init__(self, workers: int | None = None) -> None:
        """Start no process yet.

        Parameters
        ----------
        workers
            Processes; as many as there are CPUs if None.

        Raises
        ------
        click.ClickException
            If there is no compiler.
        """
        if reason := why_no_compiler():
            raise click.ClickException(
                f"{reason}; pip install 'cupy_flash[cuda13]' or [cuda12] brings a compiler, "
                "no GPU is needed"
            )
        count = min(workers or available_cpus(), _MOST_WORKERS)
        # Not fork: a CUDA context does not survive it.
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_live_and_die_with_the_parent,
        )

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # A kernel may take some ten seconds, and nobody waits for it any more.
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, job: Job, *, load: bool = False) -> Future[Built]:
        """Have a job built.

        Parameters
        ----------
        job
            What to compile.
        load
            Load the kernels on the current GPU, which leaves them in CuPy's cache, instead of
            returning their code.
        """
        with _interrupts_held():
            return self._pool.submit(_load if load else _compile, job)


def build(
    jobs: Sequence[Job], workers: int | None = None, *, load: bool = False
) -> Iterator[tuple[int, Built]]:
    """Build every job, in parallel: yield its index and what came of it as they end.

    The arguments are those of `Builder` and of its `submit`.
    """
    with Builder(min(workers or available_cpus(), max(1, len(jobs)))) as builder:
        futures = {builder.submit(job, load=load): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def write_cubin(folder: Path, job: Job, cubin: Cubin) -> Path:
    """Write machine code under the name that `CUPY_FLASH_CUBINS` finds it by."""
    path = folder / prebuilt_name(job.unit, job.device)
    # Half a cubin would be loaded, and fail.
    write_whole(path, cubin.image)
    return path
