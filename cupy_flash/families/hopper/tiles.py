"""Tiles of the `hopper` family, and which of them were measured best."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cupy_flash.families.contract import ceil_div
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile


@dataclass(frozen=True)
class HopperTile(Tile):
    """Tile of the `hopper` family. Each 64 of the Br rows are a consumer warpgroup's.

    Attributes
    ----------
    stages
        Tiles of keys or values in the shared-memory ring.
    q_stages
        Query tiles in shared memory: with 2, the next one arrives while this one is in use.
    q_steps
        Steps of 16 columns of Q that are kept in registers, the rest read from shared memory for
        each block of keys.
    turns
        1 has the warpgroups take turns at the tensor cores (FlashAttention-3, section 3.1), or at
        the softmax where that is the longer part.
    """

    stages: int = 2
    q_stages: int = 1
    q_steps: int = 0
    turns: int = 1


# Keys of the narrowest that is searched for.
FEWEST_KEYS = 32
# As many steps of Q in registers as there are.
ALL_STEPS = 16


def preferred_tiles(problem: Problem, device: Device, streams_bias: bool) -> list[HopperTile]:
    """Tiles from the best down, without stages, of which the first that fits becomes the default.

    `streams_bias` says whether the copy engine brings a bias beside the keys.

    Figures without a unit are TFLOP/s on an H100, bfloat16, CUDA 13.0, at batch x seqlen 16384 and
    heads x head_dim 2048; a tile is Br x Bc with its query tiles in shared memory and its steps of
    Q in registers. Those of one line are of one process, in turns.
    """
    head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
    widest = max(head_dim, head_dim_v)
    short = problem.seqlen_k < 2048
    # Where tiles of 192 rows would leave SMs idle, smaller ones leave fewer.
    few = ceil_div(problem.seqlen_q, 192) * problem.batch * problem.heads_q < device.sm_count
    is_mapped = problem.score is not None and problem.score.may_be_mapped
    block = problem.score.block if problem.score is not None else None
    if problem.seqlen_q > 64 and widest <= 128 and is_mapped and (block or not few):
        # 12 documents of 108 to 1663 tokens in 2 x 8192, ms of an H200: head_dim 64 192x96 0.400,
        # 192x64 0.437, 192x80 0.447; 128 128x96 0.313, 128x112 0.313, 128x128 0.314.
        sizes = (96, 64, 80, 48, 32, 112) if widest <= 64 else (96, 128, 64, 48, 80, 32)
        # Blocks of the user's come first: along their edges pairs are looked at.
        Bc = next((n for n in sizes if block is not None and block[1] % n == 0), sizes[0])
        return [tile_of(192, Bc, 2) if widest <= 64 and not few else tile_of(128, Bc, 2, 2)]
    if problem.seqlen_q > 64 and widest <= 128 and streams_bias:
        # A bias of (1, heads, 8192, 8192) and 2 x 8192, ms of an H200: head_dim 64 192x96 2.82,
        # 192x80 3.17, 192x64 3.32, 128x128 3.85; 128 128x128 1.99, 192x64 2.03, 128x96 2.27.
        return [tile_of(192, 96, 2) if widest <= 64 and not few else tile_of(128, 128, 1)]
    reads_pairs = problem.score is not None and problem.score.reads_pairs
    if problem.seqlen_q > 64 and widest <= 128 and reads_pairs:
        # What is loaded for each score takes registers. 2 x 8192, ms of an H200, a table by
        # distance, a bool mask, a float32 bias: head_dim 64 192x80 3.62 5.54 5.65, 192x64 3.74 5.57
        # 5.65, 128x128 3.69 5.60 6.60; 128 192x48 2.38 3.84 3.71, 128x96 2.59 3.44 3.79, 192x64
        # 2.56 4.07 3.90, 192x80 2.72 4.59 4.90.
        if widest <= 64:
            return [tile_of(128, 128, 2) if few else tile_of(192, 80, 2)]
        only_hides = problem.score is not None and not problem.score.changes_scores
        return [tile_of(128, 96, 2) if few or only_hides else tile_of(192, 48, 2)]
    if problem.is_float8:
        # An H100, 16384 tokens, full and causal, bfloat16 805 and 772 at head_dim 128, 839 and 803
        # at 256: 192x128 1030, 996, 128x128 859; 256 128x128 1177, 1124, 128x64 910.
        Bc = 96 if 64 < head_dim_v <= 96 or 128 < head_dim_v <= 192 else 128
        of_192_rows = widest <= 128 and problem.seqlen_q > 64 and not few
        return [tile_of(192 if of_192_rows else 128 if problem.seqlen_q > 64 else 64, Bc, 1)]
    if problem.dtype == "float32":
        # 4 x 4096 tokens, 16 heads: head_dim 64 128x96 123, 128x64 117, 192x48 111, causal 109,
        # 108, 98; 128 128x48 119, 128x64 113, 128x32 104, causal 105, 104, 97.
        if widest <= 128:
            return [tile_of(128, 96, 1) if widest <= 64 else tile_of(128, 48, 1)]
        # 64x64, 64x48, 128x32: head_dim 192 106, 96, 89, causal 93, 85, 82; 160 106, 91, 90, causal
        # 86, 75, 79; head_dim 192, head_dim_v 128 112, 98, 86, causal 92, 80, 77. 64x48, 64x32:
        # 224 99, 80, causal 79, 67. 64x32, 64x16: 256 90, 61, causal 79, 52.
        return [tile_of(64, Bc, 1) for Bc in (64, 48, 32)]
    if problem.seqlen_q <= 64:
        return [tile_of(64, 128, 2) if widest <= 128 else tile_of(64, 64, 1)]
    if widest > 256:
        # 4 heads of 512 on an H200, 4096 and 16384 tokens, full and causal: 128x64 554, 511, 562,
        # 565; 128x48 501, 480, 505, 468; 128x80, which spills, 426, 416, 425, 455. Latent attention
        # of 128 heads, 128 x 8192 keys, on an H100: 128x64 520, 128x48 490.
        return [tile_of(128, 64, 1), tile_of(128, 48, 1), tile_of(128, 32, 1)]
    if widest <= 64:
        # Exponentials hold head_dim 64 back: three consumers hide them better. 192x128 2 0,
        # 128x128 2 4: full 2048 549, 456; causal 2048 416, 396; 1024 with 192x128 2 1 294, 346.
        small, large = tile_of(128, 128, 2, ALL_STEPS), tile_of(192, 128, 2)
        return [small, large] if few or (short and problem.causal) else [large, small]
    if widest <= 96:
        # head_dim 96, 128x128 2 6, 192x96 2 1: full 1024 555, 532; 4096 594, 680; causal 512 312,
        # 250; 2048 482, 478.
        small = tile_of(128, 128, 2, ALL_STEPS)
        return [small] if short or few else [tile_of(192, 96, 2, 1), small]
    if widest <= 128:
        # head_dim 128, 128x128 2 2, 192x80 2 0: full 512 516, 458; 1024 640, 599; 2048 653, 672;
        # causal 512 338, 256; 4096 637, 591; 8192 572, 597 (the former 1 2). More Q in registers
        # leaves none for the P of two blocks: 128x128 1 2 and 1 4 at causal 4096 584 and 575.
        small, large = tile_of(128, 128, 2, 2), tile_of(192, 80, 2)
        if problem.causal and problem.score is not None and not problem.score.only_sinks:
            return [small]
        long = problem.seqlen_k >= (8192 if problem.causal else 2048)
        return [large, small] if long and not few else [small]
    if head_dim_v <= 128:
        # head_dim 192, head_dim_v 128, 128x128 1 2, 128x112 1 12, 128x64 1 12: full 1024 580, 594,
        # 602; 4096 700, 702, 648; causal 1024 436, 419, 427; 16384 701, 655, 622.
        return [tile_of(128, 128, 1, 2), tile_of(128, 112, 1, 4)]
    if widest <= 192:
        # head_dim 192, 128x64 1 12, 128x64 2 4, 128x96 1 0: full 1024 611, 609, 582; 4096 707, 720,
        # 708; causal 1024 466, 444, 417; 4096 602, 596, 586.
        return [tile_of(128, 64, 1, ALL_STEPS), tile_of(128, 96, 1)]
    # head_dim 256, 128x64 1 2, 1 0, 1 5: full 1024 597, 598, 599; 16384 762, 766, 770; causal 2048
    # 555, 557, 550; 16384 706, 706, 705.
    return [tile_of(128, 64, 1, 2)]


@functools.lru_cache(maxsize=256)
def tile_of(Br: int, Bc: int, q_stages: int, q_steps: int = 0) -> HopperTile:
    """A tile whose stages are yet to be counted."""
    return HopperTile(Br, Bc, 0, q_stages, q_steps, turns=int(Br > 64))
