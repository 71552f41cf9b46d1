"""Execution of calls on the current GPU, with a cache of prepared calls by call key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cupy_flash.arrays.jax_arrays import JaxMemory
from cupy_flash.arrays.strided import as_cupy
from cupy_flash.arrays.torch_arrays import unreadable
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.check.modifications import NO_USER_MODS, ModificationKey, UserMods
from cupy_flash.calls.check.problems import CheckedCall
from cupy_flash.calls.gpu.allocate import is_tensor
from cupy_flash.gpu.environment import cupy_module, device_for_id
from cupy_flash.planning import tuning
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.device import Device

# Maximum number of prepared calls. A call key takes about 2 KiB, and a workload uses a handful.
_MAX_CALLS = 4096

_calls: dict[tuple[Any, ...], Any] = {}


class Context(NamedTuple):
    """Current device, user functions of a call, and whether torch allocates its memory."""

    device: Device
    user_mods: UserMods
    uses_torch: bool


class Operation(NamedTuple):
    """Operation on a GPU, such as attention: the functions that prepare a call of it.

    All take the record of arrays, and the options: `Options`, or another hashable value that the
    operation defines.

    Attributes
    ----------
    readable
        Function that returns the arrays, with copies of those that kernels cannot read in place.
    prepare
        Function that checks, plans, compiles and loads a call of CuPy arrays, given a `Context`. It
        returns the prepared call, whose `run` takes arrays, addresses, `keys` and `UserMods`.
    check
        Function that returns the `CheckedCall` of CuPy arrays; None if the operation has no lengths
        that `device_lengths` can check.
    """

    readable: Callable[[Any, Any], Any]
    prepare: Callable[[Any, Any, Context], Any]
    check: Callable[[Any, Any], CheckedCall] | None = None


def run(
    operation: Operation,
    arrays: Any,
    options: Any,
    keys: int = 0,
    only_cupy: bool = False,
    user_mods: UserMods = NO_USER_MODS,
    mod_key: ModificationKey | None = None,
) -> Any:
    """Enqueue the launches of an operation on the current device and stream.

    Parameters
    ----------
    operation
        Operation to compute.
    arrays
        Record of arrays on a GPU: CuPy arrays, torch tensors or `JaxMemory`.
    options
        Options of the operation.
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
    Results of the operation, such as out and lse; None for each that is not requested.
    """
    entry = look_up(arrays.key_arrays(options), options, mod_key, only_cupy)
    if entry is None:
        return None
    key, call, addresses = entry
    if call is None:
        call, arrays, addresses = prepare(
            operation, key, arrays, addresses, options, user_mods, mod_key
        )
    if device_lengths.is_enabled and operation.check is not None:
        with_key = options if mod_key is None else options._replace(mod_key=mod_key)
        device_lengths.check(arrays, with_key, keys, operation.check)
    return call.run(arrays, addresses, keys, user_mods)


def prepare(
    operation: Operation,
    key: tuple[Any, ...],
    arrays: Any,
    addresses: tuple[int, ...],
    options: Any,
    user_mods: UserMods = NO_USER_MODS,
    mod_key: ModificationKey | None = None,
) -> tuple[Any, Any, tuple[int, ...]]:
    """Prepare a call whose call key is new; return it with the arrays that it reads and addresses.

    The prepared call is kept under its call key; if arrays are copied, under that of the copies.
    """
    device_id, *_ = key
    require_device(device_id, arrays)
    if mod_key is not None:
        options = options._replace(mod_key=mod_key)
    readable = operation.readable(arrays, options)
    if any(a is not b for a, b in zip(readable, arrays, strict=True)):
        entry = look_up(readable.key_arrays(options), options)
        assert entry is not None
        key, call, addresses = entry
        if call is not None:
            return call, readable, addresses
        return prepare(operation, key, readable, addresses, options, user_mods)
    context = Context(device_for_id(device_id), user_mods, is_tensor(arrays.like))
    call = operation.prepare(type(arrays)(*map(as_cupy, arrays)), options, context)
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call
    return call, arrays, addresses


def look_up(
    key_arrays: Iterable[Any],
    options: Any,
    mod_key: ModificationKey | None = None,
    only_cupy: bool = False,
) -> tuple[tuple[Any, ...], Any, tuple[int, ...]] | None:
    """Return the call key of these arrays, the prepared call or None, and the addresses.

    A call key holds the index of the current device, the array keys from `find_array_keys`, the
    options and the tuning generation. If `only_cupy`, arrays that are not CuPy's give None.
    """
    cupy = cupy_module()
    entry = find_array_keys(key_arrays, cupy.ndarray, only_cupy)
    if entry is None:
        return None
    array_keys, addresses = entry
    # The key holds everything that the plan and the checks depend on.
    key = (cupy.cuda.runtime.getDevice(), array_keys, options, mod_key, tuning.generation())
    return key, _calls.get(key), addresses


# Elements of an array key. The strides of a C-contiguous CuPy array are True. The low bits of an
# address determine the alignment of the array.
_ARRAY_KEY = ("shape", "strides", "dtype", "device", "low bits of the address")
STRIDES = _ARRAY_KEY.index("strides")
LOW_BITS = MAX_ALIGNMENT - 1


def find_array_keys(
    arrays: Iterable[Any], cupy_array: type, only_cupy: bool = False
) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """Return the array keys of arrays on a GPU (see `_ARRAY_KEY`), and their addresses.

    An absent array has None and 0. If `only_cupy`, the result is None if any array is not CuPy's.
    """
    array_keys: list[Any] = []
    addresses: list[int] = []
    low_bits = LOW_BITS
    # The keys of CuPy arrays are made in the loop itself, because function calls would take longer.
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
            # Reading the private flag takes 0.1 us less than the strides. If it is set, they do not
            # matter: strides of axes of length 1 are never applied.
            shape, strides = array.shape, array._c_contiguous or array.strides
            array_keys.append((shape, strides, array.dtype, data.device_id, address & low_bits))
        elif only_cupy:
            return None
        elif kind is JaxMemory:
            addresses.append(array.address)
            array_keys.append(array.array_key)
        else:
            key, address = tensor_key(array)
            array_keys.append(key)
            addresses.append(address)
    return tuple(array_keys), tuple(addresses)


def tensor_key(tensor: Any) -> tuple[tuple[Any, ...], int]:
    """Return the array key of a torch tensor on a GPU, and its address."""
    try:
        address = tensor.data_ptr()
        shape, strides = tensor.shape, tensor.stride()
    except RuntimeError as error:
        raise unreadable(tensor) from error
    if not address and tensor.numel():
        raise unreadable(tensor)
    return (shape, strides, tensor.dtype, tensor.get_device(), address & LOW_BITS), address


def require_device(device_id: int, arrays: Any) -> None:
    """Raise ValueError, naming the field, unless all arrays are on the device with this index."""
    for name, array in zip(arrays._fields, arrays, strict=True):
        if array is not None and (its_id := as_cupy(array).data.device_id) != device_id:
            context = "torch.cuda.device" if is_tensor(array) else "cupy.cuda.Device"
            raise ValueError(
                f"{name} lies on device {its_id}, but the current device is {device_id}; have all "
                f"arrays on one device and call within `with {context}({its_id})`"
            )
