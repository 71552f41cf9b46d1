"""Modifications of every kind, also random ones, and pairs to evaluate them for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from cupy_flash.mods.base import Modification
from cupy_flash.mods.ir.expression import REAL
from cupy_flash.mods.modification import MaskMod, ScoreMod

Drawn = TypeVar("Drawn")

BATCH, HEADS, KEYS = 3, 4, 96
SEED = np.random.default_rng(8)


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return SEED.standard_normal(shape).astype(dtype)


def numbers(*shape: int, below: int, dtype: Any = np.int32) -> np.ndarray:
    return SEED.integers(0, below, shape).astype(dtype)


def bucket_bias(score: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Add the position bias of T5, with 32 buckets up to a distance of 128."""
    distance = np.maximum(i - j, 0)
    far = 16 + (np.log(np.maximum(distance, 1) / 16) / np.log(128 / 16) * 16).astype(np.int32)
    bucket = np.where(distance < 16, distance, np.minimum(far, 31))
    return score + table[bucket, h]


def neighbours(i: Any, j: Any, width: Any) -> Any:
    """Return whether two pixels are at most 2 rows and 3 columns apart."""
    return (np.abs(i // width - j // width) <= 2) & (np.abs(i % width - j % width) <= 3)


def tree(b: Any, i: Any, j: Any, words: Any, first: Any) -> Any:
    bit = (words[b, i - first] >> (j - first).astype(np.uint64)) & 1
    return (j < first) | (bit != 0)


SCORES = {
    "softcap": ScoreMod(lambda score: 30 * np.tanh(score / 30)),
    "softcap of a captured cap": ScoreMod(lambda score, cap: cap * np.tanh(score / cap), cap=20.0),
    "alibi": ScoreMod(
        lambda score, h, i, j, slope: score - slope[h] * np.abs(i - j), slope=floats(HEADS)
    ),
    "alibi of causal": ScoreMod(
        lambda score, b, h, i, j, slope: score + slope[b, h] * (j - i), slope=floats(BATCH, HEADS)
    ),
    "buckets": ScoreMod(bucket_bias, table=floats(32, HEADS, dtype=np.float16)),
    "table of clipped distances": ScoreMod(
        lambda score, h, i, j, table: score * 0.5 + table[h, np.clip(i - j, -8, 8) + 8],
        table=floats(HEADS, 17, dtype=ml_dtypes.bfloat16),
    ),
    "bias": ScoreMod(
        lambda score, b, h, i, j, bias: score + bias[b, h, i, j],
        bias=floats(BATCH, HEADS, KEYS, KEYS, dtype=np.float64).swapaxes(2, 3),
    ),
    "bias shared by strides of 0": ScoreMod(
        lambda score, b, i, j, bias: score + bias[b, i, j],
        bias=np.broadcast_to(floats(KEYS, KEYS), (BATCH, KEYS, KEYS)),
    ),
    "backwards array": ScoreMod(
        lambda score, j, bias: score + bias[j], bias=floats(2 * KEYS)[::-2]
    ),
    "where": ScoreMod(lambda score, i, j: np.where(i - j > 7, score - 2, -np.inf)),
    "bool and bytes": ScoreMod(
        lambda score, j, flags, bytes: np.where(flags[j], score, score + bytes[j] * 2),
        flags=numbers(KEYS, below=2, dtype=bool),
        bytes=numbers(KEYS, below=256, dtype=np.uint8),
    ),
    "captured numbers": ScoreMod(
        lambda score, i, j, on, shift, factor: np.where(on, score, 0) + factor * (j - i + shift),
        on=True,
        shift=-3,
        factor=0.3,
    ),
    "array without axes": ScoreMod(
        lambda score, j, scale: score * scale + j, scale=np.array(0.25, np.float16)
    ),
    "functions": ScoreMod(
        lambda score, i, j: (
            np.exp(-np.abs(score))
            + np.exp2(score / 4)
            + np.sqrt(np.square(score) + 1)
            + np.log1p(score * score)
            + np.log2(2 + np.abs(score))
            + np.log10(2 + np.abs(score))
            + np.expm1(score / 8)
            + np.sin(score) * np.cos(score)
            + score**3
            + np.abs(score) ** 1.5
            + (2 + score * score) ** -2
            + np.sign(score)
            + np.log(i * i + 1)
        )
    ),
    "rounding": ScoreMod(
        lambda score: np.floor(score) + np.ceil(score) * 2 + np.rint(score) + np.trunc(score) / 2
    ),
    "quotients of reals": ScoreMod(
        lambda score: (score + 0.13) // 0.7 + (score + 0.13) % -0.7 + score / (2 + score * score)
    ),
    "powers of integers": ScoreMod(lambda score, i, j: score + (i - j) ** 2 + (i - j) ** 3 * 0.5),
    "halves of positions": ScoreMod(lambda score, i, j: score * (i / 2 - j / 3 + 0.1)),
    "nothing": ScoreMod(lambda score: score),
    "a number": ScoreMod(lambda score: 2),
    "text": ScoreMod(
        lambda score, h, i, j, table, cap: np.minimum(score, cap) + table[h, i - j + 40],
        table=floats(HEADS, 80),
        cap=1.5,
        cuda="const Real low = mod_min(score, cap); return low + table(h, i - j + 40);",
    ),
}

MASKS = {
    "causal documents": MaskMod(
        lambda b, i, j, doc: (doc[b, i] == doc[b, j]) & (j <= i),
        doc=numbers(BATCH, KEYS, below=4, dtype=np.int64),
    ),
    "window": MaskMod(lambda i, j, w: (i - w <= j) & (j <= i + 2), w=9),
    "prefix": MaskMod(
        lambda b, i, j, prefix: (j <= i) | (j < prefix[b]), prefix=numbers(BATCH, below=KEYS)
    ),
    "dilated": MaskMod(lambda i, j: (j <= i) & ((i - j) % 4 == 0)),
    "dilated by 3": MaskMod(lambda i, j: ((j - i) % 3 == 1) | ((i - j) // 5 == -2)),
    "by a captured number": MaskMod(lambda i, j, n: ((j - i) % n == 1) & ((i - j) // n < 2), n=-7),
    "by 0": MaskMod(lambda i, j, n: ((j - i) % n == 0) & ((i - j) // n == 0), n=0),
    "image": MaskMod(lambda i, j: neighbours(i, j, 14)),
    "image of captured width": MaskMod(neighbours, width=14),
    "tree": MaskMod(tree, words=SEED.integers(0, 2**64, (BATCH, 40), np.uint64), first=KEYS - 40),
    "words": MaskMod(
        lambda i, j, word: (
            (((word ^ (word << 3)) >> (j % 64).astype(np.uint64)) % 3 == 1)
            | (word.astype(np.int32) // 2**20 == i)
        ),
        word=np.array(0x9E3779B97F4A7C15, np.uint64),
    ),
    "each sign of a factor": MaskMod(
        lambda i, j: (2 * j - i < 40) ^ (i - 3 * j >= -50) ^ (-j > i - 90) ^ (4 * j != 4 * i + 8)
    ),
    "logic": MaskMod(
        lambda i, j: np.logical_or(np.logical_not(i > j), np.logical_xor(i & 1, j & 2)) == (j > 5)
    ),
    "scalars of NumPy": MaskMod(
        lambda i, j: np.logical_and(np.int64(5) <= i - j, np.float32(20.5) >= i - j)
    ),
    "shifts": MaskMod(
        lambda i, j: ((1 << (j % 40)) & 0x5555 != 0) ^ ((i - j) >> 2 > 3) ^ (i >> (j - 30) == 0)
    ),
    "packed": MaskMod(
        lambda i, j, q_start, k_start, ids: ids[q_start + i] == ids[k_start + j],
        ids=numbers(2 * KEYS, below=3, dtype=np.uint8),
    ),
    "none": MaskMod(lambda: False),
    "all": MaskMod(lambda b, h, i, j: True),
    "no finite number": MaskMod(
        lambda i, j, x: np.isnan(x[j]) | np.isinf(x[i]) & ~np.isfinite(x[j - i]),
        x=SEED.choice([1.0, np.nan, np.inf, -np.inf], KEYS),
    ),
    "text": MaskMod(lambda i, j: j <= i, cuda="if (i < 0) { return false; }\nreturn j <= i;"),
}

GALLERY: dict[str, Modification] = {**SCORES, **{f"mask, {name}": MASKS[name] for name in MASKS}}


# Negations of j, or of j rounded down to a multiple of eight; `t` holds 0, 1, 2, ...
NEGATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "-j": lambda j, t: -j,
    "0 - j": lambda j, t: 0 - j,
    "j * -1": lambda j, t: j * -1,
    "-t[j]": lambda j, t: -t[j],
    "0 - t[j]": lambda j, t: 0 - t[j],
    "-abs(t[j])": lambda j, t: -abs(t[j]),
    "t[j] * -1": lambda j, t: t[j] * -1,
    "t[j] // 8 * -8": lambda j, t: t[j] // 8 * -8,
    "-(t[j] >> 3 << 3)": lambda j, t: -(t[j] >> 3 << 3),
}


def pairs(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Return positions inside and outside of all captured arrays, and steps from a first key."""
    i = rng.integers(-20, KEYS + 30, count, np.int32)
    columns = {
        "b": rng.integers(0, BATCH, count, np.int32),
        "h": rng.integers(0, HEADS, count, np.int32),
        "i": i,
        "row": i - 7,
        "q_start": rng.integers(0, 50, count, np.int32),
        "k_start": rng.integers(0, 50, count, np.int32),
        "step": rng.integers(0, 64, count, np.int32),
        "first_key": rng.integers(0, KEYS - 30, count, np.int32),
    }
    columns["j"] = columns["first_key"] + columns["step"]
    return columns


def random_text(rng: np.random.Generator, kind: str, depth: int) -> str:
    """Return Python text of a random bool, int or real expression; real ones are continuous."""

    def of(kind: str) -> str:
        return random_text(rng, kind, depth - 1)

    n = int(rng.integers(2, 9))
    if kind == "bool":
        sign = rng.choice(["<", "<=", ">", ">=", "==", "!="])
        options = [lambda: f"({of('int')} {sign} {of('int')})"]
        if depth > 1:
            options += [
                lambda: f"({of('bool')} {rng.choice(['&', '|', '^', '==', '!='])} {of('bool')})",
                lambda: f"~{of('bool')}",
                lambda: f"np.where({of('bool')}, {of('bool')}, {of('bool')})",
            ]
    elif kind == "int" and depth <= 1:
        options = [
            lambda: str(rng.choice(["i", "j", "j", "i - j", "h", "b", "n", f"np.int32({n})"])).join(
                "()"
            )
        ]
    elif kind == "int":
        options = [
            lambda: f"({of('int')} {rng.choice(['+', '-'])} {of('int')})",
            lambda: f"({of('int')} {rng.choice(['+', '-', '*', '//', '%'])} {n})",
            lambda: f"({of('int')} {rng.choice(['//', '%', '&', '|', '^'])} {of('int')})",
            lambda: f"np.{rng.choice(['minimum', 'maximum'])}({of('int')}, {of('int')})",
            lambda: f"np.where({of('bool')}, {of('int')}, {of('int')})",
            lambda: f"abs({of('int')})",
            lambda: f"-{of('int')}",
            lambda: f"ids[{of('int')} + h, {of('int')} - b]",
        ]
    elif depth <= 1:
        options = [lambda: "score", lambda: f"{n / 8}", lambda: f"({of('int')} / {n})"]
    else:
        options = [
            lambda: f"({of('real')} {rng.choice(['+', '-'])} {of('real')})",
            lambda: f"({of('real')} {rng.choice(['*', '/'])} {n})",
            lambda: f"({of('int')} * 0.125 - {of('real')})",
            lambda: f"(factor[{of('int')} + h] * {of('int')})",
            lambda: f"(np.tanh({of('real')}) * {rng.choice([str(n), 'factor[h]'])})",
            lambda: f"np.exp2(-abs({of('real')}))",
            lambda: f"np.{rng.choice(['minimum', 'maximum'])}({of('real')}, {of('int')})",
            lambda: f"np.where({of('bool')}, {of('real')}, {of('real')})",
        ]
    return str(options[int(rng.integers(len(options)))]())


def drawn(draw: Callable[[], Drawn]) -> Drawn:
    """Draw until no index is a negative constant, which tracing refuses."""
    while True:
        try:
            return draw()
        except ValueError as error:
            if "is indexed with" not in str(error):
                raise


def random_mod(rng: np.random.Generator) -> Modification:
    if rng.integers(2):
        return random_score_mod(rng)

    def draw() -> MaskMod:
        text = random_text(rng, "bool", 4)
        return MaskMod(eval(f"lambda b, h, i, j, n, ids: {text}", {"np": np}), **_captures(rng))

    return drawn(draw)


def random_score_mod(rng: np.random.Generator) -> ScoreMod:
    """Return a random score function with gradients of its captured float array."""

    def draw() -> ScoreMod:
        text = random_text(rng, "real", 4)
        function = eval(f"lambda score, b, h, i, j, n, ids, factor: {text}", {"np": np})
        given = _captures(rng) | {"factor": floats(KEYS)}
        return ScoreMod(function, differentiable=("factor",), **given)

    return drawn(draw)


def _captures(rng: np.random.Generator) -> dict[str, Any]:
    return {"n": int(rng.integers(-9, 9)), "ids": numbers(8, KEYS, below=7)}


def with_gradients(mod: ScoreMod) -> ScoreMod:
    """Return the same score function with gradients of all captured float arrays."""
    names = [name for name, spec in mod.specs.items() if spec.rank is not None]
    reals = [name for name in names if mod.specs[name].type == REAL]
    return ScoreMod(mod.function, cuda=mod.cuda, differentiable=reals, **mod.captures)
