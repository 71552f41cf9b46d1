"""Description of one attention call, validated once, without arrays and pointers."""

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

UNUSED_Q_OFFSET = (
    "q_offset is for a causal mask, a window or another modification; pass causal=True or leave "
    "q_offset out"
)
MAX_HEAD_DIM = 576
# Kernels hold positions in 32 bits: an offset can double them, and a tile can extend past the end.
MAX_SEQLEN = 2**30 - 2**10
# Largest magnitude of a scale for which float32 surely holds the scaled scores: those of all
# float16 inputs, and scores of other inputs below 5e33.
HUGE_SCALE = 2.0**16

# Largest magnitude of a softmax scale. Its product with log2(e), which kernels use, still fits the
# type of the scores.
_LARGEST_SCALE = {"float32": 2.0**127, "float64": 2.0**1023}

# Statistics of query rows that a forward call can return, each an array of the shape and dtype of
# lse: the largest score of a row, and the entropy of its weights.
STATISTICS = ("max_logits", "entropy")
# Statistics of a row that attends to no key.
EMPTY_ROW = {"max_logits": -math.inf, "entropy": 0.0}

# Largest number of KV splits: more thread blocks than any GPU runs at once.
MAX_SPLITS = 2**16 - 1


@dataclass(frozen=True)
class Problem:
    """One attention problem: forward, or of another `direction`.

    Attributes
    ----------
    dtype
        Name of the dtype of q, k, v and out, one of `DTYPES`; a KV cache may have an 8-bit dtype.
        `FLOAT8` is the dtype of q, k and v only, and out then has one of `FLOAT8_OUTPUTS`.
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v
        Sizes of the arrays; heads_q is a multiple of heads_kv.
    causal
        Whether query i attends only to the keys j <= i + q_offset.
    q_offset
        Position of the first query among the keys, for dense batches. Without modifications it is
        clamped to [-seqlen_q, seqlen_k], beyond which it has no effect, and is 0 if not causal.
    softmax_scale
        Factor by which the products of queries and keys are multiplied.
    tensors
        Dtypes, strides and alignments of q, k, v and out, by name. The first stride is 0 for packed
        arrays, and the stride of a page for paged arrays.
    layout
        Layout of the sequences. If lengths differ, seqlen_q and seqlen_k are upper bounds, and the
        causal mask of each sequence is aligned at its bottom right.
    score
        Mask and score modifications, or None.
    scales
        Strides of the scales of an 8-bit cache or of float8 inputs; None for other dtypes.
    values_in_keys
        Whether each value is the first head_dim_v columns of its key, in the same memory. v is then
        an ordinary view of k, so a kernel may ignore this.
    shares_gpu
        Whether other kernels run at the same time. Thread blocks then do not get equal fractions of
        the work, because those that start late would delay the end.
    gradient
        Gradients that a backward call computes, or None for other calls. A backward problem has
        the tensors dout, dq, dk and dv as well.
    moves
        Names of those of q, k and v that have a tangent, for a call that computes the tangent of
        out; empty for other calls. Such a problem also has the tensors of these tangents and
        out_tangent.
    statistics
        Names of the row statistics that a forward call returns, in the order of `STATISTICS`.
    received
        What the sums of weights over queries are for, "heads" (query heads) or "groups" (the query
        heads of a KV head together); empty for a call that does not compute these sums.
    discards_out
        Whether only the log-sum-exp of a forward call is needed, so that out may stay unwritten.
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
    moves: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    received: str = ""
    discards_out: bool = False

    @property
    def gradient_spec(self) -> GradientSpec:
        """The `gradient` of a backward problem."""
        assert self.gradient is not None
        return self.gradient

    @property
    def direction(self) -> str:
        """Direction of the computation, one of the keys of `cupy_flash.families.FAMILIES`."""
        if self.received:
            return "received"
        if self.moves:
            return "tangent"
        if self.discards_out:
            return "lse"
        return "forward" if self.gradient is None else "backward"

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensors that are written."""
        if self.moves:
            return ("out_tangent",)
        if self.received:
            return ()
        if self.gradient is None:
            return ("out",)
        return tuple(name for name in ("dq", "dk", "dv") if name in self.tensors)

    @functools.cached_property
    def alignment(self) -> int:
        """Smallest row alignment of the tensors that are read, in bytes: a power of two to 16."""
        written = self.written
        return min(t.alignment for name, t in self.tensors.items() if name not in written)

    @property
    def out_alignment(self) -> int:
        """Smallest row alignment of the tensors that are written, in bytes."""
        return min((self.tensors[name].alignment for name in self.written), default=MAX_ALIGNMENT)

    def aligned(self, inputs: int, out: int | None = None) -> Problem:
        """Return the problem with rows aligned to `inputs` bytes, and written rows to `out`."""
        bytes_of = dict.fromkeys(self.tensors, inputs)
        bytes_of |= dict.fromkeys(self.written, out or self.out_alignment)
        tensors = {n: t._replace(alignment=bytes_of[n]) for n, t in self.tensors.items()}
        return dataclasses.replace(self, tensors=Tensors(**tensors))

    @property
    def itemsize(self) -> int:
        """Size of an element of `dtype`, in bytes."""
        return ITEMSIZE[self.dtype]

    @property
    def is_float8(self) -> bool:
        """Whether q, k and v are float8. False if only a KV cache is."""
        return self.dtype == FLOAT8

    @property
    def out_dtype(self) -> str:
        """Name of the dtype of out, or of the forward call's out in a backward problem."""
        return self.tensors["out"].dtype if self.is_float8 else self.dtype

    @property
    def lse_dtype(self) -> str:
        """Name of the dtype of the log-sum-exp, which is that of the accumulated sums."""
        return "float64" if self.dtype == "float64" else "float32"

    def shape_of(self, name: str) -> Shape:
        """Return the shape of q, k, v or out and of its gradient; packed arrays have batch 1."""
        layout = self.layout
        has_query_rows = name in ("q", "out")
        dim = self.head_dim if name in ("q", "k") else self.head_dim_v
        if has_query_rows:
            rows = (1, layout.total_q) if layout.packed_q else (self.batch, self.seqlen_q)
        else:
            rows = (1, layout.total_k) if layout.packed_k else (self.batch, self.seqlen_k)
        return (*rows, self.heads_q if has_query_rows else self.heads_kv, dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp."""
        if self.layout.packed_q:
            return self.heads_q, self.layout.total_q
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def rows(self) -> int:
        """Number of query rows, over the whole batch and all heads."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the result of a row may depend on its own sequence only."""
        return self.layout.batch_invariant

    @property
    def has_huge_scale(self) -> bool:
        """Whether scaling may make scores of usual magnitude infinite.

        A finite score that becomes -inf by scaling gives NaN, as in the plain formula, if the
        kernel can distinguish it from a masked score.
        """
        return abs(self.softmax_scale) > HUGE_SCALE

    @property
    def score_factor(self) -> tuple[tuple[int, int], float]:
        """Softmax scale as ((sign, shift), number), which means sign * 2**-shift * number.

        Kernels are compiled for sign and shift; the positive number is an argument. A shift keeps
        the number in the normal range of the scores' type. Where that fails, the sign is 0.
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
        """Mask by position; if lengths differ, that of a sequence with the maximum lengths."""
        mask = Mask(self.seqlen_q, self.seqlen_k, self.causal, self.q_offset)
        if self.score is None:
            return mask
        return mask._replace(left=self.score.left, right=self.score.right)

    @property
    def is_local(self) -> bool:
        """Whether a causal mask or a window limits the keys of a query by its position."""
        score = self.score
        has_window = score is not None and (score.left is not None or score.right is not None)
        return self.causal or has_window

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element, so that no computation is needed."""
        return self.rows == 0

    def flops(self) -> float:
        """Return the number of floating-point operations by the convention of the papers.

        It is 4 * batch * heads_q * seqlen_q * seqlen_k * head_dim, with the mean of both head dims.
        A causal problem counts only the fraction of visible pairs; for seqlen_q = seqlen_k that is
        half (FlashAttention-3 paper, section 4.1).
        """
        pairs = self.mask.pairs()
        return 2.0 * self.batch * self.heads_q * pairs * (self.head_dim + self.head_dim_v)


def make_problem(
    q: ArraySpec,
    k: ArraySpec,
    v: ArraySpec,
    out: ArraySpec | None = None,
    *,
    kind: str = "dense",
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
    """Check the arguments of a call and return them as a `Problem`.

    Contents of arrays that hold lengths and offsets are not checked.

    Parameters
    ----------
    q
        Spec of shape (batch, seqlen_q, heads_q, head_dim); packed (1, total_q, heads_q, head_dim).
    k, v
        Specs of shape (batch, seqlen_k, heads_kv, dim), where dim is head_dim and head_dim_v;
        packed (1, total_k, heads_kv, dim); for a KV cache (caches, seqlen_cache, heads_kv, dim);
        and with a block_table (pages, page_size, heads_kv, dim).
    out
        Spec of the output, in the form of q; None for a new contiguous output.
    kind
        Kind of batch, see `Layout.kind`.
    causal, softmax_scale, q_offset
        Options as in `cupy_flash.flash_attention`; q_offset is for dense batches only.
    batch, max_seqlen_q, max_seqlen_k
        Number of packed sequences, and largest number of query rows and of keys of one sequence.
    block_table
        Number of pages that a sequence may have, and stride of the table's rows in elements.
    chosen_caches
        Whether each sequence names its cache; otherwise sequence b has cache b.
    new_keys
        Number of rows to append to each sequence of a cache.
    packed_new
        Whether the rows to append are packed; new_keys is then 0.
    num_splits, batch_invariant
        Options as in `cupy_flash.flash_attention_with_kvcache`.
    score
        Mask and score modifications, or None.
    scales
        Strides of the scales of an 8-bit cache or of float8 inputs.
    values_in_keys
        Whether v is a view of the first columns of k.
    layout
        Argument ``layout`` of a dense call; used in error messages only.

    Raises
    ------
    TypeError
        If dtypes are not supported or differ, or an option has a wrong type.
    ValueError
        If shapes do not fit together, or a value is out of range.
    """
    is_dense, is_packed = kind in ("dense", "padded"), kind == "varlen"
    names = ("k_cache", "v_cache") if kind == "kvcache" else ("k", "v")
    is_float8 = q.dtype == FLOAT8 and kind == "dense"
    if is_float8:
        _check_float8(k, v)
    else:
        _check_dtypes(q, k, v, names, is_quantized=scales is not None)
    if is_dense:
        _check_batch(q.shape, k.shape, v.shape)
    _check_heads_and_dims(q.shape, k.shape, v.shape, names, layout if is_dense else None)
    if not is_dense:
        _check_memory_layout(
            k.shape, v.shape, names, is_packed=is_packed, is_paged=block_table is not None
        )
    sequences = q.shape[0] if batch is None else batch
    check_count("batch", sequences)
    check_bool("causal", causal)
    check_bool("batch_invariant", batch_invariant)
    max_pages, table_stride = block_table or (0, 0)
    capacity = k.shape[1] if block_table is None else max_pages * k.shape[1]
    seqlen_q, seqlen_k = q.shape[1], capacity
    if is_dense:
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
        q_offset = seqlen_k - seqlen_q if is_dense else 0
    elif not causal and score is None:
        raise ValueError(UNUSED_Q_OFFSET)
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
    """Return the problem that `make_problem` makes of new contiguous arrays of these sizes."""
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
            f"num_splits is {number}; expected 1 to {MAX_SPLITS}, or 0 for an automatic choice"
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
    """Return advice to swap axes if heads and seqlen would fit then, otherwise "".

    q and k are the lengths (seqlen, heads) that do not fit. `layout` is None if the function has no
    such argument.
    """
    if not k[0] or q[0] % k[0]:
        return ""
    if layout is None:
        return "; if heads come before rows, pass q.swapaxes(-3, -2), and likewise keys and values"
    axes, other = ("heads, seqlen", "bhsd") if layout == "bshd" else ("seqlen, heads", "bshd")
    return f'; arrays (batch, {axes}, head_dim) need layout="{other}"'


def _check_seqlens(seqlens: tuple[tuple[str, int], ...]) -> None:
    for name, seqlen in seqlens:
        if seqlen > MAX_SEQLEN:
            raise ValueError(f"{name} is {seqlen}; expected at most {MAX_SEQLEN}")


def _check_memory_layout(
    k: Shape, v: Shape, names: tuple[str, str], *, is_packed: bool, is_paged: bool
) -> None:
    """Raise ValueError unless k and v have the same numbers of caches, pages and rows."""
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
        why = "as q has" if len(dtypes) == 1 else "for float8 q, k and v"
        raise TypeError(f"out has dtype {out.dtype}; expected {' or '.join(dtypes)}, {why}")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; expected {shape}")
    check_no_self_overlap("out", out)
