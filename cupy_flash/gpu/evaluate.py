"""Evaluation of modifications on the GPU: the host side of `kernels_cu/score/evaluate.cu`."""

from __future__ import annotations

import numpy as np

from cupy_flash.families.contract import TranslationUnit, ceil_div, source_digest
from cupy_flash.families.params import assertions
from cupy_flash.gpu.by_value import ByValue
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.gpu.params import struct_with_mods

SOURCE = "score/evaluate.cu"
ENTRY = "evaluate_modification"
_THREADS = 256


def params_dtype(mods: np.dtype) -> np.dtype:
    """Return the dtype of the argument struct, which ends with what the modification reads."""
    addresses = [(name, np.uint64) for name in ("scores", "results")]
    sizes = [(name, np.int32) for name in ("heads", "seqlen_q", "seqlen_k", "q_offset")]
    return struct_with_mods([*addresses, ("pairs", np.int64), *sizes], mods)


def evaluate_unit(text: str, headers: tuple[str, ...], mods: np.dtype) -> TranslationUnit:
    """Return the translation unit that evaluates a modification.

    Parameters
    ----------
    text, headers
        C++ of ``ModArguments`` and ``Mods``, and headers to include before it.
    mods
        Dtype of ``ModArguments``.
    """
    lines = [
        f"// cupy_flash evaluate, sources {source_digest(*headers, SOURCE)}",
        *(f'#include "{header}"' for header in headers),
        text,
        f'#include "{SOURCE}"',
        assertions(("EvaluateParams", params_dtype(mods)), ("ModArguments", mods)),
        f'extern "C" __global__ void __launch_bounds__({_THREADS})',
        f"{ENTRY}(const __grid_constant__ EvaluateParams params) {{ evaluate(params); }}",
    ]
    return TranslationUnit("\n".join(lines) + "\n", (ENTRY,), "evaluate a modification")


def evaluate(
    unit: TranslationUnit, mods: np.ndarray, scores: np.ndarray, q_offset: int
) -> np.ndarray:
    """Return the modified scores, or 1 for visible and 0 for masked pairs of a mask function.

    Parameters
    ----------
    unit, mods
        Unit of `evaluate_unit`, and the values of its ``ModArguments``.
    scores : float32 array, (batch, heads, seqlen_q, seqlen_k)
        Scaled scores in host memory.
    q_offset
        Position of the first query among the keys.
    """
    cupy = cupy_module()
    kernel = kernel_cache.get(unit, {ENTRY: 0})[ENTRY]
    given, results = cupy.asarray(scores), cupy.empty(scores.shape, scores.dtype)
    record = np.zeros((), params_dtype(mods.dtype))
    record["scores"], record["results"] = given.data.ptr, results.data.ptr
    record["pairs"], record["q_offset"] = scores.size, q_offset
    _, record["heads"], record["seqlen_q"], record["seqlen_k"] = scores.shape
    record["mods"] = mods
    arguments = ByValue(bytearray(record.tobytes()))
    grid = (ceil_div(scores.size, _THREADS), 1, 1)
    kernel(grid, (_THREADS, 1, 1), (arguments.pointer,), 0)
    result: np.ndarray = cupy.asnumpy(results)
    return result
