"""`cupy-flash tune`: time every legal tile of a family and save the best."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash import cpu, tuning
from cupy_flash.attention import flash_attention
from cupy_flash.compiler import CUBINS_VARIABLE
from cupy_flash.device import Device, Resources, device_for_arch, gpu_unavailable
from cupy_flash.families import FAMILIES
from cupy_flash.planner import Plan, make_cpu_plan, make_plan, plan_tile
from cupy_flash.problem import Problem
from cupy_flash.tile import Tile

from . import environment, report
from .build import Job, build, write_cubin
from .cases import Case, describe
from .check import Check
from .compile import arch_option
from .errors import library_errors_as_usage
from .inputs import random_inputs
from .options import cases_from, output_option, shape_options, split_shape
from .providers import current_device, release_memory
from .timing import GpuTimer, HostTimer, Timed, Timer, spread

_GPU_DEFAULTS = {
    "batch": (4,),
    "seqlen_q": (4096,),
    "heads": (16,),
    "head_dim": (128,),
    "dtype": ("bfloat16",),
}
_CPU_DEFAULTS = {
    "batch": (1,),
    "seqlen_q": (2048,),
    "heads": (8,),
    "head_dim": (64,),
    "dtype": ("float32",),
}
# Every tile is timed a few times; the best, and as many more as are close to them, then take turns
# for the full number of repeats.
_FIRST_REPEATS = 3
_CLOSE = 1.15
_FEWEST_FINALISTS = 4
_MOST_FINALISTS = 8


@dataclass
class Candidate:
    """One tile, and what came of it."""

    plan: Plan
    resources: Resources | None = None
    dropped: str | None = None
    max_error: float | None = None
    failed: bool = False
    median_ms: float | None = None
    final: bool = False

    @property
    def tile(self) -> Tile:
        return self.plan.tile

    @property
    def tflops(self) -> float | None:
        return self.plan.problem.flops() / self.median_ms / 1e9 if self.median_ms else None

    @property
    def blocks_per_sm(self) -> int | None:
        """Blocks that fit an SM; None where registers are not known."""
        if self.resources is None:
            return None
        return dataclasses.replace(self.plan, resources=self.resources).blocks_per_sm()


def limited(tiles: Sequence[Tile], default: Tile, most: int | None) -> list[Tile]:
    """At most `most` tiles, evenly out of all, the default among them."""
    if most is None or len(tiles) <= most:
        return list(tiles)
    others = [tile for tile in tiles if tile != default]
    step = len(others) / max(1, most - 1)
    return [default, *(others[int(index * step)] for index in range(most - 1))]


def gpu_candidates(
    problem: Problem, device: Device, family: str | None, most: int | None
) -> list[Candidate]:
    """The legal tiles of a family, by default of the one that the planner would choose."""
    default = make_plan(problem, device, family=family)
    the_family = FAMILIES[default.family]
    legal = list(the_family.tiles(problem, device))
    return [
        Candidate(plan_tile(the_family, problem, device, tile, reason="tuning"))
        for tile in limited(legal, the_family.default_tile(problem, device), most)
    ]


def cpu_candidates(problem: Problem, most: int | None) -> list[Candidate]:
    """The CPU backend's tiles that are worth timing."""
    tiles = limited(list(cpu.candidate_tiles(problem)), cpu.default_tile(problem), most)
    return [Candidate(make_cpu_plan(problem, tile, gpu_unavailable())) for tile in tiles]


def compile_all(
    candidates: Sequence[Candidate], workers: int | None, max_spills: int, folder: Path | None
) -> None:
    """Compile every candidate, note its resources, and drop what fails or spills.

    Parameters
    ----------
    folder
        Where to keep the machine code of those that stay; None to keep none.
    """
    jobs = [Job.of(candidate.plan) for candidate in candidates]
    with report.progress("compile", len(jobs)) as advance:
        for index, built in build(jobs, workers):
            candidate = candidates[index]
            advance(str(candidate.tile))
            candidate.resources = built.resources
            if built.error or built.resources is None:
                candidate.dropped = "does not compile"
                click.echo(built.error, err=True)
            elif built.resources.spill_bytes > max_spills:
                candidate.dropped = f"spills {built.resources.spill_bytes} bytes per thread"
            elif folder is not None and built.cubin is not None:
                write_cubin(folder, jobs[index], built.cubin)


