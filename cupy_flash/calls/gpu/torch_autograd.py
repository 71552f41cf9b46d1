"""Fast path for torch tensors on a GPU: repeated calls, and the records that autograd keeps.

The backward call reuses what the forward call has looked up, and adds dout and dlse. Looking up all
arrays again would take 12 us, in a thread of autograd in which Python is slower by a third.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cupy_flash.arrays.torch_arrays import (
    current_stream,
    is_torch_on_gpu,
    may_be_transformed,
    on_stream_of,
    tensor_types,
)
from cupy_flash.calls.arguments import Arguments, GradientArguments, in_field_order, span
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.check.modifications import NO_USER_MODS
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.allocate import as_tensor
from cupy_flash.calls.gpu.backward import GRADIENTS
from cupy_flash.calls.gpu.prepared_calls import LOW_BITS, STRIDES
from cupy_flash.calls.options import Options
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.planning import tuning
from cupy_flash.problem.gradient import ROWS

# Calls without `out` and modifications need only the addresses of their arrays.
_NO_ARRAYS = Arguments()
_ROWS = span(Arguments, "q", "v")
_LENGTHS = span(Arguments, "cu_seqlens_q", "seqused_k")
# Addresses of the three arrays of lengths in a dense call, which has none.
_NO_LENGTHS = (0, 0, 0)
_ALL_ROWS = (True,) * len(ROWS)
# Maximum number of backward calls kept for one forward call: one for each strides of dout.
_MAX_BACKWARD_CALLS = 64


# Record of a forward call, kept for its backward call. Its items are: the prepared call, which also
# keeps the prepared backward calls; the options; the type of out; the strides and addresses of q, k
# and v; the addresses of out and lse; and those of the lengths of a varlen call, 0 for each that is
# not given, empty if dense. Creating a plain tuple takes 0.3 us less than a NamedTuple.
Record = tuple[
    gpu_forward.Call,
    Options,
    Any,
    tuple[Any, Any, Any],
    tuple[int, ...],
    tuple[int, int],
    tuple[int, ...],
]


def run(arrays: tuple[Any, ...], options: Options) -> tuple[tuple[Any, Any], Any] | None:
    """Repeat a call of tensors on a GPU without modifications, if such a call is prepared.

    The caller has checked the tensors with `torch_arrays.require_whole`.

    Parameters
    ----------
    arrays
        Arrays of the call, in the order of `Arguments.key_arrays`.
    options
        Options of the call, as Python values.

    Returns
    -------
    results, result
        Pair (out, lse), and the argument of `record`. None if no such call is prepared: in the
        first call, if kernels read copies of arrays, or if an array is not a plain GPU tensor.
    """
    result = _prepared(arrays, options)
    if result is None:
        return None
    _, call, addresses = result
    if call.fills_results:
        # CuPy fills results on its own current stream.
        with on_stream_of(arrays[0]):
            return call.run(_NO_ARRAYS, addresses, 0, NO_USER_MODS), result
    # Making torch's stream the current one of CuPy would take longer.
    stream = current_stream(call.device)
    return call.run(_NO_ARRAYS, addresses, 0, NO_USER_MODS, stream), result


def _prepared(
    arrays: tuple[Any, ...], options: Any
) -> tuple[tuple[Any, ...], Any, tuple[int, ...]] | None:
    """Return the key, the prepared call and the addresses of tensors on a GPU, or None."""
    if device_lengths.is_enabled or not arrays[0].is_cuda:
        return None
    try:
        result = _look_up(arrays, options)
    except (RuntimeError, ImportError):  # A tensor has no strides or memory, or CuPy is missing.
        return None
    return None if result is None or result[1] is None else result


def _look_up(
    tensors: tuple[Any, ...], options: Any
) -> tuple[tuple[Any, ...], Any, tuple[int, ...]] | None:
    """Return `prepared_calls.look_up` of tensors on a GPU; None if one of them is no such tensor.

    The memory of tensor subclasses and lazily negated tensors may not hold their values.

    Raises
    ------
    RuntimeError
        If a tensor has no strides or memory.
    """
    plain, low_bits = tensor_types(), LOW_BITS
    array_keys: list[Any] = []
    addresses: list[int] = []
    # One loop that checks tensors and makes their keys takes 0.6 us less than a check of all
    # tensors before `prepared_calls.look_up`.
    for tensor in tensors:
        if tensor is None:
            array_keys.append(None)
            addresses.append(0)
            continue
        if tensor.__class__ not in plain or tensor.is_neg():
            return None
        address = tensor.data_ptr()
        if not address and tensor.numel():
            return None
        addresses.append(address)
        shape, strides, device = tensor.shape, tensor.stride(), tensor.get_device()
        array_keys.append((shape, strides, tensor.dtype, device, address & low_bits))
    device = cupy_module().cuda.runtime.getDevice()
    key = (device, tuple(array_keys), options, None, tuning.generation())
    return key, prepared_calls._calls.get(key), tuple(addresses)


def record(result: Any, results: tuple[Any, Any]) -> Record:
    """Return the record of a call that `run` has made."""
    (_, array_keys, options, _, _), call, addresses = result
    strides = array_keys[0][STRIDES], array_keys[1][STRIDES], array_keys[2][STRIDES]
    out, lse = results
    result_addresses = out.data_ptr(), lse.data_ptr()
    lengths = addresses[_LENGTHS]
    return call, options, out.__class__, strides, addresses[_ROWS], result_addresses, lengths


def gradients(
    recorded: Record, saved: tuple[Any, ...], dout: Any, dlse: Any, needed: tuple[bool, ...]
) -> list[Any] | None:
    """Return the gradients of q, k and v.

    Parameters
    ----------
    recorded
        Record of the forward call.
    saved
        q, k, v, out and lse; for varlen calls also cu_seqlens_q, cu_seqlens_k and seqused_k, each
        only if it was given.
    dout, dlse
        Gradients of out and lse; None if the loss does not depend on out or lse.
    needed
        Flags of q, k and v: whether each gradient is needed.

    Returns
    -------
    list of Tensor or None
        Gradients, None where not needed. The result is None instead of a list if the arrays are not
        the recorded ones, or not plain tensors on the current device.
    """
    # Another thread has created the record, and each of its objects that is read first has to be
    # fetched from the cache of another core. So the record has few objects.
    call, _, plain, strides, addresses, result_addresses, length_addresses = recorded
    q, k, v, out, lse, *lengths = saved
    # Saved-tensor hooks may have restored a tensor at another address, or with other strides.
    if (
        dout.__class__ is not plain
        or (out.data_ptr(), lse.data_ptr()) != result_addresses
        or (q.data_ptr(), k.data_ptr(), v.data_ptr()) != addresses
        or (q.stride(), k.stride(), v.stride()) != strides
    ):
        return None
    # A dense call has no lengths, so it saves the 0.2 us of two comprehensions.
    if length_addresses and [x.data_ptr() for x in lengths] != [
        address for address in length_addresses if address
    ]:
        return None
    if dout.is_neg() or may_be_transformed():
        return None
    dlse_key, dlse_address = None, 0
    try:
        dout_address = dout.data_ptr()
        if not dout_address and dout.numel():
            return None
        if dlse is not None:
            if dlse.__class__ is not plain or dlse.is_neg():
                return None
            dlse_key, dlse_address = prepared_calls.tensor_key(dlse)
    except RuntimeError:
        return None
    if dout.get_device() != cupy_module().cuda.runtime.getDevice():
        return None
    backward_key = needed, dlse_key, dout.shape, dout.stride(), dout.dtype, dout_address & LOW_BITS
    backward_call = call.backward_calls.get(backward_key)
    if backward_call is None:
        with on_stream_of(q):
            return _prepare_and_run(recorded, saved, (dout, dlse), backward_key)
    lengths_in_order, dout_and_dlse = length_addresses or _NO_LENGTHS, (dout_address, dlse_address)
    in_order = in_field_order(addresses, result_addresses, dout_and_dlse, lengths_in_order, 0)
    new = _repeat_gradients(backward_call, q, in_order)
    return new if needed == _ALL_ROWS else _by_input(new, needed)


def run_gradients(arrays: tuple[Any, ...], options: Options) -> list[Any] | None:
    """Repeat a backward call of tensors on a GPU without modifications, if such a call is prepared.

    Unlike `gradients`, this needs no record of a forward call, which graphs do not have.

    Parameters
    ----------
    arrays
        Arrays of the call, in the order of the fields of `GradientArguments`.
    options
        Options of the backward call, as Python values.

    Returns
    -------
    list of Tensor or None
        Gradients of the inputs in `options.wrt`. None instead of a list in the cases of `run`, and
        while tensors may carry more than their memory holds.
    """
    result = None if may_be_transformed() else _prepared(arrays, options)
    if result is None:
        return None
    _, call, addresses = result
    return _repeat_gradients(call, arrays[0], addresses)


def _repeat_gradients(call: Any, q: Any, addresses: tuple[int, ...]) -> list[Any]:
    """Return the gradients by a prepared backward call of tensors with these addresses."""
    if call.cleared:
        # CuPy clears gradients on its own current stream.
        with on_stream_of(q):
            return call.run((), addresses)
    return call.run((), addresses, 0, NO_USER_MODS, current_stream(call.device))


def _prepare_and_run(
    recorded: Record,
    saved: tuple[Any, ...],
    result_gradients: tuple[Any, Any],
    backward_key: tuple[Any, ...],
) -> list[Any] | None:
    """Compute `gradients` without a prepared backward call; keep the new one unless it copies."""
    forward_call, options, _, _, _, _, length_addresses = recorded
    needed, *_ = backward_key
    if not is_torch_on_gpu(*result_gradients):
        return None
    q, k, v, out, lse, *given = saved
    left = iter(given)
    lengths = tuple(
        [next(left) if address else None for address in length_addresses or _NO_LENGTHS]
    )
    arguments = GradientArguments(*in_field_order((q, k, v), (out, lse), result_gradients, lengths))
    wrt = tuple([name for name, wanted in zip(ROWS, needed, strict=True) if wanted])
    options = options._replace(wrt=wrt)
    result = prepared_calls.look_up(arguments, options)
    assert result is not None
    key, call, addresses = result
    readable = arguments
    if call is None:
        call, readable, addresses = prepared_calls.prepare(
            GRADIENTS, key, arguments, addresses, options
        )
    new = call.run(readable, addresses)
    if readable is arguments:
        if len(forward_call.backward_calls) >= _MAX_BACKWARD_CALLS:
            forward_call.backward_calls.clear()
        forward_call.backward_calls[backward_key] = call
    return _by_input(map(as_tensor, new), needed)


def _by_input(new: Iterable[Any], needed: tuple[bool, ...]) -> list[Any]:
    left = iter(new)
    return [next(left) if wanted else None for wanted in needed]
