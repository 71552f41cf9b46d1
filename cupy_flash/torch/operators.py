"""Operators of PyTorch for attention and its gradients, which `torch.compile` sees in graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library
from torch._library.autograd import Info, make_autograd_impl
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cupy_flash.arrays.torch_arrays import NO_FORWARD_MODE, has_tangent, in_forward_mode
from cupy_flash.calls.arguments import in_field_order
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.differentiable import DifferentiableCall, dense_call, varlen_call
from cupy_flash.problem.gradient import ROWS
from cupy_flash.torch import modifications as mods
from cupy_flash.torch.batching import mapped
from cupy_flash.torch.functions import no_second_derivative, pull_back

_Library: Any = library.Library
OPERATORS = _Library("cupy_flash", "FRAGMENT")
# Devices whose tensors the operators compute.
_DEVICES = ("CPU", "CUDA")
_BACKENDS = tuple(getattr(torch._C.DispatchKey, device) for device in _DEVICES)

# Arguments of operators after the modifications, and of those of gradients before q. `wrt` names
# the inputs whose gradients are computed, which are q, k and v if it is None.
DENSE_SCHEMA = (
    "bool causal, float? softmax_scale, SymInt? q_offset, str layout, Tensor? key_indices"
)
VARLEN_SCHEMA = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? seqused_k, bool causal, float? softmax_scale, Tensor? key_indices"
)
RESULTS = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, str[]? wrt"
LEADING = RESULTS.count(",") + 1


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator of the namespace `cupy_flash`.

    PyTorch's `custom_op` would wrap each call in two more functions.

    Parameters
    ----------
    name, schema
        Name of the operator, and its arguments and results in the notation of PyTorch.
    run
        Function that computes the results of tensors.
    fake
        Function that returns empty tensors with the shapes of the results.
    """
    OPERATORS.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        OPERATORS.impl(name, run, device)
    library.register_fake(f"cupy_flash::{name}", fake, lib=OPERATORS)


def _record(
    name: str,
    run: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., Any] | None = None,
    refuse_tangents: Callable[[Sequence[Any]], None] | None = None,
) -> None:
    """Let autograd record an operator; `run` computes its results.

    The operator would drop the tangents of tensors that require no gradient: `refuse_tangents` is
    given the arguments, and raises an error if a tensor has a tangent.
    """
    operator = getattr(torch.ops.cupy_flash, name).default
    recording = make_autograd_impl(operator, Info(backward, save))

    def kernel(keyset: Any, *values: Any) -> Any:
        if refuse_tangents is not None and in_forward_mode():
            refuse_tangents(values)
        is_recorded = torch.is_grad_enabled() and torch._C._any_requires_grad(*values)
        if not is_recorded and _is_unobserved(keyset.raw_repr()):
            # A second call of PyTorch's dispatcher would take longer than all that `run` does
            # besides attention.
            return run(*values)
        return recording(keyset, *values)

    OPERATORS.impl(name, kernel, "Autograd", with_keyset=True)


# Comparing the objects that PyTorch returns for keys takes 2 us.
@functools.lru_cache
def _is_unobserved(keys: int) -> bool:
    """Return whether nothing observes a call with this set of keys between autograd and a device.

    Modes, transforms and subclasses of tensors do.
    """
    below = torch._C.DispatchKeySet.from_raw_repr(keys) & torch._C._after_ADInplaceOrView_keyset
    return below.highestPriorityTypeId() in _BACKENDS


