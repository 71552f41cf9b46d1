"""Layout of the sequences of a batch in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Layout of the sequences in q, k and v (`kernels_cu/scheduler/sequences.cuh`).

    Per-sequence lengths and offsets stay in device arrays. This record holds only what selects a
    kernel and fills its arguments.

    Attributes
    ----------
    kind
        Kind of batch. "dense": all sequences have one length. "padded": the same, but keys at
        the end of a sequence are padding. "varlen": q and out are packed, with shape (total_q,
        heads, dim), delimited by cu_seqlens_q; k and v are packed, too, unless they are paged.
        "kvcache": q is a dense batch, and k and v are a KV cache.
    total_q, total_k
        Number of rows of packed arrays; 0 for arrays that are not packed.
    caches
        Length of the first axis of k and v; 0 if they are packed or paged.
    page_size, pages, max_pages
        Number of rows of a page, of pages in the cache, and of pages that a sequence may have; 0 if
        the cache is not paged.
    block_table_stride
        Stride between the rows of block_table, in elements.
    new_keys
        Number of rows that are appended to each sequence before attention is computed.
    packed_new
        Whether the appended rows are packed. cu_seqlens_k_new then delimits the sequences.
    num_splits
        Number of parts that the keys of a query tile are split into; None if the library chooses.
    batch_invariant
        Whether the result of a row may depend on its own sequence only. Family, tile and KV splits
        are then chosen without regard to batch size and lengths.
    """

    kind: str = "dense"
    total_q: int = 0
    total_k: int = 0
    caches: int = 0
    page_size: int = 0
    pages: int = 0
    max_pages: int = 0
    block_table_stride: int = 0
    new_keys: int = 0
    packed_new: bool = False
    num_splits: int | None = None
    batch_invariant: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether all sequences have the same length, so that kernels read no lengths."""
        return self.kind == "dense"

    @property
    def appends(self) -> bool:
        """Whether rows are appended to a cache."""
        return self.new_keys > 0 or self.packed_new

    @property
    def packed_q(self) -> bool:
        """Whether q and out are packed."""
        return self.kind == "varlen"

    @property
    def packed_k(self) -> bool:
        """Whether k and v are packed."""
        return self.kind == "varlen" and self.page_size == 0
