"""Automatic capture of the arrays in the variables around a function."""

from __future__ import annotations

import builtins
import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from cupy_flash.arrays.cuda_interface import is_foreign_array
from cupy_flash.mods.captures import CaptureSpec, unused_name
from cupy_flash.mods.ir.expression import Node, postorder
from cupy_flash.mods.trace.symbols import Symbol, TracedArray

# Array of a capture, NumPy's or CuPy's, and its spec.
Read = tuple[Any, CaptureSpec]


class ClosureRebuilder:
    """Rebuilder of functions, with stand-ins for the arrays that their variables hold.

    Arrays are found in closure cells, globals, default arguments and attributes of functions, alone
    or as elements of a list, a tuple or a dictionary, or as attributes of a module. Python
    functions in such variables are rebuilt in the same way. All other variables keep the values
    that they have at that time.

    Parameters
    ----------
    read
        Function that checks a capture of a name and returns its array and spec.
    given
        Captures that were given by name: the arrays as the user passed them.
    specs
        Specs of those captures.
    reserved
        Names that no further capture may have.
    """

    def __init__(
        self,
        read: Callable[[str, Any], Read],
        given: Mapping[str, Any],
        specs: Mapping[str, CaptureSpec],
        reserved: Iterable[str],
    ) -> None:
        self._read = read
        self._found: dict[str, Any] = {}
        self._names = {*reserved, *specs}
        # Keyed by id(). The pair holds the object itself, so that no other object gets its id.
        self._made: dict[int, tuple[Any, Any]] = {}
        for name, spec in specs.items():
            array = given[name]
            if spec.rank:
                self._kept(array, ProgramArray(name, array, self, spec))
            elif spec.rank == 0:
                self._kept(array, ProgramNumber(spec.parameter(name).node, array))

    def rebuilt(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with stand-ins for the arrays that it can reach."""
        made: Callable[..., Any] = self._stand_in("", function)
        return made

    def captured_in(self, *graphs: Node) -> dict[str, Any]:
        """Return the arrays that the nodes of traced functions read, by name."""
        named = {node.value for node in postorder(*graphs) if node.op == "array"}
        return {name: array for name, array in self._found.items() if name in named}

    def capture(self, name: str, array: Any) -> tuple[str, CaptureSpec]:
        """Add a capture, named after a variable, and return its name and spec."""
        chosen = unused_name(name, self._names)
        _, spec = self._read(chosen, array)
        self._found[chosen] = array
        self._names.add(chosen)
        return chosen, spec

    def _stand_in(self, name: str, value: Any) -> Any:
        """Return the object that takes the place of a variable's value."""
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self._kept(value, MethodType(self._stand_in("", value.__func__), value.__self__))
        if type(value) is functools.partial:
            keywords = {key: self._stand_in(key, x) for key, x in value.keywords.items()}
            args = [self._stand_in("array", x) for x in value.args]
            made = functools.partial(self._stand_in("", value.func), *args, **keywords)
            return self._kept(value, made)
        if is_array(value):
            return self._kept(value, self._array(name, value))
        if type(value) in (list, tuple) and any(map(is_array, value)):
            elements = (self._stand_in(f"{name}_{n}", x) for n, x in enumerate(value))
            return self._kept(value, type(value)(elements))
        if type(value) is dict and any(map(is_array, value.values())):
            named = ((key, f"{name}_{key}") for key in value)
            parts = {k: self._stand_in(n if n.isidentifier() else name, value[k]) for k, n in named}
            return self._kept(value, parts)
        if isinstance(value, ModuleType):
            return self._kept(value, ProgramModule(value, self._stand_in))
        return value

    def _kept(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = value, made
        return made

    def _array(self, name: str, array: Any) -> Any:
        if getattr(array, "ndim", 1):
            return ProgramArray(name, array, self)
        try:
            chosen, spec = self.capture(name, array)
        except (TypeError, ValueError):
            if getattr(array, "requires_grad", False):
                raise
            # Arrays of this dtype cannot be captured, so the array stays a constant.
            return array
        return ProgramNumber(spec.parameter(chosen).node, array)

    def _function(self, function: FunctionType) -> FunctionType:
        outer, code = function.__globals__, function.__code__
        closure = function.__closure__ or ()
        fresh = [(n, c) for n, c in zip(code.co_freevars, closure, strict=True) if self._is_new(c)]
        for _, cell in fresh:
            self._kept(cell, CellType())
        inner: dict[str, Any] = {"__builtins__": outer.get("__builtins__", builtins)}
        cells = tuple(self._made[id(cell)][1] for cell in closure)
        made = FunctionType(code, inner, function.__name__, None, cells)
        # Registered before its variables are read, as one of them may hold the function itself.
        self._kept(function, made)
        # Variables are read in the order of the code, so that captures have the same names in every
        # process.
        for name in dict.fromkeys([*names_in(code), *_names_of_modules(outer)]):
            if name in outer:
                inner[name] = self._stand_in(name, outer[name])
        for name, cell in fresh:
            # A cell is empty until its variable is assigned.
            with contextlib.suppress(ValueError):
                self._made[id(cell)][1].cell_contents = self._stand_in(name, cell.cell_contents)
        defaults = function.__defaults__ or ()
        last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        made.__defaults__ = tuple(map(self._stand_in, last, defaults)) or None
        of_keywords = function.__kwdefaults__ or {}
        made.__kwdefaults__ = {n: self._stand_in(n, x) for n, x in of_keywords.items()}
        for name, value in function.__dict__.items():
            setattr(made, name, self._stand_in(name, value))
        return made

    def _is_new(self, value: Any) -> bool:
        return id(value) not in self._made


class ProgramNumber(Symbol):
    """Stand-in for an array without axes in a traced function: its element as a symbol."""

    __slots__ = ("_array",)

    def __init__(self, node: Node, array: Any) -> None:
        super().__init__(node)
        self._array = array

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Libraries that look up an array protocol get the error that a symbol raises.
            super().__getattr__(name)
        return getattr(self._array, name)


class ProgramArray(NDArrayOperatorsMixin, TracedArray):
    """Stand-in for an array in a traced function. It becomes a capture when it is first indexed.

    Methods and NumPy functions of the whole array are evaluated when the function is traced. Their
    results are constants of the function.

    `name` is the variable that holds the array. `spec` is the spec of the capture if it was given
    by keyword, otherwise None.
    """

    __slots__ = ("_array", "_rebuilder", "_spec")

    def __init__(
        self, name: str, array: Any, rebuilder: ClosureRebuilder, spec: CaptureSpec | None = None
    ) -> None:
        super().__init__(name, getattr(array, "ndim", 1), "")
        self._array, self._rebuilder, self._spec = array, rebuilder, spec

    def __getitem__(self, index: Any) -> Symbol:
        if self._spec is None:
            self._name, self._spec = self._rebuilder.capture(self._name, self._array)
        return TracedArray(self._name, self._spec.rank or 0, self._spec.type)[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __len__(self) -> int:  # type: ignore[override]
        return len(self._array)

    def __iter__(self) -> Iterator[Symbol]:  # type: ignore[override]
        if self._rank != 1:
            raise self.not_indexed()
        return (self[n] for n in range(len(self._array)))

    def __array__(  # type: ignore[override]
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if "out" in options:
            raise TypeError(f"{self._name} is written in a traced function, which may only read it")
        return getattr(ufunc, method)(*self._whole(inputs), **options)

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        whole = dict(zip(options, self._whole(options.values()), strict=True))
        return function(*self._whole(args), **whole)

    def _whole(self, values: Iterable[Any]) -> list[Any]:
        """Return arguments of a function of whole arrays, with arrays for their stand-ins.

        Raises
        ------
        TypeError
            For a traced value, which is a single number.
        """
        result = []
        for value in values:
            if isinstance(value, Symbol) or type(value) is TracedArray:
                raise self.not_indexed()
            result.append(value._array if isinstance(value, ProgramArray) else value)
        return result


class ProgramModule(ModuleType):
    """Stand-in for a module, with stand-ins for the functions, arrays and modules in it.

    `stand_in` returns the stand-in of an object, given its name and the object.
    """

    def __init__(self, module: ModuleType, stand_in: Callable[[str, Any], Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__["_module"], self.__dict__["_stand_in"] = module, stand_in

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        is_rebuilt = isinstance(value, (FunctionType, ModuleType)) or is_array(value)
        return self._stand_in(name, value) if is_rebuilt else value


def random_states() -> tuple[Any, ...]:
    """Return the states of the global random generators of Python and NumPy."""
    state: Any = np.random.get_state()  # noqa: NPY002
    _, words, *others = state
    return random.getstate(), words.tobytes(), *others


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy or of another library."""
    return isinstance(value, np.ndarray) or is_foreign_array(type(value))


def _names_of_modules(outer: Mapping[str, Any]) -> Iterator[str]:
    """Yield names such as ``__name__``, which statements like ``import`` look up."""
    return (name for name in outer if name.startswith("__"))


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals, and of attributes, in code and in what is defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
