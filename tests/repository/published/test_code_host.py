"""Workflows, issue forms and citation are valid, and name the versions of `pyproject.toml`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT
from support.pages.project import project_settings

import cupy_flash

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

# GitHub allows no other place for these files. The source archive leaves them out.
HOST = CHECKOUT / ".github"
if not HOST.is_dir():
    pytest.skip("the checkout has no folder .github", allow_module_level=True)
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))
FORMS = sorted((HOST / "ISSUE_TEMPLATE").glob("*_*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [HOST / "ISSUE_TEMPLATE" / "config.yml"],
    "citation-file-format": [CHECKOUT / "CITATION.cff"],
}


def check_schema(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--default-filetype", "yaml"]
    command += ["--builtin-schema", f"vendor.{schema}", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True)


needs_schemas = pytest.mark.skipif(
    importlib.util.find_spec("check_jsonschema") is None,
    reason="check-jsonschema is in the extra dev",
)


@needs_schemas
@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_files_have_the_form_that_their_readers_expect(schema: str) -> None:
    assert SCHEMAS[schema]
    result = check_schema(schema, *SCHEMAS[schema])

    assert result.returncode == 0, result.stdout


@needs_schemas
def test_an_unknown_key_of_a_workflow_is_found(tmp_path: Path) -> None:
    text = WORKFLOWS[0].read_text(encoding="utf-8")
    wrong = tmp_path / "workflow.yml"
    wrong.write_text(text.replace("runs-on:", "run-on:"), encoding="utf-8")

    assert check_schema("github-workflows", wrong).returncode != 0


def test_workflows_pass_the_security_audit() -> None:
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None:
        pytest.skip("zizmor is in the extra dev")
    result = subprocess.run(
        [zizmor, "--offline", "--no-progress", HOST], capture_output=True, text=True
    )

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_has_few_permissions_and_ends(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")

    assert "\npermissions:\n  contents: read\n" in text
    assert "\nconcurrency:\n" in text
    assert text.count("runs-on:") == text.count("timeout-minutes:")
    # Pinned to a major version, or to the branch that the action's documentation names.
    pins = re.findall(r"uses: [\w/-]+@(\S+)", text)
    assert pins
    assert all(re.fullmatch(r"v\d+|release/v\d+", pin) for pin in pins), pins


def test_the_workflows_test_every_version_of_python() -> None:
    classifiers = project_settings()["project"]["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    versions = {line.rpartition(" ")[2] for line in classifiers if line.startswith(prefix)}
    text = (HOST / "workflows" / "tests.yml").read_text(encoding="utf-8")
    matrices = [set(re.findall(r'"([\d.]+t?)"', line)) for line in text.splitlines()]

    assert [found for found in matrices if len(found) > 1] == [versions, versions | {"3.14t"}]


def test_a_bug_report_asks_for_the_output_of_info() -> None:
    text = (HOST / "ISSUE_TEMPLATE" / "bug_report.yml").read_text(encoding="utf-8")

    assert "Output of `cupy-flash info`" in text


def test_the_citation_is_of_this_version() -> None:
    text = (CHECKOUT / "CITATION.cff").read_text(encoding="utf-8")

    assert f"\nversion: {cupy_flash.__version__}\n" in text
    assert f"\nlicense: {project_settings()['project']['license']}\n" in text
