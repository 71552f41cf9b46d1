"""Calls with invalid lengths, offsets or page numbers in device memory, unchecked by the host.

Kernels clamp such values, so the result is defined all the same. All rows and pages hold numbers,
even those of no sequence, so the result shows which of them were read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash import attention_with_kvcache_reference
from support.calls.sequence_support import Truth
from support.gpu.gpu_support import DTYPES

LARGEST, SMALLEST = 2**31 - 1, -(2**31)
HEAD_DIM = 64
# (query heads, KV heads): few, and enough that clusters compute KV-cache calls on some GPUs.
HEADS = ((4, 2), (32, 8))
PAGE_SIZE, OTHER_PAGE_SIZES = 16, (1, 64)
# Number of rows in all pages, and in the pages of one sequence.
_PAGED_ROWS, _SEQUENCE_ROWS = 640, 192

Arguments = dict[str, Any]
Change = Callable[[Arguments], None]


def _numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _set(name: str, *values: int) -> Change:
    def change(arguments: Arguments) -> None:
        arguments[name] = _numbers(*values)

    return change


def _limit(name: str, value: int) -> Change:
    def change(arguments: Arguments) -> None:
        arguments[name] = value

    return change


def _no_such_pages(arguments: Arguments) -> None:
    table = arguments["block_table"]
    pages, page_size, _, _ = arguments["k_cache" if "k_cache" in arguments else "k"].shape
    # Some pages of sequences 0 and 1 become invalid, also those of new rows; all of sequence 2.
    for b, row, number in (
        (0, 0, pages),
        (0, 40, -1),
        (0, 77, LARGEST),
        (1, 20, SMALLEST),
        (1, 90, -pages),
        (1, 110, pages + 1),
    ):
        table[b, row // page_size] = number
    table[2, :] = LARGEST


_VARLEN: dict[str, Change] = {
    "rows of q beyond the last": _set("cu_seqlens_q", 0, 40, 90, LARGEST),
    "rows of q before the first": _set("cu_seqlens_q", SMALLEST, 40, 90, 120),
    "unsorted rows of q": _set("cu_seqlens_q", 60, 20, 50, 45),
    "rows of q that two sequences claim": _set("cu_seqlens_q", 0, 90, 40, 120),
    "no row of q": _set("cu_seqlens_q", 125, LARGEST, SMALLEST, -1),
    "more rows of q than max_seqlen_q": _limit("max_seqlen_q", 20),
    "max_seqlen_q beyond all rows": _limit("max_seqlen_q", 10**9),
    "keys beyond the last": _set("cu_seqlens_k", 0, 60, 150, LARGEST),
    "keys before the first": _set("cu_seqlens_k", -100, 60, 150, 300),
    "unsorted keys": _set("cu_seqlens_k", 0, 150, 60, 300),
    "keys of all sizes": _set("cu_seqlens_k", SMALLEST, LARGEST, SMALLEST, LARGEST),
    "more keys than max_seqlen_k": _limit("max_seqlen_k", 70),
    "max_seqlen_k beyond all keys": _limit("max_seqlen_k", 10**9),
    "seqused_k beyond the keys": _set("seqused_k", 1000, LARGEST, 200),
    "negative seqused_k": _set("seqused_k", -5, SMALLEST, 40),
    "pages that there are not": _no_such_pages,
}


# Names of changes, and page_size of the calls that are changed; 0 for calls without pages.
VARLEN_CALLS = [(name, 0) for name in _VARLEN if "page" not in name]
VARLEN_CALLS += [(name, PAGE_SIZE) for name in _VARLEN]
VARLEN_CALLS += [("pages that there are not", page_size) for page_size in OTHER_PAGE_SIZES]


def wrong_varlen(change: str, page_size: int, dtype: str) -> Arguments:
    """Return arguments of `flash_attention_varlen` for 3 sequences, with invalid numbers."""
    rng = np.random.default_rng(17)
    places = (_PAGED_ROWS // page_size, page_size) if page_size else (305,)
    heads_q, heads_kv = HEADS[0]
    arguments: Arguments = {
        "q": _random(rng, dtype, 125, heads_q),
        "k": _random(rng, dtype, *places, heads_kv),
        "v": _random(rng, dtype, *places, heads_kv),
        "cu_seqlens_q": _numbers(0, 40, 90, 120),
        "cu_seqlens_k": _numbers(0, 60, 150, 300),
        "max_seqlen_q": 50,
        "max_seqlen_k": 150,
        "causal": True,
        "softmax_scale": None,
        "seqused_k": None,
        "block_table": _table(rng, 3, page_size) if page_size else None,
    }
    _VARLEN[change](arguments)
    return arguments


_KVCACHE: dict[str, Change] = {
    "lengths beyond the cache": _set("cache_seqlens", 193, 1000, LARGEST),
    "negative lengths": _set("cache_seqlens", -1, SMALLEST, 100),
    "new rows that reach beyond the cache": _set("cache_seqlens", 189, 192, 188),
    "caches that there are not": _set("cache_batch_idx", -1, 5, LARGEST),
    "one cache that there is": _set("cache_batch_idx", SMALLEST, 4, 6),
    "pages that there are not": _no_such_pages,
}


KVCACHE_CALLS = [(name, 0) for name in _KVCACHE if "page" not in name]
KVCACHE_CALLS += [(name, PAGE_SIZE) for name in _KVCACHE if "there " not in name or "page" in name]
KVCACHE_CALLS += [("pages that there are not", page_size) for page_size in OTHER_PAGE_SIZES]


def wrong_kvcache(
    change: str, page_size: int, dtype: str, seqlen_new: int, heads: tuple[int, int] = HEADS[0]
) -> Arguments:
    """Return arguments of `flash_attention_with_kvcache` for 3 sequences, with invalid numbers."""
    rng = np.random.default_rng(19)
    places = (_PAGED_ROWS // page_size, page_size) if page_size else (5, _SEQUENCE_ROWS)
    heads_q, heads_kv = heads
    arguments: Arguments = {
        "q": _random(rng, dtype, 3, 7, heads_q),
        "k_cache": _random(rng, dtype, *places, heads_kv),
        "v_cache": _random(rng, dtype, *places, heads_kv),
        "k": _random(rng, dtype, 3, seqlen_new, heads_kv) if seqlen_new else None,
        "v": _random(rng, dtype, 3, seqlen_new, heads_kv) if seqlen_new else None,
        "cache_seqlens": _numbers(77, 110, 0),
        "cache_batch_idx": None if page_size else _numbers(4, 0, 2),
        "block_table": _table(rng, 3, page_size) if page_size else None,
        "rotary_cos": None,
        "rotary_sin": None,
        "rotary_interleaved": True,
        "causal": True,
        "softmax_scale": None,
    }
    _KVCACHE[change](arguments)
    return arguments


def _random(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return rng.standard_normal((*shape, HEAD_DIM)).astype(DTYPES[dtype])


def _table(rng: np.random.Generator, batch: int, page_size: int) -> np.ndarray:
    columns = _SEQUENCE_ROWS // page_size
    pages = rng.permutation(_PAGED_ROWS // page_size)[: batch * columns]
    return pages.reshape(batch, columns).astype(np.int32)


def check_varlen_result(arguments: Arguments, out: np.ndarray, lse: np.ndarray) -> None:
    """Fail unless rows of exactly one sequence are right, and rows of no sequence are 0."""
    Truth.of_varlen(arguments).check(out, lse)


def check_kvcache_result(
    arguments: Arguments, out: np.ndarray, lse: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray
) -> None:
    """Fail unless the result and both caches agree with the reference for these numbers.

    Nothing is rotated, so appended rows equal the new rows byte for byte.
    """
    Truth.of_kvcache(arguments).check(out, lse)
    expected = attention_with_kvcache_reference(**arguments)
    assert k_cache.tobytes() == expected.k_cache.tobytes(), "k_cache is not as documented"
    assert v_cache.tobytes() == expected.v_cache.tobytes(), "v_cache is not as documented"
