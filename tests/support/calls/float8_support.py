"""Random calls of `flash_attention` with q, k and v of float8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash import flash_attention
from cupy_flash.problem.arrays import contiguous_strides
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound
from support.gpu import cupy
from support.gpu.gpu_support import DTYPES, DenseSizes, Guarded, Truth, lse_bound, one_blas_thread

FLOAT8 = ml_dtypes.float8_e4m3fn
# Units of an input that have one scale each; "number" is a scale on the host.
SCALES = ("none", "number", "tensor", "head", "batch", "batch and head")


@dataclass(frozen=True)
class Float8Case(DenseSizes):
    """One call.

    `spread` is the standard deviation of the dequantized q and k, `mean` the mean of the
    dequantized values, and `alignment` the alignment of the rows of v in bytes.
    """

    seqlen_q: int
    seqlen_k: int
    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 128
    head_dim_v: int = 128
    causal: bool = False
    q_offset: int | None = None
    softmax_scale: float | None = None
    layout: str = "bshd"
    scales: str = "batch and head"
    out_dtype: str = "bfloat16"
    spread: float = 1.0
    mean: float = 0.0
    alignment: int = 16
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return q, k, v and their scales (NumPy arrays or numbers), normal when dequantized."""
        rng = np.random.default_rng(self.seed)
        found: dict[str, Any] = {}
        for name in "qkv":
            heads = self.heads_q if name == "q" else self.heads_kv
            values = rng.standard_normal(self.shape(name))
            values = values + self.mean if name == "v" else self.spread * values
            scale = self._scale(rng, heads)
            if scale is not None:
                found[f"{name}_scale"] = scale
                values /= self._placed(scale, heads)
            found[name] = values.clip(-448, 448).astype(FLOAT8)
        return found

    def _scale(self, rng: np.random.Generator, heads: int) -> Any:
        shape = {
            "head": (heads,),
            "batch": (self.batch, 1, 1),
            "batch and head": (self.batch, 1, heads),
        }.get(self.scales, ())
        scale = (2.0 ** rng.uniform(-6, 2, shape)).astype(np.float32)
        if self.scales == "none":
            return None
        return float(scale) if self.scales == "number" else scale

    def _placed(self, scale: Any, heads: int) -> np.ndarray:
        of_all = np.broadcast_to(np.asarray(scale), (self.batch, 1, heads))[..., None]
        return of_all if self.layout == "bshd" else of_all.swapaxes(1, 2)


