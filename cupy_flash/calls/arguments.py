"""The arrays of an attention call, whichever public function it came by, and what they ask for.

Shapes, dtypes and options are checked for every kind of array; contents, which say where sequences
lie, only of arrays in host memory (`cupy_flash.calls.contents`).
"""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import (
    no_array,
    normalize,
    normalize_int32,
    normalize_out,
    normalize_scale,
    way_back,
)
from cupy_flash.arrays.strided import (
    address_of,
    array_module,
    dtype_name,
    is_aligned,
    kind_of,
    new_spec,
    require_4d,
    require_axes,
    require_dtype,
    require_float,
    require_in_place,
    require_int32,
    require_layout,
    require_shape,
    spec_of,
    to_bshd,
)
from cupy_flash.calls.modifiers import (
    NO_FUNCTIONS,
    Functions,
    Modifiers,
    canonical,
    read_modifiers,
    score_spec,
)
from cupy_flash.calls.options import Options
from cupy_flash.mods.shapes import Sizes, refuse_seqlens
from cupy_flash.problem.arrays import (
    DTYPES,
    FLOAT8,
    FLOAT8_OUTPUTS,
    LARGEST_QUANTIZED,
    ArraySpec,
    Scales,
    Strides,
    check_no_self_overlap,
)
from cupy_flash.problem.problem import Problem, make_problem
from cupy_flash.problem.score import ScoreSpec
from cupy_flash.problem.values import check_bool, check_count, count


