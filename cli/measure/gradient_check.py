"""Compare gradients with the float64 reference, for all heads or a sample of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.problem.gradient import ROWS
from cupy_flash.reference.dense import attention_reference, max_error
from cupy_flash.reference.gradients import (
    attention_backward_reference,
    backward_naive,
    gradient_bound,
    gradient_sizes,
)

from ..cases.cases import Case
from ..cases.inputs import Inputs, placed_on
from ..cases.mod_arguments import numpy_dtype, restricted
from ..cases.sequences import rows_in_call, rows_of
from . import check
from .check import GPU_SCORES, HOST_SCORES, SAMPLE_ROWS, Check, Coverage

# Ratio of the work to that of a forward check: three formulas with five products each, instead of
# two formulas with two products each.
_WORK = 4
# Maximum number of groups; with more, kernel launches take longer than the arithmetic.
_MOST_GROUPS = 64


class Group(NamedTuple):
    """All query heads of a sequence that belong to one KV head.

    The gradients of a group are computed together: an element of dk depends on all queries that
    attend to its key, and the softmax of these queries depends on all keys that they attend to.
    """

    batch: int
    kv_head: int


class _Part(NamedTuple):
    """Reference gradients of q, k and v of a group, and the allowed errors.

    Attributes
    ----------
    exact
        Reference gradients; 0 where they are not compared.
    finite
        Whether each element is compared: its reference and its naive gradient must be finite.
    bounds
        Largest difference that passes, for each gradient.
    """

    exact: tuple[Any, ...]
    finite: tuple[Any, ...]
    bounds: tuple[float, ...]


def choose_groups(
    case: Case, seed: int, most_scores: int, most_rows: int | None = None
) -> list[Group]:
    """Return all groups if that is little work, otherwise a random sample with a longest sequence.

    Parameters
    ----------
    case
        Case whose heads are chosen.
    seed
        Seed of the choice.
    most_scores
        Limit of the number of scores, in addition to those of the longest sequence.
    most_rows
        Limit of the number of query rows, without the longest sequence's; None for a usual sample.
    """
    heads = case.heads_q // case.heads_kv
    lengths = tuple(zip(case.query_lengths, case.key_lengths, strict=True))
    groups = [
        Group(batch, kv_head)
        for batch, (queries, keys) in enumerate(lengths)
        for kv_head in range(case.heads_kv)
        if queries or keys
    ]
    order = [groups[index] for index in np.random.default_rng(seed).permutation(len(groups))]
    # The sort is stable, so the first group of a longest sequence is a random one.
    first = sorted(order, key=lambda group: -sum(lengths[group.batch]))[:1]
    scores, rows = most_scores, SAMPLE_ROWS if most_rows is None else most_rows
    if most_rows is None and case.scores <= most_scores and len(groups) <= _MOST_GROUPS:
        return groups
    chosen = list(first)
    for group in order:
        queries, keys = lengths[group.batch]
        cost, own_rows = heads * queries * keys, heads * queries
        if group not in first and cost <= scores and own_rows <= rows:
            chosen.append(group)
            scores, rows = scores - cost, rows - own_rows
        if len(chosen) == _MOST_GROUPS:
            break
    return sorted(chosen)


class GradientCheck:
    """Reference gradients of some groups of heads, and the error that they allow.

    `gradient_bound` defines the allowed error of each gradient of each group. Errors are reported
    relative to it.

    Attributes
    ----------
    coverage
        Number of query rows that are compared. The bound is 1, because errors are relative.
    """

    def __init__(
        self, inputs: Inputs, seed: int, *, on_gpu: bool, most_rows: int | None = None
    ) -> None:
        """Compute the reference; the parameters are those of `Check`."""
        case = inputs.case
        self._on_gpu = on_gpu and check.why_no_matmul() is None
        self._placed = placed_on(gpu=self._on_gpu)
        self._case, self._more = case, inputs.more
        most_scores = (GPU_SCORES if self._on_gpu else HOST_SCORES) // _WORK
        self._parts = {
            group: self._part(inputs, group, on_gpu=on_gpu)
            for group in choose_groups(case, seed, most_scores, most_rows)
        }
        rows = compared = 0
        for part in self._parts.values():
            finite = part.finite[0].all(-1)
            rows, compared = rows + finite.size, compared + int(finite.sum())
        self.coverage = Coverage(compared, case.query_rows, 1.0, not_finite=rows - compared)

    def _part(self, inputs: Inputs, group: Group, *, on_gpu: bool) -> _Part:
        case = self._case
        arrays = inputs.gpu if on_gpu else inputs.host
        out, _ = inputs.forward(on_gpu=on_gpu)
        dout = inputs.dout(on_gpu=on_gpu)
        if not case.is_dense:
            arrays, dout = (arrays[0][0], arrays[1][0], arrays[2][0]), dout[0]
        q, k, v = self._of_group(group, arrays)
        heads = self._heads(group)[0]
        out, dout = (self._rows(x, group.batch, heads) for x in (out, dout))
        options: dict[str, Any] = {
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
            "q_offset": case.q_offset,
        }
        options |= restricted(
            inputs.modifications(on_gpu=self._on_gpu),
            case.mods,
            batch=group.batch,
            keys=case.key_lengths[group.batch],
            heads=heads,
            rows=rows_in_call(case, self._more, group.batch),
        )
        given = (dout, q, k, v)
        exact = attention_backward_reference(*given, wrt=ROWS, **options)
        naive = backward_naive(*given, out=out, wrt=ROWS, **options)
        sizes = gradient_sizes(*given, wrt=ROWS, **options)
        _, lse = attention_reference(q, k, v, return_lse=True, **options)
        xp = array_module(q)
        kept, finite, bounds = [], [], []
        for result in zip(naive, exact, sizes, strict=True):
            # Where the naive formula overflows, it gives no bound for the gradient.
            is_finite = xp.isfinite(result[0]) & xp.isfinite(result[1]) & xp.isfinite(result[2])
            numbers, reference, size = (xp.where(is_finite, x, x.dtype.type(0)) for x in result)
            kept.append(reference)
            finite.append(is_finite)
            dtype = numpy_dtype(case.dtype)
            bounds.append(gradient_bound(numbers, reference, size, dtype, lse=lse))
        return _Part(tuple(kept), tuple(finite), tuple(bounds))

    def error(self, result: tuple[Any, Any, Any]) -> float:
        """Return the largest error of dq, dk and dv, relative to its bound."""
        worst = 0.0
        for group, part in self._parts.items():
            gradients = self._of_group(group, result)
            for got, exact, finite, bound in zip(gradients, *part, strict=True):
                compared = array_module(got).where(finite, got.astype(np.float64), 0)
                worst = max(worst, max_error(compared, exact) / bound)
        return worst

    def _of_group(self, group: Group, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return q, k and v of a group, or their gradients, as (1, seqlen, heads, dim)."""
        heads, kv_heads = self._heads(group)
        each = zip(arrays, (heads, kv_heads, kv_heads), strict=True)
        return tuple(self._rows(array, group.batch, which) for array, which in each)

    def _heads(self, group: Group) -> tuple[slice, slice]:
        """Return the slices of a group's query heads and of its KV head."""
        per_group = self._case.heads_q // self._case.heads_kv
        first = group.kv_head * per_group
        return slice(first, first + per_group), slice(group.kv_head, group.kv_head + 1)

    def _rows(self, array: Any, batch: int, heads: slice) -> Any:
        return self._placed(rows_of(self._case, array, self._more, batch, heads))


def check_of(
    inputs: Inputs, seed: int, *, on_gpu: bool, most_rows: int | None = None
) -> Check | GradientCheck:
    """Return the check of a case's results; the parameters are those of `Check`."""
    kind = GradientCheck if inputs.case.is_backward else Check
    return kind(inputs, seed, on_gpu=on_gpu, most_rows=most_rows)
