"""Base class of `ScoreMod` and `MaskMod`: a user's function, its captures, and its expression."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_flash.arrays.strided import address_of
from cupy_flash.arrays.torch_arrays import (
    is_any_tensor,
    is_torch_on_gpu,
    is_tracked,
    memory_of,
    outside_transforms,
)
from cupy_flash.mods.captures import (
    CaptureSpec,
    array_node,
    host_parameter,
    number_key,
    prefixed,
    read_capture,
    require_int32_values,
)
from cupy_flash.mods.ir.expression import REAL, SCORE, Node
from cupy_flash.mods.on_arrays.interpret import Interpreter
from cupy_flash.mods.pickling import (
    AbsentFunction,
    flattened,
    reference_to,
    resolve_reference,
    restored,
)
from cupy_flash.mods.signature import POSITIONS, RESERVED, check_text, parameters_of
from cupy_flash.mods.template import Parts, Template, captures_of
from cupy_flash.mods.trace.closures import ClosureRebuilder, random_states
from cupy_flash.mods.trace.symbols import Symbol, TracedArray, as_node
from cupy_flash.mods.trace.traced import Traced

if TYPE_CHECKING:
    from typing_extensions import Self

# Nodes of the parameters that a function may have in addition to captures.
_SYMBOLS = {"score": SCORE} | POSITIONS


class Modification:
    """Base class of `ScoreMod` and `MaskMod`. Immutable.

    Two objects are equal if they compute the same function and their captures hold the same values:
    numbers with the same bits, and arrays at the same address, or NumPy arrays with the same dtype,
    shape and bytes.

    Attributes
    ----------
    function
        The Python function. After unpickling, a stand-in if the function is not found by its name.
    captures
        Arrays (NumPy's or CuPy's) and numbers by name, which are read when a call is made.
    cuda
        CUDA source that kernels use instead of the traced function, or None.
    traced
        Expression and specs, on which generated CUDA source depends.
    array_names, arrays
        Names of captured arrays among all arrays of a call, and the arrays as calls read them;
        tensors on a GPU, and those that require a gradient, stay as they were given.
    tensors
        Captured arrays that were given as tensors of torch, by name. Calls whose arrays are all
        tensors run on torch's stream, and autograd compares the tensors' versions.
    memory
        Names in `tensors`, each with the memory that the tensor had when it was read.
    numbers
        Captured numbers by their names among all arrays of a call, in the form of `number_key`.
    read_alone
        Arguments that were read by calls without other modifications; None before the first.
    template
        The modification without the values of its captures, which graphs name by its handle.
    """

    __slots__ = (
        "__weakref__",
        "_graph",
        "array_names",
        "arrays",
        "captures",
        "cuda",
        "function",
        "memory",
        "numbers",
        "read_alone",
        "template",
        "tensors",
        "traced",
    )

    _keyword = ""
    _first: tuple[str, ...] = ()
    _type = REAL

    function: Callable[..., Any]
    captures: Mapping[str, Any]
    cuda: str | None
    traced: Traced
    array_names: tuple[str, ...]
    arrays: tuple[Any, ...]
    tensors: Mapping[str, Any]
    memory: tuple[tuple[str, Any], ...]
    numbers: tuple[tuple[str, bool | int | str], ...]
    read_alone: Any | None
    template: Template
    # The traced function, or None if there is CUDA source and the function cannot be traced.
    _graph: Node | None

    @property
    def specs(self) -> Mapping[str, CaptureSpec]:
        """Specs of the captures by name."""
        return self.traced.specs

    @property
    def expression(self) -> Node:
        """Expression that a kernel computes."""
        return self.traced.expression

    def __init__(
        self, function: Callable[..., Any], /, *, cuda: str | None = None, **captures: Any
    ) -> None:
        read = {name: self._read(name, captures[name]) for name in sorted(captures)}
        specs = {name: spec for name, (_, spec) in read.items()}
        names = parameters_of(function, self._first, specs)
        if cuda is not None:
            check_text(cuda, names)
        around = ClosureRebuilder(self._read, captures, specs, RESERVED)
        graph: Node | None = None
        try:
            graph = self._traced(around.rebuilt(function), names, specs)
        except Exception:
            # With CUDA source the function need not be traceable: it is called with arrays.
            if cuda is None:
                raise
        given = dict(captures)
        if graph is not None:
            given |= around.captured_in(graph)
        expression = graph
        if cuda is not None:
            args = (_argument(name, specs.get(name)) or _SYMBOLS[name] for name in names)
            expression = Node("cuda", self._type, tuple(args), (cuda.strip(), names))
        assert expression is not None
        self._set(function, cuda, given, expression, graph)

    def _set(
        self,
        function: Callable[..., Any],
        cuda: str | None,
        captures: Mapping[str, Any],
        expression: Node,
        graph: Node | None,
    ) -> None:
        """Set all attributes that do not depend on `_options`; called once."""
        read = {n: self._read_capture(n, captures[n]) for n in sorted(captures)}
        specs = {name: spec for name, (_, spec) in read.items()}
        arrays = {name: value for name, (value, spec) in read.items() if spec.rank is not None}
        parts: dict[str, Any] = {
            "function": function,
            "captures": MappingProxyType({name: value for name, (value, _) in read.items()}),
            "cuda": cuda,
            "traced": Traced(expression, specs, self._block()),
            "array_names": tuple(prefixed(self._keyword, name) for name in arrays),
            "arrays": tuple(
                captures[name] if _stays_tensor(captures[name]) else array
                for name, array in arrays.items()
            ),
            "tensors": MappingProxyType(
                {name: captures[name] for name in arrays if is_any_tensor(captures[name])}
            ),
            "numbers": tuple(
                (prefixed(self._keyword, name), number_key(value))
                for name, (value, _) in read.items()
                if name not in arrays
            ),
            "read_alone": None,
            "_graph": graph,
        }
        tensors: Mapping[str, Any] = parts["tensors"]
        parts["memory"] = tuple((name, memory_of(x)) for name, x in tensors.items())
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    def _set_template(self) -> None:
        """Set the attribute `template`, after all others are set."""
        options = tuple(self._options().items())
        captures = captures_of(self.specs)
        function = self.function if self._graph is None else None
        parts = Parts(
            type(self), options, self.cuda, self.expression, self._graph, captures, function
        )
        name = getattr(self.function, "__name__", repr(self.function))
        object.__setattr__(self, "template", Template(parts, name))

    def _read(self, name: str, value: Any) -> tuple[Any, CaptureSpec]:
        if name in RESERVED:
            raise TypeError(f"{name!r} is a reserved name; choose another for the capture")
        array, spec = self._read_capture(name, value)
        # Checked once for each modification, because calls do not look at the values.
        if spec.dtype == "int64":
            require_int32_values(name, array)
        return array, spec

    def _read_capture(self, name: str, value: Any) -> tuple[Any, CaptureSpec]:
        """Return the result of `read_capture`, also for a plain tensor inside of a transform."""
        with outside_transforms(value):
            return read_capture(name, value)

    def _traced(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        specs: Mapping[str, CaptureSpec],
    ) -> Node:
        given = {
            name: specs[name].parameter(name) if name in specs else Symbol(_SYMBOLS[name])
            for name in names
        }
        before = random_states()
        node = self._node(function(**given))
        # A changed state of a random generator reveals that a random number selected a branch.
        if self._node(function(**given)) is not node or random_states() != before:
            raise TypeError(
                f"{type(self).__name__}'s function computes a different result each time it is "
                "traced: it may use random numbers, a counter or a clock. Compute them outside of "
                "the function, and index them as an array: noise[h, i]"
            )
        return self._result(node)

    def _node(self, result: Any) -> Node:
        if isinstance(result, TracedArray):
            raise result.not_indexed()
        try:
            return as_node(result)
        except TypeError as error:
            what = f"{type(self).__name__}'s function returns {result!r}"
            raise TypeError(f"{what}; expected a value computed from its parameters") from error

    @property
    def traced_graph(self) -> Node | None:
        """Expression that `evaluate` computes; None if `evaluate` calls the Python function."""
        return self._graph

    @property
    def graph(self) -> Node:
        """Expression of the Python function, whether or not there is CUDA source as well.

        Raises
        ------
        TypeError
            If there is CUDA source and the Python function cannot be traced.
        """
        if self._graph is None:
            try:
                names = parameters_of(self.function, self._first, self.specs)
                self._traced(self.function, names, self.specs)
            except Exception as error:
                raise TypeError(
                    "the derivative of CUDA source is that of its Python function, which cannot be "
                    f"traced: {error}"
                ) from error
        assert self._graph is not None
        return self._graph

    def _result(self, node: Node) -> Node:
        raise NotImplementedError

    def _block(self) -> tuple[int, int] | None:
        """Return the attribute `block` of `traced`."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable; create a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable; create a new one")

    def __copy__(self) -> Self:
        return self._of_captures({**self.captures, **self.tensors})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Used when a model's configuration is copied, for example.
        captures = {**self.captures, **self.tensors}
        return self._of_captures({n: copy.deepcopy(x, memo) for n, x in captures.items()})

    def kept(self) -> Self:
        """Return an equal object with copies of captured arrays, except tensors with versions."""
        copies = {
            name: self.captures[name].copy()
            for name, spec in self.specs.items()
            if spec.rank is not None and name not in self.tensors
        }
        if not copies:
            return self
        return self._of_captures({**self.captures, **self.tensors, **copies})

    def with_arrays(self, change: Callable[[str, Any], Any]) -> Self:
        """Return an object with each captured array replaced by `change(name, array)`."""
        given = {n: self.captures[n] for n, spec in self.specs.items() if spec.rank is not None}
        made = {name: change(name, array) for name, array in given.items()}
        changed = {name: array for name, array in made.items() if array is not given[name]}
        if not changed:
            return self
        return self._of_captures({**self.captures, **self.tensors, **changed})

    def _of_captures(self, captures: Mapping[str, Any]) -> Self:
        parts = self.function, self.cuda, captures, self.expression, self._graph
        return self._made(self._options(), *parts)

    @classmethod
    def _made(
        cls,
        options: Mapping[str, Any],
        function: Callable[..., Any],
        cuda: str | None,
        captures: Mapping[str, Any],
        expression: Node,
        graph: Node | None,
    ) -> Self:
        """Return an object made of the parts of others, without tracing the function."""
        made = object.__new__(cls)
        made._set_options(options)
        made._set(function, cuda, captures, expression, graph)
        made._set_template()
        return made

    def _options(self) -> dict[str, Any]:
        """Return the attributes of an object other than its function, captures and CUDA source."""
        return {}

    def _set_options(self, options: Mapping[str, Any]) -> None:
        """Set the attributes that `_options` returns, and those that are never copied."""
        for name, option in options.items():
            object.__setattr__(self, name, option)

    def __reduce__(self) -> tuple[Any, ...]:
        module, name = reference_to(self.function)
        if self._graph is None and module is None:
            raise TypeError(
                f"{self!r} cannot be pickled: its function can be neither traced nor imported by "
                "name; define it with def at the top level of a module"
            )
        graph = None if self._graph is None else flattened(self._graph)
        expression = None if self.cuda is None else flattened(self.expression)
        captures = {**self.captures, **self.tensors}
        parts = (module, name), self.cuda, captures, expression, graph
        return _unpickled, (type(self), self._options(), *parts)

    def reread(self) -> Self:
        """Return the object, or one that reads its tensors again if one has other memory now.

        Assigning to `tensor.data`, as `torch.nn.Module.double` does, replaces the memory.
        """
        for name, memory in self.memory:
            if memory_of(self.tensors[name]) != memory:
                return self.with_arrays(lambda name, array: self.tensors.get(name, array))
        return self

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared() and all(
            _hold_the_same(self.captures[name], other.captures[name])
            for name, spec in self.specs.items()
            if spec.rank is not None
        )

    def __hash__(self) -> int:
        hashable, _ = self._compared()
        return hash(hashable)

    def _compared(self) -> tuple[tuple[Any, ...], Any]:
        """Return the hashable parts that are compared, and the function, unless it is traced."""
        function = self.function if self._graph is None else None
        options = tuple(self._options().items())
        parts = self.expression, self._graph, self.numbers, self.array_names
        return (type(self), options, *parts), function

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"{type(self).__name__}({', '.join([name, *self.specs])})"

    def _evaluate(
        self, given: Mapping[str, Any], xp: Any, dtype: Any, result: Any, real: Any = None
    ) -> Any:
        if self._graph is not None:
            score = given.get("score", np.zeros((), dtype))
            positions = {name: value for name, value in given.items() if name != "score"}
            value = Interpreter(score, positions, self.captures, xp, real).value(self._graph)
            return xp.asarray(value).astype(result, copy=False)
        captured = {
            name: host_parameter(name, value, xp, dtype) for name, value in self.captures.items()
        }
        positions = {
            name: value if name == "score" else xp.asarray(value, np.int32)
            for name, value in given.items()
        }
        everything = {**positions, **captured}
        names = parameters_of(self.function, self._first, self.specs)
        # Values of masked pairs, which may be infinite or NaN, are not used.
        with np.errstate(all="ignore"):
            value = self.function(**{name: everything[name] for name in names})
            return xp.asarray(value).astype(result, copy=False)


