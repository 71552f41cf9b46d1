"""Memory that a call takes: measured on the host, and with a fake CuPy and a fake torch."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cli import commands

from cupy_flash.cli.bench.table import print_memory
from cupy_flash.cli.cases import presets
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.measure.memory import cupy_peak_bytes, host_peak_bytes, torch_peak_bytes
from cupy_flash.cli.measure.runner import Cell
from cupy_flash.cli.measure.timing import Timed
from cupy_flash.cli.providers.providers import provider

MIB = 1 << 20


def test_the_output_has_a_row_for_each_query_of_each_head() -> None:
    case = Case("float16", 2, 113, 203, 6, 3, 24, 40)

    assert case.result_bytes == 2 * 113 * 6 * 40 * 2


def test_on_the_host_the_peak_is_what_a_call_holds_at_once_with_its_output() -> None:
    def call() -> np.ndarray:
        scratch = np.empty(5 * MIB, np.uint8)
        del scratch
        scratch = np.empty(3 * MIB, np.uint8)
        out = np.empty(4 * MIB, np.uint8)
        del scratch
        return out

    assert host_peak_bytes(Timed(call)) == pytest.approx(7 * MIB, rel=1e-3)


def test_what_was_there_before_the_call_is_not_counted() -> None:
    before = np.empty(8 * MIB, np.uint8)

    assert host_peak_bytes(Timed(lambda: before[::2])) < MIB
    assert not tracemalloc.is_tracing()


def test_a_failed_call_leaves_the_tracing_of_memory_as_it_was() -> None:
    def call() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        host_peak_bytes(Timed(call))

    assert not tracemalloc.is_tracing()


class FakePool:
    """Fake CuPy memory pool that calls the hooks with given addresses and sizes of blocks."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []
        pool = self

        class MemoryHook:
            def __enter__(self) -> None:
                pool.hooks.append(self)

            def __exit__(self, *_: object) -> None:
                pool.hooks.remove(self)

        self.cuda = SimpleNamespace(MemoryHook=MemoryHook)

    def malloc(self, address: int, size: int) -> None:
        for hook in self.hooks:
            block = {"device_id": 0, "size": size - 1, "mem_size": size, "mem_ptr": address}
            hook.malloc_postprocess(**block, pmem_id=address)

    def free(self, address: int, size: int) -> None:
        for hook in self.hooks:
            hook.free_postprocess(device_id=0, mem_size=size, mem_ptr=address, pmem_id=address)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    """Memory pool of a fake CuPy."""
    fake = FakePool()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_on_cupy_arrays_the_peak_is_of_the_blocks_that_are_out_at_once(pool: FakePool) -> None:
    def call() -> None:
        pool.malloc(0x1000, 1024)
        pool.malloc(0x2000, 4096)
        pool.free(0x1000, 1024)
        # The pool hands out the freed block again.
        pool.malloc(0x1000, 512)

    assert cupy_peak_bytes(Timed(call)) == 1024 + 4096
    assert not pool.hooks


def test_a_block_of_before_the_call_does_not_count_when_it_is_freed_in_it(pool: FakePool) -> None:
    def call() -> None:
        pool.free(0x9000, 1 << 20)
        pool.malloc(0x1000, 2048)

    assert cupy_peak_bytes(Timed(call)) == 2048


def test_the_hooks_of_the_installed_cupy_are_called_as_ours_expect() -> None:
    cupy = pytest.importorskip("cupy")
    ours = ("malloc_postprocess", "free_postprocess")

    assert all(hasattr(cupy.cuda.MemoryHook, name) for name in ours)


def test_on_torch_tensors_the_peak_is_what_its_allocator_gave_out_since_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cuda:
        allocated, peak = 1000, 99_999

        def reset_peak_memory_stats(self) -> None:
            self.peak = self.allocated

        def memory_allocated(self) -> int:
            return self.allocated

        def max_memory_allocated(self) -> int:
            return self.peak

    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def call() -> None:
        cuda.peak = cuda.allocated + 7000
        cuda.allocated += 500

    assert torch_peak_bytes(Timed(call)) == 7000


def bench(*arguments: str, code: int = 0) -> str:
    return commands.run("bench", *arguments, code=code).stdout


SMALL = (
    *("--seqlen-q", "113,239", "--batch", "1", "--heads", "2", "--head-dim", "24"),
    *("--dtype", "float32", "--provider", "cupy_flash-cpu,numpy-naive", "--repeats", "3"),
)


def test_rows_carry_the_workspace_of_ours_and_everybodys_peak(tmp_path: Path) -> None:
    rows = commands.record_of(tmp_path / "rows.json", "bench", *SMALL)["rows"]

    for ours, naive in (rows[:2], rows[2:]):
        out, scores = (n * 2 * ours["seqlen_q"] * 4 for n in (24, ours["seqlen_k"]))
        assert ours["workspace_bytes"] > 0
        assert ours["peak_bytes"] >= out
        assert naive["workspace_bytes"] is None
        # The naive formula holds at least one score matrix.
        assert naive["peak_bytes"] >= out + scores


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_peak_has_a_column_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plain, with_memory = bench(*SMALL), bench(*SMALL, "--memory")

    assert "MiB" not in plain
    assert any(line.rstrip().endswith("MiB") for line in with_memory.splitlines())
    assert "MiB: peak memory of a call, in addition to its inputs." in with_memory
    assert max(map(len, with_memory.splitlines())) <= width


def test_the_memory_preset_prints_its_table_even_where_nothing_was_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short = dataclasses.replace(presets.preset("memory"), cases=presets.preset("memory").cases[:2])
    monkeypatch.setattr(presets, "preset", lambda name, dtypes: short)
    case = ("--preset", "memory", "--provider", "cupy_flash-cpu,numpy-naive")
    text = bench(*case, "--skip-check", "--cell-seconds", "0.000001", code=1)
    table = text.split("Peak memory of a call in MiB")[1]
    rows = [line.split() for line in table.splitlines() if line.startswith(" s")]

    assert rows == [["s1024", "6.00", "-", "-"], ["s2048", "12.0", "-", "-"]]


def memory_lines(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[str]:
    """Return the lines of the memory preset's table, if score matrices fit up to 8192 keys."""
    monkeypatch.setenv("COLUMNS", str(width))
    preset = presets.preset("memory")
    table = []
    for case in preset.cases:
        cells = [Cell(provider(name), case) for name in preset.providers]
        fused, *standard = cells
        fused.peak_bytes = case.result_bytes
        for cell in standard:
            if case.seqlen_q <= 8192:
                cell.peak_bytes = 12 * case.scores
            else:
                cell.needs_bytes, cell.reason = 14 * case.scores, "needs 224.0 GiB of memory"
        table.append(cells)
    print_memory(table)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_memory_table_sets_standard_beside_fused_by_sequence_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    lines = memory_lines(width, monkeypatch, capsys)
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(" s")}

    assert max(map(len, lines)) <= width
    assert rows["s1024"] == ["6.00", "2.00", "192.0", "192.0"]
    assert rows["s8192"] == ["48.0", "16.0", "12,288", "12,288"]
    assert "standard algorithm, whole score matrix: cupy-library, torch-math." in lines
    assert "fused: cupy_flash." in lines


def test_what_does_not_fit_memory_stands_in_brackets_with_its_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = memory_lines(80, monkeypatch, capsys)
    last = next(line for line in lines if line.startswith(" s32768"))

    assert last.split()[2:] == ["64.0", "(229,376)", "(229,376)"]
    assert "( ): estimated and not run, because it exceeds the free memory." in lines
