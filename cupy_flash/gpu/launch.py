"""Launches of the kernels of a plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cupy_flash.gpu.by_value import thread_arguments
from cupy_flash.gpu.compiler import kernel_cache

if TYPE_CHECKING:
    from cupy_flash.gpu.params import PackedStruct
    from cupy_flash.gpu.tensor_map import TensorMaps
    from cupy_flash.planning.planner import Plan


class Launches:
    """Launches of a plan in order, compiled and loaded; false if there are none.

    Parameters
    ----------
    plan
        Plan of the call.
    params, tensor_maps
        Arguments of the kernels without addresses; `tensor_maps` is None if no kernel takes any.
    """

    def __init__(self, plan: Plan, params: PackedStruct, tensor_maps: TensorMaps | None) -> None:
        self._params, self._tensor_maps = params, tensor_maps
        self._kernels: dict[str, Any] = {}
        if plan.unit is not None and not plan.problem.is_empty:
            shared_memory = {e.entry: e.shared_memory for e in plan.launches}
            self._kernels = kernel_cache.get(plan.unit, shared_memory)
        self._launches = [
            (self._kernels[e.entry].ptr, *e.grid, e.threads, e.shared_memory, e.takes_maps)
            for e in plan.launches
            if self._kernels
        ]

    def __bool__(self) -> bool:
        return bool(self._launches)

    def run(self, values: tuple[int, ...], stream: int) -> None:
        """Enqueue the launches on a stream of the current device.

        Parameters
        ----------
        values
            Addresses and numbers, in the order of the names that `params` was created with.
        stream
            Handle of the stream.
        """
        given = thread_arguments()
        self._params.pack_into(given.memory, values)
        if self._tensor_maps is not None:
            # The variable keeps the maps alive until all launches have copied them. Another thread
            # may remove them from the cache meanwhile.
            maps = self._tensor_maps.maps_for(values)
            given.set_maps(maps.address)
        # This calls the driver directly, because CuPy's kernel object takes 0.7 us more.
        launch = _launch_function()
        for kernel, x, y, z, threads, shared_memory, takes_maps in self._launches:
            arguments = given.with_maps if takes_maps else given.alone
            # Unpacking a tuple here would take 0.1 us more.
            launch(kernel, x, y, z, threads, 1, 1, shared_memory, stream, arguments, 0)


class StructLaunch:
    """Launch of one kernel that takes a struct; it does nothing if the kernel is None."""

    def __init__(
        self,
        params: PackedStruct,
        kernel: Any | None,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
    ) -> None:
        self._params, self._kernel, self._grid, self._block = params, kernel, grid, block

    def run(self, values: tuple[int, ...]) -> None:
        """Enqueue the launch on the current stream, for values in the order of their names."""
        if self._kernel is None:
            return
        arguments = thread_arguments()
        self._params.pack_into(arguments.memory, values)
        self._kernel(self._grid, self._block, (arguments.pointer,))


@functools.cache
def _launch_function() -> Any:
    from cupy.cuda import driver

    return driver.launchKernel
