"""Multi-head latent attention (MLA: values are columns of keys), and wide heads, on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.calls.latent_support import (
    LATENT,
    after_the_append,
    check_latent,
    latent_arguments,
    run_on_gpu,
)
from support.calls.quantized_support import CACHE_DTYPES, QuantizedCase, on_device
from support.calls.sequence_support import KVCacheCase, Truth, ragged_lengths, to_numpy
from support.gpu import cupy
from support.gpu.gpu_support import capture_call, naming

from cupy_flash import flash_attention_with_kvcache, plan

pytestmark = pytest.mark.gpu

# Compilation takes most of the time, so the calls of a test differ in what needs no other kernel.
PROBLEMS, CALLS = 512, 32
# Number of rows in the cache of a sequence.
CAPACITY = 300
SCALES = ("none", "tensor", "page", "row", "computed")


def draw(test: int, number: int) -> tuple[KVCacheCase, dict[str, Any], np.random.Generator]:
    """Return a case, its modifications and a random generator. A test's cases use one kernel."""
    rng, sizes = np.random.default_rng([11, test]), np.random.default_rng([11, test, number])
    paged = rng.random() < 0.7
    heads_kv = int(rng.choice([1, 1, 2]))
    lengths = ragged_lengths(sizes, 5, 280)
    new = int(sizes.integers(1, 4)) if rng.random() < 0.5 else 0
    sizes_of_heads = {
        "heads_q": heads_kv * int(rng.choice([1, 2, 5, 16, 37, 64, 128])),
        "heads_kv": heads_kv,
        "head_dim": int(rng.choice([576, 576, 320, 260, 96, 400])),
    }
    of_keys = sizes_of_heads["head_dim"]
    sizes_of_heads["head_dim_v"] = int(rng.choice([of_keys - 64, of_keys, 8, 20]))
    modifications: dict[str, Any] = {}
    if rng.random() < 0.2:
        modifications["window_size"] = (int(sizes.integers(200)), int(sizes.integers(3)))
    if rng.random() < 0.2:
        sinks = sizes.standard_normal(sizes_of_heads["heads_q"])
        modifications["sinks"] = sinks.astype(np.float32)
    case = KVCacheCase(
        lengths,
        str(rng.choice(["float16", "bfloat16"])),
        seqlen_q=int(rng.choice([1, 1, 2, 3])),
        seqlen_new=new,
        causal=bool(rng.random() < 0.5),
        page_size=int(rng.choice([1, 16, 64, 37])) if paged else 0,
        indexed=not paged and bool(rng.random() < 0.5),
        slack=CAPACITY - new - max(lengths),
        seed=int(sizes.integers(2**32)),
        **sizes_of_heads,
    )
    return case, modifications, rng


