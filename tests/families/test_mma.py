"""The `mma` family, on tensor cores: plans and tiles, without a GPU."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace

import pytest

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.families.mma.forward import MmaFamily, MmaTile
from cupy_flash.problem.arrays import ITEMSIZE, ArraySpec
from cupy_flash.problem.device import ARCHITECTURES, device_for_arch
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.problem import Problem, make_problem

mma = MmaFamily()
h100 = device_for_arch("sm_90")
TILE = MmaTile(64, 32, warps=4, stages=2)


def problem(
    dtype: str = "float16",
    head_dim: int = 64,
    head_dim_v: int | None = None,
    *,
    seqlen: int = 4096,
    batch: int = 4,
    heads: int = 16,
    alignment: int = 16,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Problem:
    """Return a problem whose rows are padded to 16 bytes and start at a multiple of `alignment`."""

    def spec(dim: int) -> ArraySpec:
        width = 16 // ITEMSIZE[dtype]
        row = -(-dim // width) * width
        strides = (seqlen * heads * row, heads * row, row)
        return ArraySpec((batch, seqlen, heads, dim), strides, dtype, alignment)

    qk, v = spec(head_dim), spec(head_dim_v or head_dim)
    return make_problem(qk, qk, v, causal=causal, softmax_scale=softmax_scale)


def ragged_problem(
    dtype: str = "bfloat16",
    head_dim: int = 64,
    *,
    page_size: int = 0,
    group: int = 4,
    seqlen: int = 4096,
    causal: bool = True,
    **options: int,
) -> Problem:
    """Return a problem with packed queries over a KV cache, which may be paged."""
    case = problem(dtype, head_dim, seqlen=seqlen, causal=causal)
    pages = {"page_size": page_size, "pages": 77, "max_pages": -(-seqlen // (page_size or 1))}
    cache = pages if page_size else {"caches": 5}
    layout = Layout(kind="varlen", total_q=2 * seqlen, **cache, **options)
    return replace(case, heads_kv=case.heads_q // group, q_offset=0, layout=layout)


def test_float64_and_gpus_before_ampere_are_refused_with_the_reason():
    assert "float64" in mma.why_not(problem("float64"), h100)
    assert "needs sm_80 or newer" in mma.why_not(problem(), device_for_arch("sm_75"))


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (MmaTile(64, 32, warps=17), "warps is 17; expected 1 to 16"),
        (MmaTile(96, 32), "Br is 96; expected 16 or 32 rows for each of 4 warps"),
        (MmaTile(32, 32), "Br is 32; expected 16 or 32 rows for each of 4 warps"),
        (MmaTile(64, 24), "Bc is 24; expected a multiple of 16"),
        (MmaTile(64, 8), "Bc is 8; expected a multiple of 16"),
        (MmaTile(64, 32, stages=1), "stages is 1; expected 2 to 4"),
        (MmaTile(64, 32, stages=5), "stages is 5; expected 2 to 4"),
        (MmaTile(64, 32, q_in_registers=2), "q_in_registers is 2; expected 0 or 1"),
        (MmaTile(64, 32, min_blocks=0), "min_blocks is 0; expected at least 1"),
        (MmaTile(128, 128), "registers per thread; 255 are available"),
        (MmaTile(64, 64, min_blocks=5), "registers per thread; 96 are available"),
        (MmaTile(256, 128, warps=16, stages=4), "KiB of shared memory; sm_90 has 227 KiB"),
    ],
)
def test_a_tile_that_cannot_run_is_told_why(tile, words):
    assert words in mma.why_not_tile(problem(head_dim=192), h100, tile)


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        (MmaTile(48, 32, warps=8), "Br is 48; expected 8, 16 or 32 rows for each of 8 warps"),
        (MmaTile(64, 48, warps=8), "Bc is 48; expected a multiple of 32"),
        (MmaTile(64, 32, warps=4), "registers per thread; 255 are available"),
    ],
)
def test_of_wide_heads_two_warps_share_rows(tile, words):
    assert words in mma.why_not_tile(problem(head_dim=512), h100, tile)


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch >= 80])
def test_heads_of_any_width_have_a_tile_on_any_gpu_with_these_tensor_cores(arch):
    device = device_for_arch(arch)
    for head_dim, head_dim_v in itertools.product((1, 257, 384, 512, 576), repeat=2):
        case = problem("bfloat16", head_dim, head_dim_v)
        assert mma.why_not(case, device) is None
        assert mma.why_not_tile(case, device, mma.default_tile(case, device)) is None


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch >= 80])
def test_tiles_whose_warps_share_rows_are_among_those_to_tune(arch):
    case, device = problem("bfloat16", 512), device_for_arch(arch)
    tiles = list(mma.tiles(case, device))

    assert mma.default_tile(case, device) in tiles
    assert {tile.column_warps for tile in tiles} == {2}


def test_more_blocks_per_sm_than_its_shared_memory_holds_are_refused():
    case, small = problem(head_dim=16), device_for_arch("sm_86")
    tile = MmaTile(16, 256, warps=1, stages=4, min_blocks=3)
    assert mma.shared_memory(case, tile) <= small.shared_memory_per_block
    assert "fewer than 3 thread blocks fit" in (mma.why_not_tile(case, small, tile) or "")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v", "row_bytes"),
    [
        ("float16", 64, 64, 128),
        ("bfloat16", 33, 40, 96),
        ("float16", 17, 72, 160),
        ("float32", 64, 64, 256),
        ("float32", 36, 24, 160),
        ("float32", 36, 50, 256),
    ],
)
def test_shared_memory_is_the_query_tile_and_the_ring_with_rows_padded_to_whole_steps(
    dtype, head_dim, head_dim_v, row_bytes
):
    case = problem(dtype, head_dim, head_dim_v)
    for stages in (2, 3, 4):
        tile = MmaTile(64, 32, stages=stages)
        assert mma.shared_memory(case, tile) == (64 + stages * 32) * row_bytes


def test_warps_that_share_rows_take_whole_steps_of_32_columns_of_v():
    case, tile = problem("bfloat16", 300, 520), MmaTile(64, 32, warps=8)
    assert mma.shared_memory(case, tile) == (64 + 2 * 32) * 2 * 544
    assert mma.shared_memory(case, MmaTile(64, 32)) == (64 + 2 * 32) * 2 * 528


@pytest.mark.parametrize(("seqlen", "q_tiles"), [(1, 1), (64, 1), (65, 2), (799, 13)])
def test_the_grid_has_a_block_for_each_query_tile_of_each_head_and_split(seqlen, q_tiles):
    case = replace(problem(seqlen=seqlen), layout=Layout(num_splits=3))
    (launch, *_) = mma.schedule(case, h100, TILE).launches
    assert launch.grid == (q_tiles * 4 * 16 * 3, 1, 1)
    assert launch.threads == 128
    assert launch.shared_memory == mma.shared_memory(problem(), TILE)


@pytest.mark.parametrize(("seqlen", "q_tiles"), [(1, 1), (16, 1), (17, 2), (799, 50)])
def test_a_tile_of_sequences_holds_the_rows_of_all_heads_that_share_keys(seqlen, q_tiles):
    (launch, *_) = mma.schedule(ragged_problem(seqlen=seqlen, num_splits=3), h100, TILE).launches
    assert launch.grid == (q_tiles * 4 * (16 // 4) * 3, 1, 1)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_batch_invariant_tile_does_not_depend_on_lengths(head_dim):
    options = {"causal": False, "batch_invariant": True}
    cases = (ragged_problem("float16", head_dim, seqlen=n, **options) for n in (1, 113, 1024, 8192))
    tiles = {mma.default_tile(case, h100) for case in cases}
    assert len(tiles) == 1


# The formulas of `SwizzledRows` in layout.cuh, evaluated as they are written there. C++ and Python
# agree on them once `/` of non-negative integers is spelled `//`.
LAYOUT = (KERNEL_DIR / "tile" / "layout.cuh").read_text(encoding="utf-8")


def formula(function: str) -> str:
    body = re.search(rf"{function}\([^)]*\) {{\s*return ([^;]*);", LAYOUT)
    assert body, function
    return " ".join(body[1].replace("/", "//").split())


OFFSET, ADVANCE = (compile(formula(name), name, "eval") for name in ("offset", "advance"))


@dataclass(frozen=True)
class SwizzledRows:
    chunks: int

    @property
    def constants(self) -> dict[str, int]:
        return {"row_bytes": 16 * self.chunks, "swizzle": math.gcd(self.chunks, 8)}

    def offset(self, row: int, chunk: int) -> int:
        return int(eval(OFFSET, {}, self.constants | {"row": row, "chunk": chunk}))

    def advance(self, address: int, rows: int, chunks: int) -> int:
        names = {"address": address, "rows": rows, "chunks": chunks}
        return int(eval(ADVANCE, {}, self.constants | names))


# All widths that head_dim 1 to 576 is padded to, in chunks of 16 bytes: multiples of 16 columns
# with 2 bytes, and multiples of 8 (Q, K) or 32 (V) columns with 4 bytes, up to 128.
WIDTHS = sorted({n // 8 for n in range(16, 577, 16)} | {n // 4 for n in range(8, 129, 8)})


def test_the_swizzle_is_the_common_divisor_of_the_chunks_and_eight():
    ternary = "chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1"
    assert ternary in " ".join(LAYOUT.split())


@pytest.mark.parametrize("chunks", WIDTHS)
def test_eight_rows_of_a_chunk_column_lie_in_eight_bank_groups(chunks):
    layout = SwizzledRows(chunks)
    for first, chunk in itertools.product((0, 8, 16, 120), range(chunks)):
        groups = {layout.offset(row, chunk) // 16 % 8 for row in range(first, first + 8)}
        assert len(groups) == 8


@pytest.mark.parametrize("chunks", WIDTHS)
def test_eight_neighbouring_chunks_that_a_copy_writes_lie_in_eight_bank_groups(chunks):
    layout = SwizzledRows(chunks)
    for first in range(0, 16 * chunks, 8):
        places = (divmod(n, chunks) for n in range(first, first + 8))
        assert len({layout.offset(row, chunk) // 16 % 8 for row, chunk in places}) == 8


@pytest.mark.parametrize("chunks", WIDTHS)
def test_every_chunk_of_a_tile_has_a_slot_of_its_own(chunks):
    layout = SwizzledRows(chunks)
    offsets = [layout.offset(row, chunk) for row in range(32) for chunk in range(chunks)]
    assert sorted(offsets) == list(range(0, 32 * chunks * 16, 16))


@pytest.mark.parametrize("chunks", WIDTHS)
def test_advancing_an_offset_is_the_offset_further_on(chunks):
    layout = SwizzledRows(chunks)
    for power in (1, 2, 4, 8):
        steps, moves = range(0, chunks - power + 1, power), (0, 8, 40)
        for row, chunk, step, rows in itertools.product((0, 3, 13), range(power), steps, moves):
            moved = layout.advance(layout.offset(row, chunk), rows, step)
            assert moved == layout.offset(row + rows, chunk + step)
