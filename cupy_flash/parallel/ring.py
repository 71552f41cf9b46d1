"""Ring attention: each rank's keys and values visit the ranks whose queries see them.

Queries stay where they are (Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise
Transformers"). In step d a rank attends to the keys of the d-th rank before it, while those of the
next step arrive. They come straight from their owner, not from a neighbour who passes them on: so a
rank gets only the rows that its queries see, and one that needs none of another's hears nothing.

    step          0             1             2
    rank 0   keys of 0     keys of 2     keys of 1
    rank 1   keys of 1     keys of 0     keys of 2
    rank 2   keys of 2     keys of 1     keys of 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import array_module
from cupy_flash.parallel import calls
from cupy_flash.parallel.calls import Rows, Scores
from cupy_flash.parallel.exchange import Message, Transfer
from cupy_flash.parallel.group import Group
from cupy_flash.parallel.merger import Merger
from cupy_flash.parallel.pieces import Geometry, Span, Visit, visit


class Ring(NamedTuple):
    """Ranks of a group, in order, and this one's place among them."""

    group: Group
    ranks: Sequence[int]
    place: int

    def before(self, distance: int) -> int:
        """The place of the rank whose keys come in a step."""
        return (self.place - distance) % len(self.ranks)

    def behind(self, distance: int) -> int:
        """The place of the rank that this one's keys go to."""
        return (self.place + distance) % len(self.ranks)


# From so many elements on for each of q, keys and values that travel take longer than what is lost
# by thread blocks that have a tile each. On two H100, with a window of 512 to 8192 keys of which
# 1/32 to 1/2 travel, these take 7, 4 (1/8), 2 (1/4) and -1% longer; with all keys 2 to 17% less.
_LONG_EXCHANGE = 1 / 2


class _Guests(NamedTuple):
    """Keys and values of another rank, how they come, and how many elements travel meanwhile."""

    k: Any
    v: Any
    transfer: Transfer | None = None
    size: int = 0


def forward(
    q: Any, k: Any, v: Any, ring: Ring, geometry: Geometry, scores: Scores, sinks: Any | None
) -> tuple[Any, Any]:
    """Attention of this rank's queries to the keys of all.

    Parameters
    ----------
    q, k, v
        This rank's, (batch, rows, heads, dim).
    geometry
        Whose ranks are those of the ring.
    sinks
        (heads,); counted once, when results are merged.

    Returns
    -------
    out, lse
        (batch, rows, heads, dim), and (batch, heads, rows).
    """
    xp = array_module(q)
    visits = [visit(geometry, ring.place, ring.before(d)) for d in range(len(ring.ranks))]
    results = Merger(
        (*q.shape[:3], v.shape[3]), q.dtype, sum(len(found.layers) for found in visits), xp
    )
    guests = _Guests(k, v)
    for step, found in enumerate(visits):
        coming = _invite(k, v, ring, geometry, step + 1)
        for layer in found.layers:
            covered = sum(piece.rows.length for piece in layer)
            out, lse = results.add(is_whole=covered == q.shape[1])
            for piece in layer:
                calls.attend(
                    *(q, guests.k, guests.v, piece, geometry, scores, out, lse),
                    shares_gpu=coming.size > 0 and coming.size >= _LONG_EXCHANGE * q.size,
                )
        guests = _arrived(coming)
    return results.result(sinks)


def backward(
    of: Rows, k: Any, v: Any, ring: Ring, geometry: Geometry, scores: Scores
) -> tuple[Any, Any, Any]:
    """Gradients of this rank's queries, keys and values, in float32 (of float64 in float64).

    Keys and values visit as in `forward`; what a rank adds to their gradients goes back to the
    owner while the next step is computed, and is summed up there in the order of steps.
    """
    dq, dk, dv = _Sum(of.q), _Sum(k), _Sum(v)
    guests, returning = _Guests(k, v), None
    for step in range(len(ring.ranks)):
        found = visit(geometry, ring.place, ring.before(step))
        coming = _invite(k, v, ring, geometry, step + 1)
        is_own = step == 0
        of_keys = (dk, dv) if is_own else (_Sum(guests.k), _Sum(guests.v))
        for layer in found.layers:
            for piece in layer:
                parts = calls.gradients(of, guests.k, guests.v, piece, geometry, scores)
                dq.add(piece.rows, parts[0])
                for total, part in zip(of_keys, parts[1:], strict=True):
                    total.add(piece.keys, part)
        if returning is not None:
            returning.add_to(dk.value, dv.value)
        returning = None
        if not is_own:
            of_k, of_v = of_keys
            returning = _send_back(of_k.value, of_v.value, ring, geometry, step)
        guests = _arrived(coming)
    if returning is not None:
        returning.add_to(dk.value, dv.value)
    return dq.value, dk.value, dv.value


