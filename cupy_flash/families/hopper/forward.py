"""Fused attention of float8 to float32 on Hopper (sm_90a): `kernels_cu/forward/hopper.cu`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from cupy_flash.families import split
from cupy_flash.families.contract import (
    MAX_GRID,
    Family,
    TranslationUnit,
    ceil_div,
    round_up,
    why_not_scale,
    why_not_shared_memory,
)
from cupy_flash.families.hopper import float8, latent, persistent, pieces
from cupy_flash.families.hopper.tiles import HopperTile, preferred_tiles, tile_of
from cupy_flash.families.schedule import (
    MAIN_ENTRY,
    MAX_STRIDE,
    STRIDE_UNIT,
    WHOLE,
    Launch,
    Schedule,
    Split,
    TensorMapSpec,
)
from cupy_flash.problem.arrays import Shape
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

_WARPGROUP = 128
# Rows of a warpgroup's products, and so of the lowest tile.
_LOWEST = 64
# Keys of the narrowest that is searched for.
_FEWEST_KEYS = 32
# Columns that a block multiplies at most; wider heads are a pair's.
_MOST_COLUMNS = 256
# What the blocks of a pair send to each other: tiles of scores, as many as they have buffers for.
_PAIR_BUFFERS = 2
# Of latent attention, whose tiles of keys are held longer.
_LATENT_PAIR_BUFFERS = 1
_SCORE_BYTES = 4
# Registers of a producer's and a consumer's thread, by the number of consumers. Together they are
# what the launch allots, 168 or 128 for each thread: setmaxnreg would wait forever for more.
_REGISTERS = {1: (40, 240), 2: (40, 232), 3: (32, 160)}
# The same where the producer reads a block map: with fewer it spills, and consumers wait for it.
_MAPPED_REGISTERS = {1: (40, 240), 2: (72, 216), 3: (80, 144)}
# Of a consumer, for addresses and state, besides S, P, O and Q.
_STATE_REGISTERS = 24
# More tiles of keys and values on their way brought nothing.
_MOST_STAGES = 8
_BARRIER_BYTES = 8
_VISIT_BYTES = 32
# What a visit holds besides of a packed or cached sequence, and what is noted of its last values.
_PLACE_BYTES = 24
_TAIL_BYTES = 8
_NOTE_BYTES = 8
# Of 64 rows and a block of up to so many keys, the pairs that a mask shows (`blocks/map.cuh`).
_SHOWN_BYTES, _SHOWN_KEYS = 1024, 128
# Tiles of a bias in shared memory.
_BIAS_STAGES = 2
# Of a query tile's scales of float8, which its visit has.
_SCALES_BYTES = 8
# Bytes of what the products take of a row of each operand in one step.
_STEP_BYTES = 32
# From so many keys on, and rows that share them, it is the faster one for float32. On an H100, to
# head_dim 128, 1.2 to 1.4 times as fast as `mma` at 512, causal at 64 1.2 times at 1024 (1.0 at
# 768); above, 1.4 times as fast as `simt` at 256, causal 1.0 to 1.2 times.
_FLOAT32_ROWS = 512
_NARROW_CAUSAL_FLOAT32_ROWS = 1024
_WIDE_FLOAT32_ROWS = 256
# Whose tiles are interleaved at most, where that is for more than their keys' sake.
_MOST_HEADS = 64

_PREPARE = "prepare"
_PREPARE_THREADS = 1024
# `SequenceOrder::scratch_words` of `grid/order.cuh`.
_PREPARE_WORDS = 256 + 32
_WORD_BYTES = 4


def _of_equal_sequences(problem: Problem) -> Problem:
    """The problem that a tile is chosen for: of packed sequences, as many of the longest."""
    layout = problem.layout
    if layout.is_equal:
        return problem
    if problem.is_batch_invariant:
        # Any will do that is the same for all batches and lengths.
        return dataclasses.replace(problem, batch=128, seqlen_q=8192, seqlen_k=8192)
    if not layout.packed_q:
        return problem
    return dataclasses.replace(problem, batch=ceil_div(layout.total_q, max(1, problem.seqlen_q)))


def _ranks(problem: Problem) -> int:
    """Thread blocks that a query tile is worked on by, each with a part of the columns."""
    return 1 if max(problem.head_dim, problem.head_dim_v) <= _MOST_COLUMNS else 2


def _holds_values_in_keys(problem: Problem) -> bool:
    """Whether a slot of the ring holds keys that are also their values."""
    return _ranks(problem) > 1 and latent.has_latent_tiles(problem)


def _columns(problem: Problem, dim: int) -> int:
    """Columns of each of these blocks, of a head's `dim`; the last may have fewer."""
    ranks = _ranks(problem)
    return dim if ranks == 1 else round_up(ceil_div(dim, ranks), 16)


