"""Arrays that a function closes over, and values that are fixed when it is traced."""

from __future__ import annotations

import functools
import itertools
import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cupy_flash import flash_attention
from cupy_flash.mods.modification import MaskMod, ScoreMod

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)
LIMIT = 4
SCORE = np.float32(1)


def near(i: Any, j: Any) -> Any:
    return np.abs(i - j) < LIMIT


def looked_up(h: Any, j: Any, *, table: Any = TABLE) -> Any:
    return table[h, j]


class Bias:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def score(self, score: Any, h: Any, j: Any) -> Any:
        return score + TABLE[h, j] * self.factor


def of(mod: ScoreMod, h: int = 0, j: int = 0) -> float:
    return float(mod.evaluate(SCORE, 0, h, 0, j))


def test_arrays_of_every_variable_around_a_function_are_captured() -> None:
    local = np.full(4, 100, np.float32)

    def attributed(j: Any) -> Any:
        return attributed.table[j]  # type: ignore[attr-defined]

    attributed.table = local  # type: ignore[attr-defined]
    by_default = functools.partial(looked_up, table=TABLE)
    tables = [local, np.full(4, 1000, np.float32)]
    named = {"one": np.full(4, 10000, np.float32)}
    module = ModuleType("tables")
    module.inner = ModuleType("inner")  # type: ignore[attr-defined]
    module.inner.wide = local  # type: ignore[attr-defined]
    exec("def doubled(j):\n    return 2 * wide[j]", module.inner.__dict__)

    def through_two(h: Any, j: Any) -> Any:
        return looked_up(h, j) + TABLE[h, j]

    by_keyword = functools.partial(lambda score, j, x: score + x[j], x=local)
    # Functions by the kind of the variable, with the name of the capture and the score of a pair.
    cases = {
        "cell": (lambda score, j: score + local[j], "local", 101),
        "global": (lambda score, h, j: score + TABLE[h, j], "TABLE", 12),
        "default": (lambda score, j, x=local: score + x[j], "x", 101),
        "default by keyword": (lambda score, j, *, x=local: score + x[j], "x", 101),
        "helpers": (lambda score, h, j: score + through_two(h, j), "table", 23),
        "inner function": (lambda score, j: score + (lambda k: local[k])(j), "local", 101),
        "comprehension": (lambda score, j: score + sum([local[j] for _ in "ab"]), "local", 201),
        "attribute": (lambda score, j: score + attributed(j), "table", 101),
        "method": (Bias(2).score, "TABLE", 23),
        "list": (lambda score, j: score + tables[1][j], "tables_1", 1001),
        "dictionary": (lambda score, j: score + named["one"][j], "named_one", 10001),
        "module": (lambda score, j: score + module.inner.wide[j], "wide", 101),
        "helper of a module": (lambda score, j: score + module.inner.doubled(j), "wide", 201),
        "partial": (by_keyword, "x", 101),
        "partial helper": (lambda score, h, j: score + by_default(h, j), "table", 12),
    }
    for name, (function, capture, expected) in cases.items():
        mod = ScoreMod(function)
        assert (tuple(mod.captures), of(mod, h=2, j=3)) == ((capture,), expected), name


def test_one_array_is_one_capture_and_arrays_of_one_name_are_numbered() -> None:
    x = np.arange(4.0)
    again = x
    other = (lambda x: lambda j: x[j])(np.arange(4.0) * 10)
    mod = ScoreMod(lambda score, j: score + x[j] + again[j] + other(j))
    numbered = ScoreMod(lambda score, j: score + x[j] + other(j))
    assert tuple(numbered.captures) == ("x", "x_2")
    assert tuple(mod.captures) == ("again", "x")
    assert of(mod, j=3) == 1 + 3 + 3 + 30
    i = np.arange(4.0)
    reserved = ScoreMod(lambda score, j: score + i[j])
    assert tuple(reserved.captures) == ("i_2",)
    explicit = ScoreMod(lambda score, j, y: score + y[j] + x[j], y=x)
    assert tuple(explicit.captures) == ("y",)


