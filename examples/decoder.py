"""A small decoder-only transformer on NumPy or CuPy arrays; attention is the caller's.

Blocks as in Llama [1]_: normalize, attend, add; normalize, two gated layers (SwiGLU [2]_), add.
Query heads share key/value heads in groups [3]_, and positions enter as rotations of q and k [4]_.
If the configuration says so, attention is as in gpt-oss [5]_: every other layer sees a window of
the last tokens only, and each query head has a sink. The weights are random, from a seed.

.. [1] Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971.
.. [2] Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
.. [3] Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
   Checkpoints", arXiv:2305.13245.
.. [4] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
.. [5] OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a NumPy or a CuPy array

# attention(layer, q, k, v): q (batch, seqlen, heads_q, head_dim) and k, v (batch, seqlen, heads_kv,
# head_dim) to an array like q. Positions, masks and earlier tokens are its business.
Attention = Callable[[int, Array, Array, Array], Array]


class Config(NamedTuple):
    """Sizes of a model."""

    vocabulary: int = 256  # a token is a byte
    layers: int = 4
    width: int = 128
    heads_q: int = 8
    heads_kv: int = 2
    head_dim: int = 32
    hidden: int = 384  # of the gated layers
    window: int | None = None  # tokens that layers 0, 2, ... see, the query's own among them
    has_sinks: bool = False

    def window_size(self, layer: int) -> tuple[int, int] | None:
        """(left, right) of a layer, as attention takes it; None sees all tokens."""
        return None if self.window is None or layer % 2 else (self.window - 1, 0)


class Block(NamedTuple):
    """Weights of a block, each (features_in, features_out), and its sinks (heads_q,), if any."""

    q: Array
    k: Array
    v: Array
    attention_output: Array
    gate: Array
    widen: Array
    narrow: Array
    sinks: Array | None


def normalized(x: Array) -> Array:
    """Rows divided by their root mean square; the gains that training would add are all 1."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


class Decoder:
    """A model of random float32 weights.

    Parameters
    ----------
    config : Config
    seed : int
        Same seed, same weights, on the CPU and on the GPU.
    xp : module
        ``numpy`` or ``cupy``: where the weights lie and all but attention is computed.
    """

    def __init__(self, config: Config, seed: int, xp: Any = np) -> None:
        rng = np.random.default_rng(seed)

        def random(rows: int, columns: int, gain: float = 1.0) -> Array:
            # Unit variance in, unit variance times gain out.
            weights = rng.standard_normal((rows, columns), np.float32)
            return xp.asarray(weights * np.float32(gain / rows**0.5))

        self.config = config
        self.xp = xp
        width, hidden = config.width, config.hidden
        width_q, width_kv = config.heads_q * config.head_dim, config.heads_kv * config.head_dim
        self.embeddings = random(config.vocabulary, width, gain=config.vocabulary**0.5)
        self.blocks = [
            Block(
                q=random(width, width_q),
                k=random(width, width_kv),
                v=random(width, width_kv),
                attention_output=random(width_q, width),
                gate=random(width, hidden),
                widen=random(width, hidden),
                narrow=random(hidden, width),
                sinks=random(1, config.heads_q)[0] if config.has_sinks else None,
            )
            for _ in range(config.layers)
        ]
        self.to_logits = random(width, config.vocabulary)

    def __call__(self, tokens: Array, attention: Attention) -> Array:
        """What the last block leaves (batch, seqlen, width) of token ids (batch, seqlen)."""
        batch, seqlen = tokens.shape
        heads = (batch, seqlen, -1, self.config.head_dim)
        x = self.embeddings[tokens]
        for layer, block in enumerate(self.blocks):
            y = normalized(x)
            q, k, v = ((y @ weights).reshape(heads) for weights in (block.q, block.k, block.v))
            mixed = attention(layer, q, k, v).reshape(batch, seqlen, -1)
            x = x + mixed @ block.attention_output
            y = normalized(x)
            x = x + (silu(y @ block.gate) * (y @ block.widen)) @ block.narrow
        return x

    def logits(self, rows: Array) -> Array:
        """Scores of the next token (batch, vocabulary) of rows (batch, width) of the last block."""
        return normalized(rows) @ self.to_logits


def rotary_tables(head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, each (positions, head_dim / 2) float32, of the angles of each position."""
    frequencies = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(positions), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """x (batch, seqlen, heads, head_dim), each pair of columns turned by the angle of its row.

    Row i is at position i: the tables (seqlen, head_dim / 2) begin at the first. Computed in
    float32 and rounded once, to x's dtype, as `flash_attention_with_kvcache` does it.
    """
    even, odd = x[..., 0::2].astype(np.float32), x[..., 1::2].astype(np.float32)
    cos, sin = cos[:, None], sin[:, None]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = odd * cos + even * sin
    return turned
