"""Attention for PyTorch: functions on tensors, differentiable by autograd.

    from cupy_flash.torch import flash_attention

The functions have the arguments of the functions of the same names in `cupy_flash`. Gradients reach
q, k, v, bias, sinks, ALiBi slopes and tensors that a `ScoreMod` captures, from out and, with
return_lse, from lse; numbers and lists are constants.
`scaled_dot_product_attention` replaces PyTorch's own function. Without gradients, calls cost what
those in `cupy_flash` do. Unsupported derivatives, such as third derivatives, raise an error.

The functions may be transformed by `torch.func.grad`, `vjp` and `vmap`, cast under `torch.autocast`
and take nested tensors with the jagged layout; see docs/guide/torch.md.

Under `torch.compile` a call becomes an operator in the graph, such as `cupy_flash::attention`; see
docs/guide/torch_compile.md.
"""

from __future__ import annotations

from cupy_flash.torch import flops
from cupy_flash.torch.attention import (
    flash_attention,
    flash_attention_qkvpacked,
    flash_attention_varlen,
    scaled_dot_product_attention,
)
from cupy_flash.torch.kvcache import flash_attention_with_kvcache

__all__ = [
    "flash_attention",
    "flash_attention_qkvpacked",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "scaled_dot_product_attention",
]

flops.register()
