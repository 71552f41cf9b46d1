"""What the examples with a command line share: where to run, and errors of one line."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import click
import numpy as np


class Utf8Text(click.ParamType):
    """An argument that is text: what a shell passes may be any bytes."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail("not readable as UTF-8 text", param, ctx)
        return str(value)


backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="Where to run.",
)


def choose_backend(wanted: str) -> tuple[str, Any]:
    """Where attention runs, "cpu" or "gpu", and the array module of everything else.

    CuPy multiplies matrices with cuBLAS, which an installation that only compiles kernels lacks.
    The dense layers then stay on NumPy, whatever attention does.
    """
    if wanted == "cpu":
        return "cpu", np
    try:
        import cupy

        usable = cupy.is_available()
    except ImportError:
        usable = False
    if not usable:
        if wanted == "gpu":
            raise click.UsageError("--backend gpu needs CuPy and a GPU; use auto or cpu here")
        return "cpu", np
    try:
        cupy.ones((2, 2)) @ cupy.ones((2, 2))
    except ImportError:
        return "gpu", np
    return "gpu", cupy


class Place(NamedTuple):
    """Where the parts of a model run. Attention may use the GPU while NumPy does the rest."""

    backend: str
    dense_xp: Any
    attention_xp: Any
    dtype: Any  # of what attention takes; all else is float32

    @classmethod
    def choose(cls, wanted: str, dtype_on_gpu: Any) -> Place:
        backend, dense_xp = choose_backend(wanted)
        if backend == "cpu":
            return cls(backend, np, np, "float32")
        import cupy

        return cls(backend, dense_xp, cupy, dtype_on_gpu)

    def to_attention(self, x: Any) -> Any:
        return self.attention_xp.asarray(x, dtype=self.dtype)

    def to_dense(self, x: Any) -> Any:
        x = x.astype(np.float32, copy=False)
        return x if self.dense_xp is self.attention_xp else x.get()

    def to_host(self, x: Any) -> np.ndarray:
        return np.asarray(x if self.dense_xp is np else x.get())


def run(command: click.Command) -> None:
    """Run a command; an error is one line, exit code 2 for wrong input."""
    try:
        command(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)  # Ctrl-C, as shells count it
