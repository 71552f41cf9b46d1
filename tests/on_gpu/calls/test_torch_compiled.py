"""`torch.compile` on a GPU: models of four layers and decoding steps, also in CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.in_torch.operators import counted

from cupy_flash import MaskMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")

from support.in_torch.model import Model, prepared, random_documents, step  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's compiler uses deprecated functions of PyTorch, and advises on float32 products.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:TensorFloat32", "ignore:The CUDA Graph is empty"
    ),
]

HEADS, HEADS_KV, DIM = 8, 2, 64


def inputs(batch: int, rows: int, dtype: Any) -> tuple[Any, Any]:
    x = torch.randn(batch, rows, 32, dtype=dtype, device="cuda")
    return x, random_documents(batch, rows, "cuda")


def errors(found: list[Any], exact: list[Any]) -> list[float]:
    """Return the largest error of each tensor, relative to the largest element."""
    return [
        float(((x.double() - y).abs().max() / y.abs().max()).detach())
        for x, y in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_four_layers_are_computed_as_by_the_eager_model(backend: str) -> None:
    model = prepared(Model(), dtype=torch.bfloat16, device="cuda")
    wide = prepared(copy.deepcopy(model), dtype=torch.float64)
    compiled, graphs = counted(model, backend, dynamic=True), []
    for batch, rows in ((3, 70), (5, 131), (7, 200)):
        x, documents = inputs(batch, rows, torch.bfloat16)
        found = step(compiled, model, x, documents)
        eager = step(model, model, x, documents)
        exact = step(wide, wide, x.double(), documents)
        # Generated code rounds fewer intermediate results than eager operations, or others.
        for own, other in zip(errors(found, exact), errors(eager, exact), strict=True):
            assert own <= 2 * other + 2**-8
        graphs.append(compiled.graphs)
    assert graphs == graphs[:1] * 3


def test_graphs_of_a_whole_training_step_follow_new_inputs() -> None:
    """With "reduce-overhead" the second step is captured in CUDA graphs, and later ones replay."""
    model = prepared(Model(), dtype=torch.float32, device="cuda")
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        x, documents = inputs(3, 70, torch.float32)
        torch.compiler.cudagraph_mark_step_begin()
        found = [y.detach().clone() for y in step(compiled, model, x, documents)]
        for y, z in zip(found, step(model, model, x, documents), strict=True):
            torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)


def test_graphs_read_the_captured_tensor_at_each_launch() -> None:
    q = torch.randn(2, 300, HEADS, DIM, dtype=torch.float16, device="cuda")
    ids = torch.zeros(2, 300, dtype=torch.int32, device="cuda")
    mask = MaskMod(lambda b, i, j, ids: ids[b, i] == ids[b, j], ids=ids)

    @torch.no_grad()
    def call(q: Any) -> Any:
        return ct.flash_attention(q, q, q, mask_mod=mask)

    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for cut in (20, 77, 128, 200, 299):
        ids.copy_((torch.arange(300, device="cuda") >= cut).expand(2, 300))
        mask.refresh()
        torch.testing.assert_close(compiled(q).clone(), call(q), rtol=0, atol=0)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("paged", [False, True])
def test_a_decoding_step_appends_and_attends(mode: str | None, paged: bool) -> None:
    batch, steps, capacity = 3, 8, 64
    rows = [
        torch.randn(batch, steps, heads, DIM, dtype=torch.bfloat16, device="cuda")
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    ]
    options: dict[str, Any] = {}
    shape = (batch, capacity)
    if paged:
        shape = (batch * 4, capacity // 4)
        table = torch.randperm(batch * 4, dtype=torch.int32, device="cuda")
        options["block_table"] = table.view(batch, 4)
    own, other = (
        [torch.zeros(*shape, HEADS_KV, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        for _ in range(2)
    )
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    for cache in (*own, lengths):
        # Otherwise each launch copies the caches to memory of the graph, and back.
        torch._dynamo.mark_static_address(cache)

    def attend(caches: list[Any], new: list[Any]) -> Any:
        q, k, v = new
        out = ct.flash_attention_with_kvcache(
            *(q * 2, *caches, k, v), cache_seqlens=lengths, causal=True, **options
        )
        return out + 1

    compiled = torch.compile(attend, mode=mode, fullgraph=True)
    with torch.no_grad():
        for n in range(steps):
            new = [x[:, n : n + 1].contiguous() for x in rows]
            torch.compiler.cudagraph_mark_step_begin()
            found, expected = compiled(own, new).clone(), attend(other, new)
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
            lengths.add_(1)
    for x, y in zip(own, other, strict=True):
        assert torch.equal(x, y)
        assert x.any()


@pytest.mark.parametrize("kind", ["plain", "function"])
def test_operators_satisfy_opcheck(kind: str) -> None:
    from torch import library

    from cupy_flash.torch import operators
    from cupy_flash.torch.modifications import packed

    q, k, v = (
        torch.randn(2, 70, heads, DIM, dtype=torch.float32, device="cuda", requires_grad=True)
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    )
    options = {} if kind == "plain" else {"mask_mod": random_documents(2, 70, "cuda")}
    arguments = q, k, v, *packed(options, q, HEADS), True, None, None, "bshd"
    library.opcheck(operators.ATTENTION, arguments)
