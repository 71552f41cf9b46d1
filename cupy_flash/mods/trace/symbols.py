"""Arguments of a traced function: symbols, whose operations make nodes, and arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from cupy_flash.arrays.cuda_interface import is_foreign_array
from cupy_flash.mods.ir.expression import ARRAY, BOOL, INT, REAL, UINT64, Node, constant
from cupy_flash.mods.ir.operations import cast
from cupy_flash.mods.trace.advice import instead_of
from cupy_flash.mods.trace.numpy_functions import FUNCTIONS

_INT_MAX = np.iinfo(np.int32).max
_SHIFTS = ("left_shift", "right_shift")
# NumPy does not report which of these cases it was, so the message names all of them.
_NO_ELEMENT = (
    "a traced value cannot be an element or an index of an array that is stored in another "
    "object or computed inside of the function. Instead of np.max([x, y]) write "
    "np.maximum(x, y), of np.min([x, y]) np.minimum(x, y), of np.sum([x, y]) x + y, of "
    "np.any([p, q]) p | q, of np.all([p, q]) p & q, and of np.float32(x) "
    "x.astype(np.float32). Assign an array to a variable outside of the function, or pass it "
    "to the modification by name (table=table), and index it: table[h, i - j]"
)
_TYPES = {"b": BOOL, "i": INT, "f": REAL}


class Symbol:
    """Value of a traced function. Operators and NumPy's functions on it return further symbols."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __getattr__(self, name: str) -> NoReturn:
        if name == "__jax_array__":
            raise TypeError(
                "a JAX function or array with a traced value; write NumPy's functions, such as "
                "np.where for jnp.where, which kernels compute, too"
            )
        instead = f"np.{name}(x)" if name in FUNCTIONS or name == "abs" else instead_of(name)
        raise AttributeError(
            f"a traced value has no {name!r}: it is a single number, that of a pair (i, j); write "
            f"{instead or 'it with operators and the functions of NumPy'}"
        )

    # Symbols are not hashable, because == returns a symbol.
    def __hash__(self) -> NoReturn:
        raise TypeError(
            "a traced value cannot be looked up in a set or a dictionary; compare it, as in "
            "(x == 1) | (x == 2), or pass a table to the modification as an array"
        )

    def __repr__(self) -> str:
        return f"Symbol({self.node!r})"

    def astype(self, dtype: Any) -> Symbol:
        """Return the value converted to bool, int32, uint64 or a real.

        All signed integer dtypes become int32, and all real dtypes become the kernel's real type.
        """
        kind = np.dtype(dtype)
        type = UINT64 if kind == np.uint64 else _TYPES.get(kind.kind)
        if type is None or (kind.itemsize < 4 and type != BOOL):
            raise TypeError(
                f"astype({kind}) in a traced function; expected bool, int32, uint64 or float32"
            )
        return Symbol(cast(self.node, type))

    def clip(self, min: Any = None, max: Any = None) -> Symbol:
        """Return ``np.clip(self, min, max)``."""
        return apply("clip", self, min, max)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Symbol:
        if method != "__call__" or options:
            asked = "".join(f", {name}=" for name in options)
            what = ufunc.__name__ + ("" if method == "__call__" else f".{method}")
            raise TypeError(
                f"np.{what}(...{asked}) cannot be traced: a traced function computes one pair (i, "
                "j) at a time; combine values with operators, as in x + y, and convert them with "
                "x.astype(dtype)"
            )
        return apply(ufunc.__name__, *inputs)

    def __array_function__(
        self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Symbol:
        if function is np.clip:
            return apply("clip", *_clip_arguments(*args, **options))
        if function is np.where and len(args) == 3 and not options:
            return apply("where", *args)
        _cannot_trace(function.__name__)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", repr(function))
        if name == "__getitem__":
            raise TypeError(_NO_ELEMENT)
        raise TypeError(
            f"torch's {name} of a traced value; write NumPy's functions, such as np.where for "
            "torch.where, which kernels compute, too"
        )

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError(_NO_ELEMENT)

    def __getitem__(self, index: Any) -> Symbol:
        # Scalars of NumPy allow this, too. On the host, a capture without axes is such a scalar.
        if isinstance(index, tuple) and not index:
            return self
        raise TypeError(f"[{index!r}] of a traced value, which is a single number; index an array")


class TracedArray:
    """A captured array in a traced function: ``table[h, i - j]`` is the element as a symbol.

    It has `rank` axes, at least one. `type` is the node type of the elements.
    """

    __slots__ = ("_name", "_rank", "_type")

    def __init__(self, name: str, rank: int, type: str) -> None:
        self._name, self._rank, self._type = name, rank, type

    def __getitem__(self, index: Any) -> Symbol:
        indices = index if isinstance(index, tuple) else (index,)
        require_indices(self._name, self._rank, indices)
        nodes = [as_node(index) for index in indices]
        for node in nodes:
            if node.type != INT:
                raise TypeError(
                    f"{self._name} is indexed with a value of type {node.type}; write "
                    "x.astype(np.int32)"
                )
            if node.is_constant:
                _require_not_negative(self._name, node.value)
        array = Node("array", ARRAY, (), self._name)
        return Symbol(Node("load", self._type, (array, *nodes)))

    def not_indexed(self) -> TypeError:
        """Return the error for an array that is used where an element is expected."""
        some = ", ".join("bhij"[: self._rank])
        return TypeError(
            f"{self._name} is an array with {self._rank} axes, of which a traced function reads "
            f"one element at a time; index it, as in {self._name}[{some}]"
        )

    def __getattr__(self, name: str) -> NoReturn:
        whole = f"{self._name}.{name}"
        if name in ("shape", "size"):
            # One kernel serves arrays of all shapes.
            example = f"{whole}[0]" if name == "shape" else whole
            raise TypeError(
                f"{whole} is not known when a function is traced; pass the size to the "
                f"modification as a number, such as size={example}"
            )
        raise AttributeError(
            f"{whole} cannot be traced: {self.not_indexed()}, and pass results from the whole "
            "array to the modification as another capture"
        )

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise self.not_indexed()

    __array_ufunc__ = __array_function__ = __array__ = _refuse
    __len__ = __iter__ = __bool__ = __float__ = __int__ = __index__ = _refuse
    __contains__ = __round__ = __divmod__ = __rdivmod__ = __matmul__ = __rmatmul__ = _refuse


def require_indices(name: str, rank: int, indices: tuple[Any, ...]) -> None:
    """Raise TypeError or ValueError unless indices select one element of a capture."""
    others = [i for i in indices if i is None or i is Ellipsis or isinstance(i, (slice, bool))]
    if others or len(indices) != rank:
        what = f"{others[0]!r} among its indices" if others else f"{len(indices)} indices"
        raise TypeError(
            f"{name} has {rank} axes and is given {what}; expected {rank} integers, which select "
            "one element"
        )
    for index in indices:
        # A Python int is a literal; an index computed from positions is of a NumPy type.
        if isinstance(index, int):
            _require_not_negative(name, index)


def _require_not_negative(name: str, index: int) -> None:
    if index < 0:
        raise ValueError(
            f"{name} is indexed with {index}; expected 0 or more: indices count from the first "
            "element, and one outside of the array reads the nearest element. To count from the "
            f"end, write the length minus {-index}"
        )


# Python's operators, each with the function of NumPy that it calls.
_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
}
_COMPARED = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
_UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}
# Operations that need the value of a number, which a traced value does not have: the error of each.
_REFUSED = {
    "bool": "a traced value is neither true nor false yet. Instead of `if` write "
    "np.where(condition, x, y); of `and`, `or`, `not` and `a < b < c` write p & q, p | q, ~p and "
    "(a < b) & (b < c); of min() and max() np.minimum and np.maximum",
    "int": "int() of a traced value; write x.astype(np.int32), or np.floor(x)",
    "floor": "math.floor() of a traced value; write np.floor(x).astype(np.int32)",
    "ceil": "math.ceil() of a traced value; write np.ceil(x).astype(np.int32)",
    "trunc": "math.trunc() of a traced value; write x.astype(np.int32)",
    "round": "round() of a traced value; write np.rint(x), or np.floor(x + 0.5)",
    "divmod": "divmod() of a traced value; write x // y and x % y",
    "rdivmod": "divmod() of a traced value; write x // y and x % y",
    "float": "a traced value is not a number yet: write x.astype(np.float32) for float(x), and "
    "NumPy's functions for those of math: np.tanh(x) for math.tanh(x), x**n for math.pow(x, n), "
    "and np.abs(x) for math.fabs(x)",
    "complex": "a traced value is not complex; write np.tanh(x) for cmath.tanh(x)",
    "index": "a traced value can neither index a list nor limit a loop; index an array: write "
    "table = np.array(...) outside of the function, and table[h, i - j] inside",
    "len": "len() of a traced value, which is a single number. It cannot index a tensor that is "
    "stored in another object or computed inside of the function: assign the tensor to a variable "
    "outside of the function",
    "iter": "a traced value is one number, which cannot be iterated over or unpacked",
    "contains": "`in` a traced value, which is a single number; compare it: x == value",
}


