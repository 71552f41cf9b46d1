"""Parsing of the keyword arguments that modify attention, for the reference formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.cuda_interface import is_foreign_array
from cupy_flash.arrays.kinds import is_number_or_list, read, seed_and_offset, vector
from cupy_flash.arrays.strided import (
    array_module,
    convert_to,
    dtype_name,
    require_float,
    require_shape,
)
from cupy_flash.mods.block_list import BlockList, require_fit
from cupy_flash.mods.keywords import (
    ARRAYS,
    DROPOUT_P,
    DROPOUT_SEED,
    VECTORS,
    checked_dropout,
    checked_softcap,
    given,
    require_seed,
    window_of,
)
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications, Dropout
from cupy_flash.mods.on_arrays.score_tangents import ModificationTangents
from cupy_flash.mods.on_arrays.scores import ARRAY_FIELDS, Scores
from cupy_flash.mods.shapes import Sizes, fitted, require_limit
from cupy_flash.mods.slopes import with_captured_slopes
from cupy_flash.problem.gradient import OF_MOD
from cupy_flash.reference.eight_bits import dequantized, widened

_SCALES = ("q_scale", "k_scale", "v_scale")


def read_modifications(
    modifications: Mapping[str, Any], *, packed: bool = False, xp: Any = np
) -> BoundModifications:
    """Return the modifications that the keyword arguments of a public function specify.

    Parameters
    ----------
    modifications
        Keyword arguments that modify attention.
    packed
        Whether the sequences are packed.
    xp
        Module that the formula computes with, NumPy or CuPy; other arrays are copied.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type. Shapes are not checked.
    """
    result = given(modifications)
    if not result:
        return BoundModifications()
    arrays: dict[str, Any] = {
        name: convert_to(xp, read_array(name, result[name]))
        for name in ("alibi_slopes", "bias", "mask", "tree_mask", "sinks")
        if name in result
    }
    arrays |= {n: integers(result[n]) for n in ("seqused_q", "cache_leftpad") if n in result}
    if "mask" in arrays and dtype_name(arrays["mask"]) != "bool":
        raise TypeError(f"mask has dtype {arrays['mask'].dtype}; expected bool")
    for name in ("bias", "mask"):
        if name in arrays:
            array = arrays[name]
            missing = (3 if packed else 4) - array.ndim
            arrays[name] = array.reshape((1,) * missing + array.shape)
    softcap = result.get("softcap")
    window = window_of(result.get("window_size", (None, None)))
    prefix_lens = integers(result.get("prefix_lens"))
    scores = Scores(
        None if softcap is None else checked_softcap(softcap),
        result.get("score_mod"),
        result.get("mask_mod"),
        *(arrays.get(name) for name in ARRAY_FIELDS),
    )
    return BoundModifications(
        scores.with_prefix_window(window.left, prefix_lens),
        window,
        prefix_lens,
        integers(result.get("seqlens_k")),
        arrays.get("sinks"),
        integers(result.get("q_offset")),
        _dropout(result),
    )


def _dropout(modifications: Mapping[str, Any]) -> Dropout | None:
    """Return the dropout of a call, whose seed is read; None without dropout."""
    threshold = checked_dropout(modifications.get(DROPOUT_P, 0))
    if threshold is None:
        return None
    seed = require_seed(modifications)
    if is_number_or_list(seed):
        return Dropout.of(threshold, seed_and_offset(DROPOUT_SEED, seed, on_host=True))
    array = integers(seed)
    require_shape(DROPOUT_SEED, array, (2,), "the seed and the offset")
    return Dropout.of(threshold, array)


def fitting_modifications(
    modifications: Mapping[str, Any], q: Any, sizes: Sizes, *, causal: bool
) -> BoundModifications:
    """Return the modifications of a call with these queries and sizes; see `read_modifications`.

    Raises
    ------
    TypeError, ValueError
        See `read_modifications`; also for a wrong shape, or prefix_lens with nothing to override.
    """
    packed, xp = sizes.total_q is not None, array_module(q)
    # The reference computes in float64, but evaluates masks in the float dtype of kernels, so that
    # the same pairs are visible. Slopes and sinks are rounded to that dtype, as kernels read them.
    real = np.float64 if sizes.dtype == "float64" else np.float32
    bound_mods = read_modifications(modifications, packed=packed, xp=xp)
    slopes, sinks = (
        _head_values(x, sizes.heads_q, real)
        for x in (bound_mods.scores.alibi_slopes, bound_mods.sinks)
    )
    scores = bound_mods.scores._replace(alibi_slopes=slopes, real=real)
    bound_mods = bound_mods._replace(scores=scores, sinks=sinks)
    fields = {**scores._asdict(), **bound_mods._asdict()}
    fitted({name: fields[name] for name in ARRAYS if fields[name] is not None}, sizes)
    if isinstance(scores.mask_mod, BlockList):
        require_fit(scores.mask_mod.captures["blocks"], sizes.batch, sizes.heads_q)
    if bound_mods.prefix_lens is not None:
        require_limit(bound_mods.window, causal=causal)
    return bound_mods


class MovingModifications(NamedTuple):
    """Modifications of a call that is differentiated along their tangents.

    Attributes
    ----------
    changes
        Keyword arguments that modify attention. Slopes that are differentiated are a capture of
        `score_mod`.
    bound
        The same modifications, parsed.
    tangents
        Tangents of the modifications.
    wrt
        Names of the inputs whose gradients are requested, as `Gradients` takes them.
    """

    changes: Mapping[str, Any]
    bound: BoundModifications
    tangents: ModificationTangents
    wrt: tuple[str, ...]

    @classmethod
    def of(
        cls,
        modifications: Mapping[str, Any],
        tangents: Mapping[str, Any] | None,
        wrt: Iterable[str],
        bind: Callable[[Mapping[str, Any]], BoundModifications],
    ) -> MovingModifications:
        """Return the modifications of a call.

        Parameters
        ----------
        modifications
            Keyword arguments that modify attention.
        tangents
            Arrays by the names of `attention_backward_reference`, or None.
        wrt
            Names of the inputs whose gradients are requested.
        bind
            Function that parses modifications of the call.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid, or a tangent does not have the shape of its array.
        """
        if isinstance(wrt, str):
            raise TypeError(f"wrt is {wrt!r}, one name; expected a sequence of names: ({wrt!r},)")
        given = {name: x for name, x in (tangents or {}).items() if x is not None}
        wrt = tuple(wrt)
        names, changes = with_captured_slopes((*given, *wrt), modifications, OF_MOD)
        bound = bind(changes)
        mod = bound.scores.score_mod
        arrays = {} if mod is None else {OF_MOD + n: mod.captures[n] for n in mod.differentiable}
        parsed = {"bias": bound.scores.bias, "sinks": bound.sinks}
        arrays |= {n: read_array(n, changes[n]) for n, x in parsed.items() if x is not None}
        read = {
            name: _read_tangent(given_name, x, name, arrays)
            for name, (given_name, x) in zip(names, given.items(), strict=False)
        }
        of_mod = {n.removeprefix(OF_MOD): x for n, x in read.items() if n.startswith(OF_MOD)}
        plain = {name: x for name, x in read.items() if not name.startswith(OF_MOD)}
        fitted = bind(plain) if plain else BoundModifications()
        moving = ModificationTangents(fitted.scores.bias, fitted.sinks, of_mod)
        return cls(changes, bound, moving, names[len(given) :])


def _read_tangent(given_name: str, tangent: Any, name: str, arrays: Mapping[str, Any]) -> Any:
    """Return the tangent of an array of this name among `arrays`, which is called `given_name`."""
    if name not in arrays:
        known = ", ".join(arrays) or "none, because the call has no array with a tangent"
        raise ValueError(f"modification_tangents names {given_name!r}; expected some of {known}")
    array, own = read_array(f"the tangent of {given_name}", tangent), arrays[name]
    require_float(f"the tangent of {given_name}", array)
    require_shape(f"the tangent of {given_name}", array, tuple(own.shape), f"that of {given_name}")
    return convert_to(array_module(own), array)


def _head_values(array: Any, heads: int, real: Any) -> Any:
    """Return slopes or sinks in the dtype `real`, with a single number repeated for each head."""
    if array is None:
        return None
    if array.ndim == 0:
        array = array_module(array).broadcast_to(array, (heads,))
    with np.errstate(all="ignore"):
        return array.astype(real, copy=False)


def read_array(name: str, value: Any) -> Any:
    """Return an argument as an array of its own dtype; a number becomes an array without axes.

    Raises
    ------
    TypeError, ValueError
        If the argument cannot be read; the message names it.
    """
    if name in VECTORS and is_number_or_list(value):
        return vector(name, value, on_host=True)
    return read(name, value)


def read_scale(name: str, scale: Any, q: Any) -> Any:
    """Return a scale for functions that take q: a number, None, or an array on the device of q.

    Raises
    ------
    TypeError
        If an array cannot be read; the message names it.
    """
    if not is_foreign_array(scale):
        return scale
    return convert_to(array_module(q), read(name, scale))


def scaled(arrays: tuple[Any, ...], scales: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """Return q, k and, if given, v times their scales.

    Without any scale, the arrays are returned as they are, except that float8 becomes float32.

    Parameters
    ----------
    arrays
        q, k and optionally v, (batch, heads, seqlen, dim).
    scales
        Scale of each array, broadcastable to (batch, seqlen, heads), or None.
    dtype
        Dtype of the products.
    """
    if all(scale is None for scale in scales):
        return tuple(map(widened, arrays))
    return tuple(
        dequantized(x.swapaxes(1, 2), read_scale(name, scale, x), dtype).swapaxes(1, 2)
        for name, x, scale in zip(_SCALES[: len(arrays)], arrays, scales, strict=True)
    )


def integers(array: Any) -> Any:
    """Return integers of any array type as a NumPy array, and None as None.

    Raises
    ------
    TypeError
        If the numbers are not integers.
    """
    if array is None:
        return None
    if is_foreign_array(array):
        array = read("an array of integers", array)
    result = np.asarray(convert_to(np, array))
    if result.size and result.dtype.kind not in "iu":
        raise TypeError(f"an array has dtype {result.dtype}; expected integers")
    return result
