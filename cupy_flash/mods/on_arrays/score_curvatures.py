"""Second derivatives of changed scores, on NumPy or CuPy arrays; see `scores` for the scores."""

from __future__ import annotations

from typing import Any

from cupy_flash.mods.ir.derivative import derivative
from cupy_flash.mods.ir.expression import SCORE
from cupy_flash.mods.ir.operations import ZERO
from cupy_flash.mods.on_arrays.score_derivatives import after_softcap
from cupy_flash.mods.on_arrays.scores import Pairs, Scores


def curvatures(scores: Scores, x: Any, pairs: Pairs, xp: Any) -> Any:
    """Return the second derivatives of the inputs of the softmax with respect to scaled scores.

    Parameters
    ----------
    scores, x, pairs, xp
        Arguments as in `Scores.apply`.

    Returns
    -------
    array or None
        Second derivatives, broadcastable to x; None if they are 0 everywhere. The values of masked
        pairs are arbitrary, and may be NaN.
    """
    capped, mod = after_softcap(scores, x, xp), scores.score_mod

    def of_mod(order: int) -> Any:
        """Return derivatives of the user's function."""
        assert mod is not None
        position = pairs.row + pairs.q_offset
        return mod.derivative(
            *(capped, pairs.b, pairs.h, position, pairs.j),
            q_start=pairs.q_start,
            k_start=pairs.k_start,
            xp=xp,
            real=scores.real,
            order=order,
        )

    is_curved = mod is not None and derivative(mod.graph, SCORE, 2) is not ZERO
    if scores.softcap is None:
        return of_mod(2) if is_curved else None
    # With y = tanh(x / softcap), the softcap has the derivative 1 - y^2, and the second derivative
    # -2 y (1 - y^2) / softcap.
    real = x.dtype.type
    part = capped / real(scores.softcap)
    slope = real(1) - part * part
    result = real(-2 / scores.softcap) * part * slope
    if mod is not None:
        result = result * of_mod(1)
    return result + slope * slope * of_mod(2) if is_curved else result
