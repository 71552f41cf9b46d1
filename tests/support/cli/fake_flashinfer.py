"""Fake of FlashInfer, which computes with NumPy; its functions have the parameters of 0.6."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from cupy_flash import flash_attention_varlen
from cupy_flash.cli.providers import flashinfer
from support.cli.fake_flash_attention import FakeTorch
from support.fake_torch import install_torch

FLOAT16 = np.dtype(np.float16)


@dataclass(frozen=True)
class Plan:
    """Arguments of a plan; `starts` are those of the queries, and of the keys or pages."""

    starts: tuple[Any, Any]
    heads: tuple[int, int]
    head_dim: int
    dtypes: tuple[Any, Any]
    causal: bool = False
    indices: Any = None
    last_page_len: Any = None
    page_size: int = 0
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None


class _Wrapper:
    """Base class of the wrappers; `plan` of a subclass has the parameters of FlashInfer's.

    Attributes
    ----------
    made
        All wrappers, in order.
    """

    made: ClassVar[list[Any]] = []

    def __init__(self, workspace: Any, kv_layout: str = "NHD", **options: Any) -> None:
        assert kv_layout == "NHD"
        assert not workspace.any()
        self.options = options
        self.planned: Plan
        self.made.append(self)

    def _run(self, q: Any, k: Any, v: Any, key_starts: Any) -> Any:
        """Compute packed sequences that fit the plan."""
        p = self.planned
        assert p.heads == (q.shape[1], k.shape[1])
        assert p.head_dim == q.shape[2]
        assert p.dtypes == (q.dtype, k.dtype)
        assert all(starts.dtype == np.int32 for starts in p.starts)
        return _attention(q, k, v, p.starts[0], key_starts, p)


def _attention(q: Any, k: Any, v: Any, query_starts: Any, key_starts: Any, plan: Plan) -> Any:
    window = None if plan.window_left < 0 else (plan.window_left, None)
    starts = (np.asarray(x, np.int32) for x in (query_starts, key_starts))
    lengths = (int(np.diff(x).max()) for x in (query_starts, key_starts))
    return flash_attention_varlen(
        *map(np.asarray, (q, k, v)),
        *starts,
        *lengths,
        causal=plan.causal,
        softmax_scale=plan.sm_scale,
        window_size=window,
        softcap=plan.logits_soft_cap or None,
    )


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Packed sequences."""

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        q_data_type: Any = FLOAT16,
        kv_data_type: Any = None,
        **options: Any,
    ) -> None:
        dtypes = (q_data_type, kv_data_type or q_data_type)
        heads = (num_qo_heads, num_kv_heads)
        self.planned = Plan((qo_indptr, kv_indptr), heads, head_dim_qk, dtypes, causal, **options)

    def run(self, q: Any, k: Any, v: Any) -> Any:
        return self._run(q, k, v, self.planned.starts[1])


class _Paged(_Wrapper):
    """Base class of the wrappers for caches; `cache` is the one of the last run."""

    cache: tuple[Any, Any]

    def run(self, q: Any, paged_kv_cache: tuple[Any, Any]) -> Any:
        p = self.planned
        self.cache = paged_kv_cache
        counts = np.diff(p.starts[1])
        assert (np.asarray(p.last_page_len) <= p.page_size).all()
        lengths = np.maximum(counts - 1, 0) * p.page_size + np.asarray(p.last_page_len)
        k, v = (self._rows(pages, lengths) for pages in paged_kv_cache)
        return self._run(q, k, v, np.cumsum((0, *lengths)))

    def _rows(self, pages: Any, lengths: Any) -> Any:
        """Return the rows of all sequences, packed."""
        p = self.planned
        assert pages.shape[1] == p.page_size
        found = []
        for start, end, length in zip(p.starts[1], p.starts[1][1:], lengths, strict=False):
            rows = pages[np.asarray(p.indices)[start:end]]
            found.append(rows.reshape(-1, *pages.shape[2:])[:length])
        return np.concatenate(found)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """Several queries for each sequence of a paged cache."""

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        q_data_type: Any = FLOAT16,
        kv_data_type: Any = None,
        **options: Any,
    ) -> None:
        dtypes = (q_data_type, kv_data_type or q_data_type)
        heads = (num_qo_heads, num_kv_heads)
        pages = (paged_kv_indices, paged_kv_last_page_len, page_size)
        starts = (qo_indptr, paged_kv_indptr)
        self.planned = Plan(starts, heads, head_dim_qk, dtypes, causal, *pages, **options)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """One query for each sequence of a paged cache."""

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any = FLOAT16,
        kv_data_type: Any = None,
        **options: Any,
    ) -> None:
        dtypes = (q_data_type, kv_data_type or q_data_type)
        heads = (num_qo_heads, num_kv_heads)
        starts = (np.arange(len(indptr), dtype=np.int32), indptr)
        pages = (indices, last_page_len, page_size)
        self.planned = Plan(starts, heads, head_dim, dtypes, False, *pages, **options)


class FakeFlashInfer:
    """Fake of the module `flashinfer`."""

    BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper

    def __init__(self) -> None:
        # Number of calls for a single sequence.
        self.singles = 0
        self.wrappers = _Wrapper.made
        self.wrappers.clear()

    def single_prefill_with_kv_cache(
        self, q: Any, k: Any, v: Any, causal: bool = False, kv_layout: str = "NHD", **options: Any
    ) -> Any:
        self.singles += 1
        starts = (np.array([0, len(q)], np.int32), np.array([0, len(k)], np.int32))
        heads, dtypes = (q.shape[1], k.shape[1]), (q.dtype, k.dtype)
        plan = Plan(starts, heads, q.shape[2], dtypes, causal, **options)
        return _attention(q, k, v, *starts, plan)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """Make the provider find fakes of torch and FlashInfer."""
    install_torch(monkeypatch, FakeTorch(monkeypatch))
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer, "why_no_package", lambda module, package: None)
    monkeypatch.setattr(flashinfer, "torch_module", lambda: FakeTorch(monkeypatch))
    return fake
