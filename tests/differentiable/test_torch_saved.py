"""Tensors that a call saves for its gradients: later writes to any of them are noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.in_torch.operators import NO_MODIFICATIONS

import cupy_flash

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

# Part of torch's message about a saved tensor that was overwritten.
OVERWRITTEN = "modified by an inplace operation"


class Case(NamedTuple):
    """A call with one tensor in addition to q, k and v.

    Attributes
    ----------
    attention
        Function of q, k, v and the tensor.
    values
        Elements of the tensor.
    dtype
        Name of the tensor's dtype in torch.
    """

    attention: Callable[..., Any]
    values: Any
    dtype: str


def dense(name: str, **options: Any) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, array: Any) -> Any:
        q, k, v = (x[None] for x in (q, k, v))
        return ct.flash_attention(q, k, v, **{name: array}, **options)[0]

    return attention


def packed(name: str, **options: Any) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, array: Any) -> Any:
        qkv = torch.stack((q, k, v), 1)[None]
        return ct.flash_attention_qkvpacked(qkv, **{name: array}, **options)[0]

    return attention


def captured(kind: str) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, array: Any) -> Any:
        q, k, v = (x[None] for x in (q, k, v))
        mods = {
            "score_mod": lambda: cupy_flash.ScoreMod(lambda score, j, t: score * t[j], t=array),
            "mask_mod": lambda: cupy_flash.MaskMod(lambda i, j, t: t[i] == t[j], t=array),
            "block_list": lambda: cupy_flash.BlockList(array, (2, 2)),
            "closure": lambda: cupy_flash.MaskMod(lambda i, j: array[i] == array[j]),
        }
        name = "score_mod" if kind == "score_mod" else "mask_mod"
        return ct.flash_attention(q, k, v, **{name: mods[kind]()})[0]

    return attention


def cu_seqlens_q(q: Any, k: Any, v: Any, ends: Any) -> Any:
    return ct.flash_attention_varlen(q, k, v, ends, ends.clone(), 6, 6, causal=True)


def cu_seqlens_k(q: Any, k: Any, v: Any, ends: Any) -> Any:
    return ct.flash_attention_varlen(q, k, v, ends.clone(), ends, 6, 6)


def seqused_k(q: Any, k: Any, v: Any, used: Any) -> Any:
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=q.device)
    return ct.flash_attention_varlen(q, k, v, ends, ends, 6, 6, seqused_k=used)


def varlen_slopes(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=q.device)
    return ct.flash_attention_varlen(q, k, v, ends, ends, 6, 6, causal=True, alibi_slopes=slopes)


def operator(q: Any, k: Any, v: Any, ends: Any) -> Any:
    plain = NO_MODIFICATIONS
    lengths = (ends, ends, 6, 6, None)
    return torch.ops.cupy_flash.attention_varlen(q, k, v, *plain, *lengths, True, None, None)[0]


SEEN = np.tri(6, dtype=bool)
CASES = {
    "cu_seqlens_q": Case(cu_seqlens_q, [0, 2, 6], "int32"),
    "cu_seqlens_k": Case(cu_seqlens_k, [0, 2, 6], "int32"),
    "seqused_k": Case(seqused_k, [1, 3], "int32"),
    "operator": Case(operator, [0, 2, 6], "int32"),
    "varlen slopes": Case(varlen_slopes, [0.5, 0.25], "float64"),
    "slopes": Case(dense("alibi_slopes", causal=True), [0.5, 0.25], "float64"),
    "packed slopes": Case(packed("alibi_slopes", causal=True), [0.5, 0.25], "float64"),
    "bias": Case(dense("bias"), SEEN * 1.5, "float64"),
    "sinks": Case(dense("sinks"), [0.5, 0.25], "float64"),
    "mask": Case(dense("mask"), SEEN, "bool"),
    "packed mask": Case(packed("mask"), SEEN, "bool"),
    "prefix_lens": Case(dense("prefix_lens", causal=True), [3], "int32"),
    "q_offset": Case(dense("q_offset", causal=True), [-2], "int32"),
    "packed q_offset": Case(packed("q_offset", causal=True), [-2], "int32"),
    "tree_mask": Case(dense("tree_mask"), [[1, 3, 7, 15, 31, 63]], "uint64"),
    "seqlens_k": Case(dense("seqlens_k"), [4], "int32"),
    "score_mod": Case(captured("score_mod"), [1.0, 2, 3, 4, 5, 6], "float64"),
    "mask_mod": Case(captured("mask_mod"), [0, 0, 0, 1, 1, 1], "int32"),
    "mask_mod int64": Case(captured("mask_mod"), [0, 0, 0, 1, 1, 1], "int64"),
    "mask_mod closure": Case(captured("closure"), [0, 0, 0, 1, 1, 1], "int32"),
    "block_list": Case(captured("block_list"), np.eye(3, dtype=bool)[None, None], "bool"),
}


def assert_equal(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Assert that each tensor equals its counterpart."""
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def gradients(case: Case, inputs: list[Any], array: Any) -> Any:
    """Return the gradients of the sum of squares of a call's output."""
    return torch.autograd.grad(case.attention(*inputs, array).square().sum(), inputs)


