"""Functions that `torch.compile` leaves outside of its graphs. This module does not import PyTorch.

Traced, the library would see tensors without memory. The functions of `cupy_flash.torch` are
operators in graphs. All others are opaque: a call from a compiled function splits the graph, or
raises an error with `fullgraph=True`.

After a split, and after an operation that it does not support, PyTorch's compiler (Dynamo) also
traces the functions that the remaining program calls. So a mark on a function is not enough: the
function itself has to find out whether it is traced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., Any])

_REASON = (
    "functions of cupy_flash are not part of a graph; call those of cupy_flash.torch, and create "
    "ScoreMod, MaskMod and BlockList outside of the compiled function"
)
_modules = sys.modules


def is_dynamo_tracing() -> bool:
    """Return whether Dynamo traces the caller."""
    # While another thread imports torch, the module has no attributes yet.
    compiler: Any = getattr(_modules.get("torch"), "compiler", None)
    # Dynamo replaces this function by a constant.
    return hasattr(compiler, "is_dynamo_compiling") and compiler.is_dynamo_compiling()


def marked(function: _F, reason: str = _REASON) -> _F:
    """Mark a function so that calls from traced functions split the graph; return the function.

    The function is one that calls an opaque function before it reads a tensor. `reason` is part of
    the error with `fullgraph=True`.
    """
    # Attributes that `torch.compiler.disable` sets.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def opaque(function: _F) -> _F:
    """Return a function that is computed outside of graphs.

    It costs a third of a microsecond. Functions whose host time counts are `marked`, and call
    `outside` themselves.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if is_dynamo_tracing():
            return outside(function, arguments, options)
        return function(*arguments, **options)

    return cast("_F", marked(call))


def untraced(function: _F) -> _F:
    """Return a function as `opaque` does, for functions that may receive no tensor as an argument.

    Dynamo runs the function itself if it sees no tensor among its arguments, but then traces those
    that it calls.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" in _modules:
            return outside(function, arguments, options)
        return function(*arguments, **options)

    return cast("_F", marked(call))


@marked
def outside(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the result of a function, which neither it nor its callees let Dynamo trace."""
    if function not in _untraced:
        _untraced[function] = _modules["torch"].compiler.disable(function)
    return _untraced[function](*arguments, **(options or {}))


_untraced: dict[Callable[..., Any], Callable[..., Any]] = {}
