"""Table of hashes of machine code, which shows whether a change of the sources changed a kernel.

    python benchmarks/machine_code.py              compile everything in the table, and compare
    python benchmarks/machine_code.py --update     write a new table
    python benchmarks/machine_code.py --restamp    write the digests of the present sources to
                                                   records and tuned tiles of unchanged kernels
    python benchmarks/machine_code.py --restamp --update    do both, in this order
    python benchmarks/machine_code.py --cubins FOLDER    write the machine code to a folder, too
    python benchmarks/machine_code.py --moved FOLDER     ignore moved kernel arguments
                                                   (`instructions.py`), compared with the --cubins
                                                   folder of the earlier sources

The table holds a representative set of kernels over all families, dtypes, masks, layouts and some
architectures, which the tests compile, too. It also holds every kernel of a record or a shipped
tile. An entry is one translation unit. The rows of a family in a record or a tuned table get a new
digest only if two conditions hold: they were measured on the sources that the table was written
for, and all of their kernels have the same instructions today. Comments and file names do not
change a digest. No GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instructions import same_but_for_arguments

from cupy_flash.cli.build import kernel_sets
from cupy_flash.cli.build.build import Job, build
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import records
from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.cli.records.report import Row, write_whole
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.compiler import Cubin
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import Plan, make_plan, plan_tile
from cupy_flash.problem.device import device_for_arch

HERE = Path(__file__).resolve().parent
TABLE = HERE / "machine_code.json"
RESULTS = HERE / "results"

# Families by their name in records, which includes the direction.
FAMILY_BY_NAME = {
    kernel_name(name, direction): family
    for direction, families in FAMILIES.items()
    for name, family in families.items()
}
# Beginnings of the titles of units that belong to no family.
_OTHERS = (
    "append bfloat16 head_dim 128",
    "append float32 head_dim 64 page",
    "combine bfloat16, 16",
    "combine float32, 32",
)
# Prefix of the names of cubin sections that hold instructions.
_CODE = ".text."
# Maximum number of units per family that are compiled again if their code differs. NVRTC may
# compile an unchanged source to different code: NVRTC 13.5 does for 4 units of `hopper backward`
# (head_dim 256) and 2 units of `hopper` (float32).
_FEW_UNITS = 8
# Number of rounds, and of compilations per round, for a unit whose code differs. Each round uses
# new processes. All of 14 processes that compiled such a unit 3 to 8 times produced both codes.
_ROUNDS, _TIMES = 6, 3


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
        Case that the unit computes; None for a unit of no family.
    """

    arch: int
    family: str
    tile: tuple[tuple[str, int], ...] | str
    case: Case | None

    @classmethod
    def of(cls, arch: int, family: str, tile: Mapping[str, int], case: Case) -> Kernel:
        # The lengths of sequences do not affect the unit.
        return cls(arch, family, tuple(tile.items()), dataclasses.replace(case, lengths=None))

    def plan(self) -> Plan:
        """Return the plan that launches the unit, which must belong to a family."""
        assert self.case is not None
        family = FAMILY_BY_NAME[self.family]
        tile = family.tile_type(**dict(self.tile))
        device = device_for_arch(self.arch)
        return plan_tile(family, self.case.problem(), device, tile, reason="")

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
        return {"arch": self.arch, "family": self.family, "tile": dict(self.tile), "case": case}

    @classmethod
    def from_json(cls, row: Row) -> Kernel:
        if "case" not in row:
            return cls(row["arch"], row["family"], row["title"], None)
        mods = CaseMods.parse(row["case"].get("mods", ""))
        return cls.of(row["arch"], row["family"], row["tile"], Case(**row["case"] | {"mods": mods}))


@dataclass(frozen=True)
class Code:
    """Result of a compilation: code hash, registers of the main kernel, largest spill of any."""

    code: str
    registers: int
    spill_bytes: int
    image: bytes = dataclasses.field(default=b"", compare=False, repr=False)

    @classmethod
    def of(cls, cubin: Cubin, main_entry: str) -> Code:
        spill_bytes = max(each.spill_bytes for each in cubin.resources.values())
        registers = cubin.resources[main_entry].registers
        return cls(code_hash(cubin.image), registers, spill_bytes, cubin.image)

    def as_json(self) -> Row:
        """Return the fields of the row in the table."""
        return {"code": self.code, "registers": self.registers, "spill_bytes": self.spill_bytes}


