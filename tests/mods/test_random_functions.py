"""Random functions: an evaluator for them judges the CPU backend and generated CUDA source."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mods.function_calls import function_calls
from support.mods.function_oracle import BOOL, INT, REAL, UINT64, Expr, Oracle, Value
from support.mods.function_runs import Case, modification, report, wrong_on_cpu, wrong_on_host_text
from support.mods.random_functions import DTYPES, nodes_of, random_function, random_pairs

from cupy_flash.mods.ir.expression import postorder
from cupy_flash.mods.ir.operations import OPERATIONS
from cupy_flash.mods.trace.numpy_functions import FUNCTIONS

# Half of the functions are masks, half are score functions.
COUNT, PART = 10_000, 1000
# Functions that every run tests, and functions that differ between runs.
FIXED, FRESH = 120, 80
# Former random functions whose results were wrong once.
ONCE_WRONG = (
    4742, 5726, 7908, 8647, 1002765, 3005848, 3007382, 41044404, 289914747, 384548372,
)  # fmt: skip


def cases(numbers: Any) -> list[Case]:
    return [Case.of(random_function(int(number))) for number in numbers]


def require_none(wrong: dict[int, str], some: list[Case]) -> None:
    assert not wrong, report(wrong, [case.function for case in some])


@pytest.fixture
def some_cases(rng: np.random.Generator) -> list[Case]:
    return cases([*range(FIXED), *ONCE_WRONG, *rng.integers(10**6, 10**9, FRESH)])


def test_the_cpu_backend_computes_random_functions(some_cases: list[Case]) -> None:
    found = {case.function.number: wrong_on_cpu(case) for case in some_cases}
    require_none({number: why for number, why in found.items() if why}, some_cases)


@pytest.mark.slow
def test_device_text_on_the_host_computes_random_functions(
    some_cases: list[Case], tmp_path: Path
) -> None:
    require_none(wrong_on_host_text(tmp_path, some_cases), some_cases)


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, COUNT, PART))
def test_the_cpu_backend_and_device_text_compute_all(begin: int, tmp_path: Path) -> None:
    some = cases(range(begin, begin + PART))
    found = {case.function.number: wrong_on_cpu(case) for case in some}
    require_none({number: why for number, why in found.items() if why}, some)
    require_none(wrong_on_host_text(tmp_path, some), some)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", DTYPES)
def test_attention_and_its_gradients_see_the_same_pairs(inputs: str) -> None:
    for call in itertools.islice(function_calls(DTYPES.index(inputs) + 1, inputs), 10):
        call.check(np)


# ---- Coverage of operations


@pytest.mark.slow
@pytest.mark.parametrize(("count", "least"), [(1000, 8), (COUNT, 100)])
def test_every_operation_is_in_many_functions(count: int, least: int) -> None:
    written: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    traced: Counter[tuple[str, ...]] = Counter()
    captured: Counter[Any] = Counter()
    for number in range(count):
        function = random_function(number)
        written.update({node.op for node in nodes_of(function)})
        mod = modification(function)
        computed = [node for node in postorder(mod.expression) if node.args]
        operations.update({node.op for node in computed})
        traced.update({(node.op, *(x.type for x in node.args)) for node in computed})
        captured.update({(spec.dtype, spec.rank) for spec in mod.specs.values()})
    # "strict" and "free" are marks, which compute nothing.
    rows = OPERATIONS.keys() - {"strict", "free"} | {"cast", "load"}
    assert not {op: operations[op] for op in rows if operations[op] < least}
    assert not {name: written[name] for name in FUNCTIONS if written[name] < least}
    # Loads take an array and up to four indices, so each combination of types is rare.
    by_type = {key: n for key, n in traced.items() if key[0] != "load"}
    assert not {key: n for key, n in by_type.items() if n < least // 8}
    dtypes = {"bool", "uint8", "int32", "int64", "uint64", "float16", "bfloat16", "float32"}
    assert {dtype for dtype, rank in captured if rank is not None} == dtypes | {"float64"}
    assert {dtype for dtype, rank in captured if rank is None} == {"bool", "int32", "real"}
    assert {rank for _, rank in captured} == {None, 0, 1, 2, 3, 4}


def test_few_pairs_are_left_out_and_masks_say_both() -> None:
    some = cases(range(400))
    assert np.mean([case.share_known for case in some]) > 0.9
    masks = [case.right for case in some if case.function.kind == "mask"]
    both = [0 < x.v[x.e == 0].sum() < (x.e == 0).sum() for x in masks]
    assert np.mean(both) > 0.8


def test_a_number_gives_the_same_function_again() -> None:
    for number in range(20):
        first, second = random_function(number), random_function(number)
        assert str(first) == str(second)
        for name, value in first.captures.items():
            np.testing.assert_array_equal(value, second.captures[name])


# The first draws of these functions have indices like ~(x ** 0).
@pytest.mark.parametrize("number", [4742, 5726])
def test_no_index_is_a_negative_constant(number: int) -> None:
    modification(random_function(number))


# ---- The evaluator, compared with known results


def leaf(value: Any, type: str) -> Expr:
    return Expr("literal", type, (), value)


def computed(op: str, type: str, *args: tuple[Any, str], real: Any = np.float32) -> Any:
    """Return the result of an operation on numbers."""
    node = Expr(op, type, tuple(leaf(*arg) for arg in args))
    return Oracle({}, {}, real).value(node).v


@pytest.mark.parametrize(
    ("op", "type", "args", "expected"),
    [
        ("floor_divide", INT, [(-7, INT), (2, INT)], -4),
        ("floor_divide", INT, [(-(2**31), INT), (-1, INT)], -(2**31)),
        ("floor_divide", INT, [(5, INT), (0, INT)], 0),
        ("remainder", INT, [(-7, INT), (3, INT)], 2),
        ("remainder", INT, [(5, INT), (0, INT)], 0),
        ("floor_divide", UINT64, [(2**64 - 1, UINT64), (0, UINT64)], 0),
        ("multiply", INT, [(65536, INT), (65536, INT)], 0),
        ("negative", INT, [(-(2**31), INT)], -(2**31)),
        ("absolute", INT, [(-(2**31), INT)], -(2**31)),
        ("left_shift", INT, [(1, INT), (32, INT)], 0),
        ("left_shift", INT, [(1, INT), (-1, INT)], 0),
        ("right_shift", INT, [(-5, INT), (40, INT)], -1),
        ("right_shift", INT, [(5, INT), (-1, INT)], 0),
        ("right_shift", UINT64, [(2**63, UINT64), (64, UINT64)], 0),
        ("astype", INT, [(np.nan, REAL)], 0),
        ("astype", INT, [(3e9, REAL)], 2**31 - 1),
        ("astype", INT, [(-np.inf, REAL)], -(2**31)),
        ("astype", INT, [(-1.9, REAL)], -1),
        ("astype", UINT64, [(-3.0, REAL)], 0),
        ("astype", UINT64, [(1e30, REAL)], 2**64 - 1),
        ("astype", UINT64, [(-1, INT)], 2**64 - 1),
        ("astype", INT, [(2**32 + 5, UINT64)], 5),
        ("astype", INT, [(2**31, UINT64)], -(2**31)),
        ("astype", BOOL, [(np.nan, REAL)], True),
        ("add", BOOL, [(True, BOOL), (True, BOOL)], True),
        ("sign", UINT64, [(5, UINT64)], 1),
        ("power", INT, [(3, INT), (31, INT)], 3**31 % 2**32),
        ("power", REAL, [(-np.inf, REAL), (1.5, REAL)], np.inf),
        ("power", REAL, [(-np.inf, REAL), (0.5, REAL)], np.inf),
        ("floor_divide", REAL, [(5.0, REAL), (np.inf, REAL)], 0.0),
        ("floor_divide", REAL, [(-5.0, REAL), (np.inf, REAL)], -1.0),
        ("remainder", REAL, [(-5.0, REAL), (np.inf, REAL)], np.inf),
        ("minimum", REAL, [(np.nan, REAL), (1.0, REAL)], np.nan),
        ("maximum", REAL, [(1.0, REAL), (np.nan, REAL)], np.nan),
        ("multiply", REAL, [(41, INT), (0.7, REAL)], np.float32(41) * np.float32(0.7)),
        ("divide", REAL, [(1, INT), (3, INT)], np.float32(1) / np.float32(3)),
        ("add", REAL, [(2**24 + 1, INT), (0.0, REAL)], 2.0**24),
    ],
)
def test_the_evaluator_knows_what_numpy_leaves_open(
    op: str, type: str, args: list[tuple[Any, str]], expected: Any
) -> None:
    found = computed(op, type, *args)
    dtypes = {INT: np.int32, UINT64: np.uint64, BOOL: np.bool_, REAL: np.float32}
    assert np.asarray(found).dtype == dtypes[type]
    np.testing.assert_array_equal(found, expected)


def test_decisions_of_inexact_values_that_are_near_are_left_out() -> None:
    x = np.float32(np.exp(np.float64(np.float32(0.3))))
    near = [x, np.nextafter(x, np.float32(9)), x + np.float32(2e-6), x + np.float32(0.1)]
    symbol = Expr("symbol", REAL, (), "score")
    node = Expr("less", BOOL, (Expr("exp", REAL, (leaf(0.3, REAL),)), symbol))
    error = Oracle({"score": np.array(near, np.float32)}, {}).value(node).e
    np.testing.assert_array_equal(error > 0, [True, True, False, False])
    # Exact comparisons are never left out, and one operand that decides alone is enough.
    exact = Expr("less", BOOL, (leaf(0.3, REAL), symbol))
    both = Expr("bitwise_and", BOOL, (node, Expr("less", BOOL, (symbol, leaf(0.0, REAL)))))
    oracle = Oracle({"score": np.array(near, np.float32)}, {})
    assert not np.any(oracle.value(exact).e)
    assert not np.any(oracle.value(both).e)


def test_sums_of_products_that_overflow_are_left_out_where_contraction_matters() -> None:
    score = Expr("symbol", REAL, (), "score")
    large = leaf(2e38, REAL)

    def error(term: Expr) -> Any:
        scores = np.array([-np.inf, np.inf, 1.0], np.float32)
        oracle = Oracle({"score": scores}, {})
        found = oracle.value(Expr("add", REAL, (score, term)))
        assert not np.any(found.e)
        return np.broadcast_to(found.s, scores.shape)

    operands = {"multiply": (large, large), "square": (large,), "divide": (large, leaf(0.01, REAL))}
    for op, args in operands.items():
        product = Expr(op, REAL, args)
        negative = Expr("negative", REAL, (Expr("negative", REAL, (product,)),))
        for term in (product, negative):
            np.testing.assert_array_equal(np.isfinite(error(term)), [False, True, True])
    # A captured infinity stays infinite, however it is added.
    assert np.isfinite(error(leaf(np.inf, REAL))).all()


@pytest.mark.parametrize("right", [3e38, -3e38, float(np.finfo(np.float32).max), 2.3e38, 1e38])
def test_finite_scores_stay_finite_as_exponents(right: float) -> None:
    function = replace(random_function(0), kind="score", inputs="float32")
    pairs = random_pairs(function)
    count = len(pairs.scores)
    v, zeros = np.full(count, right, np.float32), np.zeros(count)
    case = Case(function, pairs, Value(v, zeros, zeros))
    largest = np.float32(np.finfo(np.float32).max)
    # A kernel returns ln(2) times an exponent of two, which is at most the largest number.
    kept = np.clip(v.astype(np.float64) * np.log2(np.e), -largest, largest).astype(np.float32)
    assert case.wrong_score(kept * np.float32(np.log(2))) is None
    assert case.wrong_score(np.full(count, np.copysign(np.inf, right), np.float32))
    assert case.wrong_score(np.full(count, np.nan, np.float32))


def test_an_index_outside_reads_the_nearest_element() -> None:
    load = Expr("load", INT, (Expr("symbol", INT, (), "i"),), "x")
    oracle = Oracle({"i": np.array([-9, 1, 99], np.int32)}, {"x": np.array([5, 6, 7])})
    found = oracle.value(load)
    np.testing.assert_array_equal(found.v, np.array([5, 6, 7], np.int32))
    assert found.v.dtype == np.int32
