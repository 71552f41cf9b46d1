"""Problem classes: their text, and parsing it."""

from __future__ import annotations

import dataclasses

import pytest

from cupy_flash.planning.problem_class import ProblemClass

DENSE = ProblemClass("bfloat16", 128, 64, False, 4096, 1024, 65536, 16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "packed", "page_size", "cache_dtype", "values_in_keys"),
    [
        ("", False, 0, None, False),
        ("cache", False, 0, None, False),
        ("page16", False, 16, None, False),
        ("packed", True, 0, None, False),
        ("packed-page64", True, 64, None, False),
        ("int8-cache", False, 0, "int8", False),
        ("float8_e4m3fn-page16", False, 16, "float8_e4m3fn", False),
        ("int8-packed-page64", True, 64, "int8", False),
        ("latent-cache", False, 0, None, True),
        ("int8-latent-page16", False, 16, "int8", True),
    ],
)
def test_what_is_written_is_parsed(
    kind: str,
    packed: bool,
    page_size: int,
    cache_dtype: str | None,
    values_in_keys: bool,
    causal: bool,
) -> None:
    one = dataclasses.replace(DENSE, kind=kind, causal=causal)

    assert ProblemClass.parse(str(one)) == one
    assert (one.packed, one.page_size) == (packed, page_size)
    assert (one.cache_dtype, one.values_in_keys) == (cache_dtype, values_in_keys)


@pytest.mark.parametrize("text", ["", "spelled otherwise", f"{DENSE} heap", str(DENSE)[:-3]])
def test_what_is_spelled_otherwise_is_no_class(text: str) -> None:
    assert ProblemClass.parse(text) is None
