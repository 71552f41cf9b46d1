"""Times of attention layers of models in transformers, by cupy_flash, sdpa and flex_attention.

    python benchmarks/functions/transformers_layers.py --output layers.json

Each row is the attention of one layer, forward or forward and backward, on random bfloat16 queries,
keys and values with the heads of a published model. The calls are those of the model: the function
that transformers has registered, with the mask that its mask function returns. Masks are built once
per model and not per layer, so their time is a column of its own. flex_attention is compiled, as
transformers does it. Calls of all functions alternate, and the medians count. Each is enqueued
while the GPU is busy, as within a model, so the times are those of the GPU. A function that refuses
a layer, or is left out by `--implementation`, has no number. Needs a GPU, torch and transformers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cupy_flash.cli.measure.timing import GpuTimer, Timed, spread
from cupy_flash.cli.providers.providers import release_memory
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id

_WARMUP, _REPEATS = 3, 20
# Number of passes over the flush buffer before each call: 2 ms, in which the slowest host enqueues
# a forward and a backward pass of autograd.
_PASSES = 50
# Number of timed calls of a function that takes more than this many ms.
_FEW, _LONG = 5, 50.0
_OURS = "fused_cupy"
_OTHERS = ("sdpa", "flex_attention")


@dataclass(frozen=True)
class Layer:
    """Attention of a layer: heads, the function that makes its mask, and other arguments."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    mask: str = "create_causal_mask"
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    bias: bool = False
    padding: str | None = None


_WINDOW, _CHUNK = "create_sliding_window_causal_mask", "create_chunked_causal_mask"
_FULL = "create_bidirectional_mask"
_LAYERS = (
    Layer("Llama 3 8B", 32, 8, 128),
    Layer("Llama 3 8B, left padding", 32, 8, 128, padding="left"),
    Layer("Llama 3 8B, right padding", 32, 8, 128, padding="right"),
    Layer("Llama 3 8B, 16 documents", 32, 8, 128, padding="documents"),
    Layer("Mistral 7B, window 4096", 32, 8, 128, _WINDOW, {"sliding_window": 4096}),
    Layer("Gemma 2 9B, softcap", 16, 8, 256, options={"softcap": 50.0}),
    Layer(
        "Gemma 2 9B, window 4096, softcap",
        *(16, 8, 256, _WINDOW, {"sliding_window": 4096}, {"softcap": 50.0}),
    ),
    Layer("Gemma 3 12B, window 1024", 16, 8, 256, _WINDOW, {"sliding_window": 1024}),
    Layer("Qwen 3 8B", 32, 8, 128),
    Layer("gpt-oss 20B", 64, 8, 64, sinks=True),
    Layer("gpt-oss 20B, window 128", 64, 8, 64, _WINDOW, {"sliding_window": 128}, sinks=True),
    Layer("Llama 4, chunks of 2048", 40, 8, 128, _CHUNK, {"attention_chunk_size": 2048}),
    Layer("BERT large", 16, 16, 64, _FULL),
    Layer("BERT large, right padding", 16, 16, 64, _FULL, padding="right"),
    Layer("Whisper large, cross-attention of 448 queries", 20, 20, 64, _FULL),
    Layer("T5 large, encoder", 16, 16, 64, _FULL, options={"scaling": 1.0}, bias=True),
)


