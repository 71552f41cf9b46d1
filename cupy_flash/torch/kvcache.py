"""Attention over a KV cache for PyTorch, also inside compiled functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cupy_flash.api import kvcache
from cupy_flash.arrays.strided import kind_of
from cupy_flash.arrays.torch_arrays import is_in_transform, may_be_transformed
from cupy_flash.mods.keywords import CacheModifications
from cupy_flash.torch.cache_operators import (
    APPEND,
    APPEND_WITH_SCALES,
    ATTEND,
    OPTIONS,
    TENSORS,
)
from cupy_flash.torch.graphs import are_tensors, is_number, is_plain, outside_graph
from cupy_flash.torch.modifications import fits_graph, is_integer, need_gradients, packed
from cupy_flash.torch.observed import is_observed

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CacheOptions(CacheModifications, total=False):
    """Keyword arguments of `cupy_flash.flash_attention_with_kvcache`."""

    cu_seqlens_k_new: Tensor | None
    cache_batch_idx: Tensor | None
    block_table: Tensor | None
    shared_prefix_len: int
    key_indices: Tensor | None
    key_indices_in: str
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: Tensor | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    compute_scales: bool
    head_dim_v: int | None
    causal: bool
    softmax_scale: float | None
    num_splits: int
    return_lse: bool
    return_max_logits: bool
    return_entropy: bool
    out: Tensor | None
    batch_invariant: bool
    backend: str
    family: str | None
    tile: Any
    stream: Any


# Default values of the options; modifications have none.
_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(
        kvcache.flash_attention_with_kvcache
    ).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "cache_seqlens"
}


def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | list[int] | Tensor,
    **options: Unpack[CacheOptions],
) -> Any:
    """Compute `cupy_flash.flash_attention_with_kvcache` of tensors: append to a cache, and attend.

    In a graph of `torch.compile`, the call is one operator that writes the caches in place. It
    breaks the graph with `backend`, `tile`, `stream`, `key_indices`, `return_max_logits` or
    `return_entropy`. The call has no gradient.

    Parameters
    ----------
    q, k_cache, v_cache, k, v, cache_seqlens, **options
        See `cupy_flash.flash_attention_with_kvcache`. Pass cache_seqlens as a tensor in a compiled
        function: a CUDA graph reads it at each launch, and holds the value of an integer.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim_v)
        Output. With return_lse, return_max_logits or return_entropy, a tuple of out and the
        requested results.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        See `cupy_flash.flash_attention_with_kvcache`. TypeError also for a tensor that requires a
        gradient, unless autograd is off (`torch.no_grad()`).
    NotImplementedError
        Inside of a torch.func transform.
    """
    if torch.compiler.is_compiling():
        if _fits_operator((q, k_cache, v_cache, k, v), cache_seqlens, options):
            return _in_graph(q, k_cache, v_cache, k, v, cache_seqlens, options)
        return outside_graph(
            *(flash_attention_with_kvcache, q, k_cache, v_cache, k, v),
            cache_seqlens=cache_seqlens,
            **options,
        )
    if not isinstance(q, Tensor):
        raise TypeError(f"q is {kind_of(q)}; expected a tensor")
    if may_be_transformed():
        if is_in_transform():
            raise NotImplementedError(
                "flash_attention_with_kvcache writes to its caches, so transforms such as "
                "torch.func.grad and vmap do not support it; pass a batch, or append to the caches "
                "outside of the transform and call flash_attention"
            )
        arrays = q, k_cache, v_cache, k, v
        if is_observed() and _fits_operator(arrays, cache_seqlens, options):
            return _in_graph(*arrays, cache_seqlens, options)
    return kvcache.flash_attention_with_kvcache(
        *(q, k_cache, v_cache, k, v), cache_seqlens=cache_seqlens, **options
    )


def _in_graph(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Any,
    options: Mapping[str, Any],
) -> Any:
    """Call the operator; `torch.compile` may trace this function."""
    given = {**_DEFAULTS, **options}
    modifications = {name: x for name, x in options.items() if name not in _DEFAULTS}
    has_one_length = is_integer(cache_seqlens)
    if isinstance(cache_seqlens, (list, tuple)):
        cache_seqlens = torch.tensor(cache_seqlens, dtype=torch.int32, device=q.device)
    scales = []
    for name in ("k_scale", "v_scale"):
        scale = given[name]
        if is_number(scale):
            scale = torch.full((), scale, dtype=torch.float32, device=q.device)
        scales.append(scale)
    operator = ATTEND
    if k is not None:
        operator = APPEND_WITH_SCALES if given["compute_scales"] else APPEND
    result, lse = operator(
        *(q, k_cache, v_cache, k, v),
        *((cache_seqlens, None) if has_one_length else (0, cache_seqlens)),
        *scales,
        *(given[name] for name in TENSORS),
        *packed(modifications, q, q.shape[2], has_gradient=False),
        *(given[name] for name in OPTIONS),
    )
    out = given["out"]
    if out is not None:
        # A result of an operator may not be one of its arguments.
        result = out.copy_(result)
    return (result, lse) if given["return_lse"] else result


def _fits_operator(arrays: tuple[Any, ...], cache_seqlens: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the operator accepts these arguments; `torch.compile` traces this function."""
    given = {**_DEFAULTS, **options}
    q, k_cache, *others = arrays
    scales = [given[x] for x in ("k_scale", "v_scale") if not is_number(given[x])]
    tensors = [*others, *scales, *(given[name] for name in TENSORS), given["out"]]
    if isinstance(cache_seqlens, (list, tuple)):
        fits = all(is_integer(x) for x in cache_seqlens)
    else:
        fits = is_integer(cache_seqlens) or isinstance(cache_seqlens, Tensor)
    if not fits or not are_tensors(q, k_cache, optional=tuple(tensors)):
        return False
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k_cache, *tensors)
    ):
        return False
    modifications = {name: x for name, x in options.items() if name not in _DEFAULTS}
    head_dim_v, family, out = given["head_dim_v"], given["family"], given["out"]
    return (
        given["backend"] == "auto"
        and given["tile"] is None
        and given["stream"] is None
        and given["key_indices"] is None
        and given["key_indices_in"] == "sequence"
        and not (given["return_max_logits"] or given["return_entropy"])
        and (family is None or isinstance(family, str))
        and (head_dim_v is None or is_integer(head_dim_v))
        # Without one of these, the size of the result is unknown.
        and (others[0] is not None or head_dim_v is not None)
        and (out is None or _holds_result(out, q, head_dim_v, others[0]))
        and is_integer(given["num_splits"])
        and is_integer(given["shared_prefix_len"])
        and all(
            isinstance(given[name], bool)
            for name in ("rotary_interleaved", "compute_scales", "batch_invariant", "return_lse")
        )
        and is_plain(given["causal"], given["softmax_scale"])
        and fits_graph(modifications)
        and not need_gradients(modifications)
    )


def _holds_result(out: Tensor, q: Tensor, head_dim_v: int | None, v_cache: Tensor | None) -> bool:
    """Return whether `out` has the dtype, device and shape of the result.

    Eager calls require this, but `copy_` would convert the result.
    """
    columns = head_dim_v if v_cache is None else v_cache.shape[-1]
    is_alike = out.dtype == q.dtype and out.device == q.device
    return is_alike and out.shape == (*q.shape[:-1], columns)
