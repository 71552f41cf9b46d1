"""Values that are columns of their keys, and heads wider than 256 columns, on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.quantized_support import CACHE_DTYPES, QuantizedCase, on_device
from support.sequence_support import KVCacheCase, Truth, ragged_lengths, to_numpy

from cupy_flash import flash_attention_with_kvcache, plan_with_kvcache
from cupy_flash.reference.packed import attention_with_kvcache_reference

pytestmark = pytest.mark.gpu

# Compiling takes longer than the rest, so calls of a test differ in what no kernel is compiled for.
TESTS, CALLS = 60, 8
# Rows of a sequence's cache.
CAPACITY = 300
# Of the models that have such attention.
LATENT = {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1}
SCALES = ("none", "tensor", "page", "row", "computed")

Arguments = dict[str, Any]


def latent_arguments(base: KVCacheCase, cache_dtype: str | None, scales: str) -> Arguments:
    """What the function under test takes, as new NumPy arrays: the case's keys alone."""
    if cache_dtype is None:
        found = base.problem().arguments()
    else:
        found = QuantizedCase(base, cache_dtype, scales).arguments() | {"v_scale": None}
    return found | {"v_cache": None, "v": None, "head_dim_v": base.head_dim_v}


def after_the_append(arguments: Arguments) -> tuple[Arguments, Any]:
    """The same with nothing new, and values of their own; and what the caches then hold."""
    given = {name: value for name, value in arguments.items() if name != "head_dim_v"}
    if given["k"] is not None:
        given["v_scale"] = given.get("k_scale")
        whole = given | {"v_cache": given["k_cache"], "v": given["k"]}
        stored = attention_with_kvcache_reference(**whole)
        given |= {"k_cache": stored.k_cache, "k_scale": stored.k_scale, "k": None}
        new = arguments["k"].shape[1]
        given["cache_seqlens"] = given["cache_seqlens"] + np.int32(new)
    else:
        stored = None
    given |= {
        "v_cache": given["k_cache"][..., : arguments["head_dim_v"]],
        "v": None,
        "v_scale": given.get("k_scale"),
    }
    return {name: x for name, x in given.items() if name != "compute_scales"}, stored


def run_on_gpu(arguments: Arguments, **more: Any) -> tuple[Arguments, Any, Any]:
    """The arrays after a call on the GPU, its output, which is NaN before, and lse."""
    import cupy

    given = {name: on_device(x) for name, x in arguments.items()}
    shape = (*arguments["q"].shape[:3], arguments["head_dim_v"])
    out = cupy.asarray(np.full(shape, np.nan, arguments["q"].dtype))
    out, lse = flash_attention_with_kvcache(**given, out=out, return_lse=True, **more)
    return given, to_numpy(out), to_numpy(lse)


def check_latent(
    base: KVCacheCase, cache_dtype: str | None = None, scales: str = "none", **choice: Any
) -> None:
    """Assert that a call gives what the reference gives, and stores the same bits."""
    arguments = latent_arguments(base, cache_dtype, scales)
    with np.errstate(all="ignore"):
        equivalent, stored = after_the_append(arguments)
        truth = Truth.of_kvcache(equivalent)
    given, out, lse = run_on_gpu(arguments, **choice)
    truth.check(out, lse)
    if stored is not None:
        assert to_numpy(given["k_cache"]).tobytes() == stored.k_cache.tobytes()
        if scales == "computed":
            assert to_numpy(given["k_scale"]).tobytes() == stored.k_scale.tobytes()


def draw(test: int, number: int, **fixed: Any) -> tuple[KVCacheCase, np.random.Generator]:
    """A case; those of a test are for one kernel."""
    rng, sizes = np.random.default_rng([11, test]), np.random.default_rng([11, test, number])
    paged = rng.random() < 0.7
    heads_kv = int(rng.choice([1, 1, 2]))
    lengths = ragged_lengths(sizes, 5, 280)
    new = int(sizes.integers(3))
    sizes_of_heads = {
        "heads_q": heads_kv * int(rng.choice([1, 2, 5, 16, 37, 64, 128])),
        "heads_kv": heads_kv,
        "head_dim": int(rng.choice([576, 576, 320, 260, 96, 400])),
        "head_dim_v": 0,
    }
    sizes_of_heads |= fixed
    if not sizes_of_heads["head_dim_v"]:
        of_keys = sizes_of_heads["head_dim"]
        sizes_of_heads["head_dim_v"] = int(rng.choice([of_keys - 64, of_keys, 8, 20]))
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
    return case, rng


