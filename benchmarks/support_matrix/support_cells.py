"""Cells of the support matrix: which kernel serves a call, and whether it ran on such a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from support_calls import plan_of
from support_features import CACHES, DENSE, Feature
from support_runs import APPEND, Ran, features_of, kernel_of

from cupy_flash.planning.planner import Plan

# Architectures that the page lists: Hopper, which has kernels of its own, the others that have
# bfloat16 tensor cores, and Turing.
HOPPER, OTHERS, TURING = (90,), (80, 86, 89, 100, 103, 120), (75,)
ARCHS = tuple(sorted((*HOPPER, *OTHERS, *TURING)))
SIXTEEN_BIT = ("float16", "bfloat16")


class Outcome(NamedTuple):
    """Result of planning a call for an architecture and a dtype.

    Attributes
    ----------
    family
        Name of the kernel family; "" if array operations compute the call or it is refused.
    falls_back
        Whether calls without the feature use another family.
    ran
        Whether the kernel ran for all features of the call, in tests that passed.
    reason
        Why the call is refused; "" if it is not.
    """

    family: str = ""
    falls_back: bool = False
    ran: bool = False
    reason: str = ""


def outcome(ran: Ran | None, feature: Feature, direction: str, dtype: str, arch: int) -> Outcome:
    """Return the outcome of the call of a feature."""
    if direction in feature.on_arrays:
        return Outcome()
    plan = plan_of(feature, direction, dtype, arch)
    if isinstance(plan, str):
        return Outcome(reason=plan)
    usual = _usual_family(feature.planned.get(direction, feature), direction, dtype, arch)
    return Outcome(plan.family, plan.family != usual, has_run(ran, feature, plan))


def _usual_family(feature: Feature, direction: str, dtype: str, arch: int) -> str:
    """Return the family of calls without the feature; "" if there is none."""
    plain = CACHES[0] if (feature.kind, direction) == ("kvcache", "forward") else DENSE[0]
    plan = plan_of(plain, direction, dtype, arch)
    return "" if isinstance(plan, str) else plan.family


def has_run(ran: Ran | None, feature: Feature, plan: Plan) -> bool:
    """Return whether the kernel of a plan has run for its features, with any head dimension."""
    if ran is None:
        return False
    kernel = kernel_of(plan)
    if feature.append is not None and not ran.has(kernel._replace(name=APPEND), feature.append):
        return False
    return ran.has(kernel, features_of(plan.problem) | feature.ran)


def merged(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the distinct outcomes of several dtypes. A kernel that ran for one of them has run."""
    found: dict[tuple[str, bool, bool], Outcome] = {}
    for each in outcomes:
        key = (each.family, each.falls_back, bool(each.reason))
        earlier = found.get(key)
        found[key] = each if earlier is None or each.ran else earlier
    return list(found.values())
