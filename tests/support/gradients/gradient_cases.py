"""Random gradient calls by number, run by the library and compared with `gradient_oracle`.

A number determines a call. Calls of one *class* differ only in values and lengths, so that kernels
are compiled once for all of them. Consecutive numbers are of different classes.

``python -m support.gradients.gradient_cases NUMBER [cpu|gpu]`` in the folder `tests`
runs one call, such as one that failed, again. The environment variable `FIRST_VARIABLE`
shifts the numbers that tests run: numbers from 3,000 on are other calls of other classes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupy_flash
from cupy_flash import MaskMod, ScoreMod
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES
from support.gradients import gradient_oracle

FIRST_VARIABLE = "CUPY_FLASH_FIRST_GRADIENT_CASE"
FIRST = int(os.environ.get(FIRST_VARIABLE, "0"))
CLASSES, CALLS = 60, 50
# Scores of larger magnitude are those of padding.
PADDING = 1e4

MODIFICATIONS = (
    *("window", "softcap", "alibi", "bias", "mask", "prefix", "tree", "sinks"),
    *("score_mod", "mask_mod", "none"),
)
HEADS = ((1, 1), (3, 3), (4, 2), (6, 2), (4, 1), (5, 1), (6, 3))
HEAD_DIMS = (5, 16, 33, 40, 64, 64, 80, 96, 128, 128, 192)
LONGEST = ((20, 90), (70, 130), (130, 250), (180, 70))
# Which axes of a bias or a mask have the length of the scores' axes (1); the others have length 1.
AXES = ((1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 1, 0))

# Functions as a user writes them; `gradient_oracle` has them with hand-written derivatives.
SCORE_MODS: dict[str, Any] = {
    "softer": lambda score: 20 * np.tanh(score / 20),
    "square": lambda score: score + score * score / 16,
    "logarithm": lambda score: np.log1p(score * score),
    "documents": lambda score, b, i, j, document: np.where(
        document[b, i] == document[b, j], score, score / 2
    ),
    "table": lambda score, h, i, j, table: score + table[h, i - j + 8],
    "gain": lambda score, b, h, j, gain, shift: score * gain[h] + shift[b, j],
    "distance": lambda score, h, i, j, rate: score - rate[h] * np.abs(i - j),
    "decay": lambda score, h, i, j, rate: score + np.exp(-rate[h] * np.abs(i - j)),
    "product": lambda score, h, j, of_head, of_key: score * of_head[h] * of_key[j],
}
MASK_MODS: dict[str, Any] = {
    "documents": lambda b, i, j, document: document[b, i] == document[b, j],
    "strided": lambda i, j: (i - j) % 3 == 0,
    "blocks": lambda i, j: (i // 16 == j // 16) | (j < 4),
    "heads": lambda h, i, j, start: (j >= start[h]) | (i < 0),
    "some rows": lambda i, j: (i % 5 != 0) & (j >= 0),
    "times": lambda b, i, j, time: np.abs(time[b, i] - time[b, j]) <= 40,
}


@dataclass(frozen=True)
class Class:
    """Properties of a call that kernels are compiled for."""

    dtype: str
    is_packed: bool
    causal: bool
    layout: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    longest: tuple[int, int]
    modifications: frozenset[str]
    score_mod: str
    mask_mod: str
    window: tuple[bool, bool]
    slopes_of_batch: bool
    bias_axes: tuple[int, ...]
    mask_axes: tuple[int, ...]
    array_dtype: str  # dtype of biases, sinks and captures
    is_padding_bias: bool
    has_lengths: bool  # whether a call has seqlens_k or seqused_k
    has_offset: bool
    has_dlse: bool
    has_all_gradients: bool
    grad_dtype: str | None
    offsets_differ: bool
    has_dropout: bool


def draw_class(number: int) -> Class:
    """Return a class of calls. The first 44 classes have all pairs of dtype and modification."""
    # With this seed, the first classes include every function.
    rng = np.random.default_rng((2001, number))

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    dtype = list(DTYPES)[number % len(DTYPES)]
    chosen = {MODIFICATIONS[number % len(MODIFICATIONS)]}
    chosen |= {str(x) for x in rng.choice(MODIFICATIONS, int(rng.integers(4)))}
    chosen -= {"none"}
    is_packed = chance(0.4) and "tree" not in chosen
    dim = int(rng.choice(HEAD_DIMS))
    wide = "float64" if dtype == "float64" else "float32"
    return Class(
        dtype=dtype,
        is_packed=is_packed,
        causal=chance(0.5) or "prefix" in chosen,
        layout="bhsd" if chance(0.25) and not is_packed else "bshd",
        heads=HEADS[rng.integers(len(HEADS))],
        head_dims=(dim, dim if chance(0.75) else int(rng.choice(HEAD_DIMS))),
        longest=(60, 130) if "tree" in chosen else LONGEST[rng.integers(len(LONGEST))],
        modifications=frozenset(chosen),
        score_mod=list(SCORE_MODS)[number % len(SCORE_MODS)],
        mask_mod=list(MASK_MODS)[number % len(MASK_MODS)],
        window=((True, False), (False, True), (True, True))[rng.integers(3)],
        slopes_of_batch=chance(0.5),
        bias_axes=AXES[rng.integers(len(AXES))],
        mask_axes=AXES[rng.integers(len(AXES))],
        array_dtype=dtype if chance(0.5) else wide,
        is_padding_bias=chance(0.25) and not is_packed,
        has_lengths=chance(0.3),
        has_offset=chance(0.3) and not is_packed,
        has_dlse=chance(0.5),
        has_all_gradients=chance(0.7),
        grad_dtype="float32" if dtype in ("float16", "bfloat16") and chance(0.25) else None,
        offsets_differ=chance(0.25),
        has_dropout=chance(0.25),
    )


@dataclass
class Case:
    """One call: `oracle` holds its arrays, in the layout "bshd"."""

    number: int
    of: Class
    oracle: gradient_oracle.OracleCall
    max_seqlens: tuple[int, int]
    wrt: tuple[str, ...]

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Return the dtype of the gradient of an input."""
        if self.of.grad_dtype is not None:
            return DTYPES[self.of.grad_dtype]
        return self.oracle.inputs[name].dtype

    def __str__(self) -> str:
        o = self.oracle
        shapes = {
            field.name: value.shape if isinstance(value, np.ndarray) else value
            for field in dataclasses.fields(o)
            if (value := getattr(o, field.name)) is not None and "captures" not in field.name
        }
        return f"call {self.number}, wrt {self.wrt}, {self.of}, {shapes}"


