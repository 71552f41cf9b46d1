"""The keyword arguments that modify attention, the same for all public functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np

from cupy_flash.arrays.strided import kind_of
from cupy_flash.arrays.torch_arrays import resolved
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.other_names import unexpected
from cupy_flash.problem.values import finite


class Modifications(TypedDict, total=False):
    """Masks, and what becomes of scores; each may be left out or None. See docs/masks.md.

    With x = softmax_scale * q k^T, and p = i + q_offset the position of query i among the keys, the
    order is: softcap, score_mod, ALiBi, bias; then what any mask hides; then the softmax, with the
    sink. The kind of all arrays is that of q. Arrays of float32 here are float64 if q is. Lengths
    may be lists, or have another integer dtype: they are then copied in each call.

    Parameters
    ----------
    window_size : (int or None, int or None)
        (left, right): query i sees only the keys p - left <= j <= p + right. None or -1 has no
        bound, and -1 alone is no window. A model's window of W tokens, the query itself among them,
        is (W - 1, 0).
    softcap : float
        From 1e-30 to 1e30: scores become softcap * tanh(x / softcap). 0 is no cap.
    alibi_slopes : float32 array, (heads_q,) or (batch, heads_q)
        slope * abs(p - j) is subtracted from the scores. A list, a number for all heads, or another
        float dtype is converted in each call.
    sinks : array of float32 or q's dtype, (heads_q,)
        One more score of each row, unscaled, without a value. Counts in the log-sum-exp. Lists,
        numbers and other float dtypes are converted as those of alibi_slopes.
    bias : array of float32 or q's dtype
        Is added; broadcasts to (batch, heads_q, seqlen_q, seqlen_k). The last axis of a cached call
        is the capacity. Of packed sequences (heads_q or 1, total_q, max_seqlen_k).
    mask : bool array
        Of the shapes of bias. True keeps.
    prefix_lens : int32 array, (batch,)
        Number of first keys of each sequence that all of its queries see, even those that `causal`
        and `window_size` hide.
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

    window_size: tuple[int | None, int | None] | int | None
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


class SequenceModifications(Modifications, total=False):
    """Modifications of packed sequences and of caches; see docs/masks.md.

    Parameters
    ----------
    q_offset : int32 array, (batch,)
        Position of the first query of each sequence among its keys, at most 2^30 - 2^10 from 0. By
        default the last query of a sequence stands at its last key.
    """

    q_offset: Any


class PackedModifications(SequenceModifications, total=False):
    """Modifications of packed sequences; see docs/masks.md.

    Parameters
    ----------
    seqused_q : int32 array, (batch,)
        Number of queries of each sequence that are used. The rows behind them attend to no key: 0
        in out, and in lse -inf, or the sink. Unless there is a q_offset, the last query that is
        used stands at the last key.
    """

    seqused_q: Any


class CacheModifications(SequenceModifications, total=False):
    """Modifications of a step on a cache; see docs/masks.md.

    Parameters
    ----------
    cache_leftpad : int32 array, (batch,)
        Number of first rows of each sequence's cache that are padding, which no query attends to.
        cache_seqlens counts them, and so do positions. A NaN in a value of the padding can reach
        rows that attend to other keys of its block.
    """

    cache_leftpad: Any


# Those that are arrays. Functions of equal lengths have `q_offset` among their other arguments.
ARRAYS = (
    "alibi_slopes",
    "sinks",
    "bias",
    "mask",
    "prefix_lens",
    "tree_mask",
    "seqlens_k",
    "q_offset",
    "seqused_q",
    "cache_leftpad",
)
_TYPES = (Modifications, PackedModifications, CacheModifications)
NAMES = frozenset().union(*(kind.__annotations__ for kind in _TYPES))
# Names of the modifications that a function accepts, by the annotation of its keywords. Functions
# of packed and cached sequences have other arguments in place of seqlens_k.
_TAKEN = {
    kind.__name__: [n for n in kind.__annotations__ if kind is Modifications or n != "seqlens_k"]
    for kind in _TYPES
}
# Arrays with a number for each head. The caller may pass a list, or one number for all heads.
VECTORS = ("alibi_slopes", "sinks")
MODS: dict[str, type] = {"score_mod": ScoreMod, "mask_mod": MaskMod}


