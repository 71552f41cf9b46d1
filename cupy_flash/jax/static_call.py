"""Static part of a traced call: what a compiled JAX program knows of it besides its arrays.

A program holds it as JSON text, so that a program that was exported by another process can be run.
User functions are the exception: the text names them by a token, which this process must know.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.arrays.strided import is_cupy, unallocated
from cupy_flash.calls.arguments import Arguments, GradientArguments
from cupy_flash.calls.check.gradients import check_gradient_call
from cupy_flash.calls.check.problems import CheckedCall, check_call
from cupy_flash.calls.check.whole_call import WholeCall
from cupy_flash.calls.dispatch import as_planned
from cupy_flash.calls.key_lists.modifications import require_supported
from cupy_flash.calls.key_lists.tables import checked_shape
from cupy_flash.calls.options import Options
from cupy_flash.differentiable import OF_DERIVATIVES, call_of
from cupy_flash.mods.base import Modification
from cupy_flash.mods.keywords import DROPOUT_SEED, MODS
from cupy_flash.problem.arrays import FLOAT8, FLOAT8_OUTPUTS
from cupy_flash.problem.problem import STATISTICS
from cupy_flash.problem.tile import Tile

# Name of the operand with lists of keys.
LISTS = "key_indices"
# Name of the result that serves as workspace of the kernels.
SCRATCH = "scratch"


class StaticCall(NamedTuple):
    """Call without arrays, hashable.

    Attributes
    ----------
    names
        Names of the operands: fields of `Arguments` or `GradientArguments`, and modifications that
        are arrays.
    options
        Options of the call, without `mod_key`. A backward call has `wrt`.
    keys
        Length of every cached sequence before the append if no operand gives the lengths; else 0.
    numbers
        Modifications that are numbers, window_size, softcap and dropout_p, as pairs of name and
        value.
    functions
        User functions, as pairs of name and token, see `token_of`.
    pairs
        Names of the operands that hold 64-bit integers as pairs of uint32, along one more axis. JAX
        would otherwise narrow them to 32 bits.
    scratch
        Bytes of workspace that the program allocates; None if the handler allocates it.
    specs
        Shape and name of the dtype of each operand, so that the text of a call determines them;
        None if shapes are symbolic.
    """

    names: tuple[str, ...]
    options: Options
    keys: int = 0
    numbers: tuple[tuple[str, Any], ...] = ()
    functions: tuple[tuple[str, str], ...] = ()
    pairs: tuple[str, ...] = ()
    scratch: int | None = None
    specs: tuple[tuple[tuple[int, ...], str], ...] | None = None

    @property
    def is_backward(self) -> bool:
        """Whether the call computes gradients, or their tangents."""
        return self.options.wrt is not None

    @property
    def has_lists(self) -> bool:
        """Whether queries attend to listed keys."""
        return LISTS in self.names

    @property
    def has_tangents(self) -> bool:
        """Whether the call computes tangents of results or of gradients by public functions."""
        return any(name.endswith("_tangent") for name in self.names)

    @property
    def appended(self) -> tuple[str, ...]:
        """Names of the operands that the call updates: caches, and scales that it computes."""
        if self.options.kind != "kvcache" or "k" not in self.names:
            return ()
        names: tuple[str, ...] = ("k_cache", "v_cache")
        if self.options.compute_scales:
            names += ("k_scale", "v_scale")
        return tuple(name for name in names if name in self.names)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results without the workspace."""
        if self.options.wrt is not None:
            return self.options.wrt
        return ("out", "lse", *self.options.statistics, *self.appended)

    def record(self, arrays: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the record of these operands, and the modifications that are arrays or numbers.

        A call with tangents has the record of its forward call. Lists of keys are not included.
        """
        arrays = {name: x for name, x in arrays.items() if name != LISTS}
        kind: Any = GradientArguments if self.is_backward else Arguments
        if self.has_tangents:
            kind = Arguments
            arrays = {name: x for name, x in arrays.items() if not _is_of_derivative(name)}
        own = {name: x for name, x in arrays.items() if name in kind._fields}
        others = {name: x for name, x in arrays.items() if name not in own}
        return kind(**own), {**dict(self.numbers), **others}

    def check(self, operands: tuple[Any, ...]) -> tuple[Any, Options, CheckedCall]:
        """Check the shapes and dtypes of the operands, as the function of the call does.

        Returns
        -------
        tuple
            Record of arrays without memory, options with `mod_key`, and the result of the check.

        Raises
        ------
        TypeError, ValueError
            If no kernel computes the call; the message names the argument.
        """
        arrays = {
            name: unallocated(*self.seen(name, x.shape, x.dtype))
            for name, x in zip(self.names, operands, strict=True)
        }
        record, modifications = self.record(arrays)
        modifications |= {name: function_of(token) for name, token in self.functions}
        given = self.options._replace(wrt=None) if self.has_tangents else self.options
        record.require_given(given)
        record, options = as_planned(record, given, modifications)
        check = check_call if given.wrt is None else check_gradient_call
        checked = check(record, options)
        if self.has_lists:
            forward = record if given.wrt is None else record.forward
            require_supported(WholeCall(forward, options, checked.problem, False, None))
            checked_shape(arrays[LISTS].shape, checked.problem)
        return record, options, checked

    def seen(
        self, name: str, shape: tuple[int, ...], dtype: Any
    ) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and dtype of an operand as kernels see it, see `pairs`."""
        if name in self.pairs:
            return shape[:-1], whole_dtype(name)
        return tuple(shape), np.dtype(dtype)

    def result_shapes(self, operands: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the shape and dtype of each result; dims may be symbolic."""
        given = dict(zip(self.names, operands, strict=True))
        shapes = [self._result(name, given) for name in self.results]
        return shapes if self.scratch is None else [*shapes, ((self.scratch,), np.dtype(np.uint8))]

    def _result(self, name: str, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if name not in ("out", "lse", *STATISTICS):
            return given[name].shape, given[name].dtype
        q, options = given["q"], self.options
        if name == "out":
            values = given.get("v_cache", given.get("v"))
            head_dim_v = options.head_dim_v or (None if values is None else values.shape[-1])
            dtype = q.dtype
            if dtype.name == FLOAT8:
                dtype = _dtype(options.out_dtype or FLOAT8_OUTPUTS[0])
            return (*q.shape[:-1], head_dim_v), dtype
        *batch, seqlen, heads, _ = q.shape
        if options.layout == "bhsd":
            seqlen, heads = heads, seqlen
        dtype = q.dtype if q.dtype.name == "float64" else np.dtype(np.float32)
        return (*batch, heads, seqlen), dtype

    def tangents(
        self, arrays: Mapping[str, Any], functions: Mapping[str, Modification]
    ) -> tuple[Any, ...]:
        """Return the results of a call with tangents, given its operands and user functions."""
        record, modifications = self.record(arrays)
        lengths = (None,) * 3
        if self.options.kind == "varlen":
            lengths = record.cu_seqlens_q, record.cu_seqlens_k, record.seqused_k
        options = self.options._replace(wrt=None)
        call, others = call_of(options, lengths, {**modifications, **functions})
        inputs = record.q, record.k, record.v, *others
        moving = {name: x for name, x in arrays.items() if _is_of_derivative(name)}
        return call.push_forward(inputs, moving, self.options.wrt)

    def text(self) -> str:
        """Return the JSON text of the call."""
        return _text(self)


def _is_of_derivative(name: str) -> bool:
    """Return whether an operand of a call with tangents does not belong to its forward call."""
    return name in OF_DERIVATIVES or name.endswith("_tangent")


def whole_dtype(name: str) -> np.dtype:
    """Return the dtype of an operand that a program holds as pairs of uint32."""
    return np.dtype(np.int64 if name == DROPOUT_SEED else np.uint64)


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


_DEFAULTS = Options()


@functools.lru_cache(maxsize=1024)
def _text(call: StaticCall) -> str:
    options = {
        name: value
        for name, value in call.options._asdict().items()
        if value != getattr(_DEFAULTS, name)
    }
    if isinstance(options.get("tile"), Tile):
        options["tile"] = tuple(dataclasses.asdict(options["tile"]).items())
    return json.dumps({**call._asdict(), "options": options}, sort_keys=True, separators=(",", ":"))


def parsed(text: bytes) -> StaticCall:
    """Return the call with this JSON text."""
    fields = json.loads(text)
    options = Options(**{name: _as_tuples(x) for name, x in fields.pop("options").items()})
    return StaticCall(options=options, **{name: _as_tuples(x) for name, x in fields.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


# User functions by token, and tokens by function. A compiled program may use a function at any
# time, so they are kept until the process ends, with their captured arrays in host memory. Equal
# functions have the same token.
_functions: dict[str, Modification] = {}
_tokens: dict[Modification, str] = {}
_numbers = itertools.count()
# Tokens of another process are never those of this one.
_process = uuid.uuid4().hex


def token_of(function: Modification) -> str:
    """Return the token of a user function, with its captured arrays as they are now."""
    # Arrays on the host are compared by their values, so that a function that is traced again has
    # the same token, although each trace copies the arrays.
    kept = function.with_arrays(lambda _, array: array.get() if is_cupy(array) else array.copy())
    token = _tokens.get(kept)
    if token is None:
        token = _tokens[kept] = f"{_process}-{next(_numbers)}"
        _functions[token] = kept
    return token


def function_of(token: str) -> Modification:
    """Return the user function with a token, with its captured arrays in host memory.

    Raises
    ------
    ValueError
        If another process has made the token.
    """
    function = _functions.get(token)
    if function is None:
        raise ValueError(
            "the call has a score_mod or mask_mod of another process; a program with one cannot be "
            "exported, and must be compiled in the process that runs it"
        )
    return function


def function_tokens(modifications: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the user functions among modifications, as pairs of name and token."""
    return tuple(
        (name, token_of(modifications[name]))
        for name in MODS
        if modifications.get(name) is not None
    )
