"""Modifications of a call whose queries attend to listed keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.strided import array_module
from cupy_flash.calls.arguments import CACHES
from cupy_flash.calls.check.whole_call import WholeCall
from cupy_flash.calls.key_lists.queries import Queries
from cupy_flash.calls.key_lists.stored import require_rows
from cupy_flash.errors import UnsupportedError

# Arrays of modifications that calls with lists support, and those that have an element per pair.
_SUPPORTED = {"alibi_slopes", "sinks", "bias", "mask", "prefix_lens", "seqlens_k", "q_offset"}
_OF_PAIRS = ("bias", "mask")
# Modifications that depend on the keys of a list.
OF_KEYS = (*_OF_PAIRS, "alibi_slopes")


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
    names = sorted(set(key.names) - _SUPPORTED)
    names += [name for name in ("score_mod", "mask_mod") if getattr(key, name) is not None]
    if key.dropout_threshold is not None:
        names.append("dropout_p")
    # Captured arrays have the names of their functions in front.
    names = list(dict.fromkeys(name.split(".")[0] for name in names))
    if names:
        raise UnsupportedError(
            f"{names[0]} is not supported together with key_indices; expected only masks by "
            f"position, softcap and {', '.join(sorted(_SUPPORTED))}"
        )


@ignore_fp_errors
def modifications_of(
    whole: WholeCall, queries: Queries, keys: Any, heads: slice, modifications: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the modifications of the inner call of these heads; `keys` are those of its table."""
    arguments, xp = whole.arguments, array_module(whole.arguments.q)
    result: dict[str, Any] = {}
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
        slopes = slopes[queries.sequence][:, heads] if slopes.ndim == 2 else slopes[None, heads]
        distance = abs(queries.position[:, None] - keys)
        bias = -slopes[:, :, None] * distance[:, None]
        bias = bias.astype(slopes.dtype)
        if "bias" in of_pairs:
            bias = bias + of_pairs["bias"].astype(slopes.dtype)
        of_pairs["bias"] = bias
    return result | {name: xp.ascontiguousarray(x[:, :, None]) for name, x in of_pairs.items()}


def _of_pairs(whole: WholeCall, queries: Queries, keys: Any, heads: slice, name: str) -> Any:
    """Return the elements of a bias or mask for the listed keys, (R, heads or 1, K)."""
    array, problem = getattr(whole.arguments, name), whole.problem
    xp = array_module(array)
    if problem.layout.packed_q:
        # One batch, whose queries are the rows.
        sizes = (1, problem.layout.total_q, whole.options.max_seqlen_k)
        sequence, query = xp.zeros_like(queries.query), xp.arange(len(keys))
    else:
        sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k)
        sequence, query = queries.sequence, queries.query
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    array = xp.broadcast_to(array, (sizes[0], array.shape[1], *sizes[1:]))
    if array.shape[1] > 1:
        array = array[:, heads]
    own = xp.arange(array.shape[1])[:, None]
    return array[sequence[:, None, None], own, query[:, None, None], keys[:, None]]
