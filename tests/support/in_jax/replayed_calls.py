"""Program that counts how often XLA calls the handlers of steps that it records and replays.

XLA must record launches in command buffers, see `XLA_FLAGS` in the test. Each execution has other
inputs, at addresses that may be those of the execution before. So a launch that is replayed with
old addresses, or with what was in memory when it was recorded, is found by its results.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import cupy
import jax
import numpy as np

import cupy_flash.jax as cj
from cupy_flash import ScoreMod
from cupy_flash.jax import on_gpu

LAYERS, STEPS, BATCH, CAPACITY = 8, 20, 2, 4096
counts: collections.Counter[str] = collections.Counter()
execute = on_gpu._execute


def counted(frame: Any, stream: int, device: int) -> None:
    counts["called"] += 1
    counts["recorded"] += bool(cupy.cuda.runtime.streamIsCapturing(stream))
    execute(frame, stream, device)


on_gpu._execute = counted
rng = np.random.default_rng(0)


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    """Return random arrays in host memory."""
    return [rng.standard_normal(shape).astype(jax.numpy.bfloat16) for shape in shapes]


def layers(x: Any, attention: Callable[[Any], Any]) -> Any:
    """Return the outputs of all layers, of which each but the first depends on the one before."""
    outs, y = [], x
    for _ in range(LAYERS):
        outs.append(attention(y))
        y = x + outs[-1]
    return jax.numpy.stack(outs)


def forward(x: Any) -> Any:
    return layers(x, lambda y: cj.flash_attention(y, x, x, causal=True))


def gradient(x: Any) -> Any:
    def loss(x: Any, factor: float) -> Any:
        out = cj.flash_attention(x * factor, x, x, causal=True)
        return (out.astype(np.float32) ** 2).sum()

    return jax.numpy.stack([jax.grad(loss)(x, 1 + i / LAYERS) for i in range(LAYERS)])


gain = np.array([0.5, 1, 2, 0.25], np.float32)
gains = ScoreMod(lambda score, h: score * gain[h])


def branches(x: Any, is_other: Any) -> Any:
    """Return the outputs of one of two branches: the other is not taken before it is recorded."""

    def one(y: Any) -> Any:
        return cj.flash_attention(y, x, x)

    def other(y: Any) -> Any:
        return cj.flash_attention(y, x, x, window_size=(100, 0), score_mod=gains)

    return layers(x, lambda y: jax.lax.cond(is_other, other, one, y))


k_cache, v_cache = map(jax.numpy.asarray, arrays(*[(BATCH, CAPACITY, 4, 128)] * 2))


def decode(x: Any, lengths: Any) -> Any:
    def attention(y: Any) -> Any:
        # Larger queries attend to fewer keys, so that the output depends on them.
        step = cj.flash_attention_with_kvcache(2 * y, k_cache, v_cache, cache_seqlens=lengths)
        return step.out

    return layers(x, attention)


def append(x: Any, new: Any, lengths: Any) -> Any:
    caches, outs = (k_cache, v_cache), []
    for i in range(LAYERS):
        step = cj.flash_attention_with_kvcache(
            2 * x, *caches, new[i], new[i], cache_seqlens=lengths + i
        )
        outs.append(step.out)
        caches = step.k_cache, step.v_cache
    return jax.numpy.stack(outs), *caches


def lengths() -> np.ndarray:
    return rng.integers(CAPACITY // 4, CAPACITY - LAYERS, BATCH).astype(np.int32)


def parts(results: Any) -> list[np.ndarray]:
    """Return the elements of all results along their first axis."""
    return [part for x in jax.tree.leaves(results) for part in np.asarray(x, np.float32)]


ROWS, QUERIES, NEW = (BATCH, 512, 4, 64), (BATCH, 1, 16, 128), (LAYERS, BATCH, 1, 4, 128)
# Each step with a function of the number of the execution that returns its inputs, and the number
# of handler calls of an execution.
CASES: tuple[tuple[Callable[..., Any], Callable[[int], list[Any]], int], ...] = (
    (forward, lambda _: arrays(ROWS), LAYERS),
    (gradient, lambda _: arrays(ROWS), 2 * LAYERS),
    (branches, lambda i: [*arrays(ROWS), np.bool_(i % 3 == 2)], LAYERS),
    (decode, lambda _: [*arrays(QUERIES), lengths()], LAYERS),
    (append, lambda _: [*arrays(QUERIES, NEW), lengths()], LAYERS),
)


for step, inputs, calls in CASES:
    given = [inputs(i) for i in range(STEPS)]
    compiled = jax.jit(step)
    counts.clear()
    # Before the calls that are not compiled, which would load the kernels.
    found = [parts(compiled(*map(jax.numpy.asarray, xs))) for xs in given]
    # Called once before the recording, and while XLA records, which it repeats if a buffer of the
    # program has another address. XLA of JAX 0.11 does not record operations that write operands.
    print(step.__name__, dict(counts))
    if step is not append:
        assert counts["recorded"] > 0, (step.__name__, counts)
        assert counts["called"] < STEPS * calls, (step.__name__, counts)
    before: list[np.ndarray] = []
    for xs, ours in zip(given, found, strict=True):
        expected = parts(step(*map(jax.numpy.asarray, xs)))
        # A compiled function does not round all intermediate results to bfloat16.
        tolerances = [abs(x).max() / 16 for x in expected]
        for one, x, tolerance in zip(ours, expected, tolerances, strict=True):
            np.testing.assert_allclose(one, x, rtol=0, atol=tolerance)
        # The results of the execution before would not pass.
        for old, x, tolerance in zip(before, expected, tolerances, strict=False):
            assert abs(old - x).max() > 2 * tolerance, step.__name__
        before = expected
print("all right")
