"""Second derivatives by PyTorch's autograd and torch.func, alone and in other transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gradients.gradient_calls import OF_MOD, ROWS, random_gradient_call

from cupy_flash import MaskMod, ScoreMod, attention_hvp_reference, flash_attention_hvp

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")
torch_gradients = pytest.importorskip("support.gradients.torch_gradients")

from torch.autograd import forward_ad, functional  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

# With create_graph=True, `backward` warns once that it keeps the graph.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")

# The sums have at most a few hundred float64 products of order 1, added in different orders.
CLOSE = {"rtol": 1e-11, "atol": 1000 * 2**-50}
SECOND, THIRD = "has no second derivative", "has no third derivative"


def number(device: str, *shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, device=device)


def rows(device: str) -> tuple[Any, ...]:
    """Return q, k and v of two sequences, with grouped heads."""
    return tuple(number(device, 2, n, h, d) for n, h, d in ((4, 2, 3), (5, 1, 3), (5, 1, 4)))


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Return out and lse as operations of PyTorch that autograd differentiates."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = options.get("softmax_scale", q.shape[-1] ** -0.5) * q @ k.transpose(2, 3)
    if cap := options.get("softcap"):
        scores = cap * (scores / cap).tanh()
    if "score_mod" in options:
        scores = scores.sin() * scores
    if "gain" in options:
        scores = scores.sin() * options["gain"][:, None, None] * scores
    if "alibi_slopes" in options:
        queries, keys = (torch.arange(n, device=q.device) for n in scores.shape[2:])
        distances = (queries[:, None] + len(keys) - len(queries) - keys).abs()
        scores = scores - options["alibi_slopes"][:, None, None] * distances
    if "bias" in options:
        scores = scores + options["bias"]
    if options.get("causal"):
        seen = torch.ones_like(scores).tril(scores.shape[3] - scores.shape[2])
        scores = scores.masked_fill(seen == 0, -torch.inf)
    if "mask" in options:
        scores = scores.masked_fill(~options["mask"], -torch.inf)
    if "sinks" in options:
        sinks = options["sinks"][:, None, None].expand(*scores.shape[:3], 1)
        lse = torch.cat((scores, sinks), 3).logsumexp(3)
    else:
        lse = scores.logsumexp(3)
    return ((scores - lse[..., None]).exp() @ v).transpose(1, 2), lse


NAMES = ("bias", "sinks", "alibi_slopes", "gain")
# Offsets of packed sequences, one of which is empty. The last rows belong to none.
ENDS_Q, ENDS_K = [0, 3, 3, 5], [0, 2, 4, 8]


def modifications(device: str) -> tuple[Any, ...]:
    """Return a bias, sinks, slopes and an array that a score function captures."""
    return tuple(number(device, *shape) for shape in ((2, 4, 5), (2,), (2,), (2,)))


def rows_and_modifications(device: str) -> tuple[Any, ...]:
    return *rows(device), *modifications(device)


def with_gain(gain: Any) -> ScoreMod:
    return ScoreMod(lambda score, h, gain: np.sin(score) * gain[h] * score, gain=gain)


def ours_with_modifications(q: Any, k: Any, v: Any, *others: Any) -> Any:
    *named, gain = others
    options = dict(zip(NAMES, named, strict=False))
    return ours(q, k, v, score_mod=with_gain(gain), softcap=2.0, **options)


def plain_with_modifications(q: Any, k: Any, v: Any, *others: Any) -> Any:
    return plain(q, k, v, softcap=2.0, **dict(zip(NAMES, others, strict=True)))


def packed(device: str) -> tuple[Any, ...]:
    """Return packed q, k and v with grouped heads, and the modifications."""
    _, *others = modifications(device)
    shapes = (6, 2, 3), (9, 1, 3), (9, 1, 4), (2, 6, 4)
    return *(number(device, *shape) for shape in shapes), *others


def ours_packed(q: Any, k: Any, v: Any, *others: Any) -> Any:
    ends = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in (ENDS_Q, ENDS_K))
    *named, gain = others
    out, lse = ct.flash_attention_varlen(
        *(q, k, v, *ends, 3, 4),
        return_lse=True,
        causal=True,
        score_mod=with_gain(gain),
        **dict(zip(NAMES, named, strict=False)),
    )
    # The log-sum-exp of a row of no sequence is -inf.
    return out, lse.masked_fill(lse == -torch.inf, 0)


def plain_packed(q: Any, k: Any, v: Any, bias: Any, *others: Any) -> Any:
    outs, rows = [], []
    for b in range(3):
        of_q, of_k = (slice(*ends[b : b + 2]) for ends in (ENDS_Q, ENDS_K))
        if of_q.start == of_q.stop:
            continue
        of_bias = bias[:, of_q, : of_k.stop - of_k.start]
        out, lse = plain(
            *(q[None, of_q], k[None, of_k], v[None, of_k]),
            causal=True,
            **dict(zip(NAMES, (of_bias, *others), strict=True)),
        )
        # A row without keys depends on its sink alone.
        outs.append(out[0])
        rows.append(lse[0])
    outs.append(torch.zeros_like(q[5:, :, :1]).expand(1, 2, 4))
    rows.append(torch.zeros_like(q[5:, :, 0]).T)
    return torch.cat(outs), torch.cat(rows, 1)


# Inputs, the function of the library, and the formula of calls with more inputs.
OF_MORE_INPUTS: dict[str, tuple[Any, Any, Any]] = {
    "modifications": (
        rows_and_modifications,
        ours_with_modifications,
        plain_with_modifications,
    ),
    "packed": (packed, ours_packed, plain_packed),
}


def options_of(device: str) -> dict[str, dict[str, Any]]:
    """Return options of calls by name; every row attends to at least one key."""
    mask = torch.ones(4, 5, dtype=torch.bool, device=device)
    mask[1, 3] = mask[2, 0] = mask[2, 4] = False
    return {
        "none": {},
        "causal": {"causal": True, "softmax_scale": 0.7},
        "softcap": {"softcap": 1.5},
        "bias": {"bias": number(device, 1, 2, 4, 5)},
        "mask": {"mask": mask},
        "sinks": {"sinks": number(device, 2)},
        "score_mod": {"score_mod": ScoreMod(lambda score: np.sin(score) * score), "softcap": 2.0},
    }


def loss_of(function: Any, device: str, **options: Any) -> Callable[..., Any]:
    """Return a function of the inputs whose gradients of out and lse depend on them."""

    def loss(*inputs: Any) -> Any:
        out, lse = function(*inputs, **options)
        weights = torch.linspace(-2, 3, out.numel(), dtype=out.dtype, device=device)
        return (out.sin() * weights.view(out.shape)).sum() + lse.square().sum()

    return loss


def ours(*inputs: Any, **options: Any) -> Any:
    return ct.flash_attention(*inputs, return_lse=True, **options)


def penalty(loss: Any, inputs: Any, directions: Any) -> Any:
    """Return the gradients of the squared magnitude of gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in gradients), inputs)


