"""Times of attention with its tangent, by cupy_flash and by formulas in PyTorch.

    python benchmarks/functions/forward_mode.py --output benchmarks/results/h200_tangents.json

Each row is one call on random bfloat16 arrays with tangents of q, k and v. `jvp` is
`flash_attention_jvp`, and `forward` the forward pass alone. `formula` computes the output and its
tangent by matrix products of whole score matrices, and `torch.func` applies `torch.func.jvp` to
such a formula of the output. The calls alternate, and each is enqueued while the GPU is busy. The
times are medians. `error` is the largest error of the tangent of the first head, compared with the
formula in float64, and `formula error` is that of `formula`. The script needs a GPU and PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import cupy_flash
from cupy_flash.cli.measure.timing import GpuTimer, Timed, spread
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id

_BATCH, _TOKENS, _WIDTH = 4, 4096, 2048
_WARMUP, _REPEATS = 2, 15


def weights_of(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return the attention weights of arrays (batch, heads, seqlen, head_dim)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1)


def formula(arrays: list[torch.Tensor], causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and its tangent, given q, k, v and their tangents."""
    q, k, v, q_tangent, k_tangent, v_tangent = arrays
    weights = weights_of(q, k, causal)
    moved = (q_tangent @ k.mT + q @ k_tangent.mT) * q.shape[-1] ** -0.5
    moved = weights * moved
    moved = moved - weights * moved.sum(-1, keepdim=True)
    return weights @ v, moved @ v + weights @ v_tangent


def by_torch_func(arrays: list[torch.Tensor], causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and its tangent, as `formula` does, by `torch.func.jvp`."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return weights_of(q, k, causal) @ v

    out, tangent = torch.func.jvp(attend, tuple(arrays[:3]), tuple(arrays[3:]))
    return out, tangent


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error of the first head of the first batch."""
    return float((found[:1, :1].double() - exact).abs().max())


def measure(timer: GpuTimer, head_dim: int, causal: bool) -> dict[str, Any]:
    """Return the row of the record for one head_dim."""
    heads = _WIDTH // head_dim
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    arrays = [torch.randn(_BATCH, _TOKENS, heads, head_dim, **kind) for _ in range(6)]
    transposed = [x.transpose(1, 2).contiguous() for x in arrays]
    calls: dict[str, Callable[[], Any]] = {
        "jvp": lambda: cupy_flash.flash_attention_jvp(*arrays, causal=causal),
        "forward": lambda: cupy_flash.flash_attention(*arrays[:3], causal=causal, return_lse=True),
        "formula": lambda: formula(transposed, causal),
        "torch.func": lambda: by_torch_func(transposed, causal),
    }
    _, exact = formula([x[:1, :1].double() for x in transposed], causal)
    _, ours = calls["jvp"]()
    _, theirs = calls["formula"]()
    errors = error(ours.transpose(1, 2), exact), error(theirs, exact)
    del ours, theirs, exact
    timed = [Timed(call) for call in calls.values()]
    times = timer.interleaved(timed, _WARMUP, [_REPEATS] * len(timed))
    row: dict[str, Any] = {"head_dim": head_dim, "heads": heads, "causal": causal}
    medians = {name: spread(found).median for name, found in zip(calls, times, strict=True)}
    row |= {f"{name} ms": round(median, 4) for name, median in medians.items()}
    # Seven products of the size of the scores: two of the forward pass, and five of its tangent.
    flops = 7 * 2.0 * _BATCH * _TOKENS**2 * _WIDTH * (0.5 if causal else 1)
    row["jvp TFLOP/s"] = round(flops / medians["jvp"] * 1e-9, 1)
    row["forward TFLOP/s"] = round(flops / 7 * 2 / medians["forward"] * 1e-9, 1)
    fastest = min(medians["formula"], medians["torch.func"])
    row["times as fast"] = round(fastest / medians["jvp"], 2)
    return row | {"error": errors[0], "formula error": errors[1]}


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure attention with its tangent, and write the times as JSON."""
    environment = metadata(device_for_id(0).name) | {
        "hopper_tangent_digest": FAMILIES["tangent"]["hopper"].digest(),
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
