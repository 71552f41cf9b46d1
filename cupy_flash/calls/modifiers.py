"""Masks and changes of scores that a call asks for: read, checked, and what kernels get of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import array_module, dtype_name, require_shape
from cupy_flash.mods.arguments import arguments_dtype, pack_arguments, real_type
from cupy_flash.mods.captures import CaptureSpec, read_capture
from cupy_flash.mods.compose import compose, prefixed
from cupy_flash.mods.emit import SCALE, emit
from cupy_flash.mods.keywords import ARRAYS, Window, checked_softcap, given, window_of
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.modified import Modified
from cupy_flash.mods.scores import Scores
from cupy_flash.problem.score import ScoreSpec

MAX_TREE_QUERIES = 64


class Modifiers(NamedTuple):
    """What a call's modifications ask for besides arrays, as plain values.

    Attributes
    ----------
    names
        Of their arrays, which stand behind the others of a call in this order.
    numbers
        That modifications capture, by the names that they have among all captures.
    """

    names: tuple[str, ...]
    window: Window = Window()
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    numbers: tuple[tuple[str, bool | int | float], ...] = ()


def read_modifiers(modifications: Mapping[str, Any]) -> tuple[Modifiers, tuple[Any, ...]] | None:
    """What keyword arguments ask for, and their arrays; None for nothing.

    Raises
    ------
    TypeError, ValueError
        For an argument of no such name, of a wrong kind, or out of range.
    """
    found = given(modifications)
    if not found:
        return None
    arrays = {name: found[name] for name in ARRAYS if name in found}
    numbers = []
    mods: dict[str, Any] = {}
    for name, kind in (("score_mod", ScoreMod), ("mask_mod", MaskMod)):
        mod = mods[name] = found.get(name)
        if mod is None:
            continue
        if not isinstance(mod, kind):
            raise TypeError(
                f"{name} is {type(mod).__name__}; expected a {kind.__name__}, as "
                f"{kind.__name__}(function)"
            )
        for capture, value in mod.captures.items():
            if mod.specs[capture].rank is None:
                numbers.append((prefixed(name, capture), value))
            else:
                arrays[prefixed(name, capture)] = value
    window, softcap = found.get("window_size"), found.get("softcap")
    modifiers = Modifiers(
        tuple(arrays),
        Window() if window is None else window_of(window),
        None if softcap is None else checked_softcap(softcap),
        mods["score_mod"],
        mods["mask_mod"],
        tuple(numbers),
    )
    return modifiers, tuple(arrays.values())


class Sizes(NamedTuple):
    """Sizes of a call that its modifications have to fit; keys are counted up to the capacity."""

    dtype: str
    batch: int
    heads_q: int
    seqlen_q: int
    seqlen_k: int
    total_q: int | None = None  # of packed queries


def canonical(modifiers: Modifiers, arrays: tuple[Any, ...], sizes: Sizes) -> dict[str, Any]:
    """Every array by its name, checked; biases and masks as views of the shape of all scores.

    Raises
    ------
    TypeError, ValueError
        For an array of a wrong dtype or shape.
    """
    batch, heads_q = sizes.batch, sizes.heads_q
    accumulator = "float64" if sizes.dtype == "float64" else "float32"
    reals = tuple(dict.fromkeys((accumulator, sizes.dtype)))
    packed = (heads_q, sizes.total_q, sizes.seqlen_k)
    pairs = (batch, heads_q, sizes.seqlen_q, sizes.seqlen_k)
    scores = pairs if sizes.total_q is None else packed
    found = dict(zip(modifiers.names, arrays, strict=True))
    checks: dict[str, tuple[tuple[str, ...], Any]] = {
        "alibi_slopes": ((accumulator,), None),
        "sinks": (reals, (heads_q,)),
        "bias": (reals, scores),
        "mask": (("bool",), scores),
        "prefix_lens": (("int32",), (batch,)),
        "tree_mask": (("uint64",), (batch, sizes.seqlen_q)),
        "seqlens_k": (("int32",), (batch,)),
    }
    for name, (dtypes, shape) in checks.items():
        array = found.get(name)
        if array is None:
            continue
        if dtype_name(array) not in dtypes or not array.dtype.isnative:
            raise TypeError(f"{name} has dtype {array.dtype}; expected {' or '.join(dtypes)}")
        if name in ("bias", "mask"):
            found[name] = _broadcast(name, array, shape)
        elif name == "alibi_slopes":
            expected = (heads_q,) if array.ndim == 1 else (batch, heads_q)
            require_shape(name, array, expected, "one slope for each query head")
        else:
            require_shape(name, array, shape, "see cupy_flash.Modifications")
    if "tree_mask" in found and sizes.seqlen_q > MAX_TREE_QUERIES:
        raise ValueError(
            f"tree_mask is for at most {MAX_TREE_QUERIES} queries of a sequence, and here are "
            f"{sizes.seqlen_q}; pass mask or mask_mod"
        )
    return found


def _broadcast(name: str, array: Any, shape: tuple[int, ...]) -> Any:
    try:
        return array_module(array).broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; expected one that broadcasts to {shape}"
        ) from None


def score_spec(
    modifiers: Modifiers, arrays: Mapping[str, Any], sizes: Sizes, *, causal: bool
) -> ScoreSpec:
    """What a kernel is made for, of canonical arrays."""
    specs = _capture_specs(modifiers, arrays, 1.0)
    if "prefix_lens" in specs and not causal:
        raise ValueError(
            "prefix_lens are keys that are seen in spite of a causal mask; pass causal=True or "
            "leave them out"
        )
    window = modifiers.window
    score, seen = compose(
        specs,
        score_mod=modifiers.score_mod,
        mask_mod=modifiers.mask_mod,
        sees_no_later_key=(causal and "prefix_lens" not in specs) or window.right == 0,
    )
    return ScoreSpec(
        window.left,
        window.right,
        "prefix_lens" in specs,
        "sinks" in specs,
        score is not None,
        seen is not None,
        emit(score, seen, specs, dtype=sizes.dtype),
        arguments_dtype(specs, real_type(sizes.dtype)),
        # Of the user's mask alone.
        modifiers.mask_mod is not None and not {"mask", "tree_mask"} & set(specs),
    )


def packed_arguments(
    modifiers: Modifiers, arrays: Mapping[str, Any], sizes: Sizes, softmax_scale: float
) -> tuple[np.ndarray, tuple[str, ...]]:
    """``ModArguments`` of canonical arrays, but for their addresses; and which arrays it has."""
    specs = _capture_specs(modifiers, arrays, softmax_scale)
    values = dict(arrays) | _numbers(modifiers, softmax_scale)
    named = tuple(name for name, spec in specs.items() if spec.rank is not None)
    addresses = dict.fromkeys(named, 0)
    return pack_arguments(specs, values, addresses, real_type(sizes.dtype)), named


def _numbers(modifiers: Modifiers, softmax_scale: float) -> dict[str, bool | int | float]:
    window = modifiers.window
    found: dict[str, bool | int | float] = dict(modifiers.numbers) | {SCALE: softmax_scale}
    for name, number in (
        ("softcap", modifiers.softcap),
        ("window_left", window.left),
        ("window_right", window.right),
    ):
        if number is not None:
            found[name] = number
    return found


def _capture_specs(
    modifiers: Modifiers, arrays: Mapping[str, Any], softmax_scale: float
) -> dict[str, CaptureSpec]:
    """Of everything that a kernel reads; lengths it has elsewhere."""
    found = _numbers(modifiers, softmax_scale)
    numbers = {name: read_capture(name, number)[1] for name, number in found.items()}
    return numbers | {
        name: read_capture(name, array)[1]
        if array.size
        else CaptureSpec(dtype_name(array), array.ndim)  # nobody reads it
        for name, array in arrays.items()
        if name != "seqlens_k"
    }


def on_host(modifiers: Modifiers, arrays: Mapping[str, Any]) -> Modified:
    """The same for the CPU backend, of canonical arrays."""
    return Modified(
        Scores(
            modifiers.softcap,
            modifiers.score_mod,
            modifiers.mask_mod,
            *(arrays.get(name) for name in ("alibi_slopes", "bias", "mask", "tree_mask")),
        ),
        modifiers.window,
        arrays.get("prefix_lens"),
        arrays.get("seqlens_k"),
        arrays.get("sinks"),
    )
