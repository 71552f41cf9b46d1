"""Causal attention on NumPy arrays, computed on a GPU if there is one, and the largest error."""

import numpy as np

from cupy_flash import attention_reference, flash_attention

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1024, 8, 64), dtype=np.float32)
out = flash_attention(q, k, v, causal=True)
print(out.shape, np.abs(out - attention_reference(q, k, v, causal=True)).max())
