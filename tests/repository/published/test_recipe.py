"""The conda recipe is valid, and agrees with `pyproject.toml`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT
from support.pages.project import project_settings

import cupy_flash

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)
rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build is in the extra dev")

PROJECT = project_settings()["project"]


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    """Recipe of the only variant, with expressions evaluated; rendering checks its schema."""
    stage = rattler_build.Stage0Recipe.from_file(CHECKOUT / "recipe" / "recipe.yaml")
    (variant,) = stage.render(rattler_build.VariantConfig())
    found: dict[str, Any] = variant.recipe.to_dict()
    return found


def bound(requirement: str) -> str:
    """Return a requirement as conda writes it: a name, a space and a bound."""
    return re.sub(r"(>=)", r" \1", requirement)


def test_the_schema_finds_an_unknown_field() -> None:
    with pytest.raises(rattler_build.RattlerBuildError, match="requirment"):
        rattler_build.Stage0Recipe.from_yaml("package: {name: a, version: '1'}\nrequirment: {}")


def test_the_recipe_is_of_this_version_and_of_any_platform(recipe: dict[str, Any]) -> None:
    assert recipe["package"]["version"] == cupy_flash.__version__
    assert recipe["build"]["noarch"] == "python"
    assert recipe["about"]["license"] == PROJECT["license"]


def test_the_recipe_requires_what_the_project_requires(recipe: dict[str, Any]) -> None:
    python = f"python {PROJECT['requires-python']}"
    (cupy,) = {
        line.partition(";")[0].replace("cupy-cuda12x", "cupy")
        for line in PROJECT["optional-dependencies"]["cuda12"]
        if line.startswith("cupy")
    }

    assert recipe["requirements"]["run"] == [python, *map(bound, PROJECT["dependencies"])]
    assert recipe["requirements"]["run_constraints"] == [bound(cupy)]
    build_system = project_settings()["build-system"]["requires"]
    assert set(map(bound, build_system)) <= set(recipe["requirements"]["host"])


def test_the_recipe_installs_the_same_commands(recipe: dict[str, Any]) -> None:
    expected = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]

    assert recipe["build"]["python"]["entry_points"] == expected
