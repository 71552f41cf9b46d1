"""Options of a call as immutable, hashable values, so that a call key can contain them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupy_flash.arrays.strided import kind_of, require_layout
from cupy_flash.arrays.torch_arrays import resolved
from cupy_flash.calls.check.modifications import ModificationKey
from cupy_flash.mods import keywords
from cupy_flash.problem.problem import STATISTICS
from cupy_flash.problem.tile import FrozenTile, Tile
from cupy_flash.problem.values import check_bool, finite, integer


class Options(NamedTuple):
    """Options of any attention call. Options that a public function lacks keep their defaults.

    `kind` is the call kind, as in `Layout`. In addition, it is "qkvpacked" for dense calls with q,
    k and v in one array, and "scaled" for dense float8 calls with scales.
    """

    kind: str = "dense"
    causal: bool = False
    softmax_scale: float | None = None
    return_lse: bool = False
    family: str | None = None
    tile: FrozenTile = None
    q_offset: int | None = None
    layout: str = "bshd"
    num_splits: int = 0
    batch_invariant: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    rotary_interleaved: bool = True
    compute_scales: bool = False
    # Number of value columns, if the keys hold the values; otherwise None.
    head_dim_v: int | None = None
    # Dtype of float8 results, if no `out` is given.
    out_dtype: str | None = None
    # Whether other kernels run on the GPU at the same time, such as those that exchange KV rows.
    shares_gpu: bool = False
    # Backward calls: names of the inputs whose gradients are requested, and dtype of the gradients.
    wrt: tuple[str, ...] | None = None
    grad_dtype: str | None = None
    mod_key: ModificationKey | None = None
    return_max_logits: bool = False
    return_entropy: bool = False
    # Sums of weights over queries: "heads" or "groups" (see `Problem.received`), and the first of
    # the queries of each sequence and the one after the last. Negative indices count from the end.
    received: tuple[str, int, int] | None = None
    # Whether only lse is needed, so that out may stay unwritten.
    discards_out: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the row statistics that the call returns after lse, in this order."""
        max_logits, entropy = STATISTICS
        return (max_logits,) * self.return_max_logits + (entropy,) * self.return_entropy

    @property
    def is_dense(self) -> bool:
        """Whether q, k and v are separate arrays of a dense batch."""
        return self.kind in ("dense", "scaled")


def with_statistics(options: Options, return_max_logits: Any, return_entropy: Any) -> Options:
    """Return the options with the requested row statistics.

    Raises
    ------
    TypeError
        If an argument is not True or False.
    """
    # Most calls return no statistics. For them, `_replace` would cost half a microsecond.
    if return_max_logits is False and return_entropy is False:
        return options
    return options._replace(
        return_max_logits=_bool("return_max_logits", return_max_logits),
        return_entropy=_bool("return_entropy", return_entropy),
    )


def with_offsets(
    options: Options, modifications: Mapping[str, Any] | None
) -> tuple[Options, Mapping[str, Any]]:
    """Move an array `q_offset` from the options to the modifications; return both."""
    if options.q_offset.__class__ in INTEGER_OR_NONE:
        return options, modifications or {}
    q_offset, modifications = keywords.with_offsets(options.q_offset, modifications or {})
    return options._replace(q_offset=q_offset), modifications


INTEGER_OR_NONE = (int, type(None))
_UNSCALED_KINDS = ("dense", "qkvpacked")
# Call kinds of dense batches, whose arrays have batch axes.
DENSE_KINDS = (*_UNSCALED_KINDS, "scaled")
# Tuples of option types for which the options were found to be plain Python values.
_plain: set[tuple[type, ...]] = set()


def plain_options(options: Options) -> Options:
    """Return the options as Python numbers, bools and strings.

    A number may be given as an array of one number, which is read here.

    Raises
    ------
    TypeError
        If an option has a wrong type.
    ValueError
        If a number is not finite.
    """
    # Whether options are plain depends only on their types, of which a program uses few
    # combinations. Dense calls cannot set the other options. Reading their seven fields one by one
    # takes two thirds of the time of map().
    if options.kind in _UNSCALED_KINDS:
        types: tuple[type, ...] = (
            options.causal.__class__,
            options.softmax_scale.__class__,
            options.return_lse.__class__,
            options.family.__class__,
            options.tile.__class__,
            options.q_offset.__class__,
            options.layout.__class__,
        )
    else:
        types = tuple(map(type, options))
    if types in _plain:
        return options
    plain = options._replace(
        **{name: plain(name, getattr(options, name)) for name, plain in _FIELDS.items()}
    )
    if all(type(a) is type(b) for a, b in zip(options, plain, strict=True)):
        _plain.add(types)
    return plain


def _bool(name: str, value: Any) -> bool:
    check_bool(name, value)
    return bool(value)


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, resolved(name, value))


def _number_or_none(name: str, value: Any) -> float | None:
    # An int needs no conversion: it is a valid number, and immutable.
    return value if value is None or type(value) is int else finite(name, resolved(name, value))


def _name_or_none(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {kind_of(value)}; expected a name")
    return None if value is None else str(value)


def _layout(name: str, value: Any) -> str:
    require_layout(value)
    return str(value)


def _frozen_tile(name: str, value: Any) -> Any:
    assert value is None or isinstance(value, (Tile, tuple)), name
    return value


_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "causal": _bool,
    "return_lse": _bool,
    "return_max_logits": _bool,
    "return_entropy": _bool,
    "batch_invariant": _bool,
    "rotary_interleaved": _bool,
    "compute_scales": _bool,
    "softmax_scale": _number_or_none,
    "q_offset": _integer_or_none,
    "max_seqlen_q": _integer_or_none,
    "max_seqlen_k": _integer_or_none,
    "head_dim_v": _integer_or_none,
    "num_splits": integer,
    "layout": _layout,
    "family": _name_or_none,
    "out_dtype": _name_or_none,
    "tile": _frozen_tile,
}
