"""Values for which the running row maximum changes often or stays -inf, and poisoned keys."""

from __future__ import annotations

import numpy as np

from support.gpu.gpu_support import DTYPES, Arrays, Case, bits, random_values, run


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


def check_masked_keys(case: Case, first: int, poison: float, rows: int | None = None) -> None:
    """Fail unless the first `rows` rows have the same bits if keys from `first` on are `poison`."""
    q, k, v = random_values(case)
    clean = run(case, (q, k, v))
    k[:, first:] = poison
    poisoned = run(case, (q, k, v))
    np.testing.assert_array_equal(bits(clean[0][:, :rows]), bits(poisoned[0][:, :rows]))
    np.testing.assert_array_equal(clean[1][:, :, :rows], poisoned[1][:, :, :rows])
