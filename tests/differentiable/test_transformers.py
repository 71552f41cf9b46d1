"""Models of transformers with `cupy_flash.transformers`, compared with their eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
from support.tiny_models import (  # noqa: E402
    DECODERS,
    bert,
    modernbert,
    padding,
    pair,
    t5,
    tokens,
    whisper,
)

from cupy_flash import UnsupportedError  # noqa: E402
from cupy_flash.transformers import attention  # noqa: E402

# transformers warns of what small configurations lack, and torch of what transformers calls.
pytestmark = pytest.mark.filterwarnings("ignore")

LIMIT = 2e-4
SEQLEN = 23
LENGTHS = [SEQLEN, 11, 17]
PADDINGS = [None, "left", "right"]
ENCODERS: dict[str, Callable[[], Any]] = {"BERT": bert, "ModernBERT": modernbert}
# Both have an encoder, and a decoder with cross-attention.
PAIRS: dict[str, Callable[[], Any]] = {"T5": t5, "Whisper": whisper}


def inputs_of(
    name: str, rng: np.random.Generator, side: str | None, device: str
) -> tuple[dict[str, Any], Any]:
    """Return the inputs of a model, and which rows of its logits hold no padding."""
    ids = tokens(rng, len(LENGTHS), SEQLEN, device=device)
    mask = None if side is None else padding(LENGTHS, SEQLEN, side, device)
    if name in PAIRS:
        given = {"decoder_input_ids": tokens(rng, len(LENGTHS), 9, device=device)}
        rows = torch.ones(len(LENGTHS), 9, dtype=torch.bool, device=device)
        if name == "Whisper":
            features = rng.standard_normal((len(LENGTHS), 8, 60), np.float32)
            return {**given, "input_features": torch.tensor(features, device=device)}, rows
        return {**given, "input_ids": ids, "attention_mask": mask}, rows
    rows = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return {"input_ids": ids, "attention_mask": mask}, rows


CASES = [
    (name, make, side)
    for name, make in {**DECODERS, **ENCODERS, **PAIRS}.items()
    for side in (PADDINGS if name != "Whisper" else [None])
]
IDS = [f"{name}, {side}" for name, _, side in CASES]


@pytest.mark.parametrize(("name", "make", "side"), CASES, ids=IDS)
def test_logits_and_gradients_of_a_training_step(
    name: str, make: Callable[[], Any], side: str | None, device: str, rng: np.random.Generator
) -> None:
    eager, fused = pair(make, rng, device, torch.float32)
    given, rows = inputs_of(name, rng, side, device)
    # The row before a label has its logits.
    learned = rows & rows.roll(1, 1)
    labels = torch.where(learned, tokens(rng, *rows.shape, device=device), -100)
    results = [model.train()(**given, labels=labels) for model in (eager, fused)]
    expected, found = (result.logits[rows] for result in results)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < LIMIT
    for result in results:
        result.loss.backward()
    parameters = zip(eager.named_parameters(), fused.parameters(), strict=True)
    for (parameter, expected), found in parameters:
        if expected.grad is None:
            assert found.grad is None, parameter
            continue
        largest = max(1, float(expected.grad.abs().max()))
        assert (found.grad - expected.grad).abs().max() < LIMIT * largest, parameter


# A row of padding whose window holds nothing but padding is 0 here, and an average of all values in
# eager attention; generation begins with such rows if they are at the end.
GENERATED_LENGTHS = [13, 9, 10]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "make", "side"),
    [case for case in CASES if case[0] not in ENCODERS],
    ids=[case_id for case_id in IDS if case_id.partition(",")[0] not in ENCODERS],
)
def test_generation(
    name: str,
    make: Callable[[], Any],
    side: str | None,
    cache: str,
    device: str,
    rng: np.random.Generator,
) -> None:
    eager, fused = pair(make, rng, device, torch.float32)
    if name == "Whisper":
        features = torch.tensor(rng.standard_normal((2, 8, 60), np.float32), device=device)
        given: dict[str, Any] = {"input_features": features}
    else:
        shape = (len(GENERATED_LENGTHS), max(GENERATED_LENGTHS))
        given = {"input_ids": tokens(rng, *shape, device=device)}
        if side is not None:
            mask = padding(GENERATED_LENGTHS, shape[1], side, device)
            given = {"input_ids": given["input_ids"] * mask, "attention_mask": mask}
    options = {"max_new_tokens": 14, "do_sample": False, "cache_implementation": cache}
    scores = {"return_dict_in_generate": True, "output_logits": True}
    expected = eager.generate(**given, **options, **scores)
    found = fused.generate(**given, **options, **scores)
    assert torch.equal(found.sequences, expected.sequences)
    for x, y in zip(found.logits, expected.logits, strict=True):
        assert (x - y).abs().max() < LIMIT


@pytest.mark.parametrize("side", PADDINGS)
@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "gpt-oss", "BERT", "ModernBERT", "T5"])
def test_no_mask_of_all_pairs_is_built(
    name: str, side: str | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> Any:
        raise AssertionError("a mask of all pairs")

    _, fused = pair({**DECODERS, **ENCODERS, **PAIRS}[name], rng, "cpu", torch.float32)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", refuse)
    given, _ = inputs_of(name, rng, side, "cpu")
    fused(**given)
    if name in DECODERS:
        for cache in ("dynamic", "static"):
            fused.generate(**given, max_new_tokens=9, cache_implementation=cache)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "gpt-oss", "Llama 4"])
def test_packed_batches(name: str, device: str, rng: np.random.Generator) -> None:
    _, fused = pair(DECODERS[name], rng, device, torch.float32)
    lengths = [9, 1, 17]
    ids = tokens(rng, 1, sum(lengths), device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    ends = np.cumsum([0, *lengths])
    expected = torch.cat([fused(x).logits for x in ids.split(lengths, dim=1)], dim=1)
    found = []
    # The positions alone separate the sequences, too, unless a model's masks ignore them.
    if name != "gpt-oss":
        found.append(fused(ids, position_ids=positions, use_cache=False).logits)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    given = {"position_ids": positions, "use_cache": False, **packed, **longest}
    found.append(fused(ids, **given).logits)
    for logits in found:
        assert (logits - expected).abs().max() < LIMIT


@pytest.mark.parametrize("name", ["indices", "block_indices", "head_mask", "sinks"])
def test_arguments_that_would_change_the_result_are_refused(name: str) -> None:
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match=f"^{name} is given"):
        attention(torch.nn.Identity(), q, q, q, None, **{name: torch.zeros(1)})


def test_packed_sequences_beside_pairs_are_refused() -> None:
    q, offsets = torch.zeros(1, 2, 5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    packed |= {"max_length_q": 3, "max_length_k": 3}
    pairs = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"^attention_mask has all pairs"):
        attention(torch.nn.Identity(), q, q, q, pairs, **packed)
    with pytest.raises(UnsupportedError, match=r"^position_bias has all pairs"):
        attention(torch.nn.Identity(), q, q, q, None, position_bias=pairs.float(), **packed)


def test_bool_and_additive_masks_of_the_user(device: str, rng: np.random.Generator) -> None:
    eager, fused = pair(DECODERS["Llama"], rng, device, torch.float32)
    ids = tokens(rng, 2, SEQLEN, device=device)
    visible = torch.tensor(rng.random((2, 1, SEQLEN, SEQLEN)) < 0.5, device=device)
    visible |= torch.eye(SEQLEN, dtype=torch.bool, device=device)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    expected = eager(ids, attention_mask=additive).logits
    for mask in (visible, additive):
        assert (fused(ids, attention_mask=mask).logits - expected).abs().max() < LIMIT


def test_a_prompt_in_parts(device: str, rng: np.random.Generator) -> None:
    for name in DECODERS:
        eager, fused = pair(DECODERS[name], rng, device, torch.float32)
        ids = tokens(rng, 2, SEQLEN, device=device)
        expected = eager(ids).logits
        cache = transformers.DynamicCache(config=fused.config)
        parts = [fused(x, past_key_values=cache).logits for x in ids.split([5, 12, 6], dim=1)]
        assert (torch.cat(parts, dim=1) - expected).abs().max() < LIMIT, name


@pytest.mark.parametrize("name", ["Llama", "Mistral", "ModernBERT"])
def test_a_model_in_one_compiled_graph(name: str, rng: np.random.Generator) -> None:
    eager, fused = pair({**DECODERS, **ENCODERS}[name], rng, "cpu", torch.float32)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    options = {} if name in ENCODERS else {"use_cache": False}
    for side in (None, "left"):
        given, rows = inputs_of(name, rng, side, "cpu")
        expected = eager(**given, **options).logits[rows]
        found = compiled(**given, **options).logits[rows]
        assert (found - expected).abs().max() < LIMIT


@pytest.mark.parametrize("name", ["Llama", "Mistral", "gpt-oss"])
def test_compiled_generation_compiles_no_step_twice(name: str, rng: np.random.Generator) -> None:
    eager, fused = pair(DECODERS[name], rng, "cpu", torch.float32)
    ids = tokens(rng, 2, 9)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = eager.generate(ids, **options)
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    static = {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(fused.generate(ids, **options, **static), expected)
    # A layer with a window has one graph while its cache fills, and one afterwards.
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool, rng: np.random.Generator) -> None:
    gradients = []
    for model in pair(DECODERS["Mistral"], rng, "cpu", torch.float32):
        model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        given, _ = inputs_of("Mistral", np.random.default_rng(0), None, "cpu")
        model(**given, labels=given["input_ids"]).loss.backward()
        gradients.append([x.grad for x in model.parameters()])
    for expected, found in zip(*gradients, strict=True):
        assert (found - expected).abs().max() < LIMIT * max(1, float(expected.abs().max()))


def test_beams(rng: np.random.Generator) -> None:
    eager, fused = pair(DECODERS["Gemma 3"], rng, "cpu", torch.float32)
    given = {"attention_mask": padding([9, 5], 9, "left"), "input_ids": tokens(rng, 2, 9)}
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    assert torch.equal(fused.generate(**given, **options), eager.generate(**given, **options))


def test_autocast_casts_the_inputs(rng: np.random.Generator) -> None:
    eager, fused = pair(DECODERS["Llama"], rng, "cpu", torch.float32)
    ids = tokens(rng, 2, SEQLEN)
    exact = eager(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        naive, found = eager(ids).logits, fused(ids).logits
    assert (found - exact).abs().max() <= 2 * (naive - exact).abs().max()


@pytest.mark.parametrize("is_packed", [False, True])
def test_models_drop_weights_while_they_are_trained(
    is_packed: bool, rng: np.random.Generator, device: str
) -> None:
    _, fused = pair(DECODERS["Llama"], rng, device, torch.float32)
    ids = tokens(rng, 1, 23, device=device)
    options: dict[str, Any] = {"use_cache": False}
    if is_packed:
        options["position_ids"] = torch.tensor([[*range(9), *range(14)]], device=device)
    plain = fused(ids, **options).logits
    for layer in fused.model.layers:
        layer.self_attn.attention_dropout = 0.4
    assert torch.equal(fused(ids, **options).logits, plain)
    fused.train()
    torch.manual_seed(1)
    first, second = (fused(ids, **options).logits for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(fused(ids, **options).logits, first)
    first.sum().backward()
    gradient = fused.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient.isfinite().all()
    assert gradient.any()
    fused.zero_grad()
    fused.gradient_checkpointing_enable()
    torch.manual_seed(1)
    fused(ids, **options).logits.sum().backward()
    again = fused.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(again, gradient, rtol=1e-4, atol=1e-6)
