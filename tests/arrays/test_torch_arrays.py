"""PyTorch tensors on a fake GPU: read in place, results in torch's memory, stream order."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash import (
    combine,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_with_kvcache,
)
from cupy_flash.arrays import torch_arrays
from cupy_flash.calls import dispatch
from cupy_flash.calls.arguments import Arguments, in_field_order
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls, torch_autograd
from cupy_flash.differentiable import DifferentiableCall, dense_call, varlen_call
from cupy_flash.mods.captures import read_capture
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference import rows

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8")
OURS, THEIRS = 0xA0, 0xB0
# One query with this many keys: the kernel splits them.
LENGTHS = {"q": 1, "k": 8192, "v": 8192}


class Tensor:
    """Fake tensor: an address, a shape, strides and a dtype."""

    __torch_dispatch__ = None
    is_meta = is_nested = False

    def __init__(self, gpu: Any, shape: tuple[int, ...], dtype: Any, **options: Any) -> None:
        self._gpu = gpu
        self.shape, self.dtype = shape, dtype
        self.layout, self.device = "strided", "cuda:0"
        self.filled = options.get("filled")
        self.is_cuda, self.requires_grad = True, options.get("requires_grad", False)
        self._address = options.get("address") or gpu.address()
        size = 4 if dtype == "int32" else 2
        itemsize = options.get("itemsize", size)
        bytes_ = fake_gpu.FakeArray(shape, f"V{itemsize}").strides
        self._strides = options.get("strides") or tuple(step // itemsize for step in bytes_)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 2 * self.numel())

    def get_device(self) -> int:
        return 0

    def is_neg(self) -> bool:
        return False

    is_conj = _is_zerotensor = is_neg

    def detach(self) -> Tensor:
        place = {"address": self._address, "strides": self._strides}
        return Tensor(self._gpu, self.shape, self.dtype, **place)

    def view(self, dtype: str) -> Tensor:
        return Tensor(self._gpu, self.shape, dtype)

    def new(self) -> Tensor:
        return Tensor(self._gpu, self.shape, self.dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


# The library recognizes tensors of PyTorch by the module of their type.
Tensor.__module__ = "torch"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_gpu.FakeGpu:
    """Fake GPU on which torch and CuPy use the legacy default stream, their default."""
    fake = fake_gpu.install(monkeypatch)
    fake.theirs, fake.is_grad_enabled, fake.written = 0, True, []
    fake.is_capturing = False
    private = SimpleNamespace(
        _cuda_getCurrentRawStream=lambda device: fake.theirs,
        _functorch=SimpleNamespace(
            peek_interpreter_stack=lambda: None,
            is_functorch_wrapped_tensor=lambda tensor: False,
            is_legacy_batchedtensor=lambda tensor: False,
        ),
        _len_torch_dispatch_stack=lambda: 0,
        _get_tracing_state=lambda: None,
    )
    autograd = SimpleNamespace(
        forward_ad=SimpleNamespace(_current_level=-1),
        graph=SimpleNamespace(increment_version=fake.written.extend),
    )
    torch = SimpleNamespace(
        Tensor=Tensor,
        strided="strided",
        empty_like=Tensor.new,
        full=lambda shape, value, *, dtype, device: Tensor(fake, shape, dtype, filled=value),
        from_dlpack=lambda array: Tensor(
            fake, array.shape, str(array.dtype), address=array.data.ptr
        ),
        compiler=SimpleNamespace(is_dynamo_compiling=lambda: False),
        nn=SimpleNamespace(Parameter=type("Parameter", (Tensor,), {})),
        is_grad_enabled=lambda: fake.is_grad_enabled,
        _C=private,
        autograd=autograd,
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: fake.is_capturing),
        **{name: name for name in DTYPES},
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(
        torch_arrays, "_without_memory", lambda shape, strides, itemsize: Tensor(fake, shape, None)
    )
    cached = ("_dtypes", "_plain_types", "_torch_dtypes", "_torch_stream", "_transform_state")
    for name in (*cached, "_empty_strided"):
        monkeypatch.setattr(torch_arrays, name, getattr(torch_arrays, name).__wrapped__)
    return fake


def qkv(gpu: Any, dtype: str = "float16", **options: Any) -> dict[str, Tensor]:
    shapes = {"q": (2, 113, 6, 40), "k": (2, 203, 3, 40), "v": (2, 203, 3, 72)}
    return {name: Tensor(gpu, shape, dtype, **options) for name, shape in shapes.items()}


def decoding_step(gpu: Any, caches: int = 3) -> tuple[Tensor, ...]:
    """Return q, k_cache, v_cache, k and v of one decoding step for 3 sequences."""
    shapes = [(3, 1, 6, 40), *[(caches, 61, 3, 40)] * 2, *[(3, 1, 3, 40)] * 2]
    return tuple(Tensor(gpu, shape, "float16") for shape in shapes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_are_read_where_they_lie_and_answered_by_tensors(gpu, dtype):
    tensors = qkv(gpu, dtype)
    out, lse = flash_attention(**tensors, family="mma", return_lse=True)
    assert type(out) is type(lse) is Tensor
    assert (out.shape, out.dtype) == ((2, 113, 6, 72), dtype)
    assert (lse.shape, lse.dtype) == ((2, 6, 113), "float32")
    assert out.stride() == (113 * 6 * 72, 6 * 72, 72, 1)
    assert lse.stride() == (6 * 113, 113, 1)
    _, params = gpu.launches[0]
    for name, tensor in (tensors | {"out": out}).items():
        assert params[name]["data"] == tensor.data_ptr()
        assert params[name]["row_stride"] == tensor.stride()[1]
    assert params["lse"] == lse.data_ptr()


def test_tensors_of_the_same_shapes_are_planned_for_once(gpu, monkeypatch):
    flash_attention(**qkv(gpu))
    monkeypatch.setattr(gpu_forward, "make_plan", None)
    flash_attention(**qkv(gpu))
    assert len(prepared_calls._calls) == 1


def test_an_out_of_torch_is_written_and_returned(gpu):
    out = Tensor(gpu, (2, 113, 6, 72), "float16")
    assert flash_attention(**qkv(gpu), out=out) is out
    assert gpu.launches[0][1]["out"]["data"] == out.data_ptr()
    assert gpu.written == [out]
    tensors = qkv(gpu)
    over = Tensor(gpu, out.shape, out.dtype, address=tensors["v"].data_ptr() + 16)
    with pytest.raises(ValueError, match="out overlaps v; pass separate memory"):
        flash_attention(**tensors, out=over)


def test_a_stream_of_the_call_becomes_torchs_stream(gpu, monkeypatch):
    @contextlib.contextmanager
    def current(handle):
        before, gpu.theirs = gpu.theirs, handle
        yield
        gpu.theirs = before

    cuda = SimpleNamespace(
        ExternalStream=lambda handle, device: handle,
        default_stream=lambda device: 0,
        stream=current,
    )
    monkeypatch.setattr(sys.modules["torch"], "cuda", cuda)
    gpu.theirs = THEIRS
    for handle in (OURS, 0):
        flash_attention(**qkv(gpu), stream=SimpleNamespace(cuda_stream=handle))
    flash_attention(**qkv(gpu))
    assert gpu.streams == [OURS, 0, THEIRS]
    assert gpu.order == []
    assert (gpu.stream, gpu.theirs) == (0, THEIRS)


@pytest.mark.parametrize("ours", [OURS, THEIRS])
def test_a_call_of_tensors_is_enqueued_on_torchs_stream(gpu, ours):
    gpu.stream, gpu.theirs = ours, THEIRS
    flash_attention(**qkv(gpu))
    flash_attention(**qkv(gpu), out=Tensor(gpu, (2, 113, 6, 72), "float16"), return_lse=True)
    assert gpu.streams == [THEIRS] * 2
    assert gpu.order == []
    assert gpu.stream == ours


def test_the_workspace_of_a_call_of_tensors_is_torchs_memory(gpu):
    made = []
    tensors = {name: Tensor(gpu, (1, n, 1, 64), "float16") for name, n in LENGTHS.items()}
    new = sys.modules["torch"].empty_like

    def empty_like(tensor: Tensor) -> Tensor:
        made.append(new(tensor))
        return made[-1]

    sys.modules["torch"].empty_like = empty_like
    flash_attention(**tensors, family="mma")
    workspace = made[-1]
    assert workspace.dtype == "uint8"
    assert gpu.launches[0][1]["workspace"] == workspace.data_ptr()
    assert gpu.allocations == []


def test_tensors_beside_arrays_of_cupy_are_ordered_with_their_stream(gpu):
    gpu.stream, gpu.theirs = OURS, THEIRS
    tensors = qkv(gpu)
    flash_attention(**tensors | {"k": gpu.array(*tensors["k"].shape)})
    assert gpu.streams == [OURS]
    assert set(gpu.order[:-1]) == {(OURS, THEIRS)}
    assert gpu.order[-1] == (THEIRS, OURS)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_no_stream_waits_for_a_captured_one_when_a_function_captures_a_tensor(gpu, is_capturing):
    gpu.stream, gpu.theirs, gpu.is_capturing = OURS, THEIRS, is_capturing
    read_capture("table", qkv(gpu)["q"])
    assert gpu.order == ([] if is_capturing else [(OURS, THEIRS)])
    gpu.order.clear()
    # A function that reads values waits, and CUDA then reports that the stream is captured.
    rows.read("q", qkv(gpu)["q"])
    assert gpu.order == [(OURS, THEIRS)]


def test_a_tensor_that_requires_gradients_is_refused_where_none_is_recorded(gpu):
    tensors = qkv(gpu) | {"k": Tensor(gpu, (2, 203, 3, 40), "float16", requires_grad=True)}
    with pytest.raises(TypeError, match=r"k requires a gradient, .*; pass k\.detach\(\), or call"):
        flash_attention(**tensors)


def test_parameters_and_what_nobody_differentiates_are_read_where_they_lie(gpu):
    tensors = qkv(gpu) | {"k": Tensor(gpu, (2, 203, 3, 40), "float16", requires_grad=True)}
    tensors["v"].__class__ = sys.modules["torch"].nn.Parameter
    gpu.is_grad_enabled = False
    assert type(flash_attention(**tensors)) is Tensor


def test_what_is_wrong_with_a_tensor_is_said_as_of_other_arrays(gpu):
    tensors = qkv(gpu)
    with pytest.raises(ValueError, match=r"v has 3 axes, shape \(203, 3, 72\); expected 4"):
        flash_attention(**(tensors | {"v": Tensor(gpu, (203, 3, 72), "float16")}))
    with pytest.raises(TypeError, match="k has dtype int32; expected one of float16"):
        flash_attention(**(tensors | {"k": Tensor(gpu, (2, 203, 3, 40), "int32")}))


def test_references_read_tensors_on_a_gpu_as_cupy_arrays(gpu):
    tensor = qkv(gpu)["q"]
    for array in rows.as_bhsd(tensor, tensor, tensor, "bhsd"):
        assert type(array) is fake_gpu.FakeArray
        assert (array.shape, array.dtype) == (tensor.shape, np.float16)
        assert array.data.ptr == tensor.data_ptr()


def test_packed_and_cached_sequences_take_tensors_too(gpu):
    q = Tensor(gpu, (113, 6, 40), "float16")
    k, v = (Tensor(gpu, (203, 3, dim), "float16") for dim in (40, 72))
    offsets = Tensor(gpu, (4,), "int32")
    out = flash_attention_varlen(q, k, v, offsets, offsets, 63, 105)
    assert type(out) is Tensor
    _, params = gpu.launches[-1]
    assert params["out"]["data"] == out.data_ptr()
    assert params["cu_seqlens_q"] == offsets.data_ptr()
    step, *caches, k, v = decoding_step(gpu, caches=4)
    lengths = Tensor(gpu, (3,), "int32")
    out = flash_attention_with_kvcache(step, *caches, k, v, cache_seqlens=lengths)
    assert gpu.written == caches
    assert out.shape == (3, 1, 6, 40)
    (_, append), (_, params) = gpu.launches[-2:]
    assert append["k"]["data"] == params["k"]["data"] == caches[0].data_ptr()
    assert append["seqused_k"] == lengths.data_ptr()


def test_lengths_of_torch_may_have_another_integer_dtype(gpu):
    gpu.stream, gpu.theirs = OURS, THEIRS
    q, k, v = (Tensor(gpu, (113, 6, 40), "float16") for _ in range(3))
    offsets = Tensor(gpu, (4,), "int64")
    out = flash_attention_varlen(q, k, v, offsets, offsets, 63, 105)
    assert type(out) is Tensor
    ((_, params),) = gpu.launches
    assert params["cu_seqlens_q"] not in (0, offsets.data_ptr())
    # The lengths are converted on torch's current stream, so no event is needed.
    assert gpu.streams == [THEIRS]
    assert gpu.order == []


def test_conversions_of_tensors_are_named_as_torch_names_them(gpu):
    q, k, v = (Tensor(gpu, (113, 6, 40), "float16") for _ in range(3))
    offsets = Tensor(gpu, (4,), "float32")
    with pytest.raises(TypeError, match=r"pass cu_seqlens_\w\.to\(torch\.int32\)"):
        flash_attention_varlen(q, k, v, offsets, offsets, 63, 105)
    mask = Tensor(gpu, (113, 203), "int32")
    with pytest.raises(TypeError, match=r"pass mask\.to\(torch\.bool\)"):
        flash_attention(**qkv(gpu), mask=mask)


def test_the_device_of_tensors_is_chosen_as_torch_has_it_chosen(gpu, monkeypatch):
    monkeypatch.setattr(Tensor, "get_device", lambda self: 1)
    with pytest.raises(ValueError, match=r"call within `with torch\.cuda\.device\(1\)`"):
        flash_attention(**qkv(gpu))


def test_conversions_of_tensors_on_the_host_are_named_as_torch_names_them():
    torch = pytest.importorskip("torch")
    q = torch.zeros((7, 2, 8))
    offsets = torch.tensor([0.0, 7.0])
    with pytest.raises(TypeError, match=r"pass cu_seqlens_\w\.to\(torch\.int32\)"):
        flash_attention_varlen(q, q, q, offsets, offsets, 7, 7)


def test_rotary_tables_of_torch_whose_rows_lie_apart_differently_are_copied(gpu):
    cos = Tensor(gpu, (61, 8), "float16")
    sin = Tensor(gpu, (61, 8), "float16", strides=(24, 1))
    tables = {"rotary_cos": cos, "rotary_sin": sin}
    out = flash_attention_with_kvcache(*decoding_step(gpu), cache_seqlens=5, **tables)
    assert type(out) is Tensor
    (_, append), _ = gpu.launches
    assert append["rotary_stride"] == 8
    assert append["cos"] != cos.data_ptr()
    assert append["sin"] != sin.data_ptr()


@pytest.mark.parametrize("name", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 1, 1, 1), (2, 0, 1, 3)])
@pytest.mark.parametrize("is_direct", [False, True])
def test_torch_makes_contiguous_tensors(name, shape, is_direct, monkeypatch):
    torch = pytest.importorskip("torch")
    private = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
    if is_direct and private is None:
        pytest.skip("this release of torch has no function that skips its dispatcher")
    monkeypatch.setattr(torch_arrays, "_empty_strided", lambda: private if is_direct else None)

    def ndarray(shape: Any, dtype: str, _: Any, strides: Any) -> np.ndarray:
        return np.ndarray(shape, dtype, bytearray(4096), strides=strides)

    cupy = SimpleNamespace(zeros=np.zeros, ndarray=ndarray)
    monkeypatch.setattr(torch_arrays, "_cupy", lambda: cupy)
    make = torch_arrays.tensor_maker(shape, np.dtype(name))
    new, other = make(), make()
    assert (tuple(new.shape), new.dtype) == (shape, getattr(torch, name))
    assert new.stride() == torch.empty(shape).stride()
    assert new.numel() == 0 or new.data_ptr() != other.data_ptr()


def calls(gpu: Any, kind: str) -> tuple[DifferentiableCall, dict[str, Any], tuple[Tensor, ...]]:
    """Return a call, its options, and q, k and v."""
    heads = ((6, 40), (3, 40), (3, 72))
    if kind == "dense":
        call, _ = dense_call(True, None, None, "bshd", {})
        lead = ((2, 113), (2, 203), (2, 203))
        options: dict[str, Any] = {}
    else:
        places = [Tensor(gpu, (n,), "int32") for n in (3, 3, 2)]
        used = places[2] if kind == "used" else None
        call, _ = varlen_call(*places[:2], 70, 130, used, True, None, {"window_size": None})
        lead = ((113,), (203,), (203,))
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
        options = dict(zip(names, (*places[:2], 70, 130, used), strict=True))
    shapes = [first + last for first, last in zip(lead, heads, strict=True)]
    return call, options, tuple(Tensor(gpu, shape, "float16") for shape in shapes)


def structs_of(gpu: Any, function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result and the launched structs; allocations restart at a fixed address."""
    gpu.structs.clear()
    before, gpu._next = gpu._next, fake_gpu._FIRST << 1
    found = function(*arguments, **options)
    gpu._next = before
    return found, list(gpu.structs)


