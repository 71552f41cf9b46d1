"""Kernels that need scores but no output on Hopper (sm_90a).

`kernels_cu/received/hopper.cu` sums attention weights over queries, and
`kernels_cu/received/hopper_lse.cu` computes the log-sum-exp of a forward pass whose output is not
needed. Both multiply one tile of rows by many others, `kernels_cu/received/hopper/`.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cupy_flash.families import received_common
from cupy_flash.families.contract import (
    MAX_GRID,
    Family,
    ceil_div,
    heads_in_l2,
    round_up,
    tile_members,
    why_not_dropout,
    why_not_scale,
    why_not_shared_memory,
)
from cupy_flash.families.hopper.block import (
    BARRIER_BYTES,
    REGISTERS,
    WARPGROUP,
    WARPGROUP_ROWS,
    most_stages,
    why_not_device,
)
from cupy_flash.families.hopper.persistent import section_heads
from cupy_flash.families.hopper.tensor_maps import (
    box_columns,
    map_spec,
    why_not_rows,
    why_not_strides,
)
from cupy_flash.families.schedule import (
    MAIN_ENTRY,
    Launch,
    Schedule,
    Split,
    TensorMapSpec,
)
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import Tile

# Number of registers of a consumer thread for addresses, sums, masks and exponentials.
_STATE_REGISTERS = 40
# Time of a work item of 256 and of 128 rows, relative to the former. 128 rows keep both the tensor
# cores and the unit for exponentials less busy (`docs/engineering/measurements/scores.md`).
_TIME_OF_ITEM = {256: 1.0, 128: 0.69}
_MAX_COLUMNS = 256
_MAX_STAGES = 4
_WORD = 4


@dataclass(frozen=True)
class HopperScoreTile(Tile):
    """Tile of kernels that need scores only.

    A work item has 64, 128, 192 or 256 rows of one operand, and goes through tiles of the other
    operand.

    Attributes
    ----------
    stages
        Number of tiles of the other operand in shared memory.
    left_stages
        Number of work items whose rows are in shared memory.
    """

    stages: int = 2
    left_stages: int = 1


class _HopperScoreFamily(Family[HopperScoreTile]):
    tile_type = HopperScoreTile
    arch_specific = True
    serves_sequences = True
    # Names of the operand that stays for a work item, and of the tile field with its rows.
    left: str
    left_rows: str
    right_rows: str
    # Whether each row of the other operand has a number.
    has_numbers: bool

    @abstractmethod
    def _why_not_call(self, problem: Problem) -> str | None:
        """Return why the family does not serve the modifications and the layout of a problem."""

    def _why_not(self, problem: Problem, device: Device) -> str | None:
        if problem.itemsize != 2:
            return f"its tensor-core products take float16 or bfloat16, not {problem.dtype}"
        if problem.layout.kind not in ("dense", "padded"):
            return "does not serve packed sequences and caches"
        if reason := why_not_device(device) or self._why_not_call(problem):
            return reason
        if reason := why_not_scale(problem) or why_not_rows(problem):
            return reason
        if problem.head_dim > _MAX_COLUMNS:
            return f"its tiles hold at most {_MAX_COLUMNS} columns, not {problem.head_dim}"
        if problem.seqlen_k == 0:
            return "TMA cannot address arrays without keys"
        if reason := why_not_strides(
            problem, lambda: self._tensor_maps(problem, HopperScoreTile(64, 64))
        ):
            return reason
        if self._first_legal(problem, device) is None:
            return f"none of its tiles fits {device.name}"
        return None

    def _rows(self, tile: HopperScoreTile) -> tuple[int, int]:
        """Return the rows of the operand that stays, and of a tile of the other one."""
        return getattr(tile, self.left_rows), getattr(tile, self.right_rows)

    def candidates(self, problem: Problem, device: Device) -> Iterator[HopperScoreTile]:
        for left, right in itertools.product((256, 128, 192, 64), range(128, 15, -16)):
            sizes = {self.left_rows: left, self.right_rows: right}
            yield self._with_all_stages(problem, device, HopperScoreTile(**sizes))

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[HopperScoreTile]:
        right = 128 if problem.head_dim <= 128 else 64

        def tile(left: int) -> HopperScoreTile:
            sizes = {self.left_rows: left, self.right_rows: right}
            return self._with_all_stages(problem, device, HopperScoreTile(**sizes))

        def time(left: int) -> float:
            return ceil_div(self._items(problem, tile(left)), device.sm_count) * _TIME_OF_ITEM[left]

        best = tile(min(_TIME_OF_ITEM, key=time))
        return itertools.chain((best,), self.candidates(problem, device))

    def _with_all_stages(
        self, problem: Problem, device: Device, tile: HopperScoreTile
    ) -> HopperScoreTile:
        """Return the tile with as many stages as shared memory has space for.

        Rows of a second work item come before a third stage.
        """
        numbers = [(n, 2) for n in range(_MAX_STAGES, 1, -1)]
        numbers += [(n, 1) for n in range(_MAX_STAGES, 0, -1)]
        tiles = (
            dataclasses.replace(tile, stages=stages, left_stages=left) for stages, left in numbers
        )
        return most_stages(device, tiles, lambda each: self.shared_memory(problem, each))

    def why_not_tile(self, problem: Problem, device: Device, tile: HopperScoreTile) -> str | None:
        left, right = self._rows(tile)
        if left not in (64, 128, 192, 256):
            return f"{self.left_rows} is {left}; expected 64, 128, 192 or 256"
        if right % 16 or not 16 <= right <= 256:
            return f"{self.right_rows} is {right}; expected a multiple of 16 up to 256"
        if min(tile.stages, tile.left_stages) < 1:
            return "stages and left_stages must be positive"
        if reason := why_not_shared_memory(device, self.shared_memory(problem, tile)):
            return reason
        need = right // 2 + _STATE_REGISTERS
        _, most = REGISTERS[left // WARPGROUP_ROWS]
        if need > most:
            return f"needs about {need} registers per thread; {most} are available"
        if (items := self._items(problem, tile)) > MAX_GRID:
            return f"has {items} work items; expected at most {MAX_GRID}"
        return None

    def _items(self, problem: Problem, tile: HopperScoreTile) -> int:
        heads = problem.heads_kv if problem.received == "groups" else problem.heads_q
        rows = problem.seqlen_q if self.left == "q" else problem.seqlen_k
        return ceil_div(rows, self._rows(tile)[0]) * problem.batch * heads

    def shared_memory(self, problem: Problem, tile: HopperScoreTile) -> int:
        left, right = self._rows(tile)
        row = 2 * round_up(problem.head_dim, 32)
        stage = right * (row + _WORD * self.has_numbers) + 2 * BARRIER_BYTES
        return tile.left_stages * (left * row + 2 * BARRIER_BYTES) + tile.stages * stage

    def schedule(self, problem: Problem, device: Device, tile: HopperScoreTile) -> Schedule:
        argument = "received" if problem.received else "params"
        left, right = self._rows(tile)
        blocks = max(1, min(self._items(problem, tile), device.sm_count))
        main = Launch(
            MAIN_ENTRY,
            f"hopper_{problem.direction}",
            (blocks, 1, 1),
            WARPGROUP * (left // WARPGROUP_ROWS + 1),
            self.shared_memory(problem, tile),
            min_blocks=1,
            arguments=("score_maps", argument),
        )
        return Schedule(
            (main,),
            section_heads=self._section_heads(problem, device, blocks, left, right),
            tensor_maps=self._tensor_maps(problem, tile),
        )

    def _section_heads(
        self, problem: Problem, device: Device, blocks: int, left: int, right: int
    ) -> int:
        """Return the number of query heads to interleave.

        With a causal mask, it balances the work of the thread blocks. Work items of KV tiles are
        counted like query tiles, as if there were as many queries as keys.
        """
        if not problem.causal:
            return heads_in_l2(problem, device)
        # A work item of grouped sums goes through all query heads of its KV head.
        group = problem.heads_q // problem.heads_kv if problem.received == "groups" else 1
        of_items = dataclasses.replace(problem, heads_q=problem.heads_q // group)
        return group * section_heads(of_items, blocks=blocks, Br=left, Bc=right)

    def _tensor_maps(self, problem: Problem, tile: HopperScoreTile) -> dict[str, TensorMapSpec]:
        p, (left, right) = problem, self._rows(tile)
        columns = box_columns(p.head_dim)
        sizes = {"q": (p.seqlen_q, p.heads_q), "k": (p.seqlen_k, p.heads_kv)}
        return {
            name: map_spec(
                p,
                (p.head_dim, *sizes[name], p.batch),
                p.tensors[name].strides,
                (columns, left if name == self.left else right),
            )
            for name in ("q", "k")
        }

    def config(
        self, problem: Problem, tile: HopperScoreTile, split: Split
    ) -> dict[str, int | bool]:
        producer, consumer = REGISTERS[self._rows(tile)[0] // WARPGROUP_ROWS]
        return {
            **tile_members(tile, "Br Bc stages left_stages"),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "shared_memory": self.shared_memory(problem, tile),
        } | received_common.config(problem)


class HopperReceivedFamily(_HopperScoreFamily):
    """Sums of weights by one product, with a work item for each KV tile."""

    name = "hopper"
    source = "received/hopper.cu"
    left, left_rows, right_rows, has_numbers = "k", "Bc", "Br", True

    def _why_not_call(self, problem: Problem) -> str | None:
        return why_not_dropout(problem)


class HopperLseFamily(_HopperScoreFamily):
    """Log-sum-exp of a forward pass by one product, with a work item for each query tile."""

    name = "hopper_lse"
    source = "received/hopper_lse.cu"
    left, left_rows, right_rows, has_numbers = "q", "Br", "Bc", False

    def _why_not_call(self, problem: Problem) -> str | None:
        if problem.score is not None:
            return "does not serve modifications"
        if problem.statistics:
            return "computes no row statistics"
        return None

    def why_not_first(self, problem: Problem, device: Device) -> str | None:
        items = self._items(problem, self.default_tile(problem, device))
        if 2 * items >= device.sm_count and problem.seqlen_q > WARPGROUP_ROWS:
            return None
        return (
            f"does not split the keys, and {items} query tiles leave SMs of {device.name} idle or "
            "have few rows"
        )
