"""Packed, cached and paged sequences in the `hopper` family."""

from __future__ import annotations

import dataclasses

from cupy_flash.families.contract import ceil_div
from cupy_flash.families.hopper import mla
from cupy_flash.families.hopper.block import WARPGROUP_ROWS
from cupy_flash.families.hopper.tiles import MIN_KEYS
from cupy_flash.families.schedule import Launch
from cupy_flash.problem.problem import Problem

_PREPARE_THREADS = 1024
# Value of `VarlenOrder::scratch_words` in `scheduler/varlen_order.cuh`.
_PREPARE_WORDS = 256 + 32
_WORD_BYTES = 4


def why_not(problem: Problem) -> str | None:
    """Return why no tile can serve the layout of the sequences, or None if one may."""
    layout = problem.layout
    if layout.is_dense:
        return None
    if layout.page_size:
        if not mla.holds_values_in_keys(problem):
            return "TMA loads rows that are consecutive in memory, not pages"
        if layout.page_size % MIN_KEYS:
            return f"page_size is {layout.page_size}; expected a multiple of {MIN_KEYS}"
    if not layout.packed_k and layout.caches + layout.pages == 0:
        return "TMA cannot address arrays without keys"
    if (layout.num_splits or 1) > 1 and not mla.holds_values_in_keys(problem):
        return "splits the keys only in batches of equal lengths"
    return None


def why_not_first(problem: Problem) -> str | None:
    """Return why a family that packs several heads into a query tile is better, or None."""
    rows = problem.seqlen_q
    if rows < WARPGROUP_ROWS and problem.heads_q > problem.heads_kv:
        return (
            f"has tiles of at least {WARPGROUP_ROWS} query rows of one head, which has {rows}; "
            "other families pack the query heads of a KV head into one tile"
        )
    return None


def as_dense(problem: Problem) -> Problem:
    """Return a dense problem with about as many query rows, for which a tile is chosen."""
    layout = problem.layout
    if layout.is_dense:
        return problem
    if problem.is_batch_invariant:
        # The sizes are arbitrary, but must be the same for all batch sizes and lengths.
        return dataclasses.replace(problem, batch=128, seqlen_q=8192, seqlen_k=8192)
    if not layout.packed_q:
        return problem
    return dataclasses.replace(problem, batch=ceil_div(layout.total_q, max(1, problem.seqlen_q)))


def order_bytes(problem: Problem) -> int:
    """Return the size in bytes of the order of sequences (`scheduler/varlen_order.cuh`)."""
    return (2 * problem.batch + 2) * _WORD_BYTES


def launch() -> Launch:
    """Return the launch that computes the order of sequences before the main kernel."""
    words = _PREPARE_WORDS * _WORD_BYTES
    return Launch("prepare", "hopper_prepare", (1, 1, 1), _PREPARE_THREADS, words)
