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
from cupy_flash.parallel.score_blocks import Geometry, RingStep, Span, find_ring_step


class Ring(NamedTuple):
    """Ranks that form a ring, in order, and this rank's index among them (`position`)."""

    group: Group
    ranks: Sequence[int]
    position: int

    def kv_source(self, distance: int) -> int:
        """Return the index of the rank whose keys this rank attends to in step `distance`."""
        return (self.position - distance) % len(self.ranks)

    def kv_target(self, distance: int) -> int:
        """Return the index of the rank that attends to this rank's keys in step `distance`."""
        return (self.position + distance) % len(self.ranks)


# Elements sent per element of q from which on attention runs with one query tile per thread block
# instead of a persistent grid, to leave SMs to NCCL. On two H100, this saves 2 to 17% if all keys
# are sent, and costs 4% if 1/8 of a window is sent.
_LONG_EXCHANGE = 1 / 2


class _RemoteKv(NamedTuple):
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
    ring_steps = [
        find_ring_step(geometry, ring.position, ring.kv_source(d)) for d in range(len(ring.ranks))
    ]
    results = Merger(
        (*q.shape[:3], v.shape[3]),
        q.dtype,
        sum(len(ring_step.layers) for ring_step in ring_steps),
        xp,
    )
    remote = _RemoteKv(k, v)
    for step, ring_step in enumerate(ring_steps):
        incoming = _start_receive(k, v, ring, geometry, step + 1)
        for layer in ring_step.layers:
            covered = sum(block.rows.length for block in layer)
            out, lse = results.add(is_unsplit=covered == q.shape[1])
            for block in layer:
                calls.attend(
                    *(q, remote.k, remote.v, block, geometry, scores, out, lse),
                    shares_gpu=incoming.size > 0 and incoming.size >= _LONG_EXCHANGE * q.size,
                )
        remote = _received(incoming)
    return results.result(sinks)


def backward(
    rows: Rows, k: Any, v: Any, ring: Ring, geometry: Geometry, scores: Scores
) -> tuple[Any, Any, Any]:
    """Return the gradients of this rank's q, k and v, in float32 (float64 for float64 inputs).

    Keys and values are sent as in `forward`. The gradients that a rank computes for the keys of
    another rank are sent back to their owner during the next step. The owner adds them in the order
    of steps.
    """
    dq, dk, dv = _Sum(rows.q), _Sum(k), _Sum(v)
    remote, returned = _RemoteKv(k, v), None
    for step in range(len(ring.ranks)):
        ring_step = find_ring_step(geometry, ring.position, ring.kv_source(step))
        incoming = _start_receive(k, v, ring, geometry, step + 1)
        is_local = step == 0
        kv_sums = (dk, dv) if is_local else (_Sum(remote.k), _Sum(remote.v))
        for layer in ring_step.layers:
            for block in layer:
                block_dq, *parts = calls.gradients(
                    rows, remote.k, remote.v, block, geometry, scores
                )
                dq.add(block.rows, block_dq)
                for total, part in zip(kv_sums, parts, strict=True):
                    total.add(block.keys, part)
        if returned is not None:
            returned.add_to(dk.value, dv.value)
        returned = None
        if not is_local:
            dk_sum, dv_sum = kv_sums
            returned = _send_back(dk_sum.value, dv_sum.value, ring, geometry, step)
        remote = _received(incoming)
    if returned is not None:
        returned.add_to(dk.value, dv.value)
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


def _start_receive(k: Any, v: Any, ring: Ring, geometry: Geometry, step: int) -> _RemoteKv:
    """Start the exchange of keys and values for a step; after the last step there is none."""
    if step >= len(ring.ranks):
        return _RemoteKv(None, None)
    source, target = ring.kv_source(step), ring.kv_target(step)
    incoming_step = find_ring_step(geometry, ring.position, source)
    outgoing_step = find_ring_step(geometry, target, ring.position)
    k_in, v_in = _allocate(k, incoming_step), _allocate(v, incoming_step)
    sends = [part for shard in (k, v) for part in _shard_views(shard, outgoing_step)]
    receives = [part for array in (k_in, v_in) for part in _sent_views(array, incoming_step)]
    size = max(sum(part.size for part in parts) for parts in (sends, receives))
    return _RemoteKv(k_in, v_in, _started(ring, sends, target, receives, source), size)


def _received(remote: _RemoteKv) -> _RemoteKv:
    if remote.transfer is not None:
        remote.transfer.wait()
    return _RemoteKv(remote.k, remote.v)


class _ReturnedGradients(NamedTuple):
    """Gradients of this rank's keys and values that another rank computed, and their transfer."""

    dk: Any
    dv: Any
    outgoing_step: RingStep
    transfer: Transfer | None

    def add_to(self, dk: Any, dv: Any) -> None:
        """Wait for the gradients and add them to this rank's."""
        if self.transfer is not None:
            self.transfer.wait()
        for shard, parts in ((dk, self.dk), (dv, self.dv)):
            rows = _shard_views(shard, self.outgoing_step)
            for local, part in zip(rows, _sent_views(parts, self.outgoing_step), strict=True):
                local += part


def _send_back(dk: Any, dv: Any, ring: Ring, geometry: Geometry, step: int) -> _ReturnedGradients:
    """Start to send computed gradients of keys to their owner, and to receive this rank's own."""
    owner, helper = ring.kv_source(step), ring.kv_target(step)
    ring_step = find_ring_step(geometry, ring.position, owner)
    outgoing_step = find_ring_step(geometry, helper, ring.position)
    dk_in, dv_in = _allocate(dk, outgoing_step), _allocate(dv, outgoing_step)
    sends = [part for array in (dk, dv) for part in _sent_views(array, ring_step)]
    receives = [part for array in (dk_in, dv_in) for part in _sent_views(array, outgoing_step)]
    transfer = _started(ring, sends, owner, receives, helper)
    return _ReturnedGradients(dk_in, dv_in, outgoing_step, transfer)


def _started(
    ring: Ring, sends: list[Any], target: int, receives: list[Any], source: int
) -> Transfer | None:
    """Start to exchange arrays with two ranks of the ring; return None if there are none."""
    if not sends and not receives:
        return None
    return ring.group.start(
        [Message(array, ring.ranks[target]) for array in sends],
        [Message(array, ring.ranks[source]) for array in receives],
    )


def _allocate(like: Any, ring_step: RingStep) -> Any:
    """Return an uninitialized array for the rows that a ring step receives."""
    return array_module(like).empty((like.shape[0], ring_step.keys, *like.shape[2:]), like.dtype)


def _shard_views(shard: Any, outgoing_step: RingStep) -> list[Any]:
    """Return views of the ranges of a shard that a ring step sends."""
    return [shard[:, slice(*span)] for span in outgoing_step.ranges]


def _sent_views(array: Any, ring_step: RingStep) -> list[Any]:
    """Return views of the same ranges in an array of concatenated rows that were sent."""
    parts, offset = [], 0
    for span in ring_step.ranges:
        parts.append(array[:, offset : offset + span.length])
        offset += span.length
    return parts
