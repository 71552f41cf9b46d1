"""Sources of the site: names in the reference, and links to files that are no pages."""

from __future__ import annotations

import re
from types import ModuleType, SimpleNamespace

import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT
from support.cli.public_names import public_names

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

DIRECTIVE = re.compile(r"^::: (cupy_flash\.[\w.]+)$", re.MULTILINE)


def test_the_reference_has_a_directive_for_every_public_name() -> None:
    pages = sorted((CHECKOUT / "docs" / "reference" / "api").glob("*.md"))
    names = [name for page in pages for name in DIRECTIVE.findall(page.read_text("utf-8"))]
    # Keyword arguments of functions, whose classes are not public.
    names = [name for name in names if not name.startswith("cupy_flash.mods.")]
    assert sorted(names) == sorted(public_names())


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("mkdocs")
    # MkDocs, too, lets a hook import the modules next to it.
    monkeypatch.syspath_prepend(CHECKOUT / "docs" / "site")
    found = ModuleType("hooks")
    found.__file__ = str(CHECKOUT / "docs" / "site" / "hooks.py")
    with open(found.__file__, encoding="utf-8") as file:
        exec(compile(file.read(), found.__file__, "exec"), vars(found))
    return found


@pytest.mark.parametrize(
    ("page", "base", "text", "expected"),
    [
        ("guide/a.md", "", "[train.py](../../examples/train.py)", "`examples/train.py`"),
        (
            "guide/a.md",
            "",
            "[the log](../../benchmarks/README.md)",
            "the log (`benchmarks/README.md`)",
        ),
        ("guide/a.md", "https://h/x/", "[t](../../cli/main.py)", "[t](https://h/x/cli/main.py)"),
        ("guide/a.md", "", "[cpu.md](cpu.md#x)", "[The CPU backend](cpu.md#x)"),
        ("guide/a.md", "", "[b](masks.md#gallery)", "[b](masks.md#gallery)"),
        ("guide/a.md", "", "[c](../../CONTRIBUTING.md#checks)", "[c](../contributing.md#checks)"),
        ("notebooks/03_training.md", "", "[n](04_generation.ipynb)", "[n](04_generation.md)"),
        ("notebooks/03_training.md", "", "[t](../../docs/guide/cpu.md)", "[t](../guide/cpu.md)"),
        ("changelog.md", "", "[m](docs/guide/masks.md)", "[m](guide/masks.md)"),
        ("guide/a.md", "", "[d](https://host/y.md)", "[d](https://host/y.md)"),
        ("guide/a.md", "", "```\n[e](../../cli/main.py)\n```", "```\n[e](../../cli/main.py)\n```"),
        ("guide/a.md", "", "[f](../../absent.py)", "[f](../../absent.py)"),
    ],
)
def test_links_lead_to_pages_or_to_the_sources(
    hooks: ModuleType, page: str, base: str, text: str, expected: str
) -> None:
    opened = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    config = SimpleNamespace(extra={"source_url": base})
    assert hooks.on_page_markdown(text, opened, config, None) == expected
