"""Block maps of random masks, built on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mods.block_mask_cuda import compiled_masks
from support.mods.function_maps import random_map_spec, wrong_map
from support.mods.function_runs import modification
from support.mods.random_functions import Function, random_function

from cupy_flash.calls.gpu.block_masks import mask_text
from cupy_flash.gpu import block_mask_layout
from cupy_flash.mods.modification import MaskMod

COUNT, PART = 360, 12
DTYPES = ("float32", "float16", "float64")


def masks(begin: int, count: int, inputs: str) -> list[tuple[Function, MaskMod]]:
    functions = [random_function(2 * n + 1, "mask", inputs) for n in range(begin, begin + count)]
    mods = [modification(function) for function in functions]
    return [(f, mod) for f, mod in zip(functions, mods, strict=True) if isinstance(mod, MaskMod)]


@pytest.mark.parametrize(
    ("begin", "count"),
    [(0, 3), *(pytest.param(n, PART, marks=pytest.mark.slow) for n in range(0, COUNT, PART))],
)
def test_a_block_mask_hides_no_seen_pair_and_shows_no_hidden_one(
    begin: int, count: int, tmp_path: Path
) -> None:
    inputs = DTYPES[begin // PART % len(DTYPES)]
    some = masks(begin, count, inputs)
    hosts = compiled_masks(tmp_path, [mod for _, mod in some], inputs, builds=True)
    for (function, mod), host in zip(some, hosts, strict=True):
        spec = random_map_spec(function)
        maps = spec.maps(mask_text(mod, inputs))
        why = wrong_map(host.build(spec), function, spec, maps)
        assert why is None, f"{why}\n{spec}\n{function}"


@pytest.mark.slow
def test_a_band_of_2_30_without_a_bound_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = []
    for number in range(1, 400, 2):
        function = random_function(number, "mask", "float32")
        spec = random_map_spec(function)
        if spec.q_offset > 2**30 and spec.left is None:
            far.append((function, spec))
    mods = [mod for function, _ in far[:6] if isinstance(mod := modification(function), MaskMod)]
    hosts = compiled_masks(tmp_path, mods, builds=True)

    def wrong() -> list[str | None]:
        return [
            wrong_map(host.build(spec), function, spec, spec.maps(mask_text(mod, "float32")))
            for (function, spec), mod, host in zip(far, mods, hosts, strict=False)
        ]

    assert not any(wrong())
    monkeypatch.setattr(block_mask_layout, "UNBOUNDED", 2**30)
    assert any(wrong())
