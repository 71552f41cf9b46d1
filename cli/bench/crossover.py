"""`cupy-flash crossover`: up to which sequence length library products beat the fused kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash.planning.planner import Plan
from cupy_flash.problem.device import gpu_unavailable

from ..cases.cases import Case, describe, sweep
from ..cases.inputs import Inputs, random_inputs
from ..cases.options import DTYPE_LIST, FLAGS, HEADS, output_option
from ..errors import library_errors_as_usage
from ..measure.runner import first_line, too_large
from ..measure.timing import GpuTimer, Spread, Timed, Timer, spread, take_turns
from ..providers import providers
from ..providers.providers import Prepared, Provider
from ..records import environment, report
from ..records.figures import COLOURS, figure, plot_option

LIBRARY, OURS = "cupy-library", "cupy_flash"
SEQLENS = tuple(2**power for power in range(4, 13))
# What a column of times is of: the GPU's work alone, or a call of an idle GPU up to its end.
CLOCKS = ("gpu", "call")
_CLOCK_NAMES = {"gpu": "GPU time", "call": "call time"}
# Combinations beside each other in a table of 80 columns.
_COLUMNS = 4

# A formula of a dozen launches keeps a slow host busy for half a millisecond. These passes take an
# H100 about one, and the host under a tenth of that to enqueue.
_AHEAD_BYTES = 64 << 20
_AHEAD_PASSES = 40

Scope = Callable[[], AbstractContextManager[Any]]


class WorkAhead:
    """Keeps the GPU busy before a timed call, so that it does not wait for the host within it.

    Attributes
    ----------
    late
        Calls before whose last launch that work was done already.
    """

    def __init__(self) -> None:
        import cupy

        self.late = 0
        self._event = cupy.cuda.Event
        self._stream = cupy.cuda.get_current_stream()
        self._buffer = cupy.empty(_AHEAD_BYTES, "uint8")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        for _ in range(_AHEAD_PASSES):
            self._buffer.data.memset_async(0, _AHEAD_BYTES, self._stream)
        done = self._event(disable_timing=True)
        done.record(self._stream)
        yield
        self.late += int(done.done)


@dataclass(frozen=True)
class Duel:
    """The library's products and the fused kernel on one case.

    Attributes
    ----------
    theirs, ours
        Milliseconds of the library's products and of the fused kernel, by each clock.
    plan, kernel_digest
        Of the fused kernel.
    reason
        Why nothing was timed; None if it was.
    """

    case: Case
    theirs: dict[str, Spread]
    ours: dict[str, Spread]
    plan: Plan | None = None
    kernel_digest: str | None = None
    reason: str | None = None

    def ratio(self, clock: str) -> float | None:
        """Library time by ours: above 1 the fused kernel is faster. None where not timed."""
        if self.reason or not self.ours[clock].median:
            return None
        return self.theirs[clock].median / self.ours[clock].median

    def theirs_win(self, clock: str) -> bool:
        """Whether the library is faster by more than the noise: the quartiles do not overlap."""
        return not self.reason and self.theirs[clock].high < self.ours[clock].low

    def row(self) -> dict[str, Any]:
        """As a record's row."""
        row: dict[str, Any] = {
            "dtype": self.case.dtype,
            "head_dim": self.case.head_dim,
            "causal": self.case.causal,
            "batch": self.case.batch,
            "heads": self.case.heads_q,
            "seqlen": self.case.seqlen_q,
            "family": self.plan.family if self.plan else None,
            "tile": dataclasses.asdict(self.plan.tile) if self.plan else None,
            "kernel_digest": self.kernel_digest,
        }
        for clock in CLOCKS:
            for who, times in ((LIBRARY, self.theirs), (OURS, self.ours)):
                time = times.get(clock)
                row[f"{who}_{clock}_ms"] = time.median if time else None
                row[f"{who}_{clock}_low_quartile_ms"] = time.low if time else None
                row[f"{who}_{clock}_high_quartile_ms"] = time.high if time else None
            row[f"{clock}_ratio"] = self.ratio(clock)
            row[f"library_wins_{clock}"] = self.theirs_win(clock) if not self.reason else None
        return row | {"reason": self.reason}


