"""The part of one rank in `bench --gpus`; a group of one MPI rank computes the whole case."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.cli import commands

from cupy_flash import parallel
from cupy_flash.cli.bench.bench import bench
from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.measure.ranks import RankError
from cupy_flash.cli.providers import several_gpus
from cupy_flash.cli.providers.several_gpus import SeveralGpus, ShardedCall

CASE = Case("float32", 2, 60, 60, 4, 2, 16, 16, causal=True)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        dataclasses.replace(CASE, direction="backward"),
        dataclasses.replace(CASE, kind="cache", seqlen_q=1, seqlen_k=300),
        dataclasses.replace(CASE, kind="cache", seqlen_q=3, seqlen_k=301, append=True),
    ],
    ids=["forward", "backward", "cache", "append"],
)
def test_all_ranks_together_compute_the_case(case: Case, group: parallel.Group) -> None:
    inputs = random_inputs(case, 0, on_gpu=False)
    share = ShardedCall(group, inputs, None, on_gpu=False)
    expected: Any = inputs.call(on_gpu=False)()
    found = share.whole(share.call())
    if not case.is_backward:
        found, expected = (found,), (expected,)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "head_ranks", "reason"),
    [
        ({"layout": "bhsd"}, None, "attention without modifications, in bshd layout"),
        ({"seqlen_q": 7}, None, "as many queries as keys"),
        ({"kind": "cache", "seqlen_q": 1, "page_size": 16}, None, "no pages"),
        ({"kind": "cache", "seqlen_q": 2}, None, "--causal needs --append"),
        ({}, 3, "--head-ranks is 3, which does not divide the 2 ranks"),
    ],
)
def test_what_it_does_not_time_has_a_reason(
    changed: dict[str, Any], head_ranks: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeveralGpus, "missing", lambda self: None)
    found = SeveralGpus(2, head_ranks).why_not(dataclasses.replace(CASE, **changed))
    assert reason in (found or "")


def test_a_capture_that_fails_ends_the_ranks_and_says_so(
    group: parallel.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure may have interrupted a call, after which the group cannot be used."""
    done: list[Any] = []
    rank_processes: Any = SimpleNamespace(
        send_order=lambda *order: done.append(order[0]),
        close=lambda: done.append("close"),
        communicator=SimpleNamespace(abort=lambda: done.append("abort")),
    )
    monkeypatch.setattr(several_gpus, "replayed", lambda timed: None)
    monkeypatch.setattr(several_gpus, "RankProcesses", lambda work, gpus: rank_processes)
    monkeypatch.setattr(parallel, "Group", lambda communicator, timeout: group)
    monkeypatch.setattr(Inputs, "gpu", Inputs.host)
    inputs = random_inputs(CASE, 0, on_gpu=False)
    provider = SeveralGpus(2)
    prepared = provider.prepare(inputs)
    with pytest.raises(parallel.ParallelError, match="rank 0 cannot capture its part"):
        provider.replayed(prepared)
    assert done == ["prepare", "capture", "abort", "close"]
    said = "the 2 ranks ended while they captured a call: rank 0 cannot capture"
    with pytest.raises(RankError, match=said):
        prepared.call()
    assert str(provider.why_not(CASE)).startswith(said)


def test_a_cache_takes_its_shard_besides() -> None:
    case = dataclasses.replace(CASE, kind="cache", seqlen_q=1, seqlen_k=300)
    assert SeveralGpus(2).scratch_bytes(case) == case.array_bytes // 2


@pytest.mark.parametrize(
    ("head_ranks", "changed", "says"),
    [
        (None, {}, "a part of the tokens: a ring"),
        (2, {}, "a part of the tokens: heads distributed over 2"),
        (None, {"kind": "cache", "seqlen_q": 1}, "2 GPUs, each with a part of the keys"),
    ],
)
def test_a_row_says_how_the_work_was_shared_out(
    head_ranks: int | None, changed: dict[str, Any], says: str
) -> None:
    case = dataclasses.replace(CASE, **changed)
    assert SeveralGpus(2, head_ranks).note_of(case).endswith(says)


def test_without_the_gpus_it_says_so() -> None:
    assert SeveralGpus(1000).missing() is not None
    assert any(param.name == "gpus" for param in bench.params)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--head-ranks", "1"), "--head-ranks cannot be combined with one GPU; it is for --gpus"),
        (("--gpus", "1000"), "--gpus is 1000, but"),
    ],
)
def test_options_of_gpus_that_do_nothing_are_refused(arguments: tuple[str, ...], text: str) -> None:
    result = commands.run("bench", *arguments, code=2)
    assert text in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [("--br", "64"), ("--preset", "memory")])
def test_what_ranks_do_not_take_is_refused(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeveralGpus, "missing", lambda self: None)
    result = commands.run("bench", "--gpus", "2", *arguments, code=2)
    assert "leave out --preset, --input and a forced tile" in " ".join(result.output.split())
