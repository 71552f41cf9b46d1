"""Representative calls of all kernel families, to run under compute-sanitizer.

    python tests/sanitize.py
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool initcheck --error-exitcode 1 python tests/sanitize.py

The first command runs without compute-sanitizer and compiles the kernels into CuPy's cache, so that
the other commands spend no time on compilation. Each array has its own allocation, which ends with
the last element of the array. memcheck therefore reports any access past the end of an array.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import wrong_numbers
from support.calls import float8_support, row_statistics
from support.calls.feature_calls import FeatureCall, feature_call
from support.calls.float8_support import Float8Case
from support.calls.latent_support import LATENT, check_latent
from support.calls.modified_calls import KINDS, ModifiedCall, padded_call, random_call
from support.calls.quantized_support import CACHE_DTYPES, SCALES, QuantizedCase, check_on_gpu
from support.calls.sequence_support import KVCacheCase, Truth, VarlenCase
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES, Case, current_device, random_values, tile_with
from support.gradients.gradient_calls import KINDS as GRADIENT_KINDS
from support.gradients.gradient_calls import GradientCall, random_gradient_call
from support.gradients.gradient_rule import check_gradients

from cupy_flash import (
    UnsupportedError,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from cupy_flash.calls import dispatch
from cupy_flash.calls.gpu.sharded_append import AppendedRows, CacheSharding
from cupy_flash.families import FAMILIES, FORWARD, backward_common
from cupy_flash.parallel import cache_shard
from cupy_flash.problem.arrays import MAX_ALIGNMENT

# Head dims whose consecutive rows keep the alignment of the first row.
ALIGNED_DIMS = (
    *(("float16", alignment, (40, 24)) for alignment in (16, 8, 4, 2)),
    ("float16", 8, (36, 20)),
    ("float16", 2, (33, 7)),
    ("float16", 16, (256, 192)),
    *(("float32", alignment, (40, 36)) for alignment in (16, 8, 4)),
    ("float32", 4, (33, 7)),
    *(("float64", alignment, (24, 10)) for alignment in (16, 8)),
)


def cases() -> Iterator[Case]:
    """Yield cases of every family and dtype, with masks, ragged tiles, alignments and splits."""
    small = Case(None, "float16", 70, 150, batch=1, heads_q=2, heads_kv=1)
    for family in FORWARD:
        for dtype in DTYPES:
            causal = dataclasses.replace(small, family=family, dtype=dtype, causal=True)
            yield causal
            # Here the keys are split over thread blocks, and the single query row has another tile.
            yield dataclasses.replace(causal, seqlen_q=1, seqlen_k=1030)
        for dtype, alignment, dims in ALIGNED_DIMS:
            aligned = dataclasses.replace(small, family=family, dtype=dtype, alignment=alignment)
            yield dataclasses.replace(aligned, head_dim=dims[0], head_dim_v=dims[1])
        yield dataclasses.replace(small, family=family, seqlen_q=5, seqlen_k=0)
        yield dataclasses.replace(small, family=family, causal=True, q_offset=-30)
    for dtype in ("float16", "float32"):
        long = dataclasses.replace(small, family="mma", dtype=dtype, seqlen_k=290, causal=True)
        for fields in (
            {"Br": 64, "Bc": 32, "warps": 4, "stages": 2, "q_in_registers": 0},
            {"Br": 64, "Bc": 32, "warps": 4, "stages": 3, "q_in_registers": 1},
            {"Br": 128, "Bc": 32, "warps": 4, "stages": 4, "q_in_registers": 0},
            {"Br": 128, "Bc": 64, "warps": 4, "stages": 3, "q_in_registers": 0},
        ):
            yield dataclasses.replace(long, tile=tile_with(long, fields))
    short = _more_tiles_than_sms(small, causal=True, q_offset=20)
    for fields in (
        {"Br": 64, "Bc": 64, "q_stages": 1, "turns": 0},
        {"Br": 64, "Bc": 80, "q_stages": 2, "turns": 0},
        {"Br": 128, "Bc": 128, "q_stages": 1, "q_steps": 4, "turns": 1},
        {"Br": 128, "Bc": 64, "q_stages": 2, "turns": 0},
        {"Br": 192, "Bc": 64, "q_stages": 2, "turns": 1},
    ):
        if short.is_supported():
            yield dataclasses.replace(short, tile=tile_with(short, fields))
    # The box rows of these head dims have 64 bytes; most query tiles attend to no key.
    yield dataclasses.replace(short, head_dim=96, head_dim_v=40, q_offset=-100)
    # float32 is split into components, and wide heads multiply P by slices of V's columns.
    yield dataclasses.replace(short, dtype="float32")
    yield dataclasses.replace(short, dtype="float32", batch=1, head_dim=192, head_dim_v=150)
    # Most cases above have more query rows than `decode` is meant for.
    few = dataclasses.replace(
        small, family="decode", seqlen_q=3, seqlen_k=1030, batch=2, causal=True, q_offset=20
    )
    yield few
    for dtype, alignment, dims in ALIGNED_DIMS:
        if dtype == "float16":
            aligned = dataclasses.replace(few, alignment=alignment, q_offset=None)
            yield dataclasses.replace(aligned, head_dim=dims[0], head_dim_v=dims[1])
    wide = dataclasses.replace(small, family="simt", dtype="float32", seqlen_k=290)
    for fields in ({"share_kv": 0}, {"share_kv": 1}):
        yield dataclasses.replace(wide, tile=tile_with(wide, fields))


def _more_tiles_than_sms(small: Case, **more: Any) -> Case:
    """Return a case with so many tiles that blocks of `hopper`'s persistent grid take several."""
    return dataclasses.replace(
        small, family="hopper", seqlen_q=135, seqlen_k=210, batch=4, heads_q=24, heads_kv=12, **more
    )


