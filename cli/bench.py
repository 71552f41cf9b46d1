"""`cupy-flash bench`: time providers on the same inputs, each checked against the reference."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cupy_flash.device import gpu_unavailable
from cupy_flash.errors import CompileError
from cupy_flash.problem import DTYPES

from . import environment, presets, providers, report
from .cases import Case, describe
from .check import Check, Coverage
from .inputs import InputFile, Inputs, random_inputs
from .options import (
    SIZES,
    CommaList,
    cases_from,
    output_option,
    refuse,
    shape_options,
    split_shape,
    tile_request,
)
from .providers import Prepared, Provider
from .timing import GpuTimer, HostTimer, Spread, Timer, host_microseconds, repeats_within, spread

_GPU_DEFAULTS = {
    "batch": (4,),
    "seqlen_q": (1024, 4096),
    "heads": (16,),
    "head_dim": (128,),
    "dtype": ("bfloat16",),
}
# Some ten seconds on two cores.
_CPU_DEFAULTS = {
    "batch": (1,),
    "seqlen_q": (512, 1024),
    "heads": (8,),
    "head_dim": (64,),
    "dtype": ("float32",),
}
# Untimed and timed calls of a cell.
_GPU_REPEATS = (3, 20)
_CPU_REPEATS = (1, 7)
# A cell on the host that takes more operations than this is first tried on a part of its rows.
_PROBE_FLOPS = 4e9


@dataclass
class Cell:
    """One provider on one case: what came of it."""

    provider: Provider
    case: Case
    reason: str | None = None
    prepared: Prepared | None = None
    max_error: float | None = None
    passed: bool | None = None
    one_call: float = 0.0
    time: Spread | None = None
    host: Spread | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class Settings:
    """How a row is timed."""

    warmup: int
    repeats: int
    cell_seconds: float
    seed: int
    check: bool
    host_time: bool


@dataclass
class Bench:
    """Runs cases one after the other; timers are made once."""

    settings: Settings
    _timers: dict[bool, Timer] = field(default_factory=dict)

    def run(self, inputs: Inputs, chosen: Sequence[Provider]) -> tuple[list[Cell], Coverage | None]:
        """The cells of one case."""
        cells = [Cell(provider, inputs.case) for provider in chosen]
        check = None
        ready = [cell for cell in cells if self._prepare(cell, inputs)]
        if ready and self.settings.check:
            on_gpu = any(cell.provider.on_gpu for cell in ready)
            check = Check(inputs, self.settings.seed, on_gpu=on_gpu)
        for cell in ready:
            self._try(cell, check)
        for on_gpu in (True, False):
            self._time([c for c in ready if c.reason is None and c.provider.on_gpu == on_gpu])
        return cells, check.coverage if check else None

    def _timer(self, provider: Provider) -> Timer:
        if provider.on_gpu not in self._timers:
            self._timers[provider.on_gpu] = GpuTimer() if provider.on_gpu else HostTimer()
        return self._timers[provider.on_gpu]

    def _prepare(self, cell: Cell, inputs: Inputs) -> bool:
        provider, case = cell.provider, cell.case
        cell.reason = provider.why_not(case) or _too_large(
            provider.scratch_bytes(case), on_gpu=provider.on_gpu
        )
        if cell.reason is None and not provider.on_gpu:
            cell.reason = self._too_slow_on_host(provider, inputs)
        if cell.reason is None:
            try:
                cell.prepared = provider.prepare(inputs)
            except (ValueError, RuntimeError, MemoryError) as error:
                if isinstance(error, CompileError):
                    raise
                cell.reason = _first_line(error)
        return cell.reason is None

    def _too_slow_on_host(self, provider: Provider, inputs: Inputs) -> str | None:
        """Time a part of the rows, where the whole would keep the user waiting for a refusal."""
        case = inputs.case
        if case.problem().flops() < _PROBE_FLOPS:
            return None
        part = _first_rows(inputs)
        try:
            prepared = provider.prepare(part)
        except (ValueError, RuntimeError, MemoryError) as error:
            return _first_line(error)
        seconds = self._timer(provider).once(prepared.timed)
        rows, part_rows = (c.batch * c.seqlen_q * c.heads_q for c in (case, part.case))
        return self._over_limit(seconds * rows / part_rows)

    def _over_limit(self, one_call: float) -> str | None:
        s = self.settings
        if repeats_within(s.cell_seconds, one_call, s.warmup, s.repeats):
            return None
        return f"one call takes about {one_call:.2g} s, too long for --cell-seconds"

    def _try(self, cell: Cell, check: Check | None) -> None:
        """The first call, which may compile; its check; and a second one to estimate by."""
        assert cell.prepared is not None
        try:
            with cell.prepared.scope():
                result = cell.prepared.call()
            if check is not None:
                cell.max_error = check.error(cell.prepared.to_array(result))
                cell.passed = cell.max_error <= check.coverage.bound
            del result
            cell.one_call = self._timer(cell.provider).once(cell.prepared.timed)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, CompileError):
                raise
            cell.reason = _first_line(error)
            return
        cell.reason = self._over_limit(cell.one_call)

    def _time(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        s = self.settings
        timer = self._timer(cells[0].provider)
        calls = [cell.prepared.timed for cell in cells if cell.prepared]
        repeats = [
            repeats_within(s.cell_seconds, cell.one_call, s.warmup, s.repeats) for cell in cells
        ]
        for cell, times in zip(cells, timer.interleaved(calls, s.warmup, repeats), strict=True):
            cell.time = spread(times)
        if s.host_time and cells[0].provider.on_gpu:
            import cupy

            synchronize = cupy.cuda.get_current_stream().synchronize
            for cell, timed in zip(cells, calls, strict=True):
                cell.host = host_microseconds(timed, synchronize)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _too_large(needed: int, *, on_gpu: bool) -> str | None:
    free = providers.free_bytes(on_gpu=on_gpu)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"


def _first_rows(inputs: Inputs) -> Inputs:
    """The first 256 query rows of the heads that share the first key and value head."""
    case = inputs.case
    rows, heads = min(256, case.seqlen_q), case.heads_q // case.heads_kv
    q, k, v = inputs.host
    if case.layout == "bshd":
        q, k, v = q[:1, -rows:, :heads], k[:1, :, :1], v[:1, :, :1]
    else:
        q, k, v = q[:1, :heads, -rows:], k[:1, :1], v[:1, :1]
    offset = case.first_query + case.seqlen_q - rows if case.causal else None
    part = dataclasses.replace(
        case, batch=1, heads_q=heads, heads_kv=1, seqlen_q=rows, q_offset=offset
    )
    return Inputs(part, _host=(q, k, v))


def _row(
    cell: Cell, check: Coverage | None, device: str, versions: dict[str, str]
) -> dict[str, Any]:
    """A cell as a record's row."""
    case, prepared, time = cell.case, cell.prepared, cell.time
    problem = case.problem()
    plan = prepared.plan if prepared else None
    tflops = problem.flops() / time.median / 1e9 if time and time.median else None
    outcome = {None: "skipped", True: "passed", False: "failed"}[cell.passed]
    return {
        "provider": cell.provider.name,
        "family": plan.family if plan else None,
        "kernel_digest": prepared.kernel_digest if prepared else None,
        "device": device,
        "dtype": case.dtype,
        "batch": case.batch,
        "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k,
        "heads_q": case.heads_q,
        "heads_kv": case.heads_kv,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "layout": case.layout,
        "causal": case.causal,
        "q_offset": problem.q_offset,
        "softmax_scale": problem.softmax_scale,
        "tile": prepared.tile if prepared else None,
        "num_splits": plan.num_splits if plan else None,
        "median_ms": time.median if time else None,
        "low_quartile_ms": time.low if time else None,
        "high_quartile_ms": time.high if time else None,
        "repeats": time.repeats if time else None,
        "tflops": tflops,
        "speedup": cell.speedup,
        "host_us": cell.host.median if cell.host else None,
        "max_error": None if cell.max_error is None else report.finite(cell.max_error),
        "error_bound": check.bound if check else None,
        "check": outcome,
        "checked_rows": check.rows if check else 0,
        "reason": cell.reason,
        "note": prepared.note if prepared else None,
        "versions": versions,
    }


