"""Times of the attention that keys receive, by cupy_flash and by a formula in PyTorch.

    python benchmarks/functions/received.py --output benchmarks/results/h200_received.json

Each row is one call on random bfloat16 arrays. `received` is `attention_received`, and `given lse`
the same call with the log-sum-exp of the forward pass. `forward` is the forward pass alone, and
`formula` sums the whole matrix of weights. The calls alternate, and each is enqueued while the GPU
is busy. The times are medians. The script needs a GPU and PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from forward_mode import weights_of

import cupy_flash
from cupy_flash.cli.measure.timing import GpuTimer, Timed, spread
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id

_BATCH, _TOKENS, _WIDTH = 2, 8192, 2048
_WARMUP, _REPEATS = 2, 15


def measure(timer: GpuTimer, head_dim: int, causal: bool) -> dict[str, Any]:
    """Return the row of the record for one head_dim."""
    heads = _WIDTH // head_dim
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(_BATCH, _TOKENS, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    )
    transposed = [x.transpose(1, 2).contiguous() for x in (q, k)]
    _, lse = cupy_flash.flash_attention(q, k, v, causal=causal, return_lse=True)
    calls: dict[str, Callable[[], Any]] = {
        "received": lambda: cupy_flash.attention_received(q, k, causal=causal),
        "given lse": lambda: cupy_flash.attention_received(q, k, lse=lse, causal=causal),
        "forward": lambda: cupy_flash.flash_attention(q, k, v, causal=causal),
        "formula": lambda: weights_of(*transposed, causal).sum(-2),
    }
    exact = weights_of(*(x[:1, :1].double() for x in transposed), causal).sum(-2)
    errors = {
        f"{name} error": float((calls[name]()[:1, :1].double() - exact).abs().max())
        for name in ("received", "given lse", "formula")
    }
    del exact
    timed = [Timed(call) for call in calls.values()]
    times = timer.interleaved(timed, _WARMUP, [_REPEATS] * len(timed))
    medians = {name: spread(found).median for name, found in zip(calls, times, strict=True)}
    row: dict[str, Any] = {"head_dim": head_dim, "heads": heads, "causal": causal}
    row |= {f"{name} ms": round(median, 4) for name, median in medians.items()}
    for name in ("received", "given lse"):
        row[f"{name} / forward"] = round(medians[name] / medians["forward"], 2)
    row["times as fast"] = round(medians["formula"] / medians["received"], 2)
    return row | errors


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure the attention that keys receive, and write the times as JSON."""
    environment = metadata(device_for_id(0).name) | {
        "hopper_received_digest": FAMILIES["received"]["hopper"].digest(),
        "hopper_lse_lse_digest": FAMILIES["lse"]["hopper_lse"].digest(),
        "hopper_digest": FAMILIES["forward"]["hopper"].digest(),
        "shape": (_BATCH, _TOKENS, _WIDTH),
        "dtype": "bfloat16",
    }
    timer = GpuTimer()
    rows = [measure(timer, dim, causal) for dim in (64, 128) for causal in (False, True)]
    record = {"metadata": environment, "rows": rows}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
