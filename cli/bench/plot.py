"""The command `cupy-flash plot`: TFLOP/s by sequence length and provider, in the papers' style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ..cases.cases import Case, sequences_text
from ..cases.options import EXISTING_FILE, NEW_FILE, force_option, writable_path
from ..records import records, report
from ..records.figures import COLOURS, SUFFIXES, SUFFIXES_TEXT, figure, why_no_figures

# Largest number of bars in a panel; panels with more have lines instead.
_MOST_BARS = 30
# Largest number of bars in a panel whose value labels are horizontal.
_MOST_FLAT_LABELS = 14
# Largest number of tick labels below a panel of lines; more would overlap.
_MOST_TICKS = 12
_USUAL = ("cupy_flash", "torch-flash", "torch-cudnn", "torch-efficient", "torch-math")


@dataclass(frozen=True)
class Axis:
    """Quantity on the x axis of a picture."""

    of: Callable[[Case], int]
    label: str


_SQUARE = Axis(lambda case: case.seqlen_k, "sequence length")
_KEYS = Axis(lambda case: case.seqlen_k, "keys (seqlen_k)")
_QUERIES = Axis(lambda case: case.seqlen_q, "queries (seqlen_q)")


@dataclass
class Panel:
    """A panel of a picture; its rows differ only in sequence length and provider."""

    # Texts that `_panel_parts` returns; those that differ between panels form the heading.
    parts: dict[str, str]
    # Rows, keyed by provider and x.
    rows: dict[tuple[str, int], report.Row] = field(default_factory=dict)

    @property
    def xs(self) -> list[int]:
        """Sequence lengths in ascending order."""
        return sorted({x for _, x in self.rows})

    def batches(self, x: int) -> set[int]:
        """Return the batch sizes at one sequence length."""
        return {row["batch"] for (_, at), row in self.rows.items() if at == x}


@dataclass(frozen=True)
class Picture:
    """Contents of the picture of a record."""

    device: str
    axis: Axis
    providers: list[str]
    panels: list[Panel]
    unit: str
    scale: float


@click.command()
@click.argument("path", metavar="RECORD.json", type=EXISTING_FILE)
@click.option(
    "--output",
    required=True,
    type=NEW_FILE,
    callback=lambda ctx, param, path: writable_path(path, SUFFIXES),
    help=f"Path of the image: a {SUFFIXES_TEXT} file.",
)
@force_option("--output")
def plot(path: Path, output: Path) -> None:
    """Draw the rates in a record of 'bench' by sequence length, for each provider."""
    if reason := why_no_figures():
        raise click.UsageError(reason)
    draw(picture(records.read_bench(path)), output)
    click.echo(f"Written to {output}.", err=True)


def picture(record: report.Record) -> Picture:
    """Return the picture of a record of `bench`; raise a usage error if no row has a rate."""
    rows = record.rows
    if not any(row["tflops"] for row in rows):
        raise click.UsageError("the record has no rate to draw: no row was timed")
    cases = [records.case_of(row) for row in rows]
    axis = _axis(cases)
    panels: dict[tuple[str, ...], Panel] = {}
    for parts, case, row in zip(_all_parts(cases, axis), cases, rows, strict=True):
        panel = panels.setdefault(tuple(parts.values()), Panel(parts))
        panel.rows.setdefault((row["provider"], axis.of(case)), row)
    unit, scale = report.rate_unit(rows)
    return Picture(
        device=str(record.metadata.get("device", "")),
        axis=axis,
        providers=list(dict.fromkeys(row["provider"] for row in rows)),
        panels=list(panels.values()),
        unit=unit,
        scale=scale,
    )


def _axis(cases: Sequence[Case]) -> Axis:
    oblong = [case for case in cases if case.seqlen_q != case.seqlen_k]
    if not oblong:
        return _SQUARE
    return _KEYS if len({case.seqlen_k for case in oblong}) > 1 else _QUERIES


def _all_parts(cases: Sequence[Case], axis: Axis) -> list[dict[str, str]]:
    """Return the texts that identify each case's panel; the batch size only if it is needed."""
    oblong = {_other(case, axis) for case in cases if case.seqlen_q != case.seqlen_k}
    parts = [_panel_parts(case, axis, oblong) for case in cases]
    batches: dict[tuple[Any, ...], set[int]] = {}
    for part, case in zip(parts, cases, strict=True):
        batches.setdefault((*part.values(), axis.of(case)), set()).add(case.batch)
    if all(len(result) == 1 for result in batches.values()):
        return parts
    return [
        part | {"batch": f"batch {case.batch}"} for part, case in zip(parts, cases, strict=True)
    ]


