"""Bad input: each kind raises an error that names what is wrong and what would be right.

A refused call changes neither the inputs nor `out`, if it is given.
"""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from support import refusals

from cupy_flash import (
    CompileError,
    UnsupportedError,
    attention_reference,
    flash_attention,
    flash_attention_backward,
    flash_attention_qkvpacked,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    plan,
)
from cupy_flash.calls import backends, dispatch
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.gpu.compiler import compile_cubin, why_no_compiler
from cupy_flash.planning import tuning
from cupy_flash.problem.device import device_for_arch

NO_GPU = "the CUDA driver reports no GPU"


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# The axis order of PyTorch: (batch, heads, seqlen, head_dim).
Q_HEADS_FIRST, KV_HEADS_FIRST = zeros(2, 8, 100, 16), zeros(2, 2, 200, 16)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "function", [flash_attention, attention_reference, flash_attention_backward]
)
def test_heads_that_fit_in_the_other_layout_are_told_it(function, layout):
    q, k = Q_HEADS_FIRST, KV_HEADS_FIRST
    axes, other = "heads, seqlen", "bhsd"
    if layout == "bhsd":
        q, k, axes, other = q.swapaxes(1, 2), k.swapaxes(1, 2), "seqlen, heads", "bshd"
    arrays = (q, k, k)
    if function is flash_attention_backward:
        arrays = (q, *arrays, q, zeros(2, 100, 8))
    message = rf'multiple of .*200.*; arrays \(batch, {axes}, head_dim\) need layout="{other}"$'
    with pytest.raises(ValueError, match=message):
        function(*arrays, layout=layout)
    if function is flash_attention:
        assert function(*arrays, layout=other).shape == q.shape


def test_heads_that_fit_in_no_layout_are_not():
    # 8 is not a multiple of 3, so the heads are wrong in layout "bhsd", too.
    with pytest.raises(ValueError, match=r"q has 100 heads; expected .* of k and v$"):
        flash_attention(Q_HEADS_FIRST, zeros(2, 3, 200, 16), zeros(2, 3, 200, 16))


def test_heads_before_the_rows_of_caches_and_packed_arrays_are_told_to_be_swapped():
    q, k = Q_HEADS_FIRST[:, :, :1], KV_HEADS_FIRST
    message = (
        r"heads of .*; if heads come before rows, pass q.swapaxes\(-3, -2\), and likewise keys"
    )
    with pytest.raises(ValueError, match=message):
        flash_attention_with_kvcache(q, k, k, cache_seqlens=3)
    q, k = (x.swapaxes(-3, -2) for x in (q, k))
    assert flash_attention_with_kvcache(q, k, k, cache_seqlens=3).shape == q.shape
    q, k = Q_HEADS_FIRST[0], KV_HEADS_FIRST[0]
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(q, k, k, [0, 8], [0, 2], 8, 2)


def good():
    """Return valid arguments; each test makes one of them wrong."""
    return {
        "q": zeros(2, 113, 6, 40),
        "k": zeros(2, 203, 3, 40),
        "v": zeros(2, 203, 3, 72),
        "out": np.full((2, 113, 6, 72), np.nan, np.float32),
    }


@pytest.fixture
def on_gpu(gpu):
    """Valid arguments on a fake GPU, in float16."""
    return {name: gpu.array(*array.shape) for name, array in good().items()}


def assert_refused(error, message, **changes):
    refusals.assert_refused(flash_attention, error, message, good() | changes)


