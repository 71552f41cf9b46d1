"""The digest of the CPU backend depends on what its files compute, and on nothing else."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from cupy_flash.cpu import sources
from cupy_flash.cpu.sources import SOURCES

PACKAGE = Path(sources.__file__).parents[1]
BACKWARD = SOURCES["backward"]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the sources, from which digests are computed."""
    for name in BACKWARD:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / name)
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "cpu" / "sources.py"))
    return tmp_path


def digest(direction: str) -> str:
    """Return the digest of the present contents of the files."""
    sources._syntax.cache_clear()
    return sources.digest.__wrapped__(direction)


def test_the_backends_files_are_named() -> None:
    elsewhere = {"__init__.py", "combine.py", "plan.py", "sources.py"}
    files = [path for path in (PACKAGE / "cpu").rglob("*.py") if path.name not in elsewhere]
    assert {path.relative_to(PACKAGE).as_posix() for path in files} <= {*BACKWARD}
    assert {*SOURCES["forward"]} < {*BACKWARD}


@pytest.mark.slow
@pytest.mark.parametrize("direction", SOURCES)
def test_comments_docstrings_and_formatting_do_not_change_the_digest(
    direction: str, copied: Path
) -> None:
    before = digest(direction)
    for name in BACKWARD:
        tree = ast.parse((copied / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                node.body.insert(0, ast.Expr(ast.Constant("Another docstring.")))
        # `unparse` drops comments and formats the code differently.
        (copied / name).write_text(f"# A comment.\n\n{ast.unparse(tree)}\n", encoding="utf-8")
    assert digest(direction) == before


@pytest.mark.parametrize("direction", SOURCES)
def test_names_of_files_do_not_change_the_digest(
    direction: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(direction)
    renamed = {name: f"{index}.py" for index, name in enumerate(SOURCES[direction])}
    for name, other in renamed.items():
        (copied / name).rename(copied / other)
    monkeypatch.setitem(SOURCES, direction, tuple(renamed.values()))
    assert digest(direction) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_a_change_in_any_file_changes_the_digest(name: str, copied: Path) -> None:
    before = {direction: digest(direction) for direction in SOURCES}
    with (copied / name).open("a", encoding="utf-8") as file:
        file.write("\npass\n")
    assert {direction for direction in SOURCES if digest(direction) != before[direction]} == {
        direction for direction, names in SOURCES.items() if name in names
    }


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 2"), ("x = 1", "x = 1.0"), ("x = 'a'", "x = b'a'"), ("x = 'a'", "x = 'b'"),
        ("x = a", "x = 'a'"), ("f(a, *b)", "f(a, b)"), ("f(**a)", "f(a=a)"),
        ("{**a, b: c}", "{a: b, **c}"), ("a + b - c", "a + (b - c)"),
        ("if a:\n    b\nc", "if a:\n    b\n    c"),
        ("if a:\n    b\nelse:\n    c", "if a:\n    b\n    c"),
        ("def f(a, *, b): f", "def f(a, b): f"),
    ],
)  # fmt: skip
def test_other_syntax_has_another_digest(
    one: str, other: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "forward", ("one.py",))
    found = set()
    for text in (one, other):
        (copied / "one.py").write_text(text, encoding="utf-8")
        found.add(digest("forward"))
    assert len(found) == 2


def test_all_versions_of_python_give_one_digest(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python 3.12 added type parameters to functions; 3.13 omits empty fields in `ast.dump`.
    text = '''
class A(B, metaclass=C):
    """A docstring."""

    x: int = -1

    async def f(self, a, /, b=2.5, *c: int, d: str = "e", **g) -> None:
        with open(a) as file, b:
            return f"{a!r} {b:.3f}" "a" if not a[1:, ...] else lambda: (yield)
        match a:
            case {"a": [1, *_], **rest} if rest:
                del rest
'''
    monkeypatch.setitem(SOURCES, "forward", ("one.py",))
    (copied / "one.py").write_text(text, encoding="utf-8")
    assert digest("forward") == "482f5bb4f2f13921"
