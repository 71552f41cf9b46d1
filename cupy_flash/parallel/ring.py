"""Ring attention: keys and values are sent to the ranks whose queries attend to them.

Queries stay on their rank (Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise
Transformers"). In step d, a rank attends to the keys of the d-th rank before it, while the keys of
the next step arrive. Keys come directly from their owner and are not passed on by neighbours. So a
rank receives only the keys that its queries attend to, and nothing from a rank without such keys.

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
from cupy_flash.parallel.score_blocks import Geometry, Span, Visit, visit


class Ring(NamedTuple):
    """Ranks that form a ring, in order, and this rank's index among them (`place`)."""

    group: Group
    ranks: Sequence[int]
    place: int

    def before(self, distance: int) -> int:
        """Return the index of the rank whose keys this rank attends to in step `distance`."""
        return (self.place - distance) % len(self.ranks)

    def behind(self, distance: int) -> int:
        """Return the index of the rank that attends to this rank's keys in step `distance`."""
        return (self.place + distance) % len(self.ranks)


# Elements sent per element of q from which on attention runs with one query tile per thread block
# instead of a persistent grid, to leave SMs to NCCL. On two H100, this saves 2 to 17% if all keys
# are sent, and costs 4% if 1/8 of a window is sent.
_LONG_EXCHANGE = 1 / 2


class _Guests(NamedTuple):
    """Keys and values of another rank, their transfer, and its number of elements (`size`)."""

    k: Any
    v: Any
    transfer: Transfer | None = None
    size: int = 0


def forward(
    q: Any, k: Any, v: Any, ring: Ring, geometry: Geometry, scores: Scores, sinks: Any | None
) -> tuple[Any, Any]:
    """Compute attention of this rank's queries over the keys of all ranks.

    Parameters
    ----------
    q, k, v
        Arrays of this rank, (batch, rows, heads, dim).
    geometry
        Sequence and mask, sharded over the ranks of the ring.
    sinks
        Sinks, (heads,); added once, in the final merge.

    Returns
    -------
    out, lse
        Output (batch, rows, heads, dim), and log-sum-exp (batch, heads, rows).
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
            out, lse = results.add(is_unsplit=covered == q.shape[1])
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
    """Return the gradients of this rank's q, k and v, in float32 (float64 for float64 inputs).

    Keys and values are sent as in `forward`. The gradients that a rank computes for the keys of
    another rank are sent back to their owner during the next step. The owner adds them in the order
    of steps.
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
    """Accumulator of the shape of an array, in float32 (float64 for a float64 array).

    If the first contribution covers all rows, it becomes the sum itself. Zeroing and adding would
    otherwise move as many bytes again as attention.
    """

    def __init__(self, like: Any) -> None:
        self._like = like
        self._value: Any = None

    @property
    def value(self) -> Any:
        """Sum of the contributions so far."""
        if self._value is None:
            dtype = "float64" if self._like.dtype == "float64" else "float32"
            self._value = array_module(self._like).zeros(self._like.shape, dtype)
        return self._value

    def add(self, rows: Span, part: Any) -> None:
        """Add `part` to some rows. The sum may keep `part`, so the caller must not reuse it."""
        if self._value is None and rows.length == self._like.shape[1]:
            self._value = part
        else:
            self.value[:, slice(*rows)] += part


def _invite(k: Any, v: Any, ring: Ring, geometry: Geometry, step: int) -> _Guests:
    """Start the exchange of keys and values for a step; after the last step there is none."""
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
    """Gradients of this rank's keys and values that another rank computed, and their transfer."""

    dk: Any
    dv: Any
    asked: Visit
    transfer: Transfer | None

    def add_to(self, dk: Any, dv: Any) -> None:
        """Wait for the gradients and add them to this rank's."""
        if self.transfer is not None:
            self.transfer.wait()
        for own, parts in ((dk, self.dk), (dv, self.dv)):
            rows = _rows(own, self.asked)
            for mine, part in zip(rows, _travelling(parts, self.asked), strict=True):
                mine += part


def _send_back(dk: Any, dv: Any, ring: Ring, geometry: Geometry, step: int) -> _Returning:
    """Start to send computed gradients of keys to their owner, and to receive this rank's own."""
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
    """Start and return a transfer; return None if there is nothing to exchange."""
    return ring.group.start(sends, receives) if sends or receives else None


def _room(like: Any, found: Visit) -> Any:
    """Return an uninitialized array for the rows that a ring step receives."""
    return array_module(like).empty((like.shape[0], found.keys, *like.shape[2:]), like.dtype)


def _rows(own: Any, asked: Visit) -> list[Any]:
    """Return views of the ranges of a shard that a ring step sends."""
    return [own[:, slice(*span)] for span in asked.ranges]


def _travelling(array: Any, found: Visit) -> list[Any]:
    """Return views of the same ranges in an array of concatenated rows that were sent."""
    parts, at = [], 0
    for span in found.ranges:
        parts.append(array[:, at : at + span.length])
        at += span.length
    return parts
