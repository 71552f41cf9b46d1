"""Compilation of units: what is compiled, what the compiler reports, where kernels are cached."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil

import pytest
from support.compilers import needs_compiler
from support.problems import dense_problem

from cupy_flash.calls.check.check_mod import unit_of
from cupy_flash.calls.gpu.block_masks import mask_text
from cupy_flash.errors import CompileError
from cupy_flash.families import FAMILIES, FORWARD, contract
from cupy_flash.gpu import compiler
from cupy_flash.gpu.block_masks import block_mask_unit
from cupy_flash.gpu.compiler import (
    compile_cubin,
    find_prebuilt,
    known_architectures,
    prebuilt_name,
    unit_digest,
    why_no_compiler,
)
from cupy_flash.mods.codegen.arguments import arguments_dtype
from cupy_flash.mods.modification import MaskMod
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import Tensor, Tensors
from cupy_flash.problem.device import Resources, device_for_arch

h100 = device_for_arch("sm_90")
CASE = dense_problem("float32", 1, 8, 8, 1, 1, 8, 8)
UNIT = make_plan(CASE, h100, family="naive").unit
OLD_NVRTC = "NVRTC 11.8 is too old; 12.0 or newer is needed"


@pytest.mark.parametrize("family", FORWARD.values(), ids=FORWARD.keys())
def test_a_unit_includes_one_kernel_file_and_names_one_config(family):
    tile = family.default_tile(CASE, h100)
    unit = family.unit(CASE, tile, family.schedule(CASE, h100, tile))
    assert f'#include "{family.source}"' in unit.text
    assert unit.text.count("struct Config {") == 1
    assert family.digest() in unit.text.splitlines()[0]
    assert unit.title.startswith(f"{family.name} float32 head_dim 8 tile ")
    for part in ('extern "C" __global__ void ', "__launch_bounds__("):
        assert unit.text.count(part) == len(unit.entries)
    for entry in unit.entries:
        assert re.search(rf"^{entry}\(.*const __grid_constant__ Params params\)", unit.text, re.M)


@pytest.mark.parametrize(
    "changes",
    [
        *({"dtype": "float16"}, {"causal": True}, {"head_dim": 16}, {"head_dim_v": 16}),
        *({"softmax_scale": -1.0}, {"tensors": CASE.aligned(4).tensors}),
        {"tensors": CASE.aligned(16, 4).tensors},
    ],
)
def test_what_the_kernel_is_specialized_for_changes_the_unit(changes):
    plan = make_plan(dataclasses.replace(CASE, **changes), h100, family="naive")
    assert plan.unit.text != UNIT.text


@pytest.mark.parametrize(
    "changes",
    [
        *({"seqlen_q": 9}, {"seqlen_k": 9}, {"batch": 2}, {"heads_q": 4}, {"softmax_scale": 0.1}),
        {"tensors": Tensors(**{**CASE.tensors, "q": Tensor("float32", (100, 50, 25), 16)})},
    ],
)
def test_what_is_an_argument_leaves_the_unit_as_it_is(changes):
    plan = make_plan(dataclasses.replace(CASE, **changes), h100, family="naive")
    assert plan.unit == UNIT


@needs_compiler
def test_a_struct_that_is_laid_out_otherwise_than_the_dtype_does_not_compile():
    text = UNIT.text.replace("sizeof(Params) == ", "sizeof(Params) == 8 + ")
    with pytest.raises(CompileError, match=r"static assertion|static_assert"):
        compile_cubin(dataclasses.replace(UNIT, text=text), h100)


@needs_compiler
def test_a_compile_error_shows_what_the_compilers_log_and_the_numbered_unit():
    broken = dataclasses.replace(UNIT, text=UNIT.text + "this is no C++\n")
    with pytest.raises(CompileError) as caught:
        compile_cubin(broken, h100)
    message = str(caught.value)
    assert message.startswith(f"{UNIT.title} does not compile for sm_90.\nCompiler log:\n")
    assert "error" in message
    for number, line in enumerate(broken.text.splitlines(), 1):
        assert f"{number:4} {line}" in message.splitlines()


@needs_compiler
def test_an_architecture_that_the_compiler_does_not_know_is_told_those_it_does(monkeypatch):
    from cupy.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: (70, 75, 80))
    assert known_architectures() == (75, 80)
    with pytest.raises(CompileError, match="for sm_90: this NVRTC supports sm_75, sm_80 only"):
        compile_cubin(UNIT, h100)


@needs_compiler
def test_an_nvrtc_that_is_too_old_is_named_with_the_one_that_is_needed(monkeypatch):
    from cupy.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "getVersion", lambda: (11, 8))
    assert why_no_compiler() == OLD_NVRTC
    assert known_architectures() == ()
    with pytest.raises(CompileError, match=OLD_NVRTC):
        compile_cubin(UNIT, h100)


def test_an_nvrtc_that_cannot_be_loaded_is_told_with_the_reason(monkeypatch):
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    reason = "libnvrtc.so.13: cannot open shared object file"

    def missing():
        raise RuntimeError(reason)

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    assert why_no_compiler() == f"NVRTC cannot be loaded: {reason}"


def test_the_compilers_report_is_read_per_kernel():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention' for 'sm_90'
ptxas info    : Function properties for attention
    48 bytes stack frame, 96 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size
ptxas info    : Compiling entry function 'combine' for 'sm_90'
ptxas info    : Function properties for combine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 4224 bytes smem
"""
    assert compiler._parse_resources(log) == {
        "attention": Resources(registers=255, spill_bytes=96, static_shared_memory=0),
        "combine": Resources(registers=40, spill_bytes=0, static_shared_memory=4224),
    }


