"""What the modules that launch kernels do alike: CuPy itself, keys of arrays, devices, kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cupy_flash.calls.arrays import as_cupy, kind_of
from cupy_flash.calls.jax_arrays import JaxMemory
from cupy_flash.calls.overlap import OverlapCheck
from cupy_flash.calls.torch_arrays import new_tensor, tensor_type
from cupy_flash.gpu.by_value import SLOT, thread_arguments
from cupy_flash.gpu.compiler import kernel_cache
from cupy_flash.gpu.params import PackedParams, PackedSequences
from cupy_flash.gpu.tensor_map import TensorMaps
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.problem import MAX_ALIGNMENT, Problem

# A kernel, its grid, its thread block, and the dynamic shared memory of a block in bytes.
LoadedLaunch = tuple[Any, tuple[int, int, int], tuple[int, int, int], int]
# Of cu_seqlens_q, cu_seqlens_k, seqused_k, cache_batch_idx and block_table.
Places = tuple[int, int, int, int, int]

NO_PLACES: Places = (0, 0, 0, 0, 0)
# Calls kept for reuse. A key takes about 2 KiB, and one workload uses a handful.
_MAX_CALLS = 4096

_Call = TypeVar("_Call")


@functools.cache
def cupy_module() -> Any:
    """CuPy, which is imported when the first call needs it."""
    # An import statement in the call path would take half a microsecond each time.
    import cupy

    return cupy


def facts_of(arrays: Iterable[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What plans and checks depend on in arrays on a GPU, as part of a key; and their addresses.

    Of an array that is absent, None and 0.
    """
    facts: list[Any] = []
    addresses: list[int] = []
    tensor = tensor_type()
    # A loop, as a function for each array would cost half a microsecond a call.
    for array in arrays:
        if array is None:
            facts.append(None)
            addresses.append(0)
        elif array.__class__ is tensor:
            address = array.data_ptr()
            addresses.append(address)
            facts += (
                array.shape,
                array.stride(),
                array.dtype,
                array.get_device(),
                address & (MAX_ALIGNMENT - 1),
            )
        elif array.__class__ is JaxMemory:
            addresses.append(array.address)
            facts += array.facts
        else:
            data, dtype = array.data, array.dtype
            address = data.ptr
            addresses.append(address)
            facts += (
                array.shape,
                array.strides,
                # dtype.num, as hashing a dtype takes a microsecond; it is that of both byte orders.
                dtype.num,
                dtype.isnative,
                data.device_id,
                address & (MAX_ALIGNMENT - 1),
            )
    return tuple(facts), tuple(addresses)


def remember(calls: dict[tuple[Any, ...], _Call], key: tuple[Any, ...], call: _Call) -> _Call:
    """Keep a call that was prepared, and return it."""
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call
    return call


def require_given(arrays: Any) -> None:
    """Raise TypeError for an array of a NamedTuple that is None though it has no default."""
    for name, array in zip(arrays._fields, arrays, strict=True):
        if array is None and name not in arrays._field_defaults:
            raise TypeError(f"{name} is {kind_of(array)}; expected a CuPy array")


def require_device(device_id: int, **arrays: Any) -> None:
    """Raise ValueError, naming the array, unless all that are not None lie on the device."""
    for name, array in arrays.items():
        if array is not None and (its_id := as_cupy(array).data.device_id) != device_id:
            raise ValueError(
                f"{name} lies on device {its_id}, but the current device is {device_id}; have all "
                f"arrays on one device and call within `with cupy.cuda.Device({its_id})`"
            )


def loaded_launches(plan: Plan) -> tuple[LoadedLaunch, ...]:
    """The plan's launches in order, compiled and loaded; none where there is nothing to compute."""
    if plan.unit is None or plan.problem.is_empty:
        return ()
    kernels = kernel_cache.get(plan.unit, {e.entry: e.shared_memory for e in plan.launches})
    return tuple(
        (kernels[e.entry], e.grid, (e.threads, 1, 1), e.shared_memory) for e in plan.launches
    )


