"""Calls while a dispatch mode of PyTorch is active, which observes or replaces operators.

Examples are selective activation checkpointing, the FLOP counter and fake tensors. Calls then run
as operators, because a mode does not see what is computed otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_flash.arrays.torch_arrays import is_in_transform
from cupy_flash.differentiable import DifferentiableCall
from cupy_flash.problem.gradient import ROWS
from cupy_flash.torch.graphs import are_tensors
from cupy_flash.torch.modifications import fits_graph, packed
from cupy_flash.torch.operators import ATTENTION, ATTENTION_VARLEN


def is_observed() -> bool:
    """Return whether a dispatch mode is active, and no other transform in addition."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        and torch._C._get_tracing_state() is None
        and not is_in_transform()
    )


def results_of_operator(
    call: DifferentiableCall, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor] | None:
    """Return out and lse of a call as an operator, or None if no operator accepts the call."""
    options = call.options
    own = dict(zip(call.names[len(ROWS) :], inputs[len(ROWS) :], strict=True))
    modifications = {**call.modifications, **own}
    lists = call.key_indices
    if not fits_graph(modifications) or not are_tensors(optional=(lists,)):
        return None
    q, k, v, *_ = inputs
    heads = q.shape[-3 if options.layout == "bhsd" else -2]
    plain = options.causal, options.softmax_scale
    arguments = q, k, v, *packed(modifications, q, heads)
    results: tuple[Tensor, Tensor]
    if options.kind == "dense":
        results = ATTENTION(*arguments, *plain, options.q_offset, options.layout, lists)
    else:
        ends_q, ends_k, used_k = call.lengths
        lengths = ends_q, ends_k, options.max_seqlen_q, options.max_seqlen_k, used_k
        results = ATTENTION_VARLEN(*arguments, *lengths, *plain, lists)
    return results
