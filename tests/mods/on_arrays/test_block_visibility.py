"""Blocks that a mask leaves empty or full: no wrong answers, and no empty block is computed."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from support.comparisons import assert_all_close
from support.draws import few_then_slow
from support.mods.function_calls import function_calls
from support.mods.mod_gallery import BATCH, HEADS, MASKS
from support.mods.random_functions import random_function

from cupy_flash import (
    BlockList,
    MaskMod,
    attention_reference,
    flash_attention,
    flash_attention_backward,
)
from cupy_flash.cpu import forward_pass
from cupy_flash.mods.on_arrays import block_visibility as blocks_module
from cupy_flash.mods.on_arrays.block_visibility import BlockVisibility, block_visibility_of
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

RNG = np.random.default_rng(46)
DOCUMENTS = np.sort(RNG.integers(0, 12, 300)).astype(np.int32)
TABLE = RNG.random((400, 300)) < 0.01
BLOCKS = RNG.random((1, 1, 40, 30)) < 0.1

# Masks whose blocks are all decided: they compare values of one position, or differences.
KNOWN = {
    "documents": MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=DOCUMENTS),
    "window": MaskMod(lambda i, j: abs(i - j) <= 20),
    "distances": MaskMod(lambda i, j: (j - i) * 3 < 2**31 - 100),
    "table": MaskMod(lambda i, j, table: table[i, j], table=TABLE),
    "table of distances": MaskMod(lambda i, j, near: near[i - j], near=TABLE[7]),
    "blocks": BlockList(BLOCKS, block=(8, 9)),
    "blocks of heads": BlockList(RNG.random((2, 3, 9, 9)) < 0.2, block=(16, 16)),
    "rows": MaskMod(lambda b, i: i % 3 == b),
    "keys": MaskMod(lambda h, j: j // 40 == h),
    "heads": MaskMod(lambda h: h == 1),
    "some": MaskMod(lambda i, j: np.where(j < 50, i > 100, abs(i - j) < 9)),
    "real": MaskMod(lambda i, j, x: x[i] - x[j] < 0.5, x=np.sort(RNG.random(300)).astype("f4")),
}

X = np.where(np.arange(300) % 7 == 0, np.inf, 0).astype(np.float32)
DISTANT = np.where(np.arange(300) < 8, np.inf, np.arange(300)).astype(np.float32)
LARGE = np.where(np.arange(300) % 5 == 0, 3e38, -3e38).astype(np.float32)
# Differences of infinities are NaN, and such pairs are masked, whatever later operations do.
NOT_NUMBERS = {
    "minimum": MaskMod(lambda i, j, x: np.minimum(x[i] - x[j], 5) < 10, x=X),
    "all numbers": MaskMod(lambda i, j, x: x[i] - x[j] <= np.inf, x=X),
    "clip": MaskMod(lambda i, j, x: np.clip(x[i] - x[j], -1, 1) >= -1, x=X),
    "size": MaskMod(lambda i, j, x: np.clip(abs(x[i] - x[j]), 0, 600) <= 600, x=DISTANT),
    "sum": MaskMod(lambda i, j, x: np.maximum(x[i] + -x[j], 0) >= 0, x=X),
    "overflow": MaskMod(lambda i, j, x: (x[i] + x[j]) - (x[i] + x[j] * 0.99) <= np.inf, x=LARGE),
}


def positions(batch: int, heads: int, first: int, rows: int, keys: int) -> dict[str, Any]:
    ranges = range(batch), range(heads), range(first, first + rows), range(keys)
    places = np.ix_(*(np.array(x, np.int32) for x in ranges))
    return dict(zip("bhij", places, strict=True)) | {"q_start": 3, "k_start": 5}


def in_blocks(seen: np.ndarray, block: tuple[int, int]) -> BlockVisibility:
    """Return which blocks hold any visible pair, and which hold no masked pair."""
    rows, keys = (np.arange(0, n, size) for n, size in zip(seen.shape[2:], block, strict=True))
    found = [
        reduce.reduceat(reduce.reduceat(seen, rows, axis=2), keys, axis=3)
        for reduce in (np.logical_or, np.logical_and)
    ]
    return BlockVisibility(*found)


def compare(mod: MaskMod, dtype: Any, *, exact: bool = False) -> None:
    for first, rows, keys, block in (
        (0, 71, 90, (7, 5)),
        (-20, 130, 140, (16, 32)),
        (9, 1, 3, (4, 4)),
    ):
        at = positions(BATCH, HEADS, first, rows, keys)
        with np.errstate(all="ignore"):
            found = block_visibility_of(mod, at, *block, dtype)
        if found is None:
            assert not exact
            continue
        seen = np.broadcast_to(mod.evaluate(**at, dtype=dtype), (BATCH, HEADS, rows, keys))
        right = in_blocks(seen, block)
        assert not (right.any_visible & ~found.any_visible).any()
        assert not (found.all_visible & ~right.all_visible).any()
        if exact:
            np.testing.assert_array_equal(
                np.broadcast_to(found.any_visible, right.any_visible.shape), right.any_visible
            )


@pytest.mark.parametrize("name", MASKS)
def test_no_visible_pair_is_in_a_hidden_block(name: str) -> None:
    compare(MASKS[name], np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_no_block_with_a_hidden_nan_is_visible_as_a_whole(name: str, dtype: Any) -> None:
    compare(NOT_NUMBERS[name], dtype)


def test_a_table_of_all_sequences_is_counted_for_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RNG.random((50, 71, 90)) < 0.01
    mod = MaskMod(lambda b, i, j, table: table[b, i, j], table=table)
    at = positions(1, 1, 0, 71, 90) | {"b": np.full((1, 1, 1, 1), 49, np.int32)}
    monkeypatch.setattr(blocks_module, "_MOST_COUNTED_OF_PAIR", 1)
    found = block_visibility_of(mod, at, 7, 5, np.float32)
    assert found is not None
    np.testing.assert_array_equal(
        found.any_visible[0, 0], in_blocks(table[49:][None], (7, 5)).any_visible[0, 0]
    )
    # A table with more elements than a call of several sequences is not counted.
    several = block_visibility_of(mod, at | {"b": positions(2, 1, 0, 1, 1)["b"]}, 7, 5, np.float32)
    assert several is not None
    assert several.any_visible.all()


@pytest.mark.parametrize("begin", few_then_slow(range(0, 600, 100), 1))
def test_no_visible_pair_of_a_random_function_is_in_a_hidden_block(begin: int) -> None:
    for number in range(begin, begin + 100):
        function = random_function(number, kind="mask")
        mod = MaskMod(function.function(), **function.captures)
        compare(mod, function.real)


@pytest.mark.parametrize("name", KNOWN)
def test_common_masks_are_known_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "_MOST_COUNTED_OF_PAIR", 1 << 20)
    compare(KNOWN[name], np.float32, exact=name not in ("some", "distances"))


def test_functions_that_are_not_traced_have_no_blocks() -> None:
    mod = MaskMod(lambda i, j: np.sort(j) <= i, cuda="return j <= i;")
    assert block_visibility_of(mod, positions(1, 1, 0, 9, 9), 4, 4, np.float32) is None


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "KEYS_OF_BLOCK", 8)
    monkeypatch.setattr(forward_pass, "MIN_PAIRS_TO_LOOK_AT_BLOCKS", 1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("begin", range(0, 60, 15))
def test_random_functions_are_right_in_small_blocks(begin: int) -> None:
    for call in itertools.islice(function_calls(begin + 1, "float32"), 15):
        call.check(np)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (90, 30)}], ids=str)
@pytest.mark.parametrize("name", [*KNOWN, *NOT_NUMBERS])
def test_what_is_left_out_changes_nothing(name: str, options: dict[str, Any]) -> None:
    arrays = [RNG.standard_normal((2, n, 3, 16)).astype(np.float32) for n in (200, 230, 230, 200)]
    q, k, v, dout = arrays
    options = {"mask_mod": (KNOWN | NOT_NUMBERS)[name], **options}
    given = {"tile": (16, 24), "backend": "cpu"}
    out, lse = flash_attention(q, k, v, return_lse=True, **options, **given)
    truth, true_lse = attention_reference(q, k, v, return_lse=True, **options)
    naive = attention_naive(q, k, v, **options)
    assert max_error(out, truth) <= error_bound(naive, truth, np.float32, lse=true_lse)
    found = flash_attention_backward(dout, q, k, v, out, lse, **options, **given)
    given["tile"] = (256, 256)
    passes_without = flash_attention_backward(dout, q, k, v, out, lse, **options, **given)
    assert_all_close(found, passes_without, rtol=1e-4, atol=1e-5)


# Size of the blocks that the CPU backend examines; these masks leave each block empty or full.
ROWS, KEYS = 128, forward_pass.KEYS_OF_BLOCK
SHOWN = RNG.random((1, 1, 8, 16)) < 0.2
OF_BLOCKS = {
    "diagonal": BlockList(np.eye(8, dtype=bool)[None, None], block=(128, 128)),
    "block list": BlockList(SHOWN, block=(ROWS, KEYS)),
    "documents": MaskMod(
        lambda i, j, doc: doc[i] == doc[j], doc=np.repeat(np.arange(3), [128, 512, 384])
    ),
    "table": MaskMod(lambda i, j, table: table[i // 128, j // 64], table=SHOWN[0, 0]),
    "window": MaskMod(lambda i, j: abs(i // 128 - j // 128) <= 1),
}


class Work:
    """Recorder of the CPU backend's work: tiles of rows and keys, and multiply-adds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tiles: list[tuple[int, int]] = []
        self.products: list[int] = []
        tiles_of_keys, matmul = forward_pass.Pass.tiles_of_keys, np.matmul

        def tiles(job: Any, block: Any) -> Any:
            found = tiles_of_keys(job, block)
            self.tiles += [(block.rows.start, start) for start, _ in found]
            return found

        def product(a: np.ndarray, b: np.ndarray, **options: Any) -> Any:
            # Row sums are products with a vector or use other functions, so they are not counted.
            if b.ndim > 1:
                self.products.append(a.size * b.shape[-1])
            return matmul(a, b, **options)

        monkeypatch.setattr(forward_pass.Pass, "tiles_of_keys", tiles)
        monkeypatch.setattr(np, "matmul", product)

    def of(self, function: Any, *arrays: np.ndarray, **options: Any) -> tuple[Any, Any, int]:
        """Return the result of a call, its tiles, and its number of multiply-adds."""
        self.tiles, self.products = [], []
        result = function(*arrays, **options, tile=(ROWS, KEYS), backend="cpu")
        return result, sorted(self.tiles), sum(self.products)


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_hidden_blocks_are_not_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions process visible tiles only, with a proportional number of multiply-adds."""
    q, k, v, dout = RNG.standard_normal((4, 1, 1024, 1, 16)).astype(np.float32)
    mod, everything = OF_BLOCKS[name], MaskMod(lambda i, j: (i >= 0) & (j >= 0))
    seen = mod.evaluate(**positions(1, 1, 0, 1024, 1024), dtype=np.float32)
    some = in_blocks(np.broadcast_to(seen, (1, 1, 1024, 1024)), (ROWS, KEYS)).any_visible[0, 0]
    visible = [(int(i) * ROWS, int(j) * KEYS) for i, j in np.argwhere(some)]
    assert 0 < len(visible) < some.size
    work = Work(monkeypatch)
    (out, lse), *_ = work.of(flash_attention, q, k, v, return_lse=True, mask_mod=mod)
    for call in (
        functools.partial(work.of, flash_attention, q, k, v, return_lse=True),
        functools.partial(work.of, flash_attention_backward, dout, q, k, v, out, lse),
    ):
        _, tiles, products = call(mask_mod=mod)
        _, all_tiles, all_products = call(mask_mod=everything)
        assert tiles == visible
        assert len(all_tiles) == some.size
        assert products * some.size == all_products * len(visible) > 0
