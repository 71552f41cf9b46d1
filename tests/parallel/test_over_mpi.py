"""Ranks that exchange arrays in host memory through MPI: one to four processes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.parallel import rank_checks
from support.parallel.ranks import launcher

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
RANKS = [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))]


Said = dict[str, list[str]]


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Errors of each rank, by check; an empty text means that the check passed."""
    return said_by(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def said_by_one(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Errors of a single rank, by check."""
    return said_by(1, tmp_path_factory)


def said_by(ranks: int, temporary: pytest.TempPathFactory) -> Said:
    folder = temporary.mktemp("ranks")
    seed = os.environ.get("CUPY_FLASH_TEST_SEED") or str(secrets.randbelow(2**32))
    print(f"CUPY_FLASH_TEST_SEED={seed}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "CUPY_FLASH_HOME": str(folder),
        # There may be more ranks than cores, so each rank uses one thread.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, rank_checks.__file__, seed, str(folder)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": SECONDS}
    command = [launcher(), "-n", str(ranks), *program]
    done = subprocess.run(command, env=environment, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", rank_checks.CHECKS)
def test_all_ranks_pass_the_check(said: dict[str, list[str]], name: str) -> None:
    for rank, text in enumerate(said[name]):
        assert not text, f"rank {rank}: {text}"


@pytest.mark.parametrize("name", rank_checks.checks_of(1))
def test_one_rank_passes_the_check(said_by_one: dict[str, list[str]], name: str) -> None:
    (text,) = said_by_one[name]
    assert not text
