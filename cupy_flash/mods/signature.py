"""What a modification is written in, checked: a function's parameters, and CUDA text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from cupy_flash.mods.expression import K_START, Q_START, B, H, I, J

# What a function may name, besides the score and captures.
POSITIONS = {"b": B, "h": H, "i": I, "j": J, "q_start": Q_START, "k_start": K_START}
# What would reach past the function that the text is the body of.
_REFUSED_TEXT = re.compile(r"#|%:|\?\?|\\|\b(?:__)?asm(?:__)?\b|\b__shared__\b|\b_Pragma\b")


def parameters_of(
    function: Callable[..., Any], first: tuple[str, ...], captures: Mapping[str, Any]
) -> tuple[str, ...]:
    """Names that a function is called with.

    Raises
    ------
    TypeError
        If they are not those of positions and of all captures.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{function!r} does not tell its parameters; pass a function, as lambda score: ..."
        ) from error
    allowed = {*first, *POSITIONS, *captures}
    names = []
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the function takes {parameter}; expected parameters with names")
        if name in allowed:
            names.append(name)
        elif parameter.default is parameter.empty:
            known = ", ".join([*first, *POSITIONS])
            raise TypeError(
                f"the function takes {name!r}, which is neither one of {known} nor a capture; "
                "rename it, as i for the query's position and j for the key's, or pass "
                f"{name}=... beside the function"
            )
    if missing := [name for name in captures if name not in names]:
        raise TypeError(
            f"the function does not take {missing[0]!r}, which it is to capture; add the parameter "
            "or leave the capture out"
        )
    if tuple(names[: len(first)]) != first:
        raise TypeError(f"the function takes ({', '.join(names)}); expected {first[0]!r} first")
    return tuple(names)


def check_text(cuda: str) -> None:
    """Raise TypeError for text that is no body of a function."""
    if not isinstance(cuda, str):
        raise TypeError(f"cuda is {cuda!r}; expected the text of a function's body")
    if found := _REFUSED_TEXT.search(cuda):
        raise TypeError(
            f"cuda has {found[0]!r}; it is the body of a function: no directives, assembly, shared "
            "memory or backslashes"
        )
    depth = 0
    for character in cuda:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth or not re.search(r"\breturn\b", cuda):
        raise TypeError(
            "cuda is the body of a function: it returns a value and closes the braces it opens"
        )


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the variables around it as they are now, whatever they become.

    What it computes is traced once; where it is called with arrays it has to be the same.
    """
    if not isinstance(function, FunctionType):
        return function
    outer = function.__globals__
    names = {"__builtins__", *_names_in(function.__code__)}
    made = FunctionType(
        function.__code__,
        {name: outer[name] for name in names if name in outer},
        function.__name__,
        function.__defaults__,
        tuple(map(_cell_as_it_is, function.__closure__ or ())),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _names_in(code: CodeType) -> Iterator[str]:
    """Of globals, and of attributes, in a function's code and in what is defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _cell_as_it_is(cell: CellType) -> CellType:
    try:
        return CellType(cell.cell_contents)
    except ValueError:
        # Not assigned yet.
        return cell