def rows(device: str) -> list[Any]:
    return [
        torch.randn(6, 2, 4, dtype=torch.float64, device=device, requires_grad=True)
        for _ in range(3)
    ]


def array_of(case: Case, device: str) -> Any:
    values = torch.tensor(np.asarray(case.values))
    return values.to(getattr(torch, case.dtype)).to(device)


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_is_overwritten_is_noticed(name: str, device: str) -> None:
    case = CASES[name]
    inputs, array = rows(device), array_of(case, device)
    # On a GPU the second call takes the path of recorded calls.
    for _ in range(2):
        out = case.attention(*inputs, array)
        array.copy_(array_of(case, device))
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            out.sum().backward()
        assert all(x.grad is None for x in inputs)


@pytest.mark.parametrize("name", CASES)
def test_hooks_of_saved_tensors_keep_what_was_given(name: str, device: str) -> None:
    """A hook that saves copies allows writes to the arguments, unless the write is noticed."""
    case = CASES[name]
    inputs, array = rows(device), array_of(case, device)
    for _ in range(2):
        expected = gradients(case, inputs, array)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            out = case.attention(*inputs, array)
        untouched = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
        assert_equal(untouched, expected)
        array.zero_()
        try:
            found = torch.autograd.grad(out.square().sum(), inputs)
        except RuntimeError as error:
            assert OVERWRITTEN in str(error)  # noqa: PT017
            assert "mod" in name or name == "block_list"
        else:
            assert_equal(found, expected)
        array = array_of(case, device)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_the_call(name: str, use_reentrant: bool, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    case = CASES[name]
    inputs, array = rows(device), array_of(case, device)
    expected = gradients(case, inputs, array)
    for x in inputs:
        x.grad = None
    out = checkpoint(case.attention, *inputs, array, use_reentrant=use_reentrant)
    out.square().sum().backward()
    assert_equal((x.grad for x in inputs), expected)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_rows_that_are_overwritten_are_noticed(index: int, device: str) -> None:
    inputs = rows(device)
    out = dense("seqlens_k")(*inputs, None)
    with torch.no_grad():
        inputs[index].mul_(2)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        out.sum().backward()


def test_results_that_are_overwritten_are_noticed(device: str) -> None:
    out = dense("seqlens_k")(*rows(device), None)
    with torch.no_grad():
        out.detach().mul_(2)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        out.sum().backward()


# Arguments that are not tensors have no version counters, so calls save copies of them.
OTHERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "list": (lambda x: x.tolist(), "seqlens_k"),
    "NumPy": (lambda x: x.numpy(), "seqlens_k"),
    "NumPy mask": (lambda x: x.numpy(), "mask"),
    "NumPy slopes": (lambda x: x.numpy(), "slopes"),
    "NumPy in score_mod": (lambda x: x.numpy(), "score_mod"),
    "NumPy in mask_mod": (lambda x: x.numpy(), "mask_mod"),
    "NumPy in closure": (lambda x: x.numpy(), "mask_mod closure"),
    "NumPy blocks": (lambda x: x.numpy(), "block_list"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seqlens_k", "slopes", "score_mod", "mask_mod", "block_list"])
def test_arrays_of_cupy_are_kept_as_they_were(name: str) -> None:
    import cupy

    case = CASES[name]
    inputs, array = rows("cuda"), cupy.asarray(array_of(case, "cpu").numpy())
    for _ in range(2):
        expected = gradients(case, inputs, array)
        out = case.attention(*inputs, array)
        saved = array.copy()
        array.fill(0)
        assert_equal(torch.autograd.grad(out.square().sum(), inputs), expected)
        array[...] = saved


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_tensor_is_kept_as_it_was(kind: str) -> None:
    convert, name = OTHERS[kind]
    case = CASES[name]
    inputs, other = rows("cpu"), convert(array_of(case, "cpu"))
    expected = gradients(case, inputs, other)
    out = case.attention(*inputs, other)
    other[:] = [x * 0 for x in other]
    assert_equal(torch.autograd.grad(out.square().sum(), inputs), expected)


@pytest.mark.parametrize("name", ["softcap", "softmax_scale", "window_size", "q_offset"])
def test_numbers_are_kept_as_they_were(name: str, device: str) -> None:
    inputs = rows(device)
    number = torch.tensor(2 if name in ("window_size", "q_offset") else 0.5, device=device)
    value: Any = [number, 0] if name == "window_size" else number
    attention = dense(name, causal=True)
    expected = torch.autograd.grad(attention(*inputs, value).square().sum(), inputs)
    out = attention(*inputs, value)
    number.mul_(3)
    if name == "window_size":
        value[1] = 1
    assert_equal(torch.autograd.grad(out.square().sum(), inputs), expected)


def fresh(device: str, *shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape, device=device) for shape in shapes]


@pytest.mark.parametrize("compute_scales", [False, True])
def test_appends_count_as_writes(compute_scales: bool, device: str) -> None:
    q, k, v, k_cache, v_cache = fresh(device, *[(1, 1, 2, 64)] * 3, *[(1, 9, 2, 64)] * 2)
    q, k, v = (x.half() for x in (q, k, v))
    options: dict[str, Any] = {"cache_seqlens": 3}
    caches = [x.half() for x in (k_cache, v_cache)]
    written = caches
    if compute_scales:
        caches = [torch.zeros(1, 9, 2, 64, dtype=torch.int8, device=device) for _ in range(2)]
        scales = [torch.ones(1, 9, 2, device=device) for _ in range(2)]
        options |= {"k_scale": scales[0], "v_scale": scales[1], "compute_scales": True}
        written = [*caches, *scales]
    read = [q, k, v]
    for _ in range(2):
        versions = [x._version for x in written]
        unchanged = [x._version for x in read]
        cupy_flash.flash_attention_with_kvcache(q, *caches, k, v, **options)
        assert [x._version for x in written] == [n + 1 for n in versions]
        assert [x._version for x in read] == unchanged
    options.pop("compute_scales", None)
    versions = [x._version for x in written]
    cupy_flash.flash_attention_with_kvcache(q, *caches, **options)
    assert [x._version for x in written] == versions


def test_an_append_is_seen_by_autograd(device: str) -> None:
    q, k, v, k_cache, v_cache = fresh(device, *[(1, 1, 2, 8)] * 3, *[(1, 9, 2, 8)] * 2)
    weight = torch.randn(8, device=device, requires_grad=True)
    y = (k_cache * weight).sum()
    # The append writes through another view of the same memory.
    views = [x.view(x.shape) for x in (k_cache, v_cache)]
    cupy_flash.flash_attention_with_kvcache(q, *views, k, v, cache_seqlens=3)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        y.backward()


def test_caches_of_inference_mode_are_appended_to(device: str) -> None:
    with torch.inference_mode():
        q, k, v, k_cache, v_cache = fresh(device, *[(1, 1, 2, 8)] * 3, *[(1, 9, 2, 8)] * 2)
        cupy_flash.flash_attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)
        assert torch.equal(k_cache[:, 3], k[:, 0])


