"""Program that counts how often XLA calls the handlers of steps that it records and replays.

XLA must record launches in command buffers, see `XLA_FLAGS` in the test.
"""

from __future__ import annotations

import collections
from typing import Any

import cupy
import jax
import numpy as np

import cupy_flash.jax as cj
from cupy_flash.jax import on_gpu

LAYERS, STEPS = 8, 20
counts: collections.Counter[str] = collections.Counter()
execute = on_gpu._execute


def counted(frame: Any, stream: int, device: int) -> None:
    counts["called"] += 1
    counts["recorded"] += bool(cupy.cuda.runtime.streamIsCapturing(stream))
    execute(frame, stream, device)


on_gpu._execute = counted
rng = np.random.default_rng(0)


def arrays(*shapes: tuple[int, ...]) -> list[Any]:
    return [jax.numpy.asarray(rng.standard_normal(shape), jax.numpy.bfloat16) for shape in shapes]


def forward(x: Any) -> Any:
    for _ in range(LAYERS):
        x = jax.numpy.cos(cj.flash_attention(x, x, x, causal=True))
    return x


def gradient(x: Any) -> Any:
    return jax.grad(lambda x: forward(x).astype(np.float32).sum())(x)


k_cache, v_cache = arrays(*[(2, 4096, 4, 128)] * 2)


def decode(x: Any) -> Any:
    for _ in range(LAYERS):
        x = cj.flash_attention_with_kvcache(x, k_cache, v_cache, cache_seqlens=[4096, 1000]).out
        x = jax.numpy.cos(x)
    return x


# Number of handler calls of one execution.
for step, shape, calls in (
    (forward, (2, 512, 4, 64), LAYERS),
    (gradient, (2, 512, 4, 64), 2 * LAYERS),
    (decode, (2, 1, 16, 128), LAYERS),
):
    (x,) = arrays(shape)
    compiled = jax.jit(step)
    expected = [np.asarray(step(x + i), np.float32) for i in range(STEPS)]
    counts.clear()
    for i in range(STEPS):
        found = np.asarray(compiled(x + i), np.float32)
        # A compiled function does not round all intermediate results to bfloat16.
        largest = abs(expected[i]).max()
        np.testing.assert_allclose(found, expected[i], rtol=0, atol=largest / 16)
    # Once before the recording, and while XLA records, at most for each of a few buffer addresses.
    print(step.__name__, dict(counts))
    assert counts["recorded"] > 0, counts
    assert counts["called"] <= STEPS * calls / 2, counts
print("all right")