def _choose_providers(
    asked: Sequence[str] | None, preset: presets.Preset | None, tile: dict[str, int] | None
) -> list[Provider]:
    if asked is not None:
        return [providers.provider(name, tile) for name in dict.fromkeys(asked)]
    if preset is not None:
        found = [providers.provider(name, tile) for name in preset.providers]
        return [p for p in found if p.ours or p.missing() is None]
    if gpu_unavailable() is not None:
        return [providers.provider(name, tile) for name in ("cupy_flash-cpu", "numpy-naive")]
    compared = ("torch-flash", "torch-cudnn", "cupy-library")
    found = [providers.provider(name) for name in compared]
    return [providers.provider("cupy_flash", tile), *(p for p in found if p.missing() is None)]


def _choose_baseline(
    asked: Sequence[str] | None, preset: presets.Preset | None, chosen: Sequence[Provider]
) -> list[str]:
    names = [provider.name for provider in chosen]
    if asked is not None:
        if absent := [name for name in asked if name not in names]:
            raise click.UsageError(
                f"--baseline {absent[0]} is not among the providers; expected some of "
                f"{', '.join(names)}"
            )
        return list(asked)
    if preset is not None and (kept := [name for name in preset.baseline if name in names]):
        return kept
    return [next((p.name for p in chosen if not p.ours), names[0])]


