"""Records of the arrays of forward and backward calls, and their checks.

Positions of their fields occur only in this module; other modules use names of fields, or `span`.
"""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.kinds import (
    is_number_or_list,
    no_array,
    normalize,
    normalize_int32,
    normalize_out,
    normalize_scale,
    result_converter,
    seed_and_offset,
    vector,
)
from cupy_flash.arrays.strided import kind_of
from cupy_flash.calls.check.modifications import (
    NO_USER_MODS,
    ModificationKey,
    UserMods,
    parse_modifications,
)
from cupy_flash.calls.options import Options
from cupy_flash.mods.keywords import DROPOUT_SEED, VECTORS
from cupy_flash.problem.problem import Problem


class Arguments(NamedTuple):
    """Arrays of any attention call under their public names; None for an absent array.

    With `k_cache` and `v_cache`, `k` and `v` are the new rows, and `cache_seqlens` is None if one
    integer gives the length of every cached sequence.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None
    # One array of queries, keys and values, given instead of q, k and v.
    qkv: Any = None
    block_table: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    # Scales of 8-bit keys and values.
    k_scale: Any = None
    v_scale: Any = None
    k_cache: Any = None
    v_cache: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_seqlens: Any = None
    # Offsets of the sequences in packed new rows.
    cu_seqlens_k_new: Any = None
    # Scale of float8 queries.
    q_scale: Any = None

    @property
    def like(self) -> Any:
        """Array that determines the array type of the results."""
        return self.q if self.qkv is None else self.qkv

    @property
    def keys(self) -> Any:
        """Keys that queries attend to: the cache if there is one, otherwise k."""
        return self.k if self.k_cache is None else self.k_cache

    def values_of(self, options: Options) -> Any:
        """Return the values that belong to `keys`; a view of the keys if these hold the values."""
        if options.head_dim_v is not None:
            return self.keys[..., : options.head_dim_v]
        return self.v if self.v_cache is None else self.v_cache

    @property
    def forward(self) -> Arguments:
        """Record of the arrays of the forward call, which is this record itself."""
        return self

    def key_arrays(self, options: Options) -> tuple[Any, ...]:
        """Return the arrays that calls of this kind may have; the call key describes only these."""
        return self[FIELDS[options.kind]]

    def key_names(self, options: Options) -> tuple[str, ...]:
        """Return the names of the result of `key_arrays`."""
        names: tuple[str, ...] = self._fields
        return names[FIELDS[options.kind]] + names[_FIXED:]

    @property
    def modification_arrays(self) -> tuple[Any, ...]:
        """Arrays of modifications, which `append_arrays` has appended."""
        return self[_FIXED:]

    def written(self, options: Options) -> dict[str, Any]:
        """Return the arrays that a call writes: out, then the caches and scales of an append."""
        written = {"out": self.out}
        if options.kind == "kvcache" and self.k is not None:
            names = IN_PLACE if options.compute_scales else CACHES
            written |= {name: getattr(self, name) for name in names}
        return written

    def require_given(self, options: Options) -> None:
        """Raise TypeError if an array is None that calls of this kind need.

        Raise ValueError if values are given although `head_dim_v` says that the keys hold them.
        """
        in_keys = options.head_dim_v is not None
        for name in _REQUIRED[options.kind]:
            if getattr(self, name) is None and not (in_keys and name in _VALUE_ARGUMENTS):
                raise TypeError(f"{no_array(name, None)}{_HINTS.get(name, '')}")
        for name in _VALUE_ARGUMENTS if in_keys else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is given, but with head_dim_v k_cache holds the values; pass only one"
                )

    def parts_of_qkv(self, layout: str) -> Arguments:
        """Return the arguments with q, k and v as views of qkv, if qkv is given.

        Raises
        ------
        TypeError, ValueError
            If qkv is not an array of queries, keys and values, or the layout is not "bshd".
        """
        if self.qkv is None:
            return self
        check_qkv(self.qkv, layout)
        q, k, v = parts_of(self.qkv)
        return self._replace(q=q, k=k, v=v, qkv=None)


class GradientArguments(NamedTuple):
    """Arrays of a backward call under their public names; None for an absent array."""

    # The arrays from q to lse are required; a plan needs only q, k and v.
    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None
    dout: Any = None
    lse: Any = None
    dlse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None

    def key_arrays(self, options: Options) -> tuple[Any, ...]:
        """Return all arrays: backward calls of every kind have the same."""
        return self

    def written(self, options: Options) -> dict[str, Any]:
        """Return the arrays that the gradients of q, k and v are written to."""
        return {name: getattr(self, name) for name in WRITTEN_GRADIENTS}

    def require_given(self, options: Options) -> None:
        """Raise TypeError if an array that every backward call needs is None."""
        require_arrays(self, _REQUIRED_FOR_GRADIENTS)

    @property
    def like(self) -> Any:
        """Array that determines the array type of the results."""
        return self.q

    @property
    def modification_arrays(self) -> tuple[Any, ...]:
        """Arrays of modifications, which `append_arrays` has appended."""
        return self[_FIXED_OF_GRADIENTS:]

    @property
    def forward(self) -> Arguments:
        """Record of the arrays of the forward call."""
        plain = Arguments(
            q=self.q,
            k=self.k,
            v=self.v,
            out=self.out,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seqused_k=self.seqused_k,
        )
        names = self._fields[_FIXED_OF_GRADIENTS:]
        return append_arrays(plain, names, self.modification_arrays) if names else plain


class TangentArguments(NamedTuple):
    """Arrays of a call that computes tangents; None for an absent array.

    `out` and `lse` are results of the forward call.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    out: Any = None
    lse: Any = None
    q_tangent: Any = None
    k_tangent: Any = None
    v_tangent: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None

    def key_arrays(self, options: Options) -> tuple[Any, ...]:
        """Return all arrays."""
        return self

    def written(self, options: Options) -> dict[str, Any]:
        """Return no array: all results are new."""
        return {}

    def require_given(self, options: Options) -> None:
        """Raise TypeError if an array that every such call needs is None."""
        require_arrays(self, _REQUIRED_FOR_TANGENTS)

    @property
    def like(self) -> Any:
        """Array that determines the array type of the results."""
        return self.q

    @property
    def modification_arrays(self) -> tuple[Any, ...]:
        """Arrays of modifications, which `append_arrays` has appended."""
        return self[_FIXED_OF_TANGENTS:]

    @property
    def forward(self) -> Arguments:
        """Record of the arrays of the forward call."""
        plain = Arguments(
            q=self.q,
            k=self.k,
            v=self.v,
            out=self.out,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            seqused_k=self.seqused_k,
        )
        names = self._fields[_FIXED_OF_TANGENTS:]
        return append_arrays(plain, names, self.modification_arrays) if names else plain


