"""Calls that wait for all lanes of a warp are not skipped by some of its lanes."""

from __future__ import annotations

import re

import pytest

from cupy_flash.families.contract import KERNEL_DIR

# Functions that all lanes of a warp have to call together, by the beginning of their names.
COLLECTIVES = (
    *("__shfl", "__any_sync", "__all_sync", "__ballot_sync", "__reduce", "__syncwarp"),
    *("sum_of_lanes", "max_of_lanes", "warp_sum", "warp_maximum", "warp_union"),
    *("exchange_columns", "arrive_warp"),
)
CALL = re.compile(rf"\b(?:{'|'.join(COLLECTIVES)})\w*\s*[<(]")
# An operator that evaluates its right side only if the left one says so, and the rest of the
# statement.
CONDITIONAL = re.compile(r"(?:&&|\|\||\?)(?=([^;{}]*))")
COMMENT = re.compile(r"//[^\n]*")


def right_side(rest: str) -> str:
    """Return the part of a statement before the parenthesis closes that holds its beginning."""
    depth = 0
    for at, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return rest[:at]
    return rest


def skipped_calls(text: str) -> list[str]:
    """Return the expressions in which a lane may skip a collective call."""
    sides = [right_side(match[1]) for match in CONDITIONAL.finditer(COMMENT.sub("", text))]
    return [side for side in sides if CALL.search(side)]


@pytest.mark.parametrize(
    "text",
    [
        "return is_visible && sum_of_lanes(p_sums[half]) != 0;",
        "const int x = lane < 4 ? __shfl_sync(~0u, y, 0) : 0;",
        "if (a ||\n    __any_sync(~0u, b)) return;",
    ],
)
def test_a_call_that_lanes_may_skip_is_found(text: str) -> None:
    assert skipped_calls(text)


def test_calls_of_all_lanes_and_comments_are_not_found() -> None:
    assert not skipped_calls("const float sum = sum_of_lanes(x);\nreturn is_visible && sum != 0;")
    assert not skipped_calls("total = a && b; // then __syncwarp(\n__syncwarp();")
    assert not skipped_calls("if (inspects && !all) arrive_warp(full);")


def test_no_lane_skips_a_collective_call() -> None:
    found = {
        path.relative_to(KERNEL_DIR).as_posix(): calls
        for path in sorted(KERNEL_DIR.rglob("*.cu*"))
        if (calls := skipped_calls(path.read_text(encoding="utf-8")))
    }
    assert found == {}
