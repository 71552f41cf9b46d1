"""Timing of two checkouts in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT, script

pytestmark = pytest.mark.skipif(not IN_CHECKOUT, reason="the tests stand outside a checkout")


@pytest.mark.slow
def test_calls_of_two_checkouts_are_timed_in_one_process(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("cupy_flash", "kernels_cu", "cli"):
        (other / name).symlink_to(CHECKOUT / name)
    two_checkouts = script("two_checkouts")
    before = {name: module for name, module in sys.modules.items() if "cupy_flash" in name}
    options = ["--repeats", "1", "--only", "^b4 s512 full$"]
    result = CliRunner().invoke(two_checkouts.main, [str(other), "cobraml-python", *options])
    assert result.exit_code == 0, result.output
    *_, line = result.output.splitlines()
    old, new, ratio, *label = line.split()
    assert float(ratio) == pytest.approx(float(new) / float(old), abs=1e-3)
    assert label == ["b4", "s512", "full"]
    # This process still has the same modules as before.
    assert before.items() <= sys.modules.items()


def test_a_folder_without_the_library_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(script("two_checkouts").main, [str(tmp_path), "mods"])
    assert result.exit_code == 2
    assert "has no cupy_flash" in result.output