class Arguments(NamedTuple):
    """Arrays of any attention call by the names that users know; None where there is none.

    With `k_cache` and `v_cache`, `k` and `v` are new rows, and `cache_seqlens` is None where an
    integer says the length of every cache.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None
    # In place of q, k and v.
    qkv: Any = None
    block_table: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    k_cache: Any = None
    v_cache: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    # Of caches of 8 bits, and of float8.
    k_scale: Any = None
    v_scale: Any = None
    q_scale: Any = None

    @property
    def like(self) -> Any:
        """The array whose kind results have."""
        return self.q if self.qkv is None else self.qkv

    @property
    def keys(self) -> Any:
        """What is attended to: the cache where there is one."""
        return self.k if self.k_cache is None else self.k_cache

    @property
    def values(self) -> Any:
        """Likewise."""
        return self.v if self.v_cache is None else self.v_cache

    def of_kind(self, kind: str) -> tuple[Any, ...]:
        """Those that calls of a kind may have: keys are made of no more."""
        return self[FIELDS[kind]]

    def names_of_kind(self, kind: str) -> tuple[str, ...]:
        """Their names."""
        names: tuple[str, ...] = self._fields
        return names[FIELDS[kind]] + names[_FIXED:]

    @property
    def of_modifiers(self) -> tuple[Any, ...]:
        """Arrays of modifications, see `with_modifiers`."""
        return self[_FIXED:]

    def parts_of_qkv(self, layout: str) -> Arguments:
        """The same with q, k and v as views of qkv, if that is what was given.

        Raises
        ------
        TypeError, ValueError
            For what is no array of queries, keys and values, or another layout.
        """
        if self.qkv is None:
            return self
        check_qkv(self.qkv, layout)
        q, k, v = (self.qkv[:, :, i] for i in range(3))
        return self._replace(q=q, k=k, v=v, qkv=None)


_FIXED = len(Arguments._fields)


def with_modifiers(arguments: Any, names: tuple[str, ...], arrays: tuple[Any, ...]) -> Any:
    """The same with arrays of modifications behind the others, as fields of their names."""
    # What `_make` comes to, in half of the time.
    return tuple.__new__(_record_with(arguments.__class__, names), arguments + arrays)


def modified(
    arguments: Any, modifications: Mapping[str, Any], *, backward: bool = False
) -> tuple[Any, Modifiers | None, Functions]:
    """The arrays with those of modifications, and what else these ask for; see `read_modifiers`."""
    found = read_modifiers(modifications, backward=backward)
    if found is None:
        return arguments, None, NO_FUNCTIONS
    modifiers, arrays, functions = found
    if arrays:
        arguments = with_modifiers(arguments, modifiers.names, arrays)
    return arguments, modifiers, functions


@functools.cache
def _record_with(record: Any, names: tuple[str, ...]) -> Any:
    fields = (*record._fields, *names)
    base = namedtuple(record.__name__, fields, defaults=(None,) * len(fields))  # type: ignore[misc]
    methods = {
        name: value
        for name, value in record.__dict__.items()
        if not name.startswith("_") and name not in record._fields
    }
    if record is Arguments:
        methods["of_kind"] = _of_kind_and_modifiers
    return type(record.__name__, (base,), {"__slots__": (), **methods})


def _of_kind_and_modifiers(self: Arguments, kind: str) -> tuple[Any, ...]:
    """`Arguments.of_kind`, of which calls without modifications need no more than a part."""
    return self[FIELDS[kind]] + self[_FIXED:]


# The fields that a call may have, by kind.
FIELDS = {
    "equal": slice(0, 4),
    "qkvpacked": slice(3, 5),
    "packed": slice(0, 9),
    "cached": slice(0, 17),
    "scaled": slice(0, 18),
}
_REQUIRED = {
    "equal": ("q", "k", "v"),
    "scaled": ("q", "k", "v"),
    "qkvpacked": ("qkv",),
    "packed": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "cached": ("q", "k_cache", "v_cache"),
}
_INT32 = frozenset(
    {
        "block_table",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "cache_seqlens",
        "cache_batch_idx",
        "prefix_lens",
        "seqlens_k",
    }
)
CACHES = ("k_cache", "v_cache")
SCALES = ("k_scale", "v_scale")
FLOAT8_SCALES = ("q_scale", *SCALES)
# Read in place or not at all: a copy of a cache would cost more than the call, and what is written
# is not to go to a copy.
IN_PLACE = (*CACHES, *FLOAT8_SCALES)


def written_arrays(problem: Problem) -> tuple[str, ...]:
    """Names of the arrays that a call writes."""
    if not problem.layout.new_keys:
        return ("out",)
    computed = problem.scales is not None and problem.scales.computed
    return (*CACHES, *(SCALES if computed else ()), "out")


def require_given(arguments: Arguments, kind: str) -> None:
    """Raise TypeError for an array that is None though calls of this kind need it."""
    for name in _REQUIRED[kind]:
        if getattr(arguments, name) is None:
            raise no_array(name, None)


def given_lengths(cache_seqlens: Any) -> tuple[int, Any | None]:
    """The one length of all caches, or 0 and an array of each one's."""
    if isinstance(cache_seqlens, (int, np.integer)) and not isinstance(cache_seqlens, bool):
        return operator.index(cache_seqlens), None
    if cache_seqlens is None or isinstance(cache_seqlens, (bool, float, str, np.generic)):
        raise TypeError(
            f"cache_seqlens is {cache_seqlens!r}; expected an integer or an int32 array of shape "
            "(batch,)"
        )
    return 0, cache_seqlens


def normalized(given: Any, written: tuple[str, ...] = ("out",)) -> tuple[Any, Callable[[Any], Any]]:
    """Every array as a NumPy or CuPy one, all of one kind, and the way back to the first's.

    Parameters
    ----------
    given
        `Arguments`, or another record of arrays.
    written
        Names of those that the call writes.

    Raises
    ------
    TypeError
        For what is no array, lies elsewhere than the first or is of a dtype that nothing reads.
    """
    first = given._fields[0]
    leading = normalize(first, given[0])
    convert = way_back(first, given[0])
    on_host = isinstance(leading, np.ndarray)
    found: dict[str, Any] = {first: leading}
    for name, array in zip(given._fields[1:], given[1:], strict=True):
        if array is None and name in given._field_defaults:
            continue
        if name in _INT32:
            found[name] = normalize_int32(name, array, on_host=on_host)
            continue
        if name in FLOAT8_SCALES:
            found[name] = normalize_scale(name, array, on_host=on_host)
        else:
            found[name] = (normalize_out if name in written else normalize)(name, array)
        if isinstance(found[name], np.ndarray) != on_host:
            host, device = (first, name) if on_host else (name, first)
            raise TypeError(f"{host} lies in host memory and {device} on a GPU; move one of them")
    return given._replace(**found), convert


