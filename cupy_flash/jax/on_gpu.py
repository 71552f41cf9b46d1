"""Handler of traced calls on JAX's CUDA platform: the launches of prepared calls on XLA's stream.

A call that was prepared only enqueues launches. Its results and workspace are memory of the
program, unless the program was traced where there is no GPU, or a GPU whose plan needs less: then
CuPy allocates the workspace.

XLA may record (capture) the launches of a replayable call in a command buffer, even at the first
call: of a branch that was not taken before, or on another GPU. So preparing a call works during a
recording, and all memory whose address was recorded is kept until the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, NamedTuple

from cupy_flash.arrays.jax_arrays import array_at
from cupy_flash.arrays.kinds import host_array_on_gpu
from cupy_flash.arrays.strided import as_cupy
from cupy_flash.arrays.torch_arrays import external_stream
from cupy_flash.calls.arguments import with_modifications
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.check.modifications import UserMods
from cupy_flash.calls.check.problems import CheckedCall
from cupy_flash.calls.gpu import backward, forward, prepared_calls
from cupy_flash.calls.gpu.prepared_calls import Operation
from cupy_flash.calls.key_lists.backward import gradients_of_lists
from cupy_flash.calls.key_lists.forward import attention_to_lists
from cupy_flash.calls.key_lists.stored import bits
from cupy_flash.calls.options import Options
from cupy_flash.errors import UnsupportedError
from cupy_flash.gpu.driver import relaxed_capture
from cupy_flash.gpu.environment import cupy_module, current_device
from cupy_flash.jax.frames import BufferKey, ContextReader, Frame, read_frame
from cupy_flash.jax.static_call import LISTS, SCRATCH, StaticCall, function_of, parsed
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import MAX_ALIGNMENT

# Maximum number of calls that are kept; a compiled program has a handful.
_MAX_CALLS = 4096
_LOW_BITS = MAX_ALIGNMENT - 1


class _Prepared(NamedTuple):
    """Call that is ready for the buffers of frames with the same key, see `execute`.

    Attributes
    ----------
    static
        Call without arrays.
    is_backward, keys, result_count
        Properties of `static` that take long to read: whether it is a backward call, `keys`, and
        the number of results without the workspace.
    call
        Prepared call, see `prepared_calls`.
    places
        Index of each address of the call among the addresses of the frame's arguments, those of
        captured arrays, and 0.
    captured
        Addresses of captured arrays.
    arguments
        Record of the arrays with which the call was prepared, which keeps captured arrays alive.
        All other arrays may have been freed.
    user_mods
        User functions of the call.
    needs_arrays
        Whether the call reads or fills arrays by other means than its launches.
    only_launches
        Whether the call only enqueues its launches, for which CuPy's current stream is irrelevant.
    """

    static: StaticCall
    is_backward: bool
    keys: int
    result_count: int
    call: Any
    places: tuple[int, ...]
    captured: list[int]
    arguments: Any
    user_mods: UserMods
    needs_arrays: bool
    only_launches: bool

    def scratch(self, made: list[int]) -> int:
        """Return the address of the program's workspace among those of the results, or 0."""
        return made[self.result_count] if len(made) > self.result_count else 0


_calls: dict[Any, _Prepared] = {}
# Texts of prepared calls that name the shapes and dtypes of the arguments, see `StaticCall.specs`.
_complete: set[bytes] = set()
# User functions with captured arrays on a device, by token and device. Replays read the arrays.
_functions: dict[tuple[str, int], Any] = {}
# Workspaces of recorded launches whose programs have none that suffices, by device, size and
# addresses of results. Launches that write the same results never run concurrently.
_workspaces: dict[tuple[int, ...], Any] = {}
_parsed = functools.lru_cache(maxsize=1024)(parsed)
_reader = functools.lru_cache(ContextReader)


def execute(address: int) -> None:
    """Enqueue the call with the frame at this address."""
    frame = read_frame(address)
    reader, runtime = _reader(frame.api), cupy_module().cuda.runtime
    stream = reader.stream(frame.context)
    before = runtime.getDevice()
    device = _device_of(frame, reader, before)
    # XLA remembers which device it made current, so it is restored.
    if device != before:
        runtime.setDevice(device)
    try:
        _execute(frame, stream, device)
    finally:
        if device != before:
            runtime.setDevice(before)


