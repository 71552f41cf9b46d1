"""Helpers of the examples with a command line: choice of the backend, and one-line errors."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import click
import numpy as np


class Utf8Text(click.ParamType):
    """Type of an argument that must be valid UTF-8; a shell may pass any bytes."""

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
    help="Backend of attention; auto uses a GPU if there is one.",
)


def choose_backend(wanted: str) -> tuple[str, Any]:
    """Return the backend of attention, "cpu" or "gpu", and the array module of all other layers.

    CuPy needs cuBLAS to multiply matrices. If cuBLAS is not installed, the dense layers use NumPy,
    even if attention runs on the GPU.
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
    """Backend and array modules of a model. Attention may run on the GPU and all else in NumPy."""

    backend: str
    dense_xp: Any
    attention_xp: Any
    dtype: Any  # dtype of the inputs of attention; everything else is float32

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
    """Run a command; print an error as one line. The exit code is 2 for wrong input."""
    try:
        command(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)  # the exit code of shells for Ctrl-C