def code_hash(image: bytes) -> str:
    """Return a hash of 16 hex digits of the instructions in a cubin, a 64-bit ELF file."""
    (headers_at,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<3H", image, 0x3A)
    headers = [struct.unpack_from("<II4Q", image, headers_at + i * size) for i in range(count)]
    names_at = headers[names_index][4]
    digest = hashlib.sha256()
    for name_at, _, _, _, offset, length in sorted(headers, key=lambda header: header[4]):
        start = names_at + name_at
        name = image[start : image.index(b"\0", start)].decode()
        if name.startswith(_CODE):
            digest.update(name.encode() + b"\0" + image[offset : offset + length])
    return digest.hexdigest()[:16]


def compiled(kernels: Iterable[Kernel], before: Mapping[Kernel, Code]) -> dict[Kernel, Code | str]:
    """Compile units; return the code of each, or the error message of the compiler.

    NVRTC compiles some sources to one of two codes, which may change from one compilation to the
    next. If the code of few units of a family differs from `before`, they are compiled again, and
    count as the same if any compilation gives the code in `before`.
    """
    jobs = {kernel: kernel.job() for kernel in kernels}
    # Several cases may have the same unit, which is compiled once.
    firsts: dict[tuple[str, int], Kernel] = {}
    first = {k: firsts.setdefault((x.unit.text, x.device.arch), k) for k, x in jobs.items()}
    found = dict(_codes([(kernel, jobs[kernel]) for kernel in firsts.values()]))
    others = [kernel for kernel, code in found.items() if before.get(kernel, code) != code]
    counts = Counter(kernel.family for kernel in others)
    again = [kernel for kernel in others if counts[kernel.family] <= _FEW_UNITS]
    for _ in range(_ROUNDS):
        again = [kernel for kernel in again if found[kernel] != before[kernel]]
        for kernel, code in _codes([(kernel, jobs[kernel]) for kernel in again * _TIMES]):
            if code == before[kernel]:
                found[kernel] = code
    return {kernel: found[first[kernel]] for kernel in jobs}


def _codes(jobs: Sequence[tuple[Kernel, Job]]) -> Iterator[tuple[Kernel, Code | str]]:
    for index, built in build([job for _, job in jobs]):
        kernel, job = jobs[index]
        if built.cubin is None:
            yield kernel, built.error or "no machine code"
        else:
            yield kernel, Code.of(built.cubin, job.unit.main_entry)


# ---- Kernels in the table


def representative() -> list[Kernel]:
    """Return a set of kernels over all families, dtypes, masks, layouts and row alignments."""
    defaults, others = list(_defaults()), list(_others())
    found = [_kernel(90, case, family) for case, family in defaults]
    found += [Kernel(90, *other, None) for other in others]
    # Two other architectures get every second unit, and all remaining ones get a few.
    for turn, arch in enumerate((80, 120)):
        found += [_kernel(arch, case, family) for case, family in defaults[turn::2]]
        found += [Kernel(arch, *other, None) for other in others[turn::2]]
    for arch in (75, 86, 89, 100):
        found += [_kernel(arch, case) for case in _FEW]
    found += itertools.chain(_mma(), _hopper(), _decode(), _simt(), _naive(), _gradients())
    return list(dict.fromkeys(found))


def _kernel(arch: int, case: Case, family: str | None = None, **tile: int) -> Kernel:
    """Return a kernel with the tile that the planner chooses, except for the fields in `tile`."""
    plan = make_plan(case.problem(), device_for_arch(arch), family=family)
    name = kernel_name(plan.family, case.direction)
    return Kernel.of(arch, name, dataclasses.asdict(plan.tile) | tile, case)


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
        (80, "mma", _dense("bfloat16", (128, 128), True)),
        (89, "mma", _dense("float32", (128, 128))),
        (90, "mma", _packed("float16", (128, 128), True)),
        (75, "simt", _dense("float16", (64, 64), True)),
        (86, "simt", _dense("float32", (256, 256))),
        (100, "simt", _packed("float64", (80, 80))),
    ):
        yield _kernel(arch, dataclasses.replace(case, direction="backward"), family)


