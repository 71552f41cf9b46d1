"""Attention on several GPUs as a model: time by ranks, from one GPU's rate and the links' rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cupy_flash.parallel.heads import chosen_head_ranks, why_not_head_ranks
from cupy_flash.parallel.pieces import Geometry, Piece, Visit, visit
from cupy_flash.problem.arrays import ITEMSIZE
from cupy_flash.problem.mask import Mask

from ..cases.cases import Case

# Before the first byte of an exchange, in seconds. Between two H200 of one host by NVLink, NCCL
# 2.28: 1 MB in 17 us, 16 MB in 86 us, 256 MB in 886 us, which is 14 us and 300 GB/s within 25%.
_LATENCY = 14e-6
# Of the places of a ring so many are looked at, evenly spread: in zigzag order all have the same
# work, but not the same to receive.
_PLACES = 8


@dataclass(frozen=True)
class Links:
    """What connects GPUs: bytes per second of one, each way.

    Attributes
    ----------
    within
        Between GPUs of a host.
    between
        Between hosts.
    host_gpus
        GPUs of a host.
    """

    within: float
    between: float
    host_gpus: int

    def seconds(self, amount: float, *, within: bool) -> float:
        """Of an exchange with another rank, of this host or not."""
        if not amount:
            return 0.0
        return _LATENCY + amount / (self.within if within else self.between)


class Estimate(NamedTuple):
    """A case on so many ranks.

    Attributes
    ----------
    ranks, head_ranks
        All, and those that share out heads.
    seconds
        Of a call.
    compute, exchange
        Of attention alone, and of exchanges that nothing hides.
    """

    ranks: int
    head_ranks: int
    seconds: float
    compute: float
    exchange: float


def counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found if found[-1] == most else [*found, most]


def estimate(
    case: Case, ranks: int, head_ranks: int | None, rate: float, memory: float, links: Links
) -> Estimate:
    """How long a case takes on so many ranks.

    Parameters
    ----------
    case
        Dense, as many queries as keys.
    head_ranks
        Among how many ranks heads are shared out; None for the library's own choice.
    rate
        Of attention on one GPU, in FLOP/s.
    memory
        Bytes per second of its device memory.

    Raises
    ------
    ValueError
        For head_ranks that do not fit.
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
    """The steps of a ring; ranks keep step, so each takes as long as for the slowest of them."""

    case: Case
    geometry: Geometry
    shared: int
    rate: float
    memory: float
    links: Links

    def seconds(self) -> tuple[float, float]:
        """Of attention, and of what is waited for besides."""
        steps = range(self.geometry.ranks)
        computed = self._merging()
        waited = 0.0
        for step in steps:
            work = self._work(step)
            beside = self._keys(step + 1) + self._gradients(step - 1)
            computed += work
            waited += max(0.0, beside - work)
        return computed, waited + self._gradients(len(steps) - 1)

    def _visits(self, step: int) -> list[Visit]:
        """What some ranks compute in a step; none before the first and behind the last."""
        ranks = self.geometry.ranks
        if not 0 <= step < ranks:
            return []
        places = sorted({i * ranks // _PLACES for i in range(_PLACES)} | {ranks - 1})
        return [visit(self.geometry, place, (place - step) % ranks) for place in places]

    def _work(self, step: int) -> float:
        case, pairs = self.case, 0.0
        for found in self._visits(step):
            pairs = max(
                pairs, sum(_pairs(self.geometry, p) for layer in found.layers for p in layer)
            )
        width = case.head_dim + case.head_dim_v
        if case.is_backward:
            width += 2 * case.head_dim + case.head_dim_v
        return 2.0 * case.batch * case.heads_q / self.shared * pairs * width / self.rate

    def _moved(self, step: int, itemsize: int) -> float:
        """Seconds in which the keys of a step, and their values, go from rank to rank."""
        keys = max((found.keys for found in self._visits(step)), default=0)
        case = self.case
        heads = max(1, case.heads_kv // self.shared)
        amount = keys * case.batch * heads * (case.head_dim + case.head_dim_v) * itemsize
        # In each step there is a rank whose keys come from another host, if there are several.
        ranks = self.geometry.ranks * self.shared
        return self.links.seconds(amount, within=ranks <= self.links.host_gpus)

    def _keys(self, step: int) -> float:
        return self._moved(step, ITEMSIZE[self.case.dtype])

    def _gradients(self, step: int) -> float:
        """Of what a step adds to gradients, in float32 at least; a rank's own go nowhere."""
        if not self.case.is_backward or step < 1:
            return 0.0
        return self._moved(step, max(4, ITEMSIZE[self.case.dtype]))

    def _merging(self) -> float:
        """Of reading all partial results, and writing one."""
        if self.case.is_backward:
            return 0.0
        ranks = self.geometry.ranks
        parts = sum(len(visit(self.geometry, 0, other).layers) for other in range(ranks))
        if parts < 2:
            return 0.0
        case = self.case
        rows = case.batch * case.seqlen_q / self.geometry.ranks * case.heads_q / self.shared
        return (parts + 1) * rows * case.head_dim_v * ITEMSIZE[case.dtype] / self.memory


def _pairs(geometry: Geometry, piece: Piece) -> float:
    if not piece.is_masked:
        return float(piece.rows.length * piece.keys.length)
    g = geometry
    return Mask(
        piece.rows.length, piece.keys.length, g.causal, piece.q_offset, g.left, g.right
    ).pairs()


def _heads(case: Case, ranks: int, shared: int, links: Links) -> float:
    """Seconds in which tokens are exchanged for heads, and heads for tokens."""
    if shared == 1:
        return 0.0
    moved = case.batch * case.seqlen_q / ranks * _bytes_of_token(case, shared)
    within = min(shared, links.host_gpus) - 1
    parts = ((within, True), (shared - 1 - within, False))
    seconds = sum(
        links.seconds(moved * peers / shared, within=is_within) for peers, is_within in parts
    )
    # There and back.
    return seconds + _LATENCY


def _bytes_of_token(case: Case, shared: int) -> float:
    """Of what is exchanged of a token of all heads, there and back."""
    itemsize = ITEMSIZE[case.dtype]
    wide = max(4, itemsize)
    # Queries go, and the output comes back; heads that are few go to several ranks.
    of_queries = case.heads_q * (case.head_dim + case.head_dim_v) * itemsize
    of_keys = max(case.heads_kv, shared) * (case.head_dim + case.head_dim_v)
    if not case.is_backward:
        return of_queries + of_keys * itemsize
    # Besides the output, its gradient and the log-sum-exp go, and gradients of queries, keys and
    # values come back: of keys that several ranks have they are still to be added up.
    back = wide if shared > case.heads_kv else itemsize
    return 2 * of_queries + case.heads_q * wide + of_keys * (itemsize + back)
