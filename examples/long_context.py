"""Causal attention over a sequence as long as several GPUs, or processes on the CPU, can hold.

Each process holds a shard of the tokens. Run directly, the program starts one process per GPU, and
NCCL sends keys and values. Run by MPI (``mpiexec -n 4 python examples/long_context.py``), its
processes compute in NumPy. Random rows are compared with the formula in float64. Needs click and
rich, and for several processes NCCL or the extra `parallel`.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import click
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cupy_flash import attention_reference, combine, parallel

HEAD_DIM = 128
# Fraction of a GPU's memory to use for arrays; the rest is for other memory that calls need.
MEMORY_SHARE = 0.6
# Assumed speed of a GPU and of a CPU core in FLOP/s, for a length that --minutes determines.
GPU_RATE, CPU_RATE = 500e12, 20e9
# Number of rows of each process to compare with the formula.
SAMPLED = 16
# Environment variables that launchers of MPI set.
MPI_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


class Settings(NamedTuple):
    """Options of the command line that all processes receive."""

    tokens: int | None
    heads: int
    heads_kv: int
    minutes: float
    head_ranks: int | None


class Place(NamedTuple):
    """Array module, group of ranks and dtype of a process."""

    xp: Any
    group: parallel.Group
    dtype: np.dtype[Any]

    @property
    def is_first(self) -> bool:
        return self.group.rank == 0

    def wait(self) -> None:
        """Wait until the GPU has finished all work."""
        if self.xp is not np:
            self.xp.cuda.Device().synchronize()


def run(place: Place, settings: Settings) -> None:
    """Compute attention, and compare some rows with the formula."""
    tokens = settings.tokens or fitting(place, settings)
    q, k, v = tensors(place, settings, tokens)
    out = place.xp.empty_like(q)
    shared_by = settings.heads // settings.heads_kv
    say = Console(quiet=not place.is_first).print
    say(f"{tokens} tokens, {settings.heads} heads of {HEAD_DIM}, {place.group.size} processes")

    def attend(kv_head: int) -> None:
        # Computing one KV head at a time limits the memory for keys of other processes.
        heads = slice(kv_head * shared_by, (kv_head + 1) * shared_by)
        own = slice(kv_head, kv_head + 1)
        out[:, :, heads] = parallel.flash_attention(
            *(q[:, :, heads], k[:, :, own], v[:, :, own], place.group),
            seqlen=tokens,
            causal=True,
            head_ranks=settings.head_ranks,
        )
        place.wait()

    attend(0)  # the first call compiles kernels and connects the processes
    start = time.perf_counter()
    for kv_head in progress(range(settings.heads_kv), shown=place.is_first):
        attend(kv_head)
    seconds = time.perf_counter() - start
    flops = 2.0 * settings.heads * HEAD_DIM * float(tokens) ** 2
    say(f"{seconds:.3g} s, {flops / seconds / 1e12:.4g} TFLOP/s")
    error, allowed = compare(place, q, k, v, out, tokens)
    say(f"Rows compared: off by {error:.2g}, allowed {allowed:.2g}.")
    if not error <= allowed:
        raise click.ClickException("attention differs from the formula")


def fitting(place: Place, settings: Settings) -> int:
    """Return the largest number of tokens that memory and time allow, the same on all processes."""
    size = place.group.size
    rate = CPU_RATE if place.xp is np else GPU_RATE
    work = settings.minutes * 60 * rate * size
    most = int((work / (2.0 * settings.heads * HEAD_DIM)) ** 0.5)
    if place.xp is not np:
        free = place.xp.asarray([place.xp.cuda.runtime.memGetInfo()[0]], np.int64)
        least = int(
            parallel.gather(free, place.group, seqlen=size, axis=0, order="contiguous").min()
        )
        shared_by = settings.heads // settings.heads_kv
        # Heads in memory: q, out, k, v, and for one KV head two buffers of remote k and v, partial
        # results and their sum.
        heads = 2 * settings.heads + 2 * settings.heads_kv + 4 + 9 * shared_by
        most = min(most, int(MEMORY_SHARE * least * size / (heads * HEAD_DIM * 2)))
    return max(2 * size, most)


def tensors(place: Place, settings: Settings, tokens: int) -> tuple[Any, Any, Any]:
    """Return random q, k and v of this process's tokens."""
    xp, rank, size = place.xp, place.group.rank, place.group.size
    rng = xp.random.default_rng(rank)
    own = parallel.shard_length(tokens, size, rank)
    found = []
    for heads in (settings.heads, settings.heads_kv, settings.heads_kv):
        array = xp.empty((1, own, heads, HEAD_DIM), place.dtype)
        for head in range(heads):
            array[:, :, head] = rng.standard_normal((1, own, HEAD_DIM), np.float32)
        found.append(array)
    q, k, v = found
    return q, k, v


