"""Choose the kernel family and tile for a problem, and explain the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cupy_flash.errors import UnsupportedError
from cupy_flash.families import FAMILIES, Family, TranslationUnit
from cupy_flash.families.schedule import Launch, Schedule
from cupy_flash.planning import tuning
from cupy_flash.problem.device import Device, Resources
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem
from cupy_flash.problem.tile import FrozenTile, Tile


@dataclass(frozen=True)
class Plan:
    """Plan of how a problem is computed.

    Attributes
    ----------
    problem, device
        Problem, and device on which it is computed; `device` is None for the CPU backend.
    family, tile
        Name of the kernel family ("cpu" for the CPU backend) and its compile-time tile.
    schedule
        Kernel launches, and the memory that they need.
    unit
        Translation unit; None for the CPU backend.
    reason
        Reason for this family and tile.
    rejected
        Reason why each other family is not used, by its name.
    resources
        Registers and memory of the compiled main kernel; None if it is not loaded.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_flash import flash_attention, plan
    >>> q = np.empty((1, 4096, 8, 64), np.float16)
    >>> plan(flash_attention, q, q, q, arch="sm_90").family
    'hopper'
    """

    problem: Problem
    device: Device | None
    family: str
    tile: Tile
    # The schedule follows from the fields above. It is not hashed because mappings have no hash.
    schedule: Schedule = field(repr=False, hash=False)
    unit: TranslationUnit | None = field(repr=False)
    reason: str
    rejected: Mapping[str, str] = field(hash=False)
    resources: Resources | None = None

    @property
    def num_splits(self) -> int | None:
        """Number of parts of the keys of a query tile; None if all keys are divided evenly."""
        split = self.schedule.split
        return None if split.kind == "even" else split.parts

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernel launches, in order; none on the CPU."""
        return self.schedule.launches

    @property
    def workspace(self) -> int:
        """Number of bytes of temporary memory."""
        return self.schedule.workspace

    @property
    def main(self) -> Launch | None:
        """Launch of the main kernel, whose figures the plan shows; None on the CPU."""
        return self.schedule.main

    @property
    def threads(self) -> int:
        """Number of threads of a thread block of the main kernel."""
        return self.main.threads if self.main else 0

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory of a thread block of the main kernel, in bytes."""
        return self.main.shared_memory if self.main else 0

    def blocks_per_sm(self) -> int:
        """Return how many main thread blocks fit an SM; an upper bound until it is compiled."""
        if self.device is None:
            return 0
        registers = self.resources.registers if self.resources else 0
        return self.device.blocks_per_sm(self.threads, self.shared_memory, registers)

    def __str__(self) -> str:
        problem = self.problem
        sizes = f"batch {problem.batch}, seqlen {problem.seqlen_q} x {problem.seqlen_k}"
        heads = f"heads {problem.heads_q}" + (
            f" ({problem.heads_kv} KV)" if problem.heads_kv != problem.heads_q else ""
        )
        dims = f"head_dim {problem.head_dim}" + (
            f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else ""
        )
        rows = [
            (
                "problem",
                f"{_direction_text(problem)}{problem.dtype}, {sizes}, {heads}, {dims}"
                + _mask_text(problem),
            ),
            *(self._gpu_rows() if self.device else [("device", "CPU (NumPy)")]),
            ("family", self.family),
            ("tile", str(self.tile)),
            *self._block_rows(),
            ("why", self.reason),
            ("workspace", f"{self.workspace:,} bytes" if self.workspace else "none"),
            *((f"not {name}", reason) for name, reason in self.rejected.items()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _block_rows(self) -> list[tuple[str, str]]:
        """Return the line on how many blocks of the score matrix are computed, from positions."""
        problem, score = self.problem, self.problem.score
        family = FAMILIES[problem.direction].get(self.family)
        if family is not None and not family.automatic:
            # A baseline computes all blocks.
            return []
        if score is not None and (score.offsets or score.seqused_q):
            # The positions of the queries are in device arrays.
            return []
        mask = problem.mask
        if not problem.layout.is_dense and problem.layout.kind != "padded":
            # Each sequence has its own mask, aligned at its end.
            mask = mask._replace(q_offset=problem.seqlen_k - problem.seqlen_q)
        masks_pairs = score is not None and score.masks_pairs
        if mask.is_full and not masks_pairs:
            return []
        nonempty, partial, skipped = count_blocks(mask, self.tile.Br, self.tile.Bc)
        # A mask that does not only depend on causality and window may be partial in any block.
        in_part = "" if masks_pairs else f", {partial:,} of them partial"
        text = f"{nonempty:,} computed{in_part}, {skipped:,} skipped"
        if problem.layout.is_dense:
            text += " in each head"
        else:
            text += " in each head of a sequence of maximum length"
        if score is not None and score.prefix:
            text += ", more computed if prefixes make keys visible"
        if family is not None and family.uses_block_mask(problem, self.tile):
            text += "; of these, the GPU skips blocks without visible pairs"
        elif masks_pairs:
            text += "; any block may contain masked pairs"
        return [("blocks", text)]

    def _gpu_rows(self) -> list[tuple[str, str]]:
        device, resources = self.device, self.resources
        assert device is not None
        share = self.shared_memory / device.shared_memory_per_sm
        return [
            ("device", f"{device.name} ({device.sm}, {device.sm_count} SMs)"),
            ("grid", " + ".join(f"{e.entry} {_grid_text(e)}" for e in self.launches)),
            ("threads", f"{self.threads} per block"),
            ("registers", f"{resources.registers} per thread" if resources else "not compiled yet"),
            ("shared memory", f"{self.shared_memory / 1024:.1f} KiB, {share:.0%} of the SM"),
            ("blocks per SM", ("" if resources else "at most ") + str(self.blocks_per_sm())),
        ]


def count_blocks(mask: Mask, Br: int, Bc: int) -> tuple[int, int, int]:
    """Return how many blocks of Br rows and Bc keys are computed, are partial, and are skipped."""
    nonempty = full = 0
    for first in range(0, mask.seqlen_q, Br):
        stop = min(first + Br, mask.seqlen_q)
        begin, full_begin, full_end, end = mask.blocks_of_keys(first, stop, Bc)
        nonempty += end - begin
        full += full_end - full_begin
    blocks = -(-mask.seqlen_q // Br) * -(-mask.seqlen_k // Bc)
    return nonempty, nonempty - full, blocks - nonempty


def _direction_text(problem: Problem) -> str:
    if problem.received:
        return f"sums of weights of {problem.received}, "
    if problem.moves:
        return f"tangent along {', '.join(problem.moves)}, "
    if problem.gradient is None:
        return ""
    return f"gradients of {', '.join(problem.gradient.wrt)}, "


def _mask_text(problem: Problem) -> str:
    score = problem.score
    offset = "per sequence" if score is not None and score.offsets else problem.q_offset
    text = f", causal (q_offset {offset})" if problem.causal else ""
    if score is None:
        return text
    window = score.left, score.right
    clauses = {
        f"window {window}": window != (None, None),
        "prefixes": score.prefix,
        "scores modified": score.changes_scores,
        "pairs masked": score.masks_pairs,
        "sinks": score.sinks,
        "dropout": score.dropout,
    }
    return text + "".join(f", {name}" for name, applies in clauses.items() if applies)


def _grid_text(launch: Launch) -> str:
    return " x ".join(str(n) for n in launch.grid if n > 1) or "1"


def make_plan(
    problem: Problem,
    device: Device,
    *,
    family: str | None = None,
    tile: FrozenTile = None,
    explain: bool = True,
) -> Plan:
    """Plan a problem on a device.

    Parameters
    ----------
    problem, device
        Problem to compute, and the device.
    family
        Name of the family to use; None for the first that can serve the problem.
    tile
        Tile of that family, or some of its fields (see `freeze_tile`); None for the tuned or
        default one.
    explain
        Whether to determine, for each other family, the reason why it is not used.

    Raises
    ------
    UnsupportedError
        If the family cannot serve the problem, or the tile does not fit; the message says why.
    ValueError
        If the family or a tile field is unknown.
    """
    families = FAMILIES[problem.direction]
    if family is not None and family not in families:
        raise ValueError(f"unknown family {family!r}; expected one of {', '.join(families)}")
    if family is None:
        chosen, reason = _first_choice(problem, device), "first choice for this dtype and GPU"
        if chosen is None:
            reasons = "; ".join(f"{n}: {why}" for n, why in _unusable(problem, device).items())
            raise UnsupportedError(f"no kernel family serves this problem: {reasons}")
    else:
        chosen, reason = family, "requested"
        if why_not := families[family].why_not(problem, device):
            raise UnsupportedError(f"family {family!r} cannot serve this: {why_not}")
    is_asked_for = family is not None
    rejected = _rejected(problem, device, chosen, is_asked_for=is_asked_for) if explain else {}
    the_family = families[chosen]
    the_tile, tile_reason = _choose_tile(the_family, problem, device, tile)
    return plan_tile(
        the_family,
        problem,
        device,
        the_tile,
        reason=f"{reason}; {tile_reason}",
        rejected=rejected,
    )


def _first_choice(problem: Problem, device: Device) -> str | None:
    """Return the name of the family for a call that names none; None if none serves it.

    The checks take most of the planning time. So the search ends at the first suitable family, and
    skips families that are for other numbers of query rows.
    """
    families = {n: f for n, f in FAMILIES[problem.direction].items() if f.automatic}
    for name, family in families.items():
        if (
            family.suits_rows(problem)
            and family.why_not(problem, device) is None
            and _why_not_first(family, problem, device) is None
        ):
            return name
    usable = (n for n, family in families.items() if family.why_not(problem, device) is None)
    return next(usable, None)


def _unusable(problem: Problem, device: Device) -> dict[str, str]:
    """Return the families that cannot serve the problem, with a reason for each."""
    families = FAMILIES[problem.direction].items()
    reasons = {name: family.why_not(problem, device) for name, family in families}
    return {name: reason for name, reason in reasons.items() if reason}


def _rejected(
    problem: Problem, device: Device, chosen: str, *, is_asked_for: bool
) -> dict[str, str]:
    """Return the reason why each other family is not used, by its name."""
    families = FAMILIES[problem.direction]
    rejected = _unusable(problem, device)
    for name, family in families.items():
        if name == chosen or name in rejected:
            continue
        if reason := _why_not_first(family, problem, device):
            rejected[name] = reason
        elif is_asked_for:
            rejected[name] = f"{chosen} was requested"
        else:
            rejected[name] = f"{chosen} comes first" if family.automatic else "used only on request"
    return rejected


def is_served(problem: Problem, device: Device) -> bool:
    """Return whether some family serves the problem in a call that names none."""
    families = FAMILIES[problem.direction].values()
    return any(f.automatic and f.why_not(problem, device) is None for f in families)


def _why_not_first(family: Family[Any], problem: Problem, device: Device) -> str | None:
    # Results depend bitwise on family and tile. So all batch-invariant problems of a dtype and head
    # dims use one family, which does not depend on the numbers of rows, keys and sequences.
    if not problem.is_batch_invariant:
        return family.why_not_first(problem, device)
    if family.serves_any_rows or not family.automatic:
        return None
    return (
        "serves only some numbers of query rows, and batch-invariant calls use one family for all"
    )


def plan_tile(
    family: Family[Any],
    problem: Problem,
    device: Device,
    tile: Tile,
    *,
    reason: str,
    rejected: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan of a tile that is known to be legal."""
    schedule = family.schedule(problem, device, tile)
    return Plan(
        problem=problem,
        device=device,
        family=family.name,
        tile=tile,
        schedule=schedule,
        unit=family.unit(problem, tile, schedule),
        reason=reason,
        rejected=rejected or {},
    )


