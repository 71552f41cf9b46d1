"""Transforms of torch.func: grad, vjp and vmap give the results of eager calls."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
torch_transforms = pytest.importorskip("support.gradients.torch_transforms")

from torch.func import functional_call, grad, jacrev, stack_module_state, vjp, vmap  # noqa: E402

# Sums of at most a hundred float64 products of order 1, added in another order.
CLOSE = {"rtol": 1e-12, "atol": 100 * 2**-50}


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


def number(device: str, *shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, device=device)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradients_are_those_of_the_reference(
    dtype: str, kind: str, seed: int, device: str
) -> None:
    call = torch_transforms.random_call(seed, dtype, kind, (5, 24, 64), (60, 90))
    torch_transforms.check_vjp(call, device)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_mapped_sequences_have_the_gradients_of_a_batch(
    dtype: str, kind: str, seed: int, device: str
) -> None:
    calls = (
        torch_transforms.random_call(seed + 100 * n, dtype, kind, (5, 24, 64), (60, 90))
        for n in range(9)
    )
    # A function of the index of the sequence would get another index in each call.
    call = next(x for x in calls if not torch_transforms.depends_on_sequence(x))
    torch_transforms.check_mapped(call, device)


def shapes(n: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of the arrays of `n` calls of two sequences."""
    return {
        "q": (n, 2, 5, 4, 6),
        "k": (n, 2, 7, 2, 6),
        "v": (n, 2, 7, 2, 3),
        "bias": (n, 1, 4, 5, 7),
        "sinks": (n, 4),
        "alibi_slopes": (n, 4),
        "table": (n, 12),
    }


def attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
    *others, table = others
    named = dict(zip(("bias", "sinks", "alibi_slopes"), others, strict=True))
    if table is not None:
        named["score_mod"] = ScoreMod(lambda score, i, j: score + table[i - j + 4])
    return ct.flash_attention(q, k, v, **named, q_offset=0, return_lse=True)


def loss(*inputs: Any) -> Any:
    out, lse = attention(*inputs)
    return out.square().sum() + lse.sin().sum()


MAPPED: dict[str, Any] = {
    "all": shapes(1),
    "rows": ("q", "k", "v"),
    "queries": ("q",),
    "keys": ("k", "v"),
    "rows and bias": ("q", "k", "v", "bias"),
    "rows and slopes": ("q", "k", "v", "alibi_slopes"),
    "sinks": ("sinks",),
    "table": ("table",),
}


@pytest.mark.parametrize("without", [(), ("sinks", "table"), ("bias", "sinks", "table")], ids=str)
@pytest.mark.parametrize("mapped", MAPPED)
def test_maps_are_loops(mapped: str, without: tuple[str, ...], device: str) -> None:
    size = 3
    names = [name for name in MAPPED[mapped] if name not in without]
    if not names:
        return
    inputs = [
        None if n in without else number(device, *(s if n in names else s[1:]))
        for n, s in shapes(size).items()
    ]
    # The mapped axis is the last one of some inputs.
    axes = {name: -1 if name in ("k", "bias") else 0 for name in names}
    in_dims = tuple(axes.get(name) for name in shapes(1))
    wrt = tuple(n for n, x in enumerate(inputs) if x is not None)
    moved = [
        x if axis is None or x is None else x.movedim(0, axis)
        for x, axis in zip(inputs, in_dims, strict=True)
    ]

    def of(n: int) -> list[Any]:
        return [
            x[n] if axis is not None and x is not None else x
            for x, axis in zip(inputs, in_dims, strict=True)
        ]

    out, lse = vmap(attention, in_dims)(*moved)
    per_sample = vmap(grad(loss, wrt), in_dims)(*moved)
    for n in range(size):
        one_out, one_lse = attention(*of(n))
        assert_close(out[n], one_out)
        assert_close(lse[n], one_lse)
        leaves = [None if x is None else x.clone().requires_grad_() for x in of(n)]
        expected = torch.autograd.grad(loss(*leaves), [x for x in leaves if x is not None])
        assert_close([x[n] for x in per_sample], list(expected))
    # The gradient of the sum over the samples, through the map.
    total = grad(lambda *xs: vmap(loss, in_dims)(*xs).sum(), wrt)(*moved)
    for found, each, index in zip(total, per_sample, wrt, strict=True):
        axis = in_dims[index]
        assert_close(found, each.sum(0) if axis is None else each.movedim(0, axis))
    # Autograd outside of the map.
    leaves = [None if x is None else x.clone().requires_grad_() for x in moved]
    given = [x for x in leaves if x is not None]
    assert_close(list(torch.autograd.grad(vmap(loss, in_dims)(*leaves).sum(), given)), list(total))