def compare(place: Place, q: Any, k: Any, v: Any, out: Any, tokens: int) -> tuple[float, float]:
    """Return the largest error of some rows of each process, and the allowed error.

    Each process computes the formula over its own keys, and the partial results are merged, so the
    reference needs no more memory than attention. The allowed error, relative to the weighted sum
    of absolute values, is the rounding of weights, of two partial results and of the result (half
    of the dtype's eps each), plus that of float32 scores as large as the log-sum-exp.
    """
    xp, size, rank = place.xp, place.group.size, place.group.rank

    def gathered(array: Any, axis: int) -> Any:
        length = array.shape[axis] * size
        return parallel.gather(array, place.group, seqlen=length, axis=axis, order="contiguous")

    positions = xp.asarray(parallel.shard(np.arange(tokens), size, rank, axis=0))
    chosen = xp.asarray(np.random.default_rng(rank).integers(0, len(positions), SAMPLED))
    rows, results = (gathered(array[:, chosen], 1) for array in (q, out))
    seen = positions <= gathered(positions[chosen], 0)[:, None]
    values = xp.concatenate([v.astype(np.float64), abs(v.astype(np.float64))], axis=3)
    part, lse = attention_reference(
        rows.astype(np.float64),
        k.astype(np.float64),
        values,
        mask=seen[None, None],
        return_lse=True,
    )
    exact, exact_lse = combine(gathered(part[None], 0), gathered(lse[None], 0))
    exact, sizes = exact[..., :HEAD_DIM], exact[..., HEAD_DIM:]
    error = abs(results.astype(np.float64) - exact)
    eps = float(ml_dtypes.finfo(place.dtype).eps)
    single = float(np.finfo(np.float32).eps) * (4 + 2 * float(abs(exact_lse).max()))
    return float(error.max()), float((2 * eps + single) * sizes.max())


def progress(steps: range, *, shown: bool) -> Iterator[int]:
    """Yield the steps, and show a progress bar on stderr."""
    bar = Progress(
        TextColumn("attention"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} groups of heads"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not (shown and sys.stderr.isatty()),
    )
    with bar:
        yield from bar.track(steps)


def require_fitting(settings: Settings, ranks: int) -> None:
    """Raise a usage error if the tokens or heads cannot be distributed over `ranks` processes."""
    # A process has two chunks of the sequence, each of at least one token; see `parallel.shard`.
    if settings.tokens is not None and settings.tokens < 2 * ranks:
        raise click.UsageError(
            f"--tokens is {settings.tokens}, fewer than 2 for each of the {ranks} processes"
        )
    # Each call in `run` has one KV head, whose query heads are distributed over the ranks.
    shared_by, head_ranks = settings.heads // settings.heads_kv, settings.head_ranks or 1
    if ranks % head_ranks or shared_by % head_ranks:
        raise click.UsageError(
            f"--head-ranks is {head_ranks}; expected a divisor of the {ranks} processes and of "
            f"the {shared_by} query heads of a key/value head"
        )


def mpi_world() -> Any | None:
    """Return MPI's communicator of all processes; None if MPI has not started this process."""
    if not any(variable in os.environ for variable in MPI_VARIABLES):
        return None
    try:
        from mpi4py import MPI
    except ImportError as error:
        sys.exit(f"Error: started by MPI, but there is no mpi4py ({error})")
    return MPI.COMM_WORLD


def over_mpi(world: Any, settings: Settings) -> None:
    require_fitting(settings, world.Get_size())
    group = parallel.Group(world, timeout=600)
    run(Place(np, group, np.dtype(np.float32)), settings)


def over_nccl(rank: int, ranks: int, names: Any, failures: Any, settings: Settings) -> None:
    """Run the process of one GPU."""
    try:
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(rank).use()
        if rank == 0:
            name = nccl.get_unique_id()
            for _ in range(ranks - 1):
                names.put(name)
        else:
            name = names.get()
        group = parallel.Group(nccl.NcclCommunicator(ranks, name, rank), timeout=600)
        run(Place(cupy, group, np.dtype(ml_dtypes.bfloat16)), settings)
    except Exception as error:
        failures.put(f"GPU {rank}: {told(error)}")
        sys.exit(1)


