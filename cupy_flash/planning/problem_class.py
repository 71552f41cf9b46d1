"""`ProblemClass`: which problems share a tuned tile, and how tables spell that."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from cupy_flash.problem.arrays import FLOAT8, LARGEST_QUANTIZED
from cupy_flash.problem.problem import Problem

# Longer sequences, and more query rows over the batch and all heads, are tuned alike.
MOST_POSITIONS = 16384
MOST_ROWS = 65536


@dataclass(frozen=True)
class ProblemClass:
    """The class of problems that share a tuned tile; its text is what tables hold.

    Attributes
    ----------
    dtype, head_dim, head_dim_v, causal, alignment
        As in `Problem`; of float8 the dtype of the output.
    seqlen_q, seqlen_k, rows
        Sequence lengths, and query rows over the batch and all heads, rounded to powers of four.
    kind
        How sequences lie, where they are not blocks of equal length: "packed", "cache", "page16"
        or "packed-page16"; else empty. Of keys that hold the values with "latent" ahead, and of
        keys of 8 bits with their dtype: "int8-latent-cache". "float8_e4m3fn" of blocks of equal
        length of float8.
    direction
        As in `Problem`. Which gradients are wanted, and in which dtype, makes no other class.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen_q: int
    seqlen_k: int
    rows: int
    alignment: int
    kind: str = ""
    direction: str = "forward"

    @classmethod
    def of(cls, problem: Problem) -> ProblemClass:
        """That of a problem."""
        return cls(
            problem.out_dtype,
            problem.head_dim,
            problem.head_dim_v,
            problem.causal,
            _bucket(problem.seqlen_q, MOST_POSITIONS),
            _bucket(problem.seqlen_k, MOST_POSITIONS),
            _bucket(problem.batch * problem.heads_q * problem.seqlen_q, MOST_ROWS),
            problem.alignment,
            _kind(problem),
            problem.direction,
        )

    @classmethod
    def parse(cls, text: str) -> ProblemClass | None:
        """The inverse of `str`; None for a class that is not spelled as now."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        parts = found.groupdict("")
        numbers = {
            field.name: int(parts[field.name]) for field in fields(cls) if field.type == "int"
        }
        return cls(
            dtype=parts["dtype"],
            causal=parts["mask"] == "causal",
            kind=parts["kind"],
            direction=parts["direction"] or "forward",
            **numbers,
        )

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        text = (
            f"{self.dtype} d{self.head_dim} dv{self.head_dim_v} {mask} q{self.seqlen_q} "
            f"k{self.seqlen_k} rows{self.rows} align{self.alignment}"
        )
        backward = "" if self.direction == "forward" else self.direction
        return " ".join(filter(None, (text, self.kind, backward)))

    @property
    def packed(self) -> bool:
        """Whether the queries are packed."""
        return "packed" in self.kind.split("-")

    @property
    def page_size(self) -> int:
        """Rows of a page of the cache; 0 where there are no pages."""
        return int(self.kind.partition("page")[2] or 0)

    @property
    def cache_dtype(self) -> str | None:
        """Of keys of 8 bits, or of q, k and v of float8."""
        stored = self.kind.partition("-")[0]
        return stored if stored in LARGEST_QUANTIZED else None

    @property
    def values_in_keys(self) -> bool:
        """As in `Problem`."""
        return _LATENT in self.kind.split("-")


_LATENT = "latent"
_QUANTIZED = "|".join(LARGEST_QUANTIZED)
_TEXT = re.compile(
    r"(?P<dtype>\w+) d(?P<head_dim>\d+) dv(?P<head_dim_v>\d+) (?P<mask>causal|full) "
    r"q(?P<seqlen_q>\d+) k(?P<seqlen_k>\d+) rows(?P<rows>\d+) align(?P<alignment>\d+)"
    rf"(?: (?P<kind>{FLOAT8}|(?:(?:{_QUANTIZED})-)?"
    rf"(?:packed|packed-page\d+|(?:{_LATENT}-)?(?:cache|page\d+))))?"
    r"(?: (?P<direction>backward))?"
)


def _kind(problem: Problem) -> str:
    layout = problem.layout
    if layout.is_equal:
        return FLOAT8 if problem.is_float8 else ""
    stored = "" if problem.scales is None else problem.tensors["k"].dtype
    latent = _LATENT if problem.values_in_keys else ""
    queries = "packed" if layout.packed_q else ""
    keys = f"page{layout.page_size}" if layout.page_size else "" if queries else "cache"
    return "-".join(filter(None, (stored, latent, queries, keys)))


def _bucket(value: int, most: int) -> int:
    """The nearest power of four, by ratio and at most `most`; 0 stays 0."""
    if value <= 0:
        return 0
    low = 1 << (value.bit_length() - 1) // 2 * 2
    return min(most, low * 4 if value >= 2 * low else low)
