"""Lists of keys in `cupy_flash.torch`: results, gradients, transforms and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import UnsupportedError

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

ENDS_Q, ENDS_K = [0, 3, 3, 8], [0, 9, 11, 16]


def dense_call(device: str, rng: np.random.Generator, **grad: bool) -> tuple[list[Any], Any]:
    """Return q, k, v and lists with repeated keys and -1."""
    shapes = (2, 5, 4, 6), (2, 9, 2, 6), (2, 9, 2, 3)
    inputs = [torch.tensor(rng.standard_normal(x), device=device, **grad) for x in shapes]
    return inputs, torch.tensor(rng.integers(-1, 9, (2, 5, 2, 7)), device=device)


def packed_call(device: str, rng: np.random.Generator, **grad: bool) -> tuple[list[Any], Any, Any]:
    """Return q, k and v, lists, and the lengths of the sequences."""
    shapes = (8, 4, 6), (16, 2, 6), (16, 2, 3)
    inputs = [torch.tensor(rng.standard_normal(x), device=device, **grad) for x in shapes]
    lists = torch.tensor(rng.integers(-1, 9, (8, 1, 7)), device=device)
    ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ENDS_Q, ENDS_K))
    return inputs, lists, (*ends, 5, 9)


def on_host(tensor: Any) -> np.ndarray:
    host: np.ndarray = tensor.detach().cpu().numpy()
    return host


@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients_are_those_of_arrays(
    causal: bool, device: str, rng: np.random.Generator
) -> None:
    (q, k, v), lists = dense_call(device, rng, requires_grad=True)
    options = {"causal": causal, "softcap": 3.0}
    out, lse = ct.flash_attention(q, k, v, key_indices=lists, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, torch.nan_to_num(dlse)))
    arrays = [on_host(x) for x in (q, k, v)]
    given = options | {"key_indices": on_host(lists)}
    expected, expected_lse = cupy_flash.attention_reference(*arrays, return_lse=True, **given)
    np.testing.assert_allclose(on_host(out), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(on_host(lse), expected_lse, rtol=0, atol=1e-13)
    gradients = cupy_flash.attention_backward_reference(
        on_host(dout), *arrays, dlse=on_host(dlse), **given
    )
    for x, y in zip(found, gradients, strict=True):
        np.testing.assert_allclose(on_host(x), y, rtol=0, atol=1e-12)


def test_autograd_agrees_with_differences(device: str, rng: np.random.Generator) -> None:
    inputs, lists = dense_call(device, rng, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: ct.flash_attention(*x, causal=True, key_indices=lists), inputs, fast_mode=True
    )
    inputs, lists, lengths = packed_call(device, rng, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: ct.flash_attention_varlen(*x, *lengths, key_indices=lists),
        inputs,
        fast_mode=True,
    )


def test_transforms(device: str, rng: np.random.Generator) -> None:
    (q, k, v), lists = dense_call(device, rng)

    def loss(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return ct.flash_attention(q, k, v, key_indices=lists).sin().sum()

    found = torch.func.grad(loss, (0, 1, 2))(q, k, v, lists)
    # Samples of an axis are sequences of one more axis.
    each = [x[:, None] for x in (q, k, v, lists)]
    mapped = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*each)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(loss(*leaves, lists), leaves)
    for x, y, z in zip(found, mapped, expected, strict=True):
        torch.testing.assert_close(x, z, rtol=0, atol=1e-12)
        torch.testing.assert_close(y[:, 0], z, rtol=0, atol=1e-12)


def test_a_compiled_function_is_one_graph(device: str, rng: np.random.Generator) -> None:
    def dense(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return ct.flash_attention(q.sin(), k, v, causal=True, key_indices=lists).cos()

    inputs, lists = dense_call(device, rng, requires_grad=True)
    packed_inputs, packed_lists, lengths = packed_call(device, rng, requires_grad=True)

    def packed(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return ct.flash_attention_varlen(q.sin(), k, v, *lengths, key_indices=lists).cos()

    for function, given, own in ((dense, inputs, lists), (packed, packed_inputs, packed_lists)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = [
            (out := run(*given, own), *torch.autograd.grad(out.sum(), given))
            for run in (compiled, function)
        ]
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_lists_must_not_change_before_the_backward_pass(
    device: str, rng: np.random.Generator
) -> None:
    inputs, lists = dense_call(device, rng, requires_grad=True)
    out = ct.flash_attention(*inputs, key_indices=lists)
    lists[0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_other_derivatives_are_errors(device: str, rng: np.random.Generator) -> None:
    (q, k, v), lists = dense_call(device, rng, requires_grad=True)
    out = ct.flash_attention(q, k, v, key_indices=lists)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="key_indices has neither tangents nor second"):
        dq.sum().backward()
    plain = [x.detach() for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="key_indices has neither tangents nor second"):
        torch.func.jvp(
            lambda q: ct.flash_attention(q, *plain[1:], key_indices=lists),
            (plain[0],),
            (plain[0],),
        )
    bias = torch.zeros(1, 4, 5, 9, dtype=torch.float64, device=device, requires_grad=True)
    out = ct.flash_attention(*plain, key_indices=lists, bias=bias)
    with pytest.raises(UnsupportedError, match="wrt names 'bias'"):
        out.sum().backward()


def test_rows_of_pages_in_a_step_of_generation(device: str, rng: np.random.Generator) -> None:
    q, pages = rng.standard_normal((2, 1, 4, 8)), rng.standard_normal((2, 6, 4, 2, 8))
    table, lists = np.array([[3], [1]], np.int32), rng.integers(-1, 24, (2, 1, 2, 9))
    options = {"cache_seqlens": 3, "key_indices_in": "pages"}
    given = {"block_table": table, "key_indices": lists}
    expected = cupy_flash.attention_with_kvcache_reference(q, *pages, **given, **options)
    tensors = [torch.tensor(x, device=device) for x in (q, *pages)]
    options |= {name: torch.tensor(x, device=device) for name, x in given.items()}
    out = ct.flash_attention_with_kvcache(*tensors, **options)
    np.testing.assert_allclose(on_host(out), expected.out, rtol=0, atol=1e-13)


def test_nested_tensors_are_refused(rng: np.random.Generator) -> None:
    rows = [torch.randn(n, 2, 4) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(ValueError, match="key_indices are given with nested tensors"):
        ct.flash_attention(nested, nested, nested, key_indices=torch.zeros(2, 1, 1, 1).int())


def test_operations_of_listed_pairs_are_counted(rng: np.random.Generator) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs, lists = dense_call("cpu", rng)
    with FlopCounterMode(display=False) as counter:
        ct.flash_attention(*inputs, key_indices=lists)
    # Pairs of 2 sequences, 5 queries, 4 heads and 7 keys; columns of keys and of values.
    assert counter.get_total_flops() == 2 * (2 * 5 * 4 * 7) * (6 + 3)
    inputs, lists, lengths = packed_call("cpu", rng)
    with FlopCounterMode(display=False) as counter:
        ct.flash_attention_varlen(*inputs, *lengths, key_indices=lists)
    assert counter.get_total_flops() == 2 * (8 * 4 * 7) * (6 + 3)
