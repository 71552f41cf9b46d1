"""The tiled algorithm on NumPy arrays, compared with the reference."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.comparisons import assert_same_bits, peak_memory
from threadpoolctl import threadpool_info

from cupy_flash.cpu import forward as cpu_forward
from cupy_flash.cpu import tiled
from cupy_flash.cpu.forward import candidate_tiles, default_tile, forward, scratch_bytes
from cupy_flash.cpu.row_results import RowResults
from cupy_flash.problem.problem import MAX_HEAD_DIM, Problem, make_contiguous_problem
from cupy_flash.problem.tile import Tile
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound, max_error

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]

# The run time of an example depends on its shape.
relaxed = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def random_qkv(seqlen_q, seqlen_k, *, batch=1, heads=(2, 2), dims=(40, 40), dtype="f4", seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, seqlen_q, heads[0], dims[0]))
    k = rng.standard_normal((batch, seqlen_k, heads[1], dims[0]))
    v = rng.standard_normal((batch, seqlen_k, heads[1], dims[1]))
    return [x.astype(dtype) for x in (q, k, v)]


def run(q, k, v, *, Br=64, Bc=64, causal=False, q_offset=0, scale=None, threads=2, out=None):
    """Return (out, lse) of the tiled forward pass, in buffers that held NaN before."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    if out is None:
        out = np.empty((batch, seqlen_q, heads_q, v.shape[3]), q.dtype)
    out[...] = np.nan
    lse_dtype = np.float64 if q.dtype == np.float64 else np.float32
    lse = np.full((batch, heads_q, seqlen_q), np.nan, lse_dtype)
    scale = head_dim**-0.5 if scale is None else scale
    options = {"causal": causal, "q_offset": q_offset, "softmax_scale": scale}
    forward(q, k, v, out, RowResults(lse), tile=Tile(Br, Bc), threads=threads, **options)
    return out, lse


def check(q, k, v, *, causal=False, q_offset=0, scale=None, **options):
    """Run, and compare with the reference by the error rule; NaN and inf must agree."""
    formula = {"causal": causal, "q_offset": q_offset, "softmax_scale": scale}
    exact, exact_lse = attention_reference(q, k, v, return_lse=True, **formula)
    naive = attention_naive(q, k, v, **formula)
    out, lse = run(q, k, v, causal=causal, q_offset=q_offset, scale=scale, **options)
    assert max_error(out, exact) <= error_bound(naive, exact, q.dtype, lse=exact_lse)
    largest = np.abs(exact_lse[np.isfinite(exact_lse)]).max(initial=1)
    assert max_error(lse, exact_lse) <= 16 * np.finfo(lse.dtype).eps * largest
    return out, lse


def sometimes_strided(data, array, name):
    """Return ``array``, or an equal view that is not contiguous."""
    kind = data.draw(st.sampled_from(["contiguous", "bhsd", "spread", "backwards"]), label=name)
    if kind == "bhsd":
        return array.swapaxes(1, 2).copy().swapaxes(1, 2)
    if kind == "spread":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if kind == "backwards":
        return array[:, ::-1].copy()[:, ::-1]
    return array


@relaxed
@given(data=st.data())
def test_equals_the_reference_for_any_shape_tile_mask_scale_and_layout(data):
    draw = data.draw
    dtype = draw(st.sampled_from(FLOATS))
    seqlen_q = draw(st.sampled_from([0, 1, 3, 17, 113, 150, 260]))
    seqlen_k = draw(st.sampled_from([0, 1, 3, 64, 70, 129, 203, 239]))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, dims = (heads_kv * group, heads_kv), (draw(st.integers(1, 80)), draw(st.integers(1, 80)))
    batch, seed = draw(st.integers(0, 2)), draw(st.integers(0, 2**32))
    sizes = {"batch": batch, "heads": heads, "dims": dims}
    q, k, v = random_qkv(seqlen_q, seqlen_k, **sizes, dtype=dtype, seed=seed)
    out = np.empty((*q.shape[:3], v.shape[3]), dtype)
    check(
        *(sometimes_strided(data, x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))),
        out=sometimes_strided(data, out, "out"),
        causal=draw(st.booleans()),
        q_offset=draw(st.integers(-seqlen_q - 3, seqlen_k + 3)),
        scale=draw(st.sampled_from([None, 0.0, -0.1, 0.3, 1.0])),
        Br=draw(st.integers(1, 300)),
        Bc=draw(st.integers(1, 300)),
        threads=draw(st.integers(1, 3)),
    )


