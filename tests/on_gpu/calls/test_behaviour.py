"""Behaviour of calls on a GPU: array types, streams, graphs, kernel reuse and caches on disk."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import (
    BUSY,
    DTYPES,
    Case,
    Truth,
    check_captured_call,
    current_device,
    keep_busy,
    on_gpu,
    random_values,
    run_in_threads,
)

from cupy_flash import flash_attention, flash_attention_varlen, plan
from cupy_flash.arrays import jax_arrays
from cupy_flash.arrays.strided import as_cupy
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.families import FORWARD
from cupy_flash.gpu import compiler
from cupy_flash.gpu.compiler import CUBINS_VARIABLE, compile_cubin, prebuilt_name

pytestmark = pytest.mark.gpu

# Warnings of other libraries must not fail these tests.
with_other_library = pytest.mark.filterwarnings("default")
LOGGER = "cupy_flash"
CASE = Case(None, "float32", 113, 150, head_dim=48, head_dim_v=48)
# With this many heads the keys are not split, so a call needs no workspace.
MANY_HEADS = dataclasses.replace(CASE, batch=8, heads_q=64, heads_kv=64)


def copy_on(stream: Any, target: Any, source: Any) -> None:
    target.data.copy_from_device_async(source.data, source.nbytes, stream)


# Array types


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["auto", "gpu", "cpu"])
def test_numpy_arrays_give_numpy_arrays_on_either_backend(dtype: str, backend: str) -> None:
    case = dataclasses.replace(CASE, dtype=dtype)
    values = random_values(case)
    out, lse = flash_attention(*values, backend=backend, return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    assert out.dtype == values[0].dtype
    Truth.of(values).check(out, lse)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_a_numpy_out_is_filled_and_returned(backend: str) -> None:
    values = random_values(CASE)
    out = np.full(CASE.shape("out"), np.nan, np.float32)
    assert flash_attention(*values, out=out, backend=backend) is out
    Truth.of(values).check(out)


def test_a_cupy_out_is_filled_and_returned() -> None:
    values = random_values(CASE)
    out = cupy.asarray(np.full(CASE.shape("out"), np.nan, np.float32))
    assert flash_attention(*on_gpu(values), out=out) is out
    Truth.of(values).check(out.get())


def cuda_torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    return torch


def to_torch(torch: Any, values: tuple[np.ndarray, ...], dtype: str) -> list[Any]:
    # The arrays are converted through float32, because torch cannot read bfloat16 from NumPy.
    wide = np.float64 if dtype == "float64" else np.float32
    return [
        torch.tensor(a.astype(wide), dtype=getattr(torch, dtype), device="cuda") for a in values
    ]


@with_other_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_give_torch_tensors_of_the_same_dtype(dtype: str) -> None:
    torch = cuda_torch()
    values = random_values(dataclasses.replace(CASE, dtype=dtype))
    out, lse = flash_attention(*to_torch(torch, values, dtype), return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert out.dtype == getattr(torch, dtype)
    assert out.device.type == lse.device.type == "cuda"
    host = out.double().cpu().numpy().astype(values[0].dtype)
    Truth.of(values).check(host, lse.cpu().numpy())


@with_other_library
def test_torch_memory_is_read_and_written_without_a_copy() -> None:
    torch = cuda_torch()
    values = random_values(CASE)
    q, k, v = to_torch(torch, values, "float32")
    assert as_cupy(q).data.ptr == q.data_ptr()
    out = torch.full(CASE.shape("out"), torch.nan, device="cuda")
    assert flash_attention(q, k, v, out=out) is out
    Truth.of(values).check(out.cpu().numpy())


@with_other_library
def test_torch_work_before_and_after_a_call_is_ordered_with_it_on_a_side_stream() -> None:
    torch = cuda_torch()
    values = random_values(CASE)
    ready = to_torch(torch, values, "float32")
    flash_attention(*ready)
    inputs = [torch.full_like(tensor, torch.nan) for tensor in ready]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY // 5)
        for tensor, source in zip(inputs, ready, strict=True):
            tensor.copy_(source, non_blocking=True)
        out = flash_attention(*inputs)
        # On the side stream, the inputs are overwritten as soon as the attention call is done.
        for tensor in inputs:
            tensor.fill_(torch.nan)
        host = out.cpu()
    Truth.of(values).check(host.numpy())


@pytest.fixture
def jax() -> Any:
    jax = pytest.importorskip("jax")
    if all(device.platform != "gpu" for device in jax.devices()):
        pytest.skip("this JAX has no GPU")
    return jax


@with_other_library
@pytest.mark.parametrize("way", ["private", "public"])
def test_jax_arrays_give_jax_arrays(jax: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "public":
        monkeypatch.setattr(jax_arrays, "_adopt", lambda: None)
    elif jax_arrays._adopt() is None:
        pytest.skip("this JAX has no such function")
    values = random_values(CASE)
    inputs = [jax.numpy.asarray(array).block_until_ready() for array in values]
    out, lse = flash_attention(*inputs, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.devices() == inputs[0].devices()
    truth = Truth.of(values)
    truth.check(np.asarray(out))
    # A JAX operation on the result waits for the kernel, which may still run.
    truth.check(np.asarray(jax.numpy.flip(flash_attention(*inputs), 0))[::-1])


@with_other_library
@pytest.mark.parametrize("own_stream", [False, True])
def test_jax_arrays_that_are_still_computed_are_waited_for(jax: Any, own_stream: bool) -> None:
    values = random_values(CASE)

    @jax.jit
    def slowly(arrays: Any, busy: Any) -> Any:
        zero = jax.lax.fori_loop(0, 200, lambda _, x: x @ busy, busy)[0, 0] * 0
        return [array + zero.astype(array.dtype) for array in arrays]

    busy = jax.numpy.zeros((2048, 2048), np.float32)
    arrays = [jax.numpy.asarray(array) for array in values]
    jax.block_until_ready(slowly(arrays, busy))
    with cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null:
        for _ in range(3):
            q, k, v = slowly(arrays, busy)
            Truth.of(values).check(np.asarray(flash_attention(q, k, v)))


@with_other_library
def test_jax_arrays_whose_axes_lie_in_another_order_are_read_as_they_lie(jax: Any) -> None:
    layouts = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layouts, "Format"):
        pytest.skip("this JAX has no layouts")
    values = random_values(CASE)
    q, k, v = (jax.numpy.asarray(array) for array in values)
    swapped = layouts.Format(layouts.Layout(major_to_minor=(0, 2, 1, 3)), k.sharding)
    k = jax.device_put(k, swapped).block_until_ready()
    assert k.format.layout.major_to_minor == (0, 2, 1, 3)
    Truth.of(values).check(np.asarray(flash_attention(q, k, v)))


@with_other_library
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_give_the_bits_that_cupy_arrays_give(jax: Any, dtype: str) -> None:
    values = random_values(dataclasses.replace(CASE, dtype=dtype))
    expected = [array.get() for array in flash_attention(*on_gpu(values), return_lse=True)]
    inputs = [jax.numpy.asarray(array).block_until_ready() for array in values]
    # The second call reuses what the first one prepared.
    for _ in range(2):
        results = flash_attention(*inputs, return_lse=True)
        for result, plain in zip(results, expected, strict=True):
            assert isinstance(result, jax.Array)
            assert result.dtype == plain.dtype
            np.testing.assert_array_equal(np.asarray(result), plain)


@with_other_library
def test_jax_waits_for_a_call_on_a_stream_of_ours(jax: Any) -> None:
    values = random_values(CASE)
    inputs = [jax.numpy.asarray(array).block_until_ready() for array in values]
    flash_attention(*inputs)
    keep_busy(1)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(3):
            keep_busy(BUSY // 5)
            out = flash_attention(*inputs)
            Truth.of(values).check(np.asarray(jax.numpy.flip(out, 0))[::-1])


@with_other_library
def test_jax_and_cupy_arrays_go_together_and_q_says_what_the_result_is(jax: Any) -> None:
    values = random_values(CASE)
    ours = on_gpu(values)
    theirs = [jax.numpy.asarray(array).block_until_ready() for array in values]
    out = flash_attention(theirs[0], *ours[1:])
    assert isinstance(out, jax.Array)
    Truth.of(values).check(np.asarray(out))
    out = flash_attention(ours[0], *theirs[1:])
    assert isinstance(out, cupy.ndarray)
    Truth.of(values).check(out.get())


@with_other_library
def test_a_jax_array_that_was_deleted_is_refused_on_a_gpu_too(jax: Any) -> None:
    q, k, v = (jax.numpy.asarray(array) for array in random_values(CASE))
    flash_attention(q, k, v)
    v.delete()
    with pytest.raises(ValueError, match="v is a JAX array that was deleted or donated"):
        flash_attention(q, k, v)


@with_other_library
def test_jax_arrays_on_a_second_gpu_are_read_where_that_one_is_current(jax: Any) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    values = random_values(CASE)
    first = [jax.device_put(array, jax.devices()[0]).block_until_ready() for array in values]
    second = [jax.device_put(array, jax.devices()[1]).block_until_ready() for array in values]
    # In some versions of JAX, the device that JAX used last stays the current device.
    with cupy.cuda.Device(0):
        Truth.of(values).check(np.asarray(flash_attention(*first)))
        with pytest.raises(ValueError, match="q lies on device 1, but the current device is 0"):
            flash_attention(*second)
    with cupy.cuda.Device(1):
        out = flash_attention(*second)
        assert out.devices() == {jax.devices()[1]}
        Truth.of(values).check(np.asarray(out))


@with_other_library
def test_packed_sequences_of_jax_arrays_give_jax_arrays(jax: Any) -> None:
    q, k, v = (array[0] for array in random_values(CASE))
    offsets_q, offsets_k = (np.array([0, 40, len(x)], np.int32) for x in (q, k))
    given = (q, k, v, offsets_q, offsets_k)
    options: dict[str, Any] = {"max_seqlen_q": len(q), "max_seqlen_k": len(k)}
    plain = flash_attention_varlen(*on_gpu(given), **options)
    out = flash_attention_varlen(*map(jax.numpy.asarray, given), **options)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), plain.get())


# Streams and graphs


def test_a_call_runs_on_the_current_stream_and_does_not_wait_for_it() -> None:
    values = random_values(CASE)
    ready = on_gpu(values)
    flash_attention(*ready)
    inputs = on_gpu(tuple(np.full_like(array, np.nan) for array in values))
    keep_busy(1)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # This call leaves memory for the result in the stream's pool: a new allocation could wait.
        flash_attention(*ready)
        stream.synchronize()
        keep_busy()
        for target, source in zip(inputs, ready, strict=True):
            copy_on(stream, target, source)
        out = flash_attention(*inputs)
        returned_early = not stream.done
        host = out.get(stream=stream)
        stream.synchronize()
    assert returned_early, "the call waited for the stream"
    Truth.of(values).check(host)


@pytest.mark.parametrize("family", ["mma", "simt", "naive"])
def test_a_captured_call_replays_on_new_contents(family: str) -> None:
    check_captured_call(dataclasses.replace(MANY_HEADS, family=family))


def test_threads_may_call_at_once_on_streams_of_their_own() -> None:
    # No other test uses this head_dim, so the threads also race for the first compilation.
    case = dataclasses.replace(CASE, head_dim=88, head_dim_v=88)
    problems = [random_values(dataclasses.replace(case, seqlen_q=70 + i)) for i in range(4)]
    results: dict[int, list[np.ndarray]] = {}
    start = threading.Barrier(len(problems))

    def work(index: int) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            inputs = on_gpu(problems[index])
            stream.synchronize()
            start.wait(60)
            outs = [flash_attention(*inputs) for _ in range(10)]
            results[index] = [out.get(stream=stream) for out in outs]
            stream.synchronize()

    run_in_threads(work, len(problems))
    assert sorted(results) == list(range(len(problems)))
    for index, values in enumerate(problems):
        truth = Truth.of(values)
        for out in results[index]:
            truth.check(out)


# Reuse and choice


def test_the_first_call_says_what_it_compiles_and_later_ones_reuse_everything(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(CASE, head_dim=56, head_dim_v=56)
    inputs = on_gpu(random_values(case))
    with caplog.at_level(logging.INFO, LOGGER):
        flash_attention(*inputs)
        assert any("head_dim 56" in m and "ready in" in m for m in caplog.messages)
        caplog.clear()

        def must_not_run(*args: object, **kwargs: object) -> None:
            raise AssertionError("planned or compiled again")

        monkeypatch.setattr(gpu_forward, "make_plan", must_not_run)
        monkeypatch.setattr(compiler.kernel_cache, "get", must_not_run)
        values = tuple(array[::-1].copy() for array in random_values(case))
        out = flash_attention(*on_gpu(values))
    assert not caplog.messages
    Truth.of(values).check(out.get())


def test_plan_tells_registers_once_the_kernel_is_compiled() -> None:
    case = dataclasses.replace(CASE, head_dim=24, head_dim_v=24)
    inputs = on_gpu(random_values(case))
    before = plan(flash_attention, *inputs)
    assert before.resources is None
    assert "not compiled yet" in str(before)
    flash_attention(*inputs)
    after = plan(flash_attention, *inputs)
    assert after.resources is not None
    assert 16 <= after.resources.registers <= 255
    assert f"{after.resources.registers} per thread" in str(after)
    assert dataclasses.replace(after, resources=None) == before
    assert after.blocks_per_sm() >= 1
    assert after.device == current_device()


@pytest.mark.parametrize("family", FORWARD)
def test_a_family_asked_for_is_the_one_that_runs(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The row size is a multiple of 16 bytes, which every family can read.
    case = dataclasses.replace(CASE, family=family, dtype="float16", head_dim=24, head_dim_v=24)
    if not case.is_supported():
        pytest.skip(f"{family} has nothing for this GPU")
    values = random_values(case)
    with caplog.at_level(logging.INFO, LOGGER):
        out = flash_attention(*on_gpu(values), family=family)
    assert any(message.startswith(f"{family} float16") for message in caplog.messages)
    Truth.of(values).check(out.get())


@pytest.mark.parametrize(
    ("family", "dtype", "head_dim"),
    [("hopper", "float16", 104), ("mma", "float32", 28), ("simt", "float32", 28)],
)
def test_a_tile_asked_for_is_the_one_that_runs(
    family: str, dtype: str, head_dim: int, caplog: pytest.LogCaptureFixture
) -> None:
    case = dataclasses.replace(
        CASE, family=family, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim
    )
    if not case.is_supported():
        pytest.skip(f"{family} has nothing for this GPU")
    values = random_values(case)
    problem = plan(flash_attention, *on_gpu(values), family=family).problem
    default = FORWARD[family].default_tile(problem, current_device())
    tiles = FORWARD[family].tiles(problem, current_device())
    tile = next(t for t in tiles if (t.Br, t.Bc) != (default.Br, default.Bc))
    with caplog.at_level(logging.INFO, LOGGER):
        out = flash_attention(*on_gpu(values), family=family, tile=tile)
    assert any(f"tile {tile}" in message for message in caplog.messages)
    Truth.of(values).check(out.get())


# Kernels on disk


SCRIPT = """
import logging, sys
import cupy, numpy as np
from cupy_flash import flash_attention

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
x = np.random.default_rng(0).standard_normal((1, 40, 2, 36)).astype(np.float32)
out = flash_attention(*(cupy.asarray(x) for _ in range(3)), family="simt").get()
np.save(sys.argv[1], out)
"""


def call_in_a_process(folder: Path, cache: Path) -> tuple[np.ndarray, str]:
    """Return the result of one call in a new process, and its log."""
    result = folder / "out.npy"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(result)],
        env=os.environ | {"CUPY_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return np.load(result), done.stderr


def script_truth() -> Truth:
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 36)).astype(np.float32)
    return Truth.of((x, x, x))


def test_a_second_process_reuses_the_kernels_on_disk(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}

    first, log = call_in_a_process(tmp_path, cache)
    assert "ready in" in log
    assert str(cache) in log
    kept = files()
    assert kept
    second, _ = call_in_a_process(tmp_path, cache)
    # A compilation would have written a file to the cache.
    assert files() == kept
    np.testing.assert_array_equal(first, second)
    script_truth().check(second)


@pytest.mark.skipif(sys.platform == "win32", reason="has no folder that its owner cannot write")
def test_a_cache_that_cannot_be_written_costs_a_warning_and_nothing_else(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o500)
    if os.access(cache, os.W_OK):
        # The superuser can write to every folder except /proc.
        cache = Path("/proc")
    out, log = call_in_a_process(tmp_path, cache)
    assert "cannot be written" in log
    script_truth().check(out)


def test_prebuilt_kernels_are_used_if_their_name_says_that_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CUBINS_VARIABLE, str(tmp_path))
    messages = {}
    for head_dim, name_of in ((52, prebuilt_name), (60, stale_name)):
        values = random_values(dataclasses.replace(CASE, head_dim=head_dim))
        inputs = [cupy.asarray(array) for array in values]
        planned = plan(flash_attention, *inputs)
        assert planned.unit is not None
        image = compile_cubin(planned.unit, current_device()).image
        (tmp_path / name_of(planned.unit, current_device())).write_bytes(image)
        caplog.clear()
        with caplog.at_level(logging.INFO, LOGGER):
            out = flash_attention(*inputs)
        messages[head_dim] = " ".join(caplog.messages)
        Truth.of(values).check(out.get())
    assert f"prebuilt in {tmp_path}" in messages[52]
    assert "prebuilt" not in messages[60]


def stale_name(unit: Any, device: Any) -> str:
    """Return the name of a kernel whose sources differ in one declaration."""
    changed = dataclasses.replace(unit, text=unit.text + "static_assert(true);\n")
    return prebuilt_name(changed, device)