@pytest.mark.parametrize("test", range(TESTS))
def test_random_problems_are_right(test: int) -> None:
    for number in range(CALLS):
        case, _ = draw(test, number)
        check_latent(case, family="decode")


@pytest.mark.parametrize("test", range(TESTS))
def test_random_problems_of_8_bits_are_right(test: int) -> None:
    for number in range(CALLS):
        case, rng = draw(test, number)
        scales = str(rng.choice(SCALES))
        if scales == "computed" and not case.seqlen_new:
            case = dataclasses.replace(case, seqlen_new=1)
        check_latent(case, str(rng.choice(list(CACHE_DTYPES))), scales, family="decode")


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
            lengths,
            ("bfloat16", "float16")[seed],
            heads_q=6,
            heads_kv=2,
            head_dim=dims[0],
            head_dim_v=dims[1],
            seqlen_new=1,
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
    """A case of which `hopper` has all query heads in one tile, and how its keys are split."""
    rng = np.random.default_rng([12, number])
    heads_kv = int(rng.choice([1, 1, 1, 2]))
    head_dim, head_dim_v = map(
        int, [(576, 512), (576, 512), (576, 512), (320, 256), (512, 512)][int(rng.integers(5))]
    )
    paged = rng.random() < 0.6
    new = int(rng.integers(3))
    lengths = ragged_lengths(rng, int(rng.choice([1, 5, 9])), 900)
    # Of several queries a head's are the rows.
    seqlen_q = int(rng.choice([1, 1, 1, 1, 2, 70]))
    heads = int(rng.choice([128, 128, 64, 100, 33, 7, 200])) if seqlen_q == 1 else 7
    case = KVCacheCase(
        lengths,
        str(rng.choice(["float16", "bfloat16"])),
        heads_q=heads_kv * heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_q=seqlen_q,
        seqlen_new=new,
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
    assert plan_with_kvcache(**arguments).family == "decode"


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_windows_sinks_and_modifications_are_right(cache_dtype: str | None) -> None:
    base = KVCacheCase((190, 0, 77), "bfloat16", seqlen_q=2, causal=True, heads_q=4, **LATENT)
    arguments = latent_arguments(base, cache_dtype, "row")
    more = {
        "window_size": (40, 0),
        "sinks": np.array([0.5, -1, 2, 0], np.float32),
        "softcap": 5.0,
        "alibi_slopes": np.array([0.5, 0.25, 0, 0.1], np.float32),
    }
    _, out, _ = run_on_gpu(
        arguments, family="decode", **{name: on_device(x) for name, x in more.items()}
    )
    equivalent, _ = after_the_append(arguments)
    expected = attention_with_kvcache_reference(**equivalent, **more)
    np.testing.assert_allclose(out.astype(np.float64), expected.out, atol=2**-6)


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
    import cupy

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
    # What the graph appends where it has not been yet.
    arguments["k_cache"] = np.nan_to_num(arguments["k_cache"].astype(np.float32)).astype(
        arguments["k_cache"].dtype
    )
    given = {name: on_device(x) for name, x in arguments.items()}
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        flash_attention_with_kvcache(**given, family=family)
        stream.begin_capture()
        out = flash_attention_with_kvcache(**given, family=family)
        graph = stream.end_capture()
        for length in (1, 64, 65, 400):
            grown = arguments | {"cache_seqlens": np.array([length, 2, length // 2], np.int32)}
            given["cache_seqlens"].set(grown["cache_seqlens"])
            before = to_numpy(given["k_cache"])
            out.fill(cupy.nan)
            graph.launch()
            stream.synchronize()
            equivalent, _ = after_the_append(grown | {"k_cache": before})
            Truth.of_kvcache(equivalent).check(out)
