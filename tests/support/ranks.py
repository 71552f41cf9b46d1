"""Programs that MPI starts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def launcher() -> str:
    """MPI's own, of this environment; skips the test where there is none."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    beside = Path(sys.executable).parent
    found = shutil.which("mpiexec", path=os.pathsep.join([str(beside), os.environ["PATH"]]))
    if found is None:
        pytest.skip("no mpiexec; pip install 'cupy_flash[parallel]'")
    return found
