"""Checks of lengths, offsets and indices in host arrays: values that a kernel would clamp raise."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check.problems import positions
from cupy_flash.calls.options import Options
from cupy_flash.problem.problem import MAX_SEQLEN, Problem


class LengthLimit(NamedTuple):
    """Largest allowed value of an entry of cache_seqlens, and the reason, for error messages."""

    most: int
    reason: str


def length_limits(
    arguments: Arguments, problem: Problem, new: int | None = None
) -> tuple[LengthLimit, ...]:
    """Return the limits of the length of a cached sequence before an append.

    Parameters
    ----------
    new
        Number of rows that are appended, by default `Layout.new_keys`.
    """
    new, capacity = problem.layout.new_keys if new is None else new, problem.seqlen_k
    reason = f"a cache holds {capacity} rows" + (f", and {new} are appended" if new else "")
    limits = (LengthLimit(capacity - new, reason),)
    if arguments.rotary_seqlens is not None:
        return limits
    return limits + _rotary(arguments, problem, new)


def _rotary(arguments: Arguments, problem: Problem, new: int = 0) -> tuple[LengthLimit, ...]:
    """Return the limit of the first position of rotated rows; empty without a rotary embedding."""
    if arguments.rotary_cos is None:
        return ()
    rows, count = int(arguments.rotary_cos.shape[0]), max(positions(arguments, problem), new)
    reason = f"rotary_cos has {rows} rows, and {count} are read from this position on"
    return (LengthLimit(rows - count, reason),) if count else ()


def new_rows(arguments: Arguments, problem: Problem) -> Any:
    """Return the number of rows that are appended to each sequence.

    The result is an array (batch,) if the new rows are packed.
    """
    if not problem.layout.packed_new:
        return problem.layout.new_keys
    starts = arguments.cu_seqlens_k_new.astype(np.int64)
    return starts[1:] - starts[:-1]


def require_length(name: str, length: int, limits: tuple[LengthLimit, ...]) -> None:
    """Raise ValueError for a length that is negative or exceeds a limit."""
    if length < 0:
        raise ValueError(f"{name} is {length}; expected at least 0")
    for most, reason in limits:
        if length > most:
            raise ValueError(f"{name} is {length}; expected at most {most}: {reason}")


def _require_lengths(name: str, lengths: np.ndarray, *limits: tuple[Any, str]) -> None:
    """Raise ValueError for the first entry that is negative or exceeds a limit.

    Parameters
    ----------
    limits
        Pairs (largest allowed value, reason). The value is one number, or one per entry.
    """
    wrong = lengths < 0
    for most, _ in limits:
        wrong |= lengths > most
    for b in np.flatnonzero(wrong)[:1].tolist():
        entry_limits = [
            LengthLimit(int(np.broadcast_to(m, wrong.shape)[b]), why) for m, why in limits
        ]
        require_length(f"{name}[{b}]", int(lengths[b]), tuple(entry_limits))


# Limits of the set of varlen calls that passed the checks: entries, and bytes of cu_seqlens_q.
_MAX_KNOWN = 256
_MAX_KNOWN_BYTES = 1 << 14
_known: set[Any] = set()


def check_contents(
    arguments: Arguments, options: Options, problem: Problem, keys: int
) -> np.ndarray | None:
    """Raise ValueError for contents of these NumPy arrays that kernels would have to clamp.

    Parameters
    ----------
    arguments, options, problem
        Arrays, options and problem of the call.
    keys
        Length of every cached sequence, if no array gives the lengths.

    Returns
    -------
    lengths
        Lengths of the cached sequences before the append, (batch,); None without a cache.
    """
    if options.kind == "varlen":
        _check_packed(arguments, options, problem)
    padded = getattr(arguments, "seqlens_k", None)
    if padded is not None:
        reason = f"k and v have {problem.seqlen_k} rows"
        _require_lengths("seqlens_k", padded, (problem.seqlen_k, reason))
    prefixes = getattr(arguments, "prefix_lens", None)
    if prefixes is not None:
        _require_lengths("prefix_lens", prefixes)
    used = getattr(arguments, "seqused_q", None)
    if used is not None:
        rows = np.diff(arguments.cu_seqlens_q)
        _require_lengths(
            "seqused_q", used, (rows, "cu_seqlens_q gives the sequence no more queries")
        )
    offsets = getattr(arguments, "q_offset", None)
    if offsets is not None:
        _check_positions(offsets)
    if options.kind != "kvcache":
        return None
    limits = length_limits(arguments, problem)
    if arguments.cache_seqlens is None:
        require_length("cache_seqlens", keys, limits)
        lengths = np.full(problem.batch, keys, np.int64)
    else:
        lengths = arguments.cache_seqlens.astype(np.int64)
        _require_lengths("cache_seqlens", lengths, *limits)
    if arguments.rotary_seqlens is not None:
        _require_lengths("rotary_seqlens", arguments.rotary_seqlens, *_rotary(arguments, problem))
    if arguments.cu_seqlens_k_new is not None:
        _check_packed_new(arguments, lengths, problem)
    filled = lengths + new_rows(arguments, problem)
    padding = getattr(arguments, "cache_leftpad", None)
    if padding is not None:
        _require_lengths("cache_leftpad", padding, (filled, "the cache has no more rows"))
    _check_cached(arguments, filled, problem)
    return lengths


def _check_packed_new(arguments: Arguments, lengths: np.ndarray, problem: Problem) -> None:
    """Check the offsets of packed new rows, and that the rows fit into each sequence's cache."""
    total = int(arguments.k.shape[0])
    new = _check_offsets("cu_seqlens_k_new", arguments.cu_seqlens_k_new, total, "k and v")
    is_wrong = lengths > problem.seqlen_k - new
    starts, starts_name = lengths, "cache_seqlens"
    if arguments.rotary_cos is not None:
        if arguments.rotary_seqlens is not None:
            starts, starts_name = arguments.rotary_seqlens, "rotary_seqlens"
        is_wrong |= starts > arguments.rotary_cos.shape[0] - new
    for b in np.flatnonzero(is_wrong)[:1].tolist():
        limits = length_limits(arguments, problem, int(new[b]))
        require_length(f"cache_seqlens[{b}]", int(lengths[b]), limits)
        limits = _rotary(arguments, problem, int(new[b]))
        require_length(f"{starts_name}[{b}]", int(starts[b]), limits)


