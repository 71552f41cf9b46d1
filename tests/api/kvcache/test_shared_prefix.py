"""Calls whose sequences begin with the same pages: the prefix is computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.calls.latent_support import after_the_append
from support.calls.sequence_support import Truth, to_numpy
from support.calls.shared_prefix_calls import KINDS, random_call
from support.comparisons import with_arrays

import cupy_flash
from cupy_flash.calls import dispatch, shared_prefix

PAGE, PAGES, BATCH, HEADS, DIM = 16, 6, 3, 4, 8
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


@pytest.fixture
def combined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Merges of results; every prefix is worth to be computed once."""
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED_BYTES", 0)
    made: list[Any] = []
    merge = dispatch.combine
    monkeypatch.setattr(dispatch, "combine", lambda *x: (made.append(x), merge(*x))[1])
    return made


def run(xp: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Return the arrays of a call, which writes to an output of NaN, and its results."""
    given = with_arrays(xp.asarray, arguments)
    q, v = arguments["q"], arguments["v_cache"]
    columns = arguments["head_dim_v"] if v is None else v.shape[-1]
    out = xp.asarray(np.full((*q.shape[:3], columns), np.nan, q.dtype))
    out, lse = cupy_flash.flash_attention_with_kvcache(**given, out=out, return_lse=True)
    return given, to_numpy(out), to_numpy(lse)


def check(xp: Any, arguments: dict[str, Any]) -> None:
    given, out, lse = run(xp, arguments)
    plain, _, _ = run(np, {**arguments, "shared_prefix_len": 0})
    for name in CACHES:
        if isinstance(arguments.get(name), np.ndarray):
            found = to_numpy(given[name])
            assert found.tobytes() == plain[name].tobytes() or arguments["rotary_cos"] is not None
    formula = {name: x for name, x in arguments.items() if name != "shared_prefix_len"}
    if formula["v_cache"] is None:
        formula, _ = after_the_append(formula)
    Truth.of_kvcache(formula).check(out, lse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(8))
def test_random_calls_obey_the_error_rule(
    xp: Any, number: int, kind: str, combined: list[Any], rng: np.random.Generator
) -> None:
    kernels = int(rng.integers(2**32))
    for _ in range(25 if xp is not np else 1):
        # Compiling takes most of the time, so the calls of a test differ in what needs no kernel.
        choices = np.random.default_rng(kernels)
        arguments = random_call(rng, kind, on_gpu=xp is not np, choices=choices)
        combined.clear()
        check(xp, arguments)
        shares = arguments["shared_prefix_len"] >= arguments["k_cache"].shape[1]
        assert len(combined) == shares


def call(xp: Any = np, **changes: Any) -> dict[str, Any]:
    """Return a call of three sequences with two shared pages."""
    rng = np.random.default_rng(0)
    table = rng.permutation(40)[: BATCH * PAGES].reshape(BATCH, PAGES).astype(np.int32)
    table[:, :2] = table[0, :2]
    k_cache, v_cache = rng.standard_normal((2, 40, PAGE, HEADS, DIM))
    given = {
        "q": rng.standard_normal((BATCH, 2, HEADS, DIM)),
        **{"k_cache": k_cache, "v_cache": v_cache, "block_table": table},
        **{"cache_seqlens": np.array([40, 34, 90], np.int32), "shared_prefix_len": 32},
    }
    return with_arrays(xp.asarray, given | changes)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (60, None)},
        {"alibi_slopes": np.linspace(0.1, 0.4, HEADS)},
        {"mask_mod": cupy_flash.MaskMod(lambda i, j: (i - j) % 3 != 1)},
        {"score_mod": cupy_flash.ScoreMod(lambda score: score * 0.5)},
        {"causal": True, "q_offset": np.array([33, 32, 40], np.int32)},
        {"cache_leftpad": np.array([3, 0, 33], np.int32)},
        {"bias": np.linspace(-1, 1, PAGE * PAGES)[None, None, None]},
        {"batch_invariant": True},
        {"return_max_logits": True},
    ],
    ids=str,
)
def test_what_depends_on_positions_is_computed_without_sharing(
    xp: Any, options: dict[str, Any], combined: list[Any]
) -> None:
    given = call(xp, **options)
    results = [
        cupy_flash.flash_attention_with_kvcache(**{**given, "shared_prefix_len": shared})
        for shared in (0, 32)
    ]
    assert not combined
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


def test_a_tree_of_queries_shares_the_prefix(xp: Any, combined: list[Any]) -> None:
    tree = np.array([[0b01, 0b10], [0b01, 0b11], [0b11, 0b11]], np.uint64)
    given = call(xp, tree_mask=tree, cache_seqlens=np.array([40, 34, 90], np.int32))
    out = cupy_flash.flash_attention_with_kvcache(**given)
    assert combined
    given["shared_prefix_len"] = 0
    expected = cupy_flash.flash_attention_with_kvcache(**given)
    np.testing.assert_allclose(to_numpy(out), to_numpy(expected), rtol=0, atol=1e-14)


def test_lengths_may_be_one_integer_or_a_list(xp: Any, combined: list[Any]) -> None:
    expected = cupy_flash.flash_attention_with_kvcache(
        **call(xp, cache_seqlens=np.full(BATCH, 50, np.int32), shared_prefix_len=0)
    )
    for lengths in (50, [50] * BATCH, np.int64(50), np.full(BATCH, 50, np.uint8)):
        if isinstance(lengths, np.ndarray):
            lengths = xp.asarray(lengths)
        out = cupy_flash.flash_attention_with_kvcache(**call(xp, cache_seqlens=lengths))
        np.testing.assert_allclose(to_numpy(out), to_numpy(expected), rtol=0, atol=1e-14)
    assert len(combined) == 4


def test_short_prefixes_are_not_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "combine", None)
    cupy_flash.flash_attention_with_kvcache(**call())


def test_a_whole_cache_may_be_shared(combined: list[Any]) -> None:
    table = np.arange(4, dtype=np.int32)[None].repeat(BATCH, 0)
    given = call(block_table=table, cache_seqlens=4 * PAGE)
    expected = cupy_flash.flash_attention_with_kvcache(**given | {"shared_prefix_len": 0})
    out = cupy_flash.flash_attention_with_kvcache(**given | {"shared_prefix_len": 4 * PAGE})
    assert len(combined) == 1
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)


def test_tensors_are_answered_in_kind(combined: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    given = with_arrays(torch.from_numpy, call())
    out = cupy_flash.flash_attention_with_kvcache(**given)
    assert isinstance(out, torch.Tensor)
    assert len(combined) == 1
    expected = cupy_flash.flash_attention_with_kvcache(**call(shared_prefix_len=0))
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-14)
    kept = torch.empty_like(out)
    assert cupy_flash.flash_attention_with_kvcache(**given, out=kept) is kept
    np.testing.assert_array_equal(kept, out)


@pytest.mark.parametrize(
    ("options", "lengths", "shares"),
    [
        ({"causal": True}, [33, 40, 40], True),
        ({"causal": True}, [32, 40, 40], False),
        ({}, [32, 40, 40], True),
        ({"tree_mask": np.array([[1, 3]] * BATCH, np.uint64)}, [34, 40, 40], True),
        ({"tree_mask": np.array([[1, 3]] * BATCH, np.uint64)}, [33, 40, 40], False),
    ],
)
def test_all_queries_attend_to_the_whole_prefix_if_it_is_shared(
    options: dict[str, Any], lengths: list[int], shares: bool, combined: list[Any]
) -> None:
    given = call(cache_seqlens=np.array(lengths, np.int32), **options)
    out = cupy_flash.flash_attention_with_kvcache(**given)
    assert bool(combined) == shares
    expected = cupy_flash.flash_attention_with_kvcache(**given | {"shared_prefix_len": 0})
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)


def test_the_last_page_of_the_prefix_may_differ_if_it_is_not_full(combined: list[Any]) -> None:
    given = call(shared_prefix_len=34)
    out = cupy_flash.flash_attention_with_kvcache(**given)
    assert combined
    expected = cupy_flash.flash_attention_with_kvcache(**given | {"shared_prefix_len": 0})
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.uint8])
def test_rotary_positions_of_any_integer_dtype(dtype: Any, combined: list[Any]) -> None:
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, BATCH, 1, HEADS, DIM))
    angles = rng.uniform(0, 6, (120, 2))
    lengths = np.array([40, 34, 60], dtype)
    more = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "causal": True}
    results = []
    for shared in (0, 32):
        given = call(k=k, v=v, cache_seqlens=lengths, shared_prefix_len=shared, **more)
        results.append(cupy_flash.flash_attention_with_kvcache(**given))
    assert len(combined) == 1
    np.testing.assert_allclose(*results, rtol=0, atol=1e-14)


OTHER_PAGE = call()["block_table"].copy()
OTHER_PAGE[2, 1] = 39


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shared_prefix_len": 1.5}, TypeError, "shared_prefix_len is 1.5"),
        ({"shared_prefix_len": True}, TypeError, "shared_prefix_len is True"),
        ({"shared_prefix_len": -1}, ValueError, "shared_prefix_len is -1; expected at least 0"),
        ({"shared_prefix_len": 97}, ValueError, "is 97; expected at most 96, the rows of a cache"),
        ({"shared_prefix_len": 35}, ValueError, "is 35, but a cached sequence has 34 keys"),
        ({"cache_seqlens": 31}, ValueError, "is 32, but a cached sequence has 31 keys"),
        ({"block_table": None}, ValueError, "shared_prefix_len is given, but block_table is miss"),
        ({"block_table": OTHER_PAGE}, ValueError, r"block_table\[2, 1\] is 39, but block_table\[0"),
        ({"cache_seqlens": np.array([40, 97, 40])}, ValueError, r"cache_seqlens\[1\] is 97"),
        ({"q": np.zeros((BATCH, 2, HEADS, 5))}, ValueError, "head_dim"),
    ],
)
def test_wrong_arguments_are_errors(
    changes: dict[str, Any], error: type[Exception], message: str, combined: list[Any]
) -> None:
    with pytest.raises(error, match=message):
        cupy_flash.flash_attention_with_kvcache(**call(**changes))


def test_nothing_is_appended_if_an_argument_is_wrong(combined: list[Any]) -> None:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, BATCH, 1, HEADS, DIM))
    read_only = np.empty((BATCH, 2, HEADS, DIM))
    read_only.flags.writeable = False
    for wrong in (
        {"out": np.empty((BATCH, 2, HEADS, DIM + 1))},
        {"out": read_only},
        {"sinks": np.zeros(3)},
    ):
        given = call(k=k, v=v, **wrong)
        before = given["k_cache"].copy()
        with pytest.raises(ValueError, match=r"out|sinks"):
            cupy_flash.flash_attention_with_kvcache(**given)
        np.testing.assert_array_equal(given["k_cache"], before)