def start_ranks(gpus: int, settings: Settings) -> None:
    """Start a process for each GPU, and wait until all have ended or one has failed."""
    require_fitting(settings, gpus)
    context = multiprocessing.get_context("spawn")
    names, failures = context.Queue(), context.Queue()
    processes = [
        context.Process(target=over_nccl, args=(rank, gpus, names, failures, settings), daemon=True)
        for rank in range(gpus)
    ]
    for process in processes:
        process.start()
    are_running = True
    while are_running:
        # Read before the queue: a process that has ended has already reported its failure there.
        codes = [process.exitcode for process in processes]
        are_running = None in codes
        try:
            raise click.ClickException(failures.get(timeout=0.1))
        except queue.Empty:
            ended = [(gpu, code) for gpu, code in enumerate(codes) if code]
        if ended:
            gpu, code = ended[0]
            raise click.ClickException(f"the process of GPU {gpu} ended with {code}")


def gpus_to_use(asked: int | None) -> int:
    """Return the number of GPUs to use; raise a usage error if GPUs or NCCL are missing."""
    try:
        import cupy

        here = int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no GPU
        here = 0
    if asked is not None and asked > here:
        raise click.UsageError(f"--gpus is {asked}, but there are {here} GPUs here")
    if not here:
        raise click.UsageError(
            "no GPU here; start it by MPI: mpiexec -n 2 python examples/long_context.py"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*nccl library could not be loaded")
        from cupy.cuda import nccl
    if not nccl.available:
        raise click.UsageError("no NCCL here; pip install nvidia-nccl-cu13, or -cu12")
    return asked or here


def told(error: Exception) -> str:
    """Return one line for an expected error, and a traceback for any other."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, MemoryError):
        return f"out of memory; fewer --tokens take less ({error})"
    if isinstance(error, parallel.ParallelError):
        return str(error)
    return "".join(traceback.format_exception(error))


def program(world: Any | None) -> int:
    """Run `main` in this process; return the exit code. Only one process reports an error."""
    is_first = world is None or world.Get_rank() == 0
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        return main(standalone_mode=False, obj=world) or 0
    except click.UsageError as error:
        # All processes raise the same usage error, so only the first reports it.
        if is_first:
            click.echo(f"Error: {error.format_message()}", err=True)
        return error.exit_code
    except click.Abort:
        return 130
    except Exception as error:
        if not is_first:
            # The first process may be about to report the same error and end all processes.
            time.sleep(2)
        click.echo(f"Error: {told(error)}", err=True)
        if world is not None:
            # MPI ends all processes at once, and output that its launcher has not read is lost.
            time.sleep(0.5)
            world.Abort(1)
        return 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--tokens",
    type=click.IntRange(1, 2**40),
    help="Number of tokens; default: as many as the memory and --minutes allow.",
)
@click.option(
    "--heads",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Number of query heads.",
)
@click.option(
    "--kv-heads",
    "heads_kv",
    type=click.IntRange(1, 4096),
    default=4,
    show_default=True,
    help="Number of KV heads.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=1.0,
    show_default=True,
    help="Approximate time limit, which bounds the number of tokens if --tokens is not given.",
)
@click.option("--gpus", type=click.IntRange(1), help="Number of GPUs; default: all of this host.")
@click.option(
    "--head-ranks",
    type=click.IntRange(1),
    help="Processes per head-parallel group; 1 is ring attention only. Default: automatic.",
)
@click.pass_obj
def main(world: Any | None, gpus: int | None, **options: Any) -> None:
    """Compute attention over a long sequence on several GPUs or, with MPI, in CPU processes."""
    settings = Settings(**options)
    if settings.heads % settings.heads_kv:
        raise click.UsageError("--heads is no multiple of --kv-heads")
    if math.isnan(settings.minutes):
        raise click.UsageError("--minutes is nan; expected a time")
    if world is None:
        start_ranks(gpus_to_use(gpus), settings)
    elif gpus is None:
        over_mpi(world, settings)
    else:
        raise click.UsageError("--gpus does not go with MPI, whose processes compute in NumPy")


if __name__ == "__main__":
    sys.exit(program(mpi_world()))
