"""Program that ends while its computations still need Python. Argument: platform of JAX."""

from __future__ import annotations

import sys

import jax
import numpy as np

import cupy_flash.jax as cj

(device, *_) = jax.devices(sys.argv[1])
q = jax.device_put(np.ones((2, 128, 4, 64), np.float32), device)
step = jax.jit(lambda x: cj.flash_attention(x, x, x) @ jax.numpy.eye(64))
for _ in range(300):
    q = step(q)
q.block_until_ready()
# The results of these calls are dropped.
for _ in range(30):
    step(q)
print("all right")
