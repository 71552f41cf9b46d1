"""The command `cupy-flash compile`: build kernels ahead of use, with or without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash.gpu.compiler import CUBINS_VARIABLE
from cupy_flash.gpu.environment import (
    current_device,
    gpu_unavailable,
    kernel_cache_dir,
    prepare_cupy_cache,
)
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.device import ARCHITECTURES, Device, device_for_arch

from ..cases.lists import completed
from ..cases.options import make_folder
from ..records import report
from . import kernel_sets
from .build import MOST_WORKERS, Built, Job, build, write_cubin


def _architectures(
    ctx: click.Context, param: click.Parameter, given: Sequence[str]
) -> tuple[str, ...]:
    """Return the architectures to build for, in the compiler's spelling."""
    names = [name.strip() for text in given for name in text.split(",")]
    try:
        return tuple(dict.fromkeys(device_for_arch(name).sm for name in names))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _architecture(ctx: click.Context, param: click.Parameter, given: str | None) -> str | None:
    result = _architectures(ctx, param, () if given is None else (given,))
    if len(result) > 1:
        raise click.BadParameter(f"{given!r} is a list; expected one architecture")
    return result[0] if result else None


def arch_option(command: Any, *, multiple: bool) -> Any:
    """Add `--arch`, which takes one or several architectures."""
    names = [f"sm_{number}" for number in ARCHITECTURES]
    example = "sm_80,sm_90" if multiple else "sm_90 or 90"
    return click.option(
        "--arch",
        multiple=multiple,
        callback=_architectures if multiple else _architecture,
        metavar="sm_NN",
        shell_complete=lambda ctx, param, incomplete: completed(names, incomplete),
        help=f"Architecture to compile for, such as {example}; needs no GPU. {', '.join(names)}.",
    )(command)


def _folder(ctx: click.Context, param: click.Parameter, given: str | None) -> Path | None:
    # The value of an unset shell variable is empty, and would mean the current folder.
    if given == "":
        raise click.BadParameter("'' is an empty name; expected a folder")
    return None if given is None else Path(given)


@click.command("compile")
@click.option(
    "--all", "everything", is_flag=True, help="Build a representative set for every family."
)
@click.option("--list", "listing", is_flag=True, help="List the kernels without building them.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=f"Number of processes; at most {MOST_WORKERS} are used. Default: number of CPUs.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False),
    callback=_folder,
    help=f"Write cubins to this folder; the library uses them if {CUBINS_VARIABLE} names it.",
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
    """Build kernels ahead of use, and report the resources of each.

    On a GPU the kernels go into CuPy's cache, unless --output or --arch is given. Without a GPU,
    --arch is required. The exit code is 1 if a kernel does not compile.
    """
    if listing and output is not None:
        raise click.UsageError("--list builds nothing to write; leave out --list or --output")
    load = not arch and output is None and gpu_unavailable() is None
    devices = _devices(arch)
    kernels = [kernel for device in devices for kernel in _kernels(device, everything=everything)]
    if listing:
        for kernel in kernels:
            click.echo(f"{kernel.job.device.sm}  {kernel.title}")
        return
    if output is not None:
        make_folder(output)
    jobs = [kernel.job for kernel in kernels]
    names = ", ".join(device.sm for device in devices)
    kept = " into CuPy's cache" if load else "; not kept without --output DIR"
    kept = kept if output is None else f" into {output}"
    click.echo(f"Compiling {len(jobs)} kernels for {names}{kept}.", err=True)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []

    def show() -> None:
        _print(sorted(rows, key=lambda row: row["index"]), devices)
        if output is not None:
            written = len(rows) - len(failed)
            click.echo(f"{written} cubins in {output}; use them with {CUBINS_VARIABLE}={output}")
        elif load:
            refused = prepare_cupy_cache()
            not_kept = f"Not kept: {kernel_cache_dir()} cannot be written ({refused})"
            click.echo(not_kept if refused else f"Kept in {kernel_cache_dir()}")
        else:
            click.echo("Not kept: --output DIR writes the cubins.")

    keeping = report.kept(None, rows, dict, show)
    with keeping, report.progress("compile", len(jobs)) as advance:
        for index, built in build(jobs, workers, load=load):
            advance(kernels[index].title)
            if output is not None and built.cubin is not None:
                write_cubin(output, jobs[index], built.cubin)
            if built.error:
                failed.append(built.error)
            rows.append(_row(kernels[index], built) | {"index": index})
    for error in failed:
        click.echo(f"\n{error}", err=True)
    if failed:
        click.echo(f"\n{len(failed)} of {len(kernels)} kernels do not compile", err=True)
        ctx.exit(1)


compile_kernels = arch_option(compile_kernels, multiple=True)


def _devices(arch: Sequence[str]) -> list[Device]:
    if arch:
        return [device_for_arch(name) for name in arch]
    if reason := gpu_unavailable():
        raise click.UsageError(
            f"no GPU to compile for ({reason}); name an architecture, for example --arch sm_90"
        )
    return [current_device()]


@dataclass(frozen=True)
class _Kernel:
    """A kernel to build; `plan` is None if it is not an attention kernel."""

    job: Job
    plan: Plan | None = None

    @property
    def title(self) -> str:
        """Family, dtype and sizes, layout of the keys, and tile."""
        name, tile, sizes = self.job.unit.title.partition(" tile ")
        return name + _layout_text(self.plan) + tile + sizes


def _kernels(device: Device, *, everything: bool) -> list[_Kernel]:
    choose = kernel_sets.all_plans if everything else kernel_sets.default_plans
    result = [_Kernel(Job.of(plan), plan) for plan in choose(device)]
    for unit in kernel_sets.other_units(everything=everything):
        result.append(_Kernel(Job(unit, device, ((unit.main_entry, 0),))))
    return result


def _layout_text(plan: Plan | None) -> str:
    """Return the layout of the keys as text; empty for dense batches."""
    layout = plan.problem.layout if plan else None
    if layout is None or layout.is_dense:
        return ""
    if layout.page_size:
        return f" page_size {layout.page_size}"
    return " packed" if layout.packed_k else " cache"


def _row(kernel: _Kernel, built: Built) -> dict[str, Any]:
    resources, plan = built.resources, kernel.plan
    static = resources.static_shared_memory if resources else 0
    return {
        "arch": kernel.job.device.sm,
        "kernel": kernel.title.partition(" tile ")[0],
        "tile": report.tile_text(plan.tile) if plan else "-",
        "legend": report.tile_legend(plan.family, plan.tile) if plan else None,
        "registers": resources.registers if resources else None,
        "spills": resources.spill_bytes if resources else None,
        "shared_memory": static + (plan.shared_memory if plan else 0),
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
    legends = dict.fromkeys(f"{row['legend']}." for row in rows if row["legend"])
    report.print_notes(report.console(), legends)
    click.echo("regs, spills: registers and bytes per thread. KiB: shared memory of a block.")


def _registers_text(row: report.Row) -> str:
    return "FAILED" if row["failed"] else report.number(row["registers"], "d")
