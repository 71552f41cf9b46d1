"""Operators of `cupy_flash.torch` satisfy the checks of PyTorch, with all kinds of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_flash import BlockList, MaskMod, ScoreMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

from torch import library  # noqa: E402

from cupy_flash.torch import cache_operators, operators  # noqa: E402
from cupy_flash.torch.modifications import packed  # noqa: E402

# opcheck itself reads the gradients of copies.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")

HEADS, HEADS_KV = 4, 2


def normal(rng: np.random.Generator, *shape: int, grad: bool = False) -> Any:
    return torch.tensor(rng.standard_normal(shape), requires_grad=grad)


def rows(rng: np.random.Generator, *leading: int, keys: int) -> list[Any]:
    """Return queries, keys and values that require gradients."""
    *batch, queries = leading
    shapes = (*batch, queries, HEADS, 5), (*batch, keys, HEADS_KV, 5), (*batch, keys, HEADS_KV, 3)
    return [normal(rng, *shape, grad=True) for shape in shapes]


def modifications(rng: np.random.Generator, name: str, batch: int, keys: int) -> dict[str, Any]:
    """Return modifications of a call whose sequences have at most `keys` keys."""
    if name in ("none", "lists"):
        return {}
    if name == "arrays":
        return {
            "bias": normal(rng, 1, HEADS, 1, keys, grad=True),
            "sinks": normal(rng, HEADS, grad=True),
            "alibi_slopes": rng.random(HEADS).tolist(),
            "window_size": (int(rng.integers(1, keys)), None),
            "softcap": 3.0,
            "seqlens_k": rng.integers(1, keys, batch).tolist(),
        }
    if name == "blocks":
        return {"mask_mod": BlockList(torch.tensor([[[[True, False], [False, True]]]]), (4, 3))}
    gain, ids = normal(rng, HEADS), torch.tensor(rng.integers(0, 2, (batch, keys)))
    return {
        "score_mod": ScoreMod(
            lambda score, h, gain, shift: score * gain[h] + shift, gain=gain, shift=0.5
        ),
        "mask_mod": MaskMod(
            lambda b, i, j, ids, width: (ids[b, i] == ids[b, j]) | (i - j < width), ids=ids, width=2
        ),
    }


MODIFICATIONS = ["none", "arrays", "blocks", "functions"]


def lists_of_keys(rng: np.random.Generator, name: str, *leading: int, keys: int) -> Any:
    """Return lists for a call that is named "lists", otherwise None."""
    return torch.tensor(rng.integers(-1, keys, (*leading, 1, 6))) if name == "lists" else None


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", [*MODIFICATIONS, "lists"])
def test_the_operator_of_dense_batches_and_its_gradients(
    name: str, layout: str, rng: np.random.Generator
) -> None:
    batch, queries, keys = (int(x) for x in rng.integers(2, 10, 3))
    q, k, v = rows(rng, batch, queries, keys=keys)
    given = modifications(rng, name, batch, keys)
    lists = lists_of_keys(rng, name, batch, queries, keys=keys)
    if layout == "bhsd":
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    others = *packed(given, q, HEADS), True, None, 2, layout, lists
    library.opcheck(operators.ATTENTION, (q, k, v, *others))
    with torch.no_grad():
        out, lse = operators.ATTENTION(q, k, v, *others)
    plain = [x.detach() for x in (q, k, v)]
    given = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    others = *packed(given, q, HEADS), True, None, 2, layout, lists
    wrt = ["q", "v", "bias", "sinks"] if name == "arrays" else ["q", "v"]
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    operator = torch.ops.cupy_flash.attention_gradients.default
    library.opcheck(operator, (dout, dlse, out, lse, wrt, *plain, *others))


@pytest.mark.parametrize("name", ["none", "functions", "lists"])
def test_the_operator_of_packed_sequences(name: str, rng: np.random.Generator) -> None:
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = rows(rng, 9, keys=9)
    used = torch.tensor([3, 5], dtype=torch.int32)
    # Operators find functions that exist.
    mods = modifications(rng, name, 2, 5)
    given = packed(mods, q, HEADS)
    lists = lists_of_keys(rng, name, 9, keys=5)
    arguments = (q, k, v, *given, ends, ends, 5, 5, used, True, 0.3, lists)
    library.opcheck(operators.ATTENTION_VARLEN, arguments)
    out, lse = (x.detach() for x in operators.ATTENTION_VARLEN(*arguments))
    plain = [x.detach() for x in (q, k, v)]
    operator = torch.ops.cupy_flash.attention_varlen_gradients.default
    given = torch.randn_like(out), None, out, lse, ["k"], *plain, *arguments[3:]
    library.opcheck(operator, given)


CACHED = {
    "attends": cache_operators.ATTEND,
    "appends": cache_operators.APPEND,
    "appends 8 bits": cache_operators.APPEND_WITH_SCALES,
}


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("functions", [False, True])
def test_the_operators_of_caches(name: str, functions: bool, rng: np.random.Generator) -> None:
    batch, capacity = 2, int(rng.integers(12, 20))
    q, k, v = (normal(rng, batch, 3, heads, 5).float() for heads in (HEADS, HEADS_KV, HEADS_KV))
    dtype = torch.int8 if name == "appends 8 bits" else torch.float32
    caches = [torch.zeros(3, capacity, HEADS_KV, 5, dtype=dtype) for _ in range(2)]
    given = {
        "cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32),
        "rotary_cos": normal(rng, 30, 2).float(),
        "rotary_sin": normal(rng, 30, 2).float(),
    }
    if name == "attends":
        k = v = None
        given = {}
    scales = [torch.ones(3, capacity, HEADS_KV) if dtype == torch.int8 else None for _ in range(2)]
    options: dict[str, Any] = {"rotary_interleaved": True, "compute_scales": dtype == torch.int8}
    options |= {"causal": True, "num_splits": 0, "shared_prefix_len": 0, "batch_invariant": False}
    # Operators find functions that exist.
    mods = modifications(rng, "functions" if functions else "none", batch, capacity)
    arguments = (
        *(q, *caches, k, v, 0, torch.tensor([3, 5], dtype=torch.int32), *scales),
        *(given.get(x) for x in cache_operators.TENSORS),
        *packed(mods, q, HEADS),
        *(options.get(x) for x in cache_operators.OPTIONS),
    )
    library.opcheck(CACHED[name], arguments)


@pytest.mark.parametrize(
    "name", ["none", "bias", "slopes", "lengths", "function", *MODIFICATIONS, "lists"]
)
def test_a_mapped_operator_computes_each_element(name: str, rng: np.random.Generator) -> None:
    size, batch, queries, keys = (int(x) for x in rng.integers(2, 6, 4))
    q, k, v = (x.detach() for x in rows(rng, size, batch, queries, keys=keys))
    given: dict[str, Any] = {
        "bias": {"bias": normal(rng, HEADS, 1, keys)},
        "slopes": {"alibi_slopes": normal(rng, batch, HEADS)},
        "lengths": {"seqlens_k": rng.integers(1, keys, batch).tolist()},
        "function": {"mask_mod": MaskMod(lambda i, j: (i + j) % 3 > 0)},
    }.get(name) or modifications(rng, name, batch, keys)
    given = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    lists = lists_of_keys(rng, name, batch, queries, keys=keys)
    others = *packed(given, q, HEADS), True, None, None, "bshd", lists
    operator = torch.ops.cupy_flash.attention_gradients

    def attention(q: Any, k: Any, v: Any) -> Any:
        return operators.ATTENTION(q, k, v, *others)

    def gradients(dout: Any, out: Any, lse: Any, q: Any, k: Any, v: Any) -> Any:
        return operator(dout, None, out, lse, ["q", "k"], q, k, v, *others)

    def assert_mapped(function: Any, *arguments: Any, axes: Any) -> Any:
        found = torch.vmap(function, axes)(*arguments)
        for n in range(size):
            own = [x if d is None else x.select(d, n) for x, d in zip(arguments, axes, strict=True)]
            for x, y in zip(found, function(*own), strict=True):
                torch.testing.assert_close(x[n], y, rtol=0, atol=1e-12)
        return found

    # All sequences share the keys in the second case.
    assert_mapped(attention, q.movedim(0, 2), k[0], v, axes=(2, None, 0))
    out, lse = assert_mapped(attention, q, k, v, axes=(0, 0, 0))
    dout = torch.randn_like(out)
    assert_mapped(gradients, dout, out, lse, q, k, v, axes=(0,) * 6)


def test_no_samples_are_mapped_unless_they_are_separate_calls(rng: np.random.Generator) -> None:
    q, k, v = (x.detach() for x in rows(rng, 2, 5, keys=7))
    none, sinks = q.expand(0, *q.shape), normal(rng, 0, HEADS)

    def attention(q: Any, sinks: Any = None) -> Any:
        others = *packed({"sinks": sinks}, q, HEADS), True, None, None, "bshd", None
        return operators.ATTENTION(q, k, v, *others)

    out, lse = torch.vmap(attention)(none)
    assert out.shape == (0, *q.shape[:-1], v.shape[-1])
    assert lse.shape == (0, 2, HEADS, 5)
    with pytest.raises(ValueError, match="vmap maps an axis of length 0 of q, sinks; expected a"):
        torch.vmap(attention)(none, sinks)


def test_a_mapped_operator_of_no_gradients(rng: np.random.Generator) -> None:
    q, k, v = (x.detach() for x in rows(rng, 3, 2, 5, keys=7))
    mask = MaskMod(lambda b, j: j > b)
    others = *packed({"mask_mod": mask}, q[0], HEADS), True, None, None, "bshd", None

    def gradients(q: Any, k: Any, v: Any) -> Any:
        out, lse = operators.ATTENTION(q, k, v, *others)
        made = torch.ops.cupy_flash.attention_gradients(out, None, out, lse, [], q, k, v, *others)
        assert made == []
        return out

    torch.vmap(gradients)(q, k, v)


def test_operations_are_counted_as_those_of_torch(rng: np.random.Generator) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def counted(call: Any) -> tuple[int, ...]:
        with FlopCounterMode(display=False) as counter:
            call().sum().backward()
        return tuple(counter.get_flop_counts()["Global"].values())

    batch, queries, keys = (int(x) for x in rng.integers(2, 10, 3))
    q, k, v = rows(rng, batch, queries, keys=keys)
    pairs = HEADS * batch * queries * keys
    found = counted(lambda: ct.flash_attention(q, k, v, causal=True))
    assert found == (2 * pairs * (5 + 3), 2 * pairs * (3 * 5 + 2 * 3))
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    assert counted(lambda: ct.flash_attention(q, k, v, layout="bhsd")) == found
    q, k, v = rows(rng, 9, keys=12)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 10, 12]))
    pairs = HEADS * (4 * 10 + 5 * 2)
    found = counted(lambda: ct.flash_attention_varlen(q, k, v, ends_q, ends_k, 5, 10))
    assert found == (2 * pairs * (5 + 3), 2 * pairs * (3 * 5 + 2 * 3))


def test_operations_of_cached_calls_are_counted(rng: np.random.Generator) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (normal(rng, 2, 3, heads, 5) for heads in (HEADS, HEADS_KV, HEADS_KV))
    caches = [torch.zeros(2, 9, HEADS_KV, 5, dtype=torch.float64) for _ in range(2)]
    options = [None] * len(cache_operators.TENSORS)
    others = (True, False, None, True, None, 0, 0, False, None)
    with FlopCounterMode(display=False) as counter:
        cache_operators.APPEND(
            *(q, *caches, k, v, 0, torch.tensor([2, 6]), None, None, *options),
            *(*packed({}, q, HEADS), *others),
        )
    assert counter.get_total_flops() == 2 * HEADS * 3 * (5 + 9) * (5 + 5)
