"""Attention of queries to listed keys: each query has a list of the keys that it attends to.

The call becomes one over a paged cache whose pages have one row. Each query is a sequence of its
own, and its list, without the keys that masks hide, is the row of the block table:

    key_indices of a query     5 -1  2  9  2          causal: the query is at position 7
    row of the block table     5  2  2  .  .          length 3

The order of a list affects a result only by the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, to_bshd
from cupy_flash.arrays.torch_arrays import count_writes
from cupy_flash.calls import dispatch, rotary
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.check.whole_call import (
    WholeCall,
    check_whole,
    on_stream_of_tensors,
)
from cupy_flash.calls.key_lists.fold import Listed, fold_heads
from cupy_flash.calls.key_lists.modifications import (
    modifications_of,
    require_pages,
    require_supported,
)
from cupy_flash.calls.key_lists.queries import Queries, queries_of
from cupy_flash.calls.key_lists.stored import bits, contiguous, reshaped, stored_rows
from cupy_flash.calls.key_lists.tables import Tables, read_indices, tables_of
from cupy_flash.calls.options import Options
from cupy_flash.opaque import is_dynamo_tracing, outside

# Values of `key_indices_in`: a key is given by its index in the sequence, or by its row in all
# pages, page * page_size + row.
INDICES_IN = ("sequence", "pages")


def attention_to_lists(
    arguments: Arguments,
    options: Options,
    backend: str,
    keys: int,
    modifications: Mapping[str, Any],
    stream: Any | None,
    key_indices: Any,
    key_indices_in: str = "sequence",
) -> Any:
    """Return the result of a call whose queries attend to listed keys.

    `dispatch.attention` describes the other arguments.
    """
    if key_indices_in not in INDICES_IN:
        raise ValueError(
            f"key_indices_in is {key_indices_in!r}; expected {' or '.join(map(repr, INDICES_IN))}"
        )
    call = (arguments, options, backend, keys, modifications)
    if is_dynamo_tracing():
        return outside(attention_to_lists, (*call, stream, key_indices, key_indices_in))
    with on_stream(stream, arguments.like), on_stream_of_tensors(arguments.q):
        whole = check_whole(arguments, options, keys, modifications)
        require_supported(whole)
        layout, in_pages = whole.problem.layout, key_indices_in == "pages"
        if in_pages:
            require_pages(whole)
        convert = kinds.result_converter("q", arguments.q)
        indices = read_indices(key_indices, whole)
        rows = layout.pages * layout.page_size if in_pages else whole.problem.seqlen_k
        if whole.problem.batch == 0 or rows == 0:
            # No query attends to a key.
            return dispatch.attention(*call)
        queries = queries_of(whole, keys, in_pages=in_pages)
        inner = _Inner(
            whole, backend, keys, queries, tables_of(whole, queries, indices), modifications
        )
        if layout.appends:
            inner.require_family()
            _append(whole, backend, keys)
        out, *of_rows = inner.compute()
        count_writes(*arguments.written(options).values())
        results = [convert(contiguous(x)) for x in of_rows]
        if arguments.out is not None:
            bits(whole.arguments.out)[...] = bits(out)
            # The conversion makes the caller's stream wait for ours.
            convert(out)
            out = arguments.out
        else:
            out = convert(contiguous(out))
        return (out, *results) if results else out


def require_lists(key_indices_in: str) -> None:
    """Raise ValueError if a call without lists says what their indices mean."""
    if key_indices_in != INDICES_IN[0]:
        raise ValueError(f"key_indices_in is {key_indices_in!r}, but key_indices are missing")


def _append(whole: WholeCall, backend: str, keys: int) -> None:
    """Append the new rows of a call: a call without queries does nothing else."""
    without = whole.arguments._replace(q=whole.arguments.q[:, :0], out=None)
    fixed = Arguments(*without[: len(Arguments._fields)])
    dispatch.attention(fixed, whole.options._replace(mod_key=None), backend, keys)


class _Inner:
    """Call over the block tables, for each list of a query one.

    Parameters
    ----------
    whole, backend, modifications
        The call of the user.
    keys_before
        Length of all cached sequences before the append if no array gives it.
    queries, tables
        Queries of the call, and the block tables of their lists.
    """

    def __init__(
        self,
        whole: WholeCall,
        backend: str,
        keys_before: int,
        queries: Queries,
        tables: Tables,
        modifications: Mapping[str, Any],
    ) -> None:
        problem, options = whole.problem, whole.options
        self._whole, self._backend, self._queries = whole, backend, queries
        self._modifications = modifications or {}
        stored = {n: x for n, x in stored_rows(whole).items() if x is not None}
        if getattr(whole.arguments, "sinks", None) is None:
            self._listed = fold_heads(queries, tables, stored)
        else:
            # A call has one sink for each of its heads, whatever the sequence.
            self._listed = Listed(queries, tables, stored, 1)
        q = _rotated(whole, keys_before)
        q = q if problem.layout.packed_q else to_bshd(q, options.layout)
        rows, folded = len(queries.query), self._listed.folded
        heads = problem.heads_q // folded
        self._q = reshaped(q, (rows * folded, 1, heads, problem.head_dim))
        self._options = Options(
            "kvcache",
            softmax_scale=options.softmax_scale,
            return_lse=True,
            family=options.family,
            tile=options.tile,
            num_splits=options.num_splits,
            batch_invariant=options.batch_invariant,
            head_dim_v=options.head_dim_v,
            return_max_logits=options.return_max_logits,
            return_entropy=options.return_entropy,
        )

    def _call(self, group: int) -> tuple[Arguments, slice, dict[str, Any]]:
        """Return the arrays of a call, its query heads, and its modifications."""
        xp, (queries, tables, stored, _) = array_module(self._q), self._listed
        heads_kv = stored["k_cache"].shape[2]
        counts = (n // len(tables.rows) for n in (self._q.shape[2], heads_kv))
        heads, kv = (slice(group * n, (group + 1) * n) for n in counts)
        table, lengths = tables.rows[group], tables.counts[group]
        keys = None if tables.keys is None else tables.keys[group]
        if table.shape[1] == 0:
            table = keys = xp.zeros((len(table), 1), np.int32)
        rows = Arguments(
            q=self._q[:, :, heads],
            block_table=table,
            cache_seqlens=lengths,
            **{name: x[:, :, kv] for name, x in stored.items()},
        )
        own = modifications_of(self._whole, queries, keys, heads, self._modifications)
        return rows, heads, own

    def require_family(self) -> None:
        """Raise the error of a family or tile that does not fit, before anything is appended."""
        if self._options.family is not None or self._options.tile is not None:
            rows, _, own = self._call(0)
            dispatch.plan(rows, self._options, self._backend, None, own, compiles=False)

    def compute(self) -> tuple[Any, ...]:
        """Return out, and lse and row statistics if requested, with the axes of the call."""
        problem, options = self._whole.problem, self._whole.options
        xp, shape = array_module(self._q), (problem.batch, problem.seqlen_q)
        out = xp.empty((*self._q.shape[:-1], problem.head_dim_v), self._q.dtype)
        found = []
        for group in range(len(self._listed.tables.rows)):
            rows, heads, own = self._call(group)
            rows = rows._replace(out=out[:, :, heads])
            found.append(dispatch.attention(rows, self._options, self._backend, 0, own)[1:])
        out = out.reshape(-1, problem.heads_q, problem.head_dim_v)
        of_rows = [xp.concatenate(x, axis=1) for x in zip(*found, strict=True)]
        of_rows = [x.reshape(-1, problem.heads_q) for x in of_rows]
        if problem.layout.packed_q:
            of_rows = [x.T for x in of_rows]
            # The log-sum-exp of a row of no sequence has no sink.
            lse = xp.where(self._queries.is_owned, of_rows[0], -np.inf)
            of_rows[0] = lse.astype(of_rows[0].dtype)
        else:
            out = out.reshape(*shape, *out.shape[1:])
            of_rows = [x.reshape(*shape, problem.heads_q).swapaxes(1, 2) for x in of_rows]
            if options.layout == "bhsd":
                out = out.swapaxes(1, 2)
        lse, *statistics = of_rows
        return (out, *((lse,) if options.return_lse else ()), *statistics)


def _rotated(whole: WholeCall, keys_before: int) -> Any:
    """Return the queries, rotated as an append rotates them."""
    arguments, problem = whole.arguments, whole.problem
    q, xp = arguments.q, array_module(arguments.q)
    if arguments.rotary_cos is None:
        return q
    starts = arguments.rotary_seqlens
    if starts is None:
        starts = arguments.cache_seqlens
    if starts is None:
        starts = xp.full(len(q), keys_before, np.int32)
    places = starts[:, None] + xp.arange(problem.seqlen_q) * problem.is_local
    return rotary.rotate(
        *(q, arguments.rotary_cos, arguments.rotary_sin, places, whole.options.rotary_interleaved),
        None,
    )
