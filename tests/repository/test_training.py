"""The training example: its gradients are right, and training reduces the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.examples import EXAMPLES, call, load
from threadpoolctl import threadpool_limits

from cupy_flash import attention_backward_reference, attention_reference
from cupy_flash.reference.dense import attention_naive, error_bound, max_error
from cupy_flash.reference.gradients import backward_naive

STEPS = 20


@pytest.fixture
def train() -> Iterator[Any]:
    # The example's many small products on all cores would delay each other and other tests.
    with threadpool_limits(limits=1, user_api="blas"):
        yield load("train")


def formula(
    train: Any, config: Any, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Return attention and its gradients by two functions that hold the whole score matrix."""
    cos, sin = train.rotary_tables(config.head_dim, 4096)

    def attend(layer: int, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        seqlen, dtype = q.shape[1], q.dtype
        q, k = (train.rotated(x, cos[:seqlen], sin[:seqlen]) for x in (q, k))
        options = {"causal": True, "window_size": config.window_size(layer), "sinks": sinks}
        out = forward(q, k, v, **options)

        def pullback(dout: Any) -> Any:
            wrt = ("q", "k", "v", "sinks")
            dq, dk, *others = backward(dout, q, k, v, wrt=wrt, **options)
            dq, dk = (train.rotated(x, cos[:seqlen], -sin[:seqlen]) for x in (dq, dk))
            return tuple(x.astype(dtype) for x in (dq, dk, *others))

        return out.astype(dtype), pullback

    return attend


def test_the_pullbacks_of_the_model_give_the_slope_of_the_loss_in_any_direction(
    train: Any, rng: np.random.Generator
) -> None:
    sizes = {"vocabulary": 11, "layers": 2, "width": 12, "hidden": 10, "window": 5}
    config = train.Config(**sizes, heads_q=4, heads_kv=2, head_dim=6)
    # The noise makes sinks differ from 0, and gains from 1.
    weights = {
        name: weight.astype(np.float64) + 0.1 * rng.standard_normal(weight.shape)
        for name, weight in train.random_weights(config, 0).items()
    }
    tokens = rng.integers(0, config.vocabulary, (2, 18))
    attention = formula(train, config, attention_reference, attention_backward_reference)

    def loss_of(weights: Any) -> tuple[float, Any]:
        decoder = train.Decoder(config, weights, dtype="float64")
        return train.loss_and_gradients(decoder, tokens, attention)

    _, gradients = loss_of(weights)
    assert gradients.keys() == weights.keys()
    # A central difference is off by step^2 / 6 times a third derivative, and by the rounding of the
    # loss over the step. Rotations are computed in float64, but from float32 tables.
    step = 1e-3
    for name, weight in weights.items():
        direction = rng.standard_normal(weight.shape) / weight.size**0.5
        moved = (weights | {name: weight + sign * step * direction} for sign in (1, -1))
        above, below = (loss_of(each)[0] for each in moved)
        slope = (gradients[name] * direction).sum()
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-4, abs=1e-6), name


def test_turning_by_the_negative_sine_is_the_pullback_of_a_rotation(
    train: Any, rng: np.random.Generator
) -> None:
    x, y = rng.standard_normal((2, 1, 7, 3, 8))
    cos, sin = train.rotary_tables(8, 7)
    there, back = train.rotated(x, cos, sin), train.rotated(y, cos, -sin)
    assert (there * y).sum() == pytest.approx((x * back).sum(), rel=1e-12)


def losses_of(train: Any, attention: Callable[..., Any] | None, seed: int) -> np.ndarray:
    """Return the losses of the first steps of the default model."""
    config, place = train.Config(), train.Place("cpu", np, np, "float32")
    schedule = train.Schedule(STEPS, batch=2, seqlen=70)
    decoder = train.Decoder(config, train.random_weights(config, seed))
    text = train.read_text(train.TEXT, schedule.seqlen)
    fused = train.fused_attention(config, place, schedule.seqlen)
    losses: list[float] = []
    train.train(
        decoder, text, schedule, attention or fused, seed, lambda _, loss: losses.append(loss)
    )
    return np.array(losses)


@pytest.mark.slow
def test_losses_are_those_of_the_naive_formulas_gradients_within_rounding(
    train: Any, rng: np.random.Generator
) -> None:
    # Apart from attention, all do the same float32 arithmetic. Losses differ by how rounding errors
    # of attention spread from step to step, which the naive formula in float32 measures.
    seed = int(rng.integers(2**31))
    exact = formula(train, train.Config(), attention_reference, attention_backward_reference)
    naive = formula(train, train.Config(), attention_naive, backward_naive)
    fused, exact, naive = (losses_of(train, way, seed) for way in (None, exact, naive))
    # The mean of five batches is compared, because a single loss depends on its text: in 1 of 13
    # seeds it was 0.83 of the first loss, while means were 0.53 to 0.58.
    assert exact[-5:].mean() < 0.7 * exact[0]
    assert max_error(fused, exact) <= error_bound(naive, exact, np.float32)


