"""Forward mode of PyTorch: dual tensors and torch.func.jvp, alone and in other transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gradients.gradient_calls import OF_MOD, ROWS, random_gradient_call
from support.gradients.tangent_rule import packed_call

import cupy_flash
from cupy_flash import (
    ScoreMod,
    attention_jvp_reference,
    flash_attention_jvp,
    flash_attention_varlen_jvp,
)

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
torch_gradients = pytest.importorskip("support.gradients.torch_gradients")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import jacfwd, jacrev, jvp, vmap  # noqa: E402

# Sums of at most a hundred float64 products of order 1, added in another order.
CLOSE = {"rtol": 1e-12, "atol": 100 * 2**-50}


def number(device: str, *shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, device=device)


def rows(device: str) -> list[Any]:
    """Return q, k and v of two sequences, with grouped heads."""
    return [number(device, 2, n, h, 3) for n, h in ((4, 2), (5, 1), (5, 1))]


def by_dual_tensors(function: Callable[..., Any], inputs: Any, tangents: Any) -> Any:
    """Return results and tangents as `torch.func.jvp` does, computed with dual tensors."""
    with forward_ad.dual_level():
        pairs = zip(inputs, tangents, strict=True)
        given = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
        results = function(*given)
        found = [forward_ad.unpack_dual(x) for x in results]
    return tuple(x.primal for x in found), tuple(x.tangent for x in found)


MODES = pytest.mark.parametrize("mode", [by_dual_tensors, jvp])


def with_lse(**options: Any) -> Callable[..., Any]:
    """Return a function of q, k and v that returns out and lse."""
    return lambda *inputs: ct.flash_attention(*inputs, return_lse=True, **options)


@MODES
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_tangents_are_those_of_arrays(
    dtype: str, kind: str, number: int, mode: Any, device: str, rng: np.random.Generator
) -> None:
    call = random_gradient_call(rng, dtype, kind, head_dims=(5, 24, 64), longest=(60, 90))
    of_tensors = torch_gradients.tensor_call(call, device)
    given = of_tensors.inputs
    inputs = tuple(given[name] for name in ROWS)
    options = {n: x for n, x in given.items() if n not in ROWS and not n.startswith(OF_MOD)}
    options |= of_tensors.others
    tangents = tuple(torch.randn_like(x).masked_fill(x.isnan(), torch.nan) for x in inputs)
    results, found = mode(with_lse(**options), inputs, tangents)
    assert all(map(torch.equal, results, with_lse(**options)(*inputs)))
    expected = flash_attention_jvp(*inputs, *tangents, return_lse=True, **options)
    assert all(map(torch.equal, found, expected[1::2]))
    if dtype == "float64":
        positional, named = call.forward.given(np)
        exact = (x.cpu().numpy() for x in tangents)
        exact = attention_jvp_reference(*positional, *exact, **named, return_lse=True)
        for one, other in zip(found, exact[1::2], strict=True):
            np.testing.assert_allclose(one.cpu().numpy(), other, rtol=1e-10, atol=1e-12)


@MODES
@pytest.mark.parametrize("given", range(1, 8))
def test_an_input_without_a_tangent_is_constant(mode: Any, given: int, device: str) -> None:
    inputs = rows(device)
    tangents = [torch.randn_like(x) if given >> i & 1 else None for i, x in enumerate(inputs)]
    expected = flash_attention_jvp(*inputs, *tangents, return_lse=True, causal=True)[1::2]
    function = with_lse(causal=True)
    moving = tuple(x for x, t in zip(inputs, tangents, strict=True) if t is not None)

    def of_moving(*moved: Any) -> Any:
        each = iter(moved)
        return function(
            *(x if t is None else next(each) for x, t in zip(inputs, tangents, strict=True))
        )

    _, found = mode(of_moving, moving, tuple(t for t in tangents if t is not None))
    if given == 4 and mode is by_dual_tensors:
        # The log-sum-exp does not depend on v.
        found = found[0], torch.zeros_like(expected[1]) if found[1] is None else found[1]
    assert all(map(torch.equal, found, expected))


@MODES
def test_other_functions_of_dense_calls_have_tangents(mode: Any, device: str) -> None:
    q, t = number(device, 2, 5, 3, 4, 8), number(device, 2, 5, 3, 4, 8)
    (out,), (found,) = mode(lambda x: (ct.flash_attention_qkvpacked(x, causal=True),), (q,), (t,))
    expected = flash_attention_jvp(*q.unbind(-3), *t.unbind(-3), causal=True)
    torch.testing.assert_close((out, found), expected, **CLOSE)

    def standard(function: Any) -> Any:
        return lambda *x: (function(*x, is_causal=True),)

    inputs, tangents = (tuple(number(device, 3, 2, 5, 4) for _ in range(3)) for _ in range(2))
    (found,) = mode(standard(ct.scaled_dot_product_attention), inputs, tangents)[1]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (expected,) = mode(
            standard(torch.nn.functional.scaled_dot_product_attention), inputs, tangents
        )[1]
    torch.testing.assert_close(found, expected, **CLOSE)


@MODES
def test_autocast_computes_tangents_in_its_dtype(mode: Any, device: str) -> None:
    inputs, tangents = ([x.float() for x in rows(device)] for _ in range(2))
    with torch.autocast(device, torch.bfloat16):
        _, found = mode(with_lse(), tuple(inputs), tuple(tangents))
    narrow = (x.bfloat16() for x in (*inputs, *tangents))
    expected = flash_attention_jvp(*narrow, return_lse=True)[1::2]
    assert found[0].dtype == torch.bfloat16
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("i", range(3))
def test_jacobians_of_both_modes_agree(i: int, device: str) -> None:
    inputs = rows(device)
    function = with_lse(softcap=2.0, bias=number(device, 1, 2, 4, 5))
    found = jacfwd(function, argnums=i)(*inputs)
    torch.testing.assert_close(found, jacrev(function, argnums=i)(*inputs), **CLOSE)


@pytest.mark.parametrize("option", ["bias", "sinks", "dropout", "score_mod", "none"])
def test_mapped_tangents_are_those_of_each_sample(option: str, device: str) -> None:
    samples = 3
    inputs = [torch.stack([x, x.flip(1), -x]) for x in rows(device)]
    tangents = [torch.randn_like(x) for x in inputs]
    others = {
        "bias": {"bias": number(device, samples, 2, 4, 5)},
        "sinks": {"sinks": number(device, samples, 2)},
    }.get(option, {})
    options: dict[str, Any] = {}
    if option == "dropout":
        options = {"dropout_p": 0.5, "dropout_seed": [3, 1]}
    elif option == "score_mod":
        options = {"score_mod": ScoreMod(lambda score, b, h: score * (1 + b) + h * score)}

    def one(q: Any, k: Any, v: Any, q_tangent: Any, v_tangent: Any, others: Any) -> Any:
        def moving(q: Any, v: Any) -> Any:
            return with_lse(**options, **others)(q, k, v)

        return jvp(moving, (q, v), (q_tangent, v_tangent))

    given = (*inputs, tangents[0], tangents[2], others)
    found = vmap(one)(*given)
    # One k, v and tangent of v serve all samples.
    shared = (inputs[0], inputs[1][1], inputs[2][1], tangents[0], tangents[2][1], others)
    found_shared = vmap(one, (0, None, None, 0, None, 0))(*shared)
    for n in range(samples):
        of_sample = {name: x[n] for name, x in others.items()}
        expected = one(*(x[n] for x in given[:-1]), of_sample)
        torch.testing.assert_close(sample_of(found, n), expected, **CLOSE)
        each = (x if i in (1, 2, 4) else x[n] for i, x in enumerate(shared[:-1]))
        torch.testing.assert_close(sample_of(found_shared, n), one(*each, of_sample), **CLOSE)


def sample_of(found: Any, n: int) -> Any:
    results, tangents = found
    return tuple(x[n] for x in results), tuple(x[n] for x in tangents)


def test_gradients_of_a_call_with_tangents(device: str) -> None:
    inputs = [x.requires_grad_() for x in rows(device)]
    tangents = [torch.randn_like(x) for x in inputs]
    (out, lse), _ = by_dual_tensors(with_lse(), inputs, tangents)
    found = torch.autograd.grad(out.sum() + lse.sum(), inputs, retain_graph=True)
    eager = with_lse()(*inputs)
    assert all(map(torch.equal, found, torch.autograd.grad(sum(x.sum() for x in eager), inputs)))


@MODES
@pytest.mark.parametrize("name", ["bias", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("has_q", [False, True])
def test_tangents_of_modifications_are_those_of_arrays(
    name: str, has_q: bool, mode: Any, device: str
) -> None:
    q, k, v = rows(device)
    shape = (2, 2, 4, 5) if name == "bias" else (2,)
    option, moving = number(device, *shape), number(device, *shape)
    direction = torch.randn_like(q)

    def function(option: Any, q: Any = q) -> Any:
        return ct.flash_attention(q, k, v, return_lse=True, **{name: option})

    given = (option, q) if has_q else (option,)
    _, found = mode(function, given, (moving, direction)[: len(given)])
    expected = flash_attention_jvp(
        *(q, k, v, direction if has_q else None),
        return_lse=True,
        modification_tangents={name: moving},
        **{name: option},
    )
    assert all(map(torch.equal, found, expected[1::2]))


@MODES
def test_a_tangent_of_a_cached_call_is_refused(mode: Any, device: str) -> None:
    q, k, v = rows(device)
    cached = q[:, :1], k, v
    lengths = torch.full((2,), 5, dtype=torch.int32, device=device)

    def step(q: Any) -> Any:
        return (ct.flash_attention_with_kvcache(q, *cached[1:], cache_seqlens=lengths),)

    with pytest.raises((NotImplementedError, TypeError), match=r"q has a tangent|transform"):
        mode(step, cached[:1], (torch.randn_like(cached[0]),))


def test_plain_functions_refuse_tangents(device: str) -> None:
    x = number(device, 5, 2, 4)
    message = "q has a tangent, and only q, k, v, bias, sinks, slopes"
    with pytest.raises(NotImplementedError, match=message):
        by_dual_tensors(lambda x: (cupy_flash.flash_attention(x, x, x),), (x,), (x,))


@MODES
def test_packed_calls_have_tangents(mode: Any, rng: Any, device: str) -> None:
    inputs, tangents, lengths, options = packed_call(rng, np.float64)
    inputs, tangents = (
        tuple(torch.from_numpy(x).to(device) for x in arrays) for arrays in (inputs, tangents)
    )
    starts = [torch.from_numpy(x).to(device) for x in lengths[:2]]
    if "sinks" in options:
        options["sinks"] = torch.from_numpy(options["sinks"]).to(device)

    def attend(*rows: Any) -> Any:
        return ct.flash_attention_varlen(*rows, *starts, *lengths[2:], return_lse=True, **options)

    results, found = mode(attend, inputs, tangents)
    assert all(map(torch.equal, results, attend(*inputs)))
    expected = flash_attention_varlen_jvp(
        *(*inputs, *starts, *lengths[2:], *tangents), return_lse=True, **options
    )
    assert all(map(torch.equal, found, expected[1::2]))
