"""The functions of flash_attn 2.8, with its names and arguments, computed by cupy_flash.

    from cupy_flash.flash_attn import flash_attn_func
    from cupy_flash.flash_attn.bert_padding import pad_input, unpad_input

Module names, argument names, their order, defaults and results are those of flash_attn, so a
program changes only its imports. The functions take tensors of PyTorch, on a CPU or a GPU. See
docs/migration/flash_attn.md for the differences.
"""

from __future__ import annotations

from cupy_flash.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
