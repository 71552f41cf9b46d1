"""Gradients that pairs of many rows and keys add to: those of a bias, of sinks and of captures.

In which order they are added up depends on the tile alone, see `cupy_flash.host.turns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.host.passes import Block
from cupy_flash.mods.scores import Pairs, Scores
from cupy_flash.mods.slopes import behind_softcap, capture_gradients

Array = NDArray[Any]

# The axis of rows in scores by (sequences, kv heads, heads, rows, keys).
ROWS = 3


class Sums(NamedTuple):
    """What a pass adds up besides dq, dk and dv; None or empty where it is not wanted.

    Attributes
    ----------
    bias
        (batch, heads_kv, group, seqlen_q, seqlen_k), each 1 where one element serves all.
    captures
        float64 arrays by name.
    sinks
        float64, (heads_kv, group).
    """

    bias: Array | None
    captures: Mapping[str, Array]
    sinks: Array | None

    @property
    def need_scores(self) -> bool:
        """Whether gradients of scores are needed."""
        return self.bias is not None or bool(self.captures)

    def share_rows(self, batch: int, heads_kv: int, group: int) -> bool:
        """Whether the bias has elements for each row that serve several sequences, or heads."""
        if self.bias is None or self.bias.shape[ROWS] == 1:
            return False
        return self.bias.shape[:ROWS] != (batch, heads_kv, group)

    def of_bias(self, block: Block, keys: slice) -> Array:
        """The elements that serve a block and some keys."""
        assert self.bias is not None
        lengths = self.bias.shape
        some = zip((*block, keys), lengths, strict=True)
        return self.bias[tuple(i if n > 1 else slice(0, 1) for i, n in some)]


def bias_total(dbias: Array, pairs: tuple[int, ...], compute: np.dtype[Any]) -> Array:
    """Zeros to add up the gradient of a bias in: ``dbias`` itself where that will do.

    ``pairs`` is the shape that the bias broadcasts to.
    """
    # With rows and keys there may be as many elements as scores.
    dtype = compute if 1 not in dbias.shape[-2:] else np.dtype(np.float64)
    if dbias.shape != pairs and dbias.dtype != dtype:
        return np.zeros(dbias.shape, dtype)
    dbias[...] = 0
    return dbias


def sink_gradients(sinks: Array, lse: Array, delta: Array) -> Array:
    """Gradients of sinks, (kv heads, heads, 1, 1), by (sequences, kv heads, heads, rows)."""
    sinks = sinks[..., 0]
    # A sink of -inf has no weight, not even where the lse is -inf.
    weights = np.where(sinks == -np.inf, 0, np.exp(sinks - lse))
    return -np.sum(weights * delta, axis=(0, 3), dtype=np.float64)


class ItemSums:
    """What the pairs of a block of rows and a range of keys add to the `Sums` of their pass."""

    def __init__(self, sums: Sums, block: Block, keys: slice) -> None:
        self._sums, self._block, self._keys = sums, block, keys
        self._captures = {name: np.zeros_like(total) for name, total in sums.captures.items()}
        # Of a bias without rows.
        self._bias: Array | None = None
        if sums.bias is not None and sums.bias.shape[ROWS] == 1:
            self._bias = np.zeros(sums.of_bias(block, keys).shape)

    def of_bias(self, dt: Array, block: Block, keys: slice) -> Array | None:
        """What gradients of scores add to `Sums.of_bias`, once it is the item's turn.

        None of a bias without rows: that is kept here until the item is through.
        """
        if self._sums.bias is None:
            return None
        lengths = self._sums.bias.shape
        shared = tuple(axis for axis in range(dt.ndim) if lengths[axis] == 1 < dt.shape[axis])
        part: Array = dt.sum(axis=shared, keepdims=True, dtype=np.float64) if shared else dt
        if self._bias is None:
            return part
        heads, first = self._block.heads.start, self._keys.start
        some_heads = slice(block.heads.start - heads, block.heads.stop - heads)
        some_keys = slice(keys.start - first, keys.stop - first)
        mine = self._bias[:, :, some_heads] if lengths[2] > 1 else self._bias
        mine = mine[..., some_keys] if lengths[4] > 1 else mine
        mine += part
        return None

    def take_captures(self, scores: Scores, x: Array, at: Pairs, dt: Array) -> None:
        """Take up the gradients of scores that scaled scores, x, have become."""
        assert scores.score_mod is not None
        found = capture_gradients(scores.score_mod, behind_softcap(scores, x), at, dt)
        for name, total in self._captures.items():
            total += found[name]

    def finish(self) -> None:
        """Add what is kept here."""
        if self._bias is not None:
            total = self._sums.of_bias(self._block, self._keys)
            total += self._bias
        for name, total in self._captures.items():
            self._sums.captures[name] += total
