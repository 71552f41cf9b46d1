"""Sets of kernels that `cupy-flash compile` builds; only this module lists them.

A kernel depends on dtype, head dims, causality, the sign of softmax_scale, the alignment of rows,
whether the keys are split over thread blocks, and its tile; not on batch, heads or lengths. Head
dims are compile-time constants from 1 to 576, so even the largest set has representatives only:

- `default_plans`: the dispatcher's choice for common models, for long sequences and short ones,
  which may have other tiles; gradients of long ones; packed ones; and decoding of few and of many
  sequences, with contiguous caches and with caches in pages of 16 rows.
- `all_plans`: for every family that serves it, every dtype x the head dims of published models x
  full and causal x long, short and split, with rows aligned to 16 bytes. Also three pairs of
  different head dims, one odd, with rows aligned to single elements; a negative softmax_scale;
  gradients; packed sequences; contiguous and paged caches; and each legal tile of tuned tables.
- `other_units`: kernels that append to a cache, and kernels that merge results.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from cupy_flash.families import FAMILIES, TranslationUnit
from cupy_flash.gpu.append import AppendSpec, append_unit
from cupy_flash.gpu.combine import combine_unit
from cupy_flash.gpu.key_lists import adding_unit, key_list_unit
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, make_plan, plan_tile
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.problem.arrays import DTYPES, FLOAT8, MAX_ALIGNMENT
from cupy_flash.problem.device import Device
from cupy_flash.problem.partials import CombineSpec
from cupy_flash.problem.problem import Problem

from ..cases.cases import Case

# Head dims of models, among them MiniLM (32), ViT and GPT-2 (64), LLaMA (128), DeepSeek (192) and
# Gemma (256, and 512 in global layers).
HEAD_DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# (head_dim, head_dim_v): DeepSeek's for prefill and for MLA decoding, and an odd pair, whose rows
# are read element by element.
_MIXED_HEAD_DIMS = ((192, 128), (576, 512), (65, 33))
_COMMON_HEAD_DIMS = (64, 128)
_PAGE_SIZE = 16
_COMMON_DTYPES = ("bfloat16", "float16", "float32")
# (batch, heads, seqlen): long and short sequences with enough query tiles to fill any GPU, and a
# sequence with too few.
_FULL = (4, 16, 4096)
_SHORT = (64, 16, 256)
_FEW = (1, 1, 4096)


def _problem(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    size: tuple[int, int, int],
    **more: Any,
) -> Problem:
    """Return a dense problem; `size` is (batch, heads, seqlen), and `more` has fields of `Case`."""
    batch, heads, seqlen = size
    lengths, dims = (seqlen, seqlen), (head_dim, head_dim_v)
    return Case(dtype, batch, *lengths, heads, heads, *dims, causal, **more).problem()


def default_plans(device: Device) -> list[Plan]:
    """Return the dispatcher's choices for common dtypes and head dims."""
    common = list(itertools.product(_COMMON_DTYPES, _COMMON_HEAD_DIMS))
    problems = [
        _problem(dtype, dim, dim, causal, size)
        for (dtype, dim), causal, size in itertools.product(common, (False, True), (_FULL, _SHORT))
    ]
    problems += [
        _problem(dtype, dim, dim, causal, _FULL, direction="backward")
        for (dtype, dim), causal in itertools.product(common, (False, True))
    ]
    for dtype, dim in common:
        packed = Case(dtype, 8, 2048, 2048, 16, 16, dim, dim, True, kind="varlen")
        problems.append(packed.problem())
        for batch, page_size in itertools.product((1, 64), (0, _PAGE_SIZE)):
            case = Case(dtype, batch, 1, 4096, 32, 8, dim, dim, False)
            cached = dataclasses.replace(case, kind="cache", page_size=page_size)
            problems.append(cached.problem())
    return _distinct(make_plan(problem, device) for problem in problems)


def all_plans(device: Device) -> list[Plan]:
    """Return everything that the planner may choose, at representative head dims."""
    dims = [(dim, dim) for dim in HEAD_DIMS] + list(_MIXED_HEAD_DIMS)
    problems = [
        _problem(dtype, *dim, causal, size)
        for dtype, dim, causal, size in itertools.product(
            DTYPES, dims, (False, True), (_FULL, _SHORT, _FEW)
        )
    ]
    problems += [
        _problem(dtype, *dim, causal, _FULL, direction="backward")
        for dtype, dim, causal in itertools.product(DTYPES, dims, (False, True))
    ]
    problems += [_problem(dtype, 64, 64, False, _FULL, softmax_scale=-1.0) for dtype in DTYPES]
    problems += _sequence_problems()
    served = [
        (problem, family)
        for problem in problems
        for family in FAMILIES[problem.direction].values()
        if family.why_not(problem, device) is None
    ]
    chosen = (make_plan(problem, device, family=family.name) for problem, family in served)
    # The default tiles serve GPUs that have no tuned table.
    defaults = (
        plan_tile(
            family, problem, device, family.default_tile(problem, device), reason="default tile"
        )
        for problem, family in served
    )
    return _distinct(itertools.chain(chosen, defaults, tuned_plans(device)))


