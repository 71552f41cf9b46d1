"""The command `cupy-flash tune`: time the legal tiles of a family, and save the best ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning import tuning
from cupy_flash.problem.device import Device, device_for_arch

from ..build.build import MOST_WORKERS, Builder
from ..build.compile import arch_option
from ..cases.cases import describe
from ..cases.lists import HEADS, option_name
from ..cases.mod_options import mod_options, modified, refuse_cases, split_cases
from ..cases.options import (
    EXISTING_FILE,
    FINITE,
    NEW_FILE,
    backward_option,
    count_option,
    defaults_of,
    overwritable_output_option,
    refuse_existing,
    sequence_cases,
    sequence_options,
    shape_options,
    writable_path,
)
from ..cases.workload import PRESETS, Weighted, groups_of, read_workload
from ..errors import library_errors_as_usage
from ..providers.providers import FAMILY_NAMES
from ..records import environment, report
from .candidates import Limits, illegal_sizes
from .findings import outcome_text, print_findings, print_ranking, ranking_row
from .heatmap import HeatMap, print_heat_map
from .job import TuneJob, label
from .journal import Finding, findings
from .live import Live
from .race import ranking
from .saver import Saver, require_writable
from .sweep import Compilation, Settings, Sweep, plan_sweeps, too_large_for

_GPU_DEFAULTS = defaults_of(batch=4, seqlen_q=4096, heads=16, head_dim=128, dtype="bfloat16")
_CPU_DEFAULTS = defaults_of(batch=1, seqlen_q=2048, heads=8, head_dim=64, dtype="float32")
_NO_TABLE = "tables of tuned tiles hold only calls without modifications"


def _table_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of a table that can be written; a file that exists must be a table."""
    if path is None:
        return None
    writable_path(path, (".json",))
    try:
        tuning.read_table(path)
    except tuning.TableError as error:
        raise click.BadParameter(str(error)) from error
    return path