def _choose_tile(
    family: Family[Any], problem: Problem, device: Device, request: FrozenTile
) -> tuple[Tile, str]:
    if request is not None:
        return _requested_tile(family, problem, device, request), "requested tile"
    # Tables contain only problems without modifications.
    is_plain = problem.score is None
    entry = tuning.lookup(device, family.name, family.digest(), problem) if is_plain else None
    if entry is not None:
        tile = tuned_tile(family.tile_type, entry.tile)
        if tile is not None and family.why_not_tile(problem, device, tile) is None:
            return tile, _tuned_reason(entry, device)
    tile = family.default_tile(problem, device)
    return tile, "default tile" + family.tile_note(problem, tile)


def _tuned_reason(entry: tuning.Entry, device: Device) -> str:
    if entry.gpu == device.name:
        return f"tile from the tuned table ({entry.tflops:.0f} TFLOP/s)"
    rate = f"{entry.tflops:.0f} TFLOP/s there"
    return f"tile tuned on {entry.gpu}, the nearest GPU with a table ({rate})"


def tuned_tile(tile_type: type[Tile], fields: Mapping[str, int]) -> Tile | None:
    """Return the tile of a table entry; None if its fields are not those of the type."""
    try:
        return tile_type(**fields)
    except (TypeError, ValueError):
        return None


