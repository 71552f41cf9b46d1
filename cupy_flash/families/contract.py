"""Interface of a kernel family, which is one `.cu` file and one subclass of `Family`."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from cupy_flash.families.params import layout_assertions
from cupy_flash.families.schedule import Schedule, Split, main_of
from cupy_flash.families.tokens import token_stream
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import STATISTICS, Problem
from cupy_flash.problem.tile import Tile

_PACKAGE = Path(__file__).resolve().parent.parent
# A wheel has the kernels inside the package, a checkout next to it.
KERNEL_DIR = next(
    (path for path in (_PACKAGE / "kernels_cu", _PACKAGE.parent / "kernels_cu") if path.is_dir()),
    _PACKAGE / "kernels_cu",
)

# Largest number of thread blocks in a launch, and along the second axis of its grid.
MAX_GRID = 2**31 - 1
MAX_GRID_Y = 2**16 - 1
# Largest number of registers of a thread: an instruction can address no more.
MAX_REGISTERS = 255

# First lines of a unit with modifications. They add fields to the argument struct.
_MOD_HEADERS = (
    "#define CUPY_FLASH_MODIFIED",
    '#include "score/capture.cuh"',
    '#include "score/functions.cuh"',
)

# Line of a unit whose kernels write row statistics. It adds fields to the argument struct.
_STATISTICS_HEADER = "#define CUPY_FLASH_STATISTICS"

ELEMENT_TYPES = {
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "float64": "double",
}
# The oldest architecture that has instructions for float8 conversion.
FLOAT8_ARCH = 89
# C++ types of the elements of 8-bit KV caches.
STORED_TYPES = {"float8_e4m3fn": "float8_e4m3_t", "int8": "signed_byte_t"}


@dataclass(frozen=True)
class TranslationUnit:
    """Source text of one compilation: it includes a `.cu` file and defines a `Config`.

    Attributes
    ----------
    text
        CUDA C++ that includes the family's file and defines the entries.
    entries
        Names of the ``extern "C"`` kernels, in launch order.
    title
        Description for people: family, dtype, head dims, tile.
    arch_specific
        Whether the code runs on one architecture only, compiled for a target such as ``sm_90a``.
    """

    text: str
    entries: tuple[str, ...]
    title: str
    arch_specific: bool = False

    @property
    def main_entry(self) -> str:
        """Name of the main kernel (see `main_of`)."""
        return main_of(self.entries)

    def target(self, device: Device) -> str:
        """Return the compiler's name of the architecture to compile for."""
        return device.sm + "a" * self.arch_specific


class QueryTileLists(NamedTuple):
    """Lists of query tiles in a block mask for the backward pass: one list for each KV tile.

    Attributes
    ----------
    group
        Number of query heads of a KV head, which use the same lists.
    stores_pairs
        Whether the block mask also stores the visible pairs of entries that are not full.
    """

    group: int
    stores_pairs: bool


TileT = TypeVar("TileT", bound=Tile)
FamilyT = TypeVar("FamilyT")
OtherT = TypeVar("OtherT")
ResultT = TypeVar("ResultT")


def remembers_last(
    method: Callable[[FamilyT, Problem, OtherT], ResultT],
) -> Callable[[FamilyT, Problem, OtherT], ResultT]:
    """Cache a method's last result, as planning calls it several times with the same arguments.

    Arguments are compared by identity, because the hash of a problem takes microseconds.
    """
    attribute = f"_last_{method.__name__}"

    @functools.wraps(method)
    def remembering(self: FamilyT, problem: Problem, other: OtherT) -> ResultT:
        result: tuple[Problem, OtherT, ResultT] | None = vars(self).get(attribute)
        if result is None or result[0] is not problem or result[1] is not other:
            result = problem, other, method(self, problem, other)
            setattr(self, attribute, result)
        return result[2]

    return remembering


