"""The keyword arguments that modify attention, the same for all public functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    from cupy_flash.mods.modification import MaskMod, ScoreMod


class Modifications(TypedDict, total=False):
    """Masks, and what becomes of scores; each may be left out or None. See docs/masks.md.

    With x = softmax_scale * q k^T, and p = i + q_offset the position of query i among the keys, the
    order is: softcap, score_mod, ALiBi, bias; then what any mask hides; then the softmax, with the
    sink. The kind of all arrays is that of q.

    Parameters
    ----------
    window_size : (int or None, int or None)
        (left, right): query i sees only the keys p - left <= j <= p + right. None or -1 has no
        bound. A model's window of W tokens, the query itself among them, is (W - 1, 0).
    softcap : float
        Positive: scores become softcap * tanh(x / softcap).
    alibi_slopes : float32 array, (heads_q,) or (batch, heads_q)
        slope * abs(p - j) is subtracted from the scores.
    sinks : array of float32 or q's dtype, (heads_q,)
        One more score of each row, unscaled, without a value. Counts in the log-sum-exp.
    bias : array of float32 or q's dtype
        Is added; broadcasts to (batch, heads_q, seqlen_q, seqlen_k). The last axis of a cached call
        is the capacity. Of packed sequences (heads_q or 1, total_q, max_seqlen_k).
    mask : bool array
        Of the shapes of bias. True keeps.
    prefix_lens : int32 array, (batch,)
        Keys of each sequence that all of its queries see although the call is causal.
    tree_mask : uint64 array, (batch, seqlen_q)
        Bit k of query i: whether it sees the key at the position of query k: unless q_offset says
        otherwise, the k-th of the last seqlen_q keys. It sees all keys before those. For at most 64
        queries.
    score_mod : ScoreMod
        The user's function of a score.
    mask_mod : MaskMod
        The user's mask.
    seqlens_k : int32 array, (batch,)
        Of batches of equal lengths: keys of each sequence, behind which is padding.
    """

    window_size: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Any
    sinks: Any
    bias: Any
    mask: Any
    prefix_lens: Any
    tree_mask: Any
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    seqlens_k: Any


# Those that are arrays, in the order that a call has them.
ARRAYS = ("alibi_slopes", "sinks", "bias", "mask", "prefix_lens", "tree_mask", "seqlens_k")
NAMES = frozenset(Modifications.__annotations__)


class Window(NamedTuple):
    """Bounds of the distance from a query's position to a key's; None has no bound."""

    left: int | None = None
    right: int | None = None


def given(modifications: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None.

    Raises
    ------
    TypeError
        For an argument of no such name.
    """
    for name in modifications:
        if name not in NAMES:
            raise TypeError(f"unexpected keyword argument {name!r}")
    return {name: value for name, value in modifications.items() if value is not None}


def window_of(window_size: Any) -> Window:
    """The window that an argument asks for.

    Raises
    ------
    TypeError
        For what is no pair of integers.
    ValueError
        For a bound below -1.
    """
    if isinstance(window_size, int):
        raise TypeError(
            f"window_size is {window_size}, one integer; expected (left, right). A window of W "
            f"tokens with the query among them is (W - 1, 0): ({window_size - 1}, 0)"
        )
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; expected a pair (left, right)")
    bounds: list[int | None] = []
    for bound in window_size:
        if bound is None:
            bounds.append(None)
            continue
        try:
            number = operator.index(bound)
        except TypeError:
            number = None
        if number is None or isinstance(bound, bool):
            raise TypeError(f"window_size is {window_size!r}; expected integers, or None")
        if number < -1:
            raise ValueError(
                f"window_size is {window_size!r}; expected distances of 0 or more, or -1 or None "
                "where there is no bound"
            )
        # Further than the longest sequence makes no difference, and would not fit int32.
        bounds.append(None if number == -1 else min(number, FURTHEST))
    return Window(*bounds)


FURTHEST = 2**30


def checked_softcap(softcap: Any) -> float:
    """The number.

    Raises
    ------
    TypeError
        For what is no number.
    ValueError
        For a number that is not positive and finite.
    """
    try:
        number = float(softcap)
    except (TypeError, ValueError):
        raise TypeError(f"softcap is {softcap!r}; expected a number or None") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"softcap is {number:g}; expected a positive, finite number, or None for none"
        )
    return number
