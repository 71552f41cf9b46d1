"""Random calls inside functions that JAX compiles."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from support.gradients.gradient_calls import GradientCall

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
# Arrays that a compiled function receives; others, such as 64-bit masks, are constants of it.
TRACED = (*DIFFERENTIABLE, "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seqlens_k", "mask")
TRACED += ("alibi_slopes", "prefix_lens")


def in_64_bits(dtype: str) -> Any:
    """Return a context in which JAX keeps the 64 bits of a dtype."""
    jax = pytest.importorskip("jax")
    if dtype != "float64":
        return contextlib.nullcontext()
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


def compiled(call: GradientCall) -> tuple[Any, dict[str, np.ndarray]]:
    """Return out and lse, and the gradients by name, of a compiled function of a call."""
    jax, cj = pytest.importorskip("jax"), pytest.importorskip("cupy_flash.jax")
    positional, named = call.forward.given(np)
    packed = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    everything = dict(zip(packed, positional, strict=False)) | named
    traced = {n: x for n, x in everything.items() if n in TRACED and isinstance(x, np.ndarray)}
    others = {n: x for n, x in everything.items() if n not in traced}
    function = cj.flash_attention_varlen if call.is_packed else cj.flash_attention
    wrt = {name: traced.pop(name) for name in call.names}

    @jax.jit
    def run(wrt: Any, traced: Any, dout: Any, dlse: Any) -> Any:
        def forward(wrt: Any) -> Any:
            arguments = {**others, **traced, **wrt}
            rows = [arguments.pop(name) for name in packed if name in arguments]
            return function(*rows, return_lse=True, **arguments)

        results, pull_back = jax.vjp(forward, wrt)
        dlse = jax.numpy.zeros_like(results[1]) if dlse is None else dlse
        return results, pull_back((dout, dlse))[0]

    results, gradients = run(wrt, traced, call.dout, call.dlse)
    return map(np.asarray, results), {n: np.asarray(gradients[n]) for n in call.names}
