"""Attention weights, compared with the reference, whose output they are if v is an identity."""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.weight_rule import by_identity
from support.foreign import Foreign

from cupy_flash import (
    MaskMod,
    ScoreMod,
    attention_received,
    attention_reference,
    attention_weights,
    plot_attention,
)
from cupy_flash.mods.keywords import NAMES
from cupy_flash.reference import rows

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
BATCH, HEADS, HEADS_KV, DIM = 2, 4, 2, 6
Generator = np.random.Generator


def random_qk(
    rng: Generator, seqlen_q: int, seqlen_k: int, *, batch: tuple[int, ...] = (BATCH,)
) -> tuple[np.ndarray, np.ndarray]:
    q = rng.standard_normal((*batch, seqlen_q, HEADS, DIM))
    return q, rng.standard_normal((*batch, seqlen_k, HEADS_KV, DIM))


def modifications(rng: Generator, seqlen_q: int, seqlen_k: int) -> dict[str, dict[str, Any]]:
    """Return random arguments that modify attention, by the name of the modification."""
    pairs = BATCH, HEADS, seqlen_q, seqlen_k
    table = rng.standard_normal(HEADS)
    return {
        "plain": {},
        "scale": {"softmax_scale": -0.7},
        "causal": {"causal": True},
        "causal from the left": {"causal": True, "q_offset": 0},
        "q_offset": {"causal": True, "q_offset": rng.integers(-3, seqlen_k, BATCH)},
        "window_size": {"window_size": (3, 2), "q_offset": 1},
        "prefix_lens": {"causal": True, "prefix_lens": np.array([0, seqlen_k // 2])},
        "seqlens_k": {"seqlens_k": rng.integers(0, seqlen_k + 1, BATCH)},
        "softcap": {"softcap": 0.8},
        "score_mod": {
            "score_mod": ScoreMod(
                lambda score, h, i, j, table: score * table[h] + 0.1 * (i - j), table=table
            )
        },
        "mask_mod": {"mask_mod": MaskMod(lambda b, h, i, j: (i + 2 * j + h + b) % 3 != 0)},
        "alibi_slopes": {"alibi_slopes": rng.random((BATCH, HEADS))},
        "bias": {"bias": rng.standard_normal(pairs)},
        "mask": {"mask": rng.random(pairs) < 0.6},
        "tree_mask": {"tree_mask": rng.integers(0, 2**64, (BATCH, seqlen_q), np.uint64)},
        "sinks": {"sinks": np.array([-1.0, 0.5, -np.inf, 3.0])},
        "dropout_p": {"dropout_p": 0.4, "dropout_seed": rng.integers(0, 2**60, 2)},
    }


MODIFICATIONS = modifications(np.random.default_rng(0), 3, 5)


def test_every_modification_is_tried() -> None:
    given = {name for options in MODIFICATIONS.values() for name in options}
    assert given - {"causal", "softmax_scale"} == NAMES - {"seqused_q", "cache_leftpad"}


@pytest.mark.parametrize("name", MODIFICATIONS)
def test_they_are_the_output_of_the_reference_for_an_identity(name: str, rng: Generator) -> None:
    for _ in range(4):
        seqlen_q, seqlen_k = rng.integers(1, 24, 2).tolist()
        q, k = random_qk(rng, seqlen_q, seqlen_k)
        options = modifications(rng, seqlen_q, seqlen_k)[name]
        exact = by_identity(q, k, **options)
        found = attention_weights(q, k, **options)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-14)

        queries = rng.integers(-seqlen_q, seqlen_q, 5)
        heads = rng.integers(-HEADS, HEADS, 3)
        chosen = attention_weights(q, k, queries=queries, heads=heads, **options)
        np.testing.assert_allclose(
            chosen, exact[:, heads][:, :, queries], rtol=0, atol=1e-14, strict=True
        )


@pytest.mark.parametrize("name", MODIFICATIONS)
def test_their_product_with_the_values_is_the_output(name: str, rng: Generator) -> None:
    q, k = (x.astype(np.float32) for x in random_qk(rng, 9, 17))
    v = rng.standard_normal((BATCH, 17, HEADS_KV, 5), dtype=np.float32)
    options = modifications(rng, 9, 17)[name]
    out = attention_reference(q, k, v, **options)
    weights = attention_weights(q, k, queries=[7, -1, 2], **options)
    assert weights.dtype == np.float32
    v_of_head = np.repeat(v, HEADS // HEADS_KV, 2).swapaxes(1, 2).astype(np.float64)
    product = (weights.astype(np.float64) @ v_of_head).swapaxes(1, 2)
    np.testing.assert_allclose(product, out[:, [7, -1, 2]], rtol=0, atol=1e-6)


SELECTIONS: dict[str, Any] = {
    "one": 2,
    "the last": -1,
    "a number of NumPy": np.int16(3),
    "a slice": slice(1, 3),
    "a slice from the end": slice(None, None, -2),
    "a slice past the end": slice(2, 100),
    "a list": [3, 0, 0, -4],
    "a tuple": (1, 2),
    "a range": range(3, -1, -1),
    "an array": np.array([-2, 1], np.int8),
    "an array without signs": np.array([2, 0], np.uint64),
    "an array without axes": np.array(1),
    "none": [],
    "an empty array": np.array([], np.int32),
    "an empty slice": slice(3, 1),
    "all": None,
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_rows_and_heads_are_chosen_as_by_numpy(name: str, rng: Generator) -> None:
    q, k = random_qk(rng, 4, 7)
    every = attention_weights(q, k, causal=True)
    selection = SELECTIONS[name]
    index = {"a tuple": [1, 2], "all": slice(None)}.get(name, selection)
    chosen = np.atleast_1d(np.arange(4)[index if np.size(index) else slice(0)])
    for axis, argument in ((2, "queries"), (1, "heads")):
        found = attention_weights(q, k, causal=True, **{argument: selection})
        expected = np.take(every, chosen, axis)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14, strict=True)


def test_indices_of_another_library_are_read(rng: Generator) -> None:
    q, k = random_qk(rng, 4, 7)
    found = attention_weights(q, k, queries=Foreign(np.array([3, 1])), heads=Foreign(np.array(2)))
    np.testing.assert_array_equal(found, attention_weights(q, k, queries=[3, 1], heads=2))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_layout_and_batch_axes_give_the_same_axes(
    rng: Generator, batch: tuple[int, ...], layout: str
) -> None:
    q, k = random_qk(rng, 5, 7, batch=batch)
    flat = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (q, k)]
    expected = attention_weights(*flat, causal=True).reshape(*batch, HEADS, 5, 7)
    if layout == "bhsd":
        q, k = (x.swapaxes(-3, -2) for x in (q, k))
    options: dict[str, Any] = {"causal": True, "layout": layout}
    found = attention_weights(q, k, **options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14, strict=True)
    np.testing.assert_allclose(found, by_identity(q, k, **options), rtol=0, atol=1e-14)
    largest, keys = attention_weights(q, k, top_k=2, heads=1, **options)
    assert largest.shape == keys.shape == (*batch, 1, 5, 2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_inputs_give_the_exact_weights_rounded_to_float32(
    dtype: Any, rng: Generator
) -> None:
    q, k = (x.astype(dtype) for x in random_qk(rng, 9, 13))
    exact = attention_weights(q.astype(np.float64), k.astype(np.float64), causal=True)
    found = attention_weights(q, k, causal=True)
    np.testing.assert_array_equal(found, exact.astype(np.float32), strict=True)


def test_float8_is_multiplied_by_its_scales(rng: Generator) -> None:
    q, k = (x.astype(FLOAT8) for x in random_qk(rng, 9, 13))
    scales = {
        "q_scale": rng.random((BATCH, 1, HEADS), np.float32),
        "k_scale": 1 + rng.random((BATCH, 1, HEADS_KV), np.float32),
    }
    for given in ({}, {"k_scale": 2.5}, scales):
        found = attention_weights(q, k, causal=True, **given)
        assert found.dtype == np.float32
        exact = by_identity(q, k, causal=True, **given)
        np.testing.assert_allclose(found, exact, rtol=2.0**-23, atol=0)
    assert np.abs(found - attention_weights(q, k, causal=True)).max() > 0.01


def test_positions_are_not_limited_to_32_bits(rng: Generator) -> None:
    q, k = random_qk(rng, 3, 5)
    found = attention_weights(q, k, causal=True, q_offset=np.array([2**31 - 1, -(2**31)]))
    np.testing.assert_allclose(found[0], attention_weights(q, k)[0], rtol=0, atol=1e-14)
    assert not found[1].any()


def test_queries_without_keys_have_no_weight_and_sinks_take_some(rng: Generator) -> None:
    q, k = random_qk(rng, 6, 4)
    weights = attention_weights(q, k, causal=True)
    assert not weights[:, :, :2].any()
    np.testing.assert_allclose(weights[:, :, 2:].sum(-1), 1, rtol=1e-14)
    with_sinks = attention_weights(q, k, causal=True, sinks=np.full(HEADS, 0.5))
    assert not with_sinks[:, :, :2].any()
    assert (with_sinks[:, :, 2:].sum(-1) < 1).all()
    of_one_key = attention_weights(q, k, queries=2, causal=True)
    np.testing.assert_array_equal(of_one_key, np.broadcast_to([1, 0, 0, 0], (BATCH, HEADS, 1, 4)))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_have_no_weight_even_in_rows_without_numbers(
    poison: float, rng: Generator
) -> None:
    q, k = random_qk(rng, 6, 6)
    clean = attention_weights(q, k, causal=True)
    q[...] = abs(q)
    expected = attention_weights(q, k, causal=True)
    assert np.abs(expected - clean).max() > 0.01
    k[:, 3] = poison
    found = attention_weights(q, k, causal=True)
    np.testing.assert_allclose(found[:, :, :3], expected[:, :, :3], rtol=0, atol=1e-14)
    seen = np.tri(6, dtype=bool)[3:]
    np.testing.assert_array_equal(
        np.isnan(found[:, :, 3:]), np.broadcast_to(seen, (BATCH, HEADS, 3, 6))
    )
    assert not found[:, :, 3:][..., ~seen].any()
    largest, keys = attention_weights(q, k, queries=4, causal=True, top_k=6)
    assert np.isnan(largest[..., :5]).all()
    assert not largest[..., 5].any()
    np.testing.assert_array_equal(keys, np.broadcast_to(np.arange(6), (BATCH, HEADS, 1, 6)))


def sorted_by_weight(weights: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest weights of each row and their keys, from a sorted copy of all weights."""
    keys = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(weights, keys, -1), keys


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_top_k_gives_the_first_of_the_sorted_weights(name: str, dtype: Any, rng: Generator) -> None:
    q, k = (x.astype(dtype) for x in random_qk(rng, 7, 13))
    # Keys are equal, so that only their order decides.
    k[:, [3, 4, 9]] = k[:, 11:12]
    options = modifications(rng, 7, 13)[name] | {"queries": [6, 0, 3], "heads": [-1, 0, 1]}
    weights = attention_weights(q, k, **options)
    for count in (1, 2, 5, 12, 13, 30):
        found = attention_weights(q, k, top_k=count, **options)
        for one, other in zip(found, sorted_by_weight(weights, count), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def test_equal_weights_come_in_the_order_of_their_keys() -> None:
    q, k = np.zeros((1, 2, 1, 4), np.float32), np.zeros((1, 8, 1, 4), np.float32)
    weights, keys = attention_weights(q, k, top_k=3)
    assert keys.tolist() == [[[[0, 1, 2]] * 2]]
    assert (weights == 1 / 8).all()
    # Masked keys are last, also in the order of their keys.
    mask = np.array([0, 0, 0, 1, 0, 1, 0, 0], bool)[None]
    weights, keys = attention_weights(q, k, mask=np.repeat(mask, 2, 0), top_k=5)
    assert keys[0, 0, 0].tolist() == [3, 5, 0, 1, 2]
    assert weights[0, 0, 0].tolist() == [0.5, 0.5, 0, 0, 0]
    # A query that attends to no key has only equal weights.
    for offset in (-5, -1):
        weights, keys = attention_weights(q, k, q_offset=offset, causal=True, queries=0, top_k=3)
        assert not weights.any()
        assert keys.ravel().tolist() == [0, 1, 2]
    # Weights that differ by less than float32 resolves are equal.
    k[0, :, 0, 0] = np.arange(8) * 1e-9
    q[...] = 1
    for count in (3, 8):
        _, keys = attention_weights(q, k, top_k=count)
        np.testing.assert_array_equal(keys[0, 0, 0], np.arange(count))


@pytest.mark.parametrize("top_k", [None, 3])
def test_chunks_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, rng: Generator, top_k: int | None
) -> None:
    q, k = random_qk(rng, 23, 31)
    options: dict[str, Any] = {"causal": True, "queries": slice(None, None, -2), "top_k": top_k}
    whole = attention_weights(q, k, **options)
    for chunk_rows in (1, 5):
        monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_rows * 8 * 31)
        chunked = attention_weights(q, k, **options)
        for one, other in zip(*((x if top_k else (x,)) for x in (chunked, whole)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


def test_top_k_needs_no_memory_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.random.default_rng(0).standard_normal((1, 800, 2, 8), dtype=np.float32)
    chunk = 40 * 8 * 800
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    # The first call also imports modules.
    attention_weights(q[:, :1], q, top_k=4)
    tracemalloc.start()
    try:
        attention_weights(q, q, top_k=4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * chunk < 2 * 800 * 800 * 4


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "heads"),
    [(1, 0, 5, 2), (1, 5, 0, 2), (1, 0, 0, 2), (1, 3, 5, 0), (0, 3, 5, 2)],
)
def test_empty_sizes_give_empty_arrays(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int
) -> None:
    q, k = np.ones((batch, seqlen_q, heads, 4)), np.ones((batch, seqlen_k, heads, 4))
    for causal in (False, True):
        weights = attention_weights(q, k, causal=causal)
        assert weights.shape == (batch, heads, seqlen_q, seqlen_k)
        for count in (0, 2):
            largest, keys = attention_weights(q, k, causal=causal, top_k=count)
            assert largest.shape == keys.shape == (batch, heads, seqlen_q, min(count, seqlen_k))
            assert (largest.dtype, keys.dtype) == (np.float64, np.int64)


def test_no_keys_may_be_asked_for(rng: Generator) -> None:
    weights, keys = attention_weights(*random_qk(rng, 4, 7), top_k=0, queries=1)
    assert weights.shape == keys.shape == (BATCH, HEADS, 1, 0)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a query too far": ({"queries": [0, 4]}, ValueError, "index 4 of queries is out of range; q"),
    "too far from the end": ({"queries": -5}, ValueError, "index -5 of queries .* q has 4 queries"),
    "no such head": ({"heads": np.array([4])}, ValueError, "index 4 of heads .* q has 4 heads"),
    "a large index": ({"heads": np.array([2**64 - 1], np.uint64)}, ValueError, "out of range"),
    "a fraction": ({"queries": [1.0]}, TypeError, r"queries is 1\.0; expected an integer"),
    "fractions": ({"queries": np.ones(2)}, TypeError, "queries has dtype float64; expected integ"),
    "bools": ({"heads": np.ones(4, bool)}, TypeError, "heads has dtype bool; expected integers"),
    "a bool": ({"heads": True}, TypeError, "heads is True; expected an integer"),
    "a name": ({"queries": "all"}, TypeError, "queries is 'all'; expected an integer"),
    "two axes": ({"queries": np.ones((1, 2), int)}, ValueError, r"queries has shape \(1, 2\)"),
    "a list in a list": ({"queries": [[1]]}, TypeError, r"queries is \[1\]; expected an integer"),
    "a slice of a name": ({"queries": slice("a")}, TypeError, "queries is slice"),
    "a slice without steps": ({"heads": slice(0, 2, 0)}, ValueError, "heads is slice.*zero"),
    "fewer keys than none": ({"top_k": -1}, ValueError, "top_k is -1; expected at least 0"),
    "a fraction of keys": ({"top_k": 1.5}, TypeError, r"top_k is 1\.5; expected an integer"),
    "a layout": ({"layout": "sbhd"}, ValueError, "layout must be 'bshd' or 'bhsd'"),
    "another library's name": ({"scale": 1.0}, TypeError, "pass softmax_scale"),
    "a mask of other keys": ({"mask": np.ones((4, 6), bool)}, ValueError, "mask has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, rng: Generator) -> None:
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        attention_weights(*random_qk(rng, 4, 7), **options)


@pytest.mark.parametrize("axis", ["batch", "heads", "head_dim", "ndim"])
def test_shapes_that_do_not_match_are_refused(axis: str, rng: Generator) -> None:
    q, k = random_qk(rng, 4, 7)
    q = {"batch": q[:1], "heads": q[:, :, :3], "head_dim": q[..., :5], "ndim": q[0]}[axis]
    with pytest.raises(ValueError, match=r"q and k must agree|must be a multiple|k has 4 axes"):
        attention_weights(q, k)


def test_a_list_is_refused_by_name(rng: Generator) -> None:
    q, k = random_qk(rng, 4, 7)
    with pytest.raises(TypeError, match="k is a list; expected a NumPy or CuPy array"):
        attention_weights(q, k.tolist())


def test_arrays_of_another_library_are_taken_and_given_back(rng: Generator) -> None:
    q, k = random_qk(rng, 4, 7)
    found = attention_weights(Foreign(q), Foreign(k), top_k=3)
    for one, other in zip(found, attention_weights(q, k, top_k=3), strict=True):
        assert isinstance(one, Foreign)
        np.testing.assert_array_equal(one.array, other)


# ---- Pictures.


@pytest.fixture
def weights(rng: Generator) -> np.ndarray:
    pytest.importorskip("matplotlib")
    found: np.ndarray = attention_weights(*random_qk(rng, 3, 5), causal=True)[0, 0]
    return found


def image_of(ax: Any) -> np.ndarray:
    (image,) = ax.images
    return np.ma.filled(image.get_array(), np.nan)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "float64": lambda x: x,
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "float8": lambda x: x.astype(FLOAT8),
    "another library": Foreign,
}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_show_weights_of_any_kind(kind: str, weights: np.ndarray) -> None:
    given = KINDS[kind](weights)
    expected = weights if kind == "another library" else given.astype(np.float64)
    np.testing.assert_array_equal(image_of(plot_attention(given)), expected)


def test_rows_and_keys_are_labelled_by_their_tokens(weights: np.ndarray) -> None:
    queries, keys = ["a", "$x$", "c"], ("the", "$", "_", "", "cat")
    ax = plot_attention(weights, queries=queries, keys=np.array(keys))
    for axis, labels in ((ax.yaxis, queries), (ax.xaxis, keys)):
        assert [text.get_text() for text in axis.get_ticklabels()] == list(labels)
        assert axis.get_majorticklocs().tolist() == list(range(len(labels)))
        assert not any(text.get_parse_math() for text in axis.get_ticklabels())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    # The first query is at the top, and each cell has its index in its middle.
    assert (*ax.get_xlim(), *ax.get_ylim()) == (-0.5, 4.5, 2.5, -0.5)
    for axis in (plot_attention(weights[:2]).xaxis, plot_attention(weights[:2]).yaxis):
        assert all(tick == round(tick) for tick in axis.get_majorticklocs())


def test_colors_begin_at_0_and_end_at_the_largest_weight_or_at_vmax(weights: np.ndarray) -> None:
    for shown in (weights, weights[2:]):
        assert plot_attention(shown).images[0].get_clim() == (0, shown.max())
    assert weights[2:].min() > 0
    assert plot_attention(weights, vmax=2).images[0].get_clim() == (0, 2)
    weights[1] = np.nan
    ax = plot_attention(weights)
    assert ax.images[0].get_clim() == (0, np.nanmax(weights))
    np.testing.assert_array_equal(np.isnan(image_of(ax)), np.isnan(weights))


def test_pictures_are_drawn_in_given_axes_with_or_without_a_scale(weights: np.ndarray) -> None:
    figure = plot_attention(weights).figure
    assert len(figure.axes) == 2
    assert figure.axes[1].get_ylabel() == "weight"
    ax = figure.add_subplot()
    assert plot_attention(weights, ax=ax, colorbar=False) is ax
    assert len(figure.axes) == 3
    assert len(plot_attention(weights, colorbar=False).figure.axes) == 1


WRONG_PICTURES: dict[str, tuple[Callable[[np.ndarray], Any], type[Exception], str]] = {
    "several heads": (lambda w: plot_attention(w[None]), ValueError, r"shape \(1, 3, 5\); exp"),
    "no rows": (lambda w: plot_attention(w[:0]), ValueError, "at least one row and one key"),
    "a list": (lambda w: plot_attention(w.tolist()), TypeError, "weights is a list; expected a N"),
    "complex": (lambda w: plot_attention(w * 1j), TypeError, "weights has dtype complex128"),
    "few labels": (lambda w: plot_attention(w, queries=["a"]), ValueError,
        "queries has length 1; expected 3"),
    "many labels": (lambda w: plot_attention(w, keys=list("abcdef")), ValueError,
        "keys has length 6; expected 5"),
    "one str": (lambda w: plot_attention(w, keys="abcde"), TypeError, "keys is one str; expected"),
    "numbers": (lambda w: plot_attention(w, queries=[1, 2, 3]), TypeError, "contains an int; exp"),
    "no color": (lambda w: plot_attention(w, vmax=0), ValueError, "vmax is 0; expected a number"),
    "a color": (lambda w: plot_attention(w, vmax="blue"), TypeError, "vmax is 'blue'; expected a"),
    "a scale": (lambda w: plot_attention(w, colorbar=1), TypeError, "colorbar is 1; expected True"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_PICTURES)
def test_wrong_pictures_are_refused(name: str, weights: np.ndarray) -> None:
    call, error, message = WRONG_PICTURES[name]
    with pytest.raises(error, match=message):
        call(weights)


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, weights: np.ndarray
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'cupy_flash\[plot\]'"):
        plot_attention(weights)


# ---- Sums over queries


@pytest.mark.parametrize("name", modifications(np.random.default_rng(), 7, 9))
@pytest.mark.parametrize("queries", [None, slice(-3, None), slice(2, 5), slice(4, 1)])
def test_what_a_key_receives_is_the_sum_of_its_weights(
    name: str, queries: slice | None, rng: Generator
) -> None:
    q, k = random_qk(rng, 7, 9)
    options = modifications(rng, 7, 9)[name]
    weights = attention_weights(q, k, **options)[:, :, queries or slice(None)]
    found = attention_received(q, k, queries=queries, **options)
    np.testing.assert_allclose(found, weights.sum(axis=2), rtol=0, atol=1e-14)
    grouped = attention_received(q, k, queries=queries, grouped=True, **options)
    expected = found.reshape(BATCH, HEADS_KV, HEADS // HEADS_KV, 9).sum(axis=2)
    np.testing.assert_allclose(grouped, expected, rtol=0, atol=1e-14)


def test_received_sums_have_the_batch_axes_and_the_precision_of_the_inputs(rng: Generator) -> None:
    q, k = (x.astype(np.float16) for x in random_qk(rng, 5, 8, batch=(3, 1)))
    found = attention_received(q, k, causal=True)
    assert found.shape == (3, 1, HEADS, 8)
    assert found.dtype == np.float32
    axes = [x.swapaxes(-2, -3) for x in (q, k)]
    np.testing.assert_array_equal(attention_received(*axes, causal=True, layout="bhsd"), found)
    # Each row of weights has the sum 1.
    np.testing.assert_allclose(found.sum(axis=-1), 5, rtol=1e-6)


@pytest.mark.parametrize(
    ("queries", "error", "message"),
    [
        ([1, 2], TypeError, "expected a slice"),
        (3, TypeError, "expected a slice"),
        (slice(0, 4, 2), ValueError, "without a step"),
    ],
)
def test_queries_that_are_no_range_are_refused(
    queries: Any, error: type[Exception], message: str, rng: Generator
) -> None:
    with pytest.raises(error, match=message):
        attention_received(*random_qk(rng, 5, 8), queries=queries)
