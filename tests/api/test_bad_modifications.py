"""Modifications that cannot be meant are refused, by a message that says what would be right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod, flash_attention

BATCH, SEQLEN, HEADS = 2, 16, 4
Q = np.zeros((BATCH, SEQLEN, HEADS, 8), np.float32)
SAME = ScoreMod(lambda score: score + 0)

REFUSED = [
    ({"window_size": 5}, TypeError, r"is \(W - 1, 0\): \(4, 0\)"),
    ({"window_size": (1,)}, TypeError, r"a pair \(left, right\)"),
    ({"window_size": (1.5, 0)}, TypeError, "integers, or None"),
    ({"window_size": (-2, 0)}, ValueError, "distances of 0 or more"),
    ({"softcap": 0}, ValueError, "positive, finite"),
    ({"softcap": float("nan")}, ValueError, "positive, finite"),
    ({"softcap": "soft"}, TypeError, "a number or None"),
    ({"alibi_slopes": np.zeros(3, np.float32)}, ValueError, r"expected \(4,\)"),
    ({"alibi_slopes": np.zeros(HEADS)}, TypeError, "expected float32"),
    ({"sinks": np.zeros(5, np.float32)}, ValueError, r"expected \(4,\)"),
    ({"bias": np.zeros((3, 3), np.float32)}, ValueError, r"broadcasts to \(2, 4, 16, 16\)"),
    ({"bias": "b"}, TypeError, "a NumPy or CuPy array"),
    ({"mask": np.zeros((SEQLEN, SEQLEN))}, TypeError, "expected bool"),
    ({"prefix_lens": np.zeros(BATCH, np.int32)}, ValueError, "causal=True"),
    ({"tree_mask": np.zeros((BATCH, SEQLEN), np.int64)}, TypeError, "expected uint64"),
    ({"seqlens_k": [3]}, ValueError, r"expected \(2,\)"),
    ({"seqlens_k": [3, 17]}, ValueError, r"seqlens_k\[1\] is 17; expected at most 16"),
    ({"seqlens_k": [-1, 16]}, ValueError, r"seqlens_k\[0\] is -1"),
    ({"score_mod": lambda score: score}, TypeError, r"ScoreMod\(function\)"),
    ({"mask_mod": SAME}, TypeError, "expected a MaskMod"),
    ({"score_mod": MaskMod(lambda i, j: i >= j)}, TypeError, "expected a ScoreMod"),
    ({"softcap": 3.0, "q_offset": 2**31}, ValueError, "q_offset is 2147483648"),
    ({"window": (3, 0)}, TypeError, "unexpected keyword argument 'window'"),
]


@pytest.mark.parametrize(
    ("modifications", "error", "message"), REFUSED, ids=[str(list(case[0])) for case in REFUSED]
)
def test_what_cannot_be_meant_is_refused(
    modifications: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        flash_attention(Q, Q, Q, backend="cpu", **modifications)
