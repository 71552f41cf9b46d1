"""Launches for XLA's call frames, on a fake GPU: addresses, streams, devices and workspaces."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.gpu import fake_gpu

from cupy_flash import (
    ScoreMod,
    flash_attention,
    flash_attention_backward,
    flash_attention_hvp,
    flash_attention_jvp,
)

jax = pytest.importorskip("jax")
pytest.importorskip("cupy_flash.jax")

from cupy_flash.calls.options import Options  # noqa: E402
from cupy_flash.jax import on_gpu  # noqa: E402
from cupy_flash.jax.frames import DTYPES, Frame  # noqa: E402
from cupy_flash.jax.static_call import StaticCall, token_of  # noqa: E402
from cupy_flash.planning import tuning  # noqa: E402

CODES = {dtype: code for code, dtype in DTYPES.items()}
STREAM, DEVICE, CONTEXT = 0x57E, 1, 0xC0
_Word = ctypes.c_int64
_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Array(NamedTuple):
    """Buffer of a frame."""

    address: int
    shape: tuple[int, ...]
    dtype: Any = np.float16


class FakeXla:
    """Call frames in memory, with functions that return a stream and a device."""

    def __init__(self, *, has_ordinal: bool = True) -> None:
        self.stream = STREAM
        self._kept: list[Any] = []
        api = (_Word * 24)(192 if has_ordinal else 184)
        for offset, function in ((80, self._get_stream), (184, self._get_device)):
            callback = _Function(function)
            self._kept.append(callback)
            api[offset // 8] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        self._api = self._at(api)

    def frame(self, static: StaticCall, arguments: list[Array], results: list[Array]) -> int:
        """Return the address of a frame."""
        text = static.text().encode()
        span = (_Word * 2)(self._at(ctypes.create_string_buffer(text)), len(text))
        values = (_Word * 1)(self._at(span))
        words = [168, 0, self._api, CONTEXT, 3]
        for arrays in (arguments, results):
            buffers = (_Word * len(arrays))(*map(self._buffer, arrays))
            words += [40, 0, len(arrays), 0, self._at(buffers)]
        words += [48, 0, 1, 0, 0, self._at(values), 0]
        return self._at((_Word * len(words))(*words))

    def _buffer(self, array: Array) -> int:
        dims = (_Word * len(array.shape))(*array.shape)
        # The upper half of the dtype's word is undefined.
        dtype = CODES[np.dtype(array.dtype)] | 0x7EAF << 32
        words = 48, 0, dtype, array.address, len(array.shape), self._at(dims)
        return self._at((_Word * 6)(*words))

    def _at(self, memory: Any) -> int:
        self._kept.append(memory)
        return ctypes.addressof(memory)

    def _get_stream(self, address: int) -> int:
        return self._answer(address, self.stream)

    def _get_device(self, address: int) -> int:
        return self._answer(address, 0xBAD << 32 | DEVICE)

    @staticmethod
    def _answer(address: int, value: int) -> int:
        words = (_Word * 4).from_address(address)
        assert words[2] == CONTEXT
        words[3] = value
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake_gpu.install(monkeypatch)
    for kept in ("_calls", "_functions", "_workspaces"):
        monkeypatch.setattr(on_gpu, kept, {})
    monkeypatch.setattr(on_gpu, "_complete", set())
    monkeypatch.setattr(on_gpu, "cupy_module", lambda: sys.modules["cupy"])
    monkeypatch.setattr(on_gpu, "relaxed_capture", made.relaxed_capture)
    for cached in (on_gpu._reader, on_gpu._device_count):
        cached.cache_clear()
    return made


@pytest.fixture
def xla() -> FakeXla:
    return FakeXla()


def dense(gpu: Any, **options: Any) -> tuple[StaticCall, list[Array], list[Array]]:
    shapes = (2, 113, 6, 64), (2, 127, 2, 64), (2, 127, 2, 64)
    static = StaticCall(("q", "k", "v"), Options(return_lse=True, **options))
    arguments = [Array(gpu.address(), shape) for shape in shapes]
    results = [Array(gpu.address(), shapes[0]), Array(gpu.address(), (2, 6, 113), np.float32)]
    return static, arguments, results


def test_a_call_is_prepared_once_and_launched_on_the_programs_memory(
    gpu: Any, xla: FakeXla
) -> None:
    static, *arrays = dense(gpu, causal=True)
    for stream in (STREAM, STREAM + 1):
        xla.stream = stream
        arguments, results = (
            [array._replace(address=gpu.address()) for array in some] for some in arrays
        )
        gpu.forget()
        on_gpu.execute(xla.frame(static, arguments, results))
        ((entry, params),) = gpu.launches
        assert entry == "attention"
        found = [params[name]["data"] for name in ("q", "k", "v", "out")]
        assert found == [x.address for x in (*arguments, results[0])]
        assert params["lse"] == results[1].address
        assert (gpu.streams, gpu.allocations) == ([stream], [])
        # The device of the call was current during the call only.
        assert (gpu.devices, gpu.device) == ([DEVICE, 0], 0)
        assert bool(gpu.compiled) == (stream == STREAM)


def test_a_prepared_call_asks_only_for_addresses_and_the_stream(
    gpu: Any, xla: FakeXla, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading shapes, entering a stream and asking for captures take longer than the launch."""
    static, arguments, results = dense(gpu, causal=True)
    static = static._replace(specs=tuple((x.shape, "float16") for x in arguments))
    frame = xla.frame(static, arguments, results)
    on_gpu.execute(frame)
    assert len(on_gpu._calls) == 1
    for name in ("external_stream", "relaxed_capture"):
        monkeypatch.delattr(on_gpu, name)
    monkeypatch.delattr(sys.modules["cupy"].cuda.runtime, "streamIsCapturing")
    monkeypatch.delattr(Frame, "keys")
    on_gpu.execute(frame)
    assert len(on_gpu._calls) == 1
    assert gpu.streams == [STREAM] * 2