@pytest.mark.parametrize("name", ["dense", "qkvpacked", "varlen", "kvcache", "combine"])
def test_an_out_counts_as_written(name: str, device: str) -> None:
    q = torch.randn(1, 4, 2, 8, device=device)
    ends = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    lse = torch.zeros(1, 1, 2, 4, device=device)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
        "dense": (cupy_flash.flash_attention, (q, q, q), {}),
        "qkvpacked": (cupy_flash.flash_attention_qkvpacked, (torch.stack((q, q, q), 2),), {}),
        "varlen": (cupy_flash.flash_attention_varlen, (*[q[0]] * 3, ends, ends, 3, 3), {}),
        "kvcache": (cupy_flash.flash_attention_with_kvcache, (q, q, q), {"cache_seqlens": 4}),
        "combine": (cupy_flash.combine, (q[None], lse), {}),
    }
    function, arrays, options = calls[name]
    out = torch.empty_like(q)
    for _ in range(2):
        version = out._version
        function(*arrays, **options, out=out[0] if name == "varlen" else out)
        assert out._version == version + 1


@pytest.mark.parametrize("name", ["dense", "qkvpacked", "varlen"])
def test_given_gradients_count_as_written(name: str, device: str) -> None:
    q, dout = torch.randn(2, 1, 4, 2, 8, device=device)
    ends = torch.tensor([0, 4], dtype=torch.int32, device=device)
    out, lse = cupy_flash.flash_attention(q, q, q, return_lse=True)
    qkv = torch.stack((q, q, q), 2)
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    dqkv = torch.empty_like(qkv)
    written = [dqkv] if name == "qkvpacked" else [dq, dk, dv]
    for _ in range(2):
        versions = [x._version for x in written]
        if name == "dense":
            cupy_flash.flash_attention_backward(dout, q, q, q, out, lse, dq=dq, dk=dk, dv=dv)
        elif name == "varlen":
            inputs = dout[0], q[0], q[0], q[0], out[0], lse[0], ends, ends, 4, 4
            given = {"dq": dq[0], "dk": dk[0], "dv": dv[0]}
            cupy_flash.flash_attention_varlen_backward(*inputs, **given)
        else:
            cupy_flash.flash_attention_qkvpacked_backward(dout, qkv, out, lse, dqkv=dqkv)
        assert all(x._version > n for x, n in zip(written, versions, strict=True))