def _refuse_hopeless_tile(cases: Sequence[Case], chosen: Sequence[Provider]) -> None:
    """Raise a usage error if the forced tile fits no case of any provider of ours."""
    reasons = [p.why_not(case) for p in chosen if p.ours for case in cases]
    if reasons and None not in reasons:
        raise click.UsageError(str(reasons[0]))


def _set_speedups(cells: Sequence[Cell], baseline: Sequence[str]) -> None:
    times = [c.time.median for c in cells if c.time and c.provider.name in baseline]
    base = min(times, default=None)
    for cell in cells:
        if base is not None and cell.time and cell.time.median:
            cell.speedup = base / cell.time.median


def _columns(rows: Sequence[report.Row], host_time: bool) -> list[report.Column]:
    # CPUs are far below a TFLOP/s.
    small = max((row["tflops"] or 0 for row in rows), default=0) < 1
    unit, scale = ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1.0)
    columns = [
        report.Column("case", lambda row: row["label"], numeric=False),
        report.Column("provider", lambda row: row["provider"], numeric=False),
        report.Column("ms", lambda row: report.milliseconds(row["median_ms"])),
        report.Column("+-%", lambda row: report.number(row["spread"], ".1f")),
        report.Column(unit, lambda row: _rate_text(row, scale)),
        report.Column("speedup", lambda row: report.number(row["speedup"], ".2f")),
        report.Column("error", _error_text),
    ]
    if host_time:
        columns.append(report.Column("host us", lambda row: report.number(row["host_us"], ".1f")))
    return columns


def _rate_text(row: report.Row, scale: float) -> str:
    return "-" if row["tflops"] is None else f"{row['tflops'] * scale:.4g}"


def _error_text(row: report.Row) -> str:
    if row["max_error"] is None:
        return "-"
    text = row["max_error"] if isinstance(row["max_error"], str) else f"{row['max_error']:.1e}"
    return text + ("!" if row["check"] == "failed" else "")


def _print(
    table: Sequence[Sequence[Cell]],
    rows: Sequence[Sequence[dict[str, Any]]],
    checks: Sequence[Coverage],
    device: str,
    baseline: Sequence[str],
    settings: Settings,
) -> None:
    out = report.console()
    shared, labels = describe([cells[0].case for cells in table])
    groups = []
    for cells, case_rows, label in zip(table, rows, labels, strict=True):
        shown = []
        for index, (cell, row) in enumerate(zip(cells, case_rows, strict=True)):
            share = 100 * cell.time.relative if cell.time else None
            shown.append(row | {"label": label if index == 0 else "", "spread": share})
        groups.append(shown)
    columns = _columns([row for group in groups for row in group], settings.host_time)
    if len(table) == 1:
        columns = columns[1:]
    report.print_table(out, f"{device}\n{shared}", columns, groups)
    flat = [cell for cells in table for cell in cells]
    report.print_notes(out, _notes(flat, checks, baseline, settings))
    for provider in dict.fromkeys(cell.provider.name for cell in flat):
        ratios = [c.speedup for c in flat if c.provider.name == provider and c.speedup]
        if len(ratios) > 1 and [provider] != list(baseline):
            out.print(
                f"{provider}: {statistics.geometric_mean(ratios):.3f} times as fast as "
                f"{_best_of(baseline)} (geometric mean of {len(ratios)}), at least "
                f"{min(ratios):.3f}",
                markup=False,
            )