class _Operator(NamedTuple):
    """Operator for a public function. Its arguments are q, k, v, modifications, and others.

    Attributes
    ----------
    name
        Name of the operator.
    kind
        Kind of the call, see `Options`.
    schema
        Schema of the other arguments.
    of_plain
        Function that returns the call, and its differentiable inputs other than q, k and v, given
        the other arguments and the modifications.
    lse_shape
        Function that returns the shape of lse, given q and the other arguments.
    """

    name: str
    kind: str
    schema: str
    of_plain: Callable[..., tuple[DifferentiableCall, tuple[Any, ...]]]
    lse_shape: Callable[..., tuple[Any, ...]]

    def register(self) -> Any:
        """Register the operator, and its backward pass as a second operator; return the former."""
        arguments = f"Tensor q, Tensor k, Tensor v, {mods.SCHEMA}, {self.schema}"
        define(self.name, f"({arguments}) -> (Tensor, Tensor)", self.run, self.run_fake)
        operator = getattr(torch.ops.cupy_flash, self.name).default
        _record(self.name, self.run, self.backward, _save, _refuse_tangents)
        schema = f"({RESULTS}, {arguments}) -> Tensor[]"
        define(f"{self.name}_gradients", schema, self.gradients, self.gradients_fake)
        gradients = f"{self.name}_gradients"
        _record(gradients, self.gradients, _refuse_second_derivative)
        library.register_vmap(f"cupy_flash::{self.name}", self.run_mapped, lib=OPERATORS)
        library.register_vmap(f"cupy_flash::{gradients}", self.gradients_mapped, lib=OPERATORS)
        return operator

    def _call(self, values: Sequence[Any]) -> tuple[DifferentiableCall, tuple[Any, ...]]:
        """Return the call that an operator's arguments describe, and its inputs."""
        q, k, v, *rest = values
        modifications = mods.unpacked(*rest[: mods.COUNT])
        *others, key_indices = rest[mods.COUNT :]
        call, inputs = self.of_plain(*others, modifications)
        return call.with_lists(key_indices), (q, k, v, *inputs)

    def run(self, *values: Any) -> tuple[Any, Any]:
        """Compute attention; return out and lse."""
        call, inputs = self._call(values)
        if call.following_arrays is not None:
            made = torch_autograd.run(inputs + call.following_arrays, call.options)
            if made is not None:
                results, _ = made
                return results
        results = call.run(inputs)
        return results

    def run_fake(self, *values: Any) -> tuple[Any, Any]:
        """Return empty tensors with the shapes of out and lse."""
        q, _, v, *rest = values
        mods.keep_templates(*rest[: mods.COUNT])
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        return out, q.new_empty(self.lse_shape(q, *rest[mods.COUNT :]), dtype=accumulator)

    def gradients(
        self, dout: Any, dlse: Any, out: Any, lse: Any, wrt: Sequence[str] | None, *values: Any
    ) -> list[Any]:
        """Return the gradients of the inputs in `wrt`."""
        call, inputs = self._call(values)
        names = ROWS if wrt is None else tuple(wrt)
        if call.following_arrays is not None:
            arrays = in_field_order(inputs, (out, lse), (dout, dlse), call.lengths)
            made = torch_autograd.run_gradients(arrays, call.backward_options(names))
            if made is not None:
                return made
        call, more = call.with_inputs(lambda name, _: name in names)
        needed = tuple(name in names for name in call.names)
        of_inputs = pull_back(call, (*inputs, *more), (out, lse), (dout, dlse), needed)
        result = dict(zip(call.names, of_inputs, strict=True))
        return [result[name] for name in names]

    def gradients_fake(
        self, dout: Any, dlse: Any, out: Any, lse: Any, wrt: Sequence[str] | None, *values: Any
    ) -> list[Any]:
        """Return empty tensors with the shapes of these gradients."""
        inputs = _inputs(_names(values), values)
        names = ROWS if wrt is None else wrt
        return [inputs[name].new_empty(inputs[name].shape) for name in names]

    def run_mapped(self, info: Any, axes: Any, *values: Any) -> Any:
        """Compute attention for each element of an axis."""
        return self._mapped(self.name, 0, info, axes, _names(values), values, ())

    def gradients_mapped(self, info: Any, axes: Any, *values: Any) -> Any:
        """Compute the gradients for each element of an axis."""
        wrt = values[LEADING - 1]
        names = (*("dout", "dlse", "out", "lse"), wrt, *_names(values[LEADING:]))
        wrt = ROWS if wrt is None else wrt
        return self._mapped(f"{self.name}_gradients", LEADING, info, axes, names, values, wrt)

    def _mapped(
        self,
        name: str,
        first: int,
        info: Any,
        axes: Any,
        names: tuple[Any, ...],
        values: tuple[Any, ...],
        wrt: Sequence[str],
    ) -> Any:
        """Map an operator over an axis; `first` is the position of q among its arguments."""
        after_rows = first + len(ROWS)
        functions = mods.functions_of(*values[after_rows : after_rows + mods.COUNT])
        operator, size = getattr(torch.ops.cupy_flash, name), info.batch_size
        return mapped(operator, self.kind, size, axes, names, values, functions, wrt)

    def backward(self, ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        """Return a gradient or None for each argument of the operator."""
        out, lse, *saved = ctx.saved_tensors
        tensors = iter(saved)
        leaves = [next(tensors) if x is _SAVED else x for x in ctx.leaves]
        values = tree_unflatten(leaves, ctx.structure)
        names = _names(values)
        # A list of tensors has a list of bools.
        needed = _inputs(names, ctx.needs_input_grad)
        wrt = [name for name, is_needed in needed.items() if is_needed]
        if dout is None:
            dout = torch.zeros_like(out)
        operator = getattr(torch.ops.cupy_flash, f"{self.name}_gradients")
        given = None if tuple(wrt) == ROWS else wrt
        new = dict(zip(wrt, operator(dout, dlse, out, lse, given, *values), strict=True))
        of_tensors = names[len(ROWS)]
        return (
            *(new.get(name) for name in ROWS),
            None if of_tensors is None else [new.get(name) for name in of_tensors],
            *map(_no_gradient, values[len(ROWS) + 1 :]),
        )


# Placeholder in `ctx.leaves` for a tensor that autograd has saved.
_SAVED = object()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    leaves, ctx.structure = tree_flatten(inputs)
    ctx.leaves = [_SAVED if isinstance(x, Tensor) else x for x in leaves]
    ctx.save_for_backward(*output, *(x for x in leaves if isinstance(x, Tensor)))
    # Handles do not keep the templates alive.
    ctx.templates = mods.templates(*inputs[len(ROWS) : len(ROWS) + mods.COUNT])
    ctx.set_materialize_grads(False)


def _refuse_tangents(values: Sequence[Any]) -> None:
    """Raise NotImplementedError if a tensor has a forward-mode tangent."""
    names = _names(values)
    for name, tensor in zip(tree_leaves(names), tree_leaves(tuple(values)), strict=True):
        if isinstance(tensor, Tensor) and has_tangent(tensor):
            raise NotImplementedError(f"{name} {NO_FORWARD_MODE}")


def _names(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of an operator, with the names of tensors instead of tensors."""
    tensors, *others = values[len(ROWS) : len(ROWS) + mods.COUNT]
    names = None if tensors is None else mods.tensor_names(tensors, *others)
    *plain, key_indices = values[len(ROWS) + mods.COUNT :]
    lists = None if key_indices is None else "key_indices"
    return *ROWS, names, *others, *plain, lists


def _inputs(names: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return q, k, v and the tensors of modifications by name, given arguments and `_names`."""
    first = len(ROWS)
    result = dict(zip(ROWS, values[:first], strict=True))
    if names[first] is not None:
        result |= zip(names[first], values[first], strict=True)
    return result


def _no_gradient(value: Any) -> Any:
    """Return None, or a list of None for a list that autograd flattens: a list of tensors."""
    is_flattened = isinstance(value, list) and all(isinstance(x, Tensor) for x in value)
    return [None] * len(value) if is_flattened else None


def _refuse_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise no_second_derivative("in a graph")


def _dense_lse_shape(
    q: Any, causal: Any, softmax_scale: Any, q_offset: Any, layout: str, key_indices: Any
) -> tuple[Any, ...]:
    *batch, first, second, _ = q.shape
    return (*batch, second, first) if layout == "bshd" else (*batch, first, second)


def _varlen_lse_shape(q: Any, *_: Any) -> tuple[Any, ...]:
    return q.shape[1], q.shape[0]


ATTENTION = _Operator("attention", "dense", DENSE_SCHEMA, dense_call, _dense_lse_shape).register()
ATTENTION_VARLEN = _Operator(
    "attention_varlen", "varlen", VARLEN_SCHEMA, varlen_call, _varlen_lse_shape
).register()

# Copies a captured NumPy array for the backward pass. Graphs may compute `torch.clone` again there,
# of what the array then holds.
define("copy_of_capture", "(Tensor capture) -> Tensor", torch.clone, torch.clone)
