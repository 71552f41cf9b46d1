"""Model of memory traffic, compared with counts by hand and by brute force."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from cupy_flash.cli.cases.mod_arguments import score_of
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.cases.visible import VisibleKeys
from cupy_flash.cli.model.traffic import (
    Roof,
    Schedule,
    compulsory,
    fused,
    fused_without_cache,
    standard,
    tile_ranges,
    visible_keys,
)
from cupy_flash.families.contract import heads_in_l2
from cupy_flash.mods.shapes import Sizes
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import Problem, make_contiguous_problem


def problem(**changes: object) -> Problem:
    sizes = {"seqlen_q": 113, "seqlen_k": 203, "heads_q": 4, "heads_kv": 2}
    sizes |= {"dtype": "float16", "batch": 1, "head_dim": 24, "head_dim_v": 40}
    return make_contiguous_problem(**(sizes | changes))  # type: ignore[arg-type]


def random_problem(rng: np.random.Generator) -> Problem:
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 400, 2))
    heads_kv, group = (int(n) for n in rng.integers(1, 4, 2))
    causal = bool(rng.integers(2))
    sizes = {"batch": int(rng.integers(1, 3)), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    offset = int(rng.integers(-seqlen_q, seqlen_k + 1)) if causal else None
    heads = {"heads_q": heads_kv * group, "heads_kv": heads_kv}
    return problem(**sizes, **heads, causal=causal, q_offset=offset)


def sees(p: Problem) -> np.ndarray:
    """Return which pairs of a head are visible, shape (seqlen_q, seqlen_k)."""
    i, j = np.ogrid[: p.seqlen_q, : p.seqlen_k]
    return (j <= i + p.q_offset) if p.causal else np.ones((p.seqlen_q, p.seqlen_k), bool)


def test_the_ridge_point_is_where_memory_and_arithmetic_bound_alike() -> None:
    roof = Roof(peak_flops=312e12, bytes_per_second=2e12)

    assert roof.ridge == 156.0
    assert roof.attainable(156.0) == 312e12
    assert roof.attainable(78.0) == 156e12
    assert roof.attainable(1000.0) == 312e12
    assert [roof.bound(x) for x in (155.9, 156.0)] == ["memory", "compute"]


def test_the_compulsory_bytes_are_the_four_arrays_once() -> None:
    traffic = compulsory(problem())

    assert traffic.read == 2 * (113 * 4 * 24 + 203 * 2 * (24 + 40))
    assert traffic.written == 2 * 113 * 4 * 40


def test_keys_that_no_query_sees_are_not_compulsory() -> None:
    traffic = compulsory(problem(causal=True, q_offset=-50))

    assert traffic.read == 2 * (113 * 4 * 24 + 63 * 2 * (24 + 40))


def test_the_standard_algorithm_writes_and_reads_scores_and_probabilities() -> None:
    extra = standard(problem())
    once = compulsory(problem())
    matrix = 4 * 113 * 203 * 2

    assert extra.read == once.read + 2 * matrix
    assert extra.written == once.written + 2 * matrix


def test_a_causal_standard_algorithm_keeps_the_whole_score_matrix() -> None:
    assert standard(problem(causal=True)) == standard(problem())


def keys_read(visible: np.ndarray, Br: int, Bc: int) -> list[int]:
    """Return, for each query tile, the number of keys in the KV tiles that it has to read."""
    counts = []
    for first in range(0, visible.shape[0], Br):
        touched = visible[first : first + Br].any(axis=0)
        tiles = (touched[key : key + Bc] for key in range(0, visible.shape[1], Bc))
        counts.append(sum(len(tile) for tile in tiles if tile.any()))
    return counts


def test_tiles_read_what_brute_force_finds_seen(rng: np.random.Generator) -> None:
    for _ in range(200):
        p = random_problem(rng)
        Br, Bc = (int(n) for n in rng.integers(1, 130, 2))
        seen = sees(p)

        assert [end - begin for begin, end in tile_ranges(p, Br, Bc)] == keys_read(seen, Br, Bc)
        assert visible_keys(p).keys() == seen.any(axis=0).sum()


MODIFIED = ("window 40:0", "window 3:90", "mod documents", "mod prefix")


@pytest.mark.parametrize("text", MODIFIED)
def test_modified_tiles_read_what_brute_force_finds_seen(
    text: str, rng: np.random.Generator
) -> None:
    for _ in range(50):
        p, mods = modified(random_problem(rng), text)
        seen = VisibleKeys.of(p.mask, mods.mod, p.seqlen_k)
        keys = np.arange(p.seqlen_k)
        matrix = (keys >= seen.begins[:, None]) & (keys < seen.ends[:, None])
        Br, Bc = (int(n) for n in rng.integers(1, 130, 2))
        ranges = tile_ranges(p, Br, Bc, mods)

        assert [end - begin for begin, end in ranges] == keys_read(matrix, Br, Bc)
        assert visible_keys(p, mods).keys() == matrix.any(axis=0).sum()


def modified(p: Problem, text: str) -> tuple[Problem, CaseMods]:
    """Return the problem with the modifications that `text` names, and these modifications."""
    mods = CaseMods.parse(text)
    sizes = Sizes(p.dtype, p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    return dataclasses.replace(p, score=score_of(mods, sizes, causal=p.causal)), mods


@pytest.mark.parametrize(
    ("text", "matrices", "itemsize"),
    [("bias shared", 1, 2), ("bias heads", 4, 2), ("bias batch", 8, 2), ("mask heads", 4, 1)],
)
def test_an_array_over_pairs_is_read_once_unless_the_cache_is_too_small(
    text: str, matrices: int, itemsize: int
) -> None:
    p, mods = modified(problem(batch=2), text)
    matrix = 113 * 203 * itemsize
    large = Schedule(Br=16, Bc=32, blocks=4, section_heads=2, l2_bytes=2**30)
    small = dataclasses.replace(large, l2_bytes=0)

    def more(read: int, plain: int) -> float:
        return (read - plain) / matrix

    assert more(compulsory(p, mods).read, compulsory(p).read) == matrices
    assert more(standard(p, mods).read, standard(p).read) == matrices
    assert more(fused(p, large, mods).read, fused(p, large).read) == matrices
    # Each of the four sections of two heads reads the matrices of its heads.
    assert more(fused(p, small, mods).read, fused(p, small).read) == {1: 4}.get(matrices, 8)
    uncached = fused_without_cache(p, Br=16, Bc=32, mods=mods).read
    assert more(uncached, fused_without_cache(p, Br=16, Bc=32).read) == 8


def test_a_window_leaves_most_of_a_bias_unread() -> None:
    p, mods = modified(problem(seqlen_q=203, causal=True), "window 0:0, bias shared")

    assert compulsory(p, mods).read - compulsory(p, CaseMods()).read == 203 * 2


def test_without_a_cache_every_query_tile_reads_its_own_keys() -> None:
    traffic = fused_without_cache(problem(), Br=50, Bc=64)

    assert traffic.read == 2 * (113 * 4 * 24 + 3 * 203 * 4 * (24 + 40))
    assert traffic.written == 2 * 113 * 4 * 40
    assert traffic.key_value_reads == 3 * 4 / 2


def test_keys_and_values_that_stay_in_the_cache_are_read_once() -> None:
    p = problem()
    schedule = Schedule(Br=16, Bc=32, blocks=4, section_heads=4, l2_bytes=2 * 203 * 2 * 64 * 2)

    assert fused(p, schedule) == compulsory(p)


def test_keys_and_values_that_just_miss_the_cache_are_read_for_every_round() -> None:
    p = problem()
    schedule = Schedule(Br=16, Bc=32, blocks=8, section_heads=4, l2_bytes=2 * 203 * 2 * 64 * 2 - 2)

    # Eight blocks process two query tiles of each of four heads at a time; a head has eight.
    assert fused(p, schedule).key_value_reads == 4


def test_a_cache_that_holds_nothing_leaves_what_blocks_share_in_a_round(
    rng: np.random.Generator,
) -> None:
    for _ in range(100):
        p = random_problem(rng)
        Br, Bc, together = (int(n) for n in rng.integers(1, 100, 3))
        heads = p.batch * p.heads_kv
        whole_sections = [n for n in range(1, heads + 1) if heads % n == 0]
        section = p.heads_q // p.heads_kv * int(rng.choice(whole_sections))
        schedule = Schedule(Br, Bc, section * together, section, l2_bytes=0)

        assert fused(p, schedule).read == brute_force_read(p, schedule)


def brute_force_read(p: Problem, schedule: Schedule) -> int:
    """Return the bytes read if `schedule.blocks` thread blocks take a section's tiles in order."""
    keys = [end for _, end in tile_ranges(p, schedule.Br, schedule.Bc)]
    group = p.heads_q // p.heads_kv
    heads = range(p.batch * p.heads_q)
    rows = 0
    for first in heads[:: schedule.section_heads]:
        section = heads[first : first + schedule.section_heads]
        work = list(itertools.product(reversed(keys), section))
        for start in range(0, len(work), schedule.blocks):
            longest: dict[int, int] = {}
            for count, head in work[start : start + schedule.blocks]:
                longest[head // group] = max(longest.get(head // group, 0), count)
            rows += sum(longest.values())
    return 2 * (p.rows * p.head_dim + rows * (p.head_dim + p.head_dim_v))


def test_a_last_section_of_fewer_heads_runs_more_tiles_together() -> None:
    # A section of two KV heads runs four tiles of each at a time, the section of one head eight.
    p = problem(heads_q=3, heads_kv=3, seqlen_q=128)
    schedule = Schedule(Br=16, Bc=32, blocks=8, section_heads=2, l2_bytes=0)

    assert fused(p, schedule).key_value_reads == pytest.approx((2 * 2 + 1) / 3)


def test_no_model_of_the_fused_algorithm_is_below_the_compulsory_or_above_the_uncached(
    rng: np.random.Generator,
) -> None:
    for _ in range(100):
        p = random_problem(rng)
        Br, Bc, blocks = (int(n) for n in rng.integers(1, 200, 3))
        schedule = Schedule(Br, Bc, blocks, p.heads_q // p.heads_kv, int(rng.integers(1, 2**20)))
        read = fused(p, schedule).read

        # A whole KV tile may extend past the last visible key.
        assert compulsory(p).read <= read <= fused_without_cache(p, Br=Br, Bc=Bc).read


def test_partial_results_of_splits_are_written_and_read() -> None:
    whole = Schedule(Br=128, Bc=32, blocks=8, section_heads=4, l2_bytes=2**20)
    split = dataclasses.replace(whole, num_splits=2, workspace=1000)
    one, two = fused(problem(), whole), fused(problem(), split)

    assert (two.read - one.read, two.written - one.written) == (1000, 1000)


def test_splits_leave_fewer_query_tiles_to_run_together() -> None:
    whole = Schedule(Br=16, Bc=32, blocks=32, section_heads=4, l2_bytes=0)
    split = dataclasses.replace(whole, num_splits=4)

    # The eight query tiles of a head run all at once or, with 4 splits, two at a time.
    assert fused(problem(), whole).key_value_reads == 1
    assert fused(problem(), split).key_value_reads == 4


def test_nothing_to_compute_moves_nothing() -> None:
    empty = problem(batch=0)
    schedule = Schedule(Br=16, Bc=32, blocks=4, section_heads=2, l2_bytes=0)

    for traffic in (compulsory(empty), standard(empty), fused(empty, schedule)):
        assert (traffic.total, traffic.key_value_reads) == (0, 0.0)
        assert traffic.intensity(0.0) == 0.0


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_the_schedule_is_the_plans(arch: str) -> None:
    device = device_for_arch(arch)
    p = problem(seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128)
    plan = make_plan(p, device)
    schedule = Schedule.of(plan)

    assert (schedule.Br, schedule.Bc) == (plan.tile.Br, plan.tile.Bc)
    assert schedule.section_heads == plan.schedule.section_heads
    assert 1 <= schedule.blocks <= device.sm_count * plan.blocks_per_sm()
    assert schedule.l2_bytes == device.l2_cache


def test_the_model_trusts_the_cache_with_the_heads_that_the_planner_trusts_it_with() -> None:
    device = device_for_arch("sm_80")
    p = problem(heads_q=64, heads_kv=64, seqlen_q=8192, seqlen_k=8192, head_dim=64, head_dim_v=64)
    section = heads_in_l2(p, device)

    def reads(section_heads: int) -> float:
        blocks = 4 * section_heads
        return fused(p, Schedule(64, 64, blocks, section_heads, device.l2_cache)).key_value_reads

    assert 1 < section < 64
    assert reads(section) == 1
    assert reads(section + 1) > 1