def mask_of(layer: Layer, implementation: str, batch: int, seqlen: int) -> Callable[[], Any]:
    """Return a function that makes the mask of a layer, as a model does for each call."""
    import types

    import torch
    from transformers import masking_utils

    config = types.SimpleNamespace(_attn_implementation=implementation, **layer.config)
    options: dict[str, Any] = {"attention_mask": None, "cache": None}
    if layer.padding == "documents":
        at = torch.arange(seqlen, device="cuda") % (seqlen // 16)
        options["position_ids"] = at.expand(batch, -1)
    elif layer.padding is not None:
        keys = torch.ones(batch, seqlen, dtype=torch.long, device="cuda")
        hidden = slice(None, seqlen // 4) if layer.padding == "left" else slice(-seqlen // 4, None)
        keys[0, hidden] = 0
        options["attention_mask"] = keys
    embeddings = torch.empty(batch, seqlen, 0, dtype=torch.bfloat16, device="cuda")
    create = getattr(masking_utils, layer.mask)
    return lambda: create(config=config, inputs_embeds=embeddings, **options)


def calls_of(
    layer: Layer, implementation: str, batch: int, seqlen: int
) -> dict[str, Callable[[], Any]]:
    """Return calls that make the mask, compute attention, and compute its gradients as well."""
    import torch
    from transformers import AttentionInterface

    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Any:
        made = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return made.requires_grad_()

    seqlen_q = 448 if "448 queries" in layer.name else seqlen
    # Projections give (batch, seqlen, heads, head_dim), which models transpose.
    q, k, v = (
        random(batch, length, heads, layer.head_dim).transpose(1, 2)
        for length, heads in (
            (seqlen_q, layer.heads),
            (seqlen, layer.kv_heads),
            (seqlen, layer.kv_heads),
        )
    )
    options = {"scaling": layer.head_dim**-0.5, **layer.options}
    inputs = [q, k, v]
    if layer.sinks:
        options["s_aux"] = random(layer.heads)
        inputs.append(options["s_aux"])
    if layer.bias:
        options["position_bias"] = random(1, layer.heads, seqlen_q, seqlen)
        inputs.append(options["position_bias"])
    module = torch.nn.Module()
    module.is_causal = layer.mask != _FULL
    module.num_key_value_groups = layer.heads // layer.kv_heads
    module.train()
    attend = AttentionInterface()[implementation]
    make_mask = mask_of(layer, implementation, batch, seqlen)
    mask = make_mask()
    dout = random(batch, seqlen_q, layer.heads, layer.head_dim).detach()

    def forward() -> Any:
        return attend(module, q, k, v, mask, dropout=0.0, **options)[0]

    def inference() -> Any:
        with torch.no_grad():
            return forward()

    def training() -> Any:
        return torch.autograd.grad(forward(), inputs, dout)

    return {"mask": make_mask, "forward": inference, "training": training}


def measure(layer: Layer, batch: int, seqlen: int, chosen: tuple[str, ...]) -> dict[str, Any]:
    """Return the times of a layer in ms, by function and kind of call."""
    import torch

    row: dict[str, Any] = {"layer": layer.name, "batch": batch, "seqlen": seqlen}
    for kind in ("mask", "forward", "training"):
        calls, took = {}, {}
        for implementation in chosen:
            # sdpa ignores sinks. flex_attention reads the bias of T5 beyond its end, because the
            # bias has no batch axis.
            leaves_out = {"sdpa": layer.sinks, "flex_attention": layer.bias}
            if leaves_out.get(implementation):
                continue
            try:
                call = calls_of(layer, implementation, batch, seqlen)[kind]
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                torch.cuda.synchronize()
                took[implementation] = (time.perf_counter() - start) * 1e3
            except Exception as error:
                row[f"{implementation} {kind} refused"] = f"{type(error).__name__}: {error}"[:200]
                continue
            calls[implementation] = Timed(call)
        counts = [_FEW if took[name] > _LONG else _REPEATS for name in calls]
        times = GpuTimer(_PASSES).interleaved(list(calls.values()), _WARMUP, counts)
        medians = {name: spread(x).median for name, x in zip(calls, times, strict=True)}
        row |= {f"{name} {kind} ms": round(ms, 4) for name, ms in medians.items()}
        release_memory()
    return row


@click.command()
@click.option("--batch", default=2, show_default=True, help="Sequences.")
@click.option("--seqlen", default=8192, show_default=True, help="Tokens of each sequence.")
@click.option("--only", default="", help="Time only layers whose name contains this.")
@click.option(
    "--implementation",
    type=click.Choice([_OURS, *_OTHERS]),
    multiple=True,
    default=(_OURS, *_OTHERS),
    help="Function to time; repeatable. Default: all.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Record to write.")
def main(
    batch: int, seqlen: int, only: str, implementation: tuple[str, ...], output: Path | None
) -> None:
    """Time attention layers of models in transformers."""
    import torch._dynamo
    import transformers

    from cupy_flash.transformers import register

    register()
    # Each layer compiles flex_attention again. After 8 times, torch would not compile it anymore.
    torch._dynamo.config.recompile_limit = 8 * len(_LAYERS)
    head = metadata(device_for_id(0).name) | {"transformers": transformers.__version__}
    for direction, key in (("forward", "hopper_digest"), ("backward", "hopper_backward_digest")):
        head[key] = FAMILIES[direction]["hopper"].digest()
    rows = []
    for layer in _LAYERS:
        if only not in layer.name:
            continue
        row = measure(layer, batch, seqlen, implementation)
        rows.append(row)
        for name, value in row.items():
            click.echo(f"{name}: {value}")
        for kind in ("forward", "training"):
            ours = row.get(f"{_OURS} {kind} ms")
            for other in _OTHERS:
                if ours and (theirs := row.get(f"{other} {kind} ms")):
                    click.echo(f"  {kind}: {theirs / ours:.2f} times as fast as {other}")
        if output:
            output.write_text(
                json.dumps({"metadata": head, "rows": rows}, indent=1) + "\n", "utf-8"
            )


if __name__ == "__main__":
    main()