class ReceivedArguments(NamedTuple):
    """Arrays of a call that sums attention weights over queries; None for an absent array.

    `lse` is a result of the forward call. The keys are either `k` or `k_cache`. `cache_seqlens` is
    None if one integer gives the length of every cached sequence.
    """

    q: Any = None
    k: Any = None
    lse: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    block_table: Any = None
    k_scale: Any = None
    k_cache: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None

    def key_arrays(self, options: Options) -> tuple[Any, ...]:
        """Return all arrays."""
        return self

    def written(self, options: Options) -> dict[str, Any]:
        """Return no array: the result is new."""
        return {}

    def require_given(self, options: Options) -> None:
        """Raise TypeError if an array other than lse is None that calls of this kind need."""
        names = (name for name in _REQUIRED[options.kind] if name not in _VALUE_ARGUMENTS)
        require_arrays(self, names)

    @property
    def like(self) -> Any:
        """Array that determines the array type of the result."""
        return self.q

    @property
    def modification_arrays(self) -> tuple[Any, ...]:
        """Arrays of modifications, which `append_arrays` has appended."""
        return self[_FIXED_OF_RECEIVED:]

    @property
    def forward(self) -> Arguments:
        """Record of the arrays of a forward call, whose values are the keys."""
        given = {name: getattr(self, name) for name in ReceivedArguments._fields if name != "lse"}
        plain = Arguments(**given, v=self.k, v_cache=self.k_cache)
        names = self._fields[_FIXED_OF_RECEIVED:]
        return append_arrays(plain, names, self.modification_arrays) if names else plain


