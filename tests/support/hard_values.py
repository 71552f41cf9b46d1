"""Random values of a case, changed so that a running maximum has to move, or finds nothing."""

from __future__ import annotations

import numpy as np

from support.gpu_support import DTYPES, Arrays, Case, random_values


def with_growing_keys(case: Case, ends: tuple[float, float]) -> Arrays:
    """Keys whose size goes from one end to the other, by equal factors."""
    q, k, v = random_values(case)
    size = np.geomspace(*ends, case.seqlen_k)[:, None, None]
    return q, (k.astype(np.float32) * size).astype(k.dtype), v


def with_one_key_far_above(case: Case, key: int) -> Arrays:
    """One key of each head that is five times a query."""
    q, k, v = random_values(case)
    k[:, key] = (q[:, :1, : case.heads_kv].astype(np.float32)[:, 0] * 5).astype(k.dtype)
    return q, k, v


def with_scores_far_below_zero(case: Case) -> Arrays:
    """Queries and keys that all point away from each other."""
    q, k, v = random_values(case)
    q[..., 0], k[..., 0] = 30, -30
    return q, k, v


def with_keys_at_minus_infinity(case: Case, hidden: slice) -> Arrays:
    """Keys whose score is -inf for every query."""
    q, k, v = random_values(case)
    q[..., 0] = np.abs(q[..., 0]) + DTYPES[case.dtype].type(0.5)
    k[:, hidden, :, 0] = -np.inf
    return q, k, v
