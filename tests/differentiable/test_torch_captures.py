"""Gradients of ALiBi slopes and of captured tensors in PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.gradients.captured_calls import random_call_with
from support.gradients.gradient_rule import check_gradients

import cupy_flash
from cupy_flash import MaskMod, ScoreMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
torch_gradients = pytest.importorskip("support.gradients.torch_gradients")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["dense", "padded", "varlen"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["slopes", "captures"])
def test_gradients_are_those_of_the_reference(
    wanted: str, dtype: str, kind: str, seed: int, device: str
) -> None:
    call = random_call_with(wanted, seed, dtype, kind)
    check_gradients(call, torch_gradients.gradients(call, device))


def inputs_of(device: str) -> list[Any]:
    return [number(device, shape) for shape in ((2, 7, 4, 5), (2, 9, 2, 5), (2, 9, 2, 3))]


def number(device: str, shape: tuple[int, ...]) -> Any:
    return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)


@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
def test_slopes_have_gradients(shape: tuple[int, ...], device: str) -> None:
    def attention(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        options = {"causal": True, "softcap": 3.0, "return_lse": True}
        # The slopes of a call may be the result of an operation.
        return ct.flash_attention(q, k, v, alibi_slopes=slopes.exp(), **options)

    q, k, v, slopes = *inputs_of(device), number(device, shape)
    assert torch.autograd.gradcheck(attention, (q, k, v, slopes))
    rest = [x.detach() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda slopes: attention(*rest, slopes), (slopes,))


def test_slopes_of_packed_sequences_have_gradients(device: str) -> None:
    q, k, v = number(device, (9, 4, 5)), number(device, (11, 2, 5)), number(device, (11, 2, 5))
    ends_q, ends_k = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 4, 9], [0, 3, 11])
    )

    def attention(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return ct.flash_attention_varlen(q, k, v, ends_q, ends_k, 5, 8, alibi_slopes=slopes)

    for shape in ((4,), (2, 4)):
        assert torch.autograd.gradcheck(attention, (q, k, v, number(device, shape)))


def test_slopes_keep_their_dtype(device: str) -> None:
    q, k, v = (x.detach().float() for x in inputs_of(device))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        slopes = torch.ones(4, dtype=dtype, device=device, requires_grad=True)
        ct.flash_attention(q, k, v, alibi_slopes=slopes).square().sum().backward()
        assert slopes.grad.dtype == dtype
        assert slopes.grad.any()


def by_keyword(gain: Any, table: Any) -> ScoreMod:
    def function(score: Any, h: Any, i: Any, j: Any, gain: Any, table: Any) -> Any:
        return score * gain[h] + table[i - j + 9]

    return ScoreMod(function, gain=gain, table=table)


def by_closure(gain: Any, table: Any) -> ScoreMod:
    return ScoreMod(lambda score, h, i, j: score * gain[h] + table[i - j + 9])


def by_cuda(gain: Any, table: Any) -> ScoreMod:
    def function(score: Any, h: Any, i: Any, j: Any, gain: Any, table: Any) -> Any:
        return score * gain[h] + table[i - j + 9]

    source = "return score * gain(h) + table(i - j + 9);"
    return ScoreMod(function, cuda=source, gain=gain, table=table)


@pytest.mark.parametrize("make", [by_keyword, by_closure, by_cuda])
def test_captures_have_gradients_together_with_other_modifications(
    make: Callable[..., ScoreMod], device: str
) -> None:
    def attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
        gain, table, slopes, bias = others
        # The gradient passes through these operations to the leaves.
        mod = make(gain.sigmoid(), table * 2)
        return ct.flash_attention(q, k, v, score_mod=mod, alibi_slopes=slopes, bias=bias)

    others = [number(device, shape) for shape in ((4,), (20,), (2, 4), (1, 1, 7, 9))]
    assert torch.autograd.gradcheck(attention, (*inputs_of(device), *others))


def test_captures_are_read_when_a_call_is_made(device: str) -> None:
    q, k, v = inputs_of(device)
    gain, table = number(device, (4,)), number(device, (20,))
    mod = by_keyword(gain, table)
    for _ in range(2):
        found = torch.autograd.grad(
            ct.flash_attention(q, k, v, score_mod=mod).square().sum(), (q, gain, table)
        )
        anew = by_keyword(gain, table)
        out = ct.flash_attention(q, k, v, score_mod=anew)
        expected = torch.autograd.grad(out.square().sum(), (q, gain, table))
        assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            gain.mul_(0.5)


@pytest.mark.parametrize("name", ["slopes", "gain", "table"])
def test_what_is_overwritten_is_noticed(name: str, device: str) -> None:
    q, k, v = inputs_of(device)
    arrays = {"slopes": number(device, (4,)), "gain": number(device, (4,))}
    arrays["table"] = number(device, (20,))
    mod = by_keyword(arrays["gain"], arrays["table"])
    out = ct.flash_attention(q, k, v, score_mod=mod, alibi_slopes=arrays["slopes"])
    with torch.no_grad():
        arrays[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_table_is_learned(device: str) -> None:
    """A module whose function captures a parameter fits the outputs of another table."""

    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(20, dtype=torch.float64, device=device))
            self.mod = by_keyword(torch.ones(4, dtype=torch.float64, device=device), self.table)

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return ct.flash_attention(q, k, v, score_mod=self.mod)

    q, k, v = (x.detach() for x in inputs_of(device))
    model, errors = Biased(), []
    target = ct.flash_attention(q, k, v, bias=torch.eye(7, 9, dtype=q.dtype, device=device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(q, k, v) - target).square().mean()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    assert errors[-1] < errors[0] / 4


def test_what_has_no_gradient_is_refused(device: str) -> None:
    q, k, v = (x.detach() for x in inputs_of(device))
    limit, mod = number(device, (4,)), by_keyword(number(device, (4,)), number(device, (20,)))
    with pytest.raises(TypeError, match="limit requires a gradient"):
        MaskMod(lambda h, j: limit[h] > j)
    with pytest.raises(TypeError, match="gain requires a gradient"):
        cupy_flash.flash_attention(q, k, v, score_mod=mod)
    with torch.no_grad():
        expected = ct.flash_attention(q, k, v, score_mod=mod)
        assert not expected.requires_grad
        assert torch.equal(cupy_flash.flash_attention(q, k, v, score_mod=mod), expected)
    # A capture that is listed as differentiable without requiring a gradient gets none.
    named = {"gain": limit.detach(), "differentiable": ("gain",)}
    constant = ScoreMod(lambda score, h, gain: score * gain[h], **named)
    assert not ct.flash_attention(q, k, v, score_mod=constant).requires_grad
    out = ct.flash_attention(q.requires_grad_(), k, v, score_mod=constant)
    assert torch.autograd.grad(out.sum(), q)[0].any()
