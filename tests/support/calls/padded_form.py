"""Padded forms of packed calls, which formulas for batches of equal sequences can compute."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from support.calls.modified_calls import ModifiedCall


def padded_rows(packed: np.ndarray, starts: np.ndarray, longest: int) -> np.ndarray:
    """Return rows (total, ...) of packed sequences as (batch, longest, ...), padded with zeros."""
    found = np.zeros((len(starts) - 1, longest, *packed.shape[1:]), packed.dtype)
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        found[b, : end - first] = packed[first:end]
    return found


def padded_form(call: ModifiedCall) -> ModifiedCall:
    """Return the dense call whose first rows of each sequence have the results of a packed call.

    Rows after the last used query of a sequence attend to no key.
    """
    arrays, options = dict(call.arrays), dict(call.options)
    longest_q, longest_k = options.pop("max_seqlen_q"), options.pop("max_seqlen_k")
    starts_q, starts_k = arrays.pop("cu_seqlens_q"), arrays.pop("cu_seqlens_k")
    used_q = arrays.pop("seqused_q", np.diff(starts_q))
    used_k = arrays.pop("seqused_k", np.diff(starts_k))

    def of_pairs(x: np.ndarray) -> np.ndarray:
        """Return a bias or a mask (heads, total_q, keys), with a batch axis for the sequences."""
        rows = x.swapaxes(0, 1)
        if len(rows) == 1:
            return x[None]
        return padded_rows(rows, starts_q, longest_q).swapaxes(1, 2)

    arrays["q"] = padded_rows(arrays["q"], starts_q, longest_q)
    for name in ("k", "v"):
        arrays[name] = padded_rows(arrays[name], starts_k, longest_k)
    if "bias" in arrays:
        arrays["bias"] = of_pairs(arrays["bias"])
    mask = (np.arange(longest_q) < used_q[:, None])[:, None, :, None]
    arrays["mask"] = mask & of_pairs(arrays["mask"]) if "mask" in arrays else mask
    arrays["seqlens_k"] = used_k.astype(np.int32)
    arrays.setdefault("q_offset", (used_k - used_q).astype(np.int32))
    return ModifiedCall("padded", call.dtype, arrays, options, call.mods)


def padded_results(call: ModifiedCall, results: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return results of a packed call in its padded form, and 0 in rows that are padding.

    Results are (total_q, heads, dim), or (heads, total_q) if they have one number per row.
    """
    starts, longest = call.arrays["cu_seqlens_q"], call.options["max_seqlen_q"]
    return [
        padded_rows(x, starts, longest)
        if x.ndim == 3
        else padded_rows(x.swapaxes(0, 1), starts, longest).swapaxes(1, 2)
        for x in results
    ]
