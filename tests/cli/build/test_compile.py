"""`cupy-flash compile` without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.cli import commands
from support.compilers import needs_compiler

from cupy_flash.cli.build import build as build_module
from cupy_flash.cli.build import compile as compile_module
from cupy_flash.cli.build import kernel_sets
from cupy_flash.cli.cases.cases import DIRECTIONS, Case
from cupy_flash.errors import CompileError
from cupy_flash.families import FAMILIES, FORWARD, TranslationUnit
from cupy_flash.gpu.compiler import CUBINS_VARIABLE, compile_cubin, find_prebuilt, prebuilt_name
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.device import ARCHITECTURES, Device, Resources, device_for_arch
from cupy_flash.problem.problem import Problem

SM_90 = device_for_arch("sm_90")


def compile_(*arguments: str, code: int = 0) -> Result:
    return commands.run("compile", *arguments, code=code)


def small_problem(dtype: str = "float32", direction: str = "forward") -> Problem:
    return Case(dtype, 2, 113, 203, 2, 2, 16, 16, False, direction=direction).problem()


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that restricts `compile` to the kernels of the plans that its argument makes."""
    monkeypatch.setattr(kernel_sets, "other_units", lambda **_: [])
    return lambda plans: monkeypatch.setattr(kernel_sets, "default_plans", plans)


def one_plan(device: Device) -> list[Plan]:
    """Return a plan of the kernel that compiles fastest."""
    return [make_plan(small_problem(), device, family="naive")]


def broken_plan(device: Device) -> list[Plan]:
    (plan,) = one_plan(device)
    unit = TranslationUnit("#error this is wrong\n", ("attention",), "a broken kernel")
    return [dataclasses.replace(plan, unit=unit)]


@pytest.mark.slow
@needs_compiler
def test_cubins_are_written_by_digest_and_found_where_the_variable_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Any
) -> None:
    only(one_plan)
    folder = tmp_path / "new" / "cubins"
    result = compile_("--arch", "sm_80", "--arch", "sm_90", "--output", str(folder))
    monkeypatch.setenv(CUBINS_VARIABLE, str(folder))

    assert f"2 cubins in {folder}" in result.stdout.replace("\n", "")
    for arch in ("sm_80", "sm_90"):
        device = device_for_arch(arch)
        (plan,) = one_plan(device)
        assert plan.unit is not None
        found = find_prebuilt(plan.unit, device)
        assert found == folder / prebuilt_name(plan.unit, device)
        assert found.read_bytes().startswith(b"\x7fELF")


@needs_compiler
def test_a_kernel_that_does_not_compile_shows_the_log_and_exits_with_1(only: Any) -> None:
    only(broken_plan)
    result = compile_("--arch", "sm_90", code=1)

    assert "this is wrong" in result.stderr
    assert "1 of 1 kernels do not compile" in result.stderr
    assert "FAILED" in result.stdout


@pytest.mark.slow
@needs_compiler
def test_the_report_has_registers_spills_and_shared_memory(only: Any) -> None:
    only(one_plan)
    result = compile_("--arch", "sm_90", "--workers", "1")

    assert all(name in result.stdout for name in ("regs", "spills", "KiB"))
    assert max(map(len, result.stdout.splitlines())) <= 80


