"""`cupy-flash compile`: build kernels ahead of use, with or without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.compiler import CUBINS_VARIABLE, kernel_cache_dir
from cupy_flash.device import ARCHITECTURES, Device, device_for_arch, gpu_unavailable
from cupy_flash.planner import Plan

from . import kernel_sets, report
from .build import Built, Job, build, write_cubin
from .providers import current_device

# Built for where no GPU says otherwise.
_USUAL_ARCH = "sm_90"


class Architecture(click.ParamType):
    """An architecture that kernels are built for, named as the compiler does however spelled."""

    name = "architecture"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return device_for_arch(value).sm
        except ValueError as error:
            self.fail(str(error), param, ctx)


def arch_option(command: Any, *, multiple: bool) -> Any:
    """Add `--arch`."""
    known = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
    return click.option(
        "--arch",
        type=Architecture(),
        multiple=multiple,
        metavar="sm_NN",
        help=f"Architecture, sm_90 or 90, no GPU needed: {known}.",
    )(command)


@click.command("compile")
@click.option("--all", "everything", is_flag=True, help="All that the planner may choose.")
@click.option("--list", "listing", is_flag=True, help="Name the kernels and build none.")
@click.option("--workers", type=click.IntRange(1), help="Processes; as many as CPUs if left out.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Write cubins here, for use with {CUBINS_VARIABLE} set to the folder.",
)
@click.pass_context
def compile_kernels(
    ctx: click.Context,
    /,
    everything: bool,
    listing: bool,
    workers: int | None,
    output: Path | None,
    arch: tuple[str, ...],
) -> None:
    """Build kernels ahead of use and report what each takes.

    On a GPU the kernels go into CuPy's cache, unless --output or --arch is given. Exits with 1 if
    one does not compile.
    """
    if listing and output is not None:
        raise click.UsageError("--list builds nothing to write; leave out --list or --output")
    load = not arch and output is None and gpu_unavailable() is None
    devices = _devices(arch)
    choose = kernel_sets.all_plans if everything else kernel_sets.default_plans
    plans = [plan for device in devices for plan in choose(device)]
    if listing:
        for plan in plans:
            click.echo(f"{_sm(plan)}  {_title(plan)}")
        return
    if output is not None:
        _make_folder(output)
    jobs = [Job.of(plan) for plan in plans]
    results: dict[int, Built] = {}
    with report.progress("compile", len(jobs)) as advance:
        for index, built in build(jobs, workers, load=load):
            advance(_title(plans[index]))
            results[index] = built
            if output is not None and built.cubin is not None:
                write_cubin(output, jobs[index], built.cubin)
    rows = [_row(plan, results[index]) for index, plan in enumerate(plans)]
    _print(rows, devices)
    failed = [built.error for built in results.values() if built.error]
    if output is not None:
        click.echo(
            f"{len(plans) - len(failed)} cubins in {output}; "
            f"use them with {CUBINS_VARIABLE}={output}"
        )
    elif load:
        click.echo(f"Kept in {kernel_cache_dir()}")
    else:
        click.echo("Not kept: --output DIR writes the cubins.")
    for error in failed:
        click.echo(f"\n{error}", err=True)
    if failed:
        click.echo(f"\n{len(failed)} of {len(plans)} kernels do not compile", err=True)
        ctx.exit(1)


compile_kernels = arch_option(compile_kernels, multiple=True)


def _devices(arch: Sequence[str]) -> list[Device]:
    if not arch and gpu_unavailable() is None:
        return [current_device()]
    return [device_for_arch(name) for name in dict.fromkeys(arch or (_USUAL_ARCH,))]


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.BadParameter(
            f"{str(path)!r} cannot be written: {error.strerror}", param_hint="--output"
        ) from error


def _title(plan: Plan) -> str:
    assert plan.unit is not None
    return plan.unit.title


def _sm(plan: Plan) -> str:
    assert plan.device is not None
    return plan.device.sm


def _row(plan: Plan, built: Built) -> dict[str, Any]:
    resources = built.resources
    static = resources.static_shared_memory if resources else 0
    return {
        "arch": _sm(plan),
        "kernel": _title(plan).partition(" tile ")[0],
        "tile": report.tile_text(plan.tile),
        "legend": report.tile_legend(plan.family, plan.tile),
        "registers": resources.registers if resources else None,
        "spills": resources.spill_bytes if resources else None,
        "shared_memory": plan.shared_memory + static,
        "seconds": built.cubin.seconds if built.cubin else None,
        "failed": built.error is not None,
    }


def _print(rows: Sequence[dict[str, Any]], devices: Sequence[Device]) -> None:
    columns = [
        report.Column("kernel", lambda row: row["kernel"], numeric=False),
        report.Column("tile", lambda row: row["tile"], numeric=False),
        report.Column("regs", _registers_text),
        report.Column("spills", lambda row: report.number(row["spills"], "d")),
        report.Column("KiB", lambda row: f"{row['shared_memory'] / 1024:.1f}"),
    ]
    if any(row["seconds"] is not None for row in rows):
        columns.append(report.Column("s", lambda row: report.number(row["seconds"], ".1f")))
    for device in devices:
        group = [row for row in rows if row["arch"] == device.sm]
        report.print_table(report.console(), f"{len(group)} kernels, {device.sm}", columns, [group])
    report.print_notes(report.console(), dict.fromkeys(f"{row['legend']}." for row in rows))
    click.echo("regs, spills: registers and bytes per thread. KiB: shared memory of a block.")


def _registers_text(row: report.Row) -> str:
    return "FAILED" if row["failed"] else report.number(row["registers"], "d")
