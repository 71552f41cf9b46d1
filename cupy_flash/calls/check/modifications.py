"""Mask and score arguments of a call: parsing, checks, and what kernels need from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import address_of, cast, dtype_name
from cupy_flash.mods.block_list import BLOCKS, require_fit
from cupy_flash.mods.captures import CaptureSpec, number_of, prefixed, read_capture
from cupy_flash.mods.codegen.arguments import arguments_dtype, pack_arguments, real_type
from cupy_flash.mods.codegen.emit import LOW_SCORES, SCALE, emit
from cupy_flash.mods.ir.analysis import Analysis, value_range
from cupy_flash.mods.ir.compose import compose, varies
from cupy_flash.mods.ir.derivative import Slopes, slopes_of
from cupy_flash.mods.ir.expression import Node, postorder
from cupy_flash.mods.ir.operations import ONE
from cupy_flash.mods.keywords import (
    ARRAYS,
    DROPOUT,
    DROPOUT_P,
    DROPOUT_SEED,
    MODS,
    Window,
    checked_dropout,
    checked_softcap,
    require_known,
    require_mod,
    require_seed,
    window_of,
)
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.on_arrays.bound_modifications import BoundModifications, Dropout
from cupy_flash.mods.on_arrays.scores import ARRAY_FIELDS, Scores
from cupy_flash.mods.shapes import Sizes, fitted, require_limit
from cupy_flash.mods.trace.traced import NOT_DERIVABLE, Derivable, Traced
from cupy_flash.problem.arrays import MAX_ALIGNMENT
from cupy_flash.problem.problem import UNUSED_Q_OFFSET
from cupy_flash.problem.score import LARGEST_BOUNDED, BiasSpec, ScoreSpec


class ModificationKey(NamedTuple):
    """Hashable part of the modifications of a call, without arrays and functions.

    Attributes
    ----------
    names
        Names of the arrays of modifications, which follow the other arrays of a call in this order.
    score_mod, mask_mod
        Traced expressions of the user's functions, see `UserMods`.
    numbers
        Captured numbers: pairs (name among all captures, key made by `number_key`).
    derivable
        In a backward pass, the expression of score_mod that is differentiated, and the captures
        whose gradients are supported, see `Derivable`. None in a forward pass.
    dropout_threshold
        Probability of dropout in steps of 1 / 256; None without dropout.
    """

    names: tuple[str, ...]
    window: Window = Window()
    softcap: float | None = None
    score_mod: Traced | None = None
    mask_mod: Traced | None = None
    numbers: tuple[tuple[str, bool | int | str], ...] = ()
    derivable: Derivable | None = None
    dropout_threshold: int | None = None


class UserMods(NamedTuple):
    """User functions with their captures. A call key excludes them, because it would keep them."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None


NO_USER_MODS = UserMods()
_NO_WINDOW = Window()
_NOTHING = ModificationKey(())
_ONLY_OFFSETS = ModificationKey(("q_offset",))


def parse_modifications(
    modifications: Mapping[str, Any], *, backward: bool = False
) -> tuple[ModificationKey, tuple[Any, ...], UserMods] | None:
    """Parse modifications into `ModificationKey`, arrays and `UserMods`; return None if none.

    Parameters
    ----------
    modifications
        Keyword arguments of a public function that modify attention.
    backward
        Whether derivatives are needed, see `ModificationKey.derivable`.

    Raises
    ------
    TypeError, ValueError
        If an argument has an unknown name, a wrong type, or a value out of range; or if a backward
        pass needs the derivative of a function with CUDA source that cannot be traced.
    """
    if len(modifications) == 1 and not backward:
        [(name, value)] = modifications.items()
        if value.__class__ is MODS.get(name):
            mod: Any = value
            return _parse_single_mod(name, mod.reread())
    result = _parse(modifications)
    if result is None or not backward:
        return result
    mod_key, arrays, user_mods = result
    score_mod = user_mods.score_mod
    derivable = NOT_DERIVABLE if score_mod is None else score_mod.derivable
    return mod_key._replace(derivable=derivable), arrays, user_mods


