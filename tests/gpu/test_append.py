"""Appending to a KV cache: specs, checks, and compilation without a GPU."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.compilers import needs_compiler

from cupy_flash.errors import UnsupportedError
from cupy_flash.families.params import TENSOR_DTYPE
from cupy_flash.gpu import append
from cupy_flash.gpu.append import APPEND_DTYPE, Append, AppendSpec, append_launch, append_unit
from cupy_flash.gpu.compiler import compile_cubin, known_architectures
from cupy_flash.problem.arrays import DTYPES, ITEMSIZE, Scales
from cupy_flash.problem.device import device_for_arch

h100 = device_for_arch("sm_90")

NOT_PAGED = {"caches": 5, "page_size": 0, "pages": 0, "max_pages": 0, "block_table_stride": 0}
NOT_ROTARY = {"rotary_dim": 0, "rotary_rows": 0, "rotary_stride": 0, "rotary_dtype": "float32"}
CONTIGUOUS = AppendSpec(
    dtype="float16",
    **{"batch": 3, "seqlen_q": 2, "seqlen_new": 2, "seqlen_cache": 512, "heads_q": 8},
    **{"heads_kv": 2, "head_dim": 128, "head_dim_v": 64},
    **{"queries_advance": True, "rotary_interleaved": True, "alignment": 16},
    rotary_alignment=16,
    q_strides=(2 * 8 * 128, 8 * 128, 128),
    k_strides=(2 * 2 * 128, 2 * 128, 128),
    v_strides=(2 * 2 * 64, 2 * 64, 64),
    k_cache_strides=(512 * 2 * 128, 2 * 128, 128),
    v_cache_strides=(512 * 2 * 64, 2 * 64, 64),
    **NOT_PAGED,
    **NOT_ROTARY,
)
PAGED = dataclasses.replace(
    CONTIGUOUS, caches=0, page_size=16, pages=99, max_pages=32, block_table_stride=40
)
ROTARY = {"rotary_dim": 64, "rotary_rows": 300, "rotary_stride": 32, "rotary_dtype": "float32"}


def variant(spec=CONTIGUOUS, **changes):
    return dataclasses.replace(spec, **changes)


# Fields of the argument struct, and the names of the arrays whose addresses they hold.
TENSORS = {"q": "q", "k": "k_cache", "v": "v_cache", "new_k": "k", "new_v": "v"}
OTHERS = {
    **{"seqused_k": "cache_seqlens", "cos": "rotary_cos", "sin": "rotary_sin"},
    **{name: name for name in ("cache_batch_idx", "block_table", "rotary_seqlens")},
    **{name: name for name in ("cu_seqlens_k_new", "lengths_after")},
}
POINTERS = (*TENSORS.values(), *OTHERS.values(), "q_rotated")
NAMES = (*POINTERS, "keys")
int32 = st.integers(0, 2**31 - 1)
strides = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3)
INTS = (
    *("batch", "seqlen_q", "seqlen_new", "heads_q", "heads_kv"),
    *("caches", "pages", "max_pages", "rotary_rows", "rank", "total_new"),
)
specs = st.builds(
    lambda fields, **more: variant(**fields, **more),
    st.fixed_dictionaries(
        {name: int32 for name in (*INTS, "seqlen_cache")}
        | {f"{name}_strides": strides for name in ("q", "k", "v", "k_cache", "v_cache")}
    ),
    rotary_dim=st.integers(1, 128),
    block_table_stride=st.integers(-(2**63), 2**63 - 1),
    rotary_stride=st.integers(-(2**63), 2**63 - 1),
    queries_advance=st.booleans(),
)


# The argument struct


@given(specs, st.tuples(*[st.integers(0, 2**64 - 1)] * len(POINTERS)), st.integers(-5, 2**31 - 1))
def test_packing_fills_every_field_of_the_dtype(spec, addresses, keys):
    pointers = dict(zip(POINTERS, addresses, strict=True))
    expected = np.zeros((), APPEND_DTYPE)
    for field, name in TENSORS.items():
        expected[field] = (pointers[name], *getattr(spec, f"{name}_strides"))
    expected["out"]["data"] = pointers["q_rotated"]
    for field, name in OTHERS.items():
        expected[field] = pointers[name]
    for name in (*INTS, "block_table_stride", "rotary_stride"):
        expected[name] = getattr(spec, name)
    expected["seqlen_k"] = spec.seqlen_cache
    expected["keys"], expected["q_advances"] = keys, spec.queries_advance
    packed = bytearray(APPEND_DTYPE.itemsize)
    Append(spec, NAMES)._params.pack_into(packed, (*addresses, keys))
    assert packed == expected.tobytes()


def test_fields_lie_as_a_c_compiler_aligns_them():
    aligned = np.dtype([(name, APPEND_DTYPE[name]) for name in APPEND_DTYPE.names], align=True)
    assert aligned.itemsize == APPEND_DTYPE.itemsize
    for name in APPEND_DTYPE.names:
        assert aligned.fields[name][1] == APPEND_DTYPE.fields[name][1]


def test_every_member_of_the_struct_is_asserted_in_the_unit():
    members = [name for name in APPEND_DTYPE.names if not name.startswith("_")]
    text = append_unit(CONTIGUOUS).text
    assert text.count("static_assert") == 2 + len(TENSOR_DTYPE.names) + len(members)
    assert f"sizeof(AppendParams) == {APPEND_DTYPE.itemsize}" in text


def test_without_a_rotary_embedding_there_are_no_queries_for_the_kernel():
    packed = bytearray(APPEND_DTYPE.itemsize)
    Append(variant(seqlen_q=9), NAMES)._params.pack_into(packed, (16,) * len(NAMES))
    assert np.frombuffer(packed, APPEND_DTYPE)[0]["seqlen_q"] == 0


# The unit and the launch


def test_lengths_heads_and_masks_share_one_kernel():
    sizes = {"batch": 9, "seqlen_q": 7, "seqlen_new": 8, "heads_q": 4, "seqlen_cache": 99}
    flags = {"queries_advance": False, "rotary_interleaved": False}
    other = variant(**sizes, **flags, caches=77, rank=3, stripe=9)
    assert append_unit(other).text == append_unit(CONTIGUOUS).text


@pytest.mark.parametrize(
    "changes",
    [
        *({"dtype": "bfloat16"}, {"head_dim": 96}, {"head_dim_v": 96}, {"page_size": 4}),
        *({"alignment": 8}, {"ranks": 2}, {"ranks": 2, "stripe": 256}, {"total_new": 4}, ROTARY),
    ],
)
def test_what_the_code_is_made_for_makes_a_kernel_of_its_own(changes):
    assert append_unit(variant(**changes)).text != append_unit(CONTIGUOUS).text


def test_a_row_of_a_sequence_has_threads_for_every_16_bytes_of_its_heads():
    (rows, slices, _), (threads, _, _) = append_launch(CONTIGUOUS)
    assert rows == 3 * 2
    assert threads * slices >= 2 * (128 + 64) * 2 // 16
    (_, slices, _), (threads, _, _) = append_launch(variant(**ROTARY))
    assert threads * slices >= (8 * 128 + 2 * (128 + 64)) * 2 // 16


def test_packed_new_rows_have_blocks_of_their_own_behind_those_of_rotated_queries():
    packed = variant(seqlen_new=0, total_new=11)
    assert append_launch(packed)[0][0] == 11
    assert append_launch(variant(packed, **ROTARY))[0][0] == 3 * 2 + 11
    # One block writes the lengths after the append, even if there is nothing to append.
    assert append_launch(variant(packed, total_new=0))[0][0] == 1


def test_queries_beyond_the_new_keys_have_blocks_only_if_they_are_rotated():
    assert append_launch(variant(seqlen_q=9))[0][0] == 3 * 2
    assert append_launch(variant(seqlen_q=9, **ROTARY))[0][0] == 3 * 9
    assert append_launch(variant(seqlen_new=9, **ROTARY))[0][0] == 3 * 9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 64, 2**20])
def test_a_launch_stays_within_what_a_gpu_takes(dtype, heads):
    spec = variant(dtype=dtype, heads_q=heads, heads_kv=heads, head_dim=37, **ROTARY)
    grid, (threads, _, _) = append_launch(spec)
    assert 1 <= grid[0] < 2**31
    assert 1 <= grid[1] < 2**16
    assert threads % 32 == 0
    assert 32 <= threads <= 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 2**20, "seqlen_new": 2**20}, "appending 1099511627776 rows"),
        ({"heads_kv": 2**26}, "a row of 8 query and 67108864 KV heads"),
    ],
)
def test_more_than_a_launch_takes_is_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        append_launch(variant(**changes))


# Checks


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": "int8"}, TypeError, "dtype is int8; expected one of float16"),
        (
            ROTARY | {"rotary_dtype": "bfloat16"},
            TypeError,
            "have dtype bfloat16; expected float16 or float32",
        ),
        (ROTARY | {"dtype": "float64"}, TypeError, "have dtype float32; expected float64"),
        ({"head_dim": 577}, ValueError, "head_dim is 577; expected 1 to 576"),
        ({"head_dim_v": -1}, ValueError, "head_dim_v is -1; expected 0 to 576"),
        (ROTARY | {"rotary_dim": 63}, ValueError, "rotary_dim is 63; expected an even number"),
        (ROTARY | {"rotary_dim": 130}, ValueError, "at most the head_dim 128"),
        (ROTARY | {"rotary_rows": 0}, ValueError, "have no rows; expected at least 1"),
        ({"seqlen_cache": 2**30}, ValueError, "seqlen of the cache is 1073741824"),
        (
            {"ranks": 2, "seqlen_cache": 2**31 - 2},
            ValueError,
            "seqlen of the cache is 2147483646; expected at most 2147483645",
        ),
        ({"seqlen_new": 2**30}, ValueError, "seqlen of k and v is 1073741824"),
        ({"page_size": 16, "max_pages": 31}, ValueError, "expected at most the 496 rows of 31"),
        ({"alignment": 32}, ValueError, "alignment is 32; expected 2 to 16 bytes"),
        ({"dtype": "float64", "alignment": 4}, ValueError, "expected 8 to 16 bytes"),
        (ROTARY | {"rotary_alignment": 2}, ValueError, "rotary_alignment is 2; expected 4 to 16"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused_by_name(changes, error, words):
    with pytest.raises(error, match=words):
        append.prepare(variant(**changes), h100, NAMES)


def test_an_architecture_before_turing_is_refused_by_name():
    volta = dataclasses.replace(h100, name="V100", arch=70)
    with pytest.raises(UnsupportedError, match="needs sm_75 or later, and V100 is sm_70"):
        append.prepare(CONTIGUOUS, volta, NAMES)


@pytest.mark.parametrize("nothing", [{"batch": 0}, {"seqlen_new": 0}])
def test_nothing_to_append_needs_no_kernel(nothing):
    append.prepare(variant(**nothing), h100, NAMES).run((0,) * len(NAMES))


# Compilation


def compile_spec(spec, arch="sm_90"):
    cubin = compile_cubin(append_unit(spec), device_for_arch(arch))
    assert cubin.resources["append_new_rows"].spill_bytes == 0
    assert "warning" not in cubin.log


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("arch", "dtype"), list(zip(known_architectures(), itertools.cycle(DTYPES), strict=False))
)
def test_the_kernel_compiles_without_spills(arch, dtype):
    rotary = ROTARY | {"rotary_dtype": "float64" if dtype == "float64" else "float32"}
    compile_spec(variant(dtype=dtype, **rotary), arch)
    compile_spec(variant(PAGED, dtype=dtype, rotary_interleaved=False, **rotary), arch)
    compile_spec(variant(dtype=dtype, ranks=3, rank=1, stripe=256), arch)
    compile_spec(variant(PAGED, dtype=dtype), arch)
    compile_spec(variant(PAGED, dtype=dtype, total_new=9, **rotary), arch)


@needs_compiler
@pytest.mark.parametrize("rotary", [{}, ROTARY, ROTARY | {"total_new": 9}])
@pytest.mark.parametrize("cache_dtype", [None, "int8", "float8_e4m3fn"])
def test_keys_that_hold_the_values_are_all_that_is_appended(cache_dtype, rotary):
    scales = Scales(k=(0, 0, 0)) if cache_dtype else None
    spec = variant(PAGED, head_dim=576, head_dim_v=0, cache_dtype=cache_dtype, scales=scales)
    compile_spec(variant(spec, **rotary))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_alignment_compiles_for_any_head_dim(dtype, interleaved):
    # Half rotary dims of 128, 3, 8 and 1: more than a 16-byte chunk, less than one, whole chunks.
    shapes = [(256, 256, 256), (37, 5, 6), (80, 128, 16), (2, 1, 2)]
    alignments = [a for a in (2, 4, 8, 16) if a >= ITEMSIZE[dtype]]
    rotary = {"rotary_rows": 9, "rotary_dtype": dtype, "rotary_interleaved": interleaved}
    for (head_dim, head_dim_v, rotary_dim), alignment in zip(shapes, alignments * 4, strict=False):
        dims = {"head_dim": head_dim, "head_dim_v": head_dim_v, "rotary_dim": rotary_dim}
        aligned = {"alignment": alignment, "rotary_alignment": alignment}
        compile_spec(variant(dtype=dtype, **dims, **rotary, **aligned))