def _best_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"the best of {', '.join(names)}"


def _notes(
    cells: Sequence[Cell], checks: Sequence[Coverage], baseline: Sequence[str], settings: Settings
) -> list[str]:
    notes = []
    for cell in cells:
        name = cell.provider.name
        if cell.reason:
            notes.append(f"{name}: {cell.reason}")
        if cell.prepared and cell.prepared.note:
            notes.append(f"{name}: {cell.prepared.note}")
        if cell.prepared and cell.prepared.plan:
            plan = cell.prepared.plan
            notes.append(f"{name}: {plan.family} {plan.tile}")
    notes.append(f"speedup: over {_best_of(baseline)}. +-%: half the interquartile range.")
    notes.append(environment.FLOP_CONVENTION + ".")
    if checks:
        rows, all_rows = sum(c.rows for c in checks), sum(c.all_rows for c in checks)
        share = "all" if rows == all_rows else f"{rows:,} of {all_rows:,}"
        notes.append(
            f"error: largest difference from the float64 reference over {share} query rows."
        )
    if any(cell.passed is False for cell in cells):
        notes.append(
            "!: over the bound, twice the error of the naive formula in the same precision."
        )
    if not settings.check:
        notes.append("Results were not checked (--skip-check).")
    return notes


_PROVIDERS: CommaList[str] = CommaList(str, "a provider", "cupy_flash,torch-flash")


