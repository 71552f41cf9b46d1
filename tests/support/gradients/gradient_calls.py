"""Random backward calls: their arguments and true results.

`gradient_rule.check_gradients` compares the results of calls with the true ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import cupy_flash
from cupy_flash import attention_backward_reference, attention_varlen_backward_reference
from cupy_flash.cpu.forward_pass import compute_dtype
from cupy_flash.reference.dense import attention_reference
from cupy_flash.reference.gradients import ScoreErrors, backward_naive, gradient_sizes
from cupy_flash.reference.packed import attention_varlen_reference, packed_sequences
from cupy_flash.reference.packed_gradients import backward_varlen_naive, gradient_varlen_sizes
from support.calls.modified_calls import DTYPES, LONGEST, ModifiedCall, random_call

KINDS = ("dense", "padded", "varlen")
HEAD_DIMS = (1, 5, 8, 24, 32, 64, 72, 80, 96, 128, 160, 192, 256)
# Sizes of calls whose results are compared with difference quotients.
SMALL: dict[str, Any] = {"head_dims": range(1, 9), "longest": (9, 17)}
ROWS = ("q", "k", "v")
OF_MOD = "score_mod."
# Captures of the gallery's functions that have gradients.
DIFFERENTIABLE = {"table": ("table",), "gain": ("gain", "shift")}
# Reference, naive formula and sizes of gradients, of dense calls and of packed ones.
REFERENCES = {
    False: (attention_backward_reference, backward_naive, gradient_sizes),
    True: (attention_varlen_backward_reference, backward_varlen_naive, gradient_varlen_sizes),
}
# Memory layouts of arrays, see `placed`; results do not use the last one.
PLACES = ("contiguous", "sliced", "odd", "swapped", "reversed")
PLACES_OF_RESULTS = PLACES[:4]


class GradientTruth(NamedTuple):
    """True gradients, and what their error bounds depend on, by the names of the inputs.

    `exact`, `naive` and `sizes` are arguments of `gradient_bound`. `score_errors` are the errors of
    gradients due to errors of scores, see `GradientCall.score_errors`. `lse` is the log-sum-exp of
    the reference. With sinks, it is that of the keys alone if its magnitude is larger: scores are
    that large, however little probability the sink leaves to them.
    """

    exact: Mapping[str, np.ndarray]
    naive: Mapping[str, np.ndarray]
    sizes: Mapping[str, np.ndarray]
    score_errors: Mapping[str, np.ndarray]
    lse: np.ndarray


class Part(NamedTuple):
    """Elements with a separate error bound, as an index into each named gradient and into lse."""

    of: Mapping[str, Any]
    lse: Any


UNSPLIT = Part({}, ...)


def placed(array: np.ndarray, place: str, xp: Any) -> Any:
    """Return a NumPy or CuPy array with the same values in a memory layout, padded with NaN.

    An array with a stride of 0 keeps it in every layout. `place` is "contiguous"; "sliced", columns
    of a wider array; "odd", rows without any alignment; "swapped", with the rows and heads axes
    exchanged; or "reversed", with rows in reverse order.
    """
    if 0 in array.strides and array.size:
        once = array[tuple(slice(1) if s == 0 else slice(None) for s in array.strides)]
        return xp.broadcast_to(xp.asarray(np.ascontiguousarray(once)), array.shape)
    if place == "contiguous":
        return xp.asarray(array)
    *outer, rows, heads, dim = array.shape
    whole: Any
    if place == "swapped":
        whole = xp.empty((*outer, heads, rows, dim), array.dtype).swapaxes(-3, -2)
    elif place == "reversed":
        whole = xp.empty(array.shape, array.dtype)[..., ::-1, :, :]
    else:
        before, after = (16, 16) if place == "sliced" else (1, 2)
        around = xp.full((*outer, rows, heads, before + dim + after), np.nan, array.dtype)
        whole = around[..., before : before + dim]
    whole[...] = xp.asarray(array)
    return whole


@dataclass
class GradientCall:
    """One backward call, with arrays in host memory.

    `places` has the memory layouts of q, k, v, dout, dq, dk and dv; contiguous if not named.
    """

    forward: ModifiedCall  # forward call whose gradients are requested
    dout: np.ndarray  # gradient of its output
    dlse: np.ndarray | None = None  # gradient of its log-sum-exp
    wrt: tuple[str, ...] | None = None  # inputs whose gradients are requested; None: the default
    grad_dtype: str | None = None  # dtype of the gradients, or None for that of each input
    places: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "" if self.dlse is None else " dlse"
        places = f"dout's strides {self.dout.strides}, places {self.places}"
        return f"{self.forward}, wrt {self.wrt}, in {self.grad_dtype}{more}, {places}"

    @property
    def is_packed(self) -> bool:
        return self.forward.kind == "varlen"

    @property
    def equal_addends(self) -> int:
        """Number of equal addends whose sum a gradient is; 0 if the addends differ."""
        rows, heads = -3, -2
        if self.forward.options.get("layout") == "bhsd":
            rows, heads = heads, rows
        if self.forward.options.get("softmax_scale") != 0:
            return 0
        # Rows that belong to no sequence are NaN.
        dout = np.moveaxis(self.dout, rows, 0)
        if not ((dout == dout[:1]) | np.isnan(dout)).all():
            return 0
        group = self.dout.shape[heads] // self.forward.arrays["k"].shape[heads]
        return self.dout.shape[rows] * group

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the gradients that the call returns, in order."""
        return (*ROWS, *self._captures) if self.wrt is None else self.wrt

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Arrays that have gradients, by name."""
        found = {n: x for n, x in self.forward.arrays.items() if n in (*ROWS, "bias", "sinks")}
        return found | self._captures

    @property
    def _captures(self) -> dict[str, np.ndarray]:
        _, captures = self.forward.mods.get("score_mod", ("", {}))
        return {OF_MOD + name: captures[name] for name in captures.get("differentiable", ())}

    def given(self, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the public function, as arrays of `xp`.

        The arrays that gradients are written to are missing, see `results_for`.
        """
        (_, _, _, *lengths), named = self._given(xp)
        if self.grad_dtype is not None:
            named["grad_dtype"] = self.grad_dtype
        arrays = self.forward.arrays | {"dout": self.dout}
        dout, q, k, v = (
            placed(arrays[name], self.places.get(name, "contiguous"), xp)
            for name in ("dout", *ROWS)
        )
        out, lse = (xp.asarray(x) for x in self.results)
        return (dout, q, k, v, out, lse, *lengths), named

    def results_for(self, xp: Any) -> dict[str, Any]:
        """Return arrays of NaN for the requested gradients of q, k and v, as arguments."""
        found = {}
        for name in (name for name in self.names if name in ROWS):
            poisoned = np.full(self.inputs[name].shape, np.nan, self.dtype_of(name))
            found[f"d{name}"] = placed(poisoned, self.places.get(f"d{name}", "contiguous"), xp)
        return found

    def _given(self, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments after dout that the library and the reference have in common."""
        positional, named = self.forward.given(xp)
        if self.dlse is not None:
            named["dlse"] = xp.asarray(self.dlse)
        if self.wrt is not None:
            named["wrt"] = self.wrt
        return positional, named

    @functools.cached_property
    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """Exact output and lse of the forward call, rounded to their dtypes."""
        out, lse = self.exact_results()
        dtype = self.forward.arrays["q"].dtype
        return out.astype(dtype), lse.astype(np.float64 if dtype == np.float64 else np.float32)

    def exact_results(self, **changed: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return output and lse of the float64 reference, perhaps with some options changed."""
        positional, named = self.forward.given(np)
        if self.is_packed:
            return attention_varlen_reference(*positional, **named | changed)
        return attention_reference(*positional, **named | changed, return_lse=True)

    def run(self, xp: Any, **how: Any) -> dict[str, np.ndarray]:
        """Return the library's gradients by name, in host memory; dq, dk and dv start as NaN."""
        positional, named = self.given(xp)
        outputs = self.results_for(xp)
        kind = "flash_attention_varlen" if self.is_packed else "flash_attention"
        backward = getattr(cupy_flash, f"{kind}_backward")
        gradients = backward(*positional, **named, **outputs, **how)
        found = dict(zip(self.names, gradients, strict=True))
        for name, array in outputs.items():
            assert found[name[1:]] is array, f"{name} is not what is returned: {self}"
        return found if xp is np else {name: xp.asnumpy(x) for name, x in found.items()}

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Return the dtype of the gradient of an input."""
        return self.inputs[name].dtype if self.grad_dtype is None else DTYPES[self.grad_dtype]

    @functools.cached_property
    def truth(self) -> GradientTruth:
        """True gradients of the call, with data for their error bounds."""
        (q, k, v, *lengths), named = self._given(np)
        of_naive = {"out": self.results[0], "grad_dtype": self.grad_dtype}
        reference, naive, sizes = REFERENCES[self.is_packed]
        of_errors = {"errors": self.score_errors}
        each = ((reference, {}), (naive, of_naive), (sizes, {}), (sizes, of_errors))
        found = (function(self.dout, q, k, v, *lengths, **named, **more) for function, more in each)
        by_name = (dict(zip(self.names, x, strict=True)) for x in found)
        lse = self.exact_results()[1]
        if "sinks" in named:
            _, of_keys = self.exact_results(sinks=None)
            larger = np.abs(of_keys) > np.abs(lse)
            lse = np.where(larger & np.isfinite(of_keys), of_keys, lse)
        return GradientTruth(*by_name, lse)

    @property
    def score_errors(self) -> ScoreErrors:
        """Errors of scores and slopes in the compute precision.

        A scaled score is the sum of n products. If they are added one by one, each partial sum is
        rounded by about 0.3 ulps. These errors grow as sqrt(n), so the sum is off by about eps / 4
        times the sum of absolute values, and so is the reference in float64. The largest error of a
        million scores is five times as much: 5 * sqrt(2) / 4 < 2 eps.

        In bfloat16, kernels use the hardware's tanh with a relative error of 2^-11; otherwise it is
        4 eps. A capped score has the same relative error, and is at most the scaled score or the
        cap. The slope 1 - tanh^2 is off by 2 tanh * 2^-11 tanh <= 2^-10, however small it is. The
        gallery's functions of a capped score have slopes of at most 1.5.
        """
        name = self.forward.mods.get("score_mod", ("",))[0]
        tanhs = (name == "tanh") + ("softcap" in self.forward.options)
        eps = float(np.finfo(compute_dtype(DTYPES[self.forward.dtype])).eps)
        of_tanh = 2.0**-11 if self.forward.dtype == "bfloat16" else 4 * eps
        error = tanhs * of_tanh * (1.5 if name == "gain" else 1)
        caps = self.forward.caps()
        return ScoreErrors(2 * eps, lambda x: error * np.minimum(abs(x), caps), 2 * error)

    @functools.cached_property
    def unseen(self) -> dict[str, np.ndarray]:
        """Elements with a gradient of 0: rows without keys, keys without rows, unused bias."""
        _, lse = self.exact_results(sinks=None)
        # The lse of rows that belong to no sequence is NaN.
        blind = ~(lse > -np.inf)
        if self.is_packed or self.forward.options.get("layout", "bshd") == "bshd":
            blind = blind.swapaxes(-1, -2)
        (q, k, v, *lengths), named = self._given(np)
        named["wrt"] = ("v", "bias") if "bias" in named else ("v",)
        # A row attends to a key although its weight is dropped.
        named["dropout_p"] = 0
        _, _, sizes = REFERENCES[self.is_packed]
        of_v, *of_bias = sizes(np.ones_like(self.dout), q, k, v, *lengths, **named)
        hidden = (of_v == 0).all(axis=-1)
        bias = [(name, of_bias[0] == 0) for name in named["wrt"][1:]]
        return dict([("q", blind), ("k", hidden), ("v", hidden), *bias])

    @functools.cached_property
    def parts(self) -> list[Part]:
        """Sequences of the call, each of which has separate error bounds."""
        (q, k, _, *lengths), named = self._given(np)
        if not self.is_packed:
            return [Part(dict.fromkeys(ROWS, b), b) for b in range(len(q))]
        sequences = packed_sequences(q, k, *lengths, seqused_k=named.get("seqused_k"))
        return [
            Part({"q": queries, "k": keys, "v": keys}, (slice(None), queries))
            for queries, keys, _ in sequences
        ]


def random_gradient_call(
    rng: np.random.Generator,
    dtype: str,
    kind: str,
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    longest: tuple[int, int] = LONGEST,
    sizes: np.random.Generator | None = None,
    dropout: bool = True,
) -> GradientCall:
    """Return a backward call with one to four modifications, and perhaps with dropout.

    Padding keys and rows that belong to no sequence are NaN. Arrays have random memory layouts, and
    dout and dlse may have strides of 0. `kind` is one of `KINDS`; for the options see
    `random_call`.
    """
    sizes = rng if sizes is None else sizes
    forward = random_call(
        *(rng, dtype, kind),
        few_rows=bool(rng.integers(4) == 0),
        head_dims=head_dims,
        longest=longest,
        empty=bool(rng.integers(4) == 0),
        sizes=sizes,
        dropout=dropout,
    )
    arrays, options = forward.arrays, forward.options
    if kind == "varlen":
        _add_rows_of_none(forward, rng, sizes)
    elif kind == "padded":
        for b, length in enumerate(arrays["seqlens_k"]):
            arrays["k"][b, length:] = arrays["v"][b, length:] = np.nan
    name, captures = forward.mods.get("score_mod", ("", {}))
    if name in DIFFERENTIABLE:
        captures["differentiable"] = DIFFERENTIABLE[name]
    if kind != "varlen" and rng.integers(4) == 0:
        options["layout"] = "bhsd"
        for name in ROWS:
            arrays[name] = np.ascontiguousarray(arrays[name].swapaxes(1, 2))
    q, v = arrays["q"], arrays["v"]
    dout = _of_results(rng, sizes, (*q.shape[:-1], v.shape[-1]), q.dtype)
    dlse = None
    if rng.integers(2):
        rows = q.shape[:-1]
        if options.get("layout") != "bhsd":
            rows = (*rows[:-2], rows[-1], rows[-2])
        dlse = _of_results(rng, sizes, rows, np.float64 if dtype == "float64" else np.float32)
    if kind == "varlen" and rng.integers(2):
        rows_of_none = slice(int(arrays["cu_seqlens_q"][-1]), None)
        dout = dout.copy()
        dout[rows_of_none] = np.nan
        if dlse is not None:
            dlse = dlse.copy()
            dlse[:, rows_of_none] = np.nan
    call = GradientCall(forward, dout, dlse)
    if rng.integers(2):
        names = list(call.inputs)
        chosen = rng.permutation(names)[: rng.integers(1, len(names) + 1)]
        call.wrt = tuple(str(name) for name in chosen)
    if dtype in ("float16", "bfloat16") and rng.integers(4) == 0:
        call.grad_dtype = "float32"
    if rng.integers(2):
        call.places = {name: str(rng.choice(PLACES)) for name in (*ROWS, "dout")}
        call.places |= {f"d{name}": str(rng.choice(PLACES_OF_RESULTS)) for name in ROWS}
    return call


def smooth_gradient_call(rng: np.random.Generator, kind: str) -> GradientCall:
    """Return a random small call whose score function is differentiable everywhere."""
    while True:
        call = random_gradient_call(rng, "float64", kind, **SMALL)
        if call.forward.mods.get("score_mod", ("",))[0] != "relu":
            return call


def _of_results(
    rng: np.random.Generator, sizes: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """Return a gradient of results, perhaps broadcast like that of a sum over some axes."""
    kind = rng.integers(6)
    own = tuple(1 if kind == 0 or (kind == 1 and rng.integers(2)) else n for n in shape)
    return np.broadcast_to(sizes.standard_normal(own).astype(dtype), shape)


def _add_rows_of_none(
    forward: ModifiedCall, rng: np.random.Generator, sizes: np.random.Generator
) -> None:
    """Add rows after the last packed sequence, and perhaps keys after those that are used."""
    arrays = forward.arrays
    for name, spare in zip(
        ROWS, (*sizes.integers(0, 4, 1), *[sizes.integers(0, 4)] * 2), strict=True
    ):
        shape = (spare, *arrays[name].shape[1:])
        filler = np.full(shape, np.nan, arrays[name].dtype)
        arrays[name] = np.concatenate([arrays[name], filler])
    total_q = len(arrays["q"])
    for name in ("bias", "mask"):
        if name in arrays and arrays[name].shape[1] != 1:
            missing = total_q - arrays[name].shape[1]
            arrays[name] = np.pad(arrays[name], ((0, 0), (0, missing), (0, 0)))
    if rng.integers(3) == 0:
        starts = arrays["cu_seqlens_k"]
        used = sizes.integers(0, np.diff(starts) + 1).astype(np.int32)
        arrays["seqused_k"] = used
        for start, stop in zip(starts[:-1] + used, starts[1:], strict=True):
            arrays["k"][start:stop] = arrays["v"][start:stop] = np.nan
