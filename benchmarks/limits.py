"""Long sequences against a matrix product, and grouped heads against as many of their own.

    python benchmarks/limits.py --output benchmarks/results/limits.json

bfloat16, head_dim 128. In each row our calls take turns with a product of two 8192 x 8192 bfloat16
matrices by torch, the rate that the GPU's tensor cores reach in practice. Needs a GPU and torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cupy_flash import flash_attention
from cupy_flash.cli.environment import metadata
from cupy_flash.cli.timing import GpuTimer, Timed, spread
from cupy_flash.device import device_for_id
from cupy_flash.families import FAMILIES

_TOKENS = 16384  # batch * seqlen
_HEAD_DIM = 128
_MATRIX = 8192
_WARMUP, _REPEATS = 3, 20
# seqlen, causal, query heads, and the key/value heads that they share.
_CASES = (
    (8192, False, 16, 16),
    (16384, False, 16, 16),
    (4096, False, 32, 8),
    (4096, True, 32, 8),
    (4096, False, 64, 8),
    (4096, True, 64, 8),
)


def attention_call(seqlen: int, causal: bool, heads_q: int, heads_kv: int) -> Callable[[], Any]:
    """A call on new random arrays."""
    import cupy
    import ml_dtypes

    rng = cupy.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(
            (_TOKENS // seqlen, seqlen, heads, _HEAD_DIM), dtype=cupy.float32
        ).astype(ml_dtypes.bfloat16)
        for heads in (heads_q, heads_kv, heads_kv)
    )
    return lambda: flash_attention(q, k, v, causal=causal)


def product_call() -> Callable[[], Any]:
    """The matrix product."""
    import torch

    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b)


def measure(product: Callable[[], Any], case: tuple[int, bool, int, int]) -> dict[str, Any]:
    """One row: the three take turns."""
    seqlen, causal, heads_q, heads_kv = case
    own = attention_call(seqlen, causal, heads_q, heads_q)
    calls = [Timed(own), Timed(attention_call(*case)), Timed(product)]
    own_ms, shared_ms, product_ms = (
        spread(times).median
        for times in GpuTimer().interleaved(calls, _WARMUP, [_REPEATS] * len(calls))
    )
    flops = 4.0 * _TOKENS * seqlen * heads_q * _HEAD_DIM / (2 if causal else 1)
    product_rate = 2.0 * _MATRIX**3 / product_ms / 1e9
    return {
        "seqlen": seqlen,
        "causal": causal,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "own_heads_tflops": round(flops / own_ms / 1e9, 1),
        "shared_heads_tflops": round(flops / shared_ms / 1e9, 1),
        "matmul_tflops": round(product_rate, 1),
        "own_heads_of_matmul": round(flops / own_ms / 1e9 / product_rate, 3),
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Write the rows as JSON.")
def main(output: Path | None) -> None:
    """Measure all rows."""
    product = product_call()
    rows = [measure(product, case) for case in _CASES]
    for row in rows:
        click.echo(", ".join(f"{name} {value}" for name, value in row.items()))
    if output:
        head = metadata(device_for_id(0).name) | {"hopper_digest": FAMILIES["hopper"].digest()}
        output.write_text(json.dumps({"metadata": head, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