def _parse_single_mod(name: str, mod: Any) -> tuple[ModificationKey, tuple[Any, ...], UserMods]:
    """Parse a function that is the only modification of a call. Caching saves 0.6 us per call."""
    kept = mod.read_alone
    if kept is None:
        result = _parse({name: mod})
        assert result is not None
        kept = result[:2]
        # The `UserMods` record is not cached: the function would keep itself and its block masks.
        object.__setattr__(mod, "read_alone", kept)
    user_mods = UserMods(None, mod) if name == "mask_mod" else UserMods(mod)
    return *kept, user_mods


def _parse(
    modifications: Mapping[str, Any],
) -> tuple[ModificationKey, tuple[Any, ...], UserMods] | None:
    names: tuple[str, ...] = ()
    arrays: tuple[Any, ...] = ()
    numbers: tuple[tuple[str, bool | int | str], ...] = ()
    window, softcap, dropout_threshold = _NO_WINDOW, None, None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    # One loop, because every call runs it. The last branch handles the rarer arguments.
    for name, value in modifications.items():
        if value is None:
            require_known(name)
        elif name in ARRAYS:
            names += (name,)
            arrays += (value,)
        elif name == "window_size":
            window = window_of(value)
        elif name == "softcap":
            softcap = checked_softcap(value)
        elif name in DROPOUT:
            if name == DROPOUT_P:
                dropout_threshold = checked_dropout(value)
        else:
            # Equivalent to both checks below if true, in a third of their time.
            if value.__class__ is not MODS.get(name):
                require_known(name)
                require_mod(name, value)
            mod = value.reread()
            if name == "score_mod":
                score_mod = mod
            else:
                mask_mod = mod
            names += mod.array_names
            arrays += mod.arrays
            numbers += mod.numbers
    if dropout_threshold is not None:
        names += (DROPOUT_SEED,)
        arrays += (require_seed(modifications),)
    has_none = score_mod is None and mask_mod is None
    mod_key = ModificationKey(
        names,
        window,
        softcap,
        None if score_mod is None else score_mod.traced,
        None if mask_mod is None else mask_mod.traced,
        numbers,
        dropout_threshold=dropout_threshold,
    )
    if mod_key == _NOTHING:
        return None
    return mod_key, arrays, NO_USER_MODS if has_none else UserMods(score_mod, mask_mod)


def canonical(mod_key: ModificationKey, arrays: tuple[Any, ...], sizes: Sizes) -> dict[str, Any]:
    """Return all arrays by name, checked, with biases and masks broadcast to the score shape.

    Raises
    ------
    TypeError, ValueError
        If an array has a wrong dtype or shape.
    """
    accumulator = "float64" if sizes.dtype == "float64" else "float32"
    reals = tuple(dict.fromkeys((accumulator, sizes.dtype)))
    allowed_dtypes: dict[str, tuple[str, ...]] = {
        "alibi_slopes": (accumulator,),
        "sinks": reals,
        "bias": reals,
        "mask": ("bool",),
        "prefix_lens": ("int32",),
        "tree_mask": ("uint64",),
        "seqlens_k": ("int32",),
        "q_offset": ("int32",),
        "seqused_q": ("int32",),
        "cache_leftpad": ("int32",),
        DROPOUT_SEED: ("int64",),
    }
    given = dict(zip(mod_key.names, arrays, strict=True))
    for name, dtypes in allowed_dtypes.items():
        array = given.get(name)
        if array is not None and (dtype_name(array) not in dtypes or not array.dtype.isnative):
            raise _wrong_dtype(name, array, dtypes)
    if mod_key.mask_mod is not None and mod_key.mask_mod.block is not None:
        require_fit(given[BLOCKS], sizes.batch, sizes.heads_q)
    return fitted(given, sizes)


def _wrong_dtype(name: str, array: Any, dtypes: tuple[str, ...]) -> TypeError:
    if name == "mask" and "float" in dtype_name(array):
        instead = "if it is added to the scores, pass it as bias"
    elif name == "bias" and dtype_name(array) == "bool":
        instead = "if it selects the visible pairs, pass it as mask"
    else:
        instead = f"pass {cast(name, array, dtypes[0])}"
    return TypeError(f"{name} has dtype {array.dtype}; expected {' or '.join(dtypes)}: {instead}")


