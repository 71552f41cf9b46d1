"""Nested tensors of PyTorch: results and gradients are those of a loop over the sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cupy_flash import MaskMod, ScoreMod
from cupy_flash.calls.gpu import prepared_calls

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

# PyTorch warns of its prototype of nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")

LENGTHS = [(5, 9), (0, 3), (33, 33), (1, 70)]


def sequences(device: str, lengths: list[int], *shape: int, dtype: Any = None) -> list[Any]:
    dtype = dtype or torch.float64
    return [torch.randn(n, *shape, dtype=dtype, device=device) for n in lengths]


def nested(parts: list[Any], like: Any = None) -> Any:
    """Return sequences as a nested tensor, perhaps with the lengths of another one."""
    if like is None:
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), like.offsets()).requires_grad_()


def rows(device: str, dtype: Any = None) -> tuple[Any, Any, Any]:
    """Return nested q, k and v (batch, seqlen, heads, head_dim) of other lengths."""
    q = nested(sequences(device, [m for m, _ in LENGTHS], 4, 6, dtype=dtype))
    k = nested(sequences(device, [n for _, n in LENGTHS], 2, 6, dtype=dtype))
    return q, k, nested(sequences(device, [n for _, n in LENGTHS], 2, 3, dtype=dtype), k)


def assert_close(found: Any, expected: Any) -> None:
    # Sums of at most a hundred float64 products of order 1, added in another order.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=100 * 2**-50)


def assert_is_loop(
    attention: Callable[..., Any], inputs: tuple[Any, ...], alone: Callable[..., Any]
) -> None:
    """Compare a call on nested tensors with calls on each sequence, and their gradients."""
    out = attention(*inputs)
    q = inputs[0]
    assert out.offsets() is q.offsets()
    assert out.shape[:3] == q.shape[:3]
    parts = [[part.detach().requires_grad_() for part in x.unbind()] for x in inputs]
    weights = [torch.randn_like(part) for part in out.unbind()]
    found = torch.autograd.grad(
        sum((part * w).sum() for part, w in zip(out.unbind(), weights, strict=True)), inputs
    )
    for n, (w, *of_one) in enumerate(zip(weights, *parts, strict=True)):
        expected = alone(*(x[None] for x in of_one))[0]
        assert_close(out.unbind()[n], expected)
        gradients = torch.autograd.grad((expected * w).sum(), of_one)
        for gradient, x in zip(gradients, found, strict=True):
            assert_close(x.unbind()[n], gradient)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "first position": {"causal": True, "q_offset": 0},
    "window": {"causal": True, "window_size": (3, 0), "softcap": 2.0, "softmax_scale": 0.3},
    "slopes and sinks": {"alibi_slopes": [0.5, 1, 2, 0], "sinks": [0.1, 0.2, 0.3, 0.4]},
    "functions": {
        "score_mod": ScoreMod(lambda score, i, j: score * 0.5 - abs(i - j)),
        "mask_mod": MaskMod(lambda h, i, j: (i + j + h) % 3 > 0),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_calls_are_loops(layout: str, name: str, device: str) -> None:
    inputs = rows(device)
    if layout == "bhsd":
        inputs = tuple(x.detach().transpose(1, 2).requires_grad_() for x in inputs)

    def attention(*xs: Any) -> Any:
        return ct.flash_attention(*xs, layout=layout, **OPTIONS[name])

    assert_is_loop(attention, inputs, attention)


def test_packed_queries_keys_and_values_may_be_nested(device: str) -> None:
    qkv = nested([torch.randn(n, 3, 2, 6, dtype=torch.float64, device=device) for n in (5, 1, 8)])
    window = {"causal": True, "window_size": (3, 0)}

    def attention(x: Any) -> Any:
        return ct.flash_attention_qkvpacked(x, **window)

    out = attention(qkv)
    assert out.offsets() is qkv.offsets()
    weights = torch.randn_like(out.values())
    (found,) = torch.autograd.grad((out.values() * weights).sum(), qkv)
    parts = [part.detach().requires_grad_() for part in qkv.unbind()]
    expected = torch.cat([attention(part[None])[0] for part in parts])
    assert_close(out.values(), expected)
    gradients = torch.autograd.grad((expected * weights).sum(), parts)
    assert_close(found.values(), torch.cat(gradients))


def test_nested_queries_keys_and_values_of_other_axes_are_refused(device: str) -> None:
    parts = [torch.randn(n, 3, 2, 6, device=device) for n in (5, 1)]
    qkv = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ragged_heads = torch.nested.nested_tensor_from_jagged(
        torch.randn(4, 3, 6, 6, device=device), qkv.offsets(), jagged_dim=3
    )
    for wrong in (qkv.transpose(1, 2), ragged_heads):
        with pytest.raises(ValueError, match=r"head_dim\) with a ragged seqlen"):
            ct.flash_attention_qkvpacked(wrong)
    with pytest.raises(TypeError, match=r"layout torch\.strided; expected torch\.jagged"):
        ct.flash_attention_qkvpacked(torch.nested.nested_tensor(parts))


@pytest.mark.parametrize("is_causal", [False, True])
def test_pytorchs_function_takes_nested_tensors(is_causal: bool, device: str) -> None:
    def attention(*xs: Any) -> Any:
        named = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
        return ct.scaled_dot_product_attention(*xs, **named)

    inputs = tuple(x.detach().transpose(1, 2).requires_grad_() for x in rows(device))
    assert_is_loop(attention, inputs, attention)
    packed = nested(sequences(device, [5, 1, 8], 24)).chunk(3, -1)
    q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in packed)
    assert_is_loop(attention, tuple(x.detach().requires_grad_() for x in (q, k, v)), attention)


def test_the_log_sum_exp_is_nested(device: str) -> None:
    q, k, v = rows(device)
    out, lse = ct.flash_attention(q, k, v, causal=True, return_lse=True)
    assert lse.shape[:2] == (4, 4)
    for part, own, *xs in zip(*(x.unbind() for x in (lse, out, q, k, v)), strict=True):
        expected = ct.flash_attention(*(x[None] for x in xs), causal=True, return_lse=True)
        assert_close(own, expected[0][0])
        assert_close(part, expected[1][0])
    (dk,) = torch.autograd.grad(lse.values().sum(), k)
    assert dk.values().any()


def test_modifications_have_gradients(device: str) -> None:
    q, k, v = rows(device)
    slopes, table = (
        torch.rand(n, dtype=torch.float64, device=device, requires_grad=True) for n in (4, 104)
    )

    def attention(q: Any, k: Any, v: Any) -> Any:
        mod = ScoreMod(lambda score, i, j: score + table[i - j + 70])
        return ct.flash_attention(q, k, v, alibi_slopes=slopes, score_mod=mod)

    found = torch.autograd.grad(attention(q, k, v).values().sum(), (slopes, table))
    parts = zip(*(x.unbind() for x in (q, k, v)), strict=True)
    each = (attention(*(x[None] for x in xs)).sum() for xs in parts)
    assert_close(found, torch.autograd.grad(sum(each), (slopes, table)))


def test_sequences_may_have_gaps(device: str) -> None:
    padded = torch.randn(3, 7, 4, 6, dtype=torch.float64, device=device)
    start, length = torch.tensor([0, 2, 1], device=device), torch.tensor([4, 5, 0], device=device)
    x = torch.nested.narrow(padded, 1, start, length, layout=torch.jagged)
    out = ct.flash_attention(x, x, x, causal=True)
    assert out.lengths() is x.lengths()
    for part, one in zip(out.unbind(), x.unbind(), strict=True):
        assert_close(part, ct.flash_attention(one[None], one[None], one[None], causal=True)[0])


def test_autocast_casts_nested_tensors(device: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in rows(device, torch.float32))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = ct.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    assert out.offsets() is q.offsets()


def test_what_nested_tensors_do_not_have_is_refused(device: str) -> None:
    q, k, v = rows(device)
    dense = torch.zeros(4, 9, 2, 6, dtype=torch.float64, device=device)
    flipped = [x.transpose(1, 2) for x in (q, k, v)]
    strided = torch.nested.nested_tensor(list(dense))
    zero = torch.zeros((), device=device)
    cases: list[tuple[type[Exception], str, Callable[..., Any], list[Any], dict[str, Any]]] = [
        (ValueError, "bias is given with nested", ct.flash_attention, [q, k, v], {"bias": zero}),
        (ValueError, "seqlens_k is given", ct.flash_attention, [q, k, v], {"seqlens_k": [1] * 4}),
        (ValueError, "pass enable_gqa=True", ct.scaled_dot_product_attention, flipped, {}),
        (TypeError, "k is not nested", ct.flash_attention, [q, dense, dense], {}),
        (TypeError, "q is not nested", ct.flash_attention, [dense, k, v], {}),
        (ValueError, "v has other lengths than k", ct.flash_attention, [q, k, q], {}),
        (ValueError, "expected .batch, heads,", ct.flash_attention, [q, k, v], {"layout": "bhsd"}),
        (TypeError, "torch.jagged", ct.flash_attention, [strided] * 3, {}),
        (TypeError, "torch.jagged", ct.scaled_dot_product_attention, [strided] * 3, {}),
    ]
    for error, message, function, inputs, options in cases:
        with pytest.raises(error, match=message):
            function(*inputs, **options)
    with pytest.raises(ValueError, match="attn_mask is given with nested"):
        ct.scaled_dot_product_attention(*flipped, zero)


def test_keys_of_prepared_calls_refuse_nested_tensors() -> None:
    strided = torch.nested.nested_tensor(list(torch.zeros(4, 9, 2, 6)))
    with pytest.raises(TypeError, match=r"torch\.jagged"):
        prepared_calls.tensor_key(strided)
