"""Digests of kernel sources depend on all that the compiler sees, and on nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from cupy_flash.families import FAMILIES, contract
from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.families.tokens import _parts_of_file

SOURCES = sorted(
    {family.source for families in FAMILIES.values() for family in families.values()}
    | {str(path.relative_to(KERNEL_DIR)) for path in KERNEL_DIR.rglob("*.cu")}
)
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def source_digest(folder: Path, *sources: str) -> str:
    """Return the digest of the present contents of files in a folder."""
    _parts_of_file.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "KERNEL_DIR", folder)
        return contract.source_digest.__wrapped__(*sources)


def digest_of(folder: Path, files: dict[str, str]) -> str:
    """Return the digest of files with these texts; the first file includes the others."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return source_digest(folder, next(iter(files)))


def reached(source: str) -> set[str]:
    """Return the names of a file and of all files that it includes."""
    found, pending = set[str](), [source]
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending += INCLUDE.findall((KERNEL_DIR / name).read_text(encoding="utf-8"))
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(KERNEL_DIR, tmp_path / "kernels")
    return tmp_path / "kernels"


@pytest.mark.parametrize("source", SOURCES)
def test_comments_and_white_space_of_a_kernel_do_not_change_its_digest(
    source: str, copied: Path
) -> None:
    for path in copied.rglob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        # A line that ends with a backslash continues on the next line, so it gets no comment.
        text = re.sub(r"(?<!\\)\n", "  // another comment, isn't it?\n\n", text)
        path.write_text("/* a\n#include <header>\n*/\n" + text, encoding="utf-8")
    assert source_digest(copied, source) == source_digest(KERNEL_DIR, source)


@pytest.mark.parametrize("source", SOURCES)
def test_names_of_files_do_not_change_a_digest(source: str, copied: Path, tmp_path: Path) -> None:
    for path in copied.rglob("*.cu*"):
        text = INCLUDE.sub(r'#include "moved/\1pp"', path.read_text(encoding="utf-8"))
        renamed = tmp_path / "moved" / f"{path.relative_to(copied)}pp"
        renamed.parent.mkdir(parents=True, exist_ok=True)
        renamed.write_text(text, encoding="utf-8")
    assert source_digest(tmp_path, f"moved/{source}pp") == source_digest(KERNEL_DIR, source)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["backward/simt.cu", "forward/mma.cu"])
def test_a_token_of_any_file_that_is_reached_changes_the_digest(source: str, copied: Path) -> None:
    before = source_digest(copied, source)
    for path in copied.rglob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n;\n", encoding="utf-8")
        is_reached = str(path.relative_to(copied)) in reached(source)
        assert (source_digest(copied, source) != before) == is_reached
        path.write_text(text, encoding="utf-8")


def test_every_header_is_read_once() -> None:
    # `token_stream` expands only the first include of a file.
    for path in KERNEL_DIR.rglob("*.cuh"):
        assert re.search("^#pragma once$", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a; // x", "int/* \n */a;"),
        ("f(a+b,\n  c);", "f( a + b, c );"),
        ("// a \\\nint x;\nint y;", "int y;"),
        ("int a\\\n;", "int a;"),
        ("#pragma once\nint a;", "int a;"),
        ("#if A  // why\na\n#endif  // A", "#if A\na\n# endif"),
        ("#define F(x) x + \\\n    1\nb", "#define  F( x ) x+1 /* c\n */\nb"),
        ("#define F /* a */ (x)\nb", "#define F (x)\nb"),
        ('"\\"//a"; // a', '"\\"//a";'),
        ("'\"'; // \"", "'\"' ;"),
        ("1'000; // '", "1'000;"),
        ('R"x(" /* )" )x"; // a', 'R"x(" /* )" )x";'),
    ],
)
def test_texts_of_equal_tokens_have_one_digest(one: str, other: str, tmp_path: Path) -> None:
    assert digest_of(tmp_path, {"a.cu": one}) == digest_of(tmp_path, {"a.cu": other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ab", "a b"),
        ("a >> b", "a > > b"),
        ("a + +b", "a ++b"),
        ("1.5", "1 .5"),
        ("1e-5", "1e - 5"),
        ('u8"a"', 'u8 "a"'),
        ('"a" B', '"a"B'),
        ('"a b"', '"a  b"'),
        ('"// a"', '"// b"'),
        ("'/*'; a", "'/*'; b"),
        ("1'000 + 'a'", "1'000 + 'b'"),
        ('R"x(" // )" a)x"', 'R"x(" // )" b)x"'),
        ('R"(\n#pragma once\n)"', 'R"(\n)"'),
        ("#define F(x)", "#define F (x)"),
        ("#define A\nB", "#define A B"),
        ("#pragma unroll 2\na", "#pragma unroll\n2 a"),
        ("a\n#pragma unroll\nb", "a b\n#pragma unroll\n"),
        ("#include <a>", "#include <b>"),
        ("#if A\na", "#ifdef A\na"),
    ],
)
def test_texts_of_other_tokens_have_other_digests(one: str, other: str, tmp_path: Path) -> None:
    assert digest_of(tmp_path, {"a.cu": one}) != digest_of(tmp_path, {"a.cu": other})


def test_a_header_counts_where_it_is_included_first(tmp_path: Path) -> None:
    whole = digest_of(tmp_path, {"a.cu": "int a; int b; int c;"})
    files = {"a.cu": 'int a;\n /**/ # include "b.cuh" // b\nint c;\n#include "b.cuh"\n'}
    header = {"b.cuh": "#pragma once\nint b;"}
    assert digest_of(tmp_path, files | header) == whole
    assert digest_of(tmp_path, {"a.cu": 'int a; int c;\n#include "b.cuh"\n'} | header) != whole
    # If headers include each other, the second include names a file that is already being expanded.
    circle = {"b.cuh": 'int b;\n#include "c.cuh"\n', "c.cuh": '#include "b.cuh"\n'}
    assert digest_of(tmp_path, files | circle) == whole
