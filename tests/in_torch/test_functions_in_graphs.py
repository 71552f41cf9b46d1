"""Score and mask functions of compiled calls: which object a graph evaluates, and how long."""

from __future__ import annotations

import dataclasses
import gc
import io
import sys
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import MaskMod, ScoreMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from cupy_flash.mods import template  # noqa: E402

UNTRACEABLE = "import numpy as np\ndef f(score, i): return score + {} * np.sort(i * 0 + 1)"


def rows() -> Any:
    return torch.randn(2, 8, 4, 16)


def with_table(table: Any) -> ScoreMod:
    return ScoreMod(lambda score, i, j, table: score + table[i - j + 8], table=table)


def compiled() -> Any:
    def call(q: Any, mod: Any) -> Any:
        return ct.flash_attention(q, q, q, score_mod=mod)

    return torch.compile(call, backend="aot_eager", fullgraph=True)


def eager(q: Any, mod: Any) -> Any:
    return ct.flash_attention(q, q, q, score_mod=mod)


def test_a_function_that_is_defined_anew_is_another_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a notebook: nothing but its name identifies a function that cannot be traced."""
    module = types.ModuleType("functions_of_a_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    q, call = rows(), compiled()
    for number in (1, 9):
        exec(UNTRACEABLE.format(number), module.__dict__)
        mod = ScoreMod(module.f, cuda="return score;")
        torch.testing.assert_close(call(q, mod), eager(q, mod), rtol=0, atol=0)


def test_a_function_without_a_hash_may_have_cuda_source() -> None:
    @dataclasses.dataclass
    class Function:
        first: list[int]

        def __call__(self, score: Any, i: Any) -> Any:
            return score + np.sort(i * 0 + self.first[0])

    q = rows()
    assert torch.isfinite(eager(q, ScoreMod(Function([3]), cuda="return score;"))).all()


def test_an_exported_program_keeps_its_function() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mod = with_table(torch.randn(17))

        def forward(self, q: Any) -> Any:
            return eager(q * 3, self.mod)

    q, model = rows(), Model()
    expected = model(q)
    program = torch.export.export(model, (q,))
    del model
    gc.collect()
    torch.testing.assert_close(program.module()(q), expected)


def test_a_call_under_a_dispatch_mode_keeps_its_function_only_for_its_gradient() -> None:
    def step(number: float) -> None:
        q = rows().requires_grad_()
        mod = ScoreMod(lambda score, i: score * number + i)
        with FlopCounterMode(display=False):
            out = eager(q, mod)
        del mod
        gc.collect()
        out.sum().backward()
        assert q.grad is not None

    step(0.25)
    before = len(template._used)
    for number in range(20):
        step(1.5 + number)
    assert len(template._used) == before


def test_equal_memory_may_be_captured_by_different_libraries() -> None:
    q, array = rows(), np.random.default_rng(0).standard_normal(17).astype(np.float32)
    tensor = torch.from_numpy(array).requires_grad_()
    ours = with_table(tensor)
    other = with_table(array)
    (expected,) = torch.autograd.grad(eager(q, ours).square().sum(), tensor)
    (found,) = torch.autograd.grad(compiled()(q, ours).square().sum(), tensor)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(eager(q, other), eager(q, ours))


def test_a_detached_capture_is_found_beside_the_parameter() -> None:
    q, table = rows(), torch.randn(17, requires_grad=True)
    detached = with_table(table.detach())
    parameter = with_table(table)
    with FlopCounterMode(display=False):
        found = eager(q, detached)
    torch.testing.assert_close(found, eager(q, parameter).detach())


@pytest.mark.parametrize("change", ["data", "double"])
def test_a_parameter_may_get_other_memory(change: str) -> None:
    q, module = rows(), torch.nn.Module()
    module.table = torch.nn.Parameter(torch.randn(17))
    mod = with_table(module.table)
    eager(q, mod)
    if change == "data":
        module.table.data = torch.zeros(17)
    else:
        module.double()
        with torch.no_grad():
            module.table.zero_()
    out = eager(q, mod)
    torch.testing.assert_close(out, ct.flash_attention(q, q, q))
    (gradient,) = torch.autograd.grad(out.square().sum(), module.table)
    fresh = with_table(module.table)
    (expected,) = torch.autograd.grad(eager(q, fresh).square().sum(), module.table)
    torch.testing.assert_close(gradient, expected)


class WithTable(torch.nn.Module):
    """Attention with a learned table, which the `ScoreMod` of the module captures."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(17))
        self.mod = with_table(self.table)

    def forward(self, q: Any) -> Any:
        return eager(q, self.mod)


def test_a_saved_module_captures_its_own_parameter() -> None:
    q, file, saved = rows(), io.BytesIO(), WithTable()
    torch.save(saved, file)
    file.seek(0)
    module = torch.load(file, weights_only=False)
    out = module(q)
    torch.testing.assert_close(out, saved(q))
    (found,) = torch.autograd.grad(out.square().sum(), module.table)
    (expected,) = torch.autograd.grad(saved(q).square().sum(), saved.table)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        module.table.zero_()
    torch.testing.assert_close(module(q), ct.flash_attention(q, q, q))


@pytest.mark.parametrize("kind", ["plain", "torch", "vmap", "grad", "observed"])
def test_captures_may_get_other_memory_before_calls_of_all_kinds(kind: str) -> None:
    # In float64, because masks change the order of sums.
    q, table = torch.randn(3, 2, 8, 4, 16, dtype=torch.float64), torch.randn(17)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    mods = {
        "score_mod": with_table(table),
        "mask_mod": MaskMod(lambda b, j, lengths: j < lengths[b], lengths=lengths),
    }

    def run(**mods: Any) -> Any:
        if kind == "plain":
            return cupy_flash.flash_attention(q[0], q[0], q[0], **mods)
        if kind == "vmap":
            return torch.func.vmap(lambda x: ct.flash_attention(x, x, x, **mods))(q)
        if kind == "grad":
            square = torch.func.grad(lambda x: ct.flash_attention(x, x, x, **mods).square().sum())
            return square(q[0])
        observing = FlopCounterMode(display=False) if kind == "observed" else nullcontext()
        with observing:
            return ct.flash_attention(q[0], q[0], q[0], **mods)

    for value in (torch.zeros(17), torch.zeros(17, dtype=torch.float64)):
        run(**mods)
        table.data, lengths.data = value, torch.tensor([8, 8], dtype=torch.int32)
        torch.testing.assert_close(run(**mods), run())


def test_calls_may_be_made_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    q = np.ones((1, 4, 2, 8), np.float32)
    np.testing.assert_array_equal(cupy_flash.flash_attention(q, q, q), q)
