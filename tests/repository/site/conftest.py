"""The documentation site, built once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the site, as `mkdocs build --strict` writes it."""
    if not IN_CHECKOUT:
        pytest.skip("the tests stand outside a checkout")
    needed = ("mkdocs", "material", "mkdocstrings", "mkdocs_click", "ruff")
    if absent := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"the extra docs is not installed: there is no {absent[0]}")
    folder = tmp_path_factory.mktemp("site")
    # Material for MkDocs announces its end of life in each build.
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1", "CUPY_FLASH_SOURCE_URL": ""}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
