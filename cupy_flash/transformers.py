"""Attention for Hugging Face transformers 5, registered as `fused_cupy`.

    from cupy_flash.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_cupy")

Lengths, causality, windows and packed sequences reach the kernels as they are: no mask of all pairs
is built for them. See docs/guide/transformers.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from cupy_flash.errors import UnsupportedError
from cupy_flash.torch import flash_attention, flash_attention_varlen
from cupy_flash.transformers_masks import AttentionPattern, attention_mask

__all__ = ["attention", "register"]

# transformers loads names that contain "flash" from its hub of kernels.
_NAME = "fused_cupy"
# Arguments of some models that change the result, and that attention here does not take.
_REFUSED = ("indices", "block_indices", "head_mask", "sinks")


def register() -> None:
    """Register `attention` and `attention_mask` with transformers under the name `fused_cupy`.

    Models then take attn_implementation="fused_cupy", and so does `set_attn_implementation`.
    """
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, attention_mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionPattern | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer, as `AttentionInterface` of transformers asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        Layer. Its `is_causal` counts if there is neither a mask nor the argument `is_causal`.
    query : Tensor, shape (batch, heads_q, seqlen_q, head_dim)
        Queries.
    key, value : Tensor, shape (batch, heads_kv, seqlen_k, head_dim)
        Keys and values, with one head for each group of query heads.
    attention_mask : AttentionPattern or Tensor, optional
        Result of the function of that name, or a bool or additive mask that broadcasts to (batch,
        heads_q, seqlen_q, seqlen_k). It replaces `is_causal` and `sliding_window`.
    dropout : float
        Probability of dropping a weight of the softmax, which models set while they are trained.
        It is rounded to a multiple of 1 / 256. Each call draws from PyTorch's generator.
    scaling : float, optional
        Factor on the scores, by default 1 / sqrt(head_dim).
    sliding_window : int, optional
        Number of keys up to a query's own that it attends to. Without causality, the largest
        distance of a key plus 1.
    softcap : float, optional
        Cap of the scores.
    is_causal : bool, optional
        Whether the mask is causal; the last query is at the last key.
    s_aux : Tensor, shape (heads_q,), optional
        Sinks.
    position_bias : Tensor, optional
        Summand of the scores; broadcasts to (batch, heads_q, seqlen_q, seqlen_k).
    cu_seq_lens_q, cu_seq_lens_k : Tensor, shape (sequences + 1,), optional
        Offsets of packed sequences among all rows, with `max_length_q` and `max_length_k`.
    max_length_q, max_length_k : int, optional
        Upper bounds of their lengths. The call waits for the GPU to read a tensor.
    **others
        Arguments that do not change the result, which are ignored, and those that do, which are
        refused: `indices` and `block_indices` of sparse attention, `head_mask`, `sinks`.

    Returns
    -------
    out : Tensor, shape (batch, seqlen_q, heads_q, head_dim)
        Output. Fully masked rows are 0.
    weights : None
        The weights are not computed.

    Raises
    ------
    UnsupportedError
        If an argument is refused, and if packed sequences are combined with a mask of all pairs, a
        position bias, or chunks that ignore them.
    TypeError, ValueError, CompileError
        See `cupy_flash.torch.flash_attention`.
    """
    for name in _REFUSED:
        if others.get(name) is not None:
            raise UnsupportedError(
                f"{name} is given; it is not supported, and attention without it would be wrong: "
                "load the model with attn_implementation='eager'"
            )
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux}
    if dropout != 0:
        options["dropout_p"] = dropout

    pattern = attention_mask if isinstance(attention_mask, AttentionPattern) else None
    lengths: Any = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    is_packed = not any(x is None for x in lengths)
    if pattern is not None:
        options |= {"causal": pattern.causal, "window_size": pattern.window}
    elif attention_mask is None or is_packed:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options["causal"] = causal
        if sliding_window is not None:
            options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)

    # Padding that the mask describes takes precedence, as in transformers' own functions, and so do
    # documents that it has found in position_ids.
    if is_packed and not (pattern is not None and (pattern.has_padding or pattern.packed)):
        _require_packed_alone(attention_mask, position_bias)
        return _packed(q, k, v, (*lengths[:2], *map(int, lengths[2:])), options), None
    if pattern is not None:
        if pattern.begins_at_first_key:
            # Later keys are the unused part of a static cache.
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        packed = pattern.packed
        if packed is not None and is_packed and not packed.has_documents:
            raise UnsupportedError(
                "cu_seq_lens_q is given, but the model's chunks ignore it; pass position_ids that "
                "begin with 0 in each sequence"
            )
        if packed is not None and position_bias is None:
            offsets = (packed.cu_seqlens, packed.cu_seqlens, packed.max_seqlen, packed.max_seqlen)
            if packed.used is not None:
                options |= {"seqused_k": packed.used, "q_offset": torch.zeros_like(packed.used)}
            return _packed(q, k, v, offsets, options), None
        attention_mask = _add_pattern(options, pattern, k)
    for mask in (attention_mask, position_bias):
        if mask is not None:
            _add_mask(options, mask[..., : k.shape[1]], q.dtype)
    return flash_attention(q, k, v, **options), None


def _require_packed_alone(
    attention_mask: AttentionPattern | Tensor | None, position_bias: Tensor | None
) -> None:
    """Raise UnsupportedError if packed sequences come with a mask or a bias of all pairs.

    While a graph is traced, a mask of all pairs stands for the documents of position_ids.
    """
    is_mask = isinstance(attention_mask, Tensor) and not torch.compiler.is_compiling()
    if is_mask or position_bias is not None:
        name = "attention_mask" if is_mask else "position_bias"
        raise UnsupportedError(
            f"{name} has all pairs, and cu_seq_lens_q is given; expected one of them"
        )


def _packed(q: Tensor, k: Tensor, v: Tensor, lengths: Any, options: dict[str, Any]) -> Tensor:
    """Compute attention of sequences that are consecutive among the rows of all batch entries."""
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    arguments: Any = (*rows, *lengths)
    return flash_attention_varlen(*arguments, **options).view(*q.shape[:-1], v.shape[-1])


def _add_pattern(options: dict[str, Any], pattern: AttentionPattern, k: Tensor) -> Tensor | None:
    """Add a pattern to the options of a call, and return the mask that has to be added as well."""
    if pattern.packed is not None:
        options |= {"causal": False, "window_size": None}
        return pattern.dense()
    if pattern.causal or pattern.window != (None, None):
        options["q_offset"] = pattern.q_offset
    if pattern.seqlens_k is not None:
        options["seqlens_k"] = pattern.seqlens_k
    return None if pattern.keys is None else pattern.keys[:, None, None]


def _add_mask(options: dict[str, Any], mask: Tensor, dtype: torch.dtype) -> None:
    """Add a bool or additive mask to the options of a call."""
    if mask.dtype == torch.bool:
        options["mask"] = mask
    elif "bias" in options:
        options["bias"] = options["bias"] + mask.to(dtype)
    else:
        options["bias"] = mask.to(dtype)
