"""Gradients with mask functions, by the families that skip fully masked tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.calls.modified_calls import DTYPES, MASK_MODS, ModifiedCall
from support.gpu import cupy
from support.gpu.gpu_support import Case
from support.gradients.gradient_calls import GradientCall
from support.gradients.gradient_rule import check_gradients

import cupy_flash
from cupy_flash import MaskMod, ScoreMod
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.families import backward_common
from cupy_flash.families.hopper import backward

pytestmark = pytest.mark.gpu

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K = 2, 4, 2, 700, 900
# Number of sequences of a batch in which each has its own length.
SEQUENCES = 5
Arrays = dict[str, np.ndarray]


def documents(rng: np.random.Generator) -> Arrays:
    """Return document numbers; some rows and some keys are in no document."""
    doc = np.sort(rng.integers(0, 9, (SEQUENCES, SEQLEN_K)), axis=1).astype(np.int32)
    other = doc.copy()
    doc[:, 130:400], other[0, :300] = -1, -2
    return {"of_row": doc, "of_key": other}


MASKS: dict[str, tuple[Callable[..., Any], Callable[[np.random.Generator], Arrays]]] = {
    "documents": (lambda b, i, j, of_row, of_key: of_row[b, i] == of_key[b, j], documents),
    "window": (lambda i, j: np.abs(i - j) < 130, lambda rng: {}),
    "heads": (lambda h, i, j: np.abs(i - j + 150 * h) < 90, lambda rng: {}),
    "pairs": (
        lambda i, j, seen: seen[i, j],
        lambda rng: {"seen": rng.random((SEQLEN_K, SEQLEN_K)) < 0.2},
    ),
    "few pairs": (lambda i, j: (i * 7919 + j * 104729) % 9973 == 0, lambda rng: {}),
    "blocks": (lambda i, j: (i // 256 + j // 256) % 2 == 1, lambda rng: {}),
    "nothing": (lambda i, j: i < 0, lambda rng: {}),
    "one query tile": (lambda i, j: (i >= 300) & (i < 310), lambda rng: {}),
    "one KV tile": (lambda i, j: (j >= 300) & (j < 310), lambda rng: {}),
}
DIMS = [(64, 64), (128, 128), (128, 64), (96, 96), (192, 128), (256, 256)]


def families(*names: str) -> pytest.MarkDecorator:
    """Return a mark that runs a test for those of these families that the GPU supports."""
    each = [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not Case(name, "float16", head_dim=64, head_dim_v=64).is_supported(),
                reason=f"this GPU does not support the {name} family",
            ),
        )
        for name in names
    ]
    return pytest.mark.parametrize("family", each)


each_family, only_hopper, only_mma = families("hopper", "mma"), families("hopper"), families("mma")


def make_call(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    name: str,
    dims: tuple[int, int] = (64, 64),
    *,
    dtype: str = "bfloat16",
    heads: tuple[int, int] = (HEADS, HEADS_KV),
    kind: str = "dense",
    **options: Any,
) -> GradientCall:
    function, captures = MASKS[name]
    monkeypatch.setitem(MASK_MODS, "of this test", function)
    # A call must not use the prepared call, and thus the mask, of another test.
    monkeypatch.setattr(prepared_calls, "_calls", {})

    def values(rows: int, count: int, dim: int) -> np.ndarray:
        shape = (rows,) if kind == "varlen" else (BATCH if kind == "dense" else SEQUENCES, rows)
        return rng.standard_normal((*shape, count, dim)).astype(DTYPES[dtype])

    dim, dim_v = dims
    rows, keys, lengths = SEQLEN_Q, SEQLEN_K, {}
    if kind == "varlen":
        starts = [
            np.append(0, random_lengths(rng, most).cumsum()).astype(np.int32)
            for most in (rows, keys)
        ]
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
        # The last rows belong to no sequence.
        rows, keys = (int(x[-1]) + 37 for x in starts)
        options |= {"max_seqlen_q": SEQLEN_Q, "max_seqlen_k": SEQLEN_K}
    elif kind == "padded":
        lengths = {"seqlens_k": random_lengths(rng, keys).astype(np.int32)}
    arrays = {
        "q": values(rows, heads[0], dim),
        "k": values(keys, heads[1], dim),
        "v": values(keys, heads[1], dim_v),
        **lengths,
    }
    dout = values(rows, heads[0], dim_v)
    if kind == "varlen":
        dout[-37:] = np.nan
        for name_of_array in ("q", "k", "v"):
            arrays[name_of_array][-37:] = np.nan
    elif kind == "padded":
        for b, length in enumerate(lengths["seqlens_k"]):
            arrays["k"][b, length:] = arrays["v"][b, length:] = np.nan
    mods = {"mask_mod": ("of this test", captures(rng))}
    given = {"causal": False} | options
    score_mod = given.pop("score_mod", None)
    if score_mod is not None:
        mods["score_mod"] = score_mod
    for name_of_array in ("prefix_lens", "sinks", "alibi_slopes", "bias"):
        if name_of_array in given:
            arrays[name_of_array] = given.pop(name_of_array)
    forward = ModifiedCall(kind, dtype, arrays, given, mods)
    return GradientCall(forward, dout)


def random_lengths(rng: np.random.Generator, most: int) -> np.ndarray:
    """Return lengths of sequences: 0, the largest one and random ones, in random order."""
    return rng.permutation([0, most, *rng.integers(1, most, SEQUENCES - 2)])


def uses_lists() -> bool:
    """Return whether the backward call that was prepared last reads lists of query tiles."""
    *_, prepared = prepared_calls._calls.values()
    return prepared.block_mask_key is not None


def check(
    call: GradientCall, family: str, *, has_lists: bool = True, **how: Any
) -> dict[str, np.ndarray]:
    """Check the gradients of a family, and that each run gives the same bits."""
    found = call.run(cupy, family=family, **how)
    assert uses_lists() == has_lists
    check_gradients(call, found)
    for _ in range(3):
        again = call.run(cupy, family=family, **how)
        for name, gradient in found.items():
            np.testing.assert_array_equal(gradient.view(np.uint8), again[name].view(np.uint8))
    return found


@each_family
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_gives_the_gradients(family, name, dims, causal, monkeypatch, rng) -> None:
    check(make_call(monkeypatch, rng, name, dims, causal=causal), family)


@each_family
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["varlen", "padded"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("name", ["documents", "heads", "few pairs", "nothing", "one KV tile"])
def test_sequences_of_different_lengths(family, name, dims, kind, causal, monkeypatch, rng) -> None:
    check(make_call(monkeypatch, rng, name, dims, kind=kind, causal=causal), family)


@each_family
@pytest.mark.parametrize("kind", ["varlen", "padded"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("name", ["documents", "heads"])
def test_sequences_of_different_lengths_without_stored_pairs(
    family, name, heads, kind, monkeypatch, rng
) -> None:
    monkeypatch.setattr(backward, "_PAIR_BYTES", 0)
    check(make_call(monkeypatch, rng, name, (128, 128), heads=heads, kind=kind), family)


@each_family
def test_lists_follow_lengths_that_change_in_place(family, monkeypatch, rng) -> None:
    """The lengths are in device memory, so a prepared call may find other lengths there."""
    call = make_call(monkeypatch, rng, "documents", (64, 64), kind="varlen")
    positional, named = call.given(cupy)
    for _ in range(2):
        gradients = cupy_flash.flash_attention_varlen_backward(*positional, **named, family=family)
        found = {n: x.get() for n, x in zip(call.names, gradients, strict=True)}
        check_gradients(call, found)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            starts = call.forward.arrays[name]
            starts[1:-1] = np.sort(starts[-1] - starts[1:-1])
        call = GradientCall(call.forward, call.dout)
        changed, _ = call.given(cupy)
        for array, new in zip(positional[4:8], changed[4:8], strict=True):
            array[...] = new


@only_mma
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (256, 256), (512, 512)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["documents", "heads", "few pairs", "nothing"])
def test_other_dtypes_and_wide_heads(family, name, dtype, dims, monkeypatch, rng) -> None:
    check(make_call(monkeypatch, rng, name, dims, dtype=dtype, causal=True), family)


@only_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("name", ["documents", "heads", "window"])
def test_without_stored_pairs_kernels_evaluate_the_mask(
    family, name, dims, monkeypatch, rng
) -> None:
    monkeypatch.setattr(backward, "_PAIR_BYTES", 0)
    check(make_call(monkeypatch, rng, name, dims, causal=True), family)


@each_family
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("name", ["documents", "heads", "window"])
def test_without_lists_kernels_process_all_tiles(family, name, dims, monkeypatch, rng) -> None:
    monkeypatch.setattr(backward_common, "_LIST_BYTES", 0)
    check(make_call(monkeypatch, rng, name, dims, causal=True), family, has_lists=False)


@each_family
@pytest.mark.parametrize("kind", ["varlen", "padded"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("name", ["documents", "heads"])
def test_without_lists_lanes_of_missing_keys_wait_for_each_other(
    family, name, dims, kind, monkeypatch, rng
) -> None:
    """Keys past the end of a sequence are hidden by position, and other keys by the function."""
    monkeypatch.setattr(backward_common, "_LIST_BYTES", 0)
    call = make_call(monkeypatch, rng, name, dims, kind=kind, causal=True)
    check(call, family, has_lists=False)


@each_family
@pytest.mark.parametrize("name", ["documents", "heads"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 1)])
def test_heads_may_share_lists_or_have_their_own(family, name, heads, monkeypatch, rng) -> None:
    check(make_call(monkeypatch, rng, name, (128, 128), heads=heads), family)


@only_hopper
@pytest.mark.parametrize("columns", [16, 32])
def test_scores_may_be_computed_for_any_number_of_rows(family, columns, monkeypatch, rng) -> None:
    tile = {"Br": 128, "Bc": 128, "columns": columns, "q_stages": 2, "dout_stages": 1}
    check(make_call(monkeypatch, rng, "documents"), family, tile=tile)


@only_mma
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "tile",
    [
        {"Br": 16, "Bc": 16, "warps": 1, "key_warps": 1, "columns": 16, "stages": 2},
        {"Br": 32, "Bc": 64, "warps": 4, "key_warps": 4, "columns": 16, "stages": 2},
        # A lane holds 64 pairs, so their bits need a 64-bit integer.
        {"Br": 64, "Bc": 128, "warps": 4, "key_warps": 4, "columns": 64, "stages": 1},
        {"Br": 128, "Bc": 64, "warps": 8, "key_warps": 2, "columns": 16, "stages": 1},
        {"Br": 64, "Bc": 64, "warps": 8, "key_warps": 2, "columns": 16, "paired": 1},
        {"Br": 32, "Bc": 32, "warps": 8, "key_warps": 2, "columns": 8, "paired": 1},
    ],
    ids=lambda tile: "-".join(map(str, tile.values())),
)
def test_warps_may_have_any_pairs(family, tile, dtype, monkeypatch, rng) -> None:
    tile = {"stages": 1, "min_blocks": 1, "paired": 0} | tile
    check(make_call(monkeypatch, rng, "documents", (32, 32), dtype=dtype), family, tile=tile)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (200, 100)},
        {"window_size": (200, 0), "causal": True},
        {"softcap": 20.0},
        {"score_mod": ("quadratic", {"weight": 0.01})},
        {"sinks": np.array([0.5, -1, 2, 0], np.float32)},
        {"causal": True, "prefix_lens": np.array([300, 10], np.int32)},
        {"q_offset": -100, "causal": True},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
@each_family
def test_other_modifications_combine_with_lists(family, options, dims, monkeypatch, rng) -> None:
    check(make_call(monkeypatch, rng, "documents", dims, **options), family)


@each_family
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("q", "v")])
def test_some_gradients_alone(family, wrt, dims, monkeypatch, rng) -> None:
    call = make_call(monkeypatch, rng, "documents", dims)
    call.wrt = wrt
    check(call, family)


@each_family
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_gradients_in_float32(family, dims, monkeypatch, rng) -> None:
    call = make_call(monkeypatch, rng, "documents", dims)
    call.grad_dtype = "float32"
    check(call, family)


@each_family
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_nan_in_hidden_rows_and_keys_reaches_nothing(family, dims, monkeypatch, rng) -> None:
    call = make_call(monkeypatch, rng, "documents", dims)
    expected = call.run(cupy, family=family)
    arrays, captures = call.forward.arrays, call.forward.mods["mask_mod"][1]
    for b in range(BATCH):
        rows, keys = captures["of_row"][b, SEQLEN_K - SEQLEN_Q :], captures["of_key"][b]
        hidden = ~np.isin(rows, keys)
        arrays["q"][b, hidden] = call.dout[b, hidden] = np.nan
        arrays["k"][b, ~np.isin(keys, rows)] = np.nan
    # NaN inputs would change the reference's results, so the earlier results are compared instead.
    found = call.run(cupy, family=family)
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[name])


@each_family
def test_rows_without_keys_have_no_gradient_whatever_their_lse_is(family, monkeypatch, rng) -> None:
    """The lse may cover more keys than this call has, if results of several calls are merged."""
    call = make_call(monkeypatch, rng, "documents", (128, 128))
    (dout, q, k, v, out, lse), named = call.given(cupy)
    hidden = cupy.isneginf(lse)
    assert hidden.any()
    arrays = {f"d{name}": cupy.full(x.shape, np.nan, q.dtype) for name, x in (("q", q), ("k", k))}
    more = cupy.where(hidden, cupy.float32(1.5), lse)
    dq, dk, _ = cupy_flash.flash_attention_backward(
        dout, q, k, v, out, more, **named, **arrays, family=family
    )
    assert not dq[hidden.swapaxes(1, 2)].any()
    assert not cupy.isnan(dk).any()


@each_family
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_are_visible_if_slopes_of_both_signs_cancel(family, head_dim) -> None:
    row = cupy.ones((1, 1, 1, head_dim), "float16") / 4
    q, k = cupy.concatenate([row, -row], axis=1), cupy.concatenate([row, row / 2], axis=1)
    v, dout = k * cupy.float16(2), cupy.concatenate([row, row * 3], axis=1)
    mods = {
        "mask_mod": MaskMod(lambda i, j: j < 2 + i * 0),
        "score_mod": ScoreMod(lambda score: np.abs(score)),
    }
    out, lse = cupy_flash.flash_attention(q, k, v, return_lse=True, **mods)
    _, dk, _ = cupy_flash.flash_attention_backward(dout, q, k, v, out, lse, family=family, **mods)
    assert dk.any(axis=-1).all()


@each_family
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_window_by_a_function_equals_the_window(family, head_dim, causal, rng) -> None:
    shape, width = (1, 3000, 2, head_dim), 300
    q, k, v, dout = (cupy.asarray(rng.standard_normal(shape).astype(np.float16)) for _ in range(4))
    left_right = (width, 0 if causal else width)
    out, lse = cupy_flash.flash_attention(q, k, v, window_size=left_right, return_lse=True)
    given = (dout, q, k, v, out, lse)
    expected = cupy_flash.flash_attention_backward(*given, window_size=left_right)
    mod = MaskMod(lambda i, j: np.abs(i - j) <= width)
    found = cupy_flash.flash_attention_backward(*given, mask_mod=mod, causal=causal, family=family)
    for x, y in zip(found, expected, strict=True):
        cupy.testing.assert_allclose(x, y, atol=2e-3, rtol=2e-3)


@each_family
def test_refresh_builds_new_lists(family, rng) -> None:
    shape = (1, 1000, 2, 64)
    q, k, v, dout = (cupy.asarray(rng.standard_normal(shape).astype(np.float16)) for _ in range(4))
    ids = cupy.asarray(np.sort(rng.integers(0, 6, 1000)).astype(np.int32))
    mod = MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=ids)

    def gradients(mask: MaskMod) -> list[Any]:
        out, lse = cupy_flash.flash_attention(q, k, v, mask_mod=mask, return_lse=True)
        given = (dout, q, k, v, out, lse)
        return list(cupy_flash.flash_attention_backward(*given, mask_mod=mask, family=family))

    gradients(mod)
    ids[:] = ids[::-1] // 2
    mod.refresh()
    other = MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=ids.copy())
    for found, expected in zip(gradients(mod), gradients(other), strict=True):
        cupy.testing.assert_array_equal(found, expected)
