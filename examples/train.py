"""Train a small transformer to continue a text, with hand-written gradients.

The model (decoder.py) has grouped-query attention, a window in every other layer, sinks, and rotary
embeddings. Its tokens are the bytes of the text. `flash_attention_vjp` computes attention and its
gradients. On a GPU, attention and matrix products use bfloat16, and weights stay in float32.

The text, alice.txt, is chapters I to VII of "Alice's Adventures in Wonderland" by Lewis Carroll
(1865), which is in the public domain. It is Project Gutenberg's edition in the Canterbury corpus,
with each paragraph on one line. This command wrote weights.npz:

    python examples/train.py --batch 8 --steps 1200 --output examples/weights.npz

Needs click and rich, and matplotlib for ``--plot``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from command_line import Place, backend_option, run
from decoder import (
    Array,
    AttentionPullback,
    AttentionWithPullback,
    Config,
    Decoder,
    Weights,
    random_weights,
    rotary_tables,
    rotated,
    save,
)
from ml_dtypes import bfloat16
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from threadpoolctl import threadpool_limits

from cupy_flash import flash_attention_vjp

TEXT = Path(__file__).with_name("alice.txt")
REPORTS = 10  # number of progress lines that a run prints


class Schedule(NamedTuple):
    """Number of training steps, size of a batch, and learning rate."""

    steps: int
    batch: int = 4
    seqlen: int = 192
    rate: float = 4e-3

    def rate_of(self, step: int) -> float:
        """Return the learning rate of a step: a warm-up, as early moments are noisy, then decay."""
        warm_up = min(1.0, (step + 1) / (1 + 0.05 * self.steps))
        return self.rate * warm_up * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))


class AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101).

    Parameters
    ----------
    weights : dict of arrays
        Weights, which each step updates in place.
    """

    FIRST, SECOND, DECAY, EPSILON = 0.9, 0.98, 0.1, 1e-8
    LARGEST_NORM = 1.0  # norm of all gradients together to which larger gradients are clipped

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.steps = 0
        self._first = {name: 0 * weight for name, weight in weights.items()}
        self._second = {name: 0 * weight for name, weight in weights.items()}

    def step(self, gradients: Weights, rate: float) -> None:
        self.steps += 1
        squares = sum((gradient * gradient).sum() for gradient in gradients.values())
        clip = np.minimum(1, self.LARGEST_NORM / np.sqrt(squares))
        # Bias correction: the moments begin at 0 and are too small by these factors.
        first_there, second_there = 1 - self.FIRST**self.steps, 1 - self.SECOND**self.steps
        for name, weight in self.weights.items():
            gradient = gradients[name] * clip
            first, second = self._first[name], self._second[name]
            first += (1 - self.FIRST) * (gradient - first)
            second += (1 - self.SECOND) * (gradient * gradient - second)
            if weight.ndim > 1:
                weight *= 1 - rate * self.DECAY
            scale = np.sqrt(second / second_there) + self.EPSILON
            weight -= (rate / first_there) * first / scale


def cross_entropy(logits: Array, targets: Array, xp: Any) -> tuple[Array, Callable[[], Array]]:
    """Return the mean of -log p(target) and its pullback; logits (batch, seqlen, vocabulary)."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    is_target = (targets[..., None] == xp.arange(logits.shape[-1])).astype(logits.dtype)

    def pullback() -> Array:
        return (np.exp(log_p) - is_target) / targets.size

    return -(log_p * is_target).sum() / targets.size, pullback


def fused_attention(config: Config, place: Place, seqlen: int) -> AttentionWithPullback:
    """Return causal attention with rotary embeddings as a function with a pullback."""
    cos, sin = map(place.attention_xp.asarray, rotary_tables(config.head_dim, seqlen))

    def attend(
        layer: int, q: Array, k: Array, v: Array, sinks: Array
    ) -> tuple[Array, AttentionPullback]:
        q, k, v, sinks = map(place.to_attention, (q, k, v, sinks))
        out, of_attention = flash_attention_vjp(
            rotated(q, cos, sin),
            rotated(k, cos, sin),
            v,
            causal=True,
            window_size=config.window_size(layer),
            sinks=sinks,
            wrt=("q", "k", "v", "sinks"),
            grad_dtype="float32",
            backend=place.backend,
        )

        def pullback(dout: Array) -> tuple[Array, Array, Array, Array]:
            dq, dk, dv, dsinks = of_attention(place.to_attention(dout))
            turned_back = rotated(dq, cos, -sin), rotated(dk, cos, -sin), dv, dsinks
            return tuple(map(place.to_dense, turned_back))

        return place.to_dense(out), pullback

    return attend


def batches(text: np.ndarray, schedule: Schedule, seed: int) -> Callable[[], np.ndarray]:
    """Return a function that draws random excerpts of the text, (batch, seqlen + 1) per call."""
    rng = np.random.default_rng(seed)
    columns = np.arange(schedule.seqlen + 1)

    def draw() -> np.ndarray:
        starts = rng.integers(0, len(text) - schedule.seqlen, schedule.batch)
        return text[starts[:, None] + columns]

    return draw


def loss_and_gradients(
    decoder: Decoder, tokens: Array, attention: AttentionWithPullback
) -> tuple[float, Weights]:
    """Return the loss of predicting tokens (batch, seqlen + 1) after the first, and gradients."""
    rows, of_rows = decoder.with_pullback(tokens[:, :-1], attention)
    logits, of_logits = decoder.logits_with_pullback(rows)
    loss, of_loss = cross_entropy(logits, tokens[:, 1:], decoder.xp)
    drows, gradients = of_logits(of_loss())
    return float(loss), gradients | of_rows(drows)


def train(
    decoder: Decoder,
    text: np.ndarray,
    schedule: Schedule,
    attention: AttentionWithPullback,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train the weights in place; call `report` with the index and the loss of each step."""
    optimizer = AdamW(decoder.weights)
    draw = batches(text, schedule, seed)
    for step in range(schedule.steps):
        tokens = decoder.xp.asarray(draw(), dtype=np.int32)
        loss, gradients = loss_and_gradients(decoder, tokens, attention)
        optimizer.step(gradients, schedule.rate_of(step))
        report(step, loss)


