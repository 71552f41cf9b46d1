"""Attention of JAX arrays over a KV cache: the updated caches are results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from cupy_flash.calls.arguments import given_lengths
from cupy_flash.calls.options import Options, plain_options, with_statistics
from cupy_flash.jax.differentiable import require_constants, static_of, without_gradient
from cupy_flash.problem.tile import TileRequest, freeze_tile

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cupy_flash.mods.keywords import CacheModifications


class DecodingStep(NamedTuple):
    """Results of `flash_attention_with_kvcache`, a pytree of JAX.

    Attributes
    ----------
    out
        Output, shape (batch, seqlen_q, heads_q, head_dim_v).
    lse
        Log-sum-exp of each query row, shape (batch, heads_q, seqlen_q).
    k_cache, v_cache
        Caches with the new rows; v_cache is None if k_cache holds the values.
    k_scale, v_scale
        Scales of 8-bit caches as they were given, with those of new rows if `compute_scales`.
    """

    out: Any
    lse: Any
    k_cache: Any
    v_cache: Any
    k_scale: Any
    v_scale: Any


def flash_attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any | None,
    k: Any | None = None,
    v: Any | None = None,
    *,
    cache_seqlens: Any,
    cu_seqlens_k_new: Any | None = None,
    cache_batch_idx: Any | None = None,
    block_table: Any | None = None,
    rotary_cos: Any | None = None,
    rotary_sin: Any | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Any | None = None,
    k_scale: Any | None = None,
    v_scale: Any | None = None,
    compute_scales: bool = False,
    head_dim_v: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    family: str | None = None,
    tile: TileRequest = None,
    **modifications: Unpack[CacheModifications],
) -> Any:
    """Compute `cupy_flash.flash_attention_with_kvcache` of JAX arrays, and return the caches.

    JAX arrays are immutable, so the caches with the new rows are results. If the function that
    `jax.jit` compiles takes the caches as donated arguments (`donate_argnums`), or carries them in
    a loop, they are updated in place. Otherwise each call copies them.

    Parameters
    ----------
    q, k_cache, v_cache, k, v, cache_seqlens, cu_seqlens_k_new, cache_batch_idx, block_table,
    rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, k_scale, v_scale, compute_scales,
    head_dim_v, causal, softmax_scale, num_splits, batch_invariant, return_max_logits,
    return_entropy, family, tile, **modifications
        See `cupy_flash.flash_attention_with_kvcache`. All arrays may be traced. One integer for all
        sequences, `cache_seqlens`, may be traced, too.

    Returns
    -------
    DecodingStep
        Named tuple of out, lse, and the caches and scales after the call.
    max_logits, entropy : arrays, shape (batch, heads_q, seqlen_q)
        Row statistics, see `cupy_flash.flash_attention`, each only if requested. The result is then
        a tuple of the decoding step and these arrays.

    Raises
    ------
    TypeError
        If an argument has a wrong type or dtype, an option is traced, or the call is
        differentiated.
    ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention_with_kvcache`. Inside a compiled function, errors about the
        contents of arrays or the GPU are raised by JAX when the function runs.
    """
    options = plain_options(
        Options(
            *("kvcache", causal, softmax_scale, True, family, freeze_tile(tile), None, "bshd"),
            num_splits,
            batch_invariant,
            rotary_interleaved=rotary_interleaved,
            compute_scales=compute_scales,
            head_dim_v=head_dim_v,
        )
    )
    options = with_statistics(options, return_max_logits, return_entropy)
    keys, lengths = given_lengths(cache_seqlens)
    if getattr(lengths, "ndim", None) == 0:
        lengths = jnp.broadcast_to(lengths, (q.shape[0],))
    arrays = {
        **{"q": q, "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache},
        **{"cache_seqlens": lengths, "cache_batch_idx": cache_batch_idx},
        **{"block_table": block_table, "cu_seqlens_k_new": cu_seqlens_k_new},
        **{"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_seqlens": rotary_seqlens},
        **{"k_scale": k_scale, "v_scale": v_scale},
    }
    require_constants({"causal": causal, "softmax_scale": softmax_scale, **arrays, **modifications})
    static, operands = static_of(options, arrays, modifications, keys)
    made = without_gradient(
        static,
        operands,
        "flash_attention_with_kvcache is differentiated by JAX, but has no gradient",
    )
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
    after = {name: made.get(name, x) for name, x in caches.items()}
    step = DecodingStep(made["out"], made["lse"], **jax.tree.map(jnp.asarray, after))
    statistics = tuple(made[name] for name in options.statistics)
    return (step, *statistics) if statistics else step