def problem_of(arguments: Arguments, options: Options) -> Problem:
    """The problem that NumPy or CuPy arrays pose.

    Raises
    ------
    TypeError, ValueError
        For what no kernel computes; the message names the argument.
    """
    check_bool("return_lse", options.return_lse)
    for name in _INT32:
        if (array := getattr(arguments, name, None)) is not None:
            require_int32(name, array)
    return _PROBLEM_OF[options.kind](arguments, options)


def _score(
    arguments: Arguments, options: Options, dtype: str, *sizes: int, **more: int
) -> ScoreSpec | None:
    """What a kernel is made for of the call's modifications."""
    modifiers = options.modifiers
    if modifiers is None:
        return None
    found = Sizes(dtype, *sizes, **more)
    arrays = canonical(modifiers, arguments.of_modifiers, found)
    return score_spec(modifiers, arrays, found, causal=options.causal)


def sizes_of(problem: Problem, options: Options) -> Sizes:
    """Sizes that the modifications of a problem's call have to fit."""
    p = problem
    if not p.layout.packed_q:
        return Sizes(p.dtype, p.batch, p.heads_q, p.seqlen_q, p.seqlen_k)
    # As the call names them: a problem's are no longer than the arrays.
    seqlen_q = count("max_seqlen_q", options.max_seqlen_q)
    seqlen_k = count("max_seqlen_k", options.max_seqlen_k)
    return Sizes(p.dtype, p.batch, p.heads_q, seqlen_q, seqlen_k, p.layout.total_q)


def check_qkv(qkv: Any, layout: str) -> None:
    """Raise TypeError or ValueError for what is no array of queries, keys and values."""
    shape = getattr(qkv, "shape", None)
    if shape is None:
        raise TypeError(f"qkv is {kind_of(qkv)}; expected an array")
    if len(shape) != 5 or shape[2] != 3:
        raise ValueError(
            f"qkv has shape {tuple(shape)}; expected (batch, seqlen, 3, heads, head_dim)"
        )
    if layout != "bshd":
        raise ValueError(f"layout is {layout!r}; packed arrays are 'bshd'")


