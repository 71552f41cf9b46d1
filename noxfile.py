"""Environments with the oldest and the newest versions of Python and of the dependencies.

The versions come from `pyproject.toml`: the interpreters from its classifiers, and the oldest
dependencies from its lower bounds. ``nox --list`` lists the sessions.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["oldest", "oldest_cuda12", "newest"]

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = [*nox.project.python_versions(PROJECT), "3.14t"]
# Tests of the parts that depend on the versions: NumPy's functions and dtypes, DLPack, Python
# functions that are traced, the compiler that CuPy loads, and the command line.
QUICK_SET = (
    "tests/api/kvcache/test_quantize.py",
    "tests/api/test_attention.py",
    "tests/api/test_varlen.py",
    "tests/arrays/test_arrays.py",
    "tests/cli/test_info.py",
    "tests/cpu/test_sources.py",
    "tests/gpu/test_compiler.py",
    "tests/gpu/test_environment.py",
    "tests/mods/test_captures.py",
    "tests/mods/trace",
    "tests/reference/test_reference.py",
)
# In addition without the global interpreter lock.
THREADS = "tests/api/test_threads.py"


def run_tests(session: nox.Session, *requirements: str) -> None:
    """Install the dependencies, and run the quick set or the tests that the command line names."""
    # Building NumPy from source would take minutes; a bound below the first wheel for an
    # interpreter then means that wheel.
    session.install("--only-binary", ":all:", "-r", "pyproject.toml", *requirements)
    session.install("hypothesis", "pytest", "pytest-xdist")
    session.run("python", "-m", "pytest", *(session.posargs or ["--quiet", *QUICK_SET]))
    if str(session.python).endswith("t") and not session.posargs:
        session.run("python", "-m", "pytest", "--quiet", "-m", "slow", THREADS)


@nox.session(python=PYTHONS)
def oldest(session: nox.Session) -> None:
    """Run with the oldest dependencies, without CuPy, which needs a newer NumPy."""
    run_tests(session, "--resolution", "lowest-direct")


@nox.session(python=PYTHONS)
def oldest_cuda12(session: nox.Session) -> None:
    """Run with the oldest dependencies, CuPy and NVRTC of CUDA 12."""
    run_tests(session, "--resolution", "lowest-direct", "--extra", "cuda12")


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Run with the newest dependencies, CuPy and NVRTC of CUDA 13."""
    run_tests(session, "--extra", "cuda13")
