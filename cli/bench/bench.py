"""The command `cupy-flash bench`: time providers on the same inputs, and check their results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.gpu.environment import current_device, gpu_unavailable

from ..cases import presets
from ..cases.cases import Case, describe
from ..cases.inputs import InputFile, Inputs, random_inputs
from ..cases.lists import CommaList
from ..cases.mod_options import mod_options, modified, refuse_cases, split_cases
from ..cases.options import (
    EXISTING_FILE,
    SIZES,
    Seconds,
    backward_option,
    count_option,
    defaults_of,
    output_option,
    refuse,
    sequence_cases,
    sequence_options,
    shape_options,
    split,
    tile_request,
)
from ..measure.check import Coverage
from ..measure.gpu_state import bus_id, watched
from ..measure.runner import Cell, Runner, Settings, first_line, set_speedups, too_large
from ..measure.timing import copy_rate
from ..providers import providers
from ..providers.contract import Provider
from ..providers.several_gpus import SeveralGpus
from ..records import environment, records, report
from .crossover import as_record, print_crossover
from .table import outcome_text, print_cells, print_memory, record_row, timing_text

_GPU_DEFAULTS = defaults_of(
    batch=4, seqlen_q=(1024, 4096), heads=16, head_dim=128, dtype="bfloat16"
)
# Cases that take about ten seconds on two cores.
_CPU_DEFAULTS = defaults_of(batch=1, seqlen_q=(1024, 2048), heads=8, head_dim=64, dtype="float32")
# Numbers of untimed and timed calls of a cell.
_GPU_REPEATS = (3, 20)
_CPU_REPEATS = (1, 7)


def _choose_providers(
    requested: Sequence[str] | None,
    preset: presets.Preset | None,
    dtypes: Sequence[str],
    tile: dict[str, int] | None,
    sequences: Mapping[str, Any],
    mods: Mapping[str, Any],
    *,
    backward: bool = False,
    several: SeveralGpus | None = None,
) -> list[Provider]:
    if several is not None:
        alone = dict.fromkeys(requested if requested is not None else ("cupy_flash",))
        return [*(providers.provider(name, tile) for name in alone), several]
    if requested is not None:
        return [providers.provider(name, tile) for name in dict.fromkeys(requested)]
    if preset is not None:
        result = [providers.provider(name, tile) for name in preset.providers]
        if preset.needs_all and (absent := [reason for p in result if (reason := p.missing())]):
            raise click.ClickException(f"{preset.title}: {absent[0]}")
        return [p for p in result if p.ours or p.missing() is None]
    packed = sequences["lengths"] is not None and not sequences["cache"]
    variants = ["cupy_flash-uniform"] if packed else []
    if gpu_unavailable() is not None:
        names = ["cupy_flash-cpu", *variants, "numpy-naive"]
        return [providers.provider(name, tile) for name in names]
    if packed:
        return [providers.provider(name, tile) for name in ("cupy_flash", *variants)]
    compared = []
    if {"float16", "bfloat16"} & set(dtypes):
        compared += ["torch-flash", "torch-cudnn"]
    if {"float32", "float64"} & set(dtypes):
        compared += ["torch-efficient", "torch-math"]
    if any(mods.values()) and not backward:
        compared = ["torch-flex", *compared]
    if not sequences["cache"]:
        compared.append("cupy-library")
    result = [providers.provider(name) for name in compared]
    return [providers.provider("cupy_flash", tile), *(p for p in result if p.missing() is None)]


def _several_gpus(gpus: int | None, head_ranks: int | None) -> SeveralGpus | None:
    """Return the provider of --gpus, or None if that option is not given."""
    if gpus is None:
        refuse({"head_ranks": head_ranks}, "one GPU; it is for --gpus")
        return None
    result = SeveralGpus(gpus, head_ranks)
    if reason := result.missing():
        raise click.UsageError(f"--gpus is {gpus}, but {reason}")
    return result


def _choose_baseline(
    requested: Sequence[str] | None, preset: presets.Preset | None, chosen: Sequence[Provider]
) -> list[str]:
    names = [provider.name for provider in chosen]
    if requested is not None:
        if absent := [name for name in requested if name not in names]:
            raise click.UsageError(
                f"--baseline {absent[0]} is not among the providers; expected some of "
                f"{', '.join(names)}"
            )
        return list(requested)
    if preset is not None and (kept := [name for name in preset.baseline if name in names]):
        return kept
    variants = next((name for name in names if name == "cupy_flash-uniform"), names[0])
    return [next((p.name for p in chosen if not p.ours), variants)]


def _refuse_hopeless_tile(cases: Sequence[Case], chosen: Sequence[Provider]) -> None:
    """Raise a usage error if no provider of cupy_flash accepts the forced tile in any case."""
    reasons = [p.why_not(case) for p in chosen if p.ours for case in cases]
    if reasons and None not in reasons:
        raise click.UsageError(str(reasons[0]))


_PROVIDERS: CommaList[str] = CommaList(
    str, "a provider", "cupy_flash,torch-flash", providers.names()
)


def _provider_names(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    known = providers.names()
    for name in value or ():
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; expected some of {', '.join(known)}")
    return value


@click.command()
@shape_options(_GPU_DEFAULTS, _CPU_DEFAULTS)
@sequence_options
@mod_options
@backward_option
@count_option("--seed", 0, "Seed of the random inputs and sequence lengths.")
@click.option("--br", type=click.IntRange(1), help="Force the tile's query rows.")
@click.option("--bc", type=click.IntRange(1), help="Force the tile's key rows.")
@click.option("--warps", type=click.IntRange(1), help="Force the tile's warps.")
@click.option("--stages", type=click.IntRange(1), help="Force the tile's stages.")
@click.option(
    "--tile",
    "more",
    multiple=True,
    metavar="NAME=N",
    help="Force another field of the tile, for example threads=128.",
)
@click.option(
    "--preset",
    type=click.Choice(presets.NAMES),
    metavar="NAME",
    help=f"Named set of cases: {', '.join(presets.NAMES)}.",
)
@click.option(
    "--input",
    "path",
    type=EXISTING_FILE,
    help="Path of an npz file with q, k and v of shape (batch, seqlen, heads, head_dim).",
)
@click.option(
    "--provider",
    "requested",
    type=_PROVIDERS,
    callback=_provider_names,
    help="Providers to time, separated by commas; 'cupy-flash info' lists them.",
)
@click.option(
    "--gpus",
    type=click.IntRange(2),
    help="Also run each case sharded over this many GPUs, in processes that this command starts.",
)
@click.option(
    "--head-ranks",
    type=click.IntRange(1),
    help="GPUs per head-parallel group; 1 is ring attention only. Default: the library's choice.",
)
@click.option(
    "--baseline",
    type=_PROVIDERS,
    callback=_provider_names,
    help="Providers to compare with; speedups are relative to the fastest of them in each case.",
)
@click.option("--warmup", type=click.IntRange(0), help="Untimed calls; default 3, on the CPU 1.")
@click.option("--repeats", type=click.IntRange(1), help="Timed calls; default 20, on the CPU 7.")
@click.option(
    "--cell-seconds",
    type=Seconds(),
    default=20.0,
    show_default=True,
    help="Time limit of a cell (a provider on a case); longer cells are not timed. inf: no limit.",
)
@click.option("--skip-check", is_flag=True, help="Do not compare results with the reference.")
@click.option(
    "--host-time", is_flag=True, help="Also show the host time and the total time of a call."
)
@click.option(
    "--memory",
    is_flag=True,
    help="Also show the peak memory of a call, as --preset memory does.",
)
@output_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    backward: bool,
    seed: int,
    more: tuple[str, ...],
    preset: str | None,
    path: Path | None,
    requested: tuple[str, ...] | None,
    gpus: int | None,
    head_ranks: int | None,
    baseline: tuple[str, ...] | None,
    warmup: int | None,
    repeats: int | None,
    cell_seconds: float,
    skip_check: bool,
    host_time: bool,
    memory: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Time attention or its gradients with several providers, on the same inputs.

    Each result is checked. Options for shapes take lists: every combination becomes a case. The
    exit code is 1 if a result of cupy_flash fails its check, or if nothing could be timed.
    """
    shape, sequences, mods = split_cases(options)
    br, bc, warps, stages = split(options, ("br", "bc", "warps", "stages")).values()
    tile = tile_request({"Br": br, "Bc": bc, "warps": warps, "stages": stages}, more)
    named = presets.preset(preset, shape["dtype"]) if preset else None
    file = _read_input(path, preset)
    dtypes = shape["dtype"] or ((file.q.dtype.name,) if file else _GPU_DEFAULTS["dtype"])
    several = _several_gpus(gpus, head_ranks)
    if several is not None and (preset or path or tile):
        raise click.UsageError(
            "--gpus needs random inputs, and ranks choose their tiles; leave out --preset, --input "
            "and a forced tile"
        )
    chosen = _choose_providers(
        requested, named, dtypes, tile, sequences, mods, backward=backward, several=several
    )
    compared = _choose_baseline(baseline, named, chosen)
    no_gpu = gpu_unavailable()
    on_gpu = no_gpu is None and any(p.on_gpu for p in chosen)
    if named:
        del shape["dtype"]
        other = f"--preset {preset}, which defines the cases"
        refuse_cases(shape, sequences, mods, backward=backward, other=other)
        cases = list(named.cases)
    else:
        given = _cases(shape, sequences, file, seed=seed, on_gpu=on_gpu)
        cases = modified(given, mods, backward=backward)
    if tile:
        _refuse_hopeless_tile(cases, chosen)
    if no_gpu and requested is None:
        text = f"No GPU to use: {no_gpu}.\nTiming the CPU backend.\n"
        report.console().print(text, markup=False)
    device = current_device().name if on_gpu else environment.cpu_name()

    usual_warmup, usual_repeats = _GPU_REPEATS if on_gpu else _CPU_REPEATS
    settings = Settings(
        warmup=usual_warmup if warmup is None else warmup,
        repeats=repeats or usual_repeats,
        cell_seconds=cell_seconds,
        seed=seed,
        check=not skip_check,
        host_time=host_time,
        memory=memory or preset == "memory",
    )
    runner = Runner(settings)
    done: list[tuple[list[Cell], Coverage | None, list[dict[str, Any]]]] = []
    rows: list[dict[str, Any]] = []
    copied: float | None = None

    def head() -> dict[str, Any]:
        result = environment.metadata(device) | {
            "record_version": records.VERSION,
            "flop_convention": "; ".join(environment.flop_conventions(cases)),
            "timing": timing_text(
                settings, on_gpu=on_gpu, backward=any(case.is_backward for case in cases)
            ),
            "gpu_state": dataclasses.asdict(watch.state) if on_gpu else None,
            "cpu_state": None if on_gpu else dataclasses.asdict(watch.state),
            "unreliable": watch.state.unreliable,
            "preset": preset,
            "input": path.name if path else None,
            "seed": seed,
            "warmup": settings.warmup,
            "baseline": compared,
        }
        if copied is not None:
            result["copy_tb_per_s"] = copied
        if preset == "crossover":
            result["crossover"] = as_record([cells for cells, _, _ in done])
        return result

    def show() -> None:
        table, checks, by_case = zip(*done, strict=True)
        state = watch.state
        notes = state.notes()
        if named and preset == "crossover":
            print_crossover(table, f"{device}\n{named.title}", notes)
            return
        result = [check for check in checks if check]
        print_cells(
            table,
            by_case,
            result,
            device,
            compared,
            settings,
            named,
            notes,
            copied,
            unreliable=state.unreliable,
        )
        if preset == "memory":
            print_memory(table)

    keeping = report.kept(output, rows, head, show)
    watching = watched(bus_id() if on_gpu else None)
    with (
        keeping as save,
        watching as watch,
        report.progress("bench", len(cases), lines=False) as advance,
    ):
        if on_gpu and any(case.is_cached for case in cases):
            copied = _copy_rate()
        for case, label in zip(cases, describe(cases)[1], strict=True):
            advance(label)
            draw = functools.partial(_inputs, case, file, seed, on_gpu=on_gpu)
            cells, check = runner.run(case, chosen, draw)
            set_speedups(cells, compared)
            versions = environment.versions()
            own = [record_row(cell, check, device, versions, copied) for cell in cells]
            done.append((cells, check, own))
            rows += own
            save()
            for cell in cells:
                cell.release()
            if label and not sys.stderr.isatty():
                # A terminal shows a progress bar instead.
                click.echo(f"[{len(done)}/{len(cases)}] {label}: {outcome_text(cells)}", err=True)
            # If an error makes the GPU unusable, the remaining cases have the error as a reason.
            with contextlib.suppress(RuntimeError):
                providers.release_memory()
    flat = [cell for cells, _, _ in done for cell in cells]
    if any(c.provider.ours and c.passed is False for c in flat) or not any(c.time for c in flat):
        ctx.exit(1)


