"""Tiles of the `hopper` family, and the choice of the fastest one from measurements."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cupy_flash.families.contract import ceil_div
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile


@dataclass(frozen=True)
class HopperTile(Tile):
    """Tile of the `hopper` family; each consumer warpgroup has 64 of the Br query rows.

    Attributes
    ----------
    stages
        Number of K or V tiles in the shared-memory ring.
    q_stages
        Number of query tiles in shared memory: with 2, one is loaded while the other is in use.
    q_steps
        Number of k steps (16 columns each) of Q in registers; the others are read from shared
        memory for each KV tile.
    turns
        1 enables ping-pong scheduling (FlashAttention-3, section 3.1): one warpgroup at a time
        issues its products or, if the softmax takes longer, computes its softmax.
    """

    stages: int = 2
    q_stages: int = 1
    q_steps: int = 0
    turns: int = 1


# Smallest Bc of the candidate tiles.
MIN_KEYS = 32
# Value of q_steps that keeps all of Q in registers, for any head_dim.
ALL_STEPS = 16


def preferred_tiles(problem: Problem, device: Device, streams_bias: bool) -> list[HopperTile]:
    """Return tiles from the fastest to the slowest, without stages; the first that fits is used.

    `streams_bias` tells whether TMA loads tiles of a bias in addition to keys and values.

    Figures in the comments are TFLOP/s on an H100 (bfloat16, batch x seqlen 16384, heads x head_dim
    2048) unless a unit is given. A tile is written Br x Bc.
    """
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    widest = max(head_dim, head_dim_v)
    short = problem.seqlen_k < 2048
    # Tiles of 192 rows would leave SMs idle; with smaller tiles, fewer SMs are idle.
    few = ceil_div(problem.seqlen_q, 192) * problem.batch * problem.heads_q < device.sm_count
    uses_block_mask = problem.score is not None and problem.score.block_mask_suffices
    block = problem.score.block if problem.score is not None else None
    if problem.seqlen_q > 64 and widest <= 128 and uses_block_mask and (block or not few):
        # Tile 192x96 takes 0.400 ms, 192x64 takes 0.437 ms (H200, document mask, head_dim 64).
        sizes = (96, 64, 80, 48, 32, 112) if widest <= 64 else (96, 128, 64, 48, 80, 32)
        # Prefer a Bc that divides the blocks of the user's mask. Otherwise KV tiles cross their
        # edges, and the mask is evaluated for each pair there.
        Bc = next((n for n in sizes if block is not None and block[1] % n == 0), sizes[0])
        return [tile_of(192, Bc, 2) if widest <= 64 and not few else tile_of(128, Bc, 2, 2)]
    if problem.seqlen_q > 64 and widest <= 128 and streams_bias:
        # Tile 192x96 takes 2.82 ms, 192x80 takes 3.17 ms (H200, head_dim 64, 2 x 8192). At head_dim
        # 128, tile 128x128 takes 1.99 ms, 192x64 takes 2.03 ms.
        return [tile_of(192, 96, 2) if widest <= 64 and not few else tile_of(128, 128, 1)]
    reads_pairs = problem.score is not None and problem.score.reads_pairs
    if problem.seqlen_q > 64 and widest <= 128 and reads_pairs:
        # The values loaded for each score take registers, so tiles are smaller: tile 192x80 takes
        # 5.65 ms, 128x128 takes 6.60 ms (H200, float32 bias, head_dim 64, 2 x 8192).
        if widest <= 64:
            return [tile_of(128, 128, 2) if few else tile_of(192, 80, 2)]
        only_hides = problem.score is not None and not problem.score.changes_scores
        return [tile_of(128, 96, 2) if few or only_hides else tile_of(192, 48, 2)]
    if problem.is_float8:
        # Tile 192x128 reaches 1030 TFLOP/s, 128x128 reaches 859 (head_dim 128, seqlen 16384).
        Bc = 96 if 64 < head_dim_v <= 96 or 128 < head_dim_v <= 192 else 128
        has_192_rows = widest <= 128 and problem.seqlen_q > 64 and not few
        return [tile_of(192 if has_192_rows else 128 if problem.seqlen_q > 64 else 64, Bc, 1)]
    if problem.dtype == "float32":
        # Tile 128x96 reaches 123 TFLOP/s, 128x64 reaches 117 (head_dim 64, seqlen 4096). At
        # head_dim 128, tile 128x48 reaches 119 TFLOP/s, 128x64 reaches 113.
        if widest <= 128:
            return [tile_of(128, 96, 1) if widest <= 64 else tile_of(128, 48, 1)]
        # Tile 64x64 reaches 106 TFLOP/s, 64x48 reaches 96 (head_dim 192, seqlen 4096).
        return [tile_of(64, Bc, 1) for Bc in (64, 48, 32)]
    if problem.seqlen_q <= 64:
        return [tile_of(64, 128, 2) if widest <= 128 else tile_of(64, 64, 1)]
    if widest > 256:
        # Tile 128x64 reaches 554 TFLOP/s, 128x48 reaches 501 (H200, head_dim 512, seqlen 4096).
        # Tile 128x80 spills registers and reaches 426 TFLOP/s.
        return [tile_of(128, 64, 1), tile_of(128, 48, 1), tile_of(128, 32, 1)]
    if widest <= 64:
        # Exponentials dominate at head_dim 64, and three consumers hide them better: tile 192x128
        # reaches 549 TFLOP/s, 128x128 reaches 456 (full attention, seqlen 2048).
        small, large = tile_of(128, 128, 2, ALL_STEPS), tile_of(192, 128, 2)
        return [small, large] if few or (short and problem.causal) else [large, small]
    if widest <= 96:
        # Tile 192x96 reaches 680 TFLOP/s, 128x128 reaches 594 (full attention, seqlen 4096).
        small = tile_of(128, 128, 2, ALL_STEPS)
        return [small] if short or few else [tile_of(192, 96, 2, 1), small]
    if widest <= 128:
        # Tile 192x80 reaches 672 TFLOP/s, 128x128 reaches 653 (full attention, seqlen 2048). With
        # q_steps above 2, no registers are left for P of two KV tiles.
        small, large = tile_of(128, 128, 2, 2), tile_of(192, 80, 2)
        if problem.causal and problem.score is not None and not problem.score.only_sinks:
            return [small]
        long = problem.seqlen_k >= (8192 if problem.causal else 2048)
        return [large, small] if long and not few else [small]
    if head_dim_v <= 128:
        # Tile 128x128 reaches 701 TFLOP/s, 128x112 reaches 655 (head_dim 192, causal, seqlen
        # 16384).
        return [tile_of(128, 128, 1, 2), tile_of(128, 112, 1, 4)]
    if widest <= 192:
        # Tile 128x64 reaches 466 TFLOP/s, 128x96 reaches 417 (causal, seqlen 1024).
        return [tile_of(128, 64, 1, ALL_STEPS), tile_of(128, 96, 1)]
    # The value of q_steps makes less than 2% of difference at head_dim 256.
    return [tile_of(128, 64, 1, 2)]


@functools.lru_cache(maxsize=256)
def tile_of(Br: int, Bc: int, q_stages: int, q_steps: int = 0) -> HopperTile:
    """Return a tile with 0 stages; the caller sets their number."""
    return HopperTile(Br, Bc, 0, q_stages, q_steps, turns=int(Br > 64))
