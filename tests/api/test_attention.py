"""The public functions on host arrays: inputs, results, and what the library logs."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import pytest
from support.comparisons import assert_all_equal
from support.foreign import Foreign

import cupy_flash
from cupy_flash import (
    Plan,
    Tile,
    UnsupportedError,
    attention_reference,
    flash_attention,
    flash_attention_qkvpacked,
    plan,
)
from cupy_flash.errors import CompileError, DriverError, ParallelError
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning.tuning import TableError
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
RAGGED = [(113, 203), (1, 239), (799, 3), (64, 64), (5, 0), (0, 7)]


def random_qkv(rng, seqlen_q=113, seqlen_k=203, *, dtype=np.float32, heads=(6, 3), dims=(40, 72)):
    of_q, of_k = (seqlen_q, heads[0], dims[0]), (seqlen_k, heads[1], dims[0])
    shapes = of_q, of_k, (seqlen_k, heads[1], dims[1])
    return tuple(rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes)


def poisoned(shape, dtype):
    return np.full(shape, np.nan, dtype)


def assert_close(out, q, k, v, **formula):
    """Assert at most twice the error that the naive formula makes in the dtype of the inputs."""
    exact, lse = attention_reference(q, k, v, return_lse=True, **formula)
    assert out.shape == exact.shape
    assert out.dtype == q.dtype
    naive = attention_naive(q, k, v, **formula)
    assert max_error(out, exact) <= error_bound(naive, exact, q.dtype, lse=lse)


@pytest.mark.parametrize("backend", ["cpu", "auto"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), RAGGED)
def test_numpy_arrays_give_what_the_formula_gives(rng, seqlen_q, seqlen_k, dtype, causal, backend):
    q, k, v = random_qkv(rng, seqlen_q, seqlen_k, dtype=dtype)
    out = flash_attention(q, k, v, causal=causal, backend=backend)
    assert isinstance(out, np.ndarray)
    assert_close(out, q, k, v, causal=causal)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2, np.float32(0.1)])
def test_the_softmax_scale_may_be_any_number(rng, scale):
    q, k, v = random_qkv(rng)
    out = flash_attention(q, k, v, softmax_scale=scale, backend="cpu")
    assert_close(out, q, k, v, softmax_scale=float(scale))


@pytest.mark.parametrize("q_offset", [0, 17, 90, -50, -113, -1000, 203, 10**12])
def test_q_offset_places_the_causal_mask(rng, q_offset):
    q, k, v = random_qkv(rng)
    out = flash_attention(q, k, v, causal=True, q_offset=q_offset, backend="cpu")
    assert_close(out, q, k, v, causal=True, q_offset=q_offset)


def test_rows_that_see_no_key_are_zero_with_an_lse_of_minus_infinity(rng):
    q, k, v = random_qkv(rng, 50, 20)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True, backend="cpu")
    assert not out[:, :30].any()
    assert np.isneginf(lse[..., :30]).all()
    assert np.isfinite(lse[..., 30:]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_lse_is_the_natural_logarithm_per_head_and_row(rng, dtype):
    q, k, v = random_qkv(rng, dtype=dtype)
    out, lse = flash_attention(q, k, v, return_lse=True, backend="cpu")
    _, exact = attention_reference(q, k, v, return_lse=True)
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert lse.shape == (2, 6, 113)
    assert max_error(lse, exact) <= 16 * np.finfo(lse.dtype).eps * np.abs(exact).max()
    np.testing.assert_array_equal(out, flash_attention(q, k, v, backend="cpu"))


def test_bhsd_arrays_are_read_and_answered_in_their_own_layout(rng):
    q, k, v = random_qkv(rng)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    options = {"causal": True, "return_lse": True, "backend": "cpu"}
    expected = flash_attention(q, k, v, **options)
    turned_out, turned_lse = flash_attention(*turned, layout="bhsd", **options)
    assert turned_out.shape == (2, 6, 113, 72)
    assert_all_equal((turned_out.swapaxes(1, 2), turned_lse), expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_is_filled_and_returned(rng, layout):
    q, k, v = random_qkv(rng)
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out = poisoned((*q.shape[:3], 72), np.float32)
    assert flash_attention(q, k, v, out=out, layout=layout, backend="cpu") is out
    assert_close(out, q, k, v, layout=layout)


def test_out_may_be_a_part_of_an_array_and_nothing_beside_it_is_written(rng):
    q, k, v = random_qkv(rng)
    buffer = poisoned((2, 115, 8, 80), np.float32)
    out = buffer[:, 1:-1, 2:, :72]
    result, _ = flash_attention(q, k, v, out=out, return_lse=True, backend="cpu")
    assert result is out
    assert_close(out, q, k, v)
    assert np.isnan(buffer).sum() == buffer.size - out.size


def test_strided_inputs_give_the_same_bits_as_contiguous_ones(rng):
    q, k, v = random_qkv(rng)
    expected = flash_attention(q, k, v, backend="cpu")
    wide = np.zeros((2, 203, 3, 80), np.float32)
    wide[..., 8:] = v
    spread = np.zeros((2, 203, 3, 80), np.float32)
    spread[..., ::2] = k
    backwards = q[:, ::-1].copy()[:, ::-1]
    out = flash_attention(backwards, spread[..., ::2], wide[..., 8:], backend="cpu")
    np.testing.assert_array_equal(out, expected)


def test_broadcast_keys_are_read_as_they_lie(rng):
    q, k, v = random_qkv(rng)
    k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    assert_close(flash_attention(q, k, v, backend="cpu"), q, k, v)


def test_inputs_are_left_as_they_were_and_may_be_read_only(rng):
    arrays = random_qkv(rng)
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    flash_attention(*arrays, causal=True, backend="cpu")
    assert_all_equal(arrays, before)


def test_a_call_gives_the_same_bits_every_time(rng):
    q, k, v = random_qkv(rng, 799, 799)
    first, second = (flash_attention(q, k, v, backend="cpu") for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("tile", [(16, 16), Tile(32, 48), {"Bc": 32}])
def test_a_tile_may_be_asked_for_on_the_cpu_too(rng, tile):
    q, k, v = random_qkv(rng)
    assert_close(flash_attention(q, k, v, tile=tile, backend="cpu"), q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_qkv_equals_its_three_parts(rng, causal):
    qkv = rng.standard_normal((2, 113, 3, 4, 40)).astype(np.float32)
    options = {"causal": causal, "return_lse": True, "backend": "cpu"}
    parts = [np.ascontiguousarray(qkv[:, :, i]) for i in range(3)]
    assert_all_equal(flash_attention_qkvpacked(qkv, **options), flash_attention(*parts, **options))


@pytest.mark.parametrize("shape", [(2, 113, 4, 40), (2, 113, 2, 4, 40), (3, 2, 113, 4, 40)])
def test_what_is_not_packed_in_threes_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=r"qkv has shape .*; expected \(batch, seqlen, 3, heads"):
        flash_attention_qkvpacked(np.zeros(shape, np.float32))


def test_packed_qkv_has_one_layout():
    message = "layout is 'bhsd'; expected 'bshd', the only layout of qkv"
    with pytest.raises(ValueError, match=message):
        flash_attention_qkvpacked(np.zeros((1, 5, 3, 2, 8), np.float32), layout="bhsd")


def test_packed_qkv_must_be_an_array():
    with pytest.raises(TypeError, match="qkv is a list; expected a NumPy or CuPy array"):
        flash_attention_qkvpacked([1.0])


def test_an_array_of_another_library_is_answered_in_kind(rng):
    arrays = random_qkv(rng)
    out, lse = flash_attention(*map(Foreign, arrays), return_lse=True)
    assert isinstance(out, Foreign)
    assert isinstance(lse, Foreign)
    assert_close(out.array, *arrays)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0",
    reason="from_dlpack() of NumPy before 2.1 returns read-only arrays",
)
def test_an_out_of_another_library_is_written_in_place(rng):
    arrays = random_qkv(rng)
    out = Foreign(poisoned((2, 113, 6, 72), np.float32))
    assert flash_attention(*map(Foreign, arrays), out=out) is out
    assert_close(out.array, *arrays)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_give_torch_tensors(rng, name):
    torch = pytest.importorskip("torch")
    arrays = random_qkv(rng)
    tensors = [torch.from_numpy(x).to(getattr(torch, name)) for x in arrays]
    out = flash_attention(*tensors, backend="cpu")
    assert out.dtype == tensors[0].dtype
    # torch has no NumPy arrays of bfloat16: in double precision the values are the same.
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    inputs = [t.double().numpy().astype(dtype) for t in tensors]
    assert_close(out.double().numpy().astype(dtype), *inputs)
    target = torch.full_like(out, float("nan"))
    assert flash_attention(*tensors, out=target, backend="cpu") is target
    assert torch.equal(target, out)


def test_a_plan_for_the_cpu_is_what_a_call_there_uses(rng):
    q, k, v = random_qkv(rng)
    made = plan(flash_attention, q, k, v, causal=True, backend="cpu", tile=(32, 48))
    assert isinstance(made, Plan)
    assert (made.family, made.tile) == ("cpu", Tile(32, 48))
    assert (made.problem.seqlen_q, made.problem.heads_kv, made.problem.causal) == (113, 3, True)


def test_a_plan_for_an_architecture_needs_no_gpu_and_prints(rng, capsys):
    q, k, v = random_qkv(rng, dtype=np.float16)
    made = plan(flash_attention, q, k, v, arch="sm_90")
    print(made)
    printed = capsys.readouterr().out
    assert made.family == "hopper"
    assert printed.startswith("problem ")
    assert "heads 6 (3 KV), head_dim 40/72" in printed
    assert len({line.index(line.split("  ")[-1].lstrip()) for line in printed.splitlines()}) == 1


def test_a_plan_honours_the_family_and_tile_that_are_asked_for(rng):
    q, k, v = random_qkv(rng)
    made = plan(flash_attention, q, k, v, arch="sm_90", family="simt", tile={"Bc": 32})
    assert (made.family, made.tile.Bc) == ("simt", 32)


def test_a_plan_knows_the_alignment_and_what_would_be_copied(rng):
    q, k, v = random_qkv(rng, dtype=np.float16, dims=(64, 64))
    assert plan(flash_attention, q, k, v, arch="sm_90").problem.alignment == 16
    shifted = [np.zeros((*x.shape[:3], 65), np.float16)[..., 1:] for x in (q, k, v)]
    assert plan(flash_attention, *shifted, arch="sm_90").problem.alignment == 2
    spread = np.zeros((*k.shape[:3], 128), np.float16)[..., ::2]
    strides = plan(flash_attention, q, spread, v, arch="sm_90").problem.tensors["k"].strides
    assert strides == (203 * 3 * 64, 3 * 64, 64)


def test_planning_does_not_look_at_the_values(rng):
    q, k, v = random_qkv(rng)
    made = plan(flash_attention, q, k, v, backend="cpu")
    assert made == plan(flash_attention, np.full_like(q, np.nan), k, v, backend="cpu")


PUBLIC_NAMES = """
BlockList CompileError CupyFlashError MaskMod Modifications Plan ScoreMod Tile UnsupportedError
apply_rotary apply_rotary_vjp attention_backward_reference attention_hvp_reference
attention_jvp_reference attention_received attention_received_varlen
attention_received_with_kvcache attention_reference attention_varlen_backward_reference
attention_varlen_hvp_reference attention_varlen_jvp_reference attention_varlen_reference
attention_weights attention_weights_varlen attention_weights_with_kvcache
attention_with_kvcache_reference check_mod combine dropout_mask flash_attention
flash_attention_backward flash_attention_hvp flash_attention_jvp flash_attention_qkvpacked
flash_attention_qkvpacked_backward flash_attention_qkvpacked_vjp flash_attention_varlen
flash_attention_varlen_backward flash_attention_varlen_hvp flash_attention_varlen_jvp
flash_attention_varlen_vjp
flash_attention_vjp flash_attention_with_kvcache plan plan_backward plan_varlen plan_with_kvcache
plot_attention plot_mask quantize_kv scaled_dot_product_attention seen_pairs
"""


def test_what_is_seen_of_the_package_is_what_it_promises():
    assert set(cupy_flash.__all__) == set(PUBLIC_NAMES.split())
    assert all(hasattr(cupy_flash, name) for name in cupy_flash.__all__)
    assert issubclass(UnsupportedError, ValueError)


def test_errors_of_the_library_have_one_base_class():
    for kind in (CompileError, DriverError, ParallelError, TableError, UnsupportedError):
        assert issubclass(kind, cupy_flash.CupyFlashError)


def test_plans_that_are_equal_hash_alike(rng):
    q, k, v = random_qkv(rng)
    for options in ({"backend": "cpu"}, {"arch": "sm_90"}):
        first, second = (plan(flash_attention, q, k, v, **options) for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)


def test_a_call_on_the_cpu_logs_nothing(rng, caplog):
    with caplog.at_level(logging.DEBUG, "cupy_flash"):
        flash_attention(*random_qkv(rng), backend="cpu")
    assert caplog.records == []


@pytest.mark.gpu
def test_the_first_call_of_a_configuration_says_what_it_compiles_and_later_ones_nothing(
    rng, caplog
):
    assert gpu_unavailable() is None
    # No other test uses these head dims, so this process has not seen the configuration yet.
    arrays = random_qkv(rng, dims=(43, 71))
    with caplog.at_level(logging.INFO, "cupy_flash"):
        flash_attention(*arrays)
        first = [record.getMessage() for record in caplog.records]
        flash_attention(*arrays)
    assert any("ready in" in message for message in first)
    assert len(caplog.records) == len(first)


def test_a_scale_that_changes_in_place_counts_as_it_is_now(rng):
    q, k, v = rng.standard_normal((3, 1, 9, 2, 16), dtype=np.float32)
    scale = np.full((), 0.1, np.float32)
    for value in (0.1, 0.9):
        scale[...] = value
        given = flash_attention(q, k, v, softmax_scale=scale.item(), backend="cpu")
        found = flash_attention(q, k, v, softmax_scale=np.float32(scale), backend="cpu")
        np.testing.assert_array_equal(found, given)


def test_options_of_a_wrong_type_are_refused_after_the_same_right_call(rng):
    q, k, v = rng.standard_normal((3, 1, 9, 2, 16), dtype=np.float32)
    flash_attention(q, k, v, causal=True, softmax_scale=1.0, backend="cpu")
    with pytest.raises(TypeError, match="causal"):
        flash_attention(q, k, v, causal=1, softmax_scale=1.0, backend="cpu")
    with pytest.raises(TypeError, match="softmax_scale"):
        flash_attention(q, k, v, causal=True, softmax_scale=True, backend="cpu")


def test_numbers_may_come_in_arrays_of_one(rng):
    q, k, v = rng.standard_normal((3, 1, 9, 2, 16), dtype=np.float32)
    given = flash_attention(q, k, v, causal=True, softmax_scale=0.5, q_offset=3, backend="cpu")
    options = {"softmax_scale": np.array([0.5]), "q_offset": np.array([3])}
    out = flash_attention(q, k, v, causal=True, **options, backend="cpu")
    np.testing.assert_array_equal(out, given)
    for wrong in (np.array([0.5, 1.0]), np.array(True), np.array([])):
        with pytest.raises(TypeError, match="softmax_scale"):
            flash_attention(q, k, v, softmax_scale=wrong, backend="cpu")


@pytest.mark.parametrize("seqlen", [1, 16, 3000])
def test_of_no_sequences_the_result_is_empty(seqlen):
    q = np.ones((0, seqlen, 8, 64), np.float32)
    out, lse = flash_attention(q, q, q, return_lse=True, backend="cpu")
    assert out.shape == q.shape
    assert lse.shape == (0, 8, seqlen)
    assert plan(flash_attention, q, q, q, backend="cpu").problem.is_empty
