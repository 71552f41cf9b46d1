"""Model of four layers, each with another kind of attention, and one training step of it."""

from __future__ import annotations

from typing import Any

import torch

import cupy_flash.torch as ct
from cupy_flash import BlockList, MaskMod, ScoreMod

HEADS, HEADS_KV, DIM, FARTHEST = 4, 2, 8, 256


def same_document(b: Any, i: Any, j: Any, ids: Any) -> Any:
    return ids[b, i] == ids[b, j]


def by_distance(score: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return score + table[h, i - j + FARTHEST]


class Layer(torch.nn.Module):
    """Pre-norm layer: attention, and a network for each token."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        heads_kv = HEADS if kind == "blocks" else HEADS_KV
        self.q, self.k, self.v = (
            torch.nn.Linear(width, heads * DIM) for heads in (HEADS, heads_kv, heads_kv)
        )
        self.out = torch.nn.Linear(HEADS * DIM, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.net = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.slopes = torch.nn.Parameter(torch.rand(HEADS))
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))
        self.table = torch.nn.Parameter(torch.randn(HEADS, 2 * FARTHEST + 1) / 8)

    def options(self, documents: MaskMod) -> dict[str, Any]:
        """Return the arguments of attention other than q, k and v."""
        if self.kind == "slopes":
            return {"causal": True, "alibi_slopes": self.slopes, "window_size": (20, 0)}
        if self.kind == "documents":
            return {"causal": True, "mask_mod": documents}
        if self.kind == "distances":
            return {"score_mod": self.distances, "sinks": self.sinks}
        return {"mask_mod": self.blocks, "softcap": 5.0, "sinks": [0.5, 0.0, -1.0, 1.0]}

    def prepare(self) -> None:
        """Create the functions of this layer, which capture its parameters as they are now."""
        self.distances = ScoreMod(by_distance, table=self.table)
        shown = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=self.table.device).tril()
        self.blocks = BlockList(shown, (64, 64))

    def forward(self, x: Any, documents: MaskMod) -> Any:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, DIM)) for f in (self.q, self.k, self.v))
        options = self.options(documents)
        if self.kind == "blocks":
            attended = ct.flash_attention_qkvpacked(torch.stack([q, k, v], 2), **options)
        else:
            attended = ct.flash_attention(q, k, v, **options)
        x = x + self.out(attended.flatten(-2))
        return x + self.net(self.norms[1](x))


class Model(torch.nn.Module):
    """Four layers: learned slopes, documents, learned distances, and blocks with constant sinks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        kinds = "slopes", "documents", "distances", "blocks"
        self.layers = torch.nn.ModuleList(Layer(kind, width) for kind in kinds)

    def forward(self, x: Any, documents: MaskMod) -> Any:
        for layer in self.layers:
            x = layer(x, documents)
        return x


def prepared(model: Model, **options: Any) -> Model:
    """Return the model in a dtype or on a device, with the functions of its layers."""
    model.to(**options)
    for layer in model.layers:
        layer.prepare()
    return model


def random_documents(batch: int, rows: int, device: Any = None) -> MaskMod:
    """Return a new mask of random documents."""
    ids = torch.randint(0, 3, (batch, rows), device=device).sort().values
    return MaskMod(same_document, ids=ids)


def step(function: Any, model: Model, x: Any, documents: MaskMod) -> list[Any]:
    """Return the output of a model and the gradients of the input and of all parameters used."""
    x = x.detach().requires_grad_()
    out = function(x, documents)
    wrt = [x, *model.parameters()]
    found = torch.autograd.grad(out.square().mean(), wrt, allow_unused=True)
    return [out, *(x for x in found if x is not None)]
