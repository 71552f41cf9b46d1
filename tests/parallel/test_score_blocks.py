"""Division of the score matrix into calls, and the keys that are sent for them; without ranks."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash.parallel.score_blocks import Geometry, ScoreBlock, find_ring_step
from cupy_flash.parallel.shards import chunks, halves, shard, shard_length
from cupy_flash.problem.mask import Mask


def positions(seqlen: int, g: Geometry, rank: int) -> np.ndarray:
    return shard(np.arange(seqlen), g.ranks, rank, axis=0, order=g.order)


def seen_by(block: ScoreBlock, g: Geometry) -> np.ndarray:
    """Return which pairs of a call are visible, by the documented meaning of its arguments."""
    if block.cu_seqlens is not None:
        seen = np.zeros((block.rows.length, block.keys.length), bool)
        for start, stop in zip(block.cu_seqlens, block.cu_seqlens[1:], strict=False):
            mask = Mask(stop - start, stop - start, g.causal, 0, g.left, g.right)
            hidden = mask.masked(0, stop - start, 0, stop - start)
            seen[start:stop, start:stop] = ~hidden
        return seen
    mask = Mask(block.rows.length, block.keys.length)
    if block.is_masked:
        mask = Mask(*mask[:2], g.causal, block.q_offset, g.left, g.right)
    return ~mask.masked(0, block.rows.length, 0, block.keys.length)


def expected(g: Geometry) -> np.ndarray:
    mask = Mask(g.seqlen_q, g.seqlen_k, g.causal, g.seqlen_k - g.seqlen_q, g.left, g.right)
    seen = ~mask.masked(0, g.seqlen_q, 0, g.seqlen_k)
    if g.cu_seqlens is not None:
        owner = np.searchsorted(g.cu_seqlens, np.arange(g.seqlen_q), side="right")
        seen &= owner[:, None] == owner
    return seen


def random_geometry(rng: np.random.Generator) -> Geometry:
    seqlen_q = int(rng.integers(1, 90))
    seqlen_k, cuts = int(rng.integers(1, 90)), None
    if rng.integers(2):
        seqlen_k = seqlen_q
        if rng.integers(2):
            inner = rng.integers(0, seqlen_q + 1, int(rng.integers(0, 6)))
            cuts = tuple(np.unique([0, *inner, seqlen_q]).tolist())
    sides = [None if rng.integers(2) else int(rng.integers(0, 40)) for _ in range(2)]
    order = str(rng.choice(["zigzag", "contiguous"]))
    ranks, causal = int(rng.integers(1, 7)), bool(rng.integers(2))
    by_distance = bool(rng.integers(2))
    return Geometry(seqlen_q, seqlen_k, ranks, order, causal, *sides, cuts, by_distance)


def test_score_blocks_see_each_pair_once_that_the_mask_shows(rng: np.random.Generator) -> None:
    for _ in range(300):
        g = random_geometry(rng)
        seen = np.zeros((g.seqlen_q, g.seqlen_k), int)
        for rank in range(g.ranks):
            rows = positions(g.seqlen_q, g, rank)
            for other in range(g.ranks):
                found = find_ring_step(g, rank, other)
                own = positions(g.seqlen_k, g, other)
                keys = np.concatenate([own[slice(*span)] for span in found.ranges] or [own[:0]])
                assert len(keys) == found.keys
                for layer in found.layers:
                    covered = np.concatenate([np.arange(*block.rows) for block in layer])
                    assert len(covered) == len(set(covered)), g
                    for block in layer:
                        at = np.ix_(rows[slice(*block.rows)], keys[slice(*block.keys)])
                        seen[at] += seen_by(block, g)
        np.testing.assert_array_equal(seen, expected(g), str(g))


def test_positions_of_score_blocks_are_those_of_their_tokens(rng: np.random.Generator) -> None:
    """Scores that depend on distances need right positions, even if all pairs are visible."""
    for _ in range(100):
        g = random_geometry(rng)._replace(by_distance=True, cu_seqlens=None)
        for rank in range(g.ranks):
            for other in range(g.ranks):
                found = find_ring_step(g, rank, other)
                rows = positions(g.seqlen_q, g, rank) + g.seqlen_k - g.seqlen_q
                own = positions(g.seqlen_k, g, other)
                keys = np.concatenate([own[slice(*span)] for span in found.ranges] or [own[:0]])
                for block in (block for layer in found.layers for block in layer):
                    i, j = rows[slice(*block.rows)], keys[slice(*block.keys)]
                    local = np.arange(len(i))[:, None] + block.q_offset - np.arange(len(j))
                    np.testing.assert_array_equal(local, i[:, None] - j)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_zigzag_gives_each_step_of_each_rank_the_same_causal_work(ranks: int) -> None:
    g = Geometry(2048, 2048, ranks, "zigzag", causal=True)
    for rank in range(ranks):
        for other in range(ranks):
            ((block,),) = find_ring_step(g, rank, other).layers
            assert block.is_masked == (rank == other), "one rectangle, or one causal call"
            area = block.rows.length * block.keys.length
            assert area * (0.5 if block.is_masked else 1) == 2048**2 / 2 / ranks**2


def test_of_keys_that_a_rank_does_not_see_none_travel() -> None:
    causal = Geometry(800, 800, 4, "zigzag", causal=True)
    assert [find_ring_step(causal, 1, other).keys for other in range(4)] == [100, 200, 200, 200]
    window = Geometry(800, 800, 4, "contiguous", causal=True, left=49, right=0)
    travelling = [
        [find_ring_step(window, rank, other).keys for other in range(4)] for rank in range(4)
    ]
    assert travelling == [[200, 0, 0, 0], [49, 200, 0, 0], [0, 49, 200, 0], [0, 0, 49, 200]]


def test_shards_are_all_tokens_once_and_differ_by_two_at_most(rng: np.random.Generator) -> None:
    for order in ("zigzag", "contiguous"):
        seqlen, ranks = int(rng.integers(0, 50)), int(rng.integers(1, 9))
        tokens = np.arange(seqlen)
        shards = [shard(tokens, ranks, rank, axis=0, order=order) for rank in range(ranks)]
        assert sorted(np.concatenate(shards).tolist()) == tokens.tolist()
        lengths = [shard_length(seqlen, ranks, rank, order=order) for rank in range(ranks)]
        assert lengths == list(map(len, shards))
        assert max(lengths) - min(lengths) <= 2


def test_shards_of_neighbours_are_a_shard_of_fewer_ranks() -> None:
    """Therefore, head-parallel neighbours can act as one rank of a ring."""
    for seqlen in (7, 64, 101):
        for rank in range(3):
            tokens = [halves(seqlen, 6, 2 * rank + i, "zigzag") for i in range(2)]
            together = sorted(t for pair in tokens for h in pair for t in range(h.start, h.stop))
            of_few = chunks(seqlen, 3, rank, "zigzag")
            assert together == [t for chunk in of_few for t in range(chunk.start, chunk.stop)]


def test_what_is_no_shard_is_refused() -> None:
    for arguments, text in (((3, 3), "rank is"), ((2, -1), "rank is"), ((0, 0), "ranks is 0")):
        with pytest.raises(ValueError, match=text):
            shard(np.arange(4), *arguments, axis=0)
    with pytest.raises(ValueError, match="order is 'striped'"):
        shard(np.arange(4), 2, 0, axis=0, order="striped")
