"""Every function with gradients by torch or JAX, with every array argument."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.every_array import Call, calls_of, functions_of
from support.libraries import host_array, jax_library, torch_library

import cupy_flash

INPUTS = ("q", "k", "v", "qkv", "bias", "sinks")
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
        for call in calls_of(function, np.float32)
    ]


def assert_alike(found: dict[str, np.ndarray], call: Call) -> None:
    """Assert that results and gradients are those of NumPy arrays on the CPU."""
    for name, expected in reference(call).items():
        largest = max(1.0, float(np.abs(expected).max()))
        # Sums of at most 100 float32 products of order 1.
        np.testing.assert_allclose(
            found[name], expected, rtol=0, atol=100 * 2.0**-22 * largest, err_msg=name
        )
    assert found.keys() == reference(call).keys()


def reference(call: Call) -> dict[str, np.ndarray]:
    """Return the output, lse, and gradients of the output's sum, computed on NumPy arrays."""
    name = call.function.__name__
    forward = Call(getattr(cupy_flash, name), None, call.values)
    (out, lse), _ = forward.run(lambda array: array, backend="cpu")
    backward = getattr(cupy_flash, f"{name}_backward")
    values = {n: x for n, x in call.values.items() if n != "return_lse"}
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
    inputs = {n: given[n].requires_grad_() for n in INPUTS if n in given}
    out, lse = call.function(**given)
    out.sum().backward()
    found = {"out": out, "lse": lse} | {f"d{n}": x.grad for n, x in inputs.items()}
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
