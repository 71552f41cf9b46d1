"""What autograd of another library needs of a call: its inputs by name, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupy_flash.arrays.kinds import is_number_or_list
from cupy_flash.calls import run, run_backward
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.gradients import GradientArguments
from cupy_flash.calls.options import Options, plain_options
from cupy_flash.mods.keywords import ARRAYS, MODS, checked_softcap, window_of, with_offsets
from cupy_flash.mods.modification import Modification
from cupy_flash.problem.gradient import ROWS

# Modifications with a gradient of their own, if they are arrays: numbers and lists are constants.
WITH_GRADIENT = ("bias", "sinks")
_ROWS = len(ROWS)
# Types of numbers that cannot change.
_PLAIN = (type(None), float, int)
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_NO_LENGTHS = (None,) * len(_LENGTHS)
# Modifications that are numbers.
_NUMBERS: Mapping[str, Callable[[Any], Any]] = {
    "window_size": window_of,
    "softcap": checked_softcap,
}


class DifferentiableCall(NamedTuple):
    """A call of attention, but for the inputs that have gradients.

    Attributes
    ----------
    names
        Of those inputs: q, k, v, and modifications.
    options
        Of the call, which gives lse as well; plain.
    lengths
        cu_seqlens_q, cu_seqlens_k and, if it is given, seqused_k of packed sequences.
    modifications
        But for those among the inputs.
    constants
        Arrays of lengths and modifications, by name. They are read again for gradients, but have no
        gradient themselves.
    without_lse
        Options of the call that gives out alone.
    arrays_behind
        What `Arguments.of_kind` has behind q, k and v, of a call without modifications; None of
        another.
    """

    names: tuple[str, ...]
    options: Options
    lengths: tuple[Any, ...]
    modifications: Mapping[str, Any]
    constants: Mapping[str, Any]
    without_lse: Options
    arrays_behind: tuple[Any, ...] | None

    def run(self, inputs: tuple[Any, ...], *, return_lse: bool = True) -> Any:
        """Attention: out and lse, or out alone."""
        options = self.options if return_lse else self.without_lse
        modifications = self._modifications(inputs)
        return run.attention(self.arguments(inputs), options, "auto", 0, modifications)

    def pull_back(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, Any],
        gradients: tuple[Any, Any],
        wrt: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Gradients of the inputs that `wrt` names, of those of out and, unless None, lse."""
        arguments = self.gradient_arguments(inputs, results, gradients)
        options = self.options.with_gradients(wrt)
        return run_backward.gradients(arguments, options, "auto", self._modifications(inputs))

    @property
    def functions(self) -> tuple[Modification, ...]:
        """Modifications that are functions of the user."""
        found = (self.modifications.get(name) for name in MODS)
        return tuple(mod for mod in found if isinstance(mod, Modification))

    def with_constants(self, constants: Mapping[str, Any]) -> DifferentiableCall:
        """Return the same call with the arrays of these names replaced."""
        if not constants:
            return self
        lengths = dict(zip(_LENGTHS, self.lengths, strict=True))
        others = dict(self.modifications)
        for name, array in constants.items():
            (lengths if name in lengths else others)[name] = array
        return self._replace(
            lengths=tuple(lengths.values()),
            modifications=others,
            constants={**self.constants, **constants},
            arrays_behind=None if self.arrays_behind is None else _behind(self.options, lengths),
        )

    def with_functions_kept(self) -> DifferentiableCall:
        """Return the same call with copies of its functions' captures; see `Modification.kept`."""
        return self._with_functions(lambda mod: mod.kept())

    def with_captures(self, change: Callable[[str, Any], Any]) -> DifferentiableCall:
        """Return the same call with each captured array as `change(name, array)`."""
        return self._with_functions(lambda mod: mod.with_arrays(change))

    def _with_functions(self, change: Callable[[Any], Any]) -> DifferentiableCall:
        functions = {n: mod for n in MODS if (mod := self.modifications.get(n)) is not None}
        changed = {name: change(mod) for name, mod in functions.items()}
        if all(changed[name] is mod for name, mod in functions.items()):
            return self
        return self._replace(modifications={**self.modifications, **changed})

    def with_numbers(self) -> DifferentiableCall:
        """Return the same call with window_size and softcap as numbers, which cannot change."""
        numbers = {
            name: read(self.modifications[name])
            for name, read in _NUMBERS.items()
            if self.modifications.get(name) is not None
        }
        if not numbers:
            return self
        return self._replace(modifications={**self.modifications, **numbers})

    def arguments(self, inputs: tuple[Any, ...]) -> Arguments:
        """Arrays of the call, without those of modifications."""
        q, k, v, *_ = inputs
        return Arguments(q, k, v, None, None, None, *self.lengths)

    def gradient_arguments(
        self, inputs: tuple[Any, ...], results: tuple[Any, Any], gradients: tuple[Any, Any]
    ) -> GradientArguments:
        """Those of the backward call."""
        q, k, v, *_ = inputs
        (out, lse), (dout, dlse) = results, gradients
        return GradientArguments(q, k, v, out, dout, lse, dlse, None, None, None, *self.lengths)

    def _modifications(self, inputs: tuple[Any, ...]) -> Mapping[str, Any]:
        """Those among the inputs as well."""
        if len(inputs) == _ROWS:
            return self.modifications
        own = zip(self.names[_ROWS:], inputs[_ROWS:], strict=True)
        return {**self.modifications, **dict(own)}