def wide_cases() -> Iterator[Case]:
    """Yield heads of more than 256 columns: pairs of thread blocks, and several warps per row."""
    small = Case("mma", "float16", 70, 150, batch=1, heads_q=2, heads_kv=1, causal=True)
    for dims, alignment in (((512, 512), 16), ((33, 330), 2)):
        wide = dataclasses.replace(small, head_dim=dims[0], head_dim_v=dims[1], alignment=alignment)
        yield wide
        # The keys of these cases are split over thread blocks.
        yield dataclasses.replace(wide, seqlen_q=5, seqlen_k=1030)
        yield dataclasses.replace(wide, family="decode", seqlen_q=3, seqlen_k=530)
    yield dataclasses.replace(small, family="simt", dtype="float32", head_dim=300, head_dim_v=290)
    # Most tiles of the second case attend to no key.
    many = _more_tiles_than_sms(small)
    yield dataclasses.replace(many, head_dim=512, head_dim_v=512, q_offset=20)
    yield dataclasses.replace(many, head_dim=264, head_dim_v=40, q_offset=-100)


@dataclass(frozen=True)
class LatentCall:
    """MLA call: the values are columns of the keys, which have 16 or 8 bits."""

    base: KVCacheCase
    cache_dtype: str | None
    scales: str
    family: str = "decode"

    def __str__(self) -> str:
        return f"latent {self.family} {self.cache_dtype} {self.scales} {self.base}"


