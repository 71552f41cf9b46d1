"""Test vectors of ONNX's Attention operator, opsets 23 to 25, as calls of `flash_attention`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import flash_attention

Array = np.ndarray
VECTORS = 93


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_every_vector_of_onnx_is_a_call_of_flash_attention(backend: str) -> None:
    """Compare `Y` only: `flash_attention` never stores the scores, which 18 vectors also return."""
    node = pytest.importorskip("onnx.backend.test.case.node")
    with warnings.catch_warnings():
        # The formula in the onnx package divides by zero.
        warnings.simplefilter("ignore")
        importlib.import_module("onnx.backend.test.case.node.attention")
    cases = [case for case in node._NodeTestCases if not case.name.endswith("_expanded")]
    assert len(cases) >= VECTORS
    for case in cases:
        inputs, (expected, *_) = case.data_sets[0]
        (operator,) = case.model.graph.node
        names = [name for name in operator.input if name]
        named = dict(zip(names, inputs, strict=True))
        out = attention(attributes_of(operator), named, backend)
        assert out.shape == expected.shape, case.name
        assert out.dtype == expected.dtype, case.name
        # The formula of ONNX rounds to 16 bits at every step; `flash_attention` rounds at the end.
        eps = float(ml_dtypes.finfo(out.dtype).eps)
        np.testing.assert_allclose(
            *(x.astype(np.float64) for x in (out, expected)),
            rtol=case.rtol + 4 * eps,
            atol=case.atol + eps * np.abs(inputs[2].astype(np.float64)).max(),
            err_msg=case.name,
        )


def attributes_of(operator: Any) -> dict[str, Any]:
    helper = importlib.import_module("onnx.helper")
    return {a.name: helper.get_attribute_value(a) for a in operator.attribute}


def attention(attributes: Mapping[str, Any], inputs: Mapping[str, Array], backend: str) -> Array:
    """Return output `Y` of the operator."""
    q, k, v = (inputs[name] for name in "QKV")
    is_flat = q.ndim == 3
    if is_flat:
        heads = (attributes[name] for name in ("q_num_heads", "kv_num_heads", "kv_num_heads"))
        q, k, v = (
            x.reshape(*x.shape[:2], h, -1).swapaxes(1, 2)
            for x, h in zip((q, k, v), heads, strict=True)
        )
    past = 0
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        k = np.concatenate([inputs["past_key"], k], axis=2)
        v = np.concatenate([inputs["past_value"], v], axis=2)
    options: dict[str, Any] = {
        "causal": bool(attributes.get("is_causal", 0)),
        "softmax_scale": attributes.get("scale"),
        "softcap": attributes.get("softcap"),
        "window_size": tuple(attributes.get(f"{side}_window_size", -1) for side in SIDES),
        "seqlens_k": inputs.get("nonpad_kv_seqlen"),
    }
    if options["causal"] or options["window_size"] != (-1, -1):
        # The queries follow the past keys; with lengths, they are the last keys without padding.
        lengths = options["seqlens_k"]
        options["q_offset"] = past if lengths is None else lengths - q.shape[2]
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        # Keys past the end of a short mask are masked.
        missing = k.shape[2] - mask.shape[-1]
        hidden = False if mask.dtype == bool else -np.inf
        padding = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
        name = "mask" if mask.dtype == bool else "bias"
        options[name] = np.pad(mask, padding, constant_values=hidden)
    out: Array = flash_attention(q, k, v, layout="bhsd", backend=backend, **options)
    return out.swapaxes(1, 2).reshape(*out.shape[:1], out.shape[2], -1) if is_flat else out


SIDES = ("left", "right")
