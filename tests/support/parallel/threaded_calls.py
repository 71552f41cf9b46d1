"""Public calls by several threads at once, and digests of their results.

``python -m support.parallel.threaded_calls`` in the folder `tests` prints the digests of a new
process whose threads make each call at the same time, so that they fill empty caches together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import MaskMod, ScoreMod
from support.calls.every_array import calls_of, functions_of

THREADS = 4
# Seconds after which CPython lets another thread run; 0.005 by default.
_SHORTEST_TURN = 1e-6


def calls() -> dict[str, Callable[[], Any]]:
    """Return calls of all public functions with every array argument, and larger ones, by name.

    Each invocation makes new arrays, and new functions of masks and scores.
    """
    left_out = ("check_mod", "plot")  # the first one needs a GPU, matplotlib is not thread-safe
    every = {
        str(call): functools.partial(call.run, lambda array: array, **options)
        for function in functions_of(cupy_flash)
        if not function.__name__.startswith(left_out)
        for call in calls_of(function, np.float16)
        for options in [{"arch": "sm_90"} if call.is_plan else {"backend": "cpu"}]
    }
    return every | {
        "several tiles": _several_tiles,
        "gradients of several tiles": _gradients_of_several_tiles,
        "new functions": _new_functions,
    }


def _inputs(rows: int, heads: int) -> Any:
    rng = np.random.default_rng(rows)
    return rng.standard_normal((3, 2, rows, heads, 32), dtype=np.float32)


def _several_tiles() -> Any:
    q, k, v = _inputs(400, 4)
    return cupy_flash.flash_attention(q, k, v, causal=True, tile=(64, 64), backend="cpu")


def _gradients_of_several_tiles() -> Any:
    q, k, v = _inputs(200, 4)
    out, pull_back = cupy_flash.flash_attention_vjp(q, k, v, causal=True, backend="cpu")
    return out, *pull_back(q)


def _new_functions() -> Any:
    """Return results with functions of this call; equal ones of other threads share expressions."""
    q, k, v = _inputs(40, 2)
    slopes = np.array([0.5, 0.25], np.float32)
    results = []
    for width in range(3, 9):
        near = MaskMod(lambda b, h, i, j, width: abs(i - j) < width, width=width)
        bent = ScoreMod(
            lambda score, b, h, i, j, slopes, width: np.tanh(score / width) - slopes[h] * (i - j),
            slopes=slopes,
            width=float(width),
        )
        modifications = {"mask_mod": near, "score_mod": bent, "backend": "cpu"}
        out, lse = cupy_flash.flash_attention(q, k, v, return_lse=True, **modifications)
        gradients = cupy_flash.flash_attention_backward(q, k, v, out, out, lse, **modifications)
        plan = cupy_flash.plan(cupy_flash.flash_attention, q, k, v, mask_mod=near, arch="sm_90")
        results += [out, lse, *gradients, plan.unit.text]
    return results


def digest(result: Any) -> str:
    """Return a digest of the bits of all arrays of a result, and of its texts and plans."""
    parts = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            parts.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        elif isinstance(value, cupy_flash.Plan):
            add([str(value.tile), value.unit.text if value.unit else ""])
        elif isinstance(value, dict):
            # `Call.run` collects written arrays from a set, whose order differs between processes.
            add([part for item in sorted(value.items()) for part in item])
        elif isinstance(value, (tuple, list)):
            for part in value:
                add(part)
        else:
            parts.update(repr(value).encode())

    add(result)
    return parts.hexdigest()


@contextmanager
def short_turns() -> Iterator[None]:
    """Let the interpreter switch between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SHORTEST_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Return the results of ``work(number)`` in `THREADS` threads, in the order of the numbers."""
    with short_turns(), ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def all_at_once() -> list[dict[str, str]]:
    """Return the digests of each thread, where all threads begin each call at the same time."""
    start = threading.Barrier(THREADS, timeout=60)

    def work(number: int) -> dict[str, str]:
        found = {}
        for name, call in calls().items():
            start.wait()
            found[name] = digest(call())
        return found

    return in_threads(work)


if __name__ == "__main__":
    print(json.dumps(all_at_once()))
