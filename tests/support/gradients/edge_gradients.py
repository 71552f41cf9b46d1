"""Backward calls in which rows attend to one key or none, or no row attends to some keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash import MaskMod, flash_attention, flash_attention_backward
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gradients.gradient_calls import GradientCall

BATCH, HEADS, HEADS_KV = 2, 4, 2
ALL = slice(None)


class EdgeCall(NamedTuple):
    """Dense call: its sizes, options, and special rows and keys.

    `hidden` has the names of the arrays that may hold NaN in `rows` and `keys`. With a bias, q and
    k may not: a bias masks a pair by adding -inf to its score, and NaN plus -inf is NaN.
    """

    seqlen_q: int
    seqlen_k: int
    options: Mapping[str, Any]
    rows: slice = slice(0)  # queries that attend to one key or none
    keys: slice = slice(0)  # keys that no query attends to
    hidden: tuple[str, ...] = ("q", "k", "v", "dout")

    def arrays(
        self, dtype: str, head_dim: int, rng: Any, size_of_q: float = 1.0
    ) -> dict[str, np.ndarray]:
        """Return random q, k, v and dout in host memory, with q multiplied by `size_of_q`."""
        shapes = {"q": (self.seqlen_q, HEADS), "k": (self.seqlen_k, HEADS_KV)}
        shapes |= {"v": shapes["k"], "dout": shapes["q"]}
        found = {n: rng.standard_normal((BATCH, *s, head_dim)) for n, s in shapes.items()}
        found["q"] *= size_of_q
        return {name: array.astype(DTYPES[dtype]) for name, array in found.items()}

    def forward(self, arrays: Mapping[str, np.ndarray], xp: Any, **where: Any) -> tuple[Any, ...]:
        """Return the output and the log-sum-exp."""
        found: tuple[Any, ...] = cupy_flash.flash_attention(
            *(xp.asarray(arrays[n]) for n in "qkv"),
            return_lse=True,
            **self._options(arrays, xp),
            **where,
        )
        return found

    def backward(
        self, arrays: Mapping[str, np.ndarray], results: tuple[Any, ...], xp: Any, **where: Any
    ) -> list[np.ndarray]:
        """Return dq, dk and dv for the results of `forward`, in host memory."""
        found = cupy_flash.flash_attention_backward(
            *(xp.asarray(arrays[n]) for n in ("dout", *"qkv")),
            *results,
            **self._options(arrays, xp),
            **where,
        )
        return [x if xp is np else x.get() for x in found]

    def _options(self, arrays: Mapping[str, np.ndarray], xp: Any) -> dict[str, Any]:
        """Return the options, with float arrays in float64 if `arrays` are float64."""
        real = np.float64 if arrays["q"].dtype == np.float64 else np.float32
        found = dict(self.options)
        for name, value in self.options.items():
            if isinstance(value, np.ndarray):
                found[name] = xp.asarray(value.astype(real) if value.dtype.kind == "f" else value)
        return found

    def poisoned(self, arrays: Mapping[str, np.ndarray], value: float) -> dict[str, np.ndarray]:
        """Return copies of the arrays with a value in the elements of `rows` and `keys`."""
        found = {name: array.copy() for name, array in arrays.items()}
        for name in self.hidden:
            found[name][:, self.rows if name in ("q", "dout") else self.keys] = value
        return found


def _one_key_of_each(rng: Any, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Return a random mask with one visible key per row."""
    shape = (BATCH, HEADS, seqlen_q)
    keys = rng.integers(0, seqlen_k, shape)
    seen: np.ndarray = np.arange(seqlen_k) == keys[..., None]
    return seen


def _bias(seen: np.ndarray, rng: Any) -> np.ndarray:
    found: np.ndarray = np.where(seen, rng.standard_normal(seen.shape), -np.inf)
    return found.astype(np.float32)


def _slopes() -> np.ndarray:
    return np.linspace(0.1, 1, HEADS).astype(np.float32)


def _prefix() -> dict[str, np.ndarray]:
    return {"prefix_lens": np.ones(BATCH, np.int32)}


