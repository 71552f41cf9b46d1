"""Models that `torch.compile` compiles as one graph compute what eager models compute."""

from __future__ import annotations

import contextlib
import functools
import shutil
from typing import Any

import numpy as np
import pytest
from support.in_torch.operators import counted

import cupy_flash
from cupy_flash import MaskMod, ScoreMod
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

from support.in_torch.model import Model, prepared, random_documents, step  # noqa: E402

from cupy_flash.torch.modifications import packed  # noqa: E402
from cupy_flash.torch.operators import ATTENTION  # noqa: E402

# Of the float64 results of four layers, of order 1, which other orders of summation round anew.
TOLERANCE = {"rtol": 0, "atol": 1e-11}


def sizes(rng: np.random.Generator) -> tuple[int, int]:
    """Return numbers of sequences and rows that equal no size of the model.

    PyTorch's compiler assumes that sizes that are equal at first are so forever.
    """
    return int(rng.choice([3, 5, 7])), int(rng.choice([11, 13, 17, 23, 29, 37, 53]))


def assert_alike(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)


def test_four_layers_of_all_kinds_are_one_graph(rng: np.random.Generator) -> None:
    model = prepared(Model(), dtype=torch.float64)
    compiled, graphs = counted(model, dynamic=True), []
    for _ in range(4):
        batch, rows = sizes(rng)
        x, documents = torch.randn(batch, rows, 32).double(), random_documents(batch, rows)
        found = step(compiled, model, x, documents)
        assert_alike(found, step(model, model, x, documents))
        # The output, and the gradients of the input, 14 weights of each layer, and 3 others.
        assert len(found) == 2 + 4 * 16 + 3
        graphs.append(compiled.graphs)
    # PyTorch compiles the first one twice, because the modules hold real numbers.
    assert graphs == graphs[:1] * 4


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_generated_code_of_four_layers(rng: np.random.Generator) -> None:
    model = prepared(Model(), dtype=torch.float64)
    compiled = counted(model, "inductor")
    batch, rows = sizes(rng)
    x, documents = torch.randn(batch, rows, 32).double(), random_documents(batch, rows)
    for _ in range(2):
        found = step(compiled, model, x, documents)
        assert_alike(found, step(model, model, x, documents))
    assert compiled.graphs == 1


def test_a_compiled_call_has_the_error_of_the_naive_formula(rng: np.random.Generator) -> None:
    batch, rows = sizes(rng)
    q, k, v = (rng.standard_normal((batch, rows, 4, 9)).astype(np.float32) for _ in range(3))
    ids = rng.integers(0, 2, (batch, rows))
    mask = MaskMod(lambda b, i, j: (ids[b, i] == ids[b, j]) | (i == j))
    options: dict[str, Any] = {"mask_mod": mask, "alibi_slopes": [0.5, 0.1, 0.0, 2.0]}

    def call(*tensors: Any) -> Any:
        return ct.flash_attention(*tensors, **options, return_lse=True)

    found, _ = counted(call)(*map(torch.tensor, (q, k, v)))
    options["alibi_slopes"] = np.array(options["alibi_slopes"], np.float32)
    exact, lse = cupy_flash.attention_reference(q, k, v, **options, return_lse=True)
    bound = error_bound(attention_naive(q, k, v, **options), exact, q.dtype, lse=lse)
    assert max_error(found.numpy(), exact) <= bound


def test_new_functions_and_numbers_are_no_new_graphs(rng: np.random.Generator) -> None:
    x = torch.randn(2, 30, 4, 8)

    def call(x: Any, mask: MaskMod, ends: Any, longest: int) -> Any:
        y = ct.flash_attention(x * 2, x, x, mask_mod=mask)
        rows = y.flatten(0, 1)
        return ct.flash_attention_varlen(rows, rows, rows, ends, ends, longest, longest)

    compiled = counted(call, dynamic=True)
    for _ in range(4):
        ids, width = torch.tensor(rng.integers(0, 2, (2, 30))), int(rng.integers(2, 40))
        mask = MaskMod(
            lambda b, i, j, ids, width: (ids[b, i] == ids[b, j]) & (abs(i - j) < width),
            ids=ids,
            width=width,
        )
        cut = int(rng.integers(31, 59))
        ends = torch.tensor([0, cut, 60], dtype=torch.int32)
        arguments = x, mask, ends, max(cut, 60 - cut)
        torch.testing.assert_close(compiled(*arguments), call(*arguments), rtol=0, atol=0)
    assert compiled.graphs == 1


