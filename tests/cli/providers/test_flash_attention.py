"""FlashAttention-2, -3 and -4, with a fake torch and fakes of their packages."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.cli import commands, fake_flash_attention
from support.cli.fake_flash_attention import FakeTorch
from support.fake_torch import passes_check

from cupy_flash.cli.bench.table import print_cells, record_row
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.measure.gradient_check import check_of
from cupy_flash.cli.measure.runner import Cell, Settings
from cupy_flash.cli.providers import flash_attention, torch_providers
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import environment
from cupy_flash.gpu.environment import current_device

VERSIONS = ("flash-attn", "flash-attn-3", "flash-attn-4")
NAMES = ("flash-attn-4", "flash-attn-4-deterministic")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Fake torch, with fakes of the packages of FlashAttention."""
    return fake_flash_attention.install(monkeypatch)


def case(mods: str = "", dtype: str = "float16", **more: Any) -> Case:
    sizes: dict[str, Any] = {"seqlen_q": 41, "seqlen_k": 67, "heads_q": 4, "heads_kv": 2}
    sizes |= {"head_dim": 16, "head_dim_v": 16} | more
    return Case(dtype, 2, mods=CaseMods.parse(mods), **sizes)


def varlen(mods: str = "", **more: Any) -> Case:
    return case(mods, kind="varlen", seqlen_q=67, lengths=(67, 20), **more)


def cached(mods: str = "", **more: Any) -> Case:
    return case(mods, kind="cache", **{"seqlen_q": 1} | more)


def inputs_of(made: Case) -> Inputs:
    return random_inputs(made, 3, on_gpu=True)


def passes(inputs: Inputs, prepared: Any) -> bool:
    return passes_check(check_of(inputs, 0, on_gpu=False), prepared)


def is_right(name: str, made: Case) -> bool:
    """Return whether a provider accepts a case, and its result passes the check."""
    inputs = inputs_of(made)
    assert provider(name).why_not(made) is None
    return passes(inputs, provider(name).prepare(inputs))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize(
    ("mods", "more"),
    [
        ("", {"causal": True, "softmax_scale": 0.3}),
        ("window 9:4, softcap 2.5", {"dtype": "bfloat16"}),
    ],
)
def test_dense_batches_are_those_of_the_case(
    torch: FakeTorch, name: str, direction: str, layout: str, mods: str, more: dict[str, Any]
) -> None:
    assert is_right(name, case(mods, layout=layout, direction=direction, **more))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("name", "mods"), [("flash-attn", "alibi"), ("flash-attn-4", "sinks")])
def test_each_has_modifications_that_the_others_lack(
    torch: FakeTorch, name: str, mods: str, direction: str
) -> None:
    made = case(f"window :6, {mods}", direction=direction)

    assert is_right(name, made)
    for other in set(VERSIONS) - {name}:
        assert f"flash_attn_func has no {mods}" in str(provider(other).why_not(made))


@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4"])
def test_values_may_be_wider_than_keys_except_in_the_second(torch: FakeTorch, name: str) -> None:
    made = case(head_dim_v=24)

    assert is_right(name, made)
    assert "values as wide as the keys" in str(provider("flash-attn").why_not(made))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", VERSIONS)
def test_packed_sequences_have_no_batch_axis(torch: FakeTorch, name: str, direction: str) -> None:
    assert is_right(name, varlen("window 9:0", causal=True, direction=direction))
    options = torch.calls[0]
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (67, 67)
    assert options["cu_seqlens_q"].tolist() == options["cu_seqlens_k"].tolist() == [0, 67, 87]


@pytest.mark.parametrize("name", VERSIONS[:2])
@pytest.mark.parametrize(
    "made",
    [
        cached(lengths=(67, 20), asked_splits=3),
        cached("window 30:0, softcap 3", lengths=(67, 20)),
        cached(seqlen_q=5, causal=True, append=True),
        cached(seqlen_k=700, page_size=256, lengths=(700, 300)),
    ],
    ids=["lengths", "window", "append", "pages"],
)
def test_a_cache_is_the_one_of_the_case(torch: FakeTorch, name: str, made: Case) -> None:
    assert is_right(name, made)
    assert torch.calls[0]["num_splits"] == made.asked_splits


