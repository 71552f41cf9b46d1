"""Helpers of the GPU tests: cases, arrays surrounded by NaN, and comparison with the reference.

The reference is computed on the host with NumPy, so the GPU tests need no cuBLAS, and run only the
kernels under test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from cupy_flash import flash_attention
from cupy_flash.families import FORWARD
from cupy_flash.gpu.environment import device_for_id, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.arrays import MAX_ALIGNMENT, ArraySpec, contiguous_strides
from cupy_flash.problem.device import Device, device_for_arch
from cupy_flash.problem.problem import Problem, make_problem
from cupy_flash.problem.tile import Tile
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound, max_error
from support.gpu import cupy

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def current_device() -> Device:
    """Return the GPU, or a stand-in if there is none, so that tests can be collected anywhere."""
    return device_for_arch("sm_90") if gpu_unavailable() else device_for_id(0)


@dataclass(frozen=True)
class Placement:
    """Layout of an array in a flat buffer: aligned rows, with other elements around each."""

    start: int
    outer: tuple[int, int, int, int]
    inner: tuple[int, int, int, int]

    @classmethod
    def of(cls, shape: tuple[int, int, int, int], itemsize: int, alignment: int) -> Placement:
        unit = alignment // itemsize
        # The row stride is an odd number of units, so that rows are aligned to no more than
        # requested, and exceeds the row.
        width = (shape[3] // unit + 1 | 1) * unit
        return cls(unit, (shape[0], shape[1] + 1, shape[2] + 1, width), shape)

    @property
    def size(self) -> int:
        return 2 * self.start + math.prod(self.outer)

    def view(self, flat: Any) -> Any:
        """Return the array within a NumPy or CuPy buffer of `size` elements."""
        whole = flat[self.start : self.start + math.prod(self.outer)].reshape(self.outer)
        return whole[tuple(slice(length) for length in self.inner)]


class DenseSizes:
    """Base class of dense cases: their options and the shapes of their arrays."""

    @property
    def formula(self) -> dict[str, Any]:
        """Options that determine the result."""
        names = ("causal", "q_offset", "softmax_scale", "layout")
        return {name: getattr(self, name) for name in names}

    def shape(self, name: str) -> tuple[int, int, int, int]:
        of_queries = name in ("q", "out")
        rows = self.seqlen_q if of_queries else self.seqlen_k
        heads = self.heads_q if of_queries else self.heads_kv
        dim = self.head_dim if name in ("q", "k") else self.head_dim_v
        first, second = (rows, heads) if self.layout == "bshd" else (heads, rows)
        return (self.batch, first, second, dim)


@dataclass(frozen=True)
class Case(DenseSizes):
    """Call without array values.

    If family and tile are None, the planner chooses. A family without a tile uses its default
    tile, not a tuned one, so that the kernels under test depend on the sources only.
    """

    family: str | None
    dtype: str
    seqlen_q: int = 113
    seqlen_k: int = 150
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    q_offset: int | None = None
    softmax_scale: float | None = None
    layout: str = "bshd"
    alignment: int = MAX_ALIGNMENT
    tile: Tile | None = None

    def __str__(self) -> str:
        shown = [str(self.family), self.dtype, f"{self.seqlen_q}x{self.seqlen_k}"]
        named = ("family", "dtype", "seqlen_q", "seqlen_k")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in named and value != field.default:
                shown.append(f"{field.name}={value}")
        return " ".join(shown)

    @property
    def choice(self) -> dict[str, Any]:
        """Options that determine the kernel."""
        return {"family": self.family, "tile": self.tile_used()}

    def placement(self, name: str) -> Placement:
        return Placement.of(self.shape(name), DTYPES[self.dtype].itemsize, self.alignment)

    def problem(self) -> Problem:
        """Return the problem of the call that `run` makes, without arrays."""
        options = {name: value for name, value in self.formula.items() if name != "layout"}
        specs = {name: self._spec(self.placement(name)) for name in ("q", "k", "v", "out")}
        return make_problem(**specs, **options)

    def _spec(self, placement: Placement) -> ArraySpec:
        shape, strides = placement.inner, contiguous_strides(placement.outer)
        a, b, c = (0, 1, 2) if self.layout == "bshd" else (0, 2, 1)
        in_order = (shape[a], shape[b], shape[c], shape[3]), (strides[a], strides[b], strides[c])
        return ArraySpec(*in_order, dtype=self.dtype, alignment=self.alignment)

    def tile_used(self) -> Tile | None:
        if self.family is None or self.tile is not None:
            return self.tile
        return FORWARD[self.family].default_tile(self.problem(), current_device())

    def plan(self) -> Plan:
        return make_plan(self.problem(), current_device(), **self.choice)

    def is_supported(self) -> bool:
        if self.family is None:
            return True
        return FORWARD[self.family].why_not(self.problem(), current_device()) is None


def tile_with(case: Case, fields: dict[str, int]) -> Tile:
    """Return the first legal tile of the case's family that has these fields."""
    tiles = FORWARD[str(case.family)].tiles(case.problem(), current_device())
    return next(t for t in tiles if all(getattr(t, n) == value for n, value in fields.items()))


