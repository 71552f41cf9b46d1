"""Attention to a cache: inputs, results, written arrays, errors, and launches on a fake GPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support import refusals
from support.calls.sequence_support import KVCacheCase, random_kvcache_case
from support.comparisons import assert_all_equal, with_arrays
from support.foreign import Foreign
from support.gpu import fake_gpu

from cupy_flash import UnsupportedError, flash_attention_with_kvcache, plan
from cupy_flash.calls.gpu import forward as gpu_forward
from cupy_flash.calls.gpu import prepared_calls
from cupy_flash.cpu import varlen
from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.reference.packed import attention_with_kvcache_reference

DTYPES = ["float16", "bfloat16", "float32", "float64"]

assert_refused = functools.partial(refusals.assert_refused, flash_attention_with_kvcache)


def good():
    """Return valid arguments; each test makes one of them wrong."""
    return {
        "q": np.zeros((3, 2, 6, 40), np.float32),
        "k_cache": np.zeros((4, 61, 3, 40), np.float32),
        "v_cache": np.zeros((4, 61, 3, 72), np.float32),
        "k": np.ones((3, 5, 3, 40), np.float32),
        "v": np.ones((3, 5, 3, 72), np.float32),
        "cache_seqlens": np.array([7, 0, 56], np.int32),
        "rotary_cos": np.ones((61, 8), np.float32),
        "rotary_sin": np.zeros((61, 8), np.float32),
        "out": np.full((3, 2, 6, 72), np.nan, np.float32),
    }


def good_paged():
    """Return the arguments of `good`, but with caches of 16 pages with 8 rows each."""
    return good() | {
        "k_cache": np.zeros((16, 8, 3, 40), np.float32),
        "v_cache": np.zeros((16, 8, 3, 72), np.float32),
        "block_table": np.array(
            [[3, 1] + [-9] * 6, [2] + [-9] * 7, [15, 0, 5, 6, 7, 8, 9, 10]], np.int32
        ),
    }


@pytest.mark.parametrize("arguments", [good(), good_paged()], ids=["contiguous", "paged"])
def test_the_good_arguments_are_good(arguments):
    assert np.isfinite(flash_attention_with_kvcache(**arguments)).all()


@pytest.mark.parametrize("seqlen_new", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_give_what_the_formula_gives(rng, dtype, page_size, causal, seqlen_new):
    lengths = {"seqlen_q": 3, "seqlen_new": seqlen_new, "rotary_dim": 32 if seqlen_new else 0}
    options = {"dtype": dtype, "page_size": page_size, "causal": causal}
    problem = random_kvcache_case(rng, indexed=page_size == 0, **options, **lengths).problem()
    arguments = problem.arguments()
    out, lse = flash_attention_with_kvcache(**arguments, return_lse=True, backend="cpu")
    problem.check(out, lse)
    problem.check_caches(arguments["k_cache"], arguments["v_cache"])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_new_keys_are_rotated_by_their_positions(rng, causal, interleaved):
    problem = random_kvcache_case(
        rng, seqlen_q=2, seqlen_new=4, rotary_dim=24, causal=causal, rotary_interleaved=interleaved
    ).problem()
    arguments = problem.arguments()
    before = {name: arguments[name].copy() for name in ("q", "k", "v")}
    problem.check(flash_attention_with_kvcache(**arguments, backend="cpu"))
    problem.check_caches(arguments["k_cache"], arguments["v_cache"])
    assert_all_equal((arguments[name] for name in before), before.values())


def test_queries_are_rotated_on_the_host_also_where_no_row_is_new(rng):
    problem = random_kvcache_case(rng, seqlen_q=2, seqlen_new=1, rotary_dim=16).problem()
    arguments = problem.arguments()
    arguments |= {name: arguments[name][:, :0] for name in ("k", "v")}
    out = flash_attention_with_kvcache(**arguments, backend="cpu")
    tables = [arguments.pop(name) for name in ("rotary_cos", "rotary_sin")]
    q = varlen.rotate(
        arguments["q"], *tables, arguments["cache_seqlens"], interleaved=True, advance=False
    )
    expected = flash_attention_with_kvcache(**(arguments | {"q": q}), backend="cpu")
    np.testing.assert_array_equal(out, expected)
    assert not np.array_equal(q, arguments["q"])


def test_one_integer_stands_for_the_lengths_of_all(rng):
    problem = KVCacheCase((37, 37, 37), seqlen_new=2, seed=int(rng.integers(2**32))).problem()
    results = []
    for lengths in (37, np.int64(37), [37, 37, 37], problem.cache_seqlens):
        arguments = problem.arguments() | {"cache_seqlens": lengths}
        results.append(flash_attention_with_kvcache(**arguments, backend="cpu"))
        problem.check_caches(arguments["k_cache"], arguments["v_cache"])
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_appending_row_by_row_equals_appending_at_once(rng):
    case = random_kvcache_case(rng, batch=3, seqlen_q=4, seqlen_new=4, causal=True)
    problem = case.problem()
    arguments, stepwise = problem.arguments(), problem.arguments()
    options = {"causal": True, "batch_invariant": True, "backend": "cpu"}
    names = ("q", "k", "v")
    at_once = flash_attention_with_kvcache(**(arguments | options))
    for i in range(4):
        step = {name: stepwise[name][:, i : i + 1] for name in names}
        step["cache_seqlens"] = stepwise["cache_seqlens"] + np.int32(i)
        out = flash_attention_with_kvcache(**(stepwise | options | step))
        np.testing.assert_array_equal(out[:, 0], at_once[:, i])
    problem.check_caches(stepwise["k_cache"], stepwise["v_cache"])


def test_out_is_filled_and_returned(rng):
    problem = random_kvcache_case(rng).problem()
    out = problem.poisoned_out()
    assert flash_attention_with_kvcache(**problem.arguments(), out=out, backend="cpu") is out
    problem.check(out)


def test_arrays_of_another_library_are_answered_in_kind(rng):
    problem = random_kvcache_case(rng).problem()
    arguments = with_arrays(Foreign, problem.arguments())
    out = flash_attention_with_kvcache(**arguments, backend="cpu")
    assert isinstance(out, Foreign)
    problem.check(out.array)


def test_torch_caches_are_appended_to_in_place(rng):
    torch = pytest.importorskip("torch")
    problem = random_kvcache_case(rng, seqlen_new=2).problem()
    arguments = with_arrays(torch.from_numpy, problem.arguments())
    out = flash_attention_with_kvcache(**arguments, backend="cpu")
    problem.check(out.numpy())
    problem.check_caches(arguments["k_cache"].numpy(), arguments["v_cache"].numpy())


def test_interleaved_caches_are_written_in_place(rng):
    problem = random_kvcache_case(rng, seqlen_new=3).problem()
    arguments = problem.arguments()
    both = np.stack([arguments["k_cache"], arguments["v_cache"]], axis=2)
    caches = {"k_cache": both[:, :, 0], "v_cache": both[:, :, 1]}
    problem.check(flash_attention_with_kvcache(**(arguments | caches), backend="cpu"))
    problem.check_caches(both[:, :, 0].copy(), both[:, :, 1].copy())


def test_a_read_only_cache_can_be_attended_to(rng):
    problem = random_kvcache_case(rng).problem()
    arguments = problem.arguments()
    arguments["k_cache"].flags.writeable = False
    problem.check(flash_attention_with_kvcache(**arguments, backend="cpu"))


@pytest.mark.parametrize(
    ("rows", "options"),
    [(61, {"backend": "cpu"}), (61, {"backend": "cpu", "causal": True}), (0, {})],
    ids=["full attention", "causal", "without room"],
)
def test_an_empty_cache_gives_zeros_with_an_lse_of_minus_infinity(rows, options):
    arguments = {name: good()[name] for name in ("q", "k_cache", "v_cache", "out")}
    arguments |= {name: arguments[name][:, :rows] for name in ("k_cache", "v_cache")}
    out, lse = flash_attention_with_kvcache(
        **arguments, cache_seqlens=0, return_lse=True, **options
    )
    assert not out.any()
    assert np.isneginf(lse).all()


def test_without_queries_the_cache_is_appended_to_all_the_same():
    arguments = good()
    arguments |= {"q": arguments["q"][:, :0], "out": None}
    assert flash_attention_with_kvcache(**arguments).shape == (3, 0, 6, 72)
    assert arguments["v_cache"].sum() == 3 * 5 * 3 * 72


def test_an_empty_batch_touches_nothing():
    arguments = good()
    names = ("q", "k", "v", "cache_seqlens", "out")
    arguments |= {name: arguments[name][:0] for name in names}
    assert flash_attention_with_kvcache(**arguments).shape == (0, 2, 6, 72)
    assert not arguments["k_cache"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((3, 6, 40), np.float32)}, "q has 3 axes, .*; expected 4: batch, seqlen"),
        ({"k_cache": np.zeros((61, 3, 40))}, "k_cache has 3 axes, .*; expected 4: caches, seqlen"),
        ({"v": None}, "k is given and v is not; pass both or neither"),
        ({"k": None}, "v is given and k is not; pass both or neither"),
        ({"k": np.zeros((3, 5, 120), np.float32)}, "k has 3 axes, .*; expected 4: batch, seqlen_n"),
        ({"k": np.zeros((2, 5, 3, 40), np.float32)},
         r"k has shape \(2, 5, 3, 40\); expected \(3, 5, 3, 40\), rows of k_cache for each"),
        ({"v": np.zeros((3, 4, 3, 72), np.float32)},
         r"v has shape \(3, 4, 3, 72\); expected \(3, 5, 3, 72\), rows of v_cache for each"),
        ({"k": np.zeros((3, 62, 3, 40), np.float32), "v": np.zeros((3, 62, 3, 72), np.float32)},
         "k and v append 62 rows to each cache, but a cache holds 61"),
        ({"cache_seqlens": np.zeros(2, np.int32)}, r"cache_seqlens has shape \(2,\); expected \(3"),
        ({"cache_seqlens": np.array(7, np.int32)},
         r"has shape \(\); expected \(3,\), .*; pass an integer if all are equal"),
        ({"cache_seqlens": [7, 0, 57]},
         r"cache_seqlens\[2\] is 57; expected at most 56: a cache holds 61 rows, and 5 are"),
        ({"cache_seqlens": [7, -1, 5]}, r"cache_seqlens\[1\] is -1; expected at least 0"),
        ({"cache_seqlens": 57}, "cache_seqlens is 57; expected at most 56"),
        ({"cache_seqlens": -3}, "cache_seqlens is -3; expected at least 0"),
        ({"cache_batch_idx": [0, 4, 1]}, r"cache_batch_idx\[1\] is 4; expected 0 to 3, as k_cache"),
        ({"cache_batch_idx": [0, 1]}, r"cache_batch_idx has shape \(2,\); expected \(3,\), one"),
        ({"cache_batch_idx": [0, 1, 2], "block_table": np.zeros((3, 4), np.int32)},
         "cache_batch_idx and block_table are both given; pass only one"),
        ({"rotary_sin": None}, "rotary_cos is given, but not rotary_sin; pass both or neither"),
        ({"rotary_cos": None}, "rotary_sin is given, but not rotary_cos; pass both or neither"),
        ({"k": None, "v": None}, "rotary_cos and rotary_sin rotate k and q; pass k and v with"),
        ({"rotary_cos": np.ones(61, np.float32)}, "rotary_cos has 1 axes, .*; expected 2: positio"),
        ({"rotary_sin": np.ones((61, 7), np.float32)},
         r"rotary_sin has shape \(61, 7\); expected \(61, 8\), as rotary_cos"),
        ({name: np.ones((61, 21), np.float32) for name in ("rotary_cos", "rotary_sin")},
         "rotary_cos has 21 columns for a rotary_dim of 42; expected a rotary_dim of 2 to 40"),
        ({name: np.ones((61, 0), np.float32) for name in ("rotary_cos", "rotary_sin")},
         "rotary_cos has 0 columns for a rotary_dim of 0; expected a rotary_dim of 2"),
        ({name: np.ones((4, 8), np.float32) for name in ("rotary_cos", "rotary_sin")},
         "rotary_cos has 4 rows; expected at least 5, one for each position"),
        ({name: np.ones((60, 8), np.float32) for name in ("rotary_cos", "rotary_sin")},
         r"\[2\] is 56; expected at most 55: rotary_cos has 60 rows, and 5 are read from"),
        ({"out": np.zeros((3, 2, 6, 40), np.float32)}, r"out has shape \(3, 2, 6, 40\); expected"),
        *refusals.WRONG_OPTIONS,
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name_and_nothing_is_appended(changes, message):
    assert_refused(ValueError, message, good() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": np.zeros((2, 8), np.int32)},
         "block_table has 2 rows; expected 3, one for"),
        ({"block_table": [[3, 1], [2, 2], [15, 0]]},
         r"cache_seqlens\[2\] is 56; expected at most 11: a cache holds 16 rows, and 5 are app"),
        ({"block_table": [[3, -9] + [1] * 6, [2] * 8, [15] * 8]},
         r"block_table\[0, 1\] is -9; expected 0 to 15, as there are 16 pages"),
        ({"block_table": [[3] * 8, [2] * 8, [15] * 7 + [16]]},
         r"block_table\[2, 7\] is 16; expected 0 to 15"),
        (
            {name: np.zeros((0, 8, 3, dim)) for name, dim in (("k_cache", 40), ("v_cache", 72))}
            | {name: np.zeros((3, 5, 3, dim)) for name, dim in (("k", 40), ("v", 72))}
            | {"q": np.zeros((3, 2, 6, 40)), "rotary_cos": None, "rotary_sin": None, "out": None},
            r"block_table\[0, 0\] is 3, but there are no pages; cache_seqlens must be 0",
        ),
    ],
)  # fmt: skip
def test_a_page_that_is_not_there_is_refused_also_for_new_rows(changes, message):
    assert_refused(ValueError, message, good_paged() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "q is a NoneType; expected a NumPy or CuPy array"),
        ({"k_cache": [1.0]}, "k_cache is a list; expected a NumPy or CuPy array"),
        ({"cache_seqlens": None}, "cache_seqlens is None; expected an integer or an int32 array"),
        ({"cache_seqlens": 5.0}, r"cache_seqlens is 5\.0; expected an integer or an int32 array"),
        ({"cache_seqlens": "5"}, "cache_seqlens is '5'; expected an integer or an int32 array"),
        ({"cache_seqlens": True}, "cache_seqlens is True; expected an integer or an int32 array"),
        ({"return_lse": "no"}, "return_lse is 'no'; expected True or False"),
        ({"num_splits": True}, "num_splits is True; expected an integer"),
        ({"cache_seqlens": np.zeros(3)},
         r"cache_seqlens has dtype float64; pass cache_seqlens\.astype\('int32'\)"),
        ({"block_table": np.zeros((3, 8), bool)},
         r"block_table has dtype bool; pass block_table\.astype\('int32'\)"),
        ({"k_cache": np.zeros((4, 61, 3, 40))}, "q, k_cache and v_cache must have one dtype"),
        ({"k": np.zeros((3, 5, 3, 40), np.float16)},
         "k has dtype float16; expected float32, as q has"),
        ({"rotary_cos": np.ones((61, 8))},
         "rotary_cos has dtype float64; expected float32, as q is float32"),
        ({"rotary_interleaved": 1}, "rotary_interleaved is 1; expected True or False"),
        ({"causal": 1}, "causal is 1; expected True or False"),
        ({"num_splits": 1.5}, r"num_splits is 1\.5; expected an integer"),
    ],
)  # fmt: skip
def test_a_wrong_kind_is_refused_by_name(changes, message):
    assert_refused(TypeError, message, good() | changes)


def test_sixteen_bit_queries_take_angles_of_their_own_dtype_or_float32():
    arguments = {
        name: array.astype(np.float16) if array.dtype == np.float32 else array
        for name, array in good().items()
    }
    for dtype in (np.float16, np.float32):
        tables = {name: arguments[name].astype(dtype) for name in ("rotary_cos", "rotary_sin")}
        assert np.isfinite(flash_attention_with_kvcache(**(arguments | tables))).all()
    changes = {"rotary_cos": arguments["rotary_cos"].astype(np.float32)}
    message = "rotary_sin has dtype float16; expected float32, as rotary_cos"
    assert_refused(TypeError, message, arguments | changes)


def test_a_tile_that_is_too_large_is_refused_before_anything_is_appended():
    arguments = {name: np.zeros((1, 4097, 1, 8), np.float32) for name in ("k_cache", "v_cache")}
    arguments |= {name: np.ones((1, 1, 1, 8), np.float32) for name in ("k", "v")}
    arguments |= {"q": np.zeros((1, 4096, 1, 8), np.float32), "cache_seqlens": 4096}
    arguments |= {"tile": (2**14, 2**14), "backend": "cpu"}
    assert_refused(ValueError, "tile .* bytes of scratch .* choose a smaller Br or Bc", arguments)
    out = flash_attention_with_kvcache(**(arguments | {"cache_seqlens": 0}))
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("k_cache", "v_cache"), "caches in k_cache and v_cache"),
        (("rotary_cos", "rotary_sin"), "rows of rotary_cos"),
    ],
)
def test_more_than_32_bits_count_is_refused_on_a_gpu_too(gpu, names, what):
    arguments = appending(gpu)
    for name in names:
        strides, shape = arguments[name].strides, arguments[name].shape
        arguments[name] = gpu.array(2**31, *shape[1:], strides=(0, *strides[1:]))
    with pytest.raises(ValueError, match=f"number of {what} is {2**31}; expected at most"):
        flash_attention_with_kvcache(**arguments)
    assert gpu.launches == []


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_is_never_copied(name):
    cache = good()[name]
    spread = np.zeros((*cache.shape[:3], 2 * cache.shape[3]), np.float32)[..., ::2]
    message = f"{name} has strides .*; expected a contiguous last axis: a cache is not copied"
    assert_refused(ValueError, message, good() | {name: spread})


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_that_cannot_be_written_is_not_appended_to(name):
    cache = good()[name]
    cache.flags.writeable = False
    message = f"{name} is read-only; pass an array that can be written"
    assert_refused(ValueError, message, good() | {name: cache})
    one_for_all = np.broadcast_to(good()[name][:1], good()[name].shape)
    assert_refused(ValueError, f"{name} overlaps itself", good() | {name: one_for_all})


def test_where_no_row_is_rotated_a_full_cache_needs_no_row_of_the_tables():
    arguments = good()
    arguments |= {name: arguments[name][:, :0] for name in ("q", "k", "v", "out")}
    out = flash_attention_with_kvcache(**(arguments | {"cache_seqlens": 61}))
    assert out.shape == (3, 0, 6, 72)
    message = "cache_seqlens is 61; expected at most 60: rotary_cos has 61 rows, and 1 are read"
    arguments |= {"q": good()["q"], "out": None, "cache_seqlens": 61}
    assert_refused(ValueError, message, arguments)


@pytest.mark.parametrize("other", ["q", "k", "v", "v_cache", "out"])
def test_a_cache_that_overlaps_another_array_is_not_appended_to(other):
    shapes = {"k_cache": (3, 61, 3, 40), "v_cache": (3, 61, 3, 40)}
    shapes |= {name: (3, 5, 3, 40) for name in ("q", "k", "v", "out")}
    arguments = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    arguments[other] = arguments["k_cache"][:, -shapes[other][1] :]
    message = f"k_cache overlaps {other}; pass separate memory"
    assert_refused(ValueError, message, arguments | {"cache_seqlens": 5})


@pytest.mark.parametrize("other", ["cache_seqlens", "block_table", "rotary_cos", "rotary_sin"])
@pytest.mark.parametrize("written", ["k_cache", "out"])
def test_what_is_written_may_not_overlap_lengths_pages_and_tables(written, other):
    arguments = good_paged()
    array = arguments[other]
    # After overlapping writes, results would be read as lengths, page numbers or angles.
    inside = arguments[written].reshape(-1)[: array.size].view(array.dtype).reshape(array.shape)
    inside[...] = array
    message = f"{written} overlaps {other}; pass separate memory"
    assert_refused(ValueError, message, arguments | {other: inside})


def test_a_jax_cache_is_not_appended_to():
    arguments = good() | {"k_cache": refusals.jax_array(good()["k_cache"])}
    message = "k_cache is a JAX array, which is immutable and cannot be written in place"
    assert_refused(TypeError, message, arguments)


@pytest.mark.skipif(gpu_unavailable() is None, reason="there is a GPU")
def test_without_a_gpu_asking_for_it_is_refused_with_the_reason():
    assert_refused(UnsupportedError, "backend is 'gpu', but", good() | {"backend": "gpu"})


def test_the_reference_takes_the_same_arguments(rng):
    problem = random_kvcache_case(rng, seqlen_new=2, rotary_dim=16).problem()
    result = attention_with_kvcache_reference(**problem.arguments())
    assert result.out.dtype == np.float64
    assert result.k_cache.shape == problem.k_cache.shape


def test_numpy_arrays_are_computed_on_a_gpu_where_there_is_one(rng, monkeypatch):
    """The CPU appends the new rows and rotates q; only the attention itself runs on the GPU."""
    sizes = {"page_size": 16, "seqlen_q": 2, "seqlen_new": 3, "rotary_dim": 16}
    problem = random_kvcache_case(rng, causal=True, **sizes).problem()
    uploads = fake_gpu.compute_on_host(monkeypatch)
    arguments = problem.arguments()
    out, lse = flash_attention_with_kvcache(**arguments, return_lse=True)
    problem.check(out, lse)
    problem.check_caches(arguments["k_cache"], arguments["v_cache"])
    (uploaded,) = uploads
    assert uploaded.k is uploaded.v is uploaded.rotary_cos is None
    np.testing.assert_array_equal(uploaded.cache_seqlens, problem.cache_seqlens + 3)


def test_a_family_that_the_gpu_does_not_have_is_refused_before_anything_is_appended(monkeypatch):
    uploads = fake_gpu.compute_on_host(monkeypatch)
    assert_refused(ValueError, "unknown family 'flash'", good() | {"family": "flash"})
    assert uploads == []


def on(gpu, **changes):
    """Return arguments on the fake GPU without new rows: 3 queries, 4 caches of 61 rows."""
    caches = {"k_cache": gpu.array(4, 61, 3, 40), "v_cache": gpu.array(4, 61, 3, 72)}
    return {"q": gpu.array(3, 1, 6, 40), **caches, "cache_seqlens": gpu.lengths(3), **changes}


def appending(gpu, **changes):
    """Return the arguments of `on` together with new rows and rotary tables."""
    new = {"k": gpu.array(3, 5, 3, 40), "v": gpu.array(3, 5, 3, 72)}
    tables = {"rotary_cos": gpu.array(61, 8), "rotary_sin": gpu.array(61, 8)}
    return on(gpu, **(new | tables | changes))


def test_the_kernel_is_told_where_the_arrays_and_the_lengths_lie(gpu):
    arguments = on(gpu, out=gpu.array(3, 1, 6, 72), cache_batch_idx=gpu.lengths(3))
    out, lse = flash_attention_with_kvcache(**arguments, return_lse=True)
    assert out is arguments["out"]
    assert (lse.shape, lse.dtype) == ((3, 6, 1), np.float32)
    ((entry, params),) = gpu.launches
    assert entry == "attention"
    for field, name in (("q", "q"), ("k", "k_cache"), ("v", "v_cache"), ("out", "out")):
        assert params[field]["data"] == arguments[name].data.ptr
    assert params["lse"] == lse.data.ptr
    assert (params["batch"], params["seqlen_q"], params["seqlen_k"]) == (3, 1, 61)
    assert params["seqused_k"] == arguments["cache_seqlens"].data.ptr
    assert params["cache_batch_idx"] == arguments["cache_batch_idx"].data.ptr
    assert params["cu_seqlens_q"] == params["block_table"] == 0
    assert (params["caches"], params["new_keys"], params["keys"]) == (4, 0, 0)


def test_workspace_and_counters_are_those_of_the_plan(gpu):
    flash_attention_with_kvcache(**on(gpu), num_splits=3, family="decode")
    ((_, params),) = gpu.launches
    _, (address, size) = gpu.allocations
    assert size > 0
    assert params["workspace"] == address
    assert params["counters"] == 0xC0DE00
    assert len(gpu.counters) == 1


def test_the_kernel_that_merges_splits_is_told_the_same(gpu):
    flash_attention_with_kvcache(**on(gpu), num_splits=3, family="mma")
    (first, told), (second, told_again) = gpu.launches
    assert (first, second) == ("attention", "combine")
    assert told == told_again
    assert told["num_splits"] == 3
    assert gpu.counters == []


def test_tensor_maps_are_of_the_caches_and_of_the_queries_as_they_are_rotated(gpu):
    arguments = appending(gpu)
    places = []
    for _ in range(2):
        flash_attention_with_kvcache(**arguments, family="hopper")
        (_, new), (prepare, params), (kernel, told_again) = gpu.launches[-3:]
        assert (prepare, kernel) == ("prepare", "attention")
        assert params == told_again
        specs, addresses = gpu.maps[-1]
        caches = [arguments[name].data.ptr for name in ("k_cache", "v_cache")]
        assert addresses == (new["out"]["data"], *caches)
        assert [spec.shape for spec in specs] == [(40, 1, 6, 3), (40, 61, 3, 4), (72, 61, 3, 4)]
        assert params["q"]["data"] == new["out"]["data"]
        assert params["caches"] == 4
        # The workspace begins with the order of the sequences; the rotated queries follow.
        address, _ = gpu.allocations[-1]
        assert address == params["workspace"] < new["out"]["data"]
        places.append(new["out"]["data"])
    # Each call allocates a new workspace.
    assert places[0] != places[1]
    assert len(prepared_calls._calls) == 1
    assert len(gpu.maps) == 2


def test_new_rows_are_appended_before_they_are_attended_to(gpu):
    arguments = appending(gpu)
    out = flash_attention_with_kvcache(**arguments)
    assert (out.shape, out.dtype) == ((3, 1, 6, 72), np.float16)
    (first, new), (second, params) = gpu.launches
    assert (first, second) == ("append_new_rows", "attention")
    tensors = {"q": "q", "k": "k_cache", "v": "v_cache", "new_k": "k", "new_v": "v"}
    for field, name in tensors.items():
        assert new[field]["data"] == arguments[name].data.ptr
    assert new["seqused_k"] == arguments["cache_seqlens"].data.ptr
    assert new["cos"] == arguments["rotary_cos"].data.ptr
    assert params["new_keys"] == 5
    # Attention reads the rotated queries, which are in the second and last allocation.
    _, (address, size) = gpu.allocations
    assert params["q"]["data"] == new["out"]["data"]
    assert address <= new["out"]["data"] <= address + size - 3 * 6 * 40 * 2
    assert new["out"]["data"] % 512 == address % 512
    assert params["q"]["batch_stride"] == 6 * 40


@pytest.mark.parametrize("keys", [None, 7])
@pytest.mark.parametrize("rotary", [{}, {"rotary_cos": None, "rotary_sin": None}])
def test_packed_new_rows_are_counted_by_the_kernel_that_appends_them(gpu, rotary, keys):
    packed = {"k": gpu.array(11, 3, 40), "v": gpu.array(11, 3, 72)}
    starts = gpu.lengths(4)
    arguments = appending(gpu, cu_seqlens_k_new=starts, **packed, **rotary)
    if keys is not None:
        arguments["cache_seqlens"] = keys
    flash_attention_with_kvcache(**arguments)
    (first, new), (second, params) = gpu.launches
    assert (first, second) == ("append_new_rows", "attention")
    assert new["cu_seqlens_k_new"] == starts.data.ptr
    assert (new["total_new"], new["seqlen_new"], new["new_k"]["row_stride"]) == (11, 0, 3 * 40)
    assert new["keys"] == (keys or 0)
    # Attention reads the lengths after the append from the same allocation.
    assert params["seqused_k"] == new["lengths_after"] != 0
    assert params["new_keys"] == 0
    _, (address, size) = gpu.allocations
    assert address <= new["lengths_after"] <= address + size - 4 * 3
    if not rotary:
        assert new["out"]["data"] + 3 * 6 * 40 * 2 <= new["lengths_after"]


def test_queries_that_are_not_rotated_are_read_where_they_lie(gpu):
    arguments = appending(gpu, rotary_cos=None, rotary_sin=None)
    flash_attention_with_kvcache(**arguments)
    (_, new), (_, params) = gpu.launches
    assert params["q"]["data"] == arguments["q"].data.ptr
    assert new["out"]["data"] == new["cos"] == 0


def test_queries_are_rotated_also_where_no_row_is_new(gpu):
    none = {"k": gpu.array(3, 0, 3, 40), "v": gpu.array(3, 0, 3, 72)}
    flash_attention_with_kvcache(**appending(gpu, **none))
    (_, new), (_, params) = gpu.launches
    assert params["q"]["data"] == new["out"]["data"] != 0
    assert params["new_keys"] == 0


def test_an_integer_length_is_passed_on_and_is_no_part_of_the_key(gpu):
    for keys in (0, 7, 56):
        flash_attention_with_kvcache(**appending(gpu, cache_seqlens=keys))
        (_, new), (_, params) = gpu.launches[-2:]
        assert new["keys"] == params["keys"] == keys
        assert new["seqused_k"] == params["seqused_k"] == 0
    assert len(prepared_calls._calls) == 1


def test_an_integer_length_is_checked_in_every_call(gpu):
    flash_attention_with_kvcache(**appending(gpu, cache_seqlens=56))
    message = "cache_seqlens is 57; expected at most 56: a cache holds 61 rows, and 5 are appended"
    with pytest.raises(ValueError, match=message):
        flash_attention_with_kvcache(**appending(gpu, cache_seqlens=57))
    with pytest.raises(ValueError, match="cache_seqlens is -1; expected at least 0"):
        flash_attention_with_kvcache(**appending(gpu, cache_seqlens=-1))
    tables = {name: gpu.array(40, 8) for name in ("rotary_cos", "rotary_sin")}
    with pytest.raises(ValueError, match="cache_seqlens is 36; expected at most 35: rotary_cos"):
        flash_attention_with_kvcache(**appending(gpu, cache_seqlens=36, **tables))
    assert len(gpu.launches) == 2


def test_a_paged_cache_is_described_to_both_kernels(gpu):
    caches = {"k_cache": gpu.array(31, 16, 3, 40), "v_cache": gpu.array(31, 16, 3, 72)}
    caches["block_table"] = gpu.lengths(3, 7, strides=(40, 4))
    tables = {"rotary_cos": gpu.array(112, 8), "rotary_sin": gpu.array(112, 8)}
    arguments = appending(gpu, **caches, **tables)
    flash_attention_with_kvcache(**arguments)
    (_, new), (_, params) = gpu.launches
    for struct in (new, params):
        assert struct["block_table"] == arguments["block_table"].data.ptr
        assert struct["block_table_stride"] == 10
        assert struct["pages"] == 31
    assert (params["seqlen_k"], new["seqlen_k"], params["max_pages"]) == (112, 112, 7)
    assert params["k"]["batch_stride"] == 16 * 3 * 40


def test_a_call_with_the_same_shapes_is_prepared_once_wherever_the_arrays_lie(gpu, monkeypatch):
    flash_attention_with_kvcache(**appending(gpu))
    monkeypatch.setattr(gpu_forward, "make_plan", None)
    monkeypatch.setattr(gpu_forward, "check_call", None)
    flash_attention_with_kvcache(**appending(gpu))
    assert len(gpu.launches) == 4
    assert len(gpu.compiled) == 2


@pytest.mark.parametrize("name", ["q", "k", "k_cache", "out", "rotary_cos"])
def test_another_alignment_is_another_call(gpu, name):
    arguments = appending(gpu, out=gpu.array(3, 1, 6, 72))
    flash_attention_with_kvcache(**arguments)
    shifted = gpu.array(*arguments[name].shape, address=gpu.address() + 2)
    flash_attention_with_kvcache(**(arguments | {name: shifted}))
    assert len(prepared_calls._calls) == 2


@pytest.mark.parametrize(
    "name",
    ["q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "rotary_cos", "rotary_sin", "out"],
)
def test_another_byte_order_is_refused_after_the_same_call_in_the_right_one(gpu, name):
    arguments = appending(gpu, out=gpu.array(3, 1, 6, 72))
    flash_attention_with_kvcache(**arguments)
    right = arguments[name]
    wrong = gpu.array(*right.shape, dtype=right.dtype.newbyteorder())
    with pytest.raises(TypeError, match=f"{name} has dtype >"):
        flash_attention_with_kvcache(**(arguments | {name: wrong}))
    assert len(gpu.launches) == 2


def test_tables_whose_rows_lie_at_different_distances_are_copied(gpu):
    cos, sin = gpu.array(61, 8, strides=(32, 2)), gpu.array(61, 8)
    flash_attention_with_kvcache(**appending(gpu, rotary_cos=cos, rotary_sin=sin))
    _, new = gpu.launches[0]
    assert new["cos"] != cos.data.ptr
    assert new["sin"] != sin.data.ptr
    assert new["rotary_stride"] == 8


def test_a_cache_on_the_gpu_is_never_copied(gpu):
    cache = gpu.array(4, 61, 3, 40, strides=(61 * 480, 480, 160, 4))
    with pytest.raises(ValueError, match=r"k_cache has strides .*: a cache is not copied"):
        flash_attention_with_kvcache(**on(gpu, k_cache=cache))


def test_a_cache_on_the_gpu_that_overlaps_another_array_is_not_appended_to(gpu):
    arguments = appending(gpu)
    flash_attention_with_kvcache(**arguments)
    for name in ("q", "k", "v"):
        shape = arguments[name].shape
        inside = gpu.array(*shape, address=arguments["v_cache"].data.ptr + 64)
        with pytest.raises(ValueError, match=f"v_cache overlaps {name}; pass separate memory"):
            flash_attention_with_kvcache(**(arguments | {name: inside}))
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("other", ["cache_seqlens", "rotary_cos", "rotary_sin"])
@pytest.mark.parametrize("written", ["v_cache", "out"])
def test_lengths_and_tables_on_the_gpu_in_what_is_written_are_told_in_every_call(
    gpu, written, other
):
    arguments = appending(gpu, out=gpu.array(3, 1, 6, 72))
    shape, dtype = arguments[other].shape, arguments[other].dtype
    inside = gpu.array(*shape, dtype=dtype, address=arguments[written].data.ptr + 16)
    message = f"{written} overlaps {other}; pass separate memory"
    with pytest.raises(ValueError, match=message):
        flash_attention_with_kvcache(**(arguments | {other: inside}))
    assert gpu.launches == []
    flash_attention_with_kvcache(**arguments)
    with pytest.raises(ValueError, match=message):
        flash_attention_with_kvcache(**(arguments | {other: inside}))
    assert len(gpu.launches) == 2


def test_an_out_over_the_pages_of_a_cache_is_refused_in_every_call(gpu):
    caches = {"k_cache": gpu.array(31, 16, 3, 40), "v_cache": gpu.array(31, 16, 3, 72)}
    arguments = on(gpu, **caches, block_table=gpu.lengths(3, 7), out=gpu.array(3, 1, 6, 72))
    flash_attention_with_kvcache(**arguments)
    over = gpu.array(3, 1, 6, 72, address=arguments["block_table"].data.ptr)
    with pytest.raises(ValueError, match="out overlaps block_table; pass separate memory"):
        flash_attention_with_kvcache(**(arguments | {"out": over}))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_an_array_that_is_missing_on_the_gpu_is_a_type_error(gpu, name):
    with pytest.raises(TypeError, match=f"{name} is a NoneType; expected a NumPy or CuPy array"):
        flash_attention_with_kvcache(**on(gpu, **{name: None}))


@pytest.mark.parametrize(
    ("name", "offset", "field"),
    [
        ("q", 1, "q"), ("k", 1, "new_k"), ("v", 1, "new_v"), ("cache_seqlens", 2, "seqused_k"),
        ("cache_batch_idx", 2, "cache_batch_idx"), ("rotary_cos", 1, "cos"),
        ("rotary_sin", 1, "sin"),
    ],
)  # fmt: skip
def test_what_is_read_at_an_address_that_no_load_can_use_is_copied(gpu, name, offset, field):
    arguments = appending(gpu, cache_batch_idx=gpu.lengths(3))
    whole = arguments[name]
    shifted = gpu.array(*whole.shape, dtype=whole.dtype, address=gpu.address() + offset)
    flash_attention_with_kvcache(**(arguments | {name: shifted}))
    _, new = gpu.launches[0]
    place = new[field]["data"] if name in ("q", "k", "v") else new[field]
    assert place % 16 == 0
    assert place not in (0, shifted.data.ptr)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "out"])
def test_what_is_written_at_an_address_that_no_store_can_use_is_refused(gpu, name):
    arguments = appending(gpu, out=gpu.array(3, 1, 6, 72))
    flash_attention_with_kvcache(**arguments)
    shifted = gpu.array(*arguments[name].shape, address=gpu.address() + 1)
    message = f"{name} lies at address {shifted.data.ptr:#x}; expected a multiple of 2, the size"
    with pytest.raises(ValueError, match=message):
        flash_attention_with_kvcache(**(arguments | {name: shifted}))
    assert len(gpu.launches) == 2


@pytest.mark.parametrize(
    ("name", "values", "family"),
    [("softmax_scale", [0.5, 0.25, 0.125], None), ("num_splits", [2, 3, 5], "decode")],
)
def test_an_option_that_was_changed_in_place_counts_by_its_present_value(gpu, name, values, family):
    option = np.array(values[0])
    for value in values:
        option[...] = value
        flash_attention_with_kvcache(**on(gpu), **{name: option}, family=family)
    assert [params[name] for _, params in gpu.launches] == values


def test_interleaved_caches_are_compared_element_by_element_only_once(gpu, monkeypatch):
    row = 2 * 3 * 40 * 2
    strides = (61 * row, row, 80, 2)

    def caches():
        k_cache = gpu.array(4, 61, 3, 40, strides=strides)
        beside = {"strides": strides, "address": k_cache.data.ptr + row // 2}
        v_cache = gpu.array(4, 61, 3, 40, **beside)
        return {"k_cache": k_cache, "v_cache": v_cache, "v": gpu.array(3, 5, 3, 40)}

    flash_attention_with_kvcache(**appending(gpu, **caches()))
    monkeypatch.setattr("cupy_flash.arrays.overlap._share_memory", None)
    flash_attention_with_kvcache(**appending(gpu, **caches()))
    assert len(gpu.launches) == 4


def test_where_there_are_no_queries_new_rows_are_appended_and_nothing_else_runs(gpu):
    arguments = appending(gpu, q=gpu.array(3, 0, 6, 40))
    flash_attention_with_kvcache(**arguments)
    assert [entry for entry, _ in gpu.launches] == ["append_new_rows"]


def test_a_cache_without_room_is_answered_without_a_kernel(gpu):
    empty = {"k_cache": gpu.array(4, 0, 3, 40), "v_cache": gpu.array(4, 0, 3, 72)}
    out, lse = flash_attention_with_kvcache(**on(gpu, **empty), return_lse=True)
    assert gpu.launches == []
    assert (out.filled, lse.filled) == (0, -np.inf)


def test_an_array_on_another_device_is_refused(gpu):
    with pytest.raises(ValueError, match="v_cache lies on device 1, but the current device is 0"):
        flash_attention_with_kvcache(**on(gpu, v_cache=gpu.array(4, 61, 3, 72, device=1)))


@pytest.mark.parametrize(
    ("lengths_on", "message"),
    [
        (lambda gpu: np.zeros(3, np.int32),
         r"lies in host memory and q on a GPU; pass cupy\.asarray\(cache_seqlens\)"),
        (lambda gpu: gpu.array(3, dtype=np.float64),
         r"cache_seqlens has dtype float64; pass .*astype\('int32'\)"),
    ],
    ids=["NumPy", "no integers"],
)  # fmt: skip
def test_wrong_lengths_on_a_gpu_are_refused_with_the_remedy(gpu, lengths_on, message):
    with pytest.raises(TypeError, match=message):
        flash_attention_with_kvcache(**on(gpu, cache_seqlens=lengths_on(gpu)))


def test_a_plan_is_what_the_call_is_computed_by(gpu):
    arguments = appending(gpu, causal=True, batch_invariant=True)
    flash_attention_with_kvcache(**arguments)
    made = plan(flash_attention_with_kvcache, **arguments, arch="sm_90")
    assert gpu.compiled == [made.unit.title, gpu.compiled[1]]
    assert [entry for entry, _ in gpu.launches[1:]] == [launch.entry for launch in made.launches]
    assert (made.problem.layout.kind, made.problem.layout.new_keys) == ("kvcache", 5)


def test_a_plan_leaves_the_cache_as_it_is_and_does_not_depend_on_its_length():
    arrays = {"k_cache": np.zeros((3, 61, 3, 40)), "v_cache": np.zeros((3, 61, 3, 72))}
    new = {"k": np.ones((3, 5, 3, 40)), "v": np.ones((3, 5, 3, 72))}
    arguments = {"q": np.ones((3, 5, 6, 40)), **arrays, **new, "backend": "cpu"}
    made = plan(flash_attention_with_kvcache, **arguments, cache_seqlens=[1, 2, 10**6])
    assert made == plan(flash_attention_with_kvcache, **arguments, cache_seqlens=7)
    assert made.family == "cpu"
    assert not any(cache.any() for cache in arrays.values())


def test_a_plan_is_refused_where_the_call_is(gpu):
    with pytest.raises(TypeError, match="cache_seqlens is None; expected an integer or an int32"):
        plan(flash_attention_with_kvcache, **on(gpu, cache_seqlens=None), arch="sm_90")
    with pytest.raises(ValueError, match="k is given and v is not; pass both or neither"):
        plan(flash_attention_with_kvcache, **appending(gpu, v=None), arch="sm_90")
