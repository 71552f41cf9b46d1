"""Gradients on the CPU backend: inputs, results, and errors for wrong arguments."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support import refusals
from support.comparisons import assert_all_close, assert_same_bits, peak_memory
from support.foreign import Foreign

from cupy_flash import (
    ScoreMod,
    attention_backward_reference,
    attention_varlen_backward_reference,
    flash_attention,
    flash_attention_backward,
    flash_attention_qkvpacked,
    flash_attention_qkvpacked_backward,
    flash_attention_qkvpacked_vjp,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_varlen_vjp,
    flash_attention_vjp,
    plan,
)

assert_refused = functools.partial(refusals.assert_refused, flash_attention_backward)


def arrays(rng: np.random.Generator, dtype: Any = np.float32) -> list[np.ndarray]:
    """Return q, k, v and dout."""
    shapes = [(2, 33, 4, 24), (2, 50, 2, 24), (2, 50, 2, 8), (2, 33, 4, 8)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def good() -> dict[str, Any]:
    """Return valid arguments; each test makes one of them wrong."""
    q, k, v, dout = arrays(np.random.default_rng(0))
    out, lse = flash_attention(q, k, v, return_lse=True, backend="cpu")
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "backend": "cpu"}
    return named | {"dq": np.full(q.shape, np.nan, q.dtype)}


@pytest.mark.parametrize("where", [{"arch": "sm_90"}, {"backend": "cpu"}])
def test_a_plan_allocates_nothing(where: dict[str, Any]) -> None:
    # Views that have the shape of 64 GiB. Kernels cannot read them in place, so calls copy them.
    shape, row = (8, 4096, 64, 64), np.zeros(128, np.float16)
    q = np.lib.stride_tricks.as_strided(row, (*shape[:1], 64 * 4096, *shape[2:]), (0, 0, 0, 2))
    strided = np.lib.stride_tricks.as_strided(row, q.shape, (0, 0, 0, 4))
    for array in (q, strided):
        for function in (flash_attention, flash_attention_backward):
            call = functools.partial(plan, function, q=array, k=array, v=array, **where)
            # The first call imports modules and fills caches, which stay allocated.
            call()
            assert peak_memory(call) < 1 << 20, function.__name__


def test_the_pullback_gives_what_the_backward_call_does(rng: Any) -> None:
    q, k, v, dout = arrays(rng)
    options: dict[str, Any] = {"causal": True, "softcap": 3.0, "backend": "cpu"}
    (out, lse), pullback = flash_attention_vjp(q, k, v, return_lse=True, **options)
    expected = flash_attention_backward(dout, q, k, v, out, lse, dlse=lse, **options)
    for _ in range(2):
        assert_same_bits(pullback(dout, lse), expected)


def test_gradients_of_packed_qkv_lie_in_one_array(rng: Any) -> None:
    qkv = rng.standard_normal((2, 40, 3, 4, 16)).astype(np.float32)
    dout = rng.standard_normal((2, 40, 4, 16)).astype(np.float32)
    same: dict[str, Any] = {"causal": True, "backend": "cpu"}
    out, lse = flash_attention_qkvpacked(qkv, return_lse=True, **same)
    given = np.full_like(qkv, np.nan)
    found = flash_attention_qkvpacked_backward(dout, qkv, out, lse, dqkv=given, **same)
    assert found is given
    parts = [qkv[:, :, i] for i in range(3)]
    expected = flash_attention_backward(dout, *parts, out, lse, **same)
    assert_same_bits((found[:, :, i] for i in range(3)), expected)
    new = flash_attention_qkvpacked_backward(dout, qkv, out, lse, **same)
    assert new.tobytes() == found.tobytes()


def test_gradients_of_packed_qkv_and_of_modifications_come_in_the_order_of_wrt(rng: Any) -> None:
    qkv = rng.standard_normal((2, 40, 3, 4, 16)).astype(np.float32)
    dout = rng.standard_normal((2, 40, 4, 16)).astype(np.float32)
    options: dict[str, Any] = {"score_mod": gain_of_heads(), "backend": "cpu"}
    options["sinks"] = np.zeros(4, np.float32)
    (out, lse), pullback = flash_attention_qkvpacked_vjp(qkv, return_lse=True, **options)
    parts = [qkv[:, :, i] for i in range(3)]
    names = ("q", "k", "v", "sinks", "score_mod.gain")
    expected = flash_attention_backward(dout, *parts, out, lse, wrt=names, **options)
    dqkv, dgain = pullback(dout)
    assert_same_bits((*(dqkv[:, :, i] for i in range(3)), dgain), (*expected[:3], expected[4]))
    call = functools.partial(flash_attention_qkvpacked_backward, dout, qkv, out, lse, **options)
    found = call(wrt=("sinks", "qkv", "score_mod.gain"))
    assert_same_bits(found, (expected[3], dqkv, expected[4]))
    assert_same_bits(call(wrt=("sinks",)), expected[3:4])
    for wrong, message in (
        (("q",), "wrt names 'q'; expected some of qkv, sinks, score_mod.gain"),
        (("bias",), "wrt names 'bias'"),
        (("qkv", "qkv"), "each name once"),
    ):
        with pytest.raises(ValueError, match=message):
            call(wrt=wrong)
    with pytest.raises(ValueError, match="dqkv is given"):
        call(wrt=("sinks",), dqkv=np.empty_like(qkv))


def test_the_pullback_of_packed_sequences_gives_what_the_backward_call_does(rng: Any) -> None:
    ends_q, ends_k = (np.array(x, np.int32) for x in ([0, 3, 3, 40], [0, 9, 30, 60]))
    q, k, v = (rng.standard_normal((n, 2, 16)).astype(np.float32) for n in (40, 60, 60))
    lengths = ends_q, ends_k, 37, 30
    options: dict[str, Any] = {"seqused_k": np.array([5, 1, 30], np.int32), "wrt": ("v", "q")}
    options |= {"causal": True, "backend": "cpu"}
    inputs = q, k, v
    (out, lse), pullback = flash_attention_varlen_vjp(*inputs, *lengths, return_lse=True, **options)
    expected = flash_attention_varlen_backward(
        *(out, *inputs, out, lse, *lengths), dlse=lse, **options
    )
    assert_same_bits(pullback(out, lse), expected)


def test_families_and_tiles_may_be_asked_for_in_each_direction(rng: Any) -> None:
    q, k, v, dout = arrays(rng)
    out, pullback = flash_attention_vjp(q, k, v, backend="cpu", tile={"Br": 16, "Bc": 24})
    right, other = flash_attention_vjp(q, k, v, backend="cpu")
    np.testing.assert_allclose(out, right, atol=1e-5)
    assert_all_close(pullback(dout, tile={"Br": 8}), other(dout), atol=1e-4)
    with pytest.raises(ValueError, match="'hoper'"):
        pullback(dout, family="hoper")
    with pytest.raises(ValueError, match="'hoper'"):
        flash_attention_vjp(q, k, v, backend="cpu", family="hoper")


def gain_of_heads() -> ScoreMod:
    ones = np.ones(4, np.float32)
    return ScoreMod(lambda score, h, gain: gain[h] * score, gain=ones, differentiable=["gain"])


def test_gradients_come_in_the_order_of_wrt_and_captures_behind_q_k_and_v(rng: Any) -> None:
    q, k, v, dout = arrays(rng)
    options: dict[str, Any] = {"score_mod": gain_of_heads(), "backend": "cpu"}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    call = functools.partial(flash_attention_backward, dout, q, k, v, out, lse, **options)
    dq, dk, dv, dgain = call()
    assert (dq.shape, dk.shape, dv.shape, dgain.shape) == (q.shape, k.shape, v.shape, (4,))
    assert_same_bits(call(wrt=("score_mod.gain", "k")), (dgain, dk))


def of_slopes(function: Any, slopes: Any, step: float = 1e-6) -> np.ndarray:
    """Return the derivative of a function by each slope, from differences."""
    found = np.zeros_like(slopes)
    for index in np.ndindex(slopes.shape):
        for sign in (1, -1):
            changed = slopes.copy()
            changed[index] += sign * step
            found[index] += sign * function(changed) / (2 * step)
    return found


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("options", [{"causal": True}, {"score_mod": gain_of_heads()}], ids=str)
def test_slopes_have_gradients(
    rng: np.random.Generator, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    q, k, v, dout = arrays(rng, np.float64)
    slopes, names = rng.random(shape), ("alibi_slopes", "k")
    _, pullback = flash_attention_vjp(
        q, k, v, alibi_slopes=slopes, wrt=names, backend="cpu", **options
    )

    def loss(slopes: np.ndarray) -> Any:
        return (dout * flash_attention(q, k, v, alibi_slopes=slopes, **options)).sum()

    found = pullback(dout)
    given = options | {"alibi_slopes": slopes, "wrt": names}
    for got in (found, attention_backward_reference(dout, q, k, v, **given)):
        np.testing.assert_allclose(got[0], of_slopes(loss, slopes), rtol=1e-6, atol=1e-7)
    made = plan(flash_attention_backward, q=q, k=k, v=v, arch="sm_90", **given)
    assert made.problem.gradient_spec.wants("score_mod.alibi_slopes")


def test_slopes_of_packed_sequences_have_gradients(rng: np.random.Generator) -> None:
    q, k, v, dout = (x[0] for x in arrays(rng, np.float64))
    lengths = np.array([0, 10, 33], np.int32), np.array([0, 0, 50], np.int32), 33, 50
    slopes = rng.random((2, 4))
    options: dict[str, Any] = {"causal": True, "alibi_slopes": slopes, "wrt": ("alibi_slopes",)}
    _, pullback = flash_attention_varlen_vjp(q, k, v, *lengths, **options)
    expected = attention_varlen_backward_reference(dout, q, k, v, *lengths, **options)
    assert_all_close(pullback(dout), expected)


@pytest.mark.parametrize("slopes", [0.5, [0.5] * 4])
def test_slopes_that_are_no_array_have_no_gradients(slopes: Any) -> None:
    q = np.ones((1, 4, 4, 8), np.float32)
    _, pullback = flash_attention_vjp(q, q, q, alibi_slopes=slopes, wrt=("alibi_slopes",))
    with pytest.raises(TypeError, match="pass an array"):
        pullback(q)


def test_a_pullback_is_made_of_what_a_backward_call_takes() -> None:
    q = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="wrt names 'bias'"):
        flash_attention_vjp(q, q, q, wrt=("bias",))
    with pytest.raises(ValueError, match="grad_dtype is 'x'"):
        flash_attention_vjp(q, q, q, grad_dtype="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        flash_attention_vjp(q, q, q, out=q.copy())  # type: ignore[call-arg]


class TorchDtype:
    """Dtype whose `str` is that of a dtype of PyTorch."""

    def __str__(self) -> str:
        return "torch.float32"


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype(np.float32), TorchDtype()])
def test_the_dtype_of_gradients_may_be_a_dtype_of_any_library(dtype):
    q = np.ones((1, 3, 2, 8), np.float16)
    _, pullback = flash_attention_vjp(q, q, q, grad_dtype=dtype, backend="cpu")
    assert all(gradient.dtype == np.float32 for gradient in pullback(q))
    planned = functools.partial(plan, flash_attention_backward, q=q, k=q, v=q, backend="cpu")
    assert planned(grad_dtype=dtype) == planned(grad_dtype="float32")


def test_an_output_may_lie_anyhow(rng: Any) -> None:
    q, k, v, dout = arrays(rng)
    out, lse = flash_attention(q, k, v, return_lse=True, backend="cpu")
    expected = flash_attention_backward(dout, q, k, v, out, lse, backend="cpu")
    anyhow = np.asfortranarray(out)
    found = flash_attention_backward(dout, q, k, v, anyhow, lse, backend="cpu")
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_another_librarys_arrays_come_back_as_its_own(rng: Any) -> None:
    q, k, v, dout = arrays(rng)
    out, lse = flash_attention(q, k, v, return_lse=True, backend="cpu")
    expected = flash_attention_backward(dout, q, k, v, out, lse, backend="cpu")
    found = flash_attention_backward(*map(Foreign, (dout, q, k, v, out, lse)), backend="cpu")
    assert all(isinstance(gradient, Foreign) for gradient in found)
    assert_same_bits((gradient.array for gradient in found), expected)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_has_no_gradient(empty: str) -> None:
    batch = 0 if empty == "batch" else 2
    q = np.ones((batch, 0 if empty == "queries" else 5, 4, 8), np.float32)
    k = np.ones((batch, 0 if empty == "keys" else 7, 2, 8), np.float32)
    options: dict[str, Any] = {"sinks": np.ones(4, np.float32)}
    out, lse = flash_attention(q, k, k, return_lse=True, backend="cpu", **options)
    options |= {"dlse": np.ones_like(lse), "wrt": ("q", "k", "v", "sinks")}
    found = flash_attention_backward(q, q, k, k, out, lse, backend="cpu", **options)
    exact = attention_backward_reference(q, q, k, k, **options)
    assert all(np.array_equal(*pair) for pair in zip(found, exact, strict=True))


def test_the_plan_names_the_cpu_and_its_memory() -> None:
    q = np.ones((2, 300, 4, 64), np.float16)
    options = {"backend": "cpu", "tile": {"Br": 32}}
    planned = functools.partial(plan, flash_attention_backward, q=q, k=q, v=q, **options)
    made, wide = planned(), planned(grad_dtype="float32")
    assert (made.family, made.tile.Br) == ("cpu", 32)
    assert made.workspace - wide.workspace == 4 * 2 * q.size


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"wrt": "q"}, TypeError, "wrt is 'q'; expected a sequence"),
        ({"wrt": ("q", "q")}, ValueError, "each name once"),
        ({"wrt": np.array(["q", "k", "v"])}, TypeError, "expected a sequence of names"),
        ({"grad_dtype": "fp32"}, ValueError, "grad_dtype is 'fp32'; expected 'float32', or None"),
        ({"grad_dtype": "float16"}, ValueError, "grad_dtype is 'float16'; expected 'float32'"),
        ({"wrt": ("bias",)}, ValueError, "wrt names 'bias'; expected some of q, k, v"),
        ({"wrt": ("k",)}, ValueError, "dq is given, but wrt does not name 'q'"),
        ({"family": "mma"}, ValueError, "family 'mma' is a GPU kernel"),
        ({"family": "hopper9"}, ValueError, "unknown family 'hopper9'"),
        ({"tile": {"warps": 4}}, ValueError, "unknown tile field 'warps'"),
        ({"lse": np.zeros((2, 4, 32), np.float32)}, ValueError, "lse has shape"),
        ({"dout": np.zeros((2, 33, 4, 9), np.float32)}, ValueError, "dout has shape"),
    ],
)
def test_what_is_wrong_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert_refused(error, message, good() | change)


def test_keys_of_two_sequences_have_no_gradients(rng: Any) -> None:
    q, k, v, dout = (rng.standard_normal((30, 2, 8)).astype(np.float32) for _ in range(4))
    starts = np.array([0, 10, 30], np.int32)
    lengths = (starts, starts, 20, 20)
    # seqused_k extends sequence 0 into the keys of sequence 1; each key has one gradient row only.
    options: dict[str, Any] = {"seqused_k": np.array([11, 20], np.int32), "backend": "cpu"}
    out, lse = flash_attention_varlen(q, k, v, *lengths, return_lse=True, **options)
    message = "sequence 0 11 keys; expected at most 10, its length in cu_seqlens"
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen_backward(dout, q, k, v, out, lse, *lengths, **options)


def test_a_gradient_overlaps_nothing_and_can_be_written() -> None:
    arguments = good()
    assert_refused(ValueError, "dq overlaps q", arguments | {"dq": arguments["q"]})
    arguments["dq"].flags.writeable = False
    assert_refused(ValueError, "read-only", arguments)
