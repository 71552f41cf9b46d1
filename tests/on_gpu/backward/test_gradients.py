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

import cupy_flash
from cupy_flash import UnsupportedError
from cupy_flash.cli.cases.cases import Case
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import gpu_unavailable

pytestmark = pytest.mark.gpu

# Compilation takes ten times as long as the rest, so the calls of a test differ only in properties
# that need no other kernel.
TESTS, WIDE_TESTS, CALLS = 600, 80, 5
# Head dims of calls with wide heads. Either head_dim or head_dim_v may be narrow.
WIDE = (64, 257, 264, 320, 400, 512, 576)


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


@pytest.mark.parametrize("test", range(WIDE_TESTS))
def test_random_gradients_of_wide_heads_are_right(test: int) -> None:
    rng = np.random.default_rng((test, 512))
    dtype = str(rng.choice(("float16", "bfloat16", "float32")))
    kind = str(rng.choice(KINDS))
    for number in range(CALLS):
        sizes = np.random.default_rng((test, number))
        call = random_gradient_call(
            np.random.default_rng(test), dtype, kind, head_dims=WIDE, sizes=sizes
        )
        try:
            got = call.run(cupy, family="mma")
        except UnsupportedError:
            got = call.run(cupy)
        check_gradients(call, got)


# Head dims whose columns two thread blocks divide. The second half is complete, partial, or empty.
@pytest.mark.parametrize(
    "head_dims",
    [(512, 512), (384, 384), (264, 264), (320, 448), (512, 64), (40, 512), (128, 272), (504, 256)],
    ids=str,
)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (24, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_of_the_columns_give_the_gradients(
    rng: np.random.Generator,
    head_dims: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    dtype: str,
) -> None:
    for rows, keys in ((1, 1), (65, 200), (int(rng.integers(300, 700)), int(rng.integers(2, 700)))):
        shapes = {"q": (2, rows, heads[0], head_dims[0]), "k": (2, keys, heads[1], head_dims[0])}
        shapes["v"] = (*shapes["k"][:-1], head_dims[1])
        shapes["dout"] = (*shapes["q"][:-1], head_dims[1])
        arrays = {n: rng.standard_normal(x).astype(DTYPES[dtype]) for n, x in shapes.items()}
        dout = arrays.pop("dout")
        call = GradientCall(ModifiedCall("dense", dtype, arrays, {"causal": causal}), dout)
        try:
            found = call.run(cupy, family="hopper")
        except UnsupportedError:
            pytest.skip("hopper does not serve this GPU")
        check_gradients(call, found)
        for name, gradient in call.run(cupy, family="hopper").items():
            np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))


def tiled_case(head_dims: tuple[int, int], dtype: str = "bfloat16") -> Case:
    """Return a case with several query tiles and KV tiles of any size, the last ones partial."""
    sizes = {"batch": 1, "seqlen_q": 500, "seqlen_k": 700, "heads_q": 4, "heads_kv": 2}
    dims = dict(zip(("head_dim", "head_dim_v"), head_dims, strict=True))
    return Case(dtype, **sizes, **dims, causal=True, direction="backward")


# Head dims and dtypes of cases that run with several tiles.
TILED = [((d, d), "bfloat16") for d in (64, 96, 128, 256, 320, 512)]
TILED += [(dims, "bfloat16") for dims in ((192, 128), (160, 192), (512, 264), (576, 512))]
TILED += [((64, 512), "float16"), ((512, 512), "float32")]


def tiles() -> list[tuple[str, tuple[int, int], str, Any]]:
    """Return families, head dims, dtypes and legal tiles.

    There are at most 6 tiles per case, except for `hopper`: all tiles of the tuner, and tiles with
    values of `columns` that the tuner does not try.
    """
    if gpu_unavailable():
        return []
    device, found = current_device(), []
    for name, family in FAMILIES["backward"].items():
        for head_dims, dtype in TILED:
            problem = tiled_case(head_dims, dtype).problem()
            if family.why_not(problem, device):
                continue
            legal = list(dict.fromkeys(family.candidates(problem, device)))
            if name == "hopper":
                legal += [dataclasses.replace(t, columns=n) for t in legal for n in (16, 32, 128)]
            legal = [t for t in legal if family.why_not_tile(problem, device, t) is None]
            step = 1 if name == "hopper" else -(-len(legal) // 6)
            found += [(name, head_dims, dtype, tile) for tile in legal[::step]]
    return found


@pytest.mark.parametrize(("family", "head_dims", "dtype", "tile"), tiles(), ids=str)
def test_every_tile_that_is_legal_gives_the_gradients(
    rng: np.random.Generator, family: str, head_dims: tuple[int, int], dtype: str, tile: Any
) -> None:
    case = tiled_case(head_dims, dtype)
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


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("heads_kv", [48, 24, 2])
@pytest.mark.parametrize("window", [None, (200, 0)])
def test_sections_of_ascending_and_descending_thread_blocks_are_right(
    rng: np.random.Generator, head_dim: int, heads_kv: int, window: tuple[int, int] | None
) -> None:
    """Only some of the many heads belong to the last section."""
    rows, keys = (int(rng.integers(270, 380)) for _ in range(2))
    shapes = {"q": (3, rows, 48, head_dim), "k": (3, keys, heads_kv, head_dim)}
    shapes |= {"v": shapes["k"], "dout": shapes["q"]}
    arrays = {n: rng.standard_normal(x).astype(DTYPES["bfloat16"]) for n, x in shapes.items()}
    dout = arrays.pop("dout")
    options: dict[str, Any] = {"causal": True} | ({} if window is None else {"window_size": window})
    call = GradientCall(ModifiedCall("dense", "bfloat16", arrays, options), dout)
    found = call.run(cupy)
    check_gradients(call, found)
    for name, gradient in call.run(cupy).items():
        np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2)], ids=str)
