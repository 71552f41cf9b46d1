"""Fakes of the packages of FlashAttention, which compute with NumPy.

Their functions have the parameters of flash_attn 2.8.4, FlashAttention-3 and flash-attn-4.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import flash_attention_varlen, flash_attention_with_kvcache
from cupy_flash.cli.providers import flash_attention
from cupy_flash.reference.dense import attention_naive
from cupy_flash.reference.gradients import backward_naive
from cupy_flash.reference.packed_gradients import backward_varlen_naive
from support.fake_torch import TorchOnHost, install_torch

_FORWARD: dict[str, Any] = {
    "dense": attention_naive,
    "varlen": flash_attention_varlen,
    "cache": flash_attention_with_kvcache,
}
_BACKWARD: dict[str, Any] = {"dense": backward_naive, "varlen": backward_varlen_naive}
Window = tuple[int | None, int | None]


@dataclasses.dataclass
class Graph:
    """Output of a call that needs gradients, with the arguments that its graph holds."""

    kind: str
    tensors: tuple[Any, ...]
    options: dict[str, Any]


class FakeTorch(TorchOnHost):
    """Fake of the parts of torch that the providers use.

    Attributes
    ----------
    calls
        Arguments of the calls of FlashAttention after the tensors, in order, by their names in this
        library.
    """

    bfloat16 = ml_dtypes.bfloat16
    uint8 = np.uint8

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, contextlib.nullcontext)
        self.calls: list[dict[str, Any]] = []
        self.no_grad = contextlib.nullcontext
        self.autograd = SimpleNamespace(grad=self.grad)
        self.cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=0))

    def sdpa(self, *_: Any) -> None:
        raise AssertionError("these providers do not call torch's attention")

    def zeros(self, size: int, *, dtype: Any, device: Any) -> np.ndarray:
        return np.zeros(size, dtype)

    def attention(self, kind: str, tensors: tuple[Any, ...], **options: Any) -> Any:
        """Compute a call, given by this library's names of the arguments that have a value."""
        self.calls.append(options)
        if all(tensor.requires_grad for tensor in tensors):
            return Graph(kind, tensors, options)
        return _FORWARD[kind](*map(np.asarray, tensors), **_on_host(options))

    def grad(
        self, out: Graph, inputs: tuple[Any, ...], dout: Any, *, retain_graph: bool
    ) -> tuple[Any, ...]:
        assert retain_graph
        assert inputs == out.tensors
        given = (np.asarray(x) for x in (dout, *inputs))
        return _BACKWARD[out.kind](*given, **_on_host(out.options))


def _on_host(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as arrays; which order gradients are summed in changes no result."""
    return {
        name: np.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
        if name != "deterministic"
    }


def _bounded(window_size: Window) -> Window | None:
    """Return a window whose -1 stands for no bound; None if it has no bound."""
    assert None not in window_size
    left, right = (None if bound == -1 else bound for bound in window_size)
    return None if left is None and right is None else (left, right)


class FlashAttn2:
    """Fake of `flash_attn.flash_attn_interface`."""

    module = "flash_attn.flash_attn_interface"

    def __init__(self, torch: FakeTorch) -> None:
        self.torch = torch

    def _options(
        self,
        softmax_scale: float | None,
        causal: bool,
        window_size: Window,
        softcap: float,
        alibi_slopes: Any,
    ) -> dict[str, Any]:
        return {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": _bounded(window_size),
            "softcap": softcap or None,
            "alibi_slopes": alibi_slopes,
        }

    def flash_attn_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        options = self._options(softmax_scale, causal, window_size, softcap, alibi_slopes)
        if dropout_p:
            options |= {"dropout_p": dropout_p, "dropout_seed": np.zeros(2, np.int64)}
        options["deterministic"] = deterministic
        return self.torch.attention("dense", (q, k, v), **options)

    def flash_attn_varlen_func(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Any:
        options = self._options(softmax_scale, causal, window_size, softcap, alibi_slopes)
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        options["deterministic"] = deterministic
        return self.torch.attention("varlen", (q, k, v), **options)

    def flash_attn_with_kvcache(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert block_table is None or k_cache.shape[1] % 256 == 0
        options = self._options(softmax_scale, causal, window_size, softcap, alibi_slopes)
        options |= {"k": k, "v": v, "cache_seqlens": cache_seqlens, "block_table": block_table}
        return self.torch.attention(
            "cache", (q, k_cache, v_cache), **options, num_splits=num_splits
        )


class FlashAttn3(FlashAttn2):
    """Fake of `flash_attn_interface`; its earlier versions return the log-sum-exp, too."""

    module = "flash_attn_interface"

    def flash_attn_func(  # type: ignore[override]
        self,
        q: Any,
        k: Any,
        v: Any,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        options = self._options(softmax_scale, causal, window_size, softcap, None)
        options["deterministic"] = deterministic
        return self.torch.attention("dense", (q, k, v), **options), None

    def flash_attn_varlen_func(  # type: ignore[override]
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Any = None,
        seqused_k: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        options = self._options(softmax_scale, causal, window_size, softcap, None)
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        options["deterministic"] = deterministic
        return self.torch.attention("varlen", (q, k, v), **options), None

    def flash_attn_with_kvcache(  # type: ignore[override]
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        k: Any = None,
        v: Any = None,
        qv: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Any = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        page_table: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        options = self._options(softmax_scale, causal, window_size, softcap, None)
        options |= {"k": k, "v": v, "cache_seqlens": cache_seqlens, "block_table": page_table}
        return self.torch.attention(
            "cache", (q, k_cache, v_cache), **options, num_splits=num_splits
        )


class FlashAttn4:
    """Fake of `flash_attn.cute`, whose functions return the log-sum-exp, too."""

    module = "flash_attn.cute"

    def __init__(self, torch: FakeTorch) -> None:
        self.torch = torch

    def flash_attn_func(self, *tensors: Any, **options: Any) -> Any:
        return self._call("dense", tensors, options)

    def flash_attn_varlen_func(self, *tensors: Any, **options: Any) -> Any:
        return self._call("varlen", tensors, options)

    def _call(self, kind: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
        options["sinks"] = options.pop("learnable_sink", None)
        return self.torch.attention(kind, tensors, **options), None


def install(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Make the providers find fakes of torch and of the packages of FlashAttention."""
    fake = install_torch(monkeypatch, FakeTorch(monkeypatch))
    for kind in (FlashAttn2, FlashAttn3, FlashAttn4):
        monkeypatch.setitem(sys.modules, kind.module, kind(fake))
    monkeypatch.setattr(flash_attention, "why_no_package", lambda module, package: None)
    return fake
