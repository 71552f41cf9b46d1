"""Random gradient calls by number, run by the library and compared with `gradient_oracle`.

A number says everything about a call. Calls of one *class* differ in values and lengths alone, so
that kernels are compiled once for all of them; consecutive numbers are of different classes.

One call that failed is run again by ``python -m support.gradient_cases NUMBER [cpu|gpu]`` in the
folder `tests`. The environment variable `FIRST_VARIABLE` shifts the numbers that tests run: there
are other calls, and other classes, from 3,000 on.
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
from support.gradient_oracle import (
    MASK_FUNCTIONS,
    SCORE_FUNCTIONS,
    OracleCall,
    attention,
    exact,
    naive,
)

FIRST_VARIABLE = "CUPY_FLASH_FIRST_GRADIENT_CASE"
FIRST = int(os.environ.get(FIRST_VARIABLE, "0"))
CLASSES, CALLS = 60, 50
# Scores beyond this are those of padding.
PADDING = 1e4

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
MODIFICATIONS = (
    "window",
    "softcap",
    "alibi",
    "bias",
    "mask",
    "prefix",
    "tree",
    "sinks",
    "score_mod",
    "mask_mod",
    "none",
)
HEADS = ((1, 1), (3, 3), (4, 2), (6, 2), (4, 1), (5, 1), (6, 3))
HEAD_DIMS = (5, 16, 33, 40, 64, 64, 80, 96, 128, 128, 192)
LONGEST = ((20, 90), (70, 130), (130, 250), (180, 70))
# Which axes of a bias or a mask are as long as those of the scores.
AXES = ((1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (1, 0, 0, 1), (1, 1, 1, 0))

# What `gradient_oracle` has by hand, as a user writes it.
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
    """What kernels are compiled for."""

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
    array_dtype: str  # of biases, sinks and captures
    is_padding_bias: bool
    has_lengths: bool  # seqlens_k or seqused_k
    has_offset: bool
    has_dlse: bool
    has_all_gradients: bool
    grad_dtype: str | None


def draw_class(number: int) -> Class:
    """A class of calls: all pairs of dtype and modification are among 44 of them."""
    rng = np.random.default_rng((1, number))

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    dtype = list(DTYPES)[number % len(DTYPES)]
    chosen = {MODIFICATIONS[number % len(MODIFICATIONS)]}
    chosen |= {str(x) for x in rng.choice(MODIFICATIONS, int(rng.integers(4)))}
    chosen -= {"none"}
    is_packed = chance(0.4) and "tree" not in chosen
    if is_packed:
        chosen -= {"tree"}
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
        score_mod=list(SCORE_MODS)[rng.integers(len(SCORE_MODS))],
        mask_mod=list(MASK_MODS)[rng.integers(len(MASK_MODS))],
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
    )


@dataclass
class Case:
    """One call: `oracle` holds its arrays, in the layout "bshd"."""

    number: int
    of: Class
    oracle: OracleCall
    max_seqlens: tuple[int, int]
    wrt: tuple[str, ...]

    def __str__(self) -> str:
        o = self.oracle
        shapes = {
            field.name: value.shape if isinstance(value, np.ndarray) else value
            for field in dataclasses.fields(o)
            if (value := getattr(o, field.name)) is not None and "captures" not in field.name
        }
        return f"call {self.number}, wrt {self.wrt}, {self.of}, {shapes}"


def draw(number: int) -> Case:
    """The call of a number."""
    of = draw_class(number % CLASSES + number // (CLASSES * CALLS) * CLASSES)
    return _Drawing(number, of).case()


class _Drawing:
    def __init__(self, number: int, of: Class) -> None:
        self.rng = np.random.default_rng((2, number))
        self.number, self.of = number, of
        self.dtype = DTYPES[of.dtype]
        self.wide = np.dtype(np.float64 if of.dtype == "float64" else np.float32)
        self.array_dtype = DTYPES[of.array_dtype]
        # Lengths of each sequence, and rows of packed arrays that belong to none.
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
        call = OracleCall(
            q=self.normal(*rows, heads_q, dim, dtype=self.dtype, size=size),
            k=self.normal(*keys, heads_kv, dim, dtype=self.dtype),
            v=self.normal(*keys, heads_kv, dim_v, dtype=self.dtype),
            dout=self.normal(*rows, heads_q, dim_v, dtype=self.dtype),
            causal=of.causal,
            scale=float(rng.choice([-1, 1]) * rng.uniform(0.5, 1.5) / np.sqrt(dim))
            if rng.random() < 0.3
            else None,
        )
        lse_shape = (heads_q, *rows) if of.is_packed else (self.batch, heads_q, rows[-1])
        if of.has_dlse:
            call.dlse = self.normal(*lse_shape, dtype=self.wide)
        if of.has_offset:
            difference = int(self.seqlens_k[0] - self.seqlens_q[0])
            call.q_offset = difference + int(rng.integers(-20, 21))
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
        if call.bias is not None and of.is_padding_bias:
            self.ignore_padded_rows(call)
        self.poison(call)
        names = ["q", "k", "v"]
        names += [name for name in ("bias", "sinks") if getattr(call, name) is not None]
        names += [f"score_mod.{n}" for n, x in call.captures.items() if x.dtype.kind != "i"]
        if not of.has_all_gradients:
            # Which ones is for the class to say: kernels are compiled for them.
            chosen = np.random.default_rng((3, self.number % CLASSES)).permutation(names)
            names = [str(name) for name in chosen[: max(1, len(names) // 2)]]
        longest = tuple(int(n.max(initial=0)) for n in (self.seqlens_q, self.seqlens_k))
        return Case(self.number, of, call, longest, tuple(names))

    def poison(self, call: OracleCall) -> None:
        """NaN where nothing may be read: padding, and rows of no sequence."""
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

    def ignore_padded_rows(self, call: OracleCall) -> None:
        """Let no loss depend on rows that see padding alone.

        Their log-sum-exp, -1e38 or so, has no digits left that tell how many keys they see.
        """
        ignored = attention(call, exact(self.dtype)).lse < -PADDING
        call.dout[ignored.swapaxes(1, 2)] = 0
        if call.dlse is not None:
            call.dlse[ignored] = 0

    def shape_of_pairs(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a bias or a mask."""
        of = self.of
        longest_k = int(self.seqlens_k.max(initial=0))
        if of.is_packed:
            total = int(self.seqlens_q.sum()) + self.spare[0]
            return (of.heads[0] if axes[1] else 1, total, longest_k)
        whole = (self.batch, of.heads[0], int(self.seqlens_q[0]), longest_k)
        return tuple(n if is_long else 1 for n, is_long in zip(whole, axes, strict=True))

    def add_window(self, call: OracleCall) -> None:
        left, right = (int(n) for n in self.rng.integers(0, 50, 2))
        has_left, has_right = self.of.window
        call.window = left if has_left else None, right if has_right else None

    def add_softcap(self, call: OracleCall) -> None:
        call.softcap = float(np.exp(self.rng.uniform(np.log(3), np.log(50))))

    def add_alibi(self, call: OracleCall) -> None:
        heads = self.of.heads[0]
        shape = (self.batch, heads) if self.of.slopes_of_batch else (heads,)
        call.alibi_slopes = self.rng.uniform(0.01, 0.5, shape).astype(self.wide)

    def add_bias(self, call: OracleCall) -> None:
        call.bias = self.normal(*self.shape_of_pairs(self.of.bias_axes))
        if self.of.is_padding_bias:
            # As models with padding masks have it.
            least = ml_dtypes.finfo(self.array_dtype).min
            shape = (self.batch, 1, 1, int(self.seqlens_k[0]))
            hidden = self.rng.random(shape) < self.rng.choice([0.1, 0.5, 1.0])
            call.bias = np.where(hidden, least, 0).astype(self.array_dtype)

    def add_mask(self, call: OracleCall) -> None:
        call.mask = self.rng.random(self.shape_of_pairs(self.of.mask_axes)) < 0.6

    def add_prefix(self, call: OracleCall) -> None:
        call.prefix_lens = self.rng.integers(0, self.seqlens_k + 3).astype(np.int32)

    def add_tree(self, call: OracleCall) -> None:
        shape = (self.batch, int(self.seqlens_q[0]))
        call.tree_mask = self.rng.integers(0, 2**64, shape, dtype=np.uint64)

    def add_sinks(self, call: OracleCall) -> None:
        call.sinks = self.normal(self.of.heads[0])

    def add_score_mod(self, call: OracleCall) -> None:
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

    def add_mask_mod(self, call: OracleCall) -> None:
        name, longest = self.of.mask_mod, int(self.seqlens_k.max(initial=0))
        call.mask_function = name
        if name == "documents":
            call.mask_captures["document"] = self.documents()
        elif name == "heads":
            start = self.rng.integers(0, longest + 1, self.of.heads[0])
            call.mask_captures["start"] = start.astype(np.int32)
        elif name == "times":
            steps = self.rng.integers(0, 9, (self.batch, longest + 1))
            # Float32 tells no two neighbours apart there.
            call.mask_captures["time"] = (1_700_000_000 + steps.cumsum(axis=1)).astype(np.int32)

    def documents(self) -> np.ndarray:
        shape = (self.batch, int(self.seqlens_k.max(initial=0)) + 1)
        return np.sort(self.rng.integers(0, 4, shape), axis=1).astype(np.int32)


