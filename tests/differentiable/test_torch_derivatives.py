"""Derivatives that PyTorch has and attention does not support: errors instead of zeros.

tests/in_torch/test_forward_mode.py and test_second_derivatives.py test those that attention has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.in_torch.operators import NO_MODIFICATIONS

import cupy_flash

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

# Torch's own compiler and tracer use deprecated functions of torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)

SECOND = "has no second derivative"
TANGENT = "has a tangent, and only q, k, v, bias, sinks, slopes"
TRANSFORM = "is passed inside of a transform"
TRACED = "is passed while torch traces a graph"


def numbers(device: str) -> Any:
    return torch.randn(1, 4, 2, 3, dtype=torch.float64, device=device)


def dense(x: Any, **options: Any) -> Any:
    return ct.flash_attention(x, x, x, **options)


def packed(x: Any, **options: Any) -> Any:
    return ct.flash_attention_qkvpacked(torch.stack((x, x, x), 2), **options)


def lengths_on(device: Any) -> tuple[Any, ...]:
    """Return the offsets and the largest lengths of two packed sequences of 4 rows."""
    ends = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    return ends, ends, 3, 3


def varlen(x: Any, **options: Any) -> Any:
    return ct.flash_attention_varlen(x[0], x[0], x[0], *lengths_on(x.device), **options)


def with_lse(x: Any) -> Any:
    return dense(x, return_lse=True)[1]


def operator(x: Any) -> Any:
    plain = NO_MODIFICATIONS
    return torch.ops.cupy_flash.attention(x, x, x, *plain, False, None, None, "bshd", None)[0]


def operator_varlen(x: Any) -> Any:
    plain = NO_MODIFICATIONS
    lengths = (*lengths_on(x.device), None)
    return torch.ops.cupy_flash.attention_varlen(*[x[0]] * 3, *plain, *lengths, False, None, None)[
        0
    ]


FUNCTIONS = [dense, packed, varlen, with_lse]
OPERATORS = [operator, operator_varlen]


def penalty(attention: Any, x: Any, t: Any) -> Any:
    """Return the gradient of |dy/dx|^2 with respect to a weight applied before attention."""
    weight = torch.eye(3, dtype=x.dtype, device=x.device, requires_grad=True)
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(attention(x @ weight).sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), weight)


def backward_twice(attention: Any, x: Any, t: Any) -> Any:
    x = x.clone().requires_grad_()
    attention(x).square().sum().backward(create_graph=True)
    gradient = x.grad
    x.grad = None
    gradient.sum().backward()


def product(name: str) -> Callable[..., Any]:
    def computed(attention: Any, x: Any, t: Any) -> Any:
        return getattr(torch.autograd.functional, name)(lambda x: attention(x).sum(), x, t)

    computed.__name__ = name
    return computed


def hessian(attention: Any, x: Any, t: Any) -> Any:
    return torch.autograd.functional.hessian(lambda x: attention(x).sum(), x)


def double_jvp(attention: Any, x: Any, t: Any) -> Any:
    return torch.autograd.functional.jvp(attention, x, t)


@pytest.mark.parametrize("attention", OPERATORS)
@pytest.mark.parametrize(
    "derivative", [penalty, backward_twice, product("hvp"), product("vhp"), hessian, double_jvp]
)
def test_second_derivatives_are_errors(derivative: Any, attention: Any, device: str) -> None:
    x, t = numbers(device), numbers(device)
    with pytest.raises(RuntimeError, match=SECOND):
        derivative(attention, x, t)


@pytest.mark.parametrize("attention", FUNCTIONS)
def test_gradients_in_a_graph_are_those_outside(attention: Any, device: str) -> None:
    """Some optimizers request a graph of gradients without using it."""
    x = numbers(device).requires_grad_()
    expected = torch.autograd.grad(attention(x).square().sum(), x)
    found = torch.autograd.grad(attention(x).square().sum(), x, create_graph=True)
    assert torch.equal(found[0], expected[0])
    assert found[0].requires_grad


def dual(attention: Any, x: Any, t: Any) -> Any:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        return forward.unpack_dual(attention(forward.make_dual(x, t))).tangent


def dual_of_parameters(attention: Any, x: Any, t: Any) -> Any:
    return dual(attention, x.clone().requires_grad_(), t)


def jvp(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.jvp(attention, (x,), (t,))


def linearize(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.linearize(attention, x)[1](t)


def jacfwd(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.jacfwd(attention)(x)


def grad(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.grad(lambda x: attention(x).sum())(x)


def vjp(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.vjp(attention, x)


def vmap(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.vmap(attention)(torch.stack((x, t)))


def functionalize(attention: Any, x: Any, t: Any) -> Any:
    return torch.func.functionalize(attention)(x)


def make_fx(attention: Any, x: Any, t: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(attention)(x)(t)


def jit_trace(attention: Any, x: Any, t: Any) -> Any:
    return torch.jit.trace(attention, (x,), check_trace=False)(t)


def fake(attention: Any, x: Any, t: Any) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        return attention(mode.from_tensor(x))


def plain(x: Any) -> Any:
    return cupy_flash.flash_attention(x, x, x)


def plain_packed(x: Any) -> Any:
    return cupy_flash.flash_attention_qkvpacked(torch.stack((x, x, x), 2))


def plain_varlen(x: Any) -> Any:
    return cupy_flash.flash_attention_varlen(x[0], x[0], x[0], *lengths_on(x.device))


def plain_cached(x: Any) -> Any:
    cache = torch.zeros(1, 9, 2, 3, dtype=x.dtype, device=x.device)
    return cupy_flash.flash_attention_with_kvcache(x, cache, cache.clone(), cache_seqlens=3)


def plain_combine(x: Any) -> Any:
    return cupy_flash.combine(x[:, None], torch.zeros_like(x[:, None, ..., 0]).swapaxes(2, 3))[0]


def plain_backward(x: Any) -> Any:
    with torch.no_grad():
        y = torch.linspace(-1, 1, 24, dtype=x.dtype, device=x.device).view(1, 4, 2, 3)
        out, lse = cupy_flash.flash_attention(y, y, y, return_lse=True)
    return cupy_flash.flash_attention_backward(x, y, y, y, out, lse)[0]


PLAIN = [plain, plain_packed, plain_varlen, plain_cached, plain_combine, plain_backward]


# Transforms that make tangents, with the messages of functions that have none.
TANGENTS = {
    dual: TANGENT,
    dual_of_parameters: f"{TANGENT}|requires a gradient",
    jvp: f"{TANGENT}|{TRANSFORM}",
    jacfwd: f"{TANGENT}|{TRANSFORM}",
}
REFUSED = [(transform, f) for transform in TANGENTS for f in PLAIN]
# Functions with tangents have none while torch traces a graph.
TRACING = {linearize: f"{TANGENT}|{TRACED}", functionalize: TRANSFORM, jit_trace: TRACED}
REFUSED += [(transform, f) for transform in TRACING for f in FUNCTIONS + PLAIN]


@pytest.mark.parametrize(("transform", "attention"), REFUSED)
def test_what_memory_does_not_hold_is_refused(transform: Any, attention: Any, device: str) -> None:
    message = (TANGENTS | TRACING)[transform]
    x, t = numbers(device), numbers(device)
    if attention is plain_varlen or attention is varlen:
        # Under the transform, indexing makes another tensor, and lengths are traced, too.
        message = f"{message}|{TRANSFORM}|{TRACED}"
    with pytest.raises((NotImplementedError, TypeError), match=message):
        transform(attention, x, t)


@pytest.mark.parametrize("attention", PLAIN)
@pytest.mark.parametrize("transform", [make_fx, fake])
def test_plain_functions_are_not_traced(transform: Any, attention: Any, device: str) -> None:
    message = f"{TRACED}|{TRANSFORM}" if attention is plain_varlen else TRACED
    with pytest.raises((NotImplementedError, TypeError), match=message):
        transform(attention, numbers(device), numbers(device))


@pytest.mark.parametrize("attention", FUNCTIONS)
def test_graphs_and_fake_tensors_have_the_operator(attention: Any, device: str) -> None:
    x, t = numbers(device), numbers(device)
    expected = attention(t)
    torch.testing.assert_close(make_fx(attention, x, t), expected, rtol=0, atol=0)
    found = fake(attention, x, t)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("attention", PLAIN)
@pytest.mark.parametrize("transform", [grad, vjp, vmap])
def test_plain_functions_are_not_transformed(transform: Any, attention: Any, device: str) -> None:
    with pytest.raises(NotImplementedError, match=TRANSFORM):
        transform(attention, numbers(device), numbers(device))


@pytest.mark.parametrize("attention", OPERATORS)
@pytest.mark.parametrize("transform", [dual, dual_of_parameters, jvp, linearize, jacfwd])
def test_operators_drop_no_tangent(transform: Any, attention: Any, device: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=f"{TANGENT}|[Bb]atching rule"):
        transform(attention, numbers(device), numbers(device))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", [dual, jvp])
@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_calls_drop_no_tangent(
    is_warm: bool, transform: Any, backend: str, device: str
) -> None:
    x, t = numbers(device), numbers(device)
    # PyTorch runs an existing graph on dual tensors, too. Older releases, such as 2.11, compile one
    # for them, as if they had no tangents.
    makes_graph = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(dense, backend=backend, fullgraph=fullgraph)
        if is_warm:
            compiled(x)
        if fullgraph or (transform is dual and (is_warm or makes_graph)):
            with pytest.raises((NotImplementedError, RuntimeError), match=f"{TANGENT}|ttempt"):
                transform(compiled, x, t)
        else:
            # The call with a tangent is computed outside of graphs.
            torch.testing.assert_close(transform(compiled, x, t), transform(dense, x, t))


def test_batches_of_gradients_are_refused(device: str) -> None:
    x = numbers(device).requires_grad_()
    out = dense(x)
    with pytest.raises(NotImplementedError, match=f"{TRANSFORM}|belongs to a transform"):
        torch.autograd.grad(out, x, torch.stack((out, out)).detach(), is_grads_batched=True)


def test_the_tangent_of_a_modification_is_not_dropped(device: str) -> None:
    import torch.autograd.forward_ad as forward

    x, slopes = numbers(device), torch.ones(2, dtype=torch.float64, device=device)
    with forward.dual_level():
        tangent = forward.make_dual(slopes, slopes)
        moved = dense(x, causal=True, alibi_slopes=tangent)
        assert forward.unpack_dual(moved).tangent.any()
        with pytest.raises(NotImplementedError, match=f"gain {TANGENT}"):
            cupy_flash.ScoreMod(lambda score, h, gain: score * gain[h], gain=tangent)
        scale = forward.make_dual(slopes[0].clone(), slopes[0].clone())
        for name in ("softmax_scale", "softcap"):
            with pytest.raises(NotImplementedError, match=f"{name} {TANGENT}"):
                dense(x, **{name: scale})
        # Calls without tangents still work.
        assert torch.equal(dense(x), plain(x))


@pytest.mark.parametrize("attention", FUNCTIONS)
def test_modes_that_look_on_are_let_be(attention: Any, device: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = numbers(device)
    expected = attention(x)
    with FlopCounterMode(display=False):
        assert torch.equal(attention(x), expected)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "gain"])
def test_no_parameter_is_left_without_its_gradient(device: str, name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64, device=device))
    x = numbers(device)
    if name == "gain":
        gain = parameter.detach()
        mod = cupy_flash.MaskMod(lambda h, j, gain: gain[h] > j, gain=gain)
        gain.requires_grad_()
        options: dict[str, Any] = {"mask_mod": mod}
    else:
        options = {name: torch.nn.Parameter(parameter[0].detach().clone())}
    for inputs in (x, x.clone().requires_grad_()):
        for attention in (dense, packed, varlen):
            with pytest.raises((TypeError, ValueError), match=f"{name} requires a gradient"):
                attention(inputs, **options)
            with torch.no_grad():
                attention(inputs, **options)


@pytest.mark.parametrize("attention", PLAIN)
def test_plain_functions_name_those_that_record(attention: Any, device: str) -> None:
    x = numbers(device)
    with pytest.raises(TypeError, match=re.escape(".detach(), or call the function of cupy_fl")):
        attention(x.clone().requires_grad_())
    with torch.no_grad():
        recording = attention(x.clone().requires_grad_())
    assert torch.equal(recording, attention(x))
    assert not recording.requires_grad
