"""Checks of all arguments of a call that is then computed by several calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import on_torch_stream
from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.arrays.torch_arrays import is_capturing, is_torch_on_gpu, with_torch_memory
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments, written_arrays
from cupy_flash.calls.check.lengths import check_contents, length_limits, require_length
from cupy_flash.calls.check.problems import check_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.host.forward import require_writable
from cupy_flash.calls.options import Options
from cupy_flash.problem.problem import Problem

_NOTHING = contextlib.nullcontext()


class WholeCall(NamedTuple):
    """Call that passed the checks.

    Attributes
    ----------
    arguments, options
        NumPy or CuPy arrays, those of modifications included, and the options with their key.
    problem
        Problem of the call.
    is_of_tensors
        Whether the caller gave tensors on a GPU.
    lengths
        Lengths of cached sequences before the append, (batch,), if they are in host memory.
    """

    arguments: Arguments
    options: Options
    problem: Problem
    is_of_tensors: bool
    lengths: np.ndarray | None

    @property
    def is_on_host(self) -> bool:
        """Whether the arrays are in host memory."""
        return isinstance(self.arguments.q, np.ndarray)


def check_whole(
    arguments: Arguments, options: Options, keys: int, modifications: Mapping[str, Any]
) -> WholeCall:
    """Check all arguments, as the call itself would, before anything is computed or written.

    Raises
    ------
    TypeError, ValueError
        See the public function of the call.
    """
    arguments.require_given(options)
    is_of_tensors = is_torch_on_gpu(arguments.q)
    arguments, options = dispatch.as_planned(arguments, options, modifications)
    arguments = converted(arguments, options)
    problem, _ = check_call(arguments, options)
    names, arrays = arguments.key_names(options), arguments.key_arrays(options)
    require_no_overlap(names, arrays, written_arrays(problem))
    lengths = None
    if isinstance(arguments.q, np.ndarray):
        if arguments.out is not None:
            require_writable("out", arguments.out)
        lengths = check_contents(arguments, options, problem, keys)
    elif options.kind == "kvcache" and arguments.cache_seqlens is None:
        require_length("cache_seqlens", keys, length_limits(arguments, problem))
    return WholeCall(arguments, options, problem, is_of_tensors, lengths)


@contextlib.contextmanager
def on_stream_of_tensors(q: Any) -> Iterator[None]:
    """Let CuPy use torch's current stream in this context, if q is a tensor on a GPU.

    Otherwise CuPy's stream would wait for that of torch, which a graph of torch cannot capture.
    While torch captures a graph, CuPy also uses memory of torch, which the graph keeps.
    """
    if not is_torch_on_gpu(q):
        yield
        return
    with on_torch_stream("q", q), with_torch_memory() if is_capturing() else _NOTHING:
        yield


def is_capturing_tensors(q: Any) -> bool:
    """Return whether q is a tensor on a GPU, and torch's current stream is being captured."""
    return is_torch_on_gpu(q) and is_capturing()