def test_the_good_arguments_are_good():
    assert np.isfinite(flash_attention(**good())).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": zeros(3, 203, 3, 40)}, "k has batch 3, but q has 2"),
        ({"v": zeros(1, 203, 3, 72)}, "v has batch 1, but q has 2"),
        ({"k": zeros(2, 203, 3, 32)}, "k has head_dim 32, but q has 40"),
        ({"k": zeros(2, 199, 3, 40)}, "k and v must have one seqlen, but have 199 and 203"),
        ({"v": zeros(2, 203, 6, 72)}, "k and v must have one number of heads, but have 3 and 6"),
        ({"k": zeros(2, 203, 4, 40), "v": zeros(2, 203, 4, 72)},
         "q has 6 heads; expected a multiple of the 4 heads of k and v$"),
        ({"k": zeros(2, 203, 0, 40), "v": zeros(2, 203, 0, 72)},
         "k and v have no heads; expected at least 1"),
        ({"q": zeros(2, 113, 6, 577), "k": zeros(2, 203, 3, 577)},
         "head_dim of q and k is 577; expected 1 to 576"),
        ({"q": zeros(2, 113, 6, 0), "k": zeros(2, 203, 3, 0)},
         "head_dim of q and k is 0; expected 1 to 576"),
        ({"v": zeros(2, 203, 3, 600)}, "head_dim of v is 600; expected 1 to 576"),
        ({"v": zeros(2, 203, 3, 0)}, "head_dim of v is 0; expected 1 to 576"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_go_together_are_refused(changes, message):
    assert_refused(ValueError, message, **changes)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("shape", [(), (40,), (113, 40), (113, 6, 40), (1, 2, 113, 6, 40)])
def test_arrays_with_another_number_of_axes_are_refused(name, shape):
    found, expected = (name, "4, as q has") if name != "q" else ("[qk]", "3 or more|[35], as q has")
    message = rf"{found} has \d axes, shape .*; expected ({expected}): any batch axes, and seqlen"
    assert_refused(ValueError, message, **{name: zeros(*shape)})


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_other_batch_axes_than_those_of_q_are_refused(name):
    arrays = {n: x.reshape(2, 1, *x.shape[1:]) for n, x in good().items()}
    wrong = arrays[name].swapaxes(0, 1)
    message = rf"{name} has the batch axes \(1, 2\), but q has \(2, 1\)"
    assert_refused(ValueError, message, **(arrays | {name: wrong}))


def test_an_out_whose_batch_axes_have_no_common_stride_is_refused():
    arrays = {n: np.stack([x, x, x]) for n, x in good().items()}
    out = np.zeros((2, 3, *good()["out"].shape[1:]), np.float32).swapaxes(0, 1)
    message = "out has shape .* and strides .*; expected batch axes that can be merged"
    assert_refused(ValueError, message, **(arrays | {"out": out}))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "dtype",
    [np.int64, np.int8, np.uint8, bool, complex, object, "U4", ml_dtypes.float8_e5m2],
    ids=str,
)
def test_a_dtype_that_attention_is_not_computed_in_is_refused(name, dtype):
    message = f"{name} has dtype .*; expected one of float16, bfloat16, float32, float64"
    assert_refused(TypeError, message, **{name: good()[name].astype(dtype)})


def test_inputs_are_all_of_float8_or_none():
    float8 = {name: good()[name].astype(ml_dtypes.float8_e4m3fn) for name in "qkv"}
    message = "k has dtype float32; expected float8_e4m3fn, as q has"
    assert_refused(TypeError, message, q=float8["q"])
    for name in "kv":
        message = f"{name} has dtype float8_e4m3fn; expected one of float16, bfloat16, float32"
        assert_refused(TypeError, message, **{name: float8[name]})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_of_different_dtypes_are_refused(name):
    message = "q, k and v must have one dtype, but are .*float16"
    assert_refused(TypeError, message, **{name: good()[name].astype(np.float16)})


def test_an_array_in_foreign_byte_order_is_refused_with_the_remedy():
    swapped = good()["q"].astype(np.dtype(np.float32).newbyteorder())
    assert_refused(TypeError, r"q has dtype .*byte order.*pass q.astype\('float32'\)", q=swapped)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_foreign_byte_order_on_a_gpu_is_refused_after_the_same_call_in_the_right_one(
    name, gpu, on_gpu
):
    flash_attention(**on_gpu)
    swapped = gpu.array(*good()[name].shape, dtype=np.dtype(np.float16).newbyteorder())
    with pytest.raises(TypeError, match=rf"pass {name}\.astype\('float16'\)"):
        flash_attention(**(on_gpu | {name: swapped}))
    assert len(gpu.launches) == 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"softmax_scale": 1}, {"softmax_scale": True}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"q_offset": 1}, {"q_offset": True}),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_after_an_equal_right_one(right, wrong, gpu, on_gpu):
    flash_attention(**on_gpu, causal=True, **right)
    with pytest.raises(TypeError, match=f"{next(iter(wrong))} is "):
        flash_attention(**on_gpu, causal=True, **wrong)
    assert len(gpu.launches) == 1


