"""`cupy-flash roofline --gpus`: modelled time by number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.cli import commands
from support.cli.benchmark_scripts import IN_CHECKOUT

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.model.ranks import Links, counts, estimate

CASE = Case("bfloat16", 1, 131072, 131072, 16, 16, 128, 128)
FAST = Links(1e30, 1e30, 8)
SHAPE = ("--gpu", "H200", "--batch", "1", "--heads", "16", "--dtype", "bf16")


def run(*arguments: str, code: int = 0) -> Result:
    return commands.run("roofline", *SHAPE, *arguments, code=code)


def rows_of(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    return commands.record_of(tmp_path / "rows.json", "roofline", *SHAPE, *arguments)["rows"]


def test_on_one_gpu_nothing_is_exchanged() -> None:
    found = estimate(CASE, 1, None, 600e12, 4.8e12, Links(1.0, 1.0, 8))
    assert found.exchange == 0
    assert found.seconds == pytest.approx(CASE.flops() / 600e12)


@pytest.mark.parametrize("head_ranks", [1, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_with_links_that_take_no_time_ranks_share_the_work_evenly(
    causal: bool, head_ranks: int
) -> None:
    case = Case("bfloat16", 1, 131072, 131072, 16, 16, 128, 128, causal=causal)
    found = estimate(case, 8, head_ranks, 600e12, 1e30, FAST)
    assert found.compute == pytest.approx(case.flops() / 600e12 / 8, rel=1e-3)


def test_a_step_of_a_ring_hides_the_next_ones_keys() -> None:
    """With two ranks, the second step's keys and values arrive during the first step."""
    bytes_moved = 131072 // 2 * 16 * 2 * 128 * 2
    first_step = CASE.flops() / 600e12 / 4
    slow = Links(bytes_moved / first_step / 2, 1.0, 8)
    found = estimate(CASE, 2, 1, 600e12, 1e30, slow)
    assert found.exchange == pytest.approx(first_step, rel=1e-3)
    assert estimate(CASE, 2, 1, 600e12, 1e30, Links(1e12, 1.0, 8)).exchange == 0


def test_heads_are_exchanged_before_and_after_and_nothing_hides_it() -> None:
    tokens = 131072 // 2
    moved = tokens * 16 * 128 * 2 * 4 / 2
    found = estimate(CASE, 2, 2, 600e12, 1e30, Links(300e9, 1.0, 8))
    assert found.exchange == pytest.approx(moved / 300e9, rel=0.05)


def test_between_hosts_the_network_carries() -> None:
    links = Links(1e30, 50e9, 8)
    assert links.seconds(1e9, within=True) == pytest.approx(14e-6)
    assert links.seconds(1e9, within=False) == pytest.approx(14e-6 + 0.02)
    assert links.seconds(0, within=False) == 0


def test_a_step_of_a_ring_over_hosts_takes_as_long_as_its_slowest_pair() -> None:
    """On two hosts, the first GPU of each receives from the last GPU of the other host."""
    links = Links(1e30, 50e9, 8)
    assert estimate(CASE, 8, 1, 600e12, 1e30, links).exchange == 0
    first_step = CASE.flops() / 600e12 / 16**2
    moved = 131072 // 16 * 16 * 2 * 128 * 2
    expected = 15 * (14e-6 + moved / 50e9 - first_step)
    assert estimate(CASE, 16, 1, 600e12, 1e30, links).exchange == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("heads_kv", "head_ranks", "item_back"), [(4, 2, 2), (2, 4, 4)])
def test_backward_exchanges_heads_of_all_that_it_reads_and_writes(
    heads_kv: int, head_ranks: int, item_back: int
) -> None:
    """Gradients of a KV head that several ranks hold are summed in float32."""
    case = Case("bfloat16", 1, 4096, 4096, 8, heads_kv, 128, 64, direction="backward")
    links = Links(1e6, 1.0, 8)
    of_queries = 8 * (2 * (128 + 64) * 2 + 4)
    of_keys = max(heads_kv, head_ranks) * (128 + 64) * (2 + item_back)
    moved = 4096 / head_ranks * (of_queries + of_keys) * (head_ranks - 1) / head_ranks
    found = estimate(case, head_ranks, head_ranks, 600e12, 1e30, links)
    assert found.exchange == pytest.approx(moved / 1e6, rel=1e-4)


