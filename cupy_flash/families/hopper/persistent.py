"""Persistent grid: each SM has one thread block, which processes several query tiles."""

from __future__ import annotations

import functools

import numpy as np

from cupy_flash.families.contract import ceil_div
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem

# Largest number of interleaved heads. With more, keys and values are read from device memory too
# often: each head that is processed at the same time takes part of the bandwidth.
_MAX_HEADS = 48
# Loss of balance that is accepted for fewer interleaved heads, which use L2 better.
_NEAR_BEST = 0.02
# Largest number of query tiles for which the balance is computed; more would repeat the pattern.
_MAX_TILES = 2**15
# Fixed cost of a query tile, in KV tiles.
_TILE_COST = 1


def section_heads(problem: Problem, *, blocks: int, Br: int, Bc: int) -> int:
    """Return the number of query heads to interleave (see `kernels_cu/scheduler/tile_coord.cuh`).

    It is the least number with which the work of the thread blocks is nearly as balanced as
    possible. With fewer heads, more thread blocks read the same keys and values at the same time.
    Without a causal mask the work is balanced anyway, and the heads of a KV head are interleaved.

    Lengths are rounded to multiples of the tile, so that similar lengths use the same cached
    result.

    Parameters
    ----------
    problem
        Problem to compute.
    blocks
        Number of thread blocks of the grid.
    Br, Bc
        Number of query rows, and of keys, of a tile.
    """
    group = problem.heads_q // problem.heads_kv
    tiles = ceil_div(problem.seqlen_q, Br)
    heads = min(problem.batch * problem.heads_q, max(1, _MAX_TILES // max(1, tiles)))
    if not problem.causal or tiles * heads <= blocks or tiles > _MAX_TILES:
        return group
    rounded = problem.mask.rounded(Br, Bc)
    return _most_even_section(rounded, heads, blocks, Br, Bc)


# The result is cached because it takes 0.2 to 3 ms, and each layer of a model needs it.
@functools.lru_cache(maxsize=4096)
def _most_even_section(mask: Mask, heads: int, blocks: int, Br: int, Bc: int) -> int:
    """Return the least number of heads with which the balance is close to the best."""
    cost = _tile_costs(mask, Br, Bc)
    candidates = range(1, min(heads, _MAX_HEADS) + 1)
    evenness = {count: _evenness(cost, heads, count, blocks) for count in candidates}
    best = max(evenness.values())
    return min(count for count, even in evenness.items() if even >= best - _NEAR_BEST)


def _tile_costs(mask: Mask, Br: int, Bc: int) -> np.ndarray:
    """Return the cost of each query tile of a head in KV tiles, from the last to the first tile."""
    first = np.arange(mask.seqlen_q - Br, -1, -Br)
    blocks = -(-mask.ends(first + Br - 1) // Bc) - mask.begins(first) // Bc
    return np.maximum(blocks, 0) + _TILE_COST


def _evenness(cost: np.ndarray, heads: int, section: int, blocks: int) -> float:
    """Return mean work / maximum work of the thread blocks, for the kernel's order of tiles."""
    sections = [np.repeat(cost, min(section, heads - first)) for first in range(0, heads, section)]
    work = np.concatenate(sections)
    rounds = ceil_div(len(work), blocks)
    shares = np.zeros((rounds, blocks))
    shares.reshape(-1)[: len(work)] = work
    shares[1::2] = shares[1::2, ::-1]
    total = shares.sum(axis=0)
    return float(total.mean() / total.max())
