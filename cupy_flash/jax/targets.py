"""FFI targets of the library: their names, registration, and the operation that calls one."""

from __future__ import annotations

from typing import Any

import jax

from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.jax import on_cpu, on_gpu
from cupy_flash.jax.handlers import register
from cupy_flash.jax.static_call import StaticCall
from cupy_flash.jax.versions import ffi, varying, varying_axes

# Names of the targets. A program that JAX has exported refers to them, so the meaning of a name
# never changes. The kernels of a replayable call use no memory but the program's, and their
# launches never differ, so that XLA may record them in a command buffer.
TARGET, REPLAYABLE = "cupy_flash.call.v1", "cupy_flash.replayable.v1"
TARGETS = (TARGET, REPLAYABLE)


for _name in TARGETS:
    # JAX keeps the handlers of a platform that is not in use.
    register(_name, "cpu", on_cpu.execute)
    register(_name, "CUDA", on_gpu.execute, is_replayable=_name == REPLAYABLE)


def results_of(static: StaticCall, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check a call, and return the results of the operation that computes it.

    The shapes are those on one device.
    """
    if all(isinstance(n, int) for x in operands for n in x.shape):
        checked = static.check(operands)
        static = static._replace(specs=tuple((x.shape, x.dtype.name) for x in operands))
        if gpu_unavailable() is None and not static.has_tangents:
            static = static._replace(scratch=on_gpu.scratch_bytes(static, *checked))
    shapes = [jax.ShapeDtypeStruct(*spec) for spec in static.result_shapes(operands)]
    names, results = static.names, (*static.results, "scratch")
    aliases = {names.index(name): results.index(name) for name in static.appended}
    made = ffi.ffi_call(
        TARGET if static.scratch is None else REPLAYABLE,
        shapes,
        vmap_method="sequential",
        input_output_aliases=aliases,
    )(*operands, call=static.text())
    # The types of the operation's results have no axes of `jax.shard_map`.
    axes = varying_axes(operands)
    return tuple(varying(x, axes) for x in made[: len(static.results)])


def export_checks() -> list[Any]:
    """Return what `jax.export.export` takes as `disabled_checks` for functions with attention.

    The process that runs an exported function must import `cupy_flash.jax`, which registers the
    operations. A function with a `score_mod` or `mask_mod` runs only in the process that has
    exported it.

    Returns
    -------
    list of jax.export.DisabledSafetyCheck
        One for each operation of the library.
    """
    from jax.export import DisabledSafetyCheck

    return [DisabledSafetyCheck.custom_call(name) for name in TARGETS]
