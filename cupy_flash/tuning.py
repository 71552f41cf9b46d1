"""The tuned-tile table: shipped per GPU, overlaid by the user's own."""

from __future__ import annotations

import functools
import json
import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupy_flash.problem import Problem
from cupy_flash.sequences import Sequences

logger = logging.getLogger("cupy_flash")

TABLE_VERSION = 2
SHIPPED_DIR = Path(__file__).resolve().parent / "tuned"
HOME_VARIABLE = "CUPY_FLASH_HOME"
# Longer sequences, and more query rows over the batch and all heads, are tuned alike.
MOST_POSITIONS = 16384
MOST_ROWS = 65536


@dataclass(frozen=True)
class Entry:
    """One tuned tile.

    Attributes
    ----------
    gpu
        Device name, or ``"cpu"``.
    family, digest
        Kernel family and the digest of its sources when it was tuned.
    problem_class
        See `problem_class`.
    tile
        Field names and values of the family's tile.
    tflops
        What it reached.
    """

    gpu: str
    family: str
    digest: str
    problem_class: str
    tile: dict[str, int]
    tflops: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the entry is found by."""
        return (self.gpu, self.family, self.digest, self.problem_class)


class TableError(ValueError):
    """A table file that cannot be read as one."""


def problem_class(problem: Problem) -> str:
    """The class of problems that share a tuned tile.

    dtype, head dims, causal or not, the sequence lengths and the number of query rows over the
    batch and all heads rounded to powers of four, and the alignment of the rows; and where the
    sequences are not blocks of equal length, whether they are packed, cached or paged.
    """
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    parts = [
        problem.dtype,
        f"d{problem.head_dim}",
        f"dv{problem.head_dim_v}",
        "causal" if problem.causal else "full",
        f"q{_bucket(problem.seqlen_q, MOST_POSITIONS)}",
        f"k{_bucket(problem.seqlen_k, MOST_POSITIONS)}",
        f"rows{_bucket(rows, MOST_ROWS)}",
        f"align{problem.alignment}",
    ]
    if problem.sequences is not None:
        parts.append(_kind(problem.sequences))
    return " ".join(parts)


def _kind(sequences: Sequences) -> str:
    """How sequences lie, in a word without spaces."""
    queries = "packed" if sequences.packed_q else ""
    keys = f"page{sequences.page_size}" if sequences.page_size else ""
    return "-".join(filter(None, (queries, keys))) or "cache"


def _bucket(value: int, most: int) -> int:
    """The nearest power of four, by ratio and at most `most`; 0 stays 0."""
    if value <= 0:
        return 0
    low = 1 << (value.bit_length() - 1) // 2 * 2
    return min(most, low * 4 if value >= 2 * low else low)


def user_table_path() -> Path:
    """Where the user's own table lies: ``$CUPY_FLASH_HOME``, by default ``~/.cupy_flash``."""
    # Not Path.home(), which raises for a user without one.
    home = os.environ.get(HOME_VARIABLE) or os.path.expanduser("~/.cupy_flash")
    return Path(home) / "tuned.json"


def read_table(path: Path) -> list[Entry]:
    """Read a table file's entries; a missing one is empty.

    Raises
    ------
    TableError
        If the file is there and is not a table of this version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        # The text of an OSError names the file once more.
        why = getattr(error, "strerror", None) or error
        raise TableError(f"{path} cannot be read as a tuned table: {why}") from error
    try:
        if data["version"] != TABLE_VERSION:
            raise TableError(f"{path} has version {data['version']}; expected {TABLE_VERSION}")
        return [_entry(item) for item in data["entries"]]
    except TableError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TableError(
            f"{path} is not a tuned table; expected what 'cupy-flash tables export' writes"
        ) from error


def _entry(item: dict[str, Any]) -> Entry:
    tile = {str(name): operator.index(value) for name, value in item["tile"].items()}
    texts = {name: item[name] for name in ("gpu", "family", "digest", "problem_class")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("a name is no text")
    return Entry(**texts, tile=tile, tflops=float(item["tflops"]))


def write_table(
    path: Path, entries: Iterable[Entry], made_by: Mapping[str, Any] | None = None
) -> None:
    """Write a table file, whole or not at all.

    Parameters
    ----------
    path
        The file; its folder is made.
    entries
        What it holds.
    made_by
        Notes on where it comes from, for people.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "version": TABLE_VERSION,
        "made_by": dict(made_by or {}),
        "entries": [asdict(entry) for entry in entries],
    }
    draft = path.with_suffix(f".{os.getpid()}.part")
    draft.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def merged(old: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """Both lists' entries; where keys are the same, the new one."""
    return list({entry.key: entry for entry in (*old, *new)}.values())


def save(entry: Entry) -> Path:
    """Put an entry in the user's table in place of one with the same key; return its path."""
    path = user_table_path()
    change(path, lambda entries: merged(entries, [entry]))
    return path


def change(
    path: Path,
    changed: Callable[[list[Entry]], list[Entry]],
    made_by: Mapping[str, Any] | None = None,
) -> None:
    """Rewrite a table file; one that cannot be read is set aside.

    Parameters
    ----------
    path
        The file; it need not exist.
    changed
        The new entries, given the old.
    made_by
        See `write_table`.
    """
    try:
        entries = read_table(path)
    except TableError as error:
        entries = []
        logger.warning("%s; kept as %s, a new table begins", error, set_aside(path))
    if (new := changed(entries)) != entries:
        write_table(path, new, made_by)
        reload()


def set_aside(path: Path) -> Path:
    """Rename a table that cannot be read; return its new path."""
    backup = path.with_suffix(".corrupt.json")
    path.replace(backup)
    return backup


def clear() -> int:
    """Remove the user's table; return how many entries it held.

    Raises
    ------
    TableError
        If it cannot be read.
    """
    path = user_table_path()
    count = len(read_table(path))
    path.unlink(missing_ok=True)
    reload()
    return count


@functools.cache
def _merged() -> dict[tuple[str, str, str, str], Entry]:
    table = {}
    for path in [*sorted(SHIPPED_DIR.glob("*.json")), user_table_path()]:
        try:
            entries = read_table(path)
        except TableError as error:
            logger.warning("%s; it is ignored", error)
            continue
        table.update({entry.key: entry for entry in entries})
    return table


def entries() -> list[Entry]:
    """All entries in effect: the shipped ones, overlaid by the user's."""
    return list(_merged().values())


def reload() -> None:
    """Forget what was read, so that the next lookup reads the files again."""
    global _generation
    _generation += 1
    _merged.cache_clear()


# Counts reloads: what was planned under an older table is planned again.
_generation = 0


def generation() -> int:
    """A number that changes whenever the table may have changed in this process."""
    return _generation


def lookup(gpu: str, family: str, digest: str, problem: Problem) -> Entry | None:
    """The entry for a problem's class, if the family's sources are still those it was tuned on.

    None for a batch-invariant problem, whose tile goes by nothing that a class goes by.
    """
    if problem.is_batch_invariant:
        return None
    return _merged().get((gpu, family, digest, problem_class(problem)))
