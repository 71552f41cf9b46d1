"""Check of refused calls, and options that all varlen and KV-cache calls refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_flash import UnsupportedError
from support.foreign import Foreign

# Options to change in a call, and text in the message of the ValueError.
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_splits": -2}, "num_splits is -2; expected 1 to"),
    ({"num_splits": 2, "batch_invariant": True}, "batch_invariant=True does not split keys"),
    ({"backend": "tpu"}, "backend is 'tpu'; expected one of auto, gpu, cpu"),
    ({"family": "flash", "backend": "cpu"}, "unknown family 'flash'; expected one of"),
    ({"family": "mma", "backend": "cpu"}, "family 'mma' is a GPU kernel, but the CPU backend"),
    ({"tile": {"warps": 4}, "backend": "cpu"}, "unknown tile field 'warps'"),
]


def assert_refused(
    function: Callable[..., Any], error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    """Fail unless a call raises the error with this message, and leaves all arrays unchanged."""
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in arrays]
    with pytest.raises(error) as caught:
        function(**arguments)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert type(caught.value) in (TypeError, ValueError, UnsupportedError)
    assert [x.tobytes() for x in arrays] == before


def jax_array(array: np.ndarray) -> Any:
    """Return a stand-in for a JAX array, which has DLPack and the module name of JAX's type."""

    class Immutable(Foreign):
        pass

    Immutable.__module__ = "jaxlib.xla_extension"
    return Immutable(array)
