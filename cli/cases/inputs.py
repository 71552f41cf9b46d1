"""Input arrays of a case, shared by all providers of a table row."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from cupy_flash.api.backward import flash_attention_backward, flash_attention_varlen_backward
from cupy_flash.api.dense import flash_attention
from cupy_flash.api.kvcache import flash_attention_with_kvcache
from cupy_flash.api.varlen import flash_attention_varlen
from cupy_flash.problem.arrays import DTYPES

from . import quantized, sequences
from .cases import Case, Shape
from .mod_arguments import keywords, numpy_dtype, shapes
from .sequences import Arrays

# Maximum number of elements that are drawn at once. CuPy's generator counts elements in 32 bits,
# and the drawn float32 numbers need twice the memory of 16-bit inputs.
_DRAWN_AT_ONCE = 1 << 28


@dataclass
class Inputs:
    """q, k and v of a case in its layout, copied to the host or to the GPU on first access.

    Attributes
    ----------
    case
        Case that the arrays belong to. For a cache, k and v are the caches.
    more
        Other arrays of the call, all small, by argument name.
    seed
        Seed of the arrays of the case's modifications, which are drawn on first access.
    """

    case: Case
    _gpu: Arrays | None = None
    _host: Arrays | None = None
    more: Mapping[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0
    _more_gpu: dict[str, Any] | None = None
    # Arrays of the modifications, and keyword arguments that hold them; the key is `on_gpu`.
    _drawn: dict[bool, dict[str, Any]] = field(default_factory=dict)
    _modifications: dict[bool, dict[str, Any]] = field(default_factory=dict)
    # Arrays of calls for gradients: dout, and the pair of out and lse. The key is `on_gpu`.
    _dout: dict[bool, Any] = field(default_factory=dict)
    _forward: dict[bool, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def gpu(self) -> Arrays:
        """The arrays as CuPy arrays on the current device."""
        if self._gpu is None:
            self._gpu = _moved(self._host, gpu=True)
        return self._gpu

    @property
    def host(self) -> Arrays:
        """The arrays as NumPy arrays."""
        if self._host is None:
            self._host = _moved(self._gpu, gpu=False)
        return self._host

    @property
    def more_gpu(self) -> Mapping[str, Any]:
        """Other arrays of the call as CuPy arrays on the current device."""
        if self._more_gpu is None:
            placed = placed_on(gpu=True)
            self._more_gpu = {name: placed(array) for name, array in self.more.items()}
        return self._more_gpu

    def modifications(self, *, on_gpu: bool) -> Mapping[str, Any]:
        """Return keyword arguments for the case's modifications, with CuPy or NumPy arrays."""
        if on_gpu not in self._modifications:
            if not self._drawn:
                self._drawn[on_gpu] = _drawn_arrays(self.case, self.seed, on_gpu=on_gpu)
            placed = placed_on(gpu=on_gpu)
            if on_gpu not in self._drawn:
                others = self._drawn[not on_gpu].items()
                self._drawn[on_gpu] = {name: placed(array) for name, array in others}
            self._modifications[on_gpu] = keywords(
                self.case.mods, self.case.sizes, self._drawn[on_gpu], placed
            )
        return self._modifications[on_gpu]

    def dout(self, *, on_gpu: bool) -> Any:
        """Return dout of a call for gradients: standard normal numbers in the output's shape."""
        if not self._dout:
            self._dout[on_gpu] = _drawn_dout(self.case, self.seed, on_gpu=on_gpu)
        if on_gpu not in self._dout:
            self._dout[on_gpu] = placed_on(gpu=on_gpu)(self._dout[not on_gpu])
        return self._dout[on_gpu]

    def forward(self, *, on_gpu: bool) -> tuple[Any, Any]:
        """Return the output and its log-sum-exp, which the library computes on first access."""
        if on_gpu not in self._forward:
            backend = "auto" if on_gpu else "cpu"
            result = self._forward_call(on_gpu=on_gpu, return_lse=True, backend=backend)()
            self._forward[on_gpu] = (result[0], result[1])
        return self._forward[on_gpu]

    def call(self, *, on_gpu: bool, **forced: Any) -> Callable[[], Any]:
        """Return the library call that computes the case, as a user would write it.

        For a call for gradients, its inputs dout, out and lse are computed before this returns.

        Parameters
        ----------
        on_gpu
            Whether to pass CuPy arrays; NumPy arrays otherwise.
        forced
            Additional arguments: backend, family, tile.
        """
        if not self.case.is_backward:
            return self._forward_call(on_gpu=on_gpu, **forced)
        is_dense = self.case.is_dense
        function = flash_attention_backward if is_dense else flash_attention_varlen_backward
        lse = self.forward(on_gpu=on_gpu)[1]
        return self.gradient_call(function, on_gpu=on_gpu, lse=lse, **forced)

    def gradient_call(
        self, function: Callable[..., Any], *, on_gpu: bool, **forced: Any
    ) -> Callable[[], Any]:
        """Return a call of `function` for gradients; the other parameters are those of `call`."""
        (q, k, v), options = self._arguments(on_gpu=on_gpu)
        dout = self.dout(on_gpu=on_gpu)
        options["out"] = self.forward(on_gpu=on_gpu)[0]
        dout = dout if self.case.is_dense else dout[0]
        return functools.partial(function, dout, q, k, v, **{**options, **forced})

    def _forward_call(self, *, on_gpu: bool, **forced: Any) -> Callable[[], Any]:
        case = self.case
        arrays, options = self._arguments(on_gpu=on_gpu)
        if case.is_dense:
            if case.cache_dtype:
                options |= self.more_gpu if on_gpu else self.more
                # The `dtype` of a float8 case is that of its output.
                options |= {"out_dtype": case.dtype}
            return functools.partial(flash_attention, *arrays, **{**options, **forced})
        options["num_splits"] = case.asked_splits
        function = flash_attention_with_kvcache if case.is_cached else flash_attention_varlen
        return functools.partial(function, *arrays, **{**options, **forced})

    def _arguments(self, *, on_gpu: bool) -> tuple[Arrays, dict[str, Any]]:
        """Return q, k and v as calls in both directions take them, and keyword arguments."""
        case = self.case
        q, k, v = self.gpu if on_gpu else self.host
        modifications = self.modifications(on_gpu=on_gpu)
        if case.is_dense:
            return (q, k, v), {**case.arguments, **modifications}
        options: dict[str, Any] = {
            "causal": case.causal,
            "softmax_scale": case.softmax_scale,
            **(self.more_gpu if on_gpu else self.more),
            **modifications,
        }
        if case.values_in_keys:
            options["head_dim_v"] = case.head_dim_v
            options.pop("v_scale", None)
            return (q, k, None), options
        if case.is_cached:
            return (q, k, v), options
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        return (q[0], k[0], v[0]), options

    def with_pages_of(self, page_size: int) -> Inputs:
        """Return inputs of the same call on a cache in pages of this size, in shuffled order.

        If `can_share_pages`, the pages are in this cache's memory, so that the shuffled pages of a
        sequence hold the rows of several sequences. Otherwise the arrays are new.
        """
        case = dataclasses.replace(self.case, page_size=page_size)
        if not can_share_pages(self.case, page_size):
            return random_inputs(case, 0, on_gpu=self._gpu is not None)
        _, k_shape, v_shape = case.bshd_shapes
        more = sequences.arrays_of(case, 0)

        def paged(arrays: Arrays | None) -> Arrays | None:
            if arrays is None:
                return None
            q, k, v = arrays
            pages = k.reshape(k_shape)
            if case.values_in_keys:
                return q, pages, pages[..., : case.head_dim_v]
            return q, pages, v.reshape(v_shape)

        gpu, host = paged(self._gpu), paged(self._host)
        return Inputs(case, gpu, host, more, self.seed, _drawn=self._drawn)

    def with_cache_of(self, dtype: str) -> Inputs:
        """Return inputs of the same call with its cache, or a dense case's q, k and v, in 8 bits.

        Each head has a scale.
        """
        case = dataclasses.replace(self.case, cache_dtype=dtype)
        q, k, v = self._gpu or self.host
        of_heads = np.full(case.heads_kv, quantized.SCALE, np.float32)
        more = dict(self.more) | {"k_scale": of_heads, "v_scale": of_heads}
        if case.is_dense:
            q = quantized.quantized(q, dtype)
            more["q_scale"] = np.full(case.heads_q, quantized.SCALE, np.float32)
        keys = quantized.quantized(k, dtype)
        in_keys = keys[..., : case.head_dim_v]
        arrays = (q, keys, in_keys if case.values_in_keys else quantized.quantized(v, dtype))
        gpu, host = (None, arrays) if self._gpu is None else (arrays, None)
        return Inputs(case, gpu, host, more, self.seed, _drawn=self._drawn)


