"""Directions in which calls are differentiated, and magnitudes that bound errors of tangents."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_flash import MaskMod, ScoreMod

OF_MOD = "score_mod."
# Step of difference quotients.
STEP = 1e-4


def tangents_of(arrays: Any, rng: np.random.Generator) -> list[np.ndarray]:
    """Return a random direction; it is NaN where the arrays are, as padding is."""
    found = [rng.standard_normal(x.shape).astype(x.dtype) for x in arrays]
    for tangent, array in zip(found, arrays, strict=True):
        tangent[np.isnan(array)] = np.nan
    return found


def size_of(x: np.ndarray) -> float:
    """Return the largest finite magnitude, at least 1."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=1))


def moving_modifications(options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the modifications of a call that may have tangents, by the names of `wrt`."""
    names = ("bias", "sinks", "alibi_slopes")
    found = {name: options[name] for name in names if isinstance(options.get(name), np.ndarray)}
    mod = options.get("score_mod")
    captures = () if mod is None else mod.differentiable
    return found | {OF_MOD + name: mod.captures[name] for name in captures}


def moved(options: dict[str, Any], tangents: dict[str, np.ndarray], step: float) -> dict[str, Any]:
    """Return the options of a call after a step of its modifications along their tangents."""
    result = dict(options)
    for name in tangents.keys() & options.keys():
        result[name] = options[name] + step * tangents[name]
    if "score_mod" in options:

        def change(name: str, array: np.ndarray) -> np.ndarray:
            tangent = tangents.get(OF_MOD + name)
            return array if tangent is None else array + step * tangent

        result["score_mod"] = options["score_mod"].with_arrays(change)
    return result


def arrays_of_rows(rng: np.random.Generator) -> list[np.ndarray]:
    """Return q, k and v that fit `every_modification`."""
    return [rng.standard_normal((2, n, h, 8)) for n, h in ((7, 4), (11, 2), (11, 2))]


def every_modification(rng: np.random.Generator) -> dict[str, Any]:
    """Return options of a dense call with most modifications at once."""
    return {
        "causal": True,
        "window_size": (3, None),
        "prefix_lens": [2, 0],
        "q_offset": [3, 5],
        "softcap": 3.0,
        "softmax_scale": 0.6,
        "alibi_slopes": rng.random(4),
        "bias": rng.standard_normal((2, 1, 7, 11)),
        "mask": rng.random((1, 4, 7, 11)) < 0.8,
        "sinks": rng.standard_normal(4),
        "dropout_p": 0.25,
        "dropout_seed": [5, 1],
        "score_mod": ScoreMod(
            lambda score, h, j, gain, shift: gain[h] * score * score + np.sin(score) * shift[j],
            gain=rng.random(4),
            shift=rng.standard_normal(11),
            differentiable=("gain", "shift"),
        ),
        "mask_mod": MaskMod(lambda i, j: (i + j) % 4 != 1),
    }


def random_arrays(
    rng: np.random.Generator, seqlens: tuple[int, int] = (11, 23), dtype: Any = np.float64
) -> list[np.ndarray]:
    """Return q, k, v and their tangents: batch 2, 4 query heads, 2 KV heads, dims 8 and 5."""
    shapes = [(seqlens[0], 4, 8), (seqlens[1], 2, 8), (seqlens[1], 2, 5)] * 2
    return [rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes]


def magnitudes(x: np.ndarray, options: dict[str, Any], heads: int | None = None) -> np.ndarray:
    """Return magnitudes (batch, heads, seqlen, dim) in float64, with KV heads repeated.

    The magnitude of padding, which is NaN, is 0. Packed arrays count as one sequence.
    """
    found = np.nan_to_num(np.abs(x.astype(np.float64)))
    found = found[None] if found.ndim == 3 else found
    if options.get("layout") != "bhsd":
        found = found.swapaxes(1, 2)
    return found if heads is None else found.repeat(heads // found.shape[1], 1)


def largest_product(inputs: Any, options: dict[str, Any]) -> float:
    """Return the largest sum of magnitudes of the products that add up to a scaled score."""
    q = magnitudes(inputs[0], options)
    k = magnitudes(inputs[1], options, q.shape[1])
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    return float(scale * (q @ k.swapaxes(2, 3)).max(initial=0))
