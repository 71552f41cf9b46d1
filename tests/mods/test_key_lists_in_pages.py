"""Lists of rows of pages: `key_indices_in="pages"`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.calls.key_list_calls import in_pages, random_call

from cupy_flash import (
    MaskMod,
    UnsupportedError,
    attention_reference,
    attention_with_kvcache_reference,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.reference.dense import attention_naive, error_bound

PAGES, PAGE_SIZE, HEADS_KV, DIM = 9, 4, 2, 8


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """Module of an array library, NumPy or CuPy."""
    return importlib.import_module(request.param)


def on_host(array: Any) -> np.ndarray:
    host: np.ndarray = array.get() if hasattr(array, "get") else array
    return host


@pytest.mark.parametrize("kind", ["pages", "latent", "paged varlen"])
@pytest.mark.parametrize("number", range(3))
def test_rows_of_the_own_pages_are_keys_of_the_sequence(
    number: int, kind: str, xp: Any, rng: np.random.Generator
) -> None:
    kernels = int(rng.integers(2**32))
    for _ in range(21 if xp is not np else 2):
        choices = np.random.default_rng(kernels)
        call = in_pages(random_call(rng, kind, choices=choices, has_positions=False))
        call.check(*call.run(xp))
        call.check(*call.reference())


def step(rng: np.random.Generator, dtype: Any = np.float32) -> tuple[Any, ...]:
    """Return q, caches in pages, a block table, lengths and lists of rows of any page."""
    k_cache, v_cache = rng.standard_normal((2, PAGES, PAGE_SIZE, HEADS_KV, DIM)).astype(dtype)
    q = rng.standard_normal((3, 2, 2 * HEADS_KV, DIM)).astype(dtype)
    table = rng.permutation(PAGES)[:6].reshape(3, 2).astype(np.int32)
    lengths = np.array([3, 0, 7], np.int32)
    lists = rng.integers(-2, PAGES * PAGE_SIZE + 3, (3, 2, HEADS_KV, 11)).astype(np.int32)
    return q, k_cache, v_cache, table, lengths, lists


def test_rows_of_any_page_obey_the_error_rule(xp: Any, rng: np.random.Generator) -> None:
    for dtype in (np.float16, np.float32):
        q, k_cache, v_cache, table, lengths, lists = step(rng, dtype)
        given = {"cache_seqlens": lengths, "block_table": table, "key_indices": lists}
        on_device = [xp.asarray(x) for x in (q, k_cache, v_cache)]
        options = {name: xp.asarray(x) for name, x in given.items()}
        out, lse = flash_attention_with_kvcache(
            *on_device, **options, key_indices_in="pages", return_lse=True
        )
        result = attention_with_kvcache_reference(
            q, k_cache, v_cache, **given, key_indices_in="pages"
        )
        rows = [x.reshape(-1, HEADS_KV, DIM) for x in (k_cache, v_cache)]
        for b, i, h in np.ndindex(3, 2, HEADS_KV):
            own = lists[b, i, h]
            own = own[(own >= 0) & (own < PAGES * PAGE_SIZE)]
            heads = slice(2 * h, 2 * h + 2)
            one = q[b, i, None, None, heads], *(x[None, own, h : h + 1] for x in rows)
            exact, exact_lse = attention_reference(*one, return_lse=True)
            bound = error_bound(attention_naive(*one), exact, dtype, lse=exact_lse)
            # The naive error of so few results may be small by chance.
            bound += 4 * np.finfo(dtype).eps * np.abs(one[2]).max()
            assert np.abs(on_host(out)[b, i, heads] - exact[0, 0]).max() <= bound
            np.testing.assert_allclose(result.out[b, i, heads], exact[0, 0], rtol=0, atol=1e-13)
            np.testing.assert_allclose(on_host(lse)[b, heads, i], exact_lse[0, :, 0], atol=1e-4)


def test_new_rows_are_appended_before_rows_are_read(xp: Any, rng: np.random.Generator) -> None:
    q, k_cache, v_cache, table, lengths, _ = step(rng, np.float64)
    k, v = rng.standard_normal((2, 3, 1, HEADS_KV, DIM))
    # The new row of each sequence, and nothing else.
    rows = table[np.arange(3), lengths // PAGE_SIZE] * PAGE_SIZE + lengths % PAGE_SIZE
    lists = np.repeat(rows[:, None, None, None], 2, axis=1).astype(np.int32)
    arrays = [xp.asarray(x) for x in (q, k_cache, v_cache, k, v)]
    given = {"cache_seqlens": lengths, "block_table": table, "key_indices": lists}
    options = {name: xp.asarray(x) for name, x in given.items()}
    out = on_host(flash_attention_with_kvcache(*arrays, **options, key_indices_in="pages"))
    np.testing.assert_allclose(out, np.repeat(v, 2, axis=2).repeat(2, axis=1), atol=1e-15)


def test_the_block_table_is_not_read_without_new_rows(xp: Any, rng: np.random.Generator) -> None:
    q, k_cache, v_cache, table, _, lists = step(rng)
    arrays = [xp.asarray(x) for x in (q, k_cache, v_cache)]
    options = {"key_indices": xp.asarray(lists), "key_indices_in": "pages", "cache_seqlens": 0}
    found, other = (
        on_host(flash_attention_with_kvcache(*arrays, block_table=xp.asarray(x), **options))
        for x in (table, np.zeros((3, 1), np.int32))
    )
    np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"causal": True}, "causal"),
        ({"window_size": (3, None)}, "window_size"),
        ({"alibi_slopes": [0.5] * 4}, "alibi_slopes"),
        ({"bias": np.zeros((1, 1, 2, 8), np.float32)}, "bias"),
        ({"mask": np.ones((1, 1, 2, 8), bool)}, "mask"),
        ({"mask_mod": MaskMod(lambda i, j: i != j)}, "mask_mod"),
    ],
)
def test_masks_and_changes_by_position_are_refused(
    options: dict[str, Any], name: str, rng: np.random.Generator
) -> None:
    q, k_cache, v_cache, table, lengths, lists = step(rng)
    given = {"cache_seqlens": lengths, "block_table": table, "key_indices": lists}
    with pytest.raises(UnsupportedError, match=f"^{name} is not supported together with key_ind"):
        flash_attention_with_kvcache(
            q, k_cache, v_cache, **given, key_indices_in="pages", **options
        )


def test_wrong_meanings_of_an_index_are_errors(rng: np.random.Generator) -> None:
    q, k_cache, v_cache, table, lengths, lists = step(rng)
    given = {"cache_seqlens": lengths, "block_table": table, "key_indices": lists}
    of_one_page = given | {"key_indices_in": "pages", "cache_seqlens": 0}
    calls: list[tuple[dict[str, Any], str]] = [
        (given | {"key_indices_in": "rows"}, "'rows'; expected 'sequence' or 'pages'"),
        (of_one_page | {"block_table": None}, "without a block_table"),
        (given | {"key_indices_in": "pages", "key_indices": None}, "key_indices are missing"),
    ]
    for options, message in calls:
        with pytest.raises(ValueError, match=message):
            flash_attention_with_kvcache(q, k_cache[:3], v_cache[:3], **options)
    with pytest.raises(ValueError, match="key_indices are missing"):
        flash_attention_varlen(
            *(q[:, 0], k_cache, v_cache, [0, 1, 2, 3], None, 1, 8),
            seqused_k=lengths,
            block_table=table,
            key_indices_in="pages",
        )
