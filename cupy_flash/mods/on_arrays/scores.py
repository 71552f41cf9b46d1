"""Changes of scores between the product and the softmax, and masks, on NumPy or CuPy arrays.

The order is that of docs/guide/masks.md: scale, softcap, score_mod, ALiBi, bias, and then masks.
`cupy_flash.problem.mask` handles masks that depend on position alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cupy_flash.mods.modification import MaskMod, ScoreMod


class Pairs(NamedTuple):
    """Coordinates of pairs: integers, or integer arrays that broadcast to the scores.

    Attributes
    ----------
    b, h
        Index of the sequence and index of the query head.
    row, j
        Row of the query and index of the key in their sequence.
    q_offset
        Position of the sequence's first query among its keys.
    q_start, k_start
        Rows at which a packed sequence begins in q and in k; 0 for other sequences.
    """

    b: Any
    h: Any
    row: Any
    j: Any
    q_offset: Any = 0
    q_start: Any = 0
    k_start: Any = 0


#: Names of the array fields of `Scores`, which follow the functions, in order.
ARRAY_FIELDS = ("alibi_slopes", "bias", "mask", "tree_mask", "seqused_q", "cache_leftpad")

#: Coordinates of the first pair of a call.
FIRST_PAIR = Pairs(b=0, h=0, row=0, j=0)


class Scores(NamedTuple):
    """Changes of scores and masks of a call, with their arrays.

    Attributes
    ----------
    softcap
        Cap: scores become softcap * tanh(score / softcap).
    score_mod, mask_mod
        Functions of the user.
    alibi_slopes : array, (heads_q,) or (batch, heads_q)
    bias, mask : arrays that broadcast to (batch, heads_q, seqlen_q, seqlen_k)
        For packed sequences, arrays that broadcast to (heads_q, total_q, max_seqlen_k).
    tree_mask : uint64 array, (batch, seqlen_q)
        Bit k of a row is whether it attends to the key at the position of query k.
    seqused_q, cache_leftpad : int32 arrays, (batch,)
        Number of rows of each sequence that are used, and number of leading keys that are padding.
    left, prefix_lens : int and int32 array (batch,), or both None
        Left bound of a window next to a prefix. It does not mask the first `prefix_lens[b]` keys.
    real
        Dtype of the problem's reals, see `interpret.Interpreter`; None for the
        dtype of the scores.
    """

    softcap: float | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    tree_mask: Any = None
    seqused_q: Any = None
    cache_leftpad: Any = None
    left: int | None = None
    prefix_lens: Any = None
    real: Any = None

    @property
    def changes_nothing(self) -> bool:
        """Whether no score is changed and no pair is masked."""
        return all(field is None for field in self._replace(real=None))

    @property
    def changes_scores(self) -> bool:
        """Whether scores of visible pairs differ from the scaled products."""
        changes = (self.softcap, self.score_mod, self.alibi_slopes, self.bias)
        return any(field is not None for field in changes)

    def with_prefix_window(self, left: int | None, prefix_lens: Any) -> Scores:
        """Return the object with the left bound of a window, if there is a prefix as well."""
        if left is None or prefix_lens is None:
            return self
        return self._replace(left=left, prefix_lens=prefix_lens)

    def apply(self, x: Any, pairs: Pairs, xp: Any = np) -> Any:
        """Return the scores that the softmax reads, which are -inf if masked.

        Parameters
        ----------
        x : array of float32 or float64
            Scaled scores.
        pairs
            Coordinates of the scores' pairs.
        xp
            Module of the arrays, NumPy or CuPy.
        """
        real = x.dtype.type
        position = pairs.row + pairs.q_offset
        coordinates = (pairs.b, pairs.h, position, pairs.j)
        starts = {"q_start": pairs.q_start, "k_start": pairs.k_start, "xp": xp}
        if self.softcap is not None:
            x = real(self.softcap) * xp.tanh(x / real(self.softcap))
        if self.score_mod is not None:
            x = self.score_mod.evaluate(x, *coordinates, **starts, real=self.real)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes
            slope = slopes[pairs.h] if slopes.ndim == 1 else slopes[pairs.b, pairs.h]
            x = x - slope.astype(real) * abs(position - pairs.j).astype(real)
        if self.bias is not None:
            x = x + select_pairs(self.bias, pairs).astype(real)
        masked = real(-np.inf)
        if self.mask is not None:
            x = xp.where(select_pairs(self.mask, pairs), x, masked)
        if self.tree_mask is not None:
            x = xp.where(self._visible_in_tree(pairs, xp), x, masked)
        if self.cache_leftpad is not None:
            x = xp.where(pairs.j >= self.cache_leftpad[pairs.b], x, masked)
        if self.seqused_q is not None:
            x = xp.where(pairs.row < self.seqused_q[pairs.b], x, masked)
        if self.prefix_lens is not None:
            visible = (pairs.j < self.prefix_lens[pairs.b]) | (pairs.j >= position - self.left)
            x = xp.where(visible, x, masked)
        if self.mask_mod is not None:
            deciding = real if self.real is None else self.real
            visible = self.mask_mod.evaluate(*coordinates, **starts, dtype=deciding)
            x = xp.where(visible, x, masked)
        return x

    def _visible_in_tree(self, pairs: Pairs, xp: Any) -> Any:
        node = pairs.j - pairs.q_offset
        bit = xp.clip(node, 0, 63).astype(np.uint64)
        bits = self.tree_mask[pairs.b, pairs.row]
        visible = ((bits >> bit) & np.uint64(1)).astype(bool)
        return (node < 0) | ((node < 64) & visible)


def select_pairs(array: Any, pairs: Pairs) -> Any:
    """Return the elements of a bias or mask for some pairs."""
    packed_indices = (pairs.h, pairs.q_start + pairs.row, pairs.j)
    indices = packed_indices if array.ndim == 3 else (pairs.b, pairs.h, pairs.row, pairs.j)
    # An axis of length 1 broadcasts.
    return array[tuple(i if n > 1 else 0 * i for i, n in zip(indices, array.shape, strict=True))]
