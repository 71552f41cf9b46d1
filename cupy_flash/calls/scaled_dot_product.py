"""Conversion of calls with the arguments of PyTorch's attention function to `flash_attention`.

The functions for shapes and options are used by `cupy_flash.torch` as well.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import read, result_converter
from cupy_flash.arrays.streams import on_stream
from cupy_flash.arrays.strided import (
    array_module,
    broadcasts,
    dtype_name,
    require_dtype,
    require_float,
)
from cupy_flash.arrays.torch_arrays import is_any_tensor, random_seed
from cupy_flash.mods.keywords import DROPOUT_SEED
from cupy_flash.problem.values import check_bool, finite

Shape = tuple[int, ...]

_AXES = "(..., heads, seqlen, head_dim)"


class Shapes(NamedTuple):
    """Shapes of a call's arrays after merging batch axes: (batch, heads, seqlen, head_dim).

    Attributes
    ----------
    query, key, value
        Shapes of the inputs, whose leading axes are merged into one.
    out
        Shape of the result of the call, with the original leading axes.
    mask
        Shape of the mask, whose leading axes are merged, too. None without a mask.
    whole_mask
        Shape that the mask is broadcast to before the merge. None without a mask.
    """

    query: Shape
    key: Shape
    value: Shape
    out: Shape
    mask: Shape | None
    whole_mask: Shape | None


def shapes_of(
    query: Shape, key: Shape, value: Shape, mask: Shape | None, enable_gqa: bool
) -> Shapes:
    """Return the shapes that `flash_attention` expects for the arrays of a call.

    Raises
    ------
    ValueError
        If shapes do not match.
    """
    rank = len(query)
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 2 or len(shape) != rank:
            expected = _AXES if rank < 2 else f"{_AXES} with {rank} axes, as query has"
            raise ValueError(f"{name} has shape {shape}; expected {expected}")
        if shape[:-3] != query[:-3]:
            raise ValueError(
                f"{name} has shape {shape}; expected the leading axes {query[:-3]} of query"
            )
    if value[:-1] != key[:-1]:
        raise ValueError(
            f"value has shape {value}; expected {(*key[:-1], value[-1])}, with the heads and "
            "seqlen of key"
        )
    if key[-1] != query[-1]:
        raise ValueError(f"key has a head_dim of {key[-1]}; expected {query[-1]}, as query has")
    heads, heads_kv = (1, 1) if rank == 2 else (query[-3], key[-3])
    if heads != heads_kv and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key {heads_kv}; pass enable_gqa=True if several query "
            "heads share a key"
        )
    if heads != heads_kv and (not heads_kv or heads % heads_kv):
        raise ValueError(
            f"query has {heads} heads; expected a multiple of the {heads_kv} heads of key"
        )
    leading = query[:-3]
    batch = math.prod(leading)
    whole: Shape | None = None
    if mask is not None:
        scores = (*query[:-1], key[-2])
        if not broadcasts(mask, scores):
            raise ValueError(
                f"attn_mask has shape {mask}; expected one that broadcasts to {scores}, (..., "
                "heads, seqlen_q, seqlen_k)"
            )
        whole, mask = _whole(mask, leading)
    return Shapes(
        (batch, heads, *query[-2:]),
        (batch, heads_kv, *key[-2:]),
        (batch, heads_kv, *value[-2:]),
        (*query[:-1], value[-1]),
        mask,
        whole,
    )


def _whole(mask: Shape, leading: Shape) -> tuple[Shape, Shape]:
    """Return the shape that a mask is broadcast to, and that shape with leading axes merged."""
    last = (1,) * (3 - len(mask)) + mask[-3:]
    if math.prod(mask[:-3]) == 1:
        return mask, (1, *last)
    return (*leading, *last), (math.prod(leading), *last)


def options_of(
    is_causal: bool, scale: float | None, enable_gqa: bool, *, has_mask: bool
) -> dict[str, Any]:
    """Return the arguments of `flash_attention` that are equivalent to PyTorch's arguments.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value.
    """
    check_bool("is_causal", is_causal)
    check_bool("enable_gqa", enable_gqa)
    if is_causal and has_mask:
        raise ValueError("attn_mask is given and is_causal is True; pass only one of them")
    options: dict[str, Any] = {"layout": "bhsd"}
    if is_causal:
        # The causal mask is aligned at the top left: the first query attends to the first key.
        options |= {"causal": True, "q_offset": 0}
    if scale is not None:
        _refuse_tensor("scale", scale)
        options["softmax_scale"] = finite("scale", scale)
    return options


def _refuse_tensor(name: str, value: Any) -> None:
    """Raise TypeError for a tensor of PyTorch, which may require a gradient."""
    if hasattr(value, "requires_grad"):
        raise TypeError(f"{name} is a tensor, which has no gradient here; pass {name}.item()")


def dropout_options(dropout_p: float, dropout_seed: Any | None) -> dict[str, Any]:
    """Return the arguments of `flash_attention` for dropout; none if the probability is 0."""
    _refuse_tensor("dropout_p", dropout_p)
    if finite("dropout_p", dropout_p) == 0:
        return {}
    return {"dropout_p": dropout_p, "dropout_seed": dropout_seed}


def _new_seed(query: Any) -> Any:
    """Return a new seed: from PyTorch's generator for a tensor, otherwise from the system."""
    if is_any_tensor(query):
        return random_seed(query)
    return secrets.randbits(64)


