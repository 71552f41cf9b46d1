"""The compiler of PyTorch, Dynamo, whose state outlives a test."""

from __future__ import annotations

import sys
import warnings


def discard_compiled_graphs() -> None:
    """Discard what `torch.compile` has compiled, if it was used."""
    if "torch._dynamo" in sys.modules:
        # It imports more of torch, which warns of what torch deprecates.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.modules["torch._dynamo"].reset()
