"""Varlen and KV-cache calls captured in CUDA graphs, and replayed with other array contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.sequence_support import KVCacheCase, KVCacheProblem, VarlenCase
from support.gpu import cupy
from support.gpu.gpu_sequences import (
    Target,
    cluster_of,
    cubins,
    decode_on_h100,
    kvcache,
    of_cases,
    on_every_family,
    poison_free_memory,
    problem_of,
    varlen,
)
from support.gpu.gpu_support import bits, keep_busy
from support.prebuilt import use_cubins

from cupy_flash import flash_attention_varlen, flash_attention_with_kvcache

__all__ = ["cubins", "use_cubins"]  # fixtures

STEPS = 25


@dataclasses.dataclass
class Captured:
    """Captured graph, with the result of the call, the stream, and the pool of its workspace."""

    graph: Any
    result: Any
    stream: Any
    pool: Any


def captured(
    target: Target, enqueue: Callable[[], Any], stream: Any = None, mode: int | None = None
) -> Captured:
    """Capture `enqueue` as the docs recommend: after a warm-up, with a separate memory pool."""
    stream = stream or cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        with target.skipping_what_it_refuses():
            enqueue()
        stream.synchronize()
        stream.begin_capture(mode)
        result = enqueue()
        graph = stream.end_capture()
    return Captured(graph, result, stream, pool)


def copy_on(stream: Any, target: Any, source: Any) -> None:
    target.data.copy_from_device_async(source.data, source.nbytes, stream)


def advance(lengths: Any) -> None:
    """Add 1 to the length of every sequence, on the current stream."""
    code = 'extern "C" __global__ void advance(int* lengths) { ++lengths[threadIdx.x]; }'
    cupy.RawKernel(code, "advance")((1,), (lengths.size,), (lengths,))


class Generation:
    """Decoding steps that append the same token to each cache and attend to the cache."""

    def __init__(self, target: Target, case: KVCacheCase, **options: Any) -> None:
        problem: KVCacheProblem = problem_of(dataclasses.replace(case, slack=STEPS + 1))
        self.target = target
        self.options = {**target.options, **options}
        self.arguments = problem.arguments(cupy)
        self.lengths = self.arguments["cache_seqlens"]
        self.first_lengths = self.lengths.copy()
        self.out = problem.poisoned_out(cupy)
        self.history = cupy.ndarray((STEPS, *self.out.shape), self.out.dtype)

    def step(self) -> None:
        flash_attention_with_kvcache(**self.arguments, out=self.out, **self.options)
        advance(self.lengths)

    def start_again(self, stream: Any) -> None:
        copy_on(stream, self.lengths, self.first_lengths)

    def remember(self, index: int, stream: Any) -> None:
        copy_on(stream, self.history[index], self.out)

    def state(self) -> list[np.ndarray]:
        """Return all results so far, and the caches."""
        arrays = (self.history, self.arguments["k_cache"], self.arguments["v_cache"])
        return [bits(array.get()) for array in arrays]


def generated_eagerly(target: Target, case: KVCacheCase, **options: Any) -> Generation:
    generation = Generation(target, case, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for index in range(STEPS):
            with target.skipping_what_it_refuses():
                generation.step()
            generation.remember(index, stream)
        stream.synchronize()
    return generation


def assert_replays_to(generation: Generation, made: Captured, expected: Generation) -> None:
    """Fail unless `STEPS` replays, from the first lengths on, end in the expected state."""
    generation.start_again(made.stream)
    for index in range(STEPS):
        made.graph.launch(made.stream)
        generation.remember(index, made.stream)
    made.stream.synchronize()
    assert_same_state(generation, expected)


def assert_same_state(generation: Generation, expected: Generation) -> None:
    for result, wanted in zip(generation.state(), expected.state(), strict=True):
        np.testing.assert_array_equal(result, wanted)


GENERATIONS = [
    dataclasses.replace(
        kvcache(
            dtype=dtype,
            batch=len(lengths),
            longest=max(lengths),
            seqlen_new=1,
            page_size=page_size,
            rotary_dim=rotary_dim,
            causal=True,
            heads_q=4 * heads_kv,
            heads_kv=heads_kv,
        ),
        lengths=lengths,
    )
    for dtype, heads_kv, lengths, page_size, rotary_dim in (
        # With few heads and many keys, partial results are merged through device memory.
        ("float16", 2, (1500, 0, 1800), 0, 0),
        ("bfloat16", 2, (4000,), 16, 64),
        ("bfloat16", 2, (*range(0, 150, 5), *[1] * 10), 1, 32),
        ("float32", 2, (0, 300, 17, 16, 64), 16, 64),
        # With 8 KV heads, each has one cluster, which merges its partial results itself.
        ("bfloat16", 8, (900, 0, 333), 0, 0),
        ("bfloat16", 8, (5, 400, 0, 15, 129), 16, 64),
    )
]
CLUSTERED = GENERATIONS[4:]


def test_of_the_generations_some_meet_in_clusters_and_some_in_device_memory() -> None:
    for cases, meet_in_memory in ((CLUSTERED, False), (GENERATIONS[:3], True)):
        plans = [decode_on_h100(case.problem().arguments()) for case in cases]
        assert {bool(plan.schedule.counters) for plan in plans} == {meet_in_memory}
        assert {bool(plan.workspace) for plan in plans} == {meet_in_memory}
        assert {cluster_of(plan) for plan in plans} == {8}
        assert {bool(case.page_size) for case in cases} == {False, True}


# ---- Growing caches


@on_every_family
@of_cases(GENERATIONS)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_one_graph_serves_a_growing_cache(
    target: Target, case: KVCacheCase, num_splits: int
) -> None:
    expected = generated_eagerly(target, case, num_splits=num_splits)
    generation = Generation(target, case, num_splits=num_splits)
    made = captured(target, generation.step)
    assert_replays_to(generation, made, expected)


@on_every_family
@of_cases(GENERATIONS)
def test_replays_and_eager_calls_on_other_streams_do_not_disturb_each_other(
    target: Target, case: KVCacheCase
) -> None:
    expected = generated_eagerly(target, case)
    generation = Generation(target, case)
    # `alike` makes the same call on the stream of the capture, `other` another call on `side`.
    alike, other = Generation(target, case), Generation(target, GENERATIONS[0])
    expected_other = generated_eagerly(target, GENERATIONS[0])
    made = captured(target, generation.step)
    generation.start_again(made.stream)
    side, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    made.stream.synchronize()
    for index in range(STEPS):
        with side:
            other.step()
            other.remember(index, side)
        with third:
            made.graph.launch(third)
            generation.remember(index, third)
        with made.stream:
            alike.step()
            alike.remember(index, made.stream)
    cupy.cuda.Device().synchronize()
    assert_same_state(generation, expected)
    assert_same_state(alike, expected)
    assert_same_state(other, expected_other)


@on_every_family
@of_cases(GENERATIONS)
def test_two_graphs_captured_on_one_stream_may_run_at_once(
    target: Target, case: KVCacheCase
) -> None:
    expected = generated_eagerly(target, case)
    generations = [Generation(target, case) for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    graphs = [captured(target, generation.step, stream) for generation in generations]
    for generation in generations:
        generation.start_again(stream)
    stream.synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for index in range(STEPS):
        for generation, made, own in zip(generations, graphs, streams, strict=True):
            made.graph.launch(own)
            generation.remember(index, own)
    cupy.cuda.Device().synchronize()
    for generation in generations:
        assert_same_state(generation, expected)


@on_every_family
@of_cases(GENERATIONS[:2])
def test_a_captured_workspace_is_the_graph_s_alone_while_its_pool_is_kept(
    target: Target, case: KVCacheCase
) -> None:
    expected = generated_eagerly(target, case)
    generation = Generation(target, case)
    made = captured(target, generation.step)
    generation.start_again(made.stream)
    made.stream.synchronize()
    for index in range(STEPS):
        # The free memory of the default pool is NaN and is reused; the pool of the graph is not.
        poison_free_memory(target)
        eager = Generation(target, case)
        eager.step()
        made.graph.launch(made.stream)
        generation.remember(index, made.stream)
        made.stream.synchronize()
        np.testing.assert_array_equal(bits(eager.out.get()), bits(expected.history[0].get()))
    assert_same_state(generation, expected)


@on_every_family
def test_many_layers_are_captured_in_one_graph(target: Target) -> None:
    case = GENERATIONS[1]
    cases = [dataclasses.replace(case, seed=seed) for seed in range(40)]
    eager = [Generation(target, layer) for layer in cases]
    layers = [Generation(target, layer) for layer in cases]

    def step(generations: list[Generation]) -> None:
        for generation in generations:
            generation.step()

    made = captured(target, lambda: step(layers))
    for layer in layers:
        layer.start_again(made.stream)
    with made.stream:
        for index in range(STEPS):
            made.graph.launch(made.stream)
            step(eager)
            for generation in (*layers, *eager):
                generation.remember(index, made.stream)
        made.stream.synchronize()
    for layer, expected in zip(layers, eager, strict=True):
        assert_same_state(layer, expected)


# ---- Other contents


@on_every_family
@of_cases(
    varlen(dtype=dtype, page_size=page_size, causal=True, heads_q=8, heads_kv=2, longest=400)
    for dtype, page_size in (("float16", 0), ("bfloat16", 16), ("float32", 0))
)
@pytest.mark.parametrize("num_splits", [0, 3])
def test_a_captured_varlen_call_replays_on_other_lengths(
    target: Target, case: VarlenCase, num_splits: int
) -> None:
    rng = np.random.default_rng(6)
    # The total number of rows is the same, but the lengths of the sequences are permuted.
    others = [
        dataclasses.replace(
            case,
            seqlens_q=tuple(int(n) for n in rng.permutation(case.seqlens_q)),
            seqlens_k=tuple(int(n) for n in rng.permutation(case.seqlens_k)),
        )
        for _ in range(4)
    ]
    arguments = problem_of(case).arguments(cupy)
    out = problem_of(case).poisoned_out(cupy)
    made = captured(
        target,
        lambda: flash_attention_varlen(
            **arguments, out=out, return_lse=True, num_splits=num_splits, **target.options
        ),
    )
    stream, (_, lse) = made.stream, made.result
    for other in (*others, case):
        problem = problem_of(other)
        for name, value in problem.arguments().items():
            if isinstance(value, np.ndarray):
                assert arguments[name].shape == value.shape
                arguments[name].set(value, stream=stream)
        out.data.memset_async(0xFF, out.nbytes, stream)
        lse.data.memset_async(0xFF, lse.nbytes, stream)
        made.graph.launch(stream)
        result, result_lse = out.get(stream=stream), lse.get(stream=stream)
        stream.synchronize()
        problem.check(result, result_lse)


@on_every_family
@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_step_follows_other_caches_and_pages(target: Target, page_size: int) -> None:
    case = KVCacheCase(
        (117, 900, 0, 33),
        dtype="float16",
        seqlen_q=3,
        page_size=page_size,
        indexed=not page_size,
        heads_q=8,
        heads_kv=2,
    )
    arguments = problem_of(case).arguments(cupy)
    out = problem_of(case).poisoned_out(cupy)
    made = captured(
        target, lambda: flash_attention_with_kvcache(**arguments, out=out, **target.options)
    )
    stream = made.stream
    for seed, lengths in enumerate(((0, 0, 900, 1), (900, 899, 0, 64), (5, 900, 17, 16)), 1):
        problem = problem_of(dataclasses.replace(case, lengths=lengths, seed=seed))
        for name, value in problem.arguments().items():
            if isinstance(value, np.ndarray):
                arguments[name].set(value, stream=stream)
        out.data.memset_async(0xFF, out.nbytes, stream)
        made.graph.launch(stream)
        result = out.get(stream=stream)
        stream.synchronize()
        problem.check(result)


# ---- No synchronization, no allocation


@on_every_family
@of_cases(GENERATIONS)
def test_after_a_warm_up_the_strictest_capture_succeeds(target: Target, case: KVCacheCase) -> None:
    # In this mode a wait or an allocation is an error, on any stream.
    expected = generated_eagerly(target, case)
    generation = Generation(target, case)
    made = captured(target, generation.step, mode=cupy.cuda.runtime.streamCaptureModeGlobal)
    assert_replays_to(generation, made, expected)


@on_every_family
@pytest.mark.parametrize("what", ["varlen", "kvcache"])
def test_a_call_runs_on_the_current_stream_and_does_not_wait_for_it(
    target: Target, what: str
) -> None:
    case: Any = (
        varlen(dtype="float16", causal=True)
        if what == "varlen"
        else kvcache(dtype="float16", seqlen_q=2, seqlen_new=2, rotary_dim=64, causal=True)
    )
    function = flash_attention_varlen if what == "varlen" else flash_attention_with_kvcache
    problem = problem_of(case)
    ready, arguments = problem.arguments(cupy), problem.arguments(cupy)
    for value in arguments.values():
        if isinstance(value, cupy.ndarray) and value.dtype != np.int32:
            value.data.memset(0xFF, value.nbytes)
    keep_busy(1)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        # This call leaves memory for the result in the stream's pool: a new allocation could wait.
        target.call(function, **problem.arguments(cupy))
        stream.synchronize()
        keep_busy()
        for name, value in arguments.items():
            if isinstance(value, cupy.ndarray):
                copy_on(stream, value, ready[name])
        out = function(**arguments, **target.options)
        returned_early = not stream.done
        host = out.get(stream=stream)
        stream.synchronize()
    assert returned_early, "the call waited for the stream"
    problem.check(host)
