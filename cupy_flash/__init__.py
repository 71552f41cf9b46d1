"""FlashAttention for CuPy and NumPy arrays, compiled at run time."""

from __future__ import annotations

from pathlib import Path

from cupy_flash.api.backward import (
    flash_attention_backward,
    flash_attention_qkvpacked_backward,
    flash_attention_varlen_backward,
)
from cupy_flash.api.check_mod import check_mod
from cupy_flash.api.combine import combine
from cupy_flash.api.dense import flash_attention, flash_attention_qkvpacked
from cupy_flash.api.dropout_mask import dropout_mask
from cupy_flash.api.hvp import flash_attention_hvp, flash_attention_varlen_hvp
from cupy_flash.api.jvp import flash_attention_jvp, flash_attention_varlen_jvp
from cupy_flash.api.kvcache import flash_attention_with_kvcache
from cupy_flash.api.plan import plan, plan_backward, plan_varlen, plan_with_kvcache
from cupy_flash.api.quantize import quantize_kv
from cupy_flash.api.received import (
    attention_received,
    attention_received_varlen,
    attention_received_with_kvcache,
)
from cupy_flash.api.rotary import apply_rotary, apply_rotary_vjp
from cupy_flash.api.scaled_dot_product import scaled_dot_product_attention
from cupy_flash.api.varlen import flash_attention_varlen
from cupy_flash.api.vjp import (
    flash_attention_qkvpacked_vjp,
    flash_attention_varlen_vjp,
    flash_attention_vjp,
)
from cupy_flash.errors import CompileError, CupyFlashError, UnsupportedError
from cupy_flash.mods.block_list import BlockList
from cupy_flash.mods.keywords import Modifications
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.tile import Tile
from cupy_flash.reference.dense import attention_reference
from cupy_flash.reference.gradients import attention_backward_reference
from cupy_flash.reference.hessian_products import attention_hvp_reference
from cupy_flash.reference.masks import plot_mask, seen_pairs
from cupy_flash.reference.packed import attention_varlen_reference, attention_with_kvcache_reference
from cupy_flash.reference.packed_gradients import attention_varlen_backward_reference
from cupy_flash.reference.packed_hessian_products import attention_varlen_hvp_reference
from cupy_flash.reference.packed_tangents import attention_varlen_jvp_reference
from cupy_flash.reference.tangents import attention_jvp_reference
from cupy_flash.reference.weights.chosen import attention_weights
from cupy_flash.reference.weights.chosen_of_sequences import (
    attention_weights_varlen,
    attention_weights_with_kvcache,
)
from cupy_flash.reference.weights.picture import plot_attention

__version__ = "0.1.0"

__all__ = [
    "BlockList",
    "CompileError",
    "CupyFlashError",
    "MaskMod",
    "Modifications",
    "Plan",
    "ScoreMod",
    "Tile",
    "UnsupportedError",
    "apply_rotary",
    "apply_rotary_vjp",
    "attention_backward_reference",
    "attention_hvp_reference",
    "attention_jvp_reference",
    "attention_received",
    "attention_received_varlen",
    "attention_received_with_kvcache",
    "attention_reference",
    "attention_varlen_backward_reference",
    "attention_varlen_hvp_reference",
    "attention_varlen_jvp_reference",
    "attention_varlen_reference",
    "attention_weights",
    "attention_weights_varlen",
    "attention_weights_with_kvcache",
    "attention_with_kvcache_reference",
    "check_mod",
    "combine",
    "dropout_mask",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_hvp",
    "flash_attention_jvp",
    "flash_attention_qkvpacked",
    "flash_attention_qkvpacked_backward",
    "flash_attention_qkvpacked_vjp",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "flash_attention_varlen_hvp",
    "flash_attention_varlen_jvp",
    "flash_attention_varlen_vjp",
    "flash_attention_vjp",
    "flash_attention_with_kvcache",
    "plan",
    "plan_backward",
    "plan_varlen",
    "plan_with_kvcache",
    "plot_attention",
    "plot_mask",
    "quantize_kv",
    "scaled_dot_product_attention",
    "seen_pairs",
]

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "cli").is_dir():
    # The folder `cli` is next to this package in a checkout, and inside it in a wheel.
    __path__.append(str(_ROOT.parent))
