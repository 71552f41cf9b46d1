"""Errors of commands due to paths, files or the output: one line, without a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.cli import commands
from support.compilers import needs_compiler

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import InputFile, Inputs
from cupy_flash.cli.errors import OneLineErrors
from cupy_flash.cli.main import main

QUICK = ("--seqlen-q", "8", "--heads", "1", "--provider", "cupy_flash-cpu", "--repeats", "3")
FULL = Path("/dev/full")

needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def bench(*arguments: str, code: int = 0) -> Result:
    return commands.run("bench", *arguments, code=code)


def python(
    *arguments: str, env: dict[str, str] | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that sees no GPU."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | (env or {}),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
    )


def under_a_file(tmp_path: Path) -> dict[str, str]:
    """Return environment variables that name a cache folder which cannot be created."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    return {"CUPY_CACHE_DIR": str(tmp_path / "file" / "cache")}


@pytest.mark.parametrize("command", ["bench", "tune --backend cpu --dry-run", "profile"])
def test_more_sequences_than_kernels_count_are_refused_in_one_line(command: str) -> None:
    said = commands.refusal(*command.split(), "--batch", str(10**20), "--seqlen-q", "4")

    assert f"batch is {10**20}; expected at most 2147483647" in said


@pytest.mark.parametrize("more", [(), ("--cache",)])
def test_a_batch_that_does_not_fit_the_memory_is_told_what_it_needs(more: tuple[str, ...]) -> None:
    shape = ("--batch", str(2 * 10**9), "--seqlen-q", "64")
    result = bench(*shape, "--provider", "cupy_flash-cpu", *more, code=1)
    text = " ".join(result.stdout.split())

    assert re.search(r"needs [\d.]+ GiB of memory, and [\d.]+ GiB are free", text)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("info",), ("bench", *QUICK), ("tables", "list")])