@settings(relaxed, max_examples=12)
@given(
    st.tuples(st.integers(1, MAX_HEAD_DIM), st.integers(257, MAX_HEAD_DIM), st.booleans()),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_heads_of_any_width_equal_the_reference(widths, dtype, causal, seed):
    narrow, wide, of_keys = widths
    dims = (wide, narrow) if of_keys else (narrow, wide)
    check(*random_qkv(40, 70, dims=dims, dtype=dtype, seed=seed), causal=causal)


@settings(relaxed, max_examples=40)
@given(
    q_row=st.integers(0, 149),
    key=st.integers(0, 202),
    value=st.integers(0, 202),
    poison=st.sampled_from([np.nan, np.inf, -np.inf]),
    Br=st.sampled_from([7, 64, 150]),
    Bc=st.sampled_from([5, 64, 300]),
    tensors=st.sets(st.sampled_from("qkv"), min_size=1),
)
def test_nan_and_inf_propagate_as_in_the_reference(q_row, key, value, poison, Br, Bc, tensors):
    q, k, v = random_qkv(150, 203)
    if "q" in tensors:
        q[0, q_row, 0, 0] = poison
    if "k" in tensors:
        k[0, key, 1, 3] = poison
    if "v" in tensors:
        v[0, value, 1, 5] = poison
    check(q, k, v, Br=Br, Bc=Bc)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("first_masked", [64, 100, 140])
@pytest.mark.parametrize("Br", [16, 150, 256])
def test_a_masked_key_leaves_no_trace_not_even_in_the_rounding(Br, first_masked, poison):
    q, k, v = random_qkv(200, 200)
    clean_out, clean_lse = run(q, k, v, causal=True, Br=Br)
    k[:, first_masked:] = poison
    out, lse = run(q, k, v, causal=True, Br=Br)
    # Query i attends to the keys up to i.
    np.testing.assert_array_equal(out[:, :first_masked], clean_out[:, :first_masked])
    np.testing.assert_array_equal(lse[..., :first_masked], clean_lse[..., :first_masked])


def test_keys_that_no_query_sees_are_never_touched():
    q, k, v = random_qkv(50, 203)
    k[:, 80:], v[:, 80:] = np.nan, np.nan
    out, _ = check(q, k, v, causal=True, q_offset=30)
    assert np.isfinite(out).all()


def test_rows_that_see_nothing_give_zero_and_minus_infinity_beside_nan_values():
    q, k, v = random_qkv(40, 30)
    v[:, 0] = np.nan
    out, lse = run(q, k, v, causal=True, q_offset=-10)
    assert not out[:, :10].any()
    assert (lse[..., :10] == -np.inf).all()
    assert np.isnan(out[:, 10:]).all()


@pytest.mark.parametrize("q_value", [1e3, 1e25])
def test_large_scores_neither_overflow_nor_lose_their_order(q_value):
    q, k, v = random_qkv(150, 203, dims=(16, 8))
    q[...] = 0
    q[..., 0] = q_value
    k[..., 0] = np.linspace(-2, 2, 203)[:, None]
    out, _ = run(q, k, v, scale=1.0)
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, -1:], out.shape))


@pytest.mark.parametrize("magnitude", [1e-37, 1e-20, 1e20, 1e36])
def test_values_near_the_ends_of_float32_neither_overflow_nor_vanish(magnitude):
    q, k, v = random_qkv(200, 203)
    check(4 * q, k, v * np.float32(magnitude))


@pytest.mark.parametrize("scale", [0.02, 0.125, 1.0, 5.0])
@pytest.mark.parametrize("Bc", [128, 512])
def test_in_one_step_over_all_keys_and_in_several_the_result_is_right(Bc, scale):
    q, k, v = random_qkv(200, 333, dims=(64, 64))
    check(q, k, v, scale=scale, Br=200, Bc=Bc)