def backward_twice(loss: Any, inputs: Any, directions: Any) -> Any:
    inputs = [x.clone().requires_grad_() for x in inputs]
    loss(*inputs).backward(create_graph=True)
    gradients = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    sum((x * t).sum() for x, t in zip(gradients, directions, strict=True)).backward()
    return [x.grad for x in inputs]


def along(loss: Any, directions: Any) -> Callable[..., Any]:
    """Return the derivative of a function along a direction, as a function of its arguments."""
    return lambda *inputs: jvp(loss, inputs, directions)[1]


def by_dual_tensors(loss: Any, inputs: Any, directions: Any) -> Any:
    with forward_ad.dual_level():
        pairs = zip(inputs, directions, strict=True)
        given = [forward_ad.make_dual(x.clone().requires_grad_(), t) for x, t in pairs]
        found = torch.autograd.grad(loss(*given), given)
        return [forward_ad.unpack_dual(x).tangent for x in found]


EVERY = (0, 1, 2)


def each(inputs: Any) -> tuple[int, ...]:
    """Return the positions of the inputs."""
    return tuple(range(len(inputs)))


WAYS: dict[str, Callable[..., Any]] = {
    "penalty": penalty,
    "backward twice": backward_twice,
    "functional.hvp": lambda f, x, t: functional.hvp(f, x, t)[1],
    "functional.vhp": lambda f, x, t: functional.vhp(f, x, t)[1],
    "functional.hessian": lambda f, x, t: functional.hessian(f, x),
    "dual tensors": by_dual_tensors,
    "hessian": lambda f, x, t: hessian(f, each(x))(*x),
    "reverse over reverse": lambda f, x, t: jacrev(jacrev(f, each(x)), each(x))(*x),
    "reverse over forward": lambda f, x, t: jacrev(jacfwd(f, 2), 0)(*x),
    "tangents of gradients": lambda f, x, t: jvp(grad(f, each(x)), x, t)[1],
    "gradients of tangents": lambda f, x, t: grad(along(f, t), each(x))(*x),
    "products with gradients": lambda f, x, t: vjp(grad(f, each(x)), *x)[1](t),
    "gradient of one": lambda f, x, t: grad(lambda k: grad(f)(x[0], k, *x[2:]).sin().sum())(x[1]),
    "tangent of the last": lambda f, x, t: jvp(
        lambda y: grad(f, EVERY)(*x[:-1], y), x[-1:], t[-1:]
    )[1],
}