class Difference(NamedTuple):
    """How far off a result is, and how far it may be."""

    name: str
    error: float
    allowed: float
    where: str


#: Units in the last place, at the largest true value, that a result may be off besides.
ULPS = 4


def compare(case: Case, xp: Any) -> list[Difference]:
    """All results of a call by the library on arrays of NumPy or CuPy, against the oracle.

    The error rule allows twice the error of the naive formula in the same precision, and `ULPS`
    units. The naive formula computes gradients from the output and the log-sum-exp under test: what
    the rounding of these does is no error of the gradients. It is the worse of two, by BLAS and by
    sums of one addend after the other, and in float32 and float64 a score of size s is known to s
    units at best: twice the largest log-sum-exp is added to `ULPS`. For few numbers, the error of
    one order of sums is luck. (Calls of 16 bits round P and dS by much more.)
    """
    call, dtype = case.oracle, case.oracle.q.dtype
    found = _run(case, xp)
    truth = attention(call, exact(dtype)).by_name()
    given = found["out"], found["lse"]
    orders = (False, True) if dtype.itemsize >= 4 else (False,)
    plain = [attention(call, naive(dtype, one_by_one=x), given).by_name() for x in orders]
    scores = abs(truth["lse"][abs(truth["lse"]) < PADDING]).max(initial=0)
    ulps = ULPS + (2 * float(scores) if dtype.itemsize >= 4 else 0)
    return [
        _difference(name, result, truth[name], [x[name] for x in plain], ulps)
        for name, result in found.items()
    ]


