"""Test vectors of ONNX's Attention operator, opsets 23 to 25, in models with `cupy_flash.onnx`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import UnsupportedError, attention_reference

onnx = pytest.importorskip("onnx")
reference = pytest.importorskip("onnx.reference")
of_onnx = pytest.importorskip("cupy_flash.onnx")

VECTORS, WITH_SCORES = 93, 18


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Operator class that computes on a backend."""
    monkeypatch.setattr(of_onnx.Attention, "backend", request.param)
    return of_onnx.Attention


def vectors() -> list[Any]:
    node = importlib.import_module("onnx.backend.test.case.node")
    with warnings.catch_warnings():
        # The formula in the onnx package divides by zero.
        warnings.simplefilter("ignore")
        importlib.import_module("onnx.backend.test.case.node.attention")
    cases = [case for case in node._NodeTestCases if not case.name.endswith("_expanded")]
    assert len(cases) >= VECTORS
    return cases


def run(operator: Any, model: Any, inputs: Any) -> list[np.ndarray]:
    """Return the outputs of a model, given its inputs in order."""
    evaluator = reference.ReferenceEvaluator(model, new_ops=[operator])
    results: list[np.ndarray] = evaluator.run(
        None, dict(zip(evaluator.input_names, inputs, strict=True))
    )
    return results


def test_every_vector_of_onnx(operator: Any) -> None:
    with_scores = 0
    for case in vectors():
        model, (inputs, expected) = onnx.ModelProto(), case.data_sets[0]
        model.CopyFrom(case.model)
        (node,) = model.graph.node
        if len(node.output) == 4:
            with_scores += 1
            with pytest.raises(UnsupportedError, match="qk_matmul_output of Attention is not supp"):
                run(operator, model, inputs)
            # The model is the same without the scores, which it outputs last.
            del node.output[-1], model.graph.output[-1]
            expected = expected[:-1]
        found = run(operator, model, inputs)
        for x, y in zip(found, expected, strict=True):
            assert x.shape == y.shape, case.name
            assert x.dtype == y.dtype, case.name
        assert all(map(np.array_equal, found[1:], expected[1:])), case.name
        # The formula of ONNX rounds to 16 bits at every step; `flash_attention` rounds at the end.
        eps = float(ml_dtypes.finfo(found[0].dtype).eps)
        np.testing.assert_allclose(
            *(x[0].astype(np.float64) for x in (found, expected)),
            rtol=case.rtol + 4 * eps,
            atol=case.atol + eps * np.abs(inputs[2].astype(np.float64)).max(),
            err_msg=case.name,
        )
    assert with_scores >= WITH_SCORES


def model_of(inputs: dict[str, np.ndarray], **attributes: Any) -> Any:
    """Return a model of one node, with the output Y."""
    helper = importlib.import_module("onnx.helper")
    names = ["Q", "K", "V", "attn_mask"]
    node = helper.make_node(
        "Attention", [n if n in inputs else "" for n in names], ["Y"], **attributes
    )
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    out = helper.make_tensor_value_info("Y", helper.np_dtype_to_tensor_dtype(inputs["Q"].dtype), [])
    graph = helper.make_graph([node], "attention", given, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("of_mask", [np.int32, np.float16, np.float32, np.float64])
def test_a_mask_of_another_dtype_is_added(
    of_mask: Any, dtype: Any, operator: Any, rng: np.random.Generator
) -> None:
    q, k, v = rng.standard_normal((3, 2, 4, 37, 24)).astype(dtype)
    mask = rng.integers(-4, 4, (4, 37, 37)).astype(of_mask)
    inputs = {"Q": q, "K": k, "V": v, "attn_mask": mask}
    (found,) = run(operator, model_of(inputs, scale=0.2), list(inputs.values()))
    exact = attention_reference(
        *(q, k, v), layout="bhsd", softmax_scale=0.2, bias=mask.astype(np.float64)
    )
    # The attribute scale is a float32, which is rounded.
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)


def test_values_may_have_another_dtype(operator: Any, rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 2, 4, 37, 24)).astype(np.float32)
    inputs = {"Q": q, "K": k, "V": v.astype(np.float16)}
    (found,) = run(operator, model_of(inputs, scale=0.25), list(inputs.values()))
    exact = attention_reference(q, k, inputs["V"], layout="bhsd", softmax_scale=0.25)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)


def test_flat_inputs_need_numbers_of_heads(operator: Any) -> None:
    rows = np.zeros((1, 3, 8), np.float32)
    inputs = dict.fromkeys("QKV", rows)
    with pytest.raises(ValueError, match="q_num_heads and kv_num_heads are missing"):
        run(operator, model_of(inputs), [rows] * 3)
