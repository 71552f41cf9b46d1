"""Attention for JAX."""
from cupy_flash.jax.attention import (
    flash_attention,
    flash_attention_qkvpacked,
    flash_attention_varlen,
)

__all__ = ["flash_attention", "flash_attention_qkvpacked", "flash_attention_varlen"]
