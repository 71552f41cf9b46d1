"""Compiled decoding steps: the operator writes the caches in place, as the eager call does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.in_torch.operators import counted

import cupy_flash
from cupy_flash import MaskMod, ScoreMod
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

BATCH, HEADS, HEADS_KV, DIM = 3, 4, 2, 8


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)


def call_of(rng: np.random.Generator, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Return q, the caches and the new rows, and the other arguments of a step."""
    new, capacity = int(rng.integers(1, 4)), int(rng.integers(14, 20))
    q, k, v = (normal(rng, BATCH, new, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    lengths = torch.tensor(rng.integers(2, 8, BATCH), dtype=torch.int32)
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    caches, dtype = BATCH, torch.float32
    if name == "lists and numbers":
        given |= {"cache_seqlens": lengths.tolist(), "sinks": 0.5, "alibi_slopes": [1, 0.5, 0, 2]}
        given |= {"window_size": (5, 0), "softcap": 3.0, "cache_leftpad": [0, 1, 2]}
    if name == "one length":
        given |= {"cache_seqlens": 5, "return_lse": True}
    if name == "pages":
        caches, capacity = 11, 5
        table = rng.permutation(11)[: BATCH * 3].reshape(BATCH, 3)
        given["block_table"] = torch.tensor(table, dtype=torch.int32)
    if name == "chosen caches":
        caches = BATCH + 2
        chosen = rng.permutation(caches)[:BATCH]
        given["cache_batch_idx"] = torch.tensor(chosen, dtype=torch.int32)
    if name == "packed rows":
        k, v = (normal(rng, 5, HEADS_KV, DIM) for _ in range(2))
        given["cu_seqlens_k_new"] = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    if name == "rotary":
        given |= {n: normal(rng, 30, DIM // 2) for n in ("rotary_cos", "rotary_sin")}
        given |= {"rotary_interleaved": False, "rotary_seqlens": lengths - 1}
    if name == "8 bits":
        dtype, given["k_scale"] = torch.int8, 0.05
        given["v_scale"] = torch.full((HEADS_KV,), 0.04)
    if name == "8 bits with scales":
        dtype, given["compute_scales"] = torch.float8_e4m3fn, True
        given |= {n: torch.ones(BATCH, capacity, HEADS_KV) for n in ("k_scale", "v_scale")}
    if name == "values in keys":
        given["head_dim_v"] = 5
    if name == "function":
        given["mask_mod"] = MaskMod(lambda i, j, width: i - j < width, width=4)
    if name == "out":
        given["out"] = torch.empty_like(q)
    rows = [torch.zeros(caches, capacity, HEADS_KV, DIM).to(dtype) for _ in range(2)]
    if name == "values in keys":
        return [q, rows[0], None, k, None], given
    return [q, *rows, k, v] if name != "no rows" else [
        q,
        normal(rng, *rows[0].shape),
        rows[1],
    ], given


NAMES = [
    *("plain", "lists and numbers", "one length", "pages", "chosen caches", "packed rows"),
    *("rotary", "8 bits", "8 bits with scales", "values in keys", "function", "out", "no rows"),
]


def copied(values: Any) -> Any:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in values]


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_writes_what_an_eager_step_writes(
    name: str, rng: np.random.Generator
) -> None:
    arrays, given = call_of(rng, name)

    def step(arrays: list[Any], given: dict[str, Any]) -> Any:
        q, *others = arrays
        return ct.flash_attention_with_kvcache(q * 1.5, *others, **given)

    compiled = counted(step)
    own = copied(arrays), dict(zip(given, copied(given.values()), strict=True))
    with torch.no_grad():
        found, expected = compiled(*own), step(arrays, given)
    is_pair = isinstance(expected, tuple)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for x, y in zip([*own[0], *own[1].values()], [*arrays, *given.values()], strict=True):
        if isinstance(y, torch.Tensor):
            torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0)
    assert is_pair == (name == "one length")
    assert compiled.graphs == 1


def test_steps_of_a_growing_cache_are_one_graph(rng: np.random.Generator) -> None:
    steps, capacity = 9, 16
    rows = [normal(rng, BATCH, steps, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    caches = [torch.zeros(BATCH, capacity, HEADS_KV, DIM) for _ in range(2)]
    lengths = torch.zeros(BATCH, dtype=torch.int32)

    @torch.inference_mode()
    def step(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        out = ct.flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
        lengths.add_(1)
        return out

    compiled = counted(step)
    each = [compiled(*(x[:, n : n + 1] for x in rows), lengths) for n in range(steps)]
    assert compiled.graphs == 1
    assert lengths.tolist() == [steps] * BATCH
    for cache, new in zip(caches, rows[1:], strict=True):
        torch.testing.assert_close(cache[:, :steps], new, rtol=0, atol=0)
        assert not cache[:, steps:].any()
    q, k, v = (x.numpy() for x in rows)
    exact, lse = cupy_flash.attention_reference(q, k, v, causal=True, return_lse=True)
    bound = error_bound(attention_naive(q, k, v, causal=True), exact, q.dtype, lse=lse)
    assert max_error(torch.cat(each, 1).numpy(), exact) <= bound


def test_integers_as_lengths_are_two_graphs_at_most(rng: np.random.Generator) -> None:
    q, k, v = (normal(rng, 1, 1, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    caches = [torch.zeros(1, 16, HEADS_KV, DIM) for _ in range(2)]

    def step(length: int) -> Any:
        return ct.flash_attention_with_kvcache(q, *caches, k, v, cache_seqlens=length)

    compiled = counted(step)
    for length in range(6):
        compiled(length)
    # The first graph assumes that the number does not change.
    assert compiled.graphs == 2


# PyTorch's compiler reads the gradient of the product, which is an input after the split.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    "change", [{"backend": "cpu"}, {"tile": (16, 16)}, {"requires_grad": True}], ids=str
)
def test_other_arguments_split_the_graph(change: dict[str, Any], rng: np.random.Generator) -> None:
    arrays, given = call_of(rng, "plain")
    if change.pop("requires_grad", False):
        arrays[0].requires_grad_()
    given |= change

    def step(arrays: list[Any]) -> Any:
        q, *others = arrays
        return ct.flash_attention_with_kvcache(q * 1.5, *others, **given) + 1

    compiled = torch.compile(step, backend="aot_eager")
    if arrays[0].requires_grad:
        with pytest.raises(TypeError, match="requires a gradient, which is not recorded"):
            compiled(arrays)
        return
    torch.testing.assert_close(compiled(copied(arrays)), step(arrays), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["shape", "dtype", "device"])
def test_an_output_array_of_another_kind_is_refused(change: str) -> None:
    q, cache = torch.randn(2, 1, 4, 8), torch.zeros(2, 16, 4, 8)
    out = {
        "shape": torch.empty(2, 5, 4, 8),
        "dtype": torch.empty(2, 1, 4, 8, dtype=torch.float16),
        "device": torch.empty(2, 1, 4, 8, device="meta"),
    }[change]

    def step(q: Any, out: Any) -> Any:
        return ct.flash_attention_with_kvcache(
            q, cache, cache.clone(), q, q, cache_seqlens=3, out=out
        )

    with pytest.raises((TypeError, ValueError)) as expected:
        step(q, out)
    with pytest.raises(expected.type, match="out"):
        torch.compile(step, backend="aot_eager")(q, out)


@pytest.mark.parametrize("scale", ["k_scale", "softmax_scale", "softcap"])
def test_bools_are_no_numbers(scale: str) -> None:
    q, cache = torch.randn(2, 1, 4, 8), torch.zeros(2, 16, 4, 8)

    def step(q: Any) -> Any:
        options: Any = {scale: True}
        return ct.flash_attention_with_kvcache(
            q, cache, cache.clone(), q, q, cache_seqlens=3, **options
        )

    with pytest.raises(TypeError, match=f"{scale} is"):
        torch.compile(step, backend="aot_eager")(q)


def test_arguments_of_other_types_are_refused() -> None:
    cache = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match="q is a ndarray; expected a tensor"):
        ct.flash_attention_with_kvcache(np.zeros((1, 1, 2, 4)), cache, cache, cache_seqlens=1)


def observed_call() -> tuple[Any, Any]:
    """Return a function of the queries that calls attention over a cache, and queries."""
    caches, lengths = torch.randn(2, BATCH, 9, HEADS_KV, DIM), torch.tensor([3, 4, 9]).int()

    def call(q: Any) -> Any:
        return ct.flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths)

    return call, torch.randn(BATCH, 2, HEADS, DIM)


def test_modes_observe_eager_calls() -> None:
    call, q = observed_call()
    with FlopCounterMode(display=False) as counter:
        found = call(q)
    assert torch.equal(found, call(q))
    assert counter.get_total_flops() > 0
    traced = make_fx(call)(q)
    assert torch.equal(traced(q), found)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_of_eager_calls_are_refused(transform: Any) -> None:
    call, q = observed_call()
    with pytest.raises(NotImplementedError, match="writes to its caches"):
        transform(call)(q[None] if transform is torch.vmap else q)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "score_mod"])
def test_modifications_that_require_gradients_are_refused(name: str) -> None:
    values = torch.nn.Parameter(torch.ones(HEADS))
    mod = ScoreMod(lambda score, h, table: score + table[h], table=values)
    caches, lengths = torch.randn(2, BATCH, 9, HEADS_KV, DIM), torch.tensor([3, 4, 9]).int()
    options = {name: mod if name == "score_mod" else values}

    def call(q: Any) -> Any:
        return ct.flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths, **options)

    q = torch.randn(BATCH, 2, HEADS, DIM)
    for function in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises(TypeError, match="requires a gradient"):
            function(q)
        with torch.no_grad():
            function(q)
