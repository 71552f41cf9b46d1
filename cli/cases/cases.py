"""Cases: single attention calls to benchmark or tune, as sizes and flags."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupy_flash.mods.shapes import Sizes
from cupy_flash.problem.arrays import ITEMSIZE, ArraySpec, Scales, Strides
from cupy_flash.problem.backward import with_gradient
from cupy_flash.problem.gradient import ROWS, GradientSpec
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.problem import Problem, make_problem
from cupy_flash.problem.score import ScoreSpec
from cupy_flash.problem.values import check_count

from .mod_arguments import array_bytes, score_of
from .mods import PLAIN, CaseMods
from .visible import VisibleKeys, count_pairs

Shape = tuple[int, int, int, int]
# Sequences of equal length; sequences in a KV cache; packed sequences (varlen), without padding.
KINDS = ("dense", "cache", "varlen")
# Strides of an array with one scale per head.
_OF_HEADS: Strides = (0, 0, 1)
# Calls that compute the output; calls that compute the gradients of q, k and v from the output.
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """Sizes and flags of one call on new contiguous arrays in `layout`.

    Attributes
    ----------
    dtype, batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
        Dtype and sizes. For a cache, seqlen_k is the number of keys after appending.
        If sequences differ in length, seqlen_q and seqlen_k are the largest lengths.
    causal, q_offset, softmax_scale, layout
        Arguments as in `cupy_flash.flash_attention`.
    kind
        One of `KINDS`. Their cases are calls of, in this order, `flash_attention`,
        `flash_attention_with_kvcache` and `flash_attention_varlen`.
    page_size
        Number of rows per page of the cache; 0 for a cache that is not paged.
    append
        Whether each call also appends seqlen_q new rows to the cache.
    rotary
        Whether the call also applies the rotary embedding to the new rows and the queries.
    asked_splits
        Argument num_splits of a call on caches or packed sequences.
    lengths
        Number of keys of each sequence, and of queries in a varlen batch; None if all are
        seqlen_k.
    mods
        Mask and score modifications.
    direction
        One of `DIRECTIONS`. "backward" is the call for the gradients of q, k and v, in `dtype`.
    cache_dtype
        8-bit dtype of the cache, with one scale per head; None for a cache in `dtype`. A dense
        case may have "float8_e4m3fn": q, k and v are then float8 with one scale per head, and
        `dtype` is that of the output.
    values_in_keys
        Whether the values of a cache are the first head_dim_v columns of its keys (MLA).
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    q_offset: int | None = None
    softmax_scale: float | None = None
    layout: str = "bshd"
    kind: str = "dense"
    page_size: int = 0
    append: bool = False
    rotary: bool = False
    asked_splits: int = 0
    lengths: tuple[int, ...] | None = None
    mods: CaseMods = PLAIN
    direction: str = "forward"
    cache_dtype: str | None = None
    values_in_keys: bool = False

    def as_record(self) -> dict[str, Any]:
        """Return the fields in the form that JSON holds."""
        return dataclasses.asdict(self) | {"mods": str(self.mods) or None}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Case:
        """Return the case of a record; the inverse of `as_record`."""
        lengths = record["lengths"] and tuple(record["lengths"])
        return cls(
            **dict(record) | {"lengths": lengths, "mods": CaseMods.parse(record["mods"] or "")}
        )

    def as_dense(self, batch: int, seqlen_q: int, seqlen_k: int) -> Case:
        """Return a dense case of these sizes with this case's heads, mask, scale and direction."""
        return Case(
            *(self.dtype, batch, seqlen_q, seqlen_k, self.heads_q, self.heads_kv),
            *(self.head_dim, self.head_dim_v, self.causal),
            softmax_scale=self.softmax_scale,
            mods=self.mods,
            direction=self.direction,
        )

    @property
    def is_dense(self) -> bool:
        """Whether the case is a call of `flash_attention`."""
        return self.kind == "dense"

    @property
    def is_cached(self) -> bool:
        """Whether the case is a call of `flash_attention_with_kvcache`."""
        return self.kind == "cache"

    @property
    def is_backward(self) -> bool:
        """Whether the case is a call for gradients."""
        return self.direction == "backward"

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Number of keys of each sequence."""
        return (self.seqlen_k,) * self.batch if self.lengths is None else self.lengths

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Number of queries of each sequence."""
        return self.key_lengths if self.kind == "varlen" else (self.seqlen_q,) * self.batch

    @property
    def length_counts(self) -> dict[tuple[int, int], int]:
        """Number of sequences by (number of queries, number of keys).

        A batch of equal lengths has a single entry, whatever its size.
        """
        if self.lengths is None:
            is_packed = self.kind == "varlen"
            return {(self.seqlen_k if is_packed else self.seqlen_q, self.seqlen_k): self.batch}
        return Counter(zip(self.query_lengths, self.key_lengths, strict=True))

    @property
    def query_rows(self) -> int:
        """Number of query rows in the batch, over all heads."""
        return self.heads_q * sum(n * queries for (queries, _), n in self.length_counts.items())

    @property
    def total_keys(self) -> int:
        """Number of keys of all sequences together."""
        return sum(n * keys for (_, keys), n in self.length_counts.items())

    @property
    def cache_rows(self) -> int:
        """Number of rows of k per head, over the batch or all pages."""
        caches, rows, _, _ = self.bshd_shapes[1]
        return caches * rows

    @property
    def pages_per_sequence(self) -> int:
        """Number of pages that hold seqlen_k rows; 0 if the cache is not paged."""
        return -(-self.seqlen_k // self.page_size) if self.page_size else 0

    @property
    def bshd_shapes(self) -> tuple[Shape, Shape, Shape]:
        """Shapes of q, k and v, or of the caches, in (batch, seqlen, heads, dim) order.

        Packed arrays have a batch of one; the batch axis of a paged cache is its pages.
        """
        batch, seqlen_q, seqlen_k = self.batch, self.seqlen_q, self.seqlen_k
        k_batch = batch
        if self.kind == "varlen":
            batch = k_batch = 1
            seqlen_q = seqlen_k = self.total_keys
        elif self.page_size:
            k_batch, seqlen_k = batch * self.pages_per_sequence, self.page_size
        return (
            (batch, seqlen_q, self.heads_q, self.head_dim),
            (k_batch, seqlen_k, self.heads_kv, self.head_dim),
            (k_batch, seqlen_k, self.heads_kv, self.head_dim_v),
        )

    @property
    def sizes(self) -> Sizes:
        """Sizes that modifications depend on; for a cache, seqlen_k is its capacity."""
        capacity = self.pages_per_sequence * self.page_size if self.page_size else self.seqlen_k
        total = self.total_keys if self.kind == "varlen" else None
        return Sizes(self.dtype, self.batch, self.heads_q, self.seqlen_q, capacity, total)

    def problem(self) -> Problem:
        """Return the library's `Problem`; raise TypeError or ValueError if the call is invalid."""
        problem = self._dense_problem() if self.is_dense else self._sequences_problem()
        if not self.is_backward:
            return problem
        if self.is_cached or self.asked_splits:
            option = "--num-splits" if self.asked_splits else "--cache"
            raise ValueError(f"{option} is for forward calls; leave out --backward")
        specs = {name: self._spec(x) for name, x in zip(ROWS, self.bshd_shapes, strict=True)}
        dout = self._spec((*specs["q"].shape[:3], self.head_dim_v))
        return with_gradient(problem, GradientSpec(ROWS, self.dtype), dout, specs)

    def _dense_problem(self) -> Problem:
        q, k, v = (self._spec(shape, self.cache_dtype) for shape in self.bshd_shapes)
        of_heads = _OF_HEADS if self.cache_dtype else None
        return make_problem(
            q,
            k,
            v,
            self._spec((*q.shape[:3], self.head_dim_v)),
            scales=Scales(of_heads, of_heads, q=of_heads) if of_heads else None,
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            q_offset=self.q_offset,
            score=self._score(),
        )

    def _sequences_problem(self) -> Problem:
        self._require_consistent()
        dtypes = (self.dtype, *(self.cache_dtype or self.dtype,) * 2)
        q, k, v = map(ArraySpec.contiguous, self.bshd_shapes, dtypes)
        if self.values_in_keys:
            v = dataclasses.replace(k, shape=v.shape)
        packed = self.kind == "varlen"
        pages = self.pages_per_sequence
        return make_problem(
            q,
            k,
            v,
            kind="varlen" if packed else "kvcache",
            batch=self.batch,
            max_seqlen_q=self.seqlen_q,
            max_seqlen_k=self.seqlen_k,
            block_table=(pages, pages) if self.page_size else None,
            new_keys=self.seqlen_q if self.append else 0,
            num_splits=self.asked_splits,
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            score=self._score(),
            scales=Scales(_OF_HEADS, _OF_HEADS) if self.cache_dtype else None,
            values_in_keys=self.values_in_keys,
        )

    def _score(self) -> ScoreSpec | None:
        return score_of(self.mods, self.sizes, causal=self.causal, backward=self.is_backward)

    def _require_consistent(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        check_count("batch", self.batch)
        if not self.batch:
            raise ValueError("batch is 0; expected at least 1 sequence")
        if self.layout != "bshd":
            raise ValueError(f"layout is {self.layout!r}; caches and packed sequences are 'bshd'")
        if self.q_offset is not None:
            raise ValueError("caches and packed sequences take no q_offset; leave it out")
        if (self.page_size or self.append or self.rotary) and not self.is_cached:
            raise ValueError("page_size, append and rotary need kind cache")
        if self.cache_dtype and (not self.is_cached or self.append):
            raise ValueError("cache_dtype needs kind cache or dense, and no append")
        if self.values_in_keys and (not self.is_cached or self.append):
            raise ValueError("values_in_keys needs kind cache, and no append")
        if self.rotary and (not self.append or self.head_dim % 2):
            raise ValueError("rotary needs append and an even head_dim")
        if self.lengths is not None and (
            len(self.lengths) != self.batch or max(self.lengths, default=0) != self.seqlen_k
        ):
            raise ValueError(
                f"{len(self.lengths)} lengths up to {max(self.lengths, default=0)} cannot be "
                f"combined with batch {self.batch} and seqlen_k {self.seqlen_k}"
            )
        if self.kind == "varlen" and self.seqlen_q != self.seqlen_k:
            raise ValueError(
                f"seqlen_q is {self.seqlen_q} and seqlen_k {self.seqlen_k}; packed sequences "
                "attend to themselves"
            )
        least = self.seqlen_k if self.lengths is None else min(self.lengths)
        if self.append and least < self.seqlen_q:
            raise ValueError(
                f"{self.seqlen_q} rows are appended, but a sequence has only {least} keys with "
                "them; expected at least as many"
            )

    def _spec(self, shape: Shape, dtype: str | None = None) -> ArraySpec:
        dtype = dtype or self.dtype
        if self.layout == "bshd":
            return ArraySpec.contiguous(shape, dtype)
        _, seqlen, heads, dim = shape
        strides: Strides = (heads * seqlen * dim, dim, seqlen * dim)
        return ArraySpec(shape, strides, dtype)

    def mask(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """Return the positional mask of a sequence with these lengths."""
        offset = seqlen_k - seqlen_q if self.q_offset is None else self.q_offset
        return Mask(seqlen_q, seqlen_k, self.causal, offset, *self.mods.window)

    def visible_keys(self, seqlen_q: int, seqlen_k: int) -> VisibleKeys:
        """Return the visible keys of a sequence with these lengths; mask arrays are ignored."""
        return VisibleKeys.of(self.mask(seqlen_q, seqlen_k), self.mods.mod, self.sizes.seqlen_k)

    def flops(self) -> float:
        """Return the FLOPs of the visible pairs, as `Problem.flops` counts them.

        Pairs that an array masks count, because a kernel cannot skip them. Gradients take five
        products: S again, dP = dout v', dq, dk and dv.
        """
        dim, dim_v = self.head_dim, self.head_dim_v
        width = 3 * dim + 2 * dim_v if self.is_backward else dim + dim_v
        return 2.0 * self.heads_q * _visible_pairs(self) * width

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values that any query of their sequence attends to."""
        keys = self.total_keys
        if self.mods:
            lengths = self.length_counts.items()
            keys = sum(count * self.visible_keys(*seqlens).keys() for seqlens, count in lengths)
        return keys * self.heads_kv * self._key_bytes

    @property
    def _key_bytes(self) -> int:
        """Bytes of one key and its value."""
        columns = self.head_dim + (0 if self.values_in_keys else self.head_dim_v)
        return columns * ITEMSIZE[self.cache_dtype or self.dtype]

    @property
    def array_bytes(self) -> int:
        """Bytes of q, of k and v or the caches, of the output, and of biases and masks.

        For a call for gradients, also bytes of the gradients, dout and the log-sum-exp.
        """
        rows = self.query_bytes + self.key_value_bytes + self.out_bytes
        if self.is_backward:
            rows += rows + self.query_rows * (8 if self.dtype == "float64" else 4)
        return rows + array_bytes(self.mods, self.sizes)

    @property
    def query_bytes(self) -> int:
        """Bytes of q."""
        stored = self.cache_dtype if self.is_dense else None
        return self.query_rows * self.head_dim * ITEMSIZE[stored or self.dtype]

    @property
    def key_value_bytes(self) -> int:
        """Bytes of k and v, or of the caches."""
        return self.cache_rows * self.heads_kv * self._key_bytes

    @property
    def out_bytes(self) -> int:
        """Bytes of the output."""
        return self.query_rows * self.head_dim_v * ITEMSIZE[self.dtype]

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays that the call returns."""
        return self.query_bytes + self.key_value_bytes if self.is_backward else self.out_bytes

    @property
    def scores(self) -> int:
        """Number of elements of the score matrices of all heads."""
        pairs = sum(n * queries * keys for (queries, keys), n in self.length_counts.items())
        return self.heads_q * pairs

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `flash_attention` and of the reference."""
        return {
            "causal": self.causal,
            "q_offset": self.q_offset,
            "softmax_scale": self.softmax_scale,
            "layout": self.layout,
        }

    @property
    def first_query(self) -> int:
        """Position of the first query among the keys, if all sequences have one length."""
        return self.seqlen_k - self.seqlen_q if self.q_offset is None else self.q_offset


# The number is cached, because counting takes milliseconds for long sequences, and happens often.
@functools.lru_cache(maxsize=256)
def _visible_pairs(case: Case) -> float:
    """Return the number of visible pairs of one head, over the batch."""
    mod_keys = case.sizes.seqlen_k
    return sum(
        count * count_pairs(case.mask(*lengths), case.mods.mod, mod_keys)
        for lengths, count in case.length_counts.items()
    )


SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LONG_DTYPE = {short: name for name, short in SHORT_DTYPE.items()}


def dtype_name(text: str) -> str:
    """Return the full name of a dtype, given the full or the short name."""
    return _LONG_DTYPE.get(text, text)


def _texts(case: Case) -> dict[str, str]:
    """Return the parts of a case's description, in order; a part is empty if its value is usual."""
    mask = "causal" if case.causal else "full"
    if case.q_offset is not None:
        mask += f"@{case.q_offset}"
    return {
        "dtype": SHORT_DTYPE[case.dtype],
        "direction": case.direction if case.is_backward else "",
        "kind": _kind_text(case),
        "batch": f"b{case.batch}",
        "heads": f"h{pair_text(case.heads_q, case.heads_kv)}",
        "seqlen": f"s{_seqlen_text(case)}",
        "lengths": f"{sum(case.lengths)} keys" if case.lengths else "",
        "head_dim": f"d{pair_text(case.head_dim, case.head_dim_v)}",
        "mask": mask,
        "mods": str(case.mods),
        "scale": "" if case.softmax_scale is None else f"scale {case.softmax_scale:g}",
        "layout": case.layout if case.layout != "bshd" else "",
        "step": " ".join(name for name in ("append", "rotary") if getattr(case, name)),
        "splits": f"splits {case.asked_splits}" if case.asked_splits else "",
    }


def _kind_text(case: Case) -> str:
    if case.is_cached:
        storage = f"pages of {case.page_size}" if case.page_size else "cache"
        latent = "latent" if case.values_in_keys else ""
        return " ".join(filter(None, (case.cache_dtype, latent, storage)))
    if case.is_dense:
        return f"of {case.cache_dtype}" if case.cache_dtype else ""
    return case.kind


def _seqlen_text(case: Case) -> str:
    if not case.lengths:
        return pair_text(case.seqlen_q, case.seqlen_k)
    least, most = min(case.lengths), max(case.lengths)
    span = str(most) if least == most else f"{least}..{most}"
    return f"{case.seqlen_q}/{span}" if case.is_cached else span


def pair_text(first: int, second: int) -> str:
    """Return two numbers as text, or a single one if they are equal."""
    return str(first) if first == second else f"{first}/{second}"


def sequences_text(case: Case) -> str:
    """Return the part of a description that caches and packed sequences add; "" for dense cases."""
    texts = _texts(case)
    return " ".join(filter(None, (texts[part] for part in ("kind", "lengths", "step", "splits"))))


def describe(cases: Sequence[Case]) -> tuple[str, list[str]]:
    """Return short texts: what all cases have in common, and for each what sets it apart."""
    texts = [_texts(case) for case in cases]
    varying = [part for part in texts[0] if len({text[part] for text in texts}) > 1]
    shared = " ".join(t for part, t in texts[0].items() if t and part not in varying)
    for part, usual in (("mods", "plain"), ("direction", "forward")):
        if part in varying:
            texts = [text | {part: text[part] or usual} for text in texts]
    own = [" ".join(t for part in varying if (t := text[part])) for text in texts]
    return shared, own


# Options of `sweep`; the first one varies slowest.
_SWEPT = (
    *("dtype", "layout", "head_dim", "head_dim_v", "causal", "batch", "heads", "kv_heads"),
    *("seqlen_q", "seqlen_k", "q_offset", "softmax_scale"),
)


def sweep(options: Mapping[str, Iterable[Any] | None]) -> list[Case]:
    """Return every combination of the values of shape options as a case.

    The numbers of keys, of KV heads and of value columns default to those of the queries.
    """
    cases = []
    for values in itertools.product(*(options[name] or (None,) for name in _SWEPT)):
        chosen: dict[str, Any] = dict(zip(_SWEPT, values, strict=True))
        heads_kv, seqlen_k, dim_v = (chosen[x] for x in ("kv_heads", "seqlen_k", "head_dim_v"))
        cases.append(
            Case(
                chosen["dtype"],
                chosen["batch"],
                chosen["seqlen_q"],
                chosen["seqlen_q"] if seqlen_k is None else seqlen_k,
                chosen["heads"],
                chosen["heads"] if heads_kv is None else heads_kv,
                chosen["head_dim"],
                chosen["head_dim"] if dim_v is None else dim_v,
                chosen["causal"],
                chosen["q_offset"],
                chosen["softmax_scale"],
                chosen["layout"],
            )
        )
    return list(dict.fromkeys(cases))
