"""Keyword arguments for masks and score modifications, the same for all public functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np

from cupy_flash.arrays.cuda_interface import is_foreign_array
from cupy_flash.arrays.strided import kind_of
from cupy_flash.arrays.torch_arrays import resolved
from cupy_flash.errors import UnsupportedError
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.unknown_keywords import unexpected
from cupy_flash.problem.values import finite


class Modifications(TypedDict, total=False):
    """Masks and score modifications. Each may be left out or None. See docs/guide/masks.md.

    Let x = softmax_scale * q k^T, and p = i + q_offset the position of query i among the keys.
    Scores change in this order: softcap, score_mod, ALiBi, bias. Then pairs are masked, and then
    follows the softmax with the sink. All arrays are stored where q is. Arrays that are described
    as float32 are float64 if q is float64. Lengths may be lists, or of another integer dtype: each
    call then copies them.

    Attributes
    ----------
    window_size : (int or None, int or None)
        (left, right): query i attends only to the keys p - left <= j <= p + right. None or -1 is no
        bound on that side, and -1 alone is no window. A model's window of W tokens, which includes
        the query itself, is (W - 1, 0).
    softcap : float
        Cap from 1e-30 to 1e30: scores become softcap * tanh(x / softcap). 0 is no cap.
    alibi_slopes : float32 array, (heads_q,) or (batch, heads_q)
        Slopes of ALiBi: slope * abs(p - j) is subtracted from the scores. A list, a number for all
        heads, or another float dtype is converted in each call.
    sinks : array of float32 or q's dtype, (heads_q,)
        Additional score of each row, which is not scaled and has no value. It counts in the
        log-sum-exp. Lists, numbers and other float dtypes are converted as those of alibi_slopes.
    bias : array of float32 or q's dtype
        Summand of the scores; broadcasts to (batch, heads_q, seqlen_q, seqlen_k), where seqlen_k of
        a KV cache is its capacity. For packed sequences (heads_q or 1, total_q, max_seqlen_k).
    mask : bool array
        Mask of the same shapes as bias. True keeps a pair, and False masks it.
    prefix_lens : int32 array, (batch,)
        Number of leading keys of each sequence that all of its queries attend to, even keys that
        `causal` and `window_size` mask.
    tree_mask : uint64 array, (batch, seqlen_q)
        Mask of the keys at the positions of the queries: the last seqlen_q keys, unless q_offset
        says otherwise. Bit k of query i is whether it attends to the k-th of these keys. Queries
        attend to all keys before them. There may be at most 64 queries.
    score_mod : ScoreMod
        User function that changes scores.
    mask_mod : MaskMod
        User function that masks pairs.
    seqlens_k : int32 array, (batch,)
        Number of keys of each sequence of a dense batch. Keys after them are padding.
    dropout_p : float
        Probability of dropping a weight of the softmax, from 0 to below 1. It is rounded to a
        multiple of 1 / 256 from 1 / 256 to 255 / 256. The other weights are divided by the
        probability that they are kept. 0 is no dropout. Not for KV caches. See `dropout_mask`.
    dropout_seed : int, or int64 array, (2,)
        Seed of the weights to drop, or seed and offset in an array, which the kernels read when
        they run. A list of two integers or another integer dtype is converted in each call. The
        same seed and offset drop the same weights in every call, so a training step needs its own.
        It has no effect without a dropout_p.
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
    dropout_p: float | None
    dropout_seed: Any


class SequenceModifications(Modifications, total=False):
    """Modifications of packed sequences and of KV caches; see docs/guide/masks.md.

    Attributes
    ----------
    q_offset : int32 array, (batch,)
        Position of the first query of each sequence among its keys, at most 2^30 - 2^10 from 0. By
        default the last query of a sequence has the position of its last key.
    """

    q_offset: Any


class PackedModifications(SequenceModifications, total=False):
    """Modifications of packed sequences; see docs/guide/masks.md.

    Attributes
    ----------
    seqused_q : int32 array, (batch,)
        Number of queries of each sequence that are used. Rows after them attend to no key: their
        out is 0, and their lse is -inf, or the sink. Unless there is a q_offset, the last used
        query has the position of the last key.
    """

    seqused_q: Any


class CacheModifications(SequenceModifications, total=False):
    """Modifications of a call on a KV cache; see docs/guide/masks.md.

    Attributes
    ----------
    cache_leftpad : int32 array, (batch,)
        Number of leading rows of each sequence's cache that are padding, which no query attends to.
        cache_seqlens and positions include them. A NaN in a value of the padding can reach rows
        that attend to other keys of the same KV tile.
    """

    cache_leftpad: Any


# Names of the arguments that are arrays. Functions for dense batches declare `q_offset` themselves.
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
# Arguments of dropout: a number, and an array that only calls with dropout have.
DROPOUT_P, DROPOUT_SEED = DROPOUT = ("dropout_p", "dropout_seed")
# Names of the modifications that a function accepts, by the annotation of its keywords. Functions
# for packed sequences and KV caches have other arguments instead of seqlens_k, and a KV cache has
# no dropout.
_NOT_TAKEN: dict[type, tuple[str, ...]] = {
    Modifications: (),
    PackedModifications: ("seqlens_k",),
    CacheModifications: ("seqlens_k", *DROPOUT),
}
_TAKEN = {
    kind.__name__: [n for n in kind.__annotations__ if n not in not_taken]
    for kind, not_taken in _NOT_TAKEN.items()
}
# Arrays with a number for each head. The caller may pass a list, or one number for all heads.
VECTORS = ("alibi_slopes", "sinks")
MODS: dict[str, type] = {"score_mod": ScoreMod, "mask_mod": MaskMod}


