"""Blocks of the score matrix that a mask leaves empty or full, found without computing pairs.

This is the counterpart of `codegen.bounds` for arrays in host memory: interval arithmetic
over all blocks at once. A value that depends on the query or on the key alone is computed for each
of them, and its bounds in a block are exact.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.strided import convert_to, dtype_name
from cupy_flash.mods.ir.expression import BOOL, INT, REAL, B, H, Node, postorder
from cupy_flash.mods.ir.operations import INT_RANGE
from cupy_flash.mods.modification import MaskMod
from cupy_flash.mods.on_arrays.interpret import Interpreter

Array = NDArray[Any]

# Largest number of elements of a captured array for which set elements are counted in all blocks.
# The counts take 4 bytes per element.
_MOST_COUNTED = 1 << 22
# The same limit per pair of the call, because counting must be faster than computing the pairs.
_MOST_COUNTED_OF_PAIR = 4

# Largest number of blocks over all sequences and heads. Each takes about 50 bytes.
_MOST_BLOCKS = 1 << 21

_PAIR = {"i", "j"}


class BlockVisibility(NamedTuple):
    """Visibility of blocks: arrays (batch or 1, heads or 1, row blocks, key blocks).

    Attributes
    ----------
    any_visible
        Whether a pair of a block may be visible.
    all_visible
        Whether all pairs of a block are visible.
    """

    any_visible: Array
    all_visible: Array


class _Bounds(NamedTuple):
    """Least and largest value in each block; NaN for a real that may be NaN."""

    low: Any
    high: Any


# Bounds of a bool whose value is not known.
_ANY_BOOL = _Bounds(np.False_, np.True_)


def block_visibility_of(
    mod: MaskMod,
    positions: dict[str, Any],
    rows_per_block: int,
    keys_per_block: int,
    dtype: Any,
) -> BlockVisibility | None:
    """Return which blocks a mask leaves visible; None if its function cannot be analyzed.

    Parameters
    ----------
    mod
        The mask.
    positions
        int32 arrays that broadcast to (batch, heads, rows, keys): b, h, i and j; and the numbers
        q_start and k_start.
    rows_per_block, keys_per_block
        Rows and keys of a block. The last blocks may be smaller.
    dtype
        Dtype of reals.
    """
    root = mod.traced_graph
    if root is None or root.type != BOOL:
        return None
    i, j = positions["i"], positions["j"]
    shape = (-(-i.shape[2] // rows_per_block), -(-j.shape[3] // keys_per_block))
    nodes = list(postorder(root))
    count = math.prod(shape) * math.prod(positions[x.value].size for x in (B, H) if x in nodes)
    if count > _MOST_BLOCKS or any(node.op == "cuda" for node in nodes):
        return None
    result = _Blocks(mod, positions, (rows_per_block, keys_per_block), dtype).of(root)
    if result is None:
        return None
    low, high = (
        np.broadcast_to(x, np.broadcast_shapes(np.shape(x), (1, 1, *shape))) for x in result
    )
    return BlockVisibility(any_visible=high, all_visible=low)


class _Blocks:
    """Bounds of the values of one expression in all blocks."""

    def __init__(
        self, mod: MaskMod, positions: dict[str, Any], block: tuple[int, int], dtype: Any
    ) -> None:
        self._mod, self._block = mod, block
        self._pairs = math.prod(np.broadcast_shapes(*(np.shape(positions[x]) for x in "bhij")))
        self._values = Interpreter(np.zeros((), dtype), positions, mod.captures, np)

    def of(self, root: Node) -> _Bounds | None:
        """Return the bounds of a value; None if they are not known."""
        depends: dict[Node, frozenset[str]] = {}
        for node in postorder(root):
            own = {node.value} & _PAIR if node.op == "symbol" else set()
            depends[node] = frozenset(own).union(*(depends[x] for x in node.args))
        needed = {root}
        for node in reversed(list(depends)):
            if node in needed and depends[node] == _PAIR:
                needed.update(x for x in node.args if x.type != "array")
        result: dict[Node, _Bounds | None] = {}
        for node in depends:
            if node not in needed:
                continue
            if depends[node] != _PAIR:
                result[node] = self._exact(node)
            elif node.op == "load":
                result[node] = self._of_load(node, [result[x] for x in node.args[1:]])
            else:
                result[node] = _of_operation(node, [result[x] for x in node.args])
        return result[root]

    def _exact(self, node: Node) -> _Bounds:
        """Return the bounds of a value that depends on the query, on the key, or on neither."""
        value = np.asarray(self._values.value(node, decides=True))
        if node.type == INT:
            # Sums and products of bounds must not wrap.
            value = value.astype(np.int64)
        low = high = value.reshape((1,) * (4 - value.ndim) + value.shape)
        for axis, size in zip((2, 3), self._block, strict=True):
            if value.ndim and low.shape[axis] > 1:
                starts = np.arange(0, low.shape[axis], size)
                low = np.minimum.reduceat(low, starts, axis=axis)
                high = np.maximum.reduceat(high, starts, axis=axis)
        return _Bounds(low, high)

    def _of_load(self, node: Node, indices: list[_Bounds | None]) -> _Bounds | None:
        """Return bounds of an element of a bool array: all and any over the box of its indices."""
        array = convert_to(np, self._mod.captures[node.args[0].value])
        if dtype_name(array) != BOOL or None in indices:
            return _ANY_BOOL if node.type == BOOL else None
        # Indices outside of the array read the nearest element.
        box = [
            [np.clip(end, 0, n - 1) for end in place]
            for place, n in zip(indices, array.shape, strict=True)
            if place is not None
        ]
        if len(box) == 1:
            array, box = array[None], [[np.int64(0), np.int64(0)], *box]
        *lead, (top, bottom), (left, right) = box
        if any((low != high).any() for low, high in lead):
            return _ANY_BOOL
        # If all blocks have the same index along an axis, only the part of the array at that index
        # is counted. An example is the axis of sequences in a call with one sequence.
        constant = [(low == low.flat[0]).all() for low, _ in lead]
        array = array[
            tuple(
                int(low.flat[0]) if is_constant else slice(None)
                for (low, _), is_constant in zip(lead, constant, strict=True)
            )
        ]
        if array.size > min(_MOST_COUNTED, _MOST_COUNTED_OF_PAIR * self._pairs):
            return _ANY_BOOL
        counts = np.zeros((*array.shape[:-2], *(n + 1 for n in array.shape[-2:])), np.int32)
        np.cumsum(array, axis=-2, out=counts[..., 1:, 1:], dtype=np.int32)
        np.cumsum(counts[..., 1:, 1:], axis=-1, out=counts[..., 1:, 1:])
        leading_index = tuple(
            low for (low, _), is_constant in zip(lead, constant, strict=True) if not is_constant
        )
        count = (
            counts[(*leading_index, bottom + 1, right + 1)]
            - counts[(*leading_index, top, right + 1)]
        )
        count = (
            count - counts[(*leading_index, bottom + 1, left)] + counts[(*leading_index, top, left)]
        )
        return _Bounds(count == (bottom - top + 1) * (right - left + 1), count > 0)


def _of_operation(node: Node, args: list[_Bounds | None]) -> _Bounds | None:
    """Return the bounds of an operation's result from those of its arguments."""
    kinds = [x.type for x in node.args]
    if node.type == BOOL:
        known = [
            _ANY_BOOL if x is None and kind == BOOL else x
            for x, kind in zip(args, kinds, strict=True)
        ]
        if any(x is None for x in known):
            return _ANY_BOOL
        return _of_bool(node.op, [x for x in known if x is not None])
    if any(x is None for x in args) or node.type not in (INT, REAL):
        return None
    result = _of_number(node, [x for x in args if x is not None])
    if result is None or node.type == REAL:
        return result
    # An integer that may wrap can have any value.
    low, high = INT_RANGE
    fits = (result.low >= low) & (result.high <= high)
    return _Bounds(np.where(fits, result.low, int(low)), np.where(fits, result.high, int(high)))