# Number of fields of each record without the arrays of modifications, which are appended.
_FIXED, _FIXED_OF_GRADIENTS = len(Arguments._fields), len(GradientArguments._fields)
_FIXED_OF_TANGENTS = len(TangentArguments._fields)
_FIXED_OF_RECEIVED = len(ReceivedArguments._fields)


def in_field_order(
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    gradients: tuple[Any, ...],
    lengths: tuple[Any, ...],
    absent: Any = None,
) -> tuple[Any, ...]:
    """Return values in the order of the fields of `GradientArguments`.

    `inputs` are those of q, k and v, `results` those of out and lse, and `gradients` those of dout
    and dlse. The value of dq, dk and dv is `absent`.
    """
    (out, lse), (dout, dlse) = results, gradients
    return (*inputs, out, dout, lse, dlse, absent, absent, absent, *lengths)


def call_arrays(arguments: Any) -> dict[str, Any]:
    """Return the arrays of a record that are not None, by name, without those of modifications."""
    count = len(arguments) - len(arguments.modification_arrays)
    names = arguments._fields[:count]
    return {n: x for n, x in zip(names, arguments, strict=False) if x is not None}


def append_arrays(arguments: Any, names: tuple[str, ...], arrays: tuple[Any, ...]) -> Any:
    """Return the record with the arrays of modifications appended, as fields of these names."""
    # Equivalent to `_make`, in half the time.
    return tuple.__new__(_record_with(arguments.__class__, names), arguments + arrays)


def with_modifications(
    arguments: Any, modifications: Mapping[str, Any], *, backward: bool = False
) -> tuple[Any, ModificationKey | None, UserMods]:
    """Return the record with the arrays of modifications appended, their key, and `UserMods`."""
    result = parse_modifications(modifications, backward=backward)
    if result is None:
        return arguments, None, NO_USER_MODS
    mod_key, arrays, user_mods = result
    if arrays:
        arguments = append_arrays(arguments, mod_key.names, arrays)
    return arguments, mod_key, user_mods


# The cache is bounded, because users choose the names of captures.
@functools.lru_cache(maxsize=1024)
def _record_with(record: Any, names: tuple[str, ...]) -> Any:
    fields = (*record._fields, *names)
    base = namedtuple(record.__name__, fields, defaults=(None,) * len(fields))  # type: ignore[misc]
    methods = {
        name: value
        for name, value in record.__dict__.items()
        if not name.startswith("_") and name not in record._fields
    }
    if record is Arguments:
        methods["key_arrays"] = _key_arrays_with_modifications
    return type(record.__name__, (base,), {"__slots__": (), **methods})


def _key_arrays_with_modifications(self: Arguments, options: Options) -> tuple[Any, ...]:
    """Return `Arguments.key_arrays` with the arrays of modifications appended."""
    return self[FIELDS[options.kind]] + self[_FIXED:]


def span(record: Any, first: str, last: str) -> slice:
    """Return the slice of a record type's fields from `first` to `last`, both included."""
    return slice(record._fields.index(first), record._fields.index(last) + 1)


# Slice of the fields of `Arguments` that a call of each kind may have.
FIELDS = {
    "dense": span(Arguments, "q", "out"),
    "qkvpacked": span(Arguments, "out", "qkv"),
    "varlen": span(Arguments, "q", "v_scale"),
    "kvcache": span(Arguments, "q", "cu_seqlens_k_new"),
    "scaled": span(Arguments, "q", "q_scale"),
}
_REQUIRED = {
    "dense": ("q", "k", "v"),
    "scaled": ("q", "k", "v"),
    "qkvpacked": ("qkv",),
    "varlen": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "kvcache": ("q", "k_cache", "v_cache"),
}
_REQUIRED_FOR_GRADIENTS = ("q", "k", "v", "out", "dout", "lse")
_REQUIRED_FOR_TANGENTS = ("q", "k", "v", "out", "lse")
WRITTEN_GRADIENTS = ("dq", "dk", "dv")
INT32 = frozenset(
    {
        "block_table",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "cache_seqlens",
        "cache_batch_idx",
        "rotary_seqlens",
        "cu_seqlens_k_new",
        "prefix_lens",
        "seqlens_k",
        "q_offset",
        "seqused_q",
        "cache_leftpad",
    }
)
CACHES = ("k_cache", "v_cache")
SCALES = ("k_scale", "v_scale")
FLOAT8_SCALES = ("q_scale", *SCALES)
# Arrays that are never copied: a copy of a cache would take longer than the call, and arrays that a
# call writes must be written in place.
IN_PLACE = (*CACHES, *FLOAT8_SCALES)


