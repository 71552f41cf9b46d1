"""How the sequences of a batch lie in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How q, k and v lie (`kernels_cu/grid/sequences.cuh`).

    Lengths and places that are not equal are in arrays on the device; here is only what a kernel is
    chosen by and what its arguments are made of.

    Attributes
    ----------
    kind
        "equal": q, k and v are batches of equal lengths. "packed": q and out are (total_q, heads,
        dim), their sequences told apart by cu_seqlens_q, and, where they are not paged, k and v
        likewise. "cached": q is a batch of equal lengths, k and v are a cache. "padded": as
        "equal", but that the keys of each sequence end sooner.
    total_q, total_k
        Rows of packed arrays; 0 where they are not packed.
    caches
        Length of the first axis of keys that are neither packed nor paged; 0 where they are.
    page_size, pages, max_pages
        Rows of a page, pages of the cache, and pages that a sequence may have; 0 where it is not
        paged.
    block_table_stride
        Elements between the rows of block_table.
    new_keys
        Rows that are appended to each sequence before it is attended to.
    packed_new
        Whether the rows that are appended are packed; cu_seqlens_k_new delimits each sequence's.
    num_splits
        Parts to cut the keys of a query tile into; None leaves them to the kernel.
    batch_invariant
        Whether a row's result may depend on nothing but its own sequence: then family, tile and
        the partition of the keys are chosen without looking at batch and lengths.
    """

    kind: str = "equal"
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
    def is_equal(self) -> bool:
        """Whether all sequences have one length, and kernels need not look them up."""
        return self.kind == "equal"

    @property
    def appends(self) -> bool:
        """Whether rows are appended to a cache."""
        return self.new_keys > 0 or self.packed_new

    @property
    def packed_q(self) -> bool:
        """Whether q and out are packed."""
        return self.kind == "packed"

    @property
    def packed_k(self) -> bool:
        """Whether k and v are packed."""
        return self.kind == "packed" and self.page_size == 0
