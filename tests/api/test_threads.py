"""Public functions called by several threads at once return what they return in one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.parallel.threaded_calls import THREADS, calls, digest, in_threads

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return {name: digest(call()) for name, call in calls().items()}


def test_threads_that_make_different_calls_do_not_disturb_each_other(
    expected: dict[str, str],
) -> None:
    def work(number: int) -> dict[str, str]:
        """Make all calls; each thread begins with another one."""
        every = list(calls().items())
        first = number * len(every) // THREADS
        return {name: digest(call()) for name, call in every[first:] + every[:first]}

    for found in in_threads(work):
        assert found == expected


def test_threads_that_make_the_first_calls_of_a_process_share_its_caches(
    expected: dict[str, str],
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, "-m", "support.parallel.threaded_calls"]
    output = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=300
    ).stdout

    for found in json.loads(output):
        assert found == expected
