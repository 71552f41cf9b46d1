"""Random varlen and KV-cache calls, their true results, and error bounds.

A case holds everything except array values. Its problem holds NumPy arrays in which everything that
must not be read is NaN: rows beyond the lengths, and rows and pages that belong to no sequence.
`arguments` returns copies as NumPy or CuPy arrays, by parameter name of the function under test.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.arrays.quantized import QuantizedBlocks
from cupy_flash.arrays.rotary import rotated
from cupy_flash.arrays.sequences import (
    find_cached_keys,
    find_packed_keys,
    find_queries,
    longer,
    read,
)
from cupy_flash.cpu.forward_pass import compute_dtype
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound, max_error
from cupy_flash.reference.packed import attention_varlen_reference, attention_with_kvcache_reference
from support.gpu.gpu_support import DTYPES, lse_bound, one_blas_thread

# One sequence: q (seqlen_q, heads_q, head_dim), k and v (seqlen_k, heads_kv, dim).
Dense = tuple[np.ndarray, np.ndarray, np.ndarray]


def ragged_lengths(rng: np.random.Generator, batch: int, longest: int) -> tuple[int, ...]:
    """Return lengths from 0 to `longest`, many short and few long; of three or more, one is 0."""
    lengths = np.floor((longest + 1) * rng.random(batch) ** 2).astype(int)
    if batch >= 3:
        lengths[rng.integers(batch)] = 0
    return tuple(int(length) for length in lengths)


@dataclass(frozen=True)
class VarlenCase:
    """Call of `flash_attention_varlen` without array values.

    If page_size is 0, the keys are packed. With `seqused`, each sequence has fewer keys than
    cu_seqlens_k provides. The rows after the last sequence belong to no sequence.
    """

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    dtype: str = "float32"
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    softmax_scale: float | None = None
    page_size: int = 0
    seqused: bool = False
    rows_of_none: int = 5
    slack: int = 3  # excess of max_seqlen_* over the longest sequence
    filler: float = np.nan  # value of rows and pages that belong to no sequence
    seed: int = 0

    def __str__(self) -> str:
        return _name(self)

    def problem(self) -> VarlenProblem:
        return VarlenProblem.of(self)


@dataclass(frozen=True)
class KVCacheCase:
    """Call of `flash_attention_with_kvcache` without array values.

    `lengths` are the lengths before seqlen_new rows are appended. If page_size is 0, the cache has
    no pages; with `indexed`, there are then more caches than sequences, in another order. If
    rotary_dim is 0, nothing is rotated; otherwise seqlen_new must be positive.
    """

    lengths: tuple[int, ...]
    dtype: str = "float32"
    seqlen_q: int = 1
    seqlen_new: int = 0
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    softmax_scale: float | None = None
    page_size: int = 0
    indexed: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    rotary_dtype: str | None = None  # dtype of the rotary tables, by default that of q
    slack: int = 3  # rows of the cache beyond the longest sequence
    filler: float = np.nan  # value of rows and pages that belong to no sequence
    seed: int = 0

    def __str__(self) -> str:
        return _name(self)

    def problem(self) -> KVCacheProblem:
        return KVCacheProblem.of(self)


def random_varlen_case(
    rng: np.random.Generator, *, batch: int = 5, longest: int = 203, **fixed: Any
) -> VarlenCase:
    """Return a case with ragged lengths; `fixed` sets fields."""
    return VarlenCase(
        **{
            "seqlens_q": ragged_lengths(rng, batch, longest),
            "seqlens_k": ragged_lengths(rng, batch, longest),
            "seed": int(rng.integers(2**32)),
            **fixed,
        }
    )


def random_kvcache_case(
    rng: np.random.Generator, *, batch: int = 5, longest: int = 203, **fixed: Any
) -> KVCacheCase:
    """Return a case with ragged lengths; `fixed` sets fields."""
    return KVCacheCase(
        **{
            "lengths": ragged_lengths(rng, batch, longest),
            "seed": int(rng.integers(2**32)),
            **fixed,
        }
    )


# Results with fewer elements are too small for a typical largest error of the naive formula.
FEW_RESULTS = 1000


@dataclass(frozen=True)
class Part:
    """One sequence of a result, with its error bounds.

    Each sequence has separate bounds, because short sequences have large results, whose bound would
    hide errors in long ones.
    """

    rows: Any  # index into out and owned
    lse_rows: Any  # index into lse
    out_bound: float
    lse_bound: float

    @classmethod
    def of(
        cls,
        rows: Any,
        lse_rows: Any,
        dense: Dense,
        truth: tuple[np.ndarray, np.ndarray],
        **formula: Any,
    ) -> Part:
        """Compute the bounds from the naive formula in the precision of q's dtype.

        `dense` is the sequence after all rounding of inputs by an implementation. `truth` is the
        exact (out, lse) with shapes (seqlen_q, heads_q, head_dim_v) and (heads_q, seqlen_q).
        """
        q, k, v = (x[None] for x in dense)
        out, lse = (x[None] for x in truth)
        naive = attention_naive(q, k, v, **formula)
        rounded_out, rounded_lse = attention_reference(q, k, v, return_lse=True, **formula)
        # The error of a sum of terms p v is proportional to the sum of p |v|, even if the terms
        # cancel. The naive error of many results shows this. With few results, it may be small by
        # chance (a mean of 18 keys was off by 3.9e-8, naively by less than 3e-9), and in float64
        # the naive formula has the errors of the reference.
        summing = 0.0
        if out.size < FEW_RESULTS or q.dtype == np.float64:
            terms = attention_reference(q, k, np.abs(v), **formula)
            summing = error_bound(terms, terms, compute_dtype(q.dtype), lse=rounded_lse)
        # `_finite_error` is the effect of rounding rotated inputs, 0 without rotation. It is added
        # separately, because it may cancel the naive error in a result of few elements.
        return cls(
            rows,
            lse_rows,
            2 * _finite_error(rounded_out, out)
            + error_bound(naive, rounded_out, q.dtype, lse=rounded_lse)
            + summing,
            2 * _finite_error(rounded_lse, lse)
            + lse_bound(q, k, rounded_lse, formula["softmax_scale"], formula.get("softcap")),
        )


@dataclass(frozen=True)
class Truth:
    """Result in float64, with error bounds for a result in the inputs' dtype.

    out and lse have shapes (total_q, heads_q, head_dim_v) and (heads_q, total_q) if packed,
    otherwise (batch, seqlen_q, heads_q, head_dim_v) and (batch, heads_q, seqlen_q).
    """

    out: np.ndarray
    lse: np.ndarray
    owned: np.ndarray  # rows that belong to exactly one sequence, (total_q,) or (batch, seqlen_q)
    unowned: np.ndarray  # rows that belong to no sequence
    parts: tuple[Part, ...]

    @classmethod
    def of_varlen(cls, arguments: dict[str, Any]) -> Truth:
        """Return the truth of a `flash_attention_varlen` call with NumPy arrays of any contents."""
        formula = _formula(arguments)
        q, k, v = (arguments[name] for name in "qkv")
        block_table = arguments["block_table"]
        paged = block_table is not None
        queries = list(find_queries(arguments["cu_seqlens_q"], len(q), arguments["max_seqlen_q"]))
        places = find_packed_keys(
            arguments["cu_seqlens_k"],
            arguments["max_seqlen_k"],
            batch=len(queries),
            total_k=0 if paged else len(k),
            page_size=k.shape[1] if paged else 0,
            seqused_k=arguments["seqused_k"],
            block_table=block_table,
        )
        blocks = (k, v) if paged else (k[None], v[None])
        if k.itemsize == 1:
            scales = (arguments["k_scale"], arguments["v_scale"])
            blocks = tuple(
                QuantizedBlocks(x, 1 if scale is None else scale, np.float64)
                for x, scale in zip(blocks, scales, strict=True)
            )
        owners = np.zeros(len(q), int)
        for found in queries:
            owners[found.rows] += 1
        parts = []
        with one_blas_thread():
            out, lse = attention_varlen_reference(**arguments)
            for found, keys in zip(queries, places, strict=True):
                # The result of overlapping sequences is undefined.
                if (owners[found.rows] == 1).all():
                    rows = (read(x, keys).astype(q.dtype, copy=False) for x in blocks)
                    dense = (q[found.rows], *rows)
                    truth = out[found.rows], lse[:, found.rows]
                    lse_rows = (slice(None), found.rows)
                    parts.append(Part.of(found.rows, lse_rows, dense, truth, **formula))
        owned = np.zeros(len(q), bool)
        for part in parts:
            owned[part.rows] = True
        return cls(out, lse, owned, owners == 0, tuple(parts))

    @classmethod
    def of_kvcache(cls, arguments: dict[str, Any]) -> Truth:
        """Return the truth of a `flash_attention_with_kvcache` call with NumPy arrays."""
        formula = _formula(arguments)
        q, new = arguments["q"], arguments["k"]
        before = list(
            find_cached_keys(
                np.broadcast_to(arguments["cache_seqlens"], len(q)),
                cache_shape=arguments["k_cache"].shape,
                cache_batch_idx=arguments["cache_batch_idx"],
                block_table=arguments["block_table"],
            )
        )
        starts = arguments.get("cu_seqlens_k_new")
        added = [0 if new is None else new.shape[1]] * len(q) if starts is None else np.diff(starts)
        places = [longer(keys, int(n)) for keys, n in zip(before, added, strict=True)]
        with one_blas_thread():
            found = attention_with_kvcache_reference(**arguments)
            out, lse = found.out, found.lse
            k_cache, v_cache = (
                cache if scale is None else QuantizedBlocks(cache, scale, np.float64)
                for cache, scale in ((found.k_cache, found.k_scale), (found.v_cache, found.v_scale))
            )
            if arguments["rotary_cos"] is not None:
                starts = arguments.get("rotary_seqlens")
                q = rotated(
                    q,
                    arguments["rotary_cos"],
                    arguments["rotary_sin"],
                    [keys.seqlen for keys in before] if starts is None else starts,
                    interleaved=arguments["rotary_interleaved"],
                    advance=arguments["causal"],
                    compute=np.float64 if q.dtype == np.float64 else np.float32,
                ).astype(q.dtype)
            parts = [
                Part.of(
                    b,
                    b,
                    (q[b], *(read(cache, keys).astype(q.dtype) for cache in (k_cache, v_cache))),
                    (out[b], lse[b]),
                    **formula,
                )
                for b, keys in enumerate(places)
            ]
        owned = np.ones(q.shape[:2], bool)
        return cls(out, lse, owned, ~owned, tuple(parts))

    def check(self, out: Any, lse: Any = None) -> None:
        """Fail unless a result, in NumPy or CuPy arrays, is right.

        Rows that belong to no sequence must be exactly 0, and their log-sum-exps -inf.
        """
        out, lse = to_numpy(out), None if lse is None else to_numpy(lse)
        assert out.shape == self.out.shape
        if lse is not None:
            assert lse.shape == self.lse.shape
            assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
        of_none = out[self.unowned].astype(np.float64)
        assert (of_none == 0).all(), "a row that belongs to no sequence is not exactly 0"
        if lse is not None and self.unowned.any():
            assert (lse[:, self.unowned] == -np.inf).all(), "the lse of such a row is not -inf"
        for part in self.parts:
            true_lse = self.lse[part.lse_rows]
            assert max_error(out[part.rows], self.out[part.rows]) <= part.out_bound
            sees_nothing = true_lse.swapaxes(-1, -2) == -np.inf
            assert not out[part.rows][sees_nothing].any(), "a row without keys is not exactly 0"
            if lse is not None:
                assert max_error(lse[part.lse_rows], true_lse) <= part.lse_bound


class _Problem(ABC):
    """Base class of both kinds of problems."""

    case: VarlenCase | KVCacheCase
    q: np.ndarray

    @property
    @abstractmethod
    def truth(self) -> Truth:
        """True result, computed once."""

    def poisoned_out(self, xp: Any = np) -> Any:
        """Return a buffer for `out`, full of NaN."""
        shape = (*self.q.shape[:-1], self.case.head_dim_v)
        return xp.asarray(np.full(shape, np.nan, self.q.dtype))

    def copies(self, xp: Any) -> dict[str, Any]:
        """Return copies of all arrays, as arrays of `xp`; None for an array that is missing."""
        arrays = {n: x for n, x in vars(self).items() if n not in ("case", "dense", "truth")}
        return {n: None if x is None else xp.asarray(x.copy()) for n, x in arrays.items()}

    def check(self, out: Any, lse: Any = None) -> None:
        """Fail unless a result is right."""
        self.truth.check(out, lse)


@dataclass(frozen=True)
class VarlenProblem(_Problem):
    """Arrays of a `VarlenCase`."""

    case: VarlenCase
    q: np.ndarray  # (total_q, heads_q, head_dim)
    k: np.ndarray  # (total_k, heads_kv, head_dim) or (pages, page_size, heads_kv, head_dim)
    v: np.ndarray
    cu_seqlens_q: np.ndarray  # (batch + 1,)
    cu_seqlens_k: np.ndarray
    seqused_k: np.ndarray | None  # (batch,)
    block_table: np.ndarray | None  # (batch, max_pages)
    dense: tuple[Dense, ...]  # each sequence separately

    @classmethod
    def of(cls, case: VarlenCase) -> VarlenProblem:
        assert len(case.seqlens_q) == len(case.seqlens_k)
        rng = np.random.default_rng(case.seed)
        dense = tuple(
            _random_sequence(rng, case, seqlen_q, seqlen_k)
            for seqlen_q, seqlen_k in zip(case.seqlens_q, case.seqlens_k, strict=True)
        )
        space = [n + int(rng.integers(1, 9)) if case.seqused else n for n in case.seqlens_k]
        cu_seqlens_q, cu_seqlens_k = _cumulative(case.seqlens_q), _cumulative(space)
        queries = [q for q, _, _ in dense]
        q = _packed(queries, cu_seqlens_q, case.rows_of_none, case.filler)
        keys, values = [k for _, k, _ in dense], [v for _, _, v in dense]
        block_table = None
        if case.page_size:
            capacity = max(space, default=0) + case.slack
            block_table, pages = _shuffled_pages(rng, len(dense), capacity, case.page_size)
            k, v = (
                _paged(rows, block_table, pages, case.page_size, case.filler)
                for rows in (keys, values)
            )
        else:
            k, v = (
                _packed(rows, cu_seqlens_k, case.rows_of_none, case.filler)
                for rows in (keys, values)
            )
        seqused_k = np.array(case.seqlens_k, np.int32) if case.seqused else None
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k)
        return cls(case, q, k, v, *lengths, block_table, dense)

    def arguments(self, xp: Any = np) -> dict[str, Any]:
        """Return the arguments of the function under test, as new arrays of `xp`."""
        case = self.case
        space = np.diff(self.cu_seqlens_k).max(initial=0)
        return {
            **self.copies(xp),
            "max_seqlen_q": max(case.seqlens_q, default=0) + case.slack,
            "max_seqlen_k": int(space) + case.slack,
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
        }

    @functools.cached_property
    def truth(self) -> Truth:
        return Truth.of_varlen(self.arguments())


@dataclass(frozen=True)
class KVCacheProblem(_Problem):
    """Arrays of a `KVCacheCase`."""

    case: KVCacheCase
    q: np.ndarray  # (batch, seqlen_q, heads_q, head_dim)
    k_cache: np.ndarray  # (caches, capacity, heads_kv, dim) or (pages, page_size, heads_kv, dim)
    v_cache: np.ndarray
    k: np.ndarray | None  # (batch, seqlen_new, heads_kv, head_dim)
    v: np.ndarray | None
    cache_seqlens: np.ndarray  # (batch,)
    cache_batch_idx: np.ndarray | None
    block_table: np.ndarray | None
    rotary_cos: np.ndarray | None  # (rows, rotary_dim / 2)
    rotary_sin: np.ndarray | None
    dense: tuple[Dense, ...]  # each sequence separately, rotated in the precision of its dtype

    @classmethod
    def of(cls, case: KVCacheCase) -> KVCacheProblem:
        rng = np.random.default_rng(case.seed)
        lengths, new = case.lengths, case.seqlen_new
        plain = [_random_sequence(rng, case, case.seqlen_q, length + new) for length in lengths]
        capacity = max(lengths, default=0) + new + case.slack
        cos, sin = _rotary_table(rng, case, capacity)
        block_table = cache_batch_idx = None
        keys = [k[: len(k) - new] for _, k, _ in plain]
        values = [v[: len(v) - new] for _, _, v in plain]
        if case.page_size:
            block_table, pages = _shuffled_pages(rng, len(lengths), capacity, case.page_size)
            k_cache, v_cache = (
                _paged(rows, block_table, pages, case.page_size, case.filler)
                for rows in (keys, values)
            )
        else:
            caches = len(lengths) + 2 * case.indexed
            places = rng.permutation(caches)[: len(lengths)] if case.indexed else range(caches)
            k_cache, v_cache = (
                _placed(rows, list(places), caches, capacity, case.filler)
                for rows in (keys, values)
            )
            if case.indexed:
                cache_batch_idx = np.array(places, np.int32)
        q = _stacked([q for q, _, _ in plain], (case.seqlen_q, case.heads_q, case.head_dim))
        k, v = (
            np.stack([rows[i][len(rows[i]) - new :] for rows in plain]) if new else None
            for i in (1, 2)
        )
        dense = tuple(
            _rotated_sequence(case, sequence, length, cos, sin)
            for sequence, length in zip(plain, lengths, strict=True)
        )
        of_caches = (np.array(lengths, np.int32), cache_batch_idx, block_table)
        return cls(case, q, k_cache, v_cache, k, v, *of_caches, cos, sin, dense)

    def arguments(self, xp: Any = np) -> dict[str, Any]:
        """Return the arguments of the function under test, as new arrays of `xp`."""
        case = self.case
        return {
            **self.copies(xp),
            "rotary_interleaved": case.rotary_interleaved,
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
        }

    @functools.cached_property
    def truth(self) -> Truth:
        return Truth.of_kvcache(self.arguments())

    def check_caches(self, k_cache: Any, v_cache: Any) -> None:
        """Fail unless the caches hold the new rows, and are otherwise unchanged byte for byte.

        Rotated rows may be off by the rounding of another precision or order; values may not.
        """
        for name, cache in (("k_cache", to_numpy(k_cache)), ("v_cache", to_numpy(v_cache))):
            appended = cache[self._new_rows].astype(np.float64)
            expected = self.expected_cache(name)
            exact = expected[self._new_rows].astype(np.float64)
            if name == "v_cache" or not self.case.rotary_dim:
                np.testing.assert_array_equal(appended, exact)
            else:
                untouched = self.case.rotary_dim
                np.testing.assert_array_equal(appended[..., untouched:], exact[..., untouched:])
                assert max_error(appended, exact) <= error_bound(exact, exact, cache.dtype)
            expected[self._new_rows] = cache[self._new_rows]
            assert cache.tobytes() == expected.tobytes(), f"{name} was written elsewhere"

    @property
    def _new_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """First and second index of each appended row in a cache, (batch * seqlen_new,) each."""
        batch, new = len(self.case.lengths), self.case.seqlen_new
        sequence = np.repeat(np.arange(batch), new)
        row = (self.cache_seqlens[:, None] + np.arange(new)).reshape(-1)
        if self.block_table is not None:
            page, within = np.divmod(row, self.case.page_size)
            return self.block_table[sequence, page], within
        place = np.arange(batch) if self.cache_batch_idx is None else self.cache_batch_idx
        return place[sequence], row

    def expected_cache(self, name: str) -> np.ndarray:
        """Return k_cache or v_cache after the append."""
        cache: np.ndarray = getattr(self, name).copy()
        new = self.case.seqlen_new
        index = 1 if name == "k_cache" else 2
        rows = [sequence[index][len(sequence[index]) - new :] for sequence in self.dense]
        if new and rows:
            cache[self._new_rows] = np.concatenate(rows)
        return cache


def to_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def _formula(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call that apply unchanged to the formula of one sequence.

    alibi_slopes must have one value per head.
    """
    modifications = ("window_size", "sinks", "softcap", "alibi_slopes")
    return {
        name: arguments[name]
        for name in ("causal", "softmax_scale", *modifications)
        if name in arguments
    }