CASES = [(way, option) for way in WAYS for option in options_of("cpu")]
# Calls that are not mapped as one call take minutes in this way.
CASES += [(way, call) for way in WAYS for call in OF_MORE_INPUTS if way != "reverse over forward"]


@pytest.mark.parametrize(("way", "option"), CASES)
def test_second_derivatives_are_those_of_the_formula(way: str, option: str, device: str) -> None:
    make, *functions = OF_MORE_INPUTS.get(option, (rows, ours, plain))
    options = options_of(device).get(option, {})
    inputs, directions = make(device), make(device)
    found, expected = (
        WAYS[way](loss_of(function, device, **options), inputs, directions)
        for function in functions
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    assert all(x.any() for x in torch.utils._pytree.tree_leaves(expected))


@pytest.mark.parametrize("function", ["qkvpacked", "scaled_dot_product_attention"])
@pytest.mark.parametrize("way", ["penalty", "functional.hvp", "hessian", "tangents of gradients"])
def test_other_functions_of_dense_calls(way: str, function: str, device: str) -> None:
    inputs, directions = (tuple(number(device, 1, 4, 2, 3) for _ in range(3)) for _ in range(2))

    def packed(*inputs: Any) -> Any:
        return ct.flash_attention_qkvpacked(torch.stack(inputs, 2), return_lse=True)

    def standard(*inputs: Any) -> Any:
        swapped = (x.transpose(1, 2) for x in inputs)
        out = ct.scaled_dot_product_attention(*swapped).transpose(1, 2)
        return out, out[..., 0]

    def plain_out(*inputs: Any) -> Any:
        out, lse = plain(*inputs)
        return out, lse if function == "qkvpacked" else out[..., 0]

    found, expected = (
        WAYS[way](loss_of(f, device), inputs, directions)
        for f in (packed if function == "qkvpacked" else standard, plain_out)
    )
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}])
def test_numerical_derivatives_agree(options: dict[str, Any], device: str) -> None:
    inputs = [x.requires_grad_() for x in rows(device)]

    def function(*inputs: Any) -> Any:
        return ours(*inputs, **options)

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("way", ["autograd", "torch.func"])
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["dense", "padded"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_second_derivatives_are_those_of_arrays(
    dtype: str, kind: str, number: int, way: str, device: str, rng: np.random.Generator
) -> None:
    call = random_gradient_call(rng, dtype, kind, head_dims=(5, 24, 64), longest=(60, 90))
    of_tensors = torch_gradients.tensor_call(call, device)
    given = of_tensors.inputs
    inputs = tuple(given[name] for name in ROWS)
    options = {n: x for n, x in given.items() if n not in ROWS and not n.startswith(OF_MOD)}
    options |= of_tensors.others
    directions = tuple(torch.randn_like(x).masked_fill(x.isnan(), torch.nan) for x in inputs)
    dout, *of_lse = of_tensors.results
    named = {"dlse": of_lse[0]} if of_lse else {}

    def gradients(*inputs: Any) -> Any:
        results = ours(*inputs, **options)[: 1 + len(of_lse)]
        if way == "torch.func":
            return vjp(lambda *x: ours(*x, **options)[: len(results)], *inputs)[1]((dout, *of_lse))
        return torch.autograd.grad(results, inputs, (dout, *of_lse), create_graph=True)

    if way == "torch.func":
        _, found = jvp(gradients, inputs, directions)
    else:
        inputs = tuple(x.requires_grad_() for x in inputs)
        found = torch.autograd.grad(gradients(*inputs), inputs, directions)
        inputs = tuple(x.detach() for x in inputs)
    expected = flash_attention_hvp(dout, *inputs, *directions, **named, **options)
    assert all(map(torch.equal, found, expected))
    if dtype == "float64":
        positional, modifications = call.forward.given(np)
        exact = (x.cpu().numpy() for x in directions)
        of_lse_in_memory = {} if call.dlse is None else {"dlse": call.dlse}
        right = attention_hvp_reference(
            *(call.dout, *positional, *exact), **of_lse_in_memory, **modifications
        )
        for one, other in zip(found, right, strict=True):
            np.testing.assert_allclose(one.cpu().numpy(), other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("given", range(1, 8))
def test_inputs_without_gradients_are_constants(given: int, device: str) -> None:
    inputs = [x.requires_grad_(bool(given >> i & 1)) for i, x in enumerate(rows(device))]
    moving = [x for x in inputs if x.requires_grad]
    found, expected = (
        torch.autograd.grad(
            sum(
                x.square().sum()
                for x in torch.autograd.grad(loss_of(f, device)(*inputs), moving, create_graph=True)
            ),
            moving,
        )
        for f in (ours, plain)
    )
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("way", ["penalty", "functional.hvp", "hessian", "gradients of tangents"])
def test_only_one_result_has_a_gradient(way: str, result: str, device: str) -> None:
    inputs, directions = rows(device), rows(device)
    found, expected = (
        WAYS[way](lambda *x, f=f: f(*x)[result == "lse"].sin().sum(), inputs, directions)
        for f in (ours, with_v)
    )
    torch.testing.assert_close(found, expected, **CLOSE)


def with_v(q: Any, k: Any, v: Any) -> Any:
    """Return the results of the formula, of which lse also depends on v for autograd."""
    out, lse = plain(q, k, v)
    return out, lse + 0 * v.sum()


@pytest.mark.parametrize("option", ["bias", "dropout", "score_mod", "none"])
def test_mapped_products_are_those_of_each_sample(option: str, device: str) -> None:
    samples = 3
    inputs = [torch.stack([x, x.flip(1), -x]) for x in rows(device)]
    directions = [torch.randn_like(x) for x in inputs]
    others = {"bias": number(device, samples, 2, 4, 5)} if option == "bias" else {}
    options: dict[str, Any] = {}
    if option == "dropout":
        options = {"dropout_p": 0.5, "dropout_seed": [3, 1]}
    elif option == "score_mod":
        options = {"score_mod": ScoreMod(lambda score, b, h: score * score * (1 + b) + h * score)}

    def one(inputs: Any, directions: Any, others: Any) -> Any:
        loss = loss_of(ours, device, **options, **others)
        return (
            jvp(grad(loss, EVERY), tuple(inputs), tuple(directions))[1],
            grad(along(loss, tuple(directions)), EVERY)(*inputs),
        )

    found = vmap(one, randomness="same")(inputs, directions, others)
    for n in range(samples):
        of_sample = ([x[n] for x in inputs], [x[n] for x in directions])
        expected = one(*of_sample, {name: x[n] for name, x in others.items()})
        for pair in zip(found, expected, strict=True):
            torch.testing.assert_close(tuple(x[n] for x in pair[0]), pair[1], **CLOSE)


@pytest.mark.parametrize("given", range(1, 128, 9))
@pytest.mark.parametrize("call", OF_MORE_INPUTS)
def test_any_inputs_may_be_constants(call: str, given: int, device: str) -> None:
    make, *functions = OF_MORE_INPUTS[call]
    inputs = [x.requires_grad_(bool(given >> i & 1)) for i, x in enumerate(make(device))]
    moving = [x for x in inputs if x.requires_grad]
    # All gradients depend on the last input, of which only some calls have a gradient.
    found, expected = (
        torch.autograd.grad(
            sum(
                x.square().sum()
                for x in torch.autograd.grad(loss_of(f, device)(*inputs), moving, create_graph=True)
            ),
            moving,
        )
        for f in functions
    )
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("call", OF_MORE_INPUTS)
def test_dual_tensors_of_all_inputs_but_captures(call: str, device: str) -> None:
    make, library, formula = OF_MORE_INPUTS[call]
    inputs, directions = make(device), make(device)
    for moving in (*([i] for i in range(6)), range(6)):
        found, expected = (
            tangents_of_duals(function, inputs, directions, moving)
            for function in (library, formula)
        )
        torch.testing.assert_close(found, expected, **CLOSE)


def test_a_dual_tensor_is_no_capture(device: str) -> None:
    inputs, directions = rows_and_modifications(device), rows_and_modifications(device)
    with pytest.raises(NotImplementedError, match="gain has a tangent, and only q, k, v, bias"):
        tangents_of_duals(ours_with_modifications, inputs, directions, [6])


def tangents_of_duals(function: Any, inputs: Any, directions: Any, moving: Any) -> Any:
    """Return the tangents of results, as some inputs move along their directions."""
    with forward_ad.dual_level():
        given = [
            forward_ad.make_dual(x, t) if n in moving else x
            for n, (x, t) in enumerate(zip(inputs, directions, strict=True))
        ]
        # A result may not depend on the inputs that move.
        duals = (forward_ad.unpack_dual(x) for x in function(*given))
        return [torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in duals]


@pytest.mark.parametrize("i", range(3, 7))
def test_mapped_products_of_modifications(i: int, device: str) -> None:
    inputs, directions = rows_and_modifications(device), rows_and_modifications(device)
    samples = torch.stack([inputs[i], directions[i], -inputs[i]])
    loss = loss_of(ours_with_modifications, device)

    def one(x: Any, tangent: Any) -> Any:
        given, moving = list(inputs), list(directions)
        given[i], moving[i] = x, tangent
        return jvp(grad(loss, each(inputs)), tuple(given), tuple(moving))[1]

    found = vmap(one)(samples, samples.flip(0))
    for n in range(3):
        expected = one(samples[n], samples[2 - n])
        torch.testing.assert_close(tuple(x[n] for x in found), expected, **CLOSE)


# ---- What has no second derivative


def test_nested_tensors_have_none_because_pytorch_has_none(device: str) -> None:
    offsets = torch.tensor([0, 3, 4, 8], device=device)
    leaves = [number(device, 8, 2, 4).requires_grad_() for _ in range(3)]

    def loss(*inputs: Any) -> Any:
        given = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in inputs)
        return ct.flash_attention(*given, causal=True).values().sin().sum()

    with pytest.raises(NotImplementedError, match="nested_tensor"):
        penalty(loss, leaves, None)


def test_modifications_that_require_no_gradient_are_constants(device: str) -> None:
    gain = number(device, 2)
    options = {
        "score_mod": ScoreMod(lambda score, h, gain: score * gain[h], gain=gain),
        "mask_mod": MaskMod(lambda i, j: j <= i + 1),
        "alibi_slopes": number(device, 2).abs(),
    }
    inputs, directions = rows(device), rows(device)
    loss = loss_of(ours, device, **options)
    found = penalty(loss, inputs, directions)
    expected = grad(lambda *x: sum(g.square().sum() for g in grad(loss, EVERY)(*x)), EVERY)(*inputs)
    torch.testing.assert_close(found, expected, **CLOSE)


def third_by_autograd(loss: Any, inputs: Any) -> None:
    """Differentiate a gradient twice by autograd."""
    q, *others = inputs
    q = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(q, *others), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), q, create_graph=True)
    second.sin().sum().backward()


