"""Block maps of random masks, built on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.block_map_text import compiled_masks
from support.function_maps import random_map_spec, wrong_map
from support.function_runs import modification
from support.random_functions import Function, random_function

from cupy_flash.calls.block_maps import mask_text
from cupy_flash.mods.modification import MaskMod

COUNT, PART = 360, 12
DTYPES = ("float32", "float16", "float64")


def masks(begin: int, inputs: str) -> list[tuple[Function, MaskMod]]:
    functions = [random_function(2 * n + 1, "mask", inputs) for n in range(begin, begin + PART)]
    mods = [modification(function) for function in functions]
    return [(f, mod) for f, mod in zip(functions, mods, strict=True) if isinstance(mod, MaskMod)]


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(begin, marks=pytest.mark.slow if begin else ())
        for begin in range(0, COUNT, PART)
    ],
)
def test_a_map_hides_no_seen_pair_and_shows_no_hidden_one(begin: int, tmp_path: Path) -> None:
    inputs = DTYPES[begin // PART % len(DTYPES)]
    some = masks(begin, inputs)
    hosts = compiled_masks(tmp_path, [mod for _, mod in some], inputs, builds=True)
    for (function, mod), host in zip(some, hosts, strict=True):
        spec = random_map_spec(function)
        maps = spec.maps(mask_text(mod, inputs))
        why = wrong_map(host.build(spec), function, spec, maps)
        assert why is None, f"{why}\n{spec}\n{function}"
