"""Launcher of MPI programs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def launcher() -> str:
    """Return the path of mpiexec in this environment; skip the test if there is none."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    beside = Path(sys.executable).parent
    found = shutil.which("mpiexec", path=os.pathsep.join([str(beside), os.environ["PATH"]]))
    if found is None:
        pytest.skip("no mpiexec; pip install 'cupy_flash[parallel]'")
    return found
