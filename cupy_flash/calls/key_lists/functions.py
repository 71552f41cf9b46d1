"""User functions of a call whose queries attend to listed keys.

The kernel knows a key by its place in the list. The function must see its index in the sequence,
so the function's symbols become elements of captured arrays:

    score - slope * (i - j)    ->    score - slope * (of_queries[b, 1] - keys[b, j])
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.calls.check.whole_call import WholeCall
from cupy_flash.calls.key_lists.queries import Queries
from cupy_flash.errors import UnsupportedError
from cupy_flash.mods.base import Modification
from cupy_flash.mods.captures import CaptureSpec, unused_name
from cupy_flash.mods.ir.expression import ARRAY, K_START, Q_START, B, H, I, J, postorder
from cupy_flash.mods.ir.operations import substitute
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.trace.symbols import Symbol, as_node

# Names of functions that are arguments of calls.
FUNCTIONS = ("score_mod", "mask_mod")
_INTEGERS = CaptureSpec("int32", 2)


def function_of_lists(
    name: str, function: Any, whole: WholeCall, queries: Queries, keys: Any, heads: slice
) -> Modification:
    """Return a user function for the inner call of these heads, whose table lists `keys`.

    Raises
    ------
    UnsupportedError
        If the function has CUDA source, and its Python function cannot be traced.
    """
    read: Modification = function.reread()
    if read.traced_graph is None:
        raise UnsupportedError(
            f"{name} has CUDA source, and its Python function cannot be traced; with key_indices "
            "expected a function that can be traced"
        )
    names: list[str] = []
    for wanted in ("of_queries", "keys"):
        names.append(unused_name(wanted, (*read.specs, *names)))
    rows: Any = _INTEGERS.parameter(names[0])
    listed: Any = _INTEGERS.parameter(names[1])
    sequence = Symbol(B)
    columns = {B: 0, I: 1, Q_START: 2, K_START: 3}
    new = {symbol: rows[sequence, column] for symbol, column in columns.items()}
    new |= {J: listed[sequence, Symbol(J)], H: rows[sequence, 4] + Symbol(H)}
    captures = {names[0]: _of_queries(whole, queries, heads), names[1]: keys}
    texts = read.expression, read.traced_graph
    used = {node for text in texts for node in postorder(text)}
    replacements = {symbol: as_node(x) for symbol, x in new.items() if symbol in used}
    expression, graph = (substitute(text, replacements) for text in texts)
    # Captures of a function must occur in it.
    found = {node.value for node in postorder(expression) if node.type == ARRAY}
    given = {**read.captures, **{name: x for name, x in captures.items() if name in found}}
    if name == "mask_mod":
        return MaskMod.of_graph(expression, graph, given)
    return ScoreMod.of_graph(expression, graph, given, ())


def _of_queries(whole: WholeCall, queries: Queries, heads: slice) -> Any:
    """Return what a function may know of each query row, int32 (R, 5)."""
    arguments, layout = whole.arguments, whole.problem.layout
    xp = array_module(arguments.q)
    zeros = xp.zeros_like(queries.sequence)
    starts = [zeros, zeros]
    if layout.packed_q:
        starts[0] = arguments.cu_seqlens_q.clip(0, layout.total_q)[queries.sequence]
        if not layout.page_size:
            starts[1] = arguments.cu_seqlens_k.clip(0, layout.total_k)[queries.sequence]
    first = xp.full_like(queries.sequence, heads.start)
    if queries.kv_head is not None:
        first = first + queries.kv_head * (heads.stop - heads.start)
    columns = queries.sequence, queries.position, *starts, first
    return xp.stack([x.astype(np.int32) for x in columns], axis=1)
