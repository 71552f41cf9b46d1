"""Inputs of the tests that compare calls of other libraries with their counterparts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Numbers of queries and keys. A causal mask aligned at the top left differs from one aligned at the
# bottom right; in the second case, the latter masks whole rows.
SEQLENS = [(13, 23), (23, 13)]
BATCH, HEADS, HEADS_KV, DIM = 2, 4, 2, 16


class Arrays(NamedTuple):
    """Random float32 arrays: q, k and v, a mask that keeps the first key, and a bias."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    bias: np.ndarray

    def bhsd(self) -> Arrays:
        """Return the arrays with the axes (batch, heads, seqlen, head_dim)."""
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in self[:3])
        return Arrays(q, k, v, self.mask, self.bias)


def arrays(rng: np.random.Generator, seqlen_q: int, seqlen_k: int) -> Arrays:
    """Return random inputs with the axes (batch, seqlen, heads, head_dim)."""
    q, k, v = (
        rng.standard_normal((BATCH, seqlen, heads, DIM), dtype=np.float32)
        for seqlen, heads in ((seqlen_q, HEADS), (seqlen_k, HEADS_KV), (seqlen_k, HEADS_KV))
    )
    scores = (BATCH, HEADS, seqlen_q, seqlen_k)
    mask = rng.random(scores) < 0.5
    mask[..., 0] = True
    return Arrays(q, k, v, mask, rng.standard_normal(scores, dtype=np.float32))


def positions(seqlen_q: int, seqlen_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of queries and keys that broadcast to a mask."""
    return np.arange(seqlen_q)[:, None], np.arange(seqlen_k)


def assert_close(found: Any, expected: Any, *, rows: Any = ...) -> None:
    """Assert equality up to rounding in float32, in the given rows."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found[rows], expected[rows], rtol=0, atol=1e-5)
