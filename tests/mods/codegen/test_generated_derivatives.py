"""Derivatives in generated CUDA source, run on the host, compared with those on arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.mods.generated_cuda import RunBackward, Text, derivatives_for_host
from support.mods.mod_gallery import SCORES, floats, pairs, random_score_mod, with_gradients

from cupy_flash.mods.modification import ScoreMod
from cupy_flash.mods.on_arrays.score_derivatives import capture_gradients
from cupy_flash.mods.on_arrays.scores import Pairs

# A power of 2, so that both sides compute equal scores: derivatives may jump between scores.
SCALE = 0.25
# A few roundings of values between 10 and 100; for sums, of their largest element.
TOLERANCE = {"float": 3e-5, "double": 1e-12}
COUNT = 3000

MODS = {name: with_gradients(mod) for name, mod in SCORES.items()} | {
    "no axes beside others": ScoreMod(
        lambda score, h, i, j, cap, x, y: (
            cap * np.tanh((score + x[h] * y[j, h]) / cap) - x[i - j] * np.exp(y[i, 2] / 4)
        ),
        differentiable=("y", "cap", "x"),
        cap=np.array(3.0, np.float32),
        x=floats(9)[::-1],
        y=floats(70, 4, dtype=ml_dtypes.bfloat16),
    ),
    "four axes of a view": ScoreMod(
        lambda score, b, h, i, j, x, unread: score * x[b, h, i // 3, j] + np.abs(x[0, 0, j, i]),
        differentiable=("x", "unread"),
        x=floats(3, 60, 4, 50).transpose(0, 2, 3, 1),
        unread=floats(2, 3),
    ),
    "elements chosen by elements": ScoreMod(
        lambda score, j, x, ids: np.maximum(score * x[ids[j] - 1], x[(x[j] * 4).astype(np.int32)]),
        differentiable=("x",),
        x=floats(7),
        ids=np.arange(60)[::-1] % 9,
    ),
}
INPUTS = [(name, "float16") for name in MODS] + [
    (name, "float64") for name in ("softcap", "functions", "bias", "no axes beside others")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RunBackward]:
    texts = [Text(MODS[name], None, inputs, SCALE, backward=True) for name, inputs in INPUTS]
    compiled = derivatives_for_host(tmp_path_factory.mktemp("slopes"), texts)
    return dict(zip(INPUTS, compiled, strict=True))


def compare(mod: ScoreMod, inputs: str, run: Any, rng: np.random.Generator, count: int) -> None:
    real, dtype = ("double", np.float64) if inputs == "float64" else ("float", np.float32)
    columns = pairs(rng, count)
    products = (rng.standard_normal(count) * 4 / SCALE).astype(dtype)
    weights = rng.standard_normal(count).astype(dtype)
    weights[rng.random(count) < 0.2] = 0
    found, gradients = run(products, weights, **{n: x for n, x in columns.items() if n != "j"})
    scores = products.astype(np.float64) * SCALE
    given = {name: columns[name] for name in ("b", "h", "i", "j", "q_start", "k_start")}
    tolerance = TOLERANCE[real]
    slopes = np.broadcast_to(mod.derivative(scores, **given), (count,))
    np.testing.assert_allclose(found, slopes, rtol=tolerance, atol=tolerance)
    given["row"] = given.pop("i")
    expected = capture_gradients(mod, scores, Pairs(**given), weights.astype(np.float64))
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        largest = max(1, np.abs(expected[name]).max())
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=tolerance * largest)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inputs"), INPUTS)
def test_device_text_computes_the_derivatives_of_the_function(name, inputs, runs, rng) -> None:
    compare(MODS[name], inputs, runs[name, inputs], rng, COUNT)


@pytest.mark.slow
def test_derivatives_of_random_expressions_are_those_on_arrays(rng, tmp_path) -> None:
    dtypes = ("float16", "bfloat16", "float32", "float64")
    texts = [
        Text(random_score_mod(rng), None, str(rng.choice(dtypes)), SCALE, backward=True)
        for _ in range(60)
    ]
    for text, run in zip(texts, derivatives_for_host(tmp_path, texts), strict=True):
        # pytest shows this line if the derivatives differ.
        print(text.emitted())
        assert text.score_mod is not None
        compare(text.score_mod, text.inputs, run, rng, 500)


def test_pairs_of_no_weight_leave_no_trace(tmp_path) -> None:
    mod = ScoreMod(
        lambda score, j, x: score * np.sqrt(x[j]), differentiable=("x",), x=np.array([0.0, 4, 0])
    )
    (run,) = derivatives_for_host(tmp_path, [Text(mod, backward=True)])
    weights = np.array([0, 1, np.nan])
    gradient = run(np.full(3, 2.0), weights, step=np.arange(3))[1]["x"]
    np.testing.assert_array_equal(gradient, [0, 0.5, np.nan])


@pytest.mark.parametrize("inputs", ["float16", "bfloat16", "float32"])
def test_a_softcaps_slope_is_made_of_the_tanh_that_the_score_is_made_of(inputs) -> None:
    mod = ScoreMod(lambda score: 30 * np.tanh(score / 30))
    text = Text(mod, inputs=inputs, backward=True).emitted()
    assert "changes_slope = true;" in text
    of_score, of_slope = (
        text.split(f"Real {name}(")[1].split("}\n")[0] for name in ("exponent", "slope")
    )
    functions = {"float16": "mod_logistic", "bfloat16": "mod_tanh_approx", "float32": "mod_tanh"}
    function = functions[inputs]
    in_score, in_slope = (
        part[part.index(function) :].split(";")[0].split(")")[0] for part in (of_score, of_slope)
    )
    assert in_score == in_slope
    assert of_slope.count(function) == 1


def test_text_says_where_slopes_are_1_and_spreads_nothing_then() -> None:
    for mod in (None, SCORES["alibi"], SCORES["buckets"], SCORES["nothing"]):
        text = Text(mod, backward=True).emitted()
        assert "changes_slope = false;" in text
        assert "differentiable = 0;" in text
        assert "add(" not in text.split("void scatter(")[1].split("{")[1].split("}")[0]
        assert text.split("Real slope(")[1].split("\n")[1].strip() == "return 1.0f;"


def test_indices_that_are_known_to_be_inside_are_not_clamped() -> None:
    mod = ScoreMod(
        lambda score, h, i, j, x: score + x[h, i - j, np.clip(j, 0, 5)],
        differentiable=("x",),
        x=floats(4, 9, 9),
    )
    spread = Text(mod, backward=True).emitted().split("void scatter(")[1]
    assert "Inside ? k.m0 - step : max(0, min(k.m0 - step, a.x.shape[1] - 1))" in spread
    assert "(long long)(max(0, min(r.h, a.x.shape[0] - 1)))" in spread


@pytest.mark.parametrize("name", SCORES)
def test_forward_text_does_not_depend_on_what_is_differentiable(name) -> None:
    text = Text(SCORES[name]).emitted()
    assert text == Text(MODS[name]).emitted()
    for word in ("slope(", "scatter", "differentiable"):
        assert word not in text
