"""Gradients of random calls on a GPU, against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.gpu import cupy
from support.gpu.gpu_support import current_device
from support.gradients.gradient_calls import KINDS, ROWS, GradientCall, random_gradient_call
from support.gradients.gradient_rule import check_gradients

from cupy_flash import UnsupportedError
from cupy_flash.cli.cases.cases import Case
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import gpu_unavailable

pytestmark = pytest.mark.gpu

# Compilation takes ten times as long as the rest, so the calls of a test differ only in properties
# that need no other kernel.
TESTS, CALLS = 600, 5


def draw(test: int, number: int) -> tuple[GradientCall, str | None]:
    """Return a call and the requested family, or None for the planner's choice."""
    rng, sizes = np.random.default_rng(test), np.random.default_rng((test, number))
    family = str(rng.choice(["any", *FAMILIES["backward"]]))
    dtype, kind = str(rng.choice(list(DTYPES))), str(rng.choice(KINDS))
    call = random_gradient_call(rng, dtype, kind, sizes=sizes)
    return call, None if family == "any" else family


@pytest.mark.parametrize("test", range(TESTS))
def test_random_gradients_are_right_in_every_family(test: int) -> None:
    for number in range(CALLS):
        call, family = draw(test, number)
        try:
            got = call.run(cupy, family=family)
        except UnsupportedError:
            # If the requested family does not support the call, another one does.
            assert family is not None
            got = call.run(cupy)
        check_gradients(call, got)


def tiled_case(head_dim: int, head_dim_v: int) -> Case:
    """Return a case with several query tiles and KV tiles of any size, the last ones partial."""
    sizes = {"batch": 1, "seqlen_q": 500, "seqlen_k": 700, "heads_q": 4, "heads_kv": 2}
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    return Case("bfloat16", **sizes, **dims, causal=True, direction="backward")


def tiles() -> list[tuple[str, tuple[int, int], Any]]:
    """Return families, head dims and legal tiles: at most 6 tiles per head dims, but all tiles of
    `hopper`, also with values of `columns` that the tuner does not try."""
    if gpu_unavailable():
        return []
    device, found = current_device(), []
    for name, family in FAMILIES["backward"].items():
        for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (160, 192), (256, 256)):
            problem = tiled_case(*dims).problem()
            if family.why_not(problem, device):
                continue
            legal = list(dict.fromkeys(family.candidates(problem, device)))
            if name == "hopper":
                legal += [dataclasses.replace(t, columns=n) for t in legal for n in (16, 32, 128)]
            legal = [t for t in legal if family.why_not_tile(problem, device, t) is None]
            step = 1 if name == "hopper" else -(-len(legal) // 6)
            found += [(name, dims, tile) for tile in legal[::step]]
    return found


@pytest.mark.parametrize(("family", "dims", "tile"), tiles(), ids=str)
def test_every_tile_that_is_legal_gives_the_gradients(
    rng: np.random.Generator, family: str, dims: tuple[int, int], tile: Any
) -> None:
    case = tiled_case(*dims)
    of_dout = (*case.bshd_shapes[0][:-1], case.head_dim_v)
    shapes = dict(zip((*ROWS, "dout"), (*case.bshd_shapes, of_dout), strict=True))
    arrays = {n: rng.standard_normal(x).astype(DTYPES[case.dtype]) for n, x in shapes.items()}
    dout = arrays.pop("dout")
    call = GradientCall(ModifiedCall("dense", case.dtype, arrays, {"causal": True}), dout)
    check_gradients(call, call.run(cupy, family=family, tile=dataclasses.asdict(tile)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_inputs_give_the_same_bits(dtype: str) -> None:
    rng = np.random.default_rng(0)
    call = random_gradient_call(rng, dtype, "dense", head_dims=(64,), longest=(300, 300))
    first = call.run(cupy)
    for _ in range(20):
        again = call.run(cupy)
        for name, gradient in first.items():
            np.testing.assert_array_equal(gradient.view(np.uint8), again[name].view(np.uint8))
