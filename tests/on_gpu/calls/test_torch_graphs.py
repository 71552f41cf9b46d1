"""CUDA graphs of torch that capture masked calls: memory they write, and values they read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import cupy

import cupy_flash
from cupy_flash import BlockList, MaskMod, ScoreMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

pytestmark = pytest.mark.gpu

KEYS, HEADS, DIM = 2048, 2, 64
MODES = ["global", "thread_local", "relaxed"]


def documents(step: int) -> Any:
    return (torch.arange(KEYS, device="cuda") // step).to(torch.int32)


def same_document(i: Any, j: Any, ids: Any) -> Any:
    return ids[i] == ids[j]


def same_300(i: Any, j: Any) -> Any:
    return i // 300 == j // 300


def blocks() -> Any:
    return torch.eye(KEYS // 256, dtype=torch.bool, device="cuda")[None, None]


# Two functions by name: one makes the modifications of a call, one returns the visible pairs.
MASKS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, Any], Any]]] = {
    "positions": (lambda: {"mask_mod": MaskMod(same_300)}, same_300),
    "int32": (lambda: {"mask_mod": MaskMod(same_document, ids=documents(300))}, same_300),
    "int64": (lambda: {"mask_mod": MaskMod(same_document, ids=documents(300).long())}, same_300),
    "blocks": (
        lambda: {"mask_mod": BlockList(blocks(), (256, 256))},
        lambda i, j: i // 256 == j // 256,
    ),
    "bool mask": (lambda: {"mask": documents(300)[:, None] == documents(300)[None]}, same_300),
    "score_mod": (
        lambda: {
            "score_mod": ScoreMod(
                lambda score, j, gain: score * gain[j],
                gain=torch.ones(KEYS, dtype=torch.float32, device="cuda"),
            ),
            "causal": True,
        },
        lambda i, j: i >= j,
    ),
}


def inputs() -> list[Any]:
    return [torch.randn(1, KEYS, HEADS, DIM, device="cuda", dtype=torch.float16) for _ in range(3)]


def formula(q: Any, k: Any, v: Any, seen: Any) -> Any:
    q, k, v = (x.detach().double().transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def pairs(rule: Callable[[Any, Any], Any]) -> Any:
    positions = torch.arange(KEYS, device="cuda")
    return rule(positions[:, None], positions[None])


def check(out: Any, expected: Any) -> None:
    # Results are means of values of order 1 in float16, with probabilities rounded to 11 bits.
    assert (out.double() - expected).abs().max().item() < 0.01


def captured(call: Callable[[], Any], mode: str) -> tuple[Any, Any, Any]:
    """Capture a call after two calls on the same stream; return the graph, stream and result."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        out = call()
    torch.cuda.synchronize()
    return graph, stream, out


def foreign_arrays(stream: Any) -> list[Any]:
    """Return arrays of CuPy's pool on that stream and the null stream, which no graph may write."""
    found = []
    with warnings.catch_warnings():
        # The replacement of this deprecated class supports fewer versions of torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        of_torch = cupy.cuda.ExternalStream(stream.cuda_stream)
    for own in (of_torch, cupy.cuda.Stream.null):
        with own:
            found += [cupy.zeros(512 * n, np.uint8) for n in range(1, 300)]
            own.synchronize()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MASKS)
