"""Checks of a modification: the parameters of its Python function, and its CUDA source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from cupy_flash.mods.ir.expression import K_START, Q_START, B, H, I, J

# Nodes of the parameters that a function may have in addition to the score and captures.
POSITIONS = {"b": B, "h": H, "i": I, "j": J, "q_start": Q_START, "k_start": K_START}
# Names that no capture may have, because kernels define these values.
RESERVED = frozenset({"score", "row", *POSITIONS})
# Text that would have an effect outside of the function whose body the CUDA source is.
_REFUSED_TEXT = re.compile(r"#|%:|\?\?|\\|\b(?:__)?asm(?:__)?\b|\b__shared__\b|\b_Pragma\b")
_PARAMETER = re.compile(r"[A-Za-z](?:_?[A-Za-z0-9])*_?")
# Keywords of C++, and macros and types that are defined where the source is compiled.
_CPP_TEXT = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires return short signed
sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename typeof typeof_unqual union unsigned using virtual void volatile wchar_t
while xor xor_eq
NULL Capture Real bfloat16_t half_t
"""
_CPP_WORDS = frozenset(_CPP_TEXT.split())


def parameters_of(
    function: Callable[..., Any], first: tuple[str, ...], captures: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of the arguments that a function is called with.

    Raises
    ------
    TypeError
        If a parameter is neither a position nor a capture, or a capture is not a parameter.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{function!r} has no signature; pass a function, such as lambda score: ..."
        ) from error
    allowed = {*first, *POSITIONS, *captures}
    names = []
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the function takes {parameter}; expected named parameters")
        if name in allowed:
            names.append(name)
        elif parameter.default is parameter.empty:
            known = ", ".join([*first, *POSITIONS])
            raise TypeError(
                f"the function takes {name!r}, which is neither one of {known} nor a capture; "
                "rename it, for example to i for the query's position or j for the key's, or pass "
                f"{name}=... with the function"
            )
    if missing := [name for name in captures if name not in names]:
        raise TypeError(
            f"the function does not take the capture {missing[0]!r}; add the parameter or leave "
            "the capture out"
        )
    if tuple(names[: len(first)]) != first:
        raise TypeError(f"the function takes ({', '.join(names)}); expected {first[0]!r} first")
    return tuple(names)


def check_text(cuda: str, parameters: tuple[str, ...]) -> None:
    """Raise TypeError unless CUDA source can be the body of a function with these parameters."""
    if not isinstance(cuda, str):
        raise TypeError(f"cuda is {cuda!r}; expected the body of a function as a string")
    if found := _REFUSED_TEXT.search(cuda):
        raise TypeError(
            f"cuda contains {found[0]!r}; expected the body of a function without directives, "
            "assembly, shared memory or backslashes"
        )
    for name in parameters:
        if not _PARAMETER.fullmatch(name) or name in _CPP_WORDS:
            raise TypeError(
                f"a capture is named {name!r}, which cannot be the name of a parameter in C++, "
                "the language of cuda; choose another name"
            )
    depth = 0
    for character in cuda:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth or not re.search(r"\breturn\b", cuda):
        raise TypeError(
            "cuda has no return statement, or unbalanced braces; expected the body of a function"
        )
