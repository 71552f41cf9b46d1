"""Random mask and score functions on a GPU: alone, in attention, gradients and block masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.draws import few_then_slow
from support.gpu import cupy
from support.gpu.gpu_support import current_device
from support.mods.block_mask_cuda import launched, map_of, read_map
from support.mods.function_calls import function_calls
from support.mods.function_maps import random_map_spec, wrong_map
from support.mods.function_runs import Case, modification, report
from support.mods.function_units import Unit
from support.mods.random_functions import random_function

from cupy_flash import MaskMod, UnsupportedError
from cupy_flash.calls.gpu.block_masks import mask_text
from cupy_flash.gpu.block_mask_layout import Layout

pytestmark = pytest.mark.gpu

# Half of the functions are masks, half are score functions. A translation unit has 100 of them.
COUNT, PART = 10_000, 100
# Number of tests whose functions differ between runs.
FRESH = 20
# Numbers of attention calls and of block masks, ten per test. All but the first `QUICK` are slow.
CALLS, QUICK = 300, 60
DTYPES = ("float16", "bfloat16", "float32", "float64")
FAMILIES = {
    "float16": ("hopper", "mma"),
    "bfloat16": ("hopper", "mma"),
    "float32": ("hopper", "mma", "simt"),
    "float64": ("simt", "naive"),
}


def check_unit(numbers: list[int]) -> None:
    cases = [Case.of(random_function(number)) for number in numbers]
    unit = Unit(cases)
    wrong = unit.run(unit.compiled(current_device()))
    assert not wrong, report(wrong, [case.function for case in cases])


@pytest.mark.parametrize("begin", range(0, COUNT, PART))
def test_kernels_compute_random_functions(begin: int) -> None:
    check_unit(list(range(begin, begin + PART)))


def test_kernels_compute_functions_that_once_were_wrong() -> None:
    # A comparison of |NaN| with a negative number.
    check_unit([840504095])


@pytest.mark.parametrize("_", range(FRESH))
def test_kernels_compute_new_random_functions(_: int, rng: np.random.Generator) -> None:
    check_unit([int(n) for n in rng.integers(10**6, 10**9, PART)])


@pytest.mark.parametrize("begin", few_then_slow(range(0, CALLS, 10), QUICK // 10))
def test_attention_and_its_gradients_see_the_same_pairs(begin: int) -> None:
    inputs = DTYPES[begin // 10 % 4]
    for number, call in enumerate(itertools.islice(function_calls(begin + 1, inputs), 10)):
        families = FAMILIES[inputs]
        family = families[number % len(families)]
        try:
            call.check(cupy, family=family, backward=family if family != "naive" else None)
        except UnsupportedError:
            # If the requested family does not support the call, another one does.
            call.check(cupy)


@pytest.mark.parametrize("begin", few_then_slow(range(0, CALLS, 10), QUICK // 10))
def test_block_masks_hide_no_seen_pair_and_show_no_hidden_one(begin: int) -> None:
    inputs = DTYPES[begin // 10 % 3]
    for number in range(begin, begin + 10):
        function = random_function(2 * number + 1, "mask", inputs)
        captured = {
            name: cupy.asarray(x) if isinstance(x, np.ndarray) else x
            for name, x in function.captures.items()
        }
        on_gpu = modification(function, captured)
        assert isinstance(on_gpu, MaskMod)
        spec = random_map_spec(function)
        ready = map_of(on_gpu, spec, inputs)
        mask = ready.block_mask
        memory = cupy.ndarray((mask.layout.bytes,), np.uint8, memptr=mask.memory).get()
        launched(ready)
        text = mask_text(on_gpu, inputs)
        maps = spec.maps(text)
        found = read_map(spec, maps, memory, Layout.of(spec, text))
        why = wrong_map(found, function, spec, maps)
        assert why is None, f"{why}\n{spec}\n{function}"
