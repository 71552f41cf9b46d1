"""Fast path for torch tensors on a GPU: repeated calls, and the records that autograd keeps.

The backward call reuses what the forward call has looked up, and adds dout and dlse. Looking up all
arrays again would take 12 us, in a thread of autograd in which Python is slower by a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cupy_flash.arrays.torch_arrays import (
    is_torch_on_gpu,
    may_be_transformed,
    on_stream_of,
    tensor_types,
    two_streams,
)
from cupy_flash.calls.arguments import Arguments
from cupy_flash.calls.backward_arguments import GradientArguments
from cupy_flash.calls.check import device_lengths
from cupy_flash.calls.check.modifications import NO_USER_MODS
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.calls.gpu.allocate import as_tensor
from cupy_flash.calls.options import Options
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.problem.gradient import ROWS

# Calls without `out` and modifications need only the addresses of their arrays.
_NO_ARRAYS = Arguments()
# Index of cu_seqlens_q among the arrays of a varlen call; cu_seqlens_k and seqused_k follow.
_FIRST_LENGTHS = Arguments._fields.index("cu_seqlens_q")
_NO_LENGTHS_AT = (0, 0, 0)
_LENGTHS = slice(_FIRST_LENGTHS, _FIRST_LENGTHS + len(_NO_LENGTHS_AT))
_ALL_ROWS = (True,) * len(ROWS)
# Maximum number of backward calls kept for one forward call: one for each strides of dout.
_MAX_PULL_BACKS = 64


class Recorded(NamedTuple):
    """Record of a forward call, kept for its backward call.

    Attributes
    ----------
    call
        Prepared forward call, which also keeps the prepared backward calls.
    options
        Options of the call, as Python values.
    facts, addresses
        Array keys and addresses of the call's arrays, see `prepared_calls.facts_of`.
    results_at
        Addresses of out and lse.
    """

    call: gpu_forward.Call
    options: Options
    facts: tuple[Any, ...]
    addresses: tuple[int, ...]
    results_at: tuple[int, int]


def run(arrays: tuple[Any, ...], options: Options) -> tuple[tuple[Any, Any], Any] | None:
    """Repeat a call of tensors on a GPU without modifications, if such a call is prepared.

    The caller has checked the tensors with `torch_arrays.require_whole`.

    Parameters
    ----------
    arrays
        Arrays of the call, in the order of `Arguments.arrays_of_kind`.
    options
        Options of the call, as Python values.

    Returns
    -------
    results, found
        Pair (out, lse), and the argument of `record`. None if no such call is prepared: in the
        first call, if kernels read copies of arrays, or if an array is not a plain GPU tensor.
    """
    if device_lengths.is_asked_for or not arrays[0].is_cuda:
        return None
    plain = tensor_types()
    for array in arrays:
        # The memory of tensor subclasses and lazily negated tensors may not hold their values.
        if array is not None and (array.__class__ not in plain or array.is_neg()):
            return None
    try:
        found = prepared_calls.look_up(arrays, options)
    except (RuntimeError, ImportError):  # A tensor without strides or memory; CuPy is missing.
        return None
    assert found is not None
    _, call, addresses = found
    if call is None:
        return None
    return _on_stream_of(arrays[0], call.run, _NO_ARRAYS, addresses, 0, NO_USER_MODS), found


def record(found: Any, results: tuple[Any, Any]) -> Recorded:
    """Return the record of a call that `run` has made."""
    key, call, addresses = found
    out, lse = results
    results_at = (out.data_ptr(), lse.data_ptr())
    return Recorded(call, key[2], key[1], addresses, results_at)


def _on_stream_of(tensor: Any, run: Callable[..., Any], *arguments: Any) -> Any:
    """Return `run(*arguments)`, executed while CuPy's current stream is torch's."""
    # A null context would take 0.3 us.
    if two_streams(tensor) is None:
        return run(*arguments)
    with on_stream_of(tensor):
        return run(*arguments)


def gradients(
    recorded: Recorded, saved: tuple[Any, ...], dout: Any, dlse: Any, needed: tuple[bool, ...]
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
    call, _, facts, addresses, results_at = recorded
    q, k, v, out, lse, *lengths = saved
    q_at, k_at, v_at, out_at, lse_at = (
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        *(out.data_ptr(), lse.data_ptr()),
    )
    if dout is None or (out_at, lse_at) != results_at or (q_at, k_at, v_at) != addresses[:3]:
        return None
    # Saved-tensor hooks may have restored a tensor at the same address, but with other strides.
    if q.stride() != facts[0][1] or k.stride() != facts[1][1] or v.stride() != facts[2][1]:
        return None
    lengths_at = addresses[_LENGTHS] or _NO_LENGTHS_AT
    if [x.data_ptr() for x in lengths] != [at for at in lengths_at if at]:
        return None
    plain = tensor_types()
    if dout.__class__ not in plain or not (dlse is None or dlse.__class__ in plain):
        return None
    if dout.is_neg() or (dlse is not None and dlse.is_neg()) or may_be_transformed():
        return None
    cupy = cupy_module()
    try:
        found = prepared_calls.facts_of((dout, dlse), cupy.ndarray)
    except RuntimeError:
        return None
    assert found is not None
    of_gradients, (dout_at, dlse_at) = found
    if dout.get_device() != cupy.cuda.runtime.getDevice():
        return None
    pull_back = call.pull_backs.get((needed, of_gradients))
    if pull_back is None:
        key = needed, of_gradients
        return _on_stream_of(q, _prepare_and_run, recorded, saved, (dout, dlse), key)
    at = (q_at, k_at, v_at, out_at, dout_at, lse_at, dlse_at, 0, 0, 0, *lengths_at)
    new = _on_stream_of(q, pull_back.run, (), at)
    return new if needed == _ALL_ROWS else _by_input(new, needed)


def _prepare_and_run(
    recorded: Recorded,
    saved: tuple[Any, ...],
    of_results: tuple[Any, Any],
    pull_back_key: tuple[tuple[bool, ...], Any],
) -> list[Any] | None:
    """Compute `gradients` without a prepared backward call; keep the new one unless it copies."""
    needed, _ = pull_back_key
    if not is_torch_on_gpu(*of_results):
        return None
    (q, k, v, out, lse, *given), (dout, dlse) = saved, of_results
    left = iter(given)
    lengths = [next(left) if at else None for at in recorded.addresses[_LENGTHS]]
    arguments = GradientArguments(q, k, v, out, dout, lse, dlse, None, None, None, *lengths)
    wrt = tuple([name for name, wanted in zip(ROWS, needed, strict=True) if wanted])
    options = recorded.options.with_gradients(wrt)
    found = prepared_calls.look_up(arguments, options)
    assert found is not None
    key, call, addresses = found
    readable = arguments
    if call is None:
        call, readable, addresses = prepared_calls.prepare(key, arguments, addresses, options)
    new = call.run(readable, addresses)
    if readable is arguments:
        if len(recorded.call.pull_backs) >= _MAX_PULL_BACKS:
            recorded.call.pull_backs.clear()
        recorded.call.pull_backs[pull_back_key] = call
    return _by_input(map(as_tensor, new), needed)


def _by_input(new: Iterable[Any], needed: tuple[bool, ...]) -> list[Any]:
    left = iter(new)
    return [next(left) if wanted else None for wanted in needed]