@pytest.mark.parametrize("kind", ["dense", "varlen", "used"])
@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("wrt", ["qkv", "qv", "k"])
def test_a_repeated_call_and_its_gradients_launch_what_plain_ones_do(gpu, kind, has_dlse, wrt):
    gpu.is_grad_enabled = False
    call, options, inputs = calls(gpu, kind)
    plain, backward = flash_attention, flash_attention_backward
    if kind != "dense":
        plain, backward = flash_attention_varlen, flash_attention_varlen_backward
    arrays = inputs + call.following_arrays
    assert torch_autograd.run(arrays, call.options) is None, "no call like it was made"
    constants = tuple(call.constants.values())
    whole = {"causal": True, "return_lse": True, **options}
    plain(*inputs, **whole)  # the first call has other addresses in its structs
    _, expected = structs_of(gpu, plain, *inputs, **whole)
    for _ in range(2):
        (results, found), launched = structs_of(gpu, torch_autograd.run, arrays, call.options)
        assert launched == expected
    record = torch_autograd.record(found, results)
    out, lse = results
    dout = Tensor(gpu, out.shape, "float16")
    dlse = Tensor(gpu, lse.shape, "float32") if has_dlse else None
    in_order = in_field_order(inputs, results, (dout, dlse), call.lengths)
    backward_options = call.backward_options(tuple(wrt))
    assert torch_autograd.run_gradients(in_order, backward_options) is None
    whole = {"causal": True, "dlse": dlse, "wrt": tuple(wrt), **options}
    backward(dout, *inputs, out, lse, **whole)
    _, expected = structs_of(gpu, backward, dout, *inputs, out, lse, **whole)
    for _ in range(2):
        new, launched = structs_of(gpu, torch_autograd.run_gradients, in_order, backward_options)
        assert launched == expected
        assert [x.shape for x in new] == [inputs["qkv".index(name)].shape for name in wrt]
    needed = tuple(name in wrt for name in "qkv")
    saved = (*inputs, *results, *constants)
    for _ in range(3):
        new, launched = structs_of(gpu, torch_autograd.gradients, record, saved, dout, dlse, needed)
        assert launched == expected
        for gradient, is_needed, like in zip(new, needed, inputs, strict=True):
            assert (gradient is not None) == is_needed
            assert gradient is None or gradient.shape == like.shape