class Family(ABC, Generic[TileT]):
    """Base class of kernel families, which do arithmetic on records and use no arrays and no GPU.

    A kernel receives a `Params` (`kernels_cu/params.cuh`) and a `Config` with the members that
    `unit` writes. seqlen_k may be 0. The output of a fully masked row is 0 and its lse -inf. lse is
    float32 (float64 for float64 inputs) or null. A problem without query rows is never launched.
    """

    name: str
    source: str
    tile_type: type[TileT]
    # Whether the planner may choose the family for a call that names none.
    automatic: bool = True
    # Whether the code runs on one architecture only (see `TranslationUnit`).
    arch_specific: bool = False
    # Whether the kernels support sequences that are packed, in a KV cache, paged or padded.
    serves_sequences: bool = False
    # Whether the kernels read 8-bit KV caches.
    serves_quantized: bool = False
    # Whether the kernels take float8 q, k and v.
    serves_float8: bool = False
    # Whether the kernels can skip the KV tiles that a block mask marks as fully masked.
    reads_block_masks: bool = False
    # Whether the family is acceptable for any number of query rows. The planner chooses only such
    # families for batch-invariant problems.
    serves_any_rows: bool = False

    def why_not(self, problem: Problem, device: Device) -> str | None:
        """Return why the family cannot serve the problem on the device, or None if it can."""
        if not problem.layout.is_dense and not self.serves_sequences:
            return "supports only batches of equal lengths, without packing, caches or padding"
        if problem.is_float8:
            if not self.serves_float8:
                return f"does not support q, k and v of {problem.dtype}"
        elif problem.scales is not None and not self.serves_quantized:
            return "does not support 8-bit keys and values"
        return self._why_not(problem, device)

    def uses_block_mask(self, problem: Problem, tile: TileT) -> bool:
        """Return whether the kernels of a tile read a block mask of the problem."""
        return self.reads_block_masks and may_have_block_mask(problem)

    def query_tile_lists(self, problem: Problem, tile: TileT) -> QueryTileLists | None:
        """Return the lists of query tiles that a block mask has for the kernels, or None."""
        return None

    def tile_note(self, problem: Problem, tile: TileT) -> str:
        """Return text that a plan appends to the reason why a tile was chosen; may be empty."""
        return ""

    def row_groups(self, tile: TileT) -> int:
        """Return the number of equal parts of a query tile that skip KV tiles independently."""
        return 1

    @abstractmethod
    def _why_not(self, problem: Problem, device: Device) -> str | None:
        """Return the reason for `why_not`, once it has checked the layout and the dtype."""

    def suits_rows(self, problem: Problem) -> bool:
        """Return whether the family can be the best choice for this number of query rows.

        If not, `why_not_first` returns a reason. The method accepts any problem, served or not.
        """
        return True

    def why_not_first(self, problem: Problem, device: Device) -> str | None:
        """Return why another family that also serves the problem is the better choice, or None.

        The planner does not call this for batch-invariant problems (see `serves_any_rows`).
        """
        return None

    @abstractmethod
    def candidates(self, problem: Problem, device: Device) -> Iterator[TileT]:
        """Yield every tile of the family's search space for this problem, legal or not."""

    @abstractmethod
    def why_not_tile(self, problem: Problem, device: Device, tile: TileT) -> str | None:
        """Return why a tile cannot be launched, by resource arithmetic, or None if it can."""

    def preferred_tiles(self, problem: Problem, device: Device) -> Iterable[TileT]:
        """Return tiles from the best to the worst; the first legal one is the default tile."""
        return self.candidates(problem, device)

    def default_tile(self, problem: Problem, device: Device) -> TileT:
        """Return the tile to use if the tuned table has none for the problem."""
        tile = self._first_legal(problem, device)
        assert tile is not None, "why_not() accepts the problem"
        return tile

    @remembers_last
    def _first_legal(self, problem: Problem, device: Device) -> TileT | None:
        tiles = self.preferred_tiles(problem, device)
        return next((t for t in tiles if self.why_not_tile(problem, device, t) is None), None)

    @abstractmethod
    def shared_memory(self, problem: Problem, tile: TileT) -> int:
        """Return the dynamic shared memory of a thread block of the main kernel, in bytes."""

    @abstractmethod
    def schedule(self, problem: Problem, device: Device, tile: TileT) -> Schedule:
        """Return the kernel launches and the device memory that they need."""

    @abstractmethod
    def config(self, problem: Problem, tile: TileT, split: Split) -> dict[str, int | bool]:
        """Return the members of the `Config` struct that are specific to the family."""

    def tiles(self, problem: Problem, device: Device) -> Iterator[TileT]:
        """Yield every legal tile."""
        for tile in self.candidates(problem, device):
            if self.why_not_tile(problem, device, tile) is None:
                yield tile

    def unit(self, problem: Problem, tile: TileT, schedule: Schedule) -> TranslationUnit:
        """Return the translation unit of one tile."""
        split = schedule.split
        members = {
            "head_dim": problem.head_dim,
            "head_dim_v": problem.head_dim_v,
            "causal": problem.causal,
            "score_sign": problem.score_factor[0][0],
            "score_shift": problem.score_factor[0][1],
            "alignment": problem.alignment,
            "out_alignment": problem.out_alignment,
            "split_keys": split.kind == "fixed",
        }
        members |= self.config(problem, tile, split)
        score = problem.score
        members |= score_config(problem)
        members |= {name: name in problem.statistics for name in STATISTICS}
        members["block_mask"] = self.uses_block_mask(problem, tile)
        types = {
            "Element": _element_type(problem),
            "Mods": "NoMods" if score is None else "::Mods",
        }
        if problem.scales is not None and not problem.is_float8:
            types["CacheElement"] = STORED_TYPES[problem.tensors["k"].dtype]
        gradient = problem.gradient
        if gradient is not None:
            types["Gradient"] = ELEMENT_TYPES[gradient.dtype]
            members["has_dlse"] = gradient.dlse
            members["splits_queries"] = "kv_sums" in schedule.workspace_offsets
            members["orders_sequences"] = "packed_tiles" in schedule.workspace_offsets
        # `_written` caches units: writing one takes 0.05 ms, and new lengths rarely need a new one.
        return _written(
            self.arch_specific,
            f"// cupy_flash {self.name}, sources {self.digest()}",
            (_STATISTICS_HEADER,) * bool(problem.statistics)
            + (() if score is None else (*_MOD_HEADERS, score.cuda_source)),
            (f'#include "{self.source}"', *_other_sources(schedule)),
            layout_assertions(problem),
            tuple(types.items()),
            tuple(members.items()),
            tuple([launch.definition() for launch in schedule.launches]),
            tuple([launch.entry for launch in schedule.launches]),
            (
                f"{self.name} {problem.dtype} head_dim {problem.head_dim}",
                f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "",
                "" if problem.direction == "forward" else f" {problem.direction}",
                " causal" if problem.causal else "",
                " modified" if score is not None else "",
                f" {problem.tensors['k'].dtype}" if "CacheElement" in types else "",
                f" to {problem.out_dtype}" if problem.is_float8 else "",
                " split" if split.kind == "fixed" else "",
                *(f" {name}" for name in problem.statistics),
            ),
            tile,
        )

    def digest(self) -> str:
        """Return `source_digest` of the family's `.cu`."""
        return source_digest(self.source)