def test_pages_of_any_size_need_the_third(torch: FakeTorch) -> None:
    made = cached(page_size=16, lengths=(67, 20))

    assert is_right("flash-attn-3", made)
    assert "pages of a multiple of 256 rows" in str(provider("flash-attn").why_not(made))


def test_dropout_is_an_argument(torch: FakeTorch) -> None:
    made = case("dropout 0.25")

    assert provider("flash-attn").why_not(made) is None
    provider("flash-attn").prepare(inputs_of(made)).call()
    assert torch.calls[0]["dropout_p"] == 0.25
    assert "has no dropout 0.25" in str(provider("flash-attn").why_not(cached("dropout 0.25")))


def test_tensors_share_the_memory_of_the_arrays(torch: FakeTorch) -> None:
    inputs = inputs_of(case(direction="backward", layout="bhsd", head_dim_v=24))
    tensors = provider("flash-attn-4").prepare(inputs).call.args[1]

    assert [tensor.shape for tensor in tensors] == [(2, 41, 4, 16), (2, 67, 2, 16), (2, 67, 2, 24)]
    assert all(map(np.shares_memory, tensors, inputs.gpu))


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_arguments_are_those_of_a_user(
    torch: FakeTorch, name: str, deterministic: bool
) -> None:
    made = case("window 9:, softcap 2.5", direction="backward", softmax_scale=0.3)
    prepared = provider(name + "-deterministic" * deterministic).prepare(inputs_of(made))
    prepared.call()
    prepared.call()
    (options,) = torch.calls

    assert {name: value for name, value in options.items() if value is not None} == {
        "causal": False,
        "softmax_scale": 0.3,
        "deterministic": deterministic,
        "window_size": (9, None),
        "softcap": 2.5,
    }


@pytest.mark.parametrize(
    ("name", "made", "says"),
    [
        ("flash-attn", case(dtype="float32"), "timed in float16 and bfloat16 only"),
        ("flash-attn-3", case(cache_dtype="float8_e4m3fn"), "timed in float16 and bfloat16 only"),
        ("flash-attn-4", cached(), "dense batches and packed sequences only"),
        ("flash-attn-4", case("alibi, softcap 2"), "flash_attn_func has no alibi"),
        ("flash-attn-3", varlen("bias heads, sinks"), "flash_attn_varlen_func has no sinks, bias"),
        ("flash-attn", case(causal=True, q_offset=0), "FlashAttention-2 are aligned bottom-right"),
        ("flash-attn-3", case("window 9:9", q_offset=30), "aligned bottom-right"),
        ("flash-attn", cached(append=True, rotary=True), "rotary tables of 16 bits"),
        ("flash-attn-3", cached(values_in_keys=True), "values that are not part of the keys"),
    ],
)
def test_what_it_does_not_time_has_a_reason(
    torch: FakeTorch, name: str, made: Case, says: str
) -> None:
    assert says in str(provider(name).why_not(made))


@pytest.mark.parametrize("name", VERSIONS)
def test_the_deterministic_one_is_for_gradients_only(torch: FakeTorch, name: str) -> None:
    deterministic = provider(f"{name}-deterministic")

    assert f"only gradients differ from those of {name}" in str(deterministic.why_not(case()))
    assert deterministic.why_not(case(direction="backward")) is None


def test_sums_of_gradients_are_float32(torch: FakeTorch) -> None:
    """Gradients of keys and values are summed only if several query heads share them."""
    fa4, grouped = provider("flash-attn-4"), case(direction="backward", head_dim_v=24)
    alone = dataclasses.replace(grouped, heads_kv=4)

    assert fa4.scratch_bytes(case()) == 0
    assert fa4.scratch_bytes(alone) == 4 * 2 * 41 * 4 * 16
    assert fa4.scratch_bytes(grouped) == 4 * 2 * (41 * 4 * 16 + 67 * 2 * (16 + 24))


