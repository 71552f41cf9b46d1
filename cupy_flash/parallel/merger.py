"""Collection and merging of partial results over parts of the keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.calls import dispatch
from cupy_flash.calls.check.partials import Partials

# Number of partial results that are kept before they are merged. Merging each result immediately
# would round a 16-bit sum each time; keeping all would take memory for the whole sequence. Merging
# eight results, and eight merged results, rounds three times for 512 ranks.
_TOGETHER = 8


class _Level(NamedTuple):
    """Buffers for partial results, (results, batch, rows, heads, dim), and their log-sum-exps."""

    out: Any
    lse: Any


class Merger:
    """Merger of partial attention results of the same rows over different parts of the keys.

    The bits of the merged result depend only on the partial results and on their order.

    Parameters
    ----------
    shape
        Shape of a partial result, (batch, rows, heads, dim).
    dtype
        Dtype of a partial result.
    count
        Number of partial results that will be added.
    xp
        Array module, NumPy or CuPy.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, count: int, xp: Any) -> None:
        self._shape, self._dtype, self._xp = shape, dtype, xp
        self._capacity = max(1, min(count, _TOGETHER))
        self._levels: list[_Level] = []
        self._used: list[int] = []
        self._is_whole = False

    def add(self, *, is_unsplit: bool) -> tuple[Any, Any]:
        """Return buffers for the next result and its log-sum-exp, (batch, heads, rows).

        The log-sum-exp is initialized to -inf, so that a row that is not written has no weight.

        Parameters
        ----------
        is_unsplit
            Whether the caller will write all rows.
        """
        self._is_whole = is_unsplit
        return self._next(0)

    def _next(self, level: int) -> tuple[Any, Any]:
        if level == len(self._levels):
            batch, rows, heads, _ = self._shape
            lse_dtype = np.float64 if self._dtype == np.float64 else np.float32
            out = self._xp.empty((self._capacity, *self._shape), self._dtype)
            lse = self._xp.empty((self._capacity, batch, heads, rows), lse_dtype)
            self._levels.append(_Level(out, lse))
            self._used.append(0)
        if self._used[level] == self._capacity:
            self._merge_level(level)
        index = self._used[level]
        self._used[level] += 1
        out, lse = self._levels[level]
        lse[index] = -math.inf
        return out[index], lse[index]

    def _merge_level(self, level: int) -> None:
        """Merge all results of a level into one result of the next level."""
        out, lse = self._next(level + 1)
        lse[...] = self._merged(level, None, out)[1]
        self._used[level] = 0

    def _merged(self, level: int, sinks: Any | None, out: Any | None = None) -> tuple[Any, Any]:
        used = self._used[level]
        parts = self._levels[level]
        merged: tuple[Any, Any] = dispatch.combine(
            Partials(parts.out[:used], parts.lse[:used], out, sinks)
        )
        return merged

    def result(self, sinks: Any | None) -> tuple[Any, Any]:
        """Return the output and log-sum-exp over all keys.

        Parameters
        ----------
        sinks
            Sink of each head, (heads,): an additional score in each row's softmax; or None.
        """
        if not self._levels:
            self.add(is_unsplit=False)
        level = 0
        # `_merge_level` may append a level, so the length is read again in each iteration.
        while level < len(self._levels) - 1:
            if self._used[level]:
                self._merge_level(level)
            level += 1
        is_single = self._used[-1] == 1 and len(self._levels) == 1
        if is_single and self._is_whole and sinks is None:
            return self._levels[0].out[0], self._levels[0].lse[0]
        return self._merged(len(self._levels) - 1, sinks)
