"""Calls on packed, cached and paged sequences wherever they can be computed: by the CPU backend,
and on a GPU by every kernel family that serves sequences.

Every array lies amid NaN (numbers that are no row or page of anything, where it holds integers),
so that what is read or written outside of it shows.
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
from cupy_flash.calls import problems
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.attention import append_spec
from cupy_flash.calls.options import Options
from cupy_flash.cli.build.build import Job
from cupy_flash.families import FORWARD
from cupy_flash.gpu.append import append_unit
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.device import device_for_arch
from support.gpu_support import DTYPES, Placement, bits, current_device
from support.prebuilt import selected_calls, write_cubins
from support.sequence_support import (
    KVCacheCase,
    KVCacheProblem,
    VarlenCase,
    VarlenProblem,
    random_kvcache_case,
    random_varlen_case,
    to_numpy,
)

SEQUENCE_FAMILIES = [name for name, family in FORWARD.items() if family.serves_sequences]
SIXTEEN_BIT = ("float16", "bfloat16")
# Query and key/value heads of which 1, 4 and 8 share one.
GROUPS = ((3, 3), (8, 2), (8, 1))
HEAD_DIMS = (
    *((40, 40), (128, 128), (192, 192), (256, 256)),
    *((192, 128), (64, 128), (96, 40), (33, 7), (576, 512)),
)
PAGE_SIZES = (1, 3, 16, 64, 256)
# dtype, page size, head_dim and head_dim_v.
PAGES_OF_DIMS = (
    ("bfloat16", 16, 128, 128),
    ("float16", 64, 256, 256),
    ("float16", 3, 192, 128),
    ("bfloat16", 1, 40, 33),
    ("float32", 3, 40, 33),
)
# Bytes of the memory pool that are NaN before a call; no test needs as large a workspace.
POISONED = 1 << 28
# Far from every row and page, and as bits of a float a number, not NaN.
NOT_AN_INDEX = 2**30 + 12345


@dataclass(frozen=True)
class Place:
    """Where a call is computed: "cpu", a kernel family, or "chosen", the planner's."""

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
        """Skip the test, with the planner's reason, if no kernel serves what is called within."""
        try:
            yield
        except UnsupportedError as error:
            if not str(error).startswith(
                (f"family {self.name!r} cannot serve", "no kernel family")
            ):
                raise
            pytest.skip(str(error))


CPU = Place("cpu")
ON_GPU = [Place(name) for name in (*SEQUENCE_FAMILIES, "chosen")]


def _parameters(places: Iterable[Place]) -> list[Any]:
    return [
        pytest.param(place, id=place.name, marks=[pytest.mark.gpu] if place.is_gpu else [])
        for place in places
    ]


everywhere = pytest.mark.parametrize("place", _parameters([CPU, *ON_GPU]))
on_every_family = pytest.mark.parametrize("place", _parameters(ON_GPU[:-1]))
on_gpu = pytest.mark.parametrize("place", _parameters(ON_GPU))


def of_cases(cases: Iterable[VarlenCase | KVCacheCase]) -> Any:
    return pytest.mark.parametrize("case", list(cases), ids=case_name)


def of_aligned_cases(cases: Iterable[VarlenCase | KVCacheCase]) -> Any:
    """Every case with rows that are aligned to 8, 4 and 2 bytes, as its dtype allows."""
    pairs = [
        pytest.param(case, alignment, id=f"{case_name(case)} alignment={alignment}")
        for case in cases
        for alignment in (8, 4, 2)
        if alignment >= DTYPES[case.dtype].itemsize
    ]
    return pytest.mark.parametrize(("case", "alignment"), pairs)


def case_name(case: VarlenCase | KVCacheCase) -> str:
    """The case in a few words: how many sequences, not all of their lengths."""
    lengths = case.seqlens_k if isinstance(case, VarlenCase) else case.lengths
    rest = [text for text in str(case).split() if not text.startswith(("seqlens_", "lengths="))]
    return " ".join([f"batch={len(lengths)}", f"longest={max(lengths, default=0)}", *rest])


def _rng_of(fixed: dict[str, Any]) -> np.random.Generator:
    # The same in every process, as the names of tests have to be.
    return np.random.default_rng(zlib.crc32(repr(sorted(fixed.items())).encode()))


def varlen(**fixed: Any) -> VarlenCase:
    """A case of random lengths, ever the same ones for the same arguments."""
    return random_varlen_case(_rng_of(fixed), **fixed)


def kvcache(**fixed: Any) -> KVCacheCase:
    """A case of random lengths, ever the same ones for the same arguments."""
    return random_kvcache_case(_rng_of(fixed), **fixed)


@functools.lru_cache(maxsize=4)
def problem_of(case: Any) -> Any:
    """The case's arrays and what is true of them, kept for the next place."""
    return case.problem()