def _equal_problem(arguments: Arguments, options: Options) -> Problem:
    require_layout(options.layout)
    arrays = {"q": arguments.q, "k": arguments.k, "v": arguments.v}
    if arguments.out is not None:
        arrays["out"] = arguments.out
    is_float8 = dtype_name(arguments.q) == FLOAT8
    for name, array in arrays.items():
        require_4d(name, array)
        require_float(name, array, (*DTYPES, FLOAT8) if is_float8 else DTYPES)
    if arguments.out is not None:
        require_in_place("out", arguments.out)
    specs = {n: spec_of(to_bshd(a, options.layout), address_of(a)) for n, a in arrays.items()}
    if arguments.out is None:
        shape = (*arguments.q.shape[:3], arguments.v.shape[3])
        dtype = float8_output(options.out_dtype) if is_float8 else dtype_name(arguments.q)
        specs["out"] = new_spec(shape, options.layout, dtype)
    q, k = specs["q"], specs["k"]
    scales = _float8_scales(arguments, options, q, k)
    is_padded = getattr(arguments, "seqlens_k", None) is not None
    score = _score(arguments, options, q.dtype, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return make_problem(
        *(specs[name] for name in ("q", "k", "v", "out")),
        kind="padded" if is_padded else "equal",
        score=score,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        q_offset=options.q_offset,
        scales=scales,
        fast_accum=bool(options.fast_accum),
    )


def float8_output(dtype: str | None) -> str:
    """Which dtype an output of float8 has, where there is none yet.

    Raises
    ------
    ValueError
        For another than those of 16 bits.
    """
    if dtype is not None and dtype not in FLOAT8_OUTPUTS:
        raise ValueError(f"out_dtype is {dtype!r}; expected one of {', '.join(FLOAT8_OUTPUTS)}")
    return dtype or FLOAT8_OUTPUTS[0]


def _float8_scales(
    arguments: Arguments, options: Options, q: ArraySpec, k: ArraySpec
) -> Scales | None:
    """How the scales of float8 lie; None for other dtypes, which have none."""
    given = {name: getattr(arguments, name, None) for name in FLOAT8_SCALES}
    if q.dtype != FLOAT8:
        others = {"out_dtype": options.out_dtype, "fast_accum": options.fast_accum}
        for name, value in (given | others).items():
            if value is not None:
                raise ValueError(f"{name} is for q, k and v of {FLOAT8}; q is {q.dtype}")
        return None
    if options.modifiers is not None:
        raise ValueError(f"q is {q.dtype}, which is served without modifications only")
    if arguments.out is not None and options.out_dtype is not None:
        raise ValueError("out and out_dtype both say what the output is; pass one")
    strides = {
        name: _strides_of_scale(
            name,
            array,
            (q.shape[0], 1, (q if name == "q_scale" else k).shape[2]),
            "batch, 1, heads",
        )
        for name, array in given.items()
    }
    return Scales(strides["k_scale"], strides["v_scale"], q=strides["q_scale"])


def _packed_problem(arguments: Arguments, options: Options) -> Problem:
    q, k, v, out, _, block_table, cu_seqlens_q, cu_seqlens_k, seqused_k = arguments[:9]
    packed = "total length, heads and head_dim"
    require_axes("q", q, 3, packed)
    for name, array in (("k", k), ("v", v)):
        if block_table is None:
            require_axes(name, array, 3, packed)
        else:
            require_axes(name, array, 4, "pages, page_size, heads and head_dim, as of block_table")
    if out is not None:
        expected = (*q.shape[:2], v.shape[-1])
        require_shape("out", out, expected, "as q, but with the head_dim of v")
    require_axes("cu_seqlens_q", cu_seqlens_q, 1, "where each sequence begins, and the end")
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q is empty; expected batch + 1 integers, at least one")
    batch = cu_seqlens_q.shape[0] - 1
    require_shape("cu_seqlens_k", cu_seqlens_k, (batch + 1,), "as cu_seqlens_q")
    if seqused_k is not None:
        require_shape("seqused_k", seqused_k, (batch,), "one length for each sequence")
    refuse_seqlens(getattr(arguments, "seqlens_k", None), "seqused_k")
    table = _table(block_table, batch)
    max_seqlen_k = count("max_seqlen_k", options.max_seqlen_k)
    score = _score(
        arguments,
        options,
        dtype_name(q),
        batch,
        q.shape[1],
        count("max_seqlen_q", options.max_seqlen_q),
        max_seqlen_k,
        total_q=q.shape[0],
    )
    return make_problem(
        *_specs(arguments),
        kind="packed",
        score=score,
        batch=batch,
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k,
        block_table=table,
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
    )


def _cached_problem(arguments: Arguments, options: Options) -> Problem:
    """Where q is rotated, attention reads the contiguous array that it is rotated into."""
    q, block_table = arguments.q, arguments.block_table
    require_axes("q", q, 4, "batch, seqlen, heads and head_dim")
    batch = q.shape[0]
    first = "caches, seqlen" if block_table is None else "pages, page_size"
    for name in CACHES:
        require_axes(name, getattr(arguments, name), 4, f"{first}, heads and head_dim")
        require_in_place(name, getattr(arguments, name), ": a cache is not copied")
    if arguments.out is not None:
        require_axes("out", arguments.out, 4, "batch, seqlen, heads and head_dim")
    for name, array, meaning in (
        (
            "cache_seqlens",
            arguments.cache_seqlens,
            "one length for each sequence; where all have one, pass an integer",
        ),
        ("cache_batch_idx", arguments.cache_batch_idx, "one cache for each sequence"),
    ):
        if array is not None:
            require_shape(name, array, (batch,), meaning)
    if arguments.cache_batch_idx is not None and block_table is not None:
        raise ValueError("cache_batch_idx and block_table both say where a cache is; pass one")
    q_spec, k_spec, v_spec, out_spec = _specs(arguments)
    if arguments.rotary_cos is not None:
        q_spec = ArraySpec.contiguous(q_spec.shape, q_spec.dtype)
    refuse_seqlens(getattr(arguments, "seqlens_k", None), "cache_seqlens")
    table = _table(block_table, batch)
    capacity = k_spec.shape[1] * (1 if table is None else table[0])
    scales = _cache_scales(arguments, options, k_spec)
    heads_q, seqlen_q = q_spec.shape[2], q_spec.shape[1]
    problem = make_problem(
        q_spec,
        k_spec,
        v_spec,
        out_spec,
        kind="cached",
        score=_score(arguments, options, q_spec.dtype, batch, heads_q, seqlen_q, capacity),
        block_table=table,
        chosen_caches=arguments.cache_batch_idx is not None,
        new_keys=_seqlen_new(arguments.k, arguments.v),
        num_splits=options.num_splits,
        batch_invariant=options.batch_invariant,
        causal=options.causal,
        softmax_scale=options.softmax_scale,
        scales=scales,
    )
    _check_new_rows(arguments, problem)
    _check_rotary(arguments, options, problem)
    return problem


_PROBLEM_OF = {
    "equal": _equal_problem,
    "scaled": _equal_problem,
    "qkvpacked": _equal_problem,
    "packed": _packed_problem,
    "cached": _cached_problem,
}


def _specs(arguments: Arguments) -> tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec | None]:
    q, out = arguments.q, arguments.out
    k, v = ("k", "v") if arguments.k_cache is None else CACHES
    for name, array in (("q", q), (k, arguments.keys), (v, arguments.values), ("out", out)):
        if array is not None:
            more = LARGEST_QUANTIZED if name in CACHES else ()
            require_float(name, array, (*DTYPES, *more))
    if out is not None:
        require_in_place("out", out)
    inputs = (q, arguments.keys, arguments.values)
    q_spec, k_spec, v_spec = (spec_of(array, address_of(array)) for array in inputs)
    return q_spec, k_spec, v_spec, None if out is None else spec_of(out, address_of(out))


