"""Functions of `cupy_flash` itself in functions that `torch.compile` compiles."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash import MaskMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")


def random(rng: np.random.Generator, *shape: int) -> Any:
    return torch.tensor(rng.standard_normal(shape))


def gradient(x: Any) -> Any:
    out, lse = cupy_flash.flash_attention(x, x, x, return_lse=True)
    return cupy_flash.flash_attention_backward(out, x, x, x, out, lse)[0]


def cached(x: Any) -> Any:
    caches = torch.zeros_like(x), torch.zeros_like(x)
    new = x[:, :2]
    return cupy_flash.flash_attention_with_kvcache(new, *caches, new, new, cache_seqlens=1)


def packed(x: Any) -> Any:
    n, rows = x.shape[1], x.flatten(0, 1)
    ends = torch.tensor([0, n, 2 * n], dtype=torch.int32)
    return cupy_flash.flash_attention_varlen(rows, rows, rows, ends, ends, n, n)


def merged(x: Any) -> Any:
    parts = [cupy_flash.flash_attention(x, y, y, return_lse=True) for y in x.split(3, 1)]
    return cupy_flash.combine(*map(list, zip(*parts, strict=True)))[0]


def rotated(x: Any) -> Any:
    return cupy_flash.apply_rotary(x, x[0, :, 0, :2], x[1, :, 0, :2])


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: cupy_flash.flash_attention(x, x, x, causal=True),
    "one array": lambda x: cupy_flash.flash_attention_qkvpacked(torch.stack([x, x, x], 2)),
    "packed": packed,
    "cached": cached,
    "gradient": gradient,
    "merged": merged,
    "rotated": rotated,
    "torch's name": lambda x: cupy_flash.scaled_dot_product_attention(x, x, x),
    "quantized": lambda x: cupy_flash.quantize_kv(x.float(), torch.int8)[1],
    "reference": lambda x: cupy_flash.attention_reference(x, x, x),
    "tangent": lambda x: cupy_flash.flash_attention_jvp(x, x, x, x, x, x)[1],
    "exact tangent": lambda x: cupy_flash.attention_jvp_reference(x, x, x, x, x, x)[1],
    "second derivative": lambda x: cupy_flash.flash_attention_hvp(*[x] * 8)[0],
    "exact second derivative": lambda x: cupy_flash.attention_hvp_reference(*[x] * 8)[1],
    "weights": lambda x: cupy_flash.attention_weights(x, x, queries=-1),
    "weights of packed rows": lambda x: cupy_flash.attention_weights_varlen(
        x[0], x[0], [0, 2, 5], [0, 2, 5], 3, 3
    ),
    "weights in a cache": lambda x: cupy_flash.attention_weights_with_kvcache(
        x, x, cache_seqlens=5
    ),
    "received": lambda x: cupy_flash.attention_received(x, x),
    "received of packed rows": lambda x: cupy_flash.attention_received_varlen(
        x[0], x[0], [0, 2, 5], [0, 2, 5], 3, 3
    ),
    "received of a cache": lambda x: cupy_flash.attention_received_with_kvcache(
        x, x, cache_seqlens=5
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_splits_the_graph(name: str, rng: np.random.Generator) -> None:
    x = random(rng, 2, int(rng.integers(5, 9)), 4, 6)

    def function(x: Any) -> Any:
        return FUNCTIONS[name](x * 2) + 1

    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_whole_graph_cannot_have_the_call(name: str, rng: np.random.Generator) -> None:
    compiled = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"call those of cupy_flash\.torch"):
        compiled(random(rng, 2, 6, 4, 6))


@pytest.mark.parametrize("name", ["dense", "rotated"])
def test_a_function_that_dynamo_does_not_trace_may_make_the_call(
    name: str, rng: np.random.Generator
) -> None:
    x = random(rng, 2, 6, 4, 6)

    def function(x: Any) -> Any:
        with contextlib.suppress(ValueError):
            torch._dynamo.graph_break()
            return FUNCTIONS[name](x) * 2

    compiled = torch.compile(function, backend="eager")
    torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)


def test_a_public_function_may_be_compiled_itself(rng: np.random.Generator) -> None:
    x = random(rng, 2, 6, 4, 6)
    compiled = torch.compile(cupy_flash.flash_attention, backend="eager")
    expected = cupy_flash.flash_attention(x, x, x)
    torch.testing.assert_close(compiled(x, x, x), expected, rtol=0, atol=0)


def test_a_mask_is_created_outside_of_a_whole_graph(rng: np.random.Generator) -> None:
    x, ids = random(rng, 2, 6, 4, 6), torch.tensor(rng.integers(0, 2, (2, 6)))

    def function(x: Any, ids: Any) -> Any:
        mask = MaskMod(lambda b, i, j: ids[b, i] == ids[b, j])
        return ct.flash_attention(x * 2, x, x, mask_mod=mask)

    split = torch.compile(function, backend="eager")
    torch.testing.assert_close(split(x, ids), function(x, ids), rtol=0, atol=0)
    torch._dynamo.reset()
    whole = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="create ScoreMod, MaskMod and BlockList outside"):
        whole(x, ids)


@pytest.mark.filterwarnings("error")
def test_functions_without_a_tensor_are_not_traced() -> None:
    def seen(x: Any) -> Any:
        return x + len(cupy_flash.seen_pairs(5, 7, causal=True))

    x = torch.zeros(3)
    torch.testing.assert_close(torch.compile(seen, backend="eager")(x), seen(x))


def test_the_compiler_is_imported_only_when_it_is_used() -> None:
    program = """
import sys, cupy_flash.torch, cupy_flash.flash_attn
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
