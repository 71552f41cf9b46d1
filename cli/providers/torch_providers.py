"""Providers that call torch's attention on the same CuPy arrays, if torch is installed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan

from ..cases.cases import Case
from ..cases.inputs import Inputs
from ..cases.mod_arguments import OF_PAIRS
from ..cases.mods import CaseMods
from ..measure import memory
from ..measure.timing import Timed
from ..records import environment
from .contract import Prepared, Provider

_REFUSAL = "kernel not used because"


def _why_no_call(case: Case) -> str | None:
    """Return why torch cannot compute a case of caches or packed sequences, or None if it can."""
    if case.is_dense:
        return None
    if not case.is_cached:
        return "scaled_dot_product_attention takes no packed sequences"
    for has_it, what in (
        (case.page_size, "no pages"),
        (case.append, "no rows to append"),
        (case.lengths, "no caches of different lengths"),
    ):
        if has_it:
            return f"scaled_dot_product_attention takes {what}"
    return None


def _why_no_mask(mods: CaseMods, *, causal: bool) -> str | None:
    """Return why torch's call cannot compute these modifications, or None if it can."""
    arrays = [name for name in ("bias", "mask") if getattr(mods, name)]
    if others := dataclasses.replace(mods, bias=None, mask=None, dropout=None):
        return f"scaled_dot_product_attention has no {others}"
    if len(arrays) > 1:
        return "scaled_dot_product_attention takes a bias or a mask, not both"
    if arrays and causal:
        return f"scaled_dot_product_attention takes a {arrays[0]} or is_causal, not both"
    return None


def _has_mask(case: Case) -> bool:
    """Return whether a causal mask masks any pair: it masks none if the last query is alone."""
    return case.causal and not (case.is_cached and case.seqlen_q == 1)


def torch_module() -> Any:
    """Return the module torch."""
    import torch

    return torch


@functools.cache
def why_no_torch() -> str | None:
    """Return why torch cannot run on this GPU together with CuPy, or None if it can."""
    if reason := gpu_unavailable():
        return reason
    if reason := import_failure("torch", "torch", torch_module):
        return reason
    torch = torch_module()
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


def import_failure(module: str, package: str, load: Callable[[], Any]) -> str | None:
    """Return why `load` cannot import a module of a package, or None if it can."""
    with warnings.catch_warnings():
        # Warnings of the module's own imports do not concern the user.
        warnings.simplefilter("ignore")
        try:
            load()
        except Exception as error:  # a missing or incompatible library raises various exceptions
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent and f"{module}.".startswith(f"{absent}."):
                return f"{package} is not installed"
            return f"{module} cannot be imported: {' '.join(str(error).split())[:80]}"
    return None


@functools.cache
def why_no_package(module: str, package: str) -> str | None:
    """Return why a module of a package cannot be imported, or None if it can."""
    return import_failure(module, package, lambda: importlib.import_module(module))


def idle_bytes() -> int:
    """Return the bytes of device memory that torch has reserved but does not use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def release_memory() -> None:
    """Free the device memory that torch has reserved but does not use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def to_torch(array: Any) -> Any:
    """Return a torch tensor over a CuPy array's memory."""
    torch = torch_module()
    # These dtypes are passed as integers, because not every CuPy version exports them.
    for name, bits in (("bfloat16", "int16"), ("bool", "uint8")):
        if array.dtype.name == name:
            return torch.from_dlpack(array.view(bits)).view(getattr(torch, name))
    return torch.from_dlpack(array)


def to_cupy(tensor: Any) -> Any:
    """Return a CuPy array over a torch tensor's memory."""
    import cupy
    import ml_dtypes

    torch = torch_module()
    tensor = tensor.detach()
    if tensor.dtype != torch.bfloat16:
        return cupy.from_dlpack(tensor)
    return cupy.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)


def tensors_of(inputs: Inputs, layout: str) -> tuple[Any, Any, Any]:
    """Return q, k and v as a provider with this layout takes them, over the same memory.

    For arrays in another layout these are transposed views, as its users would pass them.
    """
    import cupy

    torch = torch_module()
    ours = cupy.cuda.get_current_stream().ptr
    theirs = torch.cuda.current_stream().cuda_stream
    if ours != theirs:
        raise RuntimeError(f"torch is on stream {theirs:#x} and CuPy on {ours:#x}")
    # The environment may have changed this default; float32 must not be computed in TF32.
    torch.set_float32_matmul_precision("highest")
    q, k, v = (_in_layout(layout, inputs.case, array) for array in inputs.gpu)
    return q, k, v


def _in_layout(layout: str, case: Case, array: Any) -> Any:
    """Return a tensor over an array of a case; for packed sequences, it has no batch axis."""
    tensor = to_torch(array)
    if case.kind == "varlen":
        return tensor[0]
    return tensor if case.layout == layout else tensor.transpose(1, 2)