@contextlib.contextmanager
def prebuilt_from(folder: Path) -> Iterator[None]:
    """Have the library load kernels from a folder of cubins."""
    before = os.environ.get(CUBINS_VARIABLE)
    os.environ[CUBINS_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CUBINS_VARIABLE]
        else:
            os.environ[CUBINS_VARIABLE] = before


def time_all(
    candidates: Sequence[Candidate],
    call_of: Callable[[Candidate], Callable[[], Any]],
    check: Check,
    timer: Timer,
    *,
    warmup: int,
    repeats: int,
) -> None:
    """Check and time the candidates that were not dropped, the best of them twice."""
    running = [candidate for candidate in candidates if candidate.dropped is None]
    with report.progress("time", len(running)) as advance:
        for candidate in running:
            advance(str(candidate.tile))
            call = call_of(candidate)
            try:
                candidate.max_error = check.error(call())
            except (RuntimeError, MemoryError) as error:
                candidate.dropped = (str(error) or type(error).__name__).splitlines()[0]
                continue
            candidate.failed = not candidate.max_error <= check.coverage.bound
            (times,) = timer.interleaved([Timed(call)], 1, [_FIRST_REPEATS])
            candidate.median_ms = spread(times).median
    ranked = ranking(running)
    if not ranked or ranked[0].median_ms is None:
        return
    limit = _CLOSE * ranked[0].median_ms
    finalists = [
        candidate
        for rank, candidate in enumerate(ranked[:_MOST_FINALISTS])
        if candidate.median_ms is not None
        and (rank < _FEWEST_FINALISTS or candidate.median_ms <= limit)
    ]
    calls = [Timed(call_of(candidate)) for candidate in finalists]
    all_times = timer.interleaved(calls, warmup, [repeats] * len(calls))
    for candidate, times in zip(finalists, all_times, strict=True):
        candidate.median_ms = spread(times).median
        candidate.final = True