def test_text_is_that_of_the_explicit_form() -> None:
    table = np.ones((3, 4), np.float16)[:, ::2]
    closed = ScoreMod(lambda score, h, j: score * table[h, j], differentiable=("table",))
    given = ScoreMod(
        lambda score, h, j, table: score * table[h, j], table=table, differentiable=("table",)
    )
    assert closed.traced is given.traced
    assert closed == given
    assert closed.array_names == given.array_names == ("score_mod_table",)


def test_an_array_is_read_when_a_call_is_made_and_its_variable_is_not() -> None:
    bias = np.zeros(8, np.float32)
    mod = ScoreMod(lambda score, j: score + bias[j])
    bias[3] = 5
    assert of(mod, j=3) == 6
    bias = np.ones(8, np.float32)
    assert of(mod, j=3) == 6
    q = np.zeros((1, 8, 1, 4), np.float32)
    v = np.arange(32, dtype=np.float32).reshape(1, 8, 1, 4)
    weights = np.exp(np.where(np.arange(8) == 3, 5, 0))
    expected = (weights / weights.sum()) @ v[0, :, 0].astype(float)
    out = flash_attention(q, q, v, score_mod=mod, backend="cpu")
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=1e-5)


def test_only_what_is_indexed_is_captured() -> None:
    unread = np.ones((2, 2), complex)
    text = np.array("text")
    sizes = np.array([5, 9])
    mod = ScoreMod(
        lambda score, h, j: (
            score * unread.shape[0]
            + np.clip(TABLE[h, j], 0, sizes.max())
            + TABLE.ndim
            + len(TABLE)
            + np.max(TABLE)
            + (0 if str(text) else 1)
            + np.float64((sizes + 1)[1])
        )
    )
    assert tuple(mod.captures) == ("TABLE",)
    assert of(mod, h=2, j=3) == 2 + 9 + 2 + 3 + 11 + 10


def test_scalars_are_captured_and_vectors_iterated_over() -> None:
    factor = np.array(3, np.float32)
    stops = np.array([1, 5, 6])

    def score_at(score: Any, j: Any) -> Any:
        for stop in stops:
            score = np.where(j == stop, score * factor, score)
        return score

    mod = ScoreMod(score_at)
    assert tuple(mod.captures) == ("factor", "stops")
    assert [of(mod, j=j) for j in range(8)] == [1, 3, 1, 1, 1, 3, 3, 1]
    factor[...] = 2
    stops[0] = 0
    assert [of(mod, j=j) for j in range(8)] == [2, 1, 1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda score, h: score + TABLE[h], TypeError, "TABLE has 2 axes and is given 1 indices"),
        (lambda score, h: score + TABLE, TypeError, r"index it, as in TABLE\[b, h\]"),
        (lambda score, h: TABLE * score, TypeError, r"index it, as in TABLE\[b, h\]"),
        (lambda score, h: np.where(score > 0, TABLE, 0), TypeError, "index it"),
        (lambda score, h: np.where(TABLE, score, 0), TypeError, "index it"),
        (lambda score, h: TABLE, TypeError, "index it"),
        (lambda score, h: score + sum(TABLE), TypeError, "index it"),
        (lambda score, h: score + np.add(TABLE, 1, out=TABLE)[0, 0], TypeError, "is written"),
        (lambda score, h: score + (TABLE * 2)[h, h], TypeError,
         "Assign an array to a variable outside"),
        (lambda score, h: score + TABLE[h, -1], ValueError, "indexed with -1; expected 0 or more"),
        (lambda score, h: score + EMPTY[h], ValueError, "EMPTY has shape .* at least one element"),
        (lambda score, h: score + COMPLEX[h], TypeError, "COMPLEX has dtype complex128"),
        (lambda score, h: score + HUGE[h], ValueError, "HUGE holds 1099511627776"),
    ],
)  # fmt: skip
def test_what_is_not_read_of_an_array_is_refused(function, error, message) -> None:
    with pytest.raises(error, match=message):
        ScoreMod(function)


EMPTY, COMPLEX, HUGE = np.ones(0), np.ones(3, complex), np.array([1 << 40])