class Guarded:
    """Array on the GPU, surrounded by NaN: around it, after each row and after each sequence."""

    def __init__(self, values: np.ndarray, alignment: int) -> None:
        self._placement = Placement.of(values.shape, values.itemsize, alignment)
        self._before = np.full(self._placement.size, np.nan, values.dtype)
        self._placement.view(self._before)[...] = values
        self._buffer = cupy.asarray(self._before)
        self.view = self._placement.view(self._buffer)

    def values(self) -> np.ndarray:
        """Return the present values of the array; fail if anything around it was written."""
        after = self._buffer.get()
        values = self._placement.view(after).copy()
        self._placement.view(self._before)[...] = values
        assert after.tobytes() == self._before.tobytes(), "memory around the array was written"
        return values

    def assert_unchanged(self) -> None:
        assert self._buffer.get().tobytes() == self._before.tobytes(), "an input was written"


def bits(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, in which different NaNs differ, and 0 differs from -0."""
    return np.ascontiguousarray(array).view(np.uint8)


def with_zero_stride(array: Any, axis: int) -> Any:
    """Return a view of a NumPy or CuPy array that repeats the first element of an axis."""
    strides = tuple(0 if a == axis else stride for a, stride in enumerate(array.strides))
    if isinstance(array, np.ndarray):
        return np.lib.stride_tricks.as_strided(array, array.shape, strides)
    return cupy.ndarray(array.shape, array.dtype, array.data, strides)


def on_gpu(values: Iterable[np.ndarray]) -> list[Any]:
    """Return the arrays as contiguous CuPy arrays."""
    return [cupy.asarray(array) for array in values]


def random_values(case: Case) -> Arrays:
    """Return normal random q, k and v, which do not depend on the kernel that the case selects."""
    rng = np.random.default_rng(zlib.crc32(str(_without_kernel(case)).encode()))
    q, k, v = (rng.standard_normal(case.shape(n)).astype(DTYPES[case.dtype]) for n in "qkv")
    return q, k, v


def _without_kernel(case: Case) -> Case:
    return dataclasses.replace(case, family=None, tile=None, alignment=MAX_ALIGNMENT)


@dataclass(frozen=True)
class Truth:
    """Result in float64, and error bounds for a kernel."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: float
    lse_bound: float

    @classmethod
    def of(cls, values: Arrays, **formula: Any) -> Truth:
        with one_blas_thread():
            out, lse = attention_reference(*values, **formula, return_lse=True)
            naive = attention_naive(*values, **formula)
        q, k, _ = values
        of_lse = lse_bound(q, k, lse, formula.get("softmax_scale"))
        return cls(out, lse, error_bound(naive, out, q.dtype, lse=lse), of_lse)

    def check(self, out: np.ndarray, lse: np.ndarray | None = None, layout: str = "bshd") -> None:
        """Fail unless a result is NaN or inf where the reference is, and else within the bounds."""
        assert max_error(out, self.out) <= self.out_bound
        sees_nothing = self.lse == -np.inf
        by_head = out.swapaxes(1, 2) if layout == "bshd" else out
        assert not by_head[sees_nothing].any(), "a row without keys is not exactly 0"
        if lse is not None:
            assert lse.dtype == (np.float64 if out.dtype == np.float64 else np.float32)
            assert max_error(lse, self.lse) <= self.lse_bound


@functools.cache
def _thread_pools() -> ThreadpoolController:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[Any]:
    """Limit BLAS to one thread, because threads of small products mostly wait for each other."""
    return _thread_pools().limit(limits=1, user_api="blas")


def tanh_error(dtype: Any, cap: float) -> float:
    """Return the error bound of capped scores, and of their log-sum-exp, from tanh in bfloat16.

    Kernels use the hardware's tanh, which has an error of 2^-11. Rounding may add as much.
    """
    return 2.0**-10 * cap if np.dtype(dtype) == DTYPES["bfloat16"] else 0.0


def lse_bound(
    q: np.ndarray, k: np.ndarray, lse: np.ndarray, softmax_scale: Any, softcap: Any = None
) -> float:
    """Return the error bound of a log-sum-exp in float32, or in float64 for float64 inputs.

    lse = max + log(sum exp(score - max)). Four quantities have errors:

    - The scores: lse is off by at most the largest error of a score. The sum of n products, in any
      order, is off by about sqrt(n) * eps * |q||k| (Higham and Mary 2019). Products that drop
      2^-22 of each term, and the rounded scale, add up to 4 eps * |q||k|.
    - The sum has a relative error of a few eps, which becomes an absolute error of the logarithm.
      The hardware's exp2 costs 2 eps, log2 1 eps, a merge of splits both again, and additions 2.
    - The result is rounded by eps/2 of its size.
    - The tanh of a softcap has the error `tanh_error`.
    """
    eps = float(np.finfo(np.float64 if q.dtype == np.float64 else np.float32).eps)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else abs(softmax_scale)
    largest = np.abs(lse, where=np.isfinite(lse), out=np.zeros_like(lse)).max(initial=1)
    product = _largest_norm(q) * _largest_norm(k)
    rounded = eps * (8 * float(largest) + (4 + math.sqrt(q.shape[3])) * scale * product)
    return rounded + tanh_error(q.dtype, softcap or 0.0)


def _largest_norm(rows: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.square(rows.astype(np.float64)).sum(axis=-1))
    return float(norms[np.isfinite(norms)].max(initial=0))


def capture_call(
    stream: Any, call: Callable[..., Any], *arguments: Any, **options: Any
) -> tuple[Any, Any]:
    """Make a call on the current stream, and capture it again; return the graph and the result.

    The first call compiles kernels, and leaves memory in the pool for the capture.
    """
    call(*arguments, **options)
    stream.synchronize()
    stream.begin_capture()
    result = call(*arguments, **options)
    return stream.end_capture(), result


def check_captured_call(case: Case, meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Fail unless a call in a graph computes what its arrays hold at each replay.

    `meanwhile` is called between the capture and the first replay, on the same stream.
    """
    first = random_values(case)
    second = tuple(array[::-1].copy() for array in first)
    inputs = on_gpu(first)
    out = cupy.ndarray(case.shape("out"), DTYPES[case.dtype])
    options = {"out": out, "return_lse": True, **case.formula, **case.choice}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        graph, (_, lse) = capture_call(stream, flash_attention, *inputs, **options)
        meanwhile()
        for values in (second, first):
            for target, array in zip(inputs, values, strict=True):
                target.set(array, stream=stream)
            out.data.memset_async(0xFF, out.nbytes, stream)
            lse.data.memset_async(0xFF, lse.nbytes, stream)
            graph.launch(stream)
            result, result_lse = out.get(stream=stream), lse.get(stream=stream)
            stream.synchronize()
            Truth.of(values, **case.formula).check(result, result_lse)


@functools.lru_cache(maxsize=4)
def _truth_of_random_values(case: Case) -> Truth:
    return Truth.of(random_values(case), **case.formula)


def run(case: Case, values: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a call on guarded arrays, over NaN; fail if it writes elsewhere."""
    inputs = [Guarded(array, case.alignment) for array in values]
    out = Guarded(np.full(case.shape("out"), np.nan, values[0].dtype), case.alignment)
    fill_freed_memory_with_nan(case)
    arguments = [array.view for array in inputs]
    result, lse = flash_attention(
        *arguments, out=out.view, return_lse=True, **case.formula, **case.choice
    )
    assert result is out.view
    lse_values = lse.get()
    for array in inputs:
        array.assert_unchanged()
    return out.values(), lse_values


def check_same_bits(case: Case, calls: int) -> None:
    """Fail unless all of these calls give the same bits."""
    inputs = on_gpu(random_values(case))
    out = cupy.ndarray(case.shape("out"), DTYPES[case.dtype])
    results = set()
    for _ in range(calls):
        out.data.memset_async(0xFF, out.nbytes)
        _, lse = flash_attention(*inputs, out=out, return_lse=True, **case.formula, **case.choice)
        results.add((out.get().tobytes(), lse.get().tobytes()))
    assert len(results) == 1


def require_free_memory(needed: int) -> None:
    """Skip the test unless the GPU has `needed` bytes of free memory."""
    cupy.get_default_memory_pool().free_all_blocks()
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.1f} are")


def fill_freed_memory_with_nan(case: Case) -> None:
    """Put NaN into the memory that CuPy's pool will use next for lse and the workspace."""
    problem = case.problem()
    lse_bytes = problem.rows * (8 if case.dtype == "float64" else 4)
    sizes = [size for size in (lse_bytes, case.plan().workspace) if size]
    # Both blocks are held at once, so that they are distinct. They are freed on return.
    blocks = [cupy.cuda.alloc(size) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        # All bits set is a NaN in every format.
        block.memset_async(0xFF, size)


def check(case: Case, values: Arrays | None = None) -> None:
    """Fail unless a case is computed right, on random values if none are given."""
    if values is None:
        truth = _truth_of_random_values(_without_kernel(case))
        values = random_values(case)
    else:
        truth = Truth.of(values, **case.formula)
    out, lse = run(case, values)
    truth.check(out, lse, case.layout)


def of_cases(cases: Iterable[Case]) -> Any:
    return pytest.mark.parametrize("case", list(cases), ids=str)


def of_supported_cases(cases: Iterable[Case]) -> Any:
    return of_cases(case for case in cases if case.is_supported())


def checks_of(cases: Iterable[Case]) -> Callable[[Case], None]:
    """Return a test that each case is computed right; a module assigns it to the test's name."""

    @of_cases(cases)
    def test(case: Case) -> None:
        check(case)

    return test


def checks_of_supported(cases: Iterable[Case]) -> Callable[[Case], None]:
    return checks_of(case for case in cases if case.is_supported())


@contextlib.contextmanager
def naming(what: Any) -> Iterator[None]:
    """Add `what` to the message of an assertion that fails within the context."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def check_all(cases: Iterable[Case]) -> None:
    """Fail with the names of the cases that are not computed right."""
    failures = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failures.append(f"{case}: {str(error).splitlines()[0]}")
    assert not failures, "\n".join(failures)


def run_in_threads(work: Callable[[int], None], count: int) -> None:
    """Call `work` with each number below `count`, each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Cycles that a stream is kept busy: at most half a second, and at least the time of 100 calls.
BUSY = 500_000_000


def keep_busy(cycles: int = BUSY) -> None:
    """Enqueue a kernel that runs for `cycles` clock cycles on the current stream."""
    code = """
    extern "C" __global__ void spin(long long cycles) {
      const long long begin = clock64();
      while (clock64() - begin < cycles) {}
    }
    """
    cupy.RawKernel(code, "spin")((1,), (1,), (np.int64(cycles),))
