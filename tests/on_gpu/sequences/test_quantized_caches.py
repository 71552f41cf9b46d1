"""8-bit KV caches on a GPU, against the reference on dequantized values."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
from support.calls.quantized_support import (
    CACHE_DTYPES,
    SCALES,
    QuantizedCase,
    check_on_gpu,
    on_device,
    run_on_gpu,
)
from support.calls.sequence_support import KVCacheCase, Truth, VarlenCase, ragged_lengths, to_numpy
from support.gpu import cupy
from support.gpu.gpu_support import capture_call, naming

from cupy_flash import flash_attention_varlen, flash_attention_with_kvcache, plan
from cupy_flash.errors import UnsupportedError
from cupy_flash.reference.packed import attention_with_kvcache_reference

pytestmark = pytest.mark.gpu

# Compilation takes most of the time, so the calls of a test differ in what needs no other kernel.
PROBLEMS, CALLS = 1000, 40
# Number of rows in the cache of a sequence.
CAPACITY = 300


def draw(test: int, number: int) -> tuple[QuantizedCase, dict[str, int]]:
    """Return a case and its number of splits. Kernels of a test's cases differ only in the tile."""
    rng, sizes = np.random.default_rng([7, test]), np.random.default_rng([7, test, number])
    paged = rng.random() < 0.5
    page_size = int(rng.choice([1, 16, 37, 64])) if paged else 0
    # Scales, windows, sinks and splits of each kind occur with packed queries and without.
    scales = SCALES[test % len(SCALES)]
    is_packed = test % 3 == 2 and scales != "computed"
    heads_kv = int(rng.choice([1, 2, 3]))
    lengths = ragged_lengths(sizes, 5, 280)
    appends = scales == "computed" or rng.random() < 0.4
    new = int(sizes.choice([1, 2, 5])) if appends else 0
    common: dict[str, Any] = {
        "dtype": str(rng.choice(["float16", "bfloat16"])),
        "heads_q": heads_kv * int(rng.choice([1, 4, 8])),
        "heads_kv": heads_kv,
        "head_dim": int(rng.choice([16, 64, 72, 128, 256, 320])),
        "head_dim_v": int(rng.choice([16, 64, 40, 128, 256, 300])),
        "causal": bool(rng.random() < 0.5),
        "page_size": page_size,
        "seed": int(sizes.integers(2**32)),
    }
    base: KVCacheCase | VarlenCase
    if is_packed:
        queries = ragged_lengths(sizes, 5, int(rng.choice([3, 70])))
        base = VarlenCase(queries, lengths, seqused=bool(rng.random() < 0.5), **common)
    else:
        base = KVCacheCase(
            lengths,
            seqlen_q=int(rng.choice([1, 1, 2, 9])),
            seqlen_new=new,
            indexed=not paged and bool(rng.random() < 0.5),
            slack=CAPACITY - new - max(lengths),
            **common,
        )
    window: tuple[int | None, int | None] = (None, None)
    if test % 4 == 1:
        window = int(sizes.integers(200)), int(sizes.integers(20))
    case = QuantizedCase(base, str(rng.choice(list(CACHE_DTYPES))), scales, window, test % 5 == 2)
    return case, {"num_splits": 3 if test % 4 == 3 else 0}


