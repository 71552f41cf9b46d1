"""Duration of the first call of a process, with an empty kernel cache and with a filled one.

    python benchmarks/startup.py --output benchmarks/results/startup.json

Each figure is the median over new processes. The first process of a round starts with an empty
kernel cache and compiles the kernel; the second finds it in the cache. The time is from after the
imports and the creation of the CUDA context to the synchronized result. Needs a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FORWARD
from cupy_flash.gpu.environment import device_for_id

_CALL = """
import json, sys, time
import cupy
import cupy_flash
q = cupy.zeros((1, 512, 8, {head_dim}), "float32").astype("{dtype}")
cupy.cuda.Device().synchronize()
start = time.perf_counter()
cupy_flash.flash_attention(q, q, q, causal=True)
cupy.cuda.Device().synchronize()
print(json.dumps(time.perf_counter() - start))
"""

# Kernel families that compute the cases on an H100 or H200.
_FAMILIES = ("hopper", "mma")
_CASES = (("float16", 64), ("float16", 128), ("float32", 64))


def first_call_seconds(dtype: str, head_dim: int, cache: str) -> float:
    """Return the seconds of the first call in a new process, with the kernel cache `cache`."""
    done = subprocess.run(
        [sys.executable, "-c", _CALL.format(dtype=dtype, head_dim=head_dim)],
        env=os.environ | {"CUPY_CACHE_DIR": cache},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(json.loads(done.stdout))


def measure(dtype: str, head_dim: int, rounds: int) -> dict[str, object]:
    """Measure one row: first call with a cold and with a warm cache, in seconds."""
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            # Compiles CuPy's conversion kernel, so that the timed call compiles only attention.
            first_call_seconds("float16" if dtype == "float32" else dtype, 8, cache)
            cold.append(first_call_seconds(dtype, head_dim, cache))
            warm.append(first_call_seconds(dtype, head_dim, cache))
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "cold_first_call_s": statistics.median(cold),
        "warm_first_call_s": statistics.median(warm),
        "rounds": rounds,
    }


@click.command()
@click.option(
    "--rounds", default=3, show_default=True, help="Number of first calls per case and cache."
)
@click.option("--output", type=click.Path(path_type=Path), help="Record to write.")
def main(rounds: int, output: Path | None) -> None:
    """Measure the first call of a process, with an empty kernel cache and with a filled one."""
    rows = [measure(dtype, head_dim, rounds) for dtype, head_dim in _CASES]
    for row in rows:
        click.echo(
            f"{row['dtype']} head_dim {row['head_dim']}: cold {row['cold_first_call_s']:.2f} s, "
            f"from the cache {row['warm_first_call_s']:.3f} s"
        )
    if output:
        digests = {f"{name}_digest": FORWARD[name].digest() for name in _FAMILIES}
        record = {"metadata": metadata(device_for_id(0).name) | digests, "rows": rows}
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
