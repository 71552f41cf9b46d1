"""Attention for JAX outside `jax.jit`: functions on JAX arrays, differentiable by JAX.

    from cupy_flash.jax import flash_attention
    jax.grad(lambda q: flash_attention(q, k, v, causal=True).sum())(q)

The functions have the arguments of the functions of the same names in `cupy_flash`. Gradients reach
q, k, v, bias and sinks; numbers and lists are constants. A call is computed when it is made, so it
cannot be part of a function under `jax.jit`, where arrays have no values yet. As usual in JAX, an
argument may be a NumPy array, which is copied to the device of the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from cupy_flash.arrays.kinds import elements, host_array_on_gpu, unshared
from cupy_flash.arrays.strided import kind_of
from cupy_flash.calls.arguments import check_qkv, parts_of
from cupy_flash.differentiable import WITH_GRADIENT, DifferentiableCall, dense_call, varlen_call
from cupy_flash.mods.keywords import ARRAYS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import Modifications, PackedModifications

__all__ = ["flash_attention", "flash_attention_qkvpacked", "flash_attention_varlen"]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention` of JAX arrays, differentiable by JAX.

    The axes are (batch, seqlen, heads, head_dim). Arrays (batch, heads, seqlen, head_dim), as
    PyTorch has them, need layout="bhsd": without it heads and seqlen are silently confused.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, q_offset, layout, return_lse, **modifications
        See `cupy_flash.flash_attention`.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, or is traced, as inside `jax.jit`.
    ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention` and `cupy_flash.flash_attention_backward`.
    """
    _require_constants({"softmax_scale": softmax_scale, "q_offset": q_offset}, modifications)
    call, others = dense_call(causal, softmax_scale, q_offset, layout, modifications)
    out, lse = _differentiable(call, (q, k, v, *others))
    return (out, lse) if return_lse else out


def flash_attention_qkvpacked(
    qkv: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: Any = None,
    return_lse: bool = False,
    **modifications: Unpack[Modifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_qkvpacked` of a JAX array, differentiable by JAX.

    Parameters
    ----------
    qkv : array, shape (batch, seqlen, 3, heads, head_dim)
        Queries, keys and values along the third-to-last axis, copied, because JAX has no views.
    causal, softmax_scale, q_offset, return_lse, **modifications
        See `cupy_flash.flash_attention_qkvpacked`.

    Returns
    -------
    out : array, shape (batch, seqlen, heads, head_dim)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    if not isinstance(qkv, (jax.Array, np.ndarray)):
        raise TypeError(f"qkv is {kind_of(qkv)}; expected a JAX or NumPy array")
    layout = modifications.pop("layout", "bshd")  # type: ignore[typeddict-item]
    check_qkv(qkv, layout)
    return flash_attention(
        *parts_of(qkv),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
        return_lse=return_lse,
        **modifications,
    )


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    **modifications: Unpack[PackedModifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_varlen` of JAX arrays, differentiable by JAX.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
    seqused_k, return_lse, **modifications
        See `cupy_flash.flash_attention_varlen`.

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v)
        Output. With return_lse, the pair (out, lse).

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `flash_attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    _require_constants({"softmax_scale": softmax_scale, **lengths}, modifications)
    call, others = varlen_call(
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k),
        *(causal, softmax_scale, modifications),
    )
    out, lse = _differentiable(call, (q, k, v, *others))
    return (out, lse) if return_lse else out


def _require_constants(values: Mapping[str, Any], modifications: Mapping[str, Any]) -> None:
    """Raise TypeError for traced values without a gradient, and for traced values in lists."""
    for name, value in {**values, **modifications}.items():
        if not any(isinstance(x, jax.core.Tracer) for x in elements(value)):
            continue
        if isinstance(value, (list, tuple)):
            raise TypeError(
                f"{name} holds values that are traced by JAX; pass numbers, or one array, because "
                "lists have no gradients"
            )
        if name not in WITH_GRADIENT:
            raise TypeError(
                f"{name} is traced by JAX; pass a value: only q, k, v, bias, sinks have gradients"
            )


def _with_arrays(call: DifferentiableCall, change: Callable[[str, Any], Any]) -> DifferentiableCall:
    """Return the call with its length and modification arrays replaced by `change(name, array)`."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    lengths = tuple(map(change, names, call.lengths))
    modifications = {
        name: change(name, value) if name in ARRAYS else value
        for name, value in call.modifications.items()
    }
    return call._replace(lengths=lengths, modifications=modifications)


def _on_device(
    call: DifferentiableCall, inputs: tuple[Any, ...]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """Return the call and its inputs with NumPy arrays copied to the device of the JAX arrays."""
    places = (array.devices() for array in inputs if isinstance(array, jax.Array))
    # If all inputs are NumPy arrays, None selects JAX's default device.
    (device, *_) = next(places, (None,))
    inputs = tuple(
        # Copied first, because JAX may read the memory after `device_put` has returned.
        jax.device_put(array.copy(), device) if isinstance(array, np.ndarray) else array
        for array in inputs
    )
    (device, *_) = inputs[0].devices()
    if device.platform != "gpu":
        return call, inputs
    # Host arrays of the call become CuPy arrays: JAX would narrow a uint64 tree_mask to uint32.
    return _with_arrays(call.with_captures(host_array_on_gpu), host_array_on_gpu), inputs


def _run(call: DifferentiableCall, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    for name, array in zip(call.names, inputs, strict=True):
        if isinstance(array, jax.core.Tracer):
            raise TypeError(
                f"{name} is traced by a transform such as jax.jit or jax.vmap; call attention "
                "outside of it, with concrete arrays"
            )
    call, inputs = _on_device(call, inputs)
    results: tuple[Any, Any] = call.run(inputs)
    return results


def _differentiable(call: DifferentiableCall, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    # The caller may overwrite NumPy and CuPy arrays before the gradients are computed.
    call = _with_arrays(call.with_functions_kept(), lambda _, array: unshared(array))
    attention = jax.custom_vjp(lambda *inputs: _run(call, inputs))

    def forward(*inputs: Any) -> tuple[Any, Any]:
        inputs = tuple(map(unshared, inputs))
        results = _run(call, inputs)
        return results, (inputs, results)

    def backward(saved: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
        inputs, results = saved
        # JAX creates the zero gradient of an unused result on its default device.
        (device,) = results[0].devices()
        gradients = jax.device_put(gradients, device)
        placed, inputs = _on_device(call, inputs)
        return placed.pull_back(inputs, results, gradients, call.names)

    attention.defvjp(forward, backward)
    result: tuple[Any, Any] = attention(*inputs)
    return result