class Window(NamedTuple):
    """Bounds of the distance from a query's position to a key's; None has no bound."""

    left: int | None = None
    right: int | None = None


def given(modifications: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None.

    Raises
    ------
    TypeError
        For an argument of no such name, and for a function that is no modification.
    """
    for name in modifications:
        require_known(name)
    found = {name: value for name, value in modifications.items() if value is not None}
    for name in MODS.keys() & found.keys():
        require_mod(name, found[name])
    return found


def require_known(name: str, function: Callable[..., Any] | None = None) -> None:
    """Raise TypeError unless there is a keyword argument of this name.

    Parameters
    ----------
    name
        The keyword.
    function
        Public function that it is passed to, by default the one that runs.
    """
    if name not in NAMES:
        raise unexpected(name, _TAKEN, function)


def with_offsets(q_offset: Any, modifications: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return `q_offset` and modifications, to which it belongs if it is one for each sequence.

    Parameters
    ----------
    q_offset
        Argument of a function of equal lengths: a number, None, or an array or list of numbers.
    modifications
        The other modifications of the call.
    """
    if q_offset.__class__ in (int, type(None)):
        return q_offset, modifications
    is_array = isinstance(q_offset, (list, tuple)) or hasattr(q_offset, "__dlpack__")
    if not getattr(q_offset, "ndim", is_array):
        return q_offset, modifications
    return None, {**modifications, "q_offset": q_offset}


def require_mod(name: str, value: Any) -> None:
    """Raise TypeError unless a value is what score_mod, or mask_mod, is to be."""
    kind = MODS[name]
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} is {kind_of(value)}; expected a {kind.__name__}, as {kind.__name__}(function)"
        )


def window_of(window_size: Any) -> Window:
    """The window that an argument asks for.

    Raises
    ------
    TypeError
        For what is neither a pair of integers nor -1.
    ValueError
        For a bound below -1.
    """
    is_sequence = isinstance(window_size, (tuple, list))
    if not is_sequence and (number := _integer(window_size)) is not None:
        if number == -1:
            return Window()
        example = f": ({number - 1}, 0)" if number > 0 else ""
        raise TypeError(
            f"window_size is {number}, one integer; expected (left, right). A window of W "
            f"tokens with the query among them is (W - 1, 0){example}"
        )
    if not is_sequence or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; expected a pair (left, right)")
    left, right = window_size
    return Window(_bound(left, window_size), _bound(right, window_size))


def _bound(bound: Any, window_size: Any) -> int | None:
    # As most are, in a third of the time.
    if bound is None or (bound.__class__ is int and 0 <= bound <= FURTHEST):
        return bound
    number = _integer(bound)
    if number is None:
        raise TypeError(f"window_size is {window_size!r}; expected integers, or None")
    if number < -1:
        raise ValueError(
            f"window_size is {window_size!r}; expected distances of 0 or more, or -1 or None "
            "where there is no bound"
        )
    # Further than the longest sequence makes no difference, and would not fit int32.
    return None if number == -1 else min(number, FURTHEST)


def _integer(value: Any) -> int | None:
    """The integer that a value is; None for any other."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


FURTHEST = 2**30
# Scores divided by such a cap, and the cap times anything near 1, are numbers in float32.
SMALLEST_CAP, LARGEST_CAP = 1e-30, 1e30


def checked_softcap(softcap: Any) -> float | None:
    """Return the number, or None for 0, which stands for no cap.

    Raises
    ------
    TypeError
        For what is no number.
    ValueError
        For a number out of range.
    """
    number = finite("softcap", resolved("softcap", softcap))
    if number == 0:
        return None
    if not SMALLEST_CAP <= number <= LARGEST_CAP:
        raise ValueError(
            f"softcap is {number:g}; expected a number from {SMALLEST_CAP:g} to {LARGEST_CAP:g}, "
            "or 0 or None for no cap"
        )
    return number
