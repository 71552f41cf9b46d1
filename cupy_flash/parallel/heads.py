"""Head-parallel attention: ranks exchange tokens for heads, and heads for tokens afterwards.

Each rank has some tokens of all heads, and for attention all tokens of some heads (Jacobs et al.
2023, "DeepSpeed Ulysses"). Where there are more ranks than heads, neighbours exchange heads among
themselves, and groups of neighbours are the places of a ring:

    rank         0 1     2 3     4 5     6 7        heads are exchanged within each pair
    of a pair    0 1     0 1     0 1     0 1
    ring of 0    0       2       4       6          tokens of pairs, half of the heads
    ring of 1      1       3       5       7

In zigzag order the shards of neighbours are together a shard of the longer ring: chunks i, i + 1
and those as far from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import array_module
from cupy_flash.parallel.exchange import Message
from cupy_flash.parallel.group import Group
from cupy_flash.parallel.ring import Ring
from cupy_flash.parallel.shards import Chunk, halves


def why_not_head_ranks(head_ranks: int, ranks: int, heads_q: int, heads_kv: int) -> str | None:
    """Why heads cannot be shared out among so many ranks; None if they can."""
    if head_ranks < 1 or ranks % head_ranks:
        return f"does not divide the {ranks} ranks"
    if heads_q % head_ranks:
        return f"does not divide the {heads_q} query heads"
    if heads_kv % head_ranks and head_ranks % heads_kv:
        return f"neither divides the {heads_kv} key/value heads nor is a multiple of them"
    return None


def chosen_head_ranks(ranks: int, heads_kv: int) -> int:
    """Among how many ranks heads are shared out unless the caller says.

    As many as have any whole: an exchange of heads moves a rank's own tokens, a ring those of all
    ranks, and in backward twice as many bytes again for gradients. Two ranks are a ring: with as
    many heads of keys as of queries each sends half of q, k, v and out of its tokens, or all of k
    and v, which is as much, and only the ring sends it while attention is computed.
    """
    return 1 if ranks == 2 else math.gcd(ranks, heads_kv)


class HeadExchange(NamedTuple):
    """Neighbouring ranks that exchange heads.

    Attributes
    ----------
    group
        All ranks.
    head_ranks
        How many exchange heads; 1 exchanges nothing.
    heads_q, heads_kv
        Of the whole problem.
    order
        Of the shards.
    """

    group: Group
    head_ranks: int
    heads_q: int
    heads_kv: int
    order: str

    @property
    def ring(self) -> Ring:
        """The ranks that have this one's heads."""
        of_heads = self.group.rank % self.head_ranks
        ranks = range(of_heads, self.group.size, self.head_ranks)
        return Ring(self.group, ranks, self.group.rank // self.head_ranks)

    @property
    def neighbours(self) -> range:
        """The ranks that exchange heads with this one, itself among them."""
        first = self.group.rank // self.head_ranks * self.head_ranks
        return range(first, first + self.head_ranks)

    @property
    def shares_key_heads(self) -> bool:
        """Whether several ranks have the same key/value heads."""
        return self.head_ranks > self.heads_kv

    def query_heads(self, rank: int) -> slice:
        """The query heads of a rank."""
        place, each = rank % self.head_ranks, self.heads_q // self.head_ranks
        return slice(place * each, (place + 1) * each)

    def key_heads(self, rank: int) -> slice:
        """The key/value heads that these read; several ranks have the same where there are few."""
        of_queries, shared_by = self.query_heads(rank), self.heads_q // self.heads_kv
        return slice(of_queries.start // shared_by, -(-of_queries.stop // shared_by))

    def to_heads(self, arrays: Sequence[tuple[Any, int, Callable[[int], slice]]]) -> list[Any]:
        """All tokens of this rank's heads.

        Parameters
        ----------
        arrays
            Of this rank's tokens, (batch, tokens, heads, dim); the whole sequence's length; and
            which heads a rank gets.
        """
        if self.head_ranks == 1:
            return [array for array, _, _ in arrays]
        rank, sends, receives, found = self.group.rank, [], [], []
        for array, seqlen, heads_of in arrays:
            heads, xp = heads_of(rank), array_module(array)
            places = self._places(seqlen)
            tokens = sum(chunk.length for pair in places.values() for chunk in pair)
            width = heads.stop - heads.start
            whole = xp.empty((array.shape[0], tokens, width, array.shape[3]), array.dtype)
            found.append(whole)
            for other, (low, high) in places.items():
                for half, place in zip(self._halves(seqlen, rank), (low, high), strict=True):
                    if other == rank:
                        whole[:, _rows(place)] = array[:, _rows(half), heads]
                    else:
                        sends.append(Message(array[:, _rows(half), heads_of(other)], other))
                        receives.append(Message(whole[:, _rows(place)], other))
        self.group.start(sends, receives).wait()
        return found

    def to_tokens(
        self, arrays: Sequence[tuple[Any, int, int, Callable[[int], slice]]]
    ) -> list[Any]:
        """All heads of this rank's tokens: what `to_heads` exchanged goes back.

        Parameters
        ----------
        arrays
            Of all tokens of this rank's heads, (batch, tokens, heads, dim); the whole sequence's
            length; how many heads there are in all; and which a rank has. What several ranks have
            is summed up, in their order.
        """
        if self.head_ranks == 1:
            return [array for array, *_ in arrays]
        rank, sends, receives, parts = self.group.rank, [], [], []
        for array, seqlen, _, heads_of in arrays:
            xp, places = array_module(array), self._places(seqlen)
            own = self._halves(seqlen, rank)
            tokens = sum(half.length for half in own)
            for other, pair in places.items():
                width = heads_of(other).stop - heads_of(other).start
                part = xp.empty((array.shape[0], tokens, width, array.shape[3]), array.dtype)
                parts.append(part)
                for half, place in zip(own, pair, strict=True):
                    if other == rank:
                        part[:, _rows(half)] = array[:, _rows(place)]
                    else:
                        sends.append(Message(array[:, _rows(place)], other))
                        receives.append(Message(part[:, _rows(half)], other))
        self.group.start(sends, receives).wait()
        found = []
        for _, _, heads, heads_of in arrays:
            of_array, parts = parts[: self.head_ranks], parts[self.head_ranks :]
            found.append(self._joined(of_array, heads, heads_of))
        return found

    def _joined(self, parts: list[Any], heads: int, heads_of: Callable[[int], slice]) -> Any:
        """All heads of some tokens, from the ranks that exchange heads."""
        first, xp = parts[0], array_module(parts[0])
        is_shared = sum(part.shape[2] for part in parts) > heads
        whole = xp.zeros((*first.shape[:2], heads, first.shape[3]), first.dtype)
        for other, part in zip(self.neighbours, parts, strict=True):
            if is_shared:
                whole[:, :, heads_of(other)] += part
            else:
                whole[:, :, heads_of(other)] = part
        return whole

    def _halves(self, seqlen: int, rank: int) -> tuple[Chunk, Chunk]:
        return halves(seqlen, self.group.size, rank, self.order)

    def _places(self, seqlen: int) -> dict[int, tuple[Chunk, Chunk]]:
        """Where the two chunks of each neighbour lie among the tokens of all of them."""
        of_ranks = {rank: self._halves(seqlen, rank) for rank in self.neighbours}
        in_order = sorted(
            (half.start, i, rank, half.length)
            for rank, pair in of_ranks.items()
            for i, half in enumerate(pair)
        )
        found: dict[int, list[Chunk]] = {rank: [] for rank in of_ranks}
        at = 0
        for start, _, rank, length in in_order:
            found[rank].append(Chunk(start, start + length, at))
            at += length
        return {rank: (pair[0], pair[1]) for rank, pair in found.items()}


def _rows(chunk: Chunk) -> slice:
    return slice(chunk.at, chunk.at + chunk.length)
