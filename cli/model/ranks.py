"""Model of attention on several GPUs: time by ranks, from one GPU's rate and the links' rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cupy_flash.parallel.heads import chosen_head_ranks, why_not_head_ranks
from cupy_flash.parallel.score_blocks import Geometry, RingStep, ScoreBlock, find_ring_step
from cupy_flash.problem.arrays import ITEMSIZE
from cupy_flash.problem.mask import Mask

from ..cases.cases import Case

# Latency of an exchange in seconds. Between two H200 of one host (NVLink, NCCL 2.28), 1 MB takes
# 17 us, 16 MB 86 us and 256 MB 886 us; 14 us and 300 GB/s are within 25% of these.
_LATENCY = 14e-6
# Number of a ring's ranks that are modelled, evenly spread. In zigzag order all ranks have the same
# work, but receive different amounts.
_PLACES = 8


@dataclass(frozen=True)
class Links:
    """Bandwidth of one GPU's links, in bytes per second and direction.

    Attributes
    ----------
    within
        Bandwidth to GPUs of the same host.
    between
        Bandwidth to other hosts.
    host_gpus
        Number of GPUs per host.
    """

    within: float
    between: float
    host_gpus: int

    def seconds(self, amount: float, *, within: bool) -> float:
        """Return the seconds of an exchange with a rank of the same host, or of another one."""
        if not amount:
            return 0.0
        return _LATENCY + amount / (self.within if within else self.between)


class Estimate(NamedTuple):
    """Estimated time of a case on several ranks.

    Attributes
    ----------
    ranks, head_ranks
        Number of ranks, and of ranks over which heads are distributed.
    seconds
        Time of a call.
    compute, exchange
        Time of attention alone, and of exchanges that do not overlap with it.
    """

    ranks: int
    head_ranks: int
    seconds: float
    compute: float
    exchange: float


def counts(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, and `most`."""
    result = [1]
    while result[-1] * 2 <= most:
        result.append(result[-1] * 2)
    return result if result[-1] == most else [*result, most]


def estimate(
    case: Case, ranks: int, head_ranks: int | None, rate: float, memory: float, links: Links
) -> Estimate:
    """Estimate the time of a case on several ranks.

    Raise ValueError if head_ranks does not fit the ranks and heads.

    Parameters
    ----------
    case
        Dense case with as many queries as keys.
    head_ranks
        Number of ranks over which heads are distributed; None for the library's choice.
    rate
        Rate of attention on one GPU, in FLOP/s.
    memory
        Bandwidth of the GPU's device memory, in bytes per second.
    """
    shared = chosen_head_ranks(ranks, case.heads_kv) if head_ranks is None else head_ranks
    if reason := why_not_head_ranks(shared, ranks, case.heads_q, case.heads_kv):
        raise ValueError(f"head_ranks is {shared}, which {reason}")
    left, right = case.mods.window
    geometry = Geometry(
        case.seqlen_q, case.seqlen_k, ranks // shared, "zigzag", case.causal, left, right
    )
    ring = _Ring(case, geometry, shared, rate, memory, links)
    computed, waited = ring.seconds()
    exchanged = _heads(case, ranks, shared, links)
    return Estimate(ranks, shared, computed + waited + exchanged, computed, waited + exchanged)