def _check_packed(arguments: Arguments, options: Options, problem: Problem) -> None:
    """Check the contents of a varlen call, unless the same contents have passed before.

    All layers of a model are called with the same contents. Checking them takes 30 to 60 us,
    recognizing them 3 us.
    """
    layout = problem.layout
    integers = arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.seqused_k
    key = None
    if arguments.block_table is None and arguments.cu_seqlens_q.nbytes <= _MAX_KNOWN_BYTES:
        contents = (None if x is None else x.tobytes() for x in integers)
        limits = options.max_seqlen_q, options.max_seqlen_k, layout.total_q, layout.total_k
        key = (*contents, *limits, _writes_keys(options))
        if key in _known:
            return
    _check_packed_positions(arguments, options, problem)
    if key is not None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known.add(key)


def _check_packed_positions(arguments: Arguments, options: Options, problem: Problem) -> None:
    layout = problem.layout
    q_lengths = _check_offsets("cu_seqlens_q", arguments.cu_seqlens_q, layout.total_q, "q")
    _check_most("cu_seqlens_q", q_lengths, options.max_seqlen_q or 0, "max_seqlen_q")
    total_k = layout.total_k if layout.packed_k else None
    k_lengths = _check_offsets("cu_seqlens_k", arguments.cu_seqlens_k, total_k, "k")
    name = "cu_seqlens_k"
    if arguments.seqused_k is not None:
        name, k_lengths = "seqused_k", arguments.seqused_k.astype(np.int64)
        if k_lengths.size and k_lengths.min() < 0:
            b = int(k_lengths.argmin())
            raise ValueError(f"seqused_k[{b}] is {k_lengths[b]}; expected at least 0")
        if _writes_keys(options):
            _check_batch_indices(arguments)
    _check_most(name, k_lengths, options.max_seqlen_k or 0, "max_seqlen_k")
    if layout.packed_k:
        left = layout.total_k - arguments.cu_seqlens_k[:-1].astype(np.int64)
        for b in np.flatnonzero(k_lengths > left)[:1]:
            raise ValueError(
                f"{name} gives sequence {b} {k_lengths[b]} keys; expected at most {left[b]}, the "
                "number of rows of k from its first key on"
            )
    else:
        _check_pages(arguments.block_table, name, k_lengths, problem)


