"""Calls under `torch.autocast`: the casts are those of PyTorch's own function."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

LOWER = torch.bfloat16
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MASKS = [None, torch.bool, torch.bfloat16, torch.float32]
# PyTorch casts the float32 mask of a float64 call, and then refuses its dtype.
CASES = [*itertools.product(DTYPES[:3], MASKS), *itertools.product(DTYPES[3:], MASKS[:2])]


def rows(device: str, dtype: Any) -> list[Any]:
    return [torch.randn(2, 3, n, 16, device=device).to(dtype).requires_grad_() for n in (7, 9, 9)]


@pytest.mark.parametrize(("dtype", "mask"), CASES)
def test_dtypes_are_those_of_pytorch(dtype: Any, mask: Any, device: str) -> None:
    inputs = rows(device, dtype)
    bias = None if mask is None else (torch.rand(7, 9, device=device) < 0.5).to(mask)
    with torch.autocast(device, dtype=LOWER):
        out = ct.scaled_dot_product_attention(*inputs, bias)
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, bias)
    assert out.dtype == expected.dtype
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert all(x.dtype == dtype for x in found)


@pytest.mark.parametrize("mask", [torch.float32, torch.float64])
def test_the_mask_of_a_float64_call_is_not_cast(mask: Any, device: str) -> None:
    inputs, bias = rows(device, torch.float64), torch.randn(7, 9, device=device).to(mask)
    expected = ct.scaled_dot_product_attention(*inputs, bias)
    with torch.autocast(device, dtype=LOWER):
        assert torch.equal(ct.scaled_dot_product_attention(*inputs, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_results_are_those_of_a_call_on_casts(dtype: Any, device: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in rows(device, dtype))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    bias = torch.randn(1, 3, 1, 9, device=device, requires_grad=True)
    others = {"sinks": torch.randn(3, device=device, requires_grad=True)}
    others["alibi_slopes"] = torch.rand(3, device=device, requires_grad=True)
    inputs = [*leaves, bias, *others.values()]
    with torch.autocast(device, dtype=LOWER):
        out = ct.flash_attention(*leaves, bias=bias, **others)
    expected = ct.flash_attention(*(x.to(LOWER) for x in leaves), bias=bias.to(LOWER), **others)
    assert out.dtype == LOWER
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, dout)
    for gradient, of_casts, x in zip(
        found, torch.autograd.grad(expected, inputs, dout), inputs, strict=True
    ):
        assert gradient.dtype == x.dtype
        assert torch.equal(gradient, of_casts)


def test_packed_rows_are_cast(device: str) -> None:
    qkv = torch.randn(2, 6, 3, 2, 8, device=device, requires_grad=True)
    ends = torch.tensor([0, 6, 12], dtype=torch.int32, device=device)
    with torch.autocast(device, dtype=LOWER):
        out = ct.flash_attention_qkvpacked(qkv, causal=True)
        packed = [x.flatten(0, 1) for x in qkv.unbind(2)]
        again = ct.flash_attention_varlen(*packed, ends, ends, 6, 6, causal=True)
    assert out.dtype == again.dtype == LOWER
    # Dense and packed kernels may differ. Both round weights and output to 8 bits, each with an
    # error of up to 2^-9 times the largest value.
    largest = qkv[:, :, 2].abs().max().item()
    torch.testing.assert_close(out.flatten(0, 1), again, rtol=0, atol=2**-7 * largest)
    out.sum().backward()
    assert qkv.grad.dtype == torch.float32


def test_mixed_dtypes_are_cast_to_one(device: str) -> None:
    q, k, v = rows(device, torch.float32)
    with torch.autocast(device, dtype=LOWER):
        out = ct.scaled_dot_product_attention(q, k.to(LOWER), v.half())
        with torch.autocast(device, enabled=False):
            whole = ct.scaled_dot_product_attention(q, k, v)
    assert out.dtype == LOWER
    assert whole.dtype == torch.float32


# PyTorch's compiler uses deprecated functions of PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_calls_are_cast(device: str) -> None:
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in rows(device, torch.float32)]

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast(device, dtype=LOWER):
            return ct.flash_attention(q, k, v, causal=True)

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    assert torch.equal(out, call(*inputs))
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), inputs))
