"""Fake of the parts of PyTorch that the providers of `bench` use, which computes with NumPy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from cupy_flash.cli.providers import torch_flex, torch_providers
from support.gpu import fake_cupy


class Tensor(np.ndarray):
    """Fake tensor: an array with a device, PyTorch's `transpose`, and a mark for gradients."""

    device = "cuda"
    requires_grad = False

    def transpose(self, one: Any, other: Any = None) -> Any:
        return self.swapaxes(one, other)

    def detach(self) -> Any:
        return self.view()

    def requires_grad_(self) -> Any:
        self.requires_grad = True
        return self


class TorchOnHost:
    """Fake of torch; a subclass computes `scaled_dot_product_attention` in its method `sdpa`."""

    tensor: type[Tensor] = Tensor
    sdpa: Callable[..., Any]

    def __init__(self, patch: pytest.MonkeyPatch, sdpa_kernel: Callable[..., Any]) -> None:
        backends = SimpleNamespace(CUDNN_ATTENTION="cudnn", EFFICIENT_ATTENTION="it")
        attention = SimpleNamespace(SDPBackend=backends, sdpa_kernel=sdpa_kernel)
        functional = SimpleNamespace(scaled_dot_product_attention=self.sdpa)
        self.nn = SimpleNamespace(attention=attention, functional=functional)
        patch.setitem(sys.modules, "torch.nn.attention", attention)

    def set_float32_matmul_precision(self, _: str) -> None:
        pass

    def from_dlpack(self, array: np.ndarray) -> Tensor:
        return array.view(self.tensor)


Fake = TypeVar("Fake", bound=TorchOnHost)


def install_torch(patch: pytest.MonkeyPatch, fake: Fake) -> Fake:
    """Make the providers find the fake torch and a fake CuPy, and return the fake torch."""
    cupy = fake_cupy.install(patch)
    cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=0)
    for module in (torch_providers, torch_flex):
        patch.setattr(module, "torch_module", lambda: fake)
    patch.setattr(torch_providers, "to_cupy", np.asarray)
    patch.setattr(torch_providers, "why_no_torch", lambda: None)
    return fake


def passes_check(check: Any, prepared: Any) -> bool:
    """Return whether the result of a prepared call is within the bound of a check."""
    with prepared.scope():
        return check.error(prepared.to_result(prepared.call())) <= check.coverage.bound