@dataclass(frozen=True)
class Referee:
    """Times two providers on the same inputs, taking turns.

    Attributes
    ----------
    theirs, ours
        Who is timed: the library's products and the fused kernel.
    timer
        Of GPU calls.
    ahead
        Entered before a call whose GPU time is taken.
    """

    theirs: Provider
    ours: Provider
    timer: Timer
    ahead: Scope
    warmup: int
    repeats: int

    def duel(self, inputs: Inputs) -> Duel:
        """The times of a case, or the reason why there are none."""
        prepared = []
        for provider in (self.theirs, self.ours):
            try:
                prepared.append(_ready(provider, inputs))
            except (ValueError, RuntimeError, MemoryError) as error:
                return _void(inputs.case, f"{provider.name}: {first_line(error)}")
        calls = [p.call for p in prepared]
        for call in calls:
            for _ in range(self.warmup):
                call()
        repeats = [self.repeats] * len(calls)
        gpu = self.timer.interleaved([Timed(call, self.ahead) for call in calls], 0, repeats)
        seconds = take_turns(self.timer.once, [Timed(call) for call in calls], repeats)
        theirs, ours = (
            {"gpu": spread(g), "call": spread([1e3 * s for s in c])}
            for g, c in zip(gpu, seconds, strict=True)
        )
        fused = prepared[1]
        return Duel(inputs.case, theirs, ours, fused.plan, fused.kernel_digest)


def _void(case: Case, reason: str) -> Duel:
    return Duel(case, {}, {}, reason=reason)


def _ready(provider: Provider, inputs: Inputs) -> Prepared:
    """Prepared, and called once, which compiles; raises what keeps it from running."""
    reason = provider.why_not(inputs.case) or too_large(
        provider.scratch_bytes(inputs.case), on_gpu=provider.on_gpu
    )
    if reason:
        raise ValueError(reason)
    prepared = provider.prepare(inputs)
    prepared.call()
    return prepared


@dataclass(frozen=True)
class Series:
    """One combination over all sequence lengths, shortest first."""

    label: str
    duels: Sequence[Duel]

    @property
    def head_dim(self) -> int:
        """Of all its cases."""
        return self.duels[0].case.head_dim

    def crossover(self, clock: str) -> int | None:
        """The longest sequence at which the library wins; None if it never does."""
        return max((d.case.seqlen_q for d in self.duels if d.theirs_win(clock)), default=None)

    def verdict(self, clock: str) -> str:
        """`crossover` in words."""
        timed = [duel.case.seqlen_q for duel in self.duels if not duel.reason]
        if not timed:
            return "not timed"
        last = self.crossover(clock)
        if last is None:
            return f"never from {min(timed)} on"
        return f"up to {last}" + (" or beyond" if last == max(timed) else "")

    def cell(self, seqlen: int) -> str:
        """The table's text for a sequence length; a dash where it was not timed."""
        return next((_cell(duel) for duel in self.duels if duel.case.seqlen_q == seqlen), "-")

    def losses(self) -> dict[str, list[int]]:
        """Sequence lengths at which the library wins by GPU time, by the kernel that lost."""
        found: dict[str, list[int]] = {}
        for duel in self.duels:
            if duel.theirs_win("gpu") and (plan := duel.plan):
                kernel = f"{plan.family} tile {report.tile_text(plan.tile)}"
                found.setdefault(kernel, []).append(duel.case.seqlen_q)
        return found


def all_series(duels: Sequence[Duel]) -> list[Series]:
    """The duels by head_dim, dtype and mask."""

    groups: dict[tuple[int, str, bool], list[Duel]] = {}
    for duel in duels:
        case = duel.case
        groups.setdefault((case.head_dim, case.dtype, case.causal), []).append(duel)
    series = [
        Series(
            f"{dtype} {'causal' if causal else 'full'}",
            sorted(group, key=lambda duel: duel.case.seqlen_q),
        )
        for (_, dtype, causal), group in groups.items()
    ]
    return sorted(series, key=lambda one: one.head_dim)


