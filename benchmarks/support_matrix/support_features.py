"""Features of the support matrix, and the arguments of calls that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from support_runs import CAPTURED

from cupy_flash import BlockList, MaskMod, ScoreMod
from cupy_flash.problem.gradient import ROWS

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
}
DIRECTIONS = ("forward", "backward", "tangent", "hvp", "received")


class Sizes(NamedTuple):
    """Sizes of a call. `rows` is the number of keys of a sequence and, without a cache, queries."""

    batch: int = 2
    rows: int = 4096
    heads: int = 16
    head_dim: int = 128

    @property
    def group_heads(self) -> int:
        """Number of KV heads of a call with grouped heads."""
        return self.heads // 4


Arrays = dict[str, Any]
# Sizes of the calls that are planned for GPUs, and of those that the CPU backend computes.
PLANNED, COMPUTED = Sizes(), Sizes(2, 32, 4, 8)
PAGE = 16


@dataclass(frozen=True)
class Feature:
    """One feature, and the call that uses it.

    Attributes
    ----------
    title
        Name in tables, in Markdown.
    options
        Function that returns arguments of the call, given sizes and a dtype.
    kind
        Kind of the batch: "dense", "varlen" or "kvcache".
    directions
        Directions whose functions take such arguments.
    wrt
        Name of a modification whose gradient a backward call computes, too; "" for none.
    ran
        Features that the kernel's row must have in addition to those of the planned problem.
    append
        Features that the row of the append kernel must have; None for a call that appends nothing.
    on_arrays
        Directions that array operations of CuPy compute on a GPU.
    planned
        By direction, another feature whose kernels the call launches, if `plan` does not take it.
    """

    title: str
    options: Callable[[Sizes, np.dtype], Arrays] = lambda sizes, dtype: {}
    kind: str = "dense"
    directions: tuple[str, ...] = DIRECTIONS
    wrt: str = ""
    ran: frozenset[str] = frozenset()
    append: frozenset[str] | None = None
    on_arrays: tuple[str, ...] = ()
    planned: Mapping[str, Feature] = field(default_factory=dict, hash=False)


def inputs(kind: str, sizes: Sizes, dtype: np.dtype) -> Arrays:
    """Return the arguments that every forward call of a kind needs."""
    batch, rows, heads, head_dim = sizes
    if kind == "kvcache":
        query = np.zeros((batch, 1, heads, head_dim), dtype)
        shape = (batch, rows, sizes.group_heads, head_dim)
        return {"q": query, **_caches(shape, dtype), "cache_seqlens": lengths(sizes)}
    shape = (batch, rows) if kind == "dense" else (batch * rows,)
    result: Arrays = {name: np.zeros((*shape, heads, head_dim), dtype) for name in ROWS}
    if kind == "varlen":
        ends = np.arange(0, (batch + 1) * rows, rows, dtype=np.int32)
        result |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        result |= {"max_seqlen_q": rows, "max_seqlen_k": rows}
    return result


def _caches(shape: tuple[int, ...], dtype: np.dtype) -> Arrays:
    # An append refuses caches that overlap.
    return {name: np.zeros(shape, dtype) for name in ("k_cache", "v_cache")}


def lengths(sizes: Sizes) -> np.ndarray:
    """Return a length for each sequence that is below the number of its rows."""
    return np.full(sizes.batch, sizes.rows // 2, np.int32)


def _pairs(sizes: Sizes, dtype: Any) -> np.ndarray:
    return np.zeros((1, sizes.heads, sizes.rows, sizes.rows), dtype)


def _grouped(sizes: Sizes, dtype: np.dtype) -> Arrays:
    rows = np.zeros((sizes.batch, sizes.rows, sizes.group_heads, sizes.head_dim), dtype)
    return {"k": rows, "v": rows}


def _narrow_values(sizes: Sizes, dtype: np.dtype) -> Arrays:
    return {"v": np.zeros((*sizes[:3], sizes.head_dim // 2), dtype)}


def _blocks(sizes: Sizes, dtype: np.dtype) -> Arrays:
    block = min(sizes.rows, 128)
    count = sizes.rows // block
    return {"mask_mod": BlockList(np.ones((1, 1, count, count), bool), (block, block))}


def _pages(sizes: Sizes, dtype: np.dtype, page: int = PAGE) -> Arrays:
    count = sizes.rows // page
    shape = (sizes.batch * count, page, sizes.group_heads, sizes.head_dim)
    table = np.arange(sizes.batch * count, dtype=np.int32).reshape(sizes.batch, count)
    return _caches(shape, dtype) | {"block_table": table}


def _packed_pages(sizes: Sizes, dtype: np.dtype) -> Arrays:
    pages = _pages(sizes, dtype)
    rows = {"k": pages["k_cache"], "v": pages["v_cache"], "block_table": pages["block_table"]}
    return rows | {"cu_seqlens_k": None, "seqused_k": lengths(sizes)}


def _common_pages(sizes: Sizes, dtype: np.dtype) -> Arrays:
    options = _pages(sizes, dtype)
    options["block_table"][:, 0] = 0
    return options | {"shared_prefix_len": PAGE}


def _new_rows(sizes: Sizes, dtype: np.dtype) -> Arrays:
    new = np.zeros((sizes.batch, 1, sizes.group_heads, sizes.head_dim), dtype)
    return {"k": new, "v": new}


def _rotary(sizes: Sizes, dtype: np.dtype) -> Arrays:
    table = np.ones((sizes.rows, sizes.head_dim // 2), dtype)
    return _new_rows(sizes, dtype) | {"rotary_cos": table, "rotary_sin": table}


def _stored(name: str) -> Callable[[Sizes, np.dtype], Arrays]:
    def options(sizes: Sizes, dtype: np.dtype) -> Arrays:
        cache = inputs("kvcache", sizes, DTYPES[name])["k_cache"]
        scale = np.ones(cache.shape[:-1], np.float32)
        return {"k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale}

    return options


def _latent(sizes: Sizes, dtype: np.dtype) -> Arrays:
    dims = (576, 512) if sizes.rows == PLANNED.rows else (sizes.head_dim, sizes.head_dim // 2)
    query = np.zeros((sizes.batch, 1, sizes.heads, dims[0]), dtype)
    cache = np.zeros((sizes.batch, sizes.rows, 1, dims[0]), dtype)
    return {"q": query, "k_cache": cache, "v_cache": None, "head_dim_v": dims[1]}


def _lists(shape: Callable[[Sizes], tuple[int, ...]]) -> Callable[[Sizes, np.dtype], Arrays]:
    return lambda sizes, dtype: {"key_indices": np.zeros((*shape(sizes), 1, 4), np.int32)}


def _gathered(sizes: Sizes, dtype: np.dtype) -> Arrays:
    query, rows = (
        np.zeros((sizes.batch * sizes.rows, count, sizes.heads, sizes.head_dim), dtype)
        for count in (1, 64)
    )
    return {"q": query, "k": rows, "v": rows}


# Kernels of calls with lists of keys: those of a cache with pages of one row, and those of a batch
# of one query each over gathered keys.
_LISTED = Feature("", lambda s, d: _pages(s, d, page=1), "kvcache")
_GATHERED = Feature("", _gathered)
_BY_LISTS = {"forward": _LISTED, "backward": _GATHERED}
_OF_LISTS = frozenset({"key_indices"})
_CAPTURED = frozenset({CAPTURED})
_FORWARD = ("forward",)
_OF_CACHES = ("forward", "received")
_MADE = ("forward", "backward")
_CAUSAL = {"causal": True}

# Float8 queries, keys and values.
FLOAT8 = Feature("float8 inputs", directions=_FORWARD)
DENSE = (
    Feature("no mask"),
    Feature("`causal`", lambda s, d: _CAUSAL),
    Feature("`window_size`", lambda s, d: {"window_size": (s.rows // 4, 0)}),
    Feature("`prefix_lens`", lambda s, d: _CAUSAL | {"prefix_lens": lengths(s)}),
    Feature("`q_offset` by sequence", lambda s, d: _CAUSAL | {"q_offset": lengths(s)}),
    Feature("`seqlens_k` (padding)", lambda s, d: {"seqlens_k": lengths(s)}),
    Feature("grouped heads (GQA)", _grouped),
    Feature("`head_dim_v` below `head_dim`", _narrow_values),
    Feature("`softcap`", lambda s, d: {"softcap": 20.0}),
    Feature("`sinks`", lambda s, d: {"sinks": np.zeros(s.heads, np.float32)}, wrt="sinks"),
    Feature(
        "`alibi_slopes`",
        lambda s, d: {"alibi_slopes": np.ones(s.heads, np.float32)},
        wrt="alibi_slopes",
    ),
    Feature("`bias` array", lambda s, d: {"bias": _pairs(s, d)}, wrt="bias"),
    Feature("`mask` array of bools", lambda s, d: {"mask": _pairs(s, bool)}),
    Feature("`ScoreMod`", lambda s, d: {"score_mod": ScoreMod(lambda score, i, j: score + i - j)}),
    Feature("`MaskMod`", lambda s, d: {"mask_mod": MaskMod(lambda i, j: i // 8 == j // 8)}),
    Feature("`BlockList`", _blocks),
    Feature("dropout", lambda s, d: {"dropout_p": 0.1, "dropout_seed": 1}, on_arrays=("received",)),
    Feature(
        "row statistics",
        lambda s, d: {"return_max_logits": True, "return_entropy": True},
        directions=_FORWARD,
    ),
    Feature("captured in a CUDA graph", directions=_MADE, ran=_CAPTURED),
    Feature(
        "`key_indices`",
        _lists(lambda s: (s.batch, s.rows)),
        directions=_MADE,
        ran=_OF_LISTS,
        planned=_BY_LISTS,
    ),
)
VARLEN = (
    Feature("packed", kind="varlen"),
    Feature("packed with `causal`", lambda s, d: _CAUSAL, "varlen"),
    Feature("packed with `seqused_q`", lambda s, d: {"seqused_q": lengths(s)}, "varlen"),
    Feature("packed with `seqused_k`", lambda s, d: {"seqused_k": lengths(s)}, "varlen"),
    Feature("packed with pages", _packed_pages, "varlen", _FORWARD),
    Feature(
        "packed with `batch_invariant`", lambda s, d: {"batch_invariant": True}, "varlen", _FORWARD
    ),
    Feature(
        "packed with `key_indices`",
        _lists(lambda s: (s.batch * s.rows,)),
        "varlen",
        _MADE,
        ran=_OF_LISTS,
        planned=_BY_LISTS,
    ),
)
CACHES = (
    Feature("contiguous cache", kind="kvcache", directions=_OF_CACHES),
    Feature("cache in pages", _pages, "kvcache", _OF_CACHES),
    Feature("cache in a CUDA graph", kind="kvcache", directions=_FORWARD, ran=_CAPTURED),
    Feature("append", _new_rows, "kvcache", _FORWARD, append=frozenset()),
    Feature(
        "append with rotary embedding", _rotary, "kvcache", _FORWARD, append=frozenset({"rotary"})
    ),
    Feature("`int8` cache", _stored("int8"), "kvcache", _OF_CACHES, on_arrays=("received",)),
    Feature(
        "`float8_e4m3fn` cache",
        _stored("float8_e4m3fn"),
        "kvcache",
        _OF_CACHES,
        on_arrays=("received",),
    ),
    Feature("latent attention (MLA)", _latent, "kvcache", _FORWARD),
    Feature(
        "`tree_mask`",
        lambda s, d: {"tree_mask": np.ones((s.batch, 1), np.uint64)},
        "kvcache",
        _OF_CACHES,
    ),
    Feature("`cache_leftpad`", lambda s, d: {"cache_leftpad": lengths(s)}, "kvcache", _OF_CACHES),
    Feature("cache with `num_splits`", lambda s, d: {"num_splits": 2}, "kvcache", _FORWARD),
    Feature(
        "cache with `batch_invariant`", lambda s, d: {"batch_invariant": True}, "kvcache", _FORWARD
    ),
    Feature(
        "`shared_prefix_len`",
        _common_pages,
        "kvcache",
        _FORWARD,
        ran=frozenset({"shared_prefix_len"}),
    ),
    Feature(
        "cache with `key_indices`",
        lambda s, d: {"key_indices": np.zeros((s.batch, 1, 1, 4), np.int32)},
        "kvcache",
        _FORWARD,
        ran=_OF_LISTS,
        planned=_BY_LISTS,
    ),
)