def test_the_second_stores_gradients_of_keys_for_each_query_head(torch: FakeTorch) -> None:
    fa2, grouped = provider("flash-attn"), case(direction="backward")
    alone = dataclasses.replace(grouped, heads_kv=4)

    assert fa2.scratch_bytes(case()) == 0
    assert fa2.scratch_bytes(alone) == 4 * 2 * 41 * 4 * 16
    assert fa2.scratch_bytes(grouped) == 2 * (4 * 41 * 4 * 16 + 2 * 67 * 4 * (16 + 16))


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("absent", ["torch", "its package"])
def test_without_its_package_or_torch_it_is_missing(
    torch: FakeTorch, name: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent == "torch":
        monkeypatch.setattr(torch_providers, "why_no_torch", lambda: "torch is not installed")
        says = "torch is not installed"
    else:
        find = torch_providers.why_no_package.__wrapped__
        monkeypatch.setattr(flash_attention, "why_no_package", find)
        # A module that is None in `sys.modules` cannot be imported.
        monkeypatch.setitem(sys.modules, provider(name).module, None)  # type: ignore[attr-defined]
        says = f"{name} is not installed"

    assert provider(name).missing() == says
    assert provider(name).why_not(case(direction="backward")) == says


def test_a_package_that_lacks_another_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("import no_such_library\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    find = torch_providers.why_no_package.__wrapped__

    assert find("flash_attn_interface", "flash-attn-3") == (
        "flash_attn_interface cannot be imported: No module named 'no_such_library'"
    )
    assert find("no_such_package.cute", "flash-attn-4") == "flash-attn-4 is not installed"
    assert find("json.decoder", "json") is None


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("flash_attn.flash_attn_interface", "flash-attn"),
        ("flash_attn_interface", "flash-attn-3"),
        ("flashinfer", "flashinfer-python"),
    ],
)
def test_a_record_names_the_versions_of_packages_that_were_used(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2 of {name}")
    assert package not in environment.versions()
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    assert environment.versions()[package] == f"1.2 of {package}"


def test_a_record_names_its_version_and_its_compilers_if_it_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"flash-attn-4": "4.0.0b36"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "flash-attn-4" not in environment.versions()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", ModuleType("flash_attn.cute"))
    assert environment.versions().items() >= installed.items()
    assert "nvidia-cutlass-dsl" not in environment.versions()
    installed["nvidia-cutlass-dsl"] = "4.8.1"
    assert environment.versions().items() >= installed.items()


def test_a_table_says_that_autograd_is_timed(
    torch: FakeTorch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell(provider("flash-attn-4"), case(direction="backward"), reason="not timed")
    row = record_row(cell, None, "a GPU", {})
    settings = Settings(3, 20, 20.0, seed=0, check=True, host_time=False)
    print_cells([[cell]], [[row]], [], "a GPU", ["flash-attn-4"], settings)

    assert "torch's tensors are autograd.grad" in " ".join(capsys.readouterr().out.split())


@pytest.mark.gpu
# Its packages warn of their own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        ("--causal", "yes", "--kv-heads", "1", "--layout", "bshd,bhsd"),
        ("--window", "40:0", "--sinks", "--softcap", "20"),
        ("--lengths", "113,7,203"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("direction", [(), ("--backward",)], ids=["forward", "backward"])
def test_on_a_gpu_it_is_timed_in_graphs_and_checked(
    tmp_path: Path, direction: tuple[str, ...], options: tuple[str, ...]
) -> None:
    pytest.importorskip("flash_attn.cute")
    if current_device().arch < 90:
        pytest.skip("FlashAttention-4 has no gradients on this GPU")
    shape = () if "--lengths" in options else ("--batch", "2", "--seqlen-q", "203")
    names = NAMES if direction else NAMES[:1]
    data = commands.record_of(
        *(tmp_path / "rows.json", "bench", *direction, *shape, "--heads", "2"),
        *("--head-dim", "64", "--repeats", "3", "--provider", ",".join(names), *options),
    )

    assert {row["check"] for row in data["rows"]} == {"passed"}
    assert {row["timed_by"] for row in data["rows"]} == {"graph"}
    assert {"flash-attn-4", "nvidia-cutlass-dsl"} <= set(data["metadata"]["versions"])