class Window(NamedTuple):
    """Bounds of the distance from a query's position to a key's; None is no bound."""

    left: int | None = None
    right: int | None = None


def given(modifications: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modifications that are not None.

    Raises
    ------
    TypeError
        For an unknown argument, and for a function that is neither a ScoreMod nor a MaskMod.
    """
    for name in modifications:
        require_known(name)
    result = {name: value for name, value in modifications.items() if value is not None}
    for name in MODS.keys() & result.keys():
        require_mod(name, result[name])
    return result


def require_known(name: str, function: Callable[..., Any] | None = None) -> None:
    """Raise TypeError unless there is a keyword argument of this name.

    The error names the public `function`, by default the one that is being called.
    """
    if name not in NAMES:
        raise unexpected(name, _TAKEN, function)


def with_offsets(q_offset: Any, modifications: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments, with a `q_offset` that differs per sequence among the modifications.

    Functions for dense batches take a number, None, or an array or list of numbers as `q_offset`.
    """
    # Dynamo of PyTorch 2.11 does not tell the class of a dynamic integer.
    if q_offset is None or isinstance(q_offset, int):
        return q_offset, modifications
    is_array = isinstance(q_offset, (list, tuple)) or is_foreign_array(q_offset)
    if not getattr(q_offset, "ndim", is_array):
        return q_offset, modifications
    return None, {**modifications, "q_offset": q_offset}


def require_mod(name: str, value: Any) -> None:
    """Raise TypeError unless a value has the type of score_mod or mask_mod."""
    kind = MODS[name]
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} is {kind_of(value)}; expected a {kind.__name__}: {kind.__name__}(function)"
        )


def window_of(window_size: Any) -> Window:
    """Return the window that the argument window_size describes.

    Raises
    ------
    TypeError
        If the argument is neither a pair of integers or None nor -1.
    ValueError
        If a bound is below -1.
    """
    is_sequence = isinstance(window_size, (tuple, list))
    if not is_sequence and (number := _integer(window_size)) is not None:
        if number == -1:
            return Window()
        example = f": ({number - 1}, 0)" if number > 0 else ""
        raise TypeError(
            f"window_size is {number}, one integer; expected (left, right). A window of W "
            f"tokens that includes the query is (W - 1, 0){example}"
        )
    if not is_sequence or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; expected a pair (left, right)")
    left, right = window_size
    return Window(_bound(left, window_size), _bound(right, window_size))


def _bound(bound: Any, window_size: Any) -> int | None:
    # Fast path for usual bounds, which takes a third of the time.
    if bound is None or (bound.__class__ is int and 0 <= bound <= FURTHEST):
        return bound
    number = _integer(bound)
    if number is None:
        raise TypeError(f"window_size is {window_size!r}; expected integers, or None")
    if number < -1:
        raise ValueError(
            f"window_size is {window_size!r}; expected distances of 0 or more, or -1 or None "
            "for no bound"
        )
    # A bound beyond the longest sequence makes no difference, and would not fit int32.
    return None if number == -1 else min(number, FURTHEST)


def _integer(value: Any) -> int | None:
    """Return a value as an integer, or None if it is not an integer."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


# Probabilities of dropout are multiples of 1 / DROPOUT_STEPS.
DROPOUT_STEPS = 256
FURTHEST = 2**30
# For a cap within these limits, score / cap and the cap times a number near 1 are finite in
# float32.
SMALLEST_CAP, LARGEST_CAP = 1e-30, 1e30


def checked_softcap(softcap: Any) -> float | None:
    """Return softcap as a number, or None for 0, which means no cap.

    Raises
    ------
    TypeError
        If the argument is not a number.
    ValueError
        If the number is out of range.
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


def checked_dropout(dropout_p: Any) -> int | None:
    """Return the probability of dropout in steps of 1 / 256, or None for 0, which is no dropout.

    Raises
    ------
    TypeError
        If the argument is not a number.
    ValueError
        If the number is out of range.
    """
    number = finite(DROPOUT_P, resolved(DROPOUT_P, dropout_p))
    if not 0 <= number < 1:
        raise ValueError(f"dropout_p is {number:g}; expected a number from 0 to below 1")
    if number == 0:
        return None
    # A positive probability is never rounded to 0 or 1.
    return min(max(round(number * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1)


def require_seed(modifications: Mapping[str, Any]) -> Any:
    """Return dropout_seed of a call with dropout; raise ValueError if it is missing."""
    seed = modifications.get(DROPOUT_SEED)
    if seed is None:
        raise ValueError(
            "dropout_p is above 0, but dropout_seed is missing; pass an integer, another one in "
            "each training step, and the same one for the gradients"
        )
    return seed


def refuse_dropout(modifications: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the modifications without the arguments of dropout, which `where` does not support.

    Raises
    ------
    UnsupportedError
        If dropout_p is above 0.
    TypeError, ValueError
        See `checked_dropout`.
    """
    if not modifications or modifications.keys().isdisjoint(DROPOUT):
        return modifications
    dropout_p = modifications.get(DROPOUT_P)
    if dropout_p is not None and checked_dropout(dropout_p) is not None:
        raise unsupported_dropout(where)
    return {name: value for name, value in modifications.items() if name not in DROPOUT}


def unsupported_dropout(where: str) -> UnsupportedError:
    """Return the error for dropout in calls, described by `where`, that do not support it."""
    return UnsupportedError(
        f"dropout_p and dropout_seed are for training, and not supported by {where}; leave them out"
    )
