"""8-bit KV caches on the CPU, compared with the reference on the dequantized caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.calls.float8_support import Float8Case
from support.calls.quantized_support import (
    CACHE_DTYPES,
    SCALES,
    QuantizedCase,
    random_packed_case,
    random_quantized_case,
)
from support.calls.sequence_support import KVCacheCase, Truth, VarlenCase
from support.draws import few_then_slow
from support.refusals import assert_refused

from cupy_flash import (
    flash_attention,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_with_kvcache,
    plan,
)
from cupy_flash.arrays import quantized as quantized_module
from cupy_flash.arrays.kinds import normalize_scale
from cupy_flash.arrays.quantized import QuantizedBlocks, dequantized, quantized, scales_of_rows
from cupy_flash.cpu.varlen import rotate
from cupy_flash.errors import UnsupportedError
from cupy_flash.reference.packed import attention_with_kvcache_reference

PROBLEMS, CHUNK = 300, 20
SMALL = KVCacheCase((5, 0, 19), "bfloat16", seqlen_new=2, causal=True)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def check(case: QuantizedCase, **choice: Any) -> None:
    arguments = case.arguments()
    with np.errstate(all="ignore"):
        expected = attention_with_kvcache_reference(**arguments)
        truth = Truth.of_kvcache(arguments)
    out = np.full((*arguments["q"].shape[:3], case.base.head_dim_v), np.nan, arguments["q"].dtype)
    _, lse = flash_attention_with_kvcache(**arguments, out=out, return_lse=True, **choice)
    truth.check(out, lse)
    for name in ("k_cache", "v_cache"):
        assert same_bits(arguments[name], getattr(expected, name))
    if case.scales in ("row", "computed"):
        for name in ("k_scale", "v_scale"):
            assert same_bits(arguments[name], getattr(expected, name))


@pytest.mark.parametrize("chunk", few_then_slow(range(PROBLEMS // CHUNK), 5))
def test_random_problems_are_right(chunk: int) -> None:
    rng = np.random.default_rng([20261, chunk])
    for _ in range(CHUNK):
        check(random_quantized_case(rng))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_rows_may_be_computed_on_their_own(cache_dtype: str, scales: str) -> None:
    check(QuantizedCase(SMALL, cache_dtype, scales), batch_invariant=True)


@pytest.mark.parametrize("scales", ["head", "computed"])
def test_new_keys_are_turned_and_rounded_before_they_are_quantized(scales: str) -> None:
    # No comparison with the reference: a key that rounds differently may be a step away in 8 bits.
    case = QuantizedCase(dataclasses.replace(SMALL, rotary_dim=16), "int8", scales)
    arguments, by_hand = case.arguments(), case.arguments()
    out = flash_attention_with_kvcache(**arguments)
    cos, sin = by_hand.pop("rotary_cos"), by_hand.pop("rotary_sin")
    for name in ("q", "k"):
        by_hand[name] = rotate(
            by_hand[name], cos, sin, by_hand["cache_seqlens"], interleaved=True, advance=True
        )
    assert same_bits(out, flash_attention_with_kvcache(**by_hand))
    assert same_bits(arguments["k_cache"], by_hand["k_cache"])


@pytest.mark.parametrize("page_size", [0, 16])
def test_many_rows_of_queries_are_right(page_size: int) -> None:
    # With this many query rows, all keys are first dequantized into an array.
    many = KVCacheCase((200, 170), "float16", seqlen_q=140, causal=True, page_size=page_size)
    check(QuantizedCase(many, "int8", "row"))


def test_windows_and_sinks_are_right() -> None:
    check(QuantizedCase(SMALL, "float8_e4m3fn", "head", window=(3, 0), sinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(5))
def test_random_packed_queries_are_right(chunk: int) -> None:
    rng = np.random.default_rng([20262, chunk])
    for _ in range(20):
        case = random_packed_case(rng)
        arguments = case.arguments()
        with np.errstate(all="ignore"):
            truth = Truth.of_varlen(arguments)
        shape = (*arguments["q"].shape[:-1], case.base.head_dim_v)
        out = np.full(shape, np.nan, arguments["q"].dtype)
        _, lse = flash_attention_varlen(
            **arguments, out=out, return_lse=True, batch_invariant=bool(rng.integers(2))
        )
        truth.check(out, lse)


def test_numbers_are_rounded_to_nearest_even_and_limited() -> None:
    one = np.ones(1, np.float32)
    rows = np.array([[0.5, 1.5, -2.5, 126.6, 1e9, -1e9, np.inf, np.nan]], np.float32)
    np.testing.assert_array_equal(
        quantized(rows, one, np.int8)[0], [0, 2, -2, 127, 127, -127, 127, 0]
    )
    rows = np.array([[17, 19, 464, 465, -1e9, 2**-10, 2**-10 * 1.001, np.nan]], np.float32)
    found = quantized(rows, one, ml_dtypes.float8_e4m3fn)[0].astype(np.float32)
    np.testing.assert_array_equal(found, [16, 20, 448, 448, -448, 0, 2**-9, np.nan])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_float8_code_stands_for_its_number(dtype: type) -> None:
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    stored = np.broadcast_to(codes[::-1].reshape(1, 2, 4, 32), (3, 2, 4, 32))
    expected = stored.astype(dtype)
    np.testing.assert_array_equal(dequantized(stored, None, dtype), expected)
    np.testing.assert_array_equal(dequantized(stored, np.float32(3), dtype), 3 * expected)
    blocks = QuantizedBlocks(stored, np.float32(3), dtype)
    np.testing.assert_array_equal(blocks[1:, :, 2:], 3 * expected[1:, :, 2:])


def call_over_float8(name: str) -> Callable[..., Any]:
    """Return a call with float8 arrays, all of which have scales."""
    base: KVCacheCase | VarlenCase = dataclasses.replace(SMALL, seqlen_new=0)
    if name == "dense":
        return functools.partial(flash_attention, **Float8Case(30, 40).arguments())
    if name == "pages":
        base = dataclasses.replace(SMALL, seqlen_new=0, page_size=16)
    elif name == "many queries":
        base = KVCacheCase((200, 170), "float32", seqlen_q=140)
    elif name == "varlen":
        base = VarlenCase((5, 0, 19), (40, 3, 19), "bfloat16")
    function = flash_attention_varlen if name == "varlen" else flash_attention_with_kvcache
    arguments = QuantizedCase(base, "float8_e4m3fn", "head").arguments()
    return functools.partial(function, **arguments, batch_invariant=name == "rows on their own")


@pytest.mark.parametrize(
    "name", ["contiguous", "pages", "many queries", "rows on their own", "varlen", "dense"]
)
def test_numbers_of_float8_are_looked_up_in_a_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negated table acts like negated scales, so no number is converted outside of the table."""
    call = functools.partial(call_over_float8(name), backend="cpu", return_lse=True)
    given = call.keywords
    scales = {n: -given[n] for n in ("q_scale", "k_scale", "v_scale") if n in given}
    plain, expected = call(), call(**scales)
    table = quantized_module._numbers_of_codes
    monkeypatch.setattr(quantized_module, "_numbers_of_codes", lambda *dtypes: -table(*dtypes))
    found = call()
    assert not np.array_equal(found[0], plain[0])
    assert all(map(same_bits, found, expected))


