"""Arguments of the operators of `cupy_flash.torch`, and functions compiled by `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Modifications of a call without any, in the order of the operators' schemas: tensors, names,
# integers and reals.
NO_MODIFICATIONS = (None, None, None, None)


def counted(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    """Return a function compiled as one graph; the attribute `graphs` of the result counts them."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, **options)

    class Counted:
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return compiled(*arguments, **options)

        @property
        def graphs(self) -> int:
            return int(counter.frame_count)

    return Counted()