def _sequence_problems() -> Iterator[Problem]:
    """Yield the problems of packed prefill, of decoding, and of a chunk of a prompt."""
    for dtype, dim, causal in itertools.product(DTYPES, _COMMON_HEAD_DIMS, (False, True)):
        heads = (16, 4, dim, dim)
        yield Case(dtype, 8, 2048, 2048, *heads, causal, kind="varlen").problem()
        for rows, page_size in itertools.product((1, 512), (0, _PAGE_SIZE)):
            case = Case(dtype, 8, rows, 4096, *heads, causal, kind="cache", page_size=page_size)
            yield case.problem()


def tuned_plans(device: Device) -> Iterator[Plan]:
    """Yield a plan for each entry of the tuned tables whose tile is legal on the device."""
    for entry in tuning.entries():
        family = FAMILIES[entry.direction].get(entry.family)
        problem = problem_of_class(entry.problem_class)
        if family is None or problem is None or entry.digest != family.digest():
            continue
        names = {field.name for field in dataclasses.fields(family.tile_type)}
        if names != set(entry.tile) or family.why_not(problem, device):
            continue
        tile = family.tile_type(**entry.tile)
        if family.why_not_tile(problem, device, tile) is None:
            yield plan_tile(family, problem, device, tile, reason="tuned")


def other_units(*, everything: bool) -> list[TranslationUnit]:
    """Return kernels that append to a cache, that merge results, and that read lists of keys."""
    dtypes = DTYPES if everything else _COMMON_DTYPES
    units = [key_list_unit(), *map(adding_unit, ("float32", "float64"))]
    for dtype, dim, page_size in itertools.product(dtypes, _COMMON_HEAD_DIMS, (0, _PAGE_SIZE)):
        units.append(append_unit(_append_spec(dtype, dim, page_size)))
        tables = dict.fromkeys((dtype, "float64" if dtype == "float64" else "float32"))
        rotations = itertools.product(tables, (False, True)) if everything else [(dtype, False)]
        for rotation in rotations:
            units.append(append_unit(_append_spec(dtype, dim, page_size, rotation)))
    for dtype, dim in itertools.product(dtypes, HEAD_DIMS if everything else _COMMON_HEAD_DIMS):
        rows = (16 * dim, 16 * dim, dim)
        sinks = dict.fromkeys((dtype, "float64" if dtype == "float64" else "float32"))
        units += [
            combine_unit(CombineSpec(dtype, 2, 1, 1, 16, dim, 16 * dim, rows, rows, 16, 16, kind))
            for kind in (None, *(sinks if everything else ()))
        ]
    return list({unit.text: unit for unit in units}.values())


def _append_spec(
    dtype: str, dim: int, page_size: int, rotation: tuple[str, bool] | None = None
) -> AppendSpec:
    """Return the spec of one new row of 8 heads, rotated if (table dtype, interleaved) is given."""
    rows, cached = (8 * dim, 8 * dim, dim), (4096 * 8 * dim, 8 * dim, dim)
    pages = 4096 // page_size if page_size else 0
    rotary_dtype, rotary_interleaved = rotation or (dtype, False)
    return AppendSpec(
        dtype=dtype,
        batch=1,
        seqlen_q=1,
        seqlen_new=1,
        heads_q=8,
        heads_kv=8,
        head_dim=dim,
        head_dim_v=dim,
        seqlen_cache=4096,
        q_strides=rows,
        k_strides=rows,
        v_strides=rows,
        k_cache_strides=cached,
        v_cache_strides=cached,
        caches=0 if page_size else 1,
        page_size=page_size,
        pages=pages,
        max_pages=pages,
        block_table_stride=pages,
        rotary_dim=dim if rotation else 0,
        rotary_rows=4096 if rotation else 0,
        rotary_stride=dim // 2 if rotation else 0,
        rotary_dtype=rotary_dtype,
        rotary_interleaved=rotary_interleaved,
        queries_advance=True,
        alignment=MAX_ALIGNMENT,
    )


def case_of_class(text: str) -> Case | None:
    """Return a case of a tuned entry's class, whose rows may be aligned otherwise."""
    result = ProblemClass.parse(text)
    if result is None or result.dtype not in DTYPES:
        return None
    heads = max(1, result.rows // max(1, result.seqlen_q))
    return Case(
        result.dtype,
        1,
        result.seqlen_q,
        result.seqlen_k,
        heads,
        1 if result.values_in_keys else heads,
        result.head_dim,
        result.head_dim_v,
        result.causal,
        kind="varlen" if result.packed else "cache" if result.kind not in ("", FLOAT8) else "dense",
        page_size=result.page_size,
        direction=result.direction,
        cache_dtype=result.cache_dtype,
        values_in_keys=result.values_in_keys,
    )


def problem_of_class(text: str) -> Problem | None:
    """Return a problem of a tuned entry's class, or None if there is none."""
    result, case = ProblemClass.parse(text), case_of_class(text)
    if result is None or case is None:
        return None
    try:
        problem = case.problem()
    except ValueError:
        # A class of packed sequences may have fewer queries than keys; a case cannot.
        return None
    return problem.aligned(result.alignment)


def _distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Return one plan for each unit, because different problems may have the same kernel."""
    result: dict[str, Plan] = {}
    for plan in plans:
        assert plan.unit is not None
        result.setdefault(plan.unit.text, plan)
    return list(result.values())
