"""Random calls with 8-bit keys and values: `KVCacheCase` and `VarlenCase`, quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy_flash import flash_attention_varlen, flash_attention_with_kvcache
from cupy_flash.reference.packed import attention_with_kvcache_reference
from support.calls import sequence_support
from support.gpu import cupy

# NumPy dtype and largest number, by the name of the dtype in `Problem`.
CACHE_DTYPES: dict[str, tuple[Any, float]] = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "int8": (np.int8, 127.0),
}
_CACHES = (("k", "k_cache"), ("v", "v_cache"))
SCALES = ("none", "number", "tensor", "head", "page", "row", "computed")


@dataclass(frozen=True)
class QuantizedCase:
    """Call of `flash_attention_with_kvcache` or `flash_attention_varlen` with 8-bit keys.

    `scales` names the unit that has one scale, see `SCALES`. Without pages, "page" means a scale
    for each sequence's cache. `window` and `sinks` are those of the call.
    """

    base: sequence_support.KVCacheCase | sequence_support.VarlenCase
    cache_dtype: str
    scales: str
    window: tuple[int | None, int | None] = (None, None)
    sinks: bool = False

    def __str__(self) -> str:
        return f"{self.cache_dtype} {self.scales} {self.window} {self.sinks} {self.base}"

    @property
    def is_packed(self) -> bool:
        return isinstance(self.base, sequence_support.VarlenCase)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the function under test, as new NumPy arrays.

        Rows that must not be read hold NaN in float8. Their scales are NaN, too, unless new rows
        may be divided by them.
        """
        found = self.base.problem().arguments()
        rng = np.random.default_rng(self.base.seed + 1)
        for name, stored in (("k", "k"), ("v", "v")) if self.is_packed else _CACHES:
            cache = found[stored]
            unread = np.isnan(cache.astype(np.float32)).any(axis=-1)
            found[stored], found[f"{name}_scale"] = self._quantized(rng, cache, unread)
        if not self.is_packed:
            found["compute_scales"] = self.scales == "computed"
        if self.window != (None, None):
            found["window_size"] = self.window
        if self.sinks:
            found["sinks"] = rng.standard_normal(self.base.heads_q).astype(np.float32)
        return found

    def _quantized(
        self, rng: np.random.Generator, cache: np.ndarray, unread: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        dtype, largest = CACHE_DTYPES[self.cache_dtype]
        # Packed keys have no batch axis.
        *blocks, rows, heads = cache.shape[:-1]
        of_rows = (*blocks, rows, heads)
        shape = {
            "head": (heads,),
            "page": (*blocks, 1, heads),
            "row": of_rows,
            "computed": of_rows,
        }.get(self.scales, ())
        # With such scales, some values are clipped to the largest number.
        usual = np.float32(3 / largest)
        scale = (usual * rng.uniform(0.5, 2, shape)).astype(np.float32)
        if self.scales == "none":
            scale = np.float32(1)
        scaled = cache.astype(np.float32) / np.asarray(scale)[..., None]
        scaled = np.clip(scaled, -largest, largest)
        if dtype is np.int8:
            scaled = np.rint(np.where(np.isnan(scaled), 99, scaled))
        quantized = scaled.astype(dtype)
        appends = isinstance(self.base, sequence_support.KVCacheCase) and self.base.seqlen_new > 0
        if shape == of_rows and (self.scales == "computed" or not appends):
            scale = np.where(unread, np.float32(np.nan), scale)
        if self.scales == "none":
            return quantized, None
        return quantized, float(scale) if self.scales == "number" else scale


def random_quantized_case(rng: np.random.Generator, **fixed: Any) -> QuantizedCase:
    """Return a case with ragged lengths; `fixed` sets fields of its `KVCacheCase`."""
    cache_dtype = str(rng.choice(list(CACHE_DTYPES)))
    scales = str(rng.choice(SCALES))
    heads_kv = int(rng.choice([1, 2, 3]))
    paged = rng.random() < 0.5
    seqlen_new = int(rng.choice([1, 2, 5])) if scales == "computed" else int(rng.integers(3))
    base = sequence_support.random_kvcache_case(
        rng,
        **{
            "dtype": str(rng.choice(["float16", "bfloat16", "float32"])),
            "seqlen_q": int(rng.choice([1, 1, 2, 5])),
            "seqlen_new": seqlen_new,
            "heads_q": heads_kv * int(rng.choice([1, 4])),
            "heads_kv": heads_kv,
            "head_dim": int(rng.choice([16, 64, 72, 128])),
            "head_dim_v": int(rng.choice([16, 64, 40, 128])),
            "causal": bool(rng.random() < 0.5),
            "page_size": int(rng.choice([1, 16, 37])) if paged else 0,
            "indexed": not paged and bool(rng.random() < 0.5),
            **fixed,
        },
    )
    return QuantizedCase(base, cache_dtype, scales)


def random_packed_case(rng: np.random.Generator, **fixed: Any) -> QuantizedCase:
    """Return a case with packed queries; `fixed` sets fields of its `VarlenCase`."""
    heads_kv = int(rng.choice([1, 2, 3]))
    base = sequence_support.random_varlen_case(
        rng,
        **{
            "dtype": str(rng.choice(["float16", "bfloat16", "float32"])),
            "heads_q": heads_kv * int(rng.choice([1, 4])),
            "heads_kv": heads_kv,
            "head_dim": int(rng.choice([16, 64, 72, 128])),
            "head_dim_v": int(rng.choice([16, 64, 40, 128])),
            "causal": bool(rng.random() < 0.5),
            "page_size": int(rng.choice([0, 1, 16, 37])),
            "seqused": bool(rng.random() < 0.5),
            **fixed,
        },
    )
    return QuantizedCase(
        base,
        str(rng.choice(list(CACHE_DTYPES))),
        str(rng.choice([scales for scales in SCALES if scales != "computed"])),
        (int(rng.integers(40)), int(rng.integers(40))) if rng.random() < 0.3 else (None, None),
        bool(rng.random() < 0.3),
    )


def on_device(x: Any) -> Any:
    """Return an array on the GPU; return any other value unchanged."""
    if not isinstance(x, (np.ndarray, np.generic)):
        return x
    if x.itemsize == 1 and x.dtype.kind == "V":
        # CuPy cannot create float8 arrays, but can view bytes as float8.
        return cupy.asarray(x.view(np.uint8)).view(x.dtype)
    return cupy.asarray(x)


def run_on_gpu(arguments: dict[str, Any], **more: Any) -> tuple[dict[str, Any], Any, Any]:
    """Run a call on the GPU, over an output of NaN; return its arrays, output and lse."""
    given = {name: on_device(x) for name, x in arguments.items()}
    is_packed = "k_cache" not in given
    values = given["v" if is_packed else "v_cache"]
    shape = (*given["q"].shape[:-1], values.shape[-1])
    out = cupy.asarray(np.full(shape, np.nan, arguments["q"].dtype))
    more = {name: on_device(x) for name, x in more.items()}
    function = flash_attention_varlen if is_packed else flash_attention_with_kvcache
    out, lse = function(**given, out=out, return_lse=True, **more)
    return given, sequence_support.to_numpy(out), sequence_support.to_numpy(lse)


def _same_bits(a: Any, b: np.ndarray) -> bool:
    a = sequence_support.to_numpy(a)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def check_on_gpu(case: QuantizedCase, **choice: Any) -> None:
    """Fail unless a call on the GPU agrees with the reference, and stores the same bits."""
    arguments = case.arguments()
    if case.is_packed:
        with np.errstate(all="ignore"):
            of_packed = sequence_support.Truth.of_varlen(arguments)
        of_packed.check(*run_on_gpu(arguments, **choice)[1:])
        return
    with np.errstate(all="ignore"):
        expected = attention_with_kvcache_reference(**arguments)
        truth = sequence_support.Truth.of_kvcache(arguments)
    given, out, lse = run_on_gpu(arguments, **choice)
    truth.check(out, lse)
    for name in ("k_cache", "v_cache"):
        assert _same_bits(given[name], getattr(expected, name)), (name, str(case))
    if case.scales in ("row", "computed"):
        for name in ("k_scale", "v_scale"):
            assert _same_bits(given[name], getattr(expected, name)), (name, str(case))
