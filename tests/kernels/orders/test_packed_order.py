"""Tests of the order of packed sequences in the grid of the backward pass, run on the host."""

from __future__ import annotations

import numpy as np
import pytest
from support.host_programs import HostProgram, needs_host_compiler

# Same value as in `on_cpu/packed_order.cpp`.
ROWS = 24

pytestmark = needs_host_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    """Return the compiled program, which prints the tile of each thread block."""
    return HostProgram("packed_order", tmp_path_factory)


def test_each_tile_has_one_block_and_follows_later_tiles_of_its_head(program: HostProgram) -> None:
    rng = np.random.default_rng(7)
    lines, batches = [], []
    for _ in range(100):
        lengths = rng.integers(0, rng.choice([2, 60, 900]), rng.integers(1, 12))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        heads, chunks = int(rng.choice([1, 3, 8])), int(rng.choice([1, 2]))
        numbers = [len(lengths), starts[-1] + 9, heads, rng.integers(1, heads + 1), chunks]
        lines.append(" ".join(map(str, [*numbers, lengths.max(), *starts])))
        batches.append((lengths, heads, chunks))
    for (lengths, heads, chunks), rows in zip(batches, program.rows(lines, 4), strict=True):
        tiles = -(-lengths // ROWS)
        blocks: dict[tuple[int, ...], int] = {}
        for index, (sequence, head, tile, chunk) in enumerate(rows.tolist()):
            assert blocks.setdefault((sequence, head, tile, chunk), index) == index
            # In the dq order, the thread block of the next tile adds first, and so does that of
            # the previous chunk in the order of dk and dv.
            if tile + 1 < tiles[sequence]:
                assert (sequence, head, tile + 1, chunk) in blocks
            if chunk > 0 and tile < tiles[sequence]:
                assert (sequence, head, tile, chunk - 1) in blocks
        for sequence, count in enumerate(tiles.tolist()):
            for head in range(heads):
                assert all(
                    (sequence, head, tile, chunk) in blocks
                    for tile in range(count)
                    for chunk in range(chunks)
                )
        # A sequence starts only after all blocks of longer ones.
        first = [
            min((i for k, i in blocks.items() if k[0] == s), default=-1) for s in range(len(tiles))
        ]
        by_start = sorted((i, s) for s, i in enumerate(first) if i >= 0)
        counts = [sum(k[0] == s for k in blocks) for _, s in by_start]
        assert counts == sorted(counts, reverse=True)