def _requested_tile(
    family: Family[Any], problem: Problem, device: Device, request: FrozenTile
) -> Tile:
    if isinstance(request, Tile) and type(request) is not Tile:
        if not isinstance(request, family.tile_type):
            raise ValueError(
                f"tile is a {type(request).__name__}; family {family.name!r} takes a "
                f"{family.tile_type.__name__}"
            )
        if reason := family.why_not_tile(problem, device, request):
            raise UnsupportedError(f"tile {request} of family {family.name!r}: {reason}")
        return request
    wanted = tile_fields(family.tile_type, request)
    default = family.default_tile(problem, device)
    first = dataclasses.replace(default, **wanted)
    if (reason := family.why_not_tile(problem, device, first)) is None:
        return first
    fitting = [
        tile
        for tile in family.candidates(problem, device)
        if all(getattr(tile, name) == value for name, value in wanted.items())
    ]
    # The nearest to the default comes first, to keep good values of fields that were not requested.
    fitting.sort(key=lambda tile: _distance(tile, default))
    reasons = []
    for tile in fitting:
        if (why_not := family.why_not_tile(problem, device, tile)) is None:
            return tile
        reasons.append(why_not)
    text = " ".join(f"{name}={value}" for name, value in wanted.items())
    # Prefer the reason of the nearest candidate: other fields of the default may be illegal here.
    reason = reasons[0] if reasons else reason
    raise UnsupportedError(f"family {family.name!r} has no tile with {text} here: {reason}")


def _distance(tile: Tile, other: Tile) -> float:
    """Return the distance of two tiles: the sum of the relative differences of their fields."""
    pairs = zip(dataclasses.astuple(tile), dataclasses.astuple(other), strict=True)
    return sum(abs(a - b) / max(a, b, 1) for a, b in pairs)


def tile_fields(tile_type: type[Tile], request: FrozenTile) -> dict[str, int]:
    """Return the fields of a request, checked against those of a tile type.

    Raises
    ------
    ValueError
        If the tile type does not have a field.
    """
    names = [f.name for f in dataclasses.fields(tile_type)]
    fields = dataclasses.asdict(request) if isinstance(request, Tile) else dict(request or ())
    for name in fields:
        if name not in names:
            raise ValueError(f"unknown tile field {name!r}; expected one of {', '.join(names)}")
    return fields
