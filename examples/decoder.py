"""A small decoder-only transformer on NumPy or CuPy arrays, with hand-written gradients.

The blocks are those of Llama [1]_: attention and a gated feed-forward layer (SwiGLU [2]_), each
with a normalized input and a residual connection. It uses grouped-query attention [3]_ and rotary
position embeddings [4]_. As in gpt-oss [5]_, every other layer has a sliding window, and each query
head has a sink. The caller passes the attention function.

Some functions return a result and a `pullback`. The pullback maps the gradient of the result to the
gradients of the inputs, and holds all values that the backward pass needs.

.. [1] Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971.
.. [2] Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
.. [3] Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
   Checkpoints", arXiv:2305.13245.
.. [4] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
.. [5] OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a NumPy or a CuPy array
Weights = dict[str, Array]

# attention(layer, q, k, v, sinks) takes q (batch, seqlen, heads_q, head_dim), k and v (batch,
# seqlen, heads_kv, head_dim) and sinks (heads_q,), and returns an array like q. It also applies
# rotary embeddings and masks, and handles the KV cache.
Attention = Callable[[int, Array, Array, Array, Array], Array]
# The pullback maps the gradient of the output to the gradients of q, k, v and sinks.
AttentionPullback = Callable[[Array], tuple[Array, Array, Array, Array]]
AttentionWithPullback = Callable[
    [int, Array, Array, Array, Array], tuple[Array, AttentionPullback | None]
]


class Config(NamedTuple):
    """Sizes of a model."""

    vocabulary: int = 256  # a token is a byte
    layers: int = 4
    width: int = 96
    heads_q: int = 6
    heads_kv: int = 2
    head_dim: int = 16
    hidden: int = 256  # width of the gated layers
    window: int = 32  # tokens that a query attends to in layers 0, 2, ..., including its own

    @property
    def heads(self) -> int:
        """Number of heads of queries, keys and values together."""
        return self.heads_q + 2 * self.heads_kv

    def window_size(self, layer: int) -> tuple[int, int] | None:
        """Return the argument `window_size` of attention, (left, right); None without a window."""
        return None if layer % 2 else (self.window - 1, 0)


def random_weights(config: Config, seed: int, xp: Any = np) -> Weights:
    """Return initial weights in float32; the shape of a matrix is (features_in, features_out).

    The same seed gives the same weights on the CPU and on the GPU.
    """
    rng = np.random.default_rng(seed)

    def random(rows: int, columns: int, gain: float = 1.0) -> Array:
        # An input of unit variance gives an output of variance gain squared.
        weights = rng.standard_normal((rows, columns), np.float32)
        return xp.asarray(weights * np.float32(gain / rows**0.5))

    width, hidden = config.width, config.hidden
    # The sum of what all layers add to the residual stream has unit variance, like its input.
    of_sum = (2 * config.layers) ** -0.5
    weights = {"embeddings": random(config.vocabulary, width, gain=config.vocabulary**0.5)}
    for layer in range(config.layers):
        weights |= {
            f"{layer}.qkv": random(width, config.heads * config.head_dim),
            f"{layer}.attention_output": random(config.heads_q * config.head_dim, width, of_sum),
            f"{layer}.gate_and_widen": random(width, 2 * hidden),
            f"{layer}.narrow": random(hidden, width, of_sum),
            f"{layer}.sinks": xp.zeros(config.heads_q, np.float32),
        }
    return weights | {"to_logits": random(width, config.vocabulary, gain=0.1)}


def save(path: Path, config: Config, weights: Weights) -> None:
    """Write a model as an .npz file, its weights as float16."""
    sizes = {f"config.{name}": np.array(size) for name, size in config._asdict().items()}
    arrays = {n: (w if isinstance(w, np.ndarray) else w.get()) for n, w in weights.items()}
    with path.open("wb") as file:
        np.savez_compressed(file, **sizes, **{n: w.astype(np.float16) for n, w in arrays.items()})


def load(path: Path, xp: Any = np) -> tuple[Config, Weights]:
    """Read a model that `save` wrote; the weights are converted to float32."""
    with np.load(path) as file:
        config = Config(**{name: int(file[f"config.{name}"]) for name in Config._fields})
        names = [name for name in file.files if not name.startswith("config.")]
        return config, {name: xp.asarray(file[name].astype(np.float32)) for name in names}


class Decoder:
    """Decoder-only transformer.

    Parameters
    ----------
    config : Config
        Sizes of the model.
    weights : dict of arrays
        Weights, named as by `random_weights`.
    xp : module
        ``numpy`` or ``cupy``: module of the weights and of all computations except attention.
    dtype : str
        Dtype that matrices are rounded to before they are multiplied. Everything else has the dtype
        of the weights.
    """

    def __init__(
        self, config: Config, weights: Weights, xp: Any = np, dtype: Any = "float32"
    ) -> None:
        self.config = config
        self.weights = weights
        self.xp = xp
        self.dtype = np.dtype(dtype)

    def __call__(self, tokens: Array, attention: Attention) -> Array:
        """Return the output (batch, seqlen, width) of the last block for tokens (batch, seqlen)."""
        return self.with_pullback(tokens, lambda *inputs: (attention(*inputs), None))[0]

    def with_pullback(
        self, tokens: Array, attention: AttentionWithPullback
    ) -> tuple[Array, Callable[[Array], Weights]]:
        """Return the output, and the pullback to the gradients of all weights except to_logits."""
        embeddings = self.weights["embeddings"]
        x = embeddings[tokens]
        blocks = []
        for layer in range(self.config.layers):
            x, of_attention = self._attend(layer, x, attention)
            x, of_gates = self._gate(layer, x)
            blocks += [of_attention, of_gates]

        def pullback(dx: Array) -> Weights:
            gradients: Weights = {}
            for block in reversed(blocks):
                dx, of_block = block(dx)
                gradients |= of_block
            # A matrix product, because sums by index have no fixed order on a GPU.
            dx = dx.reshape(-1, dx.shape[-1])
            is_token = tokens.reshape(-1, 1) == self.xp.arange(len(embeddings))
            gradients["embeddings"] = is_token.T.astype(dx.dtype) @ dx
            return gradients

        return x, pullback

    def logits(self, rows: Array) -> Array:
        """Return logits (..., vocabulary) of the next token from outputs of the last block."""
        return self.logits_with_pullback(rows)[0]

    def logits_with_pullback(
        self, rows: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, Weights]]]:
        """Return the logits, and the pullback to the gradients of `rows` and of to_logits."""
        y, of_norm = normalized(rows)
        logits, of_product = self._product(y, "to_logits")

        def pullback(dlogits: Array) -> tuple[Array, Weights]:
            dy, gradients = of_product(dlogits)
            return of_norm(dy), gradients

        return logits, pullback

    def _product(
        self, x: Array, name: str
    ) -> tuple[Array, Callable[[Array], tuple[Array, Weights]]]:
        """Return the product of x and a weight matrix, and the pullback to both."""

        def rounded(x: Array) -> Array:
            return x.reshape(-1, x.shape[-1]).astype(self.dtype, copy=False)

        def exact(x: Array) -> Array:
            return x.astype(self.weights[name].dtype, copy=False)

        rows, matrix = rounded(x), rounded(self.weights[name])
        y = exact(rows @ matrix).reshape(*x.shape[:-1], -1)

        def pullback(dy: Array) -> tuple[Array, Weights]:
            dy = rounded(dy)
            return exact(dy @ matrix.T).reshape(x.shape), {name: exact(rows.T @ dy)}

        return y, pullback

    def _attend(
        self, layer: int, x: Array, attention: AttentionWithPullback
    ) -> tuple[Array, Callable[[Array], tuple[Array, Weights]]]:
        config = self.config
        heads_qk = config.heads_q + config.heads_kv
        y, of_norm = normalized(x)
        qkv, of_qkv = self._product(y, f"{layer}.qkv")
        qkv = qkv.reshape(*x.shape[:2], config.heads, config.head_dim)
        q, k, v = self.xp.split(qkv, [config.heads_q, heads_qk], axis=2)
        out, of_attention = attention(layer, q, k, v, self.weights[f"{layer}.sinks"])
        added, of_output = self._product(out.reshape(*x.shape[:2], -1), f"{layer}.attention_output")

        def pullback(dx: Array) -> tuple[Array, Weights]:
            assert of_attention is not None
            dout, gradients = of_output(dx)
            *dqkv, dsinks = of_attention(dout.reshape(out.shape))
            dy, of_weights = of_qkv(self.xp.concatenate(dqkv, axis=2).reshape(*x.shape[:2], -1))
            return dx + of_norm(dy), gradients | of_weights | {f"{layer}.sinks": dsinks}

        return x + added, pullback

    def _gate(self, layer: int, x: Array) -> tuple[Array, Callable[[Array], tuple[Array, Weights]]]:
        y, of_norm = normalized(x)
        both, of_both = self._product(y, f"{layer}.gate_and_widen")
        gate, wide = self.xp.split(both, 2, axis=-1)
        share = 1 / (1 + np.exp(-gate))
        silu = gate * share
        added, of_narrow = self._product(silu * wide, f"{layer}.narrow")

        def pullback(dx: Array) -> tuple[Array, Weights]:
            dhidden, gradients = of_narrow(dx)
            dgate = dhidden * wide * (share + silu * (1 - share))
            dy, of_weights = of_both(self.xp.concatenate([dgate, dhidden * silu], axis=-1))
            return dx + of_norm(dy), gradients | of_weights

        return x + added, pullback


def normalized(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Return rows divided by their root mean square (RMSNorm), and the pullback.

    There are no learned gains, as the matrices that follow can represent them.
    """
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    y = x * scale

    def pullback(dy: Array) -> Array:
        return scale * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y, pullback


def rotary_tables(head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines of each position's angles, (positions, head_dim / 2) float32."""
    frequencies = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(positions), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Apply rotary embedding to pairs of columns of x (batch, seqlen, heads, head_dim).

    Row i has position i and uses row i of the tables, (seqlen, head_dim / 2). Like
    `flash_attention_with_kvcache`, this computes at least in float32 and rounds once, to x's dtype.
    With -sin it is the inverse rotation, which is also the pullback.
    """
    even, odd = (x[..., i::2].astype(np.result_type(x.dtype, cos.dtype)) for i in (0, 1))
    cos, sin = cos[:, None], sin[:, None]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = odd * cos + even * sin
    return turned
