"""Tensors whose memory does not hold their values: resolved, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def imaginary(x: Any) -> Any:
    """Return a tensor with the values of `x` that is a lazy negation."""
    lazy = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert lazy.is_neg()
    return lazy


def negative(x: Any) -> Any:
    return torch._neg_view(-x)


def zeros(x: Any) -> Any:
    lazy = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)
    assert lazy._is_zerotensor()
    return lazy


LAZY = [imaginary, negative]


def numbers(device: str) -> Any:
    return torch.randn(1, 5, 2, 8, device=device)


def cache_of(x: Any) -> Any:
    return torch.cat((x, x), 1)


def ends(x: Any) -> Any:
    return torch.tensor([0, 2, 5], dtype=torch.int32, device=x.device)


def slopes(x: Any) -> Any:
    return torch.tensor([0.5, 0.25], device=x.device)


def lse_of(x: Any) -> Any:
    return torch.zeros(1, 1, 2, 5, device=x.device)


def stacked(x: Any) -> Any:
    """Return an array of queries, keys and values that views `x` three times."""
    return x.expand(3, 5, 2, 8).transpose(0, 1)[None]


# Calls in which only the named argument is `lazy`.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "q": lambda x, lazy: cupy_flash.flash_attention(lazy, x, x),
    "k": lambda x, lazy: cupy_flash.flash_attention(x, lazy, x),
    "v": lambda x, lazy: cupy_flash.flash_attention(x, x, lazy),
    "torch k": lambda x, lazy: ct.flash_attention(x, lazy, x),
    "torch q": lambda x, lazy: ct.flash_attention(lazy, x, x),
    "bhsd": lambda x, lazy: ct.flash_attention(x, x, lazy, layout="bhsd"),
    "bias": lambda x, lazy: ct.flash_attention(x, x, x, bias=lazy.mT[:, :1, :1, :1]),
    "qkvpacked": lambda x, lazy: cupy_flash.flash_attention_qkvpacked(stacked(lazy)),
    "torch qkvpacked": lambda x, lazy: ct.flash_attention_qkvpacked(stacked(lazy)),
    "varlen": lambda x, lazy: cupy_flash.flash_attention_varlen(
        x[0], lazy[0], x[0], ends(x), ends(x), 3, 3
    ),
    "torch varlen": lambda x, lazy: ct.flash_attention_varlen(
        x[0], x[0], lazy[0], ends(x), ends(x), 3, 3
    ),
    "cached q": lambda x, lazy: cupy_flash.flash_attention_with_kvcache(
        lazy, cache_of(x), cache_of(x), cache_seqlens=7
    ),
    "appended": lambda x, lazy: cupy_flash.flash_attention_with_kvcache(
        x, cache_of(x), cache_of(x), lazy, x, cache_seqlens=2
    ),
    "combine": lambda x, lazy: cupy_flash.combine(lazy[None], lse_of(x))[0],
    "dout": lambda x, lazy: gradients(x, lazy)[1],
    "reference": lambda x, lazy: cupy_flash.attention_reference(x, lazy, x),
}


def gradients(x: Any, dout: Any) -> Any:
    out, lse = cupy_flash.flash_attention(x, x, x, return_lse=True)
    return cupy_flash.flash_attention_backward(dout, x, x, x, out, lse)


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("name", CALLS)
def test_lazy_negation_is_resolved(name: str, lazy: Any, device: str) -> None:
    x, given = numbers(device), numbers(device)
    call = CALLS[name]
    if name == "reference" and device == "cuda":
        pytest.importorskip("cupyx")
    for _ in range(2):
        found, expected = call(x, lazy(given)), call(x, given.clone())
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "bias"])
def test_zeros_without_memory_are_zeros_or_refused(name: str, device: str) -> None:
    x = numbers(device)
    try:
        found = CALLS[name](x, zeros(x))
    except NotImplementedError as error:
        assert "has no memory" in str(error)  # noqa: PT017
        assert device == "cuda"
    else:
        assert torch.equal(found, CALLS[name](x, torch.zeros_like(x)))


@pytest.mark.parametrize("lazy", LAZY)
def test_gradients_of_lazy_tensors_are_those_of_resolved_ones(lazy: Any, device: str) -> None:
    x, given, dout = numbers(device), numbers(device), numbers(device)
    for _ in range(2):
        found = []
        for k, gradient in ((lazy(given), lazy(dout)), (given.clone(), dout.clone())):
            k.requires_grad_()
            found.append(torch.autograd.grad(ct.flash_attention(x, k, x), k, gradient))
        assert torch.equal(found[0][0].resolve_neg(), found[1][0])


@pytest.mark.parametrize("lazy", [*LAZY, zeros])
def test_lazy_tensors_are_not_written(lazy: Any, device: str) -> None:
    x = numbers(device)
    written = lazy(numbers(device))
    if lazy is zeros and device == "cuda":
        # Calls with tensors on a GPU read addresses before they check anything else.
        with pytest.raises(NotImplementedError, match="has no memory"):
            cupy_flash.flash_attention(x, x, x, out=written)
        return
    with pytest.raises(TypeError, match=r"out is a lazy view, .*; pass out\.clone\(\)"):
        cupy_flash.flash_attention(x, x, x, out=written)
    caches = {"k_cache": cache_of(x), "v_cache": cache_of(x)}
    for name in caches:
        given = caches | {name: lazy(cache_of(x))}
        with pytest.raises(TypeError, match=f"{name} is a lazy view"):
            cupy_flash.flash_attention_with_kvcache(x, **given, k=x, v=x, cache_seqlens=2)
    out, lse = cupy_flash.flash_attention(x, x, x, return_lse=True)
    with pytest.raises(TypeError, match="dk is a lazy view"):
        cupy_flash.flash_attention_backward(x, x, x, x, out, lse, dk=written)
    with pytest.raises(TypeError, match="out is a lazy view"):
        cupy_flash.combine(x[None], lse_of(x), out=written)


def test_lazy_captures_are_refused(device: str) -> None:
    """Calls read captures in place, so a copy would not show later writes."""
    gain = negative(slopes(numbers(device)))
    with pytest.raises(TypeError, match=r"gain is a lazy view, .*; pass gain\.clone\(\)"):
        cupy_flash.ScoreMod(lambda score, h, gain: score * gain[h], gain=gain)


def test_conjugation_is_resolved_before_the_dtype_is_refused(device: str) -> None:
    x = numbers(device)
    lazy = torch.complex(x, x).conj()
    with pytest.raises(TypeError, match="k has dtype complex64; expected one of float16"):
        cupy_flash.flash_attention(x, lazy, x)


class Named(torch.Tensor):
    """Subclass that does not override operations, so its memory holds its values."""


class Wrapped(torch.Tensor):
    """Subclass with its own operations."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*[getattr(x, "inner", x) for x in args], **(kwargs or {}))