def empty(like: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A new array, of the same library as another."""
    if like.__class__ is tensor_type():
        return new_tensor(like, shape, dtype)
    return cupy_module().ndarray(shape, dtype)


def address_of_result(array: Any) -> int:
    """Address of the first element of a CuPy array or a tensor."""
    if array.__class__ is tensor_type():
        return int(array.data_ptr())
    return int(array.data.ptr)


@dataclass(frozen=True)
class Attention:
    """Everything about the attention of a call that does not change while its key stays the same.

    Attributes
    ----------
    out_shape, lse_shape, dtype, lse_dtype
        Of the results.
    apart
        Of all arrays of the call.
    params, tensor_maps, sequences
        What kernels are given, but for the addresses; None for what they have no parameter for.
    counters, workspace
        Words, and bytes.
    """

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: np.dtype
    lse_dtype: np.dtype
    apart: OverlapCheck
    params: PackedParams
    tensor_maps: TensorMaps | None
    sequences: PackedSequences | None
    counters: int
    workspace: int
    kernels: tuple[LoadedLaunch, ...]

    @classmethod
    def of(
        cls,
        plan: Plan,
        dtype: np.dtype,
        out_shape: tuple[int, ...],
        lse_shape: tuple[int, ...],
        apart: OverlapCheck,
    ) -> Attention:
        """Compile and load what a plan launches."""
        problem = plan.problem
        takes_sequences = problem.sequences is not None or plan.takes_sequences
        return cls(
            out_shape=out_shape,
            lse_shape=lse_shape,
            dtype=dtype,
            lse_dtype=_lse_dtype(problem),
            apart=apart,
            params=PackedParams(
                problem, num_splits=plan.num_splits, section_heads=plan.section_heads
            ),
            tensor_maps=TensorMaps(plan.tensor_maps) if plan.tensor_maps else None,
            sequences=PackedSequences(problem) if takes_sequences else None,
            counters=plan.counters,
            workspace=plan.workspace,
            kernels=loaded_launches(plan),
        )

    def results(self, like: Any, out: Any | None, return_lse: bool) -> tuple[Any, Any | None]:
        """`out` or a new array, and one for the log-sum-exp if it is asked for."""
        if out is None:
            out = empty(like, self.out_shape, self.dtype)
        return out, empty(like, self.lse_shape, self.lse_dtype) if return_lse else None

    def launch(
        self,
        inputs: tuple[int, ...],
        out: Any,
        lse: Any | None,
        workspace: int,
        counters: int,
        places: Places = NO_PLACES,
        keys: int = 0,
    ) -> None:
        """Enqueue the kernels on the current stream.

        Parameters
        ----------
        inputs
            Addresses of queries, keys and values.
        workspace, counters, places
            Addresses, or 0.
        out, lse
            Arrays.
        keys
            Length of every cache, where no array says it.
        """
        q, k, v = inputs
        lse_address = 0 if lse is None else address_of_result(lse)
        by_value = thread_arguments()
        memory, (params, sequences) = by_value.memory, by_value.pointers
        out_address = address_of_result(out)
        self.params.pack_into(memory, 0, q, k, v, out_address, lse_address, workspace)
        arguments: tuple[Any, ...] = (params,)
        if self.tensor_maps is not None:
            # Named until the launches are made: others may push it out of those that are kept.
            maps = self.tensor_maps.at(inputs)
            arguments = (params, maps.pointers[0])
        if self.sequences is not None:
            self.sequences.pack_into(memory, SLOT, *places, counters, keys)
            arguments = (*arguments, sequences)
        for kernel, grid, block, shared_memory in self.kernels:
            kernel(grid, block, arguments, shared_memory)


def _lse_dtype(problem: Problem) -> np.dtype:
    return np.dtype("float64" if problem.dtype == "float64" else "float32")
