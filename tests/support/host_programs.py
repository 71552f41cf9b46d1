"""Programs made of the kernels' headers, compiled by g++ and run on the host."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.problem.mask import Mask

FOLDER = Path(__file__).resolve().parents[1] / "kernels" / "on_cpu"
COMPILER = shutil.which("g++")

needs_host_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no g++ to compile the kernel's code with"
)


def build(name: str, target: Path, *options: str) -> Path:
    """Compile `tests/kernels/on_cpu/<name>.cpp` to the path `target`, and return this path."""
    paths = (f"-I{KERNEL_DIR}", f"-I{FOLDER}", str(FOLDER / f"{name}.cpp"))
    command = [str(COMPILER), "-std=c++20", "-O1", *options, *paths, "-o", str(target)]
    subprocess.run(command, check=True)
    return target


class HostProgram:
    """Program that reads lines of numbers, compiled into a new folder with sanitizers."""

    def __init__(self, name: str, folders: pytest.TempPathFactory, *options: str) -> None:
        sanitizers = ("-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
        path = folders.mktemp("cpu") / Path(name).name
        self.path = build(name, path, *sanitizers, *options)

    def output(self, lines: Iterable[str]) -> str:
        """Return what the program prints for these lines; fail if a sanitizer ended it."""
        text = "".join(f"{line}\n" for line in lines)
        done = subprocess.run(
            [str(self.path)], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(self, lines: Iterable[str], width: int) -> list[np.ndarray]:
        """Return each line of the output as an array with `width` columns."""
        found = self.output(lines).splitlines()
        return [np.array(line.split(), int).reshape(-1, width) for line in found]


def windowed(mask: Mask, rng: np.random.Generator) -> Mask:
    """Return the mask with random windows and prefixes, or without."""
    if rng.integers(2):
        left, right = (None if rng.integers(3) == 0 else int(rng.integers(140)) for _ in range(2))
        prefix = int(rng.integers(140)) if rng.integers(2) else 0
        mask = mask._replace(left=None if prefix else left, right=right, prefix=prefix)
    return mask


def bounds_of(mask: Mask) -> str:
    """Return left and right bound of a mask's window (-1 for no bound), and its prefix."""
    left, right = (-1 if bound is None else bound for bound in (mask.left, mask.right))
    return f"{left} {right} {mask.prefix}"
