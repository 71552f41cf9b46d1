"""ALiBi as part of a `ScoreMod` that captures the slopes, for their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupy_flash.arrays.kinds import is_number_or_list
from cupy_flash.mods.captures import read_capture, unused_name
from cupy_flash.mods.ir.compose import with_alibi
from cupy_flash.mods.ir.expression import SCORE
from cupy_flash.mods.modification import ScoreMod

# Modification whose gradient is that of a capture.
SLOPES = "alibi_slopes"


def with_captured_slopes(
    wrt: Sequence[str], modifications: Mapping[str, Any], prefix: str
) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return gradients and modifications with slopes captured by `score_mod`, if `wrt` names them.

    Parameters
    ----------
    wrt
        Names of the inputs whose gradients are requested.
    modifications
        Keyword arguments that modify attention.
    prefix
        Prefix of the names of captures among the inputs.

    Raises
    ------
    TypeError
        If the slopes are a number or a list, or for the reasons in `capturing_slopes`.
    """
    slopes = modifications.get(SLOPES)
    if SLOPES not in wrt or slopes is None:
        return tuple(wrt), modifications
    if is_number_or_list(slopes):
        kind = type(slopes).__name__
        raise TypeError(f"wrt names {SLOPES!r}, but {SLOPES} is of type {kind}; pass an array")
    score_mod, name = capturing_slopes(modifications.get("score_mod"), slopes)
    names = tuple(prefix + name if x == SLOPES else x for x in wrt)
    return names, {**modifications, SLOPES: None, "score_mod": score_mod}


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
    name = unused_name(SLOPES, captures)
    _, spec = read_capture(name, slopes)
    expression, graph = (with_alibi(node, name, spec) for node in (expression, graph))
    captures[name] = slopes
    return ScoreMod.of_graph(expression, graph, captures, (*differentiable, name)), name
