"""The command `cupy-flash roofline`: the rate that a GPU's memory and units allow, as a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console

from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import Device

from ..cases.cases import Case, describe
from ..cases.inputs import random_inputs
from ..cases.lists import CommaList
from ..cases.mod_options import dense_cases, mod_options
from ..cases.options import (
    backward_option,
    defaults_of,
    force_option,
    overwritable_output_option,
    shape_options,
)
from ..errors import library_errors_as_usage
from ..measure.runner import too_large
from ..measure.timing import GpuTimer, spread
from ..providers import providers
from ..records import environment, report
from ..records.figures import COLOURS, figure, plot_option
from ..records.report import Column
from . import backward as backward_model
from . import gpus, scaling
from .gpus import Gpu
from .traffic import Roof, Schedule, Traffic, fused, fused_without_cache, standard

# Shape that articles use for a roofline of attention.
_DEFAULTS = defaults_of(batch=1, seqlen_q=4096, heads=32, head_dim=128, dtype="float16")
_WARMUP, _REPEATS = 3, 20
# Numbers of query and key rows of the tile that is modelled for an architecture without kernels.
_USUAL_TILE = (64, 64)

_STANDARD, _FUSED, _NO_CACHE = "standard", "fused", "fused, no L2"
_SHORT = {_STANDARD: "standard", _FUSED: "fused", _NO_CACHE: "no L2"}

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A GPU whose roofline is modelled.

    Attributes
    ----------
    gpu
        Published figures of the GPU.
    device
        Device that the planner plans for; None if there are no kernels for the architecture.
    present
        Whether the GPU is CuPy's current device.
    """

    gpu: Gpu
    device: Device | None
    present: bool


@dataclass(frozen=True)
class Measured:
    """Measured rate of the library's own choice in FLOP/s, or the reason why there is none."""

    flops: float | None = None
    reason: str | None = None