@pytest.mark.parametrize(
    ("family", "dtype", "head_dim"),
    [
        ("hopper", "bfloat16", 64),
        ("hopper", "float16", 128),
        ("mma", "bfloat16", 64),
        ("mma", "float32", 64),
        ("mma", "float32", 128),
    ],
)
def test_queries_of_few_heads_are_divided_among_thread_blocks(
    rng: np.random.Generator,
    family: str,
    dtype: str,
    head_dim: int,
    heads: tuple[int, int],
    causal: bool,
) -> None:
    rows, keys = (int(rng.integers(900, 1300)) for _ in range(2))
    shapes = {"q": (1, rows, heads[0], head_dim), "k": (1, keys, heads[1], head_dim)}
    shapes |= {"v": shapes["k"], "dout": shapes["q"]}
    arrays = {n: rng.standard_normal(x).astype(DTYPES[dtype]) for n, x in shapes.items()}
    dout = arrays.pop("dout")
    call = GradientCall(ModifiedCall("dense", dtype, arrays, {"causal": causal}), dout)
    try:
        found = call.run(cupy, family=family)
    except UnsupportedError:
        pytest.skip(f"{family} does not serve this GPU")
    check_gradients(call, found)
    for _ in range(10):
        for name, gradient in call.run(cupy, family=family).items():
            np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))


# Options of calls in which the KV tiles of a pair differ: one is masked, or does not exist.
PAIR_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "first keys": {"causal": True, "q_offset": -90},
    "few last rows": {"causal": True, "q_offset": 40},
    "window": {"causal": True, "window_size": (70, 0)},
    "both sides": {"window_size": (50, 90)},
    "float32": {"causal": True, "grad_dtype": "float32"},
    "dq alone": {"wrt": ("q",)},
}


@pytest.mark.parametrize("options", PAIR_OPTIONS.values(), ids=list(PAIR_OPTIONS))
@pytest.mark.parametrize("keys", [1, 50, 64, 65, 128, 130, 449])
@pytest.mark.parametrize("head_dims", [(256, 256), (192, 128), (136, 136), (64, 200)], ids=str)
def test_pairs_of_kv_tiles_give_the_gradients(
    rng: np.random.Generator, head_dims: tuple[int, int], keys: int, options: dict[str, Any]
) -> None:
    rows, (dim, dim_v) = int(rng.integers(1, 400)), head_dims
    shapes = {"q": (2, rows, 6, dim), "k": (2, keys, 2, dim), "v": (2, keys, 2, dim_v)}
    shapes["dout"] = (2, rows, 6, dim_v)
    arrays = {n: rng.standard_normal(x).astype(DTYPES["bfloat16"]) for n, x in shapes.items()}
    dout, options = arrays.pop("dout"), dict(options)
    wanted = {name: options.pop(name, None) for name in ("wrt", "grad_dtype")}
    call = GradientCall(ModifiedCall("dense", "bfloat16", arrays, options), dout, **wanted)
    tile = {"Br": 64, "Bc": 64, "dout_stages": 1, "pair": 2}
    try:
        found = call.run(cupy, family="hopper", tile=tile)
    except UnsupportedError:
        pytest.skip("this GPU has no clusters")
    check_gradients(call, found)
    for name, gradient in call.run(cupy, family="hopper", tile=tile).items():
        np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(256, 256), (192, 128)], ids=str)
