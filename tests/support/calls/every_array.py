"""Calls of every public function with every array argument, convertible to any library.

The calls are made from the signatures of the functions. The tests fail for an argument that has no
case here, unless `PLAIN` lists it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import cupy_flash
from cupy_flash import MaskMod, ScoreMod

BATCH, HEADS, HEADS_KV, DIM, CAPACITY, PAGE = 2, 4, 2, 16, 32, 16
ROWS, KEYS = 7, 9
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

# Arguments that neither are arrays nor contain any.
PLAIN = {
    "arch", "ax", "b", "backend", "batch", "batch_invariant", "block", "causal", "colorbar",
    "compute_scales", "dropout_p", "dtype", "enable_gqa", "family", "grad_dtype", "grouped", "h",
    "head_dim_v", "heads_q", "interleaved", "is_causal", "key_indices_in", "layout", "max_seqlen_k",
    "max_seqlen_q", "num_splits", "out_dtype", "per", "return_entropy", "return_lse",
    "return_max_logits", "rotary_interleaved", "scale", "seqlen_k", "seqlen_q", "softcap",
    "softmax_scale", "stream", "tile", "vmax", "window_size", "wrt",
}  # fmt: skip
# Annotations of further arguments that are no arrays. Their names may be those of arrays in other
# functions.
PLAIN_TYPES = ("int", "int | None", "slice | None", "Sequence[str] | None")
# Arrays that a call writes; arrays of JAX are immutable.
WRITTEN = frozenset({"out", "dq", "dk", "dv", "dqkv"})
# Required arguments of functions that take sizes, or a function of the user, instead of arrays.
WITHOUT_INPUTS = {
    "check_mod": {"mod"},
    "dropout_mask": {"dropout_seed"},
    "plot_attention": {"weights"},
    "plot_mask": set(),
    "seen_pairs": set(),
}


@dataclass
class Captured:
    """Modification that captures arrays of the tested library.

    `make` makes the modification, given a function that converts NumPy arrays.
    """

    make: Callable[[Callable[[Any], Any]], Any]


@dataclass
class Call:
    """One call on NumPy arrays, of a public function or of a function that returns its plan."""

    function: Callable[..., Any]
    argument: str | None  # optional argument that the call tests; None for required ones only
    values: dict[str, Any] = field(default_factory=dict)  # arrays, numbers and `Captured`

    def __str__(self) -> str:
        return f"{self.function.__name__} {self.argument or '-'}"

    @property
    def is_plan(self) -> bool:
        """Whether the call returns a plan, and writes nothing."""
        return self.function.__name__.startswith("plan")

    @property
    def writes(self) -> set[str]:
        """Arguments that the call, or the call that it plans, writes."""
        # A plan ignores dqkv. A backward call reads `out`, the output of the forward call.
        unwritten = {"dqkv"} if self.is_plan else set()
        unwritten |= {"out"} if "lse" in self.values else set()
        found = WRITTEN & self.values.keys() - unwritten
        appends = self.values.get("k") is not None and "k_cache" in self.values
        if appends and self.function.__name__.startswith("flash"):
            found = {*found, "k_cache", "v_cache"}
            if self.values.get("compute_scales"):
                found |= {"k_scale", "v_scale"}
        return found

    def converted(self, convert: Callable[[Any], Any]) -> dict[str, Any]:
        """Return all arguments by name, with arrays converted."""
        return {name: _converted(value, convert) for name, value in self.values.items()}

    def run(self, convert: Callable[[Any], Any], **options: Any) -> tuple[list[Any], Any]:
        """Call the function on converted arguments; return results and arrays that it wrote."""
        given = self.converted(convert)
        parameters = inspect.signature(self.function).parameters.values()
        positional = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_ONLY]
        known = {p.name for p in parameters}
        named = given | {n: x for n, x in options.items() if n in known}
        found = self.function(*positional, **named)
        written = {} if self.is_plan else {name: named[name] for name in self.writes}
        if self.function.__name__.endswith("_vjp"):
            out, pull_back = found
            gradients = pull_back(out)
            found = (out, *(gradients if isinstance(gradients, tuple) else (gradients,)))
        if found is None or not isinstance(found, (tuple, list)):
            found = (found,)
        return [x for x in found if x is not None], written


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Captured):
        return value.make(convert)
    return convert(value.copy()) if isinstance(value, np.ndarray) else value


def functions_of(module: ModuleType) -> list[Callable[..., Any]]:
    """Return the public functions of a module; for `cupy_flash` also those that return plans."""
    public = (getattr(module, name) for name in module.__all__ if not name.startswith("plan"))
    functions = [f for f in public if inspect.isfunction(f)]
    if module is not cupy_flash:
        return functions
    return functions + [
        planned(f)
        for f in functions
        if f.__name__.startswith("flash_attention")
        and not f.__name__.endswith(("_hvp", "_jvp", "_vjp"))
    ]


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the arguments of another, and arch, that returns its plan."""

    def made(*arguments: Any, **options: Any) -> cupy_flash.Plan:
        return cupy_flash.plan(function, *arguments, **options)

    signature = inspect.signature(function)
    *others, modifications = signature.parameters.values()
    arch = inspect.Parameter("arch", inspect.Parameter.KEYWORD_ONLY, default=None)
    made.__name__ = f"plan {function.__name__}"
    made.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*others, arch, modifications]
    )
    return made


