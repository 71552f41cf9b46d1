"""Tracing of functions: allowed operations, errors for others, and equality of modifications."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash.mods.ir.expression import (
    INT,
    REAL,
    SCORE,
    TRUE,
    I,
    J,
    Node,
    constant,
    fold,
    postorder,
    symbol,
)
from cupy_flash.mods.ir.operations import operation, substitute
from cupy_flash.mods.modification import MaskMod, ScoreMod

TABLE = np.ones((4, 8), np.float32)
WORDS = np.ones(4, np.uint64)


def score_if(score: Any, i: Any, j: Any) -> Any:
    if i > j:
        return score
    return score - 1


def score_loop(score: Any, j: Any) -> Any:
    for _ in range(j):
        score = score + 1
    return score


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (score_if, "Instead of `if` write np.where"),
        (lambda score, i, j: score if i > j else 0, "np.where"),
        (lambda score, i, j: np.where(i > j and j > 3, score, 0), "`and`.* p & q"),
        (lambda score, i, j: np.where(i > j or j > 3, score, 0), "p | q"),
        (lambda score, i, j: np.where(not i > j, score, 0), "~p"),
        (lambda score, i, j: np.where(0 < i - j < 3, score, 0), r"\(a < b\) & \(b < c\)"),
        (lambda score, i, j: score + max(i, j), "np.maximum"),
        (lambda score, i, j: bool(score), "np.where"),
        (score_loop, "nor limit a loop"),
        (lambda score: math.tanh(score), "np.tanh"),
        (lambda score: float(score), r"astype\(np.float32\)"),
        (lambda score: int(score), r"astype\(np.int32\)"),
        (lambda score: np.float32(score), r"astype\(np.float32\)"),
        (lambda score: complex(score), "not complex"),
        (lambda score, j: np.where(j in {1, 2}, score, 0), r"\(x == 1\) \| \(x == 2\)"),
        (lambda score: len(score), "a single number"),
        (lambda score: sum(score), "iterate"),
        (lambda score: 3 in score, "compare it"),
        (lambda score: round(score), "np.rint"),
        (lambda score: divmod(score, 2)[0], "x // y"),
        (lambda score: np.sum(score), "cannot be traced: .* one pair"),
        (lambda score: np.arctan(score), "np.arctan cannot be traced.*tanh"),
        (lambda score: np.linalg.norm(score), "cannot be traced"),
        (lambda score: np.add.reduce(score), "cannot be traced"),
        (lambda score: np.add(score, 1, dtype=np.float64), "np.add.*dtype=.* cannot be traced"),
        (lambda score: np.where(score > 0), "cannot be traced"),
        (lambda score, j: score + np.arange(3)[j], r"by name \(table=table\)"),
        (lambda score, j: score + [1, 2][j], "index an array: write table"),
        (lambda score: score + np.ones(3), "outside of the function"),
        (lambda score: np.round(score), r"np.rint\(x\)"),
        (lambda score, j: np.max([score, j]), r"np.maximum\(x, y\)"),
        (lambda score, j: np.max(score), r"np.maximum\(x, y\)"),
        (
            lambda score, j: np.where(np.any([score > 0, j > 0]), score, 0),
            r"np.any\(\[p, q\]\) p \| q",
        ),
        (lambda score, j: np.where(np.all(score > 0), score, 0), "Write p & q"),
        (lambda score: score * 2.0**score, r"2.0 \*\* x with .* write np.exp2\(x\)"),
        (lambda score, j: score * 2**j, "1 << x for an integer"),
        (lambda score: 3**score, r"np.exp2\(x \* np.log2\(3\)\)"),
        (lambda score, j: score + (j + 3000000000), "write 3000000000.0 .*astype"),
        (lambda score, j: score + np.uint64(3) * j, r"write 3, or x.astype\(np.uint64\)"),
        (lambda score: np.fmod(score, 2), r"x - y \* np.trunc\(x / y\)"),
        (lambda score: math.floor(score), r"np.floor\(x\).astype"),
        (lambda score: math.ceil(score), r"np.ceil\(x\).astype"),
        (lambda score: math.trunc(score), r"x.astype\(np.int32\)"),
        (lambda score: math.pow(score, 2), r"x\*\*n for math.pow"),
        (lambda score, j: np.where(np.isin(j, [1, 2]), score, 0), r"\(x == 1\) \| \(x == 2\)"),
        (lambda score: np.hypot(score, score), "np.sqrt"),
        (lambda score: score + "1", "expected numbers"),
        (lambda score: score[0], "index an array"),
        (lambda score, j: score & j, "expected integers or bools"),
        (lambda score, j: score - ((j > 2) - (j > 5)), "p \\^ q"),
        (lambda score, j: score + -(j > 2), "~p"),
        (lambda score, j: score**j, r"np.exp2\(y\) for 2 \*\* y"),
        (lambda score, j: j**-2, r"astype\(np.float32\)"),
        (lambda score, j: j**1000, r"astype\(np.float32\)"),
        (lambda score, j: np.reciprocal(j), "1 / x"),
        (lambda score, j: score + (j + 2**40), r"astype\(np.uint64\)"),
        (lambda score, j: score + (j + -(2**40)), "does not fit int32"),
        (lambda score, j: score.astype(np.float16), "expected bool, int32, uint64 or float32"),
        (lambda score: None, "returns None; expected a value"),
        (lambda score: "text", "expected a value"),
    ],
)
def test_what_cannot_be_traced_raises_with_what_to_write_instead(function, advice) -> None:
    with pytest.raises(TypeError, match=advice) as caught:
        ScoreMod(function)
    assert type(caught.value) is TypeError


def test_a_traced_value_has_no_methods_of_arrays() -> None:
    with pytest.raises(AttributeError, match="no 'sum': it is a single number"):
        ScoreMod(lambda score: score.sum())
    for name, advice in (
        ("tanh", r"np.tanh\(x\)"),
        ("abs", r"np.abs\(x\)"),
        ("max", r"np.maximum\(x, y\)"),
        ("float", r"x.astype\(np.float32\)"),
        ("to", r"x.astype\(np.float32\)"),
        ("dtype", "operators and the functions of NumPy"),
    ):
        with pytest.raises(AttributeError, match=f"no '{name}': .*{advice}"):
            ScoreMod(lambda score: getattr(score, name)())  # noqa: B023


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda score, h, table: score + table[h], "2 axes and is given 1 indices; expected 2"),
        (lambda score, h, table: score + table[h, 0, 0], "given 3 indices"),
        (lambda score, h, table: score + table[h, :], "slice.*select one element"),
        (lambda score, h, table: score + table[h, ...], "Ellipsis"),
        (lambda score, h, table: score + table[h, None], "None"),
        (lambda score, h, table: score + table[score, h], r"astype\(np.int32\)"),
        (lambda score, h, table: score + table[h, h / 2], "type real"),
        (lambda score, h, table: score + table, r"index it, as in table\[b, h\]"),
        (lambda score, h, table: table * 2, "index it"),
        (lambda score, h, table: np.exp(table), "index it"),
        (lambda score, h, table: np.where(table, score, 0), "index it"),
        (lambda score, h, table: table, "index it"),
        (lambda score, h, table: score + len(table), "index it"),
        (lambda score, h, table: score * table.shape[0], r"size=table.shape\[0\]"),
        (lambda score, h, table: score * table.size, r"size=table.size$"),
        (lambda score, h, table: score + (3 in table), "index it"),
        (lambda score, h, table: round(table), "index it"),
        (lambda score, h, table: divmod(table, 2)[0], "index it"),
        (lambda score, h, table: score @ table, "index it"),
    ],
)
def test_a_captured_array_is_indexed_by_as_many_integers_as_it_has_axes(function, advice) -> None:
    with pytest.raises(TypeError, match=advice):
        ScoreMod(function, table=TABLE)


@pytest.mark.parametrize("name", ["ndim", "dtype", "T", "sum", "astype", "copy"])
def test_a_captured_array_has_no_attributes_of_arrays(name) -> None:
    advice = rf"table.{name} cannot be traced: .* index it, as in table\[b, h\], and pass results"
    with pytest.raises(AttributeError, match=advice):
        ScoreMod(lambda score, table: score + getattr(table, name), table=TABLE)


def test_the_host_refuses_the_same_indices() -> None:
    mod = ScoreMod(
        lambda score, h, table: score + table[h], table=TABLE, cuda="return score + table(h, 0);"
    )
    with pytest.raises(TypeError, match="2 axes and is given 1 indices"):
        mod.evaluate(np.float32(1), 0, 0, 0, 0)


def test_unsigned_words_are_chosen_and_combined_with_literals() -> None:
    mask = MaskMod(
        lambda i, j, words: (
            np.where(j, words[i] & 5, np.uint64(2)) * np.where(i > 2, 1, 2**40) != 0
        ),
        words=WORDS,
    )
    assert mask.evaluate(0, 0, 0, np.arange(3)).all()


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logical_functions_take_a_word_beside_an_int32(name: str) -> None:
    function, j = getattr(np, name), np.arange(4, dtype=np.int32)
    found = MaskMod(lambda j: function(np.uint64(2**64 - 1), j)).evaluate(b=0, h=0, i=0, j=j)
    np.testing.assert_array_equal(found, function(True, j))


def test_unsigned_words_are_not_mixed_with_positions() -> None:
    with pytest.raises(TypeError, match=r"write x.astype\(np.uint64\)"):
        MaskMod(lambda i, j, words: words[i] >> j & 1 != 0, words=WORDS)


@pytest.mark.parametrize(
    ("function", "captures", "message"),
    [
        (lambda score, k: score, {}, "takes 'k', which is neither one of score, b, h, i, j"),
        (lambda score, kv_idx: score, {},
         "rename it, for example to .* j for the key's, or pass kv_idx="),
        (lambda score: score, {"table": TABLE}, "does not take the capture 'table'"),
        (lambda b, score: score, {}, "expected 'score' first"),
        (lambda b: b, {}, "expected 'score' first"),
        (lambda score, row: score, {}, "takes 'row'"),
        (lambda score, *rest: score, {}, r"takes \*rest; expected named parameters"),
        (lambda score, **rest: score, {}, "expected named parameters"),
        (lambda score, i: score, {"i": 3}, "is a reserved name"),
        (lambda score, row: score, {"row": 3}, "is a reserved name"),
        (3, {}, "has no signature"),
    ],
)  # fmt: skip
def test_names_of_parameters_are_those_of_positions_and_captures(
    function, captures, message
) -> None:
    with pytest.raises(TypeError, match=message):
        ScoreMod(function, **captures)


def test_a_mask_takes_no_score_and_gives_a_bool() -> None:
    with pytest.raises(TypeError, match="takes 'score'"):
        MaskMod(lambda score: score > 0)
    with pytest.raises(TypeError, match="type int32; expected a bool: compare it"):
        MaskMod(lambda i, j: i - j)


def test_names_come_in_any_order_and_defaults_are_constants() -> None:
    mod = ScoreMod(lambda score, table, j, *, h, w=3: score + table[h, j] * w, table=TABLE)
    assert mod.evaluate(np.float32(1), 0, 0, 0, 0) == 4


@pytest.mark.parametrize(
    "text",
    [
        "#include <x>\nreturn score;",
        'asm("trap;"); return score;',
        "__asm__(); return score;",
        "__shared__ int x; return score;",
        "return score; } int x() { return 1;",
        "return score; }",
        "score;",
        "a\\\nsm(); return score;",
        3,
    ],
)
def test_cuda_text_is_the_body_of_a_function_and_no_more(text) -> None:
    with pytest.raises(TypeError, match="cuda"):
        ScoreMod(lambda score: score, cuda=text)


def test_cuda_text_takes_what_cannot_be_traced() -> None:
    mod = ScoreMod(lambda score: np.arctan(score), cuda="return atanf(score);")
    assert mod.evaluate(np.float32(1), 0, 0, 0, 0) == np.float32(math.pi / 4)


def test_equal_functions_give_equal_keys_whatever_their_captures_hold() -> None:
    def make(values: np.ndarray, n: int) -> ScoreMod:
        return ScoreMod(lambda score, h, x, n: score + x[h] * n, x=values, n=n)

    first, second = make(np.ones(3), 1), make(np.zeros(5), 2)
    other = ScoreMod(lambda score, h, n, x: score + x[h] * n, n=1, x=np.ones(2))
    assert first.traced is second.traced is other.traced


@pytest.mark.parametrize(
    "values",
    [np.ones(3, np.float32), np.ones(6)[::2], np.ones(())],
    ids=["dtype", "contiguity", "rank"],
)
def test_keys_differ_where_device_text_does(values) -> None:
    def make(values: np.ndarray) -> ScoreMod:
        return ScoreMod(lambda score, h, x: score + (x[h] if values.ndim else x), x=values)

    assert make(np.ones(3)).traced is not make(values).traced
    assert ScoreMod(lambda score: score + 1) != ScoreMod(lambda score: score + 2)
    plain = ScoreMod(lambda score: score + 1)
    assert plain != ScoreMod(lambda score: score + 1, cuda="return score + 1;")


def test_modifications_are_immutable() -> None:
    mod = ScoreMod(lambda score: score * 2)
    with pytest.raises(AttributeError, match="immutable"):
        mod.cuda = "return 1;"
    with pytest.raises(TypeError):
        mod.captures["x"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError, match="immutable"):
        mod.expression.op = "neg"


def test_equal_subexpressions_are_one_node() -> None:
    mod = ScoreMod(lambda score, i, j: np.abs(i - j) * np.abs(i - j) + score)
    product = mod.expression.args[0].args[0].args[0]
    assert product.op == "mul"
    assert product.args[0] is product.args[1]
    assert constant(0.0, REAL) is not constant(-0.0, REAL)
    assert constant(math.nan, REAL) is constant(math.nan, REAL)
    assert constant(1, INT) is not constant(1.0, REAL)
    for copied in (pickle.loads(pickle.dumps(mod.expression)), copy.deepcopy(mod.expression)):
        assert copied is mod.expression


def test_constants_are_folded_and_neutral_elements_left_out() -> None:
    expected = ScoreMod(lambda score, j: score + j)
    mod = ScoreMod(lambda score, j: np.where(np.bool_(True), score * 1 + (j + 0) * 1, -5))
    assert mod.expression is expected.expression
    assert operation("mul", constant(2**30, INT), constant(6, INT)) is constant(-(2**31), INT)
    assert MaskMod(lambda i, j: (i > j) & True).expression.op == "lt"
    assert MaskMod(lambda i, j: i - j <= i - j).expression is TRUE


def test_walkers_process_each_node_once_after_its_arguments() -> None:
    x = SCORE
    for _ in range(200):
        x = operation("add", x, x)
    nodes = list(postorder(x))
    assert len(nodes) == 201
    assert fold(x, lambda node, results: sum(results) or 1) == 2**200


@given(st.integers(-100, 100), st.integers(-100, 100))
def test_substitution_computes_what_the_parts_do(i: int, j: int) -> None:
    root = MaskMod(lambda i, j: (i - j) // 3 * 2 + 1 <= j).expression
    given = {I: constant(i, INT), J: constant(j, INT)}
    replaced = substitute(root, given)
    assert not any(node.op == "symbol" for node in postorder(replaced))
    renamed = substitute(root, {I: symbol("row")})
    assert any(node.value == "row" for node in postorder(renamed))
    assert isinstance(renamed, Node)


def test_positions_broadcast_and_results_have_the_dtype_of_scores() -> None:
    mod = ScoreMod(lambda score, i, j: score + i * 0.5 - j)
    scores = np.zeros((2, 3, 4, 5), np.float32)
    i, j = np.arange(4)[:, None], np.arange(5)
    new = mod.evaluate(scores, np.arange(2)[:, None, None, None], 0, i, j)
    assert (new.shape, new.dtype) == (scores.shape, np.float32)
    assert mod.evaluate(scores.astype(np.float64), 0, 0, i, j).dtype == np.float64
    assert ScoreMod(lambda score: 1).evaluate(scores, 0, 0, i, j).dtype == np.float32


# ---- Variables outside of a function

OUTSIDE = 5


def test_a_function_keeps_the_variables_that_it_was_traced_with(monkeypatch):
    j = np.arange(8, dtype=np.int32)
    # All functions of this loop share its variable w.
    masks = [MaskMod(lambda i, j: i - j < w) for w in (2, 6)]  # noqa: B023
    outer = MaskMod(lambda i, j: np.any([x < OUTSIDE for x in [0]]) & (j < OUTSIDE))
    monkeypatch.setitem(globals(), "OUTSIDE", 0)
    for mask, w in zip(masks, (2, 6), strict=True):
        assert mask.evaluate(0, 0, 7, j).tolist() == (7 - j < w).tolist()
    assert outer.evaluate(0, 0, 7, j).sum() == 5


def test_copies_are_of_the_same_text_and_of_captures_of_their_own():
    table = np.arange(4.0)
    mod = ScoreMod(lambda score, j, table, n: score + table[j] * n, table=table, n=2)
    shallow, deep = copy.copy(mod), copy.deepcopy({"layer": [mod]})["layer"][0]
    assert shallow == deep == mod
    assert hash(shallow) == hash(deep) == hash(mod)
    assert shallow.captures["table"] is table
    assert deep.captures["table"] is not table
    table[:] = 0
    score = np.float32(1)
    assert shallow.evaluate(score, 0, 0, 0, 3) == 1
    assert deep.evaluate(score, 0, 0, 0, 3) == 7