@pytest.mark.filterwarnings("error")
def test_nothing_that_is_quantized_makes_numpy_warn() -> None:
    arguments = QuantizedCase(SMALL, "float8_e4m3fn", "computed").arguments()
    arguments["k"][0, 0], arguments["v"][1, 1] = np.inf, np.nan
    out = flash_attention_with_kvcache(**arguments)
    assert np.isfinite(out[2].astype(np.float32)).all()


def test_computed_scales_make_the_largest_number_of_each_row_the_largest_there_is() -> None:
    rows = np.array([[1, -4], [0, 0], [3e38, 1]], np.float32)
    scales = scales_of_rows(rows, "int8")
    np.testing.assert_allclose(scales, [4 / 127, 0, 3e38 / 127], rtol=1e-7)
    np.testing.assert_array_equal(quantized(rows, scales, np.int8), [[32, -127], [0, 0], [127, 0]])


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_a_scale_of_zero_stands_for_zeros(cache_dtype: str) -> None:
    # The scale of 1e-44 is 0, because float32 cannot hold 1e-44 over the largest number.
    rows = np.array([[1e-44, 0, -1e-44]], np.float32)
    scales = scales_of_rows(rows, cache_dtype)
    stored = quantized(rows, scales, CACHE_DTYPES[cache_dtype][0]).astype(np.float32)
    assert np.abs(stored * scales[:, None] - rows).max() <= 1e-44
    case = QuantizedCase(SMALL, cache_dtype, "number")
    arguments = case.arguments() | {"k_scale": 0.0, "v_scale": 0.0}
    assert not flash_attention_with_kvcache(**arguments).any()
    assert not arguments["v_cache"][0, 5].astype(np.float32).any()


