"""Modifications of a call whose queries attend to listed keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.strided import array_module
from cupy_flash.calls.arguments import CACHES
from cupy_flash.calls.check.modifications import ModificationKey
from cupy_flash.calls.check.whole_call import WholeCall
from cupy_flash.calls.key_lists.functions import FUNCTIONS, function_of_lists
from cupy_flash.calls.key_lists.queries import Queries
from cupy_flash.calls.key_lists.stored import require_rows
from cupy_flash.errors import UnsupportedError
from cupy_flash.mods.keywords import Window

# Arrays of modifications that calls with lists support, and those that have an element per pair.
_SUPPORTED = {"alibi_slopes", "sinks", "bias", "mask", "prefix_lens", "seqlens_k", "q_offset"}
_OF_PAIRS = ("bias", "mask")
# Arrays of modifications that do not depend on the positions of keys.
_WITHOUT_POSITIONS = {"sinks"}
# Arrays of modifications that depend on the keys of a list.
_OF_KEYS = (*_OF_PAIRS, "alibi_slopes")


def require_supported(whole: WholeCall) -> None:
    """Raise an error for calls and modifications that lists do not support.

    Raises
    ------
    UnsupportedError
        For float8 queries, and modifications that are not in `_SUPPORTED`.
    ValueError
        For several batch axes, none, and caches whose rows cannot be numbered without a copy.
    """
    key = whole.options.mod_key
    if whole.options.kind not in ("dense", "varlen", "kvcache"):
        raise UnsupportedError("key_indices are not supported by calls with float8 queries")
    if whole.arguments.q.ndim != (3 if whole.problem.layout.packed_q else 4):
        raise ValueError(f"q has {whole.arguments.q.ndim} axes; with key_indices expected 4")
    if whole.options.kind == "kvcache":
        for name in CACHES:
            require_rows(name, getattr(whole.arguments, name))
    if key is None:
        return
    names = [*_other_arrays(key, _SUPPORTED)]
    if key.dropout_threshold is not None:
        names.append("dropout_p")
    if names:
        supported = sorted((*_SUPPORTED, *FUNCTIONS))
        raise UnsupportedError(
            f"{names[0]} is not supported together with key_indices; expected only masks by "
            f"position, softcap and {', '.join(supported)}"
        )


def _other_arrays(key: ModificationKey, known: Collection[str]) -> list[str]:
    """Return the names of the arrays of modifications other than captures that are not known."""
    # Captured arrays have the names of their functions in front.
    return sorted(x for x in {*key.names} - {*known} if not x.startswith(FUNCTIONS))


def require_pages(whole: WholeCall) -> None:
    """Raise an error for calls whose lists cannot hold rows of pages.

    Raises
    ------
    ValueError
        Without a block table.
    UnsupportedError
        For masks and changes of scores that depend on the position of a key.
    """
    if not whole.problem.layout.page_size:
        raise ValueError(
            "key_indices_in is 'pages' without a block_table; expected 'sequence', or a block_table"
        )
    key = whole.options.mod_key
    names = ["causal"] if whole.options.causal else []
    if key is not None:
        names += ["window_size"] if key.window != Window() else []
        names += [name for name in FUNCTIONS if getattr(key, name) is not None]
        names += _other_arrays(key, _WITHOUT_POSITIONS)
    if names:
        raise UnsupportedError(
            f"{names[0]} is not supported together with key_indices_in='pages': a row of a page "
            "has no known position in the sequence; list only the rows that the mask leaves, or "
            "pass indices in the sequence"
        )


def depend_on_keys(whole: WholeCall) -> bool:
    """Return whether modifications depend on which keys a list holds."""
    key, arguments = whole.options.mod_key, whole.arguments
    has_functions = key is not None and any(getattr(key, x) is not None for x in FUNCTIONS)
    return has_functions or any(getattr(arguments, x, None) is not None for x in _OF_KEYS)


@ignore_fp_errors
def modifications_of(
    whole: WholeCall, queries: Queries, keys: Any, heads: slice, modifications: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the modifications of the inner call of these heads; `keys` are those of its table."""
    arguments, xp = whole.arguments, array_module(whole.arguments.q)
    result: dict[str, Any] = {
        name: function_of_lists(name, function, whole, queries, keys, heads)
        for name in FUNCTIONS
        if (function := modifications.get(name)) is not None and len(keys)
    }
    if modifications.get("softcap") is not None:
        result["softcap"] = modifications["softcap"]
    sinks = getattr(arguments, "sinks", None)
    if sinks is not None:
        result["sinks"] = sinks[heads]
    of_pairs = {
        name: _of_pairs(whole, queries, keys, heads, name)
        for name in _OF_PAIRS
        if getattr(arguments, name, None) is not None
    }
    slopes = getattr(arguments, "alibi_slopes", None)
    if slopes is not None:
        of_row = _heads(queries, heads, xp)
        slopes = slopes[queries.sequence[:, None], of_row] if slopes.ndim == 2 else slopes[of_row]
        distance = abs(queries.position[:, None] - keys)
        bias = -slopes[:, :, None] * distance[:, None]
        bias = bias.astype(slopes.dtype)
        if "bias" in of_pairs:
            bias = bias + of_pairs["bias"].astype(slopes.dtype)
        of_pairs["bias"] = bias
    return result | {name: xp.ascontiguousarray(x[:, :, None]) for name, x in of_pairs.items()}


def _heads(queries: Queries, heads: slice, xp: Any) -> Any:
    """Return the query heads of each row, (R or 1, heads)."""
    own = xp.arange(heads.start, heads.stop)[None]
    return own if queries.kv_head is None else own + queries.kv_head[:, None] * own.size


def _of_pairs(whole: WholeCall, queries: Queries, keys: Any, heads: slice, name: str) -> Any:
    """Return the elements of a bias or mask for the listed keys, (R, heads or 1, K)."""
    array, problem = getattr(whole.arguments, name), whole.problem
    xp = array_module(array)
    if problem.layout.packed_q:
        # One batch, whose queries are the rows.
        sizes = (1, problem.layout.total_q, whole.options.max_seqlen_k)
        assert queries.row is not None
        sequence, query = xp.zeros_like(queries.query), queries.row
    else:
        sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k)
        sequence, query = queries.sequence, queries.query
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    array = xp.broadcast_to(array, (sizes[0], array.shape[1], *sizes[1:]))
    own = _heads(queries, heads, xp) if array.shape[1] > 1 else xp.zeros((1, 1), int)
    return array[sequence[:, None, None], own[..., None], query[:, None, None], keys[:, None]]
