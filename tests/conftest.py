"""Fixtures and hooks of all tests: markers gpu and slow, seeds, and a home folder per test."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import secrets
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from cupy_flash.gpu import compiler
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.parallel import Group
from cupy_flash.planning import tuning

# Tests have no deadlines, since the machine may be busy.
hypothesis.settings.register_profile("cupy_flash", deadline=None)
hypothesis.settings.load_profile("cupy_flash")

# pytest then shows failed assertions in `support` with as much detail as those in tests.
pytest.register_assert_rewrite("support")

SEED_VARIABLE = "CUPY_FLASH_TEST_SEED"
# The seed differs between runs; to repeat a failing run, set the variable to the printed number.
SEED = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(2**32))
GPU_TESTS = Path(__file__).parent / "on_gpu"
# Otherwise JAX allocates three quarters of a GPU's memory, which other workers need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-json",
        metavar="FILE",
        help="add the kernels that tests run on a GPU to FILE, for the support matrix",
    )


def pytest_configure(config: pytest.Config) -> None:
    workers = getattr(config.option, "numprocesses", None)
    if workers:
        # Otherwise each worker starts one OpenBLAS thread per core: with 15 workers on 16 cores, a
        # test of gradients took 20 s instead of 1 s.
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads))
    if file := config.getoption("support_json"):
        if (reason := gpu_unavailable()) is not None:
            raise pytest.UsageError(f"--support-json needs a GPU: {reason}")
        from support.gpu.launched_kernels import Recorder

        config.pluginmanager.register(Recorder(config, config.invocation_params.dir / file))


def pytest_report_header() -> str:
    return f"{SEED_VARIABLE}={SEED}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    # Collecting and skipping the 12,000 tests in on_gpu takes a quarter of the run's time on two
    # cores. pytest does not call this hook for a folder that the command line names, or whose
    # files it names.
    return True if collection_path == GPU_TESTS and gpu_unavailable() is not None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # An id with an address differs between xdist workers, which then run no test at all.
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"an id of a test holds an address: {unstable[0]}")
    if "slow" not in config.option.markexpr:
        _deselect(config, items, "slow")
    if not config.option.collectonly and gpu_unavailable() is not None:
        _deselect(config, items, "gpu")


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    chosen = [item for item in items if item.get_closest_marker(marker)]
    items[:] = [item for item in items if not item.get_closest_marker(marker)]
    config.hook.pytest_deselected(items=chosen)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (reason := gpu_unavailable()) is not None:
        terminalreporter.write_line(f"Tests of kernels on a GPU do not run here: {reason}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random generator whose numbers depend on the run's seed and the test's id only."""
    # pytest shows this line with a failure, where the report header is out of sight.
    print(f"{SEED_VARIABLE}={SEED}")
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="session")
def new_homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of new folders; `mktemp` would search all existing folders each time."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def home(new_homes: Iterator[Path]) -> Iterator[Path]:
    """Empty `CUPY_FLASH_HOME` for each test, without prebuilt kernels and shipped tables.

    Tests do not depend on tuned tables; the tables have their own tests.
    """
    folder = next(new_homes)
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuning.HOME_VARIABLE, str(folder))
        patch.delenv(compiler.CUBINS_VARIABLE, raising=False)
        patch.setattr(tuning, "SHIPPED_DIR", folder / "shipped")
        tuning.reload()
        yield folder
    tuning.reload()


@pytest.fixture(scope="module")
def group() -> Group:
    """Group of this process alone, which exchanges arrays over MPI."""
    mpi = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    return Group(mpi.COMM_SELF)


@pytest.fixture(scope="session")
def compile_pool() -> Iterator[ProcessPoolExecutor]:
    """Pool of two processes that compile, for tests that first submit all their units."""
    if reason := compiler.why_no_compiler():
        pytest.skip(reason)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(2, mp_context=context)
    yield pool
    pool.shutdown(cancel_futures=True)
