"""FlashInfer, with a fake torch and a fake of its package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import commands, fake_flashinfer
from support.cli.fake_flashinfer import FakeFlashInfer
from support.fake_torch import passes_check

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import random_inputs
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.measure.gradient_check import check_of
from cupy_flash.cli.providers import flashinfer, torch_providers
from cupy_flash.cli.providers.providers import provider

WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    return fake_flashinfer.install(monkeypatch)


def case(mods: str = "", dtype: str = "float16", batch: int = 2, **more: Any) -> Case:
    sizes: dict[str, Any] = {"seqlen_q": 41, "seqlen_k": 67, "heads_q": 4, "heads_kv": 2}
    sizes |= {"head_dim": 16, "head_dim_v": 16} | more
    return Case(dtype, batch, mods=CaseMods.parse(mods), **sizes)


def cached(mods: str = "", **more: Any) -> Case:
    return case(mods, kind="cache", **{"seqlen_q": 1, "seqlen_k": 96, "lengths": (96, 20)} | more)


def is_right(made: Case, name: str = "flashinfer") -> bool:
    """Return whether the provider accepts a case, and its result passes the check."""
    inputs = random_inputs(made, 3, on_gpu=True)
    assert provider(name).why_not(made) is None
    prepared = provider(name).prepare(inputs)
    return passes_check(check_of(inputs, 0, on_gpu=False), prepared)


MASKS = [
    ("", {}),
    ("", {"causal": True, "softmax_scale": 0.3}),
    ("window 9:, softcap 2.5", {"dtype": "bfloat16"}),
    ("window 9:0", {}),
    ("window 9:4", {"causal": True}),
]


@pytest.mark.parametrize(("mods", "more"), MASKS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_sequence_needs_no_plan(
    library: FakeFlashInfer, layout: str, mods: str, more: dict[str, Any]
) -> None:
    assert is_right(case(mods, batch=1, layout=layout, **more))
    assert (library.singles, len(library.wrappers)) == (1, 0)


@pytest.mark.parametrize(("mods", "more"), MASKS)
@pytest.mark.parametrize(
    "kind", [{"head_dim_v": 24}, {"kind": "varlen", "seqlen_q": 67, "lengths": (67, 20)}]
)
def test_several_sequences_are_packed(
    library: FakeFlashInfer, mods: str, more: dict[str, Any], kind: dict[str, Any]
) -> None:
    assert is_right(case(mods, **more, **kind))
    assert [type(wrapper).__name__ for wrapper in library.wrappers] == [
        "BatchPrefillWithRaggedKVCacheWrapper"
    ]


@pytest.mark.parametrize("page_size", [0, 16, 5])
@pytest.mark.parametrize(
    ("wrapper", "seqlen_q", "mods", "more"),
    [
        (WRAPPER, 1, "", {"softmax_scale": 0.3}),
        (WRAPPER, 1, "window 30:4, softcap 2", {"dtype": "bfloat16", "causal": True}),
        ("BatchPrefillWithPagedKVCacheWrapper", 7, "", {"causal": True}),
        ("BatchPrefillWithPagedKVCacheWrapper", 7, "window 30:0", {"dtype": "bfloat16"}),
    ],
)
def test_a_cache_is_read_in_pages(
    library: FakeFlashInfer,
    page_size: int,
    wrapper: str,
    seqlen_q: int,
    mods: str,
    more: dict[str, Any],
) -> None:
    assert is_right(cached(mods, page_size=page_size, seqlen_q=seqlen_q, **more))
    (made,) = library.wrappers
    assert type(made).__name__ == wrapper
    assert made.planned.page_size == (page_size or 16)


def test_a_contiguous_cache_is_read_in_place(library: FakeFlashInfer) -> None:
    inputs = random_inputs(cached(), 3, on_gpu=True)
    prepared = provider("flashinfer").prepare(inputs)
    (made,) = library.wrappers
    plan = made.planned

    assert prepared.note == "reads the contiguous cache as pages of 16 rows"
    assert plan.starts[1].tolist() == [0, 6, 8]
    assert plan.indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert plan.last_page_len.tolist() == [16, 4]
    prepared.call()
    assert all(map(np.shares_memory, made.cache, inputs.gpu[1:]))


def test_a_call_runs_a_plan_that_was_made_before(
    library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper
    plans: list[Any] = []
    plan = made.plan
    monkeypatch.setattr(made, "plan", lambda *a, **o: (plans.append(o), plan(*a, **o)))
    prepared = provider("flashinfer").prepare(random_inputs(cached(), 3, on_gpu=True))

    assert len(plans) == 1
    np.testing.assert_array_equal(prepared.call(), prepared.call())
    assert len(plans) == 1


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer-tensor-cores"])
def test_tensor_cores_are_an_option_of_decoding(library: FakeFlashInfer, name: str) -> None:
    assert is_right(cached(page_size=16), name)
    assert library.wrappers[0].options == {"use_tensor_cores": name != "flashinfer"}
    for made in (case(), cached(seqlen_q=7, causal=True)):
        reason = provider(name).why_not(made)
        assert reason == (None if name == "flashinfer" else "only decoding differs from flashinfer")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (case(direction="backward"), "has no gradients"),
        (case(dtype="float32"), "timed in float16 and bfloat16 only"),
        (cached(cache_dtype="int8"), "timed in float16 and bfloat16 only"),
        (case("alibi, softcap 2"), "timed without alibi"),
        (case("window 9:4"), "no right bound"),
        (case(causal=True, q_offset=0), "takes no q_offset"),
        (case(causal=True, seqlen_q=68), "at least as many keys as queries"),
        (case(layout="bhsd"), "only packed, in bshd layout"),
        (cached(append=True), "appends to a cache in another call"),
        (cached(values_in_keys=True), "not part of the keys"),
        (cached(seqlen_k=97, lengths=None), "expected a multiple of 16 keys, or --page-size"),
        (cached(head_dim_v=24), "values as wide as the keys"),
    ],
)
def test_what_it_does_not_time_has_a_reason(library: FakeFlashInfer, made: Case, says: str) -> None:
    assert says in str(provider("flashinfer").why_not(made))


def test_without_its_package_it_is_missing(
    library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = torch_providers.why_no_package.__wrapped__
    monkeypatch.setattr(flashinfer, "why_no_package", find)
    monkeypatch.setitem(sys.modules, "flashinfer", None)

    assert provider("flashinfer").missing() == "flashinfer-python is not installed"


@pytest.mark.gpu
# Its packages warn of their own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        ("--batch", "1,2", "--seqlen-q", "203", "--causal", "yes"),
        ("--lengths", "113,7,203"),
        ("--cache", "--seqlen-k", "208", "--page-size", "16"),
        ("--cache", "--seqlen-k", "208", "--seqlen-q", "7", "--causal", "yes"),
    ],
    ids=" ".join,
)
def test_on_a_gpu_it_is_timed_and_checked(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("flashinfer")
    data = commands.record_of(
        *(tmp_path / "rows.json", "bench", "--provider", "flashinfer", "--heads", "8"),
        *("--kv-heads", "2", "--head-dim", "64", "--dtype", "bfloat16", "--repeats", "3", *options),
    )

    assert {row["check"] for row in data["rows"]} == {"passed"}
    assert "flashinfer-python" in data["metadata"]["versions"]
