"""Planning caches results that do not depend on lengths; caching changes no plan."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupy_flash.families import FAMILIES, contract, params
from cupy_flash.families.hopper.shared_memory import block_bytes, footprint
from cupy_flash.families.hopper.tiles import HopperTile
from cupy_flash.planning import planner
from cupy_flash.planning.planner import make_plan, plan_tile
from cupy_flash.problem.arrays import DTYPES, ArraySpec
from cupy_flash.problem.backward import with_gradient
from cupy_flash.problem.device import Device, device_for_arch
from cupy_flash.problem.gradient import GradientSpec
from cupy_flash.problem.problem import Problem, make_problem

devices = st.sampled_from(["sm_80", "sm_90", "sm_120"]).map(device_for_arch)
lengths = st.one_of(st.integers(1, 40), st.integers(1, 3000), st.integers(1, 2**17))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw problems of few dtypes and head dims, so that several use one cached result."""
    dims = st.sampled_from([64, 128, 192, 512])
    dtype, dim, dim_v = draw(st.sampled_from(DTYPES)), draw(dims), draw(dims)
    batch, heads_kv = draw(st.integers(1, 9)), draw(st.sampled_from([1, 8]))
    heads_q = heads_kv * draw(st.sampled_from([1, 4]))
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    kind = draw(st.sampled_from(["dense", "varlen", "kvcache", "gradients"]))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    rows = (batch, seqlen_q, seqlen_k)
    if kind == "varlen":
        rows = (1, batch * seqlen_q, batch * seqlen_k)
        options |= {"batch": batch, "max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    q = ArraySpec.contiguous((rows[0], rows[1], heads_q, dim), dtype)
    k = ArraySpec.contiguous((rows[0], rows[2], heads_kv, dim), dtype)
    v = ArraySpec.contiguous((rows[0], rows[2], heads_kv, dim_v), dtype)
    dout = ArraySpec.contiguous((rows[0], rows[1], heads_q, dim_v), dtype)
    made = make_problem(q, k, v, kind="dense" if kind == "gradients" else kind, **options)
    if kind != "gradients":
        return made
    return with_gradient(made, GradientSpec(("q", "k", "v"), dtype), dout, {"q": q, "k": k, "v": v})


def chosen_by_definition(case: Problem, device: Device) -> str:
    """Return the first family that prefers the problem, otherwise the first that can serve it."""
    families = FAMILIES[case.direction].values()
    serving = [f for f in families if f.automatic and f.why_not(case, device) is None]
    first = (f for f in serving if planner._why_not_first(f, case, device) is None)
    return next(first, serving[0]).name


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(problems(), min_size=2, max_size=8), devices)
def test_what_is_remembered_of_other_plans_changes_none(
    cases: list[Problem], device: Device
) -> None:
    plans = [make_plan(case, device) for case in cases]
    kinds: dict[str, str] = {}
    for case, plan in zip(cases, plans, strict=True):
        assert plan.family == chosen_by_definition(case, device)
        family = FAMILIES[case.direction][plan.family]
        if not family.suits_rows(case):
            assert family.why_not_first(case, device) is not None
        # A new instance of the family has no cached results.
        contract._written.cache_clear()
        params.assertions.cache_clear()
        anew = plan_tile(type(family)(), case, device, plan.tile, reason=plan.reason)
        assert anew.unit == plan.unit
        assert anew.launches == plan.launches
        for other in FAMILIES[case.direction].values():
            if other.why_not(case, device) is None:
                tile = other.default_tile(case, device)
                assert type(other)().default_tile(case, device) == tile
        # Keys that are equal but differ in type, like 1 and True, would get one cached result.
        assert plan.unit is not None
        for kind, name in re.findall(r"static constexpr (\w+) (\w+) =", plan.unit.text):
            assert kinds.setdefault(name, kind) == kind


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(problems(), min_size=30, max_size=40))
def test_problems_of_one_footprint_have_blocks_of_one_size(cases: list[Problem]) -> None:
    known: dict[Any, int] = {}
    for case in cases:
        for tile in (HopperTile(128, 128, 4), HopperTile(64, 64, 3, 2), HopperTile(192, 80, 8)):
            size = block_bytes(case, tile)
            assert known.setdefault((footprint(case), tile), size) == size
