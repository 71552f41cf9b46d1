"""Tests of the order of thread blocks in the backward pass, run on the host, with real plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support.host_programs import HostProgram, needs_host_compiler

import cupy_flash
from cupy_flash import flash_attention_backward
from cupy_flash.families.schedule import KEY_GRADIENTS
from cupy_flash.problem.mask import Mask

# Same values as in `on_cpu/gradient_order.cpp`. They are those of the default tile at head_dim 128,
# and of a pair of thread blocks with 64 keys each at head_dim 256.
BR, BC = 64, 128

pytestmark = needs_host_compiler


class Block(NamedTuple):
    """Numbers that the program prints for a thread block."""

    batch: int
    kv_head: int
    kv_tile: int
    chunk: int
    first_head: int
    end_head: int
    first_tile: int
    end_tile: int
    descends: int


class Call(NamedTuple):
    """Mask of a call, its numbers of sequences and heads, and its line of standard input."""

    mask: Mask
    sizes: tuple[int, int, int]
    line: str
    blocks: int
    tile_chunks: int


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    """Return the compiled program, which prints what each thread block processes."""
    return HostProgram("gradient_order", tmp_path_factory)


def random_call(rng: np.random.Generator, family: str, head_dim: int) -> Call:
    """Return a random call, ordered by the plan for an H100 (`hopper`) or an A100 (`mma`)."""
    heads_kv = int(rng.choice([1, 2, 5, 40]))
    batch, heads_q = int(rng.choice([1, 3])), heads_kv * int(rng.choice([1, 2, 6]))
    rows, keys = (int(rng.choice([130, 900, 4000]) + rng.integers(-60, 60)) for _ in range(2))
    options: dict[str, Any] = {"causal": bool(rng.integers(3))}
    if rng.integers(3) == 0:
        options["window_size"] = (int(rng.integers(keys)), None)
    if len(options) > 1 or options["causal"]:
        options["q_offset"] = int(rng.choice([keys - rows, rng.integers(-rows // 2, keys)]))

    def array(length: int, heads: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (batch, length, heads, head_dim))

    made = cupy_flash.plan(
        flash_attention_backward,
        q=array(rows, heads_q),
        k=array(keys, heads_kv),
        v=array(keys, heads_kv),
        arch="sm_90" if family == "hopper" else str(rng.choice(["sm_80", "sm_90"])),
        family=family,
        **options,
    )
    assert made.tile is not None
    assert (made.tile.Br, made.tile.Bc * getattr(made.tile, "pair", 1)) == (BR, BC)
    (launch,) = (launch for launch in made.launches if launch.entry == KEY_GRADIENTS)
    mask, schedule = made.problem.mask, made.schedule
    chunks = [int(schedule.params[name]) for name in ("head_chunks", "tile_chunks")]
    numbers = [int(mask.causal), int(family == "hopper"), batch, heads_q, heads_kv, rows, keys]
    numbers += [mask.q_offset, schedule.section_heads, *chunks]
    numbers += [int(schedule.params["last_section"]), launch.grid[0]]
    numbers += [-1 if bound is None else bound for bound in (mask.left, mask.right)]
    line = " ".join(map(str, [*numbers, mask.prefix]))
    return Call(mask, (batch, heads_q, heads_kv), line, launch.grid[0], chunks[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head_dim"), [("hopper", 128), ("hopper", 256), ("mma", 128)], ids=str
)
def test_blocks_process_each_tile_once_and_wait_only_for_earlier_blocks(
    program: HostProgram, family: str, head_dim: int
) -> None:
    rng = np.random.default_rng(48)
    calls = [random_call(rng, family, head_dim) for _ in range(200)]
    # Chunks occur at head_dim 128, and pairs of thread blocks have none.
    assert any(call.tile_chunks > 1 for call in calls) == (head_dim == 128)
    found = program.rows((call.line for call in calls), len(Block._fields))
    for call, rows in zip(calls, found, strict=True):
        blocks = [Block(*row) for row in rows.tolist()]
        assert len(blocks) == call.blocks
        check_tiles(call, blocks)
        check_order(blocks)


def check_tiles(call: Call, blocks: list[Block]) -> None:
    """Check that each query tile is processed once with each KV tile that it attends to."""
    batch, heads_q, heads_kv = call.sizes
    counts = Counter(
        (block.batch, head, block.kv_tile, tile)
        for block in blocks
        for head in range(block.first_head, block.end_head)
        for tile in range(block.first_tile, block.end_tile)
    )
    assert set(counts.values()) <= {1}, call
    for block in blocks:
        assert block.first_head // (heads_q // heads_kv) == block.kv_head, call
    mask = call.mask
    visible = {
        (key_tile, row // BR)
        for row in range(mask.seqlen_q)
        if mask.begin(row) < mask.end(row)
        for key_tile in range(mask.begin(row) // BC, (mask.end(row) - 1) // BC + 1)
    }
    for sequence in (0, batch - 1):
        for head in (0, heads_q - 1):
            assert all((sequence, head, *pair) in counts for pair in visible), call


def check_order(blocks: list[Block]) -> None:
    """Check that the predecessors of a thread block in each order have lower indices."""
    dq_order = defaultdict(list)
    kv_order = defaultdict(list)
    for index, block in enumerate(blocks):
        kv_order[block.batch, block.kv_head, block.kv_tile].append((block.chunk, index))
        position = block.kv_tile if block.descends else -block.kv_tile
        for head in range(block.first_head, block.end_head):
            for tile in range(block.first_tile, block.end_tile):
                dq_order[block.batch, head, tile, block.descends].append((position, index))
    # All thread blocks of a query tile have the same direction.
    assert len({key[:3] for key in dq_order}) == len(dq_order)
    for order in (*dq_order.values(), *kv_order.values()):
        indices = [index for _, index in sorted(order)]
        assert indices == sorted(indices)
    for order in kv_order.values():
        assert [chunk for chunk, _ in sorted(order)] == list(range(len(order)))
