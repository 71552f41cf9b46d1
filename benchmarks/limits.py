"""Rates of attention relative to a matrix product, and effect of float16 and of grouped heads.

    python benchmarks/limits.py --output benchmarks/results/limits.json

In each row, three calls of attention alternate with a product of two 8192 x 8192 bfloat16 matrices
by torch: in bfloat16, in float16, and in bfloat16 with fewer KV heads. The product shows the rate
that the GPU's tensor cores reach in practice. Needs a GPU and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cupy_flash import flash_attention
from cupy_flash.cli.measure.timing import GpuTimer, Timed, spread
from cupy_flash.cli.providers.providers import release_memory
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FORWARD
from cupy_flash.gpu.environment import device_for_id

_TOKENS = 16384  # batch * seqlen
_MATRIX = 8192
_WARMUP, _REPEATS = 3, 20
# head_dim, seqlen, causal, number of query heads, and number of KV heads of the grouped call.
_CASES = (
    (128, 8192, False, 16, 4),
    (128, 16384, False, 16, 4),
    (128, 4096, False, 32, 8),
    (128, 4096, True, 32, 8),
    (128, 4096, False, 64, 8),
    (128, 4096, True, 64, 8),
    (64, 1024, False, 32, 8),
    (64, 4096, True, 32, 8),
    (64, 16384, False, 32, 8),
    (256, 1024, False, 8, 2),
    (256, 4096, True, 8, 2),
    (256, 16384, False, 8, 2),
)


def attention_call(
    dtype: Any, head_dim: int, seqlen: int, causal: bool, heads_q: int, heads_kv: int
) -> Callable[[], Any]:
    """Return a call of attention on new random arrays."""
    import cupy

    rng = cupy.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(
            (_TOKENS // seqlen, seqlen, heads, head_dim), dtype=cupy.float32
        ).astype(dtype)
        for heads in (heads_q, heads_kv, heads_kv)
    )
    return lambda: flash_attention(q, k, v, causal=causal)


def product_call() -> Callable[[], Any]:
    """Return a call of the matrix product."""
    import torch

    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b)


def measure(product: Callable[[], Any], case: tuple[int, int, bool, int, int]) -> dict[str, Any]:
    """Measure one row, with four alternating calls."""
    import ml_dtypes

    head_dim, seqlen, causal, heads_q, heads_kv = case
    own = (head_dim, seqlen, causal, heads_q, heads_q)
    calls = [
        Timed(attention_call(ml_dtypes.bfloat16, *own)),
        Timed(attention_call("float16", *own)),
        Timed(attention_call(ml_dtypes.bfloat16, *case)),
        Timed(product),
    ]
    own_ms, half_ms, shared_ms, product_ms = (
        spread(times).median
        for times in GpuTimer().interleaved(calls, _WARMUP, [_REPEATS] * len(calls))
    )
    flops = 4.0 * _TOKENS * seqlen * heads_q * head_dim / (2 if causal else 1)
    product_rate = 2.0 * _MATRIX**3 / product_ms / 1e9
    return {
        "head_dim": head_dim,
        "seqlen": seqlen,
        "causal": causal,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "own_heads_tflops": round(flops / own_ms / 1e9, 1),
        "shared_heads_tflops": round(flops / shared_ms / 1e9, 1),
        "matmul_tflops": round(product_rate, 1),
        "share_of_matmul": round(flops / own_ms / 1e9 / product_rate, 3),
        "float16_of_bfloat16": round(own_ms / half_ms, 3),
        "shared_of_own_heads": round(own_ms / shared_ms, 3),
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Record to write.")
def main(output: Path | None) -> None:
    """Compare the rates of attention with the rate of a matrix product in each case."""
    product = product_call()
    rows = []
    for case in _CASES:
        rows.append(measure(product, case))
        release_memory()
    for row in rows:
        click.echo(", ".join(f"{name} {value}" for name, value in row.items()))
    if output:
        head = metadata(device_for_id(0).name) | {"hopper_digest": FORWARD["hopper"].digest()}
        output.write_text(json.dumps({"metadata": head, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
