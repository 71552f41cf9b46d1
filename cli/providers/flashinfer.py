"""FlashInfer on tensors over the same CuPy arrays, if its package is installed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_flash.mods.keywords import Window

from ..cases.cases import Case
from ..cases.inputs import Inputs, placed_on
from .contract import Prepared
from .torch_providers import Attention, TorchProvider, to_torch, torch_module, why_no_package

_DTYPES = ("float16", "bfloat16")
# Size of the workspace that FlashInfer's documentation recommends.
_WORKSPACE_BYTES = 128 << 20
# Rows of the pages in which FlashInfer reads a contiguous cache. It splits the keys of a sequence
# between pages only, so a page per sequence would be slow.
_PAGE_ROWS = 16


class FlashInfer(TorchProvider):
    """FlashInfer's functions for one sequence, packed sequences and paged caches.

    Its wrappers plan a call in `prepare`, which is not timed, as one plan serves all layers.

    Attributes
    ----------
    tensor_cores
        Argument use_tensor_cores of the wrapper for decoding.
    """

    layout = "bshd"

    def __init__(self, name: str, *, tensor_cores: bool) -> None:
        self.name = name
        self.tensor_cores = tensor_cores

    def missing(self) -> str | None:
        return super().missing() or why_no_package("flashinfer", "flashinfer-python")

    def why_not(self, case: Case) -> str | None:
        return self.missing() or _why_no_call(case) or self._why_no_decoding(case)

    def _why_no_decoding(self, case: Case) -> str | None:
        if not _is_decoding(case):
            return "only decoding differs from flashinfer" if self.tensor_cores else None
        if case.head_dim_v != case.head_dim:
            return "FlashInfer's decoding needs values as wide as the keys"
        return None

    def scratch_bytes(self, case: Case) -> int:
        return _WORKSPACE_BYTES

    def prepare(self, inputs: Inputs) -> Prepared:
        made, case = super().prepare(inputs), inputs.case
        if case.kind == "varlen":
            return made
        shape = (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)
        return dataclasses.replace(made, to_result=lambda out: made.to_result(out.reshape(shape)))

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        case = inputs.case
        if case.is_cached:
            return self._cached(inputs, q, k, v)
        if case.batch == 1 and case.is_dense:
            function = importlib.import_module("flashinfer").single_prefill_with_kv_cache
            call = functools.partial(function, q[0], k[0], v[0], causal=_is_causal(case))
            return _ignoring_tensors(functools.partial(call, **_options(case)))
        wrapper = self._wrapper("BatchPrefillWithRaggedKVCacheWrapper", q)
        indptrs = (
            _packed_starts(case.query_lengths),
            _packed_starts(case.key_lengths),
        )
        wrapper.plan(
            *indptrs,
            *(case.heads_q, case.heads_kv, case.head_dim),
            head_dim_vo=case.head_dim_v,
            causal=_is_causal(case),
            **_options(case),
            **_dtypes(q, k),
        )
        rows = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
        return _ignoring_tensors(functools.partial(wrapper.run, *rows))

    def _cached(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        """Return attention to a cache in pages: those of the case, or pages in place."""
        case = inputs.case
        rows = case.page_size or _PAGE_ROWS
        pages = tuple(x.reshape(-1, rows, *x.shape[-2:]) for x in (k, v))
        arguments = (*_page_table(inputs, rows), case.heads_q, case.heads_kv, case.head_dim, rows)
        options = _options(case) | _dtypes(q, k)
        if _is_decoding(case):
            name = "BatchDecodeWithPagedKVCacheWrapper"
            wrapper = self._wrapper(name, q, use_tensor_cores=self.tensor_cores)
            wrapper.plan(*arguments, **options)
        else:
            wrapper = self._wrapper("BatchPrefillWithPagedKVCacheWrapper", q)
            options |= {"causal": _is_causal(case), "head_dim_vo": case.head_dim_v}
            wrapper.plan(_packed_starts(case.query_lengths), *arguments, **options)
        call = functools.partial(wrapper.run, q.reshape(-1, *q.shape[-2:]), pages)
        note = None if case.page_size else f"reads the contiguous cache as pages of {rows} rows"
        return dataclasses.replace(_ignoring_tensors(call), note=note)

    @staticmethod
    def _wrapper(name: str, q: Any, **options: Any) -> Any:
        torch = torch_module()
        # A workspace must be zero before its first use.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        return getattr(importlib.import_module("flashinfer"), name)(workspace, "NHD", **options)


def _why_no_call(case: Case) -> str | None:
    """Return why a case is not timed, or None if FlashInfer may compute it."""
    if case.is_backward:
        return "FlashInfer has no gradients"
    if case.dtype not in _DTYPES or case.cache_dtype:
        return f"FlashInfer is timed in {' and '.join(_DTYPES)} only"
    if others := dataclasses.replace(case.mods, window=Window(), softcap=None):
        return f"FlashInfer is timed without {others}"
    if not (_is_causal(case) or case.mods.window.right is None or _is_decoding(case)):
        return "FlashInfer's windows have no right bound, except that of a causal mask"
    if case.is_cached:
        return _why_no_cache(case)
    if case.first_query != case.seqlen_k - case.seqlen_q:
        return "the masks of FlashInfer are aligned bottom-right: it takes no q_offset"
    if _is_causal(case) and case.seqlen_q > case.seqlen_k:
        return "FlashInfer's causal masks need at least as many keys as queries"
    if case.batch > 1 and case.layout != "bshd":
        return "FlashInfer takes several sequences only packed, in bshd layout"
    return None


def _why_no_cache(case: Case) -> str | None:
    """Return why a cache is not timed, or None if FlashInfer may compute it."""
    if case.append:
        return "FlashInfer appends to a cache in another call"
    if case.values_in_keys:
        return "FlashInfer is timed with values that are not part of the keys"
    if not case.page_size and case.seqlen_k % _PAGE_ROWS:
        return f"FlashInfer reads pages: expected a multiple of {_PAGE_ROWS} keys, or --page-size"
    return None


def _is_decoding(case: Case) -> bool:
    return case.is_cached and case.seqlen_q == 1


def _is_causal(case: Case) -> bool:
    """Return whether the mask is causal; a window without keys to the right is."""
    return case.causal or case.mods.window.right == 0


def _options(case: Case) -> dict[str, Any]:
    """Return the arguments that all functions of FlashInfer have in common."""
    left = case.mods.window.left
    return {
        "sm_scale": case.softmax_scale,
        "window_left": -1 if left is None else left,
        "logits_soft_cap": case.mods.softcap,
    }


def _dtypes(q: Any, k: Any) -> dict[str, Any]:
    """Return the dtypes that a plan is for; FlashInfer's default is float16."""
    return {"q_data_type": q.dtype, "kv_data_type": k.dtype}