def test_gradients_go_back_in_float32() -> None:
    """Gradients take twice the bytes of k and v, and their last transfer is not hidden."""
    case = Case("bfloat16", 1, 131072, 131072, 16, 16, 128, 128, direction="backward")
    found = estimate(case, 2, 1, 600e12, 1e30, Links(300e9, 1.0, 8))
    back = 131072 // 2 * 16 * 2 * 128 * 4
    assert found.exchange == pytest.approx(back / 300e9, rel=0.05)


ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/engineering/roofline.md"
RECORDS = sorted((ROOT / "benchmarks/results").glob("h100x2_*ward.json"))


@pytest.mark.skipif(not IN_CHECKOUT, reason="the tests stand outside a checkout")
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_two_gpus_took_as_long_as_the_model_says_within_a_tenth(record: Path) -> None:
    rows = commands.written(record)["rows"]
    alone = {row["causal"]: row for row in rows if row["provider"] == "cupy_flash"}
    on_two = {row["causal"]: row["median_ms"] for row in rows if "2gpus" in row["provider"]}
    assert alone.keys() == on_two.keys()
    assert on_two
    for causal, one in alone.items():
        names = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v")
        sizes = [one[name] for name in names]
        case = Case(one["dtype"], *sizes, causal=causal, direction=one["direction"])
        links = Links(300e9, 50e9, 8)
        found = estimate(case, 2, None, one["tflops"] * 1e12, 3.35e12, links).seconds * 1e3
        assert on_two[causal] == pytest.approx(found, rel=0.1)
        mask = "causal" if causal else "full"
        measured = f"{one['median_ms']:.1f} | {on_two[causal]:.1f}"
        more = f"{found:.1f} | {on_two[causal] / found - 1:+.1%}"
        assert f".json) | {mask} | {measured} | {more} |" in PAGE.read_text(encoding="utf-8")


def test_ranks_are_doubled_up_to_the_most() -> None:
    assert counts(12) == [1, 2, 4, 8, 12]
    assert counts(16) == [1, 2, 4, 8, 16]


def test_a_row_for_each_number_of_gpus(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--seqlen-q", "131072", "--gpus", "1024", "--rate", "650")
    assert [row["gpus"] for row in rows] == counts(1024)
    assert [row["head_ranks"] for row in rows[:6]] == [1, 1, 4, 8, 16, 16]
    assert rows[0]["ms"] == pytest.approx(1e3 * CASE.flops() / 650e12)
    assert all(row["efficiency"] <= 1 for row in rows)


def test_numbers_of_gpus_that_cannot_share_out_heads_as_asked_are_left_out(tmp_path: Path) -> None:
    options = ("--heads", "6", "--head-ranks", "3", "--gpus", "12", "--seqlen-q", "4096")
    rows = rows_of(tmp_path, *options)
    assert [(row["gpus"], row["head_ranks"]) for row in rows] == [(1, 1), (2, 2), (12, 3)]


def test_the_table_fits_a_terminal_and_says_what_it_assumes() -> None:
    text = run("--seqlen-q", "65536", "--gpus", "16", "--link", "250").output
    assert "250 GB/s to the 8 GPUs of a host, 50 beyond" in text
    assert "of ideal" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gpus", "4", "--link", "0"), "'0' is not a number from 0.001 to 1e+09"),
        (("--gpus", "4", "--link", "-3"), "'-3' is not a number from 0.001 to 1e+09"),
        (("--gpus", "4", "--network", "nan"), "'nan' is not a number from 0.001"),
        (("--gpus", "8", "--rate", "1e308"), "'1e308' is not a number from 0.001"),
        (("--link", "250"), "--link cannot be combined with one GPU"),
        (("--rate", "650"), "--rate cannot be combined with one GPU"),
        (("--head-ranks", "1"), "--head-ranks cannot be combined with one GPU"),
        (("--gpus", "4", "--seqlen-k", "7"), "as many queries as keys"),
        (("--gpus", "4", "--seqlen-q", "0"), "expected a case that has some"),
        (("--gpus", "4", "--plot", "x.svg"), "leave out --measure"),
        (("--gpus", "6", "--head-ranks", "4"), "--head-ranks is 4, which does not divide the 6"),
        (("--gpus", "2", "--head-ranks", "3"), "--head-ranks is 3, which does not divide the 2"),
    ],
)
def test_what_is_not_modelled_is_refused(arguments: tuple[str, ...], text: str) -> None:
    assert text in " ".join(run("--seqlen-q", "4096", *arguments, code=2).output.split())