def _difference(
    name: str, result: np.ndarray, true: np.ndarray, plain: list[np.ndarray], ulps: float
) -> Difference:
    assert result.shape == true.shape, (name, result.shape, true.shape)
    if not result.size:
        return Difference(name, 0.0, 0.0, "")
    with np.errstate(over="ignore"):
        naive_errors = np.stack([_errors(x.astype(result.dtype), true) for x in plain])
    errors = _errors(result, true)
    largest = float(abs(true[np.isfinite(true)]).max(initial=0))
    info = ml_dtypes.finfo(result.dtype)
    # The mantissa of frexp is in [0.5, 1).
    ulp = float(info.eps) * math.ldexp(0.5, math.frexp(largest)[1]) if largest else 0.0
    allowed = 2 * float(naive_errors[np.isfinite(naive_errors)].max(initial=0))
    allowed += ulps * max(ulp, float(info.smallest_subnormal))
    worst = np.unravel_index(int(errors.argmax()), errors.shape)
    where = f"at {tuple(map(int, worst))} {result[worst]} instead of {true[worst]}"
    return Difference(name, float(errors[worst]), allowed, where)


def _errors(result: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Absolute differences: 0 where both are the same infinity, infinity where one is NaN."""
    wide = result.astype(true.dtype)
    with np.errstate(invalid="ignore"):
        difference = np.where(wide == true, 0, np.abs(wide - true))
    return np.where(np.isnan(difference), np.inf, difference)


def _run(case: Case, xp: Any) -> dict[str, np.ndarray]:
    """out, lse and the gradients of a call by the library; what it writes to is NaN before."""
    call, of = case.oracle, case.of
    is_bhsd = of.layout == "bhsd"

    def given(x: np.ndarray) -> Any:
        return xp.asarray(np.ascontiguousarray(x.swapaxes(1, 2)) if is_bhsd else x)

    def poisoned(like: Any, dtype: Any = None) -> Any:
        return xp.full(like.shape, np.nan, dtype or like.dtype)

    named: dict[str, Any] = {"causal": call.causal, "softmax_scale": call.scale}
    if not of.is_packed:
        named |= {"q_offset": call.q_offset, "layout": of.layout}
    arrays = ("prefix_lens", "seqlens_k", "alibi_slopes", "bias", "mask", "tree_mask", "sinks")
    for name in (*arrays, "seqused_k"):
        if (array := getattr(call, name)) is not None:
            named[name] = xp.asarray(array)
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
    forward: Any = cupy_flash.flash_attention
    backward: Any = cupy_flash.flash_attention_backward
    if of.is_packed:
        forward = cupy_flash.flash_attention_varlen
        backward = cupy_flash.flash_attention_varlen_backward
        starts = (xp.asarray(x) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
        lengths = (*starts, *case.max_seqlens)
    q, k, v, dout = (given(x) for x in (call.q, call.k, call.v, call.dout))
    out, lse = forward(q, k, v, *lengths, return_lse=True, out=poisoned(dout), **named)
    outputs = {
        f"d{name}": poisoned(x, of.grad_dtype)
        for name, x in (("q", q), ("k", k), ("v", v))
        if name in case.wrt
    }
    dlse = None if call.dlse is None else xp.asarray(call.dlse)
    more = {"dlse": dlse, "wrt": case.wrt, "grad_dtype": of.grad_dtype, **outputs}
    gradients = backward(dout, q, k, v, out, lse, *lengths, **more, **named)
    results = {"out": out, "lse": lse} | dict(zip(case.wrt, gradients, strict=True))
    found = {}
    for name, x in results.items():
        x = x if xp is np else xp.asnumpy(x)
        found[name] = x.swapaxes(1, 2) if is_bhsd and name in ("out", "q", "k", "v") else x
    return found


def check(number: int, xp: Any) -> None:
    """Fail unless all results of a call are as near to the oracle as the rule asks for."""
    case = draw(number)
    try:
        wrong = [x for x in compare(case, xp) if not x.error <= x.allowed]
    except Exception as error:
        raise AssertionError(f"{case}") from error
    assert not wrong, f"{'; '.join(map(str, wrong))}: {case}"


assert set(SCORE_MODS) == set(SCORE_FUNCTIONS)
assert set(MASK_MODS) == set(MASK_FUNCTIONS)


if __name__ == "__main__":
    if sys.argv[2:] == ["gpu"]:
        import cupy

        check(int(sys.argv[1]), cupy)
    else:
        check(int(sys.argv[1]), np)