@pytest.mark.parametrize("test", range(PROBLEMS // CALLS))
def test_random_problems_are_right(test: int) -> None:
    for number in range(CALLS):
        case, modifications, _ = draw(test, number)
        with naming(f"problem {number}, {case}"):
            check_latent(case, modifications=modifications, family="decode")


@pytest.mark.parametrize("test", range(PROBLEMS // CALLS))
def test_random_problems_of_8_bits_are_right(test: int) -> None:
    for number in range(CALLS):
        case, modifications, rng = draw(test, number)
        cache_dtype, scales = str(rng.choice(list(CACHE_DTYPES))), str(rng.choice(SCALES))
        if scales == "computed" and not case.seqlen_new:
            case = dataclasses.replace(case, seqlen_new=1)
        with naming(f"problem {number}, {cache_dtype} {scales} {case}"):
            check_latent(case, cache_dtype, scales, modifications, family="decode")


@pytest.mark.parametrize("family", ["mma", "simt"])
def test_families_that_know_nothing_of_it_are_right(family: str) -> None:
    check_latent(
        KVCacheCase((190, 0, 77), "bfloat16", heads_q=16, seqlen_new=2, **LATENT), family=family
    )


@pytest.mark.parametrize("dims", [(257, 257), (512, 512), (576, 576), (300, 90), (64, 392)])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("cache_dtype", [None, *CACHE_DTYPES])
def test_wide_heads_with_values_of_their_own_are_right(
    dims: tuple[int, int], page_size: int, cache_dtype: str | None
) -> None:
    for seed, lengths in enumerate([(300, 0, 41), (1, 700, 65)]):
        case = KVCacheCase(
            *(lengths, ("bfloat16", "float16")[seed], 1, 1, 6, 2, *dims),
            page_size=page_size,
            seed=seed,
        )
        if cache_dtype is None:
            problem = case.problem()
            arguments = problem.arguments()
            truth = problem.truth
        else:
            arguments = QuantizedCase(case, cache_dtype, "row").arguments()
            truth = Truth.of_kvcache(arguments)
        given = {name: on_device(x) for name, x in arguments.items()}
        out = on_device(np.full(truth.out.shape, np.nan, arguments["q"].dtype))
        result = flash_attention_with_kvcache(**given, out=out, return_lse=True, family="decode")
        truth.check(*result)


LONG = KVCacheCase((5000, 17, 4097), "bfloat16", heads_q=16, page_size=64, **LATENT)


@pytest.mark.parametrize(
    "choice",
    [{}, {"num_splits": 3}, {"batch_invariant": True, "family": "decode"}],
    ids=["even", "split", "batch_invariant"],
)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache_dtype", [None, *CACHE_DTYPES])
def test_keys_may_be_shared_out(
    cache_dtype: str | None, heads: int, choice: dict[str, Any]
) -> None:
    check_latent(dataclasses.replace(LONG, heads_q=heads), cache_dtype, "row", **choice)


def draw_rows(number: int) -> tuple[KVCacheCase, dict[str, Any]]:
    """Return a case whose query heads `hopper` packs into one tile, and its number of splits."""
    rng = np.random.default_rng([12, number])
    heads_kv = int(rng.choice([1, 1, 1, 2]))
    head_dim, head_dim_v = map(
        int, [(576, 512), (576, 512), (576, 512), (320, 256), (512, 512)][int(rng.integers(5))]
    )
    paged = rng.random() < 0.6
    new = int(rng.integers(3))
    lengths = ragged_lengths(rng, int(rng.choice([1, 5, 9])), 900)
    # With several queries per sequence, the rows of a tile are the queries of one head.
    seqlen_q = int(rng.choice([1, 1, 1, 1, 2, 70]))
    heads = int(rng.choice([128, 128, 64, 100, 33, 7, 200])) if seqlen_q == 1 else 7
    case = KVCacheCase(
        *(lengths, str(rng.choice(["float16", "bfloat16"])), seqlen_q, new),
        *(heads_kv * heads, heads_kv, head_dim, head_dim_v),
        causal=bool(rng.random() < 0.5),
        page_size=int(rng.choice([64, 64, 32, 128, 96])) if paged else 0,
        indexed=not paged and bool(rng.random() < 0.5),
        slack=1000 - new - max(lengths),
        seed=int(rng.integers(2**32)),
    )
    return case, {"num_splits": int(rng.choice([0, 1, 2, 7]))}


@pytest.mark.parametrize("number", range(80))
def test_random_problems_whose_heads_are_rows_are_right(number: int) -> None:
    case, choice = draw_rows(number)
    check_latent(case, family="hopper", **choice)


# Each thread block sorts the sequences itself. The numbers of sequences are more than its threads,
# enough for many equal lengths, and fewer than pairs of thread blocks.
@pytest.mark.parametrize("sequences", [300, 70, 3])
def test_many_sequences_are_right(sequences: int) -> None:
    rng = np.random.default_rng([13, sequences])
    lengths = tuple(int(n) for n in rng.choice([0, 1, 5, 64, 65, 200, 201, 500], sequences))
    case = KVCacheCase(lengths, "float16", heads_q=128, **LATENT)
    check_latent(case, family="hopper", num_splits=1)


def test_pages_that_there_are_not_are_zeros() -> None:
    base = KVCacheCase((200, 64), "bfloat16", heads_q=128, page_size=64, **LATENT)
    arguments = latent_arguments(base, None, "none")
    zeroed = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    zeroed["k_cache"][zeroed["block_table"][0, 1]] = 0
    equivalent, _ = after_the_append(zeroed)
    arguments["block_table"][0, 1] = 10**6
    _, out, lse = run_on_gpu(arguments, family="hopper")
    Truth.of_kvcache(equivalent).check(out, lse)


def test_few_heads_go_to_decode() -> None:
    arguments = {n: on_device(x) for n, x in latent_arguments(LONG, None, "none").items()}
    assert plan(flash_attention_with_kvcache, **arguments).family == "decode"


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_windows_sinks_and_modifications_are_right(cache_dtype: str | None) -> None:
    base = KVCacheCase((190, 0, 77), "bfloat16", seqlen_q=2, causal=True, heads_q=4, **LATENT)
    modifications = {
        "window_size": (40, 0),
        "sinks": np.array([0.5, -1, 2, 0], np.float32),
        "softcap": 5.0,
        "alibi_slopes": np.array([0.5, 0.25, 0, 0.1], np.float32),
    }
    check_latent(base, cache_dtype, "row", modifications, family="decode")


@pytest.mark.parametrize(
    ("family", "cache_dtype", "heads"),
    [
        *(("decode", dtype, heads) for dtype in (None, *CACHE_DTYPES) for heads in (16, 64)),
        *(("hopper", None, heads) for heads in (64, 128)),
    ],
)
def test_the_same_call_gives_the_same_bits(
    family: str, cache_dtype: str | None, heads: int
) -> None:
    base = dataclasses.replace(LONG, heads_q=heads, lengths=(3000, 40, 1, 0, 9000, 2500))
    arguments = latent_arguments(base, cache_dtype, "row")
    _, first, first_lse = run_on_gpu(arguments, family=family)
    for _ in range(5):
        _, out, lse = run_on_gpu(arguments, family=family)
        assert (out.tobytes(), lse.tobytes()) == (first.tobytes(), first_lse.tobytes())


@pytest.mark.parametrize(
    ("family", "cache_dtype", "heads", "page_size"),
    [("decode", None, 16, 16), ("decode", "int8", 16, 16), ("hopper", None, 128, 64)],
)
def test_a_graph_serves_a_growing_cache(
    family: str, cache_dtype: str | None, heads: int, page_size: int
) -> None:
    base = KVCacheCase(
        (70, 0, 33),
        "bfloat16",
        heads_q=heads,
        seqlen_new=1,
        slack=500,
        page_size=page_size,
        **LATENT,
    )
    arguments = latent_arguments(base, cache_dtype, "tensor")
    # The lengths grow past rows that no replay appends, so the cache must hold no NaN.
    arguments["k_cache"] = np.nan_to_num(arguments["k_cache"].astype(np.float32)).astype(
        arguments["k_cache"].dtype
    )
    given = {name: on_device(x) for name, x in arguments.items()}
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        graph, out = capture_call(stream, flash_attention_with_kvcache, **given, family=family)
        for length in (1, 64, 65, 400):
            grown = arguments | {"cache_seqlens": np.array([length, 2, length // 2], np.int32)}
            given["cache_seqlens"].set(grown["cache_seqlens"])
            before = to_numpy(given["k_cache"])
            out.fill(cupy.nan)
            graph.launch()
            stream.synchronize()
            equivalent, _ = after_the_append(grown | {"k_cache": before})
            Truth.of_kvcache(equivalent).check(out)
