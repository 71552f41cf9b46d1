"""Execute the notebooks, and store their outputs or compare them with the stored ones.

    python examples/notebooks/run_notebooks.py            execute all, and store their outputs
    python examples/notebooks/run_notebooks.py --check    exit with 1 if a text has changed

Cells raise an error if a result is wrong. Stored notebooks hold no times, paths or versions.

Needs nbclient and ipykernel, and matplotlib for the pictures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
# Limit of the time of a cell in seconds, for slow machines.
CELL_SECONDS = 300
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> list[Path]:
    """Return the paths of the notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """Return a notebook after its execution, in the form that is stored.

    Raise `nbclient.exceptions.CellExecutionError` if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = nbformat.from_dict(_METADATA)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # The library of this checkout, without tiles that the user has tuned.
    paths = [str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as home:
        places = {"PYTHONPATH": os.pathsep.join(paths), "CUPY_FLASH_HOME": home}
        client.execute(env=os.environ | places)
    # The kernel adds its version.
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.pop("execution_count", None)
            if "metadata" in output:
                output.metadata = {}
    return notebook


def texts(cell: Any) -> list[tuple[str, str]]:
    """Return the kind and the text of each output of a cell; a picture has its size as text."""
    found = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            found.append((output.name, output.text))
        else:
            kinds = ", ".join(sorted(output.data))
            found.append((kinds, output.data.get("text/plain", "")))
    return found


def differences(stored: Any, found: Any) -> list[str]:
    """Return the cells whose outputs differ from the stored ones, except in their pictures."""
    result = []
    for number, (old, new) in enumerate(zip(stored.cells, found.cells, strict=True)):
        if texts(old) != texts(new):
            result.append(f"cell {number}: {texts(new)}; stored are {texts(old)}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the notebooks; return the exit code."""
    parser = argparse.ArgumentParser(description="Execute the notebooks of the examples.")
    parser.add_argument("--check", action="store_true", help="only compare; store nothing")
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; default: all")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.paths or notebooks():
        found = executed(path)
        if not options.check:
            nbformat.write(found, path)
            continue
        for difference in differences(nbformat.read(path, as_version=4), found):
            failed = True
            print(f"{path.name}, {difference}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
