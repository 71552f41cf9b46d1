"""Varlen and KV-cache calls, on the CPU backend and in every kernel family that supports sequences.

Every array is surrounded by NaN (integer arrays by numbers that are no valid row or page), so that
an access out of bounds is detected.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash import UnsupportedError, flash_attention_varlen, flash_attention_with_kvcache
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check import problems
from cupy_flash.calls.gpu.forward import append_spec
from cupy_flash.calls.options import Options
from cupy_flash.cli.build.build import Job
from cupy_flash.families import FORWARD
from cupy_flash.gpu.append import append_unit
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.device import device_for_arch
from support.calls.sequence_support import (
    KVCacheCase,
    KVCacheProblem,
    VarlenCase,
    VarlenProblem,
    random_kvcache_case,
    random_varlen_case,
    to_numpy,
)
from support.gpu.gpu_support import DTYPES, Placement, bits, current_device
from support.prebuilt import selected_calls, write_cubins

SEQUENCE_FAMILIES = [name for name, family in FORWARD.items() if family.serves_sequences]
SIXTEEN_BIT = ("float16", "bfloat16")
# (query heads, KV heads), with 1, 4 and 8 query heads per KV head.
GROUPS = ((3, 3), (8, 2), (8, 1))
HEAD_DIMS = (
    *((40, 40), (128, 128), (192, 192), (256, 256)),
    *((192, 128), (64, 128), (96, 40), (33, 7), (576, 512)),
)
PAGE_SIZES = (1, 3, 16, 64, 256)
# (dtype, page size, head_dim, head_dim_v).
PAGES_OF_DIMS = (
    ("bfloat16", 16, 128, 128),
    ("float16", 64, 256, 256),
    ("float16", 3, 192, 128),
    ("bfloat16", 1, 40, 33),
    ("float32", 3, 40, 33),
)
# Bytes of pool memory that hold NaN before a call. No test needs a workspace of this size.
POISONED = 1 << 28
# An integer far from every row and page. Its bits, read as a float, are a number and not NaN.
NOT_AN_INDEX = 2**30 + 12345


@dataclass(frozen=True)
class Target:
    """Backend of a call: "cpu", a kernel family, or "chosen" for the planner's choice."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def xp(self) -> Any:
        return importlib.import_module("cupy") if self.is_gpu else np

    @property
    def options(self) -> dict[str, Any]:
        if self.name == "chosen":
            return {}
        return {"family": self.name} if self.is_gpu else {"backend": "cpu"}

    @contextlib.contextmanager
    def skipping_what_it_refuses(self) -> Iterator[None]:
        """Skip the test, with the planner's reason, if no kernel supports the call within."""
        try:
            yield
        except UnsupportedError as error:
            if not str(error).startswith(
                (f"family {self.name!r} cannot serve", "no kernel family")
            ):
                raise
            pytest.skip(str(error))

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a call on this backend; skip the test if no kernel supports it."""
        with self.skipping_what_it_refuses():
            return function(*arguments, **options, **self.options)


CPU = Target("cpu")
ON_GPU = [Target(name) for name in (*SEQUENCE_FAMILIES, "chosen")]


def _parameters(targets: Iterable[Target]) -> list[Any]:
    return [
        pytest.param(target, id=target.name, marks=[pytest.mark.gpu] if target.is_gpu else [])
        for target in targets
    ]


everywhere = pytest.mark.parametrize("target", _parameters([CPU, *ON_GPU]))
on_every_family = pytest.mark.parametrize("target", _parameters(ON_GPU[:-1]))
on_gpu = pytest.mark.parametrize("target", _parameters(ON_GPU))


def of_cases(cases: Iterable[VarlenCase | KVCacheCase]) -> Any:
    return pytest.mark.parametrize("case", list(cases), ids=case_name)


def of_aligned_cases(cases: Iterable[VarlenCase | KVCacheCase]) -> Any:
    """Parametrize with every case and row alignments of 8, 4 and 2 bytes, as its dtype allows."""
    pairs = [
        pytest.param(case, alignment, id=f"{case_name(case)} alignment={alignment}")
        for case in cases
        for alignment in (8, 4, 2)
        if alignment >= DTYPES[case.dtype].itemsize
    ]
    return pytest.mark.parametrize(("case", "alignment"), pairs)


def case_name(case: VarlenCase | KVCacheCase) -> str:
    """Return a short name of the case, with the number of sequences instead of all lengths."""
    lengths = case.seqlens_k if isinstance(case, VarlenCase) else case.lengths
    rest = [text for text in str(case).split() if not text.startswith(("seqlens_", "lengths="))]
    return " ".join([f"batch={len(lengths)}", f"longest={max(lengths, default=0)}", *rest])


def _rng_of(fixed: dict[str, Any]) -> np.random.Generator:
    # The seed is the same in every process, because the names of tests depend on it.
    return np.random.default_rng(zlib.crc32(repr(sorted(fixed.items())).encode()))


def varlen(**fixed: Any) -> VarlenCase:
    """Return a case with random lengths; the arguments determine the seed."""
    return random_varlen_case(_rng_of(fixed), **fixed)


def kvcache(**fixed: Any) -> KVCacheCase:
    """Return a case with random lengths; the arguments determine the seed."""
    return random_kvcache_case(_rng_of(fixed), **fixed)


@functools.lru_cache(maxsize=4)
def problem_of(case: Any) -> Any:
    """Return the arrays and true results of a case, cached for its tests on other backends."""
    return case.problem()


class Amid:
    """Array in a larger buffer, surrounded by elements that must be neither read nor written.

    They are NaN, or `NOT_AN_INDEX`, and are around the array, after each row and after each head.
    """

    def __init__(self, xp: Any, values: np.ndarray, alignment: int = MAX_ALIGNMENT) -> None:
        leading = (1,) * (4 - values.ndim)
        is_index = np.issubdtype(values.dtype, np.integer)
        alignment = values.itemsize if is_index else max(alignment, values.itemsize)
        self._placement = Placement.of((*leading, *values.shape), values.itemsize, alignment)
        self._index = (0,) * len(leading)
        poison = NOT_AN_INDEX if is_index else np.nan
        self._before = np.full(self._placement.size, poison, values.dtype)
        self._view_of(self._before)[...] = values
        self.buffer = xp.array(self._before)
        self.view = self._view_of(self.buffer)

    def _view_of(self, flat: Any) -> Any:
        return self._placement.view(flat)[self._index]

    def values(self) -> np.ndarray:
        """Return the present values of the array; fail if anything around it was written."""
        after = to_numpy(self.buffer)
        values = self._view_of(after).copy()
        self._view_of(self._before)[...] = values
        assert after.tobytes() == self._before.tobytes(), "memory around the array was written"
        return values

    def assert_unchanged(self, name: str) -> None:
        assert to_numpy(self.buffer).tobytes() == self._before.tobytes(), f"{name} was written"


@dataclass
class Arrays:
    """Arguments of a call, with arrays surrounded by NaN or `NOT_AN_INDEX`."""

    amid: dict[str, Amid]
    others: dict[str, Any]

    @classmethod
    def of(cls, xp: Any, arguments: dict[str, Any], alignment: int = MAX_ALIGNMENT) -> Arrays:
        arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray)}
        return cls(
            # Integer arrays ignore the requested alignment.
            {name: Amid(xp, array, alignment) for name, array in arrays.items()},
            {name: value for name, value in arguments.items() if name not in arrays},
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return self.others | {name: array.view for name, array in self.amid.items()}

    def assert_unchanged(self, *, but: tuple[str, ...] = ()) -> None:
        for name, array in self.amid.items():
            if name not in but:
                array.assert_unchanged(name)


def poison_free_memory(target: Target) -> None:
    """Fill the free memory that lse and the workspace will use with NaN."""
    if not target.is_gpu:
        return
    cupy = target.xp
    cupy.get_default_memory_pool().free_all_blocks()
    # All bits set is a NaN in every format. The pool cuts the next allocations from this block.
    cupy.cuda.alloc(POISONED).memset_async(0xFF, POISONED)


def run_varlen(
    target: Target, arguments: dict[str, Any], alignment: int = MAX_ALIGNMENT, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a call that writes over NaN; fail if it writes elsewhere."""
    arrays = Arrays.of(target.xp, arguments, alignment)
    out = _poisoned_out(target, arguments["q"], arguments["v"], alignment)
    lse = _run(target, flash_attention_varlen, arrays, out, options)
    arrays.assert_unchanged()
    return out.values(), lse


