"""Attention over a sequence or a KV cache that is sharded over the ranks of a communicator."""

from __future__ import annotations

from cupy_flash.errors import ParallelError
from cupy_flash.parallel.attention import flash_attention, flash_attention_backward
from cupy_flash.parallel.generation import (
    cache_shard,
    cache_shard_length,
    flash_attention_with_kvcache,
)
from cupy_flash.parallel.group import Group
from cupy_flash.parallel.shards import gather, shard, shard_length

__all__ = [
    "Group",
    "ParallelError",
    "cache_shard",
    "cache_shard_length",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_with_kvcache",
    "gather",
    "shard",
    "shard_length",
]
