"""Seeds of dropout: calls without one draw it from PyTorch's random number generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cupy_flash.arrays.torch_arrays import random_seed
from cupy_flash.mods.keywords import DROPOUT_P, DROPOUT_SEED
from cupy_flash.torch.graphs import is_number

_LARGEST = 2**63 - 1


def with_seed(modifications: Any, q: Any) -> Any:
    """Return modifications with a seed of dropout, which is drawn if it is missing.

    `torch.compile` traces this function.
    """
    dropout_p = modifications.get(DROPOUT_P)
    has_none = dropout_p is None or (is_number(dropout_p) and dropout_p == 0)
    # The call raises the error for another object than a tensor.
    if has_none or modifications.get(DROPOUT_SEED) is not None or not isinstance(q, Tensor):
        return modifications
    return {**modifications, DROPOUT_SEED: random_seed(q)}


def seed_tensor(seed: Any, device: torch.device) -> Tensor:
    """Return a seed, or a list of a seed and an offset, as a tensor; a tensor unchanged.

    `torch.compile` traces this function.
    """
    if isinstance(seed, Tensor):
        return seed
    numbers = list(seed) if isinstance(seed, (list, tuple)) else [seed, 0]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def seed_fits_graph(modifications: Mapping[str, Any]) -> bool:
    """Return whether an operator accepts the arguments of dropout.

    `torch.compile` traces this function. The call outside of the graph raises the error.
    """
    dropout_p, seed = modifications.get(DROPOUT_P), modifications.get(DROPOUT_SEED)
    if dropout_p is None:
        return True
    if not (is_number(dropout_p) and 0 <= dropout_p < 1):
        return False
    if dropout_p == 0 or isinstance(seed, Tensor):
        return True
    numbers = list(seed) if isinstance(seed, (list, tuple)) else [seed, 0]
    return len(numbers) == 2 and all(
        isinstance(x, int) and not isinstance(x, bool) and -_LARGEST <= x <= _LARGEST
        for x in numbers
    )
