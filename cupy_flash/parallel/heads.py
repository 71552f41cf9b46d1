"""Head-parallel attention: an all-to-all exchanges tokens for heads, and back after attention.

Each rank holds some tokens of all heads and, during attention, all tokens of some heads (Jacobs et
al. 2023, "DeepSpeed Ulysses"). If there are more ranks than heads, only neighbouring ranks exchange
heads, and rings connect the ranks of different neighbourhoods that hold the same heads:

    rank            0 1     2 3     4 5     6 7     the ranks of a pair exchange heads
    index in pair   0 1     0 1     0 1     0 1
    ring of rank 0  0       2       4       6       ranks that hold the first half of the heads
    ring of rank 1    1       3       5       7     ranks that hold the second half

In zigzag order, the shards of neighbours together are one shard of the ring: chunks i, i + 1, and
the chunks at the same distance from the end.
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
    """Return why heads cannot be distributed over `head_ranks` ranks; None if they can."""
    if head_ranks < 1 or ranks % head_ranks:
        return f"does not divide the {ranks} ranks"
    if heads_q % head_ranks:
        return f"does not divide the {heads_q} query heads"
    if heads_kv % head_ranks and head_ranks % heads_kv:
        return f"neither divides the {heads_kv} key/value heads nor is a multiple of them"
    return None


def chosen_head_ranks(ranks: int, heads_kv: int) -> int:
    """Return the default number of ranks that heads are distributed over.

    This is the largest number for which each rank has whole KV heads. An exchange of heads moves
    only a rank's own tokens. A ring moves the keys of all ranks, and twice as many bytes again for
    their gradients. Two ranks form a ring: if heads_kv equals heads_q, both ways move the same
    number of bytes, but only the ring overlaps the exchange with attention.
    """
    return 1 if ranks == 2 else math.gcd(ranks, heads_kv)


class HeadExchange(NamedTuple):
    """Exchange of tokens for heads between neighbouring ranks.

    Attributes
    ----------
    group
        Group of all ranks.
    head_ranks
        Number of neighbouring ranks that exchange heads; with 1, nothing is exchanged.
    heads_q, heads_kv
        Numbers of heads of the whole problem.
    order
        Assignment of tokens to ranks, see `cupy_flash.parallel.shard`.
    """

    group: Group
    head_ranks: int
    heads_q: int
    heads_kv: int
    order: str

    @property
    def ring(self) -> Ring:
        """Ring of the ranks that hold the same heads as this rank."""
        index = self.group.rank % self.head_ranks
        ranks = range(index, self.group.size, self.head_ranks)
        return Ring(self.group, ranks, self.group.rank // self.head_ranks)

    @property
    def neighbours(self) -> range:
        """Ranks that exchange heads with this rank, including itself."""
        first = self.group.rank // self.head_ranks * self.head_ranks
        return range(first, first + self.head_ranks)

    @property
    def shares_key_heads(self) -> bool:
        """Whether several ranks hold the same KV heads."""
        return self.head_ranks > self.heads_kv

    def query_heads(self, rank: int) -> slice:
        """Return the query heads that a rank computes."""
        index, count = rank % self.head_ranks, self.heads_q // self.head_ranks
        return slice(index * count, (index + 1) * count)

    def key_heads(self, rank: int) -> slice:
        """Return the KV heads of a rank's query heads; several ranks may hold the same KV head."""
        query_heads, group_size = self.query_heads(rank), self.heads_q // self.heads_kv
        return slice(query_heads.start // group_size, -(-query_heads.stop // group_size))

    def to_heads(self, arrays: Sequence[tuple[Any, int, Callable[[int], slice]]]) -> list[Any]:
        """Exchange tokens for heads; return arrays of all neighbours' tokens and this rank's heads.

        Parameters
        ----------
        arrays
            Tuples of an array of this rank's tokens, (batch, tokens, heads, dim), the length of the
            whole sequence, and a function that returns the heads of a rank.
        """
        if self.head_ranks == 1:
            return [array for array, _, _ in arrays]
        rank, moves, result = self.group.rank, [], []
        for array, seqlen, heads_of in arrays:
            heads, xp = heads_of(rank), array_module(array)
            chunks = self._chunks_by_rank(seqlen)
            tokens = sum(chunk.length for pair in chunks.values() for chunk in pair)
            width = heads.stop - heads.start
            whole = xp.empty((array.shape[0], tokens, width, array.shape[3]), array.dtype)
            result.append(whole)
            for other, pair in chunks.items():
                for half, chunk in zip(self._halves(seqlen, rank), pair, strict=True):
                    source = array[:, _rows(half), heads_of(other)]
                    moves.append((other, source, whole[:, _rows(chunk)]))
        self._exchange(moves)
        return result

    def to_tokens(
        self, arrays: Sequence[tuple[Any, int, int, Callable[[int], slice]]]
    ) -> list[Any]:
        """Reverse `to_heads`: return arrays of this rank's tokens and all heads.

        Parameters
        ----------
        arrays
            Tuples of an array of this rank's heads, (batch, tokens, heads, dim), the length of the
            whole sequence, the number of all heads, and a function that returns the heads of a
            rank. Heads that several ranks hold are summed, in the order of ranks.
        """
        if self.head_ranks == 1:
            return [array for array, *_ in arrays]
        moves, parts = [], []
        for array, seqlen, _, heads_of in arrays:
            xp, own = array_module(array), self._halves(seqlen, self.group.rank)
            tokens = sum(half.length for half in own)
            for other, pair in self._chunks_by_rank(seqlen).items():
                width = heads_of(other).stop - heads_of(other).start
                part = xp.empty((array.shape[0], tokens, width, array.shape[3]), array.dtype)
                parts.append(part)
                for half, chunk in zip(own, pair, strict=True):
                    moves.append((other, array[:, _rows(chunk)], part[:, _rows(half)]))
        self._exchange(moves)
        result = []
        for _, _, heads, heads_of in arrays:
            array_parts, parts = parts[: self.head_ranks], parts[self.head_ranks :]
            result.append(self._joined(array_parts, heads, heads_of))
        return result

    def _exchange(self, moves: list[tuple[int, Any, Any]]) -> None:
        """Exchange arrays with neighbours, which include this rank.

        `moves` are tuples of a rank, the array that it receives, and the target of its own array.
        """
        rank = self.group.rank
        for other, source, target in moves:
            if other == rank:
                target[...] = source
        sends = [Message(source, other) for other, source, _ in moves if other != rank]
        receives = [Message(target, other) for other, _, target in moves if other != rank]
        self.group.start(sends, receives).wait()

    def _joined(self, parts: list[Any], heads: int, heads_of: Callable[[int], slice]) -> Any:
        """Return an array of all heads, assembled or summed from the parts of all neighbours."""
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

    def _chunks_by_rank(self, seqlen: int) -> dict[int, tuple[Chunk, Chunk]]:
        """Return the two chunks of each neighbour, with `offset` relative to the tokens of all."""
        by_rank = {rank: self._halves(seqlen, rank) for rank in self.neighbours}
        in_order = sorted(
            (half.start, i, rank, half.length)
            for rank, pair in by_rank.items()
            for i, half in enumerate(pair)
        )
        result: dict[int, list[Chunk]] = {rank: [] for rank in by_rank}
        offset = 0
        for start, _, rank, length in in_order:
            result[rank].append(Chunk(start, start + length, offset))
            offset += length
        return {rank: (pair[0], pair[1]) for rank, pair in result.items()}


def _rows(chunk: Chunk) -> slice:
    return slice(chunk.offset, chunk.offset + chunk.length)
