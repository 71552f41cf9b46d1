"""Sharding of a sequence: the tokens that each rank holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import normalize
from cupy_flash.arrays.strided import array_module, is_cupy, kind_of, require_native
from cupy_flash.parallel.exchange import Message
from cupy_flash.parallel.group import Group, run_collective
from cupy_flash.problem.values import count, integer

ORDERS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Consecutive tokens of a rank.

    Attributes
    ----------
    start, stop
        Range [start, stop) in the whole sequence.
    offset
        Index of the first of these tokens in the rank's shard.
    """

    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def halves(seqlen: int, ranks: int, rank: int, order: str) -> tuple[Chunk, Chunk]:
    """Return the two consecutive chunks that form a shard; either may be empty.

    In zigzag order, the sequence is cut into 2 * ranks chunks whose lengths differ by at most one.
    Rank r has the r-th chunk from the front and the r-th from the end, so that all ranks have the
    same work under a causal mask. In contiguous order, the second chunk is always empty.
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
    """Return the chunks of a shard that are not empty, with adjacent `halves` joined into one."""
    low, high = halves(seqlen, ranks, rank, order)
    if low.stop == high.start:
        low, high = Chunk(low.start, high.stop, 0), Chunk(high.stop, high.stop, 0)
    return tuple(chunk for chunk in (low, high) if chunk.length)


def shard_length(seqlen: int, ranks: int, rank: int, order: str = "zigzag") -> int:
    """Return the number of tokens of a sequence that a rank holds.

    Parameters
    ----------
    seqlen, ranks, rank, order
        Number of tokens of the whole sequence, and arguments of `shard`.

    Examples
    --------
    >>> from cupy_flash import parallel
    >>> [parallel.shard_length(10, ranks=4, rank=rank) for rank in range(4)]
    [3, 2, 2, 3]
    """
    _require(seqlen, ranks, rank, order)
    return sum(half.length for half in halves(seqlen, ranks, rank, order))


def shard(array: Any, ranks: int, rank: int, *, axis: int = 1, order: str = "zigzag") -> Any:
    """Return a rank's shard of an array that holds a whole sequence.

    Parameters
    ----------
    array : array
        NumPy or CuPy array of the whole sequence; not a masked array.
    ranks, rank : int
        Number of ranks, and index of the rank whose shard is returned.
    axis : int
        Axis of the tokens: 1 for (batch, seqlen, heads, dim), 0 for packed (total, heads, dim), 2
        for a log-sum-exp.
    order : {"zigzag", "contiguous"}
        Assignment of tokens. "zigzag" cuts the sequence into 2 * ranks chunks and gives rank r the
        r-th from the front and the r-th from the end, so that all ranks have the same work under a
        causal mask. "contiguous" gives each rank consecutive tokens.

    Returns
    -------
    array
        New contiguous array of `shard_length` tokens.

    Raises
    ------
    TypeError
        If an argument has a wrong type.
    ValueError
        If the rank, axis or order does not exist.

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
    result = array_module(array).empty(shape, array.dtype)
    for half in halves(seqlen, ranks, rank, order):
        place = _rows(axis, half.offset, half.offset + half.length)
        result[place] = array[_rows(axis, half.start, half.stop)]
    return result


def gather(own: Any, group: Group, *, seqlen: int, axis: int = 1, order: str = "zigzag") -> Any:
    """Return the whole array on every rank, assembled from the shards of all ranks.

    Parameters
    ----------
    own : array
        This rank's shard, of numbers or bools.
    group : Group
        Group of all ranks; each of them must call this function.
    seqlen : int
        Number of tokens of the whole sequence.
    axis, order
        Arguments of `shard`.

    Returns
    -------
    array
        New array of the whole sequence.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong, or the shard does not have the size of this rank's shard.
    ParallelError
        If another rank raises, calls with other arguments, or does not answer in time.
    """

    def planned() -> tuple[tuple[Any, ...], tuple[int, int]]:
        group.require_carried("own", own)
        require_numbers("own", own)
        tokens, dim = count("seqlen", seqlen), placed_axis(own, axis)
        length = shard_length(tokens, group.size, group.rank, order)
        if own.shape[dim] != length:
            raise ValueError(
                f"own has {own.shape[dim]} tokens on rank {group.rank} of {group.size}; expected "
                f"{length} for a sequence of {tokens} in {order} order"
            )
        others = (*own.shape[:dim], *own.shape[dim + 1 :])
        return ("gather", own.dtype.name, others, tokens, dim, order), (tokens, dim)

    with run_collective(group, planned) as (tokens, dim):
        xp = array_module(own)
        whole = xp.empty((*own.shape[:dim], tokens, *own.shape[dim + 1 :]), own.dtype)
        sends, receives = [], []
        for rank in range(group.size):
            for half in halves(tokens, group.size, rank, order):
                place = whole[_rows(dim, half.start, half.stop)]
                if rank != group.rank:
                    receives.append(Message(place, rank))
                    continue
                # One contiguous copy serves all ranks that receive it.
                part = xp.ascontiguousarray(own[_rows(dim, half.offset, half.offset + half.length)])
                place[...] = part
                sends += [Message(part, other) for other in range(group.size) if other != rank]
        group.start(sends, receives).wait()
        return whole


def _rows(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(start, stop))


def require_array(name: str, array: Any) -> None:
    """Raise TypeError unless `array` is a NumPy or CuPy array, and not a masked array."""
    if not (isinstance(array, np.ndarray) or is_cupy(array)):
        raise TypeError(f"{name} is {kind_of(array)}; expected a NumPy or CuPy array")
    normalize(name, array)


def require_numbers(name: str, array: Any) -> None:
    """Raise TypeError unless the dtype is numeric or bool, in this machine's byte order."""
    # isbuiltin is 2 for the dtypes that ml_dtypes registers with NumPy, such as bfloat16.
    if array.dtype.kind not in "biufc" and array.dtype.isbuiltin != 2:
        raise TypeError(f"{name} has dtype {array.dtype}; expected a numeric dtype, or bool")
    require_native(name, array)


def placed_axis(array: Any, axis: int) -> int:
    """Return an axis as a non-negative number; raise ValueError if the array does not have it."""
    number = integer("axis", axis)
    if not -array.ndim <= number < array.ndim:
        raise ValueError(f"axis is {number}; expected one of the {array.ndim} axes")
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
    """Raise ValueError unless 0 <= rank < ranks."""
    if integer("ranks", ranks) < 1:
        raise ValueError(f"ranks is {ranks}; expected at least 1")
    if not 0 <= integer("rank", rank) < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; expected 0 to {ranks - 1}")
