"""`python -m cupy_flash` is the command `cupy-flash`."""

from __future__ import annotations

from cupy_flash.cli.main import main

if __name__ == "__main__":
    main(prog_name="cupy-flash")