def arguments_of(function: Callable[..., Any]) -> dict[str, bool]:
    """Return arguments that may be or contain arrays, and whether each is required."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= dict.fromkeys(cupy_flash.Modifications.__annotations__, False)
        elif parameter.annotation not in PLAIN_TYPES:
            found[parameter.name] = parameter.default is parameter.empty
    return {name: required for name, required in found.items() if name not in PLAIN}


def calls_of(function: Callable[..., Any], dtype: Any, seed: int = 0) -> Iterator[Call]:
    """Yield a call with the required arguments alone, and one with each optional argument."""
    arguments = arguments_of(function)
    for argument in (None, *(n for n, required in arguments.items() if not required)):
        if (function.__name__, argument) in REFUSED or (kind_of(function), argument) in REFUSED:
            continue
        yield call_of(function, argument, dtype, seed)


def call_of(function: Callable[..., Any], argument: str | None, dtype: Any, seed: int = 0) -> Call:
    """Return the call with the required arguments and this one."""
    world = _World(function, np.dtype(dtype), np.random.default_rng(seed))
    values = world.required()
    if argument is not None:
        values |= world.optional(argument, values)
    if {"out", "lse"} <= arguments_of(function).keys() and arguments_of(function)["lse"]:
        values |= world.results(values)
    elif "return_lse" in inspect.signature(function).parameters:
        values["return_lse"] = not function.__name__.endswith("_vjp")
    without_values = {"v", "v_cache", "v_scale"} - arguments_of(function).keys()
    values = {name: x for name, x in values.items() if name not in without_values}
    return Call(function, argument, values)


def gives_arrays(function: Callable[..., Any]) -> bool:
    """Return whether the results of a function are arrays of the kind of its arguments."""
    return kind_of(function) not in WITHOUT_INPUTS and not function.__name__.startswith("plan")


def kind_of(function: Callable[..., Any]) -> str:
    """Return the kind of a function's arrays, such as "varlen"."""
    names = inspect.signature(function).parameters
    if function.__name__ in WITHOUT_INPUTS:
        return function.__name__
    for name, kind in (
        ("out_partial", "combine"),
        ("qkv", "qkvpacked"),
        ("cu_seqlens_q", "varlen"),
        ("k_cache", "kvcache"),
        ("attn_mask", "scaled_dot_product"),
        ("positions", "rotary"),
        ("per", "quantize"),
        ("top_k", "weights"),
        ("grouped", "received"),
    ):
        if name in names:
            return kind
    return "dense"


# Arguments that calls of a kind, or of a function, refuse, and the reason.
REFUSED = {
    ("varlen", "seqlens_k"): "cu_seqlens_k says how long sequences are",
    ("kvcache", "seqlens_k"): "cache_seqlens says how long sequences are",
    ("kvcache", "dropout_seed"): "dropout is for training",
    **{
        (f"plan {name}", "key_indices"): "such calls consist of several"
        for name in (
            *("flash_attention", "flash_attention_varlen", "flash_attention_with_kvcache"),
            *("flash_attention_backward", "flash_attention_varlen_backward"),
        )
    },
}


