"""What autograd of another library needs of a call: its inputs by name, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupy_flash.api.backward import flash_attention_backward, flash_attention_varlen_backward
from cupy_flash.api.dense import flash_attention
from cupy_flash.api.varlen import flash_attention_varlen

# Modifications with a gradient of their own.
_WITH_GRADIENT = ("bias", "sinks")


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

    def run(self, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Attention: out and lse."""
        modifications = dict(zip(self.names[3:], inputs[3:], strict=True))
        result: tuple[Any, Any] = self.forward(
            *inputs[:3], *self.lengths, return_lse=True, **self.options, **modifications
        )
        return result

    def pull_back(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, Any],
        gradients: tuple[Any, Any],
        wrt: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Gradients of the inputs that `wrt` names, of those of out and, unless None, lse."""
        modifications = dict(zip(self.names[3:], inputs[3:], strict=True))
        dout, dlse = gradients
        result: tuple[Any, ...] = self.backward(
            *(dout, *inputs[:3], *results, *self.lengths),
            dlse=dlse,
            wrt=wrt,
            **self.options,
            **modifications,
        )
        return result


def dense_call(options: Mapping[str, Any]) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """A call of `flash_attention`, and its inputs besides q, k and v."""
    return _call(flash_attention, flash_attention_backward, (), options)


def varlen_call(
    lengths: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """The same of `flash_attention_varlen`."""
    return _call(flash_attention_varlen, flash_attention_varlen_backward, lengths, options)


def _call(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    lengths: tuple[Any, ...],
    options: Mapping[str, Any],
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    given = {name: options[name] for name in _WITH_GRADIENT if options.get(name) is not None}
    others = {name: value for name, value in options.items() if name not in _WITH_GRADIENT}
    names = ("q", "k", "v", *given)
    return DifferentiableCall(names, forward, backward, lengths, others), tuple(given.values())
