"""Host time of compiled JAX calls: attention, an addition, and JAX's own attention.

    python benchmarks/jax_host_time.py --output benchmarks/results/jax_host_time.json

`jitted call` is the time per call of a compiled function that computes the operation once. Calls
follow each other without waiting for results, and the inputs are so small that the GPU waits for
the host. `within a loop` is the time per iteration of `jax.lax.fori_loop` in one compiled function.
XLA does not record command buffers here, except where the row says so. Needs a GPU and JAX.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_CALLS, _ITERATIONS, _ROUNDS = 500, 200, 15
_SHAPE = (1, 128, 4, 64)
_OPERATIONS = ("x + 1", "cupy_flash", "cudnn")
_FLAGS = {
    False: "--xla_gpu_enable_command_buffer=",
    True: (
        "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,WHILE --xla_gpu_graph_min_graph_size=1"
    ),
}


def operation(name: str) -> Callable[[Any], Any]:
    """Return a function of an array of `_SHAPE` that computes the operation."""
    import jax

    import cupy_flash.jax

    functions: dict[str, Callable[[Any], Any]] = {
        "x + 1": lambda x: x + 1,
        "cupy_flash": lambda x: cupy_flash.jax.flash_attention(x, x, x, causal=True),
        "cudnn": lambda x: jax.nn.dot_product_attention(
            x, x, x, is_causal=True, implementation="cudnn"
        ),
    }
    return functions[name]


def median_us(run: Callable[[], Any], count: int) -> float:
    """Return the median time of `run()` over rounds, in us per one of its `count` operations."""
    import jax

    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) / count * 1e6, 1)


def measure() -> dict[str, dict[str, float]]:
    """Measure all operations in this process: us of a jitted call, and of one within a loop."""
    import jax

    x = jax.numpy.ones(_SHAPE, jax.numpy.bfloat16)
    result = {}
    for name in _OPERATIONS:
        compute = operation(name)
        once = jax.jit(compute)
        # The loop's body depends on the iteration, so that XLA cannot compute it once.
        loop = jax.jit(lambda x, f=compute: jax.lax.fori_loop(0, _ITERATIONS, lambda _, y: f(y), x))
        for warm_up in (once, loop):
            for _ in range(3):
                jax.block_until_ready(warm_up(x))
        result[name] = {
            "jitted call, us": median_us(lambda f=once: [f(x) for _ in range(_CALLS)], _CALLS),
            "within a loop, us": median_us(lambda f=loop: f(x), _ITERATIONS),
        }
    return result


def measure_apart(*, with_command_buffers: bool) -> dict[str, dict[str, float]]:
    """Measure all operations in a new process, with or without command buffers."""
    program = "import json, jax_host_time; print(json.dumps(jax_host_time.measure()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"XLA_FLAGS": _FLAGS[with_command_buffers]},
        cwd=Path(__file__).parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure host times of compiled JAX calls and write them as JSON."""
    from cupy_flash.cli.records.environment import metadata
    from cupy_flash.families import FORWARD
    from cupy_flash.gpu.environment import device_for_id

    rows = [
        {"operation": name, "command buffers": "yes" if recorded else "no", **times}
        for recorded in (False, True)
        for name, times in measure_apart(with_command_buffers=recorded).items()
    ]
    shape = {"shape": _SHAPE, "dtype": "bfloat16", "causal": True}
    environment = metadata(device_for_id(0).name) | {"hopper_digest": FORWARD["hopper"].digest()}
    record = {"metadata": environment | shape, "rows": rows}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
