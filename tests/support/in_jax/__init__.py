"""Programs that use JAX, each run in a process of its own, and time limits: a hang is a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Time limits in seconds of a program, and of a test, which may compile dozens of kernels.
_OF_PROGRAM, _OF_TEST = 300, 600


def run_program(name: str, *arguments: object, **environment: str) -> str:
    """Run a program of this folder, and return its output; fail if it does not end well."""
    program = Path(__file__).with_name(f"{name}.py")
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(program), *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_OF_PROGRAM)
        except subprocess.TimeoutExpired:
            # Python then prints the stacks of all threads, and ends.
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            output, errors = process.communicate()
            pytest.fail(f"{name} hangs: {output[-2000:]}\n{errors[-8000:]}")
    # The reason may come before the stack of C++.
    reason = errors if len(errors) < 8000 else f"{errors[:4000]}\n...\n{errors[-4000:]}"
    assert process.returncode == 0, f"exit code {process.returncode}: {reason}"
    return output


@contextlib.contextmanager
def time_limit(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """End this process, with the stacks of all threads, if the test hangs in JAX's C++ code."""
    with capsys.disabled():
        stderr = os.dup(2)
    try:
        faulthandler.dump_traceback_later(_OF_TEST, exit=True, file=stderr)
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(stderr)
