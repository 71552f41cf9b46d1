"""Kernels that passing tests ran on a GPU, and the JSON file that names them.

`pytest --support-json FILE` writes the file, and `support_page.py` reads it. Each row names a
kernel by architecture, family, dtype and range of head dimensions, with the features of all calls
for which it ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cupy_flash.cli.records.environment import kernel_name
from cupy_flash.cli.records.report import write_whole
from cupy_flash.families import FAMILIES
from cupy_flash.families.contract import source_digest
from cupy_flash.gpu import append
from cupy_flash.planning.planner import Plan
from cupy_flash.problem.gradient import OF_MOD
from cupy_flash.problem.problem import Problem

FILE = Path(__file__).resolve().parent / "support.json"

# Largest head_dim of each range that rows distinguish. The larger of head_dim and head_dim_v
# counts.
RANGES = (64, 128, 192, 256, 512, 576)
# Kernel that appends rows to a KV cache and rotates queries and keys. It belongs to no family.
APPEND = "append"

# Feature of a kernel in tests that compare the bits of repeated calls.
SAME_BITS = "same bits"
# Feature of a kernel that was launched while a CUDA graph was captured.
CAPTURED = "CUDA graph"

# Modifications whose names are fields of the argument struct of generated CUDA source.
_FIELDS = ("alibi_slopes", "bias", "cache_leftpad", "mask", "seqused_q", "softcap", "tree_mask")
# Fields that change scores, and those that mask pairs.
_SCORES = {"alibi_slopes", "bias", "softcap"}
_MASKS = {"cache_leftpad", "mask", "seqused_q", "tree_mask"}


class Kernel(NamedTuple):
    """Kernel as far as rows distinguish kernels.

    Attributes
    ----------
    arch
        Compute capability times ten.
    name
        Name of the family, with the direction if that is not forward, or `APPEND`.
    dtype
        Name of the dtype of q, k and v.
    head_dim
        Largest head_dim of the range, one of `RANGES`.
    """

    arch: int
    name: str
    dtype: str
    head_dim: int


# Rows of the file: for each kernel, the features of all calls for which it ran.
Rows = dict[Kernel, set[str]]


@dataclass
class Ran:
    """Contents of the file.

    Attributes
    ----------
    digests
        Digest of the kernel sources, by kernel name.
    runs
        Metadata of each test run: commit, GPU, versions and number of tests.
    rows
        Kernels that ran.
    """

    digests: dict[str, str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)

    def has(self, kernel: Kernel, features: set[str] | frozenset[str]) -> bool:
        """Return whether a kernel ran for each of these features, with any head dimensions."""
        alike = [found for each, found in self.rows.items() if each[:3] == kernel[:3]]
        return bool(alike) and features <= set().union(*alike)

    def ranges(self, arch: int, name: str, dtypes: Iterable[str]) -> list[int]:
        """Return the ranges of head dimensions for which a kernel has run."""
        return sorted(
            {k.head_dim for k in self.rows if k[:2] == (arch, name) and k.dtype in dtypes}
        )


def kernel_of(plan: Plan) -> Kernel:
    """Return the kernel of a plan for a GPU."""
    assert plan.device is not None
    problem = plan.problem
    name = kernel_name(plan.family, problem.direction)
    return Kernel(plan.device.arch, name, problem.dtype, range_of(problem))


def range_of(problem: Any) -> int:
    """Return the range of the head dimensions of a problem or an append."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    return next(largest for largest in RANGES if head_dim <= largest)