def test_what_is_not_as_recorded_is_left_to_the_usual_way(gpu):
    gpu.is_grad_enabled = False
    call, _, inputs = calls(gpu, "dense")
    arrays = inputs + call.following_arrays
    call.run(inputs)
    results, found = torch_autograd.run(arrays, call.options)
    record = torch_autograd.record(found, results)
    dout = Tensor(gpu, results[0].shape, "float16")
    needed = (True, True, True)

    def gradients(saved: Any, dout: Any = dout) -> Any:
        return torch_autograd.gradients(record, saved, dout, None, needed)

    saved = (*inputs, *results)
    assert gradients(saved) is not None
    for place, array in enumerate(saved):
        elsewhere = Tensor(gpu, array.shape, array.dtype)
        assert gradients((*saved[:place], elsewhere, *saved[place + 1 :])) is None
    q = inputs[0]
    sparser = Tensor(gpu, q.shape, q.dtype, address=q.data_ptr(), strides=(1 << 20, 480, 40, 1))
    assert gradients((sparser, *saved[1:])) is None
    assert gradients(saved, None) is None
    assert gradients(saved, gpu.array(*results[0].shape)) is None
    in_order = in_field_order(inputs, results, (dout, None), call.lengths)
    options = call.backward_options(ROWS)
    call.pull_back(inputs, results, (dout, None), ROWS)
    assert torch_autograd.run_gradients(in_order, options) is not None
    gpu.device = 1
    assert gradients(saved) is None
    assert torch_autograd.run_gradients(in_order, options) is None
    q.is_cuda = False
    assert torch_autograd.run(arrays, call.options) is None
    gpu.device = 0
    assert torch_autograd.run_gradients(in_order, options) is None


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_both_passes_of_autograd_run_on_the_stream_of_torch(gpu, kind):
    gpu.is_grad_enabled = False
    gpu.stream, gpu.theirs = OURS, THEIRS
    call, _, inputs = calls(gpu, kind)
    call.run(inputs)
    gpu.forget()
    results, found = torch_autograd.run(inputs + call.following_arrays, call.options)
    record = torch_autograd.record(found, results)
    dout = Tensor(gpu, results[0].shape, "float16")
    saved = (*inputs, *results, *(x for x in call.lengths if x is not None))
    for _ in range(2):
        new = torch_autograd.gradients(record, saved, dout, None, (True, True, True))
        assert all(gradient is not None for gradient in new)
    in_order = in_field_order(inputs, results, (dout, None), call.lengths)
    assert torch_autograd.run_gradients(in_order, call.backward_options(ROWS)) is not None
    assert len(gpu.streams) >= 4
    assert set(gpu.streams) == {THEIRS}
    # CuPy's own stream neither waits nor changes.
    assert gpu.order == []
    assert gpu.stream == OURS
    gpu.forget()
    gpu.theirs = OURS
    torch_autograd.gradients(record, saved, dout, None, (True, True, True))
    assert set(gpu.streams) == {OURS}


