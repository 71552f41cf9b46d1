"""Times of the CPU backend and of the naive formula in NumPy, over a grid of float32 calls.

    python benchmarks/cpu/grid.py --output benchmarks/results/cpu_grid.json

Rounds of several calls of the two alternate, and the best time of each counts. The first call of a
round is not counted if calls are short: BLAS keeps its threads spinning for some 30 ms after a
product, which takes a core from the next call. Cases whose score matrix is too large for the
formula are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupy_flash import flash_attention, flash_attention_varlen, flash_attention_with_kvcache
from cupy_flash.cli.records import environment
from cupy_flash.cpu.sources import digest

SCORE_BYTES = 5 << 30  # size of the largest score matrix that the formula may have
TURNS = 2  # number of rounds of each side
SECONDS = 0.15  # minimum duration of a round, in seconds, without its first call
KINDS = ("dense", "cached", "packed")


class Case(NamedTuple):
    """Case of the grid: a name, and calls of cupy_flash (`ours`) and of the formula."""

    name: str
    ours: Callable[[], Any]
    naive: Callable[[], Any]


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """Compute the formula on (batch, seqlen, heads, head_dim), with all scores in memory."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    q = (q * np.float32(head_dim**-0.5)).swapaxes(1, 2)
    k, v = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
    if heads_kv < heads_q:
        # Broadcasting the KV heads avoids copies of them.
        q = q.reshape(batch, heads_kv, -1, seqlen_q, head_dim)
        k, v = k[:, :, None], v[:, :, None]
    scores = np.matmul(q, k)
    if causal:
        np.copyto(scores, -np.inf, where=hidden(seqlen_q, seqlen_k))
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.matmul(scores, v).reshape(batch, heads_q, seqlen_q, -1).swapaxes(1, 2)


def hidden(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Return a bool matrix that is True for the pairs that a causal mask masks."""
    return ~np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def dense_cases() -> Iterator[Case]:
    """Yield cases with batches of sequences of equal length."""
    grid = product((1, 8, 128), (8, 32, 128, 512, 1024, 4096), (32, 64, 128), (False, True))
    for batch, seqlen, head_dim, causal in grid:
        heads = 12 if head_dim == 32 else 8
        if 4 * batch * heads * seqlen**2 > SCORE_BYTES:
            continue
        q, k, v = random(3, batch, seqlen, heads, head_dim)
        yield Case(
            f"b{batch} s{seqlen} h{heads} d{head_dim} {'causal' if causal else 'full'}",
            lambda q=q, k=k, v=v, c=causal: flash_attention(q, k, v, causal=c, backend="cpu"),
            lambda q=q, k=k, v=v, c=causal: naive(q, k, v, c),
        )


def cached_cases() -> Iterator[Case]:
    """Yield cases with one query per sequence and a KV cache, with 32 query and 8 KV heads."""
    for batch, seqlen, head_dim in product((1, 2, 4, 8), (1024, 2048, 4096, 8192), (64, 128)):
        q = random(batch, 1, 32, head_dim)
        k, v = random(2, batch, seqlen, 8, head_dim)
        lengths = np.full(batch, seqlen, np.int32)
        yield Case(
            f"cached b{batch} s{seqlen} h32/8 d{head_dim}",
            lambda q=q, k=k, v=v, n=lengths: flash_attention_with_kvcache(
                q, k, v, cache_seqlens=n, backend="cpu"
            ),
            lambda q=q, k=k, v=v: naive(q, k, v),
        )


def packed_cases() -> Iterator[Case]:
    """Yield cases with packed sequences of random lengths; the formula computes one at a time."""
    for batch, longest, head_dim, causal in product(
        (8, 128), (16, 64, 256, 1024), (32, 64), (0, 1)
    ):
        heads = 12 if head_dim == 32 else 8
        lengths = np.random.default_rng(1).integers(longest // 4, longest + 1, batch)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        q, k, v = random(3, int(ends[-1]), heads, head_dim)

        def ours(q=q, k=k, v=v, ends=ends, n=longest, c=bool(causal)):
            return flash_attention_varlen(q, k, v, ends, ends, n, n, causal=c, backend="cpu")

        def one_by_one(q=q, k=k, v=v, ends=ends, c=bool(causal)):
            out = np.empty_like(q)
            for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
                rows = slice(first, end)
                out[rows] = naive(q[None, rows], k[None, rows], v[None, rows], c)[0]
            return out

        name = f"packed {batch} of {longest // 4}-{longest} h{heads} d{head_dim}"
        yield Case(f"{name} {'causal' if causal else 'full'}", ours, one_by_one)


def best_times(case: Case) -> tuple[float, float]:
    """Return the best times in seconds of cupy_flash and the formula, from alternating rounds."""
    best = [math.inf, math.inf]
    for _ in range(TURNS):
        for side, call in enumerate((case.ours, case.naive)):
            if not SECONDS < best[side] < math.inf:
                call()
            spent, calls = 0.0, 0
            while calls == 0 or spent < SECONDS:
                started = time.perf_counter()
                call()
                seconds = time.perf_counter() - started
                best[side] = min(best[side], seconds)
                spent += seconds
                calls += 1
    return best[0], best[1]


def geometric_mean(numbers: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def write_record(path: Path, rows: list[dict[str, Any]], timing: str) -> None:
    """Write rows with metadata: machine, digest of the sources, and the text `timing`."""
    head = {**environment.metadata(environment.cpu_name()), "family": "cpu"}
    head |= {"kernel_digest": digest(), "timing": " ".join(timing.split())}
    path.write_text(json.dumps({"metadata": head, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kind",
        choices=KINDS,
        action="append",
        help="kind of cases to time; repeatable; default: all",
    )
    parser.add_argument("--only", default="", help="time only cases whose name contains this")
    parser.add_argument("--output", type=Path, help="record to write")
    options = parser.parse_args()
    rows = []
    for kind in options.kind or KINDS:
        for case in {"dense": dense_cases, "cached": cached_cases, "packed": packed_cases}[kind]():
            if options.only not in case.name:
                continue
            ours, formula = best_times(case)
            rows.append(
                {
                    "case": case.name,
                    "ms": ours * 1e3,
                    "naive_ms": formula * 1e3,
                    "speedup": formula / ours,
                }
            )
            print(
                f"{case.name:36} {ours * 1e3:10.4g} {formula * 1e3:10.4g} {formula / ours:6.2f}",
                flush=True,
            )
    speedups = [row["speedup"] for row in rows]
    print(
        f"{len(rows)} cases: {geometric_mean(speedups):.2f} times as fast (geometric mean), least "
        f"{min(speedups):.2f}"
    )
    if options.output:
        write_record(options.output, rows, __doc__.split("\n\n")[2])


if __name__ == "__main__":
    main()
