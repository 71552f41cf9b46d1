"""Sums of attention weights over queries on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupy_flash.arrays.kinds import read
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import is_cupy
from cupy_flash.calls.arguments import Arguments, ReceivedArguments
from cupy_flash.calls.dispatch import Computation, attention, run
from cupy_flash.calls.gpu.received import RECEIVED
from cupy_flash.calls.options import Options

_RECEIVED = Computation(RECEIVED, None)
# Number of columns of the values of a forward pass whose output is not needed.
_COLUMNS = 16


def on_gpu(
    q: Any,
    k: Any,
    lse: Any,
    options: Options,
    modifications: Mapping[str, Any],
    stream: Any | None = None,
) -> Any | None:
    """Return the sums of weights of a dense call.

    The result is None if q is not on a GPU, or the call has dropout: then no kernel computes it.

    Parameters
    ----------
    q, k, lse
        Queries, keys, and the log-sum-exp of the forward call, or None to compute it.
    options, modifications, stream
        See `cupy_flash.calls.dispatch.attention`; the options have `received`.
    """
    if stream is not None:
        with on_stream(stream, q):
            return on_gpu(q, k, lse, options, modifications)
    if modifications.get("dropout_p") or not is_cupy(read("q", q)):
        return None
    if lse is None:
        forward = options._replace(return_lse=True, received=None, discards_out=True)
        values = k[..., : min(_COLUMNS, k.shape[-1])]
        _, lse = attention(Arguments(q, k, values), forward, "auto", 0, modifications)
    arguments = ReceivedArguments(q, k, lse)
    (result,) = run(_RECEIVED, arguments, options, "auto", 0, modifications)
    return result
