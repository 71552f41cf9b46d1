"""Results measured so far are kept in the file and the table, whatever ends a command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from support.cli import commands
from support.cli.bench_records import row, write
from support.compilers import needs_compiler

from cupy_flash.cli.build import kernel_sets
from cupy_flash.cli.build.build import Builder, Job
from cupy_flash.cli.main import main
from cupy_flash.cli.measure import runner
from cupy_flash.cli.records import report
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.planning.tuning import write_table
from cupy_flash.problem.device import Device, device_for_arch
from cupy_flash.problem.problem import make_contiguous_problem

needs_pipes = pytest.mark.skipif(os.name != "posix", reason="pipes are closed otherwise there")
QUICK = ("--heads", "1", "--provider", "cupy_flash-cpu", "--repeats", "3")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return commands.written(path)["rows"]


def bench_until(
    second: Callable[[], None], path: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0
) -> Result:
    """Run `bench` on 16, 24 and 32 queries, and call `second` before the case of 24."""
    run = runner.Runner.run

    def runs(self: runner.Runner, case: Any, *others: Any) -> Any:
        if case.seqlen_q == 24:
            second()
        return run(self, case, *others)

    monkeypatch.setattr(runner.Runner, "run", runs)
    line = ("bench", "--seqlen-q", "16,24,32", *QUICK, "--output", path)
    return commands.run(*line, code=code, catch_exceptions=True)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (KeyError("a defect"), 1), (MemoryError(), 1)]
)
def test_what_ends_a_bench_costs_the_cases_that_were_not_done(
    error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    path = tmp_path / "rows.json"
    result = bench_until(fails, path, monkeypatch, code)

    assert [row["seqlen_q"] for row in rows_of(path)] == [16]
    assert "GFLOP/s" in result.stdout
    assert f"Written to {path}." in result.stderr


def test_a_case_is_in_the_file_before_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    found: list[list[int]] = []

    def look() -> None:
        found.append([row["seqlen_q"] for row in rows_of(path)])

    bench_until(look, path, monkeypatch)

    assert found == [[16]]
    assert [row["seqlen_q"] for row in rows_of(path)] == [16, 24, 32]


def test_a_run_that_ends_before_its_first_case_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "rows.json"
    path.write_text("earlier", encoding="utf-8")
    monkeypatch.setattr(runner.Runner, "run", interrupted)
    commands.run("bench", *QUICK, "--output", path, "--force", code=130)

    assert path.read_text(encoding="utf-8") == "earlier"


@pytest.mark.parametrize(
    "command",
    ["bench", "roofline", "tune --backend cpu", "tune --report", "tune --arch sm_90", "compare"],
)
def test_a_record_is_not_overwritten_unless_forced(command: str, tmp_path: Path) -> None:
    path, other = tmp_path / "rows.json", tmp_path / "other.json"
    for each in (path, other):
        commands.run("bench", *QUICK, "--seqlen-q", "16", "--output", each)
    before = path.read_text(encoding="utf-8")
    others = (other, other) if command == "compare" else ()
    said = commands.run(*command.split(), "--output", path, *others, code=2).stderr

    assert f"--output {path} exists; --force overwrites it" in said
    assert path.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("line", "said", "needs"),
    [
        ("tables export {file}.json", "FILE", None),
        ("tables merge {table} --output {file}.json", "--output", None),
        ("plot {record} --output {file}.svg", "--output", "matplotlib"),
        ("roofline --gpu H100 --plot {file}.svg", "--plot", "matplotlib"),
    ],
)
def test_tables_and_pictures_overwrite_nothing_unless_forced(
    line: str, said: str, needs: str | None, tmp_path: Path
) -> None:
    if needs:
        pytest.importorskip(needs)
    table, record, file = tmp_path / "t.json", tmp_path / "r.json", tmp_path / "file"
    write_table(table, [])
    write(record, [row("cupy_flash", 512, 1.0)])
    arguments = line.format(table=table, record=record, file=file).split()
    path = next(Path(text) for text in arguments if text.startswith(str(file)))
    path.write_text("precious", encoding="utf-8")
    refusal = commands.run(*arguments, code=2).stderr

    assert f"{said} {path} exists; --force overwrites it" in " ".join(refusal.split())
    assert path.read_text(encoding="utf-8") == "precious"
    commands.run(*arguments, "--force")
    assert path.read_text(encoding="utf-8") != "precious"


def commands_of(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, *names, name)
        else:
            yield " ".join((*names, name)), command


def test_every_command_that_writes_a_file_has_force() -> None:
    writing: dict[str, bool] = {}
    for name, command in commands_of(main):
        paths = [each.type for each in command.params if isinstance(each.type, click.Path)]
        if any(path.file_okay and not path.exists for path in paths):
            writing[name] = any(each.name == "force" for each in command.params)

    names = ("bench", "compare", "plot", "profile", "roofline", "tables export", "tables merge")
    assert writing == dict.fromkeys((*names, "tune"), True)


def test_a_record_is_overwritten_by_force_and_an_empty_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.touch()
    for more in ((), ("--force",)):
        commands.run("bench", *QUICK, "--seqlen-q", "16", "--output", path, *more)


def test_into_a_pipe_there_is_a_line_of_progress_each_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    with report.progress("compile", 30) as advance:
        for number in range(30):
            advance(f"kernel {number}")
            now[0] += 4.0
    lines = capsys.readouterr().err.splitlines()

    assert lines == [f"[{n}/30] compile: kernel {n}" for n in range(3, 30, 3)]


def test_a_disk_that_is_full_for_a_while_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, times = report.write_whole, iter(range(9))

    def full_at_first(path: Path, data: bytes) -> None:
        if next(times) == 0:
            raise OSError(28, "No space left on device")
        whole(path, data)

    monkeypatch.setattr(report, "write_whole", full_at_first)
    path = tmp_path / "rows.json"
    bench_until(lambda: None, path, monkeypatch)

    assert len(rows_of(path)) == 3


def test_a_file_that_cannot_be_written_in_the_end_does_not_keep_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_whole", full)
    result = bench_until(lambda: None, tmp_path / "rows.json", monkeypatch, code=1)

    assert "s16" in result.stdout
    assert result.stderr.endswith("cannot be written: No space left on device\n")


def test_a_file_stays_as_it_was_where_its_writing_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"whole")
    write = Path.write_bytes

    def half(self: Path, data: bytes) -> None:
        write(self, data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        report.write_whole(path, b"other, and longer")

    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="links and modes")
def test_a_file_that_is_written_anew_keeps_its_mode_and_its_place_behind_a_link(
    tmp_path: Path,
) -> None:
    path, link = tmp_path / "rows.json", tmp_path / "latest.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    report.write_whole(link, b"new")

    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def with_closed_pipe(lines: int, *arguments: str) -> tuple[int, str]:
    """Return exit code and stderr of a command whose stdout is closed after `lines` lines."""
    with subprocess.Popen(
        [sys.executable, "-m", "cupy_flash", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    return process.returncode, stderr


@pytest.mark.slow
@needs_pipes
def test_a_closed_pipe_costs_the_table_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    line = ("bench", "--seqlen-q", "16,24", *QUICK[:2], "--output", str(path))
    code, stderr = with_closed_pipe(1, *line)

    assert code == 141
    assert "Traceback" not in stderr
    assert len(rows_of(path)) == 4


@pytest.mark.slow
@needs_pipes
@pytest.mark.parametrize(
    "arguments", ["--help", "bench -h", "info", "tables list --shipped", "compile --list --arch 90"]
)
def test_a_reader_that_went_away_is_no_failure(arguments: str) -> None:
    assert with_closed_pipe(0, *arguments.split()) == (141, "")


@needs_pipes
def test_an_interrupt_keeps_its_code_where_the_readers_went_away_with_it() -> None:
    code = (
        "import os, sys\n"
        "from cupy_flash.cli import main as command, info\n"
        "def interrupted():\n"
        "    for stream in (sys.stdout, sys.stderr):\n"
        "        read, write = os.pipe()\n"
        "        os.close(read)\n"
        "        os.dup2(write, stream.fileno())\n"
        "    raise KeyboardInterrupt\n"
        "info.collect = interrupted\n"
        "command.main(['info'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)

    assert result.returncode == 130


# ---- Other commands


SWEEP = ("--backend", "cpu", "--seqlen-q", "113,799", "--heads", "1", "--head-dim", "8")


def tune_until(step: int, path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """Run `tune` with a fake timer that is interrupted in call number `step`, counted from 0."""
    from cupy_flash.cli.tune import sweep

    calls = iter(range(10**6))

    class Timer:
        pause = 0.0

        def interleaved(self, timed: Any, warmup: int, repeats: Any) -> list[list[float]]:
            if next(calls) == step:
                raise KeyboardInterrupt
            return [[1.0] * count for count in repeats]

    monkeypatch.setattr(sweep, "HostTimer", Timer)
    return commands.run("tune", *options, "--output", path, code=130)


def test_an_interrupted_sweep_keeps_the_tiles_that_were_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    result = tune_until(1, path, monkeypatch, *SWEEP[:3], "799", *SWEEP[4:])
    rounds = [row["rounds"] for row in rows_of(path)]

    assert rounds.count(1) == 16
    assert "(default)" in result.stdout


def test_of_several_sweeps_those_that_were_done_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    options = (*SWEEP, "--max-tiles", "3")
    # The first sweep makes three timer calls, one for each round; the next is the second sweep's.
    result = tune_until(3, path, monkeypatch, *options)
    (row,) = rows_of(path)

    assert row["problem_class"].split()[4] == "q64"
    assert "cpu fp32 d8 full s64" in result.stdout
    assert "1 of 2 are done; the same command resumes there." in result.stderr


def small_plans(device: Device) -> list[Plan]:
    """Return plans of kernels that compile fast."""
    sizes = {"batch": 1, "seqlen_q": 113, "seqlen_k": 203, "heads_q": 2, "heads_kv": 2}
    problems = (
        make_contiguous_problem(dtype=dtype, **sizes, head_dim=16, head_dim_v=16)
        for dtype in ("float16", "float32")
    )
    return [make_plan(problem, device, family="naive") for problem in problems]


@pytest.mark.slow
@needs_compiler
def test_an_interrupted_compilation_shows_the_kernels_that_were_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy_flash.cli.build import compile as compile_module

    build = compile_module.build

    def interrupted(*arguments: Any, **options: Any) -> Any:
        yield next(iter(build(*arguments, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_module, "build", interrupted)
    monkeypatch.setattr(kernel_sets, "default_plans", small_plans)
    monkeypatch.setattr(kernel_sets, "other_units", lambda **_: [])
    result = commands.run("compile", "--arch", "90", "--output", tmp_path, code=130)

    assert result.stdout.startswith("1 kernels, sm_90\n")
    assert f"1 cubins in {tmp_path}" in result.stdout
    assert len(list(tmp_path.glob("*.cubin"))) == 1


@needs_compiler
def test_what_ends_a_command_ends_its_compilers_too() -> None:
    (job,) = map(Job.of, small_plans(device_for_arch("sm_90"))[:1])
    builder = Builder(1)
    building = builder.submit(job)
    builder.__exit__(KeyboardInterrupt)

    # The compiler's process needs longer to start than `__exit__` to stop it.
    assert building.cancelled() or isinstance(building.exception(), BrokenProcessPool)


@needs_compiler
def test_a_compiler_that_was_killed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Builder.submit

    def killed(self: Builder, job: Job, *, load: bool = False) -> Any:
        found = submit(self, job, load=load)
        for process in (self._pool._processes or {}).values():
            process.kill()
        return found

    monkeypatch.setattr(Builder, "submit", killed)
    monkeypatch.setattr(kernel_sets, "default_plans", small_plans)
    result = commands.run("compile", "--arch", "90", "--workers", "1", code=1)
    _, *told = result.stderr.splitlines()

    assert len(told) == 1
    assert "a compiler process was ended" in told[0]
