"""Pictures, where matplotlib is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..cases.options import Command, writable_path

SUFFIXES = (".png", ".svg", ".pdf")
SUFFIXES_TEXT = ".png, .svg or .pdf"

# Distinct in black and white too (by lightness) and to readers who do not see red and green apart:
# Okabe and Ito's palette, the first for us.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def plot_option(what: str) -> Callable[[Command], Command]:
    """The option `--plot FILE`: an image of `what`, known to be writable before any work starts."""
    return click.option(
        "--plot",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_drawable,
        help=f"Draw {what} into a file of {SUFFIXES_TEXT} (needs matplotlib).",
    )


def _drawable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is None:
        return None
    if reason := why_no_figures():
        raise click.BadParameter(reason)
    return writable_path(path, SUFFIXES)


def why_no_figures() -> str | None:
    """Why nothing can be drawn, or None if it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "matplotlib is not installed; pip install 'cupy_flash[plot]'"
    return None


@contextlib.contextmanager
def figure(
    path: Path, *, width: float = 7.0, height: float = 4.5, **subplots: Any
) -> Iterator[Any]:
    """Matplotlib axes whose picture is written to a file at the end.

    Parameters
    ----------
    path
        With a suffix out of `SUFFIXES`.
    width, height
        In inches.
    subplots
        More arguments of `matplotlib.figure.Figure.subplots`.

    Yields
    ------
    axes
        What `subplots` returns.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text in an SVG, and the same data gives the same file, in a PDF without its date.
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "cupy_flash", "font.size": 9}
    with mpl.rc_context(style):
        page = Figure(figsize=(width, height), layout="constrained")
        yield page.subplots(**subplots)
        dates = {".svg": "Date", ".pdf": "CreationDate"}
        metadata = {dates[suffix]: None} if (suffix := path.suffix.lower()) in dates else {}
        page.savefig(path, dpi=150, metadata=metadata)
