"""Random calls of dropout, row statistics, weights and derivatives, by number.

A number determines a call. Calls of one *class* differ only in values and lengths, so that kernels
are compiled once for all of them. Consecutive numbers are of different features.

``python -m support.calls.feature_calls [cpu|gpu] [FIRST] [COUNT]`` in the folder `tests` runs
calls, by default all `COUNT` on the CPU, and prints those that fail. With a COUNT of 1, it runs one
call again, such as one that failed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash import (
    UnsupportedError,
    attention_received,
    attention_weights,
    flash_attention_hvp,
    flash_attention_jvp,
    flash_attention_varlen_jvp,
)
from cupy_flash.calls import dispatch_received, dispatch_tangents
from cupy_flash.calls.arguments import ReceivedArguments
from cupy_flash.calls.options import Options
from cupy_flash.families import FAMILIES
from support.calls import row_statistics
from support.calls.modified_calls import (
    DTYPES,
    HEAD_DIMS,
    KINDS,
    LONGEST,
    ModifiedCall,
    add_dropout,
    random_call,
)
from support.calls.padded_form import padded_form, padded_results, padded_rows
from support.calls.weight_rule import check_received, check_weights
from support.gpu import cupy
from support.gradients.directions import tangents_of
from support.gradients.gradient_calls import KINDS as GRADIENT_KINDS
from support.gradients.gradient_calls import GradientCall, random_gradient_call
from support.gradients.gradient_rule import check_gradients
from support.gradients.hessian_rule import Direction, check_products
from support.gradients.tangent_rule import check_tangents

CLASSES, CALLS = 400, 5
COUNT = CLASSES * CALLS
# Seed of all calls, which is not that of other random calls.
_SEED = 50
# Arguments of `Options`; other arguments of a call are modifications.
_PLAIN = ("causal", "softmax_scale", "q_offset", "layout", "max_seqlen_q", "max_seqlen_k")
_DENSE = ("dense", "padded")


@dataclass(frozen=True)
class FeatureCall:
    """One call, which can check its results.

    Attributes
    ----------
    name
        Feature and arguments of the call.
    direction
        Direction of the families that may be requested; None if no kernel has the feature.
    compare
        Function that makes the call on arrays of `xp` by a family, or by the planner's choice if
        this is None, and fails if a result is wrong.
    """

    name: str
    direction: str | None
    compare: Callable[[Any, str | None], None]

    def __str__(self) -> str:
        return self.name

    def check(self, xp: Any, family: str | None = None) -> None:
        """Make the call, by another family if this one does not serve it; fail if it is wrong."""
        try:
            self.compare(xp, family)
        except UnsupportedError:
            if family is None:
                raise
            self.compare(xp, None)


@dataclass(frozen=True)
class Draw:
    """Source of random calls of one dtype.

    `sizes` draws lengths and array values, and `rng` the rest, which selects the kernel.
    """

    rng: np.random.Generator
    sizes: np.random.Generator
    dtype: str
    head_dims: Sequence[int]
    longest: tuple[int, int]

    def forward(self, kinds: Sequence[str]) -> ModifiedCall:
        return random_call(
            *(self.rng, self.dtype, str(self.rng.choice(kinds))),
            few_rows=bool(self.rng.integers(4) == 0),
            empty=bool(self.rng.integers(4) == 0),
            head_dims=self.head_dims,
            longest=self.longest,
            sizes=self.sizes,
        )

    def gradient(self, kinds: Sequence[str]) -> GradientCall:
        return random_gradient_call(
            *(self.rng, self.dtype, str(self.rng.choice(kinds))),
            head_dims=self.head_dims,
            longest=self.longest,
            sizes=self.sizes,
        )


def _poison(xp: Any, *arrays: Any) -> None:
    """Fill free memory that results may receive with NaN."""
    for array in arrays:
        xp.full(array.shape, np.nan, array.dtype)
        xp.full(array.shape, np.nan, np.float32)


def _on_host(xp: Any, *arrays: Any) -> list[np.ndarray]:
    return [x if xp is np else xp.asnumpy(x) for x in arrays]


# ---- Features


def _dropout(draw: Draw) -> FeatureCall:
    call = draw.forward(GRADIENT_KINDS)
    add_dropout(call, draw.sizes)
    return FeatureCall(f"dropout {call}", "forward", lambda xp, f: call.check(xp, family=f))


def _dropout_gradients(draw: Draw) -> FeatureCall:
    call = draw.gradient(GRADIENT_KINDS)
    add_dropout(call.forward, draw.sizes)

    def compare(xp: Any, family: str | None) -> None:
        check_gradients(call, call.run(xp, family=family))

    return FeatureCall(f"gradients with dropout {call}", "backward", compare)


def _statistics(draw: Draw) -> FeatureCall:
    call = draw.forward(KINDS)

    def compare(xp: Any, family: str | None) -> None:
        row_statistics.check(call, xp, family=family)

    return FeatureCall(f"row statistics {call}", "forward", compare)


def _received(draw: Draw) -> FeatureCall:
    of_gradients = draw.gradient(_DENSE)
    call = of_gradients.forward
    rows = _axis(call, "seqlen")
    first, last = np.sort(draw.sizes.integers(0, rows + 1, 2)).tolist()
    queries = slice(first, last) if draw.rng.integers(2) else slice(0, rows)
    grouped, has_lse = (bool(draw.rng.integers(2)) for _ in range(2))

    def compare(xp: Any, family: str | None) -> None:
        (q, k, _), options = call.given(xp)
        lse = xp.asarray(of_gradients.results[1]) if has_lse else None
        _poison(xp, q, k)
        if family is None:
            found = attention_received(q, k, lse=lse, queries=queries, grouped=grouped, **options)
        else:
            plain, mods = _split(options)
            of_heads = "groups" if grouped else "heads"
            plain |= {"family": family, "received": (of_heads, queries.start, queries.stop)}
            found = dispatch_received.on_gpu(ReceivedArguments(q, k, lse), Options(**plain), mods)
            if found is None:
                raise UnsupportedError("no kernel serves the call")
        check_received(call, queries, grouped, *_on_host(xp, found))

    name = f"attention received from {queries}, grouped {grouped}, lse {has_lse} {call}"
    return FeatureCall(name, "received", compare)


def _weights(draw: Draw) -> FeatureCall:
    call = draw.gradient(_DENSE).forward
    chosen: dict[str, Any] = {}
    for name, axis in (("queries", "seqlen"), ("heads", "heads")):
        length = _axis(call, axis)
        chosen[name] = slice(None, None, int(draw.sizes.choice([-3, 1, 2])))
        if length and draw.sizes.integers(2):
            chosen[name] = draw.sizes.integers(-length, length, 5)
    top_k = int(draw.sizes.integers(1, 40)) if draw.sizes.integers(2) else None

    def compare(xp: Any, family: str | None) -> None:
        (q, k, _), options = call.given(xp)
        _poison(xp, q, k)
        found = attention_weights(q, k, **chosen, top_k=top_k, **options)
        check_weights(call, chosen, *_on_host(xp, *(found if top_k else (found,))))

    return FeatureCall(f"attention weights {chosen}, top_k {top_k} {call}", None, compare)


def _tangents(draw: Draw, kinds: Sequence[str]) -> FeatureCall:
    call = draw.gradient(kinds).forward
    inputs = call.given(np)[0][:3]
    moved = draw.rng.integers(1, 8)
    direction = [
        x if moved >> i & 1 else None for i, x in enumerate(tangents_of(inputs, draw.sizes))
    ]

    def compare(xp: Any, family: str | None) -> None:
        given, options = call.given(xp)
        tangents = [None if x is None else xp.asarray(x) for x in direction]
        _poison(xp, *given[:3])
        if family is not None:
            results = _tangents_by(family, given, tangents, options)
        elif call.kind == "varlen":
            results = flash_attention_varlen_jvp(*given, *tangents, return_lse=True, **options)
        else:
            results = flash_attention_jvp(*given, *tangents, return_lse=True, **options)
        _compare_tangents(call, direction, _on_host(xp, *results))

    names = "".join(name for name, x in zip("qkv", direction, strict=True) if x is not None)
    return FeatureCall(f"tangents of {names} {call}", "tangent", compare)


def _tangents_by(family: str, given: Any, tangents: Any, options: dict[str, Any]) -> Any:
    """Return out, its tangent, lse and its tangent of CuPy arrays, computed by a family."""
    inputs, lengths = given[:3], given[3:]
    plain, mods = _split(options)
    if lengths:
        plain |= {"kind": "varlen", "max_seqlen_q": lengths[2], "max_seqlen_k": lengths[3]}
        lengths = (*lengths[:2], mods.pop("seqused_k", None))
    return dispatch_tangents.on_gpu(
        *(tuple(inputs), tuple(tangents), Options(**plain, family=family), mods),
        lengths=tuple(lengths) or (None, None, None),
    )


def _compare_tangents(
    call: ModifiedCall, direction: Sequence[np.ndarray | None], results: Sequence[np.ndarray]
) -> None:
    """Assert that out, its tangent, lse and its tangent obey the error rule.

    Packed calls are compared in their padded form.
    """
    if call.kind == "varlen":
        starts_q, starts_k = (call.arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k"))
        out, out_tangent, lse, lse_tangent = results
        of_none = slice(int(starts_q[-1]), None)
        for x in (out[of_none], out_tangent[of_none], lse_tangent[:, of_none]):
            assert not x.any(), f"a row of no sequence is not 0: {call}"
        assert (lse[:, of_none] == -np.inf).all(), f"lse of a row of no sequence: {call}"
        padded = padded_form(call)
        results = padded_results(call, results)
        rows = np.arange(padded.arrays["q"].shape[1])
        # Padding attends to no key, so its log-sum-exp is that of the sink.
        sinks = np.asarray(call.arrays.get("sinks", np.full(len(lse), -np.inf)), lse.dtype)
        is_padding = (rows >= np.diff(starts_q)[:, None])[:, None]
        results[2] = np.where(is_padding, sinks[:, None], results[2])
        direction = [
            None if x is None else padded_rows(x, starts, longest)
            for x, starts, longest in zip(
                direction,
                (starts_q, starts_k, starts_k),
                (len(rows), *[padded.arrays["k"].shape[1]] * 2),
                strict=True,
            )
        ]
        call = padded
    inputs, options = call.given(np)
    call.compare(results[0], results[2])
    check_tangents(results, inputs, direction, options, call)


def _hessian_products(draw: Draw) -> FeatureCall:
    call = draw.gradient(_DENSE)
    direction = Direction(call, draw.sizes)
    for name in [*direction.tangents]:
        if draw.sizes.integers(4) == 0:
            del direction.tangents[name]

    def compare(xp: Any, family: str | None) -> None:
        _poison(xp, *direction.arrays.values())
        check_products(direction.find(flash_attention_hvp, xp), direction)

    return FeatureCall(f"products along {[*direction.tangents]} {call}", None, compare)


def _axis(call: ModifiedCall, name: str) -> int:
    """Return the number of queries or of heads of a dense call."""
    heads, rows = call.arrays["q"].shape[1:3]
    if call.options.get("layout") != "bhsd":
        rows, heads = heads, rows
    return rows if name == "seqlen" else heads


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `Options`, and the modifications."""
    plain = {name: x for name, x in options.items() if name in _PLAIN}
    return plain, {name: x for name, x in options.items() if name not in _PLAIN}


