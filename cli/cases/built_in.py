"""Built-in mask and score functions by name, and the keys that each mask leaves visible."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.mods.modification import MaskMod, ScoreMod

Ints = NDArray[np.int64]

_DOCUMENTS = 12
# Largest distance between query and key, either way, that has its own entry in the bias table.
FURTHEST = 64
# Distance between the keys that the dilated mask leaves visible.
STEP = 2
SOFTCAP = 50.0


class BuiltIn(NamedTuple):
    """A built-in modification.

    Attributes
    ----------
    about
        Short description of the function.
    make
        Class of the modification: `ScoreMod` or `MaskMod`.
    function
        Function that the modification is made of.
    captures
        Function of (heads_q, seqlen_k) that returns the captured values, in host memory.
    head_axis
        Name of the captured array whose first axis is the query heads.
    visible_range
        Function of query positions and seqlen_k that returns begin and end of each query's
        visible keys. None for a modification that masks nothing.
    step
        Distance between visible keys within that range.
    """

    about: str
    make: type[ScoreMod] | type[MaskMod]
    function: Callable[..., Any]
    captures: Callable[[int, int], dict[str, Any]]
    head_axis: str | None = None
    visible_range: Callable[[Ints, int], tuple[Ints, Ints]] | None = None
    step: int = 1

    @property
    def keyword(self) -> str:
        """Keyword argument of the library's functions that takes the modification."""
        return "mask_mod" if self.make is MaskMod else "score_mod"


@functools.lru_cache(maxsize=8)
def _ends(seqlen_k: int) -> Ints:
    """Return the end of each document; the random cuts are the same for all sequences."""
    places = np.arange(1, max(seqlen_k, 1))
    count = min(_DOCUMENTS - 1, len(places))
    cuts = np.random.default_rng(0).choice(places, count, replace=False)
    return np.sort([*cuts, max(seqlen_k, 1)]).astype(np.int64)


def _document_of(positions: Ints, seqlen_k: int) -> Ints:
    # Positions outside the sequence belong to the nearest document.
    inside = np.clip(positions, 0, max(seqlen_k - 1, 0))
    return np.searchsorted(_ends(seqlen_k), inside, side="right")


def _documents(heads_q: int, seqlen_k: int) -> dict[str, Any]:
    return {"document": _document_of(np.arange(max(seqlen_k, 1)), seqlen_k).astype(np.int32)}


def _visible_documents(positions: Ints, seqlen_k: int) -> tuple[Ints, Ints]:
    ends = _ends(seqlen_k)
    document = _document_of(positions, seqlen_k)
    return np.concatenate(([0], ends[:-1]))[document], ends[document]


def _table(heads_q: int, seqlen_k: int) -> dict[str, Any]:
    shape = (heads_q, 2 * FURTHEST + 1)
    return {"table": np.random.default_rng(0).standard_normal(shape, np.float32)}


def _prefix(seqlen_k: int) -> int:
    return seqlen_k // 4


def _visible_prefix(positions: Ints, seqlen_k: int) -> tuple[Ints, Ints]:
    ends = np.maximum(positions + 1, _prefix(seqlen_k))
    return np.zeros_like(ends), np.minimum(ends, seqlen_k)


def _visible_all(positions: Ints, seqlen_k: int) -> tuple[Ints, Ints]:
    return np.zeros_like(positions), np.full_like(positions, seqlen_k)


BUILT_IN = {
    "documents": BuiltIn(
        f"{_DOCUMENTS} documents in one sequence, cut at random",
        MaskMod,
        lambda i, j, document: document[i] == document[j],
        _documents,
        visible_range=_visible_documents,
    ),
    "t5": BuiltIn(
        f"a bias for each head by i - j, clipped at {FURTHEST}",
        ScoreMod,
        lambda score, h, i, j, table: (
            score + table[h, np.clip(i - j, -FURTHEST, FURTHEST) + FURTHEST]
        ),
        _table,
        head_axis="table",
    ),
    "dilated": BuiltIn(
        "every second key is visible",
        MaskMod,
        lambda i, j: (i - j) % STEP == 0,
        lambda heads_q, seqlen_k: {},
        visible_range=_visible_all,
        step=STEP,
    ),
    "prefix": BuiltIn(
        "causal after a visible prefix of a quarter of the keys, without --causal",
        MaskMod,
        lambda i, j, prefix: (j <= i) | (j < prefix),
        lambda heads_q, seqlen_k: {"prefix": _prefix(seqlen_k)},
        visible_range=_visible_prefix,
    ),
    "softcap": BuiltIn(
        f"a softcap of {SOFTCAP:g} as a traced function",
        ScoreMod,
        lambda score, cap: cap * np.tanh(score / cap),
        lambda heads_q, seqlen_k: {"cap": SOFTCAP},
    ),
}
