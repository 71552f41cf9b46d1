"""Random calls that sum attention weights over queries: their arguments and true results.

The true weights of a call are the output of the float64 reference of attention for values that form
an identity matrix.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_flash
from cupy_flash import (
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
)
from cupy_flash.calls.arguments import ReceivedArguments
from cupy_flash.calls.options import Options
from support.calls.modified_calls import KINDS, PAGE, ModifiedCall, random_call
from support.gradients.gradient_calls import random_gradient_call

__all__ = ["KINDS", "ReceivedCall", "random_received_call"]

_OPTIONS = ("causal", "softmax_scale", "q_offset", "layout", "max_seqlen_q", "max_seqlen_k")
_FUNCTIONS = {"varlen": "_varlen", "kvcache": "_with_kvcache", "paged": "_with_kvcache"}
# Index of a query that is the last one of any sequence.
_END = 2**31 - 1


@dataclass
class ReceivedCall:
    """One call; its arrays are in host memory."""

    forward: ModifiedCall
    queries: slice
    grouped: bool

    def __str__(self) -> str:
        return f"{self.queries} grouped {self.grouped} of {self.forward}"

    @property
    def suffix(self) -> str:
        """Suffix of the names of the functions for this kind of batch."""
        return _FUNCTIONS.get(self.forward.kind, "")

    @property
    def is_packed(self) -> bool:
        return self.forward.kind == "varlen"

    @property
    def is_cached(self) -> bool:
        return self.suffix == "_with_kvcache"

    def given(self, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the public function, as arrays of `xp`."""
        (q, k, _, *lengths), named = self.forward.given(xp)
        return (q, k, *lengths), named | {"queries": self.queries, "grouped": self.grouped}

    def run(self, xp: Any, **how: Any) -> np.ndarray:
        """Run the public function; return its result in host memory."""
        positional, named = self.given(xp)
        function = getattr(cupy_flash, f"attention_received{self.suffix}")
        found = function(*positional, **named | how)
        return np.asarray(found if xp is np else xp.asnumpy(found))

    def prepared(
        self, xp: Any, lse: Any, family: str | None = None
    ) -> tuple[ReceivedArguments, Options, dict[str, Any]]:
        """Return the arrays, the options and the modifications of the call."""
        (q, k, *lengths), named = self.given(xp)
        if self.is_packed:
            named |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=False))
            named |= dict(zip(("max_seqlen_q", "max_seqlen_k"), lengths[2:], strict=True))
        named = {name: x for name, x in named.items() if name not in ("queries", "grouped")}
        plain = {name: named.pop(name) for name in _OPTIONS if name in named}
        arrays = {n: named.pop(n) for n in ReceivedArguments._fields if n in named}
        arrays |= {"q": q, "k_cache" if self.is_cached else "k": k, "lse": lse}
        kind = "kvcache" if self.is_cached else self.forward.kind
        first, last = self.queries.start or 0, self.queries.stop
        received = "groups" if self.grouped else "heads", first, _END if last is None else last
        plain |= {"kind": "dense" if kind == "padded" else kind, "received": received}
        return ReceivedArguments(**arrays), Options(family=family, **plain), named

    @functools.cached_property
    def lse(self) -> np.ndarray:
        """Log-sum-exp of the forward call on the CPU backend."""
        positional, named = self.forward.given(np)
        function = getattr(cupy_flash, f"flash_attention{self.suffix}")
        found: np.ndarray = function(*positional, **named, return_lse=True, backend="cpu")[1]
        return found

    @functools.cached_property
    def exact(self) -> np.ndarray:
        """True result in float64."""
        (q, k, v, *lengths), named = self.forward.given(np)
        of_rows = getattr(self, f"_{self.suffix.removeprefix('_') or 'dense'}_weights")
        sums = of_rows(q, k, v, lengths, named)
        if self.grouped:
            heads_kv = k.shape[1 if named.get("layout") == "bhsd" else -2]
            *batch, heads_q, keys = sums.shape
            sums = sums.reshape(*batch, heads_kv, heads_q // heads_kv, keys).sum(-2)
        return sums

    def _dense_weights(self, q: Any, k: Any, v: Any, lengths: Any, named: Any) -> np.ndarray:
        is_bhsd = named.get("layout") == "bhsd"
        keys = k.shape[2 if is_bhsd else 1]
        identity = np.eye(keys)[None] if is_bhsd else np.eye(keys)[:, None]
        v = np.broadcast_to(identity, (*k.shape[:-1], keys))
        weights = attention_reference(q, k, v, **named)
        if not is_bhsd:
            weights = weights.swapaxes(1, 2)
        return weights[:, :, self.queries].sum(2)

    def _varlen_weights(self, q: Any, k: Any, v: Any, lengths: Any, named: Any) -> np.ndarray:
        v = np.broadcast_to(np.eye(len(k))[:, None], (*k.shape[:-1], len(k)))
        weights, _ = attention_varlen_reference(q, k, v, *lengths, **named)
        chosen = np.zeros(len(q), bool)
        starts, used = lengths[0], named.get("seqused_q")
        for b, (begin, end) in enumerate(itertools.pairwise(starts)):
            rows = np.arange(begin, end if used is None else begin + used[b])
            chosen[rows[self.queries]] = True
        return weights[chosen].sum(0)

    def _with_kvcache_weights(self, q: Any, k: Any, v: Any, lengths: Any, named: Any) -> np.ndarray:
        blocks, rows = k.shape[:2]
        # Each row of the whole cache has its own column.
        identity = np.eye(blocks * rows).reshape(blocks, rows, 1, blocks * rows)
        v = np.broadcast_to(identity, (*k.shape[:-1], blocks * rows))
        result = attention_with_kvcache_reference(q, k, v, **named)
        sums = result.out[:, self.queries].sum(1)
        table = named.get("block_table")
        if table is None:
            places = np.arange(blocks * rows).reshape(blocks, rows)[: len(q)]
        else:
            places = (table[:, :, None] * rows + np.arange(rows)).reshape(len(q), -1)
        found = np.take_along_axis(sums, places[:, None], axis=2)
        past = np.arange(places.shape[1]) >= np.reshape(named["cache_seqlens"], (-1, 1))
        return np.where(past[:, None], 0, found)

    def check(self, found: np.ndarray, **how: Any) -> None:
        """Fail unless a result of a kernel is right."""
        size = max(30.0, float(np.abs(self.lse[np.isfinite(self.lse)]).max(initial=0)))
        eps = float(np.finfo(self.lse.dtype).eps)
        # A weight has the error of its score, times the weight.
        bound = 64 * eps * size * max(1.0, float(self.exact.max(initial=0)))
        assert found.dtype == self.lse.dtype
        np.testing.assert_allclose(found, self.exact, rtol=0, atol=bound, err_msg=str(self), **how)


def random_received_call(
    rng: np.random.Generator, dtype: str, kind: str, **sizes: Any
) -> ReceivedCall:
    """Return a call with one to four modifications, and rows that must not be read NaN.

    `kind` is one of `KINDS`; for `sizes` see `random_call`.
    """
    if kind in ("kvcache", "paged"):
        forward = random_call(rng, dtype, kind, few_rows=bool(rng.integers(2)), **sizes)
        _poison(forward)
    else:
        forward = random_gradient_call(rng, dtype, kind, **sizes).forward
        for name in ("q", "k"):
            forward.arrays[name] = np.ascontiguousarray(forward.arrays[name])
    axis = 0 if kind == "varlen" else 2 if forward.options.get("layout") == "bhsd" else 1
    seqlen = forward.options.get("max_seqlen_q", forward.arrays["q"].shape[axis])
    choices = [slice(None), slice(-int(rng.integers(1, 40)), None)]
    if kind in ("dense", "padded"):
        first, last = np.sort(rng.integers(0, seqlen + 1, 2)).tolist()
        choices = [slice(0, seqlen), slice(first, last)]
    else:
        first, last = rng.integers(-seqlen - 2, seqlen + 3, 2).tolist()
        choices.append(slice(first, last))
    return ReceivedCall(forward, choices[rng.integers(len(choices))], bool(rng.integers(2)))


def _poison(call: ModifiedCall) -> None:
    """Set the keys past the lengths of cached sequences to NaN."""
    arrays = call.arrays
    for b, length in enumerate(arrays["cache_seqlens"]):
        if "block_table" in arrays:
            for number, page in enumerate(arrays["block_table"][b]):
                arrays["k_cache"][page, max(0, length - number * PAGE) :] = np.nan
        else:
            arrays["k_cache"][b, length:] = np.nan
