"""The command `cupy-flash`."""

from __future__ import annotations

import click

import cupy_flash

from .bench import bench
from .compile import compile_kernels
from .errors import OneLineErrors
from .info import info
from .tune import tune


@click.group(cls=OneLineErrors, invoke_without_command=True)
@click.version_option(cupy_flash.__version__, prog_name="cupy-flash")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Fused attention for CuPy and NumPy arrays: look around, time, tune and compile."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (info, bench, tune, compile_kernels):
    main.add_command(_command)
