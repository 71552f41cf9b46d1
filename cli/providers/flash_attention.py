"""FlashAttention-2, -3 and -4 on tensors over the same CuPy arrays, if their packages are there."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from ..cases.cases import Case
from ..cases.inputs import Inputs
from ..cases.mods import PLAIN
from .torch_providers import Attention, TorchProvider, to_torch, why_no_package

# Keyword arguments of this library, by the fields of `CaseMods` that they hold.
_KEYWORDS = {
    "window": "window_size",
    "softcap": "softcap",
    "alibi": "alibi_slopes",
    "sinks": "sinks",
    "dropout": "dropout_p",
}
_DTYPES = ("float16", "bfloat16")
# Rows of a page must be a multiple of this in FlashAttention-2.
_PAGE_ROWS = 256


class FlashAttention(TorchProvider):
    """Functions of one package of FlashAttention, which all have bottom-right causal masks.

    Attributes
    ----------
    product
        Name of the product in messages.
    package, module
        Name of the package, and of the module that has the functions.
    functions
        Names of the functions, by the kind of a case.
    modifications
        Names of their arguments for modifications, by the fields of `CaseMods`.
    unbounded
        Bound of a window on a side that has none.
    block_table
        Name of their argument for the pages of a cache.
    deterministic
        Whether gradients are summed in a fixed order.
    """

    layout = "bshd"
    product: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]
    functions: ClassVar[Mapping[str, str]]
    modifications: ClassVar[Mapping[str, str]]
    unbounded: ClassVar[int | None] = -1
    block_table: ClassVar[str] = "block_table"

    def __init__(self, *, deterministic: bool) -> None:
        self.name = self.package + ("-deterministic" if deterministic else "")
        self.deterministic = deterministic

    def missing(self) -> str | None:
        return super().missing() or why_no_package(self.module, self.package)

    def why_not(self, case: Case) -> str | None:
        return self.missing() or self._why_no_call(case)

    def _why_no_call(self, case: Case) -> str | None:
        """Return why a case is not timed, or None if the library may compute it.

        The library refuses other cases itself: which head_dims it supports depends on the GPU.
        """
        if self.deterministic and not case.is_backward:
            return f"only gradients differ from those of {self.package}"
        if case.kind not in self.functions:
            return f"{self.product} is timed on dense batches and packed sequences only"
        if case.dtype not in _DTYPES or case.cache_dtype:
            return f"{self.product} is timed in {' and '.join(_DTYPES)} only"
        if others := dataclasses.replace(case.mods, **self._no_modifications(case)):
            return f"{self.functions[case.kind]} has no {others}"
        if case.is_cached:
            return self._why_no_cache(case)
        if case.first_query != case.seqlen_k - case.seqlen_q:
            return f"the masks of {self.product} are aligned bottom-right: it takes no q_offset"
        return None

    def _why_no_cache(self, case: Case) -> str | None:
        """Return why a cache is not timed, or None if the library may compute it."""
        if case.values_in_keys:
            return f"{self.functions['cache']} needs values that are not part of the keys"
        if case.rotary:
            return f"{self.functions['cache']} takes rotary tables of 16 bits, not float32"
        return None

    def _no_modifications(self, case: Case) -> dict[str, Any]:
        """Return the fields of `CaseMods` that the case's function takes, with default values."""
        # Caches are for inference, and their functions have no dropout.
        taken = (name for name in self.modifications if name != "dropout" or not case.is_cached)
        return {name: getattr(PLAIN, name) for name in taken}

    def scratch_bytes(self, case: Case) -> int:
        if not case.is_backward:
            return 0
        # dq, and dk and dv of grouped heads, are summed in float32, twice as wide as the inputs.
        is_grouped = case.heads_q != case.heads_kv
        return 2 * (case.query_bytes + (case.key_value_bytes if is_grouped else 0))

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        case = inputs.case
        options: dict[str, Any] = {"causal": case.causal, "softmax_scale": case.softmax_scale}
        given = inputs.modifications(on_gpu=True)
        for name, argument in self.modifications.items():
            if (value := given.get(_KEYWORDS[name])) is not None:
                options[argument] = self._argument(name, value)
        for name, array in inputs.more_gpu.items():
            options[self.block_table if name == "block_table" else name] = to_torch(array)
        if case.is_cached:
            options["num_splits"] = case.asked_splits
        else:
            options["deterministic"] = self.deterministic
        if case.kind == "varlen":
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        function = getattr(importlib.import_module(self.module), self.functions[case.kind])
        return Attention(functools.partial(_output, function, options))

    def _argument(self, name: str, value: Any) -> Any:
        """Return a modification in the form that the library takes."""
        if name == "window":
            return tuple(self.unbounded if bound is None else bound for bound in value)
        return to_torch(value) if name in ("alibi", "sinks") else value


def _output(function: Any, options: Mapping[str, Any], *tensors: Any) -> Any:
    """Return the output of a call; some versions return the log-sum-exp as a second result."""
    result = function(*tensors, **options)
    return result[0] if isinstance(result, tuple) else result


class FlashAttention2(FlashAttention):
    """FlashAttention-2, the package that most users install."""

    product = "FlashAttention-2"
    package = "flash-attn"
    module = "flash_attn.flash_attn_interface"
    functions: ClassVar = {
        "dense": "flash_attn_func",
        "varlen": "flash_attn_varlen_func",
        "cache": "flash_attn_with_kvcache",
    }
    modifications: ClassVar = {
        "window": "window_size",
        "softcap": "softcap",
        "alibi": "alibi_slopes",
        "dropout": "dropout_p",
    }

    def _why_no_call(self, case: Case) -> str | None:
        if reason := super()._why_no_call(case):
            return reason
        if case.head_dim_v != case.head_dim:
            return f"{self.functions[case.kind]} needs values as wide as the keys"
        if case.page_size % _PAGE_ROWS:
            return f"{self.functions['cache']} needs pages of a multiple of {_PAGE_ROWS} rows"
        return None

    def scratch_bytes(self, case: Case) -> int:
        if not case.is_backward:
            return 0
        # dq is summed in float32; dk and dv of grouped heads are stored for each query head.
        group = case.heads_q // case.heads_kv
        return 2 * case.query_bytes + (group * case.key_value_bytes if group > 1 else 0)


class FlashAttention3(FlashAttention):
    """FlashAttention-3, for Hopper GPUs, which is built from its sources."""

    product = "FlashAttention-3"
    package = "flash-attn-3"
    module = "flash_attn_interface"
    functions = FlashAttention2.functions
    modifications: ClassVar = {"window": "window_size", "softcap": "softcap"}
    block_table = "page_table"


class FlashAttention4(FlashAttention):
    """FlashAttention-4, whose kernels CuTe DSL compiles in the first call."""

    product = "FlashAttention-4"
    package = "flash-attn-4"
    module = "flash_attn.cute"
    functions: ClassVar = {"dense": "flash_attn_func", "varlen": "flash_attn_varlen_func"}
    modifications: ClassVar = {
        "window": "window_size",
        "softcap": "softcap",
        "sinks": "learnable_sink",
    }
    unbounded = None


ALL = tuple(
    kind(deterministic=deterministic)
    for kind in (FlashAttention2, FlashAttention3, FlashAttention4)
    for deterministic in (False, True)
)
