"""Row statistics of `cupy_flash.torch`: results without gradients in addition to out and lse."""

from __future__ import annotations

from typing import Any

import pytest

import cupy_flash

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

STATISTICS = {"return_max_logits": True, "return_entropy": True}


def rows(device: str, dtype: Any = None) -> list[Any]:
    kind = {"dtype": dtype or torch.float64, "device": device}
    shapes = (2, 19, 4, 8), (2, 21, 2, 8), (2, 21, 2, 6)
    return [torch.randn(shape, **kind).requires_grad_() for shape in shapes]


def same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach().cpu(), torch.as_tensor(y).detach().cpu())


def reference(q: Any, k: Any, v: Any, **options: Any) -> Any:
    host = (x.detach().cpu() for x in (q, k, v))
    return cupy_flash.attention_reference(*host, **options, **STATISTICS)


@pytest.mark.parametrize("causal", [False, True])
def test_statistics_have_no_gradients_and_out_has_the_same(causal: bool, device: str) -> None:
    inputs = rows(device)
    out, *statistics = ct.flash_attention(*inputs, causal=causal, **STATISTICS)
    same((out, *statistics), reference(*inputs, causal=causal))
    assert not any(x.requires_grad for x in statistics)
    found = torch.autograd.grad(out.sum(), inputs)
    expected = torch.autograd.grad(ct.flash_attention(*inputs, causal=causal).sum(), inputs)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(RuntimeError, match="does not require grad"):
        statistics[0].sum().backward()


def test_lse_has_its_gradient_if_statistics_are_returned(device: str) -> None:
    inputs = rows(device)
    _, lse, _ = ct.flash_attention(*inputs, return_lse=True, return_entropy=True)
    _, expected = ct.flash_attention(*inputs, return_lse=True)
    found = torch.autograd.grad(lse.square().sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad(expected.square().sum(), inputs, allow_unused=True)
    for x, y in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(x, y)


def test_modified_calls_and_other_functions_return_statistics(device: str) -> None:
    q, k, v = rows(device)
    bias = torch.randn(4, 19, 21, dtype=torch.float64, device=device)[None]
    host = bias.cpu()
    same(
        ct.flash_attention(q, k, v, bias=bias, **STATISTICS),
        reference(q, k, v, bias=host),
    )
    expected = ct.flash_attention(q, k, v, **STATISTICS)
    qkv = torch.stack([q, q, q], -3)
    same(ct.flash_attention_qkvpacked(qkv, **STATISTICS), ct.flash_attention(q, q, q, **STATISTICS))
    starts = torch.tensor([0, 19], dtype=torch.int32, device=device)
    ends = torch.tensor([0, 21], dtype=torch.int32, device=device)
    found = ct.flash_attention_varlen(q[0], k[0], v[0], starts, ends, 19, 21, **STATISTICS)
    same(found, (x[0] for x in expected))
    cached = (x.detach() for x in (q, k, v))
    found = ct.flash_attention_with_kvcache(*cached, cache_seqlens=21, **STATISTICS)
    same(found, expected)


def test_nested_tensors_give_nested_statistics(device: str) -> None:
    parts = [torch.randn(length, 2, 8, device=device) for length in (5, 3, 9)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    results = ct.flash_attention(nested, nested, nested, return_lse=True, **STATISTICS)
    for index, part in enumerate(parts):
        expected = ct.flash_attention(*[part[None]] * 3, return_lse=True, **STATISTICS)
        found = [x.unbind()[index] for x in results]
        same(found, (x[0] for x in expected))


def test_compiled_functions_compute_statistics_outside_of_the_graph(device: str) -> None:
    inputs = [x.detach() for x in rows(device)]

    def twice(q: Any, k: Any, v: Any) -> Any:
        return [2 * x for x in ct.flash_attention(q, k, v, **STATISTICS)]

    def step(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention_with_kvcache(q, k, v, cache_seqlens=21, **STATISTICS)

    same(torch.compile(twice)(*inputs), twice(*inputs))
    same(torch.compile(step)(*inputs), step(*inputs))


def test_transforms_refuse_statistics(device: str) -> None:
    q, k, v = rows(device)

    def loss(q: Any) -> Any:
        return ct.flash_attention(q, k, v, return_entropy=True)[0].sum()

    with pytest.raises(NotImplementedError, match="entropy of attention is not computed inside"):
        torch.func.grad(loss)(q)
