"""Prepared merges of partial results on a GPU: kernel and packed arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_flash.arrays.overlap import OverlapCheck
from cupy_flash.arrays.strided import readable_in_place
from cupy_flash.calls.check.partials import Partials, spec_of_call
from cupy_flash.calls.conversions import contiguous_copies, converted
from cupy_flash.calls.gpu.allocate import ResultAllocator, result_allocator
from cupy_flash.calls.gpu.prepared_calls import Context, Operation
from cupy_flash.gpu import combine

# Names of the values that the struct is packed from: addresses of `Partials` and of the results.
_NAMES = (*Partials._fields, "result", "lse")
_OUT = Partials._fields.index("out")


@dataclass(frozen=True)
class Call:
    """Prepared merge: everything that the call key determines, see `prepared_calls.look_up`."""

    allocate_results: ResultAllocator
    overlap_check: OverlapCheck
    kernel: combine.Combine

    def run(self, partials: Partials, addresses: tuple[int, ...], *_: Any) -> tuple[Any, Any]:
        """Enqueue the merge of arrays at these addresses; return out and lse."""
        self.overlap_check.check(addresses)
        (out, lse), (out_address, lse_address) = self.allocate_results()
        if out is None:
            out, out_address = partials.out, addresses[_OUT]
        self.kernel.run((*addresses, out_address, lse_address))
        return out, lse


def readable(partials: Partials, _: None) -> Partials:
    """Return the arrays, with copies of those that the kernel cannot read in place."""
    partials = converted(partials)
    copied = contiguous_copies(partials, "lse_partial", "sinks")
    return partials._replace(out_partial=readable_in_place(partials.out_partial), **copied)


def prepare(partials: Partials, _: None, context: Context) -> Call:
    """Check such CuPy arrays, and compile and load the kernel that merges them."""
    spec = spec_of_call(*partials)
    out_partial, lse_partial = partials.out_partial, partials.lse_partial
    out = None if partials.out is not None else (out_partial.shape[1:], out_partial.dtype)
    return Call(
        allocate_results=result_allocator(
            (out, (lse_partial.shape[1:], lse_partial.dtype)), uses_torch=context.uses_torch
        ),
        overlap_check=OverlapCheck(partials._fields, partials, ("out",)),
        kernel=combine.prepare(spec, context.device, _NAMES),
    )


# Merge of partial results. The options of a call are None.
COMBINE = Operation(readable, prepare)