def _provider_names(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    known = providers.names()
    for name in value or ():
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; expected some of {', '.join(known)}")
    return value


@click.command()
@shape_options
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@click.option("--br", type=click.IntRange(1), help="Force the tile's query rows.")
@click.option("--bc", type=click.IntRange(1), help="Force the tile's key rows.")
@click.option("--warps", type=click.IntRange(1), help="Force the tile's warps.")
@click.option("--stages", type=click.IntRange(1), help="Force the tile's stages.")
@click.option(
    "--tile", "more", multiple=True, metavar="NAME=N", help="Force another field of the tile."
)
@click.option("--preset", type=click.Choice(presets.NAMES), help="A named set of cases.")
@click.option(
    "--input",
    "path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="An npz file with real q, k and v of shape (batch, seqlen, heads, head_dim).",
)
@click.option(
    "--provider",
    "asked",
    type=_PROVIDERS,
    callback=_provider_names,
    help="Who computes, separated by commas; 'cupy-flash info' lists them.",
)
@click.option(
    "--baseline",
    type=_PROVIDERS,
    callback=_provider_names,
    help="Whom speedups refer to: the best of these providers on each case.",
)
@click.option("--warmup", type=click.IntRange(0), help="Untimed calls: 3; on the CPU 1.")
@click.option("--repeats", type=click.IntRange(1), help="Timed calls: 20; on the CPU 7.")
@click.option(
    "--cell-seconds",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Give a cell that takes longer a reason instead of a number.",
)
@click.option("--skip-check", is_flag=True, help="Do not compare with the reference.")
@click.option("--host-time", is_flag=True, help="Also time how long a call keeps Python.")
@output_option
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    seed: int,
    br: int | None,
    bc: int | None,
    warps: int | None,
    stages: int | None,
    more: tuple[str, ...],
    preset: str | None,
    path: Path | None,
    asked: tuple[str, ...] | None,
    baseline: tuple[str, ...] | None,
    warmup: int | None,
    repeats: int | None,
    cell_seconds: float,
    skip_check: bool,
    host_time: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Time attention on the same inputs by several providers, each checked.

    Shape options take lists: every combination becomes a case. Exits with 1 if a result of ours
    fails its check.
    """
    shape = split_shape(options)
    tile = tile_request({"Br": br, "Bc": bc, "warps": warps, "stages": stages}, more)
    named = presets.preset(preset, shape["dtype"]) if preset else None
    chosen = _choose_providers(asked, named, tile)
    compared = _choose_baseline(baseline, named, chosen)
    file = _read_input(path, preset)
    cases = _cases(shape, preset, named, file)
    if tile:
        _refuse_hopeless_tile(cases, chosen)
    no_gpu = gpu_unavailable()
    if no_gpu and asked is None:
        click.echo(f"No GPU to use: {no_gpu}.\nTiming the CPU backend.\n")
    on_gpu = no_gpu is None and any(p.on_gpu for p in chosen)
    device = providers.current_device().name if on_gpu else environment.cpu_name()

    usual_warmup, usual_repeats = _GPU_REPEATS if on_gpu else _CPU_REPEATS
    settings = Settings(
        warmup=usual_warmup if warmup is None else warmup,
        repeats=repeats or usual_repeats,
        cell_seconds=cell_seconds,
        seed=seed,
        check=not skip_check,
        host_time=host_time,
    )
    runner = Bench(settings)
    table: list[list[Cell]] = []
    checks: list[Coverage | None] = []
    with report.progress("bench", len(cases)) as advance:
        for case, label in zip(cases, describe(cases)[1], strict=True):
            advance(label)
            if reason := _too_large(case.array_bytes, on_gpu=on_gpu):
                table.append([Cell(p, case, reason=reason) for p in chosen])
                checks.append(None)
                continue
            inputs = file.inputs(case) if file else random_inputs(case, seed, on_gpu=on_gpu)
            cells, check = runner.run(inputs, chosen)
            _set_speedups(cells, compared)
            table.append(cells)
            checks.append(check)
            del inputs
            for cell in cells:
                _drop_arrays(cell)
            providers.release_memory()

    versions = environment.versions()
    rows = [
        [_row(cell, check, device, versions) for cell in cells]
        for cells, check in zip(table, checks, strict=True)
    ]
    _print(table, rows, [c for c in checks if c], device, compared, settings)
    if output:
        head = environment.metadata(device) | {
            "preset": preset,
            "input": path.name if path else None,
            "seed": seed,
            "warmup": settings.warmup,
            "baseline": compared,
        }
        report.write(output, report.Record(head, [row for case_rows in rows for row in case_rows]))
        click.echo(f"Written to {output}.", err=True)
    if any(c.provider.ours and c.passed is False for cells in table for c in cells):
        ctx.exit(1)


def _drop_arrays(cell: Cell) -> None:
    """Let go of the inputs that the cell's call holds; its plan stays."""
    if cell.prepared:
        cell.prepared = dataclasses.replace(cell.prepared, call=_gone, to_array=_gone)


def _gone(*_: Any) -> Any:
    raise AssertionError("the arrays of this cell were released")


def _read_input(path: Path | None, preset: str | None) -> InputFile | None:
    if path is None:
        return None
    if preset:
        raise click.UsageError("--input does not go with --preset: both name the cases")
    return InputFile.read(path)


def _cases(
    shape: dict[str, Any],
    preset: str | None,
    named: presets.Preset | None,
    file: InputFile | None,
) -> list[Case]:
    if named is not None:
        refuse(
            shape,
            [name for name in shape if name != "dtype"],
            f"--preset {preset}, which names the cases",
        )
        return list(named.cases)
    if file is not None:
        refuse(shape, SIZES, "--input, whose arrays have their own sizes")
        q = file.q.dtype.name
        assert q in DTYPES
        return [
            file.case(
                dtype=dtype, layout=layout, causal=causal, q_offset=offset, softmax_scale=scale
            )
            for dtype in shape["dtype"] or (q,)
            for layout in shape["layout"] or ("bshd",)
            for causal in shape["causal"] or (False,)
            for offset in (shape["q_offset"] or (None,))
            for scale in shape["softmax_scale"] or (None,)
        ]
    return cases_from(shape, _CPU_DEFAULTS if gpu_unavailable() else _GPU_DEFAULTS)