def _stays_tensor(array: Any) -> bool:
    """Return whether calls read a captured array as the tensor that was given."""
    with outside_transforms(array):
        return is_tracked(array) or is_torch_on_gpu(array)


def _unpickled(
    kind: type[Modification],
    options: Mapping[str, Any],
    reference: tuple[str | None, str],
    cuda: str | None,
    captures: Mapping[str, Any],
    expression: Any,
    graph: Any,
) -> Modification:
    """Return the modification that was pickled."""
    function = resolve_reference(*reference)
    if graph is None and isinstance(function, AbsentFunction):
        raise TypeError(
            f"{'.'.join(filter(None, reference))} is not found, and the pickled modification "
            "does not contain what it computes, because it cannot be traced"
        )
    traced = None if graph is None else restored(graph)
    text = traced if expression is None else restored(expression)
    assert text is not None
    return kind._made(options, function, cuda, captures, text, traced)


def _hold_the_same(x: Any, y: Any) -> bool:
    """Return whether two arrays use the same memory, or hold the same bits on the host."""
    if x is y:
        return True
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        bits = f"u{x.itemsize}"
        return np.array_equal(x.view(bits), y.view(bits))
    return type(x) is type(y) and x.strides == y.strides and address_of(x) == address_of(y)


def _argument(name: str, spec: CaptureSpec | None) -> Node | None:
    """Return the node that CUDA source receives for a capture; None if `spec` is None."""
    if spec is None:
        return None
    if spec.rank is not None:
        return array_node(name)
    return Node("scalar", spec.type, (), name)
