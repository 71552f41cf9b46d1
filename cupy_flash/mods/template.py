"""Modifications without the values of their captures, which compiled graphs name by handles."""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import address_of, dtype_name
from cupy_flash.mods.captures import CaptureSpec, number_key
from cupy_flash.mods.ir.expression import INT, Node
from cupy_flash.mods.pickling import AbsentFunction, flattened, reference_to


class Parts(NamedTuple):
    """Parts of a modification that do not depend on the values of its captures.

    Attributes
    ----------
    kind
        Class of the modification.
    options
        Result of `Modification._options`, as pairs.
    cuda
        CUDA source, or None.
    expression
        Expression that a kernel computes.
    graph
        Expression of the Python function, or None if it cannot be traced.
    captures
        Names and kinds of the captures: "array", or the type of a number.
    function
        The Python function if it cannot be traced, otherwise None.
    """

    kind: type
    options: tuple[Any, ...]
    cuda: str | None
    expression: Node
    graph: Node | None
    captures: tuple[tuple[str, str], ...]
    function: Callable[..., Any] | None


class Template:
    """Modification without the values of its captures. Objects with equal parts are the same.

    Attributes
    ----------
    parts
        Parts of all modifications that have this template.
    name
        Name of the function of the first modification.
    handle
        Text that identifies the template. If the function is traced, it is the same in every
        process.
    arrays, integers, reals
        Names of the captures that are arrays, integers or bools, and reals.
    """

    __slots__ = (
        "__weakref__",
        "_modifications",
        "arrays",
        "handle",
        "integers",
        "name",
        "parts",
        "reals",
    )

    parts: Parts
    name: str
    handle: str
    arrays: tuple[str, ...]
    integers: tuple[str, ...]
    reals: tuple[str, ...]
    # Modifications by the places of their arrays and their numbers. Their block masks are shared
    # by calls that find them here.
    _modifications: weakref.WeakValueDictionary[Any, Any]

    def __new__(cls, parts: Parts, name: str) -> Template:
        """Return the existing template with these parts, or a new one, named in its handle."""
        key = parts._replace(function=_hashable(parts.function))
        with _lock:
            template = _by_parts.get(key)
            if template is None:
                template = _by_parts[key] = object.__new__(cls)
                template.parts, template.name = parts, name
                handle = _handle(parts, name)
                # A function of the same name may have been defined again, as in a notebook.
                is_taken = handle in _by_handle or handle in _used
                template.handle = f"{handle} {next(_counter)}" if is_taken else handle
                kinds: dict[str, list[str]] = {"array": [], "integer": [], "real": []}
                for capture, kind in parts.captures:
                    kinds["integer" if kind in ("bool", INT) else kind].append(capture)
                template.arrays, template.integers, template.reals = map(tuple, kinds.values())
                template._modifications = weakref.WeakValueDictionary()
                _by_handle[template.handle] = template
        return template

    def add(self, modification: Any) -> None:
        """Let the method `modification` return this object for its captures, while it is alive."""
        captures = modification.captures
        places = [
            place(address_of(x), dtype_name(x), x.shape, x.strides)
            for x in (captures[name] for name in self.arrays)
        ]
        numbers = [captures[name] for name in (*self.integers, *self.reals)]
        self._modifications[_key(places, numbers)] = modification

    def modification(
        self, arrays: Sequence[Any], places: Sequence[Any], numbers: Sequence[bool | int | float]
    ) -> Any:
        """Return the modification with these captures: an existing one, otherwise a new one.

        Parameters
        ----------
        arrays
            Captured arrays in the order of `Template.arrays`.
        places
            Places of these arrays, made by the function `place`.
        numbers
            Captured numbers in the order of `Template.integers` and `Template.reals`. Bools may be
            given as integers.
        """
        types = dict(self.parts.captures)
        names = (*self.integers, *self.reals)
        numbers = [
            bool(x) if types[n] == "bool" else x for n, x in zip(names, numbers, strict=True)
        ]
        found = self._modifications.get(_key(places, numbers))
        # The same memory may belong to a tensor that requires a gradient, and to a detached one.
        if found is not None and not any(x.requires_grad for x in found.tensors.values()):
            return found
        captures = dict(zip((*self.arrays, *names), (*arrays, *numbers), strict=True))
        parts = self.parts
        function = parts.function or AbsentFunction(self.name)
        new: Any = parts.kind
        return new._made(
            dict(parts.options), function, parts.cuda, captures, parts.expression, parts.graph
        )


def captures_of(specs: Mapping[str, CaptureSpec]) -> tuple[tuple[str, str], ...]:
    """Return the value of `Parts.captures`, given the specs of captures."""
    return tuple((n, spec.type if spec.rank is None else "array") for n, spec in specs.items())


def place(
    address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
) -> tuple[Any, ...]:
    """Return a hashable description of an array's memory; strides are in bytes."""
    steps = tuple(step for step, n in zip(strides, shape, strict=True) if n > 1)
    return address, dtype, tuple(shape), steps


def template_of(handle: str) -> Template:
    """Return the template of a handle.

    Raises
    ------
    RuntimeError
        If there is no modification with this handle.
    """
    template = _used.get(handle) or _by_handle.get(handle)
    if template is None:
        raise RuntimeError(
            f"the graph calls {handle!r}, and no modification that computes this function exists "
            "in this process; create it before the graph runs, for example by importing the module "
            "that defines it"
        )
    return template


def keep(handle: str) -> None:
    """Keep the template of a handle until the process ends, for a graph that holds the handle.

    PyTorch does not say when it drops a graph. Templates hold no captured arrays, and
    there is one for each function in a graph, so they stay few.
    """
    _used[handle] = template_of(handle)


def _hashable(function: Any) -> Any:
    """Return a function, or the number that identifies the object if it has no hash."""
    try:
        hash(function)
    except TypeError:
        # The template keeps the function, so no other object gets this number.
        return id(function)
    return function


def _key(places: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
    return (*places, *[(type(x), number_key(x)) for x in numbers])


def _handle(parts: Parts, name: str) -> str:
    described: tuple[Any, ...]
    reference = None if parts.function is None else reference_to(parts.function)
    if reference is not None and reference[0] is None:
        # The function cannot be imported by its name, so other processes must not find it either.
        described = "function", next(_counter)
    else:
        # With CUDA source the expression names it, and the graph is that of the Python function.
        has_two = parts.graph is not None and parts.graph is not parts.expression
        graph = flattened(parts.graph) if has_two and parts.graph is not None else None
        described = parts.options, flattened(parts.expression), graph, parts.captures, reference
    kind = parts.kind.__name__
    digest = hashlib.sha256(repr((kind, *described)).encode()).hexdigest()[:24]
    return f"{kind}({name}) {digest}"


_by_parts: weakref.WeakValueDictionary[Parts, Template] = weakref.WeakValueDictionary()
_by_handle: weakref.WeakValueDictionary[str, Template] = weakref.WeakValueDictionary()
# Templates that graphs use.
_used: dict[str, Template] = {}
_lock = threading.Lock()
_counter = itertools.count()