def test_an_offset_of_the_queries_may_be_dynamic() -> None:
    def call(x: Any, offset: Any) -> Any:
        return ct.flash_attention(x, x, x, causal=True, q_offset=offset)

    compiled = counted(call, dynamic=True)
    for rows, offset in ((7, 2), (9, 3), (9, 5), (9, -4)):
        x = torch.randn(2, rows, 4, 8)
        torch.testing.assert_close(compiled(x, offset), call(x, offset), rtol=0, atol=0)
    torch.testing.assert_close(compiled(x, None), call(x, None), rtol=0, atol=0)


def test_a_graph_reads_what_captured_tensors_hold_now() -> None:
    x, ids = torch.randn(1, 9, 2, 8), torch.zeros(1, 9, dtype=torch.int32)
    mask = MaskMod(lambda b, i, j: ids[b, i] == ids[b, j])
    compiled = counted(lambda x: ct.flash_attention(x, x, x, mask_mod=mask))
    before = compiled(x)
    ids[:, 4:] = 1
    mask.refresh()
    after = compiled(x)
    torch.testing.assert_close(after, ct.flash_attention(x, x, x, mask_mod=mask), rtol=0, atol=0)
    assert not torch.equal(before, after)


def test_a_captured_tensor_that_is_overwritten_is_an_error_of_the_backward_pass() -> None:
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    ids = torch.zeros(1, 9, dtype=torch.int32)
    mask = MaskMod(lambda b, i, j, ids: ids[b, i] == ids[b, j], ids=ids)
    out = counted(lambda x: ct.flash_attention(x, x, x, mask_mod=mask))(x)
    ids[:, 4:] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("how", ["eager", "observed", "aot_eager", "inductor"])
