"""Gradients by PyTorch's autograd, with a fake torch that computes with NumPy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.fake_torch import Tensor, TorchOnHost, install_torch, passes_check

from cupy_flash.cli.cases.cases import Case
from cupy_flash.cli.cases.inputs import Inputs, random_inputs
from cupy_flash.cli.measure.gradient_check import GradientCheck
from cupy_flash.cli.providers.providers import provider
from cupy_flash.reference.gradients import backward_naive


class GradientTensor(Tensor):
    """Fake tensor that records which tensor it repeats."""

    source: GradientTensor | None = None

    def repeat_interleave(self, count: int, axis: int) -> Any:
        found = self.repeat(count, axis)
        found.source = self
        return found


class Output:
    """Output of attention, with the inputs and options that its graph holds."""

    def __init__(self, inputs: tuple[Any, ...], options: dict[str, Any], stream: Any) -> None:
        self.inputs, self.options, self.stream = inputs, options, stream


class Stream(NamedTuple):
    """Fake of `torch.cuda.Stream`."""

    cuda_stream: Any


class FakeTorch(TorchOnHost):
    """Fake of the parts of torch that compute gradients.

    Attributes
    ----------
    log
        Operations in order: attention, gradients, replays.
    takes_groups
        Whether `sdpa` accepts grouped heads (GQA).
    captures
        Whether calls can be captured.
    """

    tensor = GradientTensor

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, self.sdpa_kernel)
        self.log: list[str] = []
        self.takes_groups = self.captures = True
        self.stream = 0
        self.is_grad_enabled = True
        self.capturing: Any = None
        self.autograd = SimpleNamespace(grad=self.grad)
        self.cuda = SimpleNamespace(
            current_stream=lambda: Stream(self.stream),
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            Stream=lambda: Stream("side"),
            stream=self.on,
            graph=self.capture,
            synchronize=lambda: None,
        )
        self.backends: list[Any] = []

    @contextlib.contextmanager
    def no_grad(self) -> Iterator[None]:
        self.is_grad_enabled = False
        yield
        self.is_grad_enabled = True

    @contextlib.contextmanager
    def sdpa_kernel(self, backends: list[str]) -> Iterator[None]:
        self.backends = backends
        yield
        self.backends = []

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream.cuda_stream
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def capture(self, graph: Any, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        if not self.captures:
            # After a failed capture, PyTorch stays on the stream of the capture.
            self.stream = stream.cuda_stream
            raise RuntimeError("operation not permitted when stream is capturing")
        with self.on(stream):
            self.capturing = stream.cuda_stream
            yield
            self.capturing = None

    def sdpa(self, q: Any, k: Any, v: Any, enable_gqa: bool = False, **options: Any) -> Output:
        assert self.backends
        assert self.is_grad_enabled
        if enable_gqa and not self.takes_groups:
            raise RuntimeError("no grouped heads")
        self.log.append("attention")
        return Output((q, k, v), options, self.stream)

    def grad(
        self, out: Output, inputs: tuple[Any, ...], dout: Any, *, retain_graph: bool
    ) -> tuple[Any, ...]:
        assert retain_graph
        assert all(tensor.requires_grad for tensor in inputs)
        assert self.capturing in (None, out.stream), "autograd stays on the streams of forward"
        self.log.append("gradients")
        arrays = (np.asarray(x) for x in (dout, *out.inputs))
        # PyTorch aligns its causal mask top-left.
        mask = {"causal": True, "q_offset": 0} if out.options["is_causal"] else {"causal": False}
        found = backward_naive(*arrays, layout="bhsd", softmax_scale=out.options["scale"], **mask)
        for tensor, used in zip(inputs, out.inputs, strict=True):
            assert tensor is used or tensor is used.source
        return tuple(
            x if tensor is used else x.reshape(*tensor.shape[:2], -1, *x.shape[2:]).sum(2)
            for x, tensor, used in zip(found, inputs, out.inputs, strict=True)
        )


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Fake torch and fake CuPy, which both compute with NumPy."""
    return install_torch(monkeypatch, FakeTorch(monkeypatch))