def test_the_reference_makes_room_for_scales_that_it_computes() -> None:
    arguments = QuantizedCase(SMALL, "int8", "number").arguments()
    found = attention_with_kvcache_reference(**arguments | {"compute_scales": True})
    assert found.k_scale.shape == arguments["k_cache"].shape[:3]
    assert isinstance(arguments["k_scale"], float)


def test_scales_are_real_numbers_or_arrays() -> None:
    with pytest.raises(TypeError, match="k_scale is a complex64; expected a NumPy or CuPy array"):
        normalize_scale("k_scale", np.complex64(1), on_host=True)


def test_one_family_of_a_gpu_reads_them() -> None:
    arguments = QuantizedCase(dataclasses.replace(SMALL, seqlen_new=0), "int8", "head").arguments()
    assert plan(flash_attention_with_kvcache, **arguments, arch="sm_90").family == "decode"
    with pytest.raises(UnsupportedError, match="mma: does not support 8-bit keys and values"):
        plan(flash_attention_with_kvcache, **arguments, arch="sm_75")
    arguments["q"] = arguments["q"].astype(np.float32)
    with pytest.raises(UnsupportedError, match="take float16 or bfloat16, not float32"):
        plan(flash_attention_with_kvcache, **arguments, arch="sm_90")


OF_ROWS = np.ones((3, 24, 2), np.float32)
READ_ONLY = np.frombuffer(OF_ROWS.tobytes(), np.float32).reshape(3, 24, 2)
COMPUTED = {"compute_scales": True}
# Changed arguments of a call with int8 caches that have a scale for each head.
BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a shape of scales": ({"v_scale": np.ones(3, np.float32)},
        r"v_scale has shape \(3,\), which does not broadcast to \(3, 24, 2\)"),
    "an infinite scale": ({"k_scale": np.inf}, "k_scale is inf"),
    "a huge scale": ({"k_scale": 1e39}, "expected a number in the range of float32"),
    "a scale that is read-only": ({"k_scale": READ_ONLY, "v_scale": OF_ROWS, **COMPUTED},
        "k_scale is read-only"),
    "computed without new rows": ({"k": None, "v": None, **COMPUTED},
        "compute_scales is for new rows; pass k and v"),
    "computed of heads": (COMPUTED,
        r"k_scale is of shape \(2,\); expected shape .* a scale for each row and head"),
    "computed of nothing": ({"k_scale": None, **COMPUTED},
        "k_scale is None; expected shape .*, as compute_scales writes a scale"),
    "computed that are one": (
        {"k_scale": np.broadcast_to(np.float32(1), (3, 24, 2)), "v_scale": OF_ROWS, **COMPUTED},
        "k_scale overlaps itself",
    ),
}  # fmt: skip
BAD_DTYPES: dict[str, tuple[dict[str, Any], str]] = {
    "two dtypes": ({"v_cache": np.zeros((3, 24, 2, 64), ml_dtypes.float8_e4m3fn)},
        "k_cache and v_cache must have one dtype, but are int8 and float8_e4m3fn"),
    "a dtype of scales": ({"k_scale": np.ones(2, np.float16)},
        "k_scale has dtype float16; expected one of float32"),
    "float64": (dict.fromkeys("kv", np.zeros((3, 2, 2, 64))) | {"q": np.zeros((3, 1, 4, 64))},
        "expected float16, bfloat16 or float32 with 8-bit caches"),
    "another dtype of 8 bits": (
        {name: np.zeros((3, 24, 2, 64), ml_dtypes.float8_e5m2) for name in ("k_cache", "v_cache")},
        "k_cache has dtype float8_e5m2; expected one of .*float64, float8_e4m3fn, int8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES | BAD_DTYPES)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(name: str) -> None:
    changes, message = (BAD_VALUES | BAD_DTYPES)[name]
    arguments = QuantizedCase(SMALL, "int8", "head").arguments() | changes
    error = TypeError if name in BAD_DTYPES else ValueError
    assert_refused(flash_attention_with_kvcache, error, message, arguments)


def test_scales_are_for_caches_of_8_bits() -> None:
    arguments = SMALL.problem().arguments()
    for more in ({"k_scale": 2.0}, {"v_scale": np.ones(2, np.float32)}, {"compute_scales": True}):
        with pytest.raises(ValueError, match="is for 8-bit caches; these are bfloat16"):
            flash_attention_with_kvcache(**arguments, **more)


PACKED = QuantizedCase(
    VarlenCase((5, 0, 19), (40, 3, 19), "bfloat16", causal=True, filler=0), "int8", "row"
)


@pytest.mark.parametrize("scales", ["none", "number", "head", "page", "row"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_packed_queries_get_what_keys_of_numbers_get(page_size: int, scales: str) -> None:
    base = dataclasses.replace(PACKED.base, page_size=page_size)
    arguments = QuantizedCase(base, "float8_e4m3fn", scales).arguments()
    plain = {name: x for name, x in arguments.items() if name not in ("k_scale", "v_scale")}
    plain["q"] = plain["q"].astype(np.float32)
    for name in ("k", "v"):
        scale = arguments[f"{name}_scale"]
        scale = np.float32(1) if scale is None else np.asarray(scale, np.float32)
        plain[name] = arguments[name].astype(np.float32) * scale[..., None]
    expected = flash_attention_varlen(**plain, backend="cpu")
    out = flash_attention_varlen(**arguments, backend="cpu")
    np.testing.assert_allclose(out[:24].astype(np.float32), expected[:24], rtol=2**-8)


def test_one_family_of_a_gpu_reads_them_for_packed_queries() -> None:
    arguments = PACKED.arguments()
    made = plan(flash_attention_varlen, **arguments, arch="sm_90")
    assert (made.family, made.problem.layout.kind) == ("decode", "varlen")
    assert made.problem.scales is not None
    # Each row and head has a scale, and heads are contiguous.
    assert made.problem.scales.given == {"k_scale": (0, 2, 1), "v_scale": (0, 2, 1)}


BAD_PACKED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "two dtypes": (
        *(TypeError, {"v": np.zeros((67, 2, 64), ml_dtypes.float8_e4m3fn)}),
        "k and v must have one dtype, but are int8 and float8_e4m3fn",
    ),
    "a shape of scales": (
        *(ValueError, {"v_scale": np.ones(3, np.float32)}),
        r"v_scale has shape \(3,\), which does not broadcast to \(1, 67, 2\)",
    ),
    "float64": (
        *(TypeError, {"q": np.zeros((29, 4, 64))}),
        "expected float16, bfloat16 or float32 with 8-bit keys and values",
    ),
    "16 bits": (
        *(ValueError, dict.fromkeys("kv", np.zeros((67, 2, 64), ml_dtypes.bfloat16))),
        "k_scale is for 8-bit keys and values; these are bfloat16",
    ),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_what_does_not_go_together_is_refused_of_packed_queries(name: str) -> None:
    error, changes, message = BAD_PACKED[name]
    assert_refused(flash_attention_varlen, error, message, PACKED.arguments() | changes)


def test_keys_of_8_bits_have_no_gradients() -> None:
    arguments = PACKED.arguments()
    q = arguments["q"]
    lse = np.zeros((4, len(q)), np.float32)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    inputs = q, q, arguments["k"], arguments["v"], q, lse, *(arguments[name] for name in names)
    with pytest.raises(TypeError, match="k has dtype int8; expected one of"):
        flash_attention_varlen_backward(*inputs)