def run_kvcache(
    target: Target, arguments: dict[str, Any], alignment: int = MAX_ALIGNMENT, **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (out, lse, k_cache, v_cache) after a call; fail if it writes elsewhere."""
    arrays = Arrays.of(target.xp, arguments, alignment)
    out = _poisoned_out(target, arguments["q"], arguments["v_cache"], alignment)
    lse = _run(target, flash_attention_with_kvcache, arrays, out, options)
    arrays.assert_unchanged(but=("k_cache", "v_cache"))
    caches = (arrays.amid[name].values() for name in ("k_cache", "v_cache"))
    return (out.values(), lse, *caches)


def _poisoned_out(target: Target, q: np.ndarray, v: np.ndarray, alignment: int) -> Amid:
    """Return a buffer for the output, full of NaN."""
    shape = (*q.shape[:-1], v.shape[-1])
    return Amid(target.xp, np.full(shape, np.nan, q.dtype), alignment)


def _run(
    target: Target, function: Callable[..., Any], arrays: Arrays, out: Amid, options: dict[str, Any]
) -> np.ndarray:
    """Run a call that writes to `out`; return its lse."""
    poison_free_memory(target)
    given = arrays.arguments | {"out": out.view, "return_lse": True}
    result, lse = target.call(function, **given, **options)
    assert result is out.view
    return to_numpy(lse)


def check_varlen(
    target: Target, case: VarlenCase, alignment: int = MAX_ALIGNMENT, **options: Any
) -> None:
    """Fail unless a case is computed right."""
    problem: VarlenProblem = problem_of(case)
    out, lse = run_varlen(target, problem.arguments(), alignment, **options)
    problem.check(out, lse)


def check_kvcache(
    target: Target, case: KVCacheCase, alignment: int = MAX_ALIGNMENT, **options: Any
) -> None:
    """Fail unless a case is computed right, and the cache changes by the appended rows only.

    Options replace arguments of the case with the same name, such as cache_seqlens.
    """
    problem: KVCacheProblem = problem_of(case)
    arguments = problem.arguments()
    given = {name: options.pop(name) for name in tuple(options) if name in arguments}
    out, lse, k_cache, v_cache = run_kvcache(target, arguments | given, alignment, **options)
    problem.check(out, lse)
    problem.check_caches(k_cache, v_cache)


def check_sequences(
    target: Target, case: VarlenCase | KVCacheCase, alignment: int = MAX_ALIGNMENT, **options: Any
) -> None:
    """Fail unless a case of either kind is computed right."""
    check = check_varlen if isinstance(case, VarlenCase) else check_kvcache
    check(target, case, alignment, **options)


def checks_everywhere(cases: Iterable[VarlenCase | KVCacheCase]) -> Callable[..., None]:
    """Return a test that each case is computed right on the CPU and in every kernel family.

    A module assigns it to the test's name.
    """

    @everywhere
    @of_cases(cases)
    def test(target: Target, case: VarlenCase | KVCacheCase) -> None:
        check_sequences(target, case)

    return test


def assert_same_bits(results: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(bits(result), bits(wanted))


# ---- Kernels of all selected tests, compiled at once


@pytest.fixture(scope="module")
def cubins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels of the selected cases on all CPUs, instead of one by one in each call."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    calls = selected_calls(request)
    on_a_gpu = [call for call in calls if "case" in call and call["target"].is_gpu]
    if not gpu_unavailable():
        write_cubins(folder, itertools.chain.from_iterable(map(_jobs_of, on_a_gpu)))
    return folder


def _jobs_of(call: dict[str, Any]) -> Iterator[Job]:
    """Yield the compilations for a test's parameters; the test compiles what is missing here."""
    options = {name: call[name] for name in ("alignment", "num_splits") if name in call}
    family = None if call["target"].name == "chosen" else call["target"].name
    return jobs_of(call["case"], family, **options)


def jobs_of(
    case: VarlenCase | KVCacheCase,
    family: str | None,
    alignment: int = MAX_ALIGNMENT,
    num_splits: int = 0,
) -> Iterator[Job]:
    """Yield the compilations for a check of a case on this GPU; none if the case is refused."""
    problem = problem_of(case)
    values = problem.arguments() | {"out": problem.poisoned_out()}
    arguments = Arrays.of(np, values, alignment).arguments
    device = current_device()
    asked = Options(
        "varlen" if isinstance(case, VarlenCase) else "kvcache",
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        num_splits=num_splits,
    )
    given = {name: arguments[name] for name in Arguments._fields if name in arguments}
    most = {name: arguments[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in arguments}
    if isinstance(case, KVCacheCase):
        asked = asked._replace(rotary_interleaved=case.rotary_interleaved)
    posed = problems.problem_of(Arguments(**given), asked._replace(**most))
    appends = []
    if isinstance(case, KVCacheCase) and case.seqlen_new:
        unit = append_unit(append_spec(Arguments(**given), posed, asked))
        appends.append(Job(unit, device, tuple((entry, 0) for entry in unit.entries)))
    with contextlib.suppress(UnsupportedError):
        plan = make_plan(posed, device, family=family)
        yield from (Job.of(plan), *appends)


def decode_on_h100(arguments: dict[str, Any]) -> Plan:
    """Return the plan of the `decode` family for a `flash_attention_with_kvcache` call on an H100.

    `arguments` are NumPy arrays and options.
    """
    caches = Arguments(**{name: arguments.get(name) for name in Arguments._fields})
    posed = problems.problem_of(caches, Options("kvcache", causal=arguments["causal"]))
    return make_plan(posed, device_for_arch("sm_90"), family="decode")


def cluster_of(plan: Plan) -> int:
    """Return the thread blocks per cluster in a launch of `decode`; 0 without clusters."""
    assert plan.main is not None
    return plan.main.cluster
