"""Wheel and source archive are accepted by the tools of package indexes, and the README renders."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from types import ModuleType

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)
for tool in ("hatchling", "twine", "check_wheel_contents", "readme_renderer"):
    pytest.importorskip(tool, reason=f"{tool} is in the extras dev and test")

BASE_URL = "https://host.invalid/owner/cupy_flash"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def metadata(archives: list[Path]) -> Message:
    (wheel,) = (path for path in archives if path.suffix == ".whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", CHECKOUT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(text: str) -> str:
    """Return the HTML that a package index shows for a description in Markdown."""
    from readme_renderer import markdown

    html = markdown.render(text)
    assert html is not None
    return html


def targets(html: str) -> list[str]:
    """Return the targets of all links and images, except anchors within the page."""
    found = re.findall(r'(?:href|src)="([^"]*)"', html)
    return [target for target in found if not target.startswith("#")]


def run(*command: str | Path) -> None:
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_metadata_of_both_archives_is_accepted(archives: list[Path]) -> None:
    assert [path.name.partition("-")[0] for path in archives] == ["cupy_flash"] * 2

    run("twine", "check", "--strict", *archives)


def test_the_wheel_holds_no_stray_file(archives: list[Path]) -> None:
    run("check_wheel_contents", *(path for path in archives if path.suffix == ".whl"))


def test_the_description_has_no_relative_link(metadata: Message) -> None:
    html = rendered(metadata.get_payload())

    assert ">Quick start<" in html
    assert not [target for target in targets(html) if not target.startswith("https://")]


def test_without_a_base_url_links_are_text_and_figures_are_left_out(hook: ModuleType) -> None:
    readme = (
        "# Name\n\nSee [the\nguide](docs/guide.md#part) and [CUDA](https://host.invalid).\n\n"
        "![A\nfigure](docs/a.svg)\n\n*Its [caption](docs/b.md).*\n\nText *in italics*.\n"
    )

    assert hook.description(readme, "") == (
        "# Name\n\nSee the\nguide and [CUDA](https://host.invalid).\n\nText *in italics*.\n"
    )


def test_with_a_base_url_links_and_images_are_those_of_the_repository(hook: ModuleType) -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    found = targets(rendered(hook.description(readme, BASE_URL)))

    assert f"{BASE_URL}/raw/HEAD/docs/figures/rate.svg" in found
    assert f"{BASE_URL}/blob/HEAD/docs/guide/arrays.md#array-libraries" in found
    assert all(target.startswith("https://") for target in found)
    paths = {re.sub(r".*/HEAD/|#.*", "", target) for target in found if BASE_URL in target}
    assert not [path for path in paths if not (CHECKOUT / path).exists()]


def test_the_projects_links_follow_from_the_base_url(hook: ModuleType) -> None:
    assert hook.urls("") == {}
    assert hook.urls(BASE_URL)["Repository"] == BASE_URL
    assert all(url.startswith(BASE_URL) for url in hook.urls(BASE_URL).values())