def recorded() -> dict[str, list[tuple[str, str, list[Kernel]]]]:
    """Return, by file, family, digest and kernels of each row of a record or entry of a table."""
    found = {path.name: list(_kernels_of_rows(path)) for path in sorted(RESULTS.glob("*.json"))}
    for path in sorted(tuning.SHIPPED_DIR.glob("*.json")):
        found[path.name] = [
            (
                kernel_name(entry.family, entry.direction),
                entry.digest,
                list(_kernels_of_entry(entry)),
            )
            for entry in tuning.read_table(path)
        ]
    return found


def _kernels_of_rows(path: Path) -> Iterator[tuple[str, str, list[Kernel]]]:
    for row in records.read(path).rows:
        family = kernel_name(row.get("family"), row.get("direction") or "forward")
        digest = row.get("kernel_digest")
        if not digest or family not in FAMILY_BY_NAME:
            continue
        if "cases" in row:
            cases = [
                Case.of_record({name: x for name, x in case.items() if name != "weight"})
                for case in row["cases"]
            ]
            tiles = [tile for tile in (row["default_tile"], row["best_tile"]) if tile]
        else:
            cases, tiles = [_served(row)], [row["tile"]]
        pairs = itertools.product(cases, tiles)
        yield family, digest, [Kernel.of(90, family, tile, case) for case, tile in pairs]


def _served(row: Row) -> Case:
    """Return the case that the provider of a row actually computed for the row's case."""
    case, served = records.case_of(row), getattr(provider(row["provider"]), "served", None)
    found = case if served is None else served(case)
    # A provider that builds block maps in each call computes the case itself. Without a GPU it
    # returns a reason instead of a case.
    return found if isinstance(found, Case) else case


def _kernels_of_entry(entry: tuning.Entry) -> Iterator[Kernel]:
    problem = kernel_sets.problem_of_class(entry.problem_class)
    if problem is None:
        return
    case = Case(
        **{
            name: getattr(problem, name)
            for name in ("dtype", "batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv")
        },
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        direction=problem.direction,
    )
    family = kernel_name(entry.family, problem.direction)
    yield Kernel.of(entry.arch, family, entry.tile, case)


# ---- The table


def write_table(found: Mapping[Kernel, Code | str], tested: Iterable[Kernel]) -> None:
    """Write the table of all compiled units."""
    from cupy.cuda import nvrtc

    tested = set(tested)
    rows = [
        {**kernel.as_json(), "tested": kernel in tested, **code.as_json()}
        for kernel, code in found.items()
        if isinstance(code, Code)
    ]
    families = sorted({kernel.family for kernel in found if kernel.case is not None})
    head = {
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        "digests": {family: FAMILY_BY_NAME[family].digest() for family in families},
    }
    lines = [json.dumps(row) for row in rows]
    text = json.dumps(head)[:-1] + ', "kernels": [\n' + ",\n".join(lines) + "\n]}\n"
    write_whole(TABLE, text.encode())


def read_table() -> tuple[Row, dict[Kernel, Code], list[Kernel]]:
    """Return the head of the table, all kernels with their code, and those that tests compile."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    kernels = {
        Kernel.from_json(row): Code(row["code"], row["registers"], row["spill_bytes"])
        for row in data["kernels"]
    }
    tested = [Kernel.from_json(row) for row in data["kernels"] if row["tested"]]
    return {"nvrtc": data["nvrtc"], "digests": data["digests"]}, kernels, tested


def why_not_comparable(head: Row) -> str | None:
    """Return why the table is not comparable with this compiler's code; None if it is."""
    from cupy.cuda import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    if version == head["nvrtc"]:
        return None
    return f"the table is of NVRTC {head['nvrtc']}, and this is {version}"


