"""Host time of a call if the addresses of its arrays change, by kernel family.

    python benchmarks/pointers.py --output benchmarks/results/pointers.json

Tensor maps hold addresses, so the `hopper` family must encode new ones on the host. The arrays are
small, so that the host never waits for the GPU. Medians of single calls. Needs a GPU.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cupy_flash import flash_attention
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FORWARD
from cupy_flash.gpu.environment import device_for_id

_SHAPE = (1, 128, 4, 64)  # batch, seqlen, heads, head_dim
_DTYPE = "float16"
_FAMILIES = ("mma", "hopper")
# Number of distinct sets of q, k and v: one, a few that alternate, and more than are cached.
_SETS = {"the same": 1, "16 sets in turns": 16, "never seen or forgotten": 2000}
_CALLS = 2000


def endless_sets(count: int) -> Iterator[tuple[Any, ...]]:
    """Return an endless iterator that cycles through `count` sets of q, k and v."""
    import cupy

    rng = cupy.random.default_rng(0)
    return itertools.cycle(
        [
            tuple(rng.standard_normal(_SHAPE, dtype=cupy.float32).astype(_DTYPE) for _ in "qkv")
            for _ in range(count)
        ]
    )


def median_us(family: str, count: int) -> float:
    """Return the median host time of one call, in microseconds."""
    import cupy

    sets = endless_sets(count)
    flash_attention(*next(sets), family=family)
    times = []
    for call in range(_CALLS):
        inputs = next(sets)
        start = time.perf_counter()
        flash_attention(*inputs, family=family)
        times.append(time.perf_counter() - start)
        if call % 50 == 49:
            cupy.cuda.Device().synchronize()
    return 1e6 * statistics.median(times)


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Record to write.")
def main(output: Path | None) -> None:
    """Measure the host time of a call with constant, recurring and new addresses of its arrays."""
    rows = []
    for addresses, count in _SETS.items():
        times = {f"{name}_us": round(median_us(name, count), 1) for name in _FAMILIES}
        rows.append({"addresses": addresses, **times})
        click.echo(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    if output:
        digests = {f"{name}_digest": FORWARD[name].digest() for name in _FAMILIES}
        record = {"metadata": metadata(device_for_id(0).name) | digests, "rows": rows}
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
