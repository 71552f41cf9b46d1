"""Functions of the user in calls whose queries attend to listed keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.key_list_calls import KINDS, random_call

import cupy_flash
from cupy_flash import BlockList, MaskMod, ScoreMod, UnsupportedError, flash_attention
from cupy_flash.calls.key_lists import forward
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.problem.device import device_for_arch


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """Module of an array library, NumPy or CuPy."""
    return importlib.import_module(request.param)


def on_host(array: Any) -> np.ndarray:
    host: np.ndarray = array.get() if hasattr(array, "get") else array
    return host


def functions(rng: np.random.Generator) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a score and a mask function, which read `keys` by h, i and j."""
    table, seen = rng.standard_normal((16, 90)).astype(np.float32), rng.random(90) < 0.7

    def make(convert: Callable[..., Any]) -> dict[str, Any]:
        keys, visible = convert(table), convert(seen)
        return {
            "score_mod": ScoreMod(
                lambda score, h, i, j, keys: score + keys[h, i - j + 40], keys=keys
            ),
            "mask_mod": MaskMod(lambda i, j, visible: visible[j] | (i == j), visible=visible),
        }

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(2))
def test_random_calls_obey_the_error_rule(
    number: int, kind: str, xp: Any, rng: np.random.Generator
) -> None:
    kernels = int(rng.integers(2**32))
    for _ in range(12 if xp is not np else 2):
        make = functions(rng)
        call = random_call(rng, kind, choices=np.random.default_rng(kernels)).modified(make)
        call.check(*call.run(xp, **make(xp.asarray)))
        call.check(*call.reference())


# Functions of everything that a function may read.
EVERYTHING = {
    "score_mod": lambda convert, table: ScoreMod(
        lambda score, b, h, i, j, q_start, k_start, table: (
            score * (1 + table[h, j]) + table[b, i] + 0.1 * (q_start - k_start)
        ),
        table=convert(table),
    ),
    "mask_mod": lambda convert, table: MaskMod(
        lambda b, h, i, j, q_start, k_start, table: (
            table[b + h, (i + j) % 20] + 0.1 * (q_start - k_start) > -1
        ),
        table=convert(table),
    ),
    "constant": lambda convert, table: ScoreMod(lambda score: np.tanh(score)),
    "blocks": lambda convert, table: BlockList(convert(table[None, None, :4, :4] > -0.5), (2, 5)),
}


@pytest.mark.parametrize("lists", [1, 2])
@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_function_sees_the_call_and_not_the_list(
    kind: str, name: str, lists: int, xp: Any, rng: np.random.Generator
) -> None:
    table = rng.standard_normal((8, 20))
    argument = name if name in ("score_mod", "mask_mod") else "score_mod"
    argument = "mask_mod" if name == "blocks" else argument
    if kind == "dense":
        shapes, lengths = ((3, 5, 4, 8), (3, 9, 2, 8), (3, 9, 2, 8)), ()
        names = ("flash_attention", "attention_reference", "attention_backward_reference")
        indices = rng.integers(-1, 10, (3, 5, lists, 12))
    else:
        shapes, lengths = ((8, 4, 8), (18, 2, 8), (18, 2, 8)), ([0, 3, 3, 8], [0, 7, 11, 18], 5, 7)
        names = (
            *("flash_attention_varlen", "attention_varlen_reference"),
            "attention_varlen_backward_reference",
        )
        indices = rng.integers(-1, 8, (8, lists, 12))
    forward, reference, backward_reference = (getattr(cupy_flash, x) for x in names)
    backward = getattr(cupy_flash, f"{names[0]}_backward")
    inputs = [rng.standard_normal(x) for x in shapes]
    plain = {"key_indices": indices, argument: EVERYTHING[name](np.asarray, table), "causal": True}
    given = plain | {
        "key_indices": xp.asarray(indices),
        argument: EVERYTHING[name](xp.asarray, table),
    }
    rows = [xp.asarray(x) for x in inputs]
    out, lse = forward(*rows, *lengths, return_lse=True, **given)
    wanted = {} if lengths else {"return_lse": True}
    expected, expected_lse = reference(*inputs, *lengths, **wanted, **plain)
    np.testing.assert_allclose(on_host(out), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(on_host(lse), expected_lse, rtol=0, atol=1e-12)
    dout = rng.standard_normal(expected.shape)
    found = backward(xp.asarray(dout), *rows, out, lse, *lengths, **given)
    gradients = backward_reference(dout, *inputs, *lengths, **plain)
    for one, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(on_host(one), other, rtol=0, atol=1e-11)


def test_a_function_that_cannot_be_traced_is_refused() -> None:
    q = k = v = np.ones((1, 4, 2, 8), np.float32)
    mod = MaskMod(lambda i, j: j in (i, 0), cuda="return j == i || j == 0;")
    with pytest.raises(UnsupportedError, match="mask_mod has CUDA source"):
        flash_attention(q, k, v, mask_mod=mod, key_indices=np.zeros((1, 4, 1, 2), int))


@pytest.mark.slow
def test_a_kernel_with_captured_positions_compiles(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    calls = []
    run = forward.dispatch.attention
    monkeypatch.setattr(forward.dispatch, "attention", lambda *x: calls.append(x) or run(*x))
    q, k, v = (rng.standard_normal((2, n, 2, 64)).astype(np.float16) for n in (3, 40, 40))
    table = rng.standard_normal((8, 40)).astype(np.float32)
    mods = {x: EVERYTHING[x](np.asarray, table) for x in ("score_mod", "mask_mod")}
    # CUDA text is given the positions, too.
    mods["mask_mod"] = MaskMod(lambda h, i, j: j <= i + h, cuda="return j <= i + h;")
    lists = rng.integers(-1, 40, (2, 3, 1, 20))
    flash_attention(q, k, v, key_indices=lists, **mods)
    arguments, options, *_, own = calls[0]
    made = forward.dispatch.plan(arguments, options, "gpu", "sm_90", own)
    assert made.unit is not None
    cubin = compile_cubin(made.unit, device_for_arch("sm_90"))
    assert set(cubin.resources) == {launch.entry for launch in made.launches}