# Calls in which rows attend to one key, by the way in which the other keys are masked.
ONE_KEY: dict[str, Callable[[Any], EdgeCall]] = {
    "causal": lambda rng: EdgeCall(150, 150, {"causal": True}, slice(1)),
    "key": lambda rng: EdgeCall(150, 1, {}, ALL),
    "window": lambda rng: EdgeCall(150, 150, {"window_size": (0, 0)}, ALL),
    "end of a window": lambda rng: EdgeCall(
        150, 90, {"window_size": (10, 0), "q_offset": -49}, slice(49, 50)
    ),
    "window and softcap": lambda rng: EdgeCall(
        150, 150, {"window_size": (0, 0), "softcap": 20.0, "alibi_slopes": _slopes()}, ALL
    ),
    "mask": lambda rng: EdgeCall(150, 200, {"mask": _one_key_of_each(rng, 150, 200)}, ALL),
    "bias": lambda rng: EdgeCall(
        150, 200, {"bias": _bias(_one_key_of_each(rng, 150, 200), rng)}, ALL
    ),
    "bias and softcap": lambda rng: EdgeCall(
        150, 200, {"bias": _bias(_one_key_of_each(rng, 150, 200), rng), "softcap": 20.0}, ALL
    ),
    "function": lambda rng: EdgeCall(
        150, 150, {"mask_mod": MaskMod(lambda b, h, i, j: i == j)}, ALL
    ),
    # All keys come before the window of every row, but the first key is in a prefix.
    "window and prefix": lambda rng: EdgeCall(
        *(150, 90, {"causal": True, "window_size": (10, 0), "q_offset": 200} | _prefix()), ALL
    ),
}


def _hidden(rng: Any, seqlen_q: int, seqlen_k: int, rows: slice, keys: slice) -> np.ndarray:
    """Return a random mask that hides these rows and keys, and a tenth of the other pairs."""
    seen: np.ndarray = rng.random((BATCH, HEADS, seqlen_q, seqlen_k)) < 0.9
    seen[:, :, rows], seen[..., keys] = False, False
    return seen


def _masked(rng: Any, **more: Any) -> EdgeCall:
    rows, keys = slice(70, 100), slice(3, 150, 7)
    return EdgeCall(150, 200, {"mask": _hidden(rng, 150, 200, rows, keys)} | more, rows, keys)


def _biased(rng: Any, **more: Any) -> EdgeCall:
    call = _masked(rng)
    options = {"bias": _bias(call.options["mask"], rng)} | more
    return call._replace(options=options, hidden=("v", "dout"))