def can_share_pages(case: Case, page_size: int) -> bool:
    """Return whether a cache can be read as pages in place: whole pages, and no appended rows."""
    return case.seqlen_k % page_size == 0 and not case.append


def placed_on(*, gpu: bool) -> Callable[[Any], Any]:
    """Return a function that copies arrays to the GPU or the host, if they are not there."""

    def placed(array: Any) -> Any:
        if isinstance(array, np.ndarray) and not gpu:
            return array
        cupy = importlib.import_module("cupy")
        return cupy.asarray(array) if gpu else cupy.asnumpy(array)

    return placed


def _moved(arrays: Arrays | None, *, gpu: bool) -> Arrays:
    import cupy

    assert arrays is not None
    q, k, v = map(cupy.asarray if gpu else cupy.asnumpy, arrays)
    return q, k, v


def _normal(xp: Any, generator: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return standard normal numbers or, for dtype bool, whether each drawn number is positive."""
    drawn = np.float64 if dtype == np.float64 else np.float32

    def part(size: Any) -> Any:
        result = generator.standard_normal(size, dtype=drawn)
        return result > 0 if dtype == np.dtype(bool) else result.astype(dtype, copy=False)

    if math.prod(shape) == 0:
        # CuPy's generator launches a kernel even for an empty array.
        return xp.empty(shape, dtype)
    if math.prod(shape) <= _DRAWN_AT_ONCE:
        return part(shape)
    array = xp.empty(shape, dtype)
    flat = array.reshape(-1)
    for start in range(0, flat.size, _DRAWN_AT_ONCE):
        chunk = flat[start : start + _DRAWN_AT_ONCE]
        chunk[...] = part(chunk.size)
    return array


def _drawn_arrays(case: Case, seed: int, *, on_gpu: bool) -> dict[str, Any]:
    """Draw the arrays of a case's modifications, on the GPU or the host; ALiBi slopes are fixed."""
    xp: Any = importlib.import_module("cupy") if on_gpu else np
    # Another seed than that of q, so that q does not depend on whether the case has a bias.
    generator = xp.random.default_rng(seed + 1)
    result = {}
    for name, (shape, dtype) in shapes(case.mods, case.sizes).items():
        if name == "alibi_slopes":
            heads = np.arange(1, case.heads_q + 1)
            result[name] = xp.asarray((2.0 ** (-8 * heads / case.heads_q)).astype(dtype))
        else:
            result[name] = _normal(xp, generator, shape, dtype)
    return result


def _drawn_dout(case: Case, seed: int, *, on_gpu: bool) -> Any:
    xp: Any = importlib.import_module("cupy") if on_gpu else np
    shape = _in_layout(case, (*case.bshd_shapes[0][:3], case.head_dim_v))
    return _normal(xp, xp.random.default_rng(seed + 2), shape, numpy_dtype(case.dtype))


def _in_layout(case: Case, bshd: Shape) -> Shape:
    return bshd if case.layout == "bshd" else (bshd[0], bshd[2], bshd[1], bshd[3])


def random_inputs(case: Case, seed: int, *, on_gpu: bool) -> Inputs:
    """Draw standard normal inputs in the memory where they are used."""
    if case.cache_dtype:
        wide = dataclasses.replace(case, cache_dtype=None)
        return random_inputs(wide, seed, on_gpu=on_gpu).with_cache_of(case.cache_dtype)
    shapes_of_qkv = [_in_layout(case, shape) for shape in case.bshd_shapes]
    xp: Any = importlib.import_module("cupy") if on_gpu else np
    # CuPy's older RandomState would need the cuRAND library.
    generator = xp.random.default_rng(seed)
    dtype = numpy_dtype(case.dtype)
    if case.values_in_keys:
        q, k = (_normal(xp, generator, shape, dtype) for shape in shapes_of_qkv[:2])
        v = k[..., : case.head_dim_v]
    else:
        q, k, v = (_normal(xp, generator, shape, dtype) for shape in shapes_of_qkv)
    more = sequences.arrays_of(case, seed)
    if on_gpu:
        return Inputs(case, _gpu=(q, k, v), more=more, seed=seed)
    return Inputs(case, _host=(q, k, v), more=more, seed=seed)


@dataclass(frozen=True)
class InputFile:
    """q, k and v from a user's file, in bshd order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def read(cls, path: Path) -> InputFile:
        """Read an npz file; raise a usage error if it lacks q, k and v of one float dtype."""
        try:
            arrays = _read_arrays(path)
        except click.UsageError:
            raise
        except Exception as error:
            # Damaged archives raise exceptions of zlib, struct, zipfile or NumPy.
            raise click.UsageError(f"{path} cannot be read as an npz file: {error}") from error
        for name, array in zip("qkv", arrays, strict=True):
            if array.ndim != 4 or array.dtype.name not in DTYPES:
                raise click.UsageError(
                    f"{name} in {path} is {array.dtype} of shape {array.shape}; expected a float "
                    "array of shape (batch, seqlen, heads, head_dim)"
                )
        dtypes = [array.dtype.name for array in arrays]
        if len(set(dtypes)) > 1:
            raise click.UsageError(
                f"q, k and v in {path} are {', '.join(dtypes)}; expected one dtype"
            )
        return cls(*arrays)

    def case(self, **flags: Any) -> Case:
        """Return the case that the file's arrays define, with its remaining fields in `flags`.

        Raise a usage error if the shapes of the arrays do not match.
        """
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3]:
            raise click.UsageError(
                f"q, k and v of --input have shapes {q}, {k} and {v}; expected one batch, q and k "
                "of one head_dim, k and v of one seqlen and number of heads"
            )
        return Case(
            batch=q[0],
            seqlen_q=q[1],
            seqlen_k=k[1],
            heads_q=q[2],
            heads_kv=k[2],
            head_dim=q[3],
            head_dim_v=v[3],
            **flags,
        )

    def inputs(self, case: Case) -> Inputs:
        """Return the arrays in the case's dtype and layout."""
        dtype = numpy_dtype(case.dtype)
        axes = (0, 1, 2, 3) if case.layout == "bshd" else (0, 2, 1, 3)
        # Values beyond a narrower dtype's range become inf; their rows are not compared.
        with np.errstate(over="ignore"):
            q, k, v = (
                np.ascontiguousarray(array.astype(dtype, copy=False).transpose(axes))
                for array in (self.q, self.k, self.v)
            )
        return Inputs(case, _host=(q, k, v))


def _read_arrays(path: Path) -> list[np.ndarray]:
    # The file is opened here, because numpy.load leaves a file open that it cannot read.
    with path.open("rb") as raw:
        # For other files, the message of numpy.load would be about arrays or pickles.
        if not zipfile.is_zipfile(raw):
            raise click.UsageError(
                f"{path} cannot be read as an npz file: it is not a zip archive; expected what "
                "numpy.savez writes, with arrays q, k and v"
            )
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            if any(name not in file for name in "qkv"):
                raise click.UsageError(
                    f"{path} holds {', '.join(file) or 'nothing'}; expected arrays q, k and v"
                )
            return [_with_dtype(_read_array(file, name)) for name in "qkv"]


def _read_array(file: Any, name: str) -> np.ndarray:
    try:
        result: np.ndarray = file[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        # NumPy's message would recommend loading the file unsafely.
        raise ValueError(f"{name} holds Python objects; expected numbers") from error
    return result


def _with_dtype(array: np.ndarray) -> np.ndarray:
    # NumPy's file format has no bfloat16: bfloat16 arrays are stored as raw elements of two bytes.
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array
