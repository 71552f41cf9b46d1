"""Block masks of random mask functions, checked by the evaluator of random functions."""

from __future__ import annotations

import numpy as np

from cupy_flash.gpu.block_mask_layout import BlockMaskSpec
from support.mods.block_mask_cuda import FoundMap, kept_pairs, of_blocks
from support.mods.function_oracle import Oracle
from support.mods.random_functions import Function


def random_map_spec(function: Function) -> BlockMaskSpec:
    """Return the spec of a block mask with few, partly ragged blocks at any distance from key 0."""
    rng = np.random.default_rng([48, function.number])

    def maybe(bound: int) -> int | None:
        return None if rng.integers(3) else int(rng.integers(0, bound))

    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 200, 2))
    parts = int(rng.choice([1, 2, 3]))
    offsets = [0, seqlen_k - seqlen_q, -30, 1000, 2**24 - 50, 2**30 - 1024, 2**30 + 300]
    return BlockMaskSpec(
        Br=parts * int(rng.choice([8, 16, 24, 64, 64])),
        Bc=int(rng.choice([8, 16, 80, 128, 160])),
        batch=2,
        heads_q=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        q_offset=int(rng.choice(offsets)),
        causal=bool(rng.integers(4) == 0),
        left=maybe(150),
        right=maybe(150),
        parts=parts,
    )


def pairs_of(function: Function, spec: BlockMaskSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return which pairs are visible, (batch, heads, seqlen_q, seqlen_k), and which are decided."""
    zero = np.int32(0)
    shape = (spec.batch, spec.heads_q, spec.seqlen_q, spec.seqlen_k)
    symbols = {
        "b": np.arange(spec.batch, dtype=np.int32)[:, None, None, None],
        "h": np.arange(spec.heads_q, dtype=np.int32)[:, None, None],
        "i": np.arange(spec.seqlen_q, dtype=np.int32)[:, None] + np.int32(spec.q_offset),
        "j": np.arange(spec.seqlen_k, dtype=np.int32),
        "q_start": zero,
        "k_start": zero,
    }
    found = Oracle(symbols, function.captures, function.real, function.inputs).value(function.root)
    return np.broadcast_to(found.v, shape), np.broadcast_to(found.e == 0, shape)


def wrong_map(
    found: FoundMap, function: Function, spec: BlockMaskSpec, maps: tuple[int, int]
) -> str | None:
    """Return how a block mask differs from the function on decided pairs; None if it does not."""
    seen, known = pairs_of(function, spec)
    # If a mask does not depend on the sequence or the head, there is one block mask for all.
    seen, known = (x[: maps[0], : maps[1]] for x in (seen, known))
    distance = np.arange(spec.seqlen_q)[:, None] + spec.q_offset - np.arange(spec.seqlen_k)
    band = distance >= 0 if spec.causal else np.ones(distance.shape, bool)
    if spec.left is not None:
        band &= distance <= spec.left
    if spec.right is not None:
        band &= -distance <= spec.right
    some_seen = of_blocks(seen & known & band, spec)
    some_hidden = of_blocks(~seen & band & known, spec)
    if (hides := some_seen & ~found.nonempty).any():
        return f"{hides.sum()} blocks with seen pairs are empty"
    if (shows := some_hidden & found.full & found.nonempty).any():
        return f"{shows.sum()} blocks with hidden pairs are full"
    for kept in kept_pairs(found, spec):
        if (differs := kept.there & known[kept.at] & (kept.shown != seen[kept.at])).any():
            return f"{differs.sum()} kept pairs of block {kept.block} of part {kept.part}"
    return None