# The cache is bounded because units contain the generated CUDA source of users' functions.
@functools.lru_cache(maxsize=256)
def _written(
    arch_specific: bool,
    first_line: str,
    functions: tuple[str, ...],
    sources: tuple[str, ...],
    assertions: str,
    types: tuple[tuple[str, str], ...],
    members: tuple[tuple[str, int | bool], ...],
    definitions: tuple[str, ...],
    entries: tuple[str, ...],
    title: tuple[str, ...],
    tile: Tile,
) -> TranslationUnit:
    """Return the translation unit made of these parts, with the tile appended to its title."""
    lines = [
        first_line,
        *functions,
        *sources,
        assertions,
        config_struct(dict(types), dict(members)),
        *definitions,
    ]
    title_of_tile = "".join(title) + f" tile {tile}"
    return TranslationUnit("\n".join(lines) + "\n", entries, title_of_tile, arch_specific)


def _element_type(problem: Problem) -> str:
    """Return the C++ type of the elements of q, k and v."""
    of_out = ELEMENT_TYPES[problem.out_dtype]
    return f"float8_for<{of_out}>" if problem.is_float8 else of_out


def _other_sources(schedule: Schedule) -> Iterator[str]:
    """Yield an include directive for each source file of a launch that is not the family's own."""
    for source in dict.fromkeys(launch.source for launch in schedule.launches):
        if source is not None:
            yield f'#include "{source}"  // sources {source_digest(source)}'


