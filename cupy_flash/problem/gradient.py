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
    as_inputs
        Whether the gradients of other inputs have those' dtypes; else they have `dtype` as well.
    bias
        Axes of the gradient of a bias, if wanted: batch, heads, rows and keys, 1 long where one
        element serves all. Of packed sequences the first is 1, and rows are those of all.
    captured
        Elements of the captured arrays whose gradients are computed, together.
    """

    wrt: tuple[str, ...]
    dtype: str
    dlse: bool = False
    as_inputs: bool = True
    bias: tuple[int, int, int, int] | None = None
    captured: int = 0

    def wants(self, *names: str) -> bool:
        """Whether the gradient of one of these inputs is computed."""
        return any(name in self.wrt for name in names)
