"""Entry point of `python -m cupy_flash`, which is the command `cupy-flash`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Ctrl-C during its import exits with code 130, like Ctrl-C later."""
    try:
        from cupy_flash.cli.main import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command(prog_name="cupy-flash")


if __name__ == "__main__":
    main()
