"""Kernels that `machine_code.py` compiles: their identification, and a representative set."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cupy_flash.cli.build import kernel_sets
from cupy_flash.cli.build.build import Job
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.cli.records.report import Row
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import Plan, make_plan, plan_tile
from cupy_flash.problem.arrays import ArraySpec, Tensors
from cupy_flash.problem.backward import with_tangents
from cupy_flash.problem.device import device_for_arch
from cupy_flash.problem.gradient import ROWS
from cupy_flash.problem.problem import Problem

# Families, and directions, by the name of the family in records, which includes the direction.
FAMILY_BY_NAME = {
    kernel_name(name, direction): family
    for direction, families in FAMILIES.items()
    for name, family in families.items()
}
_DIRECTIONS = {
    kernel_name(name, direction): direction
    for direction, families in FAMILIES.items()
    for name in families
}
# Beginnings of the titles of the chosen units that belong to no family.
_OTHERS = (
    "append bfloat16 head_dim 128",
    "append float32 head_dim 64 page",
    "combine bfloat16, 16",
    "combine float32, 32",
)


@dataclass(frozen=True)
class Kernel:
    """Identification of one translation unit, independent of the names of source files.

    Attributes
    ----------
    arch
        Compute capability times 10.
    family
        Name in `FAMILY_BY_NAME`, or "append" or "combine" for units of no family.
    tile
        Names and values of the tile's fields, or the title of a unit of no family.
    case
        Case that the unit computes; None for a unit of no family. Tangents and sums of weights are
        those of a forward case.
    wrt
        Inputs other than q, k and v whose gradients a backward unit computes.
    """

    arch: int
    family: str
    tile: tuple[tuple[str, int], ...] | str
    case: Case | None
    wrt: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        arch: int,
        family: str,
        tile: Mapping[str, int],
        case: Case,
        wrt: tuple[str, ...] = (),
    ) -> Kernel:
        # The lengths of sequences do not affect the unit.
        case = dataclasses.replace(case, lengths=None)
        return cls(arch, family, tuple(tile.items()), case, wrt)

    def plan(self) -> Plan:
        """Return the plan that launches the unit, which must belong to a family."""
        assert self.case is not None
        family = FAMILY_BY_NAME[self.family]
        tile = family.tile_type(**dict(self.tile))
        device = device_for_arch(self.arch)
        problem = problem_of(self.case, _DIRECTIONS[self.family], self.wrt)
        return plan_tile(family, problem, device, tile, reason="")

    def job(self) -> Job:
        """Return the job that compiles the unit."""
        if self.case is not None:
            return Job.of(self.plan())
        units = kernel_sets.other_units(everything=False)
        unit = next(unit for unit in units if unit.title == self.tile)
        return Job(unit, device_for_arch(self.arch), ())

    def as_json(self) -> Row:
        """Return the row of the table."""
        if self.case is None:
            return {"arch": self.arch, "family": self.family, "title": self.tile}
        usual = {field.name: field.default for field in dataclasses.fields(Case)} | {"mods": None}
        given = self.case.as_record()
        case = {name: value for name, value in given.items() if value != usual[name]}
        row = {"arch": self.arch, "family": self.family, "tile": dict(self.tile), "case": case}
        return row | {"wrt": self.wrt} if self.wrt else row

    @classmethod
    def from_json(cls, row: Row) -> Kernel:
        if "case" not in row:
            return cls(row["arch"], row["family"], row["title"], None)
        mods = CaseMods.parse(row["case"].get("mods", ""))
        case = Case(**row["case"] | {"mods": mods})
        return cls.of(row["arch"], row["family"], row["tile"], case, tuple(row.get("wrt", ())))


def problem_of(case: Case, direction: str, wrt: tuple[str, ...] = ()) -> Problem:
    """Return the problem of a case; see `Kernel` for `wrt`.

    A benchmark case is forward or backward. The other problems are made of both.
    """
    problem = case.problem()
    if direction == "backward":
        gradient = problem.gradient_spec
        return dataclasses.replace(
            problem, gradient=dataclasses.replace(gradient, wrt=(*gradient.wrt, *wrt))
        )
    if direction == "forward":
        return problem
    # The others need the derivatives of modifications.
    backward = dataclasses.replace(case, direction="backward").problem()
    problem = dataclasses.replace(problem, score=backward.score)
    if direction == "lse":
        return dataclasses.replace(problem, discards_out=True)
    if direction == "received":
        tensors = Tensors(**{name: problem.tensors[name] for name in ("q", "k")})
        return dataclasses.replace(problem, tensors=tensors, received="heads")
    shapes = case.bshd_shapes
    specs = (ArraySpec.contiguous(shape, case.dtype) for shape in shapes)
    out = ArraySpec.contiguous((*shapes[0][:3], case.head_dim_v), case.dtype)
    return with_tangents(problem, dict(zip(ROWS, specs, strict=True)), out)


def representative() -> list[Kernel]:
    """Return a set of kernels over all families, dtypes, masks, layouts and row alignments."""
    defaults, others = list(_defaults()), list(_others())
    found = [_kernel(90, case, family) for case, family in defaults]
    found += [Kernel(90, *other, None) for other in others]
    # Two other architectures get every second unit, and all remaining ones get a few.
    for first, arch in enumerate((80, 120)):
        found += [_kernel(arch, case, family) for case, family in defaults[first::2]]
        found += [Kernel(arch, *other, None) for other in others[first::2]]
    for arch in (75, 86, 89, 100):
        found += [_kernel(arch, case) for case in _FEW]
    found += itertools.chain(_mma(), _hopper(), _decode(), _simt(), _naive())
    found += itertools.chain(_gradients(), _sink_gradients(), _tangents(), _received())
    return list(dict.fromkeys(found))


def _kernel(arch: int, case: Case, family: str | None = None, **tile: int) -> Kernel:
    """Return a kernel with the tile that the planner chooses, except for the fields in `tile`."""
    found = _default_kernel(arch, case, family, case.direction)
    return dataclasses.replace(found, tile=tuple((dict(found.tile) | tile).items()))


def _default_kernel(
    arch: int, case: Case, family: str | None, direction: str, wrt: tuple[str, ...] = ()
) -> Kernel:
    """Return a kernel with the tile that the planner chooses."""
    problem = problem_of(case, direction, wrt)
    plan = make_plan(problem, device_for_arch(arch), family=family)
    name = kernel_name(plan.family, direction)
    return Kernel.of(arch, name, dataclasses.asdict(plan.tile), case, wrt)


def _dense(dtype: str, dims: tuple[int, int], causal: bool = False, **more: Any) -> Case:
    return Case(dtype, 4, 4096, 4096, 16, 16, *dims, causal, **more)


def _single(dtype: str, dims: tuple[int, int], rows: int, causal: bool = False) -> Case:
    """Return a case with one head and few query rows, which uses split KV."""
    return Case(dtype, 1, rows, 65536, 1, 1, *dims, causal)


def _cached(dtype: str, dims: tuple[int, int], rows: int, group: int, **more: Any) -> Case:
    return Case(dtype, 8, rows, 4096, 4 * group, 4, *dims, kind="cache", **more)


def _packed(dtype: str, dims: tuple[int, int], causal: bool = False, seqlen: int = 2048) -> Case:
    return Case(dtype, 8, seqlen, seqlen, 16, 4, *dims, causal, kind="varlen")


def _defaults() -> Iterator[tuple[Case, str | None]]:
    for dtype, dim, causal in (
        ("bfloat16", 128, True),
        ("bfloat16", 64, False),
        ("float16", 128, False),
        ("float16", 256, True),
        ("float32", 64, True),
    ):
        yield _dense(dtype, (dim, dim), causal), None
    # Not `hopper`: NVRTC 13.5 compiles its unit for this case to one of two codes.
    yield _dense("float32", (128, 128)), "mma"
    for dtype, family in (("float16", "mma"), ("bfloat16", "simt"), ("float32", "naive")):
        yield _dense(dtype, (64, 64), True), family
    # Rows aligned to single elements, split KV for few query tiles, and a negative scale.
    yield Case("bfloat16", 4, 999, 999, 4, 4, 65, 33, True), None
    yield Case("float32", 4, 999, 999, 4, 4, 65, 33, False), None
    yield Case("float64", 1, 999, 999, 4, 4, 64, 64, True), None
    yield _single("float16", (128, 128), 64), "mma"
    yield _single("float32", (64, 64), 64), None
    yield _dense("bfloat16", (64, 64), True, softmax_scale=-1.0), None
    for dtype, dim in (("bfloat16", 128), ("float32", 64)):
        yield _packed(dtype, (dim, dim), True), None
        for rows, page_size in ((1, 0), (1, 16), (512, 16)):
            yield _cached(dtype, (dim, dim), rows, 4, causal=True, page_size=page_size), None
    yield Case("float16", 64, 1, 1024, 32, 8, 64, 64, kind="cache"), None


def _others() -> Iterator[tuple[str, str]]:
    for unit in kernel_sets.other_units(everything=False):
        if unit.title.startswith(_OTHERS):
            yield unit.title.split()[0], unit.title


_FEW = (
    _dense("float16", (128, 128), True),
    _dense("float32", (64, 64)),
    Case("float16", 8, 1, 4096, 32, 8, 128, 128, kind="cache", page_size=16),
)

# The following functions cover the remaining parameters of units: every architecture, alignment of
# rows and width of head_dim, and each field of a tile with another value than its default.


def _mma() -> Iterator[Kernel]:
    tile = {"Br": 64, "Bc": 32, "warps": 4, "stages": 2, "q_in_registers": 0}
    negative = _dense("bfloat16", (36, 20), softmax_scale=-0.5)
    for arch, case, changes in (
        (87, _dense("float16", (34, 128), True), {"stages": 4}),
        (88, negative, {"stages": 3, "q_in_registers": 1}),
        (103, _single("float16", (96, 17), 128), {"Br": 128}),
        (110, _dense("float32", (18, 50), softmax_scale=-0.5), {"stages": 3}),
        (121, _dense("float32", (64, 64), True), {"Br": 32, "warps": 2, "stages": 4}),
    ):
        yield _kernel(arch, case, "mma", **(tile | changes))
    yield _kernel(90, _cached("bfloat16", (64, 64), 512, 4, causal=True, page_size=1), "mma")
    split = _cached("float32", (128, 128), 512, 1, page_size=128, asked_splits=2)
    yield _kernel(80, split, "mma")
    yield _kernel(90, _packed("float16", (256, 256), True), "mma")
    yield _kernel(90, _dense("float32", (128, 128), True), "mma")


def _hopper() -> Iterator[Kernel]:
    alike = ((dim, dim) for dim in (32, 40, 72, 80, 96, 160, 192, 224, 256))
    for index, dims in enumerate([*alike, (192, 128), (64, 128), (8, 256), (256, 8)]):
        dtype, causal = ("bfloat16", "float16")[index % 2], index // 2 % 2 == 0
        few = Case(dtype, 32, 512, 512, 16, 16, *dims, True)
        kinds = (
            _dense(dtype, dims, causal),
            _single(dtype, dims, 1),
            _packed(dtype, dims, not causal),
            few,
            _cached(dtype, dims, 512, 1, causal=causal),
            _single(dtype, dims, 4096, True),
            _packed(dtype, dims, True, seqlen=512),
            _dense(dtype, dims, causal, softmax_scale=-0.5),
        )
        yield _kernel(90, kinds[index % len(kinds)], "hopper")
    # Head dims that two thread blocks of a cluster split.
    yield _kernel(90, _dense("bfloat16", (512, 512), True), "hopper")
    yield _kernel(90, _packed("float16", (576, 512)), "hopper")
    # NVRTC compiles units of other head dims, such as 240 and 192/128, to one of several codes.
    for dim, causal in ((256, True), (192, False)):
        yield _kernel(90, _dense("float32", (dim, dim), causal), "hopper")


def _decode() -> Iterator[Kernel]:
    archs = (80, 89, 90, 100, 120)
    for i, dim in enumerate((64, 96, 128, 192, 256)):
        # Each head_dim gets two of the three page sizes.
        for j in (i, i + 1):
            page_size = (0, 16, 1)[j % 3]
            causal, rows = (i + j) % 2 == 0, (1, 8)[i // 2 % 2]
            case = _cached("bfloat16", (dim, dim), rows, 4, causal=causal, page_size=page_size)
            yield _kernel(archs[(i + 2 * j) % 5], case, "decode")
    tile = {"Br": 16, "Bc": 16, "warps": 4, "stages": 3, "min_blocks": 1, "cluster": 0}
    wide, dims = {"Br": 32, "Bc": 32}, (128, 128)
    equal = Case("bfloat16", 8, 1, 8192, 32, 8, *dims, True)
    packed = Case("bfloat16", 8, 5, 5, 32, 8, 36, 36, kind="varlen")
    negative = _cached("bfloat16", dims, 1, 4, page_size=7, softmax_scale=-0.5)
    split = _cached("float16", dims, 1, 4, page_size=64, asked_splits=3)
    whole = _cached("bfloat16", dims, 2, 4, causal=True, asked_splits=1)
    for arch, case, changes in (
        (86, equal, {}),
        (87, packed, wide),
        (88, _cached("float16", (33, 72), 1, 4), {"stages": 5}),
        (90, negative, {"warps": 2, "stages": 2, "min_blocks": 3}),
        (103, split, {"Bc": 32, "warps": 2}),
        (110, whole, {}),
        (121, _cached("bfloat16", (18, 18), 3, 1), {"warps": 1, "stages": 8}),
        (90, _cached("bfloat16", (80, 80), 8, 3, page_size=32), {"Br": 32, "warps": 8}),
        (90, equal, {"cluster": 8}),
        (100, _cached("bfloat16", dims, 8, 4, causal=True), {"Br": 32, "cluster": 4}),
        (90, _cached("bfloat16", dims, 5, 4, page_size=16), {"Br": 32, "cluster": 2}),
        (100, _cached("bfloat16", dims, 2, 4, causal=True), {"cluster": 1}),
    ):
        yield _kernel(arch, case, "decode", **(tile | changes))


def _simt() -> Iterator[Kernel]:
    for arch, case in (
        (75, _dense("float64", (256, 256), True)),
        (80, _dense("float32", (37, 37), True)),
        (75, _dense("bfloat16", (256, 256), True)),
        (100, _single("float32", (128, 128), 5)),
        (88, _single("float16", (64, 64), 5)),
        (75, _packed("float16", (128, 128), True)),
        (103, _cached("float64", (64, 64), 100, 2, causal=True, page_size=1, asked_splits=2)),
        (110, _cached("float32", (64, 64), 100, 2, causal=True, page_size=7)),
        (121, _cached("float32", (128, 128), 100, 2, page_size=128)),
    ):
        yield _kernel(arch, case, "simt")
    for arch, row_threads, dim in ((86, 4, 49), (87, 8, 50), (89, 16, 52), (120, 32, 50)):
        tile = {"Br": 512 // row_threads, "Bc": 32, "threads": 128, "rows_per_thread": 4}
        case = _dense("float32", (dim, dim))
        yield _kernel(arch, case, "simt", **tile, share_kv=1, unroll=1)


def _naive() -> Iterator[Kernel]:
    for arch, dtype in ((75, "float16"), (90, "bfloat16"), (120, "float64")):
        yield _kernel(arch, Case(dtype, 2, 113, 203, 6, 3, 40, 72, True), "naive")


def _gradients() -> Iterator[Kernel]:
    for arch, family, case in (
        (90, "hopper", _dense("bfloat16", (64, 64), True)),
        (90, "hopper", _dense("bfloat16", (128, 128))),
        (90, "hopper", _packed("float16", (128, 128), True)),
        (90, "hopper", Case("bfloat16", 16, 512, 512, 16, 16, 64, 64)),
        (80, "mma", _dense("bfloat16", (128, 128), True)),
        (89, "mma", _dense("float32", (128, 128))),
        (90, "mma", _packed("float16", (128, 128), True)),
        (75, "simt", _dense("float16", (64, 64), True)),
        (86, "simt", _dense("float32", (256, 256))),
        (100, "simt", _packed("float64", (80, 80))),
    ):
        yield _kernel(arch, dataclasses.replace(case, direction="backward"), family)


def _sink_gradients() -> Iterator[Kernel]:
    sinks = CaseMods(sinks=True)
    for arch, family, case in (
        (90, "hopper", _dense("bfloat16", (128, 128), True, mods=sinks)),
        (90, "hopper", _dense("float16", (64, 64), mods=CaseMods(sinks=True, dropout=0.1))),
        (80, "mma", dataclasses.replace(_packed("float16", (64, 64), True), mods=sinks)),
        (75, "simt", _dense("float32", (64, 64), mods=sinks)),
    ):
        case = dataclasses.replace(case, direction="backward")
        yield _default_kernel(arch, case, family, "backward", ("sinks",))


def _tangents() -> Iterator[Kernel]:
    mods = CaseMods(softcap=20.0, sinks=True)
    for arch, family, case in (
        (90, "hopper", _dense("bfloat16", (128, 128), True)),
        (90, "hopper", _dense("float16", (64, 64))),
        (90, "mma", _dense("bfloat16", (128, 128), True)),
        (80, "mma", _dense("float16", (64, 64))),
        (90, "mma", _packed("bfloat16", (64, 64), True)),
        (120, "mma", _dense("bfloat16", (80, 40), mods=mods)),
        (75, "simt", _dense("float32", (64, 64), True)),
        (86, "simt", _packed("float64", (64, 64))),
    ):
        yield _default_kernel(arch, case, family, "tangent")


def _received() -> Iterator[Kernel]:
    mods = CaseMods(softcap=20.0, sinks=True)
    for arch, family, case in (
        (90, "hopper", _dense("bfloat16", (128, 128), True)),
        (90, "hopper", _dense("float16", (64, 64))),
        (90, "mma", _dense("bfloat16", (128, 128), True)),
        (80, "mma", _dense("float16", (64, 64))),
        (120, "mma", _dense("bfloat16", (80, 80), mods=mods)),
        (75, "simt", _dense("float32", (64, 64), True)),
        (86, "simt", _dense("float64", (64, 64))),
    ):
        yield _default_kernel(arch, case, family, "received")
    for dtype, dim, causal in (("bfloat16", 128, True), ("float16", 64, False)):
        yield _default_kernel(90, _dense(dtype, (dim, dim), causal), "hopper_lse", "lse")