def _cell(duel: Duel) -> str:
    """Both ratios, marked where the library wins."""
    if duel.reason:
        return "-"
    texts = []
    for clock in CLOCKS:
        ratio = duel.ratio(clock)
        text = "-" if ratio is None else f"{ratio:.{2 if ratio < 10 else 1}f}"
        texts.append(f"{text:>5}" + ("*" if duel.theirs_win(clock) else " "))
    return "".join(texts).rstrip()


def _batches(series: Sequence[Series]) -> Iterator[Sequence[Series]]:
    """Series of one head_dim, as many as fit beside each other."""
    for _, same in itertools.groupby(series, key=lambda one: one.head_dim):
        group = list(same)
        for start in range(0, len(group), _COLUMNS):
            yield group[start : start + _COLUMNS]


def _print(series: Sequence[Series], title: str, late: int) -> None:
    out = report.console()
    out.print(
        f"{title}\n{LIBRARY} time / {OURS} time, by GPU time and by call time; "
        "*: the library wins beyond noise\n",
        markup=False,
    )
    for batch in _batches(series):
        rows = [
            {"seqlen": seqlen} | {one.label: one.cell(seqlen) for one in batch}
            for seqlen in sorted({duel.case.seqlen_q for one in batch for duel in one.duels})
        ]
        columns = [report.Column("seqlen", lambda row: str(row["seqlen"]))]
        columns += [report.Column(one.label, _getter(one.label)) for one in batch]
        report.print_table(out, f"head_dim {batch[0].head_dim}", columns, [rows])
    verdicts = [
        {"head_dim": str(one.head_dim), "case": one.label}
        | {clock: one.verdict(clock) for clock in CLOCKS}
        for one in series
    ]
    columns = [
        report.Column("head_dim", _getter("head_dim")),
        report.Column("case", _getter("case"), numeric=False),
        *(report.Column(f"by {_CLOCK_NAMES[c]}", _getter(c), numeric=False) for c in CLOCKS),
    ]
    groups = [list(group) for _, group in itertools.groupby(verdicts, lambda row: row["head_dim"])]
    report.print_table(out, f"Sequence lengths at which {LIBRARY} wins", columns, groups)
    report.print_notes(out, _notes(series, late))


def _getter(name: str) -> Callable[[report.Row], str]:
    return lambda row: str(row[name])


def _notes(series: Sequence[Series], late: int) -> list[str]:
    duels = [duel for one in series for duel in one.duels]
    notes = [
        "GPU time: between events, behind other work and with the L2 flushed. Call time: from an "
        "idle GPU to the call's end, the host's part included. Within noise, where the quartiles "
        "overlap, neither wins."
    ]
    if late:
        notes.append(
            f"{late} calls kept the host longer than the work ahead kept the GPU: their GPU time "
            "may include waiting for launches."
        )
    notes += [
        f"head_dim {one.head_dim} {one.label}: {kernel} loses by GPU time at seqlen "
        f"{', '.join(map(str, seqlens))}"
        for one in series
        for kernel, seqlens in one.losses().items()
    ]
    return notes + [f"not timed: {duel.reason}" for duel in duels if duel.reason]


def _draw(series: Sequence[Series], path: Path, title: str) -> None:
    """Ratios by sequence length, a panel for each head_dim."""
    panels = [list(group) for _, group in itertools.groupby(series, key=lambda one: one.head_dim)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = {"width": 4.5 * columns, "height": 0.6 + 3.2 * rows}
    grid = {"nrows": rows, "ncols": columns, "sharex": True, "squeeze": False}
    with figure(path, **size, **grid) as axes:
        for panel, group in itertools.zip_longest(axes.flat, panels):
            if group is None:
                panel.set_visible(False)
                continue
            _draw_panel(panel, group)
        lines, labels = axes.flat[0].get_legend_handles_labels()
        page = axes.flat[0].figure
        page.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=7)
        page.suptitle(title)


def _draw_panel(panel: Any, group: Sequence[Series]) -> None:
    for one, colour in zip(group, itertools.cycle(COLOURS)):
        for clock, style in (("gpu", "-"), ("call", ":")):
            points = [(d.case.seqlen_q, d.ratio(clock)) for d in one.duels if d.ratio(clock)]
            if points:
                x, y = zip(*points, strict=True)
                label = f"{one.label}, {_CLOCK_NAMES[clock]}"
                panel.plot(x, y, style, color=colour, marker=".", label=label)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
    panel.set_title(f"head_dim {group[0].head_dim}")
    panel.set_xlabel("sequence length")
    panel.set_ylabel(f"{LIBRARY} time / ours")


