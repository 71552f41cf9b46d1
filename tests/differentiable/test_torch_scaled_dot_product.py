"""`cupy_flash.torch.scaled_dot_product_attention` as a replacement for PyTorch's function."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

import cupy_flash  # noqa: E402

LEADING = [(), (4,), (2, 4), (3, 2, 4)]


def inputs(rng: Any, *leading: int, device: str = "cpu", heads_kv: int | None = None) -> list[Any]:
    """Return random query, key and value tensors in float64."""
    of_keys = leading if heads_kv is None else (*leading[:-1], heads_kv)
    shapes = ((*leading, 7, 5), (*of_keys, 10, 5), (*of_keys, 10, 3))
    return [random(rng, *shape, device=device) for shape in shapes]


def random(rng: np.random.Generator, *shape: int, device: str = "cpu") -> Any:
    return torch.tensor(rng.standard_normal(shape), device=device, requires_grad=True)


def formula(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute attention by PyTorch's elementary operations."""
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def assert_alike(rng: np.random.Generator, given: list[Any], **options: Any) -> None:
    """Assert that the result and all gradients are those of the formula."""
    of_mask = options.get("attn_mask")
    differentiable = list(given)
    if of_mask is not None and of_mask.requires_grad:
        differentiable.append(of_mask)
    found = ct.scaled_dot_product_attention(*given, **options)
    expected = formula(*given, **options)
    assert found.shape == expected.shape
    dout = random(rng, *found.shape, device=str(found.device)).detach()
    gradients = (torch.autograd.grad(x, differentiable, dout) for x in (found, expected))
    of_found, of_expected = gradients
    for x, y in zip((found, *of_found), (expected, *of_expected), strict=True):
        # Each element sums at most 720 products of order 10, in float64.
        np.testing.assert_allclose(x.detach().cpu(), y.detach().cpu(), rtol=0, atol=7200 * 2.0**-51)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("leading", LEADING)
def test_any_number_of_axes(
    leading: tuple[int, ...], is_causal: bool, device: str, rng: np.random.Generator
) -> None:
    given = inputs(rng, *leading, device=device)
    assert_alike(rng, given, is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("leading", LEADING)
def test_masks_that_broadcast(leading: tuple[int, ...], device: str, rng: Any) -> None:
    scores = (*leading, 7, 10)
    shapes = {scores[i:] for i in range(len(scores))}
    shapes |= {tuple(n if rng.random() < 0.5 else 1 for n in scores) for _ in range(4)}
    for shape in shapes:
        given = inputs(rng, *leading, device=device)
        added = random(rng, *shape, device=device)
        assert_alike(rng, given, attn_mask=added)
        # Key 0 stays visible, because the formula has no result for fully masked rows.
        seen = (added.detach() < 0.5) | (torch.arange(shape[-1], device=device) == 0)
        assert_alike(rng, given, attn_mask=seen)


def test_a_mask_of_float32_beside_float64(rng: np.random.Generator) -> None:
    mask = random(rng, 4, 7, 10).detach().float().requires_grad_()
    ct.scaled_dot_product_attention(*inputs(rng, 2, 4), mask).sum().backward()
    assert mask.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "function",
    [cupy_flash.scaled_dot_product_attention, ct.scaled_dot_product_attention],
    ids=["arrays", "tensors"],
)
def test_seeds_of_dropout_come_from_pytorchs_generator(function: Any) -> None:
    q, k, v = torch.randn(3, 2, 4, 19, 8)
    torch.manual_seed(5)
    first, second = (function(q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(function(q, k, v, dropout_p=0.3), first)
    assert not torch.equal(first, second)


def test_a_wholly_masked_row_is_zero_without_gradients(rng: np.random.Generator) -> None:
    given = inputs(rng, 2, 4)
    seen = torch.ones(7, 10, dtype=torch.bool)
    seen[3] = False
    out = ct.scaled_dot_product_attention(*given, seen)
    assert not out[..., 3, :].any()
    assert all(not x.any() for x in torch.autograd.grad(out[..., 3, :].sum(), given))


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_query_heads_that_share_keys(heads_kv: int, rng: np.random.Generator) -> None:
    given = inputs(rng, 2, 4, heads_kv=heads_kv)
    assert_alike(rng, given, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.0}])
def test_it_takes_the_place_of_pytorchs_function(options: dict[str, Any], rng: Any) -> None:
    given = inputs(rng, 2, 4)
    found = ct.scaled_dot_product_attention(*given, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(*given, **options)
    # The results are weighted means of numbers of order 1, in float64.
    torch.testing.assert_close(found, expected, rtol=0, atol=2.0**-46)


@pytest.mark.parametrize("of_mask", [None, "bool", "added"])
def test_a_compiled_call_is_one_graph(of_mask: str | None, rng: np.random.Generator) -> None:
    given = inputs(rng, 2, 4)
    mask = None if of_mask is None else random(rng, 7, 10)
    if mask is not None and of_mask == "bool":
        mask = mask.detach() < 0.5

    def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
        is_causal = mask is None
        return ct.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for function in (compiled, attention):
        for x in given:
            x.grad = None
        out = function(*given, mask)
        out.sum().backward()
        results = [out.detach(), *[x.grad for x in given]]
        if function is compiled:
            expected = results
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": np.zeros((1, 2, 3, 4))}, TypeError, "query is a ndarray; expected a tensor"),
        ({"attn_mask": np.zeros((3, 3))}, TypeError, "attn_mask is a ndarray; expected a tensor"),
        ({"key": torch.zeros(1, 2, 3, 4).double()}, TypeError,
         "key has dtype torch.float64; expected torch.float32, as query"),
        ({"attn_mask": torch.zeros(3, 3).half()}, TypeError,
         "attn_mask has dtype float16; expected bool or float32"),
        ({"attn_mask": torch.zeros(3, 4)}, ValueError,
         "attn_mask has shape (3, 4); expected one that broadcasts to (1, 2, 3, 3)"),
        ({"attn_mask": torch.zeros(3, 3), "is_causal": True}, ValueError,
         "attn_mask is given and is_causal is True"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5; expected a number from 0 to below 1"),
        ({"scale": torch.tensor(0.5)}, TypeError, "scale is a tensor, which has no gradient here"),
        ({"dropout_p": torch.zeros(())}, TypeError, "dropout_p is a tensor"),
        ({"key": torch.zeros(1, 1, 3, 4), "value": torch.zeros(1, 1, 3, 4)}, ValueError,
         "pass enable_gqa=True"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change: dict[str, Any], error: Any, message: str) -> None:
    given = {name: torch.zeros(1, 2, 3, 4) for name in ("query", "key", "value")}
    with pytest.raises(error, match=re.escape(message)):
        ct.scaled_dot_product_attention(**(given | change))
