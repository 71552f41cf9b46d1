"""One backward pass of the CPU backend: a forward pass and the arrays of its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from cupy_flash.cpu.forward_pass import SCRATCH_LIMIT, Pass, Tiling

Array = NDArray[Any]

# Number of scores up to which one step computes several heads and sequences.
SCORES_AT_ONCE = 1 << 17
# Number of workers whose scratch together fits into `SCRATCH_LIMIT`, unless one head takes more.
_WORKERS = 4


class GradientPass(NamedTuple):
    """A forward pass, the gradients of its outputs, and arrays for the gradients of its inputs.

    Attributes
    ----------
    job
        Forward pass, including its output.
    dlse
        Gradient of the log-sum-exp; None if nothing depends on it.
    dq, dk, dv
        Gradients, or None if not requested. Each element of dq is written once; dk and dv are
        accumulated in the dtype of the computation.
    bias
        Gradient of a bias, or None if not requested. Broadcast axes have length 1.
    small
        Gradients in float64: "sinks", (heads_q,), and "score_mod.NAME" for each captured array.
    is_shared
        Whether query tiles of several sequences or heads add to the same element of `bias`.
    """

    job: Pass
    lse: Array  # (batch, heads_kv, group, seqlen_q)
    dout: Array  # (batch, heads_kv, group, seqlen_q, head_dim_v)
    dlse: Array | None  # (batch, heads_kv, group, seqlen_q)
    dq: Array | None  # (batch, heads_kv, group, seqlen_q, head_dim)
    dk: Array | None  # (batch, heads_kv, seqlen_k, head_dim)
    dv: Array | None  # (batch, heads_kv, seqlen_k, head_dim_v)
    bias: Array | None  # (batch, heads_kv, group, seqlen_q, seqlen_k)
    small: Mapping[str, Array]
    is_shared: bool

    @classmethod
    def make(
        cls,
        job: Pass,
        dout: Array,
        lse: Array,
        dlse: Array | None,
        totals: Mapping[str, Array],
        *,
        is_shared: bool = False,
    ) -> GradientPass:
        """Return a backward pass over arrays of the shapes in `gradients.backward`.

        `totals` holds the gradient arrays by name. The gradient of a bias has the axes of `bias`.
        """
        batch, heads_kv, group, seqlen_q, _ = job.q.shape
        dims = job.q.shape[4], job.v.shape[3]
        job = job._replace(tiling=smaller(job.tiling, *dims, job.compute.itemsize))

        def by_row(x: Array) -> Array:
            grouped = x.reshape(batch, seqlen_q, heads_kv, group, x.shape[3])
            return grouped.transpose(0, 2, 3, 1, 4)

        def by_head(x: Array) -> Array:
            return x.reshape(batch, heads_kv, group, seqlen_q)

        dk, dv = (totals[n].swapaxes(1, 2) if n in totals else None for n in ("k", "v"))
        return cls(
            job=job,
            lse=by_head(lse),
            dout=by_row(dout),
            dlse=None if dlse is None else by_head(dlse),
            dq=by_row(totals["q"]) if "q" in totals else None,
            dk=dk,
            dv=dv,
            bias=totals.get("bias"),
            small={n: x for n, x in totals.items() if n not in ("q", "k", "v", "bias")},
            is_shared=is_shared,
        )

    @property
    def captures(self) -> dict[str, Array]:
        """Gradients in `small` of the arrays that a score_mod captures."""
        return {name: x for name, x in self.small.items() if name != "sinks"}

    @property
    def needs_scores(self) -> bool:
        """Whether a requested gradient depends on the gradients of the scores."""
        return any(x is not None for x in (self.dq, self.dk, self.bias)) or bool(self.captures)

    @property
    def scratch_bytes(self) -> int:
        """Number of bytes of one worker's buffers."""
        head_dim, head_dim_v = self.job.q.shape[4], self.job.v.shape[3]
        tiling, itemsize = self.job.tiling, self.job.compute.itemsize
        one = scratch_elements(tiling.Br * tiling.heads_per_tile, tiling.Bc, head_dim, head_dim_v)
        return tiling.batch * tiling.kv_heads * one * itemsize


def smaller(tiling: Tiling, head_dim: int, head_dim_v: int, itemsize: int) -> Tiling:
    """Return `tiling` with fewer heads and sequences per query tile, if necessary.

    A query tile then has at most `SCORES_AT_ONCE` scores, and `_WORKERS` workers fit
    `SCRATCH_LIMIT`, unless a single head exceeds these limits.
    """
    m = tiling.Br * tiling.heads_per_tile
    one = scratch_elements(m, tiling.Bc, head_dim, head_dim_v) * itemsize
    fitting = SCRATCH_LIMIT // (_WORKERS * one)
    at_once = max(1, min(SCORES_AT_ONCE // (m * tiling.Bc), fitting))
    kv_heads = min(tiling.kv_heads, at_once)
    return tiling._replace(kv_heads=kv_heads, batch=min(tiling.batch, max(1, at_once // kv_heads)))


def scratch_elements(m: int, Bc: int, head_dim: int, head_dim_v: int) -> int:
    """Return the number of elements of all buffers for m rows and Bc keys of one KV head."""
    p_and_ds = 2 * m * Bc
    of_rows = m * (3 * head_dim + head_dim_v + 2)  # q, dq, a product, dout; lse, delta
    of_keys = 2 * Bc * (head_dim + head_dim_v)  # copies of k and v, and products
    return p_and_ds + of_rows + of_keys
