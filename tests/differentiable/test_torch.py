"""Attention in PyTorch's autograd, on the CPU and on a GPU."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from support.in_torch.operators import NO_MODIFICATIONS

import cupy_flash
from cupy_flash.calls.gpu import prepared_calls

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")


def tensors(device: str, *shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    return [
        torch.randn(shape, dtype=dtype or torch.float64, device=device, requires_grad=True)
        for shape in shapes
    ]


def integers(device: str, values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


def qkv(device: str, dtype: Any = None) -> list[Any]:
    return tensors(device, (2, 7, 4, 5), (2, 9, 2, 5), (2, 9, 2, 3), dtype=dtype)


def formula(q: Any, k: Any, v: Any) -> Any:
    """Compute causal attention with grouped heads (GQA) by PyTorch's own operations."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(k.shape[2] - q.shape[1] + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_of_out_and_lse_are_those_of_finite_differences(device: str, layout: str) -> None:
    inputs = qkv(device)
    if layout == "bhsd":
        inputs = [x.detach().transpose(1, 2).requires_grad_() for x in inputs]

    options = {"causal": True, "window_size": (4, 0), "layout": layout, "return_lse": True}
    assert torch.autograd.gradcheck(lambda q, k, v: ct.flash_attention(q, k, v, **options), inputs)


