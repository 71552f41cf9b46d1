"""The rule of who sees whom, against a mask written out, and that nothing else states it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import cupy_flash
from cupy_flash.problem.mask import Mask, seen_in_sequences, unseen

PACKAGE = Path(cupy_flash.__file__).parent


def written_out(mask: Mask) -> np.ndarray:
    rows, keys = np.mgrid[: mask.seqlen_q, : mask.seqlen_k]
    return (keys <= rows + mask.q_offset) | (not mask.causal)


def random_masks(rng: np.random.Generator) -> list[Mask]:
    masks = []
    for _ in range(200):
        seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 40, 2))
        offset = int(rng.integers(-seqlen_q, seqlen_k + 1))
        masks.append(Mask(seqlen_q, seqlen_k, bool(rng.integers(4)), offset))
    return masks


def test_rows_see_what_a_mask_that_is_written_out_shows(rng) -> None:
    for mask in random_masks(rng):
        matrix = written_out(mask)
        rows = np.arange(mask.seqlen_q)
        seen = mask.seen_by(rows)
        np.testing.assert_array_equal(seen, matrix.sum(axis=1))
        np.testing.assert_array_equal(seen, [mask.seen(int(row)) for row in rows])
        np.testing.assert_array_equal(unseen(seen, 0, mask.seqlen_k), ~matrix)
        first = int(rng.integers(mask.seqlen_q))
        start = int(rng.integers(mask.seqlen_k))
        if mask.causal:
            part = mask.unseen(first, mask.seqlen_q, start, mask.seqlen_k)
            np.testing.assert_array_equal(part, ~matrix[first:, start:])


def test_blocks_of_keys_and_tiles_of_rows_are_each_others_transpose(rng) -> None:
    for mask in random_masks(rng):
        matrix = written_out(mask)
        first, stop = np.sort(rng.choice(mask.seqlen_q + 1, 2, replace=False))
        size = int(rng.integers(1, 12))
        blocks = [matrix[first:stop, k : k + size] for k in range(0, mask.seqlen_k, size)]
        whole, some = mask.blocks_of_keys(int(first), int(stop), size)
        assert some == sum(block.any() for block in blocks)
        full = [block.all() and block.shape[1] == size for block in blocks]
        assert whole == sum(full)
        first, stop = np.sort(rng.choice(mask.seqlen_k + 1, 2, replace=False))
        tiles = [matrix[r : r + size, first:stop] for r in range(0, mask.seqlen_q, size)]
        some, whole = mask.tiles_of_rows(int(first), int(stop), size)
        assert [tile.any() for tile in tiles] == [index >= some for index in range(len(tiles))]
        assert [tile.all() for tile in tiles] == [index >= whole for index in range(len(tiles))]


def test_each_key_is_seen_from_its_first_row_on(rng) -> None:
    for mask in random_masks(rng):
        for key, column in enumerate(written_out(mask).T):
            expected = int(column.argmax()) if column.any() else mask.seqlen_q
            assert mask.first_row(key) == expected


def test_pairs_are_those_of_the_mask_less_half_of_each_rows_last(rng) -> None:
    for mask in random_masks(rng):
        matrix = written_out(mask)
        rows, keys = np.mgrid[: mask.seqlen_q, : mask.seqlen_k]
        diagonal = matrix & (keys == rows + mask.q_offset) if mask.causal else np.zeros(1)
        assert mask.pairs() == matrix.sum() - 0.5 * diagonal.sum()


def test_rows_of_sequences_are_aligned_at_their_ends() -> None:
    q, k = np.array([3, 1, 2]), np.array([5, 4, 1])
    seen = seen_in_sequences(3, q, k)
    for row, (seqlen_q, seqlen_k) in zip(seen, zip(q, k, strict=True), strict=True):
        mask = Mask(int(seqlen_q), int(seqlen_k), True, int(seqlen_k - seqlen_q))
        np.testing.assert_array_equal(
            np.clip(row[:seqlen_q], 0, seqlen_k), mask.seen_by(np.arange(seqlen_q))
        )


def reckons_with_the_offset(node: ast.AST) -> bool:
    """Whether an expression adds to a mask's offset, subtracts from it or compares with it."""
    if not isinstance(node, (ast.BinOp, ast.Compare)):
        return False
    parts = [node.left, *(node.comparators if isinstance(node, ast.Compare) else [node.right])]
    names = {getattr(part, "attr", getattr(part, "id", None)) for part in parts}
    is_none = any(isinstance(part, ast.Constant) and part.value is None for part in parts)
    return "q_offset" in names and not is_none


MODULES = sorted(
    str(path.relative_to(PACKAGE))
    for path in PACKAGE.rglob("*.py")
    if path.parts[-2:] != ("problem", "mask.py")
)


@pytest.mark.parametrize("module", MODULES)
def test_no_other_module_states_the_rule(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    found = [node.lineno for node in ast.walk(tree) if reckons_with_the_offset(node)]
    # A piece of a sequence's rows lies so much further behind: its mask is moved, not stated.
    assert len(found) == (module == str(Path("host", "batches.py")))
