"""Attention calls split into differentiable inputs and constants, for autograd of torch and JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupy_flash.api.hvp import flash_attention_hvp, flash_attention_varlen_hvp
from cupy_flash.api.jvp import flash_attention_jvp, flash_attention_varlen_jvp
from cupy_flash.arrays.kinds import is_number_or_list
from cupy_flash.calls import dispatch, dispatch_backward
from cupy_flash.calls.arguments import Arguments, GradientArguments
from cupy_flash.calls.key_lists.backward import gradients_of_lists
from cupy_flash.calls.key_lists.forward import attention_to_lists
from cupy_flash.calls.options import Options, plain_options, with_statistics
from cupy_flash.mods.base import Modification
from cupy_flash.mods.keywords import (
    ARRAYS,
    DROPOUT,
    DROPOUT_P,
    DROPOUT_SEED,
    DROPOUT_STEPS,
    MODS,
    checked_dropout,
    checked_softcap,
    require_seed,
    window_of,
    with_offsets,
)
from cupy_flash.problem.gradient import OF_MOD, ROWS, TANGENTS, tangent_of

# Modifications that are differentiable inputs if they are arrays; numbers and lists are constants.
WITH_GRADIENT = ("bias", "sinks")
_SLOPES = "alibi_slopes"
_ROWS = len(ROWS)
# Array arguments of derivatives in addition to those of the call and tangents of modifications.
OF_DERIVATIVES = (*TANGENTS, "dout", "dlse", "dout_tangent", "dlse_tangent")
# Types of immutable options.
_PLAIN = (type(None), float, int)
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_NO_LENGTHS = (None,) * len(_LENGTHS)
_LISTS = "key_indices"
# Modifications that are numbers, with the functions that parse them.
_NUMBERS: Mapping[str, Callable[[Any], Any]] = {
    "window_size": window_of,
    "softcap": checked_softcap,
}


class DifferentiableCall(NamedTuple):
    """An attention call without its differentiable inputs.

    Attributes
    ----------
    names
        Names of the differentiable inputs: q, k, v, modifications, and "score_mod.NAME" for each
        differentiable capture.
    options
        Options of the call, as Python values, with `return_lse` set.
    lengths
        cu_seqlens_q, cu_seqlens_k and seqused_k of a varlen call; None for each that is not given.
    modifications
        Modifications that are not among the differentiable inputs.
    constants
        Arrays of lengths and modifications, by name. The backward pass reads them again, but they
        have no gradients.
    without_lse
        Options of the same call that returns out only.
    following_arrays
        Arrays that follow q, k and v in `Arguments.key_arrays`; None for a call with
        modifications or lists of keys.
    key_indices
        Lists of the keys that each query attends to, or None.
    """

    names: tuple[str, ...]
    options: Options
    lengths: tuple[Any, ...]
    modifications: Mapping[str, Any]
    constants: Mapping[str, Any]
    without_lse: Options
    following_arrays: tuple[Any, ...] | None
    key_indices: Any | None = None

    def run(self, inputs: tuple[Any, ...], *, return_lse: bool = True) -> Any:
        """Compute attention; return out, lse and row statistics of `options`, or out only."""
        options = self.options if return_lse else self.without_lse
        modifications = self._modifications(inputs)
        call = self.arguments(inputs), options, "auto", 0, modifications
        if self.key_indices is not None:
            return attention_to_lists(*call, None, self.key_indices)
        return dispatch.attention(*call)

    def with_statistics(self, return_max_logits: Any, return_entropy: Any) -> DifferentiableCall:
        """Return the call with the requested row statistics, after checks of both arguments."""
        options = with_statistics(self.options, return_max_logits, return_entropy)
        return self if options is self.options else self._replace(options=options)

    def pull_back(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, Any],
        gradients: tuple[Any, Any],
        wrt: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Return gradients of the inputs in `wrt`, given those of out and lse (None if unused)."""
        arguments = self.gradient_arguments(inputs, results, gradients)
        options, modifications = self.backward_options(wrt), self._modifications(inputs, wrt)
        backward = arguments, options, "auto", modifications
        if self.key_indices is not None:
            return gradients_of_lists(*backward, None, self.key_indices)
        return dispatch_backward.gradients(*backward)

    def push_forward(
        self,
        inputs: tuple[Any, ...],
        moving: Mapping[str, Any],
        wrt: tuple[str, ...] | None = None,
    ) -> tuple[Any, ...]:
        """Return the tangents of out and lse, or of the gradients of the inputs in `wrt`.

        Parameters
        ----------
        inputs
            Differentiable inputs.
        moving
            Tangents of the inputs, named by `tangent_of`; None, or missing, for zeros. For tangents
            of gradients also dout and, perhaps, dlse, and their tangents.
        wrt
            Names of inputs, or None.

        Raises
        ------
        NotImplementedError
            For a call with lists of keys.
        """
        self.require_tangents()
        is_dense = self.options.kind == "dense"
        arguments = dict(zip(ROWS, inputs, strict=False)) | self._plain_arguments()
        arguments |= {name: moving[name] for name in OF_DERIVATIVES if name in moving}
        of_inputs = {name: moving.get(tangent_of(name)) for name in self.names[_ROWS:]}
        of_inputs = {name: x for name, x in of_inputs.items() if x is not None}
        arguments |= self._modifications(inputs, (*of_inputs, *(wrt or ())))
        arguments["modification_tangents"] = of_inputs
        if wrt is not None:
            hvp = flash_attention_hvp if is_dense else flash_attention_varlen_hvp
            return hvp(**arguments, wrt=wrt)
        jvp = flash_attention_jvp if is_dense else flash_attention_varlen_jvp
        return jvp(**arguments, return_lse=True)[1::2]

    def require_tangents(self) -> None:
        """Raise NotImplementedError for a call with lists of keys, which has no tangents."""
        if self.key_indices is not None:
            raise NotImplementedError(
                "attention with key_indices has neither tangents nor second derivatives, but "
                "gradients of q, k and v"
            )

    def _plain_arguments(self) -> dict[str, Any]:
        """Return the arguments of a public function that are neither inputs nor modifications."""
        names: tuple[str, ...] = ("causal", "softmax_scale", "q_offset", "layout")
        lengths: dict[str, Any] = {}
        if self.options.kind == "varlen":
            names = ("causal", "softmax_scale", "max_seqlen_q", "max_seqlen_k")
            lengths = dict(zip(_LENGTHS, self.lengths, strict=True))
        # An offset of each sequence is one of the modifications, which replaces this number.
        return {name: getattr(self.options, name) for name in names} | lengths

    def backward_options(self, wrt: tuple[str, ...]) -> Options:
        """Return the options of the backward call for the gradients of the inputs in `wrt`."""
        return _backward_options(self.options, wrt)

    @property
    def functions(self) -> tuple[Modification, ...]:
        """User functions among the modifications."""
        result = (self.modifications.get(name) for name in MODS)
        return tuple(mod for mod in result if isinstance(mod, Modification))

    def with_constants(self, constants: Mapping[str, Any]) -> DifferentiableCall:
        """Return the call with the constants of these names replaced by other arrays."""
        if not constants:
            return self
        lengths = dict(zip(_LENGTHS, self.lengths, strict=True))
        others, lists = dict(self.modifications), self.key_indices
        for name, array in constants.items():
            if name == _LISTS:
                lists = array
            else:
                (lengths if name in lengths else others)[name] = array
        return self._replace(
            key_indices=lists,
            lengths=tuple(lengths.values()),
            modifications=others,
            constants={**self.constants, **constants},
            following_arrays=None
            if self.following_arrays is None
            else _following_arrays(self.options, lengths),
        )

    def with_lists(self, key_indices: Any | None) -> DifferentiableCall:
        """Return the call whose queries attend to listed keys, or the same call for None."""
        if key_indices is None:
            return self
        constants = {**self.constants, _LISTS: key_indices}
        return self._replace(constants=constants, following_arrays=None, key_indices=key_indices)

    def with_inputs(
        self, is_input: Callable[[str, Any], bool]
    ) -> tuple[DifferentiableCall, tuple[Any, ...]]:
        """Return the call with more differentiable inputs, and these inputs.

        They are the ALiBi slopes and those tensors captured by score_mod for which
        `is_input(name, tensor)` is true.
        """
        score_mod = self.modifications.get("score_mod")
        captured = {} if score_mod is None else score_mod.tensors
        found = {_SLOPES: self.modifications.get(_SLOPES)}
        found |= {OF_MOD + name: tensor for name, tensor in captured.items()}
        found = {name: array for name, array in found.items() if is_input(name, array)}
        if not found:
            return self, ()
        modifications = {n: x for n, x in self.modifications.items() if n not in found}
        constants = {name: x for name, x in self.constants.items() if name not in found}
        names = (*self.names, *found)
        call = self._replace(names=names, modifications=modifications, constants=constants)
        return call, tuple(found.values())

    def with_functions_kept(self) -> DifferentiableCall:
        """Return the call with copies of its functions' captures; see `Modification.kept`."""
        return self._with_functions(lambda mod: mod.kept())

    def with_captures(self, change: Callable[[str, Any], Any]) -> DifferentiableCall:
        """Return the call with each captured array replaced by `change(name, array)`."""
        return self._with_functions(lambda mod: mod.with_arrays(change))

    def _with_functions(self, change: Callable[[Any], Any]) -> DifferentiableCall:
        functions = {n: mod for n in MODS if (mod := self.modifications.get(n)) is not None}
        changed = {name: change(mod) for name, mod in functions.items()}
        if all(changed[name] is mod for name, mod in functions.items()):
            return self
        return self._replace(modifications={**self.modifications, **changed})

    def with_numbers(self) -> DifferentiableCall:
        """Return the call with window_size and softcap as immutable numbers."""
        numbers = {
            name: read(self.modifications[name])
            for name, read in _NUMBERS.items()
            if self.modifications.get(name) is not None
        }
        if not numbers:
            return self
        return self._replace(modifications={**self.modifications, **numbers})

    def arguments(self, inputs: tuple[Any, ...]) -> Arguments:
        """Return the arrays of the call, without those of modifications."""
        q, k, v, *_ = inputs
        return Arguments(q, k, v, **dict(zip(_LENGTHS, self.lengths, strict=True)))

    def gradient_arguments(
        self, inputs: tuple[Any, ...], results: tuple[Any, Any], gradients: tuple[Any, Any]
    ) -> GradientArguments:
        """Return the arrays of the backward call, without those of modifications."""
        q, k, v, *_ = inputs
        (out, lse), (dout, dlse) = results, gradients
        lengths = dict(zip(_LENGTHS, self.lengths, strict=True))
        return GradientArguments(q, k, v, out, dout, lse, dlse, **lengths)

    def _modifications(
        self, inputs: tuple[Any, ...], differentiated: tuple[str, ...] = ()
    ) -> Mapping[str, Any]:
        """Return all modifications, including those among the differentiable inputs.

        The score function names those of its captures as differentiable that are among the inputs
        in `differentiated`.
        """
        if len(inputs) == _ROWS:
            return self.modifications
        given = dict(zip(self.names[_ROWS:], inputs[_ROWS:], strict=True))
        captures = {name: given.pop(OF_MOD + name) for name in _captures(self.names)}
        result = {**self.modifications, **given}
        if captures:
            score_mod = self.modifications["score_mod"]
            if any(score_mod.tensors.get(name) is not array for name, array in captures.items()):
                score_mod = score_mod.with_arrays(lambda name, x: captures.get(name, x))
            if names := _captures(differentiated):
                score_mod = score_mod.differentiable_in(names)
            result["score_mod"] = score_mod
        return result


