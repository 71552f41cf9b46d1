"""Calls of MLA, whose values are columns of the keys: their arguments and true results."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash import flash_attention_with_kvcache
from cupy_flash.reference.packed import attention_with_kvcache_reference
from support.calls.quantized_support import QuantizedCase, on_device
from support.calls.sequence_support import KVCacheCase, Truth, to_numpy
from support.gpu import cupy

# Head dims and KV heads of models with MLA.
LATENT = {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1}
Arguments = dict[str, Any]


def latent_arguments(base: KVCacheCase, cache_dtype: str | None, scales: str) -> Arguments:
    """Return the arguments of the call, as new NumPy arrays, with keys but no values."""
    if cache_dtype is None:
        found = base.problem().arguments()
    else:
        found = QuantizedCase(base, cache_dtype, scales).arguments() | {"v_scale": None}
    return found | {"v_cache": None, "v": None, "head_dim_v": base.head_dim_v}


def after_the_append(arguments: Arguments) -> tuple[Arguments, Any]:
    """Return an equivalent call after the append, with separate values, and the new caches."""
    given = {name: value for name, value in arguments.items() if name != "head_dim_v"}
    if given["k"] is not None:
        given["v_scale"] = given.get("k_scale")
        whole = given | {"v_cache": given["k_cache"], "v": given["k"]}
        stored = attention_with_kvcache_reference(**whole)
        given |= {"k_cache": stored.k_cache, "k_scale": stored.k_scale, "k": None}
        new = arguments["k"].shape[1]
        given["cache_seqlens"] = given["cache_seqlens"] + np.int32(new)
    else:
        stored = None
    given |= {
        "v_cache": given["k_cache"][..., : arguments["head_dim_v"]],
        "v": None,
        "v_scale": given.get("k_scale"),
    }
    return {name: x for name, x in given.items() if name != "compute_scales"}, stored


def run_on_gpu(arguments: Arguments, **more: Any) -> tuple[Arguments, Any, Any]:
    """Run a call on the GPU, over an output of NaN; return its arrays, output and lse."""
    given = {name: on_device(x) for name, x in arguments.items()}
    shape = (*arguments["q"].shape[:3], arguments["head_dim_v"])
    out = cupy.asarray(np.full(shape, np.nan, arguments["q"].dtype))
    out, lse = flash_attention_with_kvcache(**given, out=out, return_lse=True, **more)
    return given, to_numpy(out), to_numpy(lse)


def check_latent(
    base: KVCacheCase,
    cache_dtype: str | None = None,
    scales: str = "none",
    modifications: Arguments | None = None,
    **choice: Any,
) -> None:
    """Fail unless a call agrees with the reference, and stores the same bits.

    `modifications` are limited to those that `sequence_support.Truth` supports.
    """
    arguments = latent_arguments(base, cache_dtype, scales) | (modifications or {})
    with np.errstate(all="ignore"):
        equivalent, stored = after_the_append(arguments)
        truth = Truth.of_kvcache(equivalent)
    given, out, lse = run_on_gpu(arguments, **choice)
    truth.check(out, lse)
    if stored is not None:
        assert to_numpy(given["k_cache"]).tobytes() == stored.k_cache.tobytes()
        if cache_dtype is not None and scales == "computed":
            assert to_numpy(given["k_scale"]).tobytes() == stored.k_scale.tobytes()