def _cache_scales(arguments: Arguments, options: Options, cache: ArraySpec) -> Scales | None:
    """How the scales of caches of 8 bits lie; None for others, which have none."""
    given = {name: getattr(arguments, name) for name in SCALES}
    computed = options.compute_scales
    dtypes = {dtype_name(getattr(arguments, name)) for name in CACHES}
    if not dtypes & LARGEST_QUANTIZED.keys():
        for name, array in given.items():
            if array is not None:
                raise ValueError(f"{name} is for caches of 8 bits; these are {cache.dtype}")
        if computed:
            raise ValueError(f"compute_scales is for caches of 8 bits; these are {cache.dtype}")
        return None
    if dtype_name(arguments.q) == "float64":
        raise TypeError(
            "q has dtype float64; caches of 8 bits are for float16, bfloat16 and float32"
        )
    shape = cache.shape[:3]
    axes = "caches or pages, their rows, and heads"
    strides = {name: _strides_of_scale(name, array, shape, axes) for name, array in given.items()}
    if computed:
        if arguments.k is None:
            raise ValueError("compute_scales is of the new rows; pass k and v with it")
        for name, array in given.items():
            if array is None or tuple(array.shape) != shape:
                found = "None" if array is None else f"of shape {tuple(array.shape)}"
                raise ValueError(
                    f"{name} is {found}; compute_scales writes one for each row and head, {shape}"
                )
            check_no_self_overlap(
                name, ArraySpec((*shape, 1), strides[name] or (0, 0, 0), "float32")
            )
    return Scales(strides["k_scale"], strides["v_scale"], computed)


