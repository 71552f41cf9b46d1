"""What one attention call asks for, validated once, with no arrays and no pointers in it."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from cupy_flash.problem.arrays import (
    DTYPES,
    FLOAT8,
    FLOAT8_OUTPUTS,
    ITEMSIZE,
    LARGEST_QUANTIZED,
    MAX_ALIGNMENT,
    ArraySpec,
    Scales,
    Shape,
    Tensors,
    check_no_self_overlap,
    tensor_of,
)
from cupy_flash.problem.gradient import GradientSpec
from cupy_flash.problem.layout import Layout
from cupy_flash.problem.mask import Mask
from cupy_flash.problem.score import ScoreSpec
from cupy_flash.problem.values import check_bool, check_count, count, finite, integer

NOTHING_TO_PLACE = (
    "q_offset places a causal mask, a window or another modification; pass causal=True or leave "
    "q_offset out"
)
MAX_HEAD_DIM = 576
# Kernels count positions, which an offset can double, and a tile's rows past the end in 32 bits.
MAX_SEQLEN = 2**30 - 2**10
# Factors on scores beyond which float32 may not hold the product: up to here it holds those of all
# float16 inputs, and of others those below 5e33.
HUGE_SCALE = 2.0**16

# What a scale's magnitude may be at most: with the factor log2(e) that kernels give it, it is a
# number of the type that scores are kept in.
_LARGEST_SCALE = {"float32": 2.0**127, "float64": 2.0**1023}

# More thread blocks for a sequence's keys than any GPU runs at once.
MAX_SPLITS = 2**16 - 1


@dataclass(frozen=True)
class Problem:
    """One attention problem: forward, or with a `gradient` backward.

    Attributes
    ----------
    dtype
        Of q, k, v and out: one of `DTYPES`; a cache may be of 8 bits. Or `FLOAT8`, of q, k and v,
        and out is one of `FLOAT8_OUTPUTS`.
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
        Sizes; heads_q is a multiple of heads_kv.
    causal
        Whether query i sees only the keys j <= i + q_offset.
    q_offset
        Position of the first query among the keys, of equal lengths. Without modifications kept
        within [-seqlen_q, seqlen_k], beyond which it changes nothing, and 0 when not causal.
    softmax_scale
        Factor on the scores.
    tensors
        How q, k, v and out lie, by name. The first of the strides is 0 for packed arrays, a page's
        for paged ones.
    layout
        How the sequences lie. Where their lengths are not equal, seqlen_q and seqlen_k are the most
        that one may have, and each has a causal mask of its own, aligned at the bottom right.
    score
        What is done to scores besides; None for nothing.
    scales
        Of a cache of 8 bits, or of float8; None where there are none of either.
    values_in_keys
        Whether each value is the first head_dim_v columns of its key, in the same memory. v is then
        a view of k like any other, and a kernel need not know.
    shares_gpu
        Whether other kernels run beside it: thread blocks are then not to have equal shares of the
        work, of which those that begin late hold up the end.
    gradient
        What a backward call is asked for, whose tensors are dout, dq, dk and dv besides; None of a
        forward one.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    q_offset: int
    softmax_scale: float
    tensors: Tensors
    layout: Layout
    score: ScoreSpec | None = None
    scales: Scales | None = None
    values_in_keys: bool = False
    shares_gpu: bool = False
    gradient: GradientSpec | None = None

    @property
    def direction(self) -> str:
        """What is computed: "forward" or "backward"."""
        return "forward" if self.gradient is None else "backward"

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensors that are written."""
        if self.gradient is None:
            return ("out",)
        return tuple(name for name in ("dq", "dk", "dv") if name in self.tensors)

    @functools.cached_property
    def alignment(self) -> int:
        """Bytes that every row of what is read starts at a multiple of: 16, 8, 4 or 2."""
        written = self.written
        return min(t.alignment for name, t in self.tensors.items() if name not in written)

    @property
    def out_alignment(self) -> int:
        """The same of what is written."""
        return min((self.tensors[name].alignment for name in self.written), default=MAX_ALIGNMENT)

    def aligned(self, inputs: int, out: int | None = None) -> Problem:
        """The same problem of arrays whose rows start at multiples of so many bytes."""
        bytes_of = dict.fromkeys(self.tensors, inputs)
        bytes_of |= dict.fromkeys(self.written, out or self.out_alignment)
        tensors = {n: t._replace(alignment=bytes_of[n]) for n, t in self.tensors.items()}
        return dataclasses.replace(self, tensors=Tensors(**tensors))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def is_float8(self) -> bool:
        """Whether q, k and v are, and not a cache alone."""
        return self.dtype == FLOAT8

    @property
    def out_dtype(self) -> str:
        """Of out, or of the gradients' forward call."""
        return self.tensors["out"].dtype if self.is_float8 else self.dtype

    @property
    def lse_dtype(self) -> str:
        """Name of the log-sum-exp's dtype, which is that of the sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def shape_of(self, name: str) -> Shape:
        """Shape of q, k, v or out, and so of their gradients; of packed arrays as of one batch."""
        layout = self.layout
        of_queries = name in ("q", "out")
        dim = self.head_dim if name in ("q", "k") else self.head_dim_v
        if of_queries:
            rows = (1, layout.total_q) if layout.packed_q else (self.batch, self.seqlen_q)
        else:
            rows = (1, layout.total_k) if layout.packed_k else (self.batch, self.seqlen_k)
        return (*rows, self.heads_q if of_queries else self.heads_kv, dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp."""
        if self.layout.packed_q:
            return self.heads_q, self.layout.total_q
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def rows(self) -> int:
        """Query rows over the whole batch and all heads."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's result may depend on nothing but its own sequence."""
        return self.layout.batch_invariant

    @property
    def has_huge_scale(self) -> bool:
        """Whether scores of usual size may be infinite once they are scaled.

        A scaled score of -inf is NaN in the end, as in the formula, where the kernel still knows
        that the score itself was a number.
        """
        return abs(self.softmax_scale) > HUGE_SCALE

    @property
    def score_factor(self) -> tuple[tuple[int, int], float]:
        """The scale as kernels have it: sign * 2**-shift, compiled in, times a positive number.

        A shift keeps the number clear of the smallest normal ones of the type that scores are kept
        in. Below them all the sign is 0: no score makes a difference.
        """
        smallest = 2.0**-1000 if self.dtype == "float64" else 2.0**-100
        scale = abs(self.softmax_scale)
        shift = 0 if scale >= smallest else 64
        scale *= 2.0**shift
        if scale < smallest:
            return (0, 0), 1.0
        return (1 if self.softmax_scale > 0 else -1, shift), scale

    @property
    def mask(self) -> Mask:
        """Which query sees which key; of sequences, of one that has all that any may have."""
        mask = Mask(self.seqlen_q, self.seqlen_k, self.causal, self.q_offset)
        if self.score is None:
            return mask
        return mask._replace(left=self.score.left, right=self.score.right)

    @property
    def is_local(self) -> bool:
        """Whether a causal mask or a window bounds the keys of a query by its position."""
        score = self.score
        has_window = score is not None and (score.left is not None or score.right is not None)
        return self.causal or has_window

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element, so that there is nothing to compute."""
        return self.rows == 0

    def flops(self) -> float:
        """Floating-point operations by the field's convention.

        4 * batch * heads_q * seqlen_q * seqlen_k * head_dim (the mean of both head dims), of
        which a causal problem counts the fraction of pairs that are seen; for seqlen_q =
        seqlen_k that is half (FlashAttention-3 paper, section 4.1).
        """
        pairs = self.mask.pairs()
        return 2.0 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)


def make_problem(
    q: ArraySpec,
    k: ArraySpec,
    v: ArraySpec,
    out: ArraySpec | None = None,
    *,
    kind: str = "equal",
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
    batch: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: tuple[int, int] | None = None,
    chosen_caches: bool = False,
    new_keys: int = 0,
    packed_new: bool = False,
    num_splits: int = 0,
    batch_invariant: bool = False,
    score: ScoreSpec | None = None,
    scales: Scales | None = None,
    values_in_keys: bool = False,
    layout: str = "bshd",
) -> Problem:
    """Check the caller's input and put it in a `Problem`.

    Checked is what needs no contents of the arrays that say where sequences lie.

    Parameters
    ----------
    q
        Spec of shape (batch, seqlen_q, heads_q, head_dim); packed (1, total_q, heads_q, head_dim).
    k, v
        Specs of (batch, seqlen_k, heads_kv, dim), where dim is head_dim and head_dim_v; packed (1,
        total_k, heads_kv, dim); of a cache (caches, seqlen_cache, heads_kv, dim); and where
        block_table is given of (pages, page_size, heads_kv, dim).
    out
        Spec of the output, as q; None for a new contiguous one.
    kind
        How the sequences lie, see `Layout.kind`.
    causal, softmax_scale, q_offset
        As in `cupy_flash.flash_attention`; q_offset for equal lengths only.
    batch, max_seqlen_q, max_seqlen_k
        Number of packed sequences, and the most rows that one has.
    block_table
        Pages that a sequence may have, and elements between the rows of the table.
    chosen_caches
        Whether each sequence names its cache; else sequence b has cache b.
    new_keys
        Rows to be appended to each sequence of a cache.
    packed_new
        Whether rows to be appended are packed; then new_keys is 0.
    num_splits, batch_invariant
        As in `cupy_flash.flash_attention_with_kvcache`.
    score
        Modifications.
    scales
        Of a cache of 8 bits, or of float8.
    values_in_keys
        Whether v is a view of the first columns of k.
    layout
        That the caller named for arrays of equal lengths; messages depend on it alone.

    Raises
    ------
    TypeError
        For dtypes that are not supported or differ, or an option of the wrong kind.
    ValueError
        For shapes that do not go together, or values out of range.
    """
    is_equal, is_packed = kind in ("equal", "padded"), kind == "packed"
    names = ("k_cache", "v_cache") if kind == "cached" else ("k", "v")
    is_float8 = q.dtype == FLOAT8 and kind == "equal"
    if is_float8:
        _check_float8(k, v)
    else:
        _check_dtypes(q, k, v, names, is_quantized=scales is not None)
    if is_equal:
        _check_batch(q.shape, k.shape, v.shape)
    _check_heads_and_dims(q.shape, k.shape, v.shape, names, layout if is_equal else None)
    if not is_equal:
        _check_places(
            k.shape, v.shape, names, is_packed=is_packed, is_paged=block_table is not None
        )
    sequences = q.shape[0] if batch is None else batch
    check_count("batch", sequences)
    check_bool("causal", causal)
    check_bool("batch_invariant", batch_invariant)
    max_pages, table_stride = block_table or (0, 0)
    capacity = k.shape[1] if block_table is None else max_pages * k.shape[1]
    seqlen_q, seqlen_k = q.shape[1], capacity
    if is_equal:
        _check_seqlens((("seqlen of q", seqlen_q), ("seqlen of k and v", seqlen_k)))
    elif is_packed:
        keys = "total length of k" if block_table is None else "capacity of a row of block_table"
        _check_seqlens((("total length of q", seqlen_q), (keys, capacity)))
        seqlen_q = min(seqlen_q, count("max_seqlen_q", max_seqlen_q))
        seqlen_k = min(capacity, count("max_seqlen_k", max_seqlen_k))
    else:
        _check_seqlens((("seqlen of q", seqlen_q), ("capacity of a cache", capacity)))
        if block_table is None and not chosen_caches and k.shape[0] < sequences:
            raise ValueError(
                f"k_cache and v_cache hold {k.shape[0]} caches, but q has batch {sequences}; "
                "expected one for each sequence, or cache_batch_idx"
            )
        if new_keys > capacity:
            raise ValueError(
                f"k and v append {new_keys} rows to each cache, but a cache holds {capacity}"
            )
    if q_offset is None:
        q_offset = seqlen_k - seqlen_q if is_equal else 0
    elif not causal and score is None:
        raise ValueError(NOTHING_TO_PLACE)
    out_shape = (*q.shape[:3], v.shape[3])
    out_dtypes = FLOAT8_OUTPUTS if is_float8 else (q.dtype,)
    if out is None:
        out = ArraySpec.contiguous(out_shape, out_dtypes[0])
    _check_out(out, out_shape, out_dtypes)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[3])
    packed_k = is_packed and block_table is None
    return Problem(
        dtype=q.dtype,
        batch=sequences,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=q.shape[2],
        heads_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        causal=bool(causal),
        q_offset=_offset(integer("q_offset", q_offset), seqlen_q, seqlen_k, causal, score),
        softmax_scale=_scale(softmax_scale, q.dtype),
        tensors=Tensors(
            q=tensor_of(q, is_packed=is_packed),
            k=tensor_of(k, is_packed=packed_k),
            v=tensor_of(v, is_packed=packed_k),
            out=tensor_of(out, is_packed=is_packed),
        ),
        layout=Layout(
            kind=kind,
            total_q=q.shape[1] if is_packed else 0,
            total_k=k.shape[1] if packed_k else 0,
            caches=k.shape[0] if not is_packed and block_table is None else 0,
            page_size=k.shape[1] if block_table is not None else 0,
            pages=k.shape[0] if block_table is not None else 0,
            max_pages=max_pages,
            block_table_stride=table_stride,
            new_keys=new_keys,
            packed_new=packed_new,
            num_splits=_splits(num_splits, batch_invariant),
            batch_invariant=bool(batch_invariant),
        ),
        score=score,
        scales=Scales() if is_float8 and scales is None else scales,
        values_in_keys=values_in_keys,
    )


def _offset(
    q_offset: int, seqlen_q: int, seqlen_k: int, causal: bool, score: ScoreSpec | None
) -> int:
    if score is None:
        return max(-seqlen_q, min(q_offset, seqlen_k)) if causal else 0
    if abs(q_offset) > MAX_SEQLEN:
        raise ValueError(f"q_offset is {q_offset}; expected -{MAX_SEQLEN} to {MAX_SEQLEN}")
    return q_offset


def make_contiguous_problem(
    *,
    dtype: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    head_dim_v: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    q_offset: int | None = None,
) -> Problem:
    """`make_problem` for new contiguous arrays of the given sizes."""
    return make_problem(
        ArraySpec.contiguous((batch, seqlen_q, heads_q, head_dim), dtype),
        ArraySpec.contiguous((batch, seqlen_k, heads_kv, head_dim), dtype),
        ArraySpec.contiguous((batch, seqlen_k, heads_kv, head_dim_v), dtype),
        causal=causal,
        softmax_scale=softmax_scale,
        q_offset=q_offset,
    )


def _splits(num_splits: int, batch_invariant: bool) -> int | None:
    number = integer("num_splits", num_splits)
    if not 0 <= number <= MAX_SPLITS:
        raise ValueError(
            f"num_splits is {number}; expected 1 to {MAX_SPLITS}, or 0 to have it chosen"
        )
    if not batch_invariant:
        return number or None
    if number > 1:
        raise ValueError(
            f"num_splits is {number}, but batch_invariant=True does not split keys; pass 0 or 1"
        )
    return 1


def _scale(value: float, dtype: str) -> float:
    scale = finite("softmax_scale", value)
    kept_in = "float64" if dtype == "float64" else "float32"
    if abs(scale) > _LARGEST_SCALE[kept_in]:
        raise ValueError(
            f"softmax_scale is {scale:g}; expected a magnitude of at most "
            f"{_LARGEST_SCALE[kept_in]:.3g}, as scores of {dtype} arrays are kept in {kept_in}"
        )
    return scale


def _check_dtypes(
    q: ArraySpec, k: ArraySpec, v: ArraySpec, names: tuple[str, str], *, is_quantized: bool
) -> None:
    more = tuple(LARGEST_QUANTIZED) if is_quantized else ()
    for name, spec, dtypes in (
        ("q", q, DTYPES),
        (names[0], k, DTYPES + more),
        (names[1], v, DTYPES + more),
    ):
        if spec.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {spec.dtype}; expected one of {', '.join(dtypes)}")
    if is_quantized:
        if k.dtype != v.dtype:
            raise TypeError(
                f"{' and '.join(names)} must have one dtype, but are {k.dtype} and {v.dtype}"
            )
    elif not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, {' and '.join(names)} must have one dtype, but are {q.dtype}, {k.dtype} and "
            f"{v.dtype}"
        )


def _check_float8(k: ArraySpec, v: ArraySpec) -> None:
    for name, spec in (("k", k), ("v", v)):
        if spec.dtype != FLOAT8:
            raise TypeError(f"{name} has dtype {spec.dtype}; expected {FLOAT8}, as q has")


def _check_batch(q: Shape, k: Shape, v: Shape) -> None:
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != q[0]:
            raise ValueError(f"{name} has batch {shape[0]}, but q has {q[0]}")
    if k[1] != v[1]:
        raise ValueError(f"k and v must have one seqlen, but have {k[1]} and {v[1]}")


def _check_heads_and_dims(
    q: Shape, k: Shape, v: Shape, names: tuple[str, str], layout: str | None
) -> None:
    both = " and ".join(names)
    if k[3] != q[3]:
        raise ValueError(f"{names[0]} has head_dim {k[3]}, but q has {q[3]}")
    if k[2] != v[2]:
        raise ValueError(f"{both} must have one number of heads, but have {k[2]} and {v[2]}")
    if k[2] == 0:
        raise ValueError(f"{both} have no heads; expected at least 1")
    if q[2] % k[2]:
        instead = if_swapped(q[1:3], k[1:3], layout) if k[1] == v[1] else ""
        raise ValueError(
            f"q has {q[2]} heads; expected a multiple of the {k[2]} heads of {both}{instead}"
        )
    for name, dim in ((f"q and {names[0]}", q[3]), (names[1], v[3])):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim of {name} is {dim}; expected 1 to {MAX_HEAD_DIM}")


def if_swapped(q: tuple[int, ...], k: tuple[int, ...], layout: str | None) -> str:
    """Return what to do about heads that fit if heads and seqlen are swapped, else nothing.

    Parameters
    ----------
    q, k
        Their lengths as (seqlen, heads), which do not fit.
    layout
        That the caller named; None for arrays that have but one.
    """
    if not k[0] or q[0] % k[0]:
        return ""
    if layout is None:
        return "; if heads stand before the rows, pass q.swapaxes(-3, -2), and keys and values so"
    axes, other = ("heads, seqlen", "bhsd") if layout == "bshd" else ("seqlen, heads", "bshd")
    return f'; arrays (batch, {axes}, head_dim) need layout="{other}"'


def _check_seqlens(seqlens: tuple[tuple[str, int], ...]) -> None:
    for name, seqlen in seqlens:
        if seqlen > MAX_SEQLEN:
            raise ValueError(f"{name} is {seqlen}; expected at most {MAX_SEQLEN}")


def _check_places(
    k: Shape, v: Shape, names: tuple[str, str], *, is_packed: bool, is_paged: bool
) -> None:
    """Raise ValueError unless k and v have places for the same rows."""
    both = " and ".join(names)
    rows = "page_size" if is_paged else "total length" if is_packed else "seqlen"
    places = f"number of {'pages' if is_paged else 'caches'}"
    for axis, what in ((0, places), (1, rows)):
        if k[axis] != v[axis]:
            raise ValueError(f"{both} must have one {what}, but have {k[axis]} and {v[axis]}")
    check_count(f"{places} in {both}", k[0])
    if is_paged and k[1] == 0:
        raise ValueError(f"{both} have pages of 0 rows; expected at least 1")


def _check_out(out: ArraySpec, shape: tuple[int, int, int, int], dtypes: tuple[str, ...]) -> None:
    if out.dtype not in dtypes:
        why = "as q has" if len(dtypes) == 1 else "of q, k and v of float8"
        raise TypeError(f"out has dtype {out.dtype}; expected {' or '.join(dtypes)}, {why}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; expected {shape}")
    check_no_self_overlap("out", out)
