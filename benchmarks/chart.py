"""Line charts as SVG, legible on white and on dark pages.

The SVG is not written by matplotlib, so that the same numbers give the same bytes on all machines.
A check can then compare a figure with the one that its records give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Label, colour and dashes of each provider. The colours are those of Okabe and Ito's palette, made
# lighter until they contrast with both white and black.
STYLES = {
    "cupy_flash": ("cupy_flash", "#2188d9", ""),
    "cupy_flash-mma": ("cupy_flash, kernel mma", "#2188d9", "5 3"),
    "torch-cudnn": ("torch, cuDNN", "#d55e00", ""),
    "torch-flash": ("torch, FlashAttention-2", "#0a9f76", "5 3"),
}
_OTHERS = ("#b5651d", "#8a63d2", "#c2517f")
_GREY = "#7a828c"

_WIDTH = 760
_LEFT, _GAP, _TOP, _BELOW = 44, 24, 26, 40
_LEGEND = 26


@dataclass(frozen=True)
class Panel:
    """One plot with a line for each provider; a line maps x to y."""

    title: str
    lines: Mapping[str, Mapping[int, float]]


def svg(title: str, panels: Sequence[Panel], unit: str, x_label: str, columns: int) -> str:
    """Return an SVG of panels in rows, with a common scale and one legend."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    # Lines of cupy_flash come first in the legend, and are drawn last, on top of the others.
    names.sort(key=lambda name: not name.startswith("cupy_flash"))
    width = (_WIDTH - _LEFT - _GAP * (columns - 1) - 8) / columns
    height = 170 if columns < 3 else 130
    rows = -(-len(panels) // columns)
    total = _LEGEND + rows * (_TOP + height + _BELOW)
    top = max(y for panel in panels for line in panel.lines.values() for y in line.values())
    ticks = _ticks(top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" '
        f'width="{_WIDTH}" height="{total}" role="img" font-family="sans-serif" font-size="12" '
        f'fill="{_GREY}">',
        f"<title>{escape(title)}</title>",
        *_legend(names),
    ]
    for index, panel in enumerate(panels):
        left = _LEFT + index % columns * (width + _GAP)
        y = _LEGEND + _TOP + index // columns * (_TOP + height + _BELOW)
        parts.append(f'<g transform="translate({left:.1f} {y})">')
        if index % columns == 0:
            parts += _scale(ticks, height)
        parts += _axes(panel, ticks, unit, x_label, width, height, names)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def length_text(length: int) -> str:
    """Return a length as text, with 1k for 1024."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def _ticks(top: float) -> list[float]:
    """Return round numbers from 0 to at least the largest value."""
    scale = 10.0 ** (len(str(int(top))) - 1)
    step = next(s * scale for s in (0.2, 0.5, 1, 2, 5) if top / (s * scale) <= 5)
    return [step * index for index in range(math.ceil(top / step) + 1)]


def _style(name: str, names: Sequence[str]) -> tuple[str, str, str]:
    others = [other for other in names if other not in STYLES]
    return STYLES.get(name) or (name, _OTHERS[others.index(name) % len(_OTHERS)], "")


def _stroke(colour: str, dashes: str) -> str:
    return f'stroke="{colour}" stroke-width="2"' + (
        f' stroke-dasharray="{dashes}"' if dashes else ""
    )


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = _LEFT
    for name in names:
        label, colour, dashes = _style(name, names)
        yield f'<line x1="{x}" x2="{x + 24}" y1="12" y2="12" {_stroke(colour, dashes)}/>'
        yield f'<text x="{x + 30}" y="16">{escape(label)}</text>'
        x += 50 + 7 * len(label)


def _scale(ticks: Sequence[float], height: float) -> Iterator[str]:
    for tick in ticks:
        y = height * (1 - tick / ticks[-1]) + 4
        yield f'<text x="-6" y="{y:.1f}" text-anchor="end">{tick:g}</text>'


def _axes(
    panel: Panel,
    ticks: Sequence[float],
    unit: str,
    x_label: str,
    width: float,
    height: float,
    names: Sequence[str],
) -> Iterator[str]:
    xs = sorted({x for line in panel.lines.values() for x in line})
    # Lengths double from one to the next, so that equal steps form a logarithmic axis.
    places = {x: (index + 0.5) * width / len(xs) for index, x in enumerate(xs)}
    yield f'<text y="-9" font-weight="bold">{escape(panel.title)}</text>'
    yield f'<text x="{width:.1f}" y="-9" text-anchor="end">{escape(unit)}</text>'
    for tick in ticks:
        y = height * (1 - tick / ticks[-1])
        yield (
            f'<line x2="{width:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{_GREY}" stroke-opacity="{0.8 if tick == 0 else 0.25}"/>'
        )
    for x, place in places.items():
        yield (
            f'<text x="{place:.1f}" y="{height + 16}" text-anchor="middle">{length_text(x)}</text>'
        )
    yield f'<text x="{width / 2:.1f}" y="{height + 31}" text-anchor="middle">{x_label}</text>'
    for name in reversed([name for name in names if name in panel.lines]):
        _, colour, dashes = _style(name, names)
        points = [
            (places[x], height * (1 - y / ticks[-1])) for x, y in sorted(panel.lines[name].items())
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" {_stroke(colour, dashes)}/>'
        dots = "".join(f"M{x:.1f},{y:.1f}h0" for x, y in points)
        yield f'<path d="{dots}" stroke="{colour}" stroke-width="5" stroke-linecap="round"/>'