class _Sum:
    """A sum of parts of an array like another, in float32 (of float64 in float64).

    The first part becomes the sum where it is of all rows: else clearing and adding would read and
    write as much again as attention itself does.
    """

    def __init__(self, like: Any) -> None:
        self._like = like
        self._value: Any = None

    @property
    def value(self) -> Any:
        """What was added so far."""
        if self._value is None:
            dtype = "float64" if self._like.dtype == "float64" else "float32"
            self._value = array_module(self._like).zeros(self._like.shape, dtype)
        return self._value

    def add(self, rows: Span, part: Any) -> None:
        """Add to some rows; the part is then this sum's own."""
        if self._value is None and rows.length == self._like.shape[1]:
            self._value = part
        else:
            self.value[:, slice(*rows)] += part


def _invite(k: Any, v: Any, ring: Ring, geometry: Geometry, step: int) -> _Guests:
    """Start the exchange of a step's keys and values; behind the last step nothing comes."""
    if step >= len(ring.ranks):
        return _Guests(None, None)
    giver, taker = ring.before(step), ring.behind(step)
    needed, asked = visit(geometry, ring.place, giver), visit(geometry, taker, ring.place)
    k_in, v_in = _room(k, needed), _room(v, needed)
    sends = [Message(part, ring.ranks[taker]) for own in (k, v) for part in _rows(own, asked)]
    receives = [
        Message(part, ring.ranks[giver])
        for coming in (k_in, v_in)
        for part in _travelling(coming, needed)
    ]
    size = max(sum(message.array.size for message in way) for way in (sends, receives))
    return _Guests(k_in, v_in, _started(ring, sends, receives), size)


def _arrived(guests: _Guests) -> _Guests:
    if guests.transfer is not None:
        guests.transfer.wait()
    return _Guests(guests.k, guests.v)


class _Returning(NamedTuple):
    """What another rank adds to gradients of this one's keys and values."""

    dk: Any
    dv: Any
    asked: Visit
    transfer: Transfer | None

    def add_to(self, dk: Any, dv: Any) -> None:
        """Add it once it is here."""
        if self.transfer is not None:
            self.transfer.wait()
        for own, parts in ((dk, self.dk), (dv, self.dv)):
            rows = _rows(own, self.asked)
            for mine, part in zip(rows, _travelling(parts, self.asked), strict=True):
                mine += part


def _send_back(dk: Any, dv: Any, ring: Ring, geometry: Geometry, step: int) -> _Returning:
    """Start the exchange of what this rank adds to its guests' gradients."""
    owner, helper = ring.before(step), ring.behind(step)
    found, asked = visit(geometry, ring.place, owner), visit(geometry, helper, ring.place)
    dk_in, dv_in = _room(dk, asked), _room(dv, asked)
    sends = [
        Message(part, ring.ranks[owner]) for given in (dk, dv) for part in _travelling(given, found)
    ]
    receives = [
        Message(part, ring.ranks[helper])
        for coming in (dk_in, dv_in)
        for part in _travelling(coming, asked)
    ]
    return _Returning(dk_in, dv_in, asked, _started(ring, sends, receives))


def _started(ring: Ring, sends: list[Message], receives: list[Message]) -> Transfer | None:
    """The transfer, or None where there is nothing to exchange."""
    return ring.group.start(sends, receives) if sends or receives else None


def _room(like: Any, found: Visit) -> Any:
    """An array for the rows of another rank's that travel."""
    return array_module(like).empty((like.shape[0], found.keys, *like.shape[2:]), like.dtype)


def _rows(own: Any, asked: Visit) -> list[Any]:
    """The rows of an owner's array that a visit is about."""
    return [own[:, slice(*span)] for span in asked.ranges]


def _travelling(array: Any, found: Visit) -> list[Any]:
    """The same rows in an array of those that travel."""
    parts, at = [], 0
    for span in found.ranges:
        parts.append(array[:, at : at + span.length])
        at += span.length
    return parts
