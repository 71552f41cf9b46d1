"""Functions that are differentiated by torch or JAX, with every array argument."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.calls.every_array import Call, calls_of, functions_of, kind_of
from support.libraries import host_array, jax_library, torch_library

import cupy_flash

INPUTS = ("q", "k", "v", "qkv", "bias", "sinks")
# Arguments of `scaled_dot_product_attention` by their names in `flash_attention`.
SCALED_DOT_PRODUCT = {"query": "q", "key": "k", "value": "v", "attn_mask": "bias"}
# Functions of `cupy_flash.jax` that have their own tests, and arguments of calls without gradients.
OTHERS = {
    "dot_product_attention",
    "export_checks",
    "flash_attention_with_kvcache",
    "flax_attention",
}
NO_GRADIENTS = {"q_scale", "k_scale", "v_scale", "block_table"}
DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def calls(module: str) -> list[Any]:
    """Return the calls of a module, which may not be installed."""
    try:
        found = importlib.import_module(f"cupy_flash.{module}")
    except ImportError:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"{module} is not installed"))]
    return [
        pytest.param(call, id=str(call))
        for function in functions_of(found)
        if function.__name__ not in OTHERS
        for call in calls_of(function, np.float32)
        if call.argument not in NO_GRADIENTS
    ]


def assert_alike(found: dict[str, np.ndarray], call: Call) -> None:
    """Assert that results and gradients are those of NumPy arrays on the CPU."""
    right = reference(call)
    if kind_of(call.function) == "scaled_dot_product":
        del right["lse"]
    for name, expected in right.items():
        largest = max(1.0, float(np.abs(expected).max()))
        # Each element sums at most 100 float32 products of order 1.
        np.testing.assert_allclose(
            found[name], expected, rtol=0, atol=100 * 2.0**-22 * largest, err_msg=name
        )
    assert found.keys() == right.keys()


def reference(call: Call) -> dict[str, np.ndarray]:
    """Return the output, lse, and gradients of the output's sum, computed on NumPy arrays."""
    name, values = call.function.__name__, call.values
    if name == "scaled_dot_product_attention":
        name = "flash_attention"
        values = {SCALED_DOT_PRODUCT.get(n, n): x for n, x in values.items()}
        values |= {"layout": "bhsd", "return_lse": True}
    forward = Call(getattr(cupy_flash, name), None, values)
    (out, lse), _ = forward.run(lambda array: array, backend="cpu")
    backward = getattr(cupy_flash, f"{name}_backward")
    values = {n: x for n, x in values.items() if n != "return_lse"}
    values |= {"out": out, "lse": lse, "dout": np.ones_like(out)}
    wanted = [n for n in INPUTS if n in values]
    values["wrt"] = tuple(wanted)
    gradients, _ = Call(backward, None, values).run(lambda array: array, backend="cpu")
    named = zip(wanted, gradients, strict=True)
    return {"out": out, "lse": lse} | {f"d{n}": x for n, x in named}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", calls("torch"))
def test_tensors(call: Call, device: str) -> None:
    library = torch_library("cuda" if device == "gpu" else "cpu")
    given = call.converted(library.convert)
    names = {n: SCALED_DOT_PRODUCT.get(n, n) for n in given}
    inputs = {n: given[n].requires_grad_() for n, name in names.items() if name in INPUTS}
    results = call.function(**given)
    results = results if isinstance(results, tuple) else (results,)
    found = dict(zip(("out", "lse"), results, strict=False))
    found["out"].sum().backward()
    found |= {f"d{names[n]}": x.grad for n, x in inputs.items()}
    assert_alike({n: host_array(x) for n, x in found.items()}, call)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_numpy", [False, True], ids=["jax", "numpy"])
@pytest.mark.parametrize("call", calls("jax"))
def test_jax_arrays(call: Call, of_numpy: bool, device: str) -> None:
    library = jax_library(device)
    given = call.converted((lambda array: array) if of_numpy else library.convert)
    inputs = {n: given.pop(n) for n in INPUTS if n in given}
    # If all inputs are NumPy arrays, JAX's default device computes.
    jax = importlib.import_module("jax")

    def total(inputs: dict[str, Any]) -> tuple[Any, Any]:
        out, lse = call.function(**inputs, **given)
        return out.sum(), (out, lse)

    with jax.default_device(jax.devices(device)[0]):
        gradients, (out, lse) = jax.grad(total, has_aux=True)(inputs)
    found = {"out": out, "lse": lse} | {f"d{n}": x for n, x in gradients.items()}
    assert all(x.devices() == {jax.devices(device)[0]} for x in found.values())
    assert_alike({n: np.asarray(x) for n, x in found.items()}, call)
