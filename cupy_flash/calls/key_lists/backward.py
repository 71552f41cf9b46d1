"""Gradients of attention to listed keys.

The keys and values of each list are gathered, a few queries at a time. Each query is then a
sequence of a dense batch, whose gradients a backward call computes:

    lists          query 0: 5 2 2          query 1: 2 9
    gathered       k[5] k[2] k[2]          k[2] k[9]
    its gradients  a    b    c             d    e          dk[2] = b + c + d, dk[5] = a, dk[9] = e
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_flash.arrays import kinds
from cupy_flash.arrays.numpy_errors import ignore_fp_errors
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import array_module, as_cupy, to_bshd
from cupy_flash.arrays.torch_arrays import count_writes
from cupy_flash.calls import dispatch, dispatch_backward
from cupy_flash.calls.arguments import WRITTEN_GRADIENTS, GradientArguments
from cupy_flash.calls.check.gradients import check_gradient_call
from cupy_flash.calls.check.whole_call import (
    WholeCall,
    check_whole,
    is_capturing_tensors,
    on_stream_of_tensors,
)
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.key_lists.fold import fold_heads
from cupy_flash.calls.key_lists.modifications import modifications_of, require_supported
from cupy_flash.calls.key_lists.queries import Queries, queries_of
from cupy_flash.calls.key_lists.stored import bits, contiguous, reshaped, stored_rows
from cupy_flash.calls.key_lists.tables import Tables, read_indices, tables_of
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu import key_lists
from cupy_flash.opaque import is_dynamo_tracing, outside
from cupy_flash.problem.gradient import ROWS

# Largest size in bytes of the gathered keys of a backward call, and of their gradients.
_CHUNK_BYTES = 256 << 20


def gradients_of_lists(
    arguments: GradientArguments,
    options: Options,
    backend: str,
    modifications: Mapping[str, Any],
    stream: Any | None,
    key_indices: Any,
) -> tuple[Any, ...]:
    """Return the gradients of a call whose queries attend to listed keys.

    `dispatch_backward.gradients` describes the other arguments.
    """
    call = (arguments, options, backend, modifications)
    if is_dynamo_tracing():
        return outside(gradients_of_lists, (*call, stream, key_indices))
    assert options.wrt is not None
    require_gradients_of_lists(options.wrt)
    with on_stream(stream, arguments.like), on_stream_of_tensors(arguments.q):
        if is_capturing_tensors(arguments.q):
            raise UnsupportedError(
                "gradients of tensors with key_indices are not supported while a CUDA graph of "
                "PyTorch is captured; compute them outside of the graph"
            )
        given, plain = dispatch.as_planned(arguments, options, modifications)
        given = converted(given, plain)
        check_gradient_call(given, plain)
        forward = arguments.forward._replace(out=None)
        whole = check_whole(forward, options._replace(wrt=None), 0, modifications)
        require_supported(whole)
        indices = read_indices(key_indices, whole)
        if whole.problem.batch == 0 or whole.problem.seqlen_k == 0:
            return dispatch_backward.gradients(*call)
        queries = queries_of(whole, 0)
        tables = tables_of(whole, queries, indices)
        found = _Passes(whole, given, options, backend, queries, tables, modifications).compute()
        convert = kinds.result_converter("q", arguments.q)
        results = []
        for name in options.wrt:
            target = getattr(arguments, f"d{name}")
            if target is None:
                results.append(convert(found[name]))
            else:
                bits(as_cupy(getattr(given, f"d{name}")))[...] = bits(found[name])
                convert(found[name])
                results.append(target)
        count_writes(*(getattr(arguments, name) for name in WRITTEN_GRADIENTS))
        return tuple(results)


def require_gradients_of_lists(wrt: Sequence[str]) -> None:
    """Raise UnsupportedError if gradients of other inputs than q, k and v are requested."""
    if others := [name for name in wrt if name not in ROWS]:
        raise UnsupportedError(
            f"wrt names {others[0]!r}; with key_indices expected some of {', '.join(ROWS)}"
        )


class _Passes:
    """Backward calls over gathered keys, some queries at a time.

    Parameters
    ----------
    whole, given
        The forward call of the user, and its backward arrays, as NumPy or CuPy arrays.
    options, backend, modifications
        Options of the backward call, its backend, and the modifications of the user.
    queries, tables
        Queries of the call, and the block tables of their lists.
    """

    def __init__(
        self,
        whole: WholeCall,
        given: GradientArguments,
        options: Options,
        backend: str,
        queries: Queries,
        tables: Tables,
        modifications: Mapping[str, Any],
    ) -> None:
        assert options.wrt is not None
        self._whole, self._options, self._backend = whole, options, backend
        self._modifications = modifications or {}
        self._listed = fold_heads(queries, tables, stored_rows(whole))
        folded, packed = self._listed.folded, whole.problem.layout.packed_q
        rows, heads = len(queries.query) * folded, whole.problem.heads_q // folded
        self._rows = {
            name: reshaped(
                x if packed else to_bshd(x, options.layout), (rows, 1, heads, x.shape[-1])
            )
            for name in ("q", "out", "dout")
            if (x := getattr(given, name)) is not None
        }
        for name in ("lse", "dlse"):
            if (x := getattr(given, name)) is not None:
                # (heads, total_q), or (batch, heads, seqlen_q).
                x = x.T if packed else x.swapaxes(1, 2)
                self._rows[name] = x.reshape(rows, heads, 1)

    @ignore_fp_errors
    def compute(self) -> dict[str, Any]:
        """Return the requested gradients by name, with the axes of the call."""
        options, (_, tables, stored, _) = self._options, self._listed
        problem, xp = self._whole.problem, array_module(self._rows["q"])
        assert options.wrt is not None
        total = np.dtype(np.float64 if problem.dtype == "float64" else np.float32)
        found = {"q": xp.zeros(self._rows["q"].shape, total)}
        for name in ("k", "v"):
            found[name] = xp.zeros(stored[f"{name}_cache"].shape, total)
        entries, heads_kv = tables.rows.shape[2], stored["k_cache"].shape[2]
        dims = problem.head_dim + problem.head_dim_v
        each = entries * heads_kv * dims * total.itemsize
        step = max(1, _CHUNK_BYTES // max(1, each))
        lists = len(tables.rows)
        for first in range(0, len(self._rows["q"]) if entries else 0, step):
            span = slice(first, first + step)
            for group in range(lists):
                counts = (n // lists for n in (found["q"].shape[2], heads_kv))
                heads, kv = (slice(group * n, (group + 1) * n) for n in counts)
                gradients = self._of_rows(span, group, heads, kv)
                table, lengths = tables.rows[group, span], tables.counts[group, span]
                for name, gradient in gradients.items():
                    if name == "q":
                        found[name][span, :, heads] = gradient
                    else:
                        _add(found[name][:, 0, kv], table, lengths, gradient)
        dtype = total if options.grad_dtype else self._rows["q"].dtype
        return {name: self._shaped(name, found[name].astype(dtype)) for name in options.wrt}

    def _of_rows(self, span: slice, group: int, heads: slice, kv: slice) -> dict[str, Any]:
        """Return the gradients of some queries, and of the keys and values gathered for them."""
        options, (queries, tables, rows_of, _) = self._options, self._listed
        xp = array_module(self._rows["q"])
        table, lengths = tables.rows[group, span], tables.counts[group, span]
        places = xp.where(xp.arange(table.shape[1]) < lengths[:, None], table, 0)
        gathered = {}
        for name in ("k", "v"):
            stored = rows_of[f"{name}_cache"][:, 0, kv]
            gathered[name] = bits(stored)[places].view(stored.dtype)
        rows = {name: x[span][..., heads, :] for name, x in self._rows.items()}
        keys = None
        if tables.keys is not None:
            keys = tables.keys[group, span]
            queries = Queries(*(None if x is None else x[span] for x in queries))
        own = modifications_of(self._whole, queries, keys, heads, self._modifications)
        own.pop("sinks", None)
        inner = Options(
            "dense",
            softmax_scale=options.softmax_scale,
            return_lse=True,
            family=options.family,
            tile=options.tile,
            wrt=options.wrt,
            grad_dtype=None if self._rows["q"].dtype.itemsize > 2 else "float32",
        )
        arguments = GradientArguments(**rows, **gathered)
        own["seqlens_k"] = lengths
        results = dispatch_backward.gradients(arguments, inner, self._backend, own)
        assert options.wrt is not None
        return dict(zip(options.wrt, results, strict=True))

    def _shaped(self, name: str, gradient: Any) -> Any:
        """Return a gradient with the axes of its input."""
        like = getattr(self._whole.arguments, name)
        if self._whole.problem.layout.packed_q or self._options.layout == "bshd":
            return gradient.reshape(like.shape)
        return contiguous(gradient.reshape(to_bshd(like, "bhsd").shape).swapaxes(1, 2))


def _add(total: Any, table: Any, lengths: Any, parts: Any) -> None:
    """Add gradients of gathered rows (R, K, heads, dim) to those of all rows, in a fixed order.

    `table` (R, K) holds the row of each part; only the first `lengths` of each query count.
    """
    xp = array_module(table)
    is_part = xp.arange(table.shape[1]) < lengths[:, None]
    if isinstance(total, np.ndarray):
        np.add.at(total, table[is_part], parts[is_part])
        return
    rows = xp.where(is_part, table, len(total)).ravel().astype(np.int64)
    # Distinct numbers, so that any sort gives the same order.
    order = xp.argsort(rows * rows.size + xp.arange(rows.size))
    starts = xp.searchsorted(rows[order], xp.arange(len(total) + 1))
    own = xp.ascontiguousarray(total)
    key_lists.add_listed(own, xp.ascontiguousarray(parts), order, starts)
    total[...] = own
