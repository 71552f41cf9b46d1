"""Write docs/reference/support.md from the planner and from the kernels that tests ran on a GPU.

    python benchmarks/support_matrix/support_page.py            write the page
    python benchmarks/support_matrix/support_page.py --check    exit with 1 if the page is not up to
                                                                date, or kernels have changed since

The prose of the page is in page.md, where a name in double braces stands for a table. Families and
refusals are those of the planner. `pytest --support-json FILE` wrote support.json, next to this
script, on a GPU. Without that file, no kernel counts as run.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from support_calls import refusal_on_cpu
from support_cells import ARCHS, HOPPER, OTHERS, SIXTEEN_BIT, TURING, Outcome, merged, outcome
from support_dims import all_dims
from support_features import CACHES, DENSE, FLOAT8, VARLEN, Feature
from support_runs import FILE, RANGES, SAME_BITS, Ran, changed, read

from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.cli.records.report import markdown_row
from cupy_flash.families import FAMILIES
from cupy_flash.problem.arrays import DTYPES

TEMPLATE = Path(__file__).resolve().parent / "page.md"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "support.md"

FEATURES = (*DENSE, *VARLEN, *CACHES)
# Headings of the directions that have kernels.
HEADINGS = {
    "forward": "forward",
    "backward": "backward",
    "tangent": "jvp",
    "received": "attention_received",
}
# Dtypes of the columns of the table of GPUs. One column is for both 16-bit dtypes.
_COLUMNS = {
    "float16, bfloat16": SIXTEEN_BIT,
    "float32": ("float32",),
    "float64": ("float64",),
}
# Beginning of the message if no family serves a problem, which the page leaves out.
_NO_FAMILY = "no kernel family serves this problem: "
# Cell of a feature that the functions of a direction do not have.
NO_CALL = "–"
_WRAP = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)


class Page:
    """Rendered page.

    Parameters
    ----------
    template
        Text of the page with names of tables in double braces.
    ran
        Kernels that tests ran, or None if no tests ran on a GPU.
    """

    def __init__(self, template: str, ran: Ran | None) -> None:
        self._ran = ran
        self._reasons: dict[str, str] = {}
        # The reasons come last on the page, after all tables that refer to them.
        self.text = re.sub(r"\{\{(\w+)\}\}", lambda match: getattr(self, match[1])(), template)

    def runs(self) -> str:
        """Return a sentence for each test run."""
        if self._ran is None:
            return "No test run on a GPU is recorded, so that no cell says that a kernel works."
        lines = (_WRAP(_run_text(run), subsequent_indent="  ") for run in self._ran.runs)
        return "\n".join(["These test runs are recorded:\n", *lines])

    def gpus(self) -> str:
        """Return the table of the families by GPU, call and dtype."""
        calls = {heading: (DENSE[0], name) for name, heading in HEADINGS.items()}
        calls = {"forward": calls.pop("forward"), "decoding": (CACHES[0], "forward"), **calls}
        rows = []
        for group in (HOPPER, OTHERS, TURING):
            for heading, (feature, direction) in calls.items():
                cells = [
                    self._cell(feature, direction, dtypes, group) for dtypes in _COLUMNS.values()
                ]
                rows.append([_names(group), heading, *cells])
        return _table(["GPU", "call", *_COLUMNS], rows)

    def float8(self) -> str:
        """Return a sentence on float8 inputs."""
        cell = self._cell(FLOAT8, "forward", ("float8_e4m3fn",), ARCHS)
        return _WRAP(f"Float8 inputs of `flash_attention`: {cell}.")

    def features(self) -> str:
        """Return the table of features of 16-bit dtypes on sm_90."""
        rows = [
            [feature.title, *(self._cell(feature, name, SIXTEEN_BIT, HOPPER) for name in HEADINGS)]
            for feature in FEATURES
        ]
        return _table(["feature", *HEADINGS.values()], rows)

    def hopper(self) -> str:
        """Return the table of other dtypes on sm_90."""
        return self._groups(("float32", "float64"), HOPPER)

    def others(self) -> str:
        """Return the table of other GPUs from sm_80 on."""
        return self._groups(_COLUMNS, OTHERS)

    def turing(self) -> str:
        """Return the table of sm_75."""
        return self._groups(_COLUMNS, TURING)

    def _groups(self, columns: Iterable[str], archs: Sequence[int]) -> str:
        """Return a table with a row for all features of a dtype and a call that have one cell."""
        rows = []
        for column in columns:
            for direction, heading in HEADINGS.items():
                cells: dict[str, list[str]] = {}
                for feature in FEATURES:
                    if direction in feature.directions:
                        cell = self._cell(feature, direction, _COLUMNS[column], archs)
                        cells.setdefault(cell, []).append(feature.title)
                most = max(cells, key=lambda cell: len(cells[cell]))
                del cells[most]
                rows += [[column, heading, ", ".join(found), cell] for cell, found in cells.items()]
                rows.append([column, heading, "all others" if cells else "all", most])
        return _table(["dtypes", "call", "features", "cell"], rows)

    def _outcomes(
        self, feature: Feature, direction: str, dtypes: Sequence[str], archs: Sequence[int]
    ) -> list[tuple[Outcome, tuple[int, ...]]]:
        """Return the distinct outcomes of a call, each with its architectures."""
        found: dict[tuple[str, bool, bool, bool], tuple[Outcome, tuple[int, ...]]] = {}
        for arch in archs:
            outcomes = [outcome(self._ran, feature, direction, dtype, arch) for dtype in dtypes]
            for each in merged(outcomes):
                key = (each.family, each.falls_back, each.ran, bool(each.reason))
                first, its_archs = found.get(key, (each, ()))
                found[key] = first, (*its_archs, arch)
        return list(found.values())

    def _cell(
        self, feature: Feature, direction: str, dtypes: Sequence[str], archs: Sequence[int]
    ) -> str:
        """Return the text of a cell for some dtypes and architectures."""
        if direction not in feature.directions:
            return NO_CALL
        found = self._outcomes(feature, direction, dtypes, archs)
        if len(found) == 1:
            return self._text(found[0][0])
        return "; ".join(f"{_names(its_archs)}: {self._text(each)}" for each, its_archs in found)

    def _text(self, each: Outcome) -> str:
        if each.reason:
            return f"refused [{self._number(each.reason)}](#reasons)"
        if not each.family:
            return "array operations"
        status = "works" if each.ran else "compiles"
        return f"{status}, {'falls back to ' * each.falls_back}`{each.family}`"

    def _number(self, reason: str) -> int:
        """Return the number of a reason in the list at the end of the page.

        Reasons that differ only in the architecture have one number.
        """
        key = re.sub(r"(not|is) sm_\d+", "", reason.removeprefix(_NO_FAMILY))
        self._reasons.setdefault(key, reason.removeprefix(_NO_FAMILY))
        return list(self._reasons).index(key) + 1

    def dims(self) -> str:
        """Return the table of head dimensions by family and dtype."""
        rows = []
        for (direction, family), by_dtype in all_dims().items():
            groups: dict[tuple[str, ...], list[str]] = {}
            for dtype, dims in by_dtype.items():
                cells = (_dims_text(dims.ranges), "any" if dims.any_alignment else "16 bytes")
                groups.setdefault(cells, []).append(dtype)
            for cells, dtypes in groups.items():
                name = kernel_name(family, direction)
                heading = f"`{family}`, {HEADINGS[direction]}"
                invariant = direction == "forward" and FAMILIES[direction][family].serves_any_rows
                row = [heading, ", ".join(dtypes), *cells, "yes" if invariant else "no"]
                rows.append([*row, self._repeated(name, dtypes), self._ran_dims(name, dtypes)])
        headings = ["family", "dtypes", "head_dim", "row alignment", "batch-invariant"]
        return _table([*headings, "deterministic", "ran with head_dim"], rows)

    def _ran_dims(self, name: str, dtypes: Sequence[str]) -> str:
        """Return the architectures and ranges of head dimensions for which a kernel has run."""
        archs = sorted({kernel.arch for kernel in self._ran.rows}) if self._ran else []
        found = {arch: self._ran.ranges(arch, name, dtypes) for arch in archs if self._ran}
        texts = [f"sm_{arch}: {_ranges_text(ranges)}" for arch, ranges in found.items() if ranges]
        return "; ".join(texts) or "not run"

    def _repeated(self, name: str, dtypes: Sequence[str]) -> str:
        """Return whether tests compared the bits of repeated calls of a kernel."""
        rows = self._ran.rows.items() if self._ran else ()
        compared = any(
            kernel.name == name and kernel.dtype in dtypes and SAME_BITS in features
            for kernel, features in rows
        )
        return "yes, compared" if compared else "yes, not compared"

    def cpu(self) -> str:
        """Return the calls that the CPU backend refuses."""
        refused: dict[str, list[str]] = {}
        for feature in FEATURES:
            for direction in feature.directions:
                for dtype in DTYPES:
                    if reason := refusal_on_cpu(feature, direction, dtype):
                        refused.setdefault(reason, []).append(f"{feature.title}, {dtype}")
        lines = [
            _WRAP(
                f"- {'; '.join(dict.fromkeys(calls))}: refused [{self._number(reason)}](#reasons).",
                subsequent_indent="  ",
            )
            for reason, calls in refused.items()
        ]
        return "\n".join(lines) or "- No call is refused."

    def reasons(self) -> str:
        """Return the numbered reasons of refusals."""
        return "\n".join(
            _WRAP(f"{number}. {reason}.", subsequent_indent=" " * len(f"{number}. "))
            for number, reason in enumerate(self._reasons.values(), 1)
        )


def _run_text(run: Mapping[str, Any]) -> str:
    commit = f"commit {run['commit'][:12]}" if run["commit"] else "an unknown commit"
    dirty = ", with changes that are not committed" if run["dirty"] else ""
    versions = run["versions"]
    return (
        f"- {run['gpu']} ({run['sm']}): {run['tests']} tests passed on {run['date'][:10]} at "
        f"{commit}{dirty}, with CuPy {versions.get('cupy')}, NVRTC {versions.get('nvrtc')} and "
        f"driver {versions.get('driver')}."
    )


def _names(archs: Sequence[int]) -> str:
    """Return the names of architectures; consecutive ones are a range."""
    if archs == OTHERS:
        return "other GPUs from sm_80 on"
    first, last = (ARCHS.index(archs[index]) for index in (0, -1))
    if len(archs) > 2 and last - first + 1 == len(archs):
        return f"sm_{archs[0]} to sm_{archs[-1]}"
    return ", ".join(f"sm_{arch}" for arch in archs)


def _dims_text(ranges: Mapping[int, tuple[tuple[int, int], ...]]) -> str:
    """Return the ranges of head dimensions, with the architectures of each."""
    archs: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for arch, its_ranges in ranges.items():
        archs.setdefault(its_ranges, []).append(arch)
    texts = (
        f"{_names(its_archs)}: {', '.join(f'{first} to {last}' for first, last in its_ranges)}"
        for its_ranges, its_archs in archs.items()
    )
    return "; ".join(texts)


def _ranges_text(ranges: Sequence[int]) -> str:
    """Return the ranges of `RANGES` with these largest head dimensions, joined where adjacent."""
    texts = []
    for is_known, group in itertools.groupby(range(len(RANGES)), lambda i: RANGES[i] in ranges):
        first, *others = group
        if is_known:
            last = others[-1] if others else first
            texts.append(f"{RANGES[first - 1] + 1 if first else 1} to {RANGES[last]}")
    return ", ".join(texts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = markdown_row(["---"] * len(headings))
    return "\n".join([markdown_row(headings), rule, *map(markdown_row, rows)])


def rendered(file: Path = FILE) -> str:
    """Return the text of the page, for the kernels in a file."""
    return Page(TEMPLATE.read_text(encoding="utf-8"), read(file)).text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare the page")
    options = parser.parse_args(arguments)
    text = rendered()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    ran = read(FILE)
    if ran is not None and (names := changed(ran)):
        print(f"{FILE} is of other kernels: {', '.join(names)} changed since", file=sys.stderr)
        return 1
    if PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is not up to date; run {Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
