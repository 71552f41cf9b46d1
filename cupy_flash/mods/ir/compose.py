"""Modifications of a call, composed into one expression of the score and one of the mask.

Kernels compute these expressions. `on_arrays.scores.Scores.apply` does the same on arrays.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.mods.captures import CaptureSpec, array_node, prefixed
from cupy_flash.mods.ir.expression import (
    BOOL,
    Q_START,
    REAL,
    ROW,
    SCORE,
    B,
    H,
    I,
    J,
    Node,
    postorder,
)
from cupy_flash.mods.ir.operations import operation, substitute
from cupy_flash.mods.trace.symbols import Symbol, as_node
from cupy_flash.mods.trace.traced import Traced


def compose(
    specs: Mapping[str, CaptureSpec],
    *,
    score_mod: Traced | None,
    mask_mod: Traced | None,
    masks_later_keys: bool,
) -> tuple[Node | None, Node | None]:
    """Return the expressions of the new score and of the mask, each of them None if there is none.

    Parameters
    ----------
    specs
        Specs of the captures that the call has among softcap, alibi_slopes, bias, mask, tree_mask,
        cache_leftpad, seqused_q, prefix_lens and window_left.
    score_mod, mask_mod
        The user's functions, traced.
    masks_later_keys
        Whether keys after a query's position are masked, so that distances have one sign.
    """
    # Typed as Any, because `Symbol` gets its operators at run time.
    x: Any = Symbol(SCORE)
    position: Any = Symbol(I)
    row: Any = Symbol(ROW)
    b, h, j, q_start = (Symbol(node) for node in (B, H, J, Q_START))
    if "softcap" in specs:
        cap: Any = specs["softcap"].parameter("softcap")
        x = cap * np.tanh(x / cap)
    if score_mod is not None:
        given = as_node(x)
        # The user's order of operations is kept; see `cupy_flash.mods.ir.lower`.
        inner = given if given is SCORE else operation("free", given)
        x = Symbol(substitute(prefixed_text(score_mod, "score_mod")[0], {SCORE: inner}))
    if "alibi_slopes" in specs:
        # Without abs() the distance is linear in j. Pairs whose distance then has the wrong sign
        # are masked.
        distance = position - j if masks_later_keys else np.abs(position - j)
        x = x - _slope("alibi_slopes", specs["alibi_slopes"]) * distance
    pairs: dict[int | None, Any] = {3: (h, q_start + row, j), 4: (b, h, row, j)}
    if "bias" in specs:
        bias: Any = specs["bias"].parameter("bias")
        x = x + bias[pairs[specs["bias"].rank]]
    conditions: list[Any] = []
    if "mask" in specs:
        mask: Any = specs["mask"].parameter("mask")
        conditions.append(mask[pairs[specs["mask"].rank]])
    if "tree_mask" in specs:
        bits: Any = specs["tree_mask"].parameter("tree_mask")
        place = row - position + j
        bit = np.clip(place, 0, 63).astype(np.uint64)
        in_tree = ((bits[b, row] >> bit) & np.uint64(1)).astype(np.bool_)
        conditions.append((place < 0) | ((place < 64) & in_tree))
    if "cache_leftpad" in specs:
        padding: Any = specs["cache_leftpad"].parameter("cache_leftpad")
        conditions.append(j >= padding[b])
    if "seqused_q" in specs:
        used: Any = specs["seqused_q"].parameter("seqused_q")
        conditions.append(row < used[b])
    if "prefix_lens" in specs and "window_left" in specs:
        # A prefix and the window's left bound leave two ranges of keys, but kernels limit a row to
        # one range by position. So the left bound becomes part of the mask.
        prefixes: Any = specs["prefix_lens"].parameter("prefix_lens")
        left: Any = specs["window_left"].parameter("window_left")
        conditions.append((j < prefixes[b]) | (j >= position - left))
    if mask_mod is not None:
        conditions.append(Symbol(prefixed_text(mask_mod, "mask_mod")[0]))
    visible: Any = functools.reduce(operator.and_, conditions) if conditions else None
    node = as_node(x)
    assert node.type == REAL
    assert visible is None or visible.node.type == BOOL
    return (None if node is SCORE else node), (None if visible is None else visible.node)


def with_alibi(score: Node, name: str, slopes: CaptureSpec) -> Node:
    """Return a score minus the distance of query and key times the slope in a captured array."""
    position: Any = Symbol(I)
    return as_node(Symbol(score) - _slope(name, slopes) * np.abs(position - Symbol(J)))


def _slope(name: str, spec: CaptureSpec) -> Any:
    """Return the slope of a pair: one for all, one for each head, or for each sequence and head."""
    slopes: Any = spec.parameter(name)
    indices = Symbol(B), Symbol(H)
    return slopes[indices[-spec.rank :]] if spec.rank else slopes


def varies(mod: Traced) -> tuple[bool, bool]:
    """Return whether a traced function depends on the batch index, and on the query head."""
    nodes = set(postorder(mod.expression))
    return B in nodes, H in nodes


def prefixed_text(mod: Traced, kind: str) -> tuple[Node, dict[str, CaptureSpec]]:
    """Return the expression and the specs, with captures renamed by `prefixed`.

    The new names are valid in C++, whatever the parameters of the Python function are called.
    """
    replacements, specs = {}, {}
    for name, spec in mod.specs.items():
        other = prefixed(kind, name)
        specs[other] = spec
        if spec.rank is None:
            replacements[Node("scalar", spec.type, (), name)] = Node("scalar", spec.type, (), other)
        else:
            replacements[array_node(name)] = array_node(other)
    return substitute(mod.expression, replacements), specs