def _execute(frame: Frame, stream: int, device: int) -> None:
    low_bits = [x & _LOW_BITS for x in (*frame.addresses, *frame.results)]
    # The key holds all that a prepared call depends on: the results follow from the arguments, and
    # most texts name the shapes and dtypes of these.
    keys = None if frame.text in _complete else frame.keys()
    key = frame.text, keys, device, tuning.generation(), *low_bits
    prepared = _calls.get(key)
    if prepared is not None and prepared.only_launches and not device_lengths.is_enabled:
        # The rest takes longer than the launches.
        given, made = frame.addresses, frame.results
        results: list[Any] = [None] * prepared.result_count
        scratch = prepared.scratch(made)
        _launch(prepared, given, made, scratch, stream, prepared.arguments, results)
        return
    is_recorded = bool(cupy_module().cuda.runtime.streamIsCapturing(stream))
    allowing = relaxed_capture() if is_recorded else contextlib.nullcontext()
    with external_stream(stream, device), allowing:
        if prepared is None:
            static = _parsed(frame.text)
            if static.has_tangents:
                _compute_tangents(static, frame, device)
                return
            if static.has_lists:
                _compute_lists(static, frame, device)
                return
            prepared = _prepare(frame, device)
            if len(_calls) >= _MAX_CALLS:
                _calls.clear()
            if prepared.static.specs is not None:
                _complete.add(frame.text)
                key = frame.text, None, device, tuning.generation(), *low_bits
            _calls[key] = prepared
        _enqueue(prepared, frame, stream, device, is_recorded)


def _device_of(frame: Frame, reader: ContextReader, current: int) -> int:
    """Return the CUDA index of the device of a call."""
    if _device_count() == 1:
        return 0
    index = reader.device(frame.context)
    if index is not None:
        return index
    # JAX before 0.6 does not tell.
    address = next(filter(None, (*frame.addresses, *frame.results)), None)
    if address is None:
        return current
    return int(cupy_module().cuda.runtime.pointerGetAttributes(address).device)


@functools.cache
def _device_count() -> int:
    return int(cupy_module().cuda.runtime.getDeviceCount())


def scratch_bytes(
    static: StaticCall, arguments: Any, options: Options, checked: CheckedCall
) -> int | None:
    """Return the bytes of workspace that a checked call needs on the current device.

    The result is None if the device does not support the call, for a call with a mask_mod, and for
    one with lists of keys. The latter two have memory of their own, so XLA must not record their
    launches.
    """
    if static.has_lists or any(name == "mask_mod" for name, _ in static.functions):
        return None
    device, problem = current_device(), checked.problem
    try:
        plan = make_plan(problem, device, family=options.family, tile=options.tile, explain=False)
    except (UnsupportedError, ValueError):
        # The program may run on the CPU, although there is a GPU. If not, the handler raises this.
        return None
    return plan.workspace if static.is_backward else forward.scratch_layout(plan, arguments).size


def _compute_tangents(static: StaticCall, frame: Frame, device: int) -> None:
    """Compute tangents on the current stream, by functions of `cupy_flash` on CuPy arrays."""
    given, results = _by_name(static, frame, device)
    functions = {name: _on_device(token, device) for name, token in static.functions}
    made = static.tangents(given, functions)
    for name, tangent in zip(static.results, made, strict=True):
        results[name][...] = tangent


def _compute_lists(static: StaticCall, frame: Frame, device: int) -> None:
    """Compute a call with lists of keys on the current stream, by functions on CuPy arrays."""
    given, results = _by_name(static, frame, device)
    record, modifications = static.record(given)
    modifications |= {name: _on_device(token, device) for name, token in static.functions}
    if static.is_backward:
        made = gradients_of_lists(
            *(record, static.options, "auto", modifications, None, given[LISTS])
        )
    else:
        options = static.options._replace(return_lse=True)
        made = attention_to_lists(record, options, "auto", 0, modifications, None, given[LISTS])
    for name, result in zip(static.results, made, strict=True):
        bits(results[name])[...] = bits(result)


def _prepare(frame: Frame, device: int) -> _Prepared:
    """Check, plan, compile and load what calls with such frames need."""
    static = _parsed(frame.text)
    record, options, user_mods, _ = _arrays(static, frame, device)
    operation = _operation(static)
    found = prepared_calls.look_up(record.key_arrays(options), options)
    assert found is not None
    key, call, addresses = found
    if call is None:
        call, readable, _ = prepared_calls.prepare(
            operation, key, record, addresses, options, user_mods
        )
        if any(a is not b for a, b in zip(readable, record, strict=True)):
            raise RuntimeError("kernels cannot read the arrays of a compiled program in place")
    names = record._fields if static.is_backward else record.key_names(options)
    captured = [
        name for name in names if name not in static.names and getattr(record, name) is not None
    ]
    after = [*static.names, *captured]
    needs_arrays = bool(call.cleared if static.is_backward else call.fills_results)
    needs_memory = _workspace_bytes(static, call) > (static.scratch or 0)
    only_launches = not (
        needs_arrays or needs_memory or static.appended or user_mods.mask_mod is not None
    )
    return _Prepared(
        static,
        static.is_backward,
        static.keys,
        len(static.results),
        call,
        tuple(after.index(name) if name in after else len(after) for name in names),
        [as_cupy(getattr(record, name)).data.ptr for name in captured],
        record,
        user_mods,
        needs_arrays,
        only_launches,
    )


def _workspace_bytes(static: StaticCall, call: Any) -> int:
    """Return the bytes of workspace that a prepared call needs."""
    needed: int = call.workspace if static.is_backward else call.scratch_bytes
    return needed


