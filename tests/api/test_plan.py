"""`plan` of every function returns the plan that a call uses, whatever outputs are passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import (
    Plan,
    flash_attention,
    flash_attention_backward,
    flash_attention_qkvpacked,
    flash_attention_qkvpacked_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_vjp,
    flash_attention_with_kvcache,
    plan,
)

ON = {"arch": "sm_90"}
Q, KV = np.zeros((2, 70, 4, 64), np.float16), np.zeros((2, 90, 2, 64), np.float16)
QKV = np.zeros((2, 70, 3, 4, 64), np.float16)
ROWS, STARTS = np.zeros((70, 4, 64), np.float16), [0, 30, 70]
PACKED = {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
PACKED |= {"max_seqlen_q": 40, "max_seqlen_k": 40}


def test_outputs_and_results_of_the_forward_call_change_no_contiguous_plan() -> None:
    out, lse = np.zeros_like(Q), np.zeros((2, 4, 70), np.float32)
    inputs = {"q": Q, "k": KV, "v": KV}

    assert plan(flash_attention, Q, KV, KV, **ON) == plan(
        flash_attention, **inputs, out=out, return_lse=True, **ON
    )
    planned = plan(flash_attention_backward, **inputs, causal=True, **ON)
    assert planned == plan(flash_attention_backward, out, Q, KV, KV, out, lse, causal=True, **ON)
    # With `dlse` the call computes one more term.
    assert planned != plan(flash_attention_backward, **inputs, dlse=lse, causal=True, **ON)


@pytest.mark.parametrize("where", [ON, {"backend": "cpu"}])
@pytest.mark.parametrize(
    ("packed", "apart"),
    [
        (flash_attention_qkvpacked, flash_attention),
        (flash_attention_qkvpacked_backward, flash_attention_backward),
    ],
)
def test_a_plan_of_qkv_is_that_of_its_views(
    packed: Callable[..., Any], apart: Callable[..., Any], where: dict[str, Any]
) -> None:
    views = {name: QKV[:, :, i] for i, name in enumerate("qkv")}

    found = plan(packed, qkv=QKV, causal=True, **where)
    assert found == plan(apart, **views, causal=True, **where)


@pytest.mark.parametrize("function", [flash_attention, flash_attention_backward])
def test_an_architecture_and_the_cpu_backend_exclude_each_other(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(ValueError, match="arch is 'sm_90', but backend is 'cpu'"):
        plan(function, q=Q, k=KV, v=KV, backend="cpu", **ON)


def test_gradients_of_a_strided_head_dim_are_planned_as_for_the_copies_of_a_call() -> None:
    strided = np.empty((*Q.shape[:-1], 2 * Q.shape[-1]), Q.dtype)[..., ::2]
    found = plan(flash_attention_backward, q=strided, k=KV, v=KV, **ON)
    assert found == plan(flash_attention_backward, q=Q, k=KV, v=KV, **ON)


@pytest.mark.parametrize("where", [ON, {"backend": "cpu"}])
def test_gradients_of_packed_sequences_have_a_plan(where: dict[str, Any]) -> None:
    found = plan(flash_attention_varlen_backward, **PACKED, wrt=("k",), **where)

    assert found.problem.layout.kind == "varlen"
    assert found.problem.gradient is not None
    assert found.problem.gradient.wrt == ("k",)
    assert found.family == ("hopper" if where is ON else "cpu")


def test_gradients_of_qkv_and_a_bias_are_planned_by_their_names() -> None:
    bias = np.zeros((4, 70, 70), np.float16)
    call = {"qkv": QKV, "bias": bias, "wrt": ("qkv", "bias")}
    gradient = plan(flash_attention_qkvpacked_backward, **call, **ON).problem.gradient

    assert gradient is not None
    assert gradient.wrt == ("q", "k", "v", "bias")


def test_the_deprecated_functions_warn_and_plan_the_same() -> None:
    cache = {"q": Q, "k_cache": KV, "v_cache": KV, "cache_seqlens": 80}
    old: dict[str, tuple[Callable[[], Plan], Plan]] = {
        "flash_attention, q": (lambda: plan(Q, KV, KV, **ON),
            plan(flash_attention, Q, KV, KV, **ON)),
        "flash_attention, ": (lambda: plan(q=Q, k=KV, v=KV, **ON),
            plan(flash_attention, Q, KV, KV, **ON)),
        "flash_attention_backward": (lambda: cupy_flash.plan_backward(Q, KV, KV, causal=True, **ON),
            plan(flash_attention_backward, q=Q, k=KV, v=KV, causal=True, **ON)),
        "flash_attention_varlen": (lambda: cupy_flash.plan_varlen(**PACKED, **ON),
            plan(flash_attention_varlen, **PACKED, **ON)),
        "flash_attention_with_kvcache": (lambda: cupy_flash.plan_with_kvcache(**cache, **ON),
            plan(flash_attention_with_kvcache, **cache, **ON)),
    }  # fmt: skip
    for name, (function, expected) in old.items():
        with pytest.warns(DeprecationWarning, match=rf"is deprecated; call plan\({name}") as caught:
            assert function() == expected
        assert [warning.filename for warning in caught] == [__file__]


def test_a_function_without_plans_is_told_those_that_have_some() -> None:
    with pytest.raises(TypeError, match=r"function is .*\.vjp\.\w*vjp; .* one of cupy_flash.flash"):
        plan(flash_attention_vjp, Q, KV, KV)


@pytest.mark.parametrize(
    ("function", "arrays", "missing"),
    [
        (flash_attention, (Q, KV), "flash_attention is planned without v; expected q, k, v$"),
        (flash_attention_varlen, (Q,) * 4, "planned without cu_seqlens_k, max_seqlen_q, max_seqle"),
        (flash_attention_with_kvcache, (Q, KV), "planned without v_cache, cache_seqlens; expec"),
        (flash_attention_qkvpacked, (), "planned without qkv; expected qkv$"),
        (flash_attention_backward, (Q, KV, KV), r"without v; .* plan\(.*_backward, q=q, k=k, v=v"),
        (flash_attention_qkvpacked_backward, (QKV,), r"without qkv; .*: plan\(.*, qkv=qkv\)"),
    ],
)
def test_what_a_plan_lacks_is_named(
    function: Callable[..., Any], arrays: tuple[Any, ...], missing: str
) -> None:
    with pytest.raises(TypeError, match=missing):
        plan(function, *arrays, **ON)


@pytest.mark.filterwarnings("error")
def test_the_name_of_a_function_is_not_taken_for_an_array() -> None:
    with pytest.raises(TypeError, match="is 'flash_attention', a name; expected the function"):
        plan("flash_attention", Q, KV, KV)


def test_arguments_that_do_not_fit_are_said_to_be_the_functions() -> None:
    with pytest.raises(TypeError, match="flash_attention: too many positional arguments"):
        plan(flash_attention, Q, KV, KV, KV)
