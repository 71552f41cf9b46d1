"""Tables of tuned tiles: shipped tables for several GPUs, and the user's table, which precedes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import operator
import os
import threading
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
# Value of `Entry.gpu` in entries of the CPU backend.
CPU = "cpu"
# Timeout for the lock of a table. A change takes milliseconds, so a longer wait means a hang.
LOCK_SECONDS = 60


@dataclass(frozen=True)
class Entry:
    """One tuned tile.

    Attributes
    ----------
    gpu
        Device name, or `CPU`.
    arch, sm_count
        Architecture and number of SMs of the GPU, as in `Device`; 0 for the CPU.
    family, digest
        Kernel family and the digest of its sources when it was tuned.
    problem_class
        Text of the class of problems, see `ProblemClass`.
    tile
        Field names and values of the family's tile.
    tflops
        TFLOP/s that the tile reached.
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
        """Key of the entry in a table."""
        return (self.gpu, self.family, self.digest, self.problem_class)

    @property
    def direction(self) -> str:
        """Direction of the problems, since a forward and a backward family may have one name."""
        result = ProblemClass.parse(self.problem_class)
        return result.direction if result else "forward"


class TableError(CupyFlashError, ValueError):
    """Error for a file that cannot be read as a table of tuned tiles."""


def problem_class(problem: Problem) -> str:
    """Return the text of the problem's class, see `ProblemClass`."""
    return str(ProblemClass.of(problem))


def user_table_path() -> Path:
    """Return the path of the user's table, in ``$CUPY_FLASH_HOME`` or ``~/.cupy_flash``."""
    # Path.home() would raise for a user without a home directory.
    home = os.environ.get(HOME_VARIABLE) or os.path.expanduser("~/.cupy_flash")
    return Path(home) / "tuned.json"


def read_table(path: Path) -> list[Entry]:
    """Read the entries of a table file; there are none if the file does not exist.

    Raises
    ------
    TableError
        If the file exists but is not a table of this version.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[list[Entry], dict[str, Any]]:
    """Return the entries of a table file and its notes on how the table was made."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], {}
    except (OSError, ValueError, RecursionError) as error:
        # Use `strerror` because the text of an OSError repeats the file name.
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
    """Return advice on how to repair the user's table, or an empty string for other files."""
    return "; 'cupy-flash tables clear' sets it aside" if path == user_table_path() else ""


