"""Table of rates by tile size, with Br as rows and Bc as columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ..records import report
from .candidates import Candidate
from .race import ranking

Size = tuple[int, int]

# Colours from slow to fast, as RGB: five points of the viridis colour map.
_COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LEAST_WIDTH = 4


@dataclass(frozen=True)
class HeatMap:
    """Best rate of each size, and why other sizes have none.

    Attributes
    ----------
    title
        Description of the sweep and its device.
    rates
        TFLOP/s of the best tile of each (Br, Bc), according to the ranking.
    reasons
        Reason why a size in the search space has no rate.
    early
        Sizes whose best tile left the race early, so that its rate has fewer repeats.
    """

    title: str
    rates: Mapping[Size, float]
    reasons: Mapping[Size, str]
    early: frozenset[Size] = frozenset()

    @classmethod
    def of(
        cls, title: str, candidates: Sequence[Candidate], illegal: Mapping[Size, str]
    ) -> HeatMap:
        """Return the map of a sweep's candidates and of the sizes that have no legal tile."""
        rates: dict[Size, float] = {}
        reasons = dict(illegal)
        early = set()
        last_round = max((candidate.rounds for candidate in candidates), default=0)
        for candidate in ranking(candidates):
            size = (candidate.tile.Br, candidate.tile.Bc)
            if candidate.tflops is None or candidate.failed:
                why = "wrong result" if candidate.failed else candidate.dropped or "not timed"
                reasons.setdefault(size, why)
            elif size not in rates:
                rates[size] = candidate.tflops
                if candidate.rounds < last_round:
                    early.add(size)
        sizes = rates.keys() | reasons.keys()
        for size in itertools.product({Br for Br, _ in sizes}, {Bc for _, Bc in sizes}):
            reasons.setdefault(size, "not tried")
        without = {size: why for size, why in reasons.items() if size not in rates}
        return cls(title, rates, without, frozenset(early))

    @property
    def rows(self) -> list[int]:
        """Values of Br in the map."""
        return sorted({size[0] for size in (*self.rates, *self.reasons)})

    @property
    def columns(self) -> list[int]:
        """Values of Bc in the map."""
        return sorted({size[1] for size in (*self.rates, *self.reasons)})

    @property
    def best(self) -> Size:
        """Size with the highest rate among those that were timed to the end."""
        to_the_end = (size for size in self.rates if size not in self.early)
        return max(to_the_end, key=self.rates.__getitem__)

    @property
    def unit(self) -> tuple[str, float]:
        """Unit of the rates that are shown, and its factor on TFLOP/s."""
        return report.rate_unit({"tflops": rate} for rate in self.rates.values())

    def rate_text(self, rate: float) -> str:
        """Return a rate in that unit, without decimals if the rates are large."""
        scale = self.unit[1]
        return f"{rate * scale:{'.0f' if max(self.rates.values()) * scale >= 20 else '.3g'}}"

    def legend(self) -> dict[str, str]:
        """Return a letter for each kind of reason; reasons of a kind may differ in numbers."""
        kinds = dict.fromkeys(_kind(why) for why in self.reasons.values())
        return dict(zip(kinds, _LETTERS, strict=False))


def _kind(reason: str) -> str:
    return " ".join("N" if any(c.isdigit() for c in word) else word for word in reason.split())


def _colour(share: float) -> tuple[int, int, int]:
    position = min(max(share, 0.0), 1.0) * (len(_COLOURS) - 1)
    low = min(int(position), len(_COLOURS) - 2)
    part = position - low
    pairs = zip(_COLOURS[low], _COLOURS[low + 1], strict=True)
    red, green, blue = (round(a + part * (b - a)) for a, b in pairs)
    return red, green, blue


def print_heat_map(out: Console, heat: HeatMap) -> None:
    """Print the map: a star marks the best tile's size, a letter a size that has no rate."""
    if not heat.rates:
        return
    best, worst = heat.rates[heat.best], min(heat.rates.values())
    legend = heat.legend()
    grid = [[Text("Br\\Bc"), *(Text(str(Bc)) for Bc in heat.columns)]]
    for Br in heat.rows:
        cells = [Text(str(Br))]
        for Bc in heat.columns:
            rate = heat.rates.get((Br, Bc))
            if rate is None:
                reason = heat.reasons.get((Br, Bc))
                cells.append(Text(legend.get(_kind(reason), "?") if reason else "", style="dim"))
            else:
                size = (Br, Bc)
                mark = "*" if size == heat.best else "~" if size in heat.early else ""
                cells.append(Text(mark + heat.rate_text(rate), style=_style(rate, worst, best)))
        grid.append(cells)
    widths = [max(_LEAST_WIDTH, *map(len, column)) for column in zip(*grid, strict=True)]
    unit = heat.unit[0]
    out.print(f"{heat.title}: {unit} of the best tile of each size, * the best", markup=False)
    for cells in grid:
        for cell, width in zip(cells, widths, strict=True):
            cell.align("right", width)
        # A map that is wider than the terminal is not wrapped.
        out.print(Text(" ").join(cells), soft_wrap=True)
    if heat.early:
        out.print("~: left the race early, so timed with fewer repeats", markup=False)
    for kind, letter in legend.items():
        out.print(f"{letter}: {kind}", markup=False)


def _style(rate: float, worst: float, best: float) -> str:
    # Most differences are near the best rate: the colours are spread over the upper part.
    share = (rate / best - max(0.5, worst / best)) / (1 - max(0.5, worst / best) or 1.0)
    red, green, blue = _colour(share)
    ink = "black" if 299 * red + 587 * green + 114 * blue > 128000 else "white"
    return f"{ink} on rgb({red},{green},{blue})"
