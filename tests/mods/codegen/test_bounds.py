"""Bounds of masks over ranges of positions: never wrong, and rarely undecided without need."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.mods.block_mask_cuda import ALL, NONE, SOME, HostMask, compiled_masks
from support.mods.mod_gallery import drawn

from cupy_flash.mods.codegen.bounds import emit_bounds
from cupy_flash.mods.modification import MaskMod

BATCH, HEADS, KEYS = 2, 3, 96
# Query positions also lie before the first key and past the last one.
FIRST_ROW, END_ROW = -20, KEYS + 14
SEED = np.random.default_rng(11)


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return SEED.standard_normal(shape).astype(dtype)


def numbers(*shape: int, below: int, dtype: Any = np.int32) -> np.ndarray:
    return SEED.integers(0, below, shape).astype(dtype)


def documents(*shape: int, count: int, dtype: Any = np.int32) -> np.ndarray:
    """Return ids that increase along the last axis."""
    return np.sort(numbers(*shape, below=count, dtype=dtype))


def neighbours(i: Any, j: Any, width: Any) -> Any:
    return (np.abs(i // width - j // width) <= 2) & (np.abs(i % width - j % width) <= 3)


CAUSAL = MaskMod(lambda i, j: j <= i)
WINDOW = MaskMod(lambda i, j, w: (i - w <= j) & (j <= i + 2), w=40)
PREFIX = MaskMod(
    lambda b, i, j, prefix: (j <= i) | (j < prefix[b]), prefix=np.array([30, 64], np.int32)
)
DOCUMENTS = MaskMod(
    lambda b, i, j, doc: (doc[b, i] == doc[b, j]) & (j <= i),
    doc=documents(BATCH, KEYS, count=5, dtype=np.int64),
)
DILATED = MaskMod(lambda i, j: (j <= i) & ((i - j) % 4 == 0))
GLOBAL = MaskMod(lambda i, j: (j <= i) & ((i - j < 24) | (j < 4)))

GALLERY = {
    "causal": CAUSAL,
    "window": WINDOW,
    "prefix": PREFIX,
    "documents": DOCUMENTS,
    "dilated": DILATED,
    "sliding and global": GLOBAL,
    "documents out of order": MaskMod(
        lambda i, j, doc: doc[i] == doc[j], doc=numbers(KEYS, below=2, dtype=np.uint8)
    ),
    "documents, backwards": MaskMod(
        lambda i, j, doc: doc[i] <= doc[j], doc=documents(2 * KEYS, count=9)[::-2]
    ),
    "chunks": MaskMod(lambda i, j: (i // 16 == j // 16) | (j // 16 < i // 32)),
    "chunks of captured size": MaskMod(lambda i, j, n: (i // n == j // n) & (j <= i), n=13),
    "size of 0": MaskMod(lambda i, j, n: ((j - i) % n == 0) & ((i - j) // n == 0), n=0),
    "negative size": MaskMod(lambda i, j, n: ((j - i) % n > -5) & ((i - j) // n < 2), n=-7),
    "image": MaskMod(lambda i, j: neighbours(i, j, 14)),
    "image of captured width": MaskMod(neighbours, width=14),
    "heads": MaskMod(lambda h, i, j: np.where(h == 1, j <= i, np.abs(i - j) < 8 * h)),
    "a table of distances": MaskMod(
        lambda h, i, j, on: on[h, np.clip(i - j, 0, 15)], on=numbers(HEADS, 16, below=2, dtype=bool)
    ),
    "dense": MaskMod(
        lambda b, i, j, seen: seen[b, i, j], seen=numbers(BATCH, KEYS, KEYS, below=2, dtype=bool)
    ),
    "flags": MaskMod(
        lambda i, j, on, off: on[j] & ~off[i] | (j == i),
        on=np.repeat(numbers(12, below=2, dtype=bool), 8),
        off=np.repeat(numbers(6, below=2, dtype=bool), 16),
    ),
    "words": MaskMod(
        lambda b, i, j, words: (words[b, i] >> np.clip(j - 8, 0, 63).astype(np.uint64)) & 1 != 0,
        words=SEED.integers(0, 2**64, (BATCH, KEYS), np.uint64),
    ),
    "words, few bits": MaskMod(
        lambda j, words: ((words[j] >> 3) & np.uint64(6)) < np.uint64(3) + (words[j] & 1),
        words=SEED.integers(0, 2**64, KEYS, np.uint64),
    ),
    "reals": MaskMod(
        lambda i, j, x, y: x[i] * 0.5 + y[j] / 3 < 0.25,
        x=floats(KEYS, dtype=np.float16),
        y=floats(KEYS, dtype=ml_dtypes.bfloat16),
    ),
    "not finite": MaskMod(
        lambda i, j, x, y: (x[j] - y[i] < 1) | ~(x[j] * y[i] >= 0) & (y[i] != y[i]),
        x=np.repeat(SEED.choice([1.0, np.nan, np.inf, -np.inf, 0.0, 2.0], 12), 8),
        y=np.repeat(SEED.choice([1.0, np.nan, np.inf, -np.inf, 0.0, 3.0], 12), 8),
    ),
    "functions": MaskMod(
        lambda i, j, x: (
            (np.tanh(x[i]) + np.exp(x[j] / 4) < 1.4)
            ^ (np.log2(np.abs(x[j]) + 0.5) > np.sqrt(np.maximum(x[i], 0)))
            ^ (np.floor((i - j) / 8) == np.rint(x[0]))
            ^ (1 / (j + 1) < 0.02)
            ^ (np.log1p(x[i] * x[i]) < np.expm1(x[j] / 2))
            ^ (np.sin(x[j]) > np.ceil(x[i] - 0.5) - np.trunc(x[i]))
        ),
        x=floats(KEYS),
    ),
    "casts": MaskMod(
        lambda i, j: ((i * 0.37).astype(np.int32) > j) | ((j < 9).astype(np.int32) * 20 > i)
    ),
    "shifts and bits": MaskMod(
        lambda i, j: ((1 << (j % 40)) & 0x5555 != 0) ^ ((i - j) >> 2 > 3) ^ (i & 48 == j & 48)
    ),
    "either bit": MaskMod(lambda i, j: (i | j) < 64),
    "other bits": MaskMod(lambda i, j: ((i ^ j) & 32 == 0) & (~j < -30)),
    "where": MaskMod(lambda i, j: np.where(i < 40, j // 8, 11 - j // 8) < np.sign(i - 60) * 2 + 6),
    "a position twice": MaskMod(lambda i, j: (2 * i - j + 3 < i + 20) | (j - i + 2 == j - i - 1)),
    "a real beside itself": MaskMod(lambda j, x: x[j] * 2.0 == x[j] * 2.0, x=floats(KEYS)),
    "text": MaskMod(lambda i, j: j <= i, cuda="return j <= i;"),
    "none": MaskMod(lambda: False),
    "all": MaskMod(lambda: True),
    "windows of pairs of heads": MaskMod(
        lambda h, i, j, left, right: (i - j <= left[h // 2]) & (j - i <= right[h // 2]),
        left=numbers(2, below=40),
        right=numbers(2, below=40),
    ),
}


def evaluated(mod: MaskMod, b: int, h: int) -> np.ndarray:
    """Return the mask of all pairs; indices count from the first row and the first key."""
    i, j = np.ogrid[FIRST_ROW:END_ROW, :KEYS]
    return np.broadcast_to(mod.evaluate(b, h, i, j), (END_ROW - FIRST_ROW, KEYS))


def random_ranges(rng: np.random.Generator, count: int) -> np.ndarray:
    ends = np.empty((count, 4), np.int32)
    for at, (low, end) in ((0, (FIRST_ROW, END_ROW)), (2, (0, KEYS))):
        # Some ranges are short or single positions.
        length = np.minimum(rng.integers(1, 40, count), rng.integers(1, 40, count))
        ends[:, at] = rng.integers(low, end - length + 1)
        ends[:, at + 1] = ends[:, at] + length - 1
    return ends


def true_answers(seen: np.ndarray, ends: np.ndarray) -> np.ndarray:
    answers = []
    for i_low, i_high, j_low, j_high in ends:
        block = seen[i_low - FIRST_ROW : i_high + 1 - FIRST_ROW, j_low : j_high + 1]
        answers.append(ALL if block.all() else SOME if block.any() else NONE)
    return np.array(answers)


def check(mod: MaskMod, host: HostMask, rng: np.random.Generator, count: int) -> None:
    for b, h in ((0, 2), (1, 1)):
        ends = random_ranges(rng, count)
        found = host.classify(b, h, ends)
        wrong = (found != SOME) & (found != true_answers(evaluated(mod, b, h), ends))
        assert not wrong.any(), f"{ends[wrong][0]} of {b}, {h}: {found[wrong][0]}"


def compile_gallery(names: Any, tmp_path_factory: Any, dtype: str) -> dict[str, HostMask]:
    mods = [GALLERY[name] for name in names]
    hosts = compiled_masks(tmp_path_factory.mktemp("masks"), mods, dtype)
    return dict(zip(names, hosts, strict=True))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HostMask]:
    return compile_gallery(GALLERY, tmp_path_factory, "float32")


@pytest.mark.parametrize("name", GALLERY)
def test_bounds_of_the_gallery_are_never_wrong(name, hosts, rng) -> None:
    check(GALLERY[name], hosts[name], rng, 400)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_bounds_of_reals_are_never_wrong_in_other_types(dtype, tmp_path_factory, rng) -> None:
    names = ("reals", "not finite", "functions", "casts")
    for name, host in compile_gallery(names, tmp_path_factory, dtype).items():
        check(GALLERY[name], host, rng, 300)


def random_text(rng: np.random.Generator, kind: str, depth: int) -> str:
    """Return Python source of a random expression of bools, ints or reals."""

    def of(kind: str) -> str:
        return random_text(rng, kind, depth - 1)

    n = int(rng.integers(2, 9))
    sign = rng.choice(["<", "<=", ">", ">=", "==", "!="])
    if kind == "bool":
        options = [lambda: f"({of('int')} {sign} {of('int')})"] * 3
        if depth > 1:
            options += [
                lambda: f"({of('bool')} {rng.choice(['&', '|', '^', '=='])} {of('bool')})",
                lambda: f"~{of('bool')}",
                lambda: f"np.where({of('bool')}, {of('bool')}, {of('bool')})",
                lambda: f"({of('real')} {rng.choice(['<', '>='])} {of('real')})",
            ]
    elif depth <= 1:
        leaves = {"int": ["i", "j", "i", "j", "i - j", "h", "n", "h % n", "doc[j]", "doc[i]"]}
        leaves["real"] = ["x[i]", "x[j]", f"np.float32({n / 8})", "(i - j) * 0.25"]
        number = f"np.{'int32' if kind == 'int' else 'float32'}({n})"
        options = [lambda: f"({rng.choice([*leaves[kind], number])})"]
    elif kind == "int":
        options = [
            lambda: f"({of('int')} {rng.choice(['+', '-'])} {of('int')})",
            lambda: f"({of('int')} {rng.choice(['+', '-', '*', '//', '%', '&', '>>'])} {n})",
            lambda: f"({of('int')} {rng.choice(['//', '%', '&', '|', '^', '*'])} {of('int')})",
            lambda: f"np.{rng.choice(['minimum', 'maximum'])}({of('int')}, {of('int')})",
            lambda: f"np.where({of('bool')}, {of('int')}, {of('int')})",
            lambda: f"np.{rng.choice(['abs', 'sign', 'invert', 'negative'])}({of('int')})",
            lambda: f"doc[{of('int')}]",
            lambda: f"({of('real')} * {n}).astype(np.int32)",
        ]
    else:
        options = [
            lambda: f"({of('real')} {rng.choice(['+', '-', '*'])} {of('real')})",
            lambda: f"({of('real')} {rng.choice(['*', '/'])} {n})",
            lambda: f"({of('int')} * 0.125 - {of('real')})",
            # NumPy computes tanh of integers in float64, where fewer results round to 1.
            lambda: f"np.tanh(({of('real')}).astype(np.float32))",
            lambda: f"np.{rng.choice(['floor', 'abs', 'ceil'])}({of('real')})",
            lambda: f"np.{rng.choice(['minimum', 'maximum'])}({of('real')}, {of('int')})",
            lambda: f"np.where({of('bool')}, {of('real')}, {of('real')})",
            lambda: f"x[{of('int')}]",
        ]
    return str(options[int(rng.integers(len(options)))]())


def random_mask(rng: np.random.Generator) -> tuple[str, MaskMod]:
    n = int(rng.integers(-9, 9))
    captures = {"n": n, "doc": documents(KEYS, count=6), "x": np.sort(floats(KEYS))}
    text = random_text(rng, "bool", 4)
    return text, MaskMod(eval(f"lambda b, h, i, j, n, doc, x: {text}", {"np": np}), **captures)


def test_bounds_of_random_expressions_are_never_wrong(rng, tmp_path) -> None:
    texts, mods = zip(*(drawn(lambda: random_mask(rng)) for _ in range(24)), strict=True)
    hosts = compiled_masks(tmp_path, mods)
    for text, mod, host in zip(texts, mods, hosts, strict=True):
        # pytest shows this line if the bounds are wrong.
        print(text)
        check(mod, host, rng, 150)


# ---- Blocks that stay undecided


def undecided(mod: MaskMod, host: HostMask, rows: int, keys: int) -> tuple[int, int]:
    """Return the number of blocks that are truly mixed, and that of other undecided blocks."""
    starts = np.array([(i, j) for i in range(0, KEYS, rows) for j in range(0, KEYS, keys)])
    i, j = starts.T
    ends = np.stack([i, np.minimum(i + rows, KEYS) - 1, j, np.minimum(j + keys, KEYS) - 1], 1)
    found, true = host.classify(1, 1, ends), true_answers(evaluated(mod, 1, 1), ends)
    assert (found[true == SOME] == SOME).all()
    return int((true == SOME).sum()), int(((found == SOME) & (true != SOME)).sum())


@pytest.mark.parametrize(
    ("name", "mixed", "needless"),
    [
        ("causal", 12, 0), ("window", 30, 0), ("prefix", 4, 0), ("documents", 26, 0),
        ("dilated", 78, 0), ("sliding and global", 29, 0), ("chunks", 0, 0), ("heads", 12, 0),
        ("flags", 7, 0),
    ],
)  # fmt: skip
def test_blocks_that_a_mask_does_not_cut_are_decided(name, mixed, needless, hosts) -> None:
    assert undecided(GALLERY[name], hosts[name], 8, 8) == (mixed, needless)


def test_where_two_conditions_exclude_each_other_within_a_block_it_is_looked_at(hosts) -> None:
    # Here a block holds visible and masked pairs, whatever the bounds are.
    name = "documents out of order"
    mixed, needless = undecided(GALLERY[name], hosts[name], 8, 8)
    assert needless == 0
    assert mixed > 100


# ---- Generated CUDA source


def bounds_of(mod: MaskMod) -> str:
    return emit_bounds(mod.expression, mod.specs).text


def test_what_one_position_reads_is_found_once_for_its_range() -> None:
    text = bounds_of(DOCUMENTS)
    assert "r.v0 = range_at(a.doc.at(b, i));" in text
    assert "const Truth x0 = range_eq(rows.v0, keys.v0);" in text
    assert "const Truth x1 = range_le(j, i);" in text


def test_a_position_on_both_sides_of_a_comparison_counts_once() -> None:
    mod = MaskMod(lambda i, j: 2 * i - j + 3 < i + 20)
    assert "range_lt(Ints{i.low - j.high - 17, i.high - j.low - 17}, range_at(0))" in bounds_of(mod)


def test_equal_masks_have_the_same_text() -> None:
    one, other = (
        MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=numbers(9, below=3)) for _ in range(2)
    )
    assert one.traced is other.traced
    assert bounds_of(one) == bounds_of(other)


def test_what_cuda_text_computes_is_not_known() -> None:
    assert "Truth::any()" in bounds_of(GALLERY["text"])
