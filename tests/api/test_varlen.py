"""Packed attention: inputs, results, errors, and launches on a fake GPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support import refusals
from support.calls.sequence_support import VarlenCase, random_varlen_case
from support.comparisons import with_arrays
from support.foreign import Foreign
from support.gpu import fake_gpu

from cupy_flash import UnsupportedError, flash_attention_varlen, plan
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.reference.packed import attention_varlen_reference

DTYPES = ["float16", "bfloat16", "float32", "float64"]

assert_refused = functools.partial(refusals.assert_refused, flash_attention_varlen)


def good():
    """Return valid arguments; each test makes one of them wrong."""
    return {
        "q": np.zeros((113, 6, 40), np.float32),
        "k": np.zeros((203, 3, 40), np.float32),
        "v": np.zeros((203, 3, 72), np.float32),
        "cu_seqlens_q": np.array([0, 50, 50, 113], np.int32),
        "cu_seqlens_k": np.array([0, 90, 95, 200], np.int32),
        "max_seqlen_q": 63,
        "max_seqlen_k": 105,
        "out": np.full((113, 6, 72), np.nan, np.float32),
    }


def good_paged():
    """Return the arguments of `good`, but with keys in 16 pages with 8 rows each."""
    return good() | {
        "k": np.zeros((16, 8, 3, 40), np.float32),
        "v": np.zeros((16, 8, 3, 72), np.float32),
        "cu_seqlens_k": np.array([0, 20, 20, 61], np.int32),
        "max_seqlen_k": 41,
        "block_table": np.array([[3, 1, 2, -9, -9, -9], [-9] * 6, [15, 0, 5, 6, 7, 8]], np.int32),
    }


@pytest.mark.parametrize("arguments", [good(), good_paged()], ids=["varlen", "paged"])
def test_the_good_arguments_are_good(arguments):
    assert np.isfinite(flash_attention_varlen(**arguments)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_give_what_the_formula_gives(rng, dtype, page_size, causal):
    problem = random_varlen_case(
        rng, dtype=dtype, page_size=page_size, causal=causal, seqused=page_size == 1
    ).problem()
    out, lse = flash_attention_varlen(**problem.arguments(), return_lse=True, backend="cpu")
    assert isinstance(out, np.ndarray)
    problem.check(out, lse)


def test_out_is_filled_and_0_where_rows_belong_to_no_sequence(rng):
    problem = random_varlen_case(rng, rows_of_none=7).problem()
    out = problem.poisoned_out()
    assert flash_attention_varlen(**problem.arguments(), out=out, backend="cpu") is out
    problem.check(out)
    assert (out[-7:] == 0).all()


def test_lists_of_lengths_will_do_with_numpy_arrays(rng):
    problem = random_varlen_case(rng, page_size=16, seqused=True).problem()
    arguments = problem.arguments()
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
    lists = {name: arguments[name].tolist() for name in names}
    expected = flash_attention_varlen(**arguments, out=problem.poisoned_out(), backend="cpu")
    out = flash_attention_varlen(**(arguments | lists), out=problem.poisoned_out(), backend="cpu")
    np.testing.assert_array_equal(out, expected)


def test_arrays_of_another_library_are_answered_in_kind(rng):
    problem = random_varlen_case(rng).problem()
    arguments = with_arrays(Foreign, problem.arguments())
    out, lse = flash_attention_varlen(**arguments, return_lse=True)
    assert isinstance(out, Foreign)
    assert isinstance(lse, Foreign)
    problem.check(out.array, lse.array)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.3.0",
    reason="old versions of NumPy multiply strided arrays in another order: 1 of 40 calls differs",
)
def test_strided_inputs_give_the_same_bits_as_contiguous_ones(rng):
    arguments = random_varlen_case(rng, rows_of_none=0).problem().arguments()
    expected = flash_attention_varlen(**arguments, backend="cpu")
    for name in ("q", "k", "v"):
        wide = np.zeros((*arguments[name].shape[:2], 130), arguments[name].dtype)
        wide[..., ::2][..., :64] = arguments[name]
        arguments[name] = wide[..., :128:2]
    spread = np.zeros(2 * len(arguments["cu_seqlens_q"]), np.int32)
    spread[::2] = arguments["cu_seqlens_q"]
    arguments["cu_seqlens_q"] = spread[::2]
    np.testing.assert_array_equal(flash_attention_varlen(**arguments, backend="cpu"), expected)


@pytest.mark.parametrize(
    "case",
    [
        VarlenCase((5,), (0,)),
        VarlenCase((0, 0), (5, 6)),
        VarlenCase((3, 0, 4), (0, 0, 0), slack=0),
        VarlenCase((3, 4), (0, 0), page_size=4, slack=0),
    ],
    ids=str,
)
def test_sequences_without_queries_or_keys_are_computed(case):
    problem = case.problem()
    out, lse = flash_attention_varlen(**problem.arguments(), return_lse=True, backend="cpu")
    problem.check(out, lse)


def test_rows_of_a_batch_of_no_sequences_are_0():
    starts = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.zeros(1, np.int32))
    arguments = good() | starts
    out, lse = flash_attention_varlen(**arguments, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_the_result_of_a_sequence_is_that_of_a_call_of_its_own(rng):
    problem = random_varlen_case(rng, causal=True).problem()
    options = {"batch_invariant": True, "backend": "cpu"}
    out = flash_attention_varlen(**problem.arguments(), **options)
    for b, (q, k, v) in enumerate(problem.dense):
        lengths = [0, len(q)], [0, len(k)], len(q), len(k)
        alone = flash_attention_varlen(q, k, v, *lengths, causal=True, **options)
        first, end = problem.cu_seqlens_q[b : b + 2]
        np.testing.assert_array_equal(out[first:end], alone)


def test_lengths_changed_in_place_are_read_and_checked_anew(rng):
    ends = np.array([0, 50, 70, 113], np.int32)
    q, k, v = rng.standard_normal((3, 113, 2, 8), dtype=np.float32)

    def call(ends):
        return flash_attention_varlen(q, k, v, ends, ends, 63, 63, backend="cpu")

    before = call(ends)
    ends[1] = 8
    assert call(ends).tobytes() == call(ends.copy()).tobytes() != before.tobytes()
    ends[1] = 71
    with pytest.raises(ValueError, match="cu_seqlens_q decreases from 71 to 70 at index 2"):
        call(ends)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((1, 113, 6, 40))}, "q has 4 axes, .*; expected 3: total length, heads"),
        ({"k": np.zeros((203, 40))}, "k has 2 axes, shape .*; expected 3: total length, heads"),
        ({"k": np.zeros((203, 3, 32), np.float32)}, "k has head_dim 32, but q has 40"),
        ({"out": np.zeros((113, 6, 40), np.float32)}, r"out has shape \(113, 6, 40\); expected \("),
        ({"cu_seqlens_q": np.zeros((2, 2), np.int32)}, "cu_seqlens_q has 2 axes"),
        ({"cu_seqlens_q": np.zeros(0, np.int32)}, r"cu_seqlens_q is empty; expected batch \+ 1"),
        ({"cu_seqlens_k": np.zeros(3, np.int32)},
         r"cu_seqlens_k has shape \(3,\); expected \(4,\), as cu_seqlens_q"),
        ({"seqused_k": np.zeros(4, np.int32)}, r"seqused_k has shape \(4,\); expected \(3,\)"),
        ({"cu_seqlens_q": [0, 50, 49, 113]}, "cu_seqlens_q decreases from 50 to 49 at index 2"),
        ({"cu_seqlens_q": [0, 50, 50, 114]}, r"cu_seqlens_q\[3\] is 114; expected at most 113"),
        ({"cu_seqlens_q": [-1, 50, 50, 113]}, r"cu_seqlens_q\[0\] is -1; expected at least 0"),
        ({"cu_seqlens_k": [0, 90, 95, 204]}, r"cu_seqlens_k\[3\] is 204; expected at most 203"),
        ({"max_seqlen_q": 62},
         "cu_seqlens_q gives sequence 2 a length of 63; expected at most 62, the value of "
         "max_seqlen_q"),
        ({"max_seqlen_k": 104},
         "cu_seqlens_k gives sequence 2 a length of 105; expected at most 104, the value of "
         "max_seqlen_k"),
        ({"seqused_k": [1, -1, 3]}, r"seqused_k\[1\] is -1; expected at least 0"),
        ({"seqused_k": [1, 2, 106]}, "seqused_k gives sequence 2 a length of 106; expected at"),
        ({"seqused_k": [1, 2, 109], "max_seqlen_k": 200},
         "seqused_k gives sequence 2 109 keys; expected at most 108, the number of rows of k "
         "from its first key on"),
        ({"max_seqlen_q": -1}, "max_seqlen_q is -1; expected at least 0"),
        *refusals.WRONG_OPTIONS,
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(changes, message):
    assert_refused(ValueError, message, good() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": np.zeros((2, 6), np.int32)},
         "block_table has 2 rows; expected 3, one for each sequence"),
        ({"block_table": np.zeros(3, np.int32)}, "block_table has 1 axes, .*; expected 2: batch"),
        ({"k": np.zeros((128, 3, 40), np.float32)}, "k has 3 axes, .*; expected 4: pages, page_"),
        ({"block_table": [[3, 1, 16, -9, -9, -9], [-9] * 6, [15, 0, 5, 6, 7, 8]]},
         r"block_table\[0, 2\] is 16; expected 0 to 15, as there are 16 pages"),
        ({"block_table": [[3, 1, 2, -9, -9, -9], [-9] * 6, [15, 0, 5, 6, 7, -1]]},
         r"block_table\[2, 5\] is -1; expected 0 to 15"),
        ({"block_table": [[3, 1], [1, 1], [1, 1]]},
         "cu_seqlens_k gives sequence 0 20 keys; expected at most 16, the rows of its pages"),
    ],
)  # fmt: skip
def test_a_page_that_is_not_there_is_refused(changes, message):
    assert_refused(ValueError, message, good_paged() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q is a NoneType; expected a NumPy or CuPy array"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q is a NoneType; expected a NumPy or CuPy array"),
        ({"cu_seqlens_k": None}, "may be None with both block_table and seqused_k"),
        ({"q": np.zeros((113, 6, 40), np.int8)}, "q has dtype int8; expected one of float16"),
        ({"v": np.zeros((203, 3, 72))}, "q, k and v must have one dtype, but are float32"),
        (
            {"cu_seqlens_k": np.zeros(4, np.float32)},
            r"cu_seqlens_k has dtype float32; pass cu_seqlens_k\.astype\('int32'\)",
        ),
        ({"cu_seqlens_k": [0.0, 1.5, 2.0, 3.0]}, "cu_seqlens_k holds a float; expected int"),
        ({"max_seqlen_q": None}, "max_seqlen_q is None; expected an integer"),
        ({"max_seqlen_k": 3.0}, r"max_seqlen_k is 3\.0; expected an integer"),
        ({"causal": 1}, "causal is 1; expected True or False"),
        ({"batch_invariant": 1}, "batch_invariant is 1; expected True or False"),
        ({"num_splits": "2"}, "num_splits is '2'; expected an integer"),
        ({"max_seqlen_q": True}, "max_seqlen_q is True; expected an integer"),
        ({"return_lse": 1}, "return_lse is 1; expected True or False"),
        ({"seqused_k": 3}, "seqused_k is 3, one integer; expected an int32 array, or a list"),
        ({"tile": "64"}, "tile is '64'; expected a Tile"),
    ],
)
def test_a_wrong_kind_is_refused_by_name(changes, message):
    assert_refused(TypeError, message, good() | changes)


def test_integers_that_int32_does_not_hold_are_refused():
    message = "cu_seqlens_k holds integers that do not fit int32"
    assert_refused(ValueError, message, good() | {"cu_seqlens_k": [0, 1, 2, 2**31]})


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_an_out_that_overlaps_lengths_is_refused(name):
    arguments = good() | {"seqused_k": np.array([1, 2, 3], np.int32)}
    lengths = np.asarray(arguments[name], np.int32)
    inside = arguments["out"].reshape(-1)[: lengths.size].view(np.int32)
    inside[...] = lengths
    message = f"out overlaps {name}; pass separate memory"
    assert_refused(ValueError, message, arguments | {name: inside})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_an_input_is_refused(name):
    arrays = {n: np.zeros((113, 6, 72), np.float32) for n in ("q", "k", "v")}
    lengths = {"cu_seqlens_k": [0, 113], "max_seqlen_q": 113, "max_seqlen_k": 113}
    arguments = {**arrays, "cu_seqlens_q": [0, 113], **lengths, "out": arrays[name][::-1]}
    assert_refused(ValueError, f"out overlaps {name}; pass separate memory", arguments)


def test_a_read_only_out_is_refused():
    arguments = good()
    arguments["out"].flags.writeable = False
    assert_refused(ValueError, "out is read-only", arguments)


@pytest.mark.skipif(gpu_unavailable() is None, reason="there is a GPU")
def test_without_a_gpu_asking_for_it_is_refused_with_the_reason():
    assert_refused(UnsupportedError, "backend is 'gpu', but", good() | {"backend": "gpu"})


def test_the_reference_takes_the_same_arguments(rng):
    arguments = random_varlen_case(rng).problem().arguments()
    out, lse = attention_varlen_reference(**arguments)
    assert (out.dtype, lse.shape) == (np.float64, (4, len(arguments["q"])))


def test_numpy_arrays_are_computed_on_a_gpu_where_there_is_one(rng, monkeypatch):
    problem = random_varlen_case(rng, page_size=16, rows_of_none=7).problem()
    uploads = fake_gpu.compute_on_host(monkeypatch)
    out = problem.poisoned_out()
    result, lse = flash_attention_varlen(**problem.arguments(), out=out, return_lse=True)
    assert result is out
    problem.check(out, lse)
    assert (out[-7:] == 0).all()
    assert len(uploads) == 1
    assert all(array is None or array.flags.c_contiguous for array in uploads[0])


def on(gpu, **changes):
    """Return arguments on the fake GPU: 3 sequences, 113 queries, 203 keys."""
    arrays = {"q": gpu.array(113, 6, 40), "k": gpu.array(203, 3, 40), "v": gpu.array(203, 3, 72)}
    starts = {"cu_seqlens_q": gpu.lengths(4), "cu_seqlens_k": gpu.lengths(4)}
    return {**arrays, **starts, "max_seqlen_q": 63, "max_seqlen_k": 105, **changes}


def paged_on(gpu, **changes):
    """Return the arguments of `on`, but with keys in 31 pages of 16 rows, and their lengths."""
    pages = {"k": gpu.array(31, 16, 3, 40), "v": gpu.array(31, 16, 3, 72)}
    tables = {"seqused_k": gpu.lengths(3), "block_table": gpu.lengths(3, 7)}
    return on(gpu, **(pages | tables | changes))


def test_the_kernel_is_told_where_the_arrays_and_the_sequences_lie(gpu):
    arguments = on(gpu, out=gpu.array(113, 6, 72), seqused_k=gpu.lengths(3))
    out, lse = flash_attention_varlen(**arguments, return_lse=True)
    assert out is arguments["out"]
    assert (lse.shape, lse.dtype) == ((6, 113), np.float32)
    ((_, params),) = gpu.launches
    for name in ("q", "k", "v", "out"):
        assert params[name]["data"] == arguments[name].data.ptr
        assert params[name]["batch_stride"] == 0
    assert params["lse"] == lse.data.ptr
    assert (params["batch"], params["seqlen_q"], params["seqlen_k"]) == (3, 63, 105)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
        assert params[name] == arguments[name].data.ptr
    assert params["cache_batch_idx"] == params["block_table"] == params["keys"] == 0
    assert (params["total_q"], params["total_k"]) == (113, 203)


def test_tensor_maps_are_of_the_packed_arrays(gpu):
    arguments = on(gpu)
    flash_attention_varlen(**arguments, family="hopper")
    (prepare, params), (kernel, told_again) = gpu.launches
    assert (prepare, kernel) == ("prepare", "attention")
    assert params == told_again
    ((specs, addresses),) = gpu.maps
    assert addresses == tuple(arguments[name].data.ptr for name in ("q", "k", "v"))
    assert [spec.shape for spec in specs] == [(40, 113, 6, 1), (40, 203, 3, 1), (72, 203, 3, 1)]
    _, (address, _) = gpu.allocations
    assert params["workspace"] == address
    assert params["cu_seqlens_q"] == arguments["cu_seqlens_q"].data.ptr


def test_the_kernel_is_told_of_pages(gpu):
    table = gpu.lengths(3, 7, strides=(40, 4))
    arguments = paged_on(gpu, block_table=table, seqused_k=None)
    out = flash_attention_varlen(**arguments)
    assert (out.shape, out.dtype) == ((113, 6, 72), np.float16)
    ((_, params),) = gpu.launches
    assert params["k"]["batch_stride"] == 16 * 3 * 40
    assert params["block_table"] == arguments["block_table"].data.ptr
    assert (params["pages"], params["max_pages"]) == (31, 7)
    assert params["block_table_stride"] == 10


def test_a_call_with_the_same_shapes_is_prepared_once_wherever_the_arrays_lie(gpu, monkeypatch):
    flash_attention_varlen(**on(gpu))
    monkeypatch.setattr(gpu_forward, "make_plan", None)
    flash_attention_varlen(**on(gpu))
    assert len(gpu.launches) == 2
    assert len(gpu.compiled) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True}, {"softmax_scale": 0.5}, {"num_splits": 2}, {"batch_invariant": True},
        {"max_seqlen_k": 50}, {"return_lse": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_call_with_another_option_is_prepared_anew(gpu, changes):
    flash_attention_varlen(**on(gpu))
    flash_attention_varlen(**on(gpu, **changes))
    assert len(prepared_calls._calls) == 2


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_another_byte_order_is_refused_after_the_same_call_in_the_right_one(gpu, name):
    arguments = on(gpu, seqused_k=gpu.lengths(3))
    flash_attention_varlen(**arguments)
    right = arguments[name]
    wrong = gpu.array(*right.shape, dtype=right.dtype.newbyteorder())
    with pytest.raises(TypeError, match=f"{name} has dtype >"):
        flash_attention_varlen(**(arguments | {name: wrong}))
    assert len(gpu.launches) == 1


def test_an_option_of_the_wrong_kind_is_refused_after_an_equal_right_one(gpu):
    flash_attention_varlen(**on(gpu), causal=True, num_splits=1)
    with pytest.raises(TypeError, match="causal is 1; expected True or False"):
        flash_attention_varlen(**on(gpu), causal=1, num_splits=1)
    with pytest.raises(TypeError, match=r"num_splits is 1\.0; expected an integer"):
        flash_attention_varlen(**on(gpu), causal=True, num_splits=1.0)


def test_a_scale_may_be_an_array_of_one_number_and_a_family_may_not_be_a_list(gpu):
    flash_attention_varlen(**on(gpu), softmax_scale=np.array(0.25))
    ((_, params),) = gpu.launches
    assert params["softmax_scale"] == 0.25
    with pytest.raises(TypeError, match="family is a list; expected a name"):
        flash_attention_varlen(**on(gpu), family=["mma"])


def test_what_cannot_be_read_in_place_is_copied(gpu):
    k = gpu.array(203, 3, 40, strides=(480, 160, 4))
    offsets = gpu.lengths(4, strides=(8,))
    flash_attention_varlen(**on(gpu, k=k, cu_seqlens_q=offsets))
    ((_, params),) = gpu.launches
    assert params["k"]["data"] != k.data.ptr
    assert params["k"]["row_stride"] == 3 * 40
    assert params["cu_seqlens_q"] != offsets.data.ptr


def test_an_array_on_another_device_is_refused(gpu):
    with pytest.raises(ValueError, match="seqused_k lies on device 1, but the current device is 0"):
        flash_attention_varlen(**on(gpu, seqused_k=gpu.lengths(3, device=1)))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_out_that_overlaps_an_input_on_the_gpu_is_refused_in_every_call(gpu, name):
    arguments = on(gpu, out=gpu.array(113, 6, 72))
    flash_attention_varlen(**arguments)
    shape = arguments["out"].shape
    beside = gpu.array(*shape, address=arguments[name].data.ptr - 2 * 113 * 6 * 72)
    flash_attention_varlen(**(arguments | {"out": beside}))
    within = gpu.array(*shape, address=arguments[name].data.ptr - 16)
    with pytest.raises(ValueError, match=f"out overlaps {name}; pass separate memory"):
        flash_attention_varlen(**(arguments | {"out": within}))
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("other", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"])
def test_an_out_over_lengths_or_pages_is_refused_in_every_call(gpu, other):
    arguments = paged_on(gpu, out=gpu.array(113, 6, 72))
    flash_attention_varlen(**arguments)
    over = gpu.array(113, 6, 72, address=arguments[other].data.ptr - 16)
    with pytest.raises(ValueError, match=f"out overlaps {other}; pass separate memory"):
        flash_attention_varlen(**(arguments | {"out": over}))
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"])
def test_an_array_that_is_missing_on_the_gpu_is_a_type_error(gpu, name):
    with pytest.raises(TypeError, match=f"{name} is a NoneType; expected a NumPy or CuPy array"):
        flash_attention_varlen(**on(gpu, **{name: None}))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"])
def test_lengths_and_pages_at_an_address_that_no_load_can_use_are_copied(gpu, name):
    arguments = paged_on(gpu)
    shifted = gpu.lengths(*arguments[name].shape, address=gpu.address() + 2)
    for _ in range(2):
        flash_attention_varlen(**(arguments | {name: shifted}))
    for _, params in gpu.launches:
        assert params[name] % 4 == 0
        assert params[name] not in (0, shifted.data.ptr)


@pytest.mark.parametrize(
    ("name", "field"), [("max_seqlen_q", "seqlen_q"), ("max_seqlen_k", "seqlen_k")]
)
def test_an_option_that_was_changed_in_place_counts_by_its_present_value(gpu, name, field):
    option = np.array(7)
    for value in (7, 9, 11):
        option[...] = value
        flash_attention_varlen(**on(gpu, **{name: option}))
    assert [params[field] for _, params in gpu.launches] == [7, 9, 11]


def test_masked_lengths_are_refused():
    masked = np.ma.masked_array(good()["cu_seqlens_q"], mask=False)
    assert_refused(TypeError, "cu_seqlens_q is a masked array", good() | {"cu_seqlens_q": masked})


def test_an_out_of_jax_is_refused():
    out = refusals.jax_array(np.zeros((113, 6, 72), np.float32))
    assert_refused(TypeError, "out is a JAX array, which is immutable", good() | {"out": out})


@pytest.mark.parametrize(
    "changes_on",
    [
        lambda gpu: {"q": gpu.array(0, 6, 40)},
        lambda gpu: {"cu_seqlens_q": gpu.lengths(1), "cu_seqlens_k": gpu.lengths(1)},
        lambda gpu: {"max_seqlen_q": 0},
    ],
    ids=["no rows", "no sequences", "no row of any sequence"],
)
def test_nothing_is_launched_where_there_are_no_queries(gpu, changes_on):
    flash_attention_varlen(**on(gpu, **changes_on(gpu)))
    assert gpu.launches == []


@pytest.mark.parametrize("most", [0, 105])
def test_without_keys_the_kernel_fills_the_rows_of_sequences(gpu, most):
    empty = {"k": gpu.array(0, 3, 40), "v": gpu.array(0, 3, 72)} if most else {}
    flash_attention_varlen(**on(gpu, max_seqlen_k=most, **empty))
    ((_, params),) = gpu.launches
    assert params["seqlen_k"] == 0


def test_numpy_lengths_with_arrays_on_a_gpu_are_refused_with_the_remedy(gpu):
    message = r"cu_seqlens_q lies in host memory and q on a GPU; pass cupy\.asarray\(cu_seqlens_q\)"
    with pytest.raises(TypeError, match=message):
        flash_attention_varlen(**on(gpu, cu_seqlens_q=np.zeros(4, np.int32)))


def test_lengths_on_a_gpu_with_numpy_arrays_are_refused_with_the_remedy(gpu):
    message = r"cu_seqlens_k lies on a GPU and q in host memory; pass cu_seqlens_k\.get\(\)"
    assert_refused(TypeError, message, good() | {"cu_seqlens_k": gpu.lengths(4)})


def test_arrays_on_a_gpu_are_not_computed_on_the_cpu(gpu):
    with pytest.raises(ValueError, match="backend is 'cpu', but the arrays lie in GPU memory"):
        flash_attention_varlen(**on(gpu), backend="cpu")


@pytest.mark.parametrize("pages", [0, 31])
def test_a_plan_is_what_the_call_is_computed_by(gpu, pages):
    paged = {name: gpu.array(pages, 16, 3, dim) for name, dim in (("k", 40), ("v", 72))}
    paged |= {"block_table": gpu.lengths(3, 9)}
    arguments = on(gpu, causal=True, num_splits=3, **(paged if pages else {}))
    flash_attention_varlen(**arguments)
    made = plan(flash_attention_varlen, **arguments, arch="sm_90")
    assert gpu.compiled == [made.unit.title]
    assert [entry for entry, _ in gpu.launches] == [launch.entry for launch in made.launches]
    assert (made.problem.layout.kind, made.problem.layout.pages) == ("varlen", pages)


def test_the_cpu_is_planned_for_without_a_look_at_what_arrays_hold():
    planned = functools.partial(plan, flash_attention_varlen, backend="cpu")
    arguments = {name: value for name, value in good().items() if name != "out"}
    made = planned(**arguments, tile=(16, 32))
    assert (made.family, made.tile.Bc) == ("cpu", 32)
    nan = {"q": np.full_like(arguments["q"], np.nan)}
    assert made == planned(**(arguments | nan), tile=(16, 32))
    with pytest.raises(ValueError, match="arch is 'sm_90', but backend is 'cpu'"):
        planned(**arguments, arch="sm_90")


def test_a_plan_is_refused_where_the_call_is(gpu):
    with pytest.raises(TypeError, match="max_seqlen_q is None; expected an integer"):
        plan(flash_attention_varlen, **on(gpu, max_seqlen_q=None), arch="sm_90")
    with pytest.raises(TypeError, match="cu_seqlens_k is a NoneType; expected a NumPy or CuPy"):
        plan(flash_attention_varlen, **on(gpu, cu_seqlens_k=None), arch="sm_90")


def test_biases_masks_and_trees_are_as_long_as_the_call_says_sequences_may_be(rng):
    lengths = {"cu_seqlens_q": [0, 5, 12], "cu_seqlens_k": [0, 9, 20]}
    call = {n: rng.standard_normal((20, 2, 8), np.float32) for n in ("k", "v")}
    call |= {n: np.array(x, np.int32) for n, x in lengths.items()}
    call |= {"q": rng.standard_normal((12, 2, 8), np.float32)}
    call |= {"max_seqlen_q": 16, "max_seqlen_k": 31}
    of_pairs = {
        "bias": rng.standard_normal((2, 12, 31), np.float32),
        "mask": rng.random((1, 12, 31)) < 0.7,
        "tree_mask": rng.integers(0, 2**16, (2, 16)).astype(np.uint64),
    }
    out = flash_attention_varlen(**call, **of_pairs, backend="cpu")
    np.testing.assert_allclose(out, attention_varlen_reference(**call, **of_pairs)[0], atol=1e-5)


def test_a_gpu_takes_a_tree_of_more_rows_than_there_are_queries(gpu):
    changes = {"q": gpu.array(40, 6, 40), "tree_mask": gpu.array(3, 63, dtype=np.uint64)}
    flash_attention_varlen(**on(gpu, **changes))
    assert len(gpu.launches) == 1