def score_spec(
    mod_key: ModificationKey, arrays: Mapping[str, Any], sizes: Sizes, *, causal: bool
) -> ScoreSpec:
    """Return the spec of the modifications for kernels, given the arrays from `canonical`."""
    specs = _capture_specs(mod_key, arrays, 1.0)
    window, has_prefix, has_offsets = mod_key.window, "prefix_lens" in specs, "q_offset" in specs
    if has_prefix:
        require_limit(window, causal=causal)
    if not causal and mod_key._replace(derivable=None) == _ONLY_OFFSETS:
        raise ValueError(UNUSED_Q_OFFSET)
    generated = _generate_cuda(
        mod_key.score_mod,
        mod_key.mask_mod,
        tuple(specs.items()),
        (causal or window.right == 0) and not has_prefix,
        sizes.dtype,
        mod_key.derivable,
    )
    slopes = generated.slopes
    return ScoreSpec(
        None if has_prefix else window.left,
        window.right,
        has_prefix,
        has_offsets,
        "seqused_q" in specs,
        "sinks" in specs,
        generated.score is not None,
        generated.masks_pairs,
        generated.cuda_source,
        generated.dtype,
        # A block mask describes the pairs that the user's mask alone hides, at positions that
        # follow from the lengths of the sequences.
        block_mask_suffices=mod_key.mask_mod is not None
        and not has_offsets
        and not {"mask", "tree_mask", "seqused_q", "cache_leftpad"} & set(specs)
        and not (has_prefix and window.left is not None),
        mask_varies=(False, False) if mod_key.mask_mod is None else varies(mod_key.mask_mod),
        block=None if mod_key.mask_mod is None else mod_key.mask_mod.block,
        reads_pairs=generated.reads_pairs,
        bias=_bias_spec(arrays["bias"], specs["bias"]) if "bias" in specs else None,
        is_bounded=generated.score is not None
        and _is_bounded(generated.score, _numbers(mod_key, 1.0)),
        conceals=generated.masks_pairs or mod_key.score_mod is not None or "bias" in specs,
        has_low_scores=LOW_SCORES in generated.cuda_source,
        changes_slope=slopes is not None and slopes.slope is not ONE,
        differentiable=_differentiable(mod_key.derivable),
        dropout=mod_key.dropout_threshold is not None,
    )


def _is_bounded(score: Node, numbers: Mapping[str, bool | int | float]) -> bool:
    low, high = value_range(score, numbers)
    return low >= -LARGEST_BOUNDED and high <= LARGEST_BOUNDED


