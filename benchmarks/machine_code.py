"""Table of hashes of machine code, which shows whether a change of the sources changed a kernel.

    python benchmarks/machine_code.py              compile everything in the table, and compare
    python benchmarks/machine_code.py --update     write a new table
    python benchmarks/machine_code.py --only REGEX --update    compile only the kernels whose row
                                                   matches, such as new ones, and keep other rows
    python benchmarks/machine_code.py --restamp    write the digests of the present sources to
                                                   records and tuned tiles of unchanged kernels
    python benchmarks/machine_code.py --restamp --update    do both, in this order
    python benchmarks/machine_code.py --cubins FOLDER    write the machine code to a folder, too
    python benchmarks/machine_code.py --moved FOLDER     ignore moved kernel arguments
                                                   (`instructions.py`), compared with the --cubins
                                                   folder of the earlier sources

The table holds the representative kernels in `machine_code_kernels.py`, which the tests compile,
too, and every kernel of a record or a shipped tile. An entry is one translation unit. The rows of a
family in a record or a tuned table get a new digest only if two conditions hold: they were measured
on the sources that the table was written for, and all of their kernels have the same instructions
today. Comments and file names do not change a digest. No GPU is needed.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from instructions import same_but_for_arguments
from machine_code_kernels import FAMILY_BY_NAME, Kernel, representative

from cupy_flash.cli.build import kernel_sets
from cupy_flash.cli.build.build import Job, build
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.records import records
from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.cli.records.report import Row, write_whole
from cupy_flash.gpu.compiler import Cubin
from cupy_flash.planning import tuning

HERE = Path(__file__).resolve().parent
TABLE = HERE / "machine_code.json"
RESULTS = HERE / "results"

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
class Code:
    """Result of a compilation: code hash, registers of the main kernel, and largest spill."""

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


# ---- Kernels of records and tiles


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
    # `served` returns a reason instead of a case if the provider cannot run on this machine. Such a
    # provider, which rebuilds the block mask in each call, computes the row's case itself.
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


def _why_not_kept(head: Row, kept: Iterable[Kernel]) -> str | None:
    """Return why rows of the table cannot be kept in a new one; None if they can."""
    for family in dict.fromkeys(kernel.family for kernel in kept if kernel.case is not None):
        if head["digests"].get(family) != FAMILY_BY_NAME[family].digest():
            return f"the sources of {family} have changed since the table was written"
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
    parser.add_argument(
        "--only",
        metavar="REGEX",
        help="compile only the kernels whose row in the table, as JSON, matches",
    )
    options = parser.parse_args()
    if options.only is not None and options.restamp:
        parser.error("--restamp needs all kernels; leave out --only")
    of_records = [k for rows in recorded().values() for *_, kernels in rows for k in kernels]
    tested = representative()
    every = list(dict.fromkeys([*tested, *of_records]))
    chosen = [k for k in every if re.search(options.only or "", json.dumps(k.as_json()))]
    head, before = {}, {}
    if options.restamp or not options.update or len(chosen) < len(every):
        head, before, _ = read_table()
        if reason := why_not_comparable(head):
            print(reason, file=sys.stderr)
            return 2
    kept = {k: before[k] for k in set(every).difference(chosen) if k in before}
    if options.update and (reason := _why_not_kept(head, kept)):
        print(reason, file=sys.stderr)
        return 2
    now = compiled(chosen, before)
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
        found = {**kept, **now}
        write_table({kernel: found[kernel] for kernel in every if kernel in found}, tested)
        print(f"{len(found)} kernels in {TABLE}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
