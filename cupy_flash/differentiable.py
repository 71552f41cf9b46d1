"""What autograd of another library needs of a call: its inputs by name, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupy_flash.api.backward import flash_attention_backward, flash_attention_varlen_backward
from cupy_flash.api.dense import flash_attention
from cupy_flash.api.varlen import flash_attention_varlen
from cupy_flash.problem.gradient import ROWS

# Modifications with a gradient of their own.
_WITH_GRADIENT = ("bias", "sinks")
_ROWS = len(ROWS)


class DifferentiableCall(NamedTuple):
    """A call of attention, but for the inputs that have gradients.

    Attributes
    ----------
    names
        Of those inputs: q, k, v, and modifications.
    forward, backward
        The public functions.
    lengths
        What forward takes behind q, k and v, and backward at its end.
    options
        Keyword arguments of both.
    """

    names: tuple[str, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    lengths: tuple[Any, ...]
    options: Mapping[str, Any]

    def run(self, inputs: tuple[Any, ...], *, return_lse: bool = True) -> Any:
        """Attention: out and lse, or out alone."""
        options = self.options
        if len(inputs) > _ROWS:
            options = {**options, **dict(zip(self.names[_ROWS:], inputs[_ROWS:], strict=True))}
        return self.forward(*inputs[:_ROWS], *self.lengths, return_lse=return_lse, **options)

    def pull_back(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, Any],
        gradients: tuple[Any, Any],
        wrt: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Gradients of the inputs that `wrt` names, of those of out and, unless None, lse."""
        options = self.options
        if len(inputs) > _ROWS:
            options = {**options, **dict(zip(self.names[_ROWS:], inputs[_ROWS:], strict=True))}
        dout, dlse = gradients
        result: tuple[Any, ...] = self.backward(
            dout, *inputs[:_ROWS], *results, *self.lengths, dlse=dlse, wrt=wrt, **options
        )
        return result


def dense_call(
    options: dict[str, Any], modifications: Mapping[str, Any]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """A call of `flash_attention`, and its inputs besides q, k and v."""
    return _call(flash_attention, flash_attention_backward, (), options, modifications)


def varlen_call(
    lengths: tuple[Any, ...], options: dict[str, Any], modifications: Mapping[str, Any]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """The same of `flash_attention_varlen`."""
    calls = flash_attention_varlen, flash_attention_varlen_backward
    return _call(*calls, lengths, options, modifications)


def _call(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    lengths: tuple[Any, ...],
    options: dict[str, Any],
    modifications: Mapping[str, Any],
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    # Most calls have none, and save 2 us.
    if not modifications:
        return DifferentiableCall(ROWS, forward, backward, lengths, options), ()
    given = {n: modifications[n] for n in _WITH_GRADIENT if modifications.get(n) is not None}
    options |= {n: value for n, value in modifications.items() if n not in _WITH_GRADIENT}
    names = (*ROWS, *given)
    return DifferentiableCall(names, forward, backward, lengths, options), tuple(given.values())
