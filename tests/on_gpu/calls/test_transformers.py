"""Models of transformers with 16-bit weights, CUDA graphs and long sequences on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
from support.tiny_models import (  # noqa: E402
    DECODERS,
    VOCABULARY,
    bert,
    modernbert,
    padding,
    pair,
    t5,
    tokens,
)

# transformers warns of what small configurations lack, and torch of what transformers calls.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MODELS: dict[str, Callable[[], Any]] = {
    **DECODERS,
    "BERT": bert,
    "ModernBERT": modernbert,
    "T5": t5,
}
SEQLEN = 203
LENGTHS = [SEQLEN, 113, 160]


def assert_as_exact_as_eager(found: list[Any], naive: list[Any], exact: list[Any]) -> None:
    """Assert that the norm of all errors is at most 3 times that of eager attention.

    The largest error of a model is that of a few elements, which differs between equally exact
    computations. Gradients of scores depend on the rounded output, those of eager attention on the
    rounded weights; in the CPU backend, the norm of their errors is at most twice that of eager.
    """
    of_found, of_naive = (
        torch.cat([(x.double() - y.double()).flatten() for x, y in zip(side, exact, strict=True)])
        for side in (found, naive)
    )
    assert 0 < of_found.norm() <= 3 * of_naive.norm()


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_in_16_bits(
    name: str, dtype: Any, side: str | None, rng: np.random.Generator
) -> None:
    eager, fused = pair(MODELS[name], rng, "cuda", dtype)
    exact = copy.deepcopy(eager).float()
    ids = tokens(rng, len(LENGTHS), SEQLEN, device="cuda")
    given = {"input_ids": ids}
    rows = torch.ones_like(ids, dtype=torch.bool)
    if side is not None:
        given["attention_mask"] = padding(LENGTHS, SEQLEN, side, "cuda")
    if name == "T5":
        given["decoder_input_ids"] = ids
    elif side is not None:
        rows = given["attention_mask"].bool()
    weights = torch.tensor(
        rng.standard_normal((int(rows.sum()), VOCABULARY), np.float32), device="cuda"
    )
    logits = [model(**given).logits[rows] for model in (fused, eager, exact)]
    assert_as_exact_as_eager(*([x.detach()] for x in logits))
    for x in logits:
        (x.float() * weights).sum().backward()
    gradients = [
        [x.grad for x in model.parameters() if x.grad is not None]
        for model in (fused, eager, exact)
    ]
    assert_as_exact_as_eager(*gradients)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_cuda_graphs(name: str, side: str | None, rng: np.random.Generator) -> None:
    # transformers compiles the steps of a static cache on a GPU, with mode="reduce-overhead".
    eager, fused = pair(DECODERS[name], rng, "cuda", torch.float32)
    ids = tokens(rng, 2, 30, device="cuda")
    mask = torch.ones_like(ids) if side is None else padding([30, 11], 30, side, "cuda")
    given = {"input_ids": ids * mask, "attention_mask": mask, "do_sample": False}
    expected = eager.generate(**given, max_new_tokens=20)
    for _ in range(2):
        found = fused.generate(**given, max_new_tokens=20, cache_implementation="static")
        assert torch.equal(found, expected)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["Mistral", "gpt-oss", "Llama 4"])
def test_memory_does_not_grow_with_the_pairs(
    name: str, side: str | None, rng: np.random.Generator
) -> None:
    _, fused = pair(DECODERS[name], rng, "cuda", torch.bfloat16)
    seqlen = 32768
    ids = tokens(rng, 2, seqlen, device="cuda")
    mask = None if side is None else padding([seqlen, 20000], seqlen, side, "cuda")
    with torch.no_grad():
        fused.model(ids[:, :64], use_cache=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused.model(ids, attention_mask=mask, use_cache=False)
    assert torch.cuda.max_memory_allocated() - before < seqlen**2


def test_autocast(rng: np.random.Generator) -> None:
    eager, fused = pair(DECODERS["Gemma 2"], rng, "cuda", torch.float32)
    ids = tokens(rng, 2, SEQLEN, device="cuda")
    exact = eager(ids).logits
    with torch.autocast("cuda", torch.bfloat16):
        naive, found = eager(ids).logits, fused(ids).logits
    assert_as_exact_as_eager(*([x.detach()] for x in (found, naive, exact)))
