"""Ranks that exchange arrays on GPUs through NCCL, as one or two processes with a GPU each."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import pytest
from support.gpu import cupy
from support.parallel import rank_checks

from cupy_flash.gpu.environment import nccl_unavailable

pytestmark = pytest.mark.gpu
# Time limit in seconds of all checks, including compilation. Checks not made by then have failed.
SECONDS = 240.0

Said = list[dict[str, str]]


@pytest.fixture(scope="module", params=[2], ids="{} ranks".format)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Return for each rank the traceback of each check, by name; empty if the check passed."""
    return said_by(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def said_by_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the traceback of each check, by name, if there is only one rank."""
    return said_by(1, tmp_path_factory)[0]


def said_by(ranks: int, temporary: pytest.TempPathFactory) -> Said:
    if reason := nccl_unavailable():
        pytest.skip(reason)
    if cupy.cuda.runtime.getDeviceCount() < ranks:
        pytest.skip(f"{ranks} ranks need as many GPUs")
    from cupy_flash.cli.measure.ranks import RankError, on_ranks

    # New processes import the test modules through this path.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    seed = int(os.environ.get("CUPY_FLASH_TEST_SEED") or secrets.randbelow(2**32))
    print(f"CUPY_FLASH_TEST_SEED={seed}")
    folder = temporary.mktemp("ranks")
    missing = "was not made"
    try:
        on_ranks(rank_checks.over_nccl, ranks, seed, folder, seconds=SECONDS)
    except RankError as error:
        # Checks that were made before the error have written their results.
        missing = f"{missing}: {error}"
    return [
        {
            name: place.read_text() if (place := folder / f"{name}.{rank}").exists() else missing
            for name in rank_checks.checks_of(ranks)
        }
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("name", rank_checks.CHECKS)
def test_all_ranks_pass_the_check(said: Said, name: str) -> None:
    for rank, of_rank in enumerate(said):
        assert not of_rank[name], f"rank {rank}: {of_rank[name]}"


@pytest.mark.parametrize("name", rank_checks.checks_of(1))
def test_one_rank_passes_the_check(said_by_one: dict[str, str], name: str) -> None:
    assert not said_by_one[name], said_by_one[name]