def test_a_graph_writes_its_own_memory_alone(name: str, mode: str) -> None:
    make, rule = MASKS[name]
    (q, k, v), options = inputs(), make()
    graph, stream, out = captured(lambda: cupy_flash.flash_attention(q, k, v, **options), mode)
    if "mask_mod" in options:
        # This drops the block masks of the calls before the capture. The graph has its own.
        options["mask_mod"].refresh()
    cupy.get_default_memory_pool().free_all_blocks()
    others = foreign_arrays(stream)
    of_torch = [torch.zeros(512 * n, dtype=torch.uint8, device="cuda") for n in range(1, 300)]
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        check(out, formula(q, k, v, pairs(rule)))
    assert not any(bool((x != 0).any()) for x in others)
    assert not any(x.any().item() for x in of_torch)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_follows_what_a_captured_tensor_holds(mode: str) -> None:
    q, k, v = inputs()
    ids = documents(300)
    mod = MaskMod(same_document, ids=ids)
    graph, _, out = captured(lambda: cupy_flash.flash_attention(q, k, v, mask_mod=mod), mode)
    for step in (300, 77, 1000):
        ids.copy_(documents(step))
        graph.replay()
        torch.cuda.synchronize()
        check(out, formula(q, k, v, pairs(lambda i, j, step=step: i // step == j // step)))


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_outlives_the_maps_that_a_mask_keeps(mode: str) -> None:
    q, k, v = inputs()
    mod = MaskMod(same_300)
    graph, stream, out = captured(lambda: cupy_flash.flash_attention(q, k, v, mask_mod=mod), mode)
    expected = formula(q, k, v, pairs(same_300))
    check(cupy_flash.flash_attention(q, k, v, mask_mod=mod), expected)
    mod.refresh()
    cupy.get_default_memory_pool().free_all_blocks()
    foreign_arrays(stream)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    check(out, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MASKS)
def test_a_graph_holds_gradients_of_masked_calls(name: str, mode: str) -> None:
    make, rule = MASKS[name]
    rows, options = [x.requires_grad_() for x in inputs()], make()
    dout = torch.randn_like(rows[0])

    def step() -> tuple[Any, ...]:
        out = ct.flash_attention(*rows, **options)
        return torch.autograd.grad(out, rows, dout)

    graph, _, found = captured(step, mode)
    wide = [x.detach().double().requires_grad_() for x in rows]
    q, k, v = (x.transpose(1, 2) for x in wide)
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~pairs(rule), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    expected = torch.autograd.grad(out, wide, dout.double())
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(found, expected, strict=True):
        # As in `check`; gradients of keys are sums over many queries, but still of order 1.
        assert (x.double() - y).abs().max().item() < 0.01 * max(1, y.abs().max().item())


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_appends_and_counts(mode: str) -> None:
    """A captured call increments the tensor version; replays write without incrementing it."""
    q, k, v = (torch.randn(2, 1, HEADS, DIM, device="cuda", dtype=torch.float16) for _ in range(3))
    caches = [torch.zeros(2, 64, HEADS, DIM, device="cuda", dtype=torch.float16) for _ in range(2)]
    lengths = torch.tensor([3, 9], dtype=torch.int32, device="cuda")

    def call() -> Any:
        return cupy_flash.flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)

    graph, _, out = captured(call, mode)
    version = caches[0]._version
    lengths.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert caches[0]._version == version
    for b, n in enumerate((4, 10)):
        assert torch.equal(caches[0][b, n], k[b, 0])
    assert out.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lists", [1, HEADS])
def test_a_graph_reads_lists_of_keys_at_each_launch(lists: int, mode: str) -> None:
    q, k, v = inputs()
    q = q[:, :64].contiguous()

    def drawn() -> Any:
        return torch.randint(-1, KEYS, (1, 64, lists, 200), dtype=torch.int32, device="cuda")

    indices, gain = drawn(), torch.rand(KEYS, device="cuda")
    mod = ScoreMod(lambda score, j, gain: score * gain[j], gain=gain)

    def call() -> Any:
        return cupy_flash.flash_attention(q, k, v, key_indices=indices, score_mod=mod)

    graph, stream, out = captured(call, mode)
    cupy.get_default_memory_pool().free_all_blocks()
    others = foreign_arrays(stream)
    for _ in range(3):
        indices.copy_(drawn())
        out.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, call(), rtol=0, atol=0)
    assert not any(x.any() for x in others)


def test_a_graph_of_a_step_over_listed_rows_of_pages() -> None:
    pages, size = 40, 16
    q = torch.randn(3, 1, 16, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(pages, size, 1, 576, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(3, 1, 1, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages, device="cuda")[:12].reshape(3, 4).int()
    lengths = torch.tensor([5, 40, 17], dtype=torch.int32, device="cuda")

    def drawn() -> Any:
        return torch.randint(-1, pages * size, (3, 1, 1, 100), dtype=torch.int32, device="cuda")

    rows = drawn()

    def call() -> Any:
        return cupy_flash.flash_attention_with_kvcache(
            *(q, cache, None, new),
            cache_seqlens=lengths,
            block_table=table,
            key_indices=rows,
            key_indices_in="pages",
            head_dim_v=512,
        )

    graph, _, out = captured(call, "global")
    for step in range(3):
        rows.copy_(drawn())
        lengths.fill_(20 + step)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        found = cache[table[:, 1].long(), 4 + step, 0]
        assert torch.equal(found, new[:, 0, 0])
        torch.testing.assert_close(out, call(), rtol=0, atol=0)
