"""Prepared appends to a KV cache that is sharded over ranks, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import address_of, dtype_name, readable_in_place, spec_of
from cupy_flash.calls.gpu.prepared_calls import Context, Operation
from cupy_flash.gpu import append


class AppendedRows(NamedTuple):
    """KV cache shard of a rank, new keys and values, and global lengths before the append."""

    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    cache_seqlens: Any = None

    @property
    def like(self) -> Any:
        """Array that determines which library allocates memory."""
        return self.k_cache

    def key_arrays(self, options: CacheSharding) -> AppendedRows:
        """Return all arrays: the call key describes each of them."""
        return self


class CacheSharding(NamedTuple):
    """Assignment of keys to the KV cache shard of a rank.

    Attributes
    ----------
    ranks, rank, stripe
        See `AppendSpec`.
    capacity
        Global index of the first key that is assigned to this rank but does not fit in its shard.
    """

    ranks: int
    rank: int
    stripe: int
    capacity: int


@dataclass(frozen=True)
class Call:
    """Prepared append: everything that the call key determines, see `prepared_calls.look_up`."""

    kernel: append.Append

    def run(
        self, rows: AppendedRows, addresses: tuple[int, ...], keys: int, *_: Any
    ) -> tuple[None, None]:
        """Enqueue the append of arrays at these addresses; `keys` is as in `prepared_calls.run`."""
        self.kernel.run((*addresses, keys))
        return None, None


def readable(rows: AppendedRows, _: CacheSharding) -> AppendedRows:
    """Return the arrays, with copies of those that the kernel cannot read in place."""
    lengths = rows.cache_seqlens
    return rows._replace(
        k=readable_in_place(rows.k),
        v=readable_in_place(rows.v),
        cache_seqlens=None if lengths is None else readable_in_place(lengths),
    )


def prepare(rows: AppendedRows, sharding: CacheSharding, context: Context) -> Call:
    """Compile and load the kernel that appends such CuPy arrays, which have been checked."""
    arrays = (rows.k_cache, rows.v_cache, rows.k, rows.v)
    specs = [spec_of(array, address_of(array)) for array in arrays]
    k_cache, v_cache, k, v = specs
    (batch, seqlen_new, heads_kv, head_dim), head_dim_v = k.shape, v.shape[3]
    spec = append.AppendSpec(
        dtype=dtype_name(rows.k),
        batch=batch,
        seqlen_q=0,
        seqlen_new=seqlen_new,
        heads_q=heads_kv,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        seqlen_cache=sharding.capacity,
        q_strides=(0, 0, 0),
        k_strides=k.strides,
        v_strides=v.strides,
        k_cache_strides=k_cache.strides,
        v_cache_strides=v_cache.strides,
        caches=batch,
        alignment=min(spec.row_alignment() for spec in specs),
        ranks=sharding.ranks,
        rank=sharding.rank,
        stripe=sharding.stripe,
    )
    return Call(append.prepare(spec, context.device, (*AppendedRows._fields, "keys")))


# Append to a sharded cache. The options of a call are a `CacheSharding`.
APPEND = Operation(readable, prepare)
