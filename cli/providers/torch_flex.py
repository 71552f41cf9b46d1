"""FlexAttention: torch's attention with score and mask functions, compiled for each case."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..cases.built_in import FURTHEST, STEP
from ..cases.cases import Case
from ..cases.inputs import Inputs
from .torch_providers import Attention, TorchProvider, to_torch, torch_module

# (score, b, h, q_idx, kv_idx) -> new score; (b, h, q_idx, kv_idx) -> whether the pair is visible.
Score = Callable[[Any, Any, Any, Any, Any], Any]
IsVisible = Callable[[Any, Any, Any, Any], Any]


def scores_of(case: Case, given: Mapping[str, Any], torch: Any) -> list[Score]:
    """Return a case's score modifications as functions for FlexAttention, in order.

    `given` has the tensors and numbers that the functions read, keyed by the names of the library's
    arguments and of captures.
    """
    result: list[Score] = []
    first = case.first_query
    mods = case.mods
    caps = [mods.softcap, given["cap"] if mods.mod == "softcap" else None]
    result += [_softcap(cap, torch) for cap in caps if cap is not None]
    if mods.mod == "t5":
        table = given["table"]

        def t5(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            distance = torch.clamp(q + first - k, -FURTHEST, FURTHEST)
            return score + table[h, distance + FURTHEST]

        result.append(t5)
    if mods.alibi:
        slopes = given["alibi_slopes"]
        result.append(lambda score, b, h, q, k: score - slopes[h] * abs(q + first - k))
    if mods.bias is not None:
        element = _element(given["bias"], mods.bias)
        result.append(lambda score, b, h, q, k: score + element(b, h, q, k))
    return result


def _softcap(cap: float, torch: Any) -> Score:
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def masks_of(case: Case, given: Mapping[str, Any]) -> list[IsVisible]:
    """Return a case's masks as FlexAttention functions; all return True for a visible pair."""
    result: list[IsVisible] = []
    first, (left, right) = case.first_query, case.mods.window
    if case.causal:
        result.append(lambda b, h, q, k: k <= q + first)
    if left is not None:
        result.append(lambda b, h, q, k: k >= q + first - left)
    if right is not None:
        result.append(lambda b, h, q, k: k <= q + first + right)
    if case.mods.mask is not None:
        result.append(_element(given["mask"], case.mods.mask))
    if case.mods.mod == "documents":
        document = given["document"]
        result.append(lambda b, h, q, k: document[q + first] == document[k])
    if case.mods.mod == "prefix":
        prefix = given["prefix"]
        result.append(lambda b, h, q, k: (k <= q + first) | (k < prefix))
    if case.mods.mod == "dilated":
        result.append(lambda b, h, q, k: (q + first - k) % STEP == 0)
    return result


def _element(array: Any, span: str) -> IsVisible:
    """Return a function that reads a pair's element of an array whose shape `span` names."""
    if span == "shared":
        return lambda b, h, q, k: array[0, 0, q, k]
    if span == "heads":
        return lambda b, h, q, k: array[0, h, q, k]
    return lambda b, h, q, k: array[b, h, q, k]


class Flex(TorchProvider):
    """torch.nn.attention.flex_attention under torch.compile."""

    name = "torch-flex"

    def why_not(self, case: Case) -> str | None:
        if reason := self.missing():
            return reason
        if not case.is_dense:
            return "flex_attention is timed on batches of equal length only"
        if case.mods.sinks:
            return "flex_attention has no sinks"
        if case.mods.dropout is not None:
            return "flex_attention has no dropout"
        first = case.first_query
        if case.mods.mod == "documents" and not 0 <= first <= case.seqlen_k - case.seqlen_q:
            return "queries beyond the keys are in no document, and flex_attention does not clamp"
        return None

    def scratch_bytes(self, case: Case) -> int:
        return 0

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        torch = torch_module()
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        case = inputs.case
        given = _tensors_by_name(inputs)
        # After several functions in one process, torch stops compiling them. It then only warns and
        # computes the whole score matrix.
        torch._dynamo.reset()
        block_mask, note = None, None
        if masks := masks_of(case, given):
            span = case.mods.mask
            make = torch.compile(flex.create_block_mask, dynamic=False)
            block_mask = make(
                flex.and_masks(*masks),
                case.batch if span == "batch" else None,
                case.heads_q if span in ("batch", "heads") else None,
                case.seqlen_q,
                case.seqlen_k,
                device=q.device,
            )
            kept = 100 - block_mask.sparsity()
            note = f"its BlockMask, built beforehand, keeps {kept:.1f}% of the blocks"
        scores = tuple(scores_of(case, given, torch))

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            for change in scores:
                score = change(score, b, h, q_idx, kv_idx)
            return score

        attend = functools.partial(
            torch.compile(flex.flex_attention, dynamic=False),
            score_mod=score_mod if scores else None,
            block_mask=block_mask,
            scale=case.softmax_scale,
            enable_gqa=case.heads_q != case.heads_kv,
        )
        if case.is_backward:
            # The call that is differentiated compiles the function. By default, the backward pass
            # overwrites what it reads, and cannot be repeated.
            config: Any = importlib.import_module("torch._functorch.config")
            config.donated_buffer = False
            return Attention(attend, note=note)
        # The first call compiles the function.
        with torch.no_grad():
            attend(q, k, v)
        return Attention(attend, note=note)


def _tensors_by_name(inputs: Inputs) -> dict[str, Any]:
    """Return what a case's functions read: arrays of its call, and values that they capture."""
    given = dict(inputs.modifications(on_gpu=True))
    captures: dict[str, Any] = {}
    for keyword in ("score_mod", "mask_mod"):
        if keyword in given:
            captures |= given.pop(keyword).captures
    return {
        name: to_torch(value) if hasattr(value, "dtype") else value
        for name, value in (given | captures).items()
    }


FLEX = Flex()
