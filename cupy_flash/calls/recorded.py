"""Calls of torch's tensors on a GPU that autograd records.

Their gradients depend on what the call has found out already, and on dout and dlse besides. To look
at all arrays again would take 12 us, in a thread of autograd's, where Python runs at half its pace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cupy_flash.arrays.kinds import on_torch_stream
from cupy_flash.arrays.torch_arrays import is_torch_on_gpu, tensor_types
from cupy_flash.calls import attention, on_gpu
from cupy_flash.calls.arguments import Arguments, require_given
from cupy_flash.calls.gradients import GradientArguments
from cupy_flash.calls.modifiers import NO_FUNCTIONS
from cupy_flash.calls.options import Options
from cupy_flash.calls.results import as_tensor
from cupy_flash.gpu.environment import cupy_module
from cupy_flash.problem.gradient import ROWS


class Recorded(NamedTuple):
    """A call that ran.

    Attributes
    ----------
    call
        With what was prepared for its gradients.
    options
        The call's, plain.
    addresses, strides
        Of q, k, v, out and lse, and of the first three.
    lengths, lengths_at
        cu_seqlens_q, cu_seqlens_k and seqused_k, and where they lie.
    """

    call: attention.Call
    options: Options
    addresses: tuple[int, ...]
    strides: tuple[Any, ...]
    lengths: tuple[Any, ...] = (None, None, None)
    lengths_at: tuple[int, ...] = (0, 0, 0)


def run(arguments: Arguments, options: Options) -> tuple[tuple[Any, Any], Recorded | None] | None:
    """Attention of tensors on a GPU with plain options: out and lse, and the record of the call.

    There is none where kernels read a copy of an array, and nothing at all unless all arrays are
    plain tensors on a GPU.
    """
    found = _find_known(arguments, options)
    if found is None:
        if not is_torch_on_gpu(*arguments.of_kind(options.kind)):
            return None
        require_given(arguments, options.kind)
    with on_torch_stream("q", arguments.q):
        call, readable, addresses = found or on_gpu.find(arguments, options)
        out, lse = call.run(readable, addresses, 0, NO_FUNCTIONS)
        if readable is not arguments:
            return (as_tensor(out), as_tensor(lse)), None
    at = (*addresses[:3], out.data_ptr(), lse.data_ptr())
    strides = (arguments.q.stride(), arguments.k.stride(), arguments.v.stride())
    if arguments.cu_seqlens_q is None:
        return (out, lse), Recorded(call, options, at, strides)
    lengths = (arguments.cu_seqlens_q, arguments.cu_seqlens_k, arguments.seqused_k)
    lengths_at = tuple([0 if array is None else array.data_ptr() for array in lengths])
    return (out, lse), Recorded(call, options, at, strides, lengths, lengths_at)


def _find_known(arguments: Arguments, options: Options) -> Any:
    """What `on_gpu.find` gives, where a call like it was made; of no tensor all is asked again."""
    if not arguments.q.is_cuda:
        return None
    plain = tensor_types()
    for array in arguments.of_kind(options.kind):
        if array is not None and array.__class__ not in plain:
            return None
    try:
        return on_gpu.find(arguments, options, only_known=True)
    except (RuntimeError, ImportError):  # of tensors without strides or memory; without CuPy
        return None


def gradients(
    recorded: Recorded, saved: tuple[Any, ...], dout: Any, dlse: Any, needed: tuple[bool, ...]
) -> list[Any] | None:
    """Gradients of q, k and v.

    Parameters
    ----------
    recorded
        The call.
    saved
        q, k, v, out and lse.
    dout, dlse
        None where nothing depends on it.
    needed
        Which gradients are.

    Returns
    -------
    list of Tensor or None
        None where no gradient is needed. No list where the arrays are not the recorded ones, or
        no plain tensors on the current device.
    """
    q, k, v, out, lse = saved
    at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
    if at != recorded.addresses or dout is None or not is_torch_on_gpu(dout, dlse):
        return None
    # What was kept elsewhere meanwhile may come back to the same place, but without gaps.
    if (q.stride(), k.stride(), v.stride()) != recorded.strides:
        return None
    cupy = cupy_module()
    found = on_gpu.facts_of((dout, dlse), cupy.ndarray)
    assert found is not None
    facts, (dout_at, dlse_at) = found
    if dout.get_device() != cupy.cuda.runtime.getDevice():
        return None
    calls, key = recorded.call.pull_backs, (needed, facts)
    call = calls.get(key)
    with on_torch_stream("q", q):
        if call is not None:
            addresses = (*at[:4], dout_at, at[4], dlse_at, 0, 0, 0, *recorded.lengths_at)
            results = call.run_for_new(addresses)
        else:
            given = (None, None, None, *recorded.lengths)
            arguments = GradientArguments(q, k, v, out, dout, lse, dlse, *given)
            wrt = tuple([name for name, wanted in zip(ROWS, needed, strict=True) if wanted])
            options = recorded.options.with_gradients(wrt)
            call, readable, addresses = on_gpu.find(arguments, options)
            results = call.run(readable, addresses)
            if readable is arguments:
                calls[key] = call
            else:
                results = map(as_tensor, results)
    new = iter(results)
    return [next(new) if wanted else None for wanted in needed]
