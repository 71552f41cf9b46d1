"""Comparison of the CUDA source of a modification with its Python function."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.strided import address_of, kind_of
from cupy_flash.errors import UnsupportedError
from cupy_flash.families.contract import TranslationUnit
from cupy_flash.gpu.environment import cupy_module, gpu_unavailable
from cupy_flash.gpu.evaluate import evaluate, evaluate_unit
from cupy_flash.mods.captures import CaptureSpec, prefixed
from cupy_flash.mods.codegen.arguments import arguments_dtype, pack_arguments
from cupy_flash.mods.codegen.emit import HEADERS, SCALE, emit
from cupy_flash.mods.ir.compose import prefixed_text
from cupy_flash.mods.ir.expression import Node
from cupy_flash.mods.modification import MaskMod, ScoreMod

# Tolerated difference, relative to the largest of the numbers compared and 1. The GPU computes
# with rounded powers of two and approximated functions.
TOLERANCE = 2.0**-16
# Prefix of the names of captures in the CUDA source.
_PREFIX = "mod"


def unit_of(mod: ScoreMod | MaskMod) -> TranslationUnit:
    """Return the translation unit that evaluates a modification on float32 scores."""
    expression, specs = _source_of(mod)
    score, visible = (expression, None) if isinstance(mod, ScoreMod) else (None, expression)
    return evaluate_unit(emit(score, visible, specs), HEADERS, arguments_dtype(specs, "float"))


def _source_of(mod: ScoreMod | MaskMod) -> tuple[Node, dict[str, CaptureSpec]]:
    """Return the expression of a modification, and the specs of its captures by prefixed name."""
    expression, specs = prefixed_text(mod.traced, _PREFIX)
    return expression, specs | {SCALE: CaptureSpec("real")}


def require_agreement(
    mod: ScoreMod | MaskMod, sizes: tuple[int, int, int, int], q_offset: int
) -> None:
    """Run the checks of `cupy_flash.check_mod`."""
    if not isinstance(mod, (ScoreMod, MaskMod)):
        raise TypeError(f"mod is {kind_of(mod)}; expected a ScoreMod or a MaskMod")
    if min(sizes) < 1:
        raise ValueError(f"batch, heads, seqlen_q and seqlen_k are {sizes}; expected 1 or more")
    if reason := gpu_unavailable():
        raise UnsupportedError(f"the CUDA source of mod runs on a GPU only, and {reason}")
    cupy = cupy_module()
    _, specs = _source_of(mod)
    captured = {prefixed(_PREFIX, name): value for name, value in mod.captures.items()}
    values: dict[str, Any] = captured | {SCALE: 1.0}
    arrays = {
        name: cupy.asarray(values[name]) for name, spec in specs.items() if spec.rank is not None
    }
    addresses = {name: address_of(array) for name, array in arrays.items()}
    # The strides are those of the contiguous copies; the CUDA source accepts any strides.
    packed = pack_arguments(specs, values | arrays, addresses, "float")
    scores = (4 * np.random.default_rng(0).standard_normal(sizes)).astype(np.float32)
    device_values = evaluate(unit_of(mod), packed, scores, q_offset)
    compare(mod, scores, device_values, q_offset)


def compare(
    mod: ScoreMod | MaskMod, scores: np.ndarray, device_values: np.ndarray, q_offset: int
) -> None:
    """Raise ValueError at the first pair for which the GPU's result differs from the function's."""
    b, h, row, j = np.ix_(*map(np.arange, scores.shape))
    i = row + q_offset
    if isinstance(mod, ScoreMod):
        expected = np.broadcast_to(mod.evaluate(scores, b, h, i, j), scores.shape)
        largest = np.maximum(np.maximum(np.abs(scores), np.abs(expected)), 1)
        with np.errstate(invalid="ignore"):
            differs = np.abs(device_values - expected) > TOLERANCE * largest
        is_finite = np.isfinite(expected)
        differs = np.where(
            is_finite, differs | ~np.isfinite(device_values), device_values != expected
        )
        differs &= ~(np.isnan(device_values) & np.isnan(expected))
    else:
        expected = np.broadcast_to(mod.evaluate(b, h, i, j), scores.shape)
        differs = (device_values != 0) != expected
    if not differs.any():
        return
    index = tuple(int(n) for n in np.argwhere(differs)[0])
    position = {"b": index[0], "h": index[1], "i": i[0, 0, index[2], 0], "j": index[3]}
    given = f"score={scores[index]:.6g}, " if isinstance(mod, ScoreMod) else ""
    named = ", ".join(f"{name}={n}" for name, n in position.items())
    result = (
        f"{device_values[index]:.6g}"
        if isinstance(mod, ScoreMod)
        else str(bool(device_values[index]))
    )
    raise ValueError(
        f"{mod!r} differs from its CUDA source at {differs.sum()} of {differs.size} pairs, first "
        f"at {given}{named}: the function returns {expected[index]}, the CUDA source {result}"
    )
