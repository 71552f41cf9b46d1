"""The rule of visible pairs, compared with explicit masks; no other module states the rule."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import cupy_flash
from cupy_flash.problem.mask import Mask, causal_ends, masked_after, masked_before

PACKAGE = Path(cupy_flash.__file__).parent


def written_out(mask: Mask) -> np.ndarray:
    rows, keys = np.mgrid[: mask.seqlen_q, : mask.seqlen_k]
    distance = keys - rows - mask.q_offset
    seen = (distance <= 0) | (not mask.causal)
    if mask.left is not None:
        seen &= distance >= -mask.left
    if mask.right is not None:
        seen &= distance <= mask.right
    return seen | (keys < mask.prefix)


def random_masks(rng: np.random.Generator) -> list[Mask]:
    """Return random masks: causal or full, half of them with windows, some with a prefix."""
    masks = []
    for _ in range(300):
        seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 40, 2))
        offset = int(rng.integers(-seqlen_q, seqlen_k + 1))
        mask = Mask(seqlen_q, seqlen_k, bool(rng.integers(4)), offset)
        if rng.integers(2):
            left, right = (None if rng.integers(3) == 0 else int(rng.integers(45)) for _ in "lr")
            prefix = int(rng.integers(45)) if rng.integers(2) else 0
            mask = Mask(*mask[:4], None if prefix else left, right, prefix)
        masks.append(mask)
    return masks


def test_rows_see_what_a_mask_that_is_written_out_shows(rng) -> None:
    for mask in random_masks(rng):
        matrix = written_out(mask)
        rows = np.arange(mask.seqlen_q)
        begins, ends = mask.begins(rows), mask.ends(rows)
        np.testing.assert_array_equal(ends, [mask.end(int(row)) for row in rows])
        np.testing.assert_array_equal(begins, [mask.begin(int(row)) for row in rows])
        hidden = masked_after(ends, 0, mask.seqlen_k) | masked_before(begins, 0, mask.seqlen_k)
        np.testing.assert_array_equal(hidden, ~matrix)
        assert mask.is_full <= matrix.all()
        first = int(rng.integers(mask.seqlen_q))
        start = int(rng.integers(mask.seqlen_k))
        part = (first, mask.seqlen_q, start, mask.seqlen_k)
        np.testing.assert_array_equal(mask.masked(*part), ~matrix[first:, start:])
        assert mask.all_visible(first, mask.seqlen_q) == matrix[first:].all()
        inside = np.ones(mask.seqlen_k, bool)
        for left, right in mask.edges(*part):
            assert start <= left < right <= mask.seqlen_k
            assert inside[left:right].all()
            inside[left:right] = False
        assert matrix[first:, start:][:, inside[start:]].all()


def test_blocks_of_keys_and_tiles_of_rows_are_each_others_transpose(rng) -> None:
    for mask in random_masks(rng):
        matrix = written_out(mask)
        first, stop = np.sort(rng.choice(mask.seqlen_q + 1, 2, replace=False))
        size = int(rng.integers(1, 12))
        blocks = [matrix[first:stop, k : k + size] for k in range(0, mask.seqlen_k, size)]
        found = mask.blocks_of_keys(int(first), int(stop), size)
        assert_cover(found, blocks, [block.shape[1] == size for block in blocks])
        first, stop = np.sort(rng.choice(mask.seqlen_k + 1, 2, replace=False))
        tiles = [matrix[r : r + size, first:stop] for r in range(0, mask.seqlen_q, size)]
        found = mask.tiles_of_rows(int(first), int(stop), size)
        assert_cover(found, tiles, [True] * len(tiles))


def assert_cover(found: tuple[int, int, int, int], parts: list, may_be_whole: list[bool]) -> None:
    """Assert that [begin, end) covers all visible pairs, and [full_begin, full_end) full parts."""
    begin, full_begin, full_end, end = found
    assert 0 <= begin <= full_begin <= full_end <= end <= len(parts)
    seen = [index for index, part in enumerate(parts) if part.any()]
    assert set(seen) <= set(range(begin, end))
    if seen:
        # There is no empty part at either end.
        assert (begin, end) == (seen[0], seen[-1] + 1)
    full = (part.size and part.all() and ok for part, ok in zip(parts, may_be_whole, strict=True))
    whole = [index for index, is_full in enumerate(full) if is_full]
    assert whole == list(range(full_begin, full_end))


def test_keys_are_seen_by_the_rows_between_the_first_and_the_last(rng) -> None:
    for mask in random_masks(rng):
        rows = np.arange(mask.seqlen_q)
        for key, column in enumerate(written_out(mask).T):
            between = (rows >= mask.first_row(key)) & (rows < mask.last_row(key))
            np.testing.assert_array_equal(between, column)


def test_pairs_are_those_of_the_mask_less_half_of_each_rows_last_on_a_diagonal(rng) -> None:
    for mask in random_masks(rng):
        matrix = written_out(mask)
        rows, keys = np.mgrid[: mask.seqlen_q, : mask.seqlen_k]
        diagonal = matrix & (keys == rows + mask.q_offset)
        is_plain = mask.causal and mask[4:] == (None, None, 0)
        assert mask.pairs() == matrix.sum() - 0.5 * is_plain * diagonal.sum()


def test_rows_of_sequences_are_aligned_at_their_ends() -> None:
    q, k = np.array([3, 1, 2]), np.array([5, 4, 1])
    seen = causal_ends(3, q, k)
    for row, (seqlen_q, seqlen_k) in zip(seen, zip(q, k, strict=True), strict=True):
        mask = Mask(int(seqlen_q), int(seqlen_k), True, int(seqlen_k - seqlen_q))
        ends = mask.ends(np.arange(seqlen_q))
        np.testing.assert_array_equal(np.clip(row[:seqlen_q], 0, seqlen_k), ends)


def reckons_with_the_offset(node: ast.AST) -> bool:
    """Return whether an expression adds to, subtracts from or compares a mask's offset."""
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


# Number of expressions that compute positions for modifications; these do not state the rule.
GIVES_POSITIONS = {
    str(Path("calls", "check", "check_mod.py")): 1,
    str(Path("cpu", "backward", "tiled.py")): 1,
    str(Path("mods", "on_arrays", "scores.py")): 2,
    str(Path("mods", "on_arrays", "score_derivatives.py")): 1,
    # These expressions place parts of a sequence relative to each other.
    str(Path("parallel", "score_blocks.py")): 4,
    # These expressions convert positions in a cache of transformers.
    "transformers_masks.py": 3,
    # This expression compares the offset of nested tensors with its default.
    str(Path("torch", "nested.py")): 1,
}


@pytest.mark.parametrize("module", MODULES)
def test_no_other_module_states_the_rule(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    found = [node.lineno for node in ast.walk(tree) if reckons_with_the_offset(node)]
    assert len(found) == GIVES_POSITIONS.get(module, 0)
