"""Random backward calls with gradients of ALiBi slopes or of captured arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash import ScoreMod
from support.gradients.gradient_calls import OF_MOD, GradientCall, random_gradient_call

SLOPES = OF_MOD + "alibi_slopes"


class SlopesCall(GradientCall):
    """Call whose reference captures the ALiBi slopes, for their gradient."""

    def _given(self, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional, named = super()._given(xp)
        slopes = named.pop("alibi_slopes")
        one = "alibi_slopes[h]" if slopes.ndim == 1 else "alibi_slopes[b, h]"
        function: Any = eval(f"lambda score, b, h, i, j, alibi_slopes: score - {one} * abs(i - j)")
        captures = {"alibi_slopes": slopes, "differentiable": ("alibi_slopes",)}
        named["score_mod"] = ScoreMod(function, **captures)
        return positional, named

    @property
    def _captures(self) -> dict[str, np.ndarray]:
        return {SLOPES: self.forward.arrays["alibi_slopes"]}


def random_call_with(
    wanted: str,
    seed: int,
    dtype: str,
    kind: str,
    *,
    head_dims: Sequence[int] = (5, 24, 64),
    longest: tuple[int, int] = (60, 90),
) -> GradientCall:
    """Return a random call that has ALiBi slopes and no function, or captures with gradients."""
    rng = np.random.default_rng(seed)
    while True:
        call = random_gradient_call(rng, dtype, kind, head_dims=head_dims, longest=longest)
        call.wrt, call.grad_dtype, call.places = None, None, {}
        has_slopes = "alibi_slopes" in call.forward.arrays
        if wanted == "slopes" and has_slopes and "score_mod" not in call.forward.mods:
            return SlopesCall(call.forward, call.dout, call.dlse)
        if wanted == "captures" and len(call.names) > 3:
            return call
