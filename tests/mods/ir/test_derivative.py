"""Derivatives of traced functions, compared with finite differences, and their values at kinks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.mods.mod_gallery import GALLERY, KEYS, SCORES, floats, pairs, random_score_mod

from cupy_flash import flash_attention_vjp
from cupy_flash.mods.ir.derivative import (
    change_of_slope,
    changes_of_partials,
    derivative,
    partials,
    tangent_along,
    tangent_array,
)
from cupy_flash.mods.ir.expression import REAL, SCORE, Node, postorder
from cupy_flash.mods.ir.operations import ONE, OPERATIONS, ZERO, operation
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.on_arrays.interpret import Interpreter
from cupy_flash.mods.on_arrays.score_derivatives import (
    after_softcap,
    apply_with_slope,
    capture_gradients,
)
from cupy_flash.mods.on_arrays.scores import Pairs, Scores
from cupy_flash.mods.trace.numpy_functions import FUNCTIONS

# Finite differences are off by the third derivative times STEP^2 / 6, and by roundings over STEP;
# together, this is below 1e-7 of the values.
STEP = 1e-5
TOLERANCE = 1e-7
POSITIONS = ("b", "h", "i", "j", "q_start", "k_start")


def of_pairs(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: columns[name] for name in POSITIONS}


def compare(function: Callable[[np.ndarray], Any], found: Any, x: np.ndarray) -> None:
    """Assert that `found` is the derivative of `function`, in float64."""
    at = [np.broadcast_to(function(x + n * STEP), x.shape) for n in (-1, 0, 1)]
    finite = np.isfinite(at).all(axis=0)
    first, middle, last = (values[finite] for values in at)
    before, after = (middle - first) / STEP, (last - middle) / STEP
    scale = 1 + np.abs(middle) + np.abs(after)
    # Where the function bends or jumps within the step, one-sided differences bound the error.
    allowed = np.abs(after - before) + TOLERANCE * scale
    # Almost all values are compared closely.
    assert (allowed < 1e-3 * scale).mean() > 0.98
    found = np.broadcast_to(found, x.shape)[finite]
    assert (np.abs((before + after) / 2 - found) <= allowed).all()


def compare_second(mod: ScoreMod, x: np.ndarray, b: Any = 0, h: Any = 0, **given: Any) -> None:
    """Assert that second derivatives are the derivatives of the first ones."""
    given = {"b": b, "h": h, "i": 0, "j": 0} | given
    found = mod.derivative(x, **given, order=2)
    compare(lambda x: mod.derivative(x, **given), found, x)


# Differentiable functions of reals, by the name of NumPy's function or of another notation.
SMOOTH = {
    "add": lambda x: x + 2 * x,
    "subtract": lambda x: 3 - x * 2 - (x - 1) - (x * x - x),
    "multiply": lambda x: x * 3 * x * (1 + x),
    "divide": lambda x: x / 3 + 2 / (x * x + 1) + x / (x * x + 2),
    "floor_divide": lambda x: x * ((x + 0.13) // 0.7) + x // (x * x + 1),
    "remainder": lambda x: (x + 0.13) % 0.7 + (x * 3) % -0.9 + 7.3 % (x * x + 1),
    "power": lambda x: x**3 + x**0 + x**7 + (1 + x * x) ** -2 + (2 + x * x) ** 1.5 + x**2.0,
    "float_power": lambda x: np.float_power(2 + np.sin(x), 0.3) + np.float_power(x, 2),
    "a root": lambda x: (1 + x * x) ** 0.5,
    "negative": lambda x: -x * x,
    "positive": lambda x: +x,
    "absolute": lambda x: np.abs(x - 0.2) * x,
    "fabs": lambda x: np.fabs(x),
    "sign": lambda x: np.sign(x) * x * x,
    "square": lambda x: np.square(x + 1),
    "reciprocal": lambda x: np.reciprocal(x * x + 0.5),
    "minimum": lambda x: np.minimum(x * x, 2 - x) * 3,
    "maximum": lambda x: np.maximum(x * x, 2 - x) + np.maximum(1, x),
    "clip": lambda x: np.clip(x * x, 0.5, 3 + x) + np.clip(x, -1, 1),
    "where": lambda x: np.where(x > 0.5, x * x, np.where(x < -0.5, -x, 0)) * x,
    "floor": lambda x: np.floor(x) * x,
    "ceil": lambda x: np.ceil(x) + x,
    "trunc": lambda x: np.trunc(x) * x,
    "rint": lambda x: np.rint(x * 3) * x,
    "exp": lambda x: np.exp(-x * x) * x,
    "exp2": lambda x: np.exp2(x / 3) + np.exp2(-x * x),
    "expm1": lambda x: np.expm1(x / 2),
    "log": lambda x: np.log(1 + x * x),
    "log2": lambda x: np.log2(2 + np.sin(x)),
    "log10": lambda x: np.log10(1 + x * x) * x,
    "log1p": lambda x: np.log1p(x * x),
    "tanh": lambda x: 5 * np.tanh(x / 5) + np.tanh(x) ** 2,
    "sqrt": lambda x: np.sqrt(1 + x * x) / np.sqrt(x * x + 3),
    "sin": lambda x: np.sin(3 * x) * x,
    "cos": lambda x: np.cos(x * x / 3),
    "a conversion": lambda x: x.astype(np.float64) * (x * 2).astype(np.int32),
}
# Functions whose results are no reals, and `true_divide`, which is an alias of `divide`.
OF_NO_REALS = """
less less_equal greater greater_equal equal not_equal logical_and logical_or logical_xor logical_not
bitwise_and bitwise_or bitwise_xor invert left_shift right_shift isnan isinf isfinite true_divide
"""


def test_every_function_of_reals_has_a_derivative_that_is_compared_here() -> None:
    assert FUNCTIONS.keys() - set(OF_NO_REALS.split()) <= SMOOTH.keys()
    traced = (ScoreMod(lambda score, f=f: f(score)) for f in SMOOTH.values())
    operations = {node.op for mod in traced for node in postorder(mod.graph) if node.type == REAL}
    with_derivative = {op for op, row in OPERATIONS.items() if row.derivative is not None}
    assert with_derivative - {"free"} <= operations


@pytest.mark.parametrize("name", SMOOTH)
def test_a_functions_derivative_is_what_finite_differences_give(name, rng) -> None:
    function = SMOOTH[name]
    mod = ScoreMod(lambda score: function(0.9 * score + 0.05))
    x = rng.uniform(-3, 3, 4000)
    # Functions of the sign or the magnitude of a number have no derivative at 0.
    x = x[np.minimum(abs(0.9 * x + 0.05), abs(np.sin(x))) > 1e-3]

    def evaluate(x: np.ndarray) -> Any:
        return mod.evaluate(x, 0, 0, 0, 0)

    compare(evaluate, mod.derivative(x, 0, 0, 0, 0), x)
    compare_second(mod, x)
    # The function is also compared as a part of others.
    outer = ScoreMod(lambda score: np.tanh(function(np.sin(score))) * score)
    compare(lambda x: outer.evaluate(x, 0, 0, 0, 0), outer.derivative(x, 0, 0, 0, 0), x)
    compare_second(outer, x)


@pytest.mark.parametrize("name", SCORES)
def test_slopes_of_the_gallery_are_what_finite_differences_give(name, rng) -> None:
    mod, columns = SCORES[name], pairs(rng, 3000)
    x, given = 4 * rng.standard_normal(3000), of_pairs(columns)
    compare(lambda x: mod.evaluate(x, **given), mod.derivative(x, **given), x)
    compare_second(mod, x, **given)


def test_slopes_of_random_expressions_are_what_finite_differences_give(rng) -> None:
    for _ in range(150):
        mod, columns = random_score_mod(rng), pairs(rng, 300)
        x, given = 4 * rng.standard_normal(300), of_pairs(columns)
        compare(lambda x, m=mod, g=given: m.evaluate(x, **g), mod.derivative(x, **given), x)
        compare_second(mod, x, **given)


def gradients_by_differences(
    mod: ScoreMod, x: np.ndarray, given: dict[str, np.ndarray], weight: np.ndarray, name: str
) -> np.ndarray:
    """Return the gradient of the weighted sum of new scores by each element of a capture."""
    found = np.zeros(mod.captures[name].shape)
    for element in np.ndindex(found.shape):
        sums = []
        for sign in (1, -1):
            values = mod.captures[name].astype(np.float64)
            values[element] += sign * STEP
            moved = ScoreMod(mod.function, **(dict(mod.captures) | {name: values}))
            sums.append((moved.evaluate(x, **given) * weight).sum())
        found[element] = (sums[0] - sums[1]) / (2 * STEP)
    return found


CAPTURED = {
    "a table": ScoreMod(
        lambda score, h, i, j, x: score * x[h, np.clip(i - j, -3, 3) + 3],
        differentiable=("x",),
        x=floats(4, 7, dtype=np.float16),
    ),
    "indices outside": ScoreMod(
        lambda score, i, j, x: np.tanh(score + x[i - j]), differentiable=("x",), x=floats(9)
    ),
    "two elements at once": ScoreMod(
        lambda score, i, j, x: score - x[i % 5] * x[j % 5] * score,
        differentiable=("x",),
        x=floats(5),
    ),
    "two arrays and a number": ScoreMod(
        lambda score, b, h, x, y, s: np.exp(x[b] / 3) * score + s * y[h, b] * x[h],
        differentiable=("y", "x"),
        x=floats(4),
        y=floats(4, 3, dtype=ml_dtypes.bfloat16),
        s=0.5,
    ),
    "no axes": ScoreMod(
        lambda score, x: 20 * x * np.tanh(score / (20 * x)), differentiable=["x"], x=np.array(1.1)
    ),
    "strides of 0": ScoreMod(
        lambda score, b, h, x: score + np.sin(x[b, h]),
        differentiable=("x",),
        x=np.broadcast_to(floats(4), (3, 4)),
    ),
    "an index that another gives": ScoreMod(
        lambda score, j, x, ids: score + x[ids[j] - 1] * x[(x[j] * 2).astype(np.int32)],
        differentiable=("x",),
        x=floats(6),
        ids=np.arange(20, dtype=np.int64)[::-1] % 7,
    ),
    "four axes": ScoreMod(
        lambda score, b, h, i, j, x: score * x[b, h, i, j],
        differentiable=("x",),
        x=floats(2, 3, 2, 2).transpose(0, 1, 3, 2),
    ),
    "what nobody reads": ScoreMod(
        lambda score, x, y: score + y, differentiable=("x",), x=floats(3), y=np.array(2.0)
    ),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captures_are_what_finite_differences_give(name, rng) -> None:
    mod = CAPTURED[name]
    b, h, row, j = np.ix_(*map(np.arange, (3, 4, 7, 9)))
    at = Pairs(b, h, row, j, q_offset=2)
    given = {"b": b, "h": h, "i": row + 2, "j": j}
    x, weight = rng.standard_normal((2, 3, 4, 7, 9))
    found = capture_gradients(mod, x, at, weight)
    assert list(found) == list(mod.differentiable)
    for capture, gradient in found.items():
        assert (gradient.shape, gradient.dtype) == (mod.captures[capture].shape, np.float64)
        expected = gradients_by_differences(mod, x, given, weight, capture)
        # Each element sums at most 756 products.
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=3e-6)


def test_gradients_of_captures_of_random_expressions_are_sums_over_pairs(rng) -> None:
    for _ in range(30):
        mod, columns = random_score_mod(rng), pairs(rng, 40)
        x, weight, given = *rng.standard_normal((2, 40)), of_pairs(columns)
        at = Pairs(*(columns[name] for name in ("b", "h", "i", "j")))
        one = capture_gradients(mod, x, at, weight)["factor"]
        # The step is so small that kinks of the elements are unlikely to lie within it.
        direction = rng.standard_normal(KEYS)
        factor = mod.captures["factor"].astype(np.float64)
        steps = (factor + step * direction for step in (1e-7, -1e-7))
        moved = [ScoreMod(mod.function, **(dict(mod.captures) | {"factor": x})) for x in steps]
        given |= {"q_start": 0, "k_start": 0}
        sums = [(m.evaluate(x, **given) * weight).sum() for m in moved]
        size = 1 + np.abs(one).sum() + np.abs(moved[0].evaluate(x, **given) * weight).sum()
        assert abs((sums[0] - sums[1]) / 2e-7 - one @ direction) < 1e-5 * size


# ---- Kinks, and values that `where` does not choose


def slope_at(function: Callable[[Any], Any], *x: float, order: int = 1) -> list[float]:
    mod = ScoreMod(lambda score: function(score))
    return np.broadcast_to(mod.derivative(np.array(x), 0, 0, 0, 0, order=order), len(x)).tolist()


@pytest.mark.parametrize(
    ("function", "at_0"),
    [
        (np.abs, 0), (np.sign, 0), (np.floor, 0), (lambda x: np.maximum(x, 0), 0.5),
        (lambda x: np.minimum(x, 0), 0.5), (lambda x: np.maximum(0, x), 0.5),
        (lambda x: np.clip(x, 0, 1), 0.5), (lambda x: np.maximum(x, 3 * x), 2),
        (lambda x: np.minimum(x, x), 1), (lambda x: np.where(x > 0, x, 0), 0),
        (lambda x: np.abs(x) ** 1.5, 0), (lambda x: x * np.abs(x), 0), (np.sqrt, np.inf),
    ],
)  # fmt: skip
def test_kinks_have_what_autograd_gives(function, at_0) -> None:
    assert slope_at(function, 0.0) == [at_0]


@pytest.mark.parametrize(
    ("function", "slopes"),
    [
        # A value that is not chosen contributes nothing, even if it or its slope is infinite.
        (lambda x: np.where(x > 0, np.log(x), x), (1, 1, 0.5)),
        (lambda x: np.where(x > 0, np.sqrt(x), -np.inf), (0, 0, 0.5 / np.sqrt(2))),
        (lambda x: np.sqrt(np.where(x > 0, x, 0)), (0, 0, 0.5 / np.sqrt(2))),
        (lambda x: -3 * np.sqrt(2 * np.where(x > 0, x, 0)), (0, 0, -3 / np.sqrt(4))),
        (lambda x: np.log(np.where(x > 0, x, 0) + np.where(x > 1, x, 0)), (0, 0, 0.5)),
        (lambda x: np.sqrt(np.maximum(x, -1) + 1), (0, 0.5, 0.5 / np.sqrt(3))),
    ],
)
def test_what_a_where_does_not_choose_leaves_no_trace(function, slopes) -> None:
    np.testing.assert_allclose(slope_at(function, -2.0, 0.0, 2.0), slopes, rtol=1e-15)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (np.abs, (0, 0, 0)), (lambda x: np.maximum(x, 0), (0, 0, 0)),
        (lambda x: np.maximum(x, 0) ** 3, (0, 0, 12)), (lambda x: x * np.abs(x), (-2, 0, 2)),
        (lambda x: x**3, (-12, 0, 12)), (lambda x: np.where(x > 0, np.log(x), x), (0, 0, -0.25)),
        (lambda x: np.sqrt(np.where(x > 0, x, 0)), (0, 0, -(2**-3.5))),
    ],
)  # fmt: skip
def test_second_derivatives_at_kinks_are_derivatives_of_the_first(function, expected) -> None:
    found = slope_at(function, -2.0, 0.0, 2.0, order=2)
    np.testing.assert_allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("choices", [2, 7, 8, 20])
def test_second_derivatives_where_the_first_one_changes_its_sign(choices: int) -> None:
    def chosen(score: Any, j: Any) -> Any:
        result = score * score
        for n in range(choices):
            result = np.where(j == n, 0, result)
        return result

    j = np.arange(choices + 1)
    last = np.where(j == choices, 1, 0)
    # If a factor has several alternatives, a product omits those that are 0.
    for outer, at_0 in ((np.sin, 2), (lambda x: np.exp(3 * x), 6), (lambda x: x * x + x, 2)):
        mod = ScoreMod(lambda score, j, f=outer: f(chosen(score, j)))
        found = mod.derivative(np.zeros(j.shape), 0, 0, 0, j, order=2)
        np.testing.assert_allclose(found, at_0 * last, rtol=1e-15)
    # The derivatives of the root are infinite where 0 is chosen, and must not affect the result.
    root = ScoreMod(lambda score, j: np.sqrt(chosen(score, j)))
    first, second = (root.derivative(np.full(j.shape, 2.0), 0, 0, 0, j, order=n) for n in (1, 2))
    np.testing.assert_array_equal(first, last)
    np.testing.assert_allclose(second, 0 * last, atol=1e-15)


def test_slopes_that_are_known_are_literals() -> None:
    def of(function: Callable[..., Any], **captures: Any) -> Node:
        return derivative(ScoreMod(function, **captures).graph, SCORE)

    assert of(lambda score: score) is ONE
    assert of(lambda score, i, j, x: score - x[i] * np.abs(i - j) + j, x=floats(3)) is ONE
    assert of(lambda score: np.where(score > 0, score, score - 1)) is ONE
    assert of(lambda score: 2) is ZERO
    assert of(lambda score: np.floor(score) + np.sign(score)) is ZERO
    assert of(lambda score, j, x: x[(score * 0).astype(np.int32)], x=floats(3)) is ZERO
    assert of(lambda score: score * 3 - score).value == 2
    # The derivative reuses the tanh, and adds one subtraction and one product.
    capped = ScoreMod(lambda score, cap: cap * np.tanh(score / cap), cap=3.0)
    tanh = next(node for node in postorder(capped.graph) if node.op == "tanh")
    expected = operation("strict", operation("sub", ONE, operation("mul", tanh, tanh)))
    assert derivative(capped.graph, SCORE) is expected


def test_constant_second_derivatives_are_literals() -> None:
    def of(function: Callable[..., Any]) -> Node:
        return derivative(ScoreMod(function).graph, SCORE, 2)

    assert of(lambda score: score * 3 - score) is ZERO
    assert of(lambda score, j: np.where(j > 3, score, np.abs(score))) is ZERO
    assert of(lambda score: score * score).value == 2


def test_second_derivatives_of_long_functions_stay_small() -> None:
    def chained(score: Any) -> Any:
        for n in range(500):
            score = np.where(score > n, np.sin(score) * 0.5, score)
        return score

    sizes = [len(list(postorder(derivative(ScoreMod(chained).graph, SCORE, n)))) for n in (1, 2)]
    assert sizes[1] < 6 * sizes[0] < 60_000


def test_deep_nests_of_choices_stay_small() -> None:
    def nested(score: Any) -> Any:
        for n in range(20):
            score = np.clip(np.abs(score), -n, n) * 0.5
        return score

    graph = derivative(ScoreMod(nested).graph, SCORE)
    assert len(list(postorder(graph))) < 10_000


@pytest.mark.parametrize("name", GALLERY)
def test_graphs_are_computed_on_arrays_as_the_functions_compute(name, rng) -> None:
    mod, columns = GALLERY[name], of_pairs(pairs(rng, 2000))
    x = 4 * rng.standard_normal(2000)
    if isinstance(mod, ScoreMod):
        expected, graph = mod.evaluate(x, **columns), mod.graph
    elif mod.cuda is None:
        expected, graph = mod.evaluate(**columns, dtype=np.float64), mod.expression
    else:
        return
    found = Interpreter(x, columns, mod.captures, np).value(graph)
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


def test_slopes_have_the_dtype_of_scores_and_broadcast_as_positions_do() -> None:
    mod = ScoreMod(lambda score, i, j, x: score * (i / 2 - j) * x[j], x=np.ones(9))
    scores = np.ones((2, 3, 4, 5), np.float32)
    i, j = np.arange(4)[:, None], np.arange(5)
    found = mod.derivative(scores, np.arange(2)[:, None, None, None], 0, i, j)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(np.broadcast_to(found, scores.shape)[1, 2], i / 2 - j)
    assert mod.derivative(scores.astype(np.float64), 0, 0, i, j).dtype == np.float64
    one = ScoreMod(lambda score: score + 1).derivative(scores, 0, 0, i, j)
    assert (one, one.dtype, one.shape) == (1, np.float32, ())


def test_the_derivative_of_cuda_text_is_that_of_the_function_beside_it() -> None:
    text = {"cuda": "return score * score * x(j);", "differentiable": ("x",)}
    mod = ScoreMod(lambda score, j, x: score * score * x[j], x=floats(5), **text)
    assert mod.derivative(np.float64(3), 0, 0, 0, 2) == 6 * np.float64(mod.captures["x"][2])
    gradient = capture_gradients(mod, np.full(2, 3.0), Pairs(0, 0, 0, np.arange(2)), np.ones(2))
    assert gradient["x"].tolist() == [9, 9, 0, 0, 0]


def test_a_function_that_cannot_be_traced_says_so_when_its_derivative_is_asked_for() -> None:
    mod = ScoreMod(lambda score: np.arctan(score), cuda="return atanf(score);")
    with pytest.raises(TypeError, match=r"its Python function.*np\.arctan cannot be traced.*tanh"):
        mod.derivative(np.float32(3), 0, 0, 0, 0)


# ---- Names of differentiable captures

TABLE = np.ones((4, 8), np.float32)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("y",), TypeError, "'y'; expected names of captures: factor, ids, table"),
        (("ids",), TypeError, "'ids' of dtype int32; .*float16, bfloat16, float32, float64"),
        (("factor",), TypeError, "'factor', which is a number.*np.array"),
        ("table", TypeError, r"is 'table'; expected a tuple such as \('table',\)"),
        (("table", "table"), ValueError, "'table' twice"),
    ],
)
def test_what_has_no_gradient_is_refused(names, error, message) -> None:
    def function(score: Any, j: Any, table: Any, ids: Any, factor: Any) -> Any:
        return score + table[ids[j], j] * factor

    captures = {"table": TABLE, "ids": np.ones(3, np.int32), "factor": 2.0}
    with pytest.raises(error, match=message):
        ScoreMod(function, differentiable=names, **captures)


def test_names_are_kept_by_copies_and_told_apart() -> None:
    def make(*names: str) -> ScoreMod:
        captures = {"x": np.ones(3), "y": np.ones(3)}
        return ScoreMod(
            lambda score, j, x, y: score + x[j] * y[j], differentiable=names, **captures
        )

    mod, plain = make("y", "x"), make()
    for copied in (copy.copy(mod), copy.deepcopy([mod])[0]):
        assert copied == mod
        assert copied.differentiable == ("y", "x")
    assert mod == make("y", "x")
    assert hash(mod) == hash(make("y", "x"))
    assert len({mod, plain, make("x", "y"), make("x")}) == 4
    assert repr(mod) == "ScoreMod(<lambda>, x, y, differentiable=('y', 'x'))"
    assert repr(plain) == "ScoreMod(<lambda>, x, y)"
    # Forward kernels are made for `traced`, which does not depend on these names.
    assert mod.traced is plain.traced
    with pytest.raises(AttributeError, match="immutable"):
        mod.differentiable = ()


# ---- All modifications of scores together


def test_slopes_of_all_modifications_together_are_what_finite_differences_give(rng) -> None:
    scores = Scores(
        softcap=2.5,
        score_mod=ScoreMod(
            lambda score, h, i, j, q_start, x: np.sin(score) * x[h, i - j] + q_start * score,
            x=floats(4, 9),
        ),
        mask_mod=MaskMod(lambda i, j: (i + j) % 3 != 0),
        alibi_slopes=floats(4),
        bias=np.where(rng.random((3, 1, 7, 9)) < 0.2, -np.inf, floats(3, 1, 7, 9)),
        mask=rng.random((1, 1, 7, 9)) < 0.7,
    )
    b, h, row, j = np.ix_(*map(np.arange, (3, 4, 7, 9)))
    at = Pairs(b, h, row, j, q_offset=3, q_start=2)
    x = 3 * rng.standard_normal((3, 4, 7, 9))
    new, slope = apply_with_slope(scores, x, at)
    assert new.tobytes() == scores.apply(x, at).tobytes()
    seen = np.isfinite(new)
    assert 0.2 < seen.mean() < 0.8
    x, slope = x[seen], np.broadcast_to(slope, new.shape)[seen]

    def apply(x: np.ndarray) -> np.ndarray:
        full = np.zeros(new.shape)
        full[seen] = x
        return scores.apply(full, at)[seen]

    compare(apply, slope, x)


def test_a_slope_of_1_is_none(rng) -> None:
    x, at = rng.standard_normal(5).astype(np.float32), Pairs(0, 0, 0, np.arange(5))
    mask, bias = np.ones((1, 1, 1, 5), bool), floats(1, 1, 1, 5)
    for scores in (
        Scores(),
        Scores(alibi_slopes=floats(4), bias=bias, mask=mask),
        Scores(score_mod=ScoreMod(lambda score, j: score - j)),
    ):
        new, slope = apply_with_slope(scores, x, at)
        assert slope is None
        np.testing.assert_array_equal(new, scores.apply(x, at))
    new, slope = apply_with_slope(Scores(softcap=2.0), x, at)
    assert slope is not None
    assert (new.dtype, slope.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(after_softcap(Scores(softcap=2.0), x), new)
    assert after_softcap(Scores(), x) is x


def test_hidden_pairs_leave_no_trace_in_gradients_of_captures() -> None:
    mod = ScoreMod(
        lambda score, j, x: score + np.sqrt(x[j]), differentiable=("x",), x=np.array([0.0, 4.0])
    )
    at = Pairs(0, 0, 0, np.arange(2))
    assert capture_gradients(mod, np.ones(2), at, np.array([0.0, 2.0]))["x"].tolist() == [0, 0.5]


# Steps of long functions, by the operations in their derivatives.
STEPS: dict[str, Callable[[Any, int], Any]] = {
    "sums": lambda x, n: x + n % 7, "shared terms": lambda x, n: x + x,
    "shared factors": lambda x, n: x * x - 0.5, "products": lambda x, n: x * 1.001,
    "quotients": lambda x, n: x / 1.01, "products and quotients": lambda x, n: x * 1.02 / 1.01,
    "reciprocals": lambda x, n: 1 / (x + 2), "caps": lambda x, n: 20 * np.tanh(x / 20),
    "choices": lambda x, n: np.where(x > n, x, x * 0.5),
    "choices of 0": lambda x, n: np.where(x > n, x, 0) + x,
    "extremes": lambda x, n: np.maximum(x, 0.1 * x), "roots": lambda x, n: np.sqrt(np.abs(x) + 1),
}  # fmt: skip


def chain(step: Callable[[Any, int], Any], length: int) -> ScoreMod:
    def function(score: Any) -> Any:
        for n in range(length):
            score = step(score, n)
        return score

    return ScoreMod(function)


def size(*roots: Node) -> int:
    return sum(1 for _ in postorder(*roots))


# The derivative of 500 nested quotients once exceeded the depth of Python's call stack.
@pytest.mark.parametrize("name", STEPS)
def test_derivatives_of_long_functions_grow_with_their_length(name: str) -> None:
    step = STEPS[name]
    short, long = (derivative(chain(step, n).graph, SCORE) for n in (100, 1000))
    assert size(long) <= 20 * size(short)
    q = np.ones((1, 4, 1, 8), np.float32)
    out, vjp = flash_attention_vjp(q, q, q, score_mod=chain(step, 1000))
    assert [gradient.shape for gradient in vjp(out)] == [q.shape] * 3


def test_a_function_of_many_elements_of_a_capture_has_a_derivative_by_each() -> None:
    def function(score: Any, j: Any, table: Any) -> Any:
        for n in range(300):
            score = score + table[(j + n) % 16]
        return score

    mod = ScoreMod(function, table=np.zeros(16, np.float32), differentiable=("table",))
    found = partials(mod.graph, ("table",))
    assert len(found) == 300
    assert all(partial.derivative is ONE for partial in found)


def many_choices(score: Any, h: Any, gain: Any) -> Any:
    """Return a score with more alternatives than those into which factors are multiplied."""
    result = score * gain[h]
    for n in range(12):
        result = np.where(score > n / 4 - 1, result + np.sin(n * score) * gain[h], 0 * score)
    return result * np.tanh(result)


@pytest.mark.parametrize(
    "function",
    [
        many_choices,
        lambda score, h, gain: np.exp(-gain[h] * score * score) * gain[0] + score / (2 + gain[h]),
        lambda score, h, gain: np.clip(gain[h] * score, -1, 2) * gain[h] * score,
    ],
)
def test_changes_along_captures_are_what_finite_differences_give(
    function: Callable[..., Any], rng: np.random.Generator
) -> None:
    gain, tangent = rng.random(4) + 0.5, rng.standard_normal(4)
    x, h = rng.uniform(-3, 3, 3000), rng.integers(4, size=3000).astype(np.int32)
    graph = ScoreMod(function, gain=gain, differentiable=("gain",)).graph
    moving = ("gain",)
    slope, of_slope = derivative(graph, SCORE), change_of_slope(graph, moving)
    expected = [(graph, tangent_along(graph, moving)), (slope, of_slope.of_captures)]
    of_score = [(slope, of_slope.of_score)]
    for partial, change in changes_of_partials(graph, moving, moving):
        expected.append((partial.derivative, change.of_captures))
        of_score.append((partial.derivative, change.of_score))

    def values(node: Node, x: np.ndarray, step: float = 0) -> np.ndarray:
        arrays = {"gain": gain + step * tangent, tangent_array("gain"): tangent}
        positions = dict.fromkeys(POSITIONS, 0) | {"h": h}
        return np.broadcast_to(Interpreter(x, positions, arrays, np).value(node), x.shape)

    def after_steps(node: Node, steps: np.ndarray) -> np.ndarray:
        """Return values after a step of the capture, which is the same for all pairs."""
        return values(node, x, float(steps[0]))

    for node, change in of_score:
        compare(functools.partial(values, node), values(change, x), x)
    for node, change in expected:
        compare(functools.partial(after_steps, node), values(change, x), np.zeros_like(x))
