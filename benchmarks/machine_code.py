"""Hashes of kernels' machine code: whether a change of the sources changed any kernel.

    python benchmarks/machine_code.py              compile everything in the table, and compare
    python benchmarks/machine_code.py --update     write the table anew
    python benchmarks/machine_code.py --restamp    give records and tuned tiles of unchanged kernels
                                                   the digests of the present sources

The table holds a set of kernels over all families, dtypes, masks, layouts and some architectures,
which the tests compile too, and every kernel of a record or a shipped tile. A record or a tile is
stamped anew only if it was measured on the sources that the table was written for, and all of its
kernels are the same today, instruction by instruction. No GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupy_flash.cli.build import kernel_sets
from cupy_flash.cli.build.build import Job, build
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.records import records
from cupy_flash.cli.records.report import Row, write_whole
from cupy_flash.cli.tune.findings import digest_of
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.compiler import Cubin
from cupy_flash.planning import tuning
from cupy_flash.planning.planner import make_plan, plan_tile
from cupy_flash.problem.device import device_for_arch

HERE = Path(__file__).resolve().parent
TABLE = HERE / "machine_code.json"
RESULTS = HERE / "results"

# Of what is no family, titles that begin so.
_OTHERS = (
    "append bfloat16 head_dim 128",
    "append float32 head_dim 64 page",
    "combine bfloat16, 16",
    "combine float32, 32",
)
# Sections of a cubin with instructions.
_CODE = ".text."
_PAGED = re.compile(r"cupy_flash-page(\d+)")


@dataclass(frozen=True)
class Kernel:
    """What names a kernel, whatever the sources are called.

    Attributes
    ----------
    arch
        10 times its compute capability.
    family
        Of `FAMILIES`, or "append" or "combine".
    tile
        Names and values of the tile's fields; the unit's title, of no family.
    case
        A case that it serves; None of no family.
    """

    arch: int
    family: str
    tile: tuple[tuple[str, int], ...] | str
    case: Case | None

    @classmethod
    def of(cls, arch: int, family: str, tile: Mapping[str, int], case: Case) -> Kernel:
        # Its lengths make no difference.
        return cls(arch, family, tuple(tile.items()), dataclasses.replace(case, lengths=None))

    def job(self) -> Job:
        """How it is compiled."""
        device = device_for_arch(self.arch)
        if self.case is None:
            units = kernel_sets.other_units(everything=False)
            unit = next(unit for unit in units if unit.title == self.tile)
            return Job(unit, device, ())
        family = FAMILIES[self.family]
        tile = family.tile_type(**dict(self.tile))
        return Job.of(plan_tile(family, self.case.problem(), device, tile, reason=""))

    def as_json(self) -> Row:
        """As the table holds it."""
        if self.case is None:
            return {"arch": self.arch, "family": self.family, "title": self.tile}
        given = dataclasses.asdict(self.case)
        usual = {field.name: field.default for field in dataclasses.fields(Case)}
        case = {name: value for name, value in given.items() if value != usual[name]}
        return {"arch": self.arch, "family": self.family, "tile": dict(self.tile), "case": case}

    @classmethod
    def from_json(cls, row: Row) -> Kernel:
        if "case" not in row:
            return cls(row["arch"], row["family"], row["title"], None)
        return cls.of(row["arch"], row["family"], row["tile"], Case(**row["case"]))


@dataclass(frozen=True)
class Code:
    """What came of compiling a kernel."""

    code: str
    registers: int
    spill_bytes: int


def code_hash(image: bytes) -> str:
    """Sixteen hex digits over the instructions of a cubin, an ELF file of 64 bits."""
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


def compiled(kernels: Iterable[Kernel]) -> dict[Kernel, Code | str]:
    """What comes of each: its code, or the compiler's words."""
    kernels = list(dict.fromkeys(kernels))
    jobs = [kernel.job() for kernel in kernels]
    # Cases may share a unit.
    units = {(job.unit.text, job.device.arch): job for job in jobs}
    found: dict[tuple[str, int], Code | str] = {}
    keys = list(units)
    for index, built in build(list(units.values())):
        if built.cubin is None or built.resources is None:
            found[keys[index]] = built.error or "no machine code"
        else:
            found[keys[index]] = _code(built.cubin, built.resources)
    return {
        kernel: found[job.unit.text, job.device.arch]
        for kernel, job in zip(kernels, jobs, strict=True)
    }