def test_the_backward_pass_reads_what_a_numpy_array_held(how: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    if how == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor generates C++")
    x = torch.randn(2, 9, 2, 8, requires_grad=True)
    modes = {"observed": lambda: FlopCounterMode(display=False)}

    def call(x: Any, mod: Any) -> Any:
        with modes.get(how, contextlib.nullcontext)():
            return ct.flash_attention(x, x, x, score_mod=mod).square().sum()

    is_compiled = how in ("aot_eager", "inductor")
    function = counted(call, how) if is_compiled else call
    for _ in range(2):
        values = np.random.default_rng(0).standard_normal(17).astype(np.float32)
        mod = ScoreMod(lambda score, i, j, values: score + values[i - j + 8], values=values)
        (expected,) = torch.autograd.grad(call(x, mod), x)
        out = function(x, mod)
        values += 10 * np.arange(17, dtype=np.float32)
        torch.testing.assert_close(torch.autograd.grad(out, x)[0], expected)
    assert not is_compiled or function.graphs == 1


def test_operators_of_plain_calls_have_few_arguments_and_no_lists() -> None:
    """Each argument costs host time, and lists cost most."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: list[Any] = []

    def compiler(graph: Any, _: Any) -> Any:
        operators = (ATTENTION, torch.ops.cupy_flash.attention_gradients.default)
        found.extend(node for node in graph.graph.nodes if node.target in operators)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    function = functools.partial(ct.flash_attention, causal=True)
    q, k, v = (torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(3))
    out = torch.compile(function, backend=backend, fullgraph=True)(q, k, v)
    torch.autograd.grad(out.sum(), (q, k, v))
    # The backward operator also takes dout, dlse, out, lse and the names of gradients.
    assert [len(node.args) for node in found] == [12, 12 + 5]
    for node in found:
        assert not node.kwargs
        assert not any(isinstance(x, (list, tuple)) for x in node.args)


def test_numpy_arrays_are_copied_for_the_backward_pass_only() -> None:
    x, lengths = torch.randn(2, 9, 2, 8), np.array([4, 7])
    mask = {"mask_mod": MaskMod(lambda b, j, lengths: j < lengths[b], lengths=lengths)}
    tensor = torch.tensor([4, 7])
    same = {"mask_mod": MaskMod(lambda b, j, lengths: j < lengths[b], lengths=tensor)}
    place = lengths.ctypes.data

    def places(given: Any, **options: Any) -> list[int]:
        tensors, *_ = packed(given, x, 2, **options)
        return [c.data_ptr() for c in tensors]

    assert places(mask) != [place]
    assert places(mask, has_gradient=False) == [place]
    assert places(same) == [tensor.data_ptr()]
    with torch.no_grad():
        assert places(mask) == [place]


def test_a_compiled_map_of_a_call_with_a_numpy_array() -> None:
    x, lengths = torch.randn(3, 2, 9, 2, 8), np.array([4, 7])
    mask = MaskMod(lambda b, j, lengths: j < lengths[b], lengths=lengths)

    def mapped(x: Any) -> Any:
        return torch.vmap(lambda x: ct.flash_attention(x, x, x, mask_mod=mask))(x)

    torch.testing.assert_close(counted(mapped)(x), mapped(x))


def test_numpy_arrays_that_torch_cannot_read_split_the_graph() -> None:
    x = torch.randn(2, 9, 2, 8)

    def mod_of(values: Any) -> Any:
        return ScoreMod(lambda score, i, j, values: score + values[i - j + 8], values=values)

    def call(x: Any, mod: Any) -> Any:
        return ct.flash_attention(x * 2, x, x, score_mod=mod) + 1

    compiled = torch.compile(call, backend="aot_eager")
    values = np.linspace(-1, 3, 34)
    for mod in map(mod_of, (values[::-2], values[:17], values[::-2], values[::2])):
        torch.testing.assert_close(compiled(x, mod), call(x, mod), rtol=0, atol=0)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_selective", [False, True])
def test_checkpoints_recompute_attention_unless_it_is_saved(
    is_compiled: bool, is_selective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(2, 7, 4, 8, requires_grad=True)
    saved = [torch.ops.cupy_flash.attention.default]
    mask = MaskMod(lambda i, j: (i + j) % 3 > 0)
    options: dict[str, Any] = {"use_reentrant": False}
    if is_selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, saved)

    def block(x: Any) -> Any:
        return ct.flash_attention(x.sin(), x, x, mask_mod=mask).cos()

    def step(x: Any) -> Any:
        return checkpoint(block, x, **options)

    (expected,) = torch.autograd.grad(block(x).sum(), x)
    function = counted(step, "aot_eager_decomp_partition") if is_compiled else step
    if is_compiled:
        torch.testing.assert_close(torch.autograd.grad(function(x).sum(), x)[0], expected)
        return
    with FlopCounterMode(display=False) as counter:
        (found,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    forward = 4 * 2 * 4 * 7 * 7 * 8
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.cupy_flash.attention] == forward * (1 if is_selective else 2)


def test_modules_are_compiled_with_scaled_dot_product_attention(rng: np.random.Generator) -> None:
    batch, rows = sizes(rng)
    q, mask = torch.randn(batch, 4, rows, 8, requires_grad=True), torch.rand(rows, rows) > 0.3

    def call(q: Any, mask: Any) -> Any:
        return ct.scaled_dot_product_attention(q, q, q, mask)

    found, expected = counted(call)(q, mask), call(q, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gradients = (torch.autograd.grad(x.square().sum(), q)[0] for x in (found, expected))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": np.float32(0.3)},
        {"mask": np.ones((9, 9), bool)},
        {"seqlens_k": (4, 2.5)},
        {"softmax_scale": True},
        {"softcap": True},
        {"q_offset": True},
    ],
    ids=["scale", "array", "lengths", "boolscale", "boolsoftcap", "booloffset"],
)
def test_other_arguments_split_the_graph_or_raise_the_usual_error(
    options: dict[str, Any], backend: str
) -> None:
    x = torch.randn(2, 9, 4, 8)

    def call(x: Any) -> Any:
        return ct.flash_attention(x * 2, x, x, **options) + 1

    try:
        expected = call(x)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            torch.compile(call, backend=backend)(x)
        return
    torch.testing.assert_close(torch.compile(call, backend=backend)(x), expected, rtol=0, atol=0)
