"""Inputs and attributes of ONNX's operator Attention, and their counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.pages.migration import BATCH, DIM, HEADS, HEADS_KV, SEQLENS, arrays, assert_close

from cupy_flash import attention_weights, flash_attention

onnx = pytest.importorskip("onnx")
reference = pytest.importorskip("onnx.reference")

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
LENGTHS = np.array([9, 6])


def run(
    inputs: dict[str, np.ndarray], *, outputs: tuple[str, ...] = ("Y",), **attributes: Any
) -> Any:
    """Return an output of ONNX's reference implementation, by default Y."""
    helper = onnx.helper
    names = [name if name in inputs else "" for name in INPUTS]
    node = helper.make_node("Attention", names, outputs, **attributes)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    result = helper.make_tensor_value_info(outputs[-1], onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", given, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    return reference.ReferenceEvaluator(model).run(None, inputs)[0]


def rows(rng: np.random.Generator, seqlens: tuple[int, int]) -> dict[str, Any]:
    """Return further inputs, attributes, and arguments of `flash_attention`, by row."""
    mask, bias = arrays(rng, *seqlens)[3:]
    window = {"left_window_size": 3, "right_window_size": 2}
    of_cache = {"nonpad_kv_seqlen": LENGTHS}
    end = {"q_offset": LENGTHS - seqlens[0], "seqlens_k": LENGTHS}
    short = seqlens[1] - 4
    padding = [(0, 0)] * 3 + [(0, 4)]
    return {
        "bools": ({"attn_mask": mask}, {}, {"mask": mask}),
        "short bools": (
            {"attn_mask": mask[..., :short]},
            {},
            {"mask": np.pad(mask[..., :short], padding)},
        ),
        "numbers": ({"attn_mask": bias}, {}, {"bias": bias}),
        "short numbers": (
            {"attn_mask": bias[..., :short]},
            {},
            {"bias": np.pad(bias[..., :short], padding, constant_values=-np.inf)},
        ),
        "lengths": (of_cache, {}, {"seqlens_k": LENGTHS}),
        "causal": ({}, {"is_causal": 1}, {"causal": True, "q_offset": 0}),
        "causal lengths": (of_cache, {"is_causal": 1}, {"causal": True, **end}),
        "window": ({}, window, {"window_size": (3, 2), "q_offset": 0}),
        "window of lengths": (of_cache, window, {"window_size": (3, 2), **end}),
        "scale": ({}, {"scale": 0.5}, {"softmax_scale": 0.5}),
        "softcap": ({}, {"softcap": 3.0}, {"softcap": 3.0}),
    }


ROWS = (
    "bools", "short bools", "numbers", "short numbers", "lengths", "causal", "causal lengths",
    "window", "window of lengths", "scale", "softcap",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_a_row(name: str, seqlens: tuple[int, int], rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, *seqlens).bhsd()[:3]
    inputs, attributes, options = rows(rng, seqlens)[name]
    expected = run({"Q": q, "K": k, "V": v} | inputs, **attributes)
    assert_close(flash_attention(q, k, v, layout="bhsd", **options), expected)


@pytest.mark.parametrize("past", [10, 4])
def test_past_keys(past: int, rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, *SEQLENS[0]).bhsd()[:3]
    inputs = {"Q": q, "past_key": k[:, :, :past], "past_value": v[:, :, :past]}
    inputs |= {"K": k[:, :, past:], "V": v[:, :, past:]}
    expected = run({name: inputs[name] for name in INPUTS if name in inputs}, is_causal=1)
    options = {"causal": True, "layout": "bhsd"}
    assert_close(flash_attention(q, k, v, q_offset=past, **options), expected)
    if past == 10:  # as many new keys as queries
        assert_close(flash_attention(q, k, v, **options), expected)


def test_inputs_of_three_axes(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, *SEQLENS[0])[:3]
    q_rows, k_rows, v_rows = (x.reshape(BATCH, -1, x.shape[2] * DIM) for x in (q, k, v))
    flat = {"Q": q_rows, "K": k_rows, "V": v_rows}
    expected = run(flat, q_num_heads=HEADS, kv_num_heads=HEADS_KV)
    assert_close(flash_attention(q, k, v).reshape(BATCH, -1, HEADS * DIM), expected)


def test_weights_are_mode_3_of_the_scores(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, *SEQLENS[0]).bhsd()[:3]
    outputs = ("Y", "", "", "scores")
    expected = run({"Q": q, "K": k, "V": v}, outputs=outputs, qk_matmul_output_mode=3, is_causal=1)
    found = attention_weights(q, k, causal=True, q_offset=0, layout="bhsd")
    assert_close(found, expected)