@click.command()
@shape_options(_DEFAULTS)
@mod_options
@backward_option
@click.option(
    "--gpu",
    "requested",
    type=CommaList(str, "a GPU", "A100,H100", gpus.names()),
    help=f"GPUs to model by their published figures, present or not: {', '.join(gpus.names())}.",
)
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Also time the library; by default only if the GPU is the present one.",
)
@scaling.scaling_options
@overwritable_output_option
@plot_option("the rooflines with the algorithms on them")
@force_option("--output", "--plot")
def roofline(
    backward: bool,
    requested: tuple[str, ...] | None,
    measure: bool | None,
    output: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Model the memory traffic of standard and fused attention, and the rate that it allows.

    With --gpu, no GPU is needed. Options for shapes take lists: every combination becomes a case.
    """
    targets = _targets(requested)
    several = scaling.split_scaling(options)
    cases = dense_cases(options, _DEFAULTS, backward=backward)
    if measure and not all(target.present for target in targets):
        raise click.UsageError(
            "--measure times the present GPU; leave out --gpu, or name only that GPU"
        )
    with library_errors_as_usage():
        for target, case in itertools.product(targets, cases):
            target.gpu.peak(case.dtype)

    if several["gpus"] is not None:
        _model_several(targets, cases, several, output, refused=measure or plot is not None)
        return
    rows: list[dict[str, Any]] = []
    timed = [target.present and measure is not False for target in targets]
    names = ", ".join(target.gpu.name for target in targets)

    def show() -> None:
        _print(rows)
        if plot:
            draw(plot, rows)
            click.echo(f"Drawn to {plot}.", err=True)

    keeping = report.kept(output, rows, lambda: environment.metadata(names), show)
    with keeping as save, report.progress("roofline", len(cases) * sum(timed)) as advance:
        for target, measuring in zip(targets, timed, strict=True):
            for case in cases:
                measured = None
                if measuring:
                    advance(describe([case])[0])
                    measured = measure_rate(case)
                rows += case_rows(target, case, measured)
                save()


def _model_several(
    targets: Sequence[Target],
    cases: Sequence[Case],
    several: Mapping[str, Any],
    output: Path | None,
    *,
    refused: bool,
) -> None:
    """Model the cases on several numbers of GPUs."""
    if refused:
        raise click.UsageError("--gpus prints a table; leave out --measure and --plot")
    scaling.refuse(cases, several)
    pairs = list(itertools.product(targets, cases))
    groups = []
    total = sum(len(scaling.numbers_of_gpus(case, several)) for _, case in pairs)
    with report.progress("roofline", total) as advance:
        for target, case in pairs:
            result = case_rows(target, case, None)
            fused_row = next(row for row in result if row["algorithm"] == _FUSED)
            attainable = fused_row["attainable_tflops"] * 1e12
            groups.append(scaling.rows_of(target.gpu, case, attainable, several, advance))
    record = report.Record(
        environment.metadata(", ".join(target.gpu.name for target in targets)),
        [row for rows in groups for row in rows],
    )
    report.keep(output, record, lambda: scaling.print_rows(groups, [case for _, case in pairs]))


def _targets(requested: Sequence[str] | None) -> list[Target]:
    """Return the GPUs to model: the requested ones, or the present one."""
    no_gpu = gpu_unavailable()
    current = None if no_gpu else current_device()
    if requested is None and current is None:
        raise click.UsageError(
            f"no GPU here ({no_gpu}); name one with --gpu: {', '.join(gpus.names())}"
        )
    names = (current.name,) if requested is None and current else requested or ()
    targets = []
    with library_errors_as_usage():
        present = _present_gpu(current)
        for gpu in {result.name: result for result in map(gpus.find, names)}.values():
            is_present = gpu is present
            targets.append(Target(gpu, current if is_present else gpu.device(), is_present))
    return targets


def _present_gpu(current: Device | None) -> Gpu | None:
    """Return the table's entry of the current device, or None if it has none."""
    try:
        return gpus.find(current.name) if current else None
    except ValueError:
        return None


def measure_rate(case: Case) -> Measured:
    """Measure the rate of the library's own choice as `bench` does, with the L2 flushed."""
    provider = providers.provider("cupy_flash")
    reason = provider.why_not(case) or too_large(
        case.array_bytes + provider.scratch_bytes(case), on_gpu=True
    )
    if reason:
        return Measured(reason=reason)
    try:
        prepared = provider.prepare(random_inputs(case, 0, on_gpu=True))
        (times,) = GpuTimer().interleaved([prepared.timed], _WARMUP, [_REPEATS])
    except (RuntimeError, MemoryError) as error:
        return Measured(reason=(str(error) or type(error).__name__).splitlines()[0])
    finally:
        providers.release_memory()
    median = spread(times).median
    return Measured(case.flops() / median * 1e3 if median else None)


def case_rows(target: Target, case: Case, measured: Measured | None) -> list[dict[str, Any]]:
    """Return a row of a record for each algorithm on one case."""
    problem, gpu = case.problem(), target.gpu
    plan = make_plan(problem, target.device) if target.device else None
    Br, Bc = (plan.tile.Br, plan.tile.Bc) if plan else _USUAL_TILE
    schedule = (
        Schedule.of(plan)
        if plan
        else Schedule(Br, Bc, gpu.sm_count, problem.heads_q // problem.heads_kv, gpu.l2_bytes)
    )
    again = 1.0
    if case.is_backward:
        if plan:
            kernels = backward_model.kernels_of(plan)
        else:
            kernels = backward_model.usual_kernels(schedule)
        again = backward_model.recomputation(problem, kernels)
        traffic = {
            _STANDARD: backward_model.standard(problem),
            _FUSED: backward_model.fused(problem, kernels, case.mods),
            _NO_CACHE: backward_model.fused_without_cache(problem, kernels, case.mods),
        }
    else:
        traffic = {
            _STANDARD: standard(problem, case.mods),
            _FUSED: fused(problem, schedule, case.mods),
            _NO_CACHE: fused_without_cache(problem, Br=Br, Bc=Bc, mods=case.mods),
        }
    return [
        _row(
            *(target, case, plan, schedule, name, moved),
            measured if name == _FUSED else None,
            1.0 if name == _STANDARD else again,
        )
        for name, moved in traffic.items()
    ]


def _row(
    target: Target,
    case: Case,
    plan: Plan | None,
    schedule: Schedule,
    algorithm: str,
    traffic: Traffic,
    measured: Measured | None,
    again: float,
) -> dict[str, Any]:
    gpu, flops = target.gpu, case.flops()
    peak = gpu.peak(case.dtype)
    roof = Roof(peak.flops, gpu.hbm_bytes_per_second)
    intensity = traffic.intensity(flops)
    # Recomputed products do not count, so the peak of the FLOPs that count is lower.
    of_kernels = Roof(peak.flops / again, gpu.hbm_bytes_per_second)
    attainable = of_kernels.attainable(intensity)
    rate = measured.flops if measured else None
    is_standard = algorithm == _STANDARD
    return {
        "gpu": gpu.name,
        "source": gpu.source,
        "peak_tflops": peak.flops / 1e12,
        "peak_units": peak.units,
        "bandwidth_gb_per_s": gpu.hbm_bytes_per_second / 1e9,
        "ridge": roof.ridge,
        **case.as_record(),
        "algorithm": algorithm,
        "flops": flops,
        "flops_computed": again * flops,
        "bytes_read": traffic.read,
        "bytes_written": traffic.written,
        "key_value_reads": traffic.key_value_reads,
        "intensity": intensity,
        "bound": of_kernels.bound(intensity) if flops else None,
        "attainable_tflops": attainable / 1e12,
        "measured_tflops": None if rate is None else rate / 1e12,
        "share": rate / attainable if rate is not None and attainable else None,
        "reason": measured.reason if measured else None,
        "family": plan.family if plan and not is_standard else None,
        "Br": None if is_standard else schedule.Br,
        "Bc": None if is_standard else schedule.Bc,
        "blocks": schedule.blocks if algorithm == _FUSED else None,
        "section_heads": schedule.section_heads if algorithm == _FUSED else None,
        "num_splits": schedule.num_splits if algorithm == _FUSED else None,
    }


def _case_of(row: Mapping[str, Any]) -> Case:
    return Case.of_record({field.name: row[field.name] for field in dataclasses.fields(Case)})


def _by(rows: Iterable[dict[str, Any]], *names: str) -> Iterator[Rows]:
    """Yield groups of neighbouring rows that agree in some fields."""
    for _, group in itertools.groupby(rows, key=lambda row: [row[name] for name in names]):
        yield list(group)


def _by_case(rows: Rows) -> list[Rows]:
    return [list(group) for _, group in itertools.groupby(rows, key=_case_of)]


def _print(rows: Rows) -> None:
    out = report.console()
    for of_roof in _by(rows, "gpu", "dtype"):
        _print_roof(out, of_roof)
    plans = dict.fromkeys(_plan_note(row) for row in rows if row["algorithm"] == _FUSED)
    notes = [*plans, *(f"not measured: {row['reason']}" for row in rows if row["reason"])]
    cases = [_case_of(row) for row in rows]
    is_backward = any(case.is_backward for case in cases)
    notes += [
        "standard: the forward pass's probabilities are read twice; their gradients and those of "
        "the scores are written and read three times in all, in the inputs' dtype."
        if is_backward
        else "standard: the score matrix is written and read twice, in the inputs' dtype.",
        "no L2: fused, but every tile reads the rows of others from device memory."
        if is_backward
        else "no L2: fused, but every query tile reads its keys and values from device memory.",
        "K/V: how often keys and values are read from device memory. TFLOP/s: attainable.",
    ]
    if any(row["measured_tflops"] is not None for row in rows):
        notes.append("measured: cupy_flash's own choice, and its part of the attainable rate.")
    notes += [f"{text}." for text in environment.flop_conventions(cases)]
    report.print_notes(out, notes)


def _print_roof(out: Console, rows: Rows) -> None:
    first = rows[0]
    of_cases = _by_case(rows)
    shared, labels = describe([_case_of(group[0]) for group in of_cases])
    peak = f"{first['gpu']}: {first['peak_tflops']:.4g} TFLOP/s dense ({first['peak_units']}),"
    bandwidth = f"{first['bandwidth_gb_per_s']:.0f} GB/s"
    ridge = f"ridge point {first['ridge']:.1f} FLOP/byte."
    lines = (_fitting(out, peak, bandwidth), _fitting(out, ridge, first["source"]), shared)
    title = "\n".join(lines)
    most = max(max(row["bytes_read"], row["bytes_written"]) for row in rows)
    unit, scale = ("GB", 1e9) if most >= 1e10 else ("MB", 1e6)
    columns = [
        Column("algorithm", lambda row: _SHORT[row["algorithm"]], numeric=False),
        Column(f"{unit} in", lambda row: report.four_digits(row["bytes_read"] / scale)),
        Column(f"{unit} out", lambda row: report.four_digits(row["bytes_written"] / scale)),
        Column("K/V", lambda row: f"{row['key_value_reads']:.4g}"),
        Column("FLOP/B", lambda row: report.four_digits(row["intensity"])),
        Column("bound", lambda row: row["bound"] or "-", numeric=False),
        Column("TFLOP/s", lambda row: report.four_digits(row["attainable_tflops"])),
    ]
    if any(row["measured_tflops"] is not None for row in rows):
        columns.append(Column("measured", _measured_text))
    if len(of_cases) > 1:
        out.print(title, markup=False, soft_wrap=True)
    # Each case has its own table, because 80 columns have no space for labels next to the figures.
    for label, group in zip(labels, of_cases, strict=True):
        report.print_table(out, label if len(of_cases) > 1 else title, columns, [group])


def _fitting(out: Console, *parts: str) -> str:
    """Return the parts on one line if the terminal is wide enough, otherwise one per line."""
    line = " ".join(parts)
    return line if cell_len(line) <= out.width else "\n".join(parts)


def _measured_text(row: report.Row) -> str:
    if row["measured_tflops"] is None:
        return "-"
    share = "" if row["share"] is None else f" ({row['share']:.0%})"
    return report.four_digits(row["measured_tflops"]) + share


def _plan_note(row: Mapping[str, Any]) -> str:
    tile = f"tiles of {row['Br']}x{row['Bc']}"
    if row["family"] is None:
        return f"fused on {row['gpu']}: no kernels of cupy_flash; modelled with {tile}."
    splits = f", keys split {row['num_splits']} ways" if row["num_splits"] > 1 else ""
    # The peak is that of the GPU's fastest units, which the kernel may not use.
    slower = row["family"] == "simt" and row["peak_units"] != "CUDA cores"
    units = ", on CUDA cores, which do not reach that peak" if slower else ""
    again = row["flops_computed"] / row["flops"] if row["flops"] else 1.0
    twice = f", which compute {again:.2g} times the FLOPs that count" if again > 1 else ""
    return (
        f"fused on {row['gpu']}: family {row['family']}, {tile}, {row['blocks']} concurrent blocks"
        f"{splits}{units}{twice}."
    )


_MARKERS = {_STANDARD: "s", _FUSED: "o", _NO_CACHE: "^"}


def draw(path: Path, rows: Rows) -> None:
    """Draw the roofs of the rows' GPUs and dtypes, with algorithms on them, measurements below."""
    cases = list(dict.fromkeys(map(_case_of, rows)))
    shared, texts = describe(cases)
    labels = dict(zip(cases, texts, strict=True))
    intensities = [row["intensity"] for row in rows if row["intensity"] > 0]
    intensities += [row["ridge"] for row in rows]
    ends = (min(intensities) / 4, max(intensities) * 4)
    with figure(path) as axes:
        for of_roof, colour in zip(_by(rows, "gpu", "dtype"), itertools.cycle(COLOURS)):
            _draw_roof(axes, of_roof[0], ends, colour)
            for row in of_roof:
                if row["intensity"] > 0:
                    _mark(axes, row, colour, labels[_case_of(row)])
        for algorithm, marker in _MARKERS.items():
            axes.plot([], [], marker, color="black", markerfacecolor="none", label=algorithm)
        if any(row["measured_tflops"] for row in rows):
            axes.plot([], [], "*", color="black", label="fused, measured")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="arithmetic intensity, FLOP per byte from and to device memory",
            ylabel="TFLOP/s",
            title=shared,
        )
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.figure.legend(loc="outside lower center", ncols=3)


def _draw_roof(axes: Any, row: Mapping[str, Any], ends: tuple[float, float], colour: str) -> None:
    roof = Roof(row["peak_tflops"], row["bandwidth_gb_per_s"] / 1e3)
    corners = [ends[0], roof.ridge, ends[1]]
    axes.plot(
        corners,
        [roof.attainable(x) for x in corners],
        color=colour,
        label=f"{row['gpu']} {row['dtype']}, ridge {roof.ridge:.0f}",
    )


def _mark(axes: Any, row: Mapping[str, Any], colour: str, label: str) -> None:
    x, y, measured = row["intensity"], row["attainable_tflops"], row["measured_tflops"]
    axes.plot([x], [y], _MARKERS[row["algorithm"]], color=colour, markerfacecolor="none")
    if measured:
        axes.plot([x, x], [measured, y], ":", color=colour, linewidth=1)
        axes.plot([x], [measured], "*", color=colour)
        label = f"{label}: {measured:.0f}" if label else f"{measured:.0f}"
    if row["algorithm"] == _FUSED:
        # Long labels are vertical, so that labels of neighbouring marks (causal, full) have space.
        axes.annotate(
            label,
            (x, measured or y),
            xytext=(0, -6),
            textcoords="offset points",
            horizontalalignment="center",
            verticalalignment="top",
            rotation=90 if len(label) > 5 else 0,
            fontsize=7,
        )
