"""FlashAttention-4 on tensors over the same CuPy arrays, if its package is installed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from typing import Any

from cupy_flash.mods.keywords import Window

from ..cases.cases import Case
from ..cases.inputs import Inputs
from .torch_providers import Attention, TorchProvider, import_failure, to_torch

# Functions of the module `flash_attn.cute` for dense batches and for packed sequences.
_FUNCTIONS = {"dense": "flash_attn_func", "varlen": "flash_attn_varlen_func"}
# Names of the modifications that these functions take, by the library's name.
_MODIFICATIONS = {"window_size": "window_size", "softcap": "softcap", "sinks": "learnable_sink"}
_DTYPES = ("float16", "bfloat16")


def cute_module() -> Any:
    """Return the module of FlashAttention-4."""
    return importlib.import_module("flash_attn.cute")


@functools.cache
def why_no_flash_attn() -> str | None:
    """Return why FlashAttention-4 cannot be imported, or None if it can."""
    # FlashAttention-2 is a package `flash_attn`, too, but without the module `cute`.
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn-4 is not installed"
    return import_failure("flash_attn.cute", cute_module)


class FlashAttn4(TorchProvider):
    """FlashAttention-4, whose kernels CuTe DSL compiles in the first call.

    Attributes
    ----------
    deterministic
        Whether gradients are summed in a fixed order.
    """

    layout = "bshd"

    def __init__(self, name: str, *, deterministic: bool) -> None:
        self.name = name
        self.deterministic = deterministic

    def missing(self) -> str | None:
        return super().missing() or why_no_flash_attn()

    def why_not(self, case: Case) -> str | None:
        return self.missing() or self._why_no_call(case)

    def _why_no_call(self, case: Case) -> str | None:
        """Return why a case is not timed, or None if FlashAttention-4 may compute it.

        It refuses other cases itself: which head_dims it supports depends on the GPU.
        """
        if self.deterministic and not case.is_backward:
            return "only gradients differ from those of flash-attn-4"
        if case.kind not in _FUNCTIONS:
            return "FlashAttention-4 is timed on dense batches and packed sequences only"
        if case.dtype not in _DTYPES or case.cache_dtype:
            return f"FlashAttention-4 is timed in {' and '.join(_DTYPES)} only"
        if others := dataclasses.replace(case.mods, window=Window(), softcap=None, sinks=False):
            return f"{_FUNCTIONS[case.kind]} has no {others}"
        if case.first_query != case.seqlen_k - case.seqlen_q:
            return "the masks of FlashAttention-4 are aligned bottom-right: it takes no q_offset"
        return None

    def scratch_bytes(self, case: Case) -> int:
        if not case.is_backward:
            return 0
        # dq, and dk and dv of grouped heads, are summed in float32, twice as wide as the inputs.
        is_grouped = case.heads_q != case.heads_kv
        return 2 * (case.query_bytes + (case.key_value_bytes if is_grouped else 0))

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        case = inputs.case
        options: dict[str, Any] = {
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
            "deterministic": self.deterministic,
        }
        for name, value in inputs.modifications(on_gpu=True).items():
            options[_MODIFICATIONS[name]] = to_torch(value) if name == "sinks" else value
        if not case.is_dense:
            options |= {name: to_torch(array) for name, array in inputs.more_gpu.items()}
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        function = getattr(cute_module(), _FUNCTIONS[case.kind])
        # The second result is the log-sum-exp.
        return Attention(lambda *tensors: function(*tensors, **options)[0])


ALL = (
    FlashAttn4("flash-attn-4", deterministic=False),
    FlashAttn4("flash-attn-4-deterministic", deterministic=True),
)
