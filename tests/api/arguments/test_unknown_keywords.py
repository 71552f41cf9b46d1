"""Errors for unknown keywords name an argument of the function, or of a function that has it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cupy_flash
from cupy_flash.mods import keywords
from cupy_flash.mods.unknown_keywords import INSTEAD, UNSUPPORTED

Q, LSE = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 2, 4), np.float32)
QKV, ROWS, STARTS = np.stack([Q] * 3, 2), Q[0], [0, 4]
LENGTHS = (STARTS, STARTS, 4, 4)
DENSE, PACKED, GRADIENTS = (Q, Q, Q), (ROWS, ROWS, ROWS, *LENGTHS), (Q, Q, Q, Q, Q, LSE)
PACKED_GRADIENTS = (ROWS, ROWS, ROWS, ROWS, ROWS, LSE[0], *LENGTHS)
# Arguments for a call of each function that takes masks or score modifications.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "attention_backward_reference": ((Q, Q, Q, Q), {}),
    "attention_hvp_reference": ((Q, Q, Q, Q), {}),
    "attention_jvp_reference": (DENSE, {}), "attention_reference": (DENSE, {}),
    "attention_varlen_backward_reference": ((ROWS, *PACKED), {}),
    "attention_varlen_hvp_reference": ((ROWS, *PACKED), {}),
    "attention_received": ((Q, Q), {}), "attention_varlen_jvp_reference": (PACKED, {}),
    "attention_received_varlen": ((ROWS, ROWS, *LENGTHS), {}),
    "attention_received_with_kvcache": ((Q, Q), {"cache_seqlens": 4}),
    "attention_weights_varlen": ((ROWS, ROWS, *LENGTHS), {}),
    "attention_weights_with_kvcache": ((Q, Q), {"cache_seqlens": 4}),
    "attention_varlen_reference": (PACKED, {}), "attention_weights": ((Q, Q), {}),
    "attention_with_kvcache_reference": (DENSE, {"cache_seqlens": 4}),
    "flash_attention": (DENSE, {}), "flash_attention_backward": (GRADIENTS, {}),
    "flash_attention_hvp": ((Q, Q, Q, Q), {}), "flash_attention_jvp": (DENSE, {}),
    "flash_attention_qkvpacked": ((QKV,), {}),
    "flash_attention_qkvpacked_backward": ((Q, QKV, Q, LSE), {}),
    "flash_attention_qkvpacked_vjp": ((QKV,), {}), "flash_attention_varlen": (PACKED, {}),
    "flash_attention_varlen_backward": (PACKED_GRADIENTS, {}),
    "flash_attention_varlen_hvp": ((ROWS, *PACKED), {}),
    "flash_attention_varlen_jvp": (PACKED, {}),
    "flash_attention_varlen_vjp": (PACKED, {}), "flash_attention_vjp": (DENSE, {}),
    "flash_attention_with_kvcache": (DENSE, {"cache_seqlens": 4}), "plot_mask": ((4, 4), {}),
    "seen_pairs": ((4, 4), {}),
}  # fmt: skip
NOT_OF_CACHES = {"seqlens_k", "dropout_p", "dropout_seed"}
OF_LIBRARY = ("flash_attention", "flash_attention_qkvpacked", "flash_attention_varlen")
PUBLIC = [("cupy_flash", name) for name in CALLS]
# Functions that differentiable modules have under the same names.
OF_MODULES = {
    "cupy_flash.jax": (*OF_LIBRARY, "flash_attention_with_kvcache"),
    "cupy_flash.torch": OF_LIBRARY,
}
PUBLIC += [(module, name) for module, names in OF_MODULES.items() for name in names]
EVERY_FUNCTION = pytest.mark.parametrize(
    ("module", "name"), PUBLIC, ids=[f"{module}.{name}" for module, name in PUBLIC]
)


def accepted(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments and of its masks and score modifications."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            found.append(parameter.name)
            continue
        kind = parameter.annotation.removeprefix("Unpack[").removesuffix("]")
        modifications = getattr(keywords, kind).__annotations__
        # Functions for packed sequences and KV caches have other arguments instead of seqlens_k,
        # and a KV cache has no dropout.
        missing = {"PackedModifications": {"seqlens_k"}, "CacheModifications": NOT_OF_CACHES}
        found += [n for n in modifications if n not in missing.get(kind, ())]
    return found


def with_modifications(module: ModuleType) -> list[str]:
    """Return the public functions of a module that take masks or score modifications."""
    functions = {name: getattr(module, name) for name in module.__all__}
    return [
        name
        for name, function in functions.items()
        if inspect.isfunction(function)
        and "modifications" in inspect.signature(function).parameters
    ]


EVERY_ARGUMENT = {n for name in CALLS for n in accepted(getattr(cupy_flash, name))}


def function_of(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(pytest.importorskip(module), name)
    return function


def told(module: str, name: str, keyword: str) -> str:
    """Return the part of the error for an unknown keyword that follows the keyword."""
    arguments, named = CALLS[name]
    if module == "cupy_flash.torch":
        torch = pytest.importorskip("torch")
        arguments = tuple(torch.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments)
    with pytest.raises(TypeError) as caught:
        function_of(module, name)(*arguments, **named, **{keyword: 1})
    before, _, advice = str(caught.value).partition("; ")
    assert before == f"unexpected keyword argument {keyword!r}"
    return advice


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_every_function_that_takes_modifications_is_tried() -> None:
    assert sorted(CALLS) == with_modifications(cupy_flash)


@pytest.mark.parametrize("module", OF_MODULES)
def test_every_such_function_of_a_library_is_tried(module: str) -> None:
    assert with_modifications(pytest.importorskip(module)) == list(OF_MODULES[module])


@EVERY_FUNCTION
def test_advice_names_arguments_of_the_called_function(module: str, name: str) -> None:
    own = set(accepted(function_of(module, name)))
    for keyword in (*INSTEAD, *UNSUPPORTED):
        advice = told(module, name, keyword)
        if advice.startswith("pass "):
            # Axes are written in parentheses.
            meant = words(re.sub(r"\(.*?\)", "", advice)) & EVERY_ARGUMENT
            assert meant, keyword
            assert meant <= own, keyword
        elif advice.startswith(("it is ", "it corresponds to ")):
            meant = words(advice.partition(" of ")[0]) & EVERY_ARGUMENT
            functions = re.findall(r"flash_attention\w*", advice)
            assert meant, keyword
            assert functions, keyword
            assert not meant <= own, keyword
            for other in functions:
                assert meant <= set(accepted(getattr(cupy_flash, other))), keyword
        else:
            assert advice == UNSUPPORTED[keyword]


@EVERY_FUNCTION
def test_an_unknown_name_is_told_those_that_the_function_takes(module: str, name: str) -> None:
    label = name if module == "cupy_flash" else f"{module}.{name}"
    expected = ", ".join(accepted(function_of(module, name)))
    assert told(module, name, "frobnicate") == f"{label} takes {expected}"


@pytest.mark.parametrize("name", CALLS)
def test_modifications_that_a_function_is_said_to_take_are_taken(name: str) -> None:
    arguments, named = CALLS[name]
    function = getattr(cupy_flash, name)
    listed = words(told("cupy_flash", name, "frobnicate").partition(" takes ")[2])
    for modification in (listed & keywords.NAMES) - {"q_offset"}:
        value = [3] if modification in keywords.ARRAYS else None
        refused = ""
        try:
            function(*arguments, **named, **{modification: value})
        except (TypeError, ValueError) as error:
            refused = str(error)
        assert not re.search("unexpected| is for ", refused)


@pytest.mark.parametrize(
    ("name", "keyword", "advice"),
    [
        ("flash_attention_with_kvcache", "cu_seqlens_kv",
         "it corresponds to cu_seqlens_k of flash_attention_varlen"),
        ("flash_attention_with_kvcache", "q_descale",
         "it corresponds to q_scale of flash_attention"),
        ("flash_attention_with_kvcache", "kv_seqlens", "pass cache_seqlens"),
        ("flash_attention_varlen", "kv_lens", "pass seqused_k"),
        ("flash_attention", "page_table",
         "it corresponds to block_table of flash_attention_varlen and "
         "flash_attention_with_kvcache"),
        # The error names the function with this argument and the same results.
        ("flash_attention_backward", "cu_seqlens_kv",
         "it corresponds to cu_seqlens_k of flash_attention_varlen_backward"),
        ("flash_attention_vjp", "cu_seqlens_q", "it is an argument of flash_attention_varlen_vjp"),
        ("flash_attention_varlen", "Window_Size", "did you mean 'window_size'?"),
        ("flash_attention_varlen", "seqused_kv", "did you mean 'seqused_k'?"),
    ],
)  # fmt: skip
def test_advice_depends_on_the_function(name: str, keyword: str, advice: str) -> None:
    assert told("cupy_flash", name, keyword) == advice


@pytest.mark.parametrize("keyword", ["qv", "use_cache", "rotary_dim"])
@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_is_not_near_is_no_misspelling(name: str, keyword: str) -> None:
    assert told("cupy_flash", name, keyword).startswith(f"{name} takes ")


def test_a_plan_is_advised_as_its_function() -> None:
    q = np.zeros((1, 4, 2, 8), np.float16)
    with pytest.raises(TypeError, match=r"'page_table'; it corresponds to block_table of flash"):
        cupy_flash.plan(cupy_flash.flash_attention, q, q, q, page_table=q)
    with pytest.raises(TypeError, match="'qv'; flash_attention_backward takes dout, q, k, v, "):
        cupy_flash.plan(cupy_flash.flash_attention_backward, q=q, k=q, v=q, qv=q)


@pytest.mark.parametrize("keyword", ["backend", "family", "out", "q_scale", "stream", "tile"])
def test_what_only_plain_functions_have_is_told_with_what_to_do(keyword: str) -> None:
    advice = told("cupy_flash.torch", "flash_attention", keyword)
    assert advice.startswith(
        "leave it out, as "
        if keyword in ("backend", "stream")
        else "cupy_flash.torch.flash_attention does not take it; call cupy_flash.flash_attention, "
        "which does, but without gradients by "
    )


@pytest.mark.parametrize("keyword", ["backend", "out", "return_lse", "stream"])
def test_what_functions_of_jax_lack_is_told_to_be_left_out(keyword: str) -> None:
    advice = told("cupy_flash.jax", "flash_attention_with_kvcache", keyword)
    assert advice.startswith("leave it out, as ")