def _other(case: Case, axis: Axis) -> int:
    """Return the sequence length that is not on the x axis."""
    return case.seqlen_k if axis is _QUERIES else case.seqlen_q


def _panel_parts(case: Case, axis: Axis, oblong: set[int]) -> dict[str, str]:
    """Return the texts that identify a case's panel, by property."""
    other = "seqlen_k" if axis is _QUERIES else "seqlen_q"
    mask = "causal" if case.causal else "full"
    if case.q_offset is not None:
        mask += f", q_offset {case.q_offset}"
    heads = f"{case.heads_q} head{'s'[: case.heads_q > 1]}"
    if case.heads_kv != case.heads_q:
        heads = f"{case.heads_q}/{case.heads_kv} heads"
    head_dim = f"head_dim {case.head_dim}"
    if case.head_dim_v != case.head_dim:
        head_dim += f"/{case.head_dim_v}"
    length = "seqlen_q = seqlen_k" if oblong else ""
    if (fixed := _other(case, axis)) in oblong:
        length = f"{other} {fixed}"
    return {
        "dtype": case.dtype,
        "head_dim": head_dim,
        "mask": mask,
        "heads": heads,
        "length": length,
        "scale": "" if case.softmax_scale is None else f"softmax_scale {case.softmax_scale:g}",
        # Caches and packed sequences have only one layout.
        "layout": sequences_text(case) or ("" if case.layout == "bshd" else case.layout),
        "direction": case.direction if case.is_backward else "",
        "batch": "",
    }


def length_text(length: int) -> str:
    """Return a sequence length in the form that papers use: 1k for 1024."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def draw(shown: Picture, path: Path) -> None:
    """Draw a picture into a file; needs matplotlib."""
    grid, paired = _grid(shown.panels)
    columns = len(grid[0])
    most = max(len(panel.xs) for panel in shown.panels)
    bars = most * len(shown.providers)
    # Width in inches; bars with horizontal labels must be wider than those with vertical ones.
    width = min(max((0.3 if bars <= _MOST_FLAT_LABELS else 0.2) * bars + 0.8, 3.2), 6.5)
    with figure(
        path,
        width=max(width * columns, 4.5),
        height=2.5 * len(grid) + 0.7,
        nrows=len(grid),
        ncols=columns,
        # Panels that compare a full with a causal mask have one scale; others may differ widely.
        sharey="row" if paired else False,
        squeeze=False,
    ) as all_axes:
        page = all_axes[0, 0].figure
        page.suptitle(_title(shown), fontsize=10)
        varying = _varying([panel.parts for panel in shown.panels])
        handles: dict[str, Any] = {}
        for row, row_axes in zip(grid, all_axes, strict=True):
            for panel, axes in zip(row, row_axes, strict=True):
                if panel is None:
                    axes.set_visible(False)
                    continue
                draw_panel = _draw_bars if bars <= _MOST_BARS else _draw_lines
                handles |= draw_panel(axes, panel, shown)
                axes.set_title(
                    ", ".join(text for name in varying if (text := panel.parts[name])), fontsize=9
                )
                axes.set_xlabel(shown.axis.label)
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(axis="y", linewidth=0.4, alpha=0.6)
                axes.set_axisbelow(True)
                axes.tick_params(labelleft=True)
            for axes in row_axes:
                axes.set_ylim(bottom=0)
            row_axes[0].set_ylabel(shown.unit)
        page.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(len(handles), 4),
            frameon=False,
        )


def _grid(panels: Sequence[Panel]) -> tuple[list[list[Panel | None]], bool]:
    """Return rows of panels, and whether each row pairs a full with a causal mask."""
    pairs: dict[tuple[str, ...], dict[str, Panel]] = {}
    for panel in panels:
        rest = tuple(text for name, text in panel.parts.items() if name != "mask")
        pairs.setdefault(rest, {})[panel.parts["mask"]] = panel
    masks = list(dict.fromkeys(panel.parts["mask"] for panel in panels))
    if len(masks) == 2:
        return [[result.get(mask) for mask in masks] for result in pairs.values()], True
    if len(panels) == 1:
        return [[panels[0]]], False
    padded: list[Panel | None] = [*panels, *[None] * (len(panels) % 2)]
    return [padded[start : start + 2] for start in range(0, len(padded), 2)], False


def _varying(parts: Sequence[dict[str, str]]) -> list[str]:
    return [name for name in parts[0] if len({part[name] for part in parts}) > 1]


def _title(shown: Picture) -> str:
    parts = shown.panels[0].parts
    varying = _varying([panel.parts for panel in shown.panels])
    shared = [text for name, text in parts.items() if name not in varying and text]
    rows = [row for panel in shown.panels for row in panel.rows.values()]
    batches = {row["batch"] for row in rows}
    if len(batches) == 1 and "batch" not in varying and not parts["batch"]:
        shared.append(f"batch {rows[0]['batch']}")
    elif tokens := _tokens(shown):
        shared.append(f"batch × {shown.axis.label} = {length_text(tokens)}")
    if any(records.is_wrong(row) for row in rows):
        shared.append("!: over the error bound")
    return "\n".join(filter(None, [shown.device, ", ".join(shared)]))


def _tokens(shown: Picture) -> int | None:
    """Return batch size times sequence length if it is equal in all rows, otherwise None."""
    products = {row["batch"] * x for panel in shown.panels for (_, x), row in panel.rows.items()}
    return products.pop() if len(products) == 1 else None


def _ticks(axes: Any, positions: Iterable[float], panel: Panel, shown: Picture) -> None:
    """Label sequence lengths, with the batch size if neither it nor the token count is constant."""
    batches = {row["batch"] for each in shown.panels for row in each.rows.values()}
    with_batch = len(batches) > 1 and not _tokens(shown) and not panel.parts["batch"]
    axes.set_xticks(
        list(positions),
        [
            length_text(x) + (f"\nbatch {min(panel.batches(x))}" if with_batch else "")
            for x in panel.xs
        ],
    )


def _colours(shown: Picture) -> dict[str, str]:
    """Return each provider's colour; frequent providers have the same colour in every picture."""
    usual = [name for name in _USUAL if name in shown.providers]
    others = [name for name in shown.providers if name not in usual]
    colours = dict(zip(_USUAL, COLOURS, strict=False))
    left = [c for c in COLOURS if c not in {colours[name] for name in usual}] or list(COLOURS)
    colours |= {name: left[index % len(left)] for index, name in enumerate(others)}
    ours_first = sorted([*usual, *others], key=lambda name: not name.startswith("cupy_flash"))
    return {name: colours[name] for name in ours_first}