class Changing:
    """Number that changes in place, as a parameter of PyTorch does."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)

    def __index__(self):
        return self.value


@pytest.mark.parametrize("name", ["softmax_scale", "q_offset"])
def test_an_option_that_was_changed_in_place_counts_by_its_present_value(name, gpu, on_gpu):
    option = Changing(2)
    for option.value in (2, 3, 5):
        flash_attention(**on_gpu, causal=True, family="simt", **{name: option})
    # The keys are split, so each call launches more than one kernel.
    assert list(dict.fromkeys(struct[name] for _, struct in gpu.launches)) == [2, 3, 5]


@pytest.mark.parametrize("name", ["softmax_scale", "q_offset"])
def test_an_option_is_not_kept_alive(name, on_gpu):
    option = Changing(2)
    flash_attention(**on_gpu, causal=True, **{name: option})
    gone = weakref.ref(option)
    del option
    gc.collect()
    assert gone() is None


MISALIGNED = [(np.float32, 2), (np.float16, 1), (np.float64, 4)]


@pytest.mark.parametrize(("dtype", "offset"), MISALIGNED)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_input_at_an_address_that_no_load_can_use_is_copied(name, dtype, offset, gpu):
    arrays = {key: gpu.array(*good()[key].shape, dtype=dtype) for key in "qkv"}
    flash_attention(**arrays)
    shifted = gpu.array(*arrays[name].shape, dtype=dtype, address=gpu.address() + offset)
    for _ in range(2):
        flash_attention(**(arrays | {name: shifted}))
    for _, struct in gpu.launches:
        assert struct[name]["data"] % 16 == 0
        assert struct[name]["data"] not in (0, shifted.data.ptr)
    assert len(prepared_calls._calls) == 1


@pytest.mark.parametrize(("dtype", "offset"), MISALIGNED)
def test_an_out_at_an_address_that_no_store_can_use_is_refused(dtype, offset, gpu):
    arrays = {key: gpu.array(*array.shape, dtype=dtype) for key, array in good().items()}
    flash_attention(**arrays)
    launched = len(gpu.launches)
    shape, size = arrays["out"].shape, np.dtype(dtype).itemsize
    shifted = gpu.array(*shape, dtype=dtype, address=gpu.address() + offset)
    message = rf"out lies at address {shifted.data.ptr:#x}; expected a multiple of {size}, the size"
    with pytest.raises(ValueError, match=message):
        flash_attention(**(arrays | {"out": shifted}))
    assert len(gpu.launches) == launched


def misaligned(array):
    """Return a copy that begins one byte past an aligned address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    copy = memory.view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert not copy.flags.aligned
    return copy


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_host_arrays_may_lie_at_any_address(dtype, rng):
    arrays = {name: rng.standard_normal(x.shape).astype(dtype) for name, x in good().items()}
    expected = flash_attention(**arrays, backend="cpu").copy()
    beside = {name: misaligned(array) for name, array in arrays.items()}
    out = flash_attention(**beside, backend="cpu")
    assert out is beside["out"]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_an_input_on_a_gpu_is_refused_in_every_call(name, gpu, on_gpu):
    for _ in range(2):
        flash_attention(**on_gpu)
    within = gpu.array(*on_gpu["out"].shape, address=on_gpu[name].data.ptr + 64)
    with pytest.raises(ValueError, match=f"out overlaps {name}; pass separate memory"):
        flash_attention(**(on_gpu | {"out": within}))
    assert len(gpu.launches) == 2


@pytest.mark.parametrize(("backend", "name"), [("auto", "qkv"), ("gpu", "q")])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_parts_of_a_packed_array_on_a_gpu_are_read_where_they_lie(index, backend, name, gpu):
    qkv = gpu.array(2, 113, 3, 4, 40)
    for out in (None, gpu.array(2, 113, 4, 40)):
        for _ in range(2):
            flash_attention_qkvpacked(qkv, out=out, backend=backend)
    for _, struct in gpu.launches:
        assert struct["qkv"[index]]["data"] == qkv.data.ptr + index * 4 * 40 * 2
        assert struct["qkv"[index]]["row_stride"] == 3 * 4 * 40
    assert len(prepared_calls._calls) == 2
    within = gpu.array(2, 113, 4, 40, address=qkv.data.ptr + 2 * index * 4 * 40)
    with pytest.raises(ValueError, match=f"out overlaps {name}; pass separate memory"):
        flash_attention_qkvpacked(qkv, out=within, backend=backend)
    row = 4 * 40 * 2
    broadcast = gpu.array(2, 113, 3, 4, 40, strides=(113 * row, row, 0, 80, 2))
    flash_attention_qkvpacked(broadcast, backend=backend)
    assert gpu.launches[-1][1]["qkv"[index]]["data"] == broadcast.data.ptr