def test_other_shapes_dtypes_and_alignments_are_other_calls(gpu: Any, xla: FakeXla) -> None:
    static, arguments, results = dense(gpu)
    q, *others = arguments
    other_dtype = [x._replace(dtype=jax.numpy.bfloat16) for x in arguments]
    unaligned = q._replace(address=q.address + 2)
    longer = [x._replace(shape=(2, 200, 2, 64)) for x in others]
    for given in (arguments, other_dtype, [unaligned, *others], [q, *longer]):
        on_gpu.execute(xla.frame(static, given, results))
    assert len(on_gpu._calls) == 4


def test_the_device_is_not_asked_for_if_there_is_one_only(
    gpu: Any, xla: FakeXla, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", lambda: 1)
    on_gpu._device_count.cache_clear()
    on_gpu.execute(xla.frame(*dense(gpu)))
    assert gpu.devices == []
    on_gpu._device_count.cache_clear()


def test_before_jax_tells_the_device_it_is_that_of_the_memory(gpu: Any) -> None:
    static, arguments, results = dense(gpu)
    on_gpu.execute(FakeXla(has_ordinal=False).frame(static, arguments, results))
    assert gpu.devices == [DEVICE, 0]


def test_gradients_use_the_workspace_of_the_program(gpu: Any, xla: FakeXla) -> None:
    names = ("q", "k", "v", "out", "dout", "lse")
    forward, (q, k, v), (out, lse) = dense(gpu)
    options = forward.options._replace(wrt=("q", "k", "v"))
    static = StaticCall(names, options)
    arguments = [q, k, v, out, out._replace(address=gpu.address()), lse]
    gradients = [x._replace(address=gpu.address()) for x in (q, k, v)]
    on_gpu.execute(xla.frame(static, arguments, gradients))
    # Without a workspace in the program, CuPy allocates it.
    ((allocated, size),) = gpu.allocations
    of_gradients = [x.address for x in (*gradients, arguments[4])]
    assert_hold(gpu.structs, allocated, *of_gradients)
    gpu.forget()
    scratch = Array(gpu.address(), (size,), np.uint8)
    on_gpu.execute(xla.frame(static._replace(scratch=size), arguments, [*gradients, scratch]))
    assert not gpu.allocations
    assert_hold(gpu.structs, scratch.address, *of_gradients)
    # A smaller one, which was sized for another device, is not used.
    gpu.forget()
    smaller = static._replace(scratch=size - 1)
    on_gpu.execute(xla.frame(smaller, arguments, [*gradients, scratch]))
    assert [n for _, n in gpu.allocations] == [size]


def assert_hold(structs: list[bytes], *addresses: int) -> None:
    """Assert that argument structs hold all addresses."""
    words = set(np.frombuffer(b"".join(x[: len(x) // 8 * 8] for x in structs), np.int64).tolist())
    assert set(addresses) <= words


@pytest.mark.parametrize("is_donated", [False, True])
def test_caches_that_are_not_donated_are_copied_first(
    gpu: Any, xla: FakeXla, is_donated: bool
) -> None:
    static = StaticCall(
        ("q", "k", "v", "k_cache", "v_cache", "cache_seqlens"), Options("kvcache", return_lse=True)
    )
    shapes = [(2, 1, 4, 64), (2, 1, 2, 64), (2, 1, 2, 64), (2, 300, 2, 64), (2, 300, 2, 64)]
    q, k, v, *caches = (Array(gpu.address(), shape) for shape in shapes)
    lengths = Array(gpu.address(), (2,), np.int32)
    updated = caches if is_donated else [x._replace(address=gpu.address()) for x in caches]
    results = [q._replace(address=gpu.address()), Array(gpu.address(), (2, 4, 1), np.float32)]
    on_gpu.execute(xla.frame(static, [q, k, v, *caches, lengths], [*results, *updated]))
    size = 2 * 300 * 2 * 64 * 2
    copies = [(b.address, a.address, size, STREAM) for a, b in zip(caches, updated, strict=True)]
    assert gpu.copies == ([] if is_donated else copies)
    append, attention = (params for _, params in gpu.launches[:2])
    assert append["k"]["data"] == updated[0].address
    assert attention["k"]["data"] == updated[0].address
    assert attention["seqused_k"] == lengths.address


def with_table(static: StaticCall) -> StaticCall:
    """Return the call with a function that captures an array."""
    table = np.arange(6, dtype=np.float32)
    mod = ScoreMod(lambda score, h: score * table[h])
    return static._replace(functions=(("score_mod", token_of(mod)),))


def test_captured_arrays_are_copied_to_the_device_once(
    gpu: Any, xla: FakeXla, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded launches refer to the copies, however many other calls there were since."""
    monkeypatch.setattr(on_gpu, "_MAX_CALLS", 1)
    static, arguments, results = dense(gpu)
    with_copy = with_table(static)
    structs = []
    for call in (with_copy, static, with_copy):
        on_gpu.execute(xla.frame(call, arguments, results))
        structs.append(list(gpu.structs))
        gpu.structs.clear()
        # More functions than a program has.
        for number in range(300):
            on_gpu._on_device(token_of(ScoreMod(lambda score, n=number: score * n)), DEVICE)
    assert len(gpu.uploads) == 1
    assert structs[0] == structs[2]


def test_a_call_is_prepared_while_it_is_recorded(gpu: Any, xla: FakeXla) -> None:
    static, arguments, results = dense(gpu)
    gpu.captures = gpu.refuses = True
    on_gpu.execute(xla.frame(with_table(static), arguments, results))
    assert gpu.refuses
    assert set(gpu.streams) == {STREAM}
    # The copy of the captured array is not recorded, and has ended.
    assert len(gpu.compiled) == len(gpu.uploads) == 1
    assert gpu.upload_streams == gpu.waited != [STREAM]


def test_recorded_launches_keep_their_workspace(gpu: Any, xla: FakeXla) -> None:
    """The workspace of the program may be too small, if it was traced for another GPU."""
    static = StaticCall(("q", "k", "v"), Options(return_lse=True))
    q, k, v = (Array(gpu.address(), (1, n, 2, 128)) for n in (1, 20_000, 20_000))
    results = [Array(gpu.address(), q.shape), Array(gpu.address(), (1, 2, 1), np.float32)]
    on_gpu.execute(xla.frame(static, [q, k, v], results))
    ((_, size),) = gpu.allocations
    gpu.captures = gpu.refuses = True
    scratch = Array(gpu.address(), (1,), np.uint8)
    recorded = static._replace(scratch=1)
    # XLA records again if an address has changed.
    others = [x._replace(address=gpu.address()) for x in results]
    found = []
    for q_again, made in ((q, results), (q._replace(address=gpu.address()), results), (q, others)):
        gpu.forget()
        on_gpu.execute(xla.frame(recorded, [q_again, k, v], [*made, scratch]))
        assert gpu.results == [made[0].address]
        assert gpu.allocations == []
        found.append([n for _, n in gpu.permanent_allocations])
        assert_hold(gpu.structs, *(memory.ptr for memory in list(on_gpu._workspaces.values())[-1:]))
    assert found == [[size], [], [size]]


def test_a_call_is_prepared_again_if_tiles_were_tuned(gpu: Any, xla: FakeXla) -> None:
    frame = xla.frame(*dense(gpu))
    for prepared in (1, 1, 2):
        on_gpu.execute(frame)
        assert len(gpu.compiled) == prepared
        if len(gpu.launches) == 2:
            tuning.reload()


class Table(fake_gpu.FakeArray):
    """Array of CuPy, at another address each time."""

    def __init__(self, gpu: Any, *values: float) -> None:
        super().__init__((len(values),), np.float32, address=gpu.address())
        self._values = values

    def get(self) -> np.ndarray:
        return np.array(self._values, np.float32)


Table.__module__ = "cupy"


def test_a_function_of_the_same_values_has_the_same_token(gpu: Any, xla: FakeXla) -> None:
    def token(*values: float) -> str:
        table = Table(gpu, *values)
        return token_of(ScoreMod(lambda score, h, table: score * table[h], table=table))

    tokens = [token(1, 2), token(1, 2), token(1, 3)]
    assert tokens[0] == tokens[1] != tokens[2]
    static, arguments, results = dense(gpu)
    for one in tokens:
        static = static._replace(functions=(("score_mod", one),))
        on_gpu.execute(xla.frame(static, arguments, results))
    assert [x.tolist() for x in gpu.uploads] == [[1, 2], [1, 3]]


def test_a_program_of_another_process_names_its_functions_in_vain(gpu: Any, xla: FakeXla) -> None:
    static, arguments, results = dense(gpu)
    static = static._replace(functions=(("score_mod", "0-1"),))
    with pytest.raises(ValueError, match="score_mod or mask_mod of another process"):
        on_gpu.execute(xla.frame(static, arguments, results))


@pytest.mark.parametrize("wrt", [None, ("q", "k", "v")])
def test_calls_with_lists_are_computed_in_the_programs_memory(
    wrt: tuple[str, ...] | None,
    gpu: Any,
    xla: FakeXla,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = {"q": (2, 5, 2, 8), "k": (2, 7, 1, 8), "v": (2, 7, 1, 8)}
    out = shapes["q"]
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["key_indices"] = rng.integers(-1, 7, (2, 5, 1, 6)).astype(np.int32)
    options = {"causal": True, "key_indices": arrays["key_indices"]}
    rows = [arrays[name] for name in shapes]
    expected = flash_attention(*rows, **options, return_lse=True)
    results = {"out": out, "lse": (2, 2, 5)}
    if wrt is not None:
        results = {name: shapes[name] for name in wrt}
        arrays |= zip(("out", "lse"), expected, strict=True)
        arrays["dout"] = rng.standard_normal(out).astype(np.float32)
        expected = flash_attention_backward(arrays["dout"], *rows, *expected, **options)
    static = StaticCall(tuple(arrays), Options(causal=True, return_lse=True, wrt=wrt))
    given = [Array(gpu.address(), x.shape, x.dtype) for x in arrays.values()]
    made = [Array(gpu.address(), shape, np.float32) for shape in results.values()]
    memory = {place.address: x for place, x in zip(given, arrays.values(), strict=True)}
    streams = []

    def array_at(address: int, shape: tuple[int, ...], dtype: Any, device: int) -> np.ndarray:
        assert device == DEVICE
        streams.append(gpu.stream)
        if address not in memory:
            memory[address] = np.full(shape, np.nan, dtype)
        return memory[address]

    monkeypatch.setattr(on_gpu, "array_at", array_at)
    # The arrays are those of NumPy, so that the CPU backend computes the call.
    for name in ("attention_to_lists", "gradients_of_lists"):
        run = getattr(on_gpu, name)
        monkeypatch.setattr(on_gpu, name, lambda *x, run=run: run(*x[:2], "cpu", *x[3:]))
    on_gpu.execute(xla.frame(static, given, made))
    assert gpu.launches == []
    assert set(streams) == {STREAM}
    for place, right in zip(made, expected, strict=True):
        np.testing.assert_array_equal(memory[place.address], right)


@pytest.mark.parametrize("wrt", [None, ("q", "v")])
def test_tangents_are_computed_in_the_programs_memory(
    wrt: tuple[str, ...] | None,
    gpu: Any,
    xla: FakeXla,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory: dict[int, np.ndarray] = {}
    streams = []

    def array_at(address: int, shape: tuple[int, ...], dtype: Any, device: int) -> np.ndarray:
        assert device == DEVICE
        streams.append(gpu.stream)
        values = rng.standard_normal(shape).astype(dtype)
        return memory.setdefault(address, values)

    monkeypatch.setattr(on_gpu, "array_at", array_at)
    shapes = {"q": (2, 5, 2, 8), "k": (2, 7, 1, 8), "v": (2, 7, 1, 8), "v_tangent": (2, 7, 1, 8)}
    results = {"out": shapes["q"], "lse": (2, 2, 5)}
    function: Any = flash_attention_jvp
    if wrt is not None:
        shapes |= {"dout": shapes["q"], "dlse": results["lse"]}
        results, function = {name: shapes[name] for name in wrt}, flash_attention_hvp
    static = StaticCall(tuple(shapes), Options(causal=True, return_lse=True, wrt=wrt))
    given, made = (
        [Array(gpu.address(), shape, np.float32) for shape in some.values()]
        for some in (shapes, results)
    )
    for _ in range(2):
        on_gpu.execute(xla.frame(static, given, made))
    assert gpu.launches == []
    assert set(streams) == {STREAM}
    named = {name: memory[array.address] for name, array in zip(shapes, given, strict=True)}
    options = {"return_lse": True} if wrt is None else {}
    expected = function(**named, **options, causal=True)
    expected = expected[1::2] if wrt is None else (expected[0], expected[2])
    for array, right in zip(made, expected, strict=True):
        np.testing.assert_array_equal(memory[array.address], right)
