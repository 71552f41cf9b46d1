"""Plans of the kernel that computes gradients of biases on Hopper, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import MaskMod, flash_attention_backward
from cupy_flash.families.hopper import bias_gradients
from cupy_flash.families.schedule import Launch
from cupy_flash.planning.planner import Plan

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 6, 600, 512
WHOLE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
HOPPER, OTHER = "hopper_bias_gradients", "bias_gradients"
SIZE = 128


def plan(
    shape: tuple[int, ...] = WHOLE,
    *,
    dtype: str = "float16",
    head_dim: int = 64,
    batch: int = BATCH,
    heads: int = HEADS,
    seqlen_q: int = SEQLEN_Q,
    bias_dtype: str | None = None,
    **how: Any,
) -> Plan:
    """Return the plan of the gradients of q and of a bias of this shape."""
    q = np.empty((batch, seqlen_q, heads, head_dim), dtype)
    k = np.empty((batch, SEQLEN_K, heads, head_dim), dtype)
    arrays = {"q": q, "k": k, "v": k, "bias": np.zeros(shape, bias_dtype or dtype)}
    how = {"arch": "sm_90", "wrt": ("q", "bias")} | arrays | how
    return cupy_flash.plan(flash_attention_backward, **how)


def launch_of(made: Plan) -> Launch:
    """Return the launch of the kernel of the bias gradient."""
    (launch,) = (launch for launch in made.launches if launch.entry == "bias_gradients")
    return launch


def parts_of(made: Plan) -> int:
    return int(made.schedule.params["dbias"][-1])


@pytest.mark.parametrize("head_dim", [24, 72, 80, 96, 128, 192])
def test_the_kernel_reads_boxes_of_64_columns(head_dim: int) -> None:
    made = plan(head_dim=head_dim)
    assert launch_of(made).function == HOPPER
    maps = made.schedule.tensor_maps
    assert {maps[name].box[0] for name in ("q", "k", "v", "dout")} == {64}


@pytest.mark.parametrize("kept", list(np.ndindex(2, 2, 2, 2)))
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_serves_every_broadcast(kept: tuple[int, ...], causal: bool) -> None:
    shape = tuple(n if is_kept else 1 for n, is_kept in zip(WHOLE, kept, strict=True))
    made = plan(shape, causal=causal)
    launch = launch_of(made)
    assert made.family == "hopper"
    assert made.device is not None
    assert launch.function == HOPPER
    assert launch.shared_memory <= made.device.shared_memory_per_block
    # Thread blocks of a cluster have different rows, so a bias without rows has no clusters.
    assert launch.cluster == (2 if kept[2] else 0)
    assert launch.grid[2] == (2 if kept[2] else 1)
    assert launch.grid[0] * launch.grid[2] <= made.device.sm_count
    assert made.schedule.params["dbias"][:4] == shape
    has_sums = any(launch.entry == "bias_sums" for launch in made.launches)
    assert has_sums == (parts_of(made) > 1)
    assert has_sums == ("bias_parts" in made.schedule.workspace_offsets)


@pytest.mark.parametrize(
    "how",
    [
        {"mask_mod": MaskMod(lambda i, j: (i + j) % 3 > 0)},
        {"mask": np.ones((SEQLEN_Q, SEQLEN_K), bool)},
        {"window_size": (99, 40), "prefix_lens": np.zeros(BATCH, np.int32)},
        {"causal": True, "q_offset": np.zeros(BATCH, np.int32)},
        {"seqlens_k": np.ones(BATCH, np.int32)},
        {"family": "mma"},
        {"arch": "sm_100"},
        {"dtype": "float32"},
    ],
    ids=lambda how: "+".join(how),
)
def test_other_problems_keep_the_kernel_for_every_gpu(how: dict[str, Any]) -> None:
    made = plan(**how)
    assert launch_of(made).function == OTHER
    assert launch_of(made).arguments == ("gradients",)
    assert made.unit is not None
    assert "bias_slots" not in made.unit.text


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (99, 0)}, {"softcap": 9.0}])
def test_tma_loads_a_bias_with_aligned_rows(how: dict[str, Any]) -> None:
    made = plan(**how)
    assert launch_of(made).arguments == ("bias_gradient_maps", "gradients")
    spec = made.schedule.tensor_maps["bias"]
    assert spec.shape == (SEQLEN_K, SEQLEN_Q, HEADS, BATCH)
    assert spec.box == (64, 64)
    # The main kernel takes the first four maps only.
    assert list(made.schedule.tensor_maps) == ["q", "k", "v", "dout", "bias"]


@pytest.mark.parametrize(
    "how", [{"bias_dtype": "float32"}, {"shape": (1, HEADS, SEQLEN_Q, 1)}], ids=str
)
def test_other_biases_are_loaded_when_needed(how: dict[str, Any]) -> None:
    made = plan(**how)
    assert launch_of(made).function == HOPPER
    assert launch_of(made).arguments == ("gradient_maps", "gradients")
    assert "bias" not in made.schedule.tensor_maps


def main_launch(made: Plan) -> Launch:
    """Return the launch of the kernel of the gradients of q, k and v."""
    (launch,) = (launch for launch in made.launches if launch.entry == "key_gradients")
    return launch


# Numbers of stages of q of the tiles in which a streamed bias fits.
STAGES = {24: 2, 64: 2, 72: 3, 96: 2, 128: 2}


@pytest.mark.parametrize("head_dim", STAGES)
@pytest.mark.parametrize("shape", [WHOLE, (HEADS, SEQLEN_Q, SEQLEN_K), (1, 1, 1, SEQLEN_K)])
@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("q", "bias"), ("v",)])
def test_the_main_kernel_streams_a_bias(
    shape: tuple[int, ...], head_dim: int, wrt: tuple[str, ...]
) -> None:
    made = plan(shape, head_dim=head_dim, wrt=wrt)
    assert made.device is not None
    assert made.unit is not None
    launch = main_launch(made)
    assert launch.arguments == ("bias_gradient_maps", "gradients")
    assert launch.shared_memory <= made.device.shared_memory_per_block
    assert made.schedule.tensor_maps["bias"].box == (64, 64)
    assert "int bias_stages = 2;" in made.unit.text
    is_shared = "true" if shape != WHOLE else "false"
    assert f"bool bias_is_shared = {is_shared};" in made.unit.text


@pytest.mark.parametrize(
    "how",
    [
        {"bias_dtype": "float32"},
        {"shape": (1, HEADS, SEQLEN_Q, 1)},
        {"softcap": 9.0},
        {"mask_mod": MaskMod(lambda i, j: (i + j) % 3 > 0)},
        {"head_dim": 192},
        {"head_dim": 128, "tile": {"Br": 64, "Bc": 128, "q_stages": 3}},
    ],
    ids=str,
)
def test_the_main_kernel_loads_other_biases_when_needed(how: dict[str, Any]) -> None:
    made = plan(wrt=("q", "k", "v"), **how)
    assert main_launch(made).arguments == ("gradient_maps", "gradients")
    assert "bias" not in made.schedule.tensor_maps
    assert made.unit is not None
    assert "int bias_stages = 0;" in made.unit.text


def test_few_rows_are_one_tile_without_a_cluster() -> None:
    made = plan((HEADS, SIZE, SEQLEN_K), seqlen_q=SIZE)
    assert launch_of(made).cluster == 0
    assert launch_of(plan((HEADS, SIZE + 1, SEQLEN_K), seqlen_q=SIZE + 1)).cluster == 2


def test_sums_of_many_tiles_have_runs_in_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_gradients, "_ITEMS_PER_SM", 0)
    shape, rows = (1, 1, 1, SEQLEN_K), -(-SEQLEN_Q // SIZE)
    few = plan(shape, batch=2, heads=64 // 2 // rows)
    many = plan(shape, batch=13, heads=1)
    assert parts_of(few) == parts_of(many) == 1
    assert "bias_runs" not in few.schedule.workspace_offsets
    assert 13 * rows > 64
    offset = many.schedule.workspace_offsets["bias_runs"]
    blocks = launch_of(many).grid[0]
    assert blocks == SEQLEN_K // SIZE
    assert many.workspace - offset == blocks * SIZE * SIZE * 8


@pytest.mark.parametrize(
    ("tiles", "summed", "clusters", "parts"),
    [
        (1000, 32, 66, 1),
        (66, 32, 66, 1),
        (33, 32, 66, 2),
        (67, 64, 66, 4),
        (1, 1, 66, 1),
        (1, 3, 132, 3),
    ],
)
def test_the_slowest_cluster_determines_the_number_of_parts(
    tiles: int, summed: int, clusters: int, parts: int
) -> None:
    assert bias_gradients._parts(tiles, summed, clusters) == parts


def test_only_the_bias_may_be_wanted() -> None:
    made = plan(wrt=("bias",))
    assert [launch.entry for launch in made.launches] == ["row_terms", "bias_gradients"]
    assert launch_of(made).function == HOPPER