@pytest.mark.parametrize(("seqlen", "most"), [(20, 24), (100, 24), (200, 8)])
def test_scores_that_lie_key_by_key_or_row_by_row_give_the_reference(seqlen, most):
    for batch, heads in ((1, (8, 8)), (3, (12, 4)), (most, (8, 8))):
        q, k, v = random_qkv(seqlen, seqlen, batch=batch, heads=heads)
        check(q, k, v, Br=512, Bc=512)
        check(q, k, v, causal=True, Br=512, Bc=512)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_a_masked_key_of_a_small_call_leaves_no_trace(poison):
    q, k, v = random_qkv(8, 8, heads=(2, 2))
    clean = run(q, k, v, causal=True)
    k[:, -1] = poison
    out, lse = run(q, k, v, causal=True)
    assert_same_bits((out[:, :-1], lse[..., :-1]), (clean[0][:, :-1], clean[1][..., :-1]))


def test_small_calls_take_axes_in_any_order_in_memory():
    rng = np.random.default_rng(4)
    for seed in range(200):
        seqlen_q, seqlen_k = map(int, rng.integers(1, 6, 2))
        heads_kv, group, batch, dim = map(int, rng.integers(1, 4, 4))
        sizes = {"batch": batch, "heads": (heads_kv * group, heads_kv), "dims": (dim, dim)}
        arrays = random_qkv(seqlen_q, seqlen_k, **sizes, seed=seed)
        check(*(in_memory_order(x, rng.permutation(4)) for x in arrays))


def in_memory_order(array, axes):
    """Return an equal array whose axes have this order in memory."""
    return np.ascontiguousarray(array.transpose(axes)).transpose(np.argsort(axes))


def test_rows_of_a_small_call_that_see_no_key_are_zero():
    q, k, v = random_qkv(8, 8, heads=(2, 2))
    out, lse = run(q, k, v, causal=True, q_offset=-3)
    assert not out[:, :3].any()
    assert (lse[..., :3] == -np.inf).all()
    assert np.isfinite(lse[..., 3:]).all()


def test_rows_that_see_no_key_are_no_part_of_a_step(monkeypatch):
    rows, make = [], cpu_forward.Pass.make
    monkeypatch.setattr(
        cpu_forward.Pass, "make", lambda q, *of: rows.append(q.shape[1]) or make(q, *of)
    )
    q, k, v = random_qkv(900, 300, heads=(2, 2))
    q[:, :600] = np.nan
    out, lse = run(q, k, v, causal=True, q_offset=-600)
    assert rows == [300]
    assert not out[:, :600].any()
    assert (lse[..., :600] == -np.inf).all()
    check(q[:, 600:], k, v, causal=True)


@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
@pytest.mark.parametrize("group", [1, 2])
def test_products_with_many_keys_of_interleaved_heads_are_divided(seqlen_q, group):
    q, k, v = random_qkv(seqlen_q, 2200, heads=(4 * group, 4), dims=(128, 128))
    check(q, k, v, Br=64, Bc=4096)
    check(q, k, v, causal=True, q_offset=2200 - seqlen_q, Br=64, Bc=4096)


def test_scratch_of_calls_before_leaves_no_trace():
    q, k, v = random_qkv(300, 300, heads=(4, 4))
    first, _ = run(q, k, v, causal=True, Br=512, Bc=512)
    run(q, k, np.full_like(v, np.nan), Br=512, Bc=512)
    again, _ = run(q, k, v, causal=True, Br=512, Bc=512)
    assert first.tobytes() == again.tobytes()


def test_the_default_tile_has_rows_for_all_query_heads_of_a_key_head():
    decode = problem_of("float32", 2, 4096, 64, 64, heads=(32, 4))
    assert cpu_forward.default_tile(decode) == Tile(2 * 8, 4096)
    # The scratch of four workers fits, whatever the head dims are.
    wide = dataclasses.replace(decode, dtype="float64", head_dim=256, head_dim_v=256)
    assert 4 * scratch_bytes(wide, cpu_forward.default_tile(wide)) <= cpu_forward.SCRATCH_LIMIT
    prefill = dataclasses.replace(decode, seqlen_q=700)
    assert cpu_forward.default_tile(prefill) == Tile(256, 1024)
    causal = dataclasses.replace(prefill, causal=True)
    assert cpu_forward.default_tile(causal) == Tile(128, 1024)
    long = dataclasses.replace(causal, seqlen_q=4096)
    assert cpu_forward.default_tile(long) == Tile(256, 2048)


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_whatever_the_number_of_threads(dtype):
    q, k, v = random_qkv(799, 513, heads=(4, 2), dtype=dtype)
    first = run(q, k, v, causal=True, threads=1)
    for threads in (1, 2, 3, 7):
        assert_same_bits(first, run(q, k, v, causal=True, threads=threads))


