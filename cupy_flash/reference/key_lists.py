"""Lists of keys in the float64 references: each query attends to the keys that its list names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.reference.modifications import integers
from cupy_flash.reference.rows import Rows


def dense_lists(xp: Any, key_indices: Any, seqlen_q: int) -> Any | None:
    """Return the lists of a dense or cached call as (batch, lists, seqlen_q, n), or None."""
    if key_indices is None:
        return None
    lists = xp.asarray(integers(key_indices))
    if lists.ndim == 3:
        lists = lists[:, None]
    batch, _, *shape = lists.shape
    return xp.broadcast_to(lists, (batch, seqlen_q, *shape)).swapaxes(1, 2)


def packed_lists(xp: Any, key_indices: Any) -> Any | None:
    """Return the lists of a packed call as (lists, total_q, n), or None."""
    return None if key_indices is None else xp.asarray(integers(key_indices)).swapaxes(0, 1)


def read_meaning(
    key_indices_in: str, has_pages: bool, causal: bool, modifications: Mapping[str, Any]
) -> bool:
    """Return whether lists hold rows of pages instead of keys of a sequence.

    Raises
    ------
    ValueError
        For an unknown value. For rows of pages also without a block table, and with masks and
        changes of scores that depend on the position of a key.
    """
    if key_indices_in not in ("sequence", "pages"):
        raise ValueError(f"key_indices_in is {key_indices_in!r}; expected 'sequence' or 'pages'")
    in_pages = key_indices_in == "pages"
    given = {name for name, value in modifications.items() if value is not None}
    others = [*(["causal"] if causal else []), *sorted(given - {"softcap", "sinks"})]
    if in_pages and (others or not has_pages):
        raise ValueError(
            "key_indices_in is 'pages'; expected a block_table, and neither masks nor changes of "
            f"scores except softcap and sinks, but got {', '.join(others) or 'no block_table'}"
        )
    return in_pages


def listed(xp: Any, scores: Any, values: Any, lists: Any, rows: Rows) -> tuple[Any, Any]:
    """Return the scores and the values of the keys that the queries of a chunk list.

    Parameters
    ----------
    scores : array, shape (rows, keys)
        Scores of all keys before `rows.end`; -inf for masked pairs.
    values : array, shape (keys, dim)
        Values of these keys.
    lists : array, shape (batch, lists, seqlen_q, n)
        Lists of all queries.

    Returns
    -------
    scores : array, shape (rows, n)
        Scores of the listed keys; -inf for entries that are no key.
    values : array, shape (rows, n, dim)
        Their values; 0 where the score is -inf.
    """
    own = lists[rows.b, min(rows.kv_head, lists.shape[1] - 1), rows.span]
    is_key = (own >= 0) & (own < scores.shape[1])
    keys = xp.where(is_key, own, 0)
    scores = xp.where(is_key, xp.take_along_axis(scores, keys, 1), -np.inf)
    return scores, xp.where(scores[..., None] == -np.inf, 0, values[keys])


def log_counts(xp: Any, lists: Any, rows: Rows) -> Any:
    """Return the logarithm of how often each query of a chunk lists each key, (rows, keys).

    `lists` is as for `listed`. The keys are those before `rows.end`.
    """
    own = lists[rows.b, min(rows.kv_head, lists.shape[1] - 1), rows.span]
    counts = xp.zeros((len(own), rows.end + 1), np.int64)
    # The last column counts the entries that are no key.
    keys = xp.where((own >= 0) & (own < rows.end), own, rows.end)
    xp.add.at(counts, (xp.arange(len(own))[:, None], keys), 1)
    with np.errstate(divide="ignore"):
        return xp.log(counts[:, :-1].astype(np.float64))