def _way_back(layout: str, case: Case) -> Callable[[Any], Any]:
    """Return a function from torch's result to an array in the case's layout."""
    if case.kind == "varlen" or case.layout == layout:
        return to_cupy
    return lambda out: to_cupy(out).swapaxes(1, 2)


def _replay(graph: Any, held: tuple[Any, ...]) -> None:
    # `held` keeps the memory that the graph reads and writes alive as long as the graph.
    graph.replay()


@dataclass(frozen=True)
class Attention:
    """Attention as a provider computes it.

    Attributes
    ----------
    function
        Function from q, k and v, as `tensors_of` returns them, to the output.
    scope
        Function that returns a context for its calls.
    note
        See `Prepared`.
    """

    function: Callable[[Any, Any, Any], Any]
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    note: str | None = None

    @contextlib.contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Enter the scope for calls that record no autograd graph."""
        with self.scope(), torch_module().no_grad():
            yield


class TorchProvider(Provider):
    """Base class of the providers that compute with torch.

    Attributes
    ----------
    layout
        Layout of the tensors that `attention` takes: "bhsd" or "bshd".
    """

    on_gpu = True
    layout = "bhsd"

    def missing(self) -> str | None:
        return why_no_torch()

    @abstractmethod
    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        """Return the attention; raise RuntimeError with the reason if torch refuses the tensors."""

    def prepare(self, inputs: Inputs) -> Prepared:
        torch, case = torch_module(), inputs.case
        tensors = tensors_of(inputs, self.layout)
        back = _way_back(self.layout, case)
        if not case.is_backward:
            result = self.attention(inputs, *tensors)
            call = functools.partial(result.function, *tensors)
            return Prepared(call, back, result.without_gradients, note=result.note)
        result = self.attention(inputs, *tensors)
        dout = _in_layout(self.layout, case, inputs.dout(on_gpu=True))

        def differentiated() -> Callable[[], Any]:
            # The leaves are new tensors, because autograd keeps the stream of a tensor's first use.
            leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
            with result.scope():
                out = result.function(*leaves)
            return functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)

        return Prepared(
            differentiated(),
            lambda gradients: tuple(map(back, gradients)),
            note=result.note,
            anew=differentiated,
        )

    def replayed(self, prepared: Prepared) -> Timed | None:
        # torch has separate memory for its own graphs; it launches them on its current stream,
        # which is CuPy's.
        torch = torch_module()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        call = prepared.call
        try:
            # A failed capture leaves its stream current; this context restores the previous one.
            with prepared.scope(), torch.cuda.stream(torch.cuda.current_stream()):
                if prepared.anew is not None:
                    # autograd runs backward on the streams of the forward pass.
                    torch.cuda.synchronize()
                    with torch.cuda.stream(stream):
                        call = prepared.anew()
                        call()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                    result = call()
        except RuntimeError:
            return None
        return Timed(functools.partial(_replay, graph, (call, result)))

    def peak_bytes(self, prepared: Prepared) -> int:
        return memory.torch_peak_bytes(prepared.timed)


class ScaledDotProduct(TorchProvider):
    """torch.nn.functional.scaled_dot_product_attention, restricted to one backend."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self.backend = backend

    def why_not(self, case: Case) -> str | None:
        if reason := self.missing():
            return reason
        if reason := _why_no_call(case) or _why_no_mask(case.mods, causal=_has_mask(case)):
            return reason
        if _has_mask(case) and (case.problem().q_offset if case.is_dense else case.first_query):
            return "torch's causal mask is aligned top-left: it has q_offset 0 only"
        return None

    def scratch_bytes(self, case: Case) -> int:
        if self.backend != "MATH":
            return 0
        # Scores, probabilities and masked scores, in float32 for 16-bit inputs; two more backward.
        arrays = 5 if case.is_backward else 3
        return arrays * case.scores * (8 if case.dtype == "float64" else 4)

    def _scope(self) -> AbstractContextManager[Any]:
        attention = torch_module().nn.attention
        scope: AbstractContextManager[Any] = attention.sdpa_kernel(
            [getattr(attention.SDPBackend, self.backend)]
        )
        return scope

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        case = inputs.case
        # In some versions, `import torch` does not import this module.
        importlib.import_module("torch.nn.attention")
        arguments = {"is_causal": _has_mask(case), "scale": case.softmax_scale}
        if case.mods.dropout is not None:
            arguments["dropout_p"] = case.mods.dropout
        for name, array in inputs.modifications(on_gpu=True).items():
            if name in OF_PAIRS:
                arguments["attn_mask"] = to_torch(array)
        attention = functools.partial(
            torch_module().nn.functional.scaled_dot_product_attention, **arguments
        )
        if case.heads_q == case.heads_kv:
            return self._tried(Attention(attention, self._scope), q, k, v)
        grouped = Attention(functools.partial(attention, enable_gqa=True), self._scope)
        try:
            return self._tried(grouped, q, k, v)
        except RuntimeError:
            if case.is_cached:
                # Repeating the heads would make a new cache, several times as large.
                raise
        repeated = dataclasses.replace(
            _with_repeated_heads(case, attention, k, v), scope=self._scope
        )
        return self._tried(
            dataclasses.replace(repeated, note=f"refuses grouped heads: {repeated.note}"), q, k, v
        )

    @staticmethod
    def _tried(result: Attention, q: Any, k: Any, v: Any) -> Attention:
        """Return `result` after a call; raise RuntimeError with the reasons if torch refuses."""
        with warnings.catch_warnings(record=True) as caught, result.scope():
            warnings.simplefilter("always")
            try:
                result.function(q, k, v)
            except RuntimeError as error:
                raise RuntimeError(refusal([str(w.message) for w in caught], str(error))) from error
        return result