class _WholeNumber(click.IntRange):
    """One whole number, and told so where it is a list of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not one whole number from {self.min}", param, ctx)
        return int(super().convert(number, param, ctx))


@click.command()
@click.option("--head-dim", type=HEADS, default="32,64,128,256", show_default=True)
@click.option("--heads", type=_WholeNumber(1), default=16, show_default=True)
@click.option("--batch", type=_WholeNumber(1), default=1, show_default=True)
@click.option("--dtype", type=DTYPE_LIST, default="float32,bfloat16", show_default=True)
@click.option("--causal", type=FLAGS, default="no,yes", show_default=True)
@click.option(
    "--seqlen",
    type=HEADS,
    default=",".join(map(str, SEQLENS)),
    show_default=True,
    help="Of queries and keys.",
)
@click.option(
    "--seed", type=_WholeNumber(0), default=0, show_default=True, help="Of the random inputs."
)
@click.option("--warmup", type=_WholeNumber(1), default=3, show_default=True)
@click.option("--repeats", type=_WholeNumber(3), default=20, show_default=True)
@plot_option("the ratio of both times by sequence length")
@output_option
def crossover(
    head_dim: Sequence[int],
    heads: int,
    batch: int,
    dtype: Sequence[str],
    causal: Sequence[bool],
    seqlen: Sequence[int],
    seed: int,
    warmup: int,
    repeats: int,
    plot: Path | None,
    output: Path | None,
) -> None:
    """Find the sequence length up to which library products beat the fused kernel.

    Times cupy-library and the dispatcher's choice on the same inputs, taking turns.
    """
    cases = sweep(
        dtype=dtype,
        batch=(batch,),
        seqlen_q=seqlen,
        seqlen_k=None,
        heads=(heads,),
        kv_heads=None,
        head_dim=head_dim,
        head_dim_v=None,
        causal=causal,
        q_offset=None,
        softmax_scale=None,
        layout=("bshd",),
    )
    with library_errors_as_usage():
        for case in cases:
            case.problem()
    theirs, ours = providers.provider(LIBRARY), providers.provider(OURS)
    if reason := gpu_unavailable() or theirs.missing():
        raise click.ClickException(f"the crossover is measured on a GPU: {reason}")
    ahead = WorkAhead()
    referee = Referee(theirs, ours, GpuTimer(), ahead, warmup, repeats)
    device = providers.current_device().name
    title = f"{device}, batch {batch}, {heads} heads"
    duels: list[Duel] = []
    rows: list[dict[str, Any]] = []

    def head() -> dict[str, Any]:
        return environment.metadata(device) | {
            "seed": seed,
            "warmup": warmup,
            "repeats": repeats,
            "crossover": {
                f"head_dim {one.head_dim} {one.label} {clock}": one.crossover(clock)
                for one in all_series(duels)
                for clock in CLOCKS
            },
        }

    def show() -> None:
        series = all_series(duels)
        _print(series, title, ahead.late)
        if plot:
            _draw(series, plot, title)
            click.echo(f"Drawn into {plot}.", err=True)

    keeping = report.kept(output, rows, head, show)
    with keeping as save, report.progress("crossover", len(cases)) as advance:
        for case, label in zip(cases, describe(cases)[1], strict=True):
            advance(label)
            duels.append(_duel(referee, case, seed))
            rows.append(duels[-1].row())
            save()
            # Some errors leave the GPU useless; the rows of the cases to come say so.
            with contextlib.suppress(RuntimeError):
                providers.release_memory()


def _duel(referee: Referee, case: Case, seed: int) -> Duel:
    try:
        if reason := too_large(case.array_bytes, on_gpu=True):
            return _void(case, reason)
        return referee.duel(random_inputs(case, seed, on_gpu=True))
    except (RuntimeError, MemoryError) as error:
        return _void(case, first_line(error))
