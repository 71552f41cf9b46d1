"""Random values for which the running row maximum changes often, or stays -inf."""

from __future__ import annotations

import numpy as np

from support.gpu.gpu_support import DTYPES, Arrays, Case, random_values


def with_growing_keys(case: Case, ends: tuple[float, float]) -> Arrays:
    """Return values with keys whose magnitude changes geometrically between the two ends."""
    q, k, v = random_values(case)
    size = np.geomspace(*ends, case.seqlen_k)[:, None, None]
    return q, (k.astype(np.float32) * size).astype(k.dtype), v


def with_one_key_far_above(case: Case, key: int) -> Arrays:
    """Return values in which one key of each head is five times a query."""
    q, k, v = random_values(case)
    k[:, key] = (q[:, :1, : case.heads_kv].astype(np.float32)[:, 0] * 5).astype(k.dtype)
    return q, k, v


def with_scores_far_below_zero(case: Case) -> Arrays:
    """Return values with queries and keys that all point away from each other."""
    q, k, v = random_values(case)
    q[..., 0], k[..., 0] = 30, -30
    return q, k, v


def with_keys_at_minus_infinity(case: Case, hidden: slice) -> Arrays:
    """Return values in which some keys have the score -inf for every query."""
    q, k, v = random_values(case)
    q[..., 0] = np.abs(q[..., 0]) + DTYPES[case.dtype].type(0.5)
    k[:, hidden, :, 0] = -np.inf
    return q, k, v
