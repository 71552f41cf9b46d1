"""Keys and values of a call as pages of one row."""

from __future__ import annotations

from typing import Any

from cupy_flash.arrays.strided import array_module, to_bshd
from cupy_flash.calls.check.whole_call import WholeCall


def stored_rows(whole: WholeCall) -> dict[str, Any]:
    """Return keys, values and scales as pages of one row, (rows, 1, heads_kv, dim)."""
    arguments, options = whole.arguments, whole.options
    names = ("k_cache", "v_cache") if options.kind == "kvcache" else ("k", "v")
    result: dict[str, Any] = {}
    for target, name in zip(("k_cache", "v_cache"), names, strict=True):
        array = getattr(arguments, name)
        if array is not None and not whole.problem.layout.packed_k and options.kind == "dense":
            array = to_bshd(array, options.layout)
        result[target] = None if array is None else _as_rows(array, array.shape[-2:])
    xp, shape = array_module(arguments.q), getattr(arguments, names[0]).shape
    for name in ("k_scale", "v_scale"):
        scale = getattr(arguments, name)
        if scale is not None:
            scale = xp.broadcast_to(scale, shape[:-1])
            scale = _as_rows(scale, shape[-2:-1])
        result[name] = scale
    return result


def _as_rows(array: Any, last: tuple[int, ...]) -> Any:
    return reshaped(array, (-1, 1, *last))


def bits(array: Any) -> Any:
    """Return an array as unsigned integers, which CuPy can copy in every dtype."""
    return array.view(f"uint{8 * array.itemsize}")


def contiguous(array: Any) -> Any:
    """Return an array without gaps, a copy only where this is necessary."""
    return array_module(array).ascontiguousarray(bits(array)).view(array.dtype)


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an array with another shape, a view where this is possible."""
    return bits(array).reshape(shape).view(array.dtype)


def require_rows(name: str, cache: Any) -> None:
    """Raise ValueError unless the rows of a cache have one distance, over all pages or caches."""
    if cache is None or len(cache) < 2 or cache.shape[1] == 0:
        return
    if cache.strides[0] != cache.shape[1] * cache.strides[1]:
        raise ValueError(
            f"{name} has strides {cache.strides}; with key_indices expected "
            f"{cache.shape[1] * cache.strides[1]} as the first one, since a cache is not copied"
        )