def _add_methods() -> None:
    """Add the methods of Python's operators to `Symbol`, and refuse them in `TracedArray`."""

    def applying(function: str, swapped: bool) -> Callable[..., Symbol]:
        def call(self: Symbol, *other: Any) -> Symbol:
            return apply(function, *other, self) if swapped else apply(function, self, *other)

        return call

    def refusing(message: str) -> Callable[..., NoReturn]:
        def call(self: Symbol, *args: Any) -> NoReturn:
            raise TypeError(message)

        return call

    for name, function in (_BINARY | _COMPARED | _UNARY).items():
        setattr(Symbol, f"__{name}__", applying(function, False))
        setattr(TracedArray, f"__{name}__", TracedArray._refuse)
    for name, function in _BINARY.items():
        setattr(Symbol, f"__r{name}__", applying(function, True))
        setattr(TracedArray, f"__r{name}__", TracedArray._refuse)
    for name, message in _REFUSED.items():
        setattr(Symbol, f"__{name}__", refusing(message))


_add_methods()


def _clip_arguments(
    x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> tuple[Any, Any, Any]:
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    if low is None and high is None:
        raise TypeError("np.clip is called without bounds; pass a_min, a_max or both")
    return x, low, high


def _cannot_trace(name: str) -> NoReturn:
    instead = instead_of(name)
    if instead is None:
        known = ", ".join(sorted(FUNCTIONS))
        instead = f"it with operators and these functions of NumPy: {known}"
    raise TypeError(
        f"np.{name} cannot be traced: a traced function computes one pair (i, j) at a time. Write "
        f"{instead}"
    )


def apply(name: str, *values: Any) -> Symbol:
    """Return the result of one of NumPy's functions on symbols and numbers.

    Raises
    ------
    TypeError
        For a function that is not known, and for values that are not numbers.
    """
    function = FUNCTIONS.get(name)
    if function is None:
        _cannot_trace(name)
    nodes = [None if value is None and name == "clip" else as_node(value) for value in values]
    _require_operands(name, [node for node in nodes if node is not None])
    return Symbol(function(*nodes))


def _require_operands(name: str, nodes: list[Node]) -> None:
    """Raise TypeError, with advice, for a traced exponent or a uint64 literal next to an int32."""
    base, exponent = nodes[0], nodes[-1]
    is_power = name in ("power", "float_power") and base.is_constant and not exponent.is_constant
    if is_power and base.value > 0:
        instead = f"np.exp2(x * np.log2({base.value!r}))"
        if base.value == 2:
            instead = "np.exp2(x), or 1 << x for an integer"
        raise TypeError(f"{base.value!r} ** x with a traced exponent; write {instead}")
    values = nodes[1:] if name == "where" else nodes
    ints = [node for node in values if node.type == INT]
    # Each operand of a logical function is converted to bool by itself.
    is_apart = name in _SHIFTS or name.startswith("logical_")
    if is_apart or all(node.is_constant and node.value >= 0 for node in ints):
        return
    for node in values:
        if node.is_constant and node.type == UINT64:
            fits, number = node.value <= _INT_MAX, node.value
            what = f"np.uint64({number})" if fits else f"{number}, which does not fit int32,"
            instead = f"{number}" if fits else f"{number}.0 to compute with reals"
            raise TypeError(
                f"{what} with an int32; write {instead}, or x.astype(np.uint64) for the other value"
            )


def as_node(value: Any) -> Node:
    """Return the node of a symbol, or of a number as a literal.

    Raises
    ------
    TypeError
        For any other value.
    """
    if isinstance(value, Symbol):
        return value.node
    if getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic):
        # An array without axes, such as the maximum of an array in most libraries.
        value = value[()] if isinstance(value, np.ndarray) else value.item()
    if isinstance(value, (bool, np.bool_)):
        return constant(bool(value), BOOL)
    if isinstance(value, (int, np.integer)):
        number = operator.index(value)
        is_unsigned = isinstance(value, np.uint64) or number > _INT_MAX
        try:
            return constant(number, UINT64 if is_unsigned else INT)
        except OverflowError as error:
            raise TypeError(f"{error}, the type used here; write {number}.0 for a real") from None
    if isinstance(value, (float, np.floating)):
        return constant(float(value), REAL)
    if isinstance(value, TracedArray):
        raise value.not_indexed()
    if hasattr(value, "__array__") or is_foreign_array(value):
        raise TypeError(
            "a traced function uses a whole array, but reads one element at a time. Compute the "
            "array outside of the function, assign it to a variable or pass it to the "
            "modification by name (table=table), and index it: table[h, i - j]"
        )
    raise TypeError(
        f"a traced function uses {value!r}; expected numbers, and np.where instead of None"
    )
