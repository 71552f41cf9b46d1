"""Public names and options, as tests/repository/public_api.txt lists them."""

from __future__ import annotations

import re

from support.cli.benchmark_scripts import CHECKOUT

SNAPSHOT = CHECKOUT / "tests" / "repository" / "public_api.txt"
# A line of a function or class begins with its name, of which a module may be the first part.
NAME = re.compile(r"(?:(parallel\.)?class )?([\w.]+)")


def public_names() -> list[str]:
    """Return the paths of public functions and classes, as `cupy_flash.flash_attention`."""
    found, classes = [], set()
    for line in SNAPSHOT.read_text(encoding="utf-8").splitlines():
        if line.startswith((" ", "cupy-flash")):
            continue
        match = NAME.match(line)
        assert match is not None, line
        # The package has the functions of this module, too.
        name = (match[1] or "") + match[2].replace("flash_attn_interface.", "")
        if "class " in line:
            classes.add(name)
        if name.rpartition(".")[0] not in classes:
            found.append(f"cupy_flash.{name}")
    return found


def command_names() -> list[str]:
    """Return the names of the commands, and of all of their options."""
    lines = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("cupy-flash")) :]
    # Arguments, whose names have no dashes, are in the usage of a command in capitals.
    options = {line.split()[0].split("/")[0] for line in lines if line.startswith("  --")}
    return [*(line for line in lines if not line.startswith(" ")), *sorted(options)]
