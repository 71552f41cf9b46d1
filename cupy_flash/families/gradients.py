"""What families do alike that compute gradients: row terms first, then the sums.

Each row of dk, dv and dq is summed up in one order: same inputs, same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cupy_flash.families import other_gradients
from cupy_flash.families.contract import MAX_GRID, ceil_div, heads_in_l2, round_up, why_not_scale
from cupy_flash.families.schedule import ROW_TERMS, Launch, Schedule, TensorMapSpec
from cupy_flash.problem.arrays import ITEMSIZE
from cupy_flash.problem.device import Device
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem

_TERMS_THREADS = 256
# Parts of the workspace begin on multiples of this.
_PART_BYTES = 512
_WORD = 4
# Of what is summed up on tensor cores.
_WIDEST = 256


def why_not(problem: Problem) -> str | None:
    """Why no kernel of gradients serves a problem; None if they may."""
    if problem.layout.page_size or problem.layout.kind == "cached":
        return "computes no gradients of a cache"
    return None


def why_not_tensor_cores(problem: Problem) -> str | None:
    """Why no kernel of gradients on tensor cores serves a problem; None if they may."""
    if max(problem.head_dim, problem.head_dim_v) > _WIDEST:
        return f"its sums of dk and dv need too many registers for head dims over {_WIDEST}"
    return why_not(problem) or why_not_scale(problem)


def row_lanes(problem: Problem) -> int:
    """Lanes that share a row of out and dout: 16 bytes each, a power of two of them."""
    pieces = ceil_div(problem.head_dim_v * problem.itemsize, 16)
    return min(32, 1 << (pieces - 1).bit_length())


def blocks_of(problem: Problem, keys: int, queries: int) -> tuple[int, int]:
    """Thread blocks of tiles of so many keys, and of so many queries."""
    p, layout = problem, problem.layout
    of_keys = (
        layout.total_k // keys + p.batch
        if layout.packed_k
        else ceil_div(p.seqlen_k, keys) * p.batch
    )
    of_queries = (
        layout.total_q // queries + p.batch
        if layout.packed_q
        else ceil_div(p.seqlen_q, queries) * p.batch
    )
    return of_keys * p.heads_kv, of_queries * p.heads_q


def why_not_grid(problem: Problem, keys: int, queries: int) -> str | None:
    """Why such tiles are more than a launch takes, or None if they are not."""
    own = blocks_of(problem, keys, queries)
    blocks = max(*own, _terms_blocks(problem), other_gradients.bias_tiles(problem))
    if blocks > MAX_GRID:
        return f"needs {blocks} thread blocks, more than the {MAX_GRID} of a launch"
    return None


def schedule(
    problem: Problem,
    device: Device,
    launches: Iterable[Launch],
    sums: QuerySums | None = None,
    section_heads: int = 0,
    tensor_maps: Mapping[str, TensorMapSpec] | None = None,
) -> Schedule:
    """That of the kernels that sum up rows, and of those of gradients of other inputs.

    Kernels without rows, or whose gradients nobody wants, are left out.

    Parameters
    ----------
    problem, device, launches
        What is computed, on what, by which kernels behind that of row terms.
    sums
        Of dq in the workspace, where blocks add to it.
    section_heads
        Query heads whose tiles are interleaved; 0 for those that L2 has place for.
    tensor_maps
        Of which arrays the kernels take tensor maps.
    """
    gradient = problem.gradient
    assert gradient is not None
    terms = Launch(
        ROW_TERMS,
        "find_row_terms",
        (_terms_blocks(problem), 1, 1),
        _TERMS_THREADS,
        arguments=("gradients",),
    )
    workspace = (
        _query_rows(problem) * 2 * ITEMSIZE[problem.lse_dtype]
        if sums is None
        else sums.workspace(problem)
    )
    parts = {}
    for name, size in other_gradients.workspace(problem, device).items():
        parts[name] = round_up(workspace, _PART_BYTES)
        workspace = parts[name] + size
    return Schedule(
        (
            terms,
            *(launch for launch in launches if launch.grid[0] and gradient.wants(*ROWS)),
            *other_gradients.launches(problem, device),
        ),
        workspace=workspace,
        section_heads=section_heads or heads_in_l2(problem, device),
        tensor_maps=tensor_maps or {},
        parts=parts,
    )


@dataclass(frozen=True)
class QuerySums:
    """Sums of dq in the workspace, see `kernels_cu/backward/query_sums.cuh`.

    Attributes
    ----------
    Br, columns
        Rows of a tile, and columns of a row, of float32.
    """

    Br: int
    columns: int

    def workspace(self, problem: Problem) -> int:
        """Bytes of row terms, counters and sums."""
        terms = _query_rows(problem) * 2 * ITEMSIZE[problem.lse_dtype]
        places = self.places(problem)
        sums = places * self.Br * self.columns * _WORD
        return round_up(terms, _PART_BYTES) + round_up(places * _WORD, _PART_BYTES) + sums

    def places(self, problem: Problem) -> int:
        """Tiles that there is room for."""
        layout = problem.layout
        if layout.packed_q:
            return problem.heads_q * (layout.total_q // self.Br + problem.batch)
        return problem.batch * problem.heads_q * ceil_div(problem.seqlen_q, self.Br)


def inspects(problem: Problem) -> bool:
    """Return whether some row may attend to no key, or some key may have no row attend to it.

    Kernels then inspect tiles and clean them, see `kernels_cu/backward/clean.cuh`.
    """
    mask = problem.mask
    if problem.score is not None and problem.score.conceals:
        return True
    if mask.is_full or 0 in (problem.seqlen_q, problem.seqlen_k):
        return False
    # The first and the last row attend to the fewest keys, and the fewest rows attend to the first
    # and the last key.
    rows, keys = (0, problem.seqlen_q - 1), (0, problem.seqlen_k - 1)
    return (
        not problem.layout.is_equal
        or (problem.score is not None and problem.score.offsets)
        or any(mask.begin(row) >= mask.end(row) for row in rows)
        or any(mask.first_row(key) >= mask.last_row(key) for key in keys)
    )


def _may_see_one_key(problem: Problem) -> bool:
    """Return whether some row may attend to one key only."""
    is_plain = problem.mask.is_full and problem.layout.is_equal
    is_plain &= problem.score is None or not problem.score.conceals
    return not is_plain or problem.seqlen_k == 1


def _query_rows(problem: Problem) -> int:
    """Over the whole batch and all heads, as lse has them."""
    return math.prod(problem.lse_shape)


def _terms_blocks(problem: Problem) -> int:
    """Of the kernel of row terms, which also clears rows of keys that are of no sequence."""
    layout, threads = problem.layout, _query_rows(problem) * row_lanes(problem)
    if not layout.is_equal:
        keys = layout.total_k if layout.packed_k else problem.batch * problem.seqlen_k
        threads = max(threads, keys)
    return max(1, ceil_div(threads, _TERMS_THREADS))


def config(
    problem: Problem, sums: QuerySums | None = None, *, last_writes: bool = False
) -> dict[str, int | bool]:
    """Members of the `Config` struct that all kernels of gradients read.

    Parameters
    ----------
    problem, sums
        As in `schedule`.
    last_writes
        Whether the last block that adds to a tile of dq writes it, so that nobody writes tiles
        without keys.
    """
    assert problem.gradient is not None
    return {
        "as_inputs": problem.gradient.as_inputs,
        "row_lanes": row_lanes(problem),
        "sequences": not problem.layout.is_equal,
        "sums_Br": 0 if sums is None else sums.Br,
        "conceals": problem.score is not None and problem.score.conceals,
        "inspects": inspects(problem),
        "one_key": _may_see_one_key(problem),
        "clears_queries": last_writes or not problem.layout.is_equal,
    } | other_gradients.config(problem)
