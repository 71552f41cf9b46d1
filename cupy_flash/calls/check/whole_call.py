"""Checks of all arguments of a call that is then computed by several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.overlap import require_no_overlap
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments, written_arrays
from cupy_flash.calls.check.lengths import check_contents, length_limits, require_length
from cupy_flash.calls.check.problems import check_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import Options
from cupy_flash.problem.problem import Problem


class WholeCall(NamedTuple):
    """Call that passed the checks.

    Attributes
    ----------
    arguments, options
        NumPy or CuPy arrays, those of modifications included, and the options with their key.
    problem, mod_arrays
        See `CheckedCall`.
    lengths
        Lengths of cached sequences before the append, (batch,), if they are in host memory.
    """

    arguments: Arguments
    options: Options
    problem: Problem
    mod_arrays: dict[str, Any]
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
    arguments, options = dispatch.as_planned(arguments, options, modifications)
    arguments = converted(arguments, options)
    problem, mod_arrays = check_call(arguments, options)
    names, arrays = arguments.key_names(options), arguments.key_arrays(options)
    require_no_overlap(names, arrays, written_arrays(problem))
    lengths = None
    if isinstance(arguments.q, np.ndarray):
        lengths = check_contents(arguments, options, problem, keys)
    elif options.kind == "kvcache" and arguments.cache_seqlens is None:
        require_length("cache_seqlens", keys, length_limits(arguments, problem))
    return WholeCall(arguments, options, problem, mod_arrays, lengths)
