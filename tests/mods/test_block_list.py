"""Block lists: masks that are given by blocks of rows and keys."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
from support.mods.block_mask_cuda import ALL, NONE, compiled_masks

from cupy_flash import BlockList, flash_attention, flash_attention_varlen, plan

BATCH, HEADS, SEQLEN = 2, 3, 70


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("block", [(16, 16), (7, 24), (1, 100)])
def test_a_pair_is_seen_if_its_block_is_on(batch, heads, block, rng) -> None:
    rows, keys = (-(-SEQLEN // n) for n in block)
    blocks = rng.random((batch, heads, rows, keys)) < 0.5
    q, k, v = (rng.standard_normal((BATCH, SEQLEN, HEADS, 8)).astype(np.float32) for _ in range(3))
    mask = blocks.repeat(block[0], 2).repeat(block[1], 3)[:, :, :SEQLEN, :SEQLEN]
    out = flash_attention(q, k, v, mask_mod=BlockList(blocks, block), backend="cpu")
    np.testing.assert_array_equal(out, flash_attention(q, k, v, mask=mask, backend="cpu"))


def test_bounds_decide_whole_blocks_without_a_look_at_pairs(tmp_path, rng) -> None:
    blocks = rng.random((1, 1, 4, 6)) < 0.5
    (host,) = compiled_masks(tmp_path, [BlockList(blocks, block=(32, 16))])
    places = np.array(list(np.ndindex(4, 6)))
    ends = np.stack([places * (32, 16), places * (32, 16) + (31, 15)], -1).reshape(-1, 4)
    # Columns of `ends` are i_low, i_high, j_low, j_high.
    seen = host.classify(0, 0, ends)
    np.testing.assert_array_equal(seen, np.where(blocks.ravel(), ALL, NONE))


def test_on_hopper_a_tile_divides_the_blocks_or_the_plan_says_that_none_does() -> None:
    def planned(block: tuple[int, int], head_dim: int) -> tuple[int, str]:
        q = np.empty((1, 4096, 16, head_dim), np.float16)
        mod = BlockList(np.ones((1, 1, 64, 64), bool), block)
        made = plan(flash_attention, q, q, q, arch="sm_90", mask_mod=mod)
        assert made.family == "hopper"
        return made.tile.Bc, made.reason

    for head_dim in (64, 128):
        for block in ((128, 128), (64, 64), (128, 96), (192, 160)):
            Bc, reason = planned(block, head_dim)
            assert block[1] % Bc == 0
            assert "edges" not in reason
        assert "blocks of 100 x 70" in planned((100, 70), head_dim)[1]


@pytest.mark.parametrize("seqlen_k", [4096, 8192, 4100])
def test_the_plan_says_when_queries_begin_within_a_block_of_rows(seqlen_k: int) -> None:
    q, k = (np.empty((1, n, 16, 64), np.float16) for n in (4096, seqlen_k))
    mod = BlockList(np.ones((1, 1, 64, 64), bool), (128, 96))
    made = plan(flash_attention, q, k, k, arch="sm_90", mask_mod=mod)
    assert made.tile.Bc == 96
    assert ("queries begin at key 4, not a multiple of 64" in made.reason) == (seqlen_k == 4100)


def test_packed_sequences_have_no_block_maps_whose_edges_a_plan_speaks_of() -> None:
    q, starts = np.empty((4096, 16, 64), np.float16), np.array([0, 1000, 4096], np.int32)
    mod = BlockList(np.ones((1, 1, 64, 64), bool), (100, 70))
    lengths = starts, starts, 3096, 3096
    made = plan(flash_attention_varlen, q, q, q, *lengths, arch="sm_90", mask_mod=mod)
    assert made.family == "hopper"
    assert "edges" not in made.reason


@pytest.mark.parametrize("shape", [(3, 1, 4, 4), (1, 2, 4, 4), (BATCH, HEADS + 1, 4, 4)])
def test_blocks_of_other_sequences_or_heads_are_refused(shape: tuple[int, ...]) -> None:
    q = np.zeros((BATCH, SEQLEN, HEADS, 8), np.float32)
    mod = BlockList(np.ones(shape, bool), (16, 16))
    expected = rf"{re.escape(str(shape))}; expected \({BATCH} or 1, {HEADS} or 1, row blocks"
    with pytest.raises(ValueError, match=expected):
        flash_attention(q, q, q, mask_mod=mod, backend="cpu")
    with pytest.raises(ValueError, match=expected):
        plan(flash_attention, q, q, q, arch="sm_90", mask_mod=mod)


def test_copies_have_the_same_blocks() -> None:
    one = BlockList(np.eye(3, dtype=bool)[None, None], block=(2, 4))
    other = copy.deepcopy(one)
    assert other == one
    assert other.block == (2, 4)
    assert one != BlockList(np.eye(3, dtype=bool)[None, None], block=(2, 8))


@pytest.mark.parametrize(
    ("blocks", "block", "error", "message"),
    [
        (np.ones((1, 1, 4, 4)), (8, 8), TypeError, "blocks has dtype float64; expected bool"),
        (np.ones((4, 4), bool), (8, 8), ValueError, r"blocks has shape \(4, 4\)"),
        (np.ones((1, 1, 4, 4), bool), (8, 0), ValueError, r"block is \(8, 0\)"),
        (np.ones((1, 1, 4, 4), bool), (8, 1 << 40), ValueError, "block is .* at most"),
        (np.ones((1, 1, 4, 4), bool), (8, 2.0), TypeError, r"expected \(rows, keys\)"),
        (np.ones((1, 1, 4, 4), bool), (8, 8, 8), ValueError, r"expected \(rows, keys\)"),
        (np.ones((1, 1, 4, 4), bool), 8, TypeError, r"block is 8; expected \(rows, keys\)"),
        (np.ones((1, 1, 0, 4), bool), (8, 8), ValueError, "at least one element"),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(blocks, block, error, message) -> None:
    with pytest.raises(error, match=message):
        BlockList(blocks, block)