class InThisProcess(Executor):
    """Executor that runs each call at once in this process."""

    _processes = None

    def __init__(self, count: int, **_: object) -> None:
        pass

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Resources]:
    """Resources that a fake GPU reports for the kernels loaded on it, by source text."""
    found: dict[str, Resources] = {}

    class KernelCache:
        def get(self, unit: TranslationUnit, shared_memory: dict[str, int]) -> None:
            if unit.text.startswith("#error"):
                raise CompileError("it does not compile\nCompiler log:\nthis is wrong")
            assert shared_memory.keys() == set(unit.entries)
            found[unit.text] = Resources(77, 0, 0)

    monkeypatch.setattr(compile_module, "gpu_unavailable", lambda: None)
    monkeypatch.setattr(compile_module, "current_device", lambda: SM_90)
    monkeypatch.setattr(build_module, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(build_module, "why_no_compiler", lambda: None)
    monkeypatch.setattr(build_module, "kernel_cache", KernelCache())
    monkeypatch.setattr(build_module, "loaded_resources", lambda unit: found[unit.text])
    return found


@pytest.mark.parametrize("refused", [None, "Permission denied"])
def test_on_a_gpu_kernels_go_into_cupys_cache_and_that_it_keeps_none_is_said(
    refused: str | None,
    loaded: dict[str, Resources],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only: Any,
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_module, "prepare_cupy_cache", lambda: refused)
    only(one_plan)
    result = compile_()
    text = result.stdout.replace("\n", "")
    (plan,) = one_plan(SM_90)
    assert plan.unit is not None

    assert list(loaded) == [plan.unit.text]
    assert str(loaded[plan.unit.text].registers) in result.stdout
    assert (f"Kept in {tmp_path}" in text) is (refused is None)
    assert (f"Not kept: {tmp_path} cannot be written ({refused})" in text) is (refused is not None)


def test_a_kernel_that_does_not_load_shows_the_log_and_the_others_are_kept(
    loaded: dict[str, Resources], only: Any
) -> None:
    def plans(device: Device) -> list[Plan]:
        return [*broken_plan(device), *one_plan(device)]

    only(plans)
    result = compile_(code=1)

    assert "this is wrong" in result.stderr
    assert "1 of 2 kernels do not compile" in result.stderr
    assert len(loaded) == 1


@needs_compiler
@pytest.mark.parametrize("option", ["--arch", "--output"])
def test_where_an_architecture_or_a_folder_is_given_nothing_is_loaded_on_the_gpu(
    option: str, loaded: dict[str, Resources], tmp_path: Path, only: Any
) -> None:
    def plans(device: Device) -> list[Plan]:
        (plan,) = one_plan(device)
        empty = TranslationUnit('extern "C" __global__ void attention() {}', ("attention",), "none")
        return [*broken_plan(device), dataclasses.replace(plan, unit=empty)]

    only(plans)
    result = compile_(option, "sm_90" if option == "--arch" else str(tmp_path), code=1)
    to = "; not kept without --output DIR" if option == "--arch" else f" into {tmp_path}"

    assert result.stderr.startswith(f"Compiling 2 kernels for sm_90{to}.\n")
    assert not loaded
    assert "this is wrong" in result.stderr
    assert "1 of 2 kernels do not compile" in result.stderr
    assert ("Not kept: --output DIR writes the cubins." in result.stdout) is (option == "--arch")
    assert len(list(tmp_path.iterdir())) == (option == "--output")


def test_without_a_compiler_the_message_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cupy_flash.cli.build.build.why_no_compiler", lambda: "NVRTC is not here")
    result = compile_("--arch", "sm_90", code=1)

    assert "NVRTC is not here; pip install 'cupy_flash[cuda13]'" in result.stderr


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    result = compile_("--arch", "sm_90", "--output", str(tmp_path / "file" / "cubins"), code=2)

    assert "cannot be written" in result.stderr


@pytest.mark.parametrize("more", [(), ("--all",), ("--list",), ("--output", "cubins")])
def test_without_a_gpu_it_asks_for_an_architecture(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "gpu_unavailable", lambda: "no driver")
    monkeypatch.chdir(tmp_path)
    said = "main compile: no GPU to compile for (no driver); name an architecture, for example"

    assert compile_(*more, code=2).stderr == f"{said} --arch sm_90\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_name_is_refused() -> None:
    assert "empty name" in compile_("--arch", "sm_90", "--output", "", code=2).output


def test_listing_names_the_kernels_and_builds_none() -> None:
    listing = compile_("--list", "--arch", "sm_90").stdout

    assert "head_dim 128 causal" in listing
    assert "spills" not in listing


def test_an_architecture_is_taken_once_however_it_is_spelled() -> None:
    once = compile_("--list", "--arch", "sm_90").stdout

    assert compile_("--list", "--arch", "90", "--arch", "sm_90", "--arch", "90a").stdout == once


def test_architectures_may_be_a_list() -> None:
    apart = compile_("--list", "--arch", "sm_80", "--arch", "sm_90").stdout

    assert compile_("--list", "--arch", "sm_80, 90").stdout == apart
    assert {line.split()[0] for line in apart.splitlines()} == {"sm_80", "sm_90"}


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--all",)])
def test_what_decodes_appends_and_merges_is_built_too(more: tuple[str, ...]) -> None:
    lines = compile_("--list", "--arch", "sm_90", *more).stdout.splitlines()

    for kernel in (
        "decode bfloat16 head_dim 128 cache tile",
        "decode float16 head_dim 64 page_size 16 tile",
        "hopper bfloat16 head_dim 128 causal packed tile",
        "append bfloat16 head_dim 128",
        "append float32 head_dim 64 page_size 16 rotary_dim 64 halves",
        "combine float16, 8 threads to a row",
    ):
        assert any(line.startswith(f"sm_90  {kernel}") for line in lines), kernel


@needs_compiler
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_appends_and_merges_compiles(everything: bool) -> None:
    units = kernel_sets.other_units(everything=everything)
    few = [unit for place, unit in enumerate(units) if place % 7 == 0]

    assert len({unit.text for unit in units}) == len(units)
    for unit in few:
        resources = compile_cubin(unit, SM_90).resources[unit.main_entry]
        assert resources.spill_bytes == 0, unit.title


@pytest.mark.slow
@needs_compiler
def test_into_a_pipe_a_kernel_stands_on_one_line(
    monkeypatch: pytest.MonkeyPatch, only: Any
) -> None:
    def long_title(device: Device) -> list[Plan]:
        problem = Case("bfloat16", 2, 113, 203, 2, 2, 128, 64, causal=True).problem()
        return [make_plan(problem, device, family="simt")]

    only(long_title)
    monkeypatch.delenv("COLUMNS", raising=False)
    (plan,) = long_title(SM_90)
    assert plan.unit is not None
    lines = compile_("--arch", "sm_90", "--workers", "1").stdout.splitlines()

    assert any(plan.unit.title.partition(" tile ")[0] in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_default_set_is_what_the_dispatcher_chooses_for_common_shapes(arch: int) -> None:
    device = device_for_arch(arch)
    plans = kernel_sets.default_plans(device)
    problems = [plan.problem for plan in plans]
    found = {(p.direction, p.dtype, p.head_dim, p.causal) for p in problems}

    dtypes = ("bfloat16", "float16", "float32")
    assert found == set(itertools.product(DIRECTIONS, dtypes, (64, 128), (False, True)))
    assert all(p.family == make_plan(p.problem, device).family for p in plans)


@pytest.mark.slow
def test_everything_covers_each_family_with_each_dtype_that_it_serves() -> None:
    plans = kernel_sets.all_plans(SM_90)
    texts = [plan.unit.text for plan in plans if plan.unit]
    served = {
        (problem.direction, name, dtype)
        for dtype in DTYPES
        for problem in (small_problem(dtype), small_problem(dtype, direction="backward"))
        for name, family in FAMILIES[problem.direction].items()
        if family.why_not(problem, SM_90) is None
    }

    assert len(texts) == len(set(texts)) == len(plans)
    found = {(plan.problem.direction, plan.family, plan.problem.dtype) for plan in plans}
    assert found == served
    assert {plan.problem.causal for plan in plans} == {False, True}
    assert {plan.schedule.split.kind == "fixed" for plan in plans} == {False, True}
    assert {plan.problem.softmax_scale > 0 for plan in plans} == {False, True}
    assert {2, 4, 16} <= {plan.problem.alignment for plan in plans}


@pytest.mark.slow
def test_everything_covers_each_family_that_serves_sequences_with_each_way_they_lie() -> None:
    found: dict[str, set[str]] = {}
    for plan in kernel_sets.all_plans(SM_90):
        if not (sequences := plan.problem.layout).is_dense:
            lie = "packed" if sequences.packed_k else "paged" if sequences.page_size else "cached"
            found.setdefault(plan.family, set()).add(lie)

    everything = {"packed", "paged", "cached"}
    others = dict.fromkeys(("decode", "mma", "simt"), everything)
    assert found == others | {"hopper": {"packed", "cached"}}


def test_everything_holds_the_tuned_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem()
    family = FORWARD["simt"]
    tile = list(family.tiles(problem, SM_90))[-1]
    name, fields = tuning.problem_class(problem), dataclasses.asdict(tile)
    entry = tuning.Entry("some GPU", 90, 132, "simt", family.digest(), name, fields, 1.0)
    stale = dataclasses.replace(entry, digest="0" * 16)
    other = dataclasses.replace(entry, tile={"Br": entry.tile["Br"]})
    monkeypatch.setattr(tuning, "entries", lambda: [entry, stale, other])

    assert [plan.tile for plan in kernel_sets.tuned_plans(SM_90)] == [tile]


@pytest.mark.slow
def test_everything_holds_the_default_tile_where_another_is_tuned_too() -> None:
    family = FORWARD["mma"]

    def of_bfloat16(plans: list[Plan]) -> list[Plan]:
        return [p for p in plans if (p.family, p.problem.dtype) == ("mma", "bfloat16")]

    untuned = of_bfloat16(kernel_sets.all_plans(SM_90))
    tile = dataclasses.asdict(next(family.tiles(small_problem(), SM_90)))
    for name in {tuning.problem_class(plan.problem) for plan in untuned}:
        tuning.save(tuning.Entry("another", 90, 132, "mma", family.digest(), name, tile, 1.0))
    tuned = {plan.unit.text for plan in of_bfloat16(kernel_sets.all_plans(SM_90)) if plan.unit}

    assert {plan.unit.text for plan in untuned if plan.unit} < tuned


def assert_in_class(text: str) -> Problem:
    """Return the problem that is made of the text of a class; fail unless it is in this class."""
    problem = kernel_sets.problem_of_class(text)
    assert problem is not None
    assert tuning.problem_class(problem) == text
    return problem


def test_a_problem_class_gives_a_problem_of_that_class() -> None:
    for dtype in DTYPES:
        assert_in_class(tuning.problem_class(small_problem(dtype)))
    assert kernel_sets.problem_of_class("spelled otherwise") is None


@pytest.mark.parametrize("kind", ["cache", "page1", "page64", "packed"])
def test_a_class_of_caches_or_packed_sequences_gives_a_problem_of_that_class(kind: str) -> None:
    lengths = "q256 k256" if kind == "packed" else "q1 k4096"
    assert_in_class(f"bfloat16 d64 dv128 causal {lengths} rows256 align16 {kind}")


def test_a_class_of_latents_gives_heads_over_one_of_the_cache() -> None:
    problem = assert_in_class("bfloat16 d576 dv512 full q1 k4096 rows256 align16 latent-cache")

    assert (problem.heads_q, problem.heads_kv) == (256, 1)


def test_a_class_that_no_case_is_in_gives_no_problem() -> None:
    packed = "bfloat16 d64 dv64 full q16 k4096 rows256 align16 packed"

    assert kernel_sets.problem_of_class(packed) is None


@pytest.mark.slow
def test_no_kernel_is_built_twice_and_everything_has_more_of_them() -> None:
    usual, everything = (
        [plan.unit.text for plan in choose(SM_90) if plan.unit]
        for choose in (kernel_sets.default_plans, kernel_sets.all_plans)
    )
    some, others = (kernel_sets.other_units(everything=every) for every in (False, True))

    assert len(set(usual)) == len(usual) < len(everything) == len(set(everything))
    assert {unit.text for unit in some} < {unit.text for unit in others}
