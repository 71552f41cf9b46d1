"""Tiled backward pass on the CPU: one query tile, in a loop over its KV tiles.

`cupy_flash.cpu.backward.gradients` describes the algorithm.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_flash.arrays.sequences import PagedRows
from cupy_flash.cpu.backward.backward_pass import GradientPass
from cupy_flash.cpu.backward.ordered_sum import OrderedSum, Ticket
from cupy_flash.cpu.forward_pass import Block, Scratch
from cupy_flash.cpu.thread_pool import Stop
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications
from cupy_flash.mods.on_arrays.score_derivatives import (
    after_softcap,
    apply_with_slope,
    capture_gradients,
)
from cupy_flash.mods.on_arrays.scores import Pairs
from cupy_flash.problem.gradient import OF_MOD

Array = NDArray[Any]

# A view of elements of a gradient array, and the contribution to add to them.
Part = tuple[Array, Array]

# Magnitude of a log-sum-exp above which a row has no gradient, if its scores are modified. Such a
# large number, which a padding bias may cause, has too few digits to recompute weights from. See
# `low_score` in kernels_cu/score/softmax.cuh.
_LARGEST_LSE = {"float32": 2.0**20 * math.log(2), "float64": 2.0**49 * math.log(2)}

# Weight above which a row counts as attending to one key only. The output of such a row is that
# key's value, and its scores have no gradient: the weight is 1, and dp equals delta. dp and delta
# are summed in different orders, so their computed difference would not be exactly 0.
# In rows with more keys above this weight, the true gradients are below the rounding errors of
# delta and dp: see `p_of_one_key` in kernels_cu/backward/params.cuh. Rows with one key by position
# are checked as well, as lse may be that of more keys, or include a sink.
_WEIGHT_OF_ONE_KEY = {"float16": 1 - 2.0**-14, "bfloat16": 1 - 2.0**-11}
_ERROR_OF_PRODUCT = {"float32": 2.0**-24, "float64": 2.0**-50}

# The rounding error of weights grows with the log-sum-exp. The threshold allows for about twenty
# roundings of half a unit in the last place, but is never below the threshold of bfloat16.
_ROUNDING_OF_WEIGHT = {"float32": 2.0**-20 / math.log(2), "float64": 2.0**-49 / math.log(2)}

# Sums of products along the last axis: `vecdot` of NumPy 2 takes half the time of einsum.
row_products: Any = getattr(np, "vecdot", None) or functools.partial(np.einsum, "...d,...d->...")


def least_weight_of_one_key(dtype: str, columns: int, lse: Array) -> Array:
    """Return, for each row, the weight above which a key counts as its only key.

    Parameters
    ----------
    dtype
        Name of the inputs' dtype.
    columns
        The larger of head_dim and head_dim_v.
    lse
        Natural log-sum-exp of each row, or minus it.
    """
    if dtype in _WEIGHT_OF_ONE_KEY:
        return np.full_like(lse, _WEIGHT_OF_ONE_KEY[dtype])
    least = sure_weight_of_one_key(dtype, columns)
    weights: Array = lse.dtype.type(least) - lse.dtype.type(_ROUNDING_OF_WEIGHT[dtype]) * abs(lse)
    return np.maximum(weights, lse.dtype.type(_WEIGHT_OF_ONE_KEY["bfloat16"]))


def sure_weight_of_one_key(dtype: str, columns: int) -> float:
    """Return the weight above which a key is a row's only key, whatever the row's log-sum-exp is.

    For float32 and float64 only; see `least_weight_of_one_key`.
    """
    return 1 - max(64, columns) * _ERROR_OF_PRODUCT[dtype]


def differentiate(
    gradient_pass: GradientPass,
    scratch: Scratch,
    block: Block,
    ticket: Ticket,
    ordered_sum: OrderedSum,
    stop: Stop,
) -> None:
    """Write dq of a query tile's rows, and add their contributions to all other gradients."""
    tile = _Tile(gradient_pass, scratch, block)
    for start, key in gradient_pass.job.tiles_of_keys(block):
        if stop.requested:
            return
        parts = tile.process_tile(start, key)
        if parts and not ordered_sum.wait(ticket, key):
            return
        add(parts)
        ordered_sum.release(ticket, key)
    tile.write_dq()
    ordered_sum.finish(ticket, functools.partial(add, tile.final_parts))


def add(parts: list[Part]) -> None:
    """Add contributions to their gradient arrays."""
    for total, part in parts:
        total += part


