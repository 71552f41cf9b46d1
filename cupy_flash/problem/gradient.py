"""What a backward call asks for besides what its forward call did."""

from __future__ import annotations

from dataclasses import dataclass

# Inputs of attention that have rows of their own, and so a gradient as large.
ROWS = ("q", "k", "v")
# What the names of those begin with that a score modification captures.
OF_MOD = "score_mod."


@dataclass(frozen=True)
class GradientSpec:
    """Gradients of a call.

    Attributes
    ----------
    wrt
        Names of the inputs whose gradients are computed, each once.
    dtype
        Of the gradients of q, k and v: that of the inputs, or float32.
    dlse
        Whether the log-sum-exp has a gradient too.
    """

    wrt: tuple[str, ...]
    dtype: str
    dlse: bool = False

    def wants(self, *names: str) -> bool:
        """Whether the gradient of one of these inputs is computed."""
        return any(name in self.wrt for name in names)
