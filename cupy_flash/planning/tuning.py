"""The tuned-tile table: shipped per GPU, overlaid by the user's own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupy_flash.errors import CupyFlashError
from cupy_flash.planning.problem_class import ProblemClass
from cupy_flash.problem.device import Device
from cupy_flash.problem.problem import Problem

logger = logging.getLogger("cupy_flash")

TABLE_VERSION = 3
SHIPPED_DIR = Path(__file__).resolve().parent / "tuned"
HOME_VARIABLE = "CUPY_FLASH_HOME"
# What the CPU backend's entries have for a GPU's name.
CPU = "cpu"
# A change of a table takes milliseconds: who waits longer waits for something that hangs.
LOCK_SECONDS = 60


@dataclass(frozen=True)
class Entry:
    """One tuned tile.

    Attributes
    ----------
    gpu
        Device name, or `CPU`.
    arch, sm_count
        Of that GPU, as in `Device`; 0 for the CPU.
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
    arch: int
    sm_count: int
    family: str
    digest: str
    problem_class: str
    tile: dict[str, int]
    tflops: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the entry is found by."""
        return (self.gpu, self.family, self.digest, self.problem_class)

    @property
    def direction(self) -> str:
        """Of the class's problems; families of one name have kernels of their own in each."""
        found = ProblemClass.parse(self.problem_class)
        return found.direction if found else "forward"


class TableError(CupyFlashError, ValueError):
    """A table file that cannot be read as one."""


def problem_class(problem: Problem) -> str:
    """The text of the class of problems that share a tuned tile, see `ProblemClass`."""
    return str(ProblemClass.of(problem))


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
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Entry], dict[str, Any]]:
    """A table file's entries, and the notes on where it comes from."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], {}
    except (OSError, ValueError, RecursionError) as error:
        # The text of an OSError names the file once more.
        why = getattr(error, "strerror", None) or error
        raise TableError(f"{path} cannot be read as a tuned table: {why}{_mend(path)}") from error
    try:
        if data["version"] != TABLE_VERSION:
            version = data["version"]
            raise TableError(f"{path} has version {version}; expected {TABLE_VERSION}{_mend(path)}")
        return [_entry(item) for item in data["entries"]], dict(data.get("made_by") or {})
    except TableError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f": {error}" if isinstance(error, ValueError) else ""
        raise TableError(
            f"{path} is not a tuned table{what}; expected what 'cupy-flash tables export' writes"
            f"{_mend(path)}"
        ) from error


def _mend(path: Path) -> str:
    """Return how to mend the user's table; of other files nothing can be said."""
    return "; 'cupy-flash tables clear' sets it aside" if path == user_table_path() else ""


