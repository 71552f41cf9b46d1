"""Times of replayed CUDA graphs, and the record of a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupy_flash.cli.measure.timing import GpuTimer, Timed, replayed, spread

_WARMUP, _REPEATS = 2, 21


def graph_of(call: Callable[[], Any]) -> Timed:
    """Return the replay of a call on CuPy arrays, which is made once before."""
    call()
    graph = replayed(Timed(call))
    assert graph is not None
    return graph


def medians(timer: GpuTimer, graphs: Mapping[str, Timed]) -> dict[str, float]:
    """Return the median time of each graph in milliseconds; the graphs alternate."""
    times = timer.interleaved(list(graphs.values()), _WARMUP, [_REPEATS] * len(graphs))
    return {name: spread(found).median for name, found in zip(graphs, times, strict=True)}


def write(output: Path, environment: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a record as JSON, and print its rows."""
    record = {"metadata": environment, "rows": rows}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        click.echo(json.dumps(row))
