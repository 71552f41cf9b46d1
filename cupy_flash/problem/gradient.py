"""Options of a backward call in addition to those of its forward call."""

from __future__ import annotations

from dataclasses import dataclass

# Inputs with one row per token. Their gradients have the shape of the input.
ROWS = ("q", "k", "v")


def tangent_of(name: str) -> str:
    """Return the name of the tangent of an input or result."""
    return f"{name}_tangent"


# Tangents of these inputs, in the same order.
TANGENTS = tuple(map(tangent_of, ROWS))
# Prefix of the names of captured arrays of a score modification, among all inputs of a call.
OF_MOD = "score_mod."


@dataclass(frozen=True)
class GradientSpec:
    """Gradients that a backward call computes.

    Attributes
    ----------
    wrt
        Names of the inputs whose gradients are computed, each once.
    dtype
        Name of the dtype of the gradients of q, k and v: that of the inputs, or float32.
    dlse
        Whether the call is given a gradient of the log-sum-exp.
    as_inputs
        Whether gradients of inputs other than q, k and v have the dtype of the input, not `dtype`.
    bias
        Shape (batch, heads, rows, keys) of the gradient of a bias, or None. Broadcast axes have
        length 1. For packed sequences, batch is 1 and the rows are those of all sequences.
    captured
        Total number of elements of the captured arrays whose gradients are computed.
    """

    wrt: tuple[str, ...]
    dtype: str
    dlse: bool = False
    as_inputs: bool = True
    bias: tuple[int, int, int, int] | None = None
    captured: int = 0

    def wants(self, *names: str) -> bool:
        """Return whether the gradient of at least one of these inputs is computed."""
        return any(name in self.wrt for name in names)
