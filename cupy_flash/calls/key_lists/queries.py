"""Queries of a call in one row each, and the keys that they may attend to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.calls.check.whole_call import WholeCall
from cupy_flash.problem.problem import MAX_SEQLEN


class Queries(NamedTuple):
    """Queries of a call in one row each, and the keys that they may attend to; all (R,) or None.

    Attributes
    ----------
    sequence, query, position
        Sequence of each query, its index there, and its position among the keys.
    begins, ends, prefixes
        A query may attend to the keys j with begins <= j < ends, and to those before `prefixes`.
    first_rows
        Row of the sequence's first key in the arrays without their batch axes; None if a block
        table gives the row of each key.
    is_owned
        Whether the query belongs to a sequence.
    row
        Index of each query in q if q is packed.
    kv_head
        KV head of each query if there is a query for each of them, otherwise None.
    """

    sequence: Any
    query: Any
    position: Any
    begins: Any
    ends: Any
    prefixes: Any | None
    first_rows: Any | None
    is_owned: Any
    row: Any | None
    kv_head: Any | None = None


def _lengths(whole: WholeCall, keys: int) -> Any:
    """Return the number of keys of each sequence, (batch,), clamped to the arrays."""
    arguments, problem = whole.arguments, whole.problem
    xp, layout = array_module(arguments.q), problem.layout
    if layout.kind == "kvcache":
        lengths = arguments.cache_seqlens
        if lengths is None:
            lengths = xp.full(problem.batch, keys, np.int64)
        lengths = lengths.clip(0, problem.seqlen_k)
        if layout.packed_new:
            lengths = lengths + xp.diff(arguments.cu_seqlens_k_new)
        else:
            lengths = lengths + layout.new_keys
        if (places := arguments.cache_batch_idx) is not None:
            lengths = lengths * ((places >= 0) & (places < layout.caches))
    elif layout.packed_q:
        lengths = arguments.seqused_k
        most = MAX_SEQLEN if layout.page_size else layout.total_k
        if arguments.cu_seqlens_k is not None:
            ends = arguments.cu_seqlens_k.clip(0, most)
            lengths = xp.diff(ends) if lengths is None else lengths
            lengths = lengths if layout.page_size else xp.minimum(lengths, most - ends[:-1])
    else:
        lengths = getattr(arguments, "seqlens_k", None)
        if lengths is None:
            lengths = xp.full(problem.batch, problem.seqlen_k, np.int64)
    return lengths.clip(0, problem.seqlen_k).astype(np.int64)


def queries_of(whole: WholeCall, keys: int, *, in_pages: bool = False) -> Queries:
    """Return the queries of a call, and what they may attend to by length and position.

    With `in_pages`, a list holds rows of all pages instead of keys of the query's sequence.
    """
    arguments, problem = whole.arguments, whole.problem
    layout, xp = problem.layout, array_module(arguments.q)
    lengths, offsets = _lengths(whole, keys), getattr(arguments, "q_offset", None)
    first = None if offsets is None else offsets.astype(np.int64)
    if layout.packed_q:
        starts = arguments.cu_seqlens_q.clip(0, layout.total_q).astype(np.int64)
        row = xp.arange(layout.total_q)
        sequence = (xp.searchsorted(starts, row, side="right") - 1).clip(0, problem.batch - 1)
        query = row - starts[sequence]
        seqlens_q = xp.diff(starts).clip(0, problem.seqlen_q)
        is_owned = (query >= 0) & (query < seqlens_q[sequence])
        first = lengths - seqlens_q if first is None else first
    else:
        row = None
        sequence = xp.repeat(xp.arange(problem.batch), problem.seqlen_q)
        query = xp.tile(xp.arange(problem.seqlen_q), problem.batch)
        is_owned = xp.ones(len(query), bool)
        if first is None and layout.kind == "kvcache":
            first = lengths - problem.seqlen_q
        elif first is None:
            first = xp.full(problem.batch, problem.q_offset)
    position, length = first[sequence] + query, xp.where(is_owned, lengths[sequence], 0)
    begins, ends, prefixes = xp.zeros_like(length), length, None
    if in_pages:
        # Lists of int32 cannot name further rows.
        rows = min(layout.pages * layout.page_size, np.iinfo(np.int32).max)
        ends = xp.where(is_owned, rows, 0)
        return Queries(sequence, query, position, begins, ends, None, begins, is_owned, row)
    window = None if whole.options.mod_key is None else whole.options.mod_key.window
    if window is not None and window.left is not None:
        begins = position - window.left
    rights = [0] * problem.causal
    if window is not None and window.right is not None:
        rights.append(window.right)
    if rights:
        ends = xp.minimum(length, position + min(rights) + 1)
    if (lifted := getattr(arguments, "prefix_lens", None)) is not None:
        prefixes = xp.minimum(length, lifted[sequence])
    first_rows = None
    if not layout.page_size:
        if layout.packed_q:
            starts = arguments.cu_seqlens_k.clip(0, layout.total_k)
        else:
            caches = arguments.cache_batch_idx
            caches = (
                xp.arange(problem.batch) if caches is None else caches.clip(0, layout.caches - 1)
            )
            starts = caches.astype(np.int64) * problem.seqlen_k
        first_rows = starts[sequence]
    return Queries(sequence, query, position, begins, ends, prefixes, first_rows, is_owned, row)