def _entry(item: dict[str, Any]) -> Entry:
    tile = {str(name): operator.index(value) for name, value in item["tile"].items()}
    texts = {name: item[name] for name in ("gpu", "family", "digest", "problem_class")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("a name is no text")
    arch, sm_count = operator.index(item["arch"]), operator.index(item["sm_count"])
    tflops = float(item["tflops"])
    for name, value in (("arch", arch), ("sm_count", sm_count), ("tflops", tflops)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, not a number from 0")
    return Entry(**texts, arch=arch, sm_count=sm_count, tile=tile, tflops=tflops)


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
    """Rewrite a table file while no other process does; one that cannot be read is set aside.

    Parameters
    ----------
    path
        The file; it need not exist.
    changed
        The new entries, given the old.
    made_by
        See `write_table`; None for what the file says.
    """
    with locked(path):
        try:
            entries, said = _read(path)
        except TableError as error:
            entries, said = [], {}
            logger.warning("%s; kept as %s, a new table begins", error, set_aside(path))
        if (new := changed(entries)) != entries:
            write_table(path, new, said if made_by is None else made_by)
            reload()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep everybody else from changing a table file; its folder is made.

    The lock is a file beside it, which stays: who removed it could remove what another waits for.

    Raises
    ------
    OSError
        If the folder cannot be written, or another process keeps the lock for `LOCK_SECONDS`.
    """
    # Here, since only those who save need it.
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS):
        yield


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
    if not path.exists():
        return 0
    with locked(path):
        count = len(read_table(path))
        path.unlink(missing_ok=True)
    reload()
    return count


@functools.cache
def _in_effect() -> tuple[list[Entry], list[Entry]]:
    """The user's entries, and the shipped ones."""

    def read(path: Path) -> list[Entry]:
        try:
            return read_table(path)
        except TableError as error:
            logger.warning("%s; it is ignored", error)
            return []

    shipped = [entry for path in sorted(SHIPPED_DIR.glob("*.json")) for entry in read(path)]
    return read(user_table_path()), merged((), shipped)


def entries() -> list[Entry]:
    """All entries in effect: the shipped ones, overlaid by the user's."""
    user, shipped = _in_effect()
    return merged(shipped, user)


@functools.cache
def families() -> frozenset[str]:
    """Return the names of the families that have entries in effect."""
    return frozenset(entry.family for table in _in_effect() for entry in table)


def reload() -> None:
    """Forget what was read, so that the next lookup reads the files again."""
    global _generation
    _generation += 1
    _in_effect.cache_clear()
    families.cache_clear()
    _nearest_first.cache_clear()


# Counts reloads: what was planned under an older table is planned again.
_generation = 0


def generation() -> int:
    """A number that changes whenever the table may have changed in this process."""
    return _generation


def lookup(device: Device | None, family: str, digest: str, problem: Problem) -> Entry | None:
    """The entry for a problem, if the family's sources are still those it was tuned on.

    None for a batch-invariant problem, whose tile goes by nothing that a class goes by.

    Parameters
    ----------
    device
        The GPU, or None for the CPU backend.
    family, digest
        The kernel family and the digest of its sources.
    problem
        What is computed.
    """
    if problem.is_batch_invariant:
        return None
    return lookup_class(device, family, digest, problem_class(problem))


def lookup_class(
    device: Device | None, family: str, digest: str, wanted: str, *, but_own: bool = False
) -> Entry | None:
    """The entry for a class of problems, as `lookup` finds it.

    Those of the GPU come first, then those of other GPUs of its compute capability: the nearest
    number of SMs first, then the name that begins most alike. The user's go before the shipped
    ones. The search ends at a shipped table: what was swept for it and is not in it does best with
    the default tile.

    Parameters
    ----------
    device, family, digest
        See `lookup`.
    wanted
        The class.
    but_own
        Whether to pass over the user's entries of this very GPU.
    """
    place = (device.name, device.arch, device.sm_count) if device else (CPU, 0, 0)
    for is_shipped, tiles in _nearest_first(*place, family, digest):
        entry = tiles.get(wanted)
        if is_shipped or (entry and not (but_own and entry.gpu == place[0])):
            return entry
    return None


@functools.cache
def _nearest_first(
    name: str, arch: int, sm_count: int, family: str, digest: str
) -> list[tuple[bool, dict[str, Entry]]]:
    """The tables that may serve a processor: whether each is shipped, and its entries by class."""

    def distance(item: tuple[bool, Entry]) -> tuple[bool, int, int, bool, str]:
        is_shipped, entry = item
        # Of one number of SMs there are several: an H200 NVL is nearer to an H200 than to an H100.
        letters = zip(entry.gpu, name, strict=False)
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], letters))
        sms = abs(entry.sm_count - sm_count)
        return entry.gpu != name, sms, -alike, is_shipped, entry.gpu

    found = [
        (is_shipped, entry)
        for is_shipped, table in zip((False, True), _in_effect(), strict=True)
        for entry in table
        if (entry.family, entry.digest) == (family, digest)
        and (entry.gpu == name or (name != CPU and entry.arch == arch))
    ]
    groups = itertools.groupby(sorted(found, key=distance), distance)
    return [
        (is_shipped, {entry.problem_class: entry for _, entry in group})
        for (*_, is_shipped, _), group in groups
    ]