def _code(cubin: Cubin, resources: Any) -> Code:
    return Code(code_hash(cubin.image), resources.registers, resources.spill_bytes)


# ---- Which kernels


def representative() -> list[Kernel]:
    """Over all families, dtypes, masks, layouts and kinds of rows."""
    found: list[Kernel] = []
    for arch in (80, 90, 120):
        found += _defaults(arch)
    for arch in (75, 86, 89, 100):
        found += _few(arch)
    return found


def _default(arch: int, case: Case, family: str | None = None) -> Kernel:
    plan = make_plan(case.problem(), device_for_arch(arch), family=family)
    return Kernel.of(arch, plan.family, dataclasses.asdict(plan.tile), case)


def _defaults(arch: int) -> Iterator[Kernel]:
    for dtype, dim, causal in (
        ("bfloat16", 128, True),
        ("bfloat16", 64, False),
        ("float16", 128, False),
        ("float16", 256, True),
        ("float32", 64, True),
        ("float32", 128, False),
    ):
        yield _default(arch, Case(dtype, 4, 4096, 4096, 16, 16, dim, dim, causal))
    for dtype, family in (("float16", "mma"), ("bfloat16", "simt"), ("float32", "naive")):
        yield _default(arch, Case(dtype, 4, 4096, 4096, 16, 16, 64, 64, True), family)
    # Rows of single elements; few query tiles, whose keys are split; a scale of either sign.
    yield _default(arch, Case("bfloat16", 4, 999, 999, 4, 4, 65, 33, True))
    yield _default(arch, Case("float32", 4, 999, 999, 4, 4, 65, 33, False))
    yield _default(arch, Case("float64", 1, 999, 999, 4, 4, 64, 64, True))
    yield _default(arch, Case("float16", 1, 64, 65536, 1, 1, 128, 128, False), "mma")
    yield _default(arch, Case("float32", 1, 64, 65536, 1, 1, 64, 64, False))
    negative = Case("bfloat16", 4, 4096, 4096, 16, 16, 64, 64, True, softmax_scale=-1.0)
    yield _default(arch, negative)
    for dtype, dim in (("bfloat16", 128), ("float32", 64)):
        heads = (16, 4, dim, dim, True)
        yield _default(arch, Case(dtype, 8, 2048, 2048, *heads, kind="varlen"))
        for rows, page_size in ((1, 0), (1, 16), (512, 16)):
            cached = Case(dtype, 8, rows, 4096, *heads, kind="cache", page_size=page_size)
            yield _default(arch, cached)
    yield _default(arch, Case("float16", 64, 1, 1024, 32, 8, 64, 64, kind="cache"))
    for unit in kernel_sets.other_units(everything=False):
        if unit.title.startswith(_OTHERS):
            yield Kernel(arch, unit.title.split()[0], unit.title, None)


def _few(arch: int) -> Iterator[Kernel]:
    for dtype, dim, causal in (("float16", 128, True), ("float32", 64, False)):
        yield _default(arch, Case(dtype, 4, 4096, 4096, 16, 16, dim, dim, causal))
    yield _default(arch, Case("float16", 8, 1, 4096, 32, 8, 128, 128, kind="cache", page_size=16))


def recorded() -> dict[str, list[tuple[str, str, list[Kernel]]]]:
    """By file: family, digest and kernels of each row of a record, or entry of a table."""
    found = {path.name: list(_kernels_of_rows(path)) for path in sorted(RESULTS.glob("*.json"))}
    for path in sorted(tuning.SHIPPED_DIR.glob("*.json")):
        found[path.name] = [
            (entry.family, entry.digest, list(_kernels_of_entry(entry)))
            for entry in tuning.read_table(path)
        ]
    return found


