"""Casts under `torch.autocast`, by the rule that PyTorch has for scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Whether autocast is enabled for any device. The public function, which takes a device, is slower.
autocast_is_enabled = torch._C._is_any_autocast_enabled

# Devices whose tensors attention computes.
_DEVICES = ("cpu", "cuda")
_CAST = (torch.float16, torch.bfloat16, torch.float32)


def cast_tensor(value: Any) -> Any:
    """Return a tensor in the dtype of autocast; other objects, float64 and integers unchanged.

    Autograd records the cast, so the gradient has the dtype of the tensor.
    """
    if not isinstance(value, Tensor) or value.dtype not in _CAST:
        return value
    device = value.device.type
    return value.to(torch.get_autocast_dtype(device)) if _is_enabled(device) else value


def cast_arguments(rows: tuple[Any, ...], modifications: Any) -> tuple[tuple[Any, ...], Any]:
    """Return q, k and v, and modifications with a bias, in the dtype of autocast.

    Sinks and slopes keep their dtypes, in which kernels read them.
    """
    bias = modifications.get("bias")
    if bias is not None:
        modifications = {**modifications, "bias": cast_tensor(bias)}
    return tuple(map(cast_tensor, rows)), modifications


def _is_enabled(device: str) -> bool:
    # There is no autocast for devices such as meta, and Dynamo does not trace the function of
    # PyTorch 2.11 that tells.
    return device in _DEVICES and torch.is_autocast_enabled(device)