def _strides_of_scale(
    name: str, array: Any | None, shape: tuple[int, ...], axes: str
) -> Strides | None:
    if array is None:
        return None
    require_dtype(name, array, ("float32",))
    try:
        block, row, head = array_module(array).broadcast_to(array, shape).strides
    except ValueError:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, which does not broadcast to {shape}: {axes}"
        ) from None
    size = array.itemsize
    odd = any(stride % size for stride in (block, row, head)) or not is_aligned(array)
    if odd and not isinstance(array, np.ndarray):
        raise ValueError(
            f"{name} lies at address {address_of(array):#x} with strides {array.strides}; expected "
            f"multiples of {size} bytes"
        )
    return block // size, row // size, head // size


def _table(block_table: Any | None, batch: int) -> tuple[int, int] | None:
    if block_table is None:
        return None
    require_axes("block_table", block_table, 2, "batch and pages of a sequence")
    if block_table.shape[0] != batch:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows; expected {batch}, one for each sequence"
        )
    return block_table.shape[1], block_table.strides[0] // block_table.itemsize


def _seqlen_new(k: Any | None, v: Any | None) -> int:
    if k is None and v is None:
        return 0
    if k is None or v is None:
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{given} is given and {missing} is not; pass both, or none to append")
    for name, array in (("k", k), ("v", v)):
        require_axes(name, array, 4, "batch, seqlen_new, heads and head_dim")
    return int(k.shape[1])


def _check_new_rows(arguments: Arguments, problem: Problem) -> None:
    if arguments.k is None:
        return
    for name, array, dim in (
        ("k", arguments.k, problem.head_dim),
        ("v", arguments.v, problem.head_dim_v),
    ):
        if dtype_name(array) != problem.dtype or not array.dtype.isnative:
            raise TypeError(f"{name} has dtype {array.dtype}; expected {problem.dtype}, as q has")
        expected = (problem.batch, arguments.k.shape[1], problem.heads_kv, dim)
        require_shape(name, array, expected, f"rows of {name}_cache for each sequence of q")
    if problem.layout.new_keys:
        for name in CACHES:
            cache = getattr(arguments, name)
            check_no_self_overlap(name, spec_of(cache, address_of(cache)))


def _check_rotary(arguments: Arguments, options: Options, problem: Problem) -> None:
    check_bool("rotary_interleaved", options.rotary_interleaved)
    cos, sin = arguments.rotary_cos, arguments.rotary_sin
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        given, missing = ("cos", "sin") if sin is None else ("sin", "cos")
        raise ValueError(f"rotary_{given} is given and rotary_{missing} is not; pass both or none")
    if arguments.k is None:
        raise ValueError("rotary_cos and rotary_sin rotate k and q; pass k and v with them")
    accumulator = "float64" if problem.dtype == "float64" else "float32"
    dtypes = tuple(dict.fromkeys((problem.dtype, accumulator)))
    for name, array in (("rotary_cos", cos), ("rotary_sin", sin)):
        require_axes(name, array, 2, "positions and rotary_dim / 2")
        if dtype_name(array) not in dtypes or not array.dtype.isnative:
            raise TypeError(
                f"{name} has dtype {array.dtype}; expected {' or '.join(dtypes)}, with q "
                f"{problem.dtype}"
            )
    require_shape("rotary_sin", sin, tuple(cos.shape), "as rotary_cos")
    if cos.dtype != sin.dtype:
        raise TypeError(f"rotary_sin has dtype {sin.dtype}; expected {cos.dtype}, as rotary_cos")
    rows, half = cos.shape
    check_count("number of rows of rotary_cos", rows)
    if not 2 <= 2 * half <= problem.head_dim:
        raise ValueError(
            f"rotary_cos has {half} columns for a rotary_dim of {2 * half}; expected a rotary_dim "
            f"of 2 to {problem.head_dim}, the head_dim"
        )
    least = max(positions(arguments, problem), 1)
    if rows < least:
        raise ValueError(
            f"rotary_cos has {rows} rows; expected at least {least}, one for each position"
        )


def positions(arguments: Arguments, problem: Problem) -> int:
    """How many positions are rotated to, from the length of the cache on."""
    q_rows = 0 if problem.is_empty else problem.seqlen_q if problem.causal else 1
    return max(q_rows, int(arguments.k.shape[1]))
