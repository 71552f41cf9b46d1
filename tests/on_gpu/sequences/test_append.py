"""Appends to a KV cache on a GPU: each new row is written in place, all other bytes are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES, Guarded, capture_call, current_device

from cupy_flash.gpu.append import Append, AppendSpec, prepare
from cupy_flash.parallel import generation

pytestmark = pytest.mark.gpu

NO_PAGE = -1


@dataclass(frozen=True)
class Case:
    """Shapes and options of an append, without array values and sequence lengths."""

    dtype: str = "float16"
    batch: int = 3
    seqlen_q: int = 5
    seqlen_new: int = 5
    heads_q: int = 6
    heads_kv: int = 3
    head_dim: int = 64
    head_dim_v: int = 40
    page_size: int = 0
    capacity: int = 23
    caches: int = 5
    rotary_dim: int = 0
    rotary_rows: int = 41
    rotary_dtype: str = ""
    rotary_interleaved: bool = True
    queries_advance: bool = True
    alignment: int = 16
    rotary_alignment: int = 16
    ranks: int = 1
    rank: int = 0
    stripe: int = 1

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [(f.name, getattr(self, f.name), f.default) for f in fields]
        return " ".join(f"{name}={value}" for name, value, usual in changed if value != usual)

    @property
    def max_pages(self) -> int:
        return -(-self.capacity // self.page_size) if self.page_size else 0

    @property
    def seqlen_cache(self) -> int:
        if self.ranks > 1:
            rounds, rest = divmod(self.capacity, self.stripe)
            return (rounds * self.ranks + self.rank) * self.stripe + rest
        return self.max_pages * self.page_size if self.page_size else self.capacity

    @property
    def angle_dtype(self) -> str:
        return self.rotary_dtype or ("float64" if self.dtype == "float64" else "float32")


def shuffled_pages(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Return a block table whose sequences have no page in common; 3 pages stay unused."""
    count = case.batch * case.max_pages
    return rng.permutation(count + 3)[:count].reshape(case.batch, -1).astype(np.int32)