def _of_bool(op: str, args: list[_Bounds]) -> _Bounds:
    x, y = args[0], args[-1]
    if op == "where":
        return _of_where(*args)
    # Comparisons with NaN are False, so that bounds with NaN make nothing certain.
    certain = {
        "lt": lambda: (x.high < y.low, x.low >= y.high),
        "le": lambda: (x.high <= y.low, x.low > y.high),
        "eq": lambda: (_is_one_value(x, y), _are_disjoint(x, y)),
        "ne": lambda: (_are_disjoint(x, y), _is_one_value(x, y)),
        "and": lambda: (x.low & y.low, ~(x.high & y.high)),
        "or": lambda: (x.low | y.low, ~(x.high | y.high)),
        "not": lambda: (~x.high, x.low),
    }
    if op not in certain:
        return _ANY_BOOL
    true, false = certain[op]()
    return _Bounds(true, ~false)


def _is_one_value(x: _Bounds, y: _Bounds) -> Any:
    return (x.low == x.high) & (y.low == y.high) & (x.low == y.low)


def _are_disjoint(x: _Bounds, y: _Bounds) -> Any:
    return (x.high < y.low) | (y.high < x.low)


def _of_where(condition: _Bounds, x: _Bounds, y: _Bounds) -> _Bounds:
    low = np.where(condition.high, np.minimum(x.low, y.low), y.low)
    high = np.where(condition.high, np.maximum(x.high, y.high), y.high)
    return _Bounds(np.where(condition.low, x.low, low), np.where(condition.low, x.high, high))


def _negated(x: _Bounds) -> _Bounds:
    return _Bounds(-x.high, -x.low)


def _of_sum(x: _Bounds, y: _Bounds) -> _Bounds:
    """Return the bounds of a sum: NaN where a pair may add infinities of both signs."""
    low, high = x.low + y.low, x.high + y.high
    if low.dtype.kind != "f":
        return _Bounds(low, high)
    may_be_nan = np.isnan(low) | np.isnan(high)
    may_be_nan |= (x.high == np.inf) & (y.low == -np.inf)
    may_be_nan |= (x.low == -np.inf) & (y.high == np.inf)
    nan = low.dtype.type(np.nan)
    return _Bounds(np.where(may_be_nan, nan, low), np.where(may_be_nan, nan, high))


def _of_number(node: Node, args: list[_Bounds]) -> _Bounds | None:
    op, x, y = node.op, args[0], args[-1]
    if op == "where":
        return _of_where(*args)
    if op in ("add", "sub"):
        return _of_sum(x, y if op == "add" else _negated(y))
    if op == "neg":
        return _negated(x)
    if op == "min":
        return _Bounds(np.minimum(x.low, y.low), np.minimum(x.high, y.high))
    if op == "max":
        return _Bounds(np.maximum(x.low, y.low), np.maximum(x.high, y.high))
    if op == "abs":
        least = np.maximum(np.maximum(x.low, -x.high), x.low.dtype.type(0))
        return _Bounds(least, np.maximum(-x.low, x.high))
    if node.type != INT or node.args[-1].type != INT:
        return None
    if op == "mul":
        ends = [a * b for a in x for b in y]
        return _Bounds(np.minimum.reduce(ends), np.maximum.reduce(ends))
    divisor = node.args[-1]
    if op == "floordiv" and divisor.is_constant and divisor.value > 0:
        return _Bounds(x.low // divisor.value, x.high // divisor.value)
    return None
