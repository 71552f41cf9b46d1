"""Times of gradients of the CPU backend and of the plain formula in NumPy, float32.

    python benchmarks/cpu/gradients.py

The timing is that of `grid.py`. Like `flash_attention_backward`, the formula computes the
weights from the log-sum-exp. It computes in place where possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from grid import Case, best_times, hidden, random

from cupy_flash import flash_attention, flash_attention_backward


def naive(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    causal: bool,
) -> tuple[np.ndarray, ...]:
    """Compute the formula on (batch, seqlen, heads, head_dim), with all scores in memory."""
    scale = np.float32(q.shape[3] ** -0.5)
    delta = (dout * out).sum(axis=-1).swapaxes(1, 2)
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q * scale, k, v))
    p = np.matmul(q, k.swapaxes(2, 3))
    p -= lse[..., None]
    np.exp(p, out=p)
    if causal:
        np.copyto(p, 0, where=hidden(*p.shape[2:]))
    dv = np.matmul(p.swapaxes(2, 3), dout)
    ds = np.matmul(dout, v.swapaxes(2, 3))
    ds -= delta[..., None]
    ds *= p
    dq, dk = np.matmul(ds, k), np.matmul(ds.swapaxes(2, 3), q)
    dq *= scale
    return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))


def cases() -> Iterator[Case]:
    """Yield cases with one sequence and 8 heads."""
    for seqlen, head_dim, causal in product((512, 2048, 4096), (64, 128), (False, True)):
        q, k, v, dout = random(4, 1, seqlen, 8, head_dim)
        out, lse = flash_attention(q, k, v, causal=causal, return_lse=True, backend="cpu")
        yield Case(
            f"s{seqlen} h8 d{head_dim} {'causal' if causal else 'full'}",
            lambda a=(dout, q, k, v, out, lse), c=causal: flash_attention_backward(
                *a, causal=c, backend="cpu"
            ),
            lambda a=(dout, q, k, v, out, lse), c=causal: naive(*a, c),
        )


def main() -> None:
    for case in cases():
        ours, formula = best_times(case)
        print(
            f"{case.name:20} {ours * 1e3:10.4g} {formula * 1e3:10.4g} {formula / ours:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
