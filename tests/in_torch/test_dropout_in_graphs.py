"""Dropout in graphs of `torch.compile` and `torch.export`, and its operators."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
fa = pytest.importorskip("cupy_flash.flash_attn")

from torch import library  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cupy_flash.torch import operators  # noqa: E402
from cupy_flash.torch.modifications import packed  # noqa: E402

P = 0.3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# opcheck itself reads the gradients of copies.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


def rows(device: str) -> list[Any]:
    shapes = (2, 19, 4, 8), (2, 21, 2, 8), (2, 21, 2, 6)
    return [
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in shapes
    ]


def with_gradients(function: Any, inputs: list[Any], *others: Any) -> list[Any]:
    """Return the result of a function and its gradients, for a fixed gradient of the result."""
    out = function(*inputs, *others)
    torch.rand(3, device=out.device)
    return [out, *torch.autograd.grad(out.sin().sum(), inputs)]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_that_is_given_drops_what_eager_calls_drop(device: str) -> None:
    inputs = rows(device)

    def call(q: Any, k: Any, v: Any, seed: Any) -> Any:
        return ct.flash_attention(q, k, v, causal=True, dropout_p=P, dropout_seed=seed)

    compiled = torch.compile(call, fullgraph=True)
    seeds = [torch.tensor(pair, device=device) for pair in ([1, 2], [2**62, -9])]
    for seed in (*seeds, 7, 8, -3, [4, 5]):
        found = with_gradients(compiled, inputs, seed)
        assert_equal(found, with_gradients(call, inputs, seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dense", "packed", "sdpa", "flash_attn"])
def test_graphs_draw_new_seeds(name: str, device: str) -> None:
    inputs = rows(device)
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (19, 21)]

    def call(q: Any, k: Any, v: Any) -> Any:
        if name == "dense":
            return ct.flash_attention(q, k, v, dropout_p=P)
        if name == "packed":
            each = (x.flatten(0, 1) for x in (q, k, v))
            return ct.flash_attention_varlen(*each, *ends, 19, 21, dropout_p=P)
        if name == "flash_attn":
            return fa.flash_attn_func(q, k, v, P)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ct.scaled_dot_product_attention(q, k, v, dropout_p=P, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True)
    torch.manual_seed(4)
    first, second = (with_gradients(compiled, inputs) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(4)
    assert_equal(with_gradients(compiled, inputs), first)
    # out is linear in v, so that its gradient shows which weights the backward pass drops.
    out = compiled(*inputs)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, inputs[2], dout)
    torch.testing.assert_close((dv * inputs[2]).sum(), (dout * out).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints_in_graphs_compute_the_same_weights_again(selective: bool, device: str) -> None:
    inputs = rows(device)
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        saved = [torch.ops.aten.mm.default]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, saved)

    def block(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q, k, v, dropout_p=P)

    @functools.partial(torch.compile, fullgraph=True)
    def compiled(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(block, q, k, v, **options)

    out = compiled(*inputs)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, inputs[2], dout)
    torch.testing.assert_close((dv * inputs[2]).sum(), (dout * out).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_probability_raises_the_usual_error(device: str) -> None:
    inputs = rows(device)
    compiled = torch.compile(lambda q, k, v: ct.flash_attention(q, k, v, dropout_p=1.5))
    with pytest.raises(ValueError, match=r"dropout_p is 1\.5"):
        compiled(*inputs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_cuda_graphs_of_the_compiler_draw_new_seeds() -> None:
    inputs = rows("cuda")

    @functools.partial(torch.compile, fullgraph=True, mode="reduce-overhead")
    def compiled(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q, k, v, dropout_p=P)

    seen = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*inputs)
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, inputs[2], dout)
        found, expected = (dv * inputs[2]).sum(), (dout * out).sum()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        seen.append(out.detach().clone())
    assert not any(map(torch.equal, seen, seen[1:]))


def test_an_exported_program_draws_seeds() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return ct.flash_attention(q, k, v, dropout_p=P)

    inputs = tuple(x.detach() for x in rows("cpu"))
    program = torch.export.export(Model(), inputs).module()
    torch.manual_seed(4)
    first, second = program(*inputs), program(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(Model()(*inputs), first)


def test_operators() -> None:
    q, k, v = rows("cpu")
    options = {"dropout_p": P, "dropout_seed": torch.tensor([5, 6])}
    others = *packed(options, q, 4), True, None, None, "bshd", None
    library.opcheck(operators.ATTENTION, (q, k, v, *others))
    out, lse = (x.detach() for x in operators.ATTENTION(q, k, v, *others))
    plain = [x.detach() for x in (q, k, v)]
    operator = torch.ops.cupy_flash.attention_gradients.default
    library.opcheck(operator, (torch.randn_like(out), None, out, lse, ["k"], *plain, *others))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = (x[0, :9].detach().requires_grad_() for x in (q, k, v))
    arguments = q, k, v, *packed(options, q, 4), ends, ends, 5, 5, None, False, None, None
    library.opcheck(operators.ATTENTION_VARLEN, arguments)