FEATURES: dict[str, Callable[[Draw], FeatureCall]] = {
    "dropout": _dropout,
    "dropout gradients": _dropout_gradients,
    "statistics": _statistics,
    "received": _received,
    "weights": _weights,
    "tangents": functools.partial(_tangents, kinds=_DENSE),
    "packed tangents": functools.partial(_tangents, kinds=("varlen",)),
    "Hessian products": _hessian_products,
}


# ---- Numbers


def feature_call(
    feature: str,
    dtype: str,
    of_class: int,
    number: int,
    longest: tuple[int, int] = LONGEST,
) -> FeatureCall:
    """Return a call of a feature; `number` determines its values and lengths."""
    rng, sizes = (np.random.default_rng((_SEED, *x)) for x in ((0, of_class), (1, number)))
    return FEATURES[feature](Draw(rng, sizes, dtype, HEAD_DIMS, longest))


def numbered(number: int) -> tuple[FeatureCall, str | None]:
    """Return the call of a number, and the family that is requested on a GPU."""
    of_class = number % CLASSES + number // COUNT * CLASSES
    feature = list(FEATURES)[of_class % len(FEATURES)]
    dtype = list(DTYPES)[of_class // len(FEATURES) % len(DTYPES)]
    call = feature_call(feature, dtype, of_class, number)
    families = FAMILIES[call.direction] if call.direction else ()
    return call, np.random.default_rng((_SEED, 2, of_class)).choice([None, *families])


def check(number: int, xp: Any) -> None:
    """Fail unless the results of a call are as close to the reference as the error rule requires.

    On a GPU, calls of most classes request a family.
    """
    call, family = numbered(number)
    try:
        call.check(xp, None if xp is np else family)
    except Exception as error:
        raise AssertionError(f"call {number} by {family}: {error}: {call.name}") from error


def main(where: str = "cpu", first: str = "0", count: str = str(COUNT)) -> int:
    """Run calls, and print those that fail."""
    failed = 0
    for number in range(int(first), int(first) + int(count)):
        try:
            check(number, cupy if where == "gpu" else np)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
    print(f"{failed} of {count} calls failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