def written_arrays(problem: Problem) -> tuple[str, ...]:
    """Return the names of the arrays that a call writes."""
    if not problem.layout.appends:
        return ("out",)
    computed = problem.scales is not None and problem.scales.computed
    first = slice(1) if problem.values_in_keys else slice(2)
    return (*CACHES[first], *(SCALES[first] if computed else ()), "out")


# Hints of the error messages for arguments that are None.
_HINTS = {
    "v_cache": "; if the values are the first columns of the keys, pass their number as head_dim_v",
    "cu_seqlens_k": "; it may be None with both block_table and seqused_k",
}
# Arrays that must be None if the keys hold the values.
_VALUE_ARGUMENTS = ("v_cache", "v", "v_scale")


def require_arrays(arguments: Any, names: Iterable[str]) -> None:
    """Raise TypeError if one of the arrays with these names is None."""
    for name in names:
        if getattr(arguments, name) is None:
            raise no_array(name, None)


def given_lengths(cache_seqlens: Any) -> tuple[int, Any | None]:
    """Return the common length of all caches and None, or 0 and the array of their lengths."""
    if isinstance(cache_seqlens, (int, np.integer)) and not isinstance(cache_seqlens, bool):
        return operator.index(cache_seqlens), None
    if cache_seqlens is None or isinstance(cache_seqlens, (bool, float, str, np.generic)):
        raise TypeError(
            f"cache_seqlens is {cache_seqlens!r}; expected an integer or an int32 array of shape "
            "(batch,)"
        )
    return 0, cache_seqlens


def normalized(given: Any, written: tuple[str, ...] = ("out",)) -> tuple[Any, Callable[[Any], Any]]:
    """Return the record as NumPy or CuPy arrays, and a function that converts results back.

    Parameters
    ----------
    given
        `Arguments`, or another record of arrays. The first one determines the type of results.
    written
        Names of the arrays that the call writes.

    Raises
    ------
    TypeError
        If a value is not an array, has an unsupported dtype, or is on another device than the rest.
    """
    arrays = iter(zip(given._fields, given, strict=True))
    first, like = next(arrays)
    leading, convert = normalize(first, like), result_converter(first, like)
    on_host = isinstance(leading, np.ndarray)
    result: dict[str, Any] = {first: leading}
    for name, array in arrays:
        if array is None and name in given._field_defaults:
            continue
        if name in INT32:
            result[name] = normalize_int32(name, array, on_host=on_host)
            continue
        if name in VECTORS and is_number_or_list(array):
            result[name] = vector(name, array, on_host=on_host)
            continue
        if name == DROPOUT_SEED and is_number_or_list(array):
            result[name] = seed_and_offset(name, array, on_host=on_host)
            continue
        if name in FLOAT8_SCALES:
            result[name] = normalize_scale(name, array, on_host=on_host)
        elif name in written:
            result[name] = normalize_out(name, array)
        else:
            result[name] = normalize(name, array, is_written=name in CACHES)
        if isinstance(result[name], np.ndarray) != on_host:
            host, device = (first, name) if on_host else (name, first)
            raise TypeError(f"{host} lies in host memory and {device} on a GPU; move one of them")
    return given._replace(**result), convert


def check_qkv(qkv: Any, layout: str) -> None:
    """Raise TypeError or ValueError unless `qkv` is an array of queries, keys and values."""
    check_packed("qkv", qkv, 3)
    if layout != "bshd":
        raise ValueError(f"layout is {layout!r}; expected 'bshd', the only layout of qkv")


def check_packed(name: str, array: Any, count: int) -> None:
    """Raise TypeError or ValueError unless an array holds `count` parts, as qkv holds 3."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is {kind_of(array)}; expected an array")
    if len(shape) < 4 or shape[-3] != count:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; expected (batch, seqlen, {count}, heads, head_dim), "
            "with any batch axes"
        )


def parts_of(qkv: Any) -> tuple[Any, Any, Any]:
    """Return the queries, keys and values of an array (..., seqlen, 3, heads, head_dim)."""
    return qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
