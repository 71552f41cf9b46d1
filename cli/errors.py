"""Error reporting of the commands: one line and an exit code instead of a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import click

from cupy_flash.errors import CompileError
from cupy_flash.gpu.environment import prepare_cupy_cache
from cupy_flash.planning.tuning import TableError


class NamedCommands(click.Group):
    """Command group whose error message for an unknown command lists the known ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"no command {args[0]!r}; expected one of {known}", ctx)
        return super().resolve_command(ctx, args)


class OneLineErrors(NamedCommands):
    """Command group that reports an error in one line; a usage error exits with code 2."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _exit_on_closed_pipe():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        # This precedes any import of CuPy, which fails if its cache folder cannot be created.
        prepare_cupy_cache()
        with _exit_on_closed_pipe():
            try:
                return super().invoke(ctx)
            except click.BadOptionUsage as error:
                # Click's parser attaches no context to this error; the context names the command.
                command = self.get_command(ctx, ctx.invoked_subcommand or "")
                if error.ctx is None and command is not None:
                    error.ctx = click.Context(command, ctx, ctx.invoked_subcommand)
                raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        # Python sets these streams to None if the shell closed their file descriptors.
        sys.stdout = sys.stdout or io.StringIO()
        sys.stderr = sys.stderr or io.StringIO()
        code: Any = 0
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            code = _report(_usage_text(error), error.exit_code)
        except click.ClickException as error:
            code = _report(error.format_message(), error.exit_code)
        except (CompileError, TableError) as error:
            code = _report(str(error), 1)
        except BrokenProcessPool:
            text = "a compiler process was ended, perhaps because memory ran out; try --workers 1"
            code = _report(f"cupy-flash: {text}", 1)
        except click.Abort as error:
            # Click also raises Abort at the end of a file; its cause is then an EOFError.
            is_end = isinstance(error.__cause__, EOFError)
            text = "cupy-flash: unexpected end of a file or of the input"
            code = _report(text, 1) if is_end else _report("interrupted", _INTERRUPTED)
        except BrokenPipeError as error:
            code = _code_of_closed_pipe(error)
        except OSError as error:
            place = f": {error.filename}" if error.filename else ""
            code = _report(f"cupy-flash: {error.strerror or error}{place}", 1)
            _forget_unwritten_output()
        except Exception as error:
            if not isinstance(error, MemoryError) and not _is_of_cuda(error):
                raise
            text = str(error).strip() or "out of memory"
            code = _report(f"cupy-flash: {text.splitlines()[0]}", 1)
        sys.exit(code if isinstance(code, int) else 0)


# Exit codes that a shell reports for processes ended by SIGINT (2) and SIGPIPE (13).
_INTERRUPTED, _CLOSED_PIPE = 128 + 2, 128 + 13


def _report(text: str, code: int) -> int:
    """Print the reason for the exit to stderr, unless stderr is closed, and return the code."""
    try:
        click.echo(text, err=True)
    except OSError:
        _forget_unwritten_output()
    return code


@contextlib.contextmanager
def _exit_on_closed_pipe() -> Iterator[None]:
    """Exit with the code of SIGPIPE if the reader of a pipe is gone; click would exit with 1."""
    try:
        yield
    except BrokenPipeError as error:
        raise click.exceptions.Exit(_code_of_closed_pipe(error)) from error


def _code_of_closed_pipe(error: BrokenPipeError) -> int:
    """Return the exit code for a broken pipe, or for an interrupt whose report broke the pipe."""
    _forget_unwritten_output()
    result: BaseException | None = error
    while result is not None:
        if isinstance(result, (KeyboardInterrupt, click.Abort)):
            return _INTERRUPTED
        result = result.__context__
    return _CLOSED_PIPE


def _is_of_cuda(error: Exception) -> bool:
    """Return whether CuPy raised the error for the CUDA driver or a CUDA library."""
    return type(error).__module__.startswith(("cupy.cuda", "cupy_backends"))


def _usage_text(error: click.UsageError) -> str:
    command = error.ctx.command_path if error.ctx else "cupy-flash"
    text = " ".join(error.format_message().split())
    guessed = isinstance(error, click.NoSuchOption) and error.possibilities
    unknown = isinstance(error, click.NoSuchOption) or "unexpected extra argument" in text
    if unknown and not guessed:
        text = f"{text.rstrip('.')}; see {command} --help"
    if isinstance(error, click.BadOptionUsage) and error.ctx:
        options = [p for p in error.ctx.command.params if error.option_name in p.opts]
        text += "".join(f" Expected {p.type.wanted}" for p in options if hasattr(p.type, "wanted"))
    return f"{command}: {text}"


def _forget_unwritten_output() -> None:
    """Discard unwritten output, so that Python does not flush it again at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def library_errors_as_usage() -> Iterator[None]:
    """Replace errors that the library raises for its arguments by usage errors.

    Use this context only for checks of the user's options. Elsewhere, a ValueError is a defect, and
    its traceback must be printed.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