ATTENTION = [cupy_flash.flash_attention, ct.flash_attention]


# PyTorch warns that the interface of nested tensors may change.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.to("meta"), "k is a meta tensor, which has no memory"),
        (lambda x: x.to_sparse(), r"k has the layout torch\.sparse_coo; expected torch\.strided"),
        (Wrapped, "k is a Wrapped, a subclass of torch.Tensor"),
        (
            lambda x: torch.nested.nested_tensor([x[0], x[0, :2]]),
            "k has the layout nested; expected torch.strided",
        ),
    ],
)
def test_what_has_no_memory_of_its_own_is_refused(attention: Any, make: Any, message: str) -> None:
    x = numbers("cpu")
    with pytest.raises(TypeError, match=message):
        attention(x, make(x), x)


@pytest.mark.parametrize("attention", ATTENTION)
def test_plain_subclasses_are_read(attention: Any, device: str) -> None:
    x = numbers(device)
    expected = attention(x, x, x)
    assert torch.equal(attention(x, x.as_subclass(Named), x), expected)
    found = attention(*[x.as_subclass(Named)] * 3)
    assert torch.equal(found, expected)


def test_masks_of_torch_are_read_in_their_dtypes(device: str) -> None:
    x = numbers(device)
    seen = torch.tensor(np.tri(5, dtype=bool), device=device)
    expected = cupy_flash.flash_attention(x, x, x, causal=True)
    documents = torch.zeros(5, dtype=torch.int64, device=device)
    mod = cupy_flash.MaskMod(lambda i, j, t: (t[i] == t[j]) & (j <= i), t=documents)
    bits = torch.tensor([[1, 3, 7, 15, 31]], dtype=torch.uint64, device=device)
    for options in ({"mask": seen}, {"mask_mod": mod}, {"tree_mask": bits}):
        for attention in ATTENTION:
            for _ in range(2):
                found = attention(x, x, x, **options)
                # Each element sums at most 5 products of order 1, in float32.
                np.testing.assert_allclose(found.cpu(), expected.cpu(), rtol=0, atol=2**-20)