def test_a_kernel_cache_that_cannot_be_made_is_no_matter_where_nothing_is_compiled(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("cupy")
    result = python("-m", "cupy_flash", *command, env=under_a_file(tmp_path))

    assert result.returncode == 0, result.stderr
    assert "cannot be written" not in result.stderr


@needs_compiler
def test_a_kernel_cache_that_cannot_be_made_does_not_keep_the_compiler_from_loading(
    tmp_path: Path,
) -> None:
    code = "from cupy_flash.gpu.compiler import why_no_compiler; print(why_no_compiler())"
    result = python("-c", code, env=under_a_file(tmp_path))

    assert result.stdout == "None\n"


# Code that loads two kernels as on a GPU, except that `RawModule` is a fake.
_COMPILE_TWO = """
from cupy_flash.gpu import compiler
assert compiler.why_no_compiler() is None
import cupy
from cupy_flash.problem.device import device_for_arch
from cupy_flash.families import TranslationUnit
class RawModule:
    def __init__(self, **arguments): pass
    def compile(self): pass
cupy.RawModule = RawModule
for text in "ab":
    compiler._load_module(TranslationUnit(text, ("attention",), text), device_for_arch(90))
"""


@pytest.mark.slow
@needs_compiler
def test_kernels_that_cannot_be_kept_are_warned_of_once_also_by_other_processes(
    tmp_path: Path,
) -> None:
    code = (
        f"import subprocess, sys\nagain = {_COMPILE_TWO!r}\nexec(again)\n"
        "subprocess.run([sys.executable, '-c', again], check=True)\n"
    )
    result = python("-c", code, env=under_a_file(tmp_path))

    assert result.returncode == 0, result.stderr
    # One line is about the cache; CuPy may print warnings as well.
    assert result.stderr.count("cannot be written") == 1
    assert "Traceback" not in result.stderr


def test_arrays_on_the_host_need_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    arrays = (np.ones((1, 3, 1, 8)),) * 3

    assert Inputs(Case("float64", 1, 3, 3, 1, 1, 8, 8), _host=arrays).host == arrays


@pytest.mark.parametrize(
    "content", [b"", b"not arrays", b"\x93NUMPY", b"PK\x03\x04", b"\x80\x04K."]
)
def test_an_input_that_is_no_archive_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "qkv.npz"
    path.write_bytes(content)
    said = commands.refusal("bench", "--input", path)

    assert "cannot be read as an npz file: it is not a zip archive; expected what" in said
    assert "pickle" not in said


def test_a_single_array_under_the_name_of_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "qkv.npz"
    with path.open("wb") as file:
        np.save(file, np.ones((1, 3, 1, 8)))
    result = bench("--input", str(path), code=2)

    assert "expected what numpy.savez writes" in result.stderr


def test_python_objects_in_an_input_are_refused_without_advice_to_load_them(tmp_path: Path) -> None:
    arrays = dict.fromkeys("qkv", np.array([{}], object))
    result = bench(*commands.input_options(tmp_path, **arrays), code=2)

    assert "q holds Python objects; expected numbers" in result.stderr
    assert "pickle" not in result.stderr


def test_an_archive_that_is_damaged_anywhere_is_refused_as_a_wrong_option(tmp_path: Path) -> None:
    path = tmp_path / "qkv.npz"
    np.savez_compressed(path, **dict.fromkeys("qkv", np.ones((1, 3, 1, 8))))
    whole = path.read_bytes()
    refused = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            InputFile.read(path)
        except click.UsageError:
            refused += 1
        # No code reads some bytes of an archive, such as its dates.
    assert refused > len(whole) // 2


@pytest.mark.parametrize("content", [b"text", b"\x93NUMPY\x01\x00\x04\x00text"])
def test_an_archive_of_something_else_is_refused_in_one_line(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "qkv.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", content)
    assert "cannot be read as an npz file" in commands.refusal("bench", "--input", path)


def failing(error: BaseException, code: int) -> Result:
    """Return the result of a command that raises `error`; fail unless it exits with `code`."""

    @click.group(cls=OneLineErrors)
    def group() -> None:
        pass

    @group.command()
    def fail() -> None:
        raise error

    result = CliRunner().invoke(group, ["fail"])
    assert result.exit_code == code
    return result


def test_an_interrupt_is_called_one() -> None:
    assert failing(KeyboardInterrupt(), 130).stderr.split() == ["interrupted"]


def test_the_end_of_a_file_is_not_called_an_interrupt() -> None:
    said = failing(EOFError(), 1).stderr

    assert "unexpected end of a file" in said
    assert "interrupted" not in said


def test_a_failure_of_the_system_is_told_with_the_file_that_it_concerns() -> None:
    result = failing(OSError(28, "No space left on device", "kernel.cubin"), 1)

    assert result.stderr == "cupy-flash: No space left on device: kernel.cubin\n"


@pytest.mark.parametrize(
    ("interrupt", "code"), [(None, 141), (KeyboardInterrupt(), 130), (click.Abort(), 130)]
)
def test_a_closed_pipe_has_its_own_code_unless_an_interrupt_was_being_told(
    interrupt: BaseException | None, code: int
) -> None:
    error = BrokenPipeError(32, "Broken pipe")
    error.__context__ = OSError("while writing")
    error.__context__.__context__ = interrupt

    assert failing(error, code).output == ""


def test_a_pipe_that_closes_while_the_end_is_told_has_its_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(click.Group, "main", closed)

    commands.run("info", code=141)


def test_what_nobody_reads_changes_no_exit_code_and_is_not_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", pipe)
        with pytest.raises(SystemExit) as ended:
            main(["bench", "--bogus"])
        # Python flushes stderr at its exit, too; with the closed pipe this would raise.
        print("more", file=pipe, flush=True)

    assert ended.value.code == 2


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    assert isinstance(failing(KeyError("x"), 1).exception, KeyError)


@needs_full_device
def test_rows_that_do_not_fit_the_disk_are_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.symlink_to(FULL)
    result = bench(*QUICK, "--output", str(path), code=1)

    assert result.stderr == f"{path} cannot be written: No space left on device\n"


@pytest.mark.slow
@needs_full_device
@pytest.mark.parametrize("command", [("info",), ("bench", *QUICK), ("bench", "--help")])
def test_a_full_disk_under_the_output_is_told_in_one_line(command: tuple[str, ...]) -> None:
    with FULL.open("w", encoding="utf-8") as full:
        result = python("-m", "cupy_flash", *command, stdout=full)

    assert result.returncode == 1
    assert result.stderr == "cupy-flash: No space left on device\n"


def test_a_reader_that_went_away_is_not_worth_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        result = python("-m", "cupy_flash", "info", stdout=pipe)

    assert result.returncode == 141
    assert "Traceback" not in result.stderr
    assert "pipe" not in result.stderr.lower()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "--seqln-q", "3"), "--seqlen-q"),
        (("bench", "--qqq"), "--qqq; see cupy-flash bench --help"),
        (("bench", "extra"), "unexpected extra argument (extra); see cupy-flash bench --help"),
    ],
)
def test_an_option_that_is_unknown_leads_to_those_that_are_not(
    arguments: tuple[str, ...], says: str
) -> None:
    # click quotes the option from 8.4 on.
    refusal = commands.refusal(*arguments, prog_name="cupy-flash")

    assert says in refusal.replace("'", "")


def test_an_error_of_cuda_is_told_in_one_line() -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    said = commands.only_line(failing(runtime.CUDARuntimeError(700), 1))

    assert said.startswith("cupy-flash: cudaErrorIllegalAddress")


@pytest.mark.slow
@needs_full_device
@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 0), ("2>/dev/full", 1)])
def test_streams_that_are_closed_or_full_cost_no_traceback(closed: str, code: int) -> None:
    command = " ".join(["-m cupy_flash bench --seqlen-q 8,9", *QUICK[2:], closed])
    result = subprocess.run(
        f"{sys.executable} {command}", shell=True, capture_output=True, text=True, check=False
    )

    assert result.returncode == code
    assert "Traceback" not in result.stderr