def _copy_rate() -> float | None:
    """Return the rate of copies on the GPU in TB/s, or None if it cannot be measured."""
    try:
        return copy_rate()
    except (RuntimeError, MemoryError) as error:
        click.echo(f"The rate of copies cannot be measured: {first_line(error)}", err=True)
        return None
    finally:
        with contextlib.suppress(RuntimeError):
            providers.release_memory()


def _inputs(case: Case, file: InputFile | None, seed: int, *, on_gpu: bool) -> Inputs | str:
    """Return a case's inputs, or the reason why there are none."""
    try:
        if reason := too_large(case.array_bytes, on_gpu=on_gpu):
            return reason
        return file.inputs(case) if file else random_inputs(case, seed, on_gpu=on_gpu)
    except (RuntimeError, MemoryError) as error:
        # Drawing needs additional memory, and errors of earlier calls may be reported only here.
        return f"no inputs: {first_line(error)}"


def _read_input(path: Path | None, preset: str | None) -> InputFile | None:
    if path is None:
        return None
    if preset:
        raise click.UsageError("--input cannot be combined with --preset: both define the cases")
    return InputFile.read(path)


def _cases(
    shape: dict[str, Any],
    sequences: Mapping[str, Any],
    file: InputFile | None,
    *,
    seed: int,
    on_gpu: bool,
) -> list[Case]:
    if file is not None:
        refuse(shape, "--input, whose arrays have their own sizes", SIZES)
        refuse(sequences, "--input, whose arrays are batches of equal length")
        return [
            file.case(
                dtype=dtype, layout=layout, causal=causal, q_offset=offset, softmax_scale=scale
            )
            for dtype in shape["dtype"] or (file.q.dtype.name,)
            for layout in shape["layout"] or ("bshd",)
            for causal in shape["causal"] or (False,)
            for offset in shape["q_offset"] or (None,)
            for scale in shape["softmax_scale"] or (None,)
        ]
    defaults = _GPU_DEFAULTS if on_gpu else _CPU_DEFAULTS
    return sequence_cases(sequences, shape, defaults, seed=seed, on_gpu=on_gpu)