def differences(before: Mapping[Kernel, Code], now: Mapping[Kernel, Code | str]) -> Iterator[str]:
    """Yield a line for each kernel that differs from the table."""
    for kernel, code in now.items():
        was = before.get(kernel)
        name = json.dumps(kernel.as_json())
        if not isinstance(code, Code):
            yield f"{name}: {code}"
        elif was is None:
            yield f"{name}: not in the table"
        elif was != code:
            yield (
                f"{name}: registers {was.registers} -> {code.registers}, spilled bytes "
                f"{was.spill_bytes} -> {code.spill_bytes}, code {was.code} -> {code.code}"
            )


def moved(
    before: Mapping[Kernel, Code], now: Mapping[Kernel, Code | str], folder: Path
) -> Iterator[tuple[Kernel, Code]]:
    """Yield the kernels that differ from the table only in offsets of arguments."""
    for kernel, code in now.items():
        was = before.get(kernel)
        if was is None or was == code or not isinstance(code, Code):
            continue
        image = (folder / f"{was.code}.cubin").read_bytes()
        if (was.registers, was.spill_bytes) == (code.registers, code.spill_bytes) and (
            same_but_for_arguments(image, code.image)
        ):
            yield kernel, code


# ---- Records and tiles


def restamp(head: Row, before: Mapping[Kernel, Code], now: Mapping[Kernel, Code | str]) -> int:
    """Write the present digest to all rows of a family in a file if their kernels are unchanged.

    Return the number of pairs of a file and a family that keep their earlier digest.
    """
    left = 0
    for name, rows in recorded().items():
        stale: dict[tuple[str, str], list[list[Kernel]]] = {}
        for family, digest, kernels in rows:
            if digest != FAMILY_BY_NAME[family].digest():
                stale.setdefault((family, digest), []).append(kernels)
        for (family, digest), of_rows in stale.items():
            kernels = list(itertools.chain.from_iterable(of_rows))
            if reason := _why_not_same(family, digest, kernels, head, before, now):
                left += 1
                print(f"{name}: {reason}")
                continue
            folder = RESULTS if (RESULTS / name).exists() else tuning.SHIPPED_DIR
            text = (folder / name).read_text(encoding="utf-8")
            text = text.replace(f'"{digest}"', f'"{FAMILY_BY_NAME[family].digest()}"')
            write_whole(folder / name, text.encode())
            print(f"{name}: {family} stamped anew, {len(of_rows)} rows")
    return left


def _why_not_same(
    family: str,
    digest: str,
    kernels: Iterable[Kernel],
    head: Row,
    before: Mapping[Kernel, Code],
    now: Mapping[Kernel, Code | str],
) -> str | None:
    if head["digests"].get(family) != digest:
        return f"{family} {digest} is not what the table was written for"
    for kernel in kernels:
        if kernel not in before:
            return f"{family}: a kernel is not in the table"
        if before[kernel] != now[kernel]:
            return f"{family}: machine code changed"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write a new table")
    parser.add_argument(
        "--restamp",
        action="store_true",
        help="write the present digests to records and tiles of unchanged kernels",
    )
    parser.add_argument("--cubins", type=Path, help="also write the machine code to this folder")
    parser.add_argument(
        "--moved",
        type=Path,
        help="folder that --cubins wrote for the sources of the table; a kernel is unchanged if "
        "only the offsets of its arguments differ",
    )
    options = parser.parse_args()
    of_records = [k for rows in recorded().values() for *_, kernels in rows for k in kernels]
    tested = representative()
    head, before = {}, {}
    if options.restamp or not options.update:
        head, before, _ = read_table()
        if reason := why_not_comparable(head):
            print(reason, file=sys.stderr)
            return 2
    now = compiled([*tested, *of_records], before)
    failed = [code for code in now.values() if not isinstance(code, Code)]
    if options.cubins:
        options.cubins.mkdir(parents=True, exist_ok=True)
        for code in now.values():
            if isinstance(code, Code):
                (options.cubins / f"{code.code}.cubin").write_bytes(code.image)
    left = 0
    if options.restamp or not options.update:
        if options.moved:
            before = {**before, **dict(moved(before, now, options.moved))}
        failed = list(differences(before, now))
        print("\n".join([*failed, f"{len(now) - len(failed)} of {len(now)} kernels are the same"]))
        left = restamp(head, before, now) if options.restamp else 0
    if options.update:
        write_table(now, tested)
        print(f"{len(now)} kernels in {TABLE}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