class _Tile:
    """State of the backward pass of one query tile.

    The axes of arrays are (sequences, KV heads, heads, rows, ...). In products, the rows of all
    query heads of a KV head form one matrix.

    Attributes
    ----------
    final_parts
        Contributions to add when all KV tiles are done.
    """

    def __init__(self, gradient_pass: GradientPass, scratch: Scratch, block: Block) -> None:
        self.gradient_pass, self.job, self.scratch, self.block = (
            gradient_pass,
            gradient_pass.job,
            scratch,
            block,
        )
        job, where = gradient_pass.job, tuple(block)
        bound_mods = job.bound_mods or BoundModifications()
        self.mask_mod = bound_mods.scores.mask_mod
        self.changes = bound_mods.scores._replace(mask_mod=None)
        q = self._with_column("q", job.q[where])
        dout = self._with_column("dout", gradient_pass.dout[where])
        lse = gradient_pass.lse[where]
        self.rows = lse.shape
        # Rows that attend to no key contribute nothing, whatever values they hold.
        visible, rows = job.mask_of(block), np.arange(block.rows.start, block.rows.stop)
        counts = visible.ends(rows) - visible.begins(rows)
        inactive = (lse == -np.inf) | (counts <= 0)
        if self.changes.changes_scores:
            inactive |= (abs(lse) > _LARGEST_LSE[lse.dtype.name]) & np.isfinite(lse)
        out = job.out[where].astype(job.compute, copy=False)
        sinks = job.sinks_of(block)
        if sinks is not None:
            inactive |= (lse == sinks[..., 0]) & ~out.any(-1)
        q[inactive], dout[inactive] = 0, 0
        self.inactive = inactive[..., None] if inactive.any() else None
        # If lse has a gradient or includes a sink, scores of rows with one key have gradients, too.
        has_plain_lse = sinks is None and gradient_pass.dlse is None
        self.rows_of_one_key = np.flatnonzero(counts == 1) if has_plain_lse else rows[:0]
        scores = bound_mods.scores
        functions = self.mask_mod, scores.score_mod
        masking = (
            *functions,
            scores.bias,
            scores.mask,
            scores.tree_mask,
            scores.seqused_q,
            scores.prefix_lens,
        )
        self.may_leave_one_key = has_plain_lse and any(x is not None for x in masking)
        delta = row_products(dout[..., :-1], out)
        if gradient_pass.dlse is not None:
            delta -= gradient_pass.dlse[where]
        self.final_parts: list[Part] = []
        if "sinks" in gradient_pass.small:
            self.final_parts.append(self._sink_part(lse, delta))
        self.captures = {
            name: np.zeros_like(total) for name, total in gradient_pass.captures.items()
        }
        self.final_parts += [
            (gradient_pass.captures[name], part) for name, part in self.captures.items()
        ]
        q[..., :-1] *= job.compute.type(job.softmax_scale)
        # np.negative of NumPy 2.4.6 is wrong for some arrays whose strides are two elements.
        np.subtract(0, lse, out=q[..., -1])
        np.subtract(0, delta, out=dout[..., -1])
        # The weights of these rows are then exactly 0, whatever their scores are.
        q[inactive, -1] = -np.inf
        self.q, self.dout = (x.reshape(*self.rows[:2], -1, x.shape[4]) for x in (q, dout))
        # Sums over rows use finite copies, as the weight 0 of a masked pair times inf would be NaN.
        # The result is the same: all weights of a query that is not finite are NaN anyway, and
        # `_add_infinite` adds the elements of dout that are not finite.
        self.finite_q = _finite(self.q[..., :-1])
        self.finite_dout = _finite(self.dout[..., :-1])
        self.dq: Array | None = None

    def _scratch_array(self, name: str, shape: tuple[int, ...]) -> Array:
        return self.scratch.array(name, shape, self.job.compute)

    def _with_column(self, name: str, source: Array) -> Array:
        """Return a copy with a last column of ones, which q and dout replace by -lse and -delta.

        The matrix product then subtracts lse or delta as well, which saves 5% of the total time.
        """
        *rows, dim = source.shape
        copy = self._scratch_array(name, (*rows, dim + 1))
        np.copyto(copy[..., :-1], source, casting="same_kind")
        copy[..., -1] = 1
        return copy

    def _load_keys(self, name: str, source: Array | PagedRows, start: int, stop: int) -> Array:
        """Return keys or values [start, stop), (sequences, KV heads, stop - start, dim + 1)."""
        block = self.block
        return self._with_column(
            name, source[block.batch, start:stop, block.kv_heads].swapaxes(1, 2)
        )

    def _least_weight_of_one_key(self) -> Array:
        # The last column of self.q is minus the log-sum-exp.
        columns = max(self.job.q.shape[-1], self.job.v.shape[-1])
        return least_weight_of_one_key(self.job.q.dtype.name, columns, self.q[..., -1:])

    def _sink_part(self, lse: Array, delta: Array) -> Part:
        sinks = self.job.sinks_of(self.block)
        assert sinks is not None
        sinks = sinks[..., 0]
        # A sink of -inf has no weight, not even where the lse is -inf.
        weights = np.where(sinks == -np.inf, 0, np.exp(sinks - lse))
        total = self.gradient_pass.small["sinks"].reshape(self.job.q.shape[1:3])
        part: Array = -np.asarray(np.sum(weights * delta, axis=(0, 3), dtype=np.float64))
        return total[self.block.kv_heads, self.block.heads], part

    def process_tile(self, start: int, stop: int) -> list[Part]:
        """Process keys [start, stop); return their contributions to all gradients except dq."""
        job, gradient_pass, block = self.job, self.gradient_pass, self.block
        start, stop, masked_by_mod = self._apply_mask_mod(start, stop)
        if start >= stop:
            return []
        k = self._load_keys("k", job.k, start, stop)
        masked = self._masked_pairs(start, stop)
        if masked_by_mod is not None:
            masked.append((slice(None), masked_by_mod))
        p = self._scratch_array("p", (*self.q.shape[:-1], stop - start))
        pairs = p.reshape(*self.rows, stop - start)
        slope = pair_indices = scaled = None
        if self.changes.changes_nothing:
            np.matmul(self.q, k.swapaxes(-1, -2), out=p)
        else:
            np.matmul(self.q[..., :-1], k[..., :-1].swapaxes(-1, -2), out=p)
            pair_indices = job.pairs_of(block, start, stop)
            scaled = pairs.copy() if self.captures else None
            changed, slope = apply_with_slope(self.changes, pairs, pair_indices)
            np.copyto(pairs, changed, casting="same_kind")
            masked.append((slice(None), pairs == -np.inf))
            if self.inactive is not None:
                # The queries of these rows are set to 0, but a score_mod of 0 may still be NaN.
                masked.append((slice(None), self.inactive))
            p += self.q[..., -1:]
        np.exp(p, out=p)
        _zero_masked(pairs, masked)
        parts = []
        factors = self._dropout_factors(start, stop)
        if gradient_pass.dv is not None:
            weights = p
            if factors is not None:
                # The buffer of ds is not in use yet.
                weights = np.multiply(p, factors, out=self._scratch_array("ds", p.shape))
            parts.append(
                self._key_part("dv", gradient_pass.dv, weights, self.finite_dout, start, stop)
            )
            self._add_infinite(parts[-1][1], p, weights)
        if not gradient_pass.needs_scores:
            return parts
        v = self._load_keys("v", job.v, start, stop)
        ds = self._scratch_array("ds", p.shape)
        if factors is None:
            np.matmul(self.dout, v.swapaxes(-1, -2), out=ds)
        else:
            np.matmul(self.dout[..., :-1], v[..., :-1].swapaxes(-1, -2), out=ds)
            ds *= factors
            # The last column of self.dout is minus delta.
            ds += self.dout[..., -1:]
        ds *= p
        pairs = ds.reshape(pairs.shape)
        # Masked pairs are set to 0 again, because values of masked keys may have made them NaN.
        _zero_masked(pairs, masked)
        if self.may_leave_one_key:
            is_only_key = p > self._least_weight_of_one_key()
            if factors is not None:
                is_only_key &= factors != 0
            np.copyto(ds, 0, where=is_only_key)
        elif self.rows_of_one_key.size:
            row_index = (..., self.rows_of_one_key, slice(None))
            least = self._least_weight_of_one_key().reshape(*pairs.shape[:-1], 1)
            is_only_key = p.reshape(pairs.shape)[row_index] > least[row_index]
            pairs[row_index] = np.where(is_only_key, 0, pairs[row_index])
        if gradient_pass.bias is not None:
            parts += self._bias_parts(pairs, start, stop)
        if scaled is not None and pair_indices is not None:
            self._add_captures(scaled, pair_indices, pairs)
        if slope is not None:
            pairs *= slope
            _zero_masked(pairs, masked)
        if gradient_pass.dk is not None:
            parts.append(self._key_part("dk", gradient_pass.dk, ds, self.finite_q, start, stop))
        if gradient_pass.dq is not None:
            k = k[..., :-1]
            # The finite copy gives the same result: weights of a key with NaN or inf are NaN or 0.
            self._add_dq(ds, _finite(k) if masked else k)
        return parts

    def _dropout_factors(self, start: int, stop: int) -> Array | None:
        """Return the factors of dropout on the weights of keys [start, stop); None without dropout.

        They are 0 for weights that are dropped.
        """
        kept, share = self.job.kept_by_dropout(self.block, start, stop), self.job.kept_share
        if kept is None or share is None:
            return None
        factors = self._scratch_array("factors", (*self.q.shape[:-1], stop - start))
        return np.divide(kept.reshape(factors.shape), self.job.compute.type(share), out=factors)

    def _apply_mask_mod(self, start: int, stop: int) -> tuple[int, int, Array | None]:
        """Reduce the range [start, stop) to keys that any row attends to under the user's mask.

        Returns the new range, and which of its pairs the mask_mod masks, or None if it masks none.
        """
        if self.mask_mod is None or self.job.is_fully_visible(self.block, start, stop):
            return start, stop, None
        pair_indices = self.job.pairs_of(self.block, start, stop)
        is_visible = self.mask_mod.evaluate(
            *(
                pair_indices.b,
                pair_indices.h,
                pair_indices.row + pair_indices.q_offset,
                pair_indices.j,
            ),
            q_start=pair_indices.q_start,
            k_start=pair_indices.k_start,
            dtype=self.job.compute,
        )
        is_visible = np.broadcast_to(is_visible, (*self.rows, stop - start))
        keys = np.flatnonzero(is_visible.any(axis=(0, 1, 2, 3)))
        if not keys.size:
            return start, start, None
        first, end = int(keys[0]), int(keys[-1]) + 1
        return start + first, start + end, ~is_visible[..., first:end]

    def _masked_pairs(self, start: int, stop: int) -> list[tuple[slice, Array]]:
        """Return the pairs masked by position: slices of keys, each with a mask of its pairs."""
        rows, visible = self.block.rows, self.job.mask_of(self.block)
        return [
            (slice(first - start, end - start), visible.masked(rows.start, rows.stop, first, end))
            for first, end in visible.edges(rows.start, rows.stop, start, stop)
        ]

    def _key_part(
        self, name: str, total: Array, weights: Array, rows: Array, start: int, stop: int
    ) -> Part:
        """Return the weighted sums of rows for each key, and the gradients to add them to."""
        product = self._scratch_array(name, (*rows.shape[:2], stop - start, rows.shape[3]))
        np.matmul(weights.swapaxes(-1, -2), rows, out=product)
        return total[self.block.batch, self.block.kv_heads, start:stop], product

    def _add_infinite(self, dv: Array, p: Array, weights: Array) -> None:
        """Add to dv the elements of dout that are not finite, which `finite_dout` leaves out.

        `weights` are the probabilities p after dropout.
        """
        dout = self.dout[..., :-1]
        if np.may_share_memory(self.finite_dout, dout):
            return
        rest = np.where(np.isfinite(dout), 0, dout)
        for *group_index, row in np.argwhere(rest.any(-1)):
            index = (*group_index, row)
            part = weights[index][:, None] * rest[index]
            dv[tuple(group_index)] += np.where(p[index][:, None] == 0, 0, part)

    def _bias_parts(self, dt: Array, start: int, stop: int) -> list[Part]:
        """Return the contribution to the gradient of the bias, summed over its broadcast axes."""
        bias = self.gradient_pass.bias
        assert bias is not None
        shared = tuple(axis for axis in range(5) if bias.shape[axis] == 1)
        index = (*self.block, slice(start, stop))
        total = bias[
            tuple(slice(None) if n == 1 else i for i, n in zip(index, bias.shape, strict=True))
        ]
        part = dt.sum(axis=shared, keepdims=True, dtype=bias.dtype)
        if bias.shape[4] > 1:
            return [(total, part)]
        # One element of the bias serves all keys, so it is added when the query tile is done.
        self.final_parts.append((total, part))
        return []

    def _add_captures(self, scaled: Array, pair_indices: Pairs, dt: Array) -> None:
        score_mod = self.changes.score_mod
        assert score_mod is not None
        gradients = capture_gradients(
            score_mod, after_softcap(self.changes, scaled), pair_indices, dt
        )
        for name, part in self.captures.items():
            part += gradients[name.removeprefix(OF_MOD)]

    def _add_dq(self, ds: Array, k: Array) -> None:
        shape = (*self.q.shape[:-1], k.shape[3])
        if self.dq is None:
            self.dq = np.matmul(ds, k, out=self._scratch_array("dq", shape))
        else:
            self.dq += np.matmul(ds, k, out=self._scratch_array("product", shape))

    def write_dq(self) -> None:
        """Write dq of the query tile."""
        if self.gradient_pass.dq is None:
            return
        dq = self.gradient_pass.dq[tuple(self.block)]
        if self.dq is None:
            dq[...] = 0
            return
        self.dq *= self.job.compute.type(self.job.softmax_scale)
        np.copyto(dq, self.dq.reshape(dq.shape), casting="same_kind")


def _finite(x: Array) -> Array:
    """Return the array itself if it is finite, otherwise a copy with 0 for NaN and infinity."""
    is_finite = np.isfinite(x)
    return x if is_finite.all() else np.where(is_finite, x, 0)


def _zero_masked(x: Array, masked: list[tuple[slice, Array]]) -> None:
    """Set the elements of masked pairs in x (..., rows, keys) to 0."""
    for columns, pairs in masked:
        np.copyto(x[..., columns], 0, where=pairs)
