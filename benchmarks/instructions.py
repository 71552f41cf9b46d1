"""Comparison of two cubins that ignores the offsets of kernel arguments.

If an argument moves within the argument struct, only the offsets of its reads change. The machine
code then differs, but the kernel is the same. Needs nvdisasm (pip install nvidia-cuda-nvdisasm, or
a CUDA toolkit).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?;)", re.MULTILINE)
# A read of an argument, and an addition that computes the address of an argument.
_ARGUMENT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_ADDRESS = re.compile(r"^(?:@!?U?P\w+ )?UIADD3 .*(0x[0-9a-f]+)")


def same_but_for_arguments(before: bytes, now: bytes) -> bool:
    """Return whether two cubins for sm_90 differ only in argument offsets, all equally shifted."""
    old, new = _instructions(before), _instructions(now)
    if len(old) != len(new):
        return False
    shifts: dict[str, set[int]] = {"read": set(), "address": set()}
    for first, second in zip(old, new, strict=True):
        if first == second:
            continue
        for kind, pattern in (("read", _ARGUMENT), ("address", _ADDRESS)):
            was, found = pattern.search(first), pattern.search(second)
            if was and found and _around(was) == _around(found):
                shifts[kind].add(int(found[1], 16) - int(was[1], 16))
                break
        else:
            return False
    return all(len(found) <= 1 for found in shifts.values())


def _around(found: re.Match[str]) -> tuple[str, str]:
    """Return the text before and the text after the offset."""
    return found.string[: found.start(1)], found.string[found.end(1) :]


def _instructions(image: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [str(_nvdisasm()), "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _INSTRUCTION.findall(text)


def _nvdisasm() -> Path:
    packages = Path(sysconfig.get_paths()["purelib"])
    found = shutil.which("nvdisasm") or next(packages.glob("nvidia/**/bin/nvdisasm"), None)
    if found is None:
        sys.exit("no nvdisasm: pip install nvidia-cuda-nvdisasm, or install a CUDA toolkit")
    return Path(found)