def product_with_graph(loss: Any, inputs: Any) -> Any:
    """Return a product with the Hessian that autograd can differentiate."""
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    return functional.hvp(loss, leaves, inputs, create_graph=True)[1]


THIRD_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "autograd": third_by_autograd,
    "a product": lambda f, x: product_with_graph(f, x)[0].sum().backward(),
    "reverse": lambda f, x: grad(lambda q: grad(lambda q: grad(f)(q, *x[1:]).sum())(q).sum())(x[0]),
    "forward": lambda f, x: jacfwd(hessian(f))(*x),
    "reverse over both": lambda f, x: jacrev(hessian(f))(*x),
}


@pytest.mark.parametrize("way", THIRD_DERIVATIVES)
def test_third_derivatives_are_errors(way: str, device: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{THIRD}|tangent of a tangent"):
        THIRD_DERIVATIVES[way](loss_of(ours, device), rows(device))


def test_the_tangent_of_a_tangent_is_an_error(device: str) -> None:
    inputs = rows(device)
    loss = loss_of(ours, device)
    with pytest.raises(NotImplementedError, match=f"{SECOND} that is the tangent of a tangent"):
        jacfwd(jacfwd(loss))(*inputs)


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("way", ["autograd", "torch.func"])
def test_an_overwritten_input_is_an_error(way: str, i: int, device: str) -> None:
    leaves = [x.requires_grad_() for x in rows(device)]
    if way == "autograd":
        inputs = [x * 1 for x in leaves]
        gradients = torch.autograd.grad(loss_of(ours, device)(*inputs), inputs, create_graph=True)
        with torch.no_grad():
            inputs[i].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients[0].sum().backward()
        return
    inputs = [x.detach() for x in leaves]
    _, pull_back = vjp(grad(loss_of(ours, device), EVERY), *inputs)
    inputs[i].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pull_back(tuple(rows(device)))


def test_an_overwritten_capture_is_an_error(device: str) -> None:
    gain = number(device, 2)
    mod = ScoreMod(lambda score, h, gain: score * gain[h], gain=gain)
    q, k, v = (x.requires_grad_() for x in rows(device))
    (dq,) = torch.autograd.grad(
        ct.flash_attention(q, k, v, score_mod=mod).sum(), q, create_graph=True
    )
    gain.mul_(2)
    with pytest.raises(RuntimeError, match="gain of attention is at version"):
        dq.sum().backward()
