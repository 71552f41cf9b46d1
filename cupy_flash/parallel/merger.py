"""Results over parts of the keys, until they are merged."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.calls import run
from cupy_flash.calls.partials import Partials

# Results that are kept side by side. Merging each as it comes would round the sum each time, in 16
# bits; keeping all would take as much memory as the whole sequence has. Eight at a time, and eight
# of what these come to, round three times for 512 ranks.
_TOGETHER = 8


class _Level(NamedTuple):
    """Room for results, (results, batch, rows, heads, dim), and their log-sum-exps."""

    out: Any
    lse: Any


class Merger:
    """Attention of some rows to one part of the keys after the other.

    The order in which results are added decides their bits, and nothing else does.

    Parameters
    ----------
    shape
        Of one result, (batch, rows, heads, dim).
    dtype
        Of it.
    count
        How many results there will be.
    xp
        NumPy or CuPy.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, count: int, xp: Any) -> None:
        self._shape, self._dtype, self._xp = shape, dtype, xp
        self._room = max(1, min(count, _TOGETHER))
        self._levels: list[_Level] = []
        self._used: list[int] = []
        self._is_whole = False

    def add(self, *, is_whole: bool) -> tuple[Any, Any]:
        """Where the next result goes, and its log-sum-exp, (batch, heads, rows).

        All log-sum-exps are -inf: a row that gets none is as if it saw no key.

        Parameters
        ----------
        is_whole
            Whether all rows will be written.
        """
        self._is_whole = is_whole
        return self._next(0)

    def _next(self, level: int) -> tuple[Any, Any]:
        if level == len(self._levels):
            batch, rows, heads, _ = self._shape
            lse_dtype = np.float64 if self._dtype == np.float64 else np.float32
            out = self._xp.empty((self._room, *self._shape), self._dtype)
            lse = self._xp.empty((self._room, batch, heads, rows), lse_dtype)
            self._levels.append(_Level(out, lse))
            self._used.append(0)
        if self._used[level] == self._room:
            self._raise(level)
        at = self._used[level]
        self._used[level] += 1
        out, lse = self._levels[level]
        lse[at] = -math.inf
        return out[at], lse[at]

    def _raise(self, level: int) -> None:
        """Merge a level's results into one of the next."""
        out, lse = self._next(level + 1)
        lse[...] = self._merged(level, None, out)[1]
        self._used[level] = 0

    def _merged(self, level: int, sinks: Any | None, out: Any | None = None) -> tuple[Any, Any]:
        used = self._used[level]
        parts = self._levels[level]
        merged: tuple[Any, Any] = run.combine(
            Partials(parts.out[:used], parts.lse[:used], out, sinks)
        )
        return merged

    def result(self, sinks: Any | None) -> tuple[Any, Any]:
        """Attention to all keys, and its log-sum-exp.

        Parameters
        ----------
        sinks
            One more score of each head's rows, (heads,); None for none.
        """
        if not self._levels:
            self.add(is_whole=False)
        level = 0
        # What is raised may open a level.
        while level < len(self._levels) - 1:
            if self._used[level]:
                self._raise(level)
            level += 1
        is_single = self._used[-1] == 1 and len(self._levels) == 1
        if is_single and self._is_whole and sinks is None:
            return self._levels[0].out[0], self._levels[0].lse[0]
        return self._merged(len(self._levels) - 1, sinks)