class Arrays:
    """Arrays of one append, on the host and, surrounded by NaN, on the GPU."""

    def __init__(self, rng: np.random.Generator, case: Case) -> None:
        self.case = case
        blocks, rows = case.caches, case.capacity
        if case.page_size:
            blocks, rows = case.batch * case.max_pages + 3, case.page_size
        shapes = {
            "q": (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
            "k": (case.batch, case.seqlen_new, case.heads_kv, case.head_dim),
            "v": (case.batch, case.seqlen_new, case.heads_kv, case.head_dim_v),
            "k_cache": (blocks, rows, case.heads_kv, case.head_dim),
            "v_cache": (blocks, rows, case.heads_kv, case.head_dim_v),
        }
        dtype = DTYPES[case.dtype]
        self.host = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
        self.guarded = {n: Guarded(a, case.alignment) for n, a in self.host.items()}
        if case.rotary_dim:
            angles = rng.uniform(-math.pi, math.pi, (case.rotary_rows, case.rotary_dim // 2))
            for name, function in (("cos", np.cos), ("sin", np.sin)):
                table = function(angles).astype(DTYPES[case.angle_dtype])
                self.host[name] = table
                self.guarded[name] = Guarded(table[None, :, None], case.rotary_alignment)
        # The array has one extra row, which must not be written.
        shape = (case.batch * case.seqlen_q + 1, case.heads_q, case.head_dim)
        self.q_rotated = cupy.asarray(np.full(shape, np.nan, dtype))

    def address(self, name: str) -> int:
        return int(self.guarded[name].view.data.ptr) if name in self.guarded else 0

    def strides(self, name: str) -> tuple[int, int, int]:
        view = self.guarded[name].view
        batch, row, head, _ = (stride // view.itemsize for stride in view.strides)
        return batch, row, head

    def spec(self, block_table_stride: int) -> AppendSpec:
        case = self.case
        same = {f.name for f in dataclasses.fields(Case)} - {"capacity"}
        names = ("q", "k", "v", "k_cache", "v_cache")
        return AppendSpec(
            **({name: getattr(case, name) for name in same} | {"rotary_dtype": case.angle_dtype}),
            **{f"{name}_strides": self.strides(name) for name in names},
            seqlen_cache=case.seqlen_cache,
            pages=self.host["k_cache"].shape[0] if case.page_size else 0,
            max_pages=case.max_pages,
            block_table_stride=block_table_stride,
            rotary_stride=self.strides("cos")[1] if case.rotary_dim else 0,
        )


@dataclass(frozen=True)
class Targets:
    """Lengths, block table and cache indices of the sequences, which a call reads on the device."""

    lengths: np.ndarray | int
    block_table: np.ndarray | None = None
    cache_batch_idx: np.ndarray | None = None

    @classmethod
    def random(cls, rng: np.random.Generator, case: Case) -> Targets:
        lengths = rng.integers(0, max(1, case.seqlen_cache - case.seqlen_new), case.batch)
        if case.page_size:
            return cls(lengths.astype(np.int32), block_table=shuffled_pages(rng, case))
        rows = rng.permutation(case.caches)[: case.batch]
        return cls(lengths.astype(np.int32), cache_batch_idx=rows.astype(np.int32))

    def before(self, case: Case) -> np.ndarray:
        """Return the number of cached rows of each sequence, clamped as in the append kernel."""
        told = np.broadcast_to(self.lengths, case.batch)
        if self.cache_batch_idx is not None:
            # A sequence with an invalid cache index has no keys.
            rows = self.cache_batch_idx
            told = np.where((rows >= 0) & (rows < case.caches), told, 0)
        return np.clip(told, 0, case.seqlen_cache)

    def appended(self, case: Case) -> Iterator[tuple[int, int, int, int]]:
        """Yield (sequence, new row, cache index or page, row in it) of each row that is written."""
        blocks = case.batch * case.max_pages + 3 if case.page_size else case.caches
        for batch, before in enumerate(self.before(case)):
            for row in range(case.seqlen_new):
                target = int(before) + row
                if target >= case.seqlen_cache:
                    continue
                turn, owner = divmod(target // case.stripe, case.ranks)
                if owner != case.rank:
                    continue
                target = turn * case.stripe + target % case.stripe
                block = batch
                if self.block_table is not None:
                    block = int(self.block_table[batch, target // case.page_size])
                    target %= case.page_size
                elif self.cache_batch_idx is not None:
                    block = int(self.cache_batch_idx[batch])
                if 0 <= block < blocks:
                    yield batch, row, block, target


def turned(case: Case, rows: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> Any:
    """Return rows (heads, head_dim), rotated in float64, and the error bound of a float32 result.

    A result is the sum of two products. Rounding one product and the sum costs eps/2 of each term
    and of the result. The result is then rounded to the dtype once. The bound is doubled, because
    for float64 the expected value has the same error as the result of the GPU.
    """
    exact = rows.astype(np.float64)
    half = case.rotary_dim // 2
    first = slice(0, 2 * half, 2) if case.rotary_interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if case.rotary_interleaved else slice(half, 2 * half)
    a, b = exact[:, first].copy(), exact[:, second].copy()
    c, s = cos.astype(np.float64), sin.astype(np.float64)
    exact[:, first], exact[:, second] = a * c - b * s, a * s + b * c
    sums = float(np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps)
    info: Any = ml_dtypes.finfo(rows.dtype)
    bound = np.zeros_like(exact)
    for columns, terms in ((first, abs(a * c) + abs(b * s)), (second, abs(a * s) + abs(b * c))):
        error = 2 * sums * terms
        rounding = float(info.eps) / 2 * (abs(exact[:, columns]) + error)
        bound[:, columns] = error + rounding + float(info.smallest_subnormal)
    return exact, bound


NAMES = (
    *("q", "k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin", "q_rotated"),
    *("cache_seqlens", "keys", "cache_batch_idx", "block_table"),
)


def on_device(array: np.ndarray | None) -> Any:
    return None if array is None else cupy.asarray(array)


def address_of(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


class Run:
    """Prepared append, with the arrays of `Targets` on the device."""

    def __init__(self, arrays: Arrays, targets: Targets) -> None:
        self.arrays = arrays
        by_length = isinstance(targets.lengths, np.ndarray)
        self.lengths = on_device(targets.lengths) if by_length else None
        self.keys = 0 if by_length else int(targets.lengths)
        # The block table has one extra column, which must not be read.
        table = targets.block_table
        if table is not None:
            table = np.pad(table, ((0, 0), (0, 1)), constant_values=0)
        self.table = on_device(table)
        self.rows = on_device(targets.cache_batch_idx)
        stride = 0 if table is None else table.shape[1]
        self.append: Append = prepare(arrays.spec(stride), current_device(), NAMES)

    def __call__(self) -> None:
        arrays = ("q", "k", "v", "k_cache", "v_cache", "cos", "sin")
        self.append.run(
            (
                *map(self.arrays.address, arrays),
                address_of(self.arrays.q_rotated),
                address_of(self.lengths),
                self.keys,
                address_of(self.rows),
                address_of(self.table),
            )
        )


def check(arrays: Arrays, targets: Targets) -> None:
    """Fail unless the arrays hold the result of one append to their host copies."""
    case, host = arrays.case, arrays.host
    for name in set(host) - {"k_cache", "v_cache"}:
        arrays.guarded[name].assert_unchanged()
    before = targets.before(case)
    last = case.rotary_rows - 1

    k_cache, v_cache = (arrays.guarded[name].values() for name in ("k_cache", "v_cache"))
    expected_k, expected_v = host["k_cache"].copy(), host["v_cache"].copy()
    for batch, row, block, target in targets.appended(case):
        expected_v[block, target] = host["v"][batch, row]
        expected_k[block, target] = host["k"][batch, row]
        if case.rotary_dim:
            position = min(int(before[batch]) + row, last)
            exact, bound = turned(
                case, host["k"][batch, row], host["cos"][position], host["sin"][position]
            )
            got = k_cache[block, target]
            assert (np.abs(got.astype(np.float64) - exact) <= bound).all()
            expected_k[block, target, :, : case.rotary_dim] = got[:, : case.rotary_dim]
    assert v_cache.tobytes() == expected_v.tobytes()
    assert k_cache.tobytes() == expected_k.tobytes()

    q_rotated = arrays.q_rotated.get()
    assert np.isnan(q_rotated[-1]).all(), "memory after q_rotated was written"
    if not case.rotary_dim:
        assert np.isnan(q_rotated).all(), "q is not rotated, but was written"
        return
    got_q = q_rotated[:-1].reshape(host["q"].shape)
    for batch, row in np.ndindex(case.batch, case.seqlen_q):
        position = min(int(before[batch]) + (row if case.queries_advance else 0), last)
        exact, bound = turned(
            case, host["q"][batch, row], host["cos"][position], host["sin"][position]
        )
        assert (np.abs(got_q[batch, row].astype(np.float64) - exact) <= bound).all()


def run_and_check(rng: np.random.Generator, case: Case, targets: Targets | None = None) -> Arrays:
    arrays = Arrays(rng, case)
    targets = targets or Targets.random(rng, case)
    Run(arrays, targets)()
    check(arrays, targets)
    return arrays


ROTARY = {
    "copied": {},
    "interleaved": {"rotary_dim": 32},
    "halves": {"rotary_dim": 32, "rotary_interleaved": False},
}


# Every dtype, layout and shape


@pytest.mark.parametrize("page_size", [0, 1, 3, 16])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_rows_are_appended_to_every_kind_of_cache(
    rng: np.random.Generator, dtype: str, rotary: str, page_size: int
) -> None:
    run_and_check(rng, Case(dtype, page_size=page_size, **ROTARY[rotary]))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "rotary_dim"),
    [(1, 1, 0), (2, 1, 2), (37, 5, 6), (37, 64, 36), (80, 80, 24), (256, 256, 256), (128, 96, 128)],
)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_any_head_dim_and_any_even_part_of_it_that_is_rotated(
    rng: np.random.Generator,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    rotary_dim: int,
    interleaved: bool,
) -> None:
    run_and_check(
        rng,
        Case(
            dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            rotary_dim=rotary_dim,
            rotary_interleaved=interleaved,
            rotary_dtype=dtype,
        ),
    )


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize(
    ("dtype", "alignment"),
    [(d, a) for d, t in DTYPES.items() for a in (2, 4, 8, 16) if a >= t.itemsize],
)
def test_rows_of_any_alignment(
    rng: np.random.Generator, dtype: str, alignment: int, rotary: str
) -> None:
    case = Case(
        dtype,
        alignment=alignment,
        rotary_alignment=alignment,
        rotary_dtype=dtype,
        head_dim=70,
        **ROTARY[rotary],
    )
    run_and_check(rng, case)


@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
def test_a_row_has_the_same_bits_whatever_its_alignment(rotary: str) -> None:
    results = []
    for alignment in (2, 4, 8, 16):
        case = Case(alignment=alignment, head_dim=72, **ROTARY[rotary])
        arrays = run_and_check(np.random.default_rng(5), case)
        k_cache = arrays.guarded["k_cache"].values()
        results.append((k_cache.tobytes(), arrays.q_rotated.get().tobytes()))
    assert results == results[:1] * 4


@pytest.mark.parametrize("queries_advance", [True, False])
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 1), (7, 2), (2, 7), (3, 0), (1, 20)])
def test_queries_and_new_keys_may_differ_in_number(
    rng: np.random.Generator, seqlen_q: int, seqlen_new: int, queries_advance: bool
) -> None:
    case = Case(
        seqlen_q=seqlen_q, seqlen_new=seqlen_new, rotary_dim=64, queries_advance=queries_advance
    )
    run_and_check(rng, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, seqlen_q=1, seqlen_new=1, heads_q=32, heads_kv=8, rotary_dim=64),
        Case(batch=1000, caches=1009, seqlen_q=1, seqlen_new=1, rotary_dim=64, page_size=0),
        Case(batch=1000, seqlen_q=1, seqlen_new=1, capacity=7, page_size=2),
        Case(batch=1, seqlen_q=3001, seqlen_new=3001, capacity=4000, rotary_dim=64, page_size=16),
        Case(batch=2, heads_q=80, heads_kv=80, head_dim=256, head_dim_v=256, rotary_dim=128),
        Case("float64", heads_q=1, heads_kv=1, head_dim=2, head_dim_v=1, rotary_dim=2),
    ],
    ids=str,
)
def test_from_one_row_of_one_sequence_to_thousands(rng: np.random.Generator, case: Case) -> None:
    run_and_check(rng, case)


def test_without_cache_batch_idx_sequence_b_has_row_b(rng: np.random.Generator) -> None:
    lengths = np.array([0, 7, 18], np.int32)
    run_and_check(rng, Case(rotary_dim=64), Targets(lengths))


@pytest.mark.parametrize("page_size", [0, 3])
def test_one_length_for_all_needs_no_array(rng: np.random.Generator, page_size: int) -> None:
    case = Case(rotary_dim=64, page_size=page_size)
    table = shuffled_pages(rng, case) if page_size else None
    run_and_check(rng, case, Targets(11, block_table=table))


@pytest.mark.parametrize("stripe", [1, 3, 8, 300])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_gets_the_rows_of_its_stripes(
    rng: np.random.Generator, ranks: int, rotary: str, stripe: int
) -> None:
    case = Case(seqlen_new=7, ranks=ranks, stripe=stripe, rotary_rows=80, **ROTARY[rotary])
    for rank in range(ranks):
        run_and_check(rng, dataclasses.replace(case, rank=rank))


def test_what_is_behind_a_rank_s_last_row_is_not_written(rng: np.random.Generator) -> None:
    case = Case(ranks=2, rank=1, stripe=4)
    lengths = case.seqlen_cache - np.array([2, 0, -9], np.int32)
    run_and_check(rng, case, Targets(lengths))


def strided(x: Any) -> Any:
    """Return the same values as every other element of a last axis of twice the length."""
    wide = type_of(x).zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def shifted(x: Any) -> Any:
    """Return the same values, each row shifted by one element, with gaps between rows."""
    wide = type_of(x).zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


def heads_first(x: Any) -> Any:
    """Return the same values, with the heads axis before the rows axis in memory."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def backwards(x: Any) -> Any:
    """Return the same values, with the rows in reverse order in memory."""
    return x[:, ::-1].copy()[:, ::-1]


def type_of(x: Any) -> Any:
    return cupy.get_array_module(x)


@pytest.mark.parametrize(
    ("dtype", "dims", "new", "cache", "stripe", "lengths"),
    [
        ("float16", (64, 48), None, None, 4, [0, 13, 30]),
        ("float16", (64, 64), None, None, 4, 17),
        ("bfloat16", (3, 5), None, shifted, 3, [0, 13, 30]),
        ("float16", (64, 64), shifted, None, 4, [0, 13, 30]),
        ("bfloat16", (64, 32), strided, None, 4, [0, 13, 30]),
        ("float32", (8, 8), backwards, heads_first, 5, [0, 13, 30]),
        ("float64", (9, 9), heads_first, backwards, 4, [0, 13, 30]),
        ("float16", (64, 64), None, shifted, 2**30 - 1, [0, 13, 17]),
    ],
)
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_arrays_of_any_kind_get_the_rows_that_those_of_numpy_get(
    rng: np.random.Generator,
    dtype: str,
    dims: tuple[int, int],
    new: Any,
    cache: Any,
    stripe: int,
    lengths: list[int] | int,
    ranks: int,
    rank: int,
) -> None:
    group: Any = SimpleNamespace(size=ranks, rank=rank)
    caches, added = (
        [rng.standard_normal((3, n, 2, dim)).astype(DTYPES[dtype]) for dim in dims] for n in (37, 7)
    )
    results = []
    for xp in (np, cupy):
        own = [(cache or xp.copy)(xp.array(array)) for array in caches]
        given = [(new or xp.copy)(xp.array(array)) for array in added]
        told = lengths if isinstance(lengths, int) else xp.array(lengths, np.int32)
        generation._append((own[0], own[1]), (given[0], given[1]), told, group, stripe)
        results.append([array.tobytes() for array in own])
    assert results[0] == results[1]


# Lengths and indices that are not validated


WILD = (-(2**31), -1, 0, 20, 22, 23, 24, 2**31 - 1)


@pytest.mark.parametrize("page_size", [0, 1, 4])
@pytest.mark.parametrize("rotary", ROTARY)
def test_lengths_out_of_range_are_taken_to_the_nearest_that_is_in_it(
    rng: np.random.Generator, rotary: str, page_size: int
) -> None:
    case = Case(batch=len(WILD), caches=len(WILD), page_size=page_size, **ROTARY[rotary])
    targets = Targets.random(rng, case)
    run_and_check(rng, case, dataclasses.replace(targets, lengths=np.array(WILD, np.int32)))


def test_rows_past_the_capacity_are_dropped(rng: np.random.Generator) -> None:
    case = Case(seqlen_new=9, capacity=10)
    run_and_check(rng, case, Targets(np.array([0, 5, 10], np.int32)))


def test_sequences_without_a_row_of_the_cache_are_dropped(rng: np.random.Generator) -> None:
    case = Case(batch=6, rotary_dim=64)
    rows = np.array([4, -1, 5, 2**31 - 1, -(2**31), 0], np.int32)
    lengths = np.arange(6, dtype=np.int32)
    run_and_check(rng, case, Targets(lengths, cache_batch_idx=rows))


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_of_pages_that_are_none_are_dropped(rng: np.random.Generator, page_size: int) -> None:
    case = Case(page_size=page_size, rotary_dim=64, seqlen_new=11)
    table = shuffled_pages(rng, case)
    pages = case.batch * case.max_pages + 3
    wrong = rng.random(table.shape) < 0.4
    table[wrong] = rng.choice([NO_PAGE, pages, 2**31 - 1, -(2**31)], wrong.sum())
    run_and_check(rng, case, Targets(np.array([0, 2, 9], np.int32), block_table=table))


@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
def test_positions_beyond_the_table_take_its_last_row(
    rng: np.random.Generator, rotary: str
) -> None:
    case = Case(rotary_rows=9, **ROTARY[rotary])
    run_and_check(rng, case, Targets(np.array([0, 6, 17], np.int32)))


def test_a_cache_without_rows_takes_none(rng: np.random.Generator) -> None:
    run_and_check(rng, Case(capacity=0, rotary_dim=64), Targets(np.array([0, 3, -3], np.int32)))


# Streams and graphs


def test_a_captured_append_follows_the_lengths_as_they_grow(rng: np.random.Generator) -> None:
    case = Case(page_size=4, seqlen_q=1, seqlen_new=1, rotary_dim=64)
    table = shuffled_pages(rng, case)
    stream = cupy.cuda.Stream(non_blocking=True)
    arrays = Arrays(rng, case)
    cupy.cuda.Device().synchronize()
    with stream:
        run = Run(arrays, Targets(np.array([3, 0, 11], np.int32), block_table=table))
        # The call before the capture writes the rows of the first replay: the lengths are equal.
        graph, _ = capture_call(stream, run)
        for step in range(9):
            lengths = np.array([3 + step, step, 11 + step], np.int32)
            run.lengths.set(lengths, stream=stream)
            graph.launch(stream)
            stream.synchronize()
            check(arrays, Targets(lengths, block_table=table))
            for name in ("k_cache", "v_cache"):
                guarded = arrays.guarded[name]
                arrays.host[name] = guarded.values()
