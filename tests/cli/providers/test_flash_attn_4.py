"""FlashAttention-4, with a fake torch and a fake `flash_attn.cute` that compute with NumPy."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cli import commands
from support.fake_torch import TorchOnHost, install_torch, passes_check

from cupy_flash import flash_attention_varlen
from cupy_flash.cli.bench.table import print_cells, record_row
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.measure.gradient_check import check_of
from cupy_flash.cli.measure.runner import Cell, Settings
from cupy_flash.cli.providers import flash_attn_4, torch_providers
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import environment
from cupy_flash.gpu.environment import current_device
from cupy_flash.reference.dense import attention_naive
from cupy_flash.reference.gradients import backward_naive
from cupy_flash.reference.packed_gradients import backward_varlen_naive

NAMES = ("flash-attn-4", "flash-attn-4-deterministic")


@dataclasses.dataclass
class Graph:
    """Output of a call that needs gradients, with the arguments that its graph holds."""

    tensors: tuple[Any, ...]
    options: dict[str, Any]


class FakeTorch(TorchOnHost):
    """Fake of the parts of torch that the provider uses, and of the functions of FlashAttention-4.

    Attributes
    ----------
    calls
        Keyword arguments of the calls of FlashAttention-4, in order.
    """

    bfloat16 = ml_dtypes.bfloat16

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, contextlib.nullcontext)
        self.calls: list[dict[str, Any]] = []
        self.no_grad = contextlib.nullcontext
        self.autograd = SimpleNamespace(grad=self.grad)
        self.cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=0))

    def sdpa(self, *_: Any) -> None:
        raise AssertionError("FlashAttention-4 does not call torch's attention")

    def flash_attn_func(self, *tensors: Any, **options: Any) -> tuple[Any, None]:
        return self._called(attention_naive, tensors, options), None

    def flash_attn_varlen_func(self, *tensors: Any, **options: Any) -> tuple[Any, None]:
        return self._called(flash_attention_varlen, tensors, options), None

    def _called(self, function: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.calls.append(options)
        if all(tensor.requires_grad for tensor in tensors):
            return Graph(tensors, options)
        return function(*map(np.asarray, tensors), **self._arguments(options))

    @staticmethod
    def _arguments(options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as this library takes them."""
        names = {"learnable_sink": "sinks"}
        arguments = {names.get(name, name): value for name, value in options.items()}
        del arguments["deterministic"]
        return {k: np.asarray(x) if isinstance(x, np.ndarray) else x for k, x in arguments.items()}

    def grad(
        self, out: Graph, inputs: tuple[Any, ...], dout: Any, *, retain_graph: bool
    ) -> tuple[Any, ...]:
        assert retain_graph
        assert inputs == out.tensors
        naive = backward_varlen_naive if "cu_seqlens_q" in out.options else backward_naive
        given = (np.asarray(x) for x in (dout, *inputs))
        return naive(*given, **self._arguments(out.options))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Fake torch, which has the functions of FlashAttention-4, too."""
    fake = install_torch(monkeypatch, FakeTorch(monkeypatch))
    monkeypatch.setattr(flash_attn_4, "cute_module", lambda: fake)
    monkeypatch.setattr(flash_attn_4, "why_no_flash_attn", lambda: None)
    return fake


def case(mods: str = "", dtype: str = "float16", **more: Any) -> Case:
    sizes: dict[str, Any] = {"seqlen_q": 41, "seqlen_k": 67, "heads_q": 4, "heads_kv": 2}
    sizes |= {"head_dim": 16, "head_dim_v": 24} | more
    return Case(dtype, 2, mods=CaseMods.parse(mods), **sizes)


def varlen(mods: str = "", **more: Any) -> Case:
    return case(mods, kind="varlen", seqlen_q=67, lengths=(67, 20), **more)


def inputs_of(made: Case) -> Inputs:
    return random_inputs(made, 3, on_gpu=True)


def passes(inputs: Inputs, prepared: Any) -> bool:
    return passes_check(check_of(inputs, 0, on_gpu=False), prepared)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("mods", "more"),
    [
        ("", {}),
        ("", {"causal": True, "softmax_scale": 0.3}),
        ("", {"dtype": "bfloat16"}),
        ("window 9:4, softcap 2.5, sinks", {}),
    ],
)
def test_dense_batches_are_those_of_the_case(
    torch: FakeTorch, direction: str, layout: str, mods: str, more: dict[str, Any]
) -> None:
    inputs = inputs_of(case(mods, layout=layout, direction=direction, **more))

    assert provider("flash-attn-4").why_not(inputs.case) is None
    assert passes(inputs, provider("flash-attn-4").prepare(inputs))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mods", ["", "window 9:0, sinks"])
def test_packed_sequences_have_no_batch_axis(torch: FakeTorch, direction: str, mods: str) -> None:
    inputs = inputs_of(varlen(mods, causal=True, direction=direction))
    prepared = provider("flash-attn-4").prepare(inputs)

    assert provider("flash-attn-4").why_not(inputs.case) is None
    assert passes(inputs, prepared)
    options = torch.calls[0]
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (67, 67)
    assert options["cu_seqlens_q"].tolist() == options["cu_seqlens_k"].tolist() == [0, 67, 87]


def test_tensors_share_the_memory_of_the_arrays(torch: FakeTorch) -> None:
    inputs = inputs_of(case(direction="backward", layout="bhsd"))
    tensors = provider("flash-attn-4").prepare(inputs).call.args[1]

    assert [tensor.shape for tensor in tensors] == [(2, 41, 4, 16), (2, 67, 2, 16), (2, 67, 2, 24)]
    assert all(map(np.shares_memory, tensors, inputs.gpu))


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_are_those_of_a_user(torch: FakeTorch, name: str) -> None:
    made = case("window 9:, softcap 2.5, sinks", direction="backward", softmax_scale=0.3)
    prepared = provider(name).prepare(inputs_of(made))
    prepared.call()
    prepared.call()
    (options,) = torch.calls

    assert options.pop("learnable_sink").shape == (4,)
    assert options == {
        "causal": False,
        "softmax_scale": 0.3,
        "deterministic": name == "flash-attn-4-deterministic",
        "window_size": (9, None),
        "softcap": 2.5,
    }


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (case(dtype="float32"), "timed in float16 and bfloat16 only"),
        (case(cache_dtype="float8_e4m3fn"), "timed in float16 and bfloat16 only"),
        (case(kind="cache", seqlen_q=1), "dense batches and packed sequences only"),
        (case("alibi, softcap 2"), "flash_attn_func has no alibi"),
        (varlen("bias heads, sinks"), "flash_attn_varlen_func has no bias heads"),
        (case(causal=True, q_offset=0), "aligned bottom-right"),
        (case("window 9:9", q_offset=30), "aligned bottom-right"),
    ],
)
def test_what_it_does_not_time_has_a_reason(torch: FakeTorch, made: Case, says: str) -> None:
    assert says in str(provider("flash-attn-4").why_not(made))


def test_the_deterministic_one_is_for_gradients_only(torch: FakeTorch) -> None:
    deterministic = provider("flash-attn-4-deterministic")

    assert "only gradients differ" in str(deterministic.why_not(case()))
    assert deterministic.why_not(case(direction="backward")) is None


def test_sums_of_gradients_are_float32(torch: FakeTorch) -> None:
    """Gradients of keys and values are summed only if several query heads share them."""
    fa4, grouped = provider("flash-attn-4"), case(direction="backward")
    alone = dataclasses.replace(grouped, heads_kv=4)

    assert fa4.scratch_bytes(case()) == 0
    assert fa4.scratch_bytes(alone) == 4 * 2 * 41 * 4 * 16
    assert fa4.scratch_bytes(grouped) == 4 * 2 * (41 * 4 * 16 + 67 * 2 * (16 + 24))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("absent", ["torch", "flash-attn-4"])
def test_without_its_package_or_torch_it_is_missing(
    torch: FakeTorch, name: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function = {
        "torch": (torch_providers, "why_no_torch"),
        "flash-attn-4": (flash_attn_4, "why_no_flash_attn"),
    }[absent]
    monkeypatch.setattr(module, function, lambda: f"{absent} is not installed")

    assert provider(name).missing() == f"{absent} is not installed"
    assert provider(name).why_not(case(direction="backward")) == f"{absent} is not installed"


@pytest.mark.parametrize(
    ("has_flash_attn", "cute", "says"),
    [
        (False, None, "flash-attn-4 is not installed"),
        (True, None, "flash_attn.cute cannot be imported: "),
        (True, ModuleType("flash_attn.cute"), None),
    ],
    ids=["nothing", "only FlashAttention-2", "installed"],
)
def test_it_is_available_if_its_module_can_be_imported(
    has_flash_attn: bool,
    cute: ModuleType | None,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = object() if has_flash_attn else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    # A module that is None in `sys.modules` cannot be imported.
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    reason = flash_attn_4.why_no_flash_attn.__wrapped__()

    assert reason is None if says is None else str(reason).startswith(says)


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