@pytest.mark.parametrize("array", [None, 1.0, "q", [[1.0]], {"q": 1}])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_array_is_refused(name, array):
    assert_refused(TypeError, f"{name} is a .*; expected a NumPy or CuPy array", **{name: array})


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_masked_array_is_refused_as_its_mask_would_be_lost(name):
    masked = np.ma.masked_array(good()[name], mask=False)
    message = rf"{name} is a masked array, .*; pass {name}\.filled\(...\) or {name}\.data"
    assert_refused(TypeError, message, **{name: masked})


_ROW = zeros(2, 1, 6, 72)
_READ_ONLY = good()["out"]
_READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([1.0], TypeError, "out is a list; expected a NumPy or CuPy array"),
        (refusals.jax_array(good()["out"]), TypeError,
         "out is a JAX array, which is immutable and cannot be written in place"),
        (zeros(2, 113, 6, 40), ValueError,
         r"out has shape \(2, 113, 6, 40\); expected \(2, 113, 6, 72\)"),
        (zeros(2, 113, 6, 72, dtype=np.float64), TypeError,
         "out has dtype float64; expected float32, as q has"),
        (zeros(2, 113, 6, 144)[..., ::2], ValueError,
         "out has strides .*; expected a contiguous last axis"),
        (_READ_ONLY, ValueError, "out is read-only; pass an array that can be written"),
        (np.lib.stride_tricks.as_strided(_ROW, (2, 113, 6, 72), (_ROW.strides[0], 0, 288, 4)),
         ValueError, "out overlaps itself"),
    ],
    ids=["no array", "JAX", "shape", "dtype", "strides", "read-only", "overlaps itself"],
)  # fmt: skip
def test_an_out_that_cannot_be_written_is_refused(out, error, message):
    assert_refused(error, message, out=out)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_an_input_is_refused(name):
    arrays = {n: zeros(2, 113, 6, 72) for n in ("q", "k", "v")}
    message = f"out overlaps {name}; pass separate memory"
    assert_refused(ValueError, message, **arrays, out=arrays[name])
    assert_refused(ValueError, message, **arrays, out=arrays[name][:, ::-1])


def test_an_out_between_the_rows_of_an_input_is_no_overlap():
    packed = zeros(2, 113, 2, 6, 40)
    q, out = packed[:, :, 0], packed[:, :, 1]
    k = zeros(2, 203, 3, 40)
    out[:] = np.nan
    assert flash_attention(q, k, k, out=out) is out
    assert not np.isnan(out).any()


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ValueError, {"layout": "sbhd"}, "layout is 'sbhd'; expected one of bshd, bhsd"),
        (ValueError, {"backend": "tpu"}, "backend is 'tpu'; expected one of auto, gpu, cpu"),
        (ValueError, {"softmax_scale": np.nan}, "softmax_scale is nan; expected a finite number"),
        (TypeError, {"softmax_scale": "1"}, "softmax_scale is '1'; expected a number"),
        (ValueError, {"q_offset": 3}, "q_offset is for a causal mask, a window or another"),
        (TypeError, {"q_offset": 3.5, "causal": True}, "q_offset is 3.5; expected an integer"),
        (TypeError, {"q_offset": True, "causal": True}, "q_offset is True; expected an integer"),
        (TypeError, {"softmax_scale": True}, "softmax_scale is True; expected a number"),
        (ValueError, {"softmax_scale": 10**400},
         "^softmax_scale is too large for a float; expected a f"),
        (TypeError, {"return_lse": "no"}, "return_lse is 'no'; expected True or False"),
        (TypeError, {"tile": (True, 64)}, r"tile is \(True, 64\); expected a Tile"),
        (TypeError, {"causal": "yes"}, "causal is 'yes'; expected True or False"),
        (TypeError, {"tile": "64"}, r"tile is '64'; expected a Tile, .* or \(Br, Bc\)"),
        (ValueError, {"tile": (64,)}, r"tile is \(64,\); expected a Tile"),
    ],
)  # fmt: skip
def test_an_option_that_is_no_choice_is_told_the_choices(error, changes, message):
    assert_refused(error, message, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": (0, 64)}, "Br is 0; expected a positive number"),
        ({"tile": {"warps": 4}}, "unknown tile field 'warps'; expected one of Br, Bc"),
        (
            {
                "tile": (2**14, 2**14),
                "q": zeros(2, 2**14, 6, 40),
                "k": zeros(2, 2**14, 3, 40),
                "v": zeros(2, 2**14, 3, 72),
                "out": None,
            },
            "tile .* choose a smaller Br or Bc",
        ),
        (
            {"family": "flash"},
            "unknown family 'flash'; expected one of decode, hopper, mma, simt, naive",
        ),
        ({"family": "mma"}, "family 'mma' is a GPU kernel, but the CPU backend computes this"),
    ],
)
def test_a_tile_or_family_that_the_cpu_does_not_have_is_refused(changes, message):
    assert_refused(ValueError, message, backend="cpu", **changes)