def test_many_pairs_give_the_same_bits(head_dims: tuple[int, int], causal: bool) -> None:
    """Each SM runs several pairs, and sections of both orders occur if `causal`."""
    rng, (dim, dim_v) = np.random.default_rng(7), head_dims
    shapes = {"q": (1, 2000, 12, dim), "k": (1, 2100, 12, dim), "v": (1, 2100, 12, dim_v)}
    shapes["dout"] = (1, 2000, 12, dim_v)
    arrays = {n: rng.standard_normal(x).astype(DTYPES["bfloat16"]) for n, x in shapes.items()}
    dout = arrays.pop("dout")
    call = GradientCall(ModifiedCall("dense", "bfloat16", arrays, {"causal": causal}), dout)
    found = call.run(cupy)
    check_gradients(call, found)
    for _ in range(20):
        for name, gradient in call.run(cupy).items():
            np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (300, 0)}, {"wrt": ("q",)}], ids=str
)
@pytest.mark.parametrize("head_dims", [(128, 128), (96, 128), (256, 256), (256, 200)], ids=str)
def test_many_thread_blocks_of_mma_give_the_same_bits(
    head_dims: tuple[int, int], options: dict[str, Any]
) -> None:
    """Each SM runs several thread blocks, and those of a head wait for each other's dq."""
    rng, (dim, dim_v), options = np.random.default_rng(8), head_dims, dict(options)
    shapes = {"q": (1, 2030, 12, dim), "k": (1, 2100, 6, dim), "v": (1, 2100, 6, dim_v)}
    shapes["dout"] = (1, 2030, 12, dim_v)
    arrays = {n: rng.standard_normal(x).astype(DTYPES["bfloat16"]) for n, x in shapes.items()}
    dout, wrt = arrays.pop("dout"), options.pop("wrt", None)
    call = GradientCall(ModifiedCall("dense", "bfloat16", arrays, options), dout, wrt=wrt)
    found = call.run(cupy, family="mma")
    check_gradients(call, found)
    for _ in range(20):
        for name, gradient in call.run(cupy, family="mma").items():
            np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))


def fetches_kv_tiles(call: GradientCall) -> bool:
    """Return whether thread blocks fetch the KV tiles of a call from a list."""
    q, k, v = (call.forward.arrays[name] for name in ROWS)
    backward = cupy_flash.flash_attention_backward
    plan = cupy_flash.plan(backward, q=q, k=k, v=v, arch="sm_90", wrt=call.wrt or ROWS)
    return "counters" in plan.schedule.workspace_offsets


@pytest.mark.parametrize(
    ("grad_dtype", "wrt"),
    [(None, None), ("float32", None), (None, ("q",)), (None, ("q", "k")), ("float32", ("q", "v"))],
    ids=str,
)
@pytest.mark.parametrize("head_dims", [(64, 64), (40, 64), (64, 24)], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "keys"),
    [(9, (50, 50), (128, 129)), (9, (50, 50), (129, 256)), (4, (22, 11), (1290, 1400))],
    ids=str,
)
def test_thread_blocks_process_many_kv_tiles_of_few_queries(
    rng: np.random.Generator,
    batch: int,
    heads: tuple[int, int],
    keys: tuple[int, int],
    head_dims: tuple[int, int],
    grad_dtype: str | None,
    wrt: tuple[str, ...] | None,
) -> None:
    """Thread blocks fetch the KV tiles of the whole batch, but not those of one sequence.

    The last of one to three query tiles is partial or half empty. The first sequence is NaN in some
    of its rows, which concerns no other sequence.
    """
    if current_device().arch != 90:
        pytest.skip("only the Hopper kernel fetches KV tiles")
    dim, dim_v = head_dims
    seqlen_k = int(rng.integers(*keys))
    for rows in (*(int(x) for x in rng.integers(1, 384, 2)), 64, 192, 257, 320):
        shapes = {"q": (batch, rows, heads[0], dim), "k": (batch, seqlen_k, heads[1], dim)}
        shapes |= {"v": (*shapes["k"][:3], dim_v), "dout": (*shapes["q"][:3], dim_v)}
        arrays = {n: rng.standard_normal(x).astype(DTYPES["bfloat16"]) for n, x in shapes.items()}
        for name, array in arrays.items():
            if name != "v":
                array[0, rng.integers(array.shape[1])] = np.nan

        def call_of(first: int, last: int, arrays: dict[str, Any] = arrays) -> GradientCall:
            some = {name: x[first:last] for name, x in arrays.items()}
            dout = some.pop("dout")
            modified = ModifiedCall("dense", "bfloat16", some, {})
            return GradientCall(modified, dout, wrt=wrt, grad_dtype=grad_dtype)

        whole = call_of(0, batch)
        assert fetches_kv_tiles(whole)
        assert not fetches_kv_tiles(call_of(0, 1))
        found = whole.run(cupy)
        for index in (1, batch - 1):
            of_one = {name: x[index : index + 1] for name, x in found.items()}
            check_gradients(call_of(index, index + 1), of_one)
        # A call of one sequence adds the query heads of a KV head in another order.
        same = tuple(found) if heads[0] == heads[1] else ("dq",)
        for index in range(1, batch):
            alone = call_of(index, index + 1).run(cupy)
            for name in set(same) & set(found):
                part = found[name][index : index + 1]
                np.testing.assert_array_equal(part.view(np.uint8), alone[name].view(np.uint8))
        for name, gradient in whole.run(cupy).items():
            np.testing.assert_array_equal(gradient.view(np.uint8), found[name].view(np.uint8))