def _operation(static: StaticCall) -> Operation:
    return backward.GRADIENTS if static.is_backward else forward.ATTENTION


def _arrays(
    static: StaticCall, frame: Frame, device: int
) -> tuple[Any, Options, UserMods, dict[str, Any]]:
    """Return the record of a frame's arguments, options, user functions, and results by name."""
    given, results = _by_name(static, frame, device)
    given |= {name: results[name] for name in static.appended}
    record, modifications = static.record(given)
    modifications |= {name: _on_device(token, device) for name, token in static.functions}
    record, mod_key, user_mods = with_modifications(
        record, modifications, backward=static.is_backward
    )
    return record, static.options._replace(mod_key=mod_key), user_mods, results


def _by_name(
    static: StaticCall, frame: Frame, device: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments and the results of a frame by name."""
    given, results = (
        {
            name: array_at(address, *_spec(static, name, key), device)
            for name, key, address in zip(names, keys, addresses, strict=False)
        }
        for names, keys, addresses in (
            (static.names, frame.keys(), frame.addresses),
            ((*static.results, SCRATCH), frame.result_keys(), frame.results),
        )
    )
    return given, results


def _spec(static: StaticCall, name: str, key: BufferKey) -> tuple[tuple[int, ...], Any]:
    return static.seen(name, key.shape, key.numpy_dtype)


def _on_device(token: str, device: int) -> Any:
    """Return the user function with a token, with its captured arrays on the current device."""
    function = _functions.get((token, device))
    if function is None:
        # The copies must not be recorded, and must have ended before launches on any stream.
        stream = cupy_module().cuda.Stream(non_blocking=True)
        with stream:
            copied = function_of(token).with_arrays(host_array_on_gpu)
        stream.synchronize()
        # Another thread may have copied the arrays meanwhile.
        function = _functions.setdefault((token, device), copied)
    return function


def _enqueue(
    prepared: _Prepared, frame: Frame, stream: int, device: int, is_recorded: bool
) -> None:
    """Do all that a prepared call needs, with CuPy's current stream being `stream`."""
    static, call, arguments = prepared.static, prepared.call, prepared.arguments
    made, count = frame.results, prepared.result_count
    given = _with_updated(static, frame, stream) if static.appended else frame.addresses
    results: list[Any] = [None] * count
    if prepared.needs_arrays or device_lengths.is_enabled:
        arguments, options, _, by_name = _arrays(static, frame, device)
        results = [by_name[name] for name in static.results]
        check = _operation(static).check
        if device_lengths.is_enabled and check is not None:
            device_lengths.check(arguments, options, static.keys, check)
    needed = _workspace_bytes(static, call)
    # `_memory` is referenced until the launches are enqueued; then the pool may reuse it.
    _memory, scratch = None, prepared.scratch(made)
    if needed > (static.scratch or 0):
        _memory = _workspace(needed, made[:count], device, is_recorded)
        scratch = _memory.ptr
    _launch(prepared, given, made, scratch, stream, arguments, results)


def _launch(
    prepared: _Prepared,
    given: list[int],
    made: list[int],
    scratch: int,
    stream: int,
    arguments: Any,
    results: list[Any],
) -> None:
    """Enqueue the launches, given the addresses of arguments, results and workspace."""
    call, user_mods = prepared.call, prepared.user_mods
    found = [*given, *prepared.captured, 0]
    addresses = tuple([found[place] for place in prepared.places])
    if prepared.is_backward:
        of_gradients = backward.Placed(results, [*made[: prepared.result_count], scratch])
        call.run(arguments, addresses, 0, user_mods, stream, of_gradients)
    else:
        # Updated caches follow out, lse and row statistics.
        count = 2 + len(call.statistics)
        placed = forward.Placed(results[:count], made[:count], scratch)
        call.run(arguments, addresses, prepared.keys, user_mods, stream, placed)


def _workspace(size: int, results: list[int], device: int, is_recorded: bool) -> Any:
    """Return memory on the current device for launches with results at these addresses."""
    cuda = cupy_module().cuda
    if not is_recorded:
        return cuda.alloc(size)
    key = device, size, *results
    # Not from CuPy's pool, which reuses memory once the launches are enqueued: replays run later.
    return _workspaces.get(key) or _workspaces.setdefault(key, cuda.memory.Memory(size))


def _with_updated(static: StaticCall, frame: Frame, stream: int) -> list[int]:
    """Return the addresses of a frame's arguments, with those of the caches that the call updates.

    A cache that was not donated is copied to its result first.
    """
    given, runtime = list(frame.addresses), cupy_module().cuda.runtime
    for name in static.appended:
        index, result = static.names.index(name), static.results.index(name)
        target = frame.results[result]
        if given[index] != target:
            key = frame.keys()[index]
            size = math.prod(key.shape) * key.numpy_dtype.itemsize
            runtime.memcpyAsync(target, given[index], size, runtime.memcpyDeviceToDevice, stream)
            given[index] = target
    return given