def read_text(path: Path, seqlen: int) -> np.ndarray:
    """Return the bytes of a file; raise a usage error if it has too few."""
    try:
        text = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise click.UsageError(f"--text {path}: not readable ({error.strerror})") from error
    if len(text) <= seqlen:
        raise click.UsageError(f"--text {path}: {len(text)} bytes; expected more than {seqlen}")
    return text


class Reporter:
    """Progress of training: a progress bar in a terminal, and `REPORTS` printed lines."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        console = Console(highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("", total=schedule.steps)
        self._started = self._said = time.perf_counter()
        self.losses: list[float] = []
        self._told = 0  # number of losses that printed lines cover

    def __call__(self, step: int, loss: float) -> None:
        self.progress.update(self._task, description=f"loss {loss:.3f}", advance=1)
        self.losses.append(loss)
        steps, lines = self.schedule.steps, min(REPORTS, self.schedule.steps)
        if (step + 1) * lines // steps == step * lines // steps:
            return
        now = time.perf_counter()
        new = self.losses[self._told :]
        rate = len(new) * self.schedule.batch * self.schedule.seqlen / (now - self._said)
        self.progress.console.print(
            f"step {step + 1:6}   loss {np.mean(new):.3f}   {rate:8.0f} tokens/s"
            f"   {now - self._started:5.0f} s"
        )
        self._said, self._told = now, len(self.losses)


def plot(path: Path, losses: Sequence[float]) -> None:
    """Write a figure of the losses and their running mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, alpha=0.3, label="of a step")
    span = max(1, len(losses) // 50)
    means = np.convolve(losses, np.full(span, 1 / span), "valid")
    axes.plot(steps[span - 1 :], means, label=f"mean of {span}")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.savefig(path, dpi=150)


def writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of an option; raise an error before any work if it is not writable."""
    if path is None:
        return None
    if param.name == "plot_path" and find_spec("matplotlib") is None:
        raise click.BadParameter("matplotlib is not installed; pip install 'cupy_flash[plot]'")
    try:
        path.open("ab").close()
    except OSError as error:
        raise click.BadParameter(f"{path}: not writable ({error.strerror})") from error
    return path


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=600,
    show_default=True,
    help="Number of training steps.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Number of pieces of text per step.",
)
@click.option(
    "--seqlen",
    type=click.IntRange(1),
    default=192,
    show_default=True,
    help="Number of bytes (tokens) in each piece.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=4e-3,
    show_default=True,
    help="Largest learning rate; it rises at first and decays later.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the initial weights and of the choice of texts.",
)
@click.option(
    "--text",
    "text_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=TEXT,
    help="Path of the text to train on; default: alice.txt of the examples.",
)
@click.option(
    "--output",
    metavar="FILE.npz",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    help="File to write the weights to, for generate.py --weights.",
)
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE.png",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    help="File to draw the loss to; needs matplotlib.",
)
@backend_option
def command(
    steps: int,
    batch: int,
    seqlen: int,
    rate: float,
    seed: int,
    text_path: Path,
    output: Path | None,
    plot_path: Path | None,
    backend: str,
) -> None:
    """Train a small transformer to predict the next byte of a text."""
    place = Place.choose(backend, bfloat16)
    schedule = Schedule(steps, batch, seqlen, rate)
    text = read_text(text_path, seqlen)
    config = Config()
    weights = random_weights(config, seed, place.dense_xp)
    # Without cuBLAS, NumPy computes the matrix products, in float32.
    decoder = Decoder(
        config, weights, place.dense_xp, "float32" if place.dense_xp is np else place.dtype
    )
    size = sum(weight.size for weight in weights.values())
    click.echo(
        f"{size:,} weights, {len(text):,} bytes of text; {np.dtype(place.dtype)} attention on the"
        f" {place.backend.upper()}."
    )
    reporter = Reporter(schedule)
    attention = fused_attention(config, place, seqlen)
    try:
        # The matrix products are small on the CPU, and more BLAS threads would mostly wait.
        with reporter.progress, threadpool_limits(limits=1, user_api="blas"):
            train(decoder, text, schedule, attention, seed, reporter)
    finally:  # after Ctrl-C, too, the weights so far are saved
        if output:
            save(output, config, weights)
            click.echo(f"Saved; to use it: python examples/generate.py --weights {output}")
        if plot_path and reporter.losses:
            plot(plot_path, reporter.losses)


def main() -> None:
    run(command)


if __name__ == "__main__":
    main()
