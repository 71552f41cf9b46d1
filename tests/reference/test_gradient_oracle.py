"""The two oracles of gradients, compared with finite differences and with each other."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gradients import gradient_cases, gradient_oracle
from support.gradients.gradient_cases import (
    CLASSES,
    DTYPES,
    MASK_MODS,
    MODIFICATIONS,
    SCORE_MODS,
    Case,
    arguments,
    compare,
    draw,
    draw_class,
)
from support.gradients.gradient_oracle import Arithmetic, OracleCall, attention, naive

from cupy_flash.reference.gradients import attention_backward_reference
from cupy_flash.reference.packed_gradients import attention_varlen_backward_reference

FLOAT64 = Arithmetic(np.dtype(np.float64), np.dtype(np.float64))


def test_the_oracle_imports_nothing_of_the_library() -> None:
    tree = ast.parse(Path(gradient_oracle.__file__).read_text(encoding="utf-8"))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).partition(".")[0])
    assert roots == {"__future__", "collections", "dataclasses", "math", "numpy", "typing"}


def test_the_classes_have_every_modification_in_every_dtype() -> None:
    classes = [draw_class(number) for number in range(CLASSES)]
    for name in MODIFICATIONS[:-1]:
        assert {c.dtype for c in classes if name in c.modifications} == set(DTYPES), name
        packed = {c.is_packed for c in classes if name in c.modifications}
        assert packed == ({False} if name == "tree" else {False, True}), name
    for kind, functions in (("score_mod", SCORE_MODS), ("mask_mod", MASK_MODS)):
        assert {getattr(c, kind) for c in classes if kind in c.modifications} == set(functions)
    for of in ("has_lengths", "has_dlse", "has_all_gradients", "causal", "is_packed"):
        assert {getattr(c, of) for c in classes} == {False, True}
    assert any(c.is_padding_bias for c in classes if "bias" in c.modifications)
    assert any(c.has_offset and (c.causal or "window" in c.modifications) for c in classes)
    assert any(c.has_lengths and c.is_packed for c in classes)


@pytest.mark.parametrize("number", range(0, CLASSES, 7))
def test_an_error_of_a_tenth_is_found_in_every_result(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = draw(number)
    call = case.oracle
    plain = attention(call, naive(call.q.dtype)).by_name()
    found = {"out": plain["out"].astype(call.q.dtype), "lse": plain["lse"]}
    found |= {name: plain[name].astype(case.dtype_of(name)) for name in case.wrt}
    monkeypatch.setattr(gradient_cases, "_run", lambda *_: found)
    assert all(x.error <= x.allowed for x in compare(case, np))
    # Gradients are changed first, because their allowed errors are computed from out and lse.
    for names in (case.wrt, ("out", "lse")):
        changed = []
        for name in names:
            sizes = abs(found[name].astype(np.float64))
            largest = np.unravel_index(int(np.where(sizes < 1e4, sizes, 0).argmax()), sizes.shape)
            if sizes[largest] > 1e-3:
                found[name][largest] *= 0.9
                changed.append(name)
        wrong = [x.name for x in compare(case, np) if x.name in names and not x.error <= x.allowed]
        assert sorted(wrong) == sorted(changed), case
        assert changed


def in_float64(call: OracleCall) -> OracleCall:
    """Return the same call with reals in float64."""

    def wide(x: Any) -> Any:
        is_real = isinstance(x, np.ndarray) and x.dtype.kind not in "iub"
        return x.astype(np.float64) if is_real else x

    changed = {f.name: wide(getattr(call, f.name)) for f in dataclasses.fields(call)}
    changed["captures"] = {name: wide(x) for name, x in call.captures.items()}
    return dataclasses.replace(call, **changed)


@pytest.mark.parametrize("number", range(CLASSES))
def test_the_oracle_has_the_slopes_of_its_outputs(number: int) -> None:
    case = draw(number)
    call = in_float64(case.oracle)
    gradients = attention(call, FLOAT64).gradients
    if case.of.is_padding_bias:
        # A step of 1e-5 is lost in a bias of 1e308.
        gradients.pop("bias", None)

    def loss(changed: OracleCall) -> Any:
        out, lse, _ = attention(changed, FLOAT64)
        total = (np.nan_to_num(call.dout) * out).sum()
        if call.dlse is not None:
            counts = np.isfinite(lse) & np.isfinite(call.dlse)
            total += (call.dlse[counts] * lse[counts]).sum()
        return total

    rng, step = np.random.default_rng(number), 1e-5
    directions = {name: rng.normal(size=x.shape) for name, x in gradients.items()}
    up, down = (loss(moved(call, directions, sign * step)) for sign in (1, -1))
    terms = [(gradients[name] * directions[name]).ravel() for name in gradients]
    expected, size = (sum(f(x).sum() for x in terms) for f in (np.asarray, abs))
    assert abs((up - down) / (2 * step) - expected) <= 1e-6 * (size + 1), case


def moved(call: OracleCall, directions: dict[str, np.ndarray], step: float) -> OracleCall:
    """Return the call with `step` times a direction added to each named input."""
    captures, changed = dict(call.captures), {}
    for name, direction in directions.items():
        if name.startswith("score_mod."):
            name = name.removeprefix("score_mod.")
            captures[name] = captures[name] + step * direction
        else:
            changed[name] = getattr(call, name) + step * direction
    return dataclasses.replace(call, captures=captures, **changed)


@pytest.mark.parametrize("number", range(CLASSES))
def test_the_reference_agrees_with_the_oracle(number: int) -> None:
    case = draw(number)
    # The call is float64, as functions of narrower calls may compute in float32.
    call = in_float64(case.oracle)
    of = dataclasses.replace(case.of, dtype="float64", grad_dtype=None, array_dtype="float64")
    wide = Case(number, of, call, case.max_seqlens, case.wrt)
    positional, named = arguments(wide, np)
    function: Any = attention_backward_reference
    if of.is_packed:
        function = attention_varlen_backward_reference
    gradients = function(*positional, **named)
    truth = attention(call, FLOAT64).by_name()
    for name, found in zip(case.wrt, gradients, strict=True):
        if of.layout == "bhsd" and name in ("q", "k", "v"):
            found = found.swapaxes(1, 2)
        size = abs(truth[name]).max(initial=1)
        error = abs(found - truth[name]).max(initial=0)
        assert error <= 1e-11 * size, (name, float(error), case)
