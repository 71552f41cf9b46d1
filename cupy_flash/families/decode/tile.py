"""`DecodeTile`, and what its fields may be."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_flash.problem.tile import Tile

MOST_STAGES = 8
CLUSTERS = (1, 2, 4, 8)
# Keys of a tile of a cache of 8 bits: as many bytes as 16 of 16 bits.
QUANTIZED_KEYS = 32


@dataclass(frozen=True)
class DecodeTile(Tile):
    """Tile of the `decode` family.

    Attributes
    ----------
    Br
        Rows of a thread block, 16 or 32: the query heads of a key/value head together.
    Bc
        Keys of a warp's tile, 16 or 32.
    warps
        Of a thread block; they share its keys. With wide heads a multiple of 4, which have the
        same keys and share their columns.
    stages
        Tiles in a warp's ring: one in use, the others on their way.
    min_blocks
        Thread blocks per SM that the compiler limits registers for, and that are launched.
    cluster
        Thread blocks of a cluster, which merges its results through shared memory; as many
        clusters share the keys of a head as the memory's bandwidth takes. 0 for as many blocks as
        run at once, merging through device memory.
    """

    warps: int = 4
    stages: int = 3
    min_blocks: int = 2
    cluster: int = 0