@pytest.mark.parametrize("test", range(PROBLEMS // CALLS))
def test_random_problems_are_right(test: int) -> None:
    for number in range(CALLS):
        case, choice = draw(test, number)
        with naming(f"problem {number}, {choice} {case}"):
            check_on_gpu(case, **choice)


def test_random_problems_are_of_every_kind() -> None:
    drawn = [draw(test, 0) for test in range(PROBLEMS // CALLS)]
    cases = [case for case, _ in drawn]
    for scales in SCALES:
        for is_packed in (False, True):
            assert scales == "computed" or any(
                case.scales == scales and case.is_packed == is_packed for case in cases
            )
    for is_packed in (False, True):
        mine = [pair for pair in drawn if pair[0].is_packed == is_packed]
        assert any(choice["num_splits"] for _, choice in mine)
        assert any(case.sinks for case, _ in mine)
        assert any(case.window != (None, None) for case, _ in mine)
        assert {case.base.page_size > 0 for case, _ in mine} == {False, True}
        assert {case.base.dtype for case, _ in mine} == {"float16", "bfloat16"}
        assert {case.cache_dtype for case, _ in mine} == set(CACHE_DTYPES)


LONG = KVCacheCase(
    (5000, 17, 4097), "bfloat16", heads_q=8, heads_kv=1, head_dim=128, head_dim_v=128
)


@pytest.mark.parametrize(
    "choice",
    [{}, {"num_splits": 3}, {"batch_invariant": True}],
    ids=["even", "split", "batch_invariant"],
)
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_keys_may_be_shared_out(
    dtype: str, cache_dtype: str, scales: str, choice: dict[str, int]
) -> None:
    check_on_gpu(
        QuantizedCase(dataclasses.replace(LONG, dtype=dtype), cache_dtype, scales), **choice
    )


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_long_keys_of_packed_queries_are_split(cache_dtype: str, page_size: int) -> None:
    base = VarlenCase(
        (1, 0, 40, 2), (5000, 17, 300, 4097), "bfloat16", heads_q=8, page_size=page_size
    )
    arguments = QuantizedCase(base, cache_dtype, "row").arguments()
    made = plan(flash_attention_varlen, **{name: on_device(x) for name, x in arguments.items()})
    assert made.num_splits is not None
    assert made.num_splits > 1
    check_on_gpu(QuantizedCase(base, cache_dtype, "row"))


@pytest.mark.parametrize("seqlen_q", [40, 130])
def test_many_rows_of_queries_are_right(seqlen_q: int) -> None:
    many = KVCacheCase((200, 170), "float16", seqlen_q=seqlen_q, causal=True, page_size=16)
    check_on_gpu(QuantizedCase(many, "int8", "row"))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_windows_sinks_and_modifications_are_right(cache_dtype: str) -> None:
    base = KVCacheCase((190, 0, 77), "bfloat16", seqlen_q=2, causal=True)
    arguments = QuantizedCase(base, cache_dtype, "row").arguments() | {
        "window_size": (40, 0),
        "sinks": np.array([0.5, -1, 2, 0], np.float32),
        "softcap": 5.0,
        "alibi_slopes": np.array([0.5, 0.25, 0, 0.1], np.float32),
    }
    with np.errstate(all="ignore"):
        truth = Truth.of_kvcache(arguments)
    _, out, lse = run_on_gpu(arguments)
    truth.check(out, lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tiny_scales_lose_nothing(dtype: str) -> None:
    # Probabilities times a scale of 2e-6 are subnormal in float16.
    base = KVCacheCase((200, 64, 130), dtype, head_dim=128)
    arguments = QuantizedCase(base, "int8", "row").arguments()
    rng = np.random.default_rng(3)
    for small in (2e-6, 1e-9):
        scale = arguments["v_scale"]
        arguments["v_scale"] = (small * rng.uniform(1, 4, scale.shape)).astype(np.float32)
        with np.errstate(all="ignore"):
            expected = attention_with_kvcache_reference(**arguments).out
        _, out, _ = run_on_gpu(arguments)
        # In float16, the tolerance includes the smallest subnormal number.
        least = 2.0**-24 if dtype == "float16" else 0
        bound = np.abs(expected).max() * 2**-6 + least
        assert np.abs(out.astype(np.float64) - expected).max() <= bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_huge_scale_of_a_key_that_a_row_does_not_see_makes_no_difference(dtype: str) -> None:
    base = KVCacheCase((200, 64, 131), dtype, seqlen_q=2, causal=True)
    arguments = QuantizedCase(base, "int8", "row").arguments()
    _, expected, _ = run_on_gpu(arguments)
    for sequence, length in enumerate(base.lengths):
        arguments["v_scale"][sequence, length - 1] *= 1e9
    _, out, _ = run_on_gpu(arguments)
    np.testing.assert_array_equal(out[:, 0].view(np.uint8), expected[:, 0].view(np.uint8))


@pytest.mark.parametrize("scale", [1e-32, 1e30])
def test_scales_far_from_one_are_right(scale: float) -> None:
    base = KVCacheCase((200, 64, 130), "bfloat16")
    for scales in ("tensor", "row"):
        arguments = QuantizedCase(base, "float8_e4m3fn", scales).arguments()
        arguments["v_scale"] = np.float32(scale) * np.ones_like(arguments["v_scale"])
        with np.errstate(all="ignore"):
            expected = attention_with_kvcache_reference(**arguments).out
        _, out, _ = run_on_gpu(arguments)
        off = np.abs(out.astype(np.float64) - expected).max()
        assert off <= np.abs(expected).max() * 2**-6


@pytest.mark.parametrize("scales", ["head", "row"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_chunks_of_queries_alone_have_the_same_bits(
    dtype: str, cache_dtype: str, scales: str
) -> None:
    base = KVCacheCase((200, 64, 150), dtype, seqlen_q=40, causal=True, filler=0)
    arguments = QuantizedCase(base, cache_dtype, scales).arguments()
    _, together, _ = run_on_gpu(arguments, batch_invariant=True)
    for sequence, length in enumerate(base.lengths):
        # Each chunk of queries is a separate call, as if a prompt were appended in chunks.
        for begin, end in ((0, 1), (1, 24), (24, 40)):
            part = dict(arguments)
            part["q"] = arguments["q"][sequence : sequence + 1, begin:end]
            for name in ("k_cache", "v_cache"):
                part[name] = arguments[name][sequence : sequence + 1]
            if scales == "row":
                for name in ("k_scale", "v_scale"):
                    part[name] = arguments[name][sequence : sequence + 1]
            part["cache_seqlens"] = np.array([length - 40 + end], np.int32)
            _, alone, _ = run_on_gpu(part, batch_invariant=True)
            expected = together[sequence : sequence + 1, begin:end]
            np.testing.assert_array_equal(alone.view(np.uint8), expected.view(np.uint8))


def test_scales_that_no_load_can_take_are_refused() -> None:
    base = KVCacheCase((50, 40), "float16")
    given = {n: on_device(x) for n, x in QuantizedCase(base, "int8", "head").arguments().items()}
    heads = given["k_scale"].size
    behind = cupy.zeros(4 * heads + 4, np.uint8)[2 : 4 * heads + 2].view(np.float32)
    records = cupy.zeros((heads, 6), np.uint8)
    apart = cupy.ndarray((heads,), np.float32, records.data, (6,))
    for wrong in (behind, apart):
        with pytest.raises(ValueError, match="expected multiples of 4 bytes"):
            flash_attention_with_kvcache(**given | {"k_scale": wrong})


def test_a_number_that_is_none_stays_one() -> None:
    base = KVCacheCase((50, 40), "bfloat16")
    arguments = QuantizedCase(base, "float8_e4m3fn", "tensor").arguments()
    arguments["v_cache"][0, 7, 0, 5] = np.nan
    _, out, _ = run_on_gpu(arguments)
    assert np.isnan(out[0, 0, :2, 5].astype(np.float32)).all()
    assert np.isfinite(np.delete(out[0], 5, axis=-1).astype(np.float32)).all()
    assert np.isfinite(out[1].astype(np.float32)).all()


def test_new_keys_are_turned_before_they_are_quantized() -> None:
    base = KVCacheCase((5, 0, 19), "bfloat16", seqlen_new=2, causal=True, rotary_dim=24)
    for interleaved in (True, False):
        case = dataclasses.replace(base, rotary_interleaved=interleaved)
        arguments = QuantizedCase(case, "int8", "computed").arguments()
        host = QuantizedCase(case, "int8", "computed").arguments()
        given, out, _ = run_on_gpu(arguments)
        expected = flash_attention_with_kvcache(**host, backend="cpu")
        np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=2**-5)
        # A rotated element that is rounded differently may differ by one step in 8 bits.
        off = to_numpy(given["k_cache"]).astype(int) - host["k_cache"].astype(int)
        assert np.abs(off).max() <= 1


def test_a_captured_step_serves_a_growing_cache() -> None:
    base = KVCacheCase((200, 64, 130), "bfloat16", seqlen_new=1, head_dim=128, slack=20)
    arguments = QuantizedCase(base, "float8_e4m3fn", "computed").arguments()
    given = {name: on_device(x) for name, x in arguments.items()}
    given["softmax_scale"] = arguments["softmax_scale"]
    out = cupy.empty((*given["q"].shape[:3], 64), given["q"].dtype)
    flash_attention_with_kvcache(**given, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    pool = cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        graph, _ = capture_call(stream, flash_attention_with_kvcache, **given, out=out)
    for _ in range(3):
        given["cache_seqlens"] += 1
        arguments["cache_seqlens"] = arguments["cache_seqlens"] + 1
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            arguments[name] = to_numpy(given[name])
        cupy.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        with np.errstate(all="ignore"):
            truth = Truth.of_kvcache(arguments)
        truth.check(out)


def tensors_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the same arguments, with torch tensors on the GPU instead of arrays."""
    torch = pytest.importorskip("torch")
    types = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.kind != "V":
            return torch.from_numpy(x).cuda()
        as_bytes = torch.from_numpy(x.view(np.uint8)).cuda()
        return as_bytes.view(types[x.dtype.name])

    return {name: tensor(x) for name, x in arguments.items()}


@pytest.mark.parametrize("scales", ["number", "row"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_tensors_of_torch_may_have_packed_queries(cache_dtype: str, scales: str) -> None:
    torch = pytest.importorskip("torch")
    base = VarlenCase((5, 0, 40), (200, 64, 130), "bfloat16", page_size=16, rows_of_none=0)
    arguments = QuantizedCase(base, cache_dtype, scales).arguments()
    _, expected, _ = run_on_gpu(arguments)
    found = flash_attention_varlen(**tensors_of(arguments))
    np.testing.assert_array_equal(found.view(torch.uint8).cpu().numpy(), expected.view(np.uint8))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_tensors_of_torch_are_read_and_written_in_place(cache_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    base = KVCacheCase((200, 64, 130), "bfloat16", seqlen_new=1)
    arguments = QuantizedCase(base, cache_dtype, "computed").arguments()
    expected, out, _ = run_on_gpu(arguments)
    tensors = tensors_of(arguments)
    found = flash_attention_with_kvcache(**tensors)
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.view(torch.uint8).cpu().numpy(), out.view(np.uint8))
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        after = tensors[name].view(torch.uint8).cpu().numpy()
        np.testing.assert_array_equal(after, to_numpy(expected[name]).view(np.uint8))


def test_tensors_of_torch_may_have_numbers_for_scales() -> None:
    torch = pytest.importorskip("torch")
    arguments = QuantizedCase(KVCacheCase((50, 40), "float16"), "int8", "number").arguments()
    _, expected, _ = run_on_gpu(arguments)
    tensors = tensors_of(arguments)
    found = flash_attention_with_kvcache(**tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention_with_kvcache(**tensors)
    graph.replay()
    torch.cuda.synchronize()
    for out in (found, captured):
        np.testing.assert_array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_scales_that_are_ever_other_numbers_leave_no_memory_behind(library: str) -> None:
    arguments = QuantizedCase(KVCacheCase((50, 40), "float16"), "int8", "number").arguments()
    if library == "torch":
        torch = pytest.importorskip("torch")
        used = torch.cuda.memory_allocated
    else:
        used = cupy.get_default_memory_pool().used_bytes
    given = {n: on_device(x) for n, x in arguments.items()}
    if library == "torch":
        given = tensors_of(arguments)
    cupy_used = cupy.get_default_memory_pool().used_bytes
    # Memory of earlier tests that is not collected yet would count as well.
    gc.collect()
    # The first call allocates memory that later calls reuse.
    flash_attention_with_kvcache(**given | {"k_scale": 0.5}).sum().item()
    before = used(), cupy_used()
    outs = {}
    for number in range(300):
        numbers = {"k_scale": 0.01 + number / 4096, "v_scale": 1.0 + number}
        out = flash_attention_with_kvcache(**given | numbers)
        # Sums in float16 would be too coarse to differ.
        sums = out.float() if library == "torch" else out.astype(np.float32)
        outs[number] = sums.sum().item()
        del out, sums
    assert (used(), cupy_used()) == before
    assert len(set(outs.values())) == len(outs)


def test_a_number_on_the_host_is_kept_by_value_for_captured_calls() -> None:
    base = KVCacheCase((50, 40), "float16")
    arguments = QuantizedCase(base, "int8", "number").arguments()
    given = {name: on_device(x) for name, x in arguments.items()}
    out = flash_attention_with_kvcache(**given)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    captured = cupy.empty_like(out)
    with stream, cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        graph, _ = capture_call(stream, flash_attention_with_kvcache, **given, out=captured)
        captured.fill(0)
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(to_numpy(captured), to_numpy(out))


@pytest.mark.parametrize("scales", ["number", "row"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_arrays_in_host_memory_are_computed_on_the_gpu(cache_dtype: str, scales: str) -> None:
    base = KVCacheCase((200, 64, 130), "bfloat16", seqlen_new=1)
    case = QuantizedCase(base, cache_dtype, scales)
    arguments, on_cpu = case.arguments(), case.arguments()
    _, expected, _ = run_on_gpu(case.arguments())
    out = flash_attention_with_kvcache(**arguments)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))
    flash_attention_with_kvcache(**on_cpu, backend="cpu")
    for name in ("k_cache", "v_cache"):
        assert arguments[name].tobytes() == on_cpu[name].tobytes()


def test_float32_is_refused_with_its_reason() -> None:
    for base in (KVCacheCase((5, 7), "float32"), VarlenCase((5, 7), (5, 9), "float32")):
        arguments = QuantizedCase(base, "int8", "head").arguments()
        with pytest.raises(UnsupportedError, match="take float16 or bfloat16, not float32"):
            run_on_gpu(arguments)
