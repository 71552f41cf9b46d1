"""Errors for keyword arguments that no function has, with the arguments that are meant.

Other libraries have their own names for arguments of attention: PyTorch's
``scaled_dot_product_attention`` and FlexAttention, flash_attn, FlashInfer, JAX and xFormers.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable

_NO_DROPOUT = "leave it out, as there is no dropout"
_NO_HEADS = "leave it out, as the shapes of q, k and v tell the heads"
_SAME_BITS = "leave it out, as the same inputs give the same bits"
_MASK = "pass mask, a bool array that keeps where True, or bias, which is added to the scores"
_WINDOW = "pass window_size=(left, right)"

# Advice for each name; a single word is the name of the right argument.
_INSTEAD = {
    **dict.fromkeys(("scale", "sm_scale", "scaling", "softmax_factor"), "softmax_scale"),
    **dict.fromkeys(("is_causal", "causal_mask", "use_causal_mask"), "causal"),
    **dict.fromkeys(("attn_mask", "attention_mask"), _MASK),
    **dict.fromkeys(("attn_bias", "attention_bias"), "bias"),
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate", "dropout_seed"), _NO_DROPOUT),
    **dict.fromkeys(
        ("window", "sliding_window", "local_window_size", "window_left", "window_right"), _WINDOW
    ),
    **dict.fromkeys(
        ("num_heads", "n_heads", "num_kv_heads", "num_key_value_heads", "enable_gqa", "pack_gqa"),
        _NO_HEADS,
    ),
    **dict.fromkeys(("deterministic", "is_deterministic"), _SAME_BITS),
    **dict.fromkeys(
        ("logits_soft_cap", "soft_cap", "logit_cap", "attn_logits_soft_cap", "softcapping"),
        "softcap",
    ),
    **dict.fromkeys(("alibi", "slopes"), "alibi_slopes"),
    **dict.fromkeys(("sink", "s_aux", "attention_sinks", "learnable_sink"), "sinks"),
    **dict.fromkeys(("page_table", "block_tables"), "block_table"),
    **dict.fromkeys(
        ("return_softmax_lse", "return_attn_probs", "return_softmax", "return_residual"),
        "return_lse",
    ),
    **dict.fromkeys(("kv_seqlens", "seqlens_kv", "key_value_seq_lengths", "kv_lens"), "seqlens_k"),
    "key_padding_mask": "pass seqlens_k, or mask of shape (batch, 1, 1, seqlen_k)",
    "block_mask": "pass mask_mod, a MaskMod or a BlockList",
    "kernel_options": "pass family and tile",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "q_descale": "q_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
}


def unexpected(name: str, known: Iterable[str]) -> TypeError:
    """Return the error for a keyword argument that a function does not have.

    Parameters
    ----------
    name
        The keyword.
    known
        Keywords that modify attention, which the function has.
    """
    return TypeError(f"unexpected keyword argument {name!r}; {_advice(name, list(known))}")


def _advice(name: str, known: list[str]) -> str:
    instead = _INSTEAD.get(name)
    if instead is not None:
        return instead if " " in instead else f"pass {instead}"
    functions = _functions_by_keyword()
    if name in functions:
        return f"it is an argument of {', '.join(functions[name])}"
    if near := difflib.get_close_matches(name, [*known, *functions], n=1, cutoff=0.75):
        return f"did you mean {near[0]!r}?"
    return f"those that modify attention are {', '.join(known)}"


def _functions_by_keyword() -> dict[str, list[str]]:
    """Return the names of the public functions that compute attention, by their keywords."""
    # No import, as the package imports this module.
    package = sys.modules[__name__.partition(".")[0]]
    found: dict[str, list[str]] = {}
    for function in package.__all__:
        if function.startswith("flash_attention"):
            for keyword in inspect.signature(getattr(package, function)).parameters.values():
                if keyword.kind is not keyword.VAR_KEYWORD:
                    found.setdefault(keyword.name, []).append(function)
    return found