def _draw_bars(axes: Any, panel: Panel, shown: Picture) -> dict[str, Any]:
    colours = _colours(shown)
    xs, count = panel.xs, len(colours)
    width = 0.84 / count
    upright = len(xs) * count > _MOST_FLAT_LABELS
    handles = {}
    for index, (provider, colour) in enumerate(colours.items()):
        rows = [panel.rows.get((provider, x)) for x in xs]
        heights = [(row["tflops"] or 0) * shown.scale if row else 0 for row in rows]
        positions = [at + (index - (count - 1) / 2) * width for at in range(len(xs))]
        bars = axes.bar(positions, heights, width, color=colour)
        handles[provider] = bars
        labels = [_value(row, height) for row, height in zip(rows, heights, strict=True)]
        axes.bar_label(bars, labels, fontsize=6.5, padding=1.5, rotation=90 if upright else 0)
    _ticks(axes, range(len(xs)), panel, shown)
    axes.margins(y=0.18 if upright else 0.1)
    if len(xs) == 1:
        axes.set_xlim(-1, 1)
    return handles


def _value(row: report.Row | None, height: float) -> str:
    """Return a bar's label: its value, "n/a" without a time, with "!" if the result was wrong."""
    if not height or row is None:
        return "n/a"
    text = f"{height:.0f}" if height >= 10 else f"{height:#.3g}"
    return text + ("!" if records.is_wrong(row) else "")


def _draw_lines(axes: Any, panel: Panel, shown: Picture) -> dict[str, Any]:
    handles = {}
    for provider, colour in _colours(shown).items():
        points = [
            (x, row["tflops"] * shown.scale)
            for x in panel.xs
            if (row := panel.rows.get((provider, x))) and row["tflops"]
        ]
        (handles[provider],) = axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            marker="o",
            markersize=3,
            linewidth=1.2,
        )
    if min(panel.xs) > 0:
        axes.set_xscale("log", base=2)
    # Labels need space: ticks are at powers of two, or at every n-th length that was measured.
    step = -(-len(panel.xs) // _MOST_TICKS)
    powers = [x for x in panel.xs if x & (x - 1) == 0]
    ticks = powers if 2 <= len(powers) <= _MOST_TICKS else panel.xs[::step]
    axes.set_xticks(ticks, [length_text(x) for x in ticks])
    axes.minorticks_off()
    return handles