def mask_name(dtype: str, of_query: str) -> str:
    """Return the name of the `flash_attention` argument for a mask of this dtype: mask or bias.

    Raises
    ------
    TypeError
        If the dtype is neither bool nor one that a bias may have.
    """
    if dtype == "bool":
        return "mask"
    if dtype in ("float32", of_query):
        return "bias"
    expected = " or ".join(dict.fromkeys(("bool", "float32", of_query)))
    raise TypeError(f"attn_mask has dtype {dtype}; expected {expected}")


def reshaped(array: Any, shape: Shape | None) -> Any:
    """Return an array or tensor with this shape; the array itself if it has the shape already."""
    return array if array.shape == shape else array.reshape(shape)


def run(
    attention: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_seed: Any | None,
    stream: Any | None,
) -> Any:
    """Return what `cupy_flash.scaled_dot_product_attention` returns.

    `attention` is `cupy_flash.flash_attention`. It is given, as this package cannot import it.
    """
    with on_stream(stream, query):
        arrays, options, finish = prepared(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed
        )
        return finish(attention(*arrays, **options))


def prepared(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_seed: Any | None,
) -> tuple[tuple[Any, Any, Any], dict[str, Any], Callable[[Any], Any]]:
    """Check and convert the arguments of `cupy_flash.scaled_dot_product_attention`.

    Returns the arrays and the keyword arguments of `flash_attention`, and a function that returns
    the result of the call, given that of `flash_attention`.
    """
    has_mask = attn_mask is not None
    options = options_of(is_causal, scale, enable_gqa, has_mask=has_mask)
    options |= dropout_options(dropout_p, dropout_seed)
    if options.get(DROPOUT_SEED, 0) is None:
        # As in PyTorch, calls without a seed drop other weights each time.
        options[DROPOUT_SEED] = _new_seed(query)
    result = {name: read(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    q, k, v = result.values()
    mask = read("attn_mask", attn_mask) if has_mask else None
    convert = result_converter("query", query)
    for name, x in (*result.items(), ("attn_mask", mask)):
        if x is not None and isinstance(x, np.ndarray) != isinstance(q, np.ndarray):
            host, device = ("query", name) if isinstance(q, np.ndarray) else (name, "query")
            raise TypeError(f"{host} lies in host memory and {device} on a GPU; move one of them")
    require_float("query", q)
    for name, x in (("key", k), ("value", v)):
        require_dtype(name, x, (dtype_name(q),))
    of_mask = None if mask is None else mask.shape
    shapes = shapes_of(q.shape, k.shape, v.shape, of_mask, enable_gqa)
    if mask is not None:
        name = mask_name(dtype_name(mask), dtype_name(q))
        if name == "bias" and q.dtype == np.float64:
            mask = mask.astype(np.float64, copy=False)
        whole = array_module(mask).broadcast_to(mask, shapes.whole_mask)
        options[name] = reshaped(whole, shapes.mask)
    arrays = reshaped(q, shapes.query), reshaped(k, shapes.key), reshaped(v, shapes.value)
    return arrays, options, lambda out: convert(reshaped(out, shapes.out))
