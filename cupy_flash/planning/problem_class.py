"""`ProblemClass`: the class of problems with the same tuned tile, and its text in tables."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from cupy_flash.problem.arrays import FLOAT8, LARGEST_QUANTIZED
from cupy_flash.problem.problem import Problem

# Upper bounds of sequence lengths, and of query rows over the batch and all heads, in a class.
# Larger sizes count as the bound.
MOST_POSITIONS = 16384
MOST_ROWS = 65536


@dataclass(frozen=True)
class ProblemClass:
    """Class of problems that use the same tuned tile; tables contain its text (`str`).

    Attributes
    ----------
    dtype, head_dim, head_dim_v, causal, alignment
        Same as in `Problem`, except that `dtype` is the dtype of the output for float8 inputs.
    seqlen_q, seqlen_k, rows
        Sequence lengths, and query rows over the batch and all heads, rounded to powers of four.
    kind
        Batch layout. Empty for a dense batch, or "float8_e4m3fn" if its inputs are float8.
        Otherwise "packed", "cache", "page16" or "packed-page16" (pages of 16 rows), preceded by
        "latent-" for MLA, and by the dtype of an 8-bit KV cache: "int8-latent-cache".
    direction
        Same as in `Problem`, but "forward" if only the log-sum-exp is needed. The class does not
        depend on which gradients or tangents are computed.
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
        """Return the class of a problem."""
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
            "forward" if problem.discards_out else problem.direction,
        )

    @classmethod
    def parse(cls, text: str) -> ProblemClass | None:
        """Return the class whose `str` is `text`; None if the text is not in the present format."""
        result = _TEXT.fullmatch(text)
        if result is None:
            return None
        parts = result.groupdict("")
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
        direction = "" if self.direction == "forward" else self.direction
        return " ".join(filter(None, (text, self.kind, direction)))

    @property
    def packed(self) -> bool:
        """Whether the queries are packed."""
        return "packed" in self.kind.split("-")

    @property
    def page_size(self) -> int:
        """Number of rows of a page of the KV cache; 0 if it is not paged."""
        return int(self.kind.partition("page")[2] or 0)

    @property
    def cache_dtype(self) -> str | None:
        """Name of the dtype of an 8-bit KV cache or of float8 inputs; None for others."""
        stored = self.kind.partition("-")[0]
        return stored if stored in LARGEST_QUANTIZED else None

    @property
    def values_in_keys(self) -> bool:
        """Whether each value consists of the first columns of its key (MLA)."""
        return _LATENT in self.kind.split("-")


_LATENT = "latent"
_QUANTIZED = "|".join(LARGEST_QUANTIZED)
_TEXT = re.compile(
    r"(?P<dtype>\w+) d(?P<head_dim>\d+) dv(?P<head_dim_v>\d+) (?P<mask>causal|full) "
    r"q(?P<seqlen_q>\d+) k(?P<seqlen_k>\d+) rows(?P<rows>\d+) align(?P<alignment>\d+)"
    rf"(?: (?P<kind>{FLOAT8}|(?:(?:{_QUANTIZED})-)?"
    rf"(?:packed|packed-page\d+|(?:{_LATENT}-)?(?:cache|page\d+))))?"
    r"(?: (?P<direction>backward|tangent|received))?"
)


def _kind(problem: Problem) -> str:
    layout = problem.layout
    if layout.is_dense:
        return FLOAT8 if problem.is_float8 else ""
    stored = "" if problem.scales is None else problem.tensors["k"].dtype
    latent = _LATENT if problem.values_in_keys else ""
    queries = "packed" if layout.packed_q else ""
    keys = f"page{layout.page_size}" if layout.page_size else "" if queries else "cache"
    return "-".join(filter(None, (stored, latent, queries, keys)))


def _bucket(value: int, most: int) -> int:
    """Return the power of four nearest by ratio, but at most `most`; 0 stays 0."""
    if value <= 0:
        return 0
    low = 1 << (value.bit_length() - 1) // 2 * 2
    return min(most, low * 4 if value >= 2 * low else low)