def test_gradients_of_bfloat16_products_are_those_of_float32_within_rounding(
    train: Any, rng: np.random.Generator
) -> None:
    config, text = train.Config(), train.read_text(train.TEXT, 33)
    weights = train.random_weights(config, int(rng.integers(2**31)))
    tokens = train.batches(text, train.Schedule(1, batch=2, seqlen=33), int(rng.integers(99)))()
    found = []
    for dtype in (train.bfloat16, "float32"):
        attention = train.fused_attention(config, train.Place("cpu", np, np, dtype), 33)
        decoder = train.Decoder(config, weights, dtype=dtype)
        found.append(train.loss_and_gradients(decoder, tokens, attention))
    (rounded_loss, rounded), (loss, exact) = found
    # Some twenty consecutive roundings, forward and backward, are off by at most 2^-9 each.
    rounding = 20 * 2**-9
    assert rounded_loss == pytest.approx(loss, rel=rounding)
    difference = sum(((rounded[name] - exact[name]) ** 2).sum() for name in exact)
    assert difference < rounding**2 * sum((gradient**2).sum() for gradient in exact.values())
    assert {gradient.dtype for gradient in rounded.values()} == {np.dtype(np.float32)}


def test_steps_that_bfloat16_has_no_numbers_for_add_up(
    train: Any, rng: np.random.Generator
) -> None:
    weights = {"w": np.ones((8, 8), np.float32)}
    optimizer = train.AdamW(weights)
    for _ in range(STEPS):
        optimizer.step({"w": rng.uniform(1, 2, (8, 8)).astype(np.float32)}, rate=1e-4)
    # Each step is about as long as the learning rate, whatever the gradient's magnitude.
    assert (weights["w"] < 1 - STEPS * 0.5e-4).all()
    assert (weights["w"] > 1 - STEPS * 2e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_command_learns_and_keeps_weights_that_text_is_generated_with(
    train: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, backend: str
) -> None:
    try:
        train.Place.choose(backend, "bfloat16")
    except train.click.UsageError as error:
        pytest.skip(error.message)
    weights = str(tmp_path / "weights.npz")
    options = ("--steps", "30", "--batch", "2", "--seqlen", "64", "--output", weights)
    code, output, _ = call(train, capsys, "--backend", backend, *options)
    assert code == 0
    lines = re.findall(r"step +(\d+) +loss ([\d.]+) +(\d+) tokens/s", output)
    assert [int(step) for step, _, _ in lines] == list(range(3, 31, 3))
    losses = [float(loss) for _, loss, _ in lines]
    # A prediction by the frequencies of bytes alone has a loss of 3.1 nats.
    assert losses[0] > 5
    assert losses[-1] < 3
    assert all(float(rate) > 0 for _, _, rate in lines)
    assert weights in output.replace("\n", "")

    generate = load("generate")
    code, output, _ = call(generate, capsys, "--backend", backend, "--weights", weights)
    assert code == 0
    assert "tokens/s" in output


def test_the_loss_is_drawn(train: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    options = ("--backend", "cpu", "--steps", "3", "--batch", "1", "--seqlen", "16")
    assert call(train, capsys, *options, "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_was_learnt_until_ctrl_c_is_kept(
    train: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, step: int, loss: float) -> None:
        told(self, step, loss)
        if step == 1:
            raise KeyboardInterrupt

    told = train.Reporter.__call__
    monkeypatch.setattr(train.Reporter, "__call__", interrupted)
    path = tmp_path / "weights.npz"
    options = ("--backend", "cpu", "--batch", "1", "--seqlen", "16", "--output", str(path))
    assert call(train, capsys, *options)[0] == 130
    config, weights = load("decoder").load(path)
    assert config == train.Config()
    assert weights["0.sinks"].any()


def test_the_weights_that_ship_foretell_the_text_and_are_small(train: Any) -> None:
    path = EXAMPLES / "weights.npz"
    assert path.stat().st_size < 1e6
    config, weights = load("decoder").load(path)
    assert config == train.Config()
    text = train.read_text(train.TEXT, 192)
    attention = train.fused_attention(config, train.Place("cpu", np, np, "float32"), 192)
    tokens = text[: 20 * 193].reshape(20, 193)
    loss, _ = train.loss_and_gradients(train.Decoder(config, weights), tokens, attention)
    assert loss < 1


def test_the_text_that_ships_is_one_line_of_plain_letters_for_each_paragraph() -> None:
    text = (EXAMPLES / "alice.txt").read_bytes()
    assert 10_000 < len(text) < 100_000
    assert text.isascii()
    assert b"\n\n" not in text
    assert b"  " not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "0 is not in the range"),
        (["--rate", "0"], "0.0 is not in the range"),
        (["--backend", "tpu"], "'tpu' is not one of"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--seqlen", "100000"], "83056 bytes; expected more than 100000"),
        (["--output", "missing/weights.npz"], "not writable"),
        (["--plot", "missing/loss.png"], "not writable"),
    ],
)
def test_wrong_option_of_train_gets_one_line_and_exit_code_2(
    train: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    code, output, errors = call(train, capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors
