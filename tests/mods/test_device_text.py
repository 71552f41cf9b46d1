"""What device text computes, run on the host, beside the Python function on arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_text import Text, compiled_for_host

from cupy_flash.mods.modification import MaskMod, Modification, ScoreMod

BATCH, HEADS, KEYS = 3, 4, 96
SEED = np.random.default_rng(8)


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return SEED.standard_normal(shape).astype(dtype)


def numbers(*shape: int, below: int, dtype: Any = np.int32) -> np.ndarray:
    return SEED.integers(0, below, shape).astype(dtype)


def bucket_bias(score: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """T5's, of 32 buckets up to a distance of 128."""
    distance = np.maximum(i - j, 0)
    far = 16 + (np.log(np.maximum(distance, 1) / 16) / np.log(128 / 16) * 16).astype(np.int32)
    bucket = np.where(distance < 16, distance, np.minimum(far, 31))
    return score + table[bucket, h]


def neighbours(i: Any, j: Any, width: Any) -> Any:
    """Pixels at most 2 rows and 3 columns apart."""
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
IN_DOUBLE = ("softcap", "alibi", "buckets", "bias", "functions", "rounding", "captured numbers")
# A few roundings of values of some tens.
TOLERANCE = {"float": 3e-5, "double": 1e-12}