def latent_calls() -> Iterator[LatentCall]:
    """Yield MLA calls: paged or not, with one or several row tiles, new rows, and many heads."""
    for number, (cache_dtype, page_size) in enumerate(
        itertools.product((None, *CACHE_DTYPES), (0, 1, 16))
    ):
        base = KVCacheCase(
            (270, 0, 33),
            ("float16", "bfloat16")[number % 2],
            seqlen_q=(1, 2)[number // 2 % 2],
            seqlen_new=1,
            heads_q=(16, 40)[number // 3 % 2],
            causal=True,
            page_size=page_size,
            **(LATENT if number % 3 else {"head_dim": 300, "head_dim_v": 20, "heads_kv": 1}),
        )
        scales = ("row", "page", "computed")[number % 3] if cache_dtype else "none"
        yield LatentCall(base, cache_dtype, scales)
    for dtype, page_size in (("float16", 0), ("bfloat16", 64)):
        many = KVCacheCase((270, 0, 33), dtype, heads_q=100, page_size=page_size, **LATENT)
        yield LatentCall(many, None, "none", "hopper")


@dataclass(frozen=True)
class SequenceCall:
    """A call on packed or cached sequences.

    `what` is a test case, or a pair of what is wrong and the arguments with wrong numbers.
    """

    what: VarlenCase | KVCacheCase | tuple[str, dict[str, Any]]
    family: str | None = None
    num_splits: int = 0
    alignment: int = MAX_ALIGNMENT

    def __str__(self) -> str:
        what = self.what[0] if isinstance(self.what, tuple) else str(self.what)
        return f"{self.family} num_splits={self.num_splits} {what}"

    @property
    def arguments(self) -> dict[str, Any]:
        if isinstance(self.what, tuple):
            return self.what[1]
        return self.what.problem().arguments()


def sequence_calls() -> Iterator[SequenceCall]:
    """Yield five calls of each family that serves sequences, appends with rotation, and clusters
    over caches.
    """
    for family in (name for name in FORWARD if FORWARD[name].serves_sequences):
        dtype = "float32" if family == "simt" else "float16"
        packed = VarlenCase(
            (70, 0, 33, 1), (150, 9, 0, 40), dtype, head_dim=40, head_dim_v=24, causal=True
        )
        # `hopper` requires 16-byte alignment for TMA, and does not split keys of sequences.
        alignment, num_splits = (16, 0) if family == "hopper" else (8, 3)
        yield SequenceCall(dataclasses.replace(packed, seqused=True), family, alignment=alignment)
        yield SequenceCall(wrong("keys of all sizes", 0, dtype), family, num_splits)
        yield SequenceCall(wrong("pages that there are not", 16, dtype), family)
        # Keys are split evenly over thread blocks, or into `num_splits` parts per sequence.
        cached = KVCacheCase((1030, 7, 0), dtype, seqlen_q=2, indexed=True, causal=True)
        yield SequenceCall(cached, family)
        yield SequenceCall(wrong("pages that there are not", 16, dtype, seqlen_new=7), family, 3)
    yield from clustered_calls()
    sizes = {"seqlen_q": 5, "seqlen_new": 5, "head_dim": 40, "head_dim_v": 33, "rotary_dim": 22}
    turned = KVCacheCase((77, 0, 130), "float16", causal=True, page_size=3, **sizes)
    yield SequenceCall(turned, alignment=2)
    halves = {"rotary_interleaved": False, "rotary_dtype": "float32"}
    yield SequenceCall(dataclasses.replace(turned, page_size=0, indexed=True, **halves))
    yield SequenceCall(KVCacheCase((500,), "bfloat16", seqlen_new=1, page_size=1))
    for change in ("lengths beyond the cache", "caches that there are not"):
        yield SequenceCall(wrong(change, 0, "float16", seqlen_new=7))
    yield SequenceCall(wrong("rows of q before the first", 16, "float16"))
    short_tables = turned.problem().arguments()
    for name in ("rotary_cos", "rotary_sin"):
        short_tables[name] = short_tables[name][:6]
    yield SequenceCall(("positions outside of the rotary table", short_tables))


def clustered_calls() -> Iterator[SequenceCall]:
    """Yield calls with one or several clusters per head, over sequences that not all share."""
    many = ((530, 7, 0), *wrong_numbers.HEADS[1])
    few = ((5000, 7, 0, 900), 16, 2)
    for page_size, (lengths, heads_q, heads_kv) in ((0, many), (1, many), (16, many), (0, few)):
        sizes = {"heads_q": heads_q, "heads_kv": heads_kv, "seqlen_q": 2, "seqlen_new": 2}
        case = KVCacheCase(lengths, "float16", causal=True, page_size=page_size, **sizes)
        yield SequenceCall(case, "decode")
    numbers = wrong_numbers.wrong_kvcache(
        "pages that there are not", 1, "float16", 7, wrong_numbers.HEADS[1]
    )
    yield SequenceCall(("pages of one row that there are not, many heads", numbers), "decode")


def wrong(
    change: str, page_size: int, dtype: str, seqlen_new: int | None = None
) -> tuple[str, dict[str, Any]]:
    """Return wrong arguments: for packed sequences, or for a cache if rows are appended."""
    if seqlen_new is None:
        return change, wrong_numbers.wrong_varlen(change, page_size, dtype)
    return change, wrong_numbers.wrong_kvcache(change, page_size, dtype, seqlen_new)


def on_gpu(array: np.ndarray, alignment: int) -> Any:
    """Return the array at the end of an allocation, aligned to `alignment` bytes and no more."""
    start = alignment % MAX_ALIGNMENT // array.itemsize
    flat = np.concatenate([np.zeros(start, array.dtype), array.ravel()])
    return cupy.asarray(flat)[start:].reshape(array.shape)


def call(case: Case) -> None:
    """Make a call; fail if its output is not finite."""
    q, k, v, out = (
        on_gpu(array, case.alignment)
        for array in (*random_values(case), np.full(case.shape("out"), np.nan, DTYPES[case.dtype]))
    )
    # The alignment is that of these arrays, so the tile is chosen again if none is given.
    flash_attention(
        q, k, v, out=out, return_lse=True, family=case.family, tile=case.tile, **case.formula
    )
    assert np.isfinite(out.get().astype(np.float64)).all(), "not finite"


def call_with_sequences(case: SequenceCall) -> None:
    """Make a call on packed or cached sequences; fail if it differs from the reference.

    Elements that no call may read are NaN, so finite results alone would prove little.
    """
    arguments = case.arguments
    arrays = {
        name: on_gpu(value, case.alignment if value.dtype.kind != "i" else value.itemsize)
        if isinstance(value, np.ndarray)
        else value
        for name, value in arguments.items()
    }
    is_cached = "k_cache" in arguments
    function = flash_attention_with_kvcache if is_cached else flash_attention_varlen
    shape = (*arguments["q"].shape[:-1], arguments["v_cache" if is_cached else "v"].shape[-1])
    out = on_gpu(np.full(shape, np.nan, arguments["q"].dtype), case.alignment)
    try:
        _, lse = function(
            **arrays, out=out, return_lse=True, family=case.family, num_splits=case.num_splits
        )
    except UnsupportedError as error:
        print(f"skipped: {case}: {error}")
        return
    results = (out.get(), lse.get())
    if not is_cached:
        wrong_numbers.check_varlen_result(arguments, *results)
    elif arguments["rotary_cos"] is None:
        caches = (arrays[name].get() for name in ("k_cache", "v_cache"))
        wrong_numbers.check_kvcache_result(arguments, *results, *caches)
    else:
        Truth.of_kvcache(arguments).check(*results)


def modified_calls() -> Iterator[tuple[ModifiedCall, str | None]]:
    """Yield modified calls of each family, drawn as in the tests; captures end their allocation."""
    for number in range(24):
        rng = np.random.default_rng(number)
        family = (None, *FORWARD)[number % (1 + len(FORWARD))]
        of_16_bits = ("float16", "bfloat16")[number // 6 % 2]
        dtype = "float32" if family in ("simt", "naive") else of_16_bits
        kind = "dense" if family == "naive" else KINDS[number % len(KINDS)]
        if family == "hopper" and kind == "paged":
            kind = "varlen"
        yield random_call(rng, dtype, kind, few_rows=family == "decode"), family
    # These calls take different paths through the Hopper kernel.
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((1, 2, 200, 336))
    for dtype, head_dim in (("bfloat16", 64), ("bfloat16", 128), ("float16", 64)):
        real = DTYPES[dtype]
        arrays = {
            name: rng.standard_normal((1, rows, 2, head_dim)).astype(real)
            for name, rows in (("q", 200), ("k", 336), ("v", 336))
        }
        yield ModifiedCall("dense", dtype, arrays, {"softcap": 30.0}), "hopper"
        yield ModifiedCall("dense", dtype, arrays, {"softcap": 30.0, "window_size": (70, 9)}), None
        yield ModifiedCall("dense", dtype, arrays | {"bias": bias.astype(real)}, {}), "hopper"
        blocks = {"mask_mod": ("blocks", {})}
        yield ModifiedCall("dense", dtype, arrays, {"causal": True}, blocks), "hopper"
    # Rows with very low scores are computed by an additional launch.
    for kind in KINDS:
        yield padded_call(rng, "bfloat16", kind, -1e30), "hopper"


def call_modified(case: ModifiedCall, family: str | None) -> None:
    """Make a call, with another family if this one does not serve it; fail if it is wrong."""
    try:
        case.check(cupy, family=family)
    except UnsupportedError:
        if family is not None:
            call_modified(case, None)


def call_statistics(case: ModifiedCall, family: str | None) -> None:
    """Make a call that returns row statistics; see `call_modified`."""
    try:
        row_statistics.check(case, cupy, family=family)
    except UnsupportedError:
        if family is not None:
            call_statistics(case, None)


def backward_calls() -> Iterator[tuple[GradientCall, str]]:
    """Yield backward calls of each family, drawn as in the tests; `hopper` has more head dims."""
    # The sequences are short; those of a mask function have lists of query tiles all the same.
    backward_common._LEAST_LISTED_KV_TILES = 1
    for number, (family, kind, dtype) in enumerate(
        itertools.product(FAMILIES["backward"], GRADIENT_KINDS, DTYPES)
    ):
        rng = np.random.default_rng(number)
        yield random_gradient_call(rng, dtype, kind, longest=(150, 200)), family
    for number, (head_dim, kind) in enumerate(
        itertools.product((40, 64, 128, 192, 256, 512), GRADIENT_KINDS)
    ):
        rng = np.random.default_rng(number)
        dtype = ("float16", "bfloat16")[number % 2]
        call = random_gradient_call(rng, dtype, kind, head_dims=(head_dim,), longest=(150, 200))
        yield call, "hopper"
    # Thread blocks fetch KV tiles.
    rng = np.random.default_rng(0)
    for rows in (70, 150):
        shapes = {"q": (2, rows, 200, 64), "k": (2, 150, 200, 64)}
        shapes |= {"v": shapes["k"], "dout": shapes["q"]}
        arrays = {n: rng.standard_normal(x).astype(np.float16) for n, x in shapes.items()}
        dout = arrays.pop("dout")
        yield GradientCall(ModifiedCall("dense", "float16", arrays, {}), dout), "hopper"


def call_backward(case: GradientCall, family: str | None) -> None:
    """Make a call, with another family if this one does not serve it; fail if it is wrong."""
    try:
        check_gradients(case, case.run(cupy, family=family))
    except UnsupportedError:
        if family is not None:
            call_backward(case, None)


def feature_calls() -> Iterator[tuple[FeatureCall, str]]:
    """Yield calls with dropout, of tangents and of received weights, by each family and dtype."""
    # The families with gradients serve dropout.
    directions = {"dropout": "backward", "dropout gradients": "backward"}
    directions |= {"tangents": "tangent", "packed tangents": "tangent", "received": "received"}
    calls = (
        (feature, family, dtype)
        for feature, direction in directions.items()
        for family, dtype in itertools.product(FAMILIES[direction], DTYPES)
    )
    for number, (feature, family, dtype) in enumerate(calls):
        # One seed may draw a call with dropout, whose weights no kernel sums.
        for each in range(2 if feature == "received" else 1):
            seed = 2 * number + each
            yield feature_call(feature, dtype, seed, seed, longest=(150, 200)), family


def quantized_calls() -> Iterator[QuantizedCase]:
    """Yield calls with 8-bit caches: all dtypes and scales, paged or not, and packed queries."""
    for number, (cache_dtype, page_size) in enumerate(itertools.product(CACHE_DTYPES, (0, 16))):
        packed = VarlenCase(
            (70, 0, 3), (150, 9, 530), "float16", causal=True, page_size=page_size, seqused=True
        )
        yield QuantizedCase(packed, cache_dtype, ("head", "row")[number % 2], sinks=True)
    for number, (cache_dtype, scales, page_size) in enumerate(
        itertools.product(CACHE_DTYPES, SCALES, (0, 1, 64))
    ):
        dtype, seqlen_q = ("float16", "bfloat16")[number % 2], (1, 2)[number // 2 % 2]
        dims = {"head_dim": (64, 72)[number // 4 % 2], "head_dim_v": (64, 40)[number // 4 % 2]}
        sizes = {"seqlen_q": seqlen_q, "seqlen_new": 1, "page_size": page_size}
        base = KVCacheCase((150, 0, 33), dtype, causal=True, **sizes, **dims)
        yield QuantizedCase(base, cache_dtype, scales)


def call_latent(case: LatentCall) -> None:
    """Fail if a call is wrong; calls of `hopper` are made on Hopper only."""
    if case.family != "hopper" or current_device().arch == 90:
        check_latent(case.base, case.cache_dtype, case.scales, family=case.family)


def float8_calls() -> Iterator[Float8Case]:
    """Yield float8 calls: outputs in one slice of columns or several, and ragged ends."""
    for dim, causal in itertools.product((48, 128, 192, 256), (False, True)):
        alignment = 1 if causal else 16
        dims = {"head_dim": dim, "head_dim_v": dim - 3 * causal}
        yield Float8Case(200, 333, causal=causal, alignment=alignment, **dims)


def call_float8(case: Float8Case) -> None:
    """Fail if a call is wrong; calls are made on Hopper only."""
    if current_device().arch == 90:
        float8_support.check_on_gpu(case)


def shard_appends() -> Iterator[tuple[str, Any]]:
    """Yield appends to a sharded KV cache, whose shards are all on this GPU, one after another."""
    for dtype, ranks, stripe in (("float16", 2, 3), ("bfloat16", 3, 1), ("float32", 2, 256)):
        yield f"append {dtype} to {ranks} ranks in stripes of {stripe}", (dtype, ranks, stripe)


def call_shard_append(dtype: str, ranks: int, stripe: int) -> None:
    """Append to the shards of all ranks; fail if a rank holds other rows."""
    rng = np.random.default_rng(ranks)
    whole, new = (rng.standard_normal((2, rows, 3, 40)).astype(DTYPES[dtype]) for rows in (41, 7))
    lengths = np.array([30, 5], np.int32)
    filled = whole.copy()
    for sequence, length in enumerate(lengths):
        filled[sequence, length : length + 7] = new[sequence]
    k, cache_seqlens = on_gpu(new, MAX_ALIGNMENT), on_gpu(lengths, 4)
    for rank in range(ranks):
        shard = functools.partial(cache_shard, ranks=ranks, rank=rank, stripe=stripe)
        caches = [on_gpu(shard(whole), MAX_ALIGNMENT) for _ in "kv"]
        dispatch.append(
            AppendedRows(*caches, k, k, cache_seqlens), CacheSharding(ranks, rank, stripe, 41), 0
        )
        is_wrong = any((cache.get() != shard(filled)).any() for cache in caches)
        assert not is_wrong, f"rank {rank} has other rows"


# Name of a call, and a function that makes it and fails if it is wrong.
Named = tuple[str, Callable[[], None]]


def _named(make: Callable[..., None], calls: Iterable[Any]) -> Iterator[Named]:
    """Yield names and functions for calls, or for pairs of a call and a family."""
    for each in calls:
        given = each if isinstance(each, tuple) else (each,)
        yield str(given[0]), functools.partial(make, *given)


def _supported(some: Iterable[Case]) -> Iterator[Case]:
    return (case for case in some if case.is_supported())


GROUPS: dict[str, tuple[str, Callable[[], Iterable[Named]]]] = {
    "modified": (
        "calls with masks or score modifications",
        lambda: _named(call_modified, modified_calls()),
    ),
    "statistics": (
        "calls that return row statistics",
        lambda: _named(call_statistics, modified_calls()),
    ),
    "backward": ("backward calls", lambda: _named(call_backward, backward_calls())),
    "features": (
        "calls with dropout, of tangents and of received weights",
        lambda: _named(lambda case, family: case.check(cupy, family), feature_calls()),
    ),
    "quantized": (
        "calls with 8-bit keys and values",
        lambda: _named(check_on_gpu, quantized_calls()),
    ),
    "float8": ("calls with float8 q, k and v", lambda: _named(call_float8, float8_calls())),
    "wide": (
        "calls with wide heads, and of latent attention",
        lambda: itertools.chain(
            _named(call, _supported(wide_cases())), _named(call_latent, latent_calls())
        ),
    ),
}


def plain_calls() -> Iterator[Named]:
    """Yield the calls that are in no group."""
    yield from _named(call, _supported(cases()))
    yield from _named(call_with_sequences, sequence_calls())
    yield from ((name, functools.partial(call_shard_append, *x)) for name, x in shard_appends())


def why_wrong(make: Callable[[], None]) -> str | None:
    """Make a call; return why it is wrong, or None."""
    try:
        make()
    except AssertionError as error:
        return str(error) or "not as the reference"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the calls, and make none"
    )
    for group, (what, _) in GROUPS.items():
        parser.add_argument(f"--{group}", action="store_true", help=f"make only {what}")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="make only calls whose name matches"
    )
    arguments = parser.parse_args()
    chosen = [group for group in GROUPS if getattr(arguments, group)]
    makers = [GROUPS[group][1] for group in chosen or GROUPS]
    everything = itertools.chain(() if chosen else plain_calls(), *(make() for make in makers))
    calls = [(name, make) for name, make in everything if re.search(arguments.only, name)]
    if not calls:
        parser.error(f"--only {arguments.only} matches no call; see --list")
    if arguments.list:
        print("\n".join(name for name, _ in calls))
        return 0
    # A pool would hide an access past the end of an array.
    cupy.cuda.set_allocator(None)
    start = time.perf_counter()
    failed = {name: why for name, make in calls if (why := why_wrong(make))}
    cupy.cuda.Device().synchronize()
    print(f"{len(calls)} calls in {time.perf_counter() - start:.0f} s")
    for name, why in failed.items():
        print(f"{why}: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