class Amid:
    """An array in a larger buffer, amid what must be neither read nor written.

    Around it, after each row and after each head there is NaN, or `NOT_AN_INDEX`.
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
        """What the array holds now; fails if anything around it was written."""
        after = to_numpy(self.buffer)
        values = self._view_of(after).copy()
        self._view_of(self._before)[...] = values
        assert after.tobytes() == self._before.tobytes(), "memory around the array was written"
        return values

    def assert_unchanged(self, name: str) -> None:
        assert to_numpy(self.buffer).tobytes() == self._before.tobytes(), f"{name} was written"


@dataclass
class Arrays:
    """The arguments of a call, its arrays amid poison."""

    amid: dict[str, Amid]
    others: dict[str, Any]

    @classmethod
    def of(cls, xp: Any, arguments: dict[str, Any], alignment: int = MAX_ALIGNMENT) -> Arrays:
        arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray)}
        return cls(
            # What is no index has the alignment that is asked for.
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


def poison_free_memory(place: Place) -> None:
    """Have the memory for lse and the workspace hold NaN."""
    if not place.is_gpu:
        return
    cupy = place.xp
    cupy.get_default_memory_pool().free_all_blocks()
    # All bits set is a NaN in every format. Freed on return: what is allocated next is cut from it.
    cupy.cuda.alloc(POISONED).memset_async(0xFF, POISONED)


def run_varlen(
    place: Place,
    arguments: dict[str, Any],
    alignment: int = MAX_ALIGNMENT,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a call with these values, written over NaN; fails if it writes elsewhere."""
    arrays = Arrays.of(place.xp, arguments, alignment)
    out = _poisoned_out(place, arguments["q"], arguments["v"], alignment)
    lse = _run(place, flash_attention_varlen, arrays, out, options)
    arrays.assert_unchanged()
    return out.values(), lse


def run_kvcache(
    place: Place,
    arguments: dict[str, Any],
    alignment: int = MAX_ALIGNMENT,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(out, lse, k_cache, v_cache) after a call, likewise."""
    arrays = Arrays.of(place.xp, arguments, alignment)
    out = _poisoned_out(place, arguments["q"], arguments["v_cache"], alignment)
    lse = _run(place, flash_attention_with_kvcache, arrays, out, options)
    arrays.assert_unchanged(but=("k_cache", "v_cache"))
    caches = (arrays.amid[name].values() for name in ("k_cache", "v_cache"))
    return (out.values(), lse, *caches)


def _poisoned_out(place: Place, q: np.ndarray, v: np.ndarray, alignment: int) -> Amid:
    """Room for the output, full of NaN."""
    shape = (*q.shape[:-1], v.shape[-1])
    return Amid(place.xp, np.full(shape, np.nan, q.dtype), alignment)


def _run(
    place: Place,
    function: Callable[..., Any],
    arrays: Arrays,
    out: Amid,
    options: dict[str, Any],
) -> np.ndarray:
    """The lse of a call that writes to `out`."""
    poison_free_memory(place)
    with place.skipping_what_it_refuses():
        result, lse = function(
            **arrays.arguments, out=out.view, return_lse=True, **place.options, **options
        )
    assert result is out.view
    return to_numpy(lse)


def check_varlen(
    place: Place, case: VarlenCase, alignment: int = MAX_ALIGNMENT, **options: Any
) -> None:
    """Fail unless a case is computed right."""
    problem: VarlenProblem = problem_of(case)
    out, lse = run_varlen(place, problem.arguments(), alignment, **options)
    problem.check(out, lse)


def check_kvcache(
    place: Place, case: KVCacheCase, alignment: int = MAX_ALIGNMENT, **options: Any
) -> None:
    """Fail unless a case is computed right, and the cache changes by the appended rows only.

    Options take the place of the case's own arguments, such as cache_seqlens.
    """
    problem: KVCacheProblem = problem_of(case)
    arguments = problem.arguments()
    given = {name: options.pop(name) for name in tuple(options) if name in arguments}
    out, lse, k_cache, v_cache = run_kvcache(place, arguments | given, alignment, **options)
    problem.check(out, lse)
    problem.check_caches(k_cache, v_cache)


def assert_same_bits(results: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(bits(result), bits(wanted))


# ---- Kernels of all selected tests, compiled at once


@pytest.fixture(scope="module")
def cubins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of the selected cases, compiled on all CPUs instead of one by one at each call."""
    folder: Path = tmp_path_factory.mktemp("cubins")
    calls = selected_calls(request)
    on_a_gpu = [call for call in calls if "case" in call and call["place"].is_gpu]
    if not gpu_unavailable():
        write_cubins(folder, itertools.chain.from_iterable(map(_jobs_of, on_a_gpu)))
    return folder


def _jobs_of(call: dict[str, Any]) -> Iterator[Job]:
    """Of a test's parameters; what they leave out costs a compilation later on, no more."""
    options = {name: call[name] for name in ("alignment", "num_splits") if name in call}
    family = None if call["place"].name == "chosen" else call["place"].name
    return jobs_of(call["case"], family, **options)


def jobs_of(
    case: VarlenCase | KVCacheCase,
    family: str | None,
    alignment: int = MAX_ALIGNMENT,
    num_splits: int = 0,
) -> Iterator[Job]:
    """What has to be compiled to check a case on this GPU; nothing where it is refused."""
    problem = problem_of(case)
    values = problem.arguments() | {"out": problem.poisoned_out()}
    arguments = Arrays.of(np, values, alignment).arguments
    device = current_device()
    asked = Options(
        "packed" if isinstance(case, VarlenCase) else "cached",
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
    """How `decode` computes a call of `flash_attention_with_kvcache` on an H100.

    `arguments` are NumPy arrays and options.
    """
    caches = Arguments(**{name: arguments.get(name) for name in Arguments._fields})
    posed = problems.problem_of(caches, Options("cached", causal=arguments["causal"]))
    return make_plan(posed, device_for_arch("sm_90"), family="decode")


def cluster_of(plan: Plan) -> int:
    """Thread blocks of a cluster that `decode` launches; 0 without any."""
    assert plan.main is not None
    return plan.main.cluster