def inputs_of(**more: Any) -> Inputs:
    sizes: dict[str, Any] = {"seqlen_q": 113, "seqlen_k": 203, "heads_q": 4, "heads_kv": 4} | more
    case = Case("float32", 2, head_dim=16, head_dim_v=24, direction="backward", **sizes)
    return random_inputs(case, 3, on_gpu=True)


def passes(inputs: Inputs, prepared: Any) -> bool:
    return passes_check(GradientCheck(inputs, 0, on_gpu=False), prepared)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("more", [{}, {"causal": True, "q_offset": 0}, {"softmax_scale": 0.3}])
def test_gradients_are_those_of_the_case(
    torch: FakeTorch, layout: str, more: dict[str, Any]
) -> None:
    cudnn, inputs = provider("torch-cudnn"), inputs_of(layout=layout, **more)

    assert cudnn.why_not(inputs.case) is None
    assert passes(inputs, cudnn.prepare(inputs))


def test_the_graph_is_made_before_and_a_call_goes_backward_alone(torch: FakeTorch) -> None:
    prepared = provider("torch-cudnn").prepare(inputs_of())
    torch.log.clear()
    prepared.call()
    prepared.call()

    assert torch.log == ["gradients"] * 2


@pytest.mark.parametrize("takes_groups", [True, False])
def test_of_grouped_heads_repeated_ones_are_summed_up(torch: FakeTorch, takes_groups: bool) -> None:
    inputs = inputs_of(heads_kv=2)
    if takes_groups:
        # The fake computes gradients by `backward_naive`, which accepts grouped heads anyway.
        prepared = provider("torch-cudnn").prepare(inputs)
        assert prepared.note is None
    else:
        torch.takes_groups = False
        prepared = provider("torch-efficient").prepare(inputs)
        assert prepared.note == (
            "refuses grouped heads: the gradients of repeated k and v are summed, which is timed"
        )

    assert passes(inputs, prepared)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_our_own_functions_of_tensors_are_called_as_torchs_are(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    def flash_attention(
        *tensors: Any, causal: bool, q_offset: int, softmax_scale: float | None, layout: str
    ) -> Output:
        assert (q_offset, layout) == (0, "bhsd")
        options = {"is_causal": causal, "scale": softmax_scale}
        return Output(tensors, options, torch.stream)

    ours = SimpleNamespace(flash_attention=flash_attention)
    monkeypatch.setitem(sys.modules, "cupy_flash.torch", ours)
    inputs = inputs_of(layout=layout, causal=True, q_offset=0)
    of_tensors = provider("cupy_flash-torch")
    prepared = of_tensors.prepare(inputs)

    assert of_tensors.ours
    assert of_tensors.why_not(inputs.case) is None
    assert prepared.plan is not None
    assert prepared.kernel_digest is not None
    assert passes(inputs, prepared)


def test_a_replay_goes_backward_on_the_stream_that_it_went_forward_on(torch: FakeTorch) -> None:
    cudnn = provider("torch-cudnn")
    prepared = cudnn.prepare(inputs_of())
    torch.log.clear()
    replay = cudnn.replayed(prepared)

    assert replay is not None
    assert torch.log == ["attention", "gradients", "gradients"]
    replay.call()
    assert torch.log[3:] == ["replay"]


def test_what_cannot_be_captured_is_timed_by_calls(torch: FakeTorch) -> None:
    torch.captures = False
    cudnn = provider("torch-cudnn")
    prepared = cudnn.prepare(inputs_of())

    assert cudnn.replayed(prepared) is None
    assert torch.stream == 0
    prepared.call()


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("torch-flash", {"causal": True}, "aligned top-left"),
        ("torch-cudnn", {"kind": "varlen", "seqlen_q": 203}, "takes no packed sequences"),
        ("cupy_flash-torch", {"kind": "varlen", "seqlen_q": 203}, "compared with torch's own call"),
    ],
)
def test_what_torch_has_no_gradients_of_is_refused(
    torch: FakeTorch, name: str, more: dict[str, Any], says: str
) -> None:
    case = inputs_of(**more).case

    assert says in str(provider(name).why_not(case))
