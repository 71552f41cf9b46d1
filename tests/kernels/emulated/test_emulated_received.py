"""Kernels that sum attention weights over queries, run on the host."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls.lse_calls import LseCall
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.calls.received_calls import KINDS, ReceivedCall, random_received_call
from support.draws import few_then_slow
from support.emulated_kernels import run_on_host

from cupy_flash import UnsupportedError
from cupy_flash.calls.arguments import Arguments, normalized, with_modifications
from cupy_flash.calls.check.problems import check_call
from cupy_flash.calls.check.received import check_received_call
from cupy_flash.calls.conversions import converted
from cupy_flash.calls.options import Options, plain_options, with_offsets
from cupy_flash.planning.planner import make_plan
from cupy_flash.problem.arrays import ArraySpec, Tensors
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.problem import make_problem

DEVICE = device_for_arch("sm_90")
# Thread blocks of a persistent grid on this GPU take several work items.
SMALL_DEVICE = dataclasses.replace(DEVICE, sm_count=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def sums_on_host(
    call: ReceivedCall, family: str, folder: Path, keys: int | None = None
) -> np.ndarray:
    """Return the sums that a kernel computes; `keys` is the length of every cached sequence."""
    arguments, options, mods = call.prepared(np, call.lse)
    options, mods = with_offsets(options, mods)
    arguments, mod_key, _ = with_modifications(arguments, mods, backward=True)
    options = plain_options(options._replace(mod_key=mod_key))
    arguments, _ = normalized(arguments, ())
    arguments = converted(arguments, options)
    problem, mod_arrays = check_received_call(arguments, options)
    if 0 in (problem.rows, problem.seqlen_k):
        pytest.skip("no kernel runs")
    plan = make_plan(problem, SMALL_DEVICE, family=family)
    # The call clears keys that may belong to no sequence.
    found = np.full(call.exact.shape, 0 if call.is_packed else np.nan, call.lse.dtype)
    names = ("q", "lse", "cu_seqlens_q", "cu_seqlens_k", "block_table", "cache_batch_idx")
    arrays = {name: x for name in names if (x := getattr(arguments, name)) is not None}
    arrays |= {"k": arguments.k_cache if call.is_cached else arguments.k, "received": found}
    lengths = arguments.cache_seqlens if call.is_cached else arguments.seqused_k
    if call.forward.kind == "padded":
        lengths = arguments.seqlens_k
    if lengths is not None and keys is None:
        arrays["seqused_k"] = lengths
    assert options.received is not None
    fields = dict(zip(("first_query", "last_query"), options.received[1:], strict=True))
    run_on_host(plan, options, mod_arrays, arrays, folder, fields | {"keys": keys or 0})
    return found


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(("mma", "simt"), KINDS),
        *itertools.product(("hopper",), ("dense", "padded")),
    ],
)
@pytest.mark.parametrize("number", few_then_slow(range(3), 1))
def test_sums_are_those_of_the_weights(
    family: str, kind: str, number: int, folder: Path, rng: Any
) -> None:
    dtypes = ("float32", "float64", "float16") if family == "simt" else ("float16", "bfloat16")
    call = random_received_call(
        *(rng, str(rng.choice(dtypes)), kind),
        # TMA needs aligned rows.
        head_dims=(8, 24, 64, 80, 192) if family == "hopper" else (5, 24, 64),
        longest=(150, 300) if family == "hopper" else (90, 150),
        dropout=False,
    )
    call.check(sums_on_host(call, family, folder))


@pytest.mark.parametrize("family", ["mma", "simt"])
def test_one_length_and_chosen_caches(family: str, folder: Path, rng: Any) -> None:
    dtype = "float16" if family == "mma" else "float32"
    forward = plain_cached_call(rng, dtype, 3, 70)
    length, order = 45, rng.permutation(3).astype(np.int32)
    forward.arrays["k_cache"][:, length:] = np.nan
    forward.arrays["cache_seqlens"] = np.full(3, length, np.int32)
    expected = ReceivedCall(forward, slice(-2, None), True)
    inverse = np.argsort(order).astype(np.int32)
    moved = {n: forward.arrays[n][order] for n in ("k_cache", "v_cache")}
    chosen = replaced(forward, **moved, cache_batch_idx=inverse)
    call = ReceivedCall(chosen, expected.queries, expected.grouped)
    expected.check(sums_on_host(call, family, folder, keys=length))


@pytest.mark.parametrize("page_size", [1, 5, 24, 256])
def test_pages_of_any_size(page_size: int, folder: Path, rng: Any) -> None:
    forward = plain_cached_call(rng, "bfloat16", 2, 256 if page_size == 256 else 120)
    pages = {n: in_pages(forward.arrays[n], page_size) for n in ("k_cache", "v_cache")}
    order = rng.permutation(len(pages["k_cache"]))
    table = np.argsort(order).reshape(2, -1).astype(np.int32)
    shuffled = {name: x[order] for name, x in pages.items()}
    expected = ReceivedCall(forward, slice(None), False)
    call = ReceivedCall(replaced(forward, **shuffled, block_table=table), slice(None), False)
    found = sums_on_host(call, "mma", folder)
    expected.check(found)


def test_a_page_that_does_not_exist_has_keys_of_zeros(folder: Path, rng: Any) -> None:
    forward = plain_cached_call(rng, "float32", 2, 64)
    forward.arrays["cache_seqlens"][:] = 60
    arrays = {n: in_pages(forward.arrays[n], 32) for n in ("k_cache", "v_cache")}
    table = np.array([[0, 1], [2, -7]], np.int32)
    call = ReceivedCall(replaced(forward, **arrays, block_table=table), slice(None), False)
    forward.arrays["k_cache"][1, 32:] = 0
    expected = ReceivedCall(forward, slice(None), False)
    # The CPU backend refuses the table.
    call.lse, call.exact = expected.lse, expected.exact
    expected.check(sums_on_host(call, "simt", folder))


def test_pages_of_other_sizes_are_left_to_array_operations(rng: Any) -> None:
    problem = make_problem(
        *(ArraySpec.contiguous(shape, "float32") for shape in [(2, 3, 4, 8), *[(9, 24, 2, 8)] * 2]),
        kind="kvcache",
        block_table=(4, 4),
    )
    tensors = Tensors(q=problem.tensors["q"], k=problem.tensors["k"])
    problem = dataclasses.replace(problem, received="heads", tensors=tensors)
    with pytest.raises(UnsupportedError, match="needs pages of a multiple of 16 rows, not 24"):
        make_plan(problem, DEVICE)


def plain_cached_call(rng: Any, dtype: str, batch: int, capacity: int) -> ModifiedCall:
    """Return a causal decoding call of three queries, without pages."""
    q = rng.standard_normal((batch, 3, 4, 24)).astype(DTYPES[dtype])
    k, v = rng.standard_normal((2, batch, capacity, 2, 24)).astype(DTYPES[dtype])
    lengths = rng.integers(0, capacity + 1, batch).astype(np.int32)
    arrays = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}
    return ModifiedCall("kvcache", dtype, arrays, {"causal": True})


def replaced(call: ModifiedCall, **arrays: np.ndarray) -> ModifiedCall:
    """Return a call with some arrays replaced, and the kind that they belong to."""
    kind = "paged" if "block_table" in arrays else call.kind
    return ModifiedCall(kind, call.dtype, call.arrays | arrays, dict(call.options))


def in_pages(cache: np.ndarray, page_size: int) -> np.ndarray:
    """Return the rows of a cache (batch, capacity, heads, dim) in pages, in their order."""
    return cache.reshape(-1, page_size, *cache.shape[2:])


@pytest.mark.parametrize("number", few_then_slow(range(8), 2))
def test_log_sum_exp_without_output(number: int, folder: Path, rng: Any) -> None:
    call = LseCall.random(rng)
    q, k = call.q, call.k
    options = plain_options(Options(**call.options, return_lse=True, discards_out=True))
    problem, _ = check_call(Arguments(q, k, k), options)
    plan = make_plan(problem, SMALL_DEVICE, family="hopper_lse")
    batch, seqlen_q, heads, _ = q.shape
    lse = np.full((batch, heads, seqlen_q), np.nan, np.float32)
    run_on_host(plan, options, {}, {"q": q, "k": k, "lse": lse}, folder)
    call.check(q.astype(np.float64), k.astype(np.float64), lse)