def _function_and_bias(rng: Any) -> EdgeCall:
    """Return a call with whole tiles in which the function masks nothing, but a bias does."""
    rows, seqlen = slice(70, 100), 256
    bias = _bias(_hidden(rng, seqlen, seqlen, rows, slice(0)), rng)
    options = {"bias": bias, "mask_mod": MaskMod(lambda b, h, i, j: i // 128 == j // 128)}
    return EdgeCall(seqlen, seqlen, options, rows, hidden=("v", "dout"))


# Calls in which some rows attend to no key, or no row attends to some keys.
NONE: dict[str, Callable[[Any], EdgeCall]] = {
    "rows before the first key": lambda rng: EdgeCall(192, 152, {"causal": True}, slice(40)),
    "keys behind the last row": lambda rng: EdgeCall(
        150, 200, {"causal": True, "q_offset": 0}, keys=slice(150, None)
    ),
    "window": lambda rng: EdgeCall(
        150, 200, {"window_size": (10, 0), "q_offset": 70}, slice(140, None), slice(60)
    ),
    "mask": _masked,
    "mask and sinks": lambda rng: _masked(rng, sinks=_slopes()),
    "mask and softcap": lambda rng: _masked(rng, softcap=20.0),
    "bias": _biased,
    "bias and softcap": lambda rng: _biased(rng, softcap=20.0),
    "function": lambda rng: EdgeCall(
        150,
        200,
        {"mask_mod": MaskMod(lambda b, h, i, j: (i >= 90) & (j % 7 != 3))},
        slice(40),
        slice(3, None, 7),
    ),
    "function and bias": _function_and_bias,
}


def mask_pairs(bias: np.ndarray) -> None:
    """Mask pairs of at least 290 rows by a bias of -inf, in place.

    Row 7 then attends to no key, rows 150 to 289 attend to one key, and some tiles have no visible
    pair.
    """
    bias[np.random.default_rng(1).random(bias.shape) < 0.4] = -np.inf
    bias[:, :, 7] = -np.inf
    bias[:, :, 150:290, 1:] = -np.inf
    bias[:, :, 150:290, 0] = 0


def confident_call(dtype: str, head_dim: int, rng: Any) -> GradientCall:
    """Return a call whose rows have most of their weight on one key each, up to all but 2^-45.

    Its mask hides nothing, but makes kernels look for rows that attend to one key only.
    """
    rows, keys = 300, 130
    k, v = rng.standard_normal((2, BATCH, keys, HEADS_KV, head_dim))
    own = np.repeat(k[:, rng.integers(0, keys, rows)], HEADS // HEADS_KV, axis=2)
    # The scaled score of the row's chosen key exceeds the others by about this gap.
    gaps = np.linspace(2, 32, rows)[:, None, None]
    q = own * gaps * np.sqrt(head_dim) / (own**2).sum(-1, keepdims=True)
    dout = rng.standard_normal(q.shape)
    arrays = {"q": q, "k": k, "v": v}
    arrays = {name: x.astype(DTYPES[dtype]) for name, x in arrays.items()}
    arrays["mask"] = np.ones((1, 1, rows, keys), bool)
    return GradientCall(ModifiedCall("dense", dtype, arrays, {}), dout.astype(DTYPES[dtype]))


def large_scores_of_one_key(dtype: str, head_dim: int, rng: Any) -> dict[str, np.ndarray]:
    """Return arrays for `ONE_KEY["key"]` in which every scaled score is about 40."""
    arrays = ONE_KEY["key"](rng).arrays("float64", head_dim, rng)
    k = np.repeat(arrays["k"], HEADS // HEADS_KV, axis=2)
    arrays["q"][:] = 40 * np.sqrt(head_dim) * k / (k**2).sum(-1, keepdims=True)
    return {name: array.astype(DTYPES[dtype]) for name, array in arrays.items()}


# Low bias values, as of padding, and high ones. 1e15 leaves too few digits in float64, too.
EXTREME_SCORES = (-1e6, -1e9, -1e15, -1e30, float(np.finfo(np.float32).min), 1e9, 1e30)


def has_no_digits(score: float, dtype: str) -> bool:
    """Return whether a log-sum-exp of such a size has too few digits for probabilities."""
    return abs(score) > (2.0**49 if dtype == "float64" else 2.0**20) * np.log(2)


def gradients_of_padding(
    rng: np.random.Generator, xp: Any, dtype: str, head_dim: int, score: float, **how: Any
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return dq, dk and dv of a call with rows of extreme scores, and those with dout 0 there."""
    shapes = {"q": (2, 70, 2, head_dim), "k": (2, 90, 2, head_dim)}
    shapes |= {"v": shapes["k"], "dout": shapes["q"]}
    given = {n: xp.asarray(rng.standard_normal(s).astype(DTYPES[dtype])) for n, s in shapes.items()}
    wide = np.float64 if dtype == "float64" else np.float32
    bias = np.where(rng.random((2, 1, 70, 90)) < 0.5, min(score, 0), 0).astype(wide)
    bias[0, :, :20] = bias[1, :, 69] = score
    q, k, v, dout = given.values()
    options = {"bias": xp.asarray(bias)}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    zeroed = dout.copy()
    zeroed[0, :20] = zeroed[1, 69] = 0
    both = (
        flash_attention_backward(x, q, k, v, out, lse, wrt=("q", "k", "v"), **options, **how)
        for x in (dout, zeroed)
    )
    first, second = (tuple(x if xp is np else x.get() for x in found) for found in both)
    return first, second