def features_of(problem: Problem) -> set[str]:
    """Return the features of a problem, mostly named after the arguments that ask for them."""
    layout = problem.layout
    features = {
        "causal": problem.causal,
        "grouped": problem.heads_q != problem.heads_kv,
        "head_dim_v": problem.head_dim != problem.head_dim_v,
        "varlen": layout.kind == "varlen",
        "kvcache": layout.kind == "kvcache",
        "seqlens_k": layout.kind == "padded",
        "block_table": layout.page_size > 0,
        "batch_invariant": layout.batch_invariant,
        "num_splits": (layout.num_splits or 1) > 1,
        "values_in_keys": problem.values_in_keys,
    }
    found = {name for name, applies in features.items() if applies} | set(problem.statistics)
    if problem.scales is not None and not problem.is_float8:
        found.add(problem.tensors["k"].dtype)
    if problem.gradient is not None:
        wrt = problem.gradient.wrt
        found |= {f"gradient of {'captures' if OF_MOD in name else name}" for name in wrt}
    return found | _features_of_score(problem)


def _features_of_score(problem: Problem) -> set[str]:
    score = problem.score
    if score is None:
        return set()
    names = {name for name in score.dtype.names or () if name in _FIELDS}
    features = {
        "window": score.left is not None or score.right is not None,
        "prefix_lens": score.prefix,
        "q_offset": score.offsets,
        "sinks": score.sinks,
        "dropout": score.dropout,
        # A function together with another change of scores, or mask, is not recognized.
        "score_mod": score.changes_scores and not names & _SCORES,
        "mask_mod": score.masks_pairs and not names & _MASKS and score.block is None,
        "block_list": score.block is not None,
    }
    return names | {name for name, applies in features.items() if applies}


def digests() -> dict[str, str]:
    """Return the digest of the present sources of each kernel, by its name."""
    found = {
        kernel_name(name, direction): family.digest()
        for direction, families in FAMILIES.items()
        for name, family in families.items()
    }
    return found | {APPEND: source_digest(append.SOURCE)}


def add(rows: Rows, kernel: Kernel, features: Iterable[str]) -> None:
    """Add the features of a call to the row of its kernel."""
    rows.setdefault(kernel, set()).update(features)


def as_lists(rows: Rows) -> list[list[Any]]:
    """Return rows as sorted lists, which JSON and xdist can send."""
    return [[*kernel, sorted(features)] for kernel, features in sorted(rows.items())]


def from_lists(lists: Sequence[Sequence[Any]]) -> Rows:
    """Return the rows that `as_lists` was given."""
    return {Kernel(*kernel): set(features) for *kernel, features in lists}


def read(path: Path) -> Ran | None:
    """Return the contents of a file, or None if there is none."""
    if not path.is_file():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return Ran(data["digests"], data["runs"], from_lists(data["kernels"]))


def write(path: Path, run: Mapping[str, Any], rows: Rows) -> Ran:
    """Add a test run to a file; replace a file of other kernel sources. Return the contents.

    A run that differs from an earlier one only in its date and number of tests is added to that.
    """
    ran = read(path)
    if ran is None or ran.digests != digests():
        ran = Ran(digests())
    for kernel, features in rows.items():
        add(ran.rows, kernel, features)
    _add_run(ran.runs, dict(run))
    head = json.dumps({"digests": dict(sorted(ran.digests.items())), "runs": ran.runs}, indent=1)
    lines = ",\n".join(map(json.dumps, as_lists(ran.rows)))
    text = f'{head[:-2]},\n "kernels": [\n{lines}\n]}}\n'
    write_whole(path, text.encode())
    return ran


def _add_run(runs: list[dict[str, Any]], run: dict[str, Any]) -> None:
    sums = ("date", "tests")
    alike = {name: value for name, value in run.items() if name not in sums}
    for earlier in runs:
        if {name: value for name, value in earlier.items() if name not in sums} == alike:
            earlier["date"], earlier["tests"] = run["date"], earlier["tests"] + run["tests"]
            return
    runs.append(run)


def changed(ran: Ran) -> list[str]:
    """Return the names of the kernels whose sources have changed since the tests ran."""
    now = digests()
    return sorted(name for name in {*now, *ran.digests} if now.get(name) != ran.digests.get(name))