def _ignoring_tensors(call: Callable[[], Any]) -> Attention:
    """Return attention by a call that holds the tensors in the shapes of FlashInfer already."""
    return Attention(lambda *_: call())


def _packed_starts(lengths: tuple[int, ...]) -> Any:
    """Return the tensor of starts of packed sequences, with the total length at its end."""
    return _int_tensor(np.cumsum((0, *lengths)))


def _page_table(inputs: Inputs, rows: int) -> tuple[Any, Any, Any]:
    """Return the tensors that describe the pages of a cache.

    They are the start of each sequence among the indices of pages, these indices, and the number
    of rows in the last page of each sequence.
    """
    case = inputs.case
    lengths = np.array(case.key_lengths)
    counts = -(-lengths // rows)
    pages = -(-case.seqlen_k // rows)
    in_order = np.arange(case.batch * pages).reshape(case.batch, pages)
    table = inputs.more.get("block_table", in_order)
    indices = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
    last = lengths - (np.maximum(counts, 1) - 1) * rows
    return _packed_starts(tuple(counts.tolist())), _int_tensor(indices), _int_tensor(last)


def _int_tensor(array: np.ndarray) -> Any:
    return to_torch(placed_on(gpu=True)(array.astype(np.int32)))


ALL = (
    FlashInfer("flashinfer", tensor_cores=False),
    FlashInfer("flashinfer-tensor-cores", tensor_cores=True),
)