def _k_steps(problem: Problem) -> int:
    """Products that one product of Q and K takes, of 16 columns each, of float8 32."""
    return ceil_div(_columns(problem, problem.head_dim), _STEP_BYTES // _operand_bytes(problem))


def _operand_bytes(problem: Problem) -> int:
    """Bytes of what the products take."""
    return 1 if problem.is_float8 else 2


def _least_float32_rows(problem: Problem) -> int:
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > 128:
        return _WIDE_FLOAT32_ROWS
    return _NARROW_CAUSAL_FLOAT32_ROWS if problem.causal and widest <= 64 else _FLOAT32_ROWS


def _slab_columns(columns: int, itemsize: int = 2) -> int:
    """Columns of one line of shared memory, which is also the swizzle's width."""
    return (128 if round_up(columns * itemsize, 64) % 128 == 0 else 64) // itemsize


class HopperFamily(Family[HopperTile]):
    """FlashAttention-3 with the blocks of all query tiles in one stream: wgmma and TMA."""

    name = "hopper"
    source = "forward/hopper.cu"
    tile_type = HopperTile
    arch_specific = True
    serves_sequences = True
    serves_float8 = True
    reads_block_maps = True

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        problem = _posed(problem)
        if problem.itemsize > 4:
            return f"its tensor-core products take float8, 16 bits or float32, not {problem.dtype}"
        if device.arch != 90:
            return f"needs sm_90 for wgmma, not {device.sm}"
        if not device.arch_specific:
            return "needs NVRTC 12.9 or newer: older ones compile for sm_90 alone when CuPy asks"
        if reason := why_not_scale(problem):
            return reason
        if problem.seqlen_k == 0:
            return "the copy engine cannot address arrays without keys"
        if reason := self._why_not_sequences(problem):
            return reason
        if problem.dtype == "float32":
            return self._why_not_float32(problem, device)
        if problem.is_float8:
            if reason := float8.why_not(problem):
                return reason
            return self._why_not_maps(problem, device)
        if _columns(problem, problem.head_dim_v) > _MOST_COLUMNS:
            return (
                f"two blocks write {2 * _MOST_COLUMNS} columns of a head's output at most, not "
                f"{problem.head_dim_v}"
            )
        if problem.alignment < STRIDE_UNIT:
            return (
                f"the copy engine needs rows that begin on {STRIDE_UNIT} bytes; these begin on "
                f"{problem.alignment}"
            )
        return self._why_not_maps(problem, device)

    def _why_not_maps(self, problem: Problem, device: Device) -> str | None:
        if reason := self._why_not_strides(problem):
            return reason
        if self._first_legal(problem, device) is None:
            return f"no tile of it fits {device.name}"
        return None

    def _why_not_float32(self, problem: Problem, device: Device) -> str | None:
        if not problem.layout.is_equal:
            return "it splits float32 of equal lengths only into what its products take"
        if problem.score is not None:
            return "it takes float32 without modifications only"
        if _ranks(problem) > 1:
            return f"it takes float32 to head_dim {_MOST_COLUMNS}"
        if problem.seqlen_k == 1:
            return "its float32 products do not give the only value as it is"
        if self._first_legal(problem, device) is None:
            return f"no tile of it fits {device.name}"
        return None

    def why_not_first(self, problem: Problem, device: Device) -> str | None:
        posed = _posed(problem)
        if posed is not problem:
            tile = self.default_tile(problem, device)
            return latent.why_not_first(posed, device, tile, self._tiles(posed, tile))
        if problem.dtype == "float32":
            return self._why_not_first_for_float32(problem, device)
        if problem.layout.is_equal:
            return None
        rows = problem.seqlen_q
        if rows < _LOWEST and problem.heads_q > problem.heads_kv:
            return (
                f"has tiles of one head and at least {_LOWEST} query rows, and here are {rows}; "
                "others have the heads of a group in one tile"
            )
        tile = self.default_tile(problem, device)
        tiles = self._tiles(_of_equal_sequences(problem), tile)
        if 2 * tiles * _ranks(problem) < device.sm_count:
            return (
                f"does not split the keys of sequences, and about {tiles} query tiles leave most "
                f"of {device.sm_count} SMs idle"
            )
        return None

    def _why_not_first_for_float32(self, problem: Problem, device: Device) -> str | None:
        rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
        least = _least_float32_rows(problem)
        if min(rows, problem.seqlen_k) < least:
            return (
                f"takes longer to split float32 than it saves below {least} keys, or rows that "
                "share them"
            )
        if pieces.are_broadcast(problem):
            return "writes the pieces of all keys, of which many are the same"
        tiles = self._tiles(problem, self.default_tile(problem, device))
        if 2 * tiles < device.sm_count:
            return (
                f"does not split the keys of float32, and {tiles} query tiles leave most of "
                f"{device.sm_count} SMs idle"
            )
        return None

    def _why_not_sequences(self, problem: Problem) -> str | None:
        layout = problem.layout
        if layout.is_equal:
            return None
        if layout.page_size:
            if not _holds_values_in_keys(problem):
                return "the copy engine brings rows that lie one behind the other, not pages"
            if layout.page_size % _FEWEST_KEYS:
                return f"a tile of keys is of one page, and {layout.page_size} rows are not enough"
        if not layout.packed_k and layout.caches + layout.pages == 0:
            return "the copy engine cannot address arrays without keys"
        if (layout.num_splits or 1) > 1 and not _holds_values_in_keys(problem):
            return "it splits the keys of sequences of equal length only"
        return None

    def _why_not_strides(self, problem: Problem) -> str | None:
        for spec in self.tensor_maps(problem, HopperTile(64, 16)).values():
            for length, stride in zip(spec.shape[1:], spec.strides, strict=True):
                if length > 1 and not 0 <= stride < MAX_STRIDE:
                    return f"the copy engine cannot step {stride} bytes"
        return None

    def candidates(self, problem: Problem, device: Device) -> Iterator[HopperTile]:
        problem = _posed(problem)
        steps = _k_steps(problem)
        for Br, Bc, q_stages, q_steps, turns in itertools.product(
            (64, 128, 192),
            range(_FEWEST_KEYS, 257, 16),
            (1, 2),
            sorted({0, 2, steps // 4, steps}),
            (0, 1),
        ):
            if turns and Br == 64:
                continue
            tile = dataclasses.replace(tile_of(Br, Bc, q_stages, q_steps), turns=turns)
            yield self._with_all_stages(problem, device, tile)

    def why_not_tile(self, problem: Problem, device: Device, tile: HopperTile) -> str | None:
        problem = _posed(problem)
        if tile.Br not in (64, 128, 192):
            return f"Br is {tile.Br}; expected 64, 128 or 192"
        if tile.Bc % 16 or not 16 <= tile.Bc <= 256:
            return f"Bc is {tile.Bc}; expected a multiple of 16 up to 256"
        if problem.layout.page_size % tile.Bc:
            return (
                f"Bc is {tile.Bc}; expected a divisor of a page's {problem.layout.page_size} rows"
            )
        if problem.is_float8 and (reason := float8.why_not_tile(problem, tile)):
            return reason
        if tile.stages < 2:
            return f"stages is {tile.stages}; expected at least 2"
        if tile.q_stages not in (1, 2):
            return f"q_stages is {tile.q_stages}; expected 1 or 2"
        if tile.q_steps and pieces.count(problem) > 1:
            return f"q_steps is {tile.q_steps}; expected 0 where queries come in pieces"
        if tile.q_steps and _holds_values_in_keys(problem):
            return f"q_steps is {tile.q_steps}; expected 0 where keys hold values"
        if tile.q_steps > _k_steps(problem):
            return f"q_steps is {tile.q_steps}; head_dim has {_k_steps(problem)}"
        if tile.turns not in (0, 1) or (tile.turns and tile.Br == 64):
            return f"turns is {tile.turns}; expected 0, or with more than one consumer 1"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        if self._tiles(problem, tile) > MAX_GRID:
            return f"has {self._tiles(problem, tile)} query tiles; {MAX_GRID} can be counted"
        need = self._registers(problem, tile)
        _, most = self._register_split(problem, tile)
        if need > most:
            return f"needs about {need} registers per thread; {most} are left to it"
        return None

    def _registers(self, problem: Problem, tile: HopperTile) -> int:
        """An estimate from below: S, P, O and Q, and what else lives in the main loop."""
        if problem.is_float8:
            return float8.registers(problem, tile)
        factor = pieces.count(problem)
        output = pieces.output_registers(problem, _columns(problem, problem.head_dim_v))
        scores = tile.Bc // 2 + tile.Bc // 4 * (2 if _streams_bias(problem) else factor)
        return scores + output + 4 * tile.q_steps + _STATE_REGISTERS

    def _overlaps_output(self, problem: Problem, tile: HopperTile) -> bool:
        """Whether consumers take exponentials while their own output is multiplied.

        It takes registers for P of two blocks. Three consumers do not have them, and have two
        others to fill the tensor cores meanwhile.
        """
        if problem.is_float8:
            return False
        _, most = self._register_split(problem, tile)
        need = self._registers(problem, tile) + tile.Bc // 4 * pieces.count(problem)
        # Where slots hold keys and values, leaving one early is worth more.
        return tile.Br < 192 and need <= most and not _holds_values_in_keys(problem)

    def _register_split(self, problem: Problem, tile: HopperTile) -> tuple[int, int]:
        split = _MAPPED_REGISTERS if self.is_mapped(problem) else _REGISTERS
        return split[tile.Br // _LOWEST]

    def default_tile(self, problem: Problem, device: Device) -> HopperTile:
        tile = self._first_legal(_posed(problem), device)
        assert tile is not None, "asked only where why_not() has no reason"
        return tile

    def _first_legal(self, problem: Problem, device: Device) -> HopperTile | None:
        equal = _of_equal_sequences(problem)
        preferred = (
            self._with_all_stages(
                problem,
                device,
                dataclasses.replace(tile, q_steps=min(tile.q_steps, _k_steps(problem))),
            )
            for tile in preferred_tiles(equal, device, _streams_bias(equal))
        )
        tiles = itertools.chain(preferred, self.candidates(problem, device))
        return next((t for t in tiles if self.why_not_tile(problem, device, t) is None), None)

    def _with_all_stages(self, problem: Problem, device: Device, tile: HopperTile) -> HopperTile:
        """The tile with as many stages as shared memory has place for."""
        candidates = (dataclasses.replace(tile, stages=n) for n in range(_MOST_STAGES, 0, -1))
        most = device.shared_memory_per_block
        fitting = (t for t in candidates if self.shared_memory(problem, t) <= most)
        return next(fitting, dataclasses.replace(tile, stages=0))

    def shared_memory(self, problem: Problem, tile: HopperTile) -> int:
        problem = _posed(problem)
        queries = tile.Br * _row_bytes(problem, problem.head_dim)
        stage = max(tile.Bc * _row_bytes(problem, problem.head_dim), _value_bytes(problem, tile))
        # A slot has two barriers; a visit is kept for each query tile, for one whose output is
        # being written, and for one whose queries are no longer needed.
        scales = _SCALES_BYTES if problem.is_float8 else 0
        visits = (tile.q_stages + 2) * (_VISIT_BYTES + scales)
        total = (
            tile.q_stages * (queries + 2 * _BARRIER_BYTES)
            + tile.stages * (stage + 2 * _BARRIER_BYTES)
            + visits
        )
        if _is_noted(problem, tile):
            total += tile.stages * _NOTE_BYTES
        if self.is_mapped(problem):
            blocks = (tile.stages // 2 + 1) * (tile.Br // _LOWEST)
            total += blocks * _SHOWN_BYTES * ceil_div(tile.Bc, _SHOWN_KEYS)
        if _streams_bias(problem):
            bias = tile.Br * round_up(tile.Bc, 32) * problem.itemsize
            total += _BIAS_STAGES * (bias + 2 * _BARRIER_BYTES)
        if _ranks(problem) > 1:
            scores = tile.Br * tile.Bc * _SCORE_BYTES
            # A barrier for each warp of the consumers.
            is_latent = _holds_values_in_keys(problem)
            buffers = _LATENT_PAIR_BUFFERS if is_latent else _PAIR_BUFFERS
            total += buffers * scores + 2 * (tile.Br // 16 * _BARRIER_BYTES)
        if problem.layout.is_equal:
            return total
        # Two visits more, all with their places, and two barriers for them; a note and a barrier
        # for the last values of a sequence in each slot, and for the end.
        return (
            total
            + (tile.q_stages + 4) * _PLACE_BYTES
            + 2 * _VISIT_BYTES
            + 2 * _BARRIER_BYTES
            + (tile.stages + 1) * (_BARRIER_BYTES + _TAIL_BYTES)
        )

    def tile_note(self, problem: Problem, tile: HopperTile) -> str:
        block = problem.score.block if problem.score is not None else None
        if block is None or not self.is_mapped(problem):
            return ""
        looked_at = "so pairs are looked at along their edges"
        if block[0] % _LOWEST or block[1] % tile.Bc:
            return (
                f"; blocks of {block[0]} x {block[1]} are no multiples of {_LOWEST} rows and of "
                f"the tile's {tile.Bc} keys, {looked_at}"
            )
        if math.gcd(problem.q_offset, _LOWEST) < _LOWEST:
            return (
                f"; queries begin at key {problem.q_offset}, no multiple of {_LOWEST}, and blocks "
                f"of rows at key 0, {looked_at}"
            )
        return ""

    def map_parts(self, tile: HopperTile) -> int:
        return tile.Br // _LOWEST

    def threads(self, tile: HopperTile) -> int:
        return _WARPGROUP * (tile.Br // 64 + 1)

    def schedule(self, problem: Problem, device: Device, tile: HopperTile) -> Schedule:
        given, problem = problem, _posed(problem)
        maps = self.tensor_maps(problem, tile)
        if not problem.layout.is_equal:
            is_latent = _holds_values_in_keys(problem)
            cut = latent.split_of(problem, device, tile) if is_latent else WHOLE
            main = self._main(problem, device, tile, cut)
            # The sequences' order (`grid/order.cuh`), made by a kernel before or by each block.
            order = (2 * problem.batch + 2) * _WORD_BYTES
            launches: tuple[Launch, ...] = (_prepare(), main)
            if _ranks(problem) > 1:
                launches, order = (main,), order * math.prod(main.grid)
            return Schedule(
                launches + split.combine_launches(problem, cut),
                cut,
                workspace=split.workspace(problem, cut) + order,
                # At least; the kernel takes more for a short causal sequence.
                section_heads=problem.heads_q // problem.heads_kv,
                tensor_maps=maps,
                params=latent.changed_params(given, problem),
            )
        if pieces.count(problem) > 1:
            workspace, parts = pieces.workspace(problem)
            return Schedule(
                (pieces.launch(device), self._main(problem, device, tile, WHOLE)),
                workspace=workspace,
                section_heads=self._section_heads(problem, device, tile),
                tensor_maps=maps,
                parts=parts,
            )
        if problem.is_float8:
            return Schedule(
                (float8.launch(device), self._main(problem, device, tile, WHOLE)),
                workspace=float8.workspace(problem),
                section_heads=self._section_heads(problem, device, tile),
                tensor_maps=maps,
                parts={float8.VALUES: 0},
            )
        cut = split.choose(
            problem,
            device,
            q_tiles=ceil_div(problem.seqlen_q, tile.Br) * _ranks(problem),
            key_tiles=ceil_div(problem.seqlen_k, tile.Bc),
            blocks_per_sm=1,
        )
        main = self._main(problem, device, tile, cut)
        return Schedule(
            (main, *split.combine_launches(problem, cut)),
            cut,
            workspace=split.workspace(problem, cut),
            section_heads=self._section_heads(problem, device, tile),
            tensor_maps=maps,
        )

    def _section_heads(self, problem: Problem, device: Device, tile: HopperTile) -> int:
        # With a block map tiles come by their size: the more of a size, the evener the shares. A
        # bias that heads share stays in L2 while they work on the same rows.
        shares_bias = _streams_bias(problem) and not _bias_strides(problem)[2]
        if self.is_mapped(problem) or shares_bias:
            return min(problem.batch * problem.heads_q, _MOST_HEADS)
        blocks = device.sm_count // _ranks(problem)
        return persistent.section_heads(problem, blocks=blocks, Br=tile.Br, Bc=tile.Bc)

    def _main(self, problem: Problem, device: Device, tile: HopperTile, cut: Split) -> Launch:
        ranks = _ranks(problem)
        blocks = min(self._tiles(problem, tile) * cut.parts, device.sm_count // ranks)
        return Launch(
            MAIN_ENTRY,
            "hopper_forward",
            (blocks, 1, ranks),
            self.threads(tile),
            self.shared_memory(problem, tile),
            min_blocks=1,
            cluster=ranks if ranks > 1 else 0,
            arguments=(_maps_of(problem), "float8_params" if problem.is_float8 else "params"),
        )

    def _tiles(self, problem: Problem, tile: HopperTile) -> int:
        return ceil_div(problem.seqlen_q, tile.Br) * problem.batch * problem.heads_q

    def tensor_maps(self, problem: Problem, tile: HopperTile) -> dict[str, TensorMapSpec]:
        """Of q, k and v."""
        p = _posed(problem)
        rows_q, batch_q, rows_k, batch_k = p.seqlen_q, p.batch, p.seqlen_k, p.batch
        if not p.layout.is_equal:
            if p.layout.packed_q:
                rows_q, batch_q = p.layout.total_q, 1
            if p.layout.packed_k:
                rows_k, batch_k = p.layout.total_k, 1
            elif p.layout.page_size:
                rows_k, batch_k = p.layout.page_size, p.layout.pages
            else:
                batch_k = p.layout.caches
        if pieces.count(p) > 1:
            rows = {"q": tile.Br, "k": tile.Bc, "v": tile.Bc}
            dims = {"q": p.head_dim, "k": p.head_dim, "v": p.head_dim_v}
            boxes = {name: (_slab_columns(dims[name]), rows[name]) for name in pieces.ROWS}
            return pieces.tensor_maps(p, boxes)
        if p.is_float8:
            columns = float8.value_rows(p, tile)
            return {
                "q": _spec(p, "q", (p.head_dim, rows_q, p.heads_q, batch_q), tile.Br),
                "k": _spec(p, "k", (p.head_dim, rows_k, p.heads_kv, batch_k), tile.Bc),
                float8.VALUES: float8.tensor_map(p, (_slab_columns(tile.Bc, 1), columns)),
            }
        maps = {
            "q": _spec(p, "q", (p.head_dim, rows_q, p.heads_q, batch_q), tile.Br),
            "k": _spec(p, "k", (p.head_dim, rows_k, p.heads_kv, batch_k), tile.Bc),
            "v": _spec(p, "v", (p.head_dim_v, rows_k, p.heads_kv, batch_k), tile.Bc),
        }
        if _holds_values_in_keys(p):
            # Lines of the values, and of the others.
            line, rest = (_slab_columns(n // 2) for n in (p.head_dim_v, p.head_dim - p.head_dim_v))
            for name, height in (("q", tile.Br), ("k", tile.Bc)):
                spec = maps[name]
                maps[name] = dataclasses.replace(spec, box=(line, height))
                maps[f"{name}_rest"] = dataclasses.replace(spec, box=(rest, height), array=name)
        if _streams_bias(p):
            scores = (p.seqlen_k, p.seqlen_q, p.heads_q, p.batch)
            box = (_slab_columns(tile.Bc), tile.Br)
            maps["bias"] = _map_spec(p, scores, _bias_strides(p), box)
        return maps

    def unit(self, problem: Problem, tile: HopperTile, schedule: Schedule) -> TranslationUnit:
        return super().unit(_posed(problem), tile, schedule)

    def config(self, problem: Problem, tile: HopperTile, split: Split) -> dict[str, int | bool]:
        producer_registers, consumer_registers = self._register_split(problem, tile)
        return {
            "Br": tile.Br,
            "Bc": tile.Bc,
            "stages": tile.stages,
            "q_stages": tile.q_stages,
            "turns": bool(tile.turns),
            "overlaps_output": self._overlaps_output(problem, tile),
            "q_steps": tile.q_steps,
            "producer_registers": producer_registers,
            "consumer_registers": consumer_registers,
            "sequences": not problem.layout.is_equal,
            "page_size": problem.layout.page_size,
            "values_in_keys": _holds_values_in_keys(problem),
            "noted": _is_noted(problem, tile),
            "bounded": _is_bounded(problem),
            "bias_stages": _BIAS_STAGES if _streams_bias(problem) else 0,
            "shared_memory": self.shared_memory(problem, tile),
            **(float8.config(problem, tile) if problem.is_float8 else {}),
        }


def _prepare() -> Launch:
    """What makes the order of the sequences, ahead of the kernel that takes them in it."""
    words = _PREPARE_WORDS * _WORD_BYTES
    return Launch(_PREPARE, "hopper_prepare", (1, 1, 1), _PREPARE_THREADS, words)


def _posed(problem: Problem) -> Problem:
    """The problem as the kernels have it."""
    return latent.posed(problem) if _holds_values_in_keys(problem) else problem


def _row_bytes(problem: Problem, columns: int) -> int:
    """Of a row in shared memory, all pieces."""
    bytes_of_row = _columns(problem, columns) * _operand_bytes(problem)
    return round_up(bytes_of_row, 64) * pieces.count(problem)


def _value_bytes(problem: Problem, tile: HopperTile) -> int:
    """Of a tile of values, which of float8 has columns as rows."""
    if problem.is_float8:
        return float8.value_rows(problem, tile) * _row_bytes(problem, tile.Bc)
    return tile.Bc * _row_bytes(problem, problem.head_dim_v)


def _streams_bias(problem: Problem) -> bool:
    """Whether the copy engine brings a bias beside the keys."""
    score = problem.score
    bias = score.bias if score is not None else None
    if bias is None or bias.dtype != problem.dtype or bias.alignment < STRIDE_UNIT:
        return False
    if not problem.layout.is_equal or problem.seqlen_k == 0 or _has_edges(problem):
        return False
    most = MAX_STRIDE // problem.itemsize
    return all(0 <= stride < most for stride in bias.strides)


def _maps_of(problem: Problem) -> str:
    """Which tensor maps the kernel is given."""
    if _holds_values_in_keys(problem):
        return "latent_maps"
    return "biased_maps" if _streams_bias(problem) else "maps"


def _has_edges(problem: Problem) -> bool:
    """Whether tiles of keys are left out on both sides, by a window or a block map."""
    score = problem.score
    if score is None:
        return False
    is_mapped = score.may_be_mapped and problem.layout.is_equal and problem.seqlen_k > 0
    return score.left is not None or score.right is not None or is_mapped


def _is_noted(problem: Problem, tile: HopperTile) -> bool:
    """Whether consumers leave out blocks of which their own 64 rows see nothing.

    It takes 2% of a window's time, and blocks no smaller than the tile leave nothing out. With
    causality alone it loses 1 to 3%, as those are two blocks of a query tile at most.
    """
    score = problem.score
    if score is None or not _has_edges(problem):
        return False
    return score.may_be_mapped or tile.Br > max(_LOWEST, tile.Bc)


def _is_bounded(problem: Problem) -> bool:
    """Whether p = exp(score) can be taken as it is: bfloat16 has the exponents for it.

    The consumers then take turns at the softmax. Wider heads, whose products are longer, were not
    measured.
    """
    if problem.dtype != "bfloat16" or max(problem.head_dim, problem.head_dim_v) > 128:
        return False
    return problem.score is not None and problem.score.is_bounded


def _bias_strides(problem: Problem) -> tuple[int, int, int]:
    """Of batch, row and head of a bias that there is, in elements."""
    score = problem.score
    assert score is not None
    assert score.bias is not None
    batch, head, row = score.bias.strides
    return batch, row, head


def _spec(problem: Problem, name: str, shape: Shape, rows: int) -> TensorMapSpec:
    columns = _slab_columns(_columns(problem, shape[0]), _operand_bytes(problem))
    return _map_spec(problem, shape, problem.tensors[name].strides, (columns, rows))


def _map_spec(
    problem: Problem, shape: Shape, strides: tuple[int, int, int], box: tuple[int, int]
) -> TensorMapSpec:
    """Of an array of the problem's dtype, with strides of batch, row and head in elements."""
    batch_stride, row_stride, head_stride = (s * problem.itemsize for s in strides)
    steps = (row_stride, head_stride, batch_stride)
    # Where there is nothing to step to, any stride that the driver takes will do.
    row, head, batch = (
        step if length > 1 else STRIDE_UNIT for length, step in zip(shape[1:], steps, strict=True)
    )
    return TensorMapSpec(problem.dtype, shape, (row, head, batch), box)