def _writes_keys(options: Options) -> bool:
    """Return whether a call writes a result for each key: its gradient, or a sum of weights."""
    return options.wrt is not None or options.received is not None


def _check_batch_indices(arguments: Arguments) -> None:
    """Raise ValueError for keys of two sequences, whose results would be written twice."""
    own = np.diff(arguments.cu_seqlens_k.astype(np.int64))
    for b in np.flatnonzero(arguments.seqused_k > own)[:1]:
        raise ValueError(
            f"seqused_k gives sequence {b} {arguments.seqused_k[b]} keys; expected at most "
            f"{own[b]}, its length in cu_seqlens_k: keys of two sequences have no gradients and no "
            "sums of weights"
        )


def _check_cached(arguments: Arguments, filled: np.ndarray, problem: Problem) -> None:
    """Check the cache indices or the block table, given the lengths after the append."""
    layout = problem.layout
    if arguments.cache_batch_idx is not None:
        chosen = arguments.cache_batch_idx
        for b in np.flatnonzero((chosen < 0) | (chosen >= layout.caches))[:1]:
            raise ValueError(
                f"cache_batch_idx[{b}] is {chosen[b]}; expected 0 to {layout.caches - 1}, as "
                f"k_cache holds {layout.caches} caches"
            )
    if arguments.block_table is not None:
        _check_pages(arguments.block_table, "cache_seqlens", filled, problem)


def _check_offsets(name: str, offsets: np.ndarray, total: int | None, whose: str) -> np.ndarray:
    """Check that offsets increase from at least 0 to at most `total`; return the lengths."""
    wide = offsets.astype(np.int64)
    # Subtracting slices is faster than np.diff, which takes 8 us.
    lengths = wide[1:] - wide[:-1]
    if wide[0] < 0:
        raise ValueError(f"{name}[0] is {wide[0]}; expected at least 0")
    if lengths.min(initial=0) < 0:
        b = int((lengths < 0).argmax())
        raise ValueError(
            f"{name} decreases from {wide[b]} to {wide[b + 1]} at index {b + 1}; expected running "
            "totals of the lengths"
        )
    if total is not None and wide[-1] > total:
        raise ValueError(
            f"{name}[{wide.size - 1}] is {wide[-1]}; expected at most {total}, the rows of {whose}"
        )
    return lengths


def _check_positions(offsets: np.ndarray) -> None:
    for b in np.flatnonzero(abs(offsets.astype(np.int64)) > MAX_SEQLEN)[:1]:
        raise ValueError(f"q_offset[{b}] is {offsets[b]}; expected -{MAX_SEQLEN} to {MAX_SEQLEN}")


def _check_most(name: str, lengths: np.ndarray, most: int, limit: str) -> None:
    if lengths.max(initial=most) > most:
        b = int((lengths > most).argmax())
        raise ValueError(
            f"{name} gives sequence {b} a length of {lengths[b]}; expected at most {most}, the "
            f"value of {limit}"
        )


def _check_pages(block_table: np.ndarray, name: str, lengths: np.ndarray, problem: Problem) -> None:
    layout = problem.layout
    pages_used = -(-lengths // layout.page_size)
    for b in np.flatnonzero(pages_used > layout.max_pages)[:1]:
        raise ValueError(
            f"{name} gives sequence {b} {lengths[b]} keys; expected at most "
            f"{layout.max_pages * layout.page_size}, the rows of its pages"
        )
    columns = np.arange(layout.max_pages)
    outside = (block_table < 0) | (block_table >= layout.pages)
    for b, column in np.argwhere(outside & (columns < pages_used[:, None]))[:1]:
        entry = f"block_table[{b}, {column}] is {block_table[b, column]}"
        if not layout.pages:
            raise ValueError(f"{entry}, but there are no pages; {name} must be 0")
        raise ValueError(
            f"{entry}; expected 0 to {layout.pages - 1}, as there are {layout.pages} pages"
        )