@dataclass(frozen=True)
class _Ring:
    """Steps of ring attention. All ranks wait for the slowest one in each step."""

    case: Case
    geometry: Geometry
    shared: int
    rate: float
    memory: float
    links: Links

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of attention, and the seconds of additional waiting."""
        steps = range(self.geometry.ranks)
        computed = self._merging()
        waited = 0.0
        for step in steps:
            work = self._work(step)
            overlapped = self._keys(step + 1) + self._gradients(step - 1)
            computed += work
            waited += max(0.0, overlapped - work)
        return computed, waited + self._gradients(len(steps) - 1)

    def _ring_steps(self, step: int) -> list[RingStep]:
        """Return what the modelled ranks compute in a step; empty if the ring has no such step."""
        ranks = self.geometry.ranks
        if not 0 <= step < ranks:
            return []
        places = sorted({i * ranks // _PLACES for i in range(_PLACES)} | {ranks - 1})
        return [find_ring_step(self.geometry, place, (place - step) % ranks) for place in places]

    def _work(self, step: int) -> float:
        case, pairs = self.case, 0.0
        for result in self._ring_steps(step):
            pairs = max(
                pairs, sum(_pairs(self.geometry, p) for layer in result.layers for p in layer)
            )
        width = case.head_dim + case.head_dim_v
        if case.is_backward:
            width += 2 * case.head_dim + case.head_dim_v
        return 2.0 * case.batch * case.heads_q / self.shared * pairs * width / self.rate

    def _moved(self, step: int, itemsize: int) -> float:
        """Return the seconds in which a step's keys and values are sent from rank to rank."""
        keys = max((result.keys for result in self._ring_steps(step)), default=0)
        case = self.case
        heads = max(1, case.heads_kv // self.shared)
        amount = keys * case.batch * heads * (case.head_dim + case.head_dim_v) * itemsize
        # If there are several hosts, each step has a rank whose keys come from another host.
        ranks = self.geometry.ranks * self.shared
        return self.links.seconds(amount, within=ranks <= self.links.host_gpus)

    def _keys(self, step: int) -> float:
        return self._moved(step, ITEMSIZE[self.case.dtype])

    def _gradients(self, step: int) -> float:
        """Return the seconds to send a step's gradients, in float32 at least; step 0 sends none."""
        if not self.case.is_backward or step < 1:
            return 0.0
        return self._moved(step, max(4, ITEMSIZE[self.case.dtype]))

    def _merging(self) -> float:
        """Return the seconds to read all partial results and to write the merged one."""
        if self.case.is_backward:
            return 0.0
        ranks = self.geometry.ranks
        parts = sum(len(find_ring_step(self.geometry, 0, other).layers) for other in range(ranks))
        if parts < 2:
            return 0.0
        case = self.case
        rows = case.batch * case.seqlen_q / self.geometry.ranks * case.heads_q / self.shared
        return (parts + 1) * rows * case.head_dim_v * ITEMSIZE[case.dtype] / self.memory


def _pairs(geometry: Geometry, block: ScoreBlock) -> float:
    if not block.is_masked:
        return float(block.rows.length * block.keys.length)
    g = geometry
    return Mask(
        block.rows.length, block.keys.length, g.causal, block.q_offset, g.left, g.right
    ).pairs()


def _heads(case: Case, ranks: int, shared: int, links: Links) -> float:
    """Return the seconds of the exchanges that turn parts of the tokens into parts of the heads."""
    if shared == 1:
        return 0.0
    moved = case.batch * case.seqlen_q / ranks * _bytes_of_token(case, shared)
    within = min(shared, links.host_gpus) - 1
    parts = ((within, True), (shared - 1 - within, False))
    seconds = sum(
        links.seconds(moved * peers / shared, within=is_within) for peers, is_within in parts
    )
    # `seconds` has the bytes of both directions, but the latency of one only.
    return seconds + _LATENCY


def _bytes_of_token(case: Case, shared: int) -> float:
    """Return the bytes that are exchanged, in both directions, for a token of all heads."""
    itemsize = ITEMSIZE[case.dtype]
    wide = max(4, itemsize)
    # Queries are sent, and the output comes back. If KV heads are few, several ranks get each one.
    query_bytes = case.heads_q * (case.head_dim + case.head_dim_v) * itemsize
    key_elements = max(case.heads_kv, shared) * (case.head_dim + case.head_dim_v)
    if not case.is_backward:
        return query_bytes + key_elements * itemsize
    # In addition to the output, its gradient and the log-sum-exp are sent, and the gradients of q,
    # k and v come back. Gradients of KV heads that several ranks hold are partial sums.
    back = wide if shared > case.heads_kv else itemsize
    return 2 * query_bytes + case.heads_q * wide + key_elements * (itemsize + back)
