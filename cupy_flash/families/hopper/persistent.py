"""A persistent grid: a thread block for each SM, which works through its share of the tiles."""

from __future__ import annotations

import functools

import numpy as np

from cupy_flash.families.contract import ceil_div
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem

# Heads beyond which a section's keys and values come from device memory too often: each head that
# is worked on at the same time costs a query tile's share of the bandwidth.
_MOST_HEADS = 48
# What balance is given up for a smaller section, whose keys and values more certainly stay in L2.
_NEAR_BEST = 0.02
# Query tiles that a balance is computed from; more would only repeat the pattern.
_MOST_TILES = 2**15
# Besides its blocks of keys, a query tile costs about this many blocks.
_TILE_COST = 1


def section_heads(problem: Problem, *, blocks: int, Br: int, Bc: int) -> int:
    """Query heads whose query tiles are interleaved (see `kernels_cu/grid/schedule.cuh`).

    The fewest with which the thread blocks' shares are nearly as even as they can be: the fewer,
    the more a head's keys and values are read by thread blocks that run at the same time. Without
    a causal mask all shares are even, and heads that share keys and values go together.

    Rows and keys count as multiples of a tile's, so that few lengths differ.

    Parameters
    ----------
    problem
        What is computed.
    blocks
        Thread blocks of the grid.
    Br, Bc
        Query and key rows of a tile.
    """
    group = problem.heads_q // problem.heads_kv
    tiles = ceil_div(problem.seqlen_q, Br)
    heads = min(problem.batch * problem.heads_q, max(1, _MOST_TILES // max(1, tiles)))
    if not problem.causal or tiles * heads <= blocks or tiles > _MOST_TILES:
        return group
    rounded = problem.mask.rounded(Br, Bc)
    return _most_even_section(rounded, heads, blocks, Br, Bc)


# Takes 0.2 to 3 ms, and each layer of a model asks.
@functools.lru_cache(maxsize=4096)
def _most_even_section(mask: Mask, heads: int, blocks: int, Br: int, Bc: int) -> int:
    """Return the fewest heads with which the thread blocks' work is nearly the most even."""
    cost = _tile_costs(mask, Br, Bc)
    candidates = range(1, min(heads, _MOST_HEADS) + 1)
    evenness = {count: _evenness(cost, heads, count, blocks) for count in candidates}
    best = max(evenness.values())
    return min(count for count, even in evenness.items() if even >= best - _NEAR_BEST)


def _tile_costs(mask: Mask, Br: int, Bc: int) -> np.ndarray:
    """Of a head's query tiles, in the order they are worked on: from the last to the first."""
    first = np.arange(mask.seqlen_q - Br, -1, -Br)
    blocks = -(-mask.ends(first + Br - 1) // Bc) - mask.begins(first) // Bc
    return np.maximum(blocks, 0) + _TILE_COST


def _evenness(cost: np.ndarray, heads: int, section: int, blocks: int) -> float:
    """Mean over largest share of work, for the order that the kernel takes the tiles in."""
    sections = [np.repeat(cost, min(section, heads - first)) for first in range(0, heads, section)]
    work = np.concatenate(sections)
    rounds = ceil_div(len(work), blocks)
    shares = np.zeros((rounds, blocks))
    shares.reshape(-1)[: len(work)] = work
    shares[1::2] = shares[1::2, ::-1]
    total = shares.sum(axis=0)
    return float(total.mean() / total.max())
