"""The command `cupy-flash`."""

from __future__ import annotations

import click

import cupy_flash

from .bench.bench import bench
from .bench.compare import compare
from .bench.plot import plot
from .build.compile import compile_kernels
from .errors import OneLineErrors
from .info import info
from .model.profile import profile
from .model.roofline import roofline
from .tables import tables
from .tune.tune import tune


@click.group(
    cls=OneLineErrors,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(cupy_flash.__version__, prog_name="cupy-flash")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Fused attention for CuPy and NumPy arrays.

    The commands inspect, tune and compile kernels; benchmark them, compare and plot the results;
    and profile calls and model their roofline.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (
    info,
    bench,
    tune,
    tables,
    compile_kernels,
    compare,
    plot,
    roofline,
    profile,
):
    main.add_command(_command)
