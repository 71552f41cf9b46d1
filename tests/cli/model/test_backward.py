"""Model of gradients: memory traffic, recomputed products, and the output of commands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import commands
from support.gpu import fake_cupy

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.cases.visible import VisibleKeys
from cupy_flash.cli.model import backward, profile, traffic
from cupy_flash.cli.model.profiler import Call, Kernel
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.mask import Mask

H100 = device_for_arch("sm_90")


def case(**more: Any) -> Case:
    sizes: dict[str, Any] = {"head_dim": 64, "head_dim_v": 128, "seqlen_k": 4096} | more
    return Case("bfloat16", 2, seqlen_q=4096, heads_q=16, heads_kv=4, direction="backward", **sizes)


def plan_of(of: Case, **asked: Any) -> Plan:
    return make_plan(of.problem(), H100, **asked)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(113, 203, False, 0),
        Mask(113, 203, True, 90),
        Mask(113, 203, True, -40),
        Mask(113, 203, True, 150),
        Mask(200, 113, True, -87, 30, 0),
        Mask(113, 203, False, 90, 20, 7),
        Mask(1, 239, True, 238),
        Mask(0, 113, True, 113),
    ],
)
@pytest.mark.parametrize("Bc", [16, 64])
def test_a_tile_of_keys_is_read_for_by_the_queries_that_see_any_of_it(mask: Mask, Bc: int) -> None:
    seen = VisibleKeys.of(mask)
    rows, keys = np.arange(mask.seqlen_q)[:, None], np.arange(mask.seqlen_k)
    sees = (keys >= mask.begins(rows)) & (keys < mask.ends(rows))
    begins, ends = seen.tiles_of_keys(Bc)

    for tile, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        found = np.flatnonzero(sees[:, tile * Bc : (tile + 1) * Bc].any(1))
        assert (begin, end) == ((found[0], found[-1] + 1) if found.size else (0, 0))


@pytest.mark.parametrize(
    ("asked", "products"), [({"family": "simt"}, [(2, 2), (2, 1)]), ({"family": "mma"}, [(3, 2)])]
)
def test_each_kernel_has_products_of_its_own(
    asked: dict[str, Any], products: list[tuple[int, int]]
) -> None:
    plan = plan_of(case(), **asked)
    kernels = backward.kernels_of(plan)
    of_dim, of_dim_v = (sum(each) for each in zip(*products, strict=True))
    computed = of_dim * 64 + of_dim_v * 128

    assert [kernel.products for kernel in kernels] == products
    assert [kernel.keys_stay for kernel in kernels] == [True, False][: len(products)]
    assert backward.recomputation(plan.problem, kernels) == computed / (3 * 64 + 2 * 128)


@pytest.mark.parametrize("entry", ["key_gradients", "attention"])
def test_a_kernel_that_does_everything_computes_what_counts(entry: str) -> None:
    plan = plan_of(case(), family="simt")
    terms, of_keys, of_queries = plan.launches
    rounding = dataclasses.replace(of_queries, shared_memory=0)
    launches = (terms, dataclasses.replace(of_keys, entry=entry), rounding)
    schedule = dataclasses.replace(plan.schedule, launches=launches)
    (kernel,) = backward.kernels_of(dataclasses.replace(plan, schedule=schedule))

    assert backward.recomputation(plan.problem, [kernel]) == 1


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"mods": CaseMods.parse("window 500:0")}])
def test_traffic_lies_between_what_is_compulsory_and_that_without_a_cache(
    more: dict[str, Any],
) -> None:
    of = case(**more)
    plan = plan_of(of)
    kernels = backward.kernels_of(plan)
    least = backward.compulsory(plan.problem, of.mods)
    fused = backward.fused(plan.problem, kernels, of.mods)
    most = backward.fused_without_cache(plan.problem, kernels, of.mods)

    assert least.read < fused.read < most.read
    assert least.written + plan.workspace == fused.written == most.written
    assert fused.key_value_reads >= len(kernels)


def test_what_is_read_once_is_what_each_kernel_is_given() -> None:
    of = case()
    problem, plan = of.problem(), plan_of(of, family="simt")
    kernels = [
        dataclasses.replace(k, schedule=dataclasses.replace(k.schedule, l2_bytes=1 << 40))
        for k in backward.kernels_of(plan)
    ]
    q, kv, out = of.query_bytes, of.key_value_bytes, of.out_bytes
    found = backward.fused(problem, kernels)

    # out and dout are read for the row statistics, then q, k, v, dout and the workspace twice.
    assert found.read == 2 * out + 2 * (q + kv + out + plan.workspace)
    assert found.written == q + kv + plan.workspace
    assert found.key_value_reads == 2
    assert backward.compulsory(problem) == traffic.Traffic(q + kv + 2 * out, q + kv, 1)


def test_without_a_cache_each_tile_of_keys_reads_the_queries_of_its_group() -> None:
    of = case()
    plan = plan_of(of, family="simt")
    of_keys, _ = backward.kernels_of(plan)
    found = backward.fused_without_cache(of.problem(), [of_keys])
    tiles = -(-4096 // of_keys.schedule.Bc)

    read_once = 2 * of.out_bytes + of.key_value_bytes + plan.workspace
    assert found.read == read_once + tiles * (of.query_bytes + of.out_bytes)


def test_the_standard_algorithm_moves_seven_matrices_of_scores() -> None:
    of = case()
    scores = 2 * of.scores
    found = backward.standard(of.problem())

    assert found.read == 5 * scores + of.query_bytes + of.key_value_bytes + 4 * of.out_bytes
    assert found.written == 2 * scores + of.query_bytes + of.key_value_bytes


# ---- The commands


def test_roofline_counts_what_kernels_compute_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    # Every backward family that runs on a T4 has more than one kernel.
    options = ("--backward", "--gpu", "T4", "--causal", "no,yes", "--output", path)
    result = commands.run("roofline", *options)
    rows = commands.written(path)["rows"]
    fused = [row for row in rows if row["algorithm"] == "fused"]

    assert {row["direction"] for row in rows} == {"backward"}
    for row in fused:
        assert row["flops_computed"] == pytest.approx(1.4 * row["flops"])
        assert row["attainable_tflops"] == pytest.approx(row["peak_tflops"] / 1.4)
        assert row["bound"] == "compute"
    text = " ".join(result.stdout.split())
    assert "which compute 1.4 times the FLOPs that count" in text
    assert "FLOPs of gradients = " in text
    assert "the forward pass's probabilities are read twice" in text


def test_roofline_of_a_gpu_without_kernels_is_modelled_too() -> None:
    options = ("--backward", "--gpu", "V100", "--dtype", "fp16", "--bias", "heads")
    result = commands.run("roofline", *options)

    assert "no kernels of cupy_flash; modelled with tiles of 64x64" in result.stdout


def test_profile_compares_with_all_that_the_kernels_compute() -> None:
    plan = plan_of(case(), family="simt")
    pairs = 2 * 16 * 4096 * 4096
    counters = {"gpu__time_duration.sum": 1e6, "dram__bytes_read.sum": 1e9}
    kernels = [Kernel(launch.entry, counters) for launch in plan.launches]
    rows = {row["quantity"]: row for row in profile.compare(kernels, plan, H100)}

    assert profile.flops_of(plan, CaseMods()) == case().flops()
    assert rows["tensor-core FLOPs"]["model"] == 2 * pairs * (4 * 64 + 3 * 128)
    assert rows["special functions"]["model"] == 2 * pairs
    assert rows["HBM read"]["measured"] == 3e9
    assert rows["HBM read"]["model"] == profile.model_of(plan).hbm.read


def test_profile_makes_the_call_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Call] = []

    def profiled(call: Call, metrics: Any) -> list[Kernel]:
        asked.append(call)
        return [Kernel("key_gradients", {"gpu__time_duration.sum": 1e6})]

    fake_cupy.install(monkeypatch)
    monkeypatch.setattr(profile, "profile_call", profiled)
    result = commands.run("profile", "--backward")

    assert asked[0].case.is_backward
    assert Call.from_json(asked[0].to_json()) == asked[0]
    assert "FLOPs that several kernels compute count for each" in " ".join(result.stdout.split())
