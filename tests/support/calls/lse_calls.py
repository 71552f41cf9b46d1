"""Random calls whose log-sum-exp a kernel computes without the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash import flash_attention


@dataclass(frozen=True)
class LseCall:
    """Queries and keys (batch, seqlen, heads, head_dim) of 16 bits, and options of the call."""

    q: np.ndarray
    k: np.ndarray
    options: dict[str, Any]

    @classmethod
    def random(cls, rng: np.random.Generator, heads_kv: int | None = None) -> LseCall:
        """Draw a call, with a given number of KV heads or few.

        In some calls the scores of later keys exceed the first by more than a float32 sum covers
        without another base. In some, a query is NaN.
        """
        batch, group = (int(rng.integers(1, 3)) for _ in range(2))
        heads_kv = heads_kv or int(rng.integers(1, 3))
        seqlen_q, seqlen_k = (int(rng.integers(1, 400)) for _ in range(2))
        head_dim = int(rng.choice((8, 40, 64, 128, 192, 256)))
        growth = np.linspace(1, float(rng.choice((1, 30))), seqlen_k)[:, None, None]
        q = rng.standard_normal((batch, seqlen_q, heads_kv * group, head_dim))
        k = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim)) * growth
        if rng.integers(4) == 0:
            q[0, rng.integers(seqlen_q)] = np.nan
        options = {
            "causal": bool(rng.integers(2)),
            "softmax_scale": float(rng.choice((0.3, 1.0, -0.5, 1e-35))),
        }
        if options["causal"]:
            options["q_offset"] = int(rng.integers(-seqlen_q, seqlen_k + 1))
        return cls(q.astype(np.float16), k.astype(np.float16), options)

    def check(self, q: np.ndarray, k: np.ndarray, lse: np.ndarray) -> None:
        """Compare the result for float64 copies of the arrays that the kernel read."""
        _, expected = flash_attention(q, k, k, **self.options, return_lse=True, backend="cpu")
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(lse[~finite], expected[~finite])
        # The error of a product of rows is relative to the sum of the magnitudes of its terms.
        scale = abs(self.options["softmax_scale"])
        size = np.nanmax(np.abs(q)) * np.abs(k).max() * q.shape[-1] * scale
        bound = 4 * float(np.finfo(np.float32).eps) * (size + 10)
        np.testing.assert_allclose(lse[finite], expected[finite], rtol=0, atol=bound)
