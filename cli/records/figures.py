"""Plots, drawn with matplotlib if it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..cases.options import NEW_FILE, Decorator, writable_path

SUFFIXES = (".png", ".svg", ".pdf")
SUFFIXES_TEXT = ".png, .svg or .pdf"

# Okabe and Ito's palette, whose colours differ in lightness and for readers with colour blindness.
# The first colour is that of cupy_flash.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def plot_option(what: str) -> Decorator:
    """Return the option `--plot FILE` for a plot of `what`; the path is checked before any work."""
    return click.option(
        "--plot",
        type=NEW_FILE,
        callback=_drawable,
        help=f"Draw {what} to a {SUFFIXES_TEXT} file (needs matplotlib).",
    )


def _drawable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is None:
        return None
    if reason := why_no_figures():
        raise click.BadParameter(reason)
    return writable_path(path, SUFFIXES)


def why_no_figures() -> str | None:
    """Return why plots cannot be drawn, or None if they can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "matplotlib is not installed; pip install 'cupy_flash[plot]'"
    return None


@contextlib.contextmanager
def figure(
    path: Path, *, width: float = 7.0, height: float = 4.5, **subplots: Any
) -> Iterator[Any]:
    """Yield matplotlib axes, and write the figure to a file at the end.

    Parameters
    ----------
    path
        Path of the file, with a suffix in `SUFFIXES`.
    width, height
        Size in inches.
    subplots
        Additional arguments of `matplotlib.figure.Figure.subplots`.

    Yields
    ------
    axes
        Axes that `subplots` returns.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # SVG files keep text as text. Without a date and a random salt, equal data gives equal files.
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "cupy_flash", "font.size": 9}
    with mpl.rc_context(style):
        page = Figure(figsize=(width, height), layout="constrained")
        yield page.subplots(**subplots)
        dates = {".svg": "Date", ".pdf": "CreationDate"}
        metadata = {dates[suffix]: None} if (suffix := path.suffix.lower()) in dates else {}
        page.savefig(path, dpi=150, metadata=metadata)