@pytest.mark.parametrize("index", [-1, np.int32(-1), np.int64(-3)])
def test_a_negative_constant_index_is_refused(index) -> None:
    for function in (
        lambda score, h, table: score + table[h, index],
        lambda score, h, table: score + table[np.minimum(3, 2) * 0 + index, h],
    ):
        with pytest.raises(ValueError, match="indices count from the first element"):
            ScoreMod(function, table=TABLE)
    text = ScoreMod(
        lambda score, table: np.arctan(score) + table[0, -1], table=TABLE, cuda="return score;"
    )
    with pytest.raises(ValueError, match="indices count from the first element"):
        text.evaluate(SCORE, 0, 0, 0, 0)


def test_what_a_helper_looks_up_is_frozen(monkeypatch) -> None:
    j = np.arange(16, dtype=np.int32)
    state = {"limit": 4}
    masks = [MaskMod(lambda i, j: near(i, j)), MaskMod(lambda i, j: abs(i - j) < state["limit"])]
    monkeypatch.setitem(globals(), "LIMIT", 1)
    state["limit"] = 1
    for mask in masks:
        assert mask.evaluate(0, 0, 8, j).sum() == 7


def test_a_function_that_calls_itself_is_followed() -> None:
    local = np.ones(4, np.float32)

    def total(j: Any, n: int) -> Any:
        return local[j] + (total(j, n - 1) if n else 0)

    mod = ScoreMod(lambda score, j: score + total(j, 2))
    assert (tuple(mod.captures), of(mod)) == (("local",), 4)


COUNT = itertools.count()
CALLS = 0


def counted() -> int:
    global CALLS
    CALLS += 1
    return CALLS


@pytest.mark.parametrize(
    "function",
    [
        lambda score: score + np.random.rand(),  # noqa: NPY002
        lambda score: score + np.random.default_rng().standard_normal(),
        lambda score: score * random.random(),
        lambda score: score if np.random.rand() < 2 else -score,  # noqa: NPY002
        lambda score: score if random.random() < 2 else -score,
        lambda score: score + next(COUNT),
        lambda score: score + counted(),
    ],
)
def test_what_computes_something_else_each_time_is_refused(function) -> None:
    with pytest.raises(TypeError, match=r"random numbers.*index them as an array"):
        ScoreMod(function)
    with pytest.raises(TypeError, match="random numbers"):
        ScoreMod(function, cuda="return score;").derivative(SCORE, 0, 0, 0, 0)


def test_random_numbers_of_a_seed_are_constants() -> None:
    mod = ScoreMod(lambda score: score + np.random.default_rng(3).standard_normal())
    assert of(mod) == np.float32(1) + np.float32(np.random.default_rng(3).standard_normal())


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries_are_captured(library) -> None:
    module = pytest.importorskip("torch" if library == "torch" else "jax.numpy")
    make = module.tensor if library == "torch" else module.asarray
    table, factor = make([1.0, 2.0, 3.0]), make(2.0)
    mod = ScoreMod(lambda score, j: score * factor + table[j] * len(table))
    assert tuple(mod.captures) == ("factor", "table")
    assert of(mod, j=2) == 2 + 9
    if library == "torch":
        table[2] = 5
        assert of(mod, j=2) == 2 + 15


def test_functions_of_torch_and_jax_are_refused_with_those_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    for function in (
        lambda score: torch.tanh(score),
        lambda score: torch.where(score > 0, score, score),
        lambda score: jnp.tanh(score),
        lambda score: jnp.where(score > 0, score, 0.0),
    ):
        with pytest.raises(TypeError) as caught:
            ScoreMod(function)
        # JAX raises its own error, whose context is the library's error.
        told = f"{caught.value} {caught.value.__context__}"
        assert "NumPy's functions, such as np.where" in told


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_numbers_computed_of_whole_arrays_are_constants_in_every_library(library: str) -> None:
    xp = pytest.importorskip(library)
    table = xp.asarray(np.array([1, 4, 2], np.float32))
    mod = ScoreMod(lambda score: score + table.max() * len(table))
    assert of(mod) == 1 + 4 * 3
