"""Draw docs/figures/hopper_schedule.svg, the schedule that docs/engineering/hopper.md explains.

    python benchmarks/schedule.py [FILE]

The figure shows one thread block of the Hopper kernel with 128 query rows, KV tiles of 128 keys,
16-bit inputs and head_dim 128. It is drawn from a model, not from a trace. The model has three
numbers, in cycles; see `GEMM`, `SOFTMAX` and `LOAD`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures" / "hopper_schedule.svg"

# Rows of a consumer, keys of a KV tile, and columns of a head.
ROWS, KEYS, COLUMNS = 64, 128, 128
CONSUMERS = 2
# KV tiles that the figure shows, and stages of the KV ring of this tile.
KV_TILES, STAGES = 5, 5
# FLOP per cycle and SM of 16-bit wgmma: half of the 8192 of 8-bit wgmma (measurements/float8.md).
FLOP_PER_CYCLE = 4096
# Cycles of S = Q K^T for one consumer and KV tile; O += P V takes as long. Computed.
GEMM = 2 * ROWS * KEYS * COLUMNS // FLOP_PER_CYCLE
# Cycles of a softmax of 64 x 128 scores next to running GEMMs, by the number of consumers that
# compute theirs at the same time. Measured on an H100 with the softmax of float8, whose row maxima
# are exact (measurements/float8.md). The softmax of 16-bit inputs was not measured by itself.
SOFTMAX = {1: 825, 2: 1422}
# Cycles in which TMA loads a tile of K or V. Assumed: the longest time with which the loads keep up
# with the GEMMs of all consumers, 32 bytes per cycle.
LOAD = CONSUMERS * GEMM

_COLOURS = ("#2188d9", "#d55e00")
_TMA, _GREY = "#0a9f76", "#7a828c"
_WIDTH, _LEFT, _ROW, _BOX = 760, 92, 34, 26
_HEAD, _FOOT, _LEGEND = 30, 30, 26


@dataclass(frozen=True)
class Box:
    """A job, or the part of it during which the job has `1 / lanes` of a unit.

    The jobs of KV tile 1 are named S1 = Q K^T, P1 = softmax(S1) and O1, the GEMM O += P V.
    """

    row: str
    name: str
    begin: float
    end: float
    consumer: int | None = None
    lane: int = 0
    lanes: int = 1


@dataclass
class _Job:
    """GEMM or softmax of a consumer. Jobs of the lowest `order` run at the same time."""

    name: str
    consumer: int
    left: float  # remaining work, in cycles of a unit without competition
    order: int = 0
    begin: float | None = None
    end: float | None = None


@dataclass
class _Consumer:
    """Jobs of a consumer that have been started, in the order of the KV tiles."""

    scores: list[_Job] = field(default_factory=list)
    outputs: list[_Job] = field(default_factory=list)
    softmaxes: list[_Job] = field(default_factory=list)


class Schedule:
    """Simulation of a thread block, from the first scores to the last output of a query tile.

    With ping-pong, the tensor cores compute the GEMMs of one consumer at a time, in the order of
    the named barriers. Without ping-pong, GEMMs that are in flight share the tensor cores equally.
    The first scores of all consumers are issued at time 0 in both cases, when the ring is full.
    """

    def __init__(self, *, pingpong: bool) -> None:
        self.pingpong = pingpong
        self.boxes: list[Box] = []
        self._gemms: list[_Job] = []
        self._softmaxes: list[_Job] = []
        self._consumers = [_Consumer() for _ in range(CONSUMERS)]
        self._order = 0  # place of the last GEMMs in the ping-pong order; 0 without it
        self._run()
        self._load()

    @property
    def cycles_per_kv_tile(self) -> float:
        """Cycles between the last two scores of consumer 0: all consumers compute one KV tile."""
        *_, before, last = (_end(job) for job in self._consumers[0].scores)
        return last - before

    @property
    def busy(self) -> float:
        """Fraction of these cycles in which the tensor cores work."""
        return CONSUMERS * 2 * GEMM / self.cycles_per_kv_tile

    def _run(self) -> None:
        time = 0.0
        for index, consumer in enumerate(self._consumers):
            consumer.scores.append(self._issue(_Job("S0", index, GEMM)))
        while True:
            while any([self._advance(index) for index in range(CONSUMERS)]):
                pass
            gemms = self._running_gemms()
            speeds = [(job, 1 / len(gemms)) for job in gemms]
            if self._softmaxes:
                speed = SOFTMAX[1] / SOFTMAX[len(self._softmaxes)]
                speeds += [(job, speed) for job in self._softmaxes]
            if not speeds:
                return
            step = min(job.left / speed for job, speed in speeds)
            for lane, job in enumerate(gemms):
                self._draw(Box("GEMM", job.name, time, time + step, job.consumer, lane, len(gemms)))
            for job in self._softmaxes:
                self._draw(Box("softmax", job.name, time, time + step, job.consumer))
            for job, speed in speeds:
                job.begin = time if job.begin is None else job.begin
                job.left -= step * speed
                if job.left < 1e-6:
                    job.end = time + step
                    (self._softmaxes if job in self._softmaxes else self._gemms).remove(job)
            time += step

    def _running_gemms(self) -> list[_Job]:
        """Return the GEMMs in execution: for each consumer, the one that it issued first."""
        first = min((job.order for job in self._gemms), default=0)
        found: dict[int, _Job] = {}
        for job in self._gemms:
            if job.order == first:
                found.setdefault(job.consumer, job)
        return [found[consumer] for consumer in sorted(found)]

    def _advance(self, index: int) -> bool:
        """Let a consumer start its next jobs. Return whether it started any."""
        it = self._consumers[index]
        step = len(it.softmaxes)
        if step < len(it.scores) and it.scores[step].end is not None:
            it.softmaxes.append(_Job(f"P{step}", index, SOFTMAX[1]))
            self._softmaxes.append(it.softmaxes[-1])
            return True
        # The next GEMMs follow when the softmax and the output of the step before are complete.
        jobs = it.softmaxes[-1:] + it.outputs[-1:]
        if len(it.outputs) == step or not jobs or any(job.end is None for job in jobs):
            return False
        self._order += self.pingpong
        if step < KV_TILES:
            it.scores.append(self._issue(_Job(f"S{step}", index, GEMM, self._order)))
        it.outputs.append(self._issue(_Job(f"O{step - 1}", index, GEMM, self._order)))
        return True

    def _issue(self, job: _Job) -> _Job:
        self._gemms.append(job)
        return job

    def _load(self) -> None:
        """Add the loads of the producer. The first `STAGES` tiles are in the ring at time 0."""
        tiles = ["K0"]
        for step in range(1, KV_TILES):
            tiles += [f"K{step}", f"V{step - 1}"]
        tiles.append(f"V{KV_TILES - 1}")
        time = 0.0
        for index in range(STAGES, len(tiles)):
            begin = max(time, self._released(tiles[index - STAGES]))
            time = begin + LOAD
            self.boxes.append(Box("TMA", tiles[index], begin, time))

    def _released(self, tile: str) -> float:
        """Return when all consumers have released the stage of a tile."""
        step = int(tile[1:])
        return max(
            _end((it.scores if tile[0] == "K" else it.outputs)[step]) for it in self._consumers
        )

    def _draw(self, box: Box) -> None:
        """Add a box, or extend the previous box of the same job."""
        for index in range(len(self.boxes) - 1, -1, -1):
            last = self.boxes[index]
            if (last.row, last.name, last.consumer) == (box.row, box.name, box.consumer):
                if (last.lane, last.lanes, last.end) == (box.lane, box.lanes, box.begin):
                    self.boxes[index] = Box(
                        box.row, box.name, last.begin, box.end, box.consumer, box.lane, box.lanes
                    )
                    return
                break
        self.boxes.append(box)


def _end(job: _Job) -> float:
    assert job.end is not None
    return job.end


def svg() -> str:
    """Return the figure: the schedule without ping-pong above the one with ping-pong."""
    schedules = [Schedule(pingpong=False), Schedule(pingpong=True)]
    last = max(box.end for schedule in schedules for box in schedule.boxes)
    scale = (_WIDTH - _LEFT - 8) / last
    height = _HEAD + (2 + CONSUMERS) * _ROW + _FOOT
    total = _LEGEND + height * len(schedules)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" '
        f'width="{_WIDTH}" height="{total}" role="img" font-family="sans-serif" font-size="12" '
        f'fill="{_GREY}">',
        "<title>Schedule of a thread block of the Hopper kernel: TMA loads, GEMMs and the softmax "
        "of two consumers over time, without and with ping-pong</title>",
        *_legend(),
    ]
    for index, schedule in enumerate(schedules):
        parts.append(f'<g transform="translate({_LEFT} {_LEGEND + index * height})">')
        parts += _panel(schedule, scale, last)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> Iterator[str]:
    labels = [
        (_TMA, "load of a tile of K or V"),
        *((colour, f"consumer {index}") for index, colour in enumerate(_COLOURS)),
    ]
    x = _LEFT
    for colour, label in labels:
        yield f'<rect x="{x}" y="6" width="20" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 26}" y="16">{label}</text>'
        x += 50 + 7 * len(label)


def _panel(schedule: Schedule, scale: float, last: float) -> Iterator[str]:
    rows = ["producer", "tensor cores", *(f"consumer {index}" for index in range(CONSUMERS))]
    title = "with ping-pong" if schedule.pingpong else "without ping-pong"
    yield f'<text y="18" font-weight="bold">{title}</text>'
    yield (
        f'<text x="{last * scale:.1f}" y="18" text-anchor="end">'
        f"{schedule.cycles_per_kv_tile:.0f} cycles per KV tile, tensor cores busy "
        f"{schedule.busy:.0%}</text>"
    )
    bottom = _HEAD + len(rows) * _ROW
    for tick in range(0, int(last) + 1, 2000):
        x = tick * scale
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 4}" y2="{bottom}" stroke="{_GREY}" '
            'stroke-opacity="0.25"/>'
        )
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick}</text>'
    yield f'<text x="{last * scale:.1f}" y="{bottom + 14}" text-anchor="end">cycles</text>'
    for index, row in enumerate(rows):
        yield f'<text x="-8" y="{_HEAD + index * _ROW + 17}" text-anchor="end">{row}</text>'
    for box in schedule.boxes:
        yield from _box(box, scale)


def _box(box: Box, scale: float) -> Sequence[str]:
    row = {"TMA": 0, "GEMM": 1}.get(box.row, 2 + (box.consumer or 0))
    height = _BOX / box.lanes
    y = _HEAD + row * _ROW + box.lane * height
    x, width = box.begin * scale, (box.end - box.begin) * scale
    colour = _TMA if box.consumer is None else _COLOURS[box.consumer]
    size = 11 if box.lanes == 1 else 10
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        f'fill="{colour}" stroke="#fff" stroke-width="0.5"/>',
        f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" '
        f'font-size="{size}" fill="#fff">{escape(box.name)}</text>',
    )


def main(arguments: Sequence[str]) -> None:
    """Write the figure."""
    target = Path(arguments[0]) if arguments else TARGET
    target.write_text(svg(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