def _with_repeated_heads(
    case: Case, attention: Callable[[Any, Any, Any], Any], k: Any, v: Any
) -> Attention:
    """Return attention on repeated k and v, for a function that takes no grouped heads."""

    def repeat(tensor: Any) -> Any:
        return tensor.repeat_interleave(case.heads_q // case.heads_kv, 1)

    if case.is_backward:
        return Attention(
            lambda q, k, v: attention(q, repeat(k), repeat(v)),
            note="the gradients of repeated k and v are summed, which is timed",
        )
    repeated = repeat(k), repeat(v)
    return Attention(
        lambda q, *_: attention(q, *repeated), note="k and v were repeated beforehand, untimed"
    )


def refusal(warned: list[str], error: str) -> str:
    """Return why a backend refused, extracted from torch's warnings about all backends.

    For each backend there is a heading, "... kernel not used because:", followed by reasons. The
    only reason of backends outside of the scope is that they are disabled.
    """
    reasons = [text.split(" (Triggered")[0].strip() for text in warned]
    reasons = [r for r in reasons if _REFUSAL not in r and "runtime disabled" not in r]
    return "; ".join(dict.fromkeys(reasons)) or error.strip().splitlines()[0]


class Eager(TorchProvider):
    """Plain formula in torch: q @ k^T, softmax, @ v, in the input's dtype."""

    name = "torch-eager"

    def why_not(self, case: Case) -> str | None:
        if reason := self.missing():
            return reason
        if not case.is_dense:
            return "this provider computes batches of equal length only"
        if case.mods:
            return f"this provider does not support {case.mods}"
        if case.causal and case.problem().q_offset < 0:
            return "a fully masked row gives NaN in the plain formula"
        return None

    def scratch_bytes(self, case: Case) -> int:
        return (5 if case.is_backward else 3) * case.scores * case.problem().itemsize

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        torch = torch_module()
        case = inputs.case
        problem = case.problem()
        masked = None
        if case.causal:
            shape = (case.seqlen_q, case.seqlen_k)
            visible = torch.ones(shape, dtype=torch.bool, device=q.device).tril(problem.q_offset)
            masked = visible.logical_not()

        def attend(q: Any, k: Any, v: Any) -> Any:
            scores = (q * problem.softmax_scale) @ k.transpose(-2, -1)
            if masked is not None:
                scores.masked_fill_(masked, float("-inf"))
            return torch.softmax(scores, -1) @ v

        is_plain = case.heads_q == case.heads_kv
        return Attention(attend) if is_plain else _with_repeated_heads(case, attend, k, v)


class OfTensors(TorchProvider):
    """The library as torch users call it: `cupy_flash.torch`, with tensors as inputs and output."""

    name = "cupy_flash-torch"
    ours = True

    def why_not(self, case: Case) -> str | None:
        if reason := self.missing():
            return reason
        if not case.is_dense or case.mods:
            return "it is compared with torch's own call: equal lengths, no modifications"
        try:
            self._plan(case)
        except ValueError as error:
            return str(error)
        return None

    @staticmethod
    def _plan(case: Case) -> Plan:
        return make_plan(case.problem(), current_device())

    def scratch_bytes(self, case: Case) -> int:
        return self._plan(case).workspace

    def attention(self, inputs: Inputs, q: Any, k: Any, v: Any) -> Attention:
        module = importlib.import_module("cupy_flash.torch")
        arguments = {**inputs.case.arguments, "layout": "bhsd"}
        return Attention(functools.partial(module.flash_attention, **arguments))

    def prepare(self, inputs: Inputs) -> Prepared:
        plan = self._plan(inputs.case)
        digest = environment.digest_of(plan.family, inputs.case.direction)
        return dataclasses.replace(super().prepare(inputs), plan=plan, kernel_digest=digest)


ALL: tuple[Provider, ...] = (
    OfTensors(),
    ScaledDotProduct("torch-flash", "FLASH_ATTENTION"),
    ScaledDotProduct("torch-cudnn", "CUDNN_ATTENTION"),
    ScaledDotProduct("torch-efficient", "EFFICIENT_ATTENTION"),
    ScaledDotProduct("torch-math", "MATH"),
    Eager(),
)