def surrounded(values: np.ndarray, alignment: int) -> Any:
    """Return float8 values on the GPU amid NaN, with rows aligned to just `alignment` bytes."""
    first, second, third, dim = values.shape
    width = (dim // alignment + 1 | 1) * alignment
    outer = (first, second + 1, third + 1, width)
    whole = np.full(outer, 0x7F, np.uint8)
    inner = tuple(slice(length) for length in values.shape)
    whole[inner] = values.view(np.uint8)
    flat = np.concatenate([np.full(alignment, 0x7F, np.uint8), whole.ravel()])
    on_gpu = cupy.asarray(flat)[alignment:].reshape(outer)[inner]
    assert on_gpu.strides == (*contiguous_strides(outer), 1)
    return on_gpu.view(FLOAT8)


def on_device(arguments: dict[str, Any], alignment: int = 16) -> dict[str, Any]:
    """Return the arguments with arrays on the GPU, and the rows of v aligned to `alignment`."""
    found = {}
    for name, x in arguments.items():
        if name in ("q", "k", "v"):
            found[name] = surrounded(x, alignment if name == "v" else 16)
        else:
            found[name] = cupy.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x
    return found


def truth_of(case: Float8Case, arguments: dict[str, Any]) -> Truth:
    """Return the float64 result on dequantized inputs; see `attention_naive` for the bound."""
    with one_blas_thread():
        out, lse = attention_reference(**arguments, **case.formula, return_lse=True)
        naive = attention_naive(**arguments, **case.formula, dtype=DTYPES[case.out_dtype])
    wide = {}
    for name in "qkv":
        heads = case.heads_q if name == "q" else case.heads_kv
        scale = arguments.get(f"{name}_scale", 1)
        values = arguments[name].astype(np.float32) * case._placed(scale, heads)
        wide[name] = values.astype(np.float32)
    of_products = _bound_of_products(case, wide)
    return Truth(
        out,
        lse,
        error_bound(naive, out, DTYPES[case.out_dtype]) + of_products * _spread(case, wide, out),
        lse_bound(wide["q"], wide["k"], lse, case.softmax_scale) + of_products,
    )


def _spread(case: Float8Case, wide: dict[str, np.ndarray], out: np.ndarray) -> float:
    """Return the largest change of an output element per unit of error in the scores.

    If scores are off by d_j, the output is off by sum p_j d_j (v_j - out). This is at most the
    largest d times the standard deviation of v under p.
    """
    squares = {name: x.astype(np.float64) for name, x in wide.items()}
    squares["v"] = squares["v"] ** 2
    with one_blas_thread(), np.errstate(all="ignore"):
        variance = attention_reference(**squares, **case.formula) - out**2
    counts = np.isfinite(variance) & (variance > 0)
    return float(np.sqrt(variance[counts].max(initial=0)))


def _bound_of_products(case: Float8Case, wide: dict[str, np.ndarray]) -> float:
    """Return the error bound of a log-sum-exp for the float8 products of tensor cores.

    Tensor cores truncate each of the head_dim products at 2^-13 of the largest number in the sum.
    Here the largest score stands for this number; it may be less, which makes the bound stricter.
    The truncation error has the sign of its product. For q and k with mean zero, as drawn here,
    these errors add up like random numbers.
    """
    q, k = (wide[name] if case.layout == "bhsd" else wide[name].swapaxes(1, 2) for name in "qk")
    k = k.repeat(case.heads_q // case.heads_kv, axis=1).swapaxes(-1, -2)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else abs(case.softmax_scale)
    with one_blas_thread():
        largest = float(np.abs(q @ k).max(initial=0))
    return scale * largest * case.head_dim**0.5 * 2.0**-13


def run_on_gpu(
    case: Float8Case, arguments: dict[str, Any], **choice: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a call on arrays surrounded by NaN; fail if it writes elsewhere."""
    given = on_device(arguments, case.alignment)
    out = Guarded(np.full(case.shape("out"), np.nan, DTYPES[case.out_dtype]), 16)
    result, lse = flash_attention(**given, out=out.view, return_lse=True, **case.formula, **choice)
    assert result is out.view
    return out.values(), lse.get()


def check_on_gpu(case: Float8Case, **choice: Any) -> None:
    """Fail unless a case is computed right."""
    arguments = case.arguments()
    truth = truth_of(case, arguments)
    out, lse = run_on_gpu(case, arguments, **choice)
    truth.check(out, lse, case.layout)


def random_case(rng: np.random.Generator, **fixed: Any) -> Float8Case:
    """Return a case with random lengths and options; `fixed` sets fields."""
    heads_kv = int(rng.choice([1, 2, 3]))
    head_dim, head_dim_v = (int(rng.integers(1, 257)) for _ in range(2))
    if rng.random() < 0.5:
        head_dim = head_dim_v = int(rng.choice([64, 128, 192, 256]))
    seqlen_k = int(rng.choice([1, 2, 31, 200, 700])) + int(rng.integers(60))
    causal = bool(rng.random() < 0.5)
    offset = int(rng.integers(-40, seqlen_k + 40)) if causal and rng.random() < 0.5 else None
    return Float8Case(
        **{
            "seqlen_q": int(rng.choice([1, 30, 300])) + int(rng.integers(130)),
            "seqlen_k": seqlen_k,
            "batch": int(rng.choice([1, 2])),
            "heads_q": heads_kv * int(rng.choice([1, 3])),
            "heads_kv": heads_kv,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "causal": causal,
            "q_offset": offset,
            "softmax_scale": [None, 0.3, -0.2, 1e-9, 0.0][int(rng.choice([0, 0, 0, 1, 2, 3, 4]))],
            "layout": str(rng.choice(["bshd", "bshd", "bhsd"])),
            "scales": str(rng.choice(SCALES)),
            "out_dtype": str(rng.choice(["bfloat16", "float16"])),
            "spread": float(rng.choice([0.1, 1.0, 3.0])),
            "alignment": int(rng.choice([1, 2, 4, 8, 16])),
            "seed": int(rng.integers(2**31)),
            **fixed,
        }
    )
