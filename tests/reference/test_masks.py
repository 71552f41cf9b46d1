"""Visible pairs: compared with those of the reference, and drawn as a picture."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from cupy_flash import MaskMod, attention_reference, plot_mask, seen_pairs
from cupy_flash.mods.picture import block_classes

BATCH, HEADS, QUERIES, KEYS = 2, 3, 20, 30
SEED = np.random.default_rng(3)
DOCUMENTS = MaskMod(
    lambda b, i, j, doc: doc[b, i] == doc[b, j], doc=np.sort(SEED.integers(0, 4, (BATCH, 64)))
)
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "offset": {"causal": True, "q_offset": 3},
    "window": {"window_size": (5, 2)},
    "causal window": {"causal": True, "window_size": (4, None)},
    "prefix": {"causal": True, "prefix_lens": np.array([12, 0], np.int32)},
    "padded": {"causal": True, "seqlens_k": np.array([9, 30], np.int32)},
    "documents": {"mask_mod": DOCUMENTS, "causal": True},
    "array": {"mask": SEED.random((1, HEADS, QUERIES, KEYS)) < 0.4},
    "tree": {"tree_mask": SEED.integers(0, 2**20, (BATCH, QUERIES), dtype=np.uint64)},
    "scores alone": {"softcap": 3.0, "alibi_slopes": np.ones(HEADS, np.float32)},
}


@pytest.mark.parametrize("name", MASKS)
def test_it_is_what_the_reference_gives_a_weight(name: str, rng: np.random.Generator) -> None:
    q = rng.standard_normal((BATCH, QUERIES, HEADS, 8))
    k = rng.standard_normal((BATCH, KEYS, HEADS, 8))
    # Values that form an identity matrix make the output equal to the weights.
    v = np.broadcast_to(np.eye(KEYS)[None, :, None], (BATCH, KEYS, HEADS, KEYS))
    arguments = dict(MASKS[name])
    if "alibi_slopes" in arguments:
        arguments["alibi_slopes"] = arguments["alibi_slopes"].astype(np.float64)
    weights = attention_reference(q, k, v, **arguments)
    for b, h in np.ndindex(BATCH, HEADS):
        seen = seen_pairs(QUERIES, KEYS, b=b, h=h, **MASKS[name])
        np.testing.assert_array_equal(seen, weights[b, :, h] > 0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such sequence": ({"b": 2, **MASKS["padded"]}, r"seqlens_k has shape \(2,\), but b is 2"),
    "no such head": ({"h": 3, **MASKS["array"]}, r"mask has shape .*, but h is 3"),
    "another number of queries": ({"tree_mask": np.ones((1, 9), np.uint64)},
        r"tree_mask has shape \(1, 9\), but seqlen_q is 20"),
    "another number of keys": ({"mask": np.ones((QUERIES, 9), bool)}, "but seqlen_k is 30"),
    "too many axes": ({"mask": np.ones((1, 1, 1, QUERIES, KEYS), bool)}, "expected 4 axes"),
    "nothing to be seen in spite of": ({"prefix_lens": np.array([12, 0], np.int32)},
        "pass causal=True"),
    "below 0": ({"b": -1, **MASKS["array"]}, "b is -1; expected at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arrays_have_the_sequence_and_its_pairs(name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        seen_pairs(QUERIES, KEYS, **arguments)


def test_blocks_are_left_out_masked_or_whole() -> None:
    classes = block_classes(seen_pairs(6, 6, causal=True), (2, 4))
    assert classes.tolist() == [[1, 0], [1, 0], [2, 1]]
    ragged = block_classes(seen_pairs(5, 7, window_size=(0, 0), q_offset=0), (3, 3))
    assert ragged.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_pictures_show_pairs_or_blocks() -> None:
    pytest.importorskip("matplotlib")
    (pairs,) = plot_mask(6, 6, causal=True).images
    np.testing.assert_array_equal(pairs.get_array(), np.tri(6))
    (blocks,) = plot_mask(6, 6, causal=True, block=(2, 4)).images
    assert blocks.get_array().tolist() == [[1] * 4 + [0] * 2] * 4 + [[2] * 4 + [1] * 2] * 2
    ax = DOCUMENTS.plot(QUERIES, KEYS, b=1)
    np.testing.assert_array_equal(
        ax.images[0].get_array(), seen_pairs(QUERIES, KEYS, b=1, mask_mod=DOCUMENTS)
    )
    assert DOCUMENTS.plot(8, 8, ax=ax) is ax
    for block, error in (((0, 4), ValueError), (4, TypeError), ((2.5, 4), TypeError)):
        with pytest.raises(error, match=r"block is .*; expected \(rows, keys\)"):
            plot_mask(6, 6, block=block)


def test_pictures_have_whole_numbers_on_their_axes_and_blocks_a_legend() -> None:
    pytest.importorskip("matplotlib")
    pairs, blocks = plot_mask(2, 3), plot_mask(6, 6, causal=True, block=(2, 4))
    for axis in (pairs.xaxis, pairs.yaxis):
        assert all(tick == round(tick) for tick in axis.get_majorticklocs())

    assert pairs.get_legend() is None
    texts = [text.get_text() for text in blocks.get_legend().get_texts()]
    assert texts == ["empty", "partial", "full"]
    whole = plot_mask(6, 6, block=(2, 4)).get_legend()
    assert [text.get_text() for text in whole.get_texts()] == ["full"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy_flash\[plot\]'"):
        plot_mask(6, 6)