def draw(number: int) -> Case:
    """Return the call of a number."""
    of = draw_class(number % CLASSES + number // (CLASSES * CALLS) * CLASSES)
    return _Drawing(number, of).case()


class _Drawing:
    def __init__(self, number: int, of: Class) -> None:
        self.rng = np.random.default_rng((2, number))
        self.number, self.of = number, of
        self.dtype = DTYPES[of.dtype]
        self.wide = np.dtype(np.float64 if of.dtype == "float64" else np.float32)
        self.array_dtype = DTYPES[of.array_dtype]
        # Lengths of the sequences, and numbers of rows of packed arrays that belong to no sequence.
        rng = self.rng
        self.batch = int(rng.integers(1, 5 if of.is_packed else 4))
        longest_q, longest_k = of.longest
        if of.is_packed:
            lengths = (rng.integers(0, n + 1, self.batch) for n in of.longest)
            self.seqlens_q, self.seqlens_k = lengths
            self.spare = tuple(int(n) for n in rng.integers(0, 4, 2))
        else:
            self.seqlens_q = np.full(self.batch, rng.integers(1, longest_q + 1))
            self.seqlens_k = np.full(self.batch, rng.integers(1, longest_k + 1))
            self.spare = (0, 0)

    def normal(self, *shape: int, dtype: Any = None, size: float = 1.0) -> np.ndarray:
        return (self.rng.normal(size=shape) * size).astype(dtype or self.array_dtype)

    def case(self) -> Case:
        of, rng = self.of, self.rng
        heads_q, heads_kv = of.heads
        dim, dim_v = of.head_dims
        rows, keys = (
            (self.batch, int(n[0])) if not of.is_packed else (int(n.sum()) + spare,)
            for n, spare in zip((self.seqlens_q, self.seqlens_k), self.spare, strict=True)
        )
        size = float(np.exp(rng.uniform(-1, 0.7)))
        call = gradient_oracle.OracleCall(
            q=self.normal(*rows, heads_q, dim, dtype=self.dtype, size=size),
            k=self.normal(*keys, heads_kv, dim, dtype=self.dtype),
            v=self.normal(*keys, heads_kv, dim_v, dtype=self.dtype),
            dout=self.normal(*rows, heads_q, dim_v, dtype=self.dtype),
            causal=of.causal,
        )
        if rng.random() < 0.3:
            call.scale = float(rng.choice([-1, 1]) * rng.uniform(0.5, 1.5) / np.sqrt(dim))
        lse_shape = (heads_q, *rows) if of.is_packed else (self.batch, heads_q, rows[-1])
        if of.has_dlse:
            call.dlse = self.normal(*lse_shape, dtype=self.wide)
        if of.has_offset:
            difference = int(self.seqlens_k[0] - self.seqlens_q[0])
            call.q_offset = difference + int(rng.integers(-20, 21))
        if of.offsets_differ:
            offsets = rng.integers(-20, self.seqlens_k + 20)
            call.q_offset, call.q_offsets = None, offsets.astype(np.int32)
        if of.is_packed:
            call.cu_seqlens_q, call.cu_seqlens_k = (
                np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
                for n in (self.seqlens_q, self.seqlens_k)
            )
        if of.has_lengths:
            used = rng.integers(0, self.seqlens_k + 1).astype(np.int32)
            if of.is_packed:
                call.seqused_k = used
            else:
                call.seqlens_k = used
        for name in sorted(of.modifications):
            getattr(self, f"add_{name}")(call)
        if of.has_dropout:
            seed, offset = rng.integers(-(2**63), 2**63, 2).tolist()
            call.dropout = float(rng.choice([0.1, 0.5, rng.uniform(0, 1)])), seed, offset
        if call.bias is not None and of.is_padding_bias:
            self.ignore_padded_rows(call)
        self.poison(call)
        names = [name for name, array in call.inputs.items() if array.dtype.kind != "i"]
        if not of.has_all_gradients:
            # The class determines the gradients, because kernels are compiled for them.
            chosen = np.random.default_rng((3, self.number % CLASSES)).permutation(names)
            names = [str(name) for name in chosen[: max(1, len(names) // 2)]]
        longest = tuple(int(n.max(initial=0)) for n in (self.seqlens_q, self.seqlens_k))
        return Case(self.number, of, call, longest, tuple(names))

    def poison(self, call: gradient_oracle.OracleCall) -> None:
        """Write NaN where nothing may be read: padding, rows of no sequence, some masked rows."""
        nan = float("nan")
        if call.seqlens_k is not None:
            for b, n in enumerate(call.seqlens_k):
                call.k[b, n:] = call.v[b, n:] = nan
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            end_q, end_k = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_k[-1])
            call.q[end_q:] = call.dout[end_q:] = call.k[end_k:] = call.v[end_k:] = nan
            if call.dlse is not None:
                call.dlse[:, end_q:] = nan
        if call.seqused_k is not None and call.cu_seqlens_k is not None:
            for b, used in enumerate(call.seqused_k):
                first, end = (int(n) for n in call.cu_seqlens_k[b : b + 2])
                call.k[first + int(used) : end] = call.v[first + int(used) : end] = nan
        if self.rng.random() < 0.5:
            blind, hidden = gradient_oracle.unseen(call)
            of_query = np.moveaxis(blind, -1, -2)
            call.q[of_query] = call.dout[of_query] = call.k[hidden] = nan
            if call.dlse is not None and call.sinks is None:
                call.dlse[blind] = nan

    def ignore_padded_rows(self, call: gradient_oracle.OracleCall) -> None:
        """Set dout and dlse of rows that attend to padding only to 0.

        The log-sum-exp of such a row, about -1e38, has no digits left for the number of keys.
        """
        ignored = gradient_oracle.attention(call, gradient_oracle.exact(self.dtype)).lse < -PADDING
        call.dout[ignored.swapaxes(1, 2)] = 0
        if call.dlse is not None:
            call.dlse[ignored] = 0

    def shape_of_pairs(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a bias or a mask."""
        of = self.of
        longest_k = int(self.seqlens_k.max(initial=0))
        if of.is_packed:
            total = int(self.seqlens_q.sum()) + self.spare[0]
            return (of.heads[0] if axes[1] else 1, total, longest_k)
        whole = (self.batch, of.heads[0], int(self.seqlens_q[0]), longest_k)
        return tuple(n if is_long else 1 for n, is_long in zip(whole, axes, strict=True))

    def add_window(self, call: gradient_oracle.OracleCall) -> None:
        left, right = (int(n) for n in self.rng.integers(0, 50, 2))
        has_left, has_right = self.of.window
        call.window = left if has_left else None, right if has_right else None

    def add_softcap(self, call: gradient_oracle.OracleCall) -> None:
        call.softcap = float(np.exp(self.rng.uniform(np.log(3), np.log(50))))

    def add_alibi(self, call: gradient_oracle.OracleCall) -> None:
        heads = self.of.heads[0]
        shape = (self.batch, heads) if self.of.slopes_of_batch else (heads,)
        call.alibi_slopes = self.rng.uniform(0.01, 0.5, shape).astype(self.wide)

    def add_bias(self, call: gradient_oracle.OracleCall) -> None:
        call.bias = self.normal(*self.shape_of_pairs(self.of.bias_axes))
        if self.of.is_padding_bias:
            # The bias is that of models with padding masks.
            least = ml_dtypes.finfo(self.array_dtype).min
            shape = (self.batch, 1, 1, int(self.seqlens_k[0]))
            hidden = self.rng.random(shape) < self.rng.choice([0.1, 0.5, 1.0])
            call.bias = np.where(hidden, least, 0).astype(self.array_dtype)

    def add_mask(self, call: gradient_oracle.OracleCall) -> None:
        call.mask = self.rng.random(self.shape_of_pairs(self.of.mask_axes)) < 0.6

    def add_prefix(self, call: gradient_oracle.OracleCall) -> None:
        call.prefix_lens = self.rng.integers(0, self.seqlens_k + 3).astype(np.int32)

    def add_tree(self, call: gradient_oracle.OracleCall) -> None:
        shape = (self.batch, int(self.seqlens_q[0]))
        call.tree_mask = self.rng.integers(0, 2**64, shape, dtype=np.uint64)

    def add_sinks(self, call: gradient_oracle.OracleCall) -> None:
        call.sinks = self.normal(self.of.heads[0])

    def add_score_mod(self, call: gradient_oracle.OracleCall) -> None:
        heads, name = self.of.heads[0], self.of.score_mod
        longest = int(self.seqlens_k.max(initial=0))
        rng = self.rng
        call.score_function = name
        if name == "documents":
            call.captures["document"] = self.documents()
        elif name == "table":
            call.captures["table"] = self.normal(heads, 17)
        elif name == "gain":
            call.captures["gain"] = rng.uniform(0.5, 1.5, heads).astype(self.array_dtype)
            call.captures["shift"] = self.normal(self.batch, longest // 2 + 1)
        elif name in ("distance", "decay"):
            call.captures["rate"] = rng.uniform(0.01, 0.3, heads).astype(self.array_dtype)
        elif name == "product":
            call.captures["of_head"] = rng.uniform(0.5, 1.2, heads).astype(self.array_dtype)
            call.captures["of_key"] = rng.uniform(0.5, 1.2, longest + 1).astype(self.array_dtype)

    def add_mask_mod(self, call: gradient_oracle.OracleCall) -> None:
        name, longest = self.of.mask_mod, int(self.seqlens_k.max(initial=0))
        call.mask_function = name
        if name == "documents":
            call.mask_captures["document"] = self.documents()
        elif name == "heads":
            start = self.rng.integers(0, longest + 1, self.of.heads[0])
            call.mask_captures["start"] = start.astype(np.int32)
        elif name == "times":
            steps = self.rng.integers(0, 9, (self.batch, longest + 1))
            # Float32 cannot tell neighbouring numbers of this size apart.
            call.mask_captures["time"] = (1_700_000_000 + steps.cumsum(axis=1)).astype(np.int32)

    def documents(self) -> np.ndarray:
        shape = (self.batch, int(self.seqlens_k.max(initial=0)) + 1)
        return np.sort(self.rng.integers(0, 4, shape), axis=1).astype(np.int32)


class Difference(NamedTuple):
    """Largest error of a result, and the largest that is allowed."""

    name: str
    error: float
    allowed: float
    where: str


#: Additional error that is allowed, in units in the last place of the largest true value.
ULPS = 4


def compare(case: Case, xp: Any) -> list[Difference]:
    """Compare all results of a call on arrays of NumPy or CuPy with the oracle.

    A result may be off by the sum of

    - twice the error of the naive formula in the same precision. It computes gradients from the
      output and the log-sum-exp under test, as their rounding is not an error of the gradients;
    - `ULPS` units of its dtype, or of the call's dtype if this has 16 bits, as float32 gradients of
      such a call are sums of products of 16-bit numbers;
    - in float32 and float64, ``ULPS + 2 s`` units of the result without cancellation, where s is
      the size of the scores, also without cancellation. Such a score, a sum of products and of
      what modifications add, is known to s units at best, and the naive error of few numbers may
      happen to be small. (In 16 bits the rounding of P and dS is larger, and the naive formula has
      it, too.)
    - in 16 bits with a softcap, the error of its tanh times the cap in the log-sum-exp: bfloat16
      kernels use the hardware's tanh with an error of 2^-11, and float16 kernels have 2^-22.

    Kernels store scores times log2(e), so a log-sum-exp below ln 2 times the lowest number counts
    as equal to this product.
    """
    call, dtype = case.oracle, case.oracle.q.dtype
    found = _run(case, xp)
    truth = gradient_oracle.attention(call, gradient_oracle.exact(dtype)).by_name()
    with np.errstate(all="ignore"):
        # If the results under test are wrong, this may give any numbers.
        plain = gradient_oracle.attention(
            call, gradient_oracle.naive(dtype), (found["out"], found["lse"])
        ).by_name()
    sizes = gradient_oracle.attention(call, gradient_oracle.SIZES).by_name()
    # A row with a padded key has a size beyond PADDING, but its lse may be that of other keys.
    of_rows = np.concatenate([sizes["lse"].ravel(), abs(truth["lse"]).ravel()])
    score = of_rows[of_rows < PADDING].max(initial=0)
    differences = []
    for name, result in found.items():
        true = truth[name]
        assert result.shape == true.shape, (name, result.shape, true.shape)
        assert name not in case.wrt or result.dtype == case.dtype_of(name), (name, result.dtype)
        with np.errstate(all="ignore"):
            naive_errors = _errors(plain[name].astype(result.dtype), true)
        allowed = 2 * float(naive_errors[np.isfinite(naive_errors)].max(initial=0))
        allowed += ULPS * _ulp(dtype if name in ("q", "k", "v") else result.dtype, true)
        if name == "lse":
            lowest = -math.log(2) * float(ml_dtypes.finfo(result.dtype).max)
            is_lowest = (true < lowest) & np.isfinite(true) & np.isclose(result, lowest, 1e-6, 0)
            result = np.where(is_lowest, true.astype(result.dtype), result)
            if dtype.itemsize == 2 and call.softcap is not None:
                allowed += call.softcap * (2.0**-22 if dtype == np.float16 else 2.0**-11)
        if dtype.itemsize >= 4 or name == "lse":
            size = sizes[name]
            if name == "lse":
                size = np.where(size < PADDING, size, 0)
            allowed += (ULPS + 2 * float(score)) * _ulp(result.dtype, size)
        errors = _errors(result, true)
        where = "of no elements"
        if result.size:
            worst = np.unravel_index(int(errors.argmax()), errors.shape)
            where = f"at {tuple(map(int, worst))} {result[worst]} instead of {true[worst]}"
        differences.append(Difference(name, float(errors.max(initial=0)), allowed, where))
    return differences


def _ulp(dtype: np.dtype[Any], x: np.ndarray) -> float:
    """Return the unit in the last place of a dtype at the largest finite magnitude in `x`."""
    info = ml_dtypes.finfo(dtype)
    largest = float(abs(x[np.isfinite(x)]).max(initial=0))
    # The mantissa of frexp is in [0.5, 1).
    ulp = float(info.eps) * math.ldexp(0.5, math.frexp(largest)[1]) if largest else 0.0
    return max(ulp, float(info.smallest_subnormal))


def _errors(result: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return absolute differences: 0 for equal infinities, infinity if either number is NaN."""
    with np.errstate(all="ignore"):
        wide = result.astype(true.dtype)
        difference = np.where(wide == true, 0, np.abs(wide - true))
    return np.where(np.isnan(difference), np.inf, difference)


def arguments(case: Case, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a backward call, except out and lse, as arrays of `xp`.

    The first positional argument is dout. The keyword arguments dlse and wrt are for the backward
    call only.
    """
    call, of = case.oracle, case.of

    def given(x: np.ndarray) -> Any:
        return xp.asarray(np.ascontiguousarray(x.swapaxes(1, 2)) if of.layout == "bhsd" else x)

    named: dict[str, Any] = {"causal": call.causal, "softmax_scale": call.scale, "wrt": case.wrt}
    if not of.is_packed:
        named |= {"q_offset": call.q_offset, "layout": of.layout}
    if call.q_offsets is not None:
        named["q_offset"] = xp.asarray(call.q_offsets)
    arrays = ("prefix_lens", "seqlens_k", "alibi_slopes", "bias", "mask", "tree_mask", "sinks")
    for name in (*arrays, "seqused_k", "dlse"):
        if (array := getattr(call, name)) is not None:
            named[name] = xp.asarray(array)
    if call.dropout is not None:
        named["dropout_p"], *seed = call.dropout
        named["dropout_seed"] = xp.asarray(np.array(seed))
    if call.window != (None, None):
        named["window_size"] = call.window
    if call.softcap is not None:
        named["softcap"] = call.softcap
    if call.score_function is not None:
        captures = {name: xp.asarray(x) for name, x in call.captures.items()}
        real = tuple(name for name, x in call.captures.items() if x.dtype.kind != "i")
        function = SCORE_MODS[call.score_function]
        named["score_mod"] = ScoreMod(function, differentiable=real, **captures)
    if call.mask_function is not None:
        captures = {name: xp.asarray(x) for name, x in call.mask_captures.items()}
        named["mask_mod"] = MaskMod(MASK_MODS[call.mask_function], **captures)
    lengths: tuple[Any, ...] = ()
    if of.is_packed:
        starts = (xp.asarray(x) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
        lengths = (*starts, *case.max_seqlens)
    return (*(given(x) for x in (call.dout, call.q, call.k, call.v)), *lengths), named


def _run(case: Case, xp: Any) -> dict[str, np.ndarray]:
    """Return out, lse and gradients by the library, from arrays that hold NaN before the call."""
    of = case.of
    forward: Any = cupy_flash.flash_attention
    backward: Any = cupy_flash.flash_attention_backward
    if of.is_packed:
        forward = cupy_flash.flash_attention_varlen
        backward = cupy_flash.flash_attention_varlen_backward
    (dout, q, k, v, *lengths), named = arguments(case, xp)
    poisoned = xp.full(dout.shape, np.nan, dout.dtype)
    of_forward = {name: x for name, x in named.items() if name not in ("wrt", "dlse")}
    out, lse = forward(q, k, v, *lengths, return_lse=True, out=poisoned, **of_forward)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if name in case.wrt:
            named[f"d{name}"] = xp.full(x.shape, np.nan, of.grad_dtype or x.dtype)
    gradients = backward(dout, q, k, v, out, lse, *lengths, grad_dtype=of.grad_dtype, **named)
    results = {"out": out, "lse": lse} | dict(zip(case.wrt, gradients, strict=True))
    found = {}
    for name, x in results.items():
        on_host = x if xp is np else xp.asnumpy(x)
        is_swapped = of.layout == "bhsd" and name in ("out", "q", "k", "v")
        found[name] = on_host.swapaxes(1, 2) if is_swapped else on_host
    return found


def check(number: int, xp: Any) -> None:
    """Fail unless all errors of a call are within the bounds of `compare`."""
    case = draw(number)
    try:
        wrong = [x for x in compare(case, xp) if not x.error <= x.allowed]
    except Exception as error:
        raise AssertionError(f"{case}") from error
    assert not wrong, f"{'; '.join(map(str, wrong))}: {case}"


assert set(SCORE_MODS) == set(gradient_oracle.SCORE_FUNCTIONS)
assert set(MASK_MODS) == set(gradient_oracle.MASK_FUNCTIONS)


if __name__ == "__main__":
    check(int(sys.argv[1]), cupy if sys.argv[2:] == ["gpu"] else np)
