"""Tensors of torch.distributed: those whose elements are elsewhere, or still on their way."""

from __future__ import annotations

import sys
from typing import Any


def require_local(name: str, tensor: Any) -> None:
    """Raise TypeError for a DTensor, of which this process holds a part."""
    # Without this module, which takes a second to import, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise TypeError(
            f"{name} is a DTensor, of which this process has a part; pass {name}.to_local(), or "
            "call torch.distributed.tensor.experimental.local_map(flash_attention, ...) with heads "
            "or batches sharded"
        )


def waited_for(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return tensors whose elements have arrived: results of collectives may still be awaited."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None:
        return tensors
    return tuple(
        module.wait_tensor(x) if isinstance(x, module.AsyncCollectiveTensor) else x for x in tensors
    )