def ranking(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates by time, those that passed and reached the last round first.

    Where nothing was timed, by resources: no spills, then many resident threads, then large
    tiles, which read keys and values less often.
    """

    def key(candidate: Candidate) -> tuple[Any, ...]:
        if candidate.median_ms is not None:
            return (0, candidate.failed, not candidate.final, candidate.median_ms)
        spills = candidate.resources.spill_bytes if candidate.resources else 0
        threads = (candidate.blocks_per_sm or 0) * candidate.plan.threads
        area = candidate.tile.Br * candidate.tile.Bc
        return (1, candidate.dropped is not None, spills, -threads, -area)

    return sorted(candidates, key=key)


def _row(candidate: Candidate, rank: int) -> dict[str, Any]:
    plan, resources = candidate.plan, candidate.resources
    problem = plan.problem
    static = resources.static_shared_memory if resources else 0
    return {
        "rank": rank,
        "family": plan.family,
        "kernel_digest": FAMILIES[plan.family].digest() if plan.device else cpu.digest(),
        "device": plan.device.name if plan.device else environment.cpu_name(),
        "problem_class": tuning.problem_class(problem),
        "tile": dataclasses.asdict(candidate.tile),
        "median_ms": candidate.median_ms,
        "tflops": candidate.tflops,
        "max_error": (None if candidate.max_error is None else report.finite(candidate.max_error)),
        "check": (
            "skipped" if candidate.max_error is None else "failed" if candidate.failed else "passed"
        ),
        "registers": resources.registers if resources else None,
        "shared_memory": plan.shared_memory + static if plan.device else None,
        "spills": resources.spill_bytes if resources else None,
        "blocks_per_sm": candidate.blocks_per_sm,
        "dropped": candidate.dropped,
    }


def _print(rows: Sequence[dict[str, Any]], title: str, legend: str, top: int) -> None:
    on_gpu = any(row["registers"] is not None for row in rows)
    timed = any(row["median_ms"] is not None for row in rows)
    shown = [row for row in rows if row["dropped"] is None][:top]
    columns = [report.Column("tile", lambda row: row["text"], numeric=False)]
    if timed:
        columns += [
            report.rate_column(shown),
            report.Column("ms", lambda row: report.milliseconds(row["median_ms"])),
            report.Column("error", report.error_text),
        ]
    if on_gpu:
        columns += [
            report.Column("regs", lambda row: report.number(row["registers"], "d")),
            report.Column("KiB", lambda row: f"{row['shared_memory'] / 1024:.1f}"),
            report.Column("spills", lambda row: report.number(row["spills"], "d")),
            report.Column("blocks", lambda row: report.number(row["blocks_per_sm"], "d")),
        ]
    out = report.console()
    report.print_table(out, title, columns, [shown])
    dropped = [row["dropped"] for row in rows if row["dropped"] is not None]
    notes = []
    if len(shown) + len(dropped) < len(rows):
        notes.append(f"The best {len(shown)} of {len(rows)}; --output writes all.")
    if on_gpu:
        notes.append(legend + ".")
        notes.append("KiB: shared memory of a block. spills: bytes per thread. blocks: per SM.")
    notes += [f"dropped: {reason}" for reason in dropped]
    report.print_notes(out, notes)


def _list_saved() -> None:
    path = tuning.user_table_path()
    saved = tuning.read_table(path)
    if not saved:
        click.echo(f"No tiles are saved in {path}")
        return
    click.echo(f"{len(saved)} saved in {path}")
    for entry in saved:
        fields = " ".join(f"{name}={value}" for name, value in entry.tile.items())
        stale = "" if entry.digest == _digest(entry.family) else ", stale: other sources"
        click.echo(
            f"{entry.gpu}, {entry.family}, {entry.problem_class}: {fields} "
            f"({entry.tflops:.4g} TFLOP/s{stale})"
        )


def _digest(family: str) -> str | None:
    if family == "cpu":
        return cpu.digest()
    return FAMILIES[family].digest() if family in FAMILIES else None


@click.command()
@shape_options
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@click.option("--family", type=click.Choice(list(FAMILIES)), help="Kernel family to tune.")
@click.option("--backend", type=click.Choice(["gpu", "cpu"]), help="What to tune for.")
@click.option("--max-tiles", type=click.IntRange(1), help="Try only so many tiles, evenly chosen.")
@click.option(
    "--max-spills",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Drop tiles that spill more bytes per thread.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes that compile.")
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=20, show_default=True)
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Rows to show.")
@click.option("--dry-run", is_flag=True, help="Save nothing.")
@click.option("--list", "listing", is_flag=True, help="Show what is saved.")
@click.option("--clear", is_flag=True, help="Remove what is saved.")
@output_option
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    seed: int,
    family: str | None,
    backend: str | None,
    max_tiles: int | None,
    max_spills: int,
    workers: int | None,
    warmup: int,
    repeats: int,
    top: int,
    dry_run: bool,
    listing: bool,
    clear: bool,
    output: Path | None,
    arch: str | None,
    **options: Any,
) -> None:
    """Time every legal tile of a kernel family on the given shapes and save the fastest.

    The dispatcher then uses it for that GPU and class of problems, until the family's sources
    change. Exits with 1 if a tile's result fails its check.
    """
    if listing:
        _list_saved()
        return
    if clear:
        click.echo(f"{tuning.clear()} entries removed")
        return
    on_cpu = _runs_on_cpu(backend, arch, family)
    cases = cases_from(split_shape(options), _CPU_DEFAULTS if on_cpu else _GPU_DEFAULTS)
    device = None if on_cpu else _device(arch)
    with library_errors_as_usage():
        # All problems first: a wrong option shows before anything is compiled.
        sweeps = [
            gpu_candidates(case.problem(), device, family, max_tiles)
            if device
            else cpu_candidates(case.problem(), max_tiles)
            for case in cases
        ]
    rows: list[dict[str, Any]] = []
    any_failed = False
    for case, candidates in zip(cases, sweeps, strict=True):
        with tempfile.TemporaryDirectory(prefix="cupy_flash_tune_") as folder:
            if device:
                compile_all(candidates, workers, max_spills, None if arch else Path(folder))
            if arch is None:
                with prebuilt_from(Path(folder)):
                    _measure(case, candidates, seed, warmup, repeats)
        ranked = ranking(candidates)
        case_rows = [_row(candidate, rank) for rank, candidate in enumerate(ranked, 1)]
        rows += case_rows
        label = f"{ranked[0].plan.family}, {describe([case])[0]}, {case_rows[0]['device']}"
        texts = [{"text": report.tile_text(candidate.tile)} for candidate in ranked]
        legend = report.tile_legend(ranked[0].plan.family, ranked[0].tile)
        _print([row | text for row, text in zip(case_rows, texts, strict=True)], label, legend, top)
        any_failed |= any(candidate.failed for candidate in candidates)
        _settle(ranked[0], arch, dry_run)
    if output:
        report.write(output, report.Record(environment.metadata(rows[0]["device"]), rows))
        click.echo(f"Written to {output}.", err=True)
    if any_failed:
        click.echo("!: a tile's result is not that of the reference; it was not saved.", err=True)
        ctx.exit(1)


tune = arch_option(tune, multiple=False)


def _runs_on_cpu(backend: str | None, arch: str | None, family: str | None) -> bool:
    if backend == "cpu":
        if arch or family:
            raise click.UsageError("--backend cpu has no --arch and no --family")
        return True
    if arch is None and (reason := gpu_unavailable()):
        raise click.UsageError(
            f"no GPU to tune on ({reason}); --backend cpu tunes the CPU tiles, --arch sm_90 "
            "compiles the sweep and ranks it by resources"
        )
    return False


def _device(arch: str | None) -> Device:
    if arch is None:
        return current_device()
    with library_errors_as_usage():
        return device_for_arch(arch)


def _measure(
    case: Case, candidates: Sequence[Candidate], seed: int, warmup: int, repeats: int
) -> None:
    on_gpu = candidates[0].plan.device is not None
    inputs = random_inputs(case, seed, on_gpu=on_gpu)
    q, k, v = inputs.gpu if on_gpu else inputs.host

    def call_of(candidate: Candidate) -> Callable[[], Any]:
        return functools.partial(
            flash_attention,
            q,
            k,
            v,
            backend="auto" if on_gpu else "cpu",
            family=candidate.plan.family,
            tile=dataclasses.asdict(candidate.tile),
            **case.arguments,
        )

    timer: Timer = GpuTimer() if on_gpu else HostTimer()
    check = Check(inputs, seed, on_gpu=on_gpu)
    time_all(candidates, call_of, check, timer, warmup=warmup, repeats=repeats)
    release_memory()


def _settle(best: Candidate, arch: str | None, dry_run: bool) -> None:
    """Save the winner, or say why it is not saved."""
    if arch is not None:
        click.echo(f"Nothing was timed: ranked by resources for {arch}, nothing saved.")
    elif best.tflops is None or best.failed:
        click.echo("No tile ran and passed its check: nothing saved.")
    elif dry_run:
        click.echo(f"{best.tile} is the fastest; nothing saved (--dry-run).")
    else:
        plan = best.plan
        entry = tuning.Entry(
            gpu=plan.device.name if plan.device else "cpu",
            family=plan.family,
            digest=FAMILIES[plan.family].digest() if plan.device else cpu.digest(),
            problem_class=tuning.problem_class(plan.problem),
            tile=dataclasses.asdict(best.tile),
            tflops=best.tflops,
        )
        click.echo(f"{best.tile} is the fastest; saved in {tuning.save(entry)}")
