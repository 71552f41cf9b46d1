"""Generate text token by token with a paged KV cache, and again without any cache.

The model is a small transformer (decoder.py) with a sliding window in every other layer and a sink
in every head. train.py trained it on a children's book. Both ways generate the same text, but the
cache is much faster. Needs click and rich.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from command_line import Place, Utf8Text, backend_option, run
from decoder import Array, Attention, Config, Decoder, load, rotary_tables, rotated
from rich.console import Console
from rich.text import Text
from threadpoolctl import threadpool_limits

from cupy_flash import flash_attention, flash_attention_with_kvcache

WEIGHTS = Path(__file__).with_name("weights.npz")
PROMPTS = (
    "Alice was cancelled because of the storm, and",
    "The Hatter thought it would be",
    "The Caterpillar had never",
    "The Queen said that the",
)

# Greedy decoding chooses the token with the largest logit. The cache and the recomputation sum in
# different orders, so their logits differ by rounding. The comparison fails if they differ by more
# than TOLERANCE, three times the largest difference in 150 prompts. If the best logit exceeds the
# second by more than twice TOLERANCE, both ways choose the same token. For the built-in prompts it
# exceeds it by at least 0.1, which is enough for both dtypes. For other prompts it may not. Tokens
# may then differ, and the report says that rounding decided.
TOLERANCE = {"float32": 1e-4, "float16": 4e-2}


class PagedCache:
    """Paged KV cache of all layers, and the block table that assigns pages to sequences.

    A page holds `page_size` rows of one sequence. A growing sequence takes any free page, so memory
    is reserved only for existing text, not for the maximum length. All layers use the same page
    numbers, and therefore one block table.

    Parameters
    ----------
    config : Config
    place : Place
    pages, page_size : int
        Number of pages per layer, and number of rows per page.
    sequences, max_seqlen : int
        Maximum number of sequences, and their maximum length, for the size of the block table.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        *,
        pages: int,
        page_size: int,
        sequences: int,
        max_seqlen: int,
    ) -> None:
        self._xp = place.attention_xp
        shape = (config.layers, pages, page_size, config.heads_kv, config.head_dim)
        self.k = self._xp.zeros(shape, place.dtype)
        self.v = self._xp.zeros(shape, place.dtype)
        self.free = list(range(pages))
        self._owned: list[list[int]] = [[] for _ in range(sequences)]
        self._table = np.zeros((sequences, -(-max_seqlen // page_size)), np.int32)
        self.block_table = self._xp.asarray(self._table)

    @property
    def page_size(self) -> int:
        return int(self.k.shape[2])

    def reserve(self, lengths: Sequence[int]) -> None:
        """Assign free pages until each sequence can hold `lengths` tokens."""
        changed = False
        for row, owned, length in zip(self._table, self._owned, lengths, strict=True):
            while len(owned) * self.page_size < length:
                row[len(owned)] = self.free[0]
                owned.append(self.free.pop(0))
                changed = True
        if changed:
            self.block_table = self._xp.asarray(self._table)


class Generated(NamedTuple):
    """Generated tokens of all prompts, and the time that generation took."""

    tokens: np.ndarray  # (batch, count)
    logits: np.ndarray  # (batch, count, vocabulary), from which the tokens were chosen
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens.size / self.seconds


def with_paged_cache(
    decoder: Decoder, prompts: Sequence[bytes], count: int, place: Place, page_size: int
) -> Generated:
    """Generate from all prompts at once; each step computes one row per sequence."""
    started = time.perf_counter()
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths) + count
    cos, sin = map(place.attention_xp.asarray, rotary_tables(decoder.config.head_dim, longest))
    cache = PagedCache(
        decoder.config,
        place,
        pages=sum(-(-(length + count) // page_size) for length in lengths),
        page_size=page_size,
        sequences=len(prompts),
        max_seqlen=longest,
    )

    def attention(cache_seqlens: Any, block_table: Array) -> Attention:
        def attend(layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
            # One call rotates q and k, appends k and v to each sequence in the cache, and attends
            # to all of its keys.
            out = flash_attention_with_kvcache(
                place.to_attention(q),
                cache.k[layer],
                cache.v[layer],
                place.to_attention(k),
                place.to_attention(v),
                cache_seqlens=cache_seqlens,
                block_table=block_table,
                rotary_cos=cos,
                rotary_sin=sin,
                causal=True,
                window_size=decoder.config.window_size(layer),
                sinks=place.to_attention(sinks),
                backend=place.backend,
            )
            return place.to_dense(out)

        return attend

    # Each prompt is a call of its own, because prompts have different lengths.
    cache.reserve(lengths)
    last_rows = []
    for index, prompt in enumerate(prompts):
        tokens = decoder.xp.asarray([list(prompt)])
        attend = attention(0, cache.block_table[index : index + 1])
        last_rows.append(decoder(tokens, attend)[:, -1])
    logits = [decoder.logits(decoder.xp.concatenate(last_rows))]
    chosen = [logits[0].argmax(axis=1)]

    # Each later step computes one token of all sequences. Their lengths stay on the device.
    cache_seqlens = place.attention_xp.asarray(lengths, dtype=np.int32)
    for step in range(1, count):
        cache.reserve([length + step for length in lengths])
        attend = attention(cache_seqlens, cache.block_table)
        logits.append(decoder.logits(decoder(chosen[-1][:, None], attend)[:, -1]))
        chosen.append(logits[-1].argmax(axis=1))
        cache_seqlens += 1
    return collect(decoder, place, chosen, logits, started)


def by_recomputation(
    decoder: Decoder, prompts: Sequence[bytes], count: int, place: Place
) -> Generated:
    """Generate from all prompts at once; each step recomputes every row of every sequence."""
    started = time.perf_counter()
    xp = decoder.xp
    lengths = xp.asarray([len(prompt) for prompt in prompts])
    longest = max(map(len, prompts))
    cos, sin = map(
        place.attention_xp.asarray, rotary_tables(decoder.config.head_dim, longest + count)
    )

    def attend(layer: int, q: Array, k: Array, v: Array, sinks: Array) -> Array:
        q, k, v = place.to_attention(q), place.to_attention(k), place.to_attention(v)
        seqlen = q.shape[1]
        q, k = (rotated(x, cos[:seqlen], sin[:seqlen]) for x in (q, k))
        out = flash_attention(
            q,
            k,
            v,
            causal=True,
            window_size=decoder.config.window_size(layer),
            sinks=place.to_attention(sinks),
            backend=place.backend,
        )
        return place.to_dense(out)

    # Shorter texts are padded at their ends, which no earlier token attends to.
    rows = [list(prompt.ljust(longest + count)) for prompt in prompts]
    texts, batch = xp.asarray(rows), xp.arange(len(prompts))
    logits, chosen = [], []
    for step in range(count):
        hidden = decoder(texts[:, : longest + step], attend)
        logits.append(decoder.logits(hidden[batch, lengths + step - 1]))
        chosen.append(logits[-1].argmax(axis=1))
        texts[batch, lengths + step] = chosen[-1]
    return collect(decoder, place, chosen, logits, started)


def collect(
    decoder: Decoder, place: Place, chosen: list[Array], logits: list[Array], started: float
) -> Generated:
    """Copy the results to the host, which waits for the GPU to finish."""
    tokens = place.to_host(decoder.xp.stack(chosen, axis=1))
    seconds = time.perf_counter() - started
    return Generated(tokens, place.to_host(decoder.xp.stack(logits, axis=1)), seconds)


class Comparison(NamedTuple):
    """Comparison of two ways of generating, over tokens that followed the same text."""

    difference: float  # largest difference of a logit
    lead: float  # smallest difference between the best and the second logit
    parted: dict[int, int]  # sequence index: index of its first token that differs

    @classmethod
    def of(cls, a: Generated, b: Generated) -> Comparison:
        equal = a.tokens == b.tokens
        parted = {i: int(row.argmin()) for i, row in enumerate(equal) if not row.all()}
        # The tokens before the first one that differs are equal, so it followed the same text.
        same_text = np.logical_and.accumulate(equal, axis=1)
        same_text = np.pad(same_text[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        second, first = np.partition(b.logits[same_text], -2, axis=1)[:, -2:].T
        difference = np.abs(a.logits - b.logits)[same_text].max()
        return cls(float(difference), float((first - second).min()), parted)


def print_texts(prompts: Sequence[bytes], tokens: np.ndarray) -> None:
    console = Console(highlight=False)
    for prompt, row in zip(prompts, tokens, strict=True):
        generated = bytes(row.tolist()).decode(errors="replace")
        console.print(Text.assemble(prompt.decode(errors="replace"), (generated, "cyan")), "\n")


def load_decoder(path: Path, xp: Any) -> Decoder:
    """Return the model that train.py wrote."""
    try:
        return Decoder(*load(path, xp), xp)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise click.UsageError(f"--weights {path}: not written by train.py ({error})") from error


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("prompts", nargs=-1, type=Utf8Text())
@click.option(
    "--tokens",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Number of tokens to generate for each prompt.",
)
@click.option(
    "--page-size",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Number of tokens in a page of the KV cache.",
)
@click.option(
    "--weights",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=WEIGHTS,
    help="File of weights that train.py --output wrote; default: weights.npz of the examples.",
)
@backend_option
def command(
    prompts: tuple[str, ...],
    tokens: int,
    page_size: int,
    weights: Path,
    backend: str,
) -> None:
    """Generate a continuation of each of PROMPTS with a paged KV cache, and again without a cache.

    Without PROMPTS, built-in prompts are continued.
    """
    texts = [prompt.encode() for prompt in prompts or PROMPTS]
    if not all(texts):
        raise click.UsageError("a prompt is empty; expected at least one byte of each")
    place = Place.choose(backend, "float16")
    decoder = load_decoder(weights, place.dense_xp)
    ways: dict[str, Callable[[], Generated]] = {
        "paged cache": lambda: with_paged_cache(decoder, texts, tokens, place, page_size),
        "recomputed": lambda: by_recomputation(decoder, texts, tokens, place),
    }
    if place.backend == "gpu":
        for way in ways.values():
            way()  # the first call compiles kernels, which must not be timed
    # The matrix products are small on the CPU, and more BLAS threads would mostly wait.
    with threadpool_limits(limits=1, user_api="blas"):
        results = {name: way() for name, way in ways.items()}
    cached, recomputed = results.values()

    print_texts(texts, cached.tokens)
    for name, result in results.items():
        click.echo(f"{name:12} {result.tokens_per_second:8.0f} tokens/s")
    report(Comparison.of(cached, recomputed), place, tokens)


def report(found: Comparison, place: Place, count: int) -> None:
    tolerance = TOLERANCE[place.dtype]
    click.echo(
        f"\n{place.dtype} attention on the {place.backend.upper()}. Logits differ by at most"
        f" {found.difference:.1e}; the best leads by at least {found.lead:.1e}."
    )
    if found.difference > tolerance:
        raise click.ClickException(f"rounding would be at most {tolerance:.0e}")
    for index, step in found.parted.items():
        click.echo(f"Text {index + 1} parts at token {step + 1} of {count}: rounding decided it.")
    if not found.parted:
        click.echo("All tokens are equal.")


def main() -> None:
    run(command)


if __name__ == "__main__":
    main()
