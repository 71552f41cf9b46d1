"""Array libraries: conversion of NumPy arrays to their arrays and back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.arrays.strided import is_cupy
from cupy_flash.arrays.torch_arrays import is_any_tensor
from cupy_flash.gpu.environment import gpu_unavailable

# Dtype that DLPack of NumPy, CuPy and JAX does not support.
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_NOT_OF_TORCH = {"torch.bfloat16": np.dtype(ml_dtypes.bfloat16), "torch.float8_e4m3fn": _FLOAT8}


class OnlyDlpack:
    """Array that can be read by DLPack only."""

    def __init__(self, array: Any) -> None:
        self.wrapped = array

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.wrapped.__dlpack_device__()
        return int(kind), int(number)

    def __dlpack__(self, **options: Any) -> Any:
        return self.wrapped.__dlpack__(**options)

    def __array_namespace__(self, api_version: str | None = None) -> type[OnlyDlpackNamespace]:
        return OnlyDlpackNamespace


class OnlyDlpackNamespace:
    """Namespace of `OnlyDlpack` arrays, as the array API standard defines it."""

    @staticmethod
    def from_dlpack(array: Any) -> OnlyDlpack:
        """Return an array over the memory of another library's array."""
        return OnlyDlpack(array)


class OnlyInterface:
    """Array in GPU memory that can be read by `__cuda_array_interface__` only."""

    def __init__(self, array: Any) -> None:
        self.wrapped = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.wrapped.__cuda_array_interface__)


@dataclass(frozen=True)
class Library:
    """Array library on the CPU or on a GPU.

    `convert` converts a NumPy array, and returns it unchanged if the library lacks the dtype.
    """

    name: str  # name of the library in the names of tests
    convert: Callable[[np.ndarray], Any]
    type: Any  # type of results for the library's arrays
    is_immutable: bool = False  # whether its arrays cannot be written to


def host_array(array: Any) -> np.ndarray:
    """Return an array of any library as a NumPy array."""
    if isinstance(array, (OnlyDlpack, OnlyInterface)):
        array = array.wrapped
    if is_cupy(array):
        return cast(np.ndarray, array.get())
    if hasattr(array, "copy_to_host"):
        return cast(np.ndarray, array.copy_to_host())
    if is_any_tensor(array):
        array = array.detach().cpu()
        if (dtype := _NOT_OF_TORCH.get(str(array.dtype))) is not None:
            # Torch cannot convert arrays of these dtypes to NumPy.
            bits = array.view(getattr(sys.modules["torch"], f"int{8 * dtype.itemsize}"))
            return cast(np.ndarray, bits.numpy().view(dtype))
    return np.asarray(array)


def numpy_library() -> Library:
    """Return NumPy."""
    return Library("numpy", lambda array: array, np.ndarray)


def torch_library(device: str) -> Library:
    """Return PyTorch on "cpu" or "cuda"; skip the test if there is none."""
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")

    def convert(array: np.ndarray) -> Any:
        if array.dtype != _FLOAT8:
            return torch.tensor(array, device=device)
        if device == "cpu":
            return array
        bits = torch.tensor(array.view(np.uint8), device=device)
        return bits.view(torch.float8_e4m3fn)

    return Library(f"torch {device}", convert, torch.Tensor)


def jax_library(platform: str) -> Library:
    """Return JAX on "cpu" or "gpu"; skip the test if there is none."""
    jax = pytest.importorskip("jax")
    try:
        (device, *_) = jax.devices(platform)
    except RuntimeError:
        pytest.skip(f"JAX has no {platform}")
    fallback = numpy_library() if platform == "cpu" else cupy_library()

    def convert(array: np.ndarray) -> Any:
        if array.dtype == _FLOAT8:
            return fallback.convert(array)
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            # The array is copied, because on the CPU JAX may keep reading the given memory.
            return jax.device_put(array.copy(), device)

    return Library(f"jax {platform}", convert, jax.Array, is_immutable=True)


def cupy_library() -> Library:
    """Return CuPy; skip the test if there is no GPU."""
    if reason := gpu_unavailable():
        pytest.skip(f"no GPU: {reason}")
    cupy = importlib.import_module("cupy")

    def convert(array: np.ndarray) -> Any:
        if array.dtype == _FLOAT8:
            return cupy.asarray(array.view(np.uint8)).view(array.dtype)
        return cupy.asarray(array)

    return Library("cupy", convert, cupy.ndarray)


def dlpack_library(base: Library) -> Library:
    """Return an unknown library, whose arrays wrap those of NumPy or CuPy."""

    def convert(array: np.ndarray) -> Any:
        converted = base.convert(array)
        return converted if array.dtype == _FLOAT8 else OnlyDlpack(converted)

    return Library(f"dlpack over {base.name}", convert, OnlyDlpack)


def interface_library() -> Library:
    """Return an unknown library whose arrays wrap those of CuPy; results are CuPy arrays."""
    base = cupy_library()

    def convert(array: np.ndarray) -> Any:
        converted = base.convert(array)
        # The protocol has no name for other dtypes, such as bfloat16.
        return converted if array.dtype.kind == "V" else OnlyInterface(converted)

    return Library("interface over cupy", convert, base.type)


def numba_library() -> Library:
    """Return Numba; skip the test if it is not installed, or there is no GPU."""
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("this Numba has no GPU")

    def convert(array: np.ndarray) -> Any:
        if array.dtype.kind == "V":
            return cupy_library().convert(array)
        return cuda.to_device(array)

    return Library("numba", convert, cuda.cudadrv.devicearray.DeviceNDArray)


# Libraries of arrays in host memory other than NumPy, by name.
HOST_LIBRARIES: dict[str, Callable[[], Library]] = {
    "torch": lambda: torch_library("cpu"),
    "jax": lambda: jax_library("cpu"),
    "dlpack": lambda: dlpack_library(numpy_library()),
}