def returned(results: tuple[Any, ...], return_lse: bool) -> Any:
    """Return the results of a public function, given out, lse and row statistics, if any."""
    out, lse, *statistics = results
    others = (lse, *statistics) if return_lse else tuple(statistics)
    return (out, *others) if others else out


# Creating the record takes 2 us, and few different ones occur.
@functools.lru_cache
def _backward_options(options: Options, wrt: tuple[str, ...]) -> Options:
    options = options._replace(return_max_logits=False, return_entropy=False)
    return options._replace(wrt=wrt, family=None, tile=None, num_splits=0, batch_invariant=False)


def _captures(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the captures among the names of inputs, each once."""
    names = tuple(dict.fromkeys(names))
    return tuple(name.removeprefix(OF_MOD) for name in names if name.startswith(OF_MOD))


def dense_call(
    causal: bool,
    softmax_scale: float | None,
    q_offset: Any,
    layout: str,
    modifications: Mapping[str, Any],
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """Return a call of `flash_attention`, and its differentiable inputs other than q, k and v."""
    # Most calls have no modifications, so their `DifferentiableCall` is cached.
    if not modifications and softmax_scale.__class__ in _PLAIN and q_offset.__class__ in _PLAIN:
        return _plain_call(causal, softmax_scale, q_offset, layout), ()
    q_offset, modifications = with_offsets(q_offset, modifications)
    options = Options("dense", causal, softmax_scale, True, None, None, q_offset, layout)
    return call_of(options, _NO_LENGTHS, modifications)


@functools.lru_cache(typed=True)
def _plain_call(*options: Any) -> DifferentiableCall:
    """Return a call without modifications that has these options."""
    causal, softmax_scale, q_offset, layout = options
    made = Options("dense", causal, softmax_scale, True, None, None, q_offset, layout)
    call, _ = call_of(made, _NO_LENGTHS, {})
    return call


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
    """Return a `flash_attention_varlen` call, and its differentiable inputs after q, k and v."""
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
    # As for dense calls, what does not depend on arrays is cached for calls without modifications.
    if (
        not modifications
        and causal.__class__ is bool
        and max_seqlen_q.__class__ is int
        and max_seqlen_k.__class__ is int
        and softmax_scale.__class__ in _PLAIN
    ):
        call = _plain_varlen_call(max_seqlen_q, max_seqlen_k, causal, softmax_scale)
        by_name = dict(zip(_LENGTHS, lengths, strict=True))
        constants = {name: array for name, array in by_name.items() if array is not None}
        following = _following_arrays(call.options, by_name)
        return call._replace(lengths=lengths, constants=constants, following_arrays=following), ()
    options = _varlen_options(max_seqlen_q, max_seqlen_k, causal, softmax_scale)
    return call_of(options, lengths, modifications)


@functools.lru_cache(typed=True)
def _plain_varlen_call(*options: Any) -> DifferentiableCall:
    """Return a packed call without modifications and lengths that has these options."""
    call, _ = call_of(_varlen_options(*options), _NO_LENGTHS, {})
    return call


def _varlen_options(
    max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float | None
) -> Options:
    return Options(
        *("varlen", causal, softmax_scale, True),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def call_of(
    options: Options, lengths: tuple[Any, ...], modifications: Mapping[str, Any]
) -> tuple[DifferentiableCall, tuple[Any, ...]]:
    """Return a call with `return_lse` set, and its differentiable inputs other than q, k and v.

    `lengths` are those of `DifferentiableCall`.
    """
    options = plain_options(options)
    modifications = with_plain_dropout(modifications)
    given = {
        name: modifications[name]
        for name in WITH_GRADIENT
        if modifications.get(name) is not None and not is_number_or_list(modifications[name])
    }
    others = {n: value for n, value in modifications.items() if n not in given}
    by_name = dict(zip(_LENGTHS, lengths, strict=True))
    following = None
    if not given and all(value is None for value in others.values()):
        following = _following_arrays(options, by_name)
    arrays = {**by_name, **{name: others.get(name) for name in (*ARRAYS, DROPOUT_SEED)}}
    constants = {name: array for name, array in arrays.items() if array is not None}
    names, without_lse = (*ROWS, *given), options._replace(return_lse=False)
    call = DifferentiableCall(names, options, lengths, others, constants, without_lse, following)
    return call, tuple(given.values())


def with_plain_dropout(modifications: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the modifications with dropout_p as an immutable number.

    Both arguments of dropout are left out if dropout_p is 0.

    Raises
    ------
    TypeError, ValueError
        If dropout_p is not a probability below 1, and if dropout_seed is missing.
    """
    if not modifications or modifications.keys().isdisjoint(DROPOUT):
        return modifications
    dropout_p = modifications.get(DROPOUT_P)
    others = {name: x for name, x in modifications.items() if name not in DROPOUT}
    threshold = None if dropout_p is None else checked_dropout(dropout_p)
    if threshold is None:
        return others
    seed = require_seed(modifications)
    if isinstance(seed, list):
        # The backward pass must see the numbers of the forward pass.
        seed = tuple(seed)
    return {**others, DROPOUT_P: threshold / DROPOUT_STEPS, DROPOUT_SEED: seed}


def _following_arrays(options: Options, lengths: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the value of `DifferentiableCall.following_arrays`."""
    arrays = Arguments(**lengths)
    return arrays.key_arrays(options)[_ROWS:]
