"""Invalid masks and score modifications raise errors that say what would be right."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod, attention_reference, flash_attention

BATCH, SEQLEN, HEADS = 2, 16, 4
Q = np.zeros((BATCH, SEQLEN, HEADS, 8), np.float32)
SAME = ScoreMod(lambda score: score + 0)

REFUSED = [
    ({"window_size": 5}, TypeError, r"is \(W - 1, 0\): \(4, 0\)"),
    ({"window_size": np.int64(5)}, TypeError, r"is \(W - 1, 0\): \(4, 0\)"),
    # The pair (-1, 0) would mean no left bound, so the message gives no example.
    ({"window_size": 0}, TypeError, r"is \(W - 1, 0\)$"),
    ({"window_size": True}, TypeError, r"a pair \(left, right\)"),
    ({"window_size": (1,)}, TypeError, r"a pair \(left, right\)"),
    ({"window_size": (1.5, 0)}, TypeError, "integers, or None"),
    ({"window_size": (-2, 0)}, ValueError, "distances of 0 or more"),
    ({"softcap": -30}, ValueError, "from 1e-30 to 1e.30, or 0 or None"),
    # This softcap is infinite in float32, where inf * tanh(x / inf) is NaN.
    ({"softcap": 1e300}, ValueError, "from 1e-30 to 1e.30, or 0 or None"),
    ({"softcap": float("nan")}, ValueError, "a finite number"),
    ({"softcap": "30"}, TypeError, "a number"),
    ({"softcap": True}, TypeError, "a number"),
    ({"alibi_slopes": np.zeros(3, np.float32)}, ValueError, r"expected \(4,\)"),
    ({"alibi_slopes": np.zeros(HEADS, int)}, TypeError, r"pass alibi_slopes.astype\('float32'\)"),
    ({"alibi_slopes": ["a"] * HEADS}, TypeError, "alibi_slopes is .*; expected numbers, or an"),
    ({"alibi_slopes": [[0.5, 0.5], [0.5]]}, ValueError, "alibi_slopes is not a list of numbers"),
    ({"sinks": [0.5] * 5}, ValueError, r"sinks has shape \(5,\); expected \(4,\)"),
    ({"sinks": True}, TypeError, "sinks is a bool; expected a NumPy or CuPy array"),
    ({"bias": 0.5}, TypeError, "bias is a float; expected a NumPy or CuPy array"),
    ({"alibi_slopes": np.zeros((1, HEADS), np.float32)}, ValueError,
     r"expected \(2, 4\).*is \(heads_q,\)"),
    ({"alibi_slopes": np.zeros((1, 1, HEADS), np.float32)}, ValueError,
     r"expected \(4,\), one for each query head"),
    ({"sinks": np.zeros(5, np.float32)}, ValueError, r"expected \(4,\), one for each query head"),
    ({"bias": np.zeros((SEQLEN, SEQLEN), bool)}, TypeError,
     "selects the visible pairs, pass it as mask"),
    ({"bias": np.zeros((3, 3), np.float32)}, ValueError, r"broadcasts to \(2, 4, 16, 16\)"),
    ({"bias": "b"}, TypeError, "a NumPy or CuPy array"),
    ({"mask": np.zeros((SEQLEN, SEQLEN))}, TypeError, "expected bool: .* pass it as bias"),
    ({"mask": np.zeros(SEQLEN, ml_dtypes.bfloat16)}, TypeError,
     "expected bool: .* pass it as bias"),
    ({"mask": np.zeros(SEQLEN, np.int64)}, TypeError, r"pass mask.astype\('bool'\)"),
    ({"mask": np.zeros((BATCH, SEQLEN), bool)}, ValueError, r"pass mask\[:, None, None\]"),
    ({"mask": np.zeros((3, SEQLEN), bool)}, ValueError, "heads_q, seqlen_q, seqlen_k\\)$"),
    ({"prefix_lens": np.zeros(BATCH, np.int32)}, ValueError, "causal=True"),
    ({"prefix_lens": [3, -1], "causal": True}, ValueError, r"prefix_lens\[1\] is -1"),
    ({"q_offset": np.zeros(BATCH, np.int32)}, ValueError, "causal=True"),
    ({"seqused_q": [1, 1]}, ValueError, "seqused_q is for packed sequences; pass mask_mod"),
    ({"q_offset": [0, 2**30], "causal": True}, ValueError, r"q_offset\[1\] is 1073741824"),
    ({"q_offset": [0], "causal": True}, ValueError, r"expected \(2,\), one for each sequence"),
    ({"q_offset": np.zeros(BATCH), "causal": True}, TypeError, r"q_offset.astype\('int32'\)"),
    ({"tree_mask": np.zeros((BATCH, SEQLEN), np.int64)}, TypeError, "expected uint64"),
    ({"tree_mask": np.zeros(SEQLEN, np.uint64)}, ValueError, "64 bits for each query"),
    ({"seqlens_k": [3]}, ValueError, r"expected \(2,\)"),
    ({"seqlens_k": [3, 17]}, ValueError, r"seqlens_k\[1\] is 17; expected at most 16"),
    ({"seqlens_k": [-1, 16]}, ValueError, r"seqlens_k\[0\] is -1"),
    ({"dropout_p": 0.1}, ValueError, "dropout_seed is missing; pass an integer"),
    ({"dropout_p": 1.0, "dropout_seed": 1}, ValueError, "a number from 0 to below 1"),
    ({"dropout_p": -0.1, "dropout_seed": 1}, ValueError, "a number from 0 to below 1"),
    ({"dropout_p": float("nan"), "dropout_seed": 1}, ValueError, "a finite number"),
    ({"dropout_p": "0.1", "dropout_seed": 1}, TypeError, "a number"),
    ({"dropout_p": True, "dropout_seed": 1}, TypeError, "a number"),
    ({"dropout_p": 0.1, "dropout_seed": 0.5}, TypeError, "dropout_seed is 0.5; expected an int"),
    ({"dropout_p": 0.1, "dropout_seed": [1]}, ValueError, "or two: a seed and an offset"),
    ({"dropout_p": 0.1, "dropout_seed": [1, True]}, TypeError, "expected an integer"),
    ({"dropout_p": 0.1, "dropout_seed": 2**64}, ValueError, "expected integers of 64 bits"),
    ({"dropout_p": 0.1, "dropout_seed": -(2**63) - 1}, ValueError, "integers of 64 bits"),
    ({"dropout_p": 0.1, "dropout_seed": np.zeros(3, int)}, ValueError,
     r"expected \(2,\), the seed and the offset"),
    ({"dropout_p": 0.1, "dropout_seed": np.zeros(2)}, TypeError, r"dropout_seed.astype\('int64'\)"),
    ({"score_mod": lambda score: score}, TypeError, r"ScoreMod\(function\)"),
    ({"mask_mod": SAME}, TypeError, "expected a MaskMod"),
    ({"score_mod": MaskMod(lambda i, j: i >= j)}, TypeError, "expected a ScoreMod"),
    ({"softcap": 3.0, "q_offset": 2**31}, ValueError, "q_offset is 2147483648"),
    ({"window_size": -2}, TypeError, "expected \\(left, right\\)"),
    ({"frobnicate": 3}, TypeError, "'frobnicate'; flash_attention takes q, k, v, causal, "),
]  # fmt: skip
# Argument names of other libraries, and misspelt names.
OTHER_NAMES = {
    "scale": "pass softmax_scale", "sm_scale": "pass softmax_scale", "is_causal": "pass causal",
    "attn_mask": "pass mask, .* or bias", "dropout": "pass dropout_p",
    "rng_state": "pass dropout_seed, an integer",
    "window": r"pass window_size=\(left, right\)",
    "sliding_window": r"pass window_size=\(left, right\)", "num_heads": "the shapes of the arrays",
    "enable_gqa": "the shapes of the arrays", "deterministic": "always deterministic",
    "logits_soft_cap": "pass softcap", "s_aux": "pass sinks",
    "return_attn_probs": "pass return_lse", "key_padding_mask": "pass seqlens_k, or mask",
    "block_mask": "pass mask_mod", "cache_seqlens": "an argument of flash_attention_with_kvcache$",
    "cu_seqlens_q": "an argument of flash_attention_varlen$",
    "softmaxscale": "did you mean 'softmax_scale'", "windw_size": "did you mean 'window_size'",
}  # fmt: skip


@pytest.mark.parametrize(
    ("modifications", "error", "message"), REFUSED, ids=[str(list(case[0])) for case in REFUSED]
)
def test_what_cannot_be_meant_is_refused(
    modifications: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        flash_attention(Q, Q, Q, backend="cpu", **modifications)


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("value", [None, 1])
def test_an_argument_by_another_name_is_told_the_right_one(name: str, value: int | None) -> None:
    with pytest.raises(TypeError, match=f"unexpected .*'{name}'.*{OTHER_NAMES[name]}"):
        flash_attention(Q, Q, Q, backend="cpu", **{name: value})


@pytest.mark.parametrize("nothing", [{"softcap": 0.0}, {"softcap": 0}, {"window_size": -1}])
def test_no_cap_and_no_window_by_the_values_of_other_libraries(
    nothing: dict[str, Any], rng: np.random.Generator
) -> None:
    q, k, v = (rng.standard_normal(Q.shape, np.float32) for _ in range(3))
    plain = flash_attention(q, k, v, backend="cpu")
    np.testing.assert_array_equal(flash_attention(q, k, v, backend="cpu", **nothing), plain)
    np.testing.assert_array_equal(
        attention_reference(q, k, v, **nothing), attention_reference(q, k, v)
    )