def may_have_block_mask(problem: Problem) -> bool:
    """Return whether the forward pass can read a block mask of every pair that is masked."""
    is_plain = problem.layout.is_dense and problem.seqlen_k > 0
    return is_plain and problem.score is not None and problem.score.block_mask_suffices


def has_dropout(problem: Problem) -> bool:
    """Return whether weights are dropped at random after the softmax."""
    return problem.score is not None and problem.score.dropout


def score_config(problem: Problem) -> dict[str, int | bool]:
    """Return the `Config` members for modifications of scores and for bounds on visible keys."""
    score = problem.score
    return {
        "modified": score is not None,
        "window_left": score is not None and score.left is not None,
        "window_right": score is not None and score.right is not None,
        "prefix": score is not None and score.prefix,
        "offsets": score is not None and score.offsets,
        "seqused_q": score is not None and score.seqused_q,
        "sinks": score is not None and score.sinks,
        "dropout": has_dropout(problem),
        "padded": problem.layout.kind == "padded",
    }


def config_struct(types: Mapping[str, str], members: Mapping[str, int | bool]) -> str:
    """Return the C++ definition of the `Config` struct that a kernel is compiled for.

    Parameters
    ----------
    types
        C++ type of each member type, by name.
    members
        Value of each constant, by name.
    """
    lines = [f"  using {name} = {type};" for name, type in types.items()]
    for name, value in members.items():
        kind, literal = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", value)
        lines.append(f"  static constexpr {kind} {name} = {literal};")
    return "\n".join(["struct Config {", *lines, "};"])


def tile_members(tile: Tile, names: str) -> dict[str, int]:
    """Return fields of a tile as `Config` members, given their names separated by spaces."""
    return {name: getattr(tile, name) for name in names.split()}


@functools.cache
def source_digest(*sources: str) -> str:
    """Return a hash of the tokens of kernel files and of all that they include: 16 hex digits.

    Comments, white space and the names of files do not change the hash (see `token_stream`).
    """
    text = "".join(f'#include "{source}"\n' for source in sources)
    return hashlib.sha256(token_stream(text, KERNEL_DIR).encode()).hexdigest()[:16]


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def why_not_scale(problem: Problem) -> str | None:
    """Return why a kernel that treats scaled scores of -inf as masked cannot serve the problem."""
    if not problem.has_huge_scale:
        return None
    return f"treats scores of -inf as masked; a scale of {problem.softmax_scale:g} may cause them"


def why_not_dropout(problem: Problem) -> str | None:
    """Return why a family without dropout cannot serve the problem, or None if it can."""
    return "does not support dropout" if has_dropout(problem) else None


def why_not_shared_memory(device: Device, needed: int) -> str | None:
    """Return why a thread block cannot have `needed` bytes of shared memory, or None if it can."""
    if needed <= device.shared_memory_per_block:
        return None
    return (
        f"needs {needed / 1024:.0f} KiB of shared memory; {device.name} has "
        f"{device.shared_memory_per_block // 1024} KiB per block"
    )


def why_not_blocks(
    device: Device, *, threads: int, shared_memory: int, registers: int, min_blocks: int
) -> str | None:
    """Return why `min_blocks` thread blocks do not fit an SM, or None if they do.

    Parameters
    ----------
    threads, shared_memory
        Number of threads and bytes of shared memory of a thread block.
    registers
        Lower bound of the registers that a thread needs.
    min_blocks
        Number of thread blocks per SM in `__launch_bounds__`, which limits registers per thread.
    """
    if reason := why_not_shared_memory(device, shared_memory):
        return reason
    most = min(MAX_REGISTERS, device.registers_per_sm // (threads * min_blocks) // 8 * 8)
    if registers > most:
        return f"needs about {registers} registers per thread; {most} are available"
    if device.blocks_per_sm(threads, shared_memory, 1) < min_blocks:
        return f"fewer than {min_blocks} thread blocks fit the shared memory of an SM"
    return None


def heads_in_l2(problem: Problem, device: Device) -> int:
    """Return the number of query heads whose keys and values together fit in half of the L2 cache.

    The number is a multiple of the query heads per KV head, from one KV head to the whole batch.
    """
    group = problem.heads_q // problem.heads_kv
    key_value_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    groups = device.l2_cache // 2 // max(1, key_value_bytes)
    return group * max(1, min(groups, problem.batch * problem.heads_kv))
