"""Generated CUDA source, run on the host, compared with the Python function on arrays."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.mods.generated_cuda import Text, compiled_for_host
from support.mods.mod_gallery import GALLERY, MASKS, NEGATIONS, SCORES, pairs, random_mod

from cupy_flash.mods.base import Modification
from cupy_flash.mods.modification import MaskMod, ScoreMod

IN_DOUBLE = ("softcap", "alibi", "buckets", "bias", "functions", "rounding", "captured numbers")
# A few roundings of values between 10 and 100.
TOLERANCE = {"float": 3e-5, "double": 1e-12}


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
    """Compiled functions of the whole gallery, by name and dtype of the inputs."""
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


def test_random_expressions_are_computed_as_numpy_computes_them(rng, tmp_path) -> None:
    texts = [
        Text.of(random_mod(rng), str(rng.choice(["float16", "float32", "float64"])))
        for _ in range(60)
    ]
    for text, run in zip(texts, compiled_for_host(tmp_path, texts), strict=True):
        # pytest shows this line if the results differ.
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
    # The generated code multiplies by log2(e) and back.
    np.testing.assert_allclose(run(scores)[0], [np.nan, -6, 6, 6], rtol=2**-22)
    np.testing.assert_array_equal(mod.evaluate(scores, 0, 0, 0, 0), [np.nan, -6, 6, 6])


@pytest.mark.parametrize(
    ("function", "shape", "bounds"),
    [
        (lambda j, x: x[j] > 0, (9,), ["k.first + last < a.x.shape[0]"]),
        (lambda i, j, x: x[i, j + 3] > 0, (9, 9), ["k.first + 3 + last < a.x.shape[1]"]),
        (lambda i, j, x: x[i - j] > 0, (9,), ["k.m0 - last >= 0", "k.m0 < a.x.shape[0]"]),
        (lambda i, j, x: x[np.clip(i - j, -4, 4) + 4] > 0, (9,), ["8 < a.x.shape[0]"]),
        # The outer index is read from x, so it may be anywhere; the inner index is known.
        (lambda j, x: x[x[j]] > 0, (9,), ["k.first + last < a.x.shape[0]"]),
        (lambda i, j, x: x[i * j] > 0, (9,), None),
        # Elements that depend on the row only are read once per row.
        (lambda i, j, x: (x[i] > 0) & (j > 2), (9,), None),
    ],
)
def test_what_has_to_hold_for_all_pairs_to_read_inside(function, shape, bounds) -> None:
    text = Text.of(MaskMod(function, x=np.ones(shape, np.int32))).emitted()
    assert f"has_bounds = {'true' if bounds else 'false'};" in text
    assert bool(bounds) == ("bool is_inside(" in text)
    assert not bounds or f"return {' && '.join(bounds)};" in text


@pytest.mark.parametrize("negation", NEGATIONS)
def test_negations_of_integers_are_hidden_from_the_compiler(negation, rng, tmp_path) -> None:
    # Kernels get nested minima of bare negations wrong if CUDA 13.0 compiles them.
    t, negated = np.arange(5000, dtype=np.int32), NEGATIONS[negation]
    mask = MaskMod(lambda i, j, t: np.minimum(np.minimum(i, negated(j, t)), 60) > -60, t=t)
    text = Text.of(mask, "float16")
    assert "mod_neg(" in text.emitted()
    assert not re.search(r"(?<![\w)]) ?-[a-z(]", text.emitted())
    compare(mask, "float", compiled_for_host(tmp_path, [text])[0], rng, 500)
