"""`DecodeTile` and the values that its fields may have."""

from __future__ import annotations

from dataclasses import dataclass

from cupy_flash.problem.tile import Tile

MAX_STAGES = 8
CLUSTERS = (1, 2, 4, 8)
# Number of keys of a KV tile from an 8-bit cache: as many bytes as 16 keys of 16-bit elements.
QUANTIZED_KEYS = 32


@dataclass(frozen=True)
class DecodeTile(Tile):
    """Tile of the `decode` family.

    Attributes
    ----------
    Br
        Number of query rows of a thread block, 16 or 32. The query heads of a KV head are packed.
    Bc
        Number of keys of the KV tile of a warp, 16 or 32.
    warps
        Number of warps of a thread block, which divide its keys. For wide heads, a multiple of 4:
        four warps have the same keys and divide the columns.
    stages
        Number of KV tiles in the ring of a warp: one in use, the others being loaded.
    min_blocks
        Number of thread blocks per SM, both in `__launch_bounds__` and in the size of the grid.
    cluster
        Number of thread blocks of a cluster. They merge their results through shared memory. There
        are enough clusters to saturate the memory bandwidth. 0 for no clusters: then as many
        thread blocks as run at once merge their results through device memory.
    """

    warps: int = 4
    stages: int = 3
    min_blocks: int = 2
    cluster: int = 0