def test_maps_may_be_nested(device: str) -> None:
    q, k, v = number(device, 2, 3, 5, 4, 6), number(device, 3, 7, 2, 6), number(device, 2, 7, 2, 6)
    slopes = number(device, 3, 4).exp()

    def one(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return ct.flash_attention(q, k, v, alibi_slopes=slopes).square().sum()

    both = vmap(vmap(grad(one, (0, 1, 2, 3)), (0, 0, None, 0)), (0, None, 0, None))
    found = both(q, k, v, slopes)
    for m in range(2):
        for n in range(3):
            leaves = [x.clone().requires_grad_() for x in (q[m, n], k[n], v[m], slopes[n])]
            assert_close([x[m, n] for x in found], list(torch.autograd.grad(one(*leaves), leaves)))


def test_packed_sequences_are_mapped(device: str) -> None:
    q, k, v = number(device, 3, 9, 4, 5), number(device, 3, 11, 2, 5), number(device, 11, 2, 5)
    # The lengths are mapped, too.
    ends_q = torch.tensor([[0, 4, 9], [0, 0, 7], [0, 9, 9]], dtype=torch.int32, device=device)
    ends_k = torch.tensor([0, 3, 11], dtype=torch.int32, device=device)

    def one(q: Any, k: Any, v: Any, ends: Any) -> Any:
        out = ct.flash_attention_varlen(q, k, v, ends, ends_k, 9, 8, causal=True)
        return out.square().sum()

    found = vmap(grad(one, (0, 1, 2)), (0, 0, None, 0))(q, k, v, ends_q)
    for n in range(3):
        leaves = [x.clone().requires_grad_() for x in (q[n], k[n], v)]
        expected = torch.autograd.grad(one(*leaves, ends_q[n]), leaves)
        assert_close([x[n] for x in found], list(expected))


def test_an_empty_axis_is_mapped_unless_samples_are_separate_calls(device: str) -> None:
    q, sinks = number(device, 0, 2, 5, 4, 3), number(device, 0, 4)
    out = vmap(lambda q: ct.flash_attention(q, q, q))(q)
    assert out.shape == q.shape
    with pytest.raises(ValueError, match="vmap maps an axis of length 0 of q, k, v, sinks"):
        vmap(lambda q, sinks: ct.flash_attention(q, q, q, sinks=sinks))(q, sinks)


def test_lists_and_functions_of_the_sequence_are_mapped(device: str) -> None:
    q = number(device, 3, 2, 6, 2, 4)
    first = torch.tensor([1, 3], dtype=torch.int32, device=device)
    visible = MaskMod(lambda b, j: j >= first[b])
    for options in ({"seqlens_k": [3, 6]}, {"alibi_slopes": [0.5, 2]}, {"mask_mod": visible}):
        found = vmap(lambda x, options=options: ct.flash_attention(x, x, x, **options))(q)
        expected = torch.stack([ct.flash_attention(x, x, x, **options) for x in q])
        assert_close(found, expected)


def test_jacobians_are_those_of_finite_differences(device: str) -> None:
    q, k, v = number(device, 1, 2, 1, 3), number(device, 1, 3, 1, 3), number(device, 1, 3, 1, 2)
    found = jacrev(lambda q: ct.flash_attention(q, k, v))(q)
    expected = torch.autograd.functional.jacobian(lambda q: ct.flash_attention(q, k, v), q)
    assert_close(found, expected)


class Block(torch.nn.Module):
    """Attention layer with a learned table, which its function captures in each call."""

    def __init__(self, device: str) -> None:
        super().__init__()
        make: Callable[..., Any] = torch.nn.Linear
        self.inner = make(8, 24, dtype=torch.float64, device=device)
        self.outer = make(8, 8, dtype=torch.float64, device=device)
        self.table = torch.nn.Parameter(number(device, 12))

    def forward(self, x: Any) -> Any:
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        table = self.table
        mod = ScoreMod(lambda score, i, j: score + table[i - j + 5])
        return self.outer(ct.flash_attention(q, k, v, causal=True, score_mod=mod).flatten(-2))


def test_ensembles_of_modules_are_mapped(device: str) -> None:
    models = [Block(device) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = number(device, 2, 6, 8)

    def run(parameters: Any, buffers: Any, x: Any) -> Any:
        return functional_call(base, (parameters, buffers), (x,))

    out = vmap(run, (0, 0, None))(parameters, buffers, x)
    assert_close(out, torch.stack([model(x) for model in models]))
    found = grad(lambda p: vmap(run, (0, 0, None))(p, buffers, x).square().sum())(parameters)
    for n, model in enumerate(models):
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert_close(found[name][n], parameter.grad)


def test_per_sample_gradients_of_a_module_are_those_of_a_loop(device: str) -> None:
    model, x = Block(device), number(device, 4, 6, 8)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of_sample(parameters: Any, x: Any) -> Any:
        return functional_call(model, parameters, (x[None],)).square().sum()

    found = vmap(grad(of_sample), (None, 0))(parameters, x)
    for n in range(4):
        model.zero_grad()
        model(x[n : n + 1]).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert_close(found[name][n], parameter.grad)


def test_pytorchs_function_is_transformed(device: str) -> None:
    q, k, v = (number(device, 3, 2, 4, n, 6) for n in (5, 7, 7))
    mask = number(device, 3, 5, 7)

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return vmap(grad(lambda *xs: function(*xs).square().sum(), (0, 1, 2, 3)))

    found = of(ct.scaled_dot_product_attention)(q, k, v, mask)
    expected = of(torch.nn.functional.scaled_dot_product_attention)(q, k, v, mask)
    assert_close(found, expected)
    packed = number(device, 3, 5, 3, 2, 4)
    assert_close(vmap(ct.flash_attention_qkvpacked)(packed), ct.flash_attention_qkvpacked(packed))


def test_a_write_is_noticed(device: str) -> None:
    q, k, table = number(device, 1, 4, 2, 3), number(device, 1, 4, 2, 3), number(device, 7)
    mod = ScoreMod(lambda score, i, j: score + table[i - j + 3])
    for name in ("q", "k", "table", "out"):
        out, pull_back = vjp(lambda q: ct.flash_attention(q, k, k, score_mod=mod), q)
        {"q": q, "k": k, "table": table, "out": out}[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pull_back(q)


def test_captures_without_memory_are_not_read(device: str) -> None:
    """The captures of a transform have no values outside of the call that is transformed."""
    q = number(device, 1, 4, 2, 3)

    def evaluated(table: Any) -> Any:
        mod = ScoreMod(lambda score, j: score + table[j])
        assert np.isnan(mod.evaluate(np.float64(0), b=0, h=0, i=0, j=0))
        return ct.flash_attention(q, q, q, score_mod=mod).sum()

    assert grad(evaluated)(number(device, 4)).isfinite().all()
    with pytest.raises(NotImplementedError, match="limit is passed inside of a transform"):
        grad(lambda limit: MaskMod(lambda j: j < limit[0]))(number(device, 1))


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("transform", ["vmap", "grad", "vjp"])
def test_transformed_calls_keep_no_tensor(transform: str, device: str) -> None:
    q = number(device, 2, 1, 5, 4, 8).requires_grad_()

    def call(q: Any) -> Any:
        return ct.flash_attention(q, q, q)

    def transformed() -> None:
        if transform == "vmap":
            vmap(call)(q).sum().backward()
        elif transform == "grad":
            grad(lambda x: call(x).sum())(q[0])
        else:
            out, pull = vjp(call, q[0])
            pull(out)

    transformed()
    calls, before = 10, live_tensors()
    for _ in range(calls):
        transformed()
    # Tensors that earlier tests have left come and go meanwhile, but less than one for each call.
    assert live_tensors() < before + calls


def test_slopes_of_one_sequence_serve_all_samples(device: str) -> None:
    q, slopes = number(device, 3, 1, 5, 2, 8), torch.tensor([[0.5, 2.0]], device=device)

    def call(q: Any) -> Any:
        return ct.flash_attention(q, q, q, alibi_slopes=slopes)

    assert_close(vmap(call)(q), torch.stack([call(x) for x in q]))