def test_results_that_no_kernel_writes_are_filled_on_the_stream_of_torch(gpu, monkeypatch):
    gpu.is_grad_enabled = False
    gpu.stream, gpu.theirs = OURS, THEIRS
    places = [Tensor(gpu, (1,), "int32") for _ in range(2)]
    call, _ = varlen_call(*places, 70, 130, None, True, None, {})
    inputs = tuple(Tensor(gpu, (n, 6, 40), "float16") for n in (113, 203, 203))
    call.run(inputs)
    streams = []
    monkeypatch.setattr(fake_gpu.FakeArray, "fill", lambda self, value: streams.append(gpu.stream))
    results, _ = torch_autograd.run(inputs + call.following_arrays, call.options)
    assert streams == [THEIRS] * len(results)
    assert gpu.stream == OURS


@pytest.mark.parametrize("strides", [None, (2 * 6 * 226, 6 * 226, 226, 2)])
def test_parts_that_are_tensors_are_merged_where_they_lie(gpu, strides):
    parts = Tensor(gpu, (3, 2, 113, 6, 40), "float16")
    lse = Tensor(gpu, (3, 2, 6, 113), "float32", strides=strides, itemsize=4)
    sinks = Tensor(gpu, (6,), "float32", itemsize=4)
    gpu.launches.clear()
    combine(parts, lse, sinks=sinks)
    ((entry, params),) = gpu.launches
    assert entry == "combine_partials"
    assert params["out_partial"]["data"] == parts.data_ptr()
    assert params["sinks"] == sinks.data_ptr()
    # The kernel cannot read an array with these strides in place, so it gets a copy.
    assert (params["lse_partial"] == lse.data_ptr()) == (strides is None)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_number_as_a_scale_is_filled_into_new_memory_in_each_call(gpu, library):
    shape = (3, 1, 6, 64)
    q = Tensor(gpu, shape, "float16") if library == "torch" else gpu.array(*shape)
    given = [Arguments(q=q, k_scale=scale, v_scale=1) for scale in (0.5, 0.5, 2.0)]
    placed = map(dispatch.copy_scales_to_gpu, given)
    scales = [array for each in placed for array in (each.k_scale, each.v_scale)]
    assert [array.filled for array in scales] == [0.5, 1, 0.5, 1, 2, 1]
    assert {(type(x), x.shape, str(x.dtype)) for x in scales} == {(type(q), (), "float32")}
    at = [x.data_ptr() if library == "torch" else x.data.ptr for x in scales]
    assert len(set(at)) == 6