def _name(case: VarlenCase | KVCacheCase) -> str:
    """Return the fields that differ from their defaults, for the name of a test."""
    shown = []
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        # The test for identity is for NaN, a default that differs from itself.
        if field.name != "seed" and not (value is field.default or value == field.default):
            text = "-".join(map(str, value)) if isinstance(value, tuple) else value
            shown.append(f"{field.name}={text}")
    return " ".join(shown)


def _random_sequence(
    rng: np.random.Generator, case: VarlenCase | KVCacheCase, seqlen_q: int, seqlen_k: int
) -> Dense:
    shapes = (
        (seqlen_q, case.heads_q, case.head_dim),
        (seqlen_k, case.heads_kv, case.head_dim),
        (seqlen_k, case.heads_kv, case.head_dim_v),
    )
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[case.dtype]) for shape in shapes)
    return q, k, v


def _cumulative(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _stacked(rows: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.stack(rows) if rows else np.zeros((0, *shape))


def _filled(filler: float, like: np.ndarray, *leading: int) -> np.ndarray:
    return np.full((*leading, *like.shape[1:]), filler, like.dtype)


def _packed(
    rows: list[np.ndarray], cu_seqlens: np.ndarray, spare: int, filler: float
) -> np.ndarray:
    """Return sequences packed at the offsets in cu_seqlens, with filler between them."""
    packed = _filled(filler, rows[0], int(cu_seqlens[-1]) + spare)
    for first, sequence in zip(cu_seqlens, rows, strict=False):
        packed[first : first + len(sequence)] = sequence
    return packed


def _placed(
    rows: list[np.ndarray], places: list[int], caches: int, capacity: int, filler: float
) -> np.ndarray:
    """Return a cache without pages; sequence b is at index places[b] of the first axis."""
    cache = _filled(filler, rows[0], caches, capacity)
    for place, sequence in zip(places, rows, strict=True):
        cache[place, : len(sequence)] = sequence
    return cache


def _shuffled_pages(
    rng: np.random.Generator, batch: int, capacity: int, page_size: int
) -> tuple[np.ndarray, int]:
    """Return a block table (batch, max_pages) of distinct random pages, and their number."""
    max_pages = -(-capacity // page_size)
    pages = batch * max_pages + 3
    order = rng.permutation(pages)[: batch * max_pages]
    return order.reshape(batch, max_pages).astype(np.int32), pages


def _paged(
    rows: list[np.ndarray], block_table: np.ndarray, pages: int, page_size: int, filler: float
) -> np.ndarray:
    cache = _filled(filler, rows[0], pages, page_size)
    for table, sequence in zip(block_table, rows, strict=True):
        for j, row in enumerate(sequence):
            cache[table[j // page_size], j % page_size] = row
    return cache


def _rotary_table(
    rng: np.random.Generator, case: KVCacheCase, capacity: int
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return tables of random angles, so that all positions and columns are rotated differently."""
    if not case.rotary_dim:
        return None, None
    angles = rng.uniform(-np.pi, np.pi, (capacity + case.seqlen_q, case.rotary_dim // 2))
    dtype = DTYPES[case.rotary_dtype or case.dtype]
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def _rotated_sequence(
    case: KVCacheCase, sequence: Dense, length: int, cos: np.ndarray | None, sin: np.ndarray | None
) -> Dense:
    """Return one sequence with rotated rows, computed as a naive implementation would."""
    if cos is None or sin is None:
        return sequence
    q, k, v = sequence
    positions = length + (np.arange(len(q)) if case.causal else np.zeros(len(q), int))
    q = _rotated(case, q, cos[positions], sin[positions])
    new = slice(length, length + case.seqlen_new)
    k = np.concatenate([k[:length], _rotated(case, k[new], cos[new], sin[new])])
    return q, k, v


def _rotated(case: KVCacheCase, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return x (rows, heads, head_dim) rotated by the angles of its rows, as complex products."""
    compute = np.float64 if x.dtype == np.float64 else np.float32
    dim, half = case.rotary_dim, case.rotary_dim // 2
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2))
        if case.rotary_interleaved
        else (slice(0, half), slice(half, dim))
    )
    turn = cos.astype(compute) + 1j * sin.astype(compute)
    turned = (x[..., first].astype(compute) + 1j * x[..., second].astype(compute)) * turn[:, None]
    result = x.copy()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def _finite_error(result: np.ndarray, truth: np.ndarray) -> float:
    finite = np.isfinite(result) & np.isfinite(truth)
    return float(np.abs(result[finite] - truth[finite]).max(initial=0))
