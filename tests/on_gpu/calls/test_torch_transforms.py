"""PyTorch's captures, autocast, torch.func and nested tensors with the kernels of tensor cores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gradients.captured_calls import random_call_with
from support.gradients.gradient_rule import check_gradients

from cupy_flash import MaskMod, ScoreMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
torch_gradients = pytest.importorskip("support.gradients.torch_gradients")
torch_transforms = pytest.importorskip("support.gradients.torch_transforms")

# PyTorch warns of its prototype of nested tensors.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
]

DTYPES = ["float16", "bfloat16", "float32"]
HEAD_DIMS = (64, 128)
LONGEST = (300, 500)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["slopes", "captures"])
def test_slopes_and_captures_have_the_gradients_of_the_reference(
    wanted: str, dtype: str, kind: str, seed: int
) -> None:
    call = random_call_with(wanted, seed, dtype, kind, head_dims=HEAD_DIMS, longest=LONGEST)
    found = torch_gradients.gradients(call, "cuda")
    check_gradients(call, found)
    # The second call finds its kernels prepared.
    again = torch_gradients.gradients(call, "cuda")
    assert all((found[name] == again[name]).all() for name in call.names)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transformed_calls_have_the_gradients_of_the_reference(
    dtype: str, kind: str, seed: int
) -> None:
    call = torch_transforms.random_call(seed, dtype, kind, HEAD_DIMS, LONGEST)
    torch_transforms.check_vjp(call, "cuda")
    if kind != "varlen" and not torch_transforms.depends_on_sequence(call):
        torch_transforms.check_mapped(call, "cuda")


def rows(dtype: Any, *lengths: int, heads: tuple[int, int] = (4, 2)) -> list[Any]:
    """Return q, k and v (batch, seqlen, heads, 64) that require gradients."""
    first, second = lengths
    shapes = (2, first, heads[0], 64), (2, second, heads[1], 64), (2, second, heads[1], 64)
    return [
        torch.randn(s, device="cuda").to(getattr(torch, dtype)).requires_grad_() for s in shapes
    ]


@pytest.mark.parametrize(
    ("given", "lower"), list(itertools.product(DTYPES, ["float16", "bfloat16"]))
)
def test_autocast_computes_with_casts(given: str, lower: str) -> None:
    inputs, dtype = rows(given, 203, 331), getattr(torch, lower)
    for causal in (False, True):
        with torch.autocast("cuda", dtype=dtype):
            out = ct.flash_attention(*inputs, causal=causal)
        expected = ct.flash_attention(*(x.to(dtype) for x in inputs), causal=causal)
        assert out.dtype == dtype
        assert torch.equal(out, expected)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, inputs, dout)
        for gradient, x in zip(found, torch.autograd.grad(expected, inputs, dout), strict=True):
            assert gradient.dtype == getattr(torch, given)
            assert torch.equal(gradient, x)


def test_autocast_of_another_device_casts_nothing() -> None:
    inputs = rows("float32", 70, 70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ct.flash_attention(*inputs).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_maps_have_the_bits_of_a_batch(dtype: str) -> None:
    q, k, v = rows(dtype, 203, 203)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q[None], k[None], v[None], causal=True).float().square().sum()

    found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q.detach(), k.detach(), v.detach())
    out = ct.flash_attention(q, k, v, causal=True)
    expected = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(map(torch.equal, found, expected))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (60, 0), "softcap": 20.0},
    "functions": {
        "score_mod": ScoreMod(lambda score, i, j: score - abs(i - j) * 0.01),
        "mask_mod": MaskMod(lambda i, j: (i + j) % 5 > 0),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nested_tensors_have_the_bits_of_packed_rows(dtype: str, name: str) -> None:
    lengths = [113, 0, 400, 64]
    ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")
    # Gradients of one tensor in three places would be added in another order.
    packed = [
        torch.randn(sum(lengths), 4, 64, device="cuda").to(getattr(torch, dtype)).requires_grad_()
        for _ in range(3)
    ]
    nested = [torch.nested.nested_tensor_from_jagged(x, ends.long()) for x in packed]
    out = ct.flash_attention(*nested, **OPTIONS[name])
    expected = ct.flash_attention_varlen(
        *(*packed, ends, ends, max(lengths), max(lengths)), **OPTIONS[name]
    )
    assert torch.equal(out.values(), expected)
    dout = torch.randn_like(expected)
    found = torch.autograd.grad(out.values(), packed, dout)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, packed, dout)))


def graph_of(step: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a CUDA graph of a step, and the tensors that hold its results."""
    before, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    before.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(before):
        step()
    torch.cuda.current_stream().wait_stream(before)
    with torch.cuda.graph(graph):
        return graph, step()


def test_a_graph_holds_the_gradients_of_slopes_and_captures() -> None:
    inputs = rows("bfloat16", 203, 331)
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    table = torch.randn(600, device="cuda", requires_grad=True)
    mod = ScoreMod(lambda score, i, j: score + table[i - j + 331])
    dout = torch.randn_like(inputs[0])
    wrt = [*inputs, slopes, table]

    def step() -> tuple[Any, ...]:
        out = ct.flash_attention(*inputs, score_mod=mod, alibi_slopes=slopes, causal=True)
        return torch.autograd.grad(out, wrt, dout)

    expected = [x.clone() for x in step()]
    graph, captured = graph_of(step)
    for x in captured:
        x.detach().zero_()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


def test_captures_inside_of_a_transform_are_read_on_its_stream() -> None:
    """A plain tensor that a function captures inside of a transform may be written before."""
    q, k, v = (x.detach() for x in rows("float16", 203, 203))
    table = torch.zeros(203, device="cuda")
    own = torch.cuda.Stream()

    def loss(q: Any) -> Any:
        mod = ScoreMod(lambda score, j: score + table[j])
        return ct.flash_attention(q, k, v, score_mod=mod).float().square().sum()

    for value in (0.5, -2.0):
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            torch.cuda._sleep(10**7)
            table.copy_(torch.linspace(0, value, 203, device="cuda"))
            found = torch.func.grad(loss)(q)
        torch.cuda.synchronize()
        leaf = q.clone().requires_grad_()
        assert torch.equal(found, torch.autograd.grad(loss(leaf), leaf)[0])


def test_a_modification_made_while_a_graph_is_captured_reads_its_tensor() -> None:
    q, k, v = rows("bfloat16", 203, 331)
    table = torch.randn(600, device="cuda")

    def step() -> Any:
        mod = ScoreMod(lambda score, i, j: score + table[i - j + 331])
        return ct.flash_attention(q, k, v, score_mod=mod)

    graph, captured = graph_of(step)
    table.normal_()
    graph.replay()
    torch.testing.assert_close(captured, step(), rtol=0, atol=0)
