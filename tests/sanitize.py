"""A representative set of calls to run under compute-sanitizer.

    python tests/sanitize.py
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

The first, plain run leaves the kernels in CuPy's cache, so that the others spend no time on
compiling. Every array is an allocation of its own that ends with its last element: memcheck then
sees any access beyond it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu_support import DTYPES, Case, random_values, tile_with

from cupy_flash import flash_attention
from cupy_flash.families import FAMILIES
from cupy_flash.problem import MAX_ALIGNMENT

# Head dims whose rows, one after the other, keep the alignment that the first has.
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
    """Every family and dtype, masks, ragged tiles, alignments, splits, stages, rows per warp."""
    small = Case(None, "float16", 70, 150, batch=1, heads_q=2, heads_kv=1)
    for family in FAMILIES:
        for dtype in DTYPES:
            causal = dataclasses.replace(small, family=family, dtype=dtype, causal=True)
            yield causal
            # Keys split over thread blocks; a row of queries, whose tile is another one.
            yield dataclasses.replace(causal, seqlen_q=1, seqlen_k=1030)
        for dtype, alignment, dims in ALIGNED_DIMS:
            yield dataclasses.replace(
                small,
                family=family,
                dtype=dtype,
                alignment=alignment,
                head_dim=dims[0],
                head_dim_v=dims[1],
            )
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
    # Of a persistent grid each block goes on to other tiles only where there are more than SMs.
    short = dataclasses.replace(
        small,
        family="hopper",
        seqlen_q=135,
        seqlen_k=210,
        batch=4,
        heads_q=24,
        heads_kv=12,
        causal=True,
        q_offset=20,
    )
    for fields in (
        {"Br": 64, "Bc": 64, "q_stages": 1, "turns": 0},
        {"Br": 64, "Bc": 80, "q_stages": 2, "turns": 0},
        {"Br": 128, "Bc": 128, "q_stages": 1, "q_steps": 4, "turns": 1},
        {"Br": 128, "Bc": 64, "q_stages": 2, "turns": 0},
        {"Br": 192, "Bc": 64, "q_stages": 2, "turns": 1},
    ):
        if short.is_supported():
            yield dataclasses.replace(short, tile=tile_with(short, fields))
    # Head dims whose lines are 64 bytes; most query tiles see no key.
    yield dataclasses.replace(short, head_dim=96, head_dim_v=40, q_offset=-100)
    wide = dataclasses.replace(small, family="simt", dtype="float32", seqlen_k=290)
    for fields in ({"share_kv": 0}, {"share_kv": 1}):
        yield dataclasses.replace(wide, tile=tile_with(wide, fields))


def on_gpu(array: np.ndarray, alignment: int) -> Any:
    """The array at the end of an allocation, its first element aligned to no more than asked."""
    import cupy

    start = alignment % MAX_ALIGNMENT // array.itemsize
    flat = np.concatenate([np.zeros(start, array.dtype), array.ravel()])
    return cupy.asarray(flat)[start:].reshape(array.shape)


def call(case: Case) -> bool:
    """Make one call; return whether its output is finite."""
    q, k, v, out = (
        on_gpu(array, case.alignment)
        for array in (*random_values(case), np.full(case.shape("out"), np.nan, DTYPES[case.dtype]))
    )
    # Alignment is that of the arrays as they lie here, so the tile is chosen anew if none is given.
    flash_attention(
        q, k, v, out=out, return_lse=True, family=case.family, tile=case.tile, **case.formula
    )
    return bool(np.isfinite(out.get().astype(np.float64)).all())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the calls and make none")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if case.is_supported()]
    if arguments.list:
        print("\n".join(map(str, chosen)))
        return 0
    import cupy

    # A pool would hide an access past the end of an array.
    cupy.cuda.set_allocator(None)
    start = time.perf_counter()
    failed = [case for case in chosen if not call(case)]
    cupy.cuda.Device().synchronize()
    print(f"{len(chosen)} calls in {time.perf_counter() - start:.0f} s")
    for case in failed:
        print(f"not finite: {case}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