@click.command()
@shape_options(_GPU_DEFAULTS, _CPU_DEFAULTS)
@sequence_options
@mod_options
@backward_option
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Named set of cases.")
@click.option(
    "--workload",
    type=EXISTING_FILE,
    help="Path of a .json or .csv file of weighted cases; see docs/guide/tuning.md.",
)
@count_option("--seed", 0, "Seed of random inputs.")
@click.option("--family", type=click.Choice(FAMILY_NAMES), help="Kernel family to tune.")
@click.option("--backend", type=click.Choice(["gpu", "cpu"]), help="Backend to tune.")
@click.option("--br", type=HEADS, help="Try only tiles with these numbers of query rows.")
@click.option("--bc", type=HEADS, help="Try only tiles with these numbers of key rows.")
@click.option("--max-smem", type=FINITE, help="Maximum shared memory of a thread block, in KiB.")
@click.option("--max-tiles", type=click.IntRange(1), help="Number of tiles to try, evenly chosen.")
@count_option(
    "--max-spills", 32, "Drop tiles whose kernels spill more than this many bytes per thread."
)
@click.option(
    "--min-gain",
    type=FINITE,
    default=2.0,
    show_default=True,
    help="Save only tiles that are at least this many percent faster than the default tile.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=f"Number of processes that compile; at most {MOST_WORKERS} are used. Default: number of "
    "CPUs.",
)
@count_option("--warmup", 1, "Number of untimed calls of a tile and case in each round.")
@count_option(
    "--repeats", 20, "Number of timed calls of a tile and case in the last round.", least=1
)
@count_option("--top", 20, "Number of rows to show.", least=1)
@click.option(
    "--table",
    type=NEW_FILE,
    callback=_table_file,
    help="Path of a .json table to save to, instead of the user's table.",
)
@click.option("--dry-run", is_flag=True, help="Save nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Save tiles that were measured on a busy machine, and overwrite an existing --output.",
)
@click.option("--report", "reporting", is_flag=True, help="Show the findings of earlier sweeps.")
@overwritable_output_option
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    backward: bool,
    preset: str | None,
    workload: Path | None,
    seed: int,
    family: str | None,
    backend: str | None,
    br: tuple[int, ...] | None,
    bc: tuple[int, ...] | None,
    max_smem: float | None,
    max_tiles: int | None,
    max_spills: int,
    min_gain: float,
    workers: int | None,
    warmup: int,
    repeats: int,
    top: int,
    table: Path | None,
    dry_run: bool,
    force: bool,
    reporting: bool,
    output: Path | None,
    arch: str | None,
    **options: Any,
) -> None:
    """Time every legal tile of a kernel family on the given shapes, and save the best.

    Options for shapes take lists: every combination becomes a case. Cases of one problem class are
    timed together. A tile is saved if it beats the family's default by --min-gain percent; the
    dispatcher then uses it for that GPU and class, until the family's sources change. Nothing is
    saved for cases with modifications or, without --force, on a machine that is busy. An
    interrupted sweep continues where it stopped. The exit code is 1 if a tile's result fails its
    check, or if a tile is not saved because the machine was busy.
    """
    case_options = split_cases(options)
    if reporting:
        _refuse_given(
            ctx, set(ctx.params) - {"reporting", "output", "force"}, "--report, which times nothing"
        )
        refuse_existing(output, force=force)
        _report(output)
        return
    on_cpu = backend == "cpu"
    if on_cpu:
        if arch or family:
            raise click.UsageError("--backend cpu has no --arch and no --family")
        _refuse_given(ctx, {"max_smem", "max_spills", "workers"}, "--backend cpu")
    if arch is not None:
        _refuse_given(ctx, {"table", "min_gain", "repeats", "warmup", "seed"}, "--arch")
    cases = _cases(case_options, preset, workload, seed=seed, on_cpu=on_cpu, backward=backward)
    if on_cpu and not all(each.case.is_dense and not each.case.is_backward for each in cases):
        raise click.UsageError(
            "--backend cpu has no tuned tiles for caches, packed sequences and gradients"
        )
    if any(weighted.case.flops() == 0 for weighted in cases):
        raise click.UsageError("a shape has nothing to compute, so no tile is the best for it")
    groups = groups_of(cases)
    device = None if on_cpu else _device(arch)
    are_modified = [group.is_modified for group in groups]
    if all(are_modified) and table:
        raise click.UsageError(
            f"--table {table} would receive no tile: {_NO_TABLE}; leave out --table"
        )
    limits = Limits(br, bc, max_smem, max_spills, max_tiles)
    with library_errors_as_usage():
        # All sweeps are planned first, so that a wrong option shows before anything is compiled.
        sweeps = plan_sweeps(groups, device, family, limits)
    if (br or bc) and not any(_has_size(sweep, br, bc) for sweep in sweeps):
        everything = plan_sweeps(groups[:1], device, family, Limits())[0]
        if not _has_size(everything, br, bc):
            raise click.UsageError(_no_such_size(everything, br, bc))
    if arch is not None:
        assert device is not None
        refuse_existing(output, force=force)
        _rank_by_resources(sweeps, device, limits, workers, top, output)
        return
    saver = None
    if not dry_run and not all(are_modified):
        require_writable(table)
        saver = Saver(table, device, limits.exclude_nothing, _command(), force=force)
    sweeps = _that_fit(sweeps)
    settings = Settings(seed, warmup, repeats)
    name = device.name if device else environment.cpu_name()
    job = TuneJob(sweeps, device, name, limits, settings, min_gain, saver)
    # A resumed sweep continues its existing record.
    refuse_existing(output, force=force or job.goes_on)
    rows: list[dict[str, Any]] = []

    def show() -> None:
        if sweep := job.only:
            _show(sweep, next(iter(job.found), None), device, limits, name, top)
        else:
            print_findings(job.found, name)

    def head() -> dict[str, Any]:
        reasons = filter(None, (finding["unreliable"] for finding in job.found))
        return environment.metadata(name) | {"unreliable": next(reasons, None)}

    with report.kept(output, rows, head, show) as save:
        job.run(workers, rows, save)
    found = job.found
    # The findings include those of an earlier command that was interrupted.
    if saver:
        click.echo(saver.save(found))
    elif dry_run:
        click.echo("Nothing saved (--dry-run).")
    if any(are_modified):
        click.echo(f"Not saved with modifications: {_NO_TABLE}.")
    busy = [f for f in found if f["not_stored"] and f["not_stored"] == f["unreliable"]]
    if busy:
        click.echo(
            f"Not saved: the best tile of {len(busy)} of {len(found)} classes, as the machine was "
            "busy while it was timed. Tune again when it is idle; --force saves nonetheless.",
            err=True,
        )
    failed = any(finding["failed"] for finding in found)
    if failed:
        click.echo("!: a tile's result differs from the reference; it was not saved.", err=True)
    if busy or failed or all(finding["best_tile"] is None for finding in found):
        ctx.exit(1)