def test_a_units_digest_depends_on_its_tokens_and_the_architecture_only():
    other = dataclasses.replace(UNIT, text=UNIT.text + ";\n")
    renamed = dataclasses.replace(UNIT, title="another", text=f"// Another.\n\n{UNIT.text}")
    a100 = device_for_arch("sm_80")
    bigger = dataclasses.replace(h100, name="H100 PCIe", sm_count=114)
    assert unit_digest(UNIT, h100) == unit_digest(renamed, bigger)
    assert len({unit_digest(UNIT, h100), unit_digest(other, h100), unit_digest(UNIT, a100)}) == 3


@pytest.mark.parametrize("header", ["score/capture.cuh", "score/functions.cuh"])
def test_texts_of_units_tell_of_the_headers_that_modifications_stand_behind(
    header, tmp_path, monkeypatch
):
    mod = MaskMod(lambda i, j: i >= j)

    def texts():
        contract.source_digest.cache_clear()
        block_map = block_mask_unit(mask_text(mod, "float32"), arguments_dtype(mod.specs, "float"))
        families = [family for kind in FAMILIES.values() for family in kind.values()]
        digests = (f"{family.name} {family.digest()}" for family in families)
        return [unit_of(mod).text, block_map.text, *digests]

    before = texts()
    shutil.copytree(contract.KERNEL_DIR, tmp_path / "kernels")
    with (tmp_path / "kernels" / header).open("a", encoding="utf-8") as file:
        file.write(";\n")
    with monkeypatch.context() as patch:
        patch.setattr(contract, "KERNEL_DIR", tmp_path / "kernels")
        after = texts()
    contract.source_digest.cache_clear()
    assert not {*before} & {*after}


def test_a_prebuilt_kernel_is_found_by_its_digest_only(monkeypatch, tmp_path):
    assert find_prebuilt(UNIT, h100) is None
    monkeypatch.setenv(compiler.CUBINS_VARIABLE, str(tmp_path))
    assert find_prebuilt(UNIT, h100) is None
    path = tmp_path / prebuilt_name(UNIT, h100)
    path.write_bytes(b"\x7fELF")
    assert find_prebuilt(UNIT, h100) == path
    assert find_prebuilt(dataclasses.replace(UNIT, text=UNIT.text + ";\n"), h100) is None
    assert find_prebuilt(UNIT, device_for_arch("sm_80")) is None


class RawModule:
    """Fake of `cupy.RawModule`, which needs a GPU in order to compile."""

    failure: Exception | None = None
    made: list[RawModule]

    def __init__(self, **arguments):
        self.arguments = arguments
        self.in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY")
        self.made.append(self)

    def compile(self):
        if self.failure is not None and self.in_memory is None:
            raise self.failure


@pytest.fixture
def raw_module(monkeypatch):
    cupy = pytest.importorskip("cupy")
    if reason := why_no_compiler():
        pytest.skip(reason)
    # The variable is set first, so that monkeypatch undoes what a test sets.
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY")
    monkeypatch.setattr(RawModule, "made", [], raising=False)
    monkeypatch.setattr(cupy, "RawModule", RawModule)
    return RawModule


def test_a_cache_that_cannot_be_written_is_warned_of_once_and_done_without(
    raw_module, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(raw_module, "failure", PermissionError(13, "Permission denied"))
    with caplog.at_level(logging.WARNING, "cupy_flash"):
        module, _ = compiler._load_module(UNIT, h100)
        compiler._load_module(UNIT, h100)
    # After the first failure, the second kernel is compiled in memory only.
    first, second, third = raw_module.made
    assert module is second
    assert (first.in_memory, second.in_memory, third.in_memory) == (None, "1", "1")
    assert first.arguments == second.arguments == third.arguments
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{tmp_path} cannot be written")


@pytest.fixture
def old_nvrtc(monkeypatch):
    from cupy.cuda import nvrtc

    monkeypatch.setattr(nvrtc, "getVersion", lambda: (11, 8))


@pytest.mark.usefixtures("raw_module", "old_nvrtc")
def test_a_prebuilt_kernel_is_loaded_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.CUBINS_VARIABLE, str(tmp_path))
    path = tmp_path / prebuilt_name(UNIT, h100)
    path.write_bytes(b"\x7fELF")
    module, origin = compiler._load_module(UNIT, h100)
    assert module.arguments == {"path": str(path)}
    assert origin == f"prebuilt in {tmp_path}"


@pytest.mark.usefixtures("raw_module", "old_nvrtc")
def test_without_a_usable_compiler_loading_says_so():
    with pytest.raises(CompileError, match=f"{UNIT.title} for sm_90: {OLD_NVRTC}"):
        compiler._load_module(UNIT, h100)


def test_loading_says_what_is_compiled_and_where_it_is_cached(
    raw_module, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, "cupy_flash"):
        compiler._load_module(UNIT, h100)
    assert f"{UNIT.title} for sm_90: compiling unless cached in {tmp_path}" in caplog.text
