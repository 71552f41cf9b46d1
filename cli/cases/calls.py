"""The library's call for a case, as a user would write it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cupy_flash.api.dense import flash_attention
from cupy_flash.api.kvcache import flash_attention_with_kvcache
from cupy_flash.api.varlen import flash_attention_varlen

from .inputs import Inputs


def call_of(inputs: Inputs, *, on_gpu: bool, **forced: Any) -> Callable[[], Any]:
    """The call that computes a case.

    Parameters
    ----------
    inputs
        Of the case.
    on_gpu
        Whether to pass CuPy arrays; NumPy arrays otherwise.
    forced
        More arguments: backend, family, tile.
    """
    case = inputs.case
    q, k, v = inputs.gpu if on_gpu else inputs.host
    if case.is_dense:
        return functools.partial(flash_attention, q, k, v, **case.arguments, **forced)
    options: dict[str, Any] = {
        "causal": case.causal,
        "softmax_scale": case.softmax_scale,
        "num_splits": case.asked_splits,
        **(inputs.more_gpu if on_gpu else inputs.more),
        **forced,
    }
    if case.is_cached:
        return functools.partial(flash_attention_with_kvcache, q, k, v, **options)
    options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    return functools.partial(flash_attention_varlen, q[0], k[0], v[0], **options)