tune = arch_option(tune, multiple=False)


def _cases(
    options: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
    preset: str | None,
    workload: Path | None,
    *,
    seed: int,
    on_cpu: bool,
    backward: bool,
) -> list[Weighted]:
    """Return the cases of the preset, of the workload or of the options; see `split_cases`."""
    if preset and workload:
        raise click.UsageError("--preset cannot be combined with --workload: both define the cases")
    if preset and on_cpu:
        raise click.UsageError(f"--preset {preset} is for GPUs; leave --backend cpu out")
    if preset or workload:
        source = f"--preset {preset}" if preset else "--workload"
        other = f"{source}, which defines the cases"
        refuse_cases(*options, backward=backward, other=other)
    if preset:
        return PRESETS[preset]()
    if workload:
        return read_workload(workload)
    shape, sequences, mods = options
    defaults = _CPU_DEFAULTS if on_cpu else _GPU_DEFAULTS
    found = sequence_cases(sequences, shape, defaults, seed=seed, on_gpu=not on_cpu)
    return [Weighted(case) for case in modified(found, mods, backward=backward)]


def _device(arch: str | None) -> Device:
    if arch is None:
        if reason := gpu_unavailable():
            raise click.UsageError(
                f"no GPU to tune on ({reason}); --backend cpu tunes the CPU tiles, --arch sm_90 "
                "compiles the sweep and ranks it by resources"
            )
        return current_device()
    with library_errors_as_usage():
        return device_for_arch(arch)


def _that_fit(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Return the sweeps whose arrays fit the free memory; print why others are left out."""
    reasons = [too_large_for(sweep) for sweep in sweeps]
    for sweep, reason in zip(sweeps, reasons, strict=True):
        if reason:
            text = f"{label(sweep)}: {reason}"
            if all(reasons):
                raise click.UsageError(text)
            click.echo(f"Left out: {text}", err=True)
    return [sweep for sweep, reason in zip(sweeps, reasons, strict=True) if not reason]


def _refuse_given(ctx: click.Context, names: set[str], other: str) -> None:
    """Raise a usage error if any of these parameters was given on the command line."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in names and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} cannot be combined with {other}")


def _has_size(sweep: Sweep, br: tuple[int, ...] | None, bc: tuple[int, ...] | None) -> bool:
    tiles = [candidate.tile for candidate in sweep.candidates]
    return any((not br or t.Br in br) and (not bc or t.Bc in bc) for t in tiles)