def _kernels_of_rows(path: Path) -> Iterator[tuple[str, str, list[Kernel]]]:
    for row in records.read(path).rows:
        family, digest = row.get("family"), row.get("kernel_digest")
        if not digest or family not in FAMILIES:
            continue
        arch = 90
        if "cases" in row:
            fields = {field.name for field in dataclasses.fields(Case)}
            cases = [{k: v for k, v in case.items() if k in fields} for case in row["cases"]]
            tiles = (row["default_tile"], row["best_tile"])
            kernels = [
                Kernel.of(arch, family, tile, Case(**{**case, "lengths": None}))
                for case, tile in itertools.product(cases, tiles)
            ]
        else:
            case = dataclasses.replace(records.case_of(row), lengths=None)
            if paged := _PAGED.fullmatch(row["provider"]):
                case = dataclasses.replace(case, page_size=int(paged[1]))
            kernels = [Kernel.of(arch, family, row["tile"], case)]
        yield family, digest, kernels


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
    )
    yield Kernel.of(entry.arch, entry.family, entry.tile, case)


# ---- The table


def write_table(found: Mapping[Kernel, Code | str], tested: Iterable[Kernel]) -> None:
    """The table of what was compiled."""
    from cupy.cuda import nvrtc

    tested = set(tested)
    rows = [
        {**kernel.as_json(), "tested": kernel in tested, **dataclasses.asdict(code)}
        for kernel, code in found.items()
        if isinstance(code, Code)
    ]
    families = sorted({kernel.family for kernel in found if kernel.case is not None})
    head = {
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
        "digests": {family: digest_of(family) for family in families},
    }
    lines = [json.dumps(row) for row in rows]
    text = json.dumps(head)[:-1] + ', "kernels": [\n' + ",\n".join(lines) + "\n]}\n"
    write_whole(TABLE, text.encode())


def read_table() -> tuple[Row, dict[Kernel, Code], list[Kernel]]:
    """Its head, all kernels, and those that the tests compile."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    kernels = {
        Kernel.from_json(row): Code(row["code"], row["registers"], row["spill_bytes"])
        for row in data["kernels"]
    }
    tested = [Kernel.from_json(row) for row in data["kernels"] if row["tested"]]
    return {"nvrtc": data["nvrtc"], "digests": data["digests"]}, kernels, tested


def why_not_comparable(head: Row) -> str | None:
    """Why the present compiler makes other code from the same source, or None."""
    from cupy.cuda import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    if version == head["nvrtc"]:
        return None
    return f"the table is of NVRTC {head['nvrtc']}, and this is {version}"


def differences(before: Mapping[Kernel, Code], now: Mapping[Kernel, Code | str]) -> Iterator[str]:
    """A line for each kernel that is another than in the table."""
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


# ---- Records and tiles


def restamp(head: Row, before: Mapping[Kernel, Code], now: Mapping[Kernel, Code | str]) -> int:
    """Put the present digests where all kernels are as they were; return how many files are not."""
    left = 0
    for name, rows in recorded().items():
        stale = [row for row in rows if row[1] != digest_of(row[0])]
        if not stale:
            continue
        reasons = {
            reason
            for family, digest, kernels in stale
            if (reason := _why_not_same(family, digest, kernels, head, before, now))
        }
        if reasons:
            left += 1
            print(f"{name}: {'; '.join(sorted(reasons))}")
            continue
        folder = RESULTS if (RESULTS / name).exists() else tuning.SHIPPED_DIR
        text = (folder / name).read_text(encoding="utf-8")
        for family, digest in {(family, digest) for family, digest, _ in stale}:
            text = text.replace(f'"{digest}"', f'"{digest_of(family)}"')
        write_whole(folder / name, text.encode())
        print(f"{name}: stamped anew, {len(stale)} rows")
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
    parser.add_argument("--update", action="store_true", help="write the table anew")
    parser.add_argument("--restamp", action="store_true", help="put the present digests")
    options = parser.parse_args()
    of_records = [k for rows in recorded().values() for *_, kernels in rows for k in kernels]
    tested = representative()
    if options.update:
        found = compiled([*tested, *of_records])
        write_table(found, tested)
        failed = [code for code in found.values() if not isinstance(code, Code)]
        print("\n".join(failed) or f"{len(found)} kernels in {TABLE}")
        return 1 if failed else 0
    head, before, _ = read_table()
    if reason := why_not_comparable(head):
        print(reason, file=sys.stderr)
        return 2
    now = compiled([*tested, *of_records])
    changed = list(differences(before, now))
    print("\n".join([*changed, f"{len(now) - len(changed)} of {len(now)} kernels are the same"]))
    left = restamp(head, before, now) if options.restamp else 0
    return 1 if changed or left else 0


if __name__ == "__main__":
    sys.exit(main())
