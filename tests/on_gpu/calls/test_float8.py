"""Attention with float8 q, k and v on a GPU, against the reference on dequantized inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.calls.float8_support import (
    FLOAT8,
    SCALES,
    Float8Case,
    check_on_gpu,
    on_device,
    random_case,
    run_on_gpu,
    truth_of,
)
from support.gpu import cupy
from support.gpu.gpu_support import capture_call

from cupy_flash import flash_attention
from cupy_flash.families.hopper import HopperTile
from cupy_flash.gpu.environment import device_for_id, gpu_unavailable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not gpu_unavailable() and device_for_id(0).arch != 90,
        reason="products of float8 are for Hopper only",
    ),
]

TESTS, PROBLEMS = 50, 20
# (head_dim, head_dim_v, alignment of v in bytes). Each entry needs a kernel, so there are few.
KINDS = [(128, 128, 16), (256, 256, 16), (64, 64, 4), (80, 61, 1)]
KINDS += [(192, 128, 8), (48, 192, 2), (112, 96, 16), (16, 250, 2)]
BASE = Float8Case(200, 333)


@pytest.mark.parametrize("test", range(TESTS))
def test_random_problems_are_right(test: int) -> None:
    for problem in range(PROBLEMS):
        rng = np.random.default_rng([11, test, problem])
        kind = int(rng.integers(len(KINDS)))
        dim, dim_v, alignment = KINDS[kind]
        fixed: dict[str, Any] = {"head_dim": dim, "head_dim_v": dim_v, "alignment": alignment}
        fixed["out_dtype"] = ("bfloat16", "float16")[kind % 2]
        scales = [None, None, 0.3, 1e-9, 0.0, -0.2]
        fixed["softmax_scale"] = scales[int(rng.integers(6 if kind < 2 else 5))]
        case = random_case(rng, **fixed, mean=float(rng.choice([0.0, 0.0, 2.0])))
        if kind < 3 and dim <= 128 and rng.random() < 0.5:
            check_on_gpu(case, tile=HopperTile(192, 128, stages=3, turns=1), family="hopper")
        else:
            check_on_gpu(case)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scales: str, causal: bool) -> None:
    check_on_gpu(dataclasses.replace(BASE, scales=scales, causal=causal))


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_longer_sequences(dim: int, causal: bool) -> None:
    case = Float8Case(1000, 1111, 1, 2, 1, dim, dim, causal, scales="head", out_dtype="float16")
    check_on_gpu(dataclasses.replace(case, alignment=4))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_values_with_a_mean(dim: int, out_dtype: str) -> None:
    """The sums grow with the number of keys, and so does the truncation error of tensor cores."""
    keys = 4096
    case = Float8Case(64, keys, 1, 2, 1, dim, dim, out_dtype=out_dtype, mean=2.0)
    check_on_gpu(case)


def extreme_scales(**changes: float) -> dict[str, Any]:
    arguments = BASE.arguments()
    shape = (BASE.batch, 1, 1)
    for name, value in changes.items():
        arguments[name] = np.full(shape, value, np.float32)
        arguments[name][0] = 1
    return arguments


@pytest.mark.parametrize(
    "changes",
    [
        {"q_scale": -1.0},
        {"q_scale": -0.5, "k_scale": -0.5},
        {"k_scale": 0.0},
        {"q_scale": 1e-30, "k_scale": 1e-30},
        {"q_scale": 1e-38},
        {"q_scale": 1e30, "k_scale": 1e-30},
        {"q_scale": 30.0},
        {"v_scale": -3.0},
        {"v_scale": 0.0},
        {"v_scale": 1e30},
        {"v_scale": 1e-30},
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_scales(changes: dict[str, float], causal: bool) -> None:
    """Only sequence 1 has the extreme scale; it must not affect the rows of sequence 0."""
    case = dataclasses.replace(BASE, causal=causal)
    arguments = extreme_scales(**changes)
    out, lse = run_on_gpu(case, arguments)
    for batch in range(2):
        alone = {
            name: x[batch : batch + 1] if isinstance(x, np.ndarray) else x
            for name, x in arguments.items()
        }
        one = dataclasses.replace(case, batch=1)
        truth_of(one, alone).check(out[batch : batch + 1], lse[batch : batch + 1])


def test_one_large_score_among_many_small_ones() -> None:
    """The output comes from the small scores only, as far as e4m3 holds their probabilities."""
    keys = 4096
    q = np.full((1, 64, 1, 64), 1, FLOAT8)
    k = np.zeros((1, keys, 1, 64), FLOAT8)
    v = np.ones((1, keys, 1, 64), FLOAT8)
    for at in (0, 1000, keys - 1):
        k[:], v[:] = 0, 1
        # exp(6.5) is 665. The other 4095 terms are 1 each, in sum six times as much.
        k[0, at] = 6.5 / 8
        v[0, at] = 0
        arguments = {"q": q, "k": k, "v": v}
        case = Float8Case(64, keys, 1, 1, 1, 64, 64, scales="none")
        out, lse = run_on_gpu(case, arguments)
        truth_of(case, arguments).check(out, lse)


def test_a_row_that_sees_one_key_is_its_value() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 70, 2, 64)).astype(FLOAT8) for _ in "qkv")
    case = Float8Case(70, 70, 1, 2, 2, 64, 64, causal=True, q_offset=0, scales="none")
    out, _ = run_on_gpu(case, {"q": q, "k": k, "v": v})
    assert np.array_equal(out[:, 0].astype(np.float32), v[:, 0].astype(np.float32))


def test_same_bits_from_run_to_run() -> None:
    case = Float8Case(700, 1500, 2, 6, 2, 128, 128, causal=True)
    arguments = on_device(case.arguments())
    first = flash_attention(**arguments, causal=True).get()
    for _ in range(50):
        assert flash_attention(**arguments, causal=True).get().tobytes() == first.tobytes()


def test_a_graph_reads_arrays_and_scales_anew() -> None:
    case = Float8Case(300, 500, scales="batch and head")
    first, second = case.arguments(), dataclasses.replace(case, seed=1).arguments()
    given = on_device(first)
    out = cupy.empty(case.shape("out"), "bfloat16")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        graph, _ = capture_call(stream, flash_attention, **given, out=out)
        for arguments in (second, first):
            for name, array in on_device(arguments).items():
                target = given[name]
                if name in "qkv":
                    target, array = target.view(np.uint8), array.view(np.uint8)
                target[...] = array
            graph.launch(stream)
            result = out.get(stream=stream)
            stream.synchronize()
            truth_of(case, arguments).check(result)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    case = Float8Case(100, 150, scales="head")
    arguments = case.arguments()
    given = {
        name: torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn)
        if name in "qkv"
        else torch.from_numpy(x).cuda()
        for name, x in arguments.items()
    }
    out = flash_attention(**given)
    assert out.dtype == torch.bfloat16
    truth_of(case, arguments).check(
        out.float().cpu().numpy().astype(run_on_gpu(case, arguments)[0].dtype)
    )
    half = flash_attention(**given, out_dtype="float16", layout="bshd")
    assert half.dtype == torch.float16


def test_arrays_in_host_memory_and_copied_ones() -> None:
    case = Float8Case(100, 150, scales="number", out_dtype="float16")
    arguments = case.arguments()
    truth = truth_of(case, arguments)
    truth.check(flash_attention(**arguments, out_dtype="float16"))
    given = on_device(arguments)
    given["k"] = given["k"].view(np.uint8).swapaxes(2, 3).copy().swapaxes(2, 3).view(FLOAT8)
    truth.check(flash_attention(**given, out_dtype="float16").get())