def _named(**arrays: np.ndarray) -> Captured:
    """Return arrays that a function receives in a dictionary."""
    return Captured(lambda convert: {name: convert(x) for name, x in arrays.items()})


class _World:
    """Generator of arguments for one function."""

    def __init__(
        self, function: Callable[..., Any], dtype: np.dtype[Any], rng: np.random.Generator
    ) -> None:
        self.function, self.dtype, self.rng = function, dtype, rng
        self.accumulator = np.float64 if dtype == np.float64 else np.float32
        self.kind = kind_of(function)
        self.arguments = arguments_of(function)

    def _values(self, *shape: int, dtype: Any = None) -> Any:
        return self.rng.standard_normal(shape).astype(self.dtype if dtype is None else dtype)

    def required(self) -> dict[str, Any]:
        """Return the required arguments."""
        rows, keys = (HEADS, DIM), (HEADS_KV, DIM)
        ints = np.int32
        every: dict[str, dict[str, Any]] = {
            "dense": {
                "q": self._values(BATCH, ROWS, *rows),
                "k": self._values(BATCH, KEYS, *keys),
                "v": self._values(BATCH, KEYS, *keys),
            },
            "qkvpacked": {"qkv": self._values(BATCH, ROWS, 3, *rows)},
            "varlen": {
                "q": self._values(ROWS, *rows),
                "k": self._values(KEYS, *keys),
                "v": self._values(KEYS, *keys),
                "cu_seqlens_q": np.array([0, 3, 7], ints),
                "cu_seqlens_k": np.array([0, 4, 9], ints),
                "max_seqlen_q": 4,
                "max_seqlen_k": 5,
            },
            "kvcache": {
                "q": self._values(BATCH, 2, *rows),
                "k_cache": self._values(BATCH, CAPACITY, *keys),
                "v_cache": self._values(BATCH, CAPACITY, *keys),
                "cache_seqlens": np.array([5, 9], ints),
            },
            "combine": {
                "out_partial": self._values(3, BATCH, ROWS, *rows),
                "lse_partial": self._values(3, BATCH, HEADS, ROWS, dtype=self.accumulator),
            },
            "scaled_dot_product": {
                "query": self._values(BATCH, HEADS, ROWS, DIM),
                "key": self._values(BATCH, HEADS, KEYS, DIM),
                "value": self._values(BATCH, HEADS, KEYS, DIM),
            },
            "rotary": {
                "x": self._values(BATCH, ROWS, *rows),
                "cos": self._values(CAPACITY, DIM // 2),
                "sin": self._values(CAPACITY, DIM // 2),
            },
            "quantize": {"x": self._values(4, PAGE, *keys), "dtype": "int8"},
            "seen_pairs": {"seqlen_q": ROWS, "seqlen_k": KEYS},
            "plot_mask": {"seqlen_q": ROWS, "seqlen_k": KEYS},
            "weights": {
                "q": self._values(BATCH, ROWS, *rows),
                "k": self._values(BATCH, KEYS, *keys),
            },
            "received": {
                "q": self._values(BATCH, ROWS, *rows),
                "k": self._values(BATCH, KEYS, *keys),
            },
            "plot_attention": {"weights": np.abs(self._values(ROWS, KEYS))},
            "check_mod": {"mod": self._score_mod()},
            "dropout_mask": {
                **{"batch": BATCH, "heads_q": HEADS, "seqlen_q": ROWS, "seqlen_k": KEYS},
                **{"dropout_p": 0.3, "dropout_seed": np.array([5, 1])},
            },
        }
        found = every[self.kind]
        if self.arguments.get("dout"):
            shape = (BATCH, ROWS, *rows) if self.kind == "qkvpacked" else found["q"].shape
            found["dout"] = self._values(*shape)
        if "q_tangent" in self.arguments:
            # Without any tangent, those of the results are 0 whatever a function computes.
            found |= {f"{name}_tangent": self._values(*found[name].shape) for name in "qkv"}
        missing = {n for n, is_required in self.arguments.items() if is_required} - found.keys()
        assert missing <= {"out", "lse"}, f"{self.function.__name__}: no values of {missing}"
        return found

    def optional(self, name: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return an optional argument, with others that it needs."""
        makers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "alibi_slopes": lambda _: {name: self.rng.random(HEADS).astype(np.float32)},
            "sinks": lambda _: {name: self._values(HEADS, dtype=np.float32)},
            "heads": lambda _: {name: np.array([-1, 0])},
            "queries": lambda _: {name: np.array([1, -1, 0, 1]), "top_k": 3},
            "bias": lambda v: {name: self._values(*self._pairs(v))},
            "mask": lambda v: {name: self.rng.random(self._pairs(v)) < 0.7},
            "attn_mask": lambda v: {name: self._values(*self._pairs(v))},
            "positions": lambda _: {name: self.rng.integers(CAPACITY, size=(BATCH, ROWS))},
            "q_offset": lambda _: {name: np.array([1, 3], np.int32), "causal": True},
            "seqused_q": lambda v: {name: (np.diff(v["cu_seqlens_q"]) - 1).astype(np.int32)},
            "cache_leftpad": lambda _: {name: np.array([1, 0], np.int32)},
            "prefix_lens": lambda _: {name: np.array([2, 4], np.int32), "causal": True},
            "tree_mask": lambda v: {
                name: self.rng.integers(1, 16, (BATCH, self._queries(v))).astype(np.uint64)
            },
            "seqlens_k": lambda _: {name: np.array([3, 6], np.int32)},
            "dropout_seed": lambda _: {name: np.array([5, 1]), "dropout_p": 0.3},
            "score_mod": lambda _: {name: self._score_mod()},
            "mask_mod": lambda _: {name: self._mask_mod()},
            **dict.fromkeys(
                ("dlse", "dlse_tangent"),
                lambda v: {name: self._values(*self._lse_shape(v), dtype=self.accumulator)},
            ),
            **dict.fromkeys(
                ("q_tangent", "k_tangent", "v_tangent"),
                lambda v: {name: v[name]},
            ),
            "modification_tangents": lambda v: {
                "bias": self._values(*self._pairs(v)),
                name: _named(bias=self._values(*self._pairs(v))),
            },
            "dout_tangent": lambda v: {name: self._values(*v["dout"].shape)},
            "lse": lambda v: {name: self._lse(v)},
            "out": lambda v: {name: self._poison(self._out_shape(v))},
            **dict.fromkeys(
                ("dq", "dk", "dv", "dqkv"), lambda v: {name: self._poison(v[name[1:]].shape)}
            ),
            "seqused_k": lambda _: {name: np.array([2, 5], np.int32)},
            "block_table": self._pages,
            "cache_batch_idx": lambda _: {name: np.array([1, 0], np.int32)},
            "key_indices": lambda v: {
                name: self.rng.integers(-1, 4, (*v["q"].shape[:-2], 1, 5)).astype(np.int32)
            },
            "k": self._new_rows,
            "v": self._new_rows,
            "cu_seqlens_k_new": lambda _: {
                name: np.array([0, 2, 3], np.int32),
                **{new: self._values(3, HEADS_KV, DIM) for new in ("k", "v")},
            },
            "rotary_cos": self._rotary,
            "rotary_sin": self._rotary,
            "rotary_seqlens": lambda v: {**self._rotary(v), name: np.array([2, 1], np.int32)},
            "q_scale": self._scales,
            "k_scale": self._scales,
            "v_scale": lambda v: self._scales(v, FLOAT8),
        }
        assert name in makers, f"{self.function.__name__}: no case of {name}"
        return makers[name](values)

    def _score_mod(self) -> Captured:
        table = self.rng.random(HEADS).astype(np.float32)
        return Captured(
            lambda convert: ScoreMod(
                lambda score, h, table: score * table[h], table=convert(table.copy())
            )
        )

    def _mask_mod(self) -> Captured:
        seen = self.rng.random(CAPACITY) < 0.7
        return Captured(lambda convert: MaskMod(lambda j, seen: seen[j], seen=convert(seen.copy())))

    def _queries(self, values: dict[str, Any]) -> int:
        if self.kind == "varlen":
            return int(values["max_seqlen_q"])
        return int(values["q"].shape[1]) if self.kind == "kvcache" else ROWS

    def _pairs(self, values: dict[str, Any]) -> tuple[int, ...]:
        if self.kind == "varlen":
            return HEADS, ROWS, int(values["max_seqlen_k"])
        keys = {"kvcache": CAPACITY, "qkvpacked": ROWS}.get(self.kind, KEYS)
        return BATCH, HEADS, self._queries(values), keys

    def _out_shape(self, values: dict[str, Any]) -> tuple[int, ...]:
        if self.kind == "qkvpacked":
            return BATCH, ROWS, HEADS, DIM
        if self.kind == "combine":
            return tuple(values["out_partial"].shape[1:])
        return tuple(values["q"].shape)

    def _lse_shape(self, values: dict[str, Any]) -> tuple[int, ...]:
        return (HEADS, ROWS) if self.kind == "varlen" else (BATCH, HEADS, self._queries(values))

    def _lse(self, values: dict[str, Any]) -> Any:
        """Return the log-sum-exp of a forward call of the same kind."""
        suffix = {"varlen": "_varlen", "kvcache": "_with_kvcache"}.get(self.kind, "")
        given = {"v": values["k"]} | values if "k" in values else values
        forward = getattr(cupy_flash, f"flash_attention{suffix}")
        return forward(**given, return_lse=True, backend="cpu")[1]

    def _poison(self, shape: tuple[int, ...]) -> Any:
        return np.full(shape, np.nan, self.dtype)

    def _pages(self, values: dict[str, Any]) -> dict[str, Any]:
        table = np.array([[3, 0], [1, 2]], np.int32)
        names = ("k", "v") if self.kind == "varlen" else ("k_cache", "v_cache")
        found = {name: self._values(4, PAGE, HEADS_KV, DIM) for name in names}
        return found | {"block_table": table}

    def _new_rows(self, values: dict[str, Any]) -> dict[str, Any]:
        rows = (BATCH, values["q"].shape[1], HEADS_KV, DIM)
        return {"k": self._values(*rows), "v": self._values(*rows)}

    def _rotary(self, values: dict[str, Any]) -> dict[str, Any]:
        tables = {n: self._values(CAPACITY, DIM // 2) for n in ("rotary_cos", "rotary_sin")}
        return self._new_rows(values) | tables

    def _scales(self, values: dict[str, Any], dtype: Any = np.int8) -> dict[str, Any]:
        """Return 8-bit keys and values with scales; for dense calls float8 q, k and v."""
        if self.kind in ("dense", "weights"):
            found = {
                n: values[n].astype(np.float32).astype(FLOAT8)
                for n in ("q", "k", "v")
                if n in values
            }
            heads = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV}
            scales = {
                f"{n}_scale": 0.5 + self.rng.random((BATCH, 1, heads[n])).astype(np.float32)
                for n in found
            }
            return found | scales
        names = ("k", "v") if self.kind == "varlen" else ("k_cache", "v_cache")
        found = {n: self.rng.integers(-127, 128, values[n].shape).astype(dtype) for n in names}
        scale = (1, HEADS_KV) if self.kind == "varlen" else (1, 1, HEADS_KV)
        return found | {
            n: (self.rng.random(scale) / 64).astype(np.float32) for n in ("k_scale", "v_scale")
        }

    def results(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the output and log-sum-exp that a backward call takes."""
        suffix = {"dense": "", "qkvpacked": "_qkvpacked", "varlen": "_varlen"}[self.kind]
        forward = getattr(cupy_flash, f"flash_attention{suffix}")
        call = Call(forward, None, values | {"return_lse": True, "backend": "cpu"})
        for name in ("dout", "dlse", "dq", "dk", "dv", "dqkv", "wrt"):
            call.values.pop(name, None)
        (out, lse), _ = call.run(lambda array: array)
        return {"out": out, "lse": lse}
