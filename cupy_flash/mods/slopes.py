"""ALiBi as part of a `ScoreMod` that captures the slopes, for their gradients."""

from __future__ import annotations

from typing import Any

from cupy_flash.mods.captures import read_capture, unused_name
from cupy_flash.mods.ir.compose import with_alibi
from cupy_flash.mods.ir.expression import SCORE
from cupy_flash.mods.modification import ScoreMod


def capturing_slopes(score_mod: ScoreMod | None, slopes: Any) -> tuple[ScoreMod, str]:
    """Return a `ScoreMod` that subtracts the distances of ALiBi, and the name of its slopes.

    Gradients of slopes are those of a captured array. Kernels subtract slopes themselves only if
    no gradient of them is computed.

    Parameters
    ----------
    score_mod
        User's function, which changes the scores first, or None.
    slopes
        Array of the slopes, as the argument alibi_slopes.

    Raises
    ------
    TypeError
        If `score_mod` has CUDA source, and its Python function cannot be traced.
    """
    captures: dict[str, Any] = {}
    expression = graph = SCORE
    differentiable: tuple[str, ...] = ()
    if score_mod is not None:
        captures = {**score_mod.captures, **score_mod.tensors}
        expression, graph = score_mod.expression, score_mod.graph
        differentiable = score_mod.differentiable
    name = unused_name("alibi_slopes", captures)
    _, spec = read_capture(name, slopes)
    expression, graph = (with_alibi(node, name, spec) for node in (expression, graph))
    captures[name] = slopes
    return ScoreMod.of_graph(expression, graph, captures, (*differentiable, name)), name