def _entry(item: dict[str, Any]) -> Entry:
    tile = {str(name): operator.index(value) for name, value in item["tile"].items()}
    texts = {name: item[name] for name in ("gpu", "family", "digest", "problem_class")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("gpu, family, digest and problem_class must be strings")
    arch, sm_count = operator.index(item["arch"]), operator.index(item["sm_count"])
    tflops = float(item["tflops"])
    for name, value in (("arch", arch), ("sm_count", sm_count), ("tflops", tflops)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; expected a finite number of at least 0")
    return Entry(**texts, arch=arch, sm_count=sm_count, tile=tile, tflops=tflops)


def write_table(
    path: Path, entries: Iterable[Entry], made_by: Mapping[str, Any] | None = None
) -> None:
    """Write a table file atomically, after creating its folder if necessary.

    `made_by` holds notes for people on how the table was made.
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
    """Return the entries of both lists; for equal keys, the entry of `new` is used."""
    return list({entry.key: entry for entry in (*old, *new)}.values())


def save(entry: Entry) -> Path:
    """Add an entry to the user's table or replace the one with the same key; return the path."""
    path = user_table_path()
    change(path, lambda entries: merged(entries, [entry]))
    return path


def change(
    path: Path,
    changed: Callable[[list[Entry]], list[Entry]],
    made_by: Mapping[str, Any] | None = None,
) -> None:
    """Change a table file while it is locked; a file that cannot be read is set aside.

    Parameters
    ----------
    path
        Path of the file, which need not exist.
    changed
        Function that receives the old entries and returns the new ones.
    made_by
        See `write_table`; None keeps the notes of the file.
    """
    with locked(path):
        try:
            entries, said = _read(path)
        except TableError as error:
            entries, said = [], {}
            logger.warning("%s; kept as %s, and a new table is written", error, set_aside(path))
        if (new := changed(entries)) != entries:
            write_table(path, new, said if made_by is None else made_by)
            reload()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a table file against changes by other processes; its folder is created.

    The lock is a file next to the table. It is never removed: another process may wait for it.

    Raises
    ------
    OSError
        If the folder is not writable, or another process holds the lock for `LOCK_SECONDS`.
    """
    # Imported here, because only calls that save an entry need it.
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS):
        yield


def set_aside(path: Path) -> Path:
    """Rename a table file that cannot be read, and return its new path."""
    backup = path.with_suffix(".corrupt.json")
    path.replace(backup)
    return backup


def clear() -> int:
    """Remove the user's table, and return the number of its entries.

    Raises
    ------
    TableError
        If the table cannot be read.
    """
    path = user_table_path()
    if not path.exists():
        return 0
    with locked(path):
        count = len(read_table(path))
        path.unlink(missing_ok=True)
    reload()
    return count


# The caches of what the tables hold have the generation as a key, and not only as a sign to clear
# them: a thread that began to read before a reload may finish after it.
@functools.lru_cache(1)
def _in_effect(generation: int) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of the user's table, and those of all shipped tables."""

    def read(path: Path) -> list[Entry]:
        try:
            return read_table(path)
        except TableError as error:
            logger.warning("%s; the table is ignored", error)
            return []

    shipped = [entry for path in sorted(SHIPPED_DIR.glob("*.json")) for entry in read(path)]
    return read(user_table_path()), merged((), shipped)


def entries() -> list[Entry]:
    """Return all entries in effect: the user's, and shipped ones with other keys."""
    user, shipped = _in_effect(_generation)
    return merged(shipped, user)


def families() -> frozenset[str]:
    """Return the names of the families that have entries in effect."""
    return _families(_generation)


@functools.lru_cache(1)
def _families(generation: int) -> frozenset[str]:
    return frozenset(entry.family for table in _in_effect(generation) for entry in table)


def reload() -> None:
    """Make the next lookup read the files again."""
    global _generation
    with _generation_lock:
        _generation += 1


# Number of reloads: plans made with an older table are made again.
_generation = 0
_generation_lock = threading.Lock()


def generation() -> int:
    """Return a number that changes whenever the tables may have changed in this process."""
    return _generation


def lookup(device: Device | None, family: str, digest: str, problem: Problem) -> Entry | None:
    """Return the entry for a problem, if it was tuned with the present sources of the family.

    `device` is None for the CPU backend. `digest` is that of the family's present sources. The
    result is None for a batch-invariant problem, whose tile must not depend on lengths and batch
    size.
    """
    if problem.is_batch_invariant:
        return None
    return lookup_class(device, family, digest, problem_class(problem))


def lookup_class(
    device: Device | None, family: str, digest: str, wanted: str, *, except_user: bool = False
) -> Entry | None:
    """Return the entry for a class of problems, see `lookup`.

    Entries of the GPU itself come first, then those of other GPUs of its compute capability: first
    the nearest number of SMs, then the name with the longest common prefix. User entries precede
    shipped ones. The search ends at the first shipped table, because shipped tables omit classes
    for which the default tile was the fastest.

    Parameters
    ----------
    device, family, digest
        See `lookup`.
    wanted
        Text of the problem class to look up.
    except_user
        Whether to skip the user's entries of the GPU itself.
    """
    place = (device.name, device.arch, device.sm_count) if device else (CPU, 0, 0)
    for is_shipped, tiles in _nearest_first(_generation, *place, family, digest):
        entry = tiles.get(wanted)
        if is_shipped or (entry and not (except_user and entry.gpu == place[0])):
            return entry
    return None


@functools.lru_cache(256)
def _nearest_first(
    generation: int, name: str, arch: int, sm_count: int, family: str, digest: str
) -> list[tuple[bool, dict[str, Entry]]]:
    """Return the tables for a device, nearest first, as (whether shipped, entries by class)."""

    def distance(item: tuple[bool, Entry]) -> tuple[bool, int, int, bool, str]:
        is_shipped, entry = item
        # GPUs with equal SM counts differ: an H200 NVL is nearer to an H200 than to an H100.
        letters = zip(entry.gpu, name, strict=False)
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], letters))
        sms = abs(entry.sm_count - sm_count)
        return entry.gpu != name, sms, -alike, is_shipped, entry.gpu

    result = [
        (is_shipped, entry)
        for is_shipped, table in zip((False, True), _in_effect(generation), strict=True)
        for entry in table
        if (entry.family, entry.digest) == (family, digest)
        and (entry.gpu == name or (name != CPU and entry.arch == arch))
    ]
    groups = itertools.groupby(sorted(result, key=distance), distance)
    return [
        (is_shipped, {entry.problem_class: entry for _, entry in group})
        for (*_, is_shipped, _), group in groups
    ]
