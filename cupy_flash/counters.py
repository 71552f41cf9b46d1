"""Zeroed words of device memory that kernels count arrivals in."""

from __future__ import annotations


def zeroed(count: int) -> int:
    """Address of `count` 32-bit zeros that no other running kernel counts in."""
    raise NotImplementedError(count)