@pytest.mark.parametrize(
    ("arch", "family", "tile", "message"),
    [
        ("sm_75", "simt", {"Br": 512, "Bc": 512}, "family 'simt' has no tile with Br=512 Bc=512"),
        ("sm_86", "mma", {"Br": 64, "Bc": 512}, "family 'mma' has no tile with Br=64 Bc=512 here"),
        ("sm_75", "mma", None, "family 'mma' cannot serve this: needs sm_80 or newer"),
        ("sm_90", "naive", (64, 64), "the naive kernels' tile is always 32x32"),
    ],
)
def test_a_tile_or_family_that_does_not_fit_the_gpu_says_why(arch, family, tile, message):
    inputs = {name: good()[name] for name in "qkv"}
    with pytest.raises(UnsupportedError, match=message):
        plan(flash_attention, **inputs, arch=arch, family=family, tile=tile)


def test_an_unknown_architecture_is_told_the_known_ones():
    inputs = [zeros(1, 5, 2, 8)] * 3
    with pytest.raises(ValueError, match="unknown architecture 'sm_61'; expected one of sm_75"):
        plan(flash_attention, *inputs, arch="sm_61")


def test_plan_refuses_what_the_call_refuses():
    q, k = zeros(1, 5, 2, 8), zeros(1, 5, 2, 9)
    with pytest.raises(ValueError, match="k has head_dim 9, but q has 8"):
        plan(flash_attention, q, k, q)
    with pytest.raises(ValueError, match="backend is 'tpu'; expected one of auto, gpu, cpu"):
        plan(flash_attention, q, q, q, backend="tpu")
    with pytest.raises(TypeError, match="v is a NoneType; expected a NumPy or CuPy array"):
        plan(flash_attention, q, q, None)


def test_a_misspelt_option_of_a_packed_call_is_refused():
    with pytest.raises(TypeError, match="casual"):
        flash_attention_qkvpacked(zeros(1, 5, 3, 2, 8), casual=True)


@pytest.mark.parametrize("text", ["", "{", '{"version": 1, "entries": [{"tile": 3}]}'])
def test_a_corrupt_user_table_changes_no_result(home, text):
    arguments = good() | {"q": np.linspace(-1, 1, 2 * 113 * 6 * 40).reshape(2, 113, 6, 40)}
    arguments = {name: array.astype(np.float32) for name, array in arguments.items()}
    expected = flash_attention(**arguments).copy()
    (home / "tuned.json").write_text(text)
    tuning.reload()
    np.testing.assert_array_equal(flash_attention(**arguments), expected)
    assert (home / "tuned.json").read_text() == text


@pytest.fixture
def no_gpu(monkeypatch):
    for module in (dispatch, backends):
        monkeypatch.setattr(module, "gpu_unavailable", lambda: NO_GPU)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_cpu_computes():
    assert np.isfinite(flash_attention(**good())).all()
    made = plan(flash_attention, **{name: good()[name] for name in "qkv"})
    assert (made.family, made.reason) == ("cpu", "no GPU is available")
    assert set(made.rejected.values()) == {NO_GPU}


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_asking_for_it_is_refused_with_the_reason():
    assert_refused(UnsupportedError, f"backend is 'gpu', but {NO_GPU}", backend="gpu")
    assert_refused(UnsupportedError, f"'mma' is a GPU kernel.*: {NO_GPU}", family="mma")
    q = zeros(1, 5, 2, 8)
    with pytest.raises(UnsupportedError, match=f"backend is 'gpu', but {NO_GPU}"):
        plan(flash_attention, q, q, q, backend="gpu")


@pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
def test_an_nvrtc_that_is_too_old_is_refused_before_it_compiles(monkeypatch):
    from cupy.cuda import nvrtc

    q = zeros(1, 5, 1, 8, dtype=np.float16)
    made = plan(flash_attention, q, q, q, arch="sm_90")

    def compile_program(*arguments):
        raise AssertionError("compiled all the same")

    monkeypatch.setattr(nvrtc, "getVersion", lambda: (11, 2))
    monkeypatch.setattr(nvrtc, "compileProgram", compile_program)
    with pytest.raises(CompileError, match=r"NVRTC 11\.2 is too old; 12\.0 or newer is needed"):
        compile_cubin(made.unit, device_for_arch("sm_90"))
