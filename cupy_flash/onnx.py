"""ONNX's operator Attention, for models that `onnx.reference.ReferenceEvaluator` runs.

from cupy_flash.onnx import Attention
from onnx.reference import ReferenceEvaluator

evaluator = ReferenceEvaluator("model.onnx", new_ops=[Attention])
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference import op_run

from cupy_flash.api.dense import flash_attention
from cupy_flash.errors import UnsupportedError

__all__ = ["Attention"]

_OpRun: Any = op_run.OpRun
# Position of qk_matmul_output among the outputs.
_SCORES = 3


class Attention(_OpRun):  # type: ignore[misc]
    """Operator Attention of opsets 23 to 25, computed by `flash_attention`.

    The softmax is computed in float32, or in float64 for float64 inputs, whatever the attribute
    softmax_precision says. The output qk_matmul_output is not supported.

    Attributes
    ----------
    backend : {"auto", "gpu", "cpu"}
        Backend of the calls, see `flash_attention`. It applies to all models.
    """

    backend = "auto"

    def _run(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        attn_mask: np.ndarray | None = None,
        past_key: np.ndarray | None = None,
        past_value: np.ndarray | None = None,
        nonpad_kv_seqlen: np.ndarray | None = None,
        *,
        scale: float | None = None,
        is_causal: int | None = None,
        q_num_heads: int | None = None,
        kv_num_heads: int | None = None,
        softcap: float | None = None,
        left_window_size: int | None = None,
        right_window_size: int | None = None,
        **_: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the outputs Y, present_key and present_value.

        Raises
        ------
        UnsupportedError
            If the node has the output qk_matmul_output.
        TypeError, ValueError, CompileError
            See `flash_attention`, whose q, k and v are the inputs Q, K and V.
        """
        if any(self.onnx_node.output[_SCORES:]):
            raise UnsupportedError(
                "the output qk_matmul_output of Attention is not supported, as attention never "
                "stores the scores; remove it from the node"
            )
        is_flat = q.ndim == 3
        if is_flat:
            q = _with_heads(q, q_num_heads)
            k, v = (_with_heads(x, kv_num_heads) for x in (k, v))
        if (past_key is None) != (past_value is None):
            raise ValueError("one of past_key and past_value is missing; expected both or none")
        past = 0
        if past_key is not None:
            past = past_key.shape[2]
            k = np.concatenate([past_key, k], axis=2)
            v = np.concatenate([past_value, v], axis=2)
        options: dict[str, Any] = {
            "causal": bool(is_causal),
            "window_size": (left_window_size, right_window_size),
            "softmax_scale": scale,
            "softcap": softcap,
            "seqlens_k": nonpad_kv_seqlen,
        }
        if options["causal"] or not {left_window_size, right_window_size} <= {None, -1}:
            # The queries follow the past keys; with lengths, they are the last keys.
            is_past = nonpad_kv_seqlen is None
            options["q_offset"] = past if is_past else nonpad_kv_seqlen - q.shape[2]
        if attn_mask is not None:
            name = "mask" if attn_mask.dtype == np.bool_ else "bias"
            options[name] = _padded(attn_mask, k.shape[2], q.dtype)
        values = v.astype(q.dtype, copy=False)
        out = flash_attention(q, k, values, layout="bhsd", backend=self.backend, **options)
        if is_flat:
            out = out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)
        return out, k, v


def _with_heads(rows: np.ndarray, heads: int | None) -> np.ndarray:
    """Return an input (batch, seqlen, heads * head_dim) as (batch, heads, seqlen, head_dim)."""
    if heads is None:
        raise ValueError(
            "q_num_heads and kv_num_heads are missing; expected both for inputs of three axes"
        )
    return rows.reshape(*rows.shape[:2], heads, -1).swapaxes(1, 2)


def _padded(mask: np.ndarray, keys: int, of_query: Any) -> np.ndarray:
    """Return a mask or bias of all keys, in a dtype of `flash_attention`.

    Keys past the end of a short mask are masked.
    """
    hidden: Any = False
    if mask.dtype != np.bool_:
        hidden = -np.inf
        real = np.float64 if of_query == np.float64 else np.float32
        if mask.dtype not in (real, of_query):
            mask = mask.astype(real)
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, max(0, keys - mask.shape[-1]))]
    return np.pad(mask, padding, constant_values=hidden)
