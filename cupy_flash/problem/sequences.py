"""How the sequences of a batch lie in memory where they are not blocks of equal length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sequences:
    """How q, k and v of packed, cached or paged sequences lie (`kernels_cu/work/sequences.cuh`).

    Their lengths and places are in arrays on the device; here is only what a kernel is chosen by
    and what its arguments are made of.

    Attributes
    ----------
    packed_q
        q and out are (total_q, heads, dim), their sequences told apart by cu_seqlens_q.
    packed_k
        k and v are (total_k, heads, dim), likewise by cu_seqlens_k.
    total_q, total_k
        Rows of packed arrays; 0 where they are not packed.
    caches
        Length of the first axis of a cache that is not paged; 0 where there is none.
    page_size, pages, max_pages
        Rows of a page, pages of the cache, and pages that a sequence may have; 0 where it is not
        paged.
    block_table_stride
        Elements between the rows of block_table.
    new_keys
        Rows that are appended to each sequence before it is attended to.
    num_splits
        Thread blocks to share the keys of a query tile; 0 leaves the number to the kernel.
    batch_invariant
        Whether a row's result may depend on nothing but its own sequence: then family, tile and
        the partition of the keys are chosen without looking at batch and lengths.
    """

    packed_q: bool = False
    packed_k: bool = False
    total_q: int = 0
    total_k: int = 0
    caches: int = 0
    page_size: int = 0
    pages: int = 0
    max_pages: int = 0
    block_table_stride: int = 0
    new_keys: int = 0
    num_splits: int = 0
    batch_invariant: bool = False
