"""Dropout of `cupy_flash.torch`: seeds, gradients, transforms, checkpoints and other adapters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import MaskMod, UnsupportedError

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
fa = pytest.importorskip("cupy_flash.flash_attn")

from torch.func import grad, vmap  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

P = 0.3
# Probability that is dropped: a multiple of 1 / 256.
EXACT_P = round(256 * P) / 256
SEED = (2**63 - 5, -7)


def tensors(device: str, *shapes: tuple[int, ...]) -> list[Any]:
    """Return random float64 tensors that require gradients."""
    kind = {"dtype": torch.float64, "device": device}
    return [torch.randn(shape, **kind).requires_grad_() for shape in shapes]


def rows(device: str) -> list[Any]:
    return tensors(device, (2, 19, 4, 8), (2, 21, 2, 8), (2, 21, 2, 6))


def seed_on(device: str, seed: tuple[int, int] = SEED) -> Any:
    return torch.tensor(seed, device=device)


def host(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy()


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(host(found), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", ["tensor", "list", "integer", "unsigned", "int32"])
def test_results_and_gradients_are_those_of_numpy_calls(seed: str, device: str) -> None:
    inputs = rows(device)
    numbers = {"integer": [SEED[0], 0], "unsigned": [2**64 - 3, 0], "int32": [9, -7]}
    pair = numbers.get(seed, list(SEED))
    given: Any = pair if seed == "list" else pair[0]
    if seed in ("tensor", "int32"):
        given = torch.tensor(pair, dtype=getattr(torch, "int32" if seed == "int32" else "int64"))
        given = given.to(device)
    out, lse = ct.flash_attention(
        *inputs, causal=True, dropout_p=P, dropout_seed=given, return_lse=True
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    dropout = {"dropout_p": P, "dropout_seed": pair, "causal": True}
    arrays = [host(x) for x in inputs]
    expected = cupy_flash.flash_attention(*arrays, **dropout, return_lse=True)
    gradients = cupy_flash.flash_attention_backward(
        host(dout), *arrays, *expected, dlse=host(dlse), **dropout
    )
    for x, y in zip((out, lse, *found), (*expected, *gradients), strict=True):
        close(x, y)


def test_gradients_are_finite_differences(device: str) -> None:
    q, k, v, bias, sinks = tensors(
        device, (1, 5, 2, 4), (1, 6, 1, 4), (1, 6, 1, 3), (1, 2, 5, 6), (2,)
    )
    seed = seed_on(device)

    def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        return ct.flash_attention(
            *(q, k, v), bias=bias, sinks=sinks, dropout_p=P, dropout_seed=seed, return_lse=True
        )

    assert torch.autograd.gradcheck(call, (q, k, v, bias, sinks))


def test_packed_sequences_and_nested_tensors_drop_the_same_weights(device: str) -> None:
    lengths = [7, 12]
    ends = torch.tensor([0, 7, 19], dtype=torch.int32, device=device)
    q, k, v = tensors(device, (19, 4, 8), (19, 2, 8), (19, 2, 8))
    dropout = {"dropout_p": P, "dropout_seed": seed_on(device)}
    out = ct.flash_attention_varlen(q, k, v, ends, ends, 12, 12, **dropout)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    nested = [torch.nested.nested_tensor_from_jagged(x, ends.long()) for x in (q, k, v)]
    of_nested = ct.flash_attention(*nested, **dropout)
    close(of_nested.values(), host(out))
    of_nested = torch.autograd.grad(of_nested.values(), (q, k, v), dout)
    for x, y in zip(of_nested, gradients, strict=True):
        close(x, host(y))
    dense = [torch.zeros(2, 12, *x.shape[1:], dtype=x.dtype, device=device) for x in (q, k, v)]
    for x, whole in zip((q, k, v), dense, strict=True):
        whole[0, :7], whole[1] = x[:7], x[7:]
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    padded = ct.flash_attention(*dense, seqlens_k=used, **dropout)
    close(torch.cat((padded[0, :7], padded[1])), host(out))


def drawing(name: str, device: str) -> Any:
    """Return a function without arguments that calls a function without giving it a seed."""
    q, k, v = (x.detach() for x in tensors(device, *[(2, 19, 4, 8)] * 3))
    ends = torch.tensor([0, 18, 38], dtype=torch.int32, device=device)
    packed = [x.reshape(38, 4, 8) for x in (q, k, v)]
    calls = {
        "flash_attention": lambda: ct.flash_attention(q, k, v, dropout_p=P),
        "flash_attention_qkvpacked": lambda: ct.flash_attention_qkvpacked(
            torch.stack((q, k, v), 2), dropout_p=P
        ),
        "flash_attention_varlen": lambda: ct.flash_attention_varlen(
            *packed, ends, ends, 20, 20, dropout_p=P
        ),
        "scaled_dot_product_attention": lambda: ct.scaled_dot_product_attention(q, k, v, None, P),
        "flash_attn_func": lambda: fa.flash_attn_func(q, k, v, P),
        "flash_attn_kvpacked_func": lambda: fa.flash_attn_kvpacked_func(
            q, torch.stack((k, v), 2), P
        ),
        "flash_attn_qkvpacked_func": lambda: fa.flash_attn_qkvpacked_func(
            torch.stack((q, k, v), 2), P
        ),
        "flash_attn_varlen_func": lambda: fa.flash_attn_varlen_func(*packed, ends, ends, 20, 20, P),
        "flash_attn_varlen_kvpacked_func": lambda: fa.flash_attn_varlen_kvpacked_func(
            packed[0], torch.stack(packed[1:], 1), ends, ends, 20, 20, P
        ),
        "flash_attn_varlen_qkvpacked_func": lambda: fa.flash_attn_varlen_qkvpacked_func(
            torch.stack(packed, 1), ends, 20, P
        ),
        "flash_attn_varlen_func with block_table": lambda: fa.flash_attn_varlen_func(
            packed[0],
            *(x.reshape(2, 19, 4, 8) for x in packed[1:]),
            *(ends, torch.tensor([0, 19, 38], dtype=torch.int32, device=device), 20, 19, P),
            block_table=torch.tensor([[0], [1]], dtype=torch.int32, device=device),
        ),
    }
    return calls[name]


@pytest.mark.parametrize(
    "name",
    [
        *("flash_attention", "flash_attention_qkvpacked", "flash_attention_varlen"),
        *("scaled_dot_product_attention", "flash_attn_func", "flash_attn_kvpacked_func"),
        *("flash_attn_qkvpacked_func", "flash_attn_varlen_func"),
        *("flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"),
        "flash_attn_varlen_func with block_table",
    ],
)
def test_the_generator_of_torch_draws_a_new_seed_for_each_call(name: str, device: str) -> None:
    call = drawing(name, device)
    torch.manual_seed(3)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)


def test_no_dropout_draws_no_numbers(device: str) -> None:
    q, k, v = rows(device)
    plain = ct.flash_attention(q, k, v)
    on_device = torch.cuda if device == "cuda" else torch
    before = on_device.get_rng_state()
    for dropout_p in (0, 0.0, None):
        assert torch.equal(ct.flash_attention(q, k, v, dropout_p=dropout_p), plain)
    assert torch.equal(fa.flash_attn_func(q, k, v, 0.0), plain)
    assert torch.equal(on_device.get_rng_state(), before)


def test_the_share_of_dropped_weights_is_the_probability(device: str) -> None:
    q = torch.zeros(4, 256, 2, 8, device=device)
    # All weights are equal, so that the sum of a row counts those that are kept.
    out = ct.flash_attention(q, q, torch.ones_like(q), dropout_p=P)
    count, kept = 4 * 2 * 256 * 256, float((out[..., 0] * (1 - EXACT_P)).mean())
    assert abs(kept - (1 - EXACT_P)) < 5 * math.sqrt(EXACT_P * (1 - EXACT_P) / count)
    # Rows of different sequences, heads and queries drop different weights.
    assert len(out[..., 0].unique()) > 20


def test_gradients_of_drawn_seeds_belong_to_their_forward_pass(device: str) -> None:
    q, k, v = rows(device)
    out, other = (ct.flash_attention(q, k, v, dropout_p=P) for _ in range(2))
    dout = torch.randn_like(out)
    # out is linear in v, so that its gradient shows which weights the backward pass drops.
    for x in (out, other):
        (dv,) = torch.autograd.grad(x, v, dout)
        torch.testing.assert_close((dv * v).sum(), (dout * x).sum(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_compute_the_same_gradients(use_reentrant: bool, device: str) -> None:
    inputs = rows(device)

    def block(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q, k, v, dropout_p=P).sin()

    def gradients(out: Any) -> list[Any]:
        # Numbers that are drawn before the backward pass make no difference.
        torch.rand(5, device=device)
        for x in inputs:
            x.grad = None
        out.sum().backward()
        return [out, *(x.grad for x in inputs)]

    torch.manual_seed(11)
    expected = gradients(block(*inputs))
    torch.manual_seed(11)
    found = gradients(checkpoint(block, *inputs, use_reentrant=use_reentrant))
    assert all(map(torch.equal, found, expected))


def test_a_seed_that_is_overwritten_is_an_error_of_the_backward_pass(device: str) -> None:
    q, k, v = rows(device)
    seed = seed_on(device)
    out = ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_lists_are_read_in_the_forward_pass(device: str) -> None:
    q, k, v = rows(device)
    seed = list(SEED)
    expected = torch.autograd.grad(
        ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed).sum(), (q, k, v)
    )
    out = ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed)
    seed[0] = 5
    for x, y in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("seed", [list(SEED), 7, None])
def test_torch_func_grad(seed: Any, device: str) -> None:
    q, k, v = (x.detach() for x in rows(device))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed).sin().sum()

    torch.manual_seed(2)
    found = grad(loss, (0, 1, 2))(q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(2)
    for x, y in zip(found, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        assert torch.equal(x, y)


def test_mapped_calls_drop_what_each_call_does(device: str) -> None:
    q, k, v = (x.detach() for x in rows(device))
    many = torch.stack([q, 2 * q, 3 * q])
    seeds = torch.tensor([[1, 0], [2, 5], [3, 9]], device=device)

    def call(q: Any, seed: Any) -> Any:
        return ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed)

    def gradient(q: Any, seed: Any) -> Any:
        return grad(lambda q: call(q, seed).sin().sum())(q)

    for function in (call, gradient):
        expected = torch.stack([function(*each) for each in zip(many, seeds, strict=True)])
        assert torch.equal(vmap(function)(many, seeds), expected)
        expected = torch.stack([function(each, seeds[0]) for each in many])
        assert torch.equal(vmap(function, (0, None))(many, seeds[0]), expected)


def test_randomness_of_maps_is_that_of_torch(device: str) -> None:
    q, k, v = (x.detach() for x in rows(device))
    many = torch.stack([q, q, q])

    def call(q: Any) -> Any:
        return ct.flash_attention(q, k, v, dropout_p=P)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(many)
    first, second, third = vmap(call, randomness="different")(many)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    first, second, third = vmap(call, randomness="same")(many)
    assert torch.equal(first, second)
    assert torch.equal(second, third)
    assert not torch.equal(first, ct.flash_attention(q, k, v))


def test_autocast(device: str) -> None:
    q, k, v = (x.detach().float() for x in rows(device))
    dropout = {"dropout_p": P, "dropout_seed": seed_on(device)}
    with torch.autocast(device, torch.bfloat16):
        found = ct.flash_attention(q, k, v, **dropout)
    assert torch.equal(found, ct.flash_attention(*(x.bfloat16() for x in (q, k, v)), **dropout))


@pytest.mark.parametrize("mask", [None, "bool", "bias"])
def test_scaled_dot_product_attention_drops_the_weights_of_the_seed(
    mask: str | None, device: str
) -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in rows(device))
    attn_mask = None
    if mask is not None:
        attn_mask = torch.randn(1, 4, 19, 21, dtype=torch.float64, device=device)
        attn_mask = attn_mask > 0 if mask == "bool" else attn_mask
    seed = seed_on(device)
    found = ct.scaled_dot_product_attention(
        q, k, v, attn_mask, P, enable_gqa=True, dropout_seed=seed
    )
    kept = cupy_flash.dropout_mask(2, 4, 19, 21, P, list(SEED))
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(8)
    if mask == "bool":
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif mask == "bias":
        scores = scores + attn_mask
    weights = scores.softmax(-1) * torch.as_tensor(kept, device=device) / (1 - EXACT_P)
    close(found, host(weights @ v.repeat_interleave(2, 1)))


def test_operators_see_dropout_under_dispatch_modes(device: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = rows(device)
    counts = []
    for dropout_p in (0.0, P):
        with FlopCounterMode(display=False) as counter:
            ct.flash_attention(q, k, v, dropout_p=dropout_p).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    seed = seed_on(device)
    with FlopCounterMode(display=False):
        found = ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed)
    assert torch.equal(found, ct.flash_attention(q, k, v, dropout_p=P, dropout_seed=seed))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1; expected a number from 0 to below 1"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p is nan"),
        ({"dropout_p": True}, TypeError, "dropout_p is True"),
        ({"dropout_p": "no"}, TypeError, "dropout_p is 'no'; expected a number"),
        ({"dropout_p": P, "dropout_seed": 0.5}, TypeError, "dropout_seed is 0.5"),
        ({"dropout_p": P, "dropout_seed": [1, 2, 3]}, ValueError, "dropout_seed is"),
        ({"dropout_p": P, "dropout_seed": torch.zeros(3).long()}, ValueError, "dropout_seed has"),
        ({"dropout_p": P, "dropout_seed": torch.zeros(2)}, TypeError, "dropout_seed has dtype"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: Any, message: str) -> None:
    q, k, v = rows("cpu")
    with pytest.raises(error, match=message):
        ct.flash_attention(q, k, v, **options)


def test_where_dropout_is_not_supported() -> None:
    q, k, v = (x.detach() for x in tensors("cpu", *[(2, 5, 4, 8)] * 3))
    with pytest.raises(UnsupportedError, match="expected only one of them, as the probabilities"):
        fa.flash_attn_func(q, k, v, P, return_attn_probs=True)
    with pytest.raises(UnsupportedError, match="not supported by calls on KV caches"):
        ct.flash_attention_with_kvcache(
            q, k, v, cache_seqlens=5, dropout_p=P, dropout_seed=torch.tensor([1, 2])
        )


def test_dropout_together_with_a_mask_mod(device: str) -> None:
    q, k, v = rows(device)
    dropout = {"dropout_p": P, "dropout_seed": seed_on(device)}
    mod = MaskMod(lambda i, j: (i + j) % 3 > 0)
    out = ct.flash_attention(q, k, v, mask_mod=mod, q_offset=0, **dropout)
    i, j = torch.arange(19, device=device)[:, None], torch.arange(21, device=device)
    mask = ((i + j) % 3 > 0)[None, None]
    close(out, host(ct.flash_attention(q, k, v, mask=mask, **dropout)))


@pytest.mark.gpu
def test_replays_of_a_cuda_graph_drop_other_weights() -> None:
    q, k, v = rows("cuda")
    dout = torch.randn(2, 19, 4, 6, dtype=q.dtype, device="cuda")

    def step() -> Any:
        out = ct.flash_attention(q, k, v, dropout_p=P)
        return out, *torch.autograd.grad(out, v, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    seen = []
    for _ in range(3):
        graph.replay()
        # out is linear in v, so that its gradient shows which weights the backward pass drops.
        torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), rtol=1e-9, atol=1e-9)
        seen.append(out.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_drawing_a_seed_does_not_synchronize() -> None:
    q, k, v = (x.detach() for x in rows("cuda"))
    first = ct.flash_attention(q, k, v, dropout_p=P)
    try:
        torch.cuda.set_sync_debug_mode("error")
        second = ct.flash_attention(q, k, v, dropout_p=P)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(first, second)
