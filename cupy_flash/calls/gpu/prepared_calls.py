"""Execution of calls on the current GPU, with a cache of prepared calls by call key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cupy_flash.arrays.jax_arrays import JaxMemory
from cupy_flash.arrays.strided import as_cupy
from cupy_flash.arrays.torch_arrays import no_memory
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.check.modifications import NO_USER_MODS, ModificationKey, UserMods
from cupy_flash.calls.gpu import backward as gpu_backward
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import merge, sharded_append
from cupy_flash.calls.gpu.allocate import is_tensor
from cupy_flash.calls.options import Options
from cupy_flash.gpu.environment import cupy_module, device_for_id
from cupy_flash.planning import tuning
from cupy_flash.problem.arrays import MAX_ALIGNMENT

# Maximum number of prepared calls. A call key takes about 2 KiB, and a workload uses a handful.
_MAX_CALLS = 4096

_calls: dict[tuple[Any, ...], Any] = {}


def run(
    arrays: Any,
    options: Options | sharded_append.CacheSharding | None,
    keys: int = 0,
    only_cupy: bool = False,
    user_mods: UserMods = NO_USER_MODS,
    mod_key: ModificationKey | None = None,
) -> Any:
    """Compute attention, its gradients, a merge of partial results, or an append to a cache.

    The launches are enqueued on the current device and stream.

    Parameters
    ----------
    arrays
        `Arguments` or `GradientArguments` with arrays on a GPU (CuPy arrays, torch tensors or
        `JaxMemory`); or `Partials` or `AppendedRows` with CuPy arrays.
    options
        Options of attention, or the `CacheSharding` of an append; None for a merge.
    keys
        Length of every cached sequence before the append if no array gives the lengths; else 0.
    only_cupy
        Whether to do nothing, and return None, unless all arrays are CuPy arrays.
    user_mods
        User functions that belong to `mod_key`.
    mod_key
        Key that `options` does not contain yet: adding it takes half a microsecond.

    Returns
    -------
    out, lse
        Results of attention or of a merge; lse is None if it is not requested. A backward call
        returns the gradients instead; an append returns None twice.
    """
    read_arrays = arrays.arrays_of_kind(options.kind) if isinstance(options, Options) else arrays
    entry = look_up(read_arrays, options, mod_key, only_cupy)
    if entry is None:
        return None
    key, call, addresses = entry
    if call is None:
        call, arrays, addresses = prepare(key, arrays, addresses, options, user_mods, mod_key)
    if device_lengths.is_enabled and isinstance(options, Options):
        device_lengths.check(arrays, options, keys, mod_key)
    return call.run(arrays, addresses, keys, user_mods)


def prepare(
    key: tuple[Any, ...],
    arrays: Any,
    addresses: tuple[int, ...],
    options: Options | sharded_append.CacheSharding | None,
    user_mods: UserMods = NO_USER_MODS,
    mod_key: ModificationKey | None = None,
) -> tuple[Any, Any, tuple[int, ...]]:
    """Prepare a call whose call key is new; return it with the arrays that it reads and addresses.

    The prepared call is kept under its call key; if arrays are copied, under that of the copies.
    """
    device_id = key[0]
    require_device(device_id, arrays)
    if isinstance(options, Options):
        if mod_key is not None:
            options = options.with_mod_key(mod_key)
        module = gpu_forward if options.wrt is None else gpu_backward
        readable: Any = module.readable(arrays, options)
    else:
        readable = merge.readable(arrays) if options is None else sharded_append.readable(arrays)
    if any(a is not b for a, b in zip(readable, arrays, strict=True)):
        read_arrays = (
            readable.arrays_of_kind(options.kind) if isinstance(options, Options) else readable
        )
        entry = look_up(read_arrays, options)
        assert entry is not None
        key, call, addresses = entry
        if call is not None:
            return call, readable, addresses
        return prepare(key, readable, addresses, options, user_mods)
    plain, device = type(arrays)(*map(as_cupy, arrays)), device_for_id(device_id)
    if options is None:
        call = merge.prepare(plain, device)
    elif isinstance(options, sharded_append.CacheSharding):
        call = sharded_append.prepare(plain, options, device)
    else:
        uses_torch = is_tensor(arrays.like)
        call = module.prepare(plain, options, device, user_mods, uses_torch=uses_torch)
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call
    return call, arrays, addresses


def look_up(
    read_arrays: Iterable[Any],
    options: Options | sharded_append.CacheSharding | None,
    mod_key: ModificationKey | None = None,
    only_cupy: bool = False,
) -> tuple[tuple[Any, ...], Any, tuple[int, ...]] | None:
    """Return the call key of these arrays, the prepared call or None, and the addresses.

    A call key holds the index of the current device, the array keys from `find_array_keys`, the
    options, and the tuning generation. If `only_cupy`, the result is None if any array is not
    CuPy's.
    """
    cupy = cupy_module()
    entry = find_array_keys(read_arrays, cupy.ndarray, only_cupy)
    if entry is None:
        return None
    array_keys, addresses = entry
    # The key holds everything that the plan and the checks depend on.
    key = (cupy.cuda.runtime.getDevice(), array_keys, options, mod_key, tuning.generation())
    return key, _calls.get(key), addresses


def find_array_keys(
    arrays: Iterable[Any], cupy_array: type, only_cupy: bool = False
) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """Return the array keys of arrays on a GPU (shape, strides, ...), and their addresses.

    An absent array has None and 0. If `only_cupy`, the result is None if any array is not CuPy's.
    """
    array_keys: list[Any] = []
    addresses: list[int] = []
    low_bits = MAX_ALIGNMENT - 1
    # Inline in the loop: a function call per array would cost half a microsecond.
    for array in arrays:
        if array is None:
            array_keys.append(None)
            addresses.append(0)
            continue
        kind = array.__class__
        if kind is cupy_array:
            data = array.data
            address = data.ptr
            addresses.append(address)
            array_keys.append(
                (
                    array.shape,
                    array.strides,
                    array.dtype,
                    data.device_id,
                    address & low_bits,
                )
            )
        elif only_cupy:
            return None
        elif kind is JaxMemory:
            addresses.append(array.address)
            array_keys.append(array.array_key)
        else:
            try:
                address = array.data_ptr()
            except RuntimeError as error:
                raise no_memory(array) from error
            if not address and array.numel():
                raise no_memory(array)
            addresses.append(address)
            array_keys.append(
                (
                    array.shape,
                    array.stride(),
                    array.dtype,
                    array.get_device(),
                    address & low_bits,
                )
            )
    return tuple(array_keys), tuple(addresses)


def require_device(device_id: int, arrays: Any) -> None:
    """Raise ValueError, naming the field, unless all arrays are on the device with this index."""
    for name, array in zip(arrays._fields, arrays, strict=True):
        if array is not None and (its_id := as_cupy(array).data.device_id) != device_id:
            context = "torch.cuda.device" if is_tensor(array) else "cupy.cuda.Device"
            raise ValueError(
                f"{name} lies on device {its_id}, but the current device is {device_id}; have all "
                f"arrays on one device and call within `with {context}({its_id})`"
            )