def test_bias_and_sinks_have_gradients_too(device: str) -> None:
    q, k, v = qkv(device)
    bias, sinks = tensors(device, (1, 4, 1, 9), (4,))

    def attention(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        return ct.flash_attention(q, k, v, bias=bias, sinks=sinks)

    assert torch.autograd.gradcheck(attention, (q, k, v, bias, sinks))
    # Check the gradient of the sinks alone, too.
    rest = [x.detach() for x in (q, k, v, bias)]
    assert torch.autograd.gradcheck(lambda sinks: attention(*rest, sinks), (sinks,))


NUMBERS = [[0.1, 0.2, 0.3, 0.4], (0.1, -2, 0.3, 0), 0.25, 1, np.float32(0.5)]


@pytest.mark.parametrize("values", NUMBERS, ids=repr)
@pytest.mark.parametrize("function", ["dense", "packed qkv", "varlen"])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_slopes_and_sinks_may_be_numbers_or_lists(
    device: str, name: str, function: str, values: Any
) -> None:
    (q,) = tensors(device, (2, 7, 4, 5))
    ends = integers(device, [0, 7, 14])

    def of(x: Any, given: Any) -> Any:
        if function == "dense":
            return ct.flash_attention(x, x, x, **{name: given})
        if function == "varlen":
            rows = x.reshape(-1, 4, 5)
            return ct.flash_attention_varlen(rows, rows, rows, ends, ends, 7, 7, **{name: given})
        return ct.flash_attention_qkvpacked(torch.stack([x, x, x], 2), **{name: given})

    array = np.broadcast_to(np.array(values, np.float64), (4,)).copy()
    given = torch.tensor(array, device=device)
    with torch.no_grad():
        torch.testing.assert_close(of(q, values), of(q, given), rtol=0, atol=0)
    found, expected = (torch.autograd.grad((of(q, y) ** 2).sum(), q)[0] for y in (values, given))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_lists_that_change_after_the_call_do_not_change_its_gradients() -> None:
    (q,) = tensors("cpu", (2, 7, 4, 5))
    slopes = [[0.5, 1, 0, 2], [1, 2, 3, 4]]
    given: dict[str, Any] = {"sinks": [0.5, 1, 0, 2], "alibi_slopes": slopes}
    first, second = ((ct.flash_attention(q, q, q, **given) ** 2).sum() for _ in range(2))
    (expected,) = torch.autograd.grad(first, q)
    given["sinks"][1] = given["alibi_slopes"][1][2] = 7
    torch.testing.assert_close(torch.autograd.grad(second, q)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_lists_of_tensors_that_require_a_gradient_are_refused(name: str) -> None:
    (q,) = tensors("cpu", (2, 7, 4, 5))
    one = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(ValueError, match=f"{name} holds a tensor that requires a gradient"):
        ct.flash_attention(q, q, q, **{name: [one] * 4})
    plain = q.detach()
    with pytest.raises(TypeError, match=f"{name} requires a gradient"):
        cupy_flash.flash_attention(plain, plain, plain, **{name: [one] * 4})


def test_packed_arrays_and_sequences_are_differentiable(device: str) -> None:
    (packed,) = tensors(device, (2, 6, 3, 2, 4))
    attention = ct.flash_attention_qkvpacked
    assert torch.autograd.gradcheck(lambda x: attention(x, causal=True), (packed,))
    q, k, v = tensors(device, (9, 4, 5), (11, 2, 5), (11, 2, 5))
    lengths = integers(device, [0, 4, 9]), integers(device, [0, 3, 11]), 5, 8

    def varlen(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention_varlen(q, k, v, *lengths, causal=True)

    assert torch.autograd.gradcheck(varlen, (q, k, v))


def test_a_gradient_without_strides_is_read(device: str) -> None:
    inputs = qkv(device)
    expected = torch.autograd.grad(formula(*inputs).sum(), inputs)
    got = torch.autograd.grad(ct.flash_attention(*inputs, causal=True).sum(), inputs)
    for x, y in zip(got, expected, strict=True):
        # Each element sums at most 36 products of order 1, in float64.
        np.testing.assert_allclose(x.cpu(), y.cpu(), rtol=0, atol=36 * 2**-50)


def test_used_keys_of_packed_sequences_alone_have_gradients(device: str) -> None:
    q, k, v = tensors(device, (9, 4, 5), (11, 2, 5), (11, 2, 5))
    ends_q, ends_k, used = (integers(device, x) for x in ([0, 4, 9], [0, 3, 11], [2, 8]))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention_varlen(q, k, v, ends_q, ends_k, 5, 8, seqused_k=used)

    assert torch.autograd.gradcheck(attention, (q, k, v))
    (dk,) = torch.autograd.grad(attention(q, k, v).sum(), (k,))
    assert dk[1].any()
    assert not dk[2].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q is a NoneType; expected a tensor"),
        ({"sinks": np.zeros(4)}, TypeError, "sinks is a ndarray; expected a tensor"),
        ({"windw_size": (2, 0)}, TypeError, "unexpected keyword argument 'windw_size'"),
        ({"seqused_k": torch.ones(2)}, TypeError, "unexpected keyword argument 'seqused_k'"),
        ({"causal": 1}, TypeError, "causal is 1; expected True or False"),
        ({"layout": "bsdh"}, ValueError, "layout is 'bsdh'"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
# PyTorch's compiler uses deprecated functions of PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_wrong_is_told_in_graphs_as_well(
    compiled: bool, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = dict(zip("qkv", qkv("cpu"), strict=True)) | change

    def call() -> Any:
        return ct.flash_attention(**arguments)

    function = torch.compile(call, backend="eager") if compiled else call
    with pytest.raises(error, match=message):
        function()


# PyTorch's compiler uses deprecated functions of PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"score_mod": cupy_flash.ScoreMod(lambda score: score * 2)},
        {"softmax_scale": np.float32(0.3)},
        {"seqlens_k": [4, 9]},
    ],
    ids=str,
)
def test_calls_that_no_operator_takes_break_the_graph(options: dict[str, Any]) -> None:
    inputs = [x.detach() for x in qkv("cpu")]

    def call(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q * 2, k, v, **options) + 1

    compiled = torch.compile(call, backend="eager")
    expected = call(*inputs)
    for _ in range(3):
        assert torch.equal(compiled(*inputs), expected)


# PyTorch's compiler uses deprecated functions of PyTorch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_position_of_each_sequence_is_part_of_a_graph() -> None:
    q, k, v = (x.detach() for x in qkv("cpu"))
    offsets = torch.tensor([3, -2][: len(q)], dtype=torch.int32)

    def call(offsets: Any) -> Any:
        return ct.flash_attention(q, k, v, causal=True, q_offset=offsets)

    result = torch.compile(call, backend="eager", fullgraph=True)(offsets)
    for b, offset in enumerate(offsets.tolist()):
        alone = ct.flash_attention(*(x[b : b + 1] for x in (q, k, v)), causal=True, q_offset=offset)
        torch.testing.assert_close(result[b : b + 1], alone)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_an_array_of_queries_keys_and_values_has_any_batch_axes(batch: tuple[int, ...]) -> None:
    (packed,) = tensors("cpu", (*batch, 6, 3, 2, 4))
    assert ct.flash_attention_qkvpacked(packed).shape == (*batch, 6, 2, 4)
    assert torch.autograd.gradcheck(ct.flash_attention_qkvpacked, (packed,))


def test_an_array_of_queries_keys_and_values_is_checked() -> None:
    (packed,) = tensors("cpu", (2, 6, 3, 2, 4))
    message = "layout is 'bhsd'; expected 'bshd', the only layout of qkv"
    with pytest.raises(ValueError, match=message):
        ct.flash_attention_qkvpacked(packed, layout="bhsd")
    with pytest.raises(ValueError, match="qkv has shape"):
        ct.flash_attention_qkvpacked(packed[:, :, 0])
    with pytest.raises(TypeError, match="qkv is a ndarray; expected a tensor"):
        ct.flash_attention_qkvpacked(packed.detach().numpy())


def test_only_what_is_asked_for_is_computed(device: str) -> None:
    q, k, v = qkv(device)
    k = k.detach()
    out = ct.flash_attention(q, k, v)
    dq, dv = torch.autograd.grad(out, (q, v), torch.ones_like(out))
    assert dq.shape == q.shape
    assert dv.shape == v.shape
    assert k.grad is None


class Drop(torch.autograd.Function):
    """Sum that passes no gradient to its first argument."""

    @staticmethod
    def forward(ctx: Any, dropped: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return dropped + other

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *gradients


@pytest.mark.parametrize("return_lse", [False, True])
def test_what_gets_no_gradient_has_none_instead_of_zeros(device: str, return_lse: bool) -> None:
    q, k, v = qkv(device)
    for _ in range(2):
        found = ct.flash_attention(q, k, v, return_lse=return_lse)
        out = found[0] if return_lse else found
        other = torch.zeros_like(out, requires_grad=True)
        Drop.apply(out, other).sum().backward()
        assert other.grad is not None
        assert q.grad is k.grad is v.grad is None


def test_without_recording_there_is_no_graph(device: str) -> None:
    q, k, v = qkv(device)
    with torch.no_grad():
        out, lse = ct.flash_attention(q, torch.nn.Parameter(k), v, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["on the GPU", "on the CPU"])
@pytest.mark.parametrize("place", ["contiguous", "expanded", "transposed", "misaligned"])
def test_repeated_calls_have_the_gradients_of_a_plain_one(place: str, keep: str) -> None:
    inputs = tensors("cuda", (2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64), dtype=torch.bfloat16)
    plain = [x.detach() for x in inputs]
    own = torch.cuda.Stream()
    for repetition in range(3):
        dout = torch.randn(2, 70, 4, 64, dtype=torch.bfloat16, device="cuda")
        if place == "expanded":
            dout = dout[:, :1, :, :1].expand(dout.shape)
        elif place == "transposed":
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        elif place == "misaligned":
            dout = torch.cat([dout.flatten()[:1], dout.flatten()])[1:].view(dout.shape)
        out, lse = cupy_flash.flash_attention(*plain, causal=True, return_lse=True)
        expected = cupy_flash.flash_attention_backward(dout, *plain, out, lse, causal=True)
        wrt = inputs if repetition else inputs[:2]
        with contextlib.ExitStack() as stack:
            if keep == "on the CPU":
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            own.wait_stream(torch.cuda.current_stream())
            if repetition == 2:
                stack.enter_context(torch.cuda.stream(own))
            got = torch.autograd.grad(ct.flash_attention(*inputs, causal=True), wrt, dout)
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=False))


@pytest.mark.gpu
def test_a_graph_holds_a_call_and_its_gradients() -> None:
    inputs = tensors("cuda", (2, 70, 4, 64), (2, 900, 2, 64), (2, 900, 2, 64), dtype=torch.bfloat16)
    dout = torch.randn(2, 70, 4, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> tuple[Any, ...]:
        out = ct.flash_attention(*inputs, causal=True)
        return out, *torch.autograd.grad(out, inputs, dout)

    expected = [x.detach().clone() for x in step()]
    before, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    before.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(before):
        step()
    torch.cuda.current_stream().wait_stream(before)
    with torch.cuda.graph(graph):
        captured = [x.detach() for x in step()]
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.gpu
# PyTorch's compiler uses deprecated functions of PyTorch, and captures an empty graph.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_graphs_of_the_compiler_hold_the_operator(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = qkv("cuda", torch.float32)
    dout = torch.randn(2, 7, 4, 3, device="cuda")

    def attention(q: Any, k: Any, v: Any) -> Any:
        return ct.flash_attention(q * 1.5, k, v, causal=True) + 1

    # The compiled calls are to fill the cache of prepared calls themselves.
    monkeypatch.setattr(prepared_calls, "_calls", {})
    function = torch.compile(attention, fullgraph=True, mode=mode)
    results = []
    # With "reduce-overhead" the second call is captured in a CUDA graph, and the third replays it.
    for _ in range(3):
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, dout)
        results.append([x.detach().cpu().numpy() for x in (out, *gradients)])
    out = attention(*inputs)
    eager = [out, *torch.autograd.grad(out, inputs, dout)]
    for found in results:
        for x, y in zip(found, eager, strict=True):
            np.testing.assert_array_equal(x, y.detach().cpu().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_operators_are_as_torch_wants_them(kind: str) -> None:
    from torch import library

    modifications = NO_MODIFICATIONS
    if kind == "dense":
        given: tuple[Any, ...] = (*qkv("cuda"), *modifications, True, None, None, "bshd", None)
        operator = torch.ops.cupy_flash.attention
    else:
        ends = integers("cuda", [0, 4, 9])
        rows = tensors("cuda", (9, 4, 5), (9, 2, 5), (9, 2, 5))
        given = (*rows, *modifications, ends, ends, 5, 5, None, True, None, None)
        operator = torch.ops.cupy_flash.attention_varlen
    library.opcheck(operator, given)
