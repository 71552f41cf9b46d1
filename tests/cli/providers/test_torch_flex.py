"""FlexAttention and PyTorch's attention with masks, with a fake torch that computes with NumPy."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_torch import TorchOnHost, install_torch, passes_check

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.cases.mods import CaseMods
from cupy_flash.cli.measure.check import Check
from cupy_flash.cli.providers.providers import provider
from cupy_flash.cli.providers.torch_flex import FLEX
from cupy_flash.reference.dense import attention_naive


def case(mods: str = "", **more: Any) -> Case:
    sizes: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203} | more
    sizes |= {"heads_q": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 16}
    return Case("float32", 2, mods=CaseMods.parse(mods), **sizes)


class BlockMask:
    """Fake block mask: visibility of each pair, and sparsity in blocks of 128 x 128."""

    def __init__(self, mask_mod: Any, sizes: tuple[Any, ...]) -> None:
        self.sizes, self.mask_mod = sizes, mask_mod
        batch, heads, rows, keys = sizes
        grid = np.ogrid[: batch or 1, : heads or 1, :rows, :keys]
        self.seen = np.broadcast_to(mask_mod(*grid), (batch or 1, heads or 1, rows, keys))

    def sparsity(self) -> float:
        rows, keys = self.seen.shape[2:]
        starts = itertools.product(range(0, rows, 128), range(0, keys, 128))
        blocks = [self.seen[..., r : r + 128, k : k + 128].any() for r, k in starts]
        return 100 * (1 - sum(blocks) / len(blocks))


class FakeTorch(TorchOnHost):
    """Fake of the parts of torch that the providers use.

    Attributes
    ----------
    log
        Calls of the compiler and of both attention functions, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        names = ("flex_attention", "create_block_mask", "and_masks")
        flex = SimpleNamespace(**{name: getattr(self, name) for name in names})
        self.tanh, self.clamp = np.tanh, np.clip
        self._dynamo = SimpleNamespace(reset=lambda: self.log.append("reset"))
        self.no_grad = contextlib.nullcontext
        self.bool, self.bfloat16 = np.bool_, None
        super().__init__(monkeypatch, lambda backends: contextlib.nullcontext())
        monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", flex)

    @property
    def cuda(self) -> Any:
        stream = SimpleNamespace(cuda_stream=0)
        return SimpleNamespace(current_stream=lambda: stream)

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert not dynamic
        self.log.append(f"compile {function.__name__}")
        return function

    def and_masks(self, *masks: Any) -> Any:
        return lambda *at: np.logical_and.reduce(np.broadcast_arrays(*(m(*at) for m in masks)))

    def create_block_mask(self, mask_mod: Any, *sizes: Any, device: str) -> BlockMask:
        assert device == "cuda"
        self.log.append("create_block_mask")
        return BlockMask(mask_mod, sizes)

    def flex_attention(
        self, *arrays: Any, score_mod: Any, block_mask: Any, scale: float | None, enable_gqa: bool
    ) -> Any:
        q, k, v = arrays
        self.log.append("flex_attention")
        assert enable_gqa == (q.shape[1] != k.shape[1])
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat(group, 1) for x in (k, v))
        scores = np.asarray(q) @ np.asarray(k).swapaxes(2, 3) * (scale or q.shape[3] ** -0.5)
        if score_mod is not None:
            scores = score_mod(scores, *np.ogrid[tuple(slice(n) for n in scores.shape)])
        if block_mask is not None:
            scores = np.where(block_mask.seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return (scores / scores.sum(-1, keepdims=True)) @ np.asarray(v)

    def sdpa(self, q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        self.log.append(arguments)
        group = q.shape[1] // k.shape[1]
        given = arguments["attn_mask"]
        given = {"mask" if given.dtype == bool else "bias": np.asarray(given)}
        arrays = (np.asarray(x) for x in (q, k.repeat(group, 1), v.repeat(group, 1)))
        return attention_naive(*arrays, layout="bhsd", **given)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Fake torch and fake CuPy, which both compute with NumPy."""
    return install_torch(monkeypatch, FakeTorch(monkeypatch))


def passes(inputs: Inputs, prepared: Any) -> bool:
    return passes_check(Check(inputs, 0, on_gpu=False), prepared)


def on_gpu(made: Case) -> Inputs:
    host = random_inputs(made, 3, on_gpu=False)
    return Inputs(made, _host=host.host, seed=3)


ALL = (
    *("", "window 40:0", "window 3:90", "softcap 2.5", "alibi", "bias heads", "bias shared"),
    *("bias batch", "mask heads", "mask shared", "mask batch", "mod documents", "mod t5"),
    *("mod dilated", "mod prefix", "mod softcap"),
    "window 60:9, softcap 3, alibi, bias heads, mod t5",
)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("text", ALL)
def test_each_modification_is_the_librarys(torch: FakeTorch, text: str, layout: str) -> None:
    inputs = on_gpu(case(text, layout=layout))

    assert FLEX.why_not(inputs.case) is None
    assert passes(inputs, FLEX.prepare(inputs))


@pytest.mark.parametrize("more", [{}, {"q_offset": 30}, {"seqlen_q": 203}])
@pytest.mark.parametrize("text", ["", "window 40:0", "alibi", "mod documents", "mod t5"])
def test_causal_masks_count_positions_as_the_library_does(
    torch: FakeTorch, text: str, more: dict[str, int]
) -> None:
    inputs = on_gpu(case(text, causal=True, **more))

    assert passes(inputs, FLEX.prepare(inputs))


def test_everything_is_compiled_anew_for_a_case_and_before_it_is_timed(torch: FakeTorch) -> None:
    prepared = FLEX.prepare(on_gpu(case("mod documents")))
    made = list(torch.log)
    prepared.call()

    compiled = ["reset", "compile create_block_mask", "create_block_mask"]
    assert made == [*compiled, "compile flex_attention", "flex_attention"]
    assert torch.log == [*made, "flex_attention"]


def test_compiled_gradients_can_be_computed_again(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(donated_buffer=True)
    monkeypatch.setitem(sys.modules, "torch._functorch.config", config)
    torch.autograd = SimpleNamespace(grad=lambda *given, **options: options)
    made = dataclasses.replace(case("mod documents"), direction="backward")

    assert FLEX.why_not(made) is None
    assert FLEX.prepare(on_gpu(made)).call() == {"retain_graph": True}
    # The first call of the compiled function is the one that is differentiated.
    assert torch.log[-2:] == ["compile flex_attention", "flex_attention"]
    assert not config.donated_buffer


def test_what_a_block_mask_keeps_is_told(torch: FakeTorch) -> None:
    windowed = case("window 10:0", seqlen_q=512, seqlen_k=512)

    note = FLEX.prepare(on_gpu(windowed)).note
    assert note == "its BlockMask, built beforehand, keeps 43.8% of the blocks"
    assert FLEX.prepare(on_gpu(case())).note is None


@pytest.mark.parametrize(("text", "axes"), [("shared", (None, None)), ("heads", (None, 4))])
def test_a_block_mask_has_the_axes_that_its_mask_has(
    torch: FakeTorch, text: str, axes: tuple[int | None, int | None]
) -> None:
    made = FLEX.prepare(on_gpu(case(f"mask {text}"))).call.keywords["block_mask"]

    assert made.sizes == (*axes, 113, 203)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (case("sinks"), "flex_attention has no sinks"),
        (case(kind="cache"), "batches of equal length only"),
        (case(kind="varlen", seqlen_q=203), "batches of equal length only"),
        (case("mod documents", seqlen_q=250), "does not clamp"),
    ],
)
def test_what_it_has_no_equivalent_for_is_refused(torch: FakeTorch, made: Case, says: str) -> None:
    assert says in str(FLEX.why_not(made))


@pytest.mark.parametrize("text", ["bias heads", "bias shared", "mask batch"])
def test_torchs_own_call_takes_a_bias_or_a_mask(torch: FakeTorch, text: str) -> None:
    cudnn, inputs = provider("torch-cudnn"), on_gpu(case(text))
    prepared = cudnn.prepare(inputs)

    assert cudnn.why_not(inputs.case) is None
    assert passes(inputs, prepared)
    name, _, _ = text.partition(" ")
    assert prepared.call.keywords["attn_mask"].dtype == ("bool" if name == "mask" else "float32")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (case("window 9:0, bias heads"), "scaled_dot_product_attention has no window 9:0"),
        (case("mod documents"), "scaled_dot_product_attention has no mod documents"),
        (case("bias heads, mask heads"), "takes a bias or a mask, not both"),
        (case("bias heads", causal=True, q_offset=0), "takes a bias or is_causal, not both"),
    ],
)
@pytest.mark.parametrize("name", ["torch-cudnn", "torch-efficient"])
def test_torchs_own_call_refuses_what_it_has_no_argument_for(
    torch: FakeTorch, name: str, made: Case, says: str
) -> None:
    assert says in str(provider(name).why_not(made))


def test_plain_torch_refuses_modifications(torch: FakeTorch) -> None:
    eager, plain = provider("torch-eager"), dataclasses.replace(case("sinks"), mods=CaseMods())

    assert eager.why_not(case("sinks")) == "this provider does not support sinks"
    assert eager.why_not(plain) is None
