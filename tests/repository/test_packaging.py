"""Built and installed files: one top-level package that holds the commands and the kernels."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

if not (CHECKOUT / "pyproject.toml").is_file():
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)
pytest.importorskip("hatchling", reason="building needs hatchling, which the test extra brings")


def build(target: str, folder: Path) -> Path:
    """Build with the build backend itself, because pip would download it from an index."""
    folder.mkdir(exist_ok=True)
    line = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder]
    subprocess.run(line, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.iterdir()
    return archive


def files_below(folder: str, *suffixes: str) -> set[str]:
    """Return the paths of files below a folder, relative to the checkout, with slashes."""
    return {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / folder).rglob("*")
        if path.suffix in suffixes
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what the installed wheel puts into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


WHERE = """
    import cupy_flash
    import cupy_flash.cli.main
    from cupy_flash.families.contract import KERNEL_DIR

    print(cupy_flash.__file__)
    print(cupy_flash.cli.main.__file__)
    print(KERNEL_DIR)
"""


def places(installed: Path, working_directory: Path, *arguments: str | Path) -> list[Path]:
    """Return where a new interpreter finds the package, its commands and its kernels."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    environment.pop("PYTHONSAFEPATH", None)
    line = [sys.executable, *arguments]
    output = subprocess.run(
        line, cwd=working_directory, env=environment, check=True, capture_output=True, text=True
    ).stdout
    return [Path(line).resolve() for line in output.splitlines()]


def installed_places(installed: Path) -> list[Path]:
    """Return the places of an installed package, its commands and its kernels."""
    package = (installed / "cupy_flash").resolve()
    return [package / "__init__.py", package / "cli" / "main.py", package / "kernels_cu"]


CHECKOUT_PLACES = [
    CHECKOUT / place for place in ("cupy_flash/__init__.py", "cli/main.py", "kernels_cu")
]


@pytest.fixture
def console_script(tmp_path: Path) -> Path:
    """Script whose folder is first on its path, as for the installed command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "where.py"
    script.write_text(textwrap.dedent(WHERE), encoding="utf-8")
    return script


def test_the_wheel_installs_one_top_level_name(wheel_files: set[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_files}

    assert {name for name in top_level if not name.endswith(".dist-info")} == {"cupy_flash"}


def test_the_wheel_holds_every_module_kernel_command_and_tuned_table(wheel_files: set[str]) -> None:
    beside_the_package = files_below("cli", ".py") | files_below("kernels_cu", ".cu", ".cuh")
    expected = files_below("cupy_flash", ".py", ".json", ".typed")
    expected |= {f"cupy_flash/{name}" for name in beside_the_package}

    assert {"cupy_flash/cli/main.py", "cupy_flash/py.typed"} <= expected
    assert any(name.endswith(".cu") for name in expected)
    assert expected <= wheel_files


def test_the_wheel_declares_the_command(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    scripts = distribution.entry_points.select(group="console_scripts")

    found = [(script.name, script.value) for script in scripts]
    assert found == [("cupy-flash", "cupy_flash.__main__:main")]


def test_the_wheel_requires_no_cupy_unless_an_extra_names_the_cuda_version(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    requirements = distribution.requires or []
    on_cuda = [line for line in requirements if line.startswith(("cupy", "nvidia"))]

    assert on_cuda
    assert all("extra == 'cuda1" in line for line in on_cuda)


@pytest.mark.slow
def test_an_installed_command_run_from_a_checkout_uses_what_is_installed(
    installed: Path, console_script: Path
) -> None:
    assert places(installed, CHECKOUT, console_script) == installed_places(installed)


def test_an_installed_package_serves_from_any_folder(installed: Path, tmp_path: Path) -> None:
    found = places(installed, tmp_path, "-c", textwrap.dedent(WHERE))

    assert found == installed_places(installed)


@pytest.mark.slow
def test_a_checkout_in_the_working_directory_brings_its_own_commands_and_kernels(
    installed: Path,
) -> None:
    assert places(installed, CHECKOUT, "-c", textwrap.dedent(WHERE)) == CHECKOUT_PLACES


@pytest.mark.slow
def test_a_stray_folder_of_the_packages_name_hides_nothing(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "cupy_flash").mkdir()
    found = places(installed, tmp_path, "-c", textwrap.dedent(WHERE))

    assert found == installed_places(installed)


@pytest.mark.slow
def test_an_editable_install_only_points_at_the_checkout(
    tmp_path: Path, console_script: Path
) -> None:
    with zipfile.ZipFile(build("wheel:editable", tmp_path / "editable")) as archive:
        (pointer,) = (name for name in archive.namelist() if ".dist-info/" not in name)
        entry = Path(archive.read(pointer).decode().strip())

    assert pointer.endswith(".pth")
    assert places(entry, tmp_path, console_script) == CHECKOUT_PLACES


@pytest.mark.slow
def test_the_source_archive_holds_all_that_building_and_testing_need(tmp_path: Path) -> None:
    expected = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", ".ci/run"}
    expected |= {"hatch_build.py", "noxfile.py", "recipe/recipe.yaml"}
    for folder in ("cupy_flash", "cli", "tests", "examples", "benchmarks"):
        expected |= files_below(folder, ".py", ".json", ".typed", ".txt", ".md")
    expected |= files_below("kernels_cu", ".cu", ".cuh") | files_below("docs", ".md")
    expected |= files_below("examples", ".cu")

    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert expected <= names