def _bias_spec(bias: Any, spec: CaptureSpec) -> BiasSpec | None:
    if spec.rank != 4 or not spec.contiguous_last or not bias.size:
        return None
    strides = tuple(
        stride if length > 1 else 0
        for stride, length in zip(bias.strides[:3], bias.shape, strict=False)
    )
    alignment = math.gcd(MAX_ALIGNMENT, address_of(bias), *strides)
    batch, head, row = (stride // bias.itemsize for stride in strides)
    return BiasSpec(spec.dtype, (batch, head, row), alignment)


class _GeneratedSource(NamedTuple):
    """Generated CUDA source for a `ScoreSpec`, with the score's expression and derivatives."""

    score: Node | None
    slopes: Slopes | None
    masks_pairs: bool
    cuda_source: str
    dtype: np.dtype
    reads_pairs: bool


# Generating source takes 0.1 to 1.2 ms. The source does not depend on numbers and lengths.
@functools.lru_cache(maxsize=256)
def _generate_cuda(
    score_mod: Traced | None,
    mask_mod: Traced | None,
    captures: tuple[tuple[str, CaptureSpec], ...],
    masks_later_keys: bool,
    dtype: str,
    derivable: Derivable | None,
) -> _GeneratedSource:
    specs = dict(captures)
    composed = functools.partial(
        compose, specs, mask_mod=mask_mod, masks_later_keys=masks_later_keys
    )
    score, visible = composed(score_mod=score_mod)
    slopes = None
    if derivable is not None:
        traced = derivable.traced(score_mod)
        smooth = score if traced is score_mod else composed(score_mod=traced)[0]
        slopes = slopes_of(smooth, _differentiable(derivable))
    pairwise = frozenset({"bias"} & set(specs))
    cuda_source = emit(score, visible, specs, dtype=dtype, pairwise=pairwise, slopes=slopes)
    arguments = arguments_dtype(specs, real_type(dtype))
    return _GeneratedSource(
        score, slopes, visible is not None, cuda_source, arguments, _reads_pairs(score, visible)
    )


def _differentiable(derivable: Derivable | None) -> tuple[str, ...]:
    """Return the names that differentiable captures have among all arrays of a call."""
    names = () if derivable is None else derivable.differentiable
    return tuple(prefixed("score_mod", name) for name in names)


def _reads_pairs(score: Node | None, visible: Node | None) -> bool:
    """Return whether kernels load an array element for each (query, key) pair.

    Loads that depend only on the key count if they change scores, but not if they only mask keys.
    """
    analysis = Analysis()
    loads = [] if score is None else [node for node in postorder(score) if node.op == "load"]
    if visible is not None:
        loads += [node for node in postorder(visible) if node.op == "load" and _names_rows(node)]
    return not all(map(analysis.is_of_row, loads))


def _names_rows(node: Node) -> bool:
    return any(x.op == "symbol" and x.value in ("i", "row") for x in postorder(node))


def packed_arguments(
    mod_key: ModificationKey, arrays: Mapping[str, Any], dtype: str, softmax_scale: float
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return ``ModArguments`` for arrays from `canonical`, without addresses, and array names.

    The dtype is that of q, which determines how captured floats are read.
    """
    specs = _capture_specs(mod_key, arrays, softmax_scale)
    values = dict(arrays) | _numbers(mod_key, softmax_scale)
    named = tuple(name for name, spec in specs.items() if spec.rank is not None)
    addresses = dict.fromkeys(named, 0)
    return pack_arguments(specs, values, addresses, real_type(dtype)), named


def _numbers(mod_key: ModificationKey, softmax_scale: float) -> dict[str, bool | int | float]:
    window = mod_key.window
    result = {name: number_of(key) for name, key in mod_key.numbers} | {SCALE: softmax_scale}
    for name, number in (
        ("softcap", mod_key.softcap),
        ("window_left", window.left),
        ("window_right", window.right),
        ("dropout_threshold", mod_key.dropout_threshold),
    ):
        if number is not None:
            result[name] = number
    return result


def _capture_specs(
    mod_key: ModificationKey, arrays: Mapping[str, Any], softmax_scale: float
) -> dict[str, CaptureSpec]:
    """Return the specs of all values that kernels read through ``ModArguments``."""
    result = _numbers(mod_key, softmax_scale)
    numbers = {name: read_capture(name, number)[1] for name, number in result.items()}
    return numbers | {
        name: read_capture(name, array)[1]
        if array.size
        else CaptureSpec(dtype_name(array), array.ndim)  # An empty array is never read.
        for name, array in arrays.items()
        if name != "seqlens_k"
    }


def bind_modifications(
    mod_key: ModificationKey, user_mods: UserMods, arrays: Mapping[str, Any]
) -> BoundModifications:
    """Return the modifications as the CPU backend takes them, given arrays from `canonical`.

    If the arrays include `seqused_q`, they must include a `q_offset`.
    """
    window, prefix_lens = mod_key.window, arrays.get("prefix_lens")
    scores = Scores(
        mod_key.softcap,
        *user_mods,
        *(arrays.get(name) for name in ARRAY_FIELDS),
    )
    return BoundModifications(
        scores.with_prefix_window(window.left, prefix_lens),
        window,
        prefix_lens,
        arrays.get("seqlens_k"),
        arrays.get("sinks"),
        arrays.get("q_offset"),
        None
        if mod_key.dropout_threshold is None
        else Dropout.of(mod_key.dropout_threshold, arrays[DROPOUT_SEED]),
    )