def test_lse_can_be_left_out():
    q, k, v = random_qkv(70, 70)
    out = np.full_like(q, np.nan)
    forward(
        q,
        k,
        v,
        out,
        RowResults(),
        causal=False,
        q_offset=0,
        softmax_scale=40**-0.5,
        tile=Tile(64, 64),
    )
    np.testing.assert_array_equal(out, run(q, k, v)[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("threads", [2, 64])
def test_scratch_stays_under_64_MB_however_many_threads_are_asked_for(dtype, threads):
    q, k, v = random_qkv(4096, 512, heads=(2, 2), dims=(128, 128), dtype=dtype)
    out = np.empty_like(q)
    tile = default_tile(problem_of(q.dtype, 4096, 4096, 128, 128))
    options = {"causal": False, "q_offset": 0, "softmax_scale": 0.1, "tile": tile}
    peak = peak_memory(lambda: forward(q, k, v, out, RowResults(), threads=threads, **options))
    assert peak < 64 << 20


def test_a_tile_whose_scratch_passes_the_limit_is_refused():
    q, k, v = random_qkv(8192, 8192, heads=(1, 1), dims=(1, 1))
    with pytest.raises(ValueError, match="smaller Br or Bc"):
        run(q, k, v, Br=8192, Bc=8192)


@pytest.mark.parametrize(("Br", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_tile_is_two_positive_ints(Br, error):
    with pytest.raises(error, match="Br"):
        Tile(Br, 64)
    with pytest.raises(error, match="Bc"):
        Tile(64, Br)


# Values whose results are exact, and values close to the largest number

SHAPES_OF_ONE_KEY = [(1, 1, 2, 2), (9, 1, 2, 2), (300, 1, 6, 2), (1, 1, 8, 2)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "heads_q", "heads_kv"), SHAPES_OF_ONE_KEY)
@pytest.mark.parametrize("tile", [(512, 512), (4, 3)])
def test_a_row_of_one_key_is_exactly_its_value(dtype, seqlen_q, seqlen_k, heads_q, heads_kv, tile):
    q, k, v = random_qkv(seqlen_q, seqlen_k, batch=2, heads=(heads_q, heads_kv), dtype=dtype)
    out, _ = run(3 * q, k, v, Br=tile[0], Bc=tile[1])
    expected = np.broadcast_to(np.repeat(v, heads_q // heads_kv, axis=2), out.shape)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seqlen", [2, 40, 150, 700])
@pytest.mark.parametrize("group", [1, 3])
def test_the_first_row_of_a_causal_call_is_exactly_the_first_value(dtype, seqlen, group):
    q, k, v = random_qkv(seqlen, seqlen, batch=2, heads=(2 * group, 2), dtype=dtype)
    out, _ = run(3 * q, k, v, causal=True, Br=512, Bc=512)
    np.testing.assert_array_equal(out[:, 0], np.repeat(v[:, 0], group, axis=1))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "tile"), [(30, 512), (200, 512), (200, 64), (600, 256)])
@pytest.mark.parametrize("magnitude", [1e32, 2e34, 3e38])
def test_values_up_to_the_largest_number_give_finite_results(
    magnitude, seqlen, tile, causal, dtype
):
    q, k, v = random_qkv(seqlen, seqlen, dtype=np.float32)
    v = np.clip(v, -1, 1) * np.float32(magnitude)
    v[..., 0] = magnitude  # in a column of one sign the sum of products overflows
    # Small scores need no running maximum, larger ones do.
    for factor in (1, 8):
        arrays = (factor * q).astype(dtype), k.astype(dtype), v.astype(dtype)
        out, _ = check(*arrays, causal=causal, Br=tile, Bc=tile)
        assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("tile", [512, 64])
def test_a_nan_in_one_row_does_not_change_the_rounding_of_another(tile):
    q, k, v = random_qkv(200, 203, batch=2)
    clean, _ = run(q, k, v, Br=tile, Bc=tile, causal=True)
    q[0, 7, 1, 3] = np.nan
    out, _ = run(q, k, v, Br=tile, Bc=tile, causal=True)
    assert np.isnan(out[0, 7, 1]).all()
    out[0, 7, 1] = clean[0, 7, 1]
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("tile", [512, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_of_0_gives_the_mean_of_the_visible_values_whatever_the_scores(causal, tile):
    q, k, v = random_qkv(130, 130)
    check(np.float32(1e17) * q, np.float32(1e17) * k, v, scale=0.0, causal=causal, Br=tile, Bc=tile)


@pytest.mark.parametrize("tile", [512, 64])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("seqlen", [20, 200])
def test_scores_beyond_float32_give_nan_never_a_wrong_number(seqlen, sign, tile):
    q, k, v = random_qkv(seqlen, seqlen)
    q[:, 3:], k[...] = 1e20, sign * np.float32(1e20)
    out, lse = run(q, k, v, scale=1.0, Br=tile, Bc=tile)
    assert np.isnan(out[:, 3:]).all()
    assert not np.isfinite(lse[..., 3:]).any()
    # A score of -inf due to an infinite key is different: that key has no weight.
    k[...] = -np.inf
    out, lse = run(np.abs(q), k, v, scale=1.0, Br=tile, Bc=tile)
    assert not out.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("batch", "seqlen", "heads"), [(5, 7, (3, 3)), (70, 33, (4, 4)), (9, 1, (6, 2))]
)
@pytest.mark.parametrize("causal", [False, True])
def test_many_short_sequences_equal_the_reference(batch, seqlen, heads, causal, dtype):
    q, k, v = random_qkv(seqlen, 2 * seqlen + 1, batch=batch, heads=heads, dtype=dtype)
    check(q, k, v, causal=causal, q_offset=seqlen if causal else 0, Br=512, Bc=512)


def test_the_bits_of_small_calls_and_of_whole_heads_do_not_depend_on_threads():
    for batch, seqlen in ((1, 20), (40, 100)):
        q, k, v = random_qkv(seqlen, seqlen, batch=batch, heads=(4, 4))
        first, _ = run(q, k, v, Br=512, Bc=512, threads=1)
        for threads in (2, 5):
            other, _ = run(q, k, v, Br=512, Bc=512, threads=threads)
            assert first.tobytes() == other.tobytes()


def problem_of(dtype, seqlen_q, seqlen_k, head_dim, head_dim_v, heads=(2, 2)) -> Problem:
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim}
    sizes |= {"head_dim_v": head_dim_v, "heads_q": heads[0], "heads_kv": heads[1]}
    return make_contiguous_problem(dtype=np.dtype(dtype).name, **sizes)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (113, 203, 64, 32), (16384, 16384, 256, 256)])
def test_candidate_tiles_are_distinct_and_let_four_workers_run(dtype, shape):
    problem = problem_of(dtype, *shape)
    tiles = list(candidate_tiles(problem))
    assert tiles
    assert len(set(tiles)) == len(tiles)
    for tile in [*tiles, default_tile(problem)]:
        assert 4 * scratch_bytes(problem, tile) <= cpu_forward.SCRATCH_LIMIT


def blas_threads():
    return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]


def test_blas_has_its_threads_back_afterwards_also_after_an_error(monkeypatch):
    before = blas_threads()
    q, k, v = random_qkv(70, 70)
    during = []
    attend = tiled.attend

    def watched(*arguments):
        during.append(blas_threads())
        attend(*arguments)
        raise RuntimeError("stop")

    monkeypatch.setattr(tiled, "attend", watched)
    with pytest.raises(RuntimeError, match="stop"):
        run(q, k, v)
    assert set(during[0]) <= {1}
    assert blas_threads() == before


@pytest.mark.filterwarnings("error")
def test_no_numpy_warning_reaches_the_caller():
    q, k, v = random_qkv(200, 203, dtype=np.float16)
    k[0, 3], v[0, 5], q[0, 7] = np.inf, np.nan, 6e4
    run(q, k, v, causal=True, q_offset=-20, threads=1)
    attention_reference(q, k, v, causal=True, q_offset=-20)
    attention_naive(q, k, v, causal=True, q_offset=-20)
