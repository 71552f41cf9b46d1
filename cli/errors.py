"""How the commands report what went wrong: one line and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from cupy_flash.compiler import prepare_cupy_cache
from cupy_flash.errors import CompileError
from cupy_flash.tuning import TableError


class NamedCommands(click.Group):
    """A command group that names its commands where another is asked for."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"no command {args[0]!r}; expected one of {known}", ctx)
        return super().resolve_command(ctx, args)


class OneLineErrors(NamedCommands):
    """A command group that reports a wrong option in one line and exits with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        # Before anything imports CuPy.
        prepare_cupy_cache()
        return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            click.echo(_usage_text(error), err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.echo(error.format_message(), err=True)
            sys.exit(error.exit_code)
        except (CompileError, TableError) as error:
            click.echo(str(error), err=True)
            sys.exit(1)
        except click.Abort as error:
            # Click takes the end of a file for an interrupt.
            if isinstance(error.__cause__, EOFError):
                click.echo("cupy-flash: unexpected end of a file or of the input", err=True)
                sys.exit(1)
            click.echo("interrupted", err=True)
            sys.exit(130)
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            click.echo(f"cupy-flash: {error.strerror or error}{place}", err=True)
            _forget_unwritten_output()
            sys.exit(1)
        sys.exit(result if isinstance(result, int) else 0)


def _usage_text(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx else "cupy-flash"
    text = " ".join(error.format_message().split())
    guessed = isinstance(error, click.NoSuchOption) and error.possibilities
    unknown = isinstance(error, click.NoSuchOption) or "unexpected extra argument" in text
    if unknown and not guessed:
        text = f"{text.rstrip('.')}; see {command} --help"
    return f"{command}: {text}"


def _forget_unwritten_output() -> None:
    """Keep Python from trying once more, at its exit, what could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def library_errors_as_usage() -> Iterator[None]:
    """Turn what the library says about its arguments into a usage error.

    Only for arithmetic on what the user asked for: elsewhere a ValueError is a defect and shows.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
