"""Results of the CPU backend with one number per query row: log-sum-exp and row statistics.

The statistics follow from the running sums of the online softmax. Let p = exp(score - max), let sum
be the sum of p, and let the moment be the sum of p * (score - max). The entropy of the weights
p / sum is then log(sum) - moment / sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_flash.problem.problem import EMPTY_ROW

Array = NDArray[Any]

# Lower bound of score - max in a moment. It changes no term, because exp of the bound is 0 in every
# dtype. Without it, masked pairs would add 0 * -inf, which is NaN.
_LEAST_EXPONENT = -1e4


class RowResults(NamedTuple):
    """Arrays of the results with one number per query row; None for results not requested.

    Attributes
    ----------
    lse
        Log-sum-exp, natural logarithm.
    max_logits
        Largest score over the keys. NaN where the log-sum-exp is NaN.
    entropy
        Entropy of the weights, without the term of a sink.
    """

    lse: Array | None = None
    max_logits: Array | None = None
    entropy: Array | None = None

    @property
    def has_statistics(self) -> bool:
        """Whether a result other than the log-sum-exp is requested."""
        return self.max_logits is not None or self.entropy is not None

    def each(self, function: Callable[[Array], Array]) -> RowResults:
        """Return the results of `function`, such as views of rows, for the requested arrays."""
        return RowResults(*(None if array is None else function(array) for array in self))

    def write_empty(self, lse: Any = -np.inf) -> None:
        """Write the results of rows that attend to no key; `lse` holds their sinks, if any."""
        values = {"lse": lse, **EMPTY_ROW}
        for name, array in zip(self._fields, self, strict=True):
            if array is not None:
                array[...] = values[name]


class KeySums(NamedTuple):
    """Sums of the online softmax over the keys of each row, without sinks.

    Attributes
    ----------
    row_max
        Largest score of each row.
    row_sum, moment
        Sums of p and of p * (score - row_max). None if the entropy is not requested.
    """

    row_max: Array
    row_sum: Array | None = None
    moment: Array | None = None

    @classmethod
    def of(cls, scores: Array, keys_axis: int, *, entropy: bool) -> KeySums:
        """Return the sums over all keys of a matrix of scores, which is not changed."""
        row_max = np.maximum.reduce(scores, axis=keys_axis, keepdims=True)
        if not entropy:
            return cls(row_max)
        exponents = scores - np.where(row_max == -np.inf, 0, row_max)
        weights = np.exp(exponents)
        row_sum = weights.sum(axis=keys_axis, keepdims=True)
        return cls(row_max, row_sum, moment_of(weights, exponents, keys_axis))

    def write(self, rows: RowResults, lse: Array, empty: Array | None, *, has_sinks: bool) -> None:
        """Write the statistics of rows, given their log-sum-exps including sinks.

        `empty` marks the rows without a score above -inf; None if there is no such row.
        """
        if rows.max_logits is not None:
            rows.max_logits[...] = self.row_max.reshape(rows.max_logits.shape)
        if rows.entropy is not None:
            assert self.row_sum is not None
            assert self.moment is not None
            entropy = np.maximum(np.log(self.row_sum) - self.moment / self.row_sum, 0)
            if has_sinks:
                # exp(log_share) is the sum of the keys' weights. The sink has the remaining weight.
                log_share = self.row_max + np.log(self.row_sum) - lse.reshape(self.row_max.shape)
                entropy = np.exp(log_share) * (entropy - log_share)
            rows.entropy[...] = entropy.reshape(rows.entropy.shape)
        for name, array in zip(rows._fields, rows, strict=True):
            if array is not None and name in EMPTY_ROW:
                if empty is not None:
                    np.copyto(array, EMPTY_ROW[name], where=empty.reshape(array.shape))
                np.copyto(array, np.nan, where=np.isnan(lse).reshape(array.shape))


def moment_of(weights: Array, exponents: Array, keys_axis: int = -1) -> Array:
    """Return the moment of weights, exp(exponents), along an axis that is kept."""
    moment: Array = (weights * np.maximum(exponents, _LEAST_EXPONENT)).sum(
        axis=keys_axis, keepdims=True
    )
    return moment


def shifted_moment(moment: Array, row_sum: Array, change: Array, factor: Array) -> Array:
    """Return a moment relative to new maxima: `change` is old minus new, and `factor` its exp."""
    shifted: Array = factor * (moment + np.maximum(change, _LEAST_EXPONENT) * row_sum)
    return shifted