def _no_such_size(everything: Sweep, br: tuple[int, ...] | None, bc: tuple[int, ...] | None) -> str:
    """Return the requested sizes and those that exist; Bc only for the given Br."""
    tiles = [candidate.tile for candidate in everything.candidates]
    of_br = [tile for tile in tiles if not br or tile.Br in br]
    parts = []
    for option, given, sizes in (
        ("--br", br, {tile.Br for tile in tiles}),
        ("--bc", bc, {tile.Bc for tile in of_br or tiles}),
    ):
        if given is not None and not sizes & set(given):
            requested, known = (", ".join(map(str, sorted(n))) for n in (set(given), sizes))
            parts.append(f"{option} {requested}: expected some of {known}")
    with_br = f" with --br {', '.join(map(str, br))}" if br and of_br else ""
    return f"no tile of {everything.family} is that size; {'; '.join(parts)}{with_br}"


def _title(sweep: Sweep, device: str) -> str:
    shared, own = describe([each.case for each in sweep.group.cases])
    parts = [sweep.family, shared, " + ".join(filter(None, own)), device]
    return ", ".join(filter(None, parts))


def _show(
    sweep: Sweep,
    finding: Finding | None,
    device: Device | None,
    limits: Limits,
    name: str,
    top: int,
) -> None:
    """Print a sweep's tiles and its finding; without a finding the sweep is not complete."""
    title = _title(sweep, name)
    is_saved = finding is not None and finding["stored"]
    print_ranking(ranking(sweep.candidates), title, top, is_saved=is_saved)
    problem = sweep.candidates[0].plan.problem
    illegal = illegal_sizes(problem, device, sweep.family, limits) if device else {}
    print_heat_map(report.console(), HeatMap.of(title, sweep.candidates, illegal))
    if finding is None:
        click.echo("The sweep is not complete, so nothing is saved.")
    else:
        outcome = outcome_text(finding)
        click.echo(f"The best tile: {outcome}." if finding["best_tile"] else f"{outcome}.")


def _rank_by_resources(
    sweeps: Sequence[Sweep],
    device: Device,
    limits: Limits,
    workers: int | None,
    top: int,
    output: Path | None,
) -> None:
    done: list[Sweep] = []
    rows: list[dict[str, Any]] = []

    def show() -> None:
        for sweep in done:
            print_ranking(ranking(sweep.candidates), _title(sweep, device.name), top)
            click.echo(f"Nothing was timed: ranked by resources for {device.sm}, nothing saved.")

    keeping = report.kept(output, rows, lambda: environment.metadata(device.name), show)
    with keeping as save, Builder(workers) as builder, Live(len(sweeps)) as live:
        compilation = Compilation(builder, None, limits.max_spills)
        for sweep in sweeps:
            live.begin(label(sweep))
            compilation.finish(sweep.candidates, live)
            done.append(sweep)
            rows += [ranking_row(c, rank) for rank, c in enumerate(ranking(sweep.candidates), 1)]
            save()


def _command() -> str:
    ctx = click.get_current_context()
    given = [
        f"{option_name(name)} {ctx.params[name]}"
        for name in ("preset", "workload", "family", "min_gain")
        if ctx.params.get(name) is not None
    ]
    return " ".join(["cupy-flash tune", *given])


def _report(output: Path | None) -> None:
    """Print the newest finding of each problem class and device in the journals, timing nothing."""
    newest: dict[tuple[str, str, str], Finding] = {}
    for finding in findings():
        # Journals of versions without gradients have no direction.
        kernels = (finding["family"], finding.get("direction", "forward"))
        if finding["kernel_digest"] == environment.digest_of(*kernels):
            key = (finding["device"], finding["family"], finding["problem_class"])
            newest[key] = finding
    if not newest:
        click.echo("No sweep of these kernels has been run; 'cupy-flash tune' runs one.")
        return

    def show() -> None:
        for device in dict.fromkeys(key[0] for key in newest):
            print_findings([f for key, f in newest.items() if key[0] == device], device)

    head = environment.metadata(next(iter(newest))[0])
    report.keep(output, report.Record(head, list(newest.values())), show)