def dense_call(
    causal: bool,
    softmax_scale: float | None,
    q_offset: Any,
    layout: str,
    modifications: Mapping[str, Any],
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """A call of `flash_attention`, and its inputs besides q, k and v."""
    # Most calls are alike.
    if not modifications and softmax_scale.__class__ in _PLAIN and q_offset.__class__ in _PLAIN:
        return _plain_call(causal, softmax_scale, q_offset, layout), ()
    q_offset, modifications = with_offsets(q_offset, modifications)
    options = Options("equal", causal, softmax_scale, True, None, None, q_offset, layout)
    return _call(options, _NO_LENGTHS, modifications)


@functools.lru_cache(typed=True)
def _plain_call(*options: Any) -> DifferentiableCall:
    """The call of q, k and v with these options."""
    causal, softmax_scale, q_offset, layout = options
    made = Options("equal", causal, softmax_scale, True, None, None, q_offset, layout)
    return _call(made, _NO_LENGTHS, {})[0]


def varlen_call(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Any,
    causal: bool,
    softmax_scale: float | None,
    modifications: Mapping[str, Any],
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """The same of `flash_attention_varlen`."""
    options = Options(
        *("packed", causal, softmax_scale, True),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return _call(options, (cu_seqlens_q, cu_seqlens_k, seqused_k), modifications)


def _call(
    options: Options, lengths: tuple[Any, ...], modifications: Mapping[str, Any]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    options = plain_options(options)
    given = {
        name: modifications[name]
        for name in WITH_GRADIENT
        if modifications.get(name) is not None and not is_number_or_list(modifications[name])
    }
    others = {n: value for n, value in modifications.items() if n not in given}
    by_name = dict(zip(_LENGTHS, lengths, strict=True))
    behind = None
    if not given and all(value is None for value in others.values()):
        behind = _behind(options, by_name)
    arrays = {**by_name, **{name: others.get(name) for name in ARRAYS}}
    constants = {name: array for name, array in arrays.items() if array is not None}
    names, without_lse = (*ROWS, *given), options.with_lse(False)
    call = DifferentiableCall(names, options, lengths, others, constants, without_lse, behind)
    return call, tuple(given.values())


def _behind(options: Options, lengths: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the value of `DifferentiableCall.arrays_behind`."""
    arrays = Arguments(**lengths)
    return arrays.of_kind(options.kind)[_ROWS:]
