"""Tensor maps: requests to the driver, how often they are made, and which maps are cached."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cupy_flash.errors import DriverError
from cupy_flash.families.schedule import TensorMapSpec
from cupy_flash.gpu import tensor_map
from cupy_flash.gpu.by_value import ByValue
from cupy_flash.gpu.tensor_map import TensorMaps

CPointer = pytest.importorskip("cupy.cuda.function").CPointer

SPECS = {
    "q": TensorMapSpec("bfloat16", (128, 799, 6, 2), (1536, 256, 1536 * 799), (64, 192)),
    "k": TensorMapSpec("bfloat16", (128, 203, 3, 2), (768, 256, 768 * 203), (64, 128)),
    "v": TensorMapSpec("float16", (96, 203, 3, 2), (576, 192, 576 * 203), (32, 128)),
}
NAMES = ("q", "k", "v")
MAP_BYTES = 128


class Driver:
    """Fake of cuTensorMapEncodeTiled: records requests, and writes address and request number."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.status = 0

    def __call__(self, *arguments: Any) -> int:
        target, dtype, rank, address, shape, strides, box, steps, *modes = arguments
        assert target.value % 64 == 0, "the driver wants the record on 64 bytes"
        request = {"dtype": dtype.value, "rank": rank.value, "address": address.value}
        sizes = {"shape": shape, "strides": strides, "box": box, "steps": steps}
        request |= {name: tuple(values) for name, values in sizes.items()}
        self.requests.append(request | {"modes": tuple(mode.value for mode in modes)})
        words = [address.value, len(self.requests)] * (MAP_BYTES // 16)
        ctypes.memmove(target.value, np.array(words, np.uint64).ctypes.data, MAP_BYTES)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(tensor_map, "driver_function", lambda _: fake)
    return fake


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what earlier tests learned about the driver."""
    monkeypatch.setattr(tensor_map, "_only_addresses_differ", {})


def words_of(maps: ByValue) -> np.ndarray:
    """Return a row of 64-bit words for each map."""
    return np.frombuffer(bytes(maps.memory), np.uint64).reshape(-1, MAP_BYTES // 8)


def addresses_of(maps: ByValue) -> list[int]:
    """Return the address that the fake driver wrote into each map."""
    return [int(words[0]) for words in words_of(maps)]


def addresses(call: int) -> tuple[int, int, int]:
    return (2**33 + call * 48, 2**34 + call * 48 + 16, 2**35 + call * 48 + 32)


@pytest.fixture
def maps() -> TensorMaps:
    return TensorMaps(SPECS, NAMES)


def test_each_array_gets_one_map_with_its_own_address_shape_strides_and_box(driver, maps):
    assert addresses_of(maps.maps_for(addresses(0))) == list(addresses(0))
    asked = driver.requests[: len(SPECS)]
    assert [request["address"] for request in asked] == list(addresses(0))
    for request, spec in zip(asked, SPECS.values(), strict=True):
        assert request["rank"] == 4
        assert request["shape"] == spec.shape
        assert request["strides"] == spec.strides
        assert request["box"] == (*spec.box, 1, 1)
        assert request["steps"] == (1, 1, 1, 1)


def test_addresses_are_found_among_other_values_by_their_names(driver):
    maps = TensorMaps(SPECS, ("out", "v", "keys", "k", "q"))
    q, k, v = addresses(0)
    assert addresses_of(maps.maps_for((1, v, 2, k, q))) == [q, k, v]
    assert maps.maps_for((3, v, 4, k, q)) is maps.maps_for((1, v, 2, k, q))


def test_dtype_and_swizzle_are_the_drivers_enumerators(driver, maps):
    # In cuda.h, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 is 6 and BFLOAT16 9, CU_TENSOR_MAP_SWIZZLE_64B 2
    # and 128B 3, CU_TENSOR_MAP_L2_PROMOTION_L2_128B 2. No interleave and a fill with zeros are 0.
    maps.maps_for(addresses(0))
    assert [request["dtype"] for request in driver.requests[:3]] == [9, 9, 6]
    modes = [request["modes"] for request in driver.requests[:3]]
    assert modes == [(0, 3, 2, 0), (0, 3, 2, 0), (0, 2, 2, 0)]


def test_a_kernel_gets_the_maps_by_value_one_after_another(driver, maps):
    found = maps.maps_for(addresses(0))
    assert isinstance(found.pointer, CPointer)
    assert len(found.memory) == len(SPECS) * MAP_BYTES


def test_the_same_addresses_are_encoded_once(driver, maps):
    first = maps.maps_for(addresses(0))
    driver.requests.clear()
    assert all(maps.maps_for(addresses(0)) is first for _ in range(10))
    assert not driver.requests


def test_maps_of_earlier_addresses_stay_as_they_were(driver, maps):
    kept = [maps.maps_for(addresses(call)) for call in range(20)]
    for call, scalar in enumerate(kept):
        assert addresses_of(scalar) == list(addresses(call))
        assert maps.maps_for(addresses(call)) is scalar


def test_one_changed_address_is_another_set(driver, maps):
    q, k, v = addresses(0)
    maps.maps_for((q, k, v))
    assert addresses_of(maps.maps_for((q, k, v + 16))) == [q, k, v + 16]
    assert addresses_of(maps.maps_for((q, k, v))) == [q, k, v]


def test_the_cache_is_bounded_and_what_fell_out_is_encoded_again(driver, maps, monkeypatch):
    monkeypatch.setattr(tensor_map, "_MAX_SETS", 8)
    for call in range(50):
        assert addresses_of(maps.maps_for(addresses(call))) == list(addresses(call))
        assert len(maps._encoded) <= 8
    driver.requests.clear()
    maps.maps_for(addresses(49))
    assert not driver.requests, "the newest set was not kept"
    assert addresses_of(maps.maps_for(addresses(0))) == list(addresses(0))
    assert len(driver.requests) == len(SPECS)


def test_a_failure_of_the_driver_is_an_error_that_leaves_nothing_behind(driver, maps):
    driver.status = 1
    with pytest.raises(DriverError, match="cuTensorMapEncodeTiled failed with CUresult 1"):
        maps.maps_for(addresses(0))
    driver.status = 0
    assert addresses_of(maps.maps_for(addresses(0))) == list(addresses(0))


def test_threads_that_call_at_once_get_the_maps_of_their_own_addresses(driver, maps, monkeypatch):
    # So few maps are cached that the threads constantly evict those of other threads.
    monkeypatch.setattr(tensor_map, "_MAX_SETS", 4)
    start = threading.Barrier(4)
    wrong = []

    def work(thread: int) -> None:
        start.wait(30)
        for call in range(300):
            mine = addresses(thread * 1000 + call % 7)
            if addresses_of(maps.maps_for(mine)) != list(mine):
                wrong.append(mine)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong
    assert len(maps._encoded) <= 4


class PlainDriver(Driver):
    """Fake driver whose maps with equal boxes differ only in the first word, the address."""

    def __call__(self, *arguments: Any) -> int:
        status = super().__call__(*arguments)
        target, address, columns = arguments[0].value, arguments[3].value, arguments[6][0]
        words = [address, *range(columns, columns + MAP_BYTES // 8 - 1)]
        ctypes.memmove(target, np.array(words, np.uint64).ctypes.data, MAP_BYTES)
        return status


@pytest.fixture
def plain_driver(monkeypatch: pytest.MonkeyPatch) -> PlainDriver:
    fake = PlainDriver()
    monkeypatch.setattr(tensor_map, "driver_function", lambda _: fake)
    return fake


def test_a_format_that_is_understood_is_written_without_the_driver(plain_driver, maps):
    first = maps.maps_for(addresses(0))
    plain_driver.requests.clear()
    for call in range(1, 20):
        found = maps.maps_for(addresses(call))
        assert addresses_of(found) == list(addresses(call))
        assert np.array_equal(words_of(found)[:, 1:], words_of(first)[:, 1:])
    assert not plain_driver.requests
    assert addresses_of(first) == list(addresses(0))


def test_the_format_is_probed_with_addresses_that_differ_in_every_bit(plain_driver, maps):
    maps.maps_for(addresses(0))
    for array in range(len(SPECS)):
        asked = [request["address"] for request in plain_driver.requests[array :: len(SPECS)]]
        changed = 0
        for address in asked:
            changed |= address ^ asked[0]
        assert changed == 2**46 - 2**8, "a bit was never tried"
        assert all(address % 16 == addresses(0)[array] % 16 for address in asked)


def test_other_lengths_are_not_probed_again(plain_driver, maps):
    maps.maps_for(addresses(0))
    asked = len(plain_driver.requests)
    others = {
        name: dataclasses.replace(spec, shape=(spec.shape[0], 11, *spec.shape[2:]))
        for name, spec in SPECS.items()
    }
    other_maps = TensorMaps(others, NAMES)
    for call in range(1, 5):
        assert addresses_of(other_maps.maps_for(addresses(call))) == list(addresses(call))
    assert len(plain_driver.requests) == asked + len(SPECS)
    # Maps with another box are probed again.
    plain_driver.requests.clear()
    boxes = {name: dataclasses.replace(spec, box=(32, 16)) for name, spec in SPECS.items()}
    TensorMaps(boxes, NAMES).maps_for(addresses(0))
    assert len(plain_driver.requests) == asked


@pytest.mark.parametrize("fails", ["the first word", "another word", "status"])
def test_a_driver_that_does_more_than_write_the_address_is_always_asked(monkeypatch, maps, fails):
    class Odd(PlainDriver):
        def __call__(self, *arguments: Any) -> int:
            status = super().__call__(*arguments)
            target, address = arguments[0].value, arguments[3].value
            # This driver treats high addresses, such as those of the probes, in another way.
            if address >> 40 == 0:
                return status
            if fails == "status":
                return 1
            word = 0 if fails == "the first word" else 5
            ctypes.memmove(target + 8 * word, ctypes.byref(ctypes.c_uint64(77)), 8)
            return status

    odd = Odd()
    monkeypatch.setattr(tensor_map, "driver_function", lambda _: odd)
    maps.maps_for(addresses(0))
    odd.requests.clear()
    for call in range(1, 20):
        assert addresses_of(maps.maps_for(addresses(call))) == list(addresses(call))
    assert len(odd.requests) == 19 * len(SPECS)
