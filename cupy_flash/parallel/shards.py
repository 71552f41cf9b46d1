"""Which tokens of a sequence each rank holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import normalize
from cupy_flash.arrays.strided import array_module, is_cupy, kind_of, require_native
from cupy_flash.parallel.exchange import Message
from cupy_flash.parallel.group import Group, together
from cupy_flash.problem.values import count, integer

ORDERS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Neighbouring tokens of a rank.

    Attributes
    ----------
    start, stop
        Positions in the whole sequence.
    at
        Where the first of them lies in the rank's shard.
    """

    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


def halves(seqlen: int, ranks: int, rank: int, order: str) -> tuple[Chunk, Chunk]:
    """The two chunks that a shard consists of, one behind the other; either may be empty.

    In zigzag order the sequence is cut into 2 * ranks chunks of lengths that differ by one at most,
    and rank r has the r-th and the r-th from the end: then every rank has the same share of a
    causal mask. In contiguous order the second chunk is always empty.
    """
    if order == "contiguous":
        start, stop = rank * seqlen // ranks, (rank + 1) * seqlen // ranks
        return Chunk(start, stop, 0), Chunk(stop, stop, stop - start)
    cuts = 2 * ranks
    low, low_end, high, high_end = (
        i * seqlen // cuts for i in (rank, rank + 1, cuts - 1 - rank, cuts - rank)
    )
    return Chunk(low, low_end, 0), Chunk(high, high_end, low_end - low)


def chunks(seqlen: int, ranks: int, rank: int, order: str) -> tuple[Chunk, ...]:
    """The chunks of a shard as few and as long as they can be: `halves` that touch are one."""
    low, high = halves(seqlen, ranks, rank, order)
    if low.stop == high.start:
        low, high = Chunk(low.start, high.stop, 0), Chunk(high.stop, high.stop, 0)
    return tuple(chunk for chunk in (low, high) if chunk.length)


def shard_length(seqlen: int, ranks: int, rank: int, order: str = "zigzag") -> int:
    """How many tokens of a sequence a rank holds.

    Parameters
    ----------
    seqlen, ranks, rank, order
        As of `shard`.
    """
    _require(seqlen, ranks, rank, order)
    return sum(half.length for half in halves(seqlen, ranks, rank, order))


def shard(array: Any, ranks: int, rank: int, *, axis: int = 1, order: str = "zigzag") -> Any:
    """A rank's part of an array that holds a whole sequence.

    Parameters
    ----------
    array : array
        Of NumPy or CuPy, not masked.
    ranks, rank : int
        How many ranks there are, and which one's part is wanted.
    axis : int
        Of the tokens: 1 of (batch, seqlen, heads, dim), 0 of packed (total, heads, dim), 2 of a
        log-sum-exp.
    order : {"zigzag", "contiguous"}
        "zigzag" cuts the sequence into 2 * ranks chunks and gives rank r the r-th and the r-th from
        the end, so that all have the same share of a causal mask. "contiguous" gives each rank
        neighbouring tokens.

    Returns
    -------
    array
        A new one, contiguous, of `shard_length` tokens.

    Raises
    ------
    TypeError
        For what is no such array, or no integer.
    ValueError
        For a rank or an axis that there is not, or an unknown order.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import parallel
    >>> [parallel.shard(np.arange(8), 2, rank, axis=0).tolist() for rank in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    require_array("array", array)
    axis = placed_axis(array, axis)
    seqlen = array.shape[axis]
    own = shard_length(seqlen, ranks, rank, order)
    shape = (*array.shape[:axis], own, *array.shape[axis + 1 :])
    found = array_module(array).empty(shape, array.dtype)
    for half in halves(seqlen, ranks, rank, order):
        place = _rows(axis, half.at, half.at + half.length)
        found[place] = array[_rows(axis, half.start, half.stop)]
    return found


def gather(own: Any, group: Group, *, seqlen: int, axis: int = 1, order: str = "zigzag") -> Any:
    """The whole of an array on every rank, from its shards.

    Parameters
    ----------
    own : array
        This rank's shard, of numbers or bools.
    group : Group
        The ranks, each of which calls it.
    seqlen : int
        Tokens of the whole.
    axis, order
        As of `shard`.

    Returns
    -------
    array
        A new one.

    Raises
    ------
    TypeError, ValueError
        For a shard that is not of this rank.
    ParallelError
        If another rank raises, calls with other arguments, or does not answer in time.
    """

    def planned() -> tuple[tuple[Any, ...], tuple[int, int]]:
        group.require_carried("own", own)
        require_numbers("own", own)
        tokens, at = count("seqlen", seqlen), placed_axis(own, axis)
        length = shard_length(tokens, group.size, group.rank, order)
        if own.shape[at] != length:
            raise ValueError(
                f"own has {own.shape[at]} tokens on rank {group.rank} of {group.size}; expected "
                f"{length} of a sequence of {tokens} in {order} order"
            )
        others = (*own.shape[:at], *own.shape[at + 1 :])
        return ("gather", own.dtype.name, others, tokens, at, order), (tokens, at)

    with together(group, planned) as (tokens, at):
        xp = array_module(own)
        whole = xp.empty((*own.shape[:at], tokens, *own.shape[at + 1 :]), own.dtype)
        sends, receives = [], []
        for rank in range(group.size):
            for half in halves(tokens, group.size, rank, order):
                place = whole[_rows(at, half.start, half.stop)]
                if rank != group.rank:
                    receives.append(Message(place, rank))
                    continue
                # Once for all that it goes to.
                part = xp.ascontiguousarray(own[_rows(at, half.at, half.at + half.length)])
                place[...] = part
                sends += [Message(part, other) for other in range(group.size) if other != rank]
        group.start(sends, receives).wait()
        return whole


def _rows(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, stop))


def require_array(name: str, array: Any) -> None:
    """Raise TypeError for what is no array of NumPy or CuPy, or a masked one."""
    if not (isinstance(array, np.ndarray) or is_cupy(array)):
        raise TypeError(f"{name} is {kind_of(array)}; expected an array of NumPy or CuPy")
    normalize(name, array)


def require_numbers(name: str, array: Any) -> None:
    """Raise TypeError unless the dtype is one of numbers, or bool, as this machine has them."""
    # Those of ml_dtypes, as bfloat16, NumPy knows as registered ones.
    if array.dtype.kind not in "biufc" and array.dtype.isbuiltin != 2:
        raise TypeError(f"{name} has dtype {array.dtype}; expected one of numbers, or bool")
    require_native(name, array)


def placed_axis(array: Any, axis: int) -> int:
    """An axis counted from the first; ValueError for one that the array has not."""
    number = integer("axis", axis)
    if not -array.ndim <= number < array.ndim:
        raise ValueError(f"axis is {number}; expected one of the {array.ndim} axes that there are")
    return number % array.ndim


def require_order(order: str) -> None:
    """Raise ValueError for an unknown order."""
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; expected one of {', '.join(ORDERS)}")


def _require(seqlen: int, ranks: int, rank: int, order: str) -> None:
    require_order(order)
    count("seqlen", seqlen)
    require_rank(ranks, rank)


def require_rank(ranks: int, rank: int) -> None:
    """Raise ValueError for a rank that there is not."""
    if integer("ranks", ranks) < 1:
        raise ValueError(f"ranks is {ranks}; expected at least 1")
    if not 0 <= integer("rank", rank) < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; expected 0 to {ranks - 1}")
