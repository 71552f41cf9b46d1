"""With `CUPY_FLASH_CHECK`, calls refuse lengths and indices in device arrays out of range."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy
from support.gpu.gpu_support import capture_call
from support.libraries import cupy_library, torch_library

import cupy_flash
from cupy_flash.calls.check import device_lengths

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the checks, as the environment variable does."""
    monkeypatch.setattr(device_lengths, "is_enabled", True)


def _ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def _packed(rng: np.random.Generator, ends: np.ndarray) -> dict[str, Any]:
    q, k, v = rng.standard_normal((3, 40, 2, 64)).astype(np.float16)
    lengths = {"cu_seqlens_q": _ints(0, 13, 40), "cu_seqlens_k": ends}
    return {"q": q, "k": k, "v": v, **lengths, "max_seqlen_q": 27, "max_seqlen_k": 27}


def _cached(rng: np.random.Generator, lengths: np.ndarray, page: int) -> dict[str, Any]:
    k_cache, v_cache = rng.standard_normal((2, 6, 16, 2, 64)).astype(np.float16)
    q = rng.standard_normal((2, 1, 2, 64)).astype(np.float16)
    table = _ints([5, 0], [1, page])
    caches = {"k_cache": k_cache, "v_cache": v_cache, "block_table": table}
    return {"q": q, **caches, "cache_seqlens": lengths}


def _on(convert: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in values.items()}


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_an_entry_out_of_range_is_named(library: str, rng: np.random.Generator) -> None:
    convert = (cupy_library() if library == "cupy" else torch_library("cuda")).convert
    # The loop runs twice, because the second call reuses what the first one prepared.
    for _ in range(2):
        cupy_flash.flash_attention_varlen(**_on(convert, _packed(rng, _ints(0, 27, 40))))
        wrong = _on(convert, _packed(rng, _ints(0, 28, 40)))
        for function in (cupy_flash.flash_attention_varlen, cupy_flash.flash_attention_varlen_vjp):
            with pytest.raises(ValueError, match="cu_seqlens_k gives sequence 0 a length of 28"):
                function(**wrong)
        cupy_flash.flash_attention_with_kvcache(**_on(convert, _cached(rng, _ints(3, 32), 2)))
        with pytest.raises(ValueError, match=r"cache_seqlens\[1\] is 33; expected at most 32"):
            cupy_flash.flash_attention_with_kvcache(**_on(convert, _cached(rng, _ints(3, 33), 2)))
        with pytest.raises(ValueError, match=r"block_table\[1, 1\] is 6; expected 0 to 5"):
            cupy_flash.flash_attention_with_kvcache(**_on(convert, _cached(rng, _ints(3, 32), 6)))
        q = convert(rng.standard_normal((2, 9, 2, 64)).astype(np.float16))
        with pytest.raises(ValueError, match=r"prefix_lens\[0\] is -1; expected at least 0"):
            cupy_flash.flash_attention(q, q, q, causal=True, prefix_lens=convert(_ints(-1, 3)))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_positions_of_rotated_rows_are_checked(library: str, rng: np.random.Generator) -> None:
    convert = (cupy_library() if library == "cupy" else torch_library("cuda")).convert
    x = convert(rng.standard_normal((2, 3, 2, 8)).astype(np.float16))
    table = convert(rng.standard_normal((6, 4)).astype(np.float16))
    right, wrong = (convert(_ints([0, 1, 2], [3, 4, last])) for last in (5, 6))
    cupy_flash.apply_rotary(x, table, table, right)
    with pytest.raises(ValueError, match=r"positions\[1, 2\] is 6; expected 0 to 5"):
        cupy_flash.apply_rotary(x, table, table, wrong)


def test_tensors_with_gradients_are_checked(rng: np.random.Generator) -> None:
    convert = torch_library("cuda").convert
    attention = importlib.import_module("cupy_flash.torch").flash_attention_varlen
    for _ in range(2):
        values = _on(convert, _packed(rng, _ints(0, 27, 40)))
        attention(**values | {"q": values["q"].requires_grad_()}).sum().backward()
        wrong = _on(convert, _packed(rng, _ints(0, 28, 40)))
        with pytest.raises(ValueError, match="cu_seqlens_k gives sequence 0 a length of 28"):
            attention(**wrong | {"q": wrong["q"].requires_grad_()})


def test_a_captured_call_is_not_checked(rng: np.random.Generator) -> None:
    values = _on(cupy_library().convert, _packed(rng, _ints(0, 27, 40)))
    values["out"] = cupy.empty_like(values["q"])
    expected = cupy_flash.flash_attention_varlen(**values).copy()
    values["out"].fill(0)
    cupy.cuda.get_current_stream().synchronize()
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        graph, _ = capture_call(stream, cupy_flash.flash_attention_varlen, **values)
    values["out"].fill(0)
    cupy.cuda.get_current_stream().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(values["out"].get(), expected.get())
