"""Repeated backward calls of CuPy arrays: what their call key distinguishes, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import fake_gpu
from support.gpu.fake_gpu import FakeArray, FakeGpu

from cupy_flash import flash_attention, flash_attention_backward
from cupy_flash.calls.gpu import repeated_gradients
from cupy_flash.families.params import _params_dtype
from cupy_flash.planning import tuning

ROWS, HEADS, DIM = 64, 4, 32
SHAPE = (2, ROWS, HEADS, DIM)
NAMES = ("dout", "q", "k", "v", "out", "lse")
GRADIENTS = ("dq", "dk", "dv")
# Fields of the argument struct that are addresses in newly allocated memory.
NEW = ("workspace", "kv_sums")
STRUCT = _params_dtype(None, None, False, (), "backward")
Arrays = dict[str, FakeArray]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return fake_gpu.install(monkeypatch)


def call_arrays(
    gpu: FakeGpu, dtype: Any = np.float16, shape: tuple[int, ...] = SHAPE, device: int = 0
) -> Arrays:
    arrays = {name: gpu.array(*shape, dtype=dtype, device=device) for name in NAMES[:-1]}
    batch, rows, heads, _ = shape
    return arrays | {"lse": gpu.array(batch, heads, rows, dtype=np.float32, device=device)}


def backward(arrays: Arrays, **options: Any) -> tuple[Any, ...]:
    return flash_attention_backward(*(arrays[name] for name in NAMES), **options)


def by_general_path(arrays: Arrays, **options: Any) -> tuple[Any, ...]:
    """Return the gradients of a call that the fast path does not take, because wrt is given."""
    return backward(arrays, wrt=("q", "k", "v"), **options)


def structs(gpu: FakeGpu) -> list[Any]:
    """Return the argument struct of each launch."""
    return [np.frombuffer(data, STRUCT, 1)[0] for data in gpu.structs]


def test_repeated_calls_launch_what_the_general_path_does(gpu: FakeGpu) -> None:
    arrays, others = call_arrays(gpu), call_arrays(gpu)
    results = [run(given) for run in (by_general_path, backward) for given in (arrays, others) * 2]
    assert len(gpu.compiled) == 1
    assert len(repeated_gradients._calls) == 1
    launches = len(gpu.launches) // len(results)
    for n, gradients in enumerate(results):
        given = (arrays, others)[n % 2] | dict(zip(GRADIENTS, gradients, strict=True))
        for struct in structs(gpu)[n * launches : (n + 1) * launches]:
            for name, array in given.items():
                address = struct[name] if name == "lse" else struct[name]["data"]
                assert address == array.data.ptr, name
            assert struct["dlse"] == struct["cu_seqlens_q"] == struct["seqused_k"] == 0
        assert {(x.shape, x.dtype) for x in gradients} == {(SHAPE, np.dtype(np.float16))}
    addresses = [x.data.ptr for gradients in results for x in gradients]
    assert len(set(addresses)) == len(addresses)


def transposed(gpu: FakeGpu, name: str) -> FakeArray:
    """Return an array of another order in memory: (batch, heads, seqlen, head_dim)."""
    size = 2 * DIM
    strides = (HEADS * ROWS * size, size, ROWS * size, 2)
    if name == "lse":
        return gpu.array(2, HEADS, ROWS, dtype=np.float32, strides=(4 * HEADS, 4, 8 * HEADS))
    return gpu.array(*SHAPE, strides=strides)


def offset(gpu: FakeGpu, name: str) -> FakeArray:
    """Return an array whose address is a multiple of 4 bytes, but not of 16."""
    return FakeArray(*like(name), address=gpu.address() + 4)


def like(name: str) -> tuple[tuple[int, ...], Any]:
    return ((2, HEADS, ROWS), np.float32) if name == "lse" else (SHAPE, np.float16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [transposed, offset])
def test_the_strides_and_alignment_of_each_array_are_distinguished(
    gpu: FakeGpu, name: str, change: Callable[[FakeGpu, str], FakeArray]
) -> None:
    arrays = call_arrays(gpu)
    backward(arrays)
    gpu.forget()
    changed = arrays | {name: change(gpu, name)}
    by_general_path(changed)
    expected = structs(gpu)
    gpu.forget()
    # Arrays with misaligned elements are copied, so that their addresses differ.
    fields = set(STRUCT.names or ()) - {name, *GRADIENTS, *NEW}
    for run in (backward, backward, by_general_path):
        run(changed)
        for struct, of_first in zip(structs(gpu), expected, strict=True):
            assert {f: struct[f] for f in fields} == {f: of_first[f] for f in fields}
            # A copy is read instead of the changed array in all calls, or in none.
            address, of_copy = (
                x[name].item() if name == "lse" else x[name]["data"] for x in (struct, of_first)
            )
            here = changed[name].data.ptr
            assert (address == here) == (of_copy == here)
            for field in {name, *GRADIENTS} - {"lse"}:
                assert struct[field].tolist()[1:] == of_first[field].tolist()[1:], field
        gpu.forget()
    backward(arrays)
    assert structs(gpu)[-1]["q"].tolist()[1:] == tuple(n // 2 for n in arrays["q"].strides[:3])


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, {"causal": True}),
        ({}, {"softmax_scale": 0.5}),
        ({}, {"softmax_scale": 1}),
        ({"causal": True}, {"q_offset": 3}),
        ({"causal": True, "q_offset": 1}, {"q_offset": None}),
        ({}, {"layout": "bhsd"}),
    ],
    ids=str,
)
def test_options_are_distinguished(
    gpu: FakeGpu, options: dict[str, Any], change: dict[str, Any]
) -> None:
    # The layouts have equal shapes.
    arrays = call_arrays(gpu, shape=(2, HEADS, HEADS, DIM))
    for count, given in enumerate((options, options | change, options), start=1):
        backward(arrays, **given)
        assert len(repeated_gradients._calls) == len(gpu.compiled) == min(count, 2)


def test_shapes_dtypes_and_devices_are_distinguished(gpu: FakeGpu) -> None:
    cases = [
        call_arrays(gpu),
        call_arrays(gpu, np.float32),
        call_arrays(gpu, shape=(2, HEADS, ROWS, DIM)),
        call_arrays(gpu, shape=(1, ROWS, HEADS, DIM)),
    ]
    for _ in range(2):
        for arrays in cases:
            assert {x.shape for x in backward(arrays)} == {arrays["q"].shape}
        assert len(gpu.compiled) == len(cases)
    elsewhere = call_arrays(gpu, device=1)
    with pytest.raises(ValueError, match="q lies on device 1, but the current device is 0"):
        backward(elsewhere)
    for name in NAMES:
        with pytest.raises(ValueError, match=f"{name} lies on device 1"):
            backward(cases[0] | {name: elsewhere[name]})
    gpu.device = 1
    backward(elsewhere)
    assert len(gpu.compiled) == len(cases) + 1
    with pytest.raises(ValueError, match="q lies on device 0, but the current device is 1"):
        backward(cases[0])


def test_new_tuning_tables_are_distinguished(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = call_arrays(gpu)
    for generation in (1, 2, 1):
        monkeypatch.setattr(tuning, "generation", lambda n=generation: n)
        backward(arrays)
    assert len(gpu.compiled) == 2


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"k": (2, ROWS, HEADS, DIM + 8)}, {}, ValueError, "k has"),
        ({"out": (2, ROWS + 1, HEADS, DIM)}, {}, ValueError, "out has shape"),
        ({"lse": (2, HEADS, ROWS + 1)}, {}, (TypeError, ValueError), "lse has"),
        *(({name: SHAPE}, {}, TypeError, f"{name}.* float32") for name in NAMES[:-1]),
        ({"lse": (2, HEADS, ROWS)}, {}, TypeError, "lse has dtype float64"),
        ({}, {"layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ({}, {"layout": ["bshd"]}, (TypeError, ValueError), "layout is"),
        ({}, {"causal": 1}, TypeError, "causal is 1"),
        ({}, {"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
        ({}, {"softmax_scale": "1"}, TypeError, "softmax_scale is"),
        ({}, {"backend": "tpu"}, ValueError, "backend is 'tpu'"),
    ],
)
def test_errors_are_those_of_the_general_path(
    gpu: FakeGpu, changes: dict[str, Any], options: dict[str, Any], error: Any, message: str
) -> None:
    arrays = call_arrays(gpu)
    backward(arrays)
    # Arrays of the right shape have a wrong dtype.
    wrong = dict(arrays)
    for name, shape in changes.items():
        dtype = arrays[name].dtype
        if shape == arrays[name].shape:
            dtype = np.dtype(f"float{16 * dtype.itemsize}")
        wrong[name] = gpu.array(*shape, dtype=dtype)
    messages = []
    for run in (by_general_path, backward, backward):
        with pytest.raises(error, match=message) as caught:
            run(wrong, **options)
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert len(repeated_gradients._calls) == 1


def test_the_number_of_calls_that_are_kept_is_limited(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated_gradients, "_MAX_CALLS", 3)
    arrays = call_arrays(gpu)
    for offset in range(8):
        backward(arrays, causal=True, q_offset=offset)
        assert 1 <= len(repeated_gradients._calls) <= 3


def test_host_arrays_do_not_import_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_gradients, "cupy_module", None)
    q = np.ones((1, 4, 2, 8), np.float32)
    out, lse = flash_attention(q, q, q, return_lse=True)
    assert len(flash_attention_backward(q, q, q, q, out, lse)) == 3
