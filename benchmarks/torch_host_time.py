"""Host time of eager and compiled PyTorch calls: attention alone, and a transformer with it.

    python benchmarks/torch_host_time.py --output benchmarks/results/torch_host_time.json

The host time of a call is the time until it returns to Python. The inputs are small, and few calls
follow each other before the GPU is waited for, so that no call waits for the GPU. `attention` is
one causal call. `transformer` has four layers with RMSNorm, rotary embedding and SwiGLU. A training
step computes the gradients of all parameters as well. Needs a GPU and PyTorch.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import cupy_flash.torch

_LAYERS, _HEADS, _DIM, _TOKENS = 4, 4, 64, 128
_WIDTH = _HEADS * _DIM
_CALLS, _ROUNDS, _WARMUP = 10, 30, 5


def attend_cupy_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of arrays (batch, seqlen, heads, head_dim)."""
    return cupy_flash.torch.flash_attention(q, k, v, causal=True)


def attend_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return what `attend_cupy_flash` returns, computed by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True).transpose(1, 2)


_ATTENTION = {"cupy_flash": attend_cupy_flash, "sdpa": attend_sdpa}


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return rows with their rotary embedding; the columns of a pair are half a row apart."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Layer(torch.nn.Module):
    """Pre-norm layer: attention with rotary embedding, and a SwiGLU network."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(_WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gates = torch.nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
        self.down = torch.nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(self.norms[0](x)).unflatten(-1, (3, _HEADS, _DIM))
        q, k, v = rows.unbind(-3)
        x = x + self.out(self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v).flatten(-2))
        gate, up = self.gates(self.norms[1](x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


class Transformer(torch.nn.Module):
    """Layers with a common rotary embedding."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(attend) for _ in range(_LAYERS))
        angles = torch.arange(_TOKENS)[:, None, None] / 1e4 ** torch.linspace(0, 1, _DIM // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


def functions(attention: str) -> dict[str, tuple[Any, list[Any], list[Any]]]:
    """Return the functions to time, with their arguments and the tensors that need gradients."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(0)
    attend = _ATTENTION[attention]
    q, k, v = (torch.randn(1, _TOKENS, _HEADS, _DIM, **kind, requires_grad=True) for _ in range(3))
    model = Transformer(attend).to(**kind)
    x = torch.randn(1, _TOKENS, _WIDTH, **kind)
    return {
        "attention": (attend, [q, k, v], [q, k, v]),
        "transformer": (model, [x], list(model.parameters())),
    }


def host_us(call: Callable[[], Any]) -> float:
    """Return the median host time of a call in us."""
    for _ in range(_WARMUP):
        call()
    times = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) / _CALLS * 1e6, 1)


def measure(name: str, attention: str) -> dict[str, Any]:
    """Return host times of a function in us: forward and training, eager and compiled."""
    function, arguments, wrt = functions(attention)[name]
    row: dict[str, Any] = {"function": name, "attention": attention}
    forms = {"eager": function, "compiled": torch.compile(function, fullgraph=True)}
    for form, chosen in forms.items():

        def forward(f: Any = chosen) -> Any:
            with torch.no_grad():
                return f(*arguments)

        out = forward()
        dout = torch.ones_like(out)

        def training(f: Any = chosen, dout: Any = dout) -> Any:
            return torch.autograd.grad(f(*arguments), wrt, dout)

        row[f"{form} forward, us"] = host_us(forward)
        row[f"{form} training, us"] = host_us(training)
    return row


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure host times of eager and compiled PyTorch calls, and write them as JSON."""
    from cupy_flash.cli.records.environment import metadata
    from cupy_flash.families import FAMILIES, FORWARD
    from cupy_flash.gpu.environment import device_for_id

    environment = metadata(device_for_id(0).name) | {
        "hopper_digest": FORWARD["hopper"].digest(),
        "hopper_backward_digest": FAMILIES["backward"]["hopper"].digest(),
        "shape": (1, _TOKENS, _HEADS, _DIM),
        "dtype": "bfloat16",
    }
    rows = [measure(name, x) for name in ("attention", "transformer") for x in _ATTENTION]
    record = {"metadata": environment, "rows": rows}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