def pairs(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Positions inside and outside of all captured arrays, and steps from a first key."""
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


def compare(mod: Modification, real: str, run: Any, rng: np.random.Generator, count: int) -> None:
    columns = pairs(rng, count)
    scores = (rng.standard_normal(count) * 4).astype(np.float32 if real == "float" else np.float64)
    new, seen = run(scores, **{name: columns[name] for name in columns if name != "j"})
    given = {name: columns[name] for name in ("b", "h", "i", "j", "q_start", "k_start")}
    if isinstance(mod, ScoreMod):
        expected = np.broadcast_to(mod.evaluate(scores.astype(np.float64), **given), (count,))
        tolerance = TOLERANCE[real]
        np.testing.assert_allclose(new, expected, rtol=tolerance, atol=tolerance)
        assert seen.all()
    else:
        expected = np.broadcast_to(mod.evaluate(**given), (count,))
        assert new.tobytes() == scores.tobytes()
        np.testing.assert_array_equal(seen, expected)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """Compiled text of the whole gallery, by name and type of reals."""
    names = [(name, "float16") for name in GALLERY] + [(name, "float64") for name in IN_DOUBLE]
    gallery = [Text.of(GALLERY[name], real) for name, real in names]
    runs = compiled_for_host(tmp_path_factory.mktemp("gallery"), gallery)
    return dict(zip(names, runs, strict=True))


@pytest.mark.parametrize("name", GALLERY)
def test_device_text_computes_what_the_function_does(name, texts, rng) -> None:
    compare(GALLERY[name], "float", texts[name, "float16"], rng, 3000)


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_device_text_of_doubles_computes_what_the_function_does(name, texts, rng) -> None:
    compare(GALLERY[name], "double", texts[name, "float64"], rng, 3000)


def random_text(rng: np.random.Generator, kind: str, depth: int) -> str:
    """Python text of a random expression of bools, ints or reals, the latter continuous."""

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
            lambda: f"ids[{of('int')}, {of('int')}]",
        ]
    elif depth <= 1:
        options = [lambda: "score", lambda: f"{n / 8}", lambda: f"({of('int')} / {n})"]
    else:
        options = [
            lambda: f"({of('real')} {rng.choice(['+', '-'])} {of('real')})",
            lambda: f"({of('real')} {rng.choice(['*', '/'])} {n})",
            lambda: f"({of('int')} * 0.125 - {of('real')})",
            lambda: f"(factor[{of('int')}] * {of('int')})",
            lambda: f"(np.tanh({of('real')}) * {rng.choice([str(n), 'factor[h]'])})",
            lambda: f"np.exp2(-abs({of('real')}))",
            lambda: f"np.{rng.choice(['minimum', 'maximum'])}({of('real')}, {of('int')})",
            lambda: f"np.where({of('bool')}, {of('real')}, {of('real')})",
        ]
    return str(options[int(rng.integers(len(options)))]())


def random_mod(rng: np.random.Generator) -> Modification:
    captures = {"n": int(rng.integers(-9, 9)), "ids": numbers(8, KEYS, below=7)}
    if rng.integers(2):
        text = random_text(rng, "bool", 4)
        return MaskMod(eval(f"lambda b, h, i, j, n, ids: {text}", {"np": np}), **captures)
    text = random_text(rng, "real", 4)
    names = "score, b, h, i, j, n, ids, factor"
    return ScoreMod(eval(f"lambda {names}: {text}", {"np": np}), **captures, factor=floats(KEYS))


def test_random_expressions_are_computed_as_numpy_computes_them(rng, tmp_path) -> None:
    texts = [
        Text.of(random_mod(rng), str(rng.choice(["float16", "float32", "float64"])))
        for _ in range(60)
    ]
    for text, run in zip(texts, compiled_for_host(tmp_path, texts), strict=True):
        # Shown where they differ.
        print(text.emitted())
        compare(text.mods[0], text.real, run, rng, 500)


def test_a_score_and_a_mask_share_one_struct_of_arguments(rng, tmp_path) -> None:
    text = Text(SCORES["alibi"], MASKS["window"])
    (run,) = compiled_for_host(tmp_path, [text])
    columns = pairs(rng, 500)
    scores = rng.standard_normal(500).astype(np.float32)
    new, seen = run(scores, **{name: columns[name] for name in columns if name != "j"})
    positions = {name: columns[name] for name in "bhij"}
    expected = text.mods[0].evaluate(scores, **positions)
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(seen, text.mods[1].evaluate(**positions))


def test_nan_of_a_score_stays_in_minimum_and_maximum(tmp_path) -> None:
    mod = ScoreMod(lambda score: np.clip(np.minimum(score, 5), -5, 5) + np.sign(score))
    (run,) = compiled_for_host(tmp_path, [Text(mod)])
    scores = np.array([np.nan, -np.inf, np.inf, 7], np.float32)
    # Times log2(e) and back.
    np.testing.assert_allclose(run(scores)[0], [np.nan, -6, 6, 6], rtol=2**-22)
    np.testing.assert_array_equal(mod.evaluate(scores, 0, 0, 0, 0), [np.nan, -6, 6, 6])


@pytest.mark.parametrize(
    ("function", "shape", "bounds"),
    [
        (lambda j, x: x[j] > 0, (9,), ["k.first + last < a.x.shape[0]"]),
        (
            lambda i, j, x: x[i, j + 3] > 0,
            (9, 9),
            ["k.first + 3 + last < a.x.shape[1]"],
        ),
        (
            lambda i, j, x: x[i - j] > 0,
            (9,),
            ["k.m0 - last >= 0", "k.m0 < a.x.shape[0]"],
        ),
        (lambda i, j, x: x[np.clip(i - j, -4, 4) + 4] > 0, (9,), ["8 < a.x.shape[0]"]),
        # One that is read is anywhere; what it is read at is known.
        (lambda j, x: x[x[j]] > 0, (9,), ["k.first + last < a.x.shape[0]"]),
        (lambda i, j, x: x[i * j] > 0, (9,), None),
        # What a row reads is asked for once.
        (lambda i, j, x: (x[i] > 0) & (j > 2), (9,), None),
    ],
)
def test_what_has_to_hold_for_all_pairs_to_read_inside(function, shape, bounds) -> None:
    text = Text.of(MaskMod(function, x=np.ones(shape, np.int32))).emitted()
    assert f"has_bounds = {'true' if bounds else 'false'};" in text
    assert bool(bounds) == ("bool is_inside(" in text)
    assert not bounds or f"return {' && '.join(bounds)};" in text
