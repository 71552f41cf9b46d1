"""Python functions that XLA calls: errors, signals, threads, and the end of the process."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.in_jax import run_program

jax = pytest.importorskip("jax")
cj = pytest.importorskip("cupy_flash.jax")
handlers = pytest.importorskip("cupy_flash.jax.handlers")

# Handlers that tests have registered: XLA cannot forget a name.
names = (f"cupy_flash.test.{number}" for number in range(1000))


def registered(execute: Callable[[int], None]) -> Callable[[Any], Any]:
    """Return a compiled function that calls a handler of its own."""
    from cupy_flash.jax.handlers import register
    from cupy_flash.jax.versions import ffi

    name = next(names)
    register(name, "cpu", execute)

    def call(x: Any) -> Any:
        return ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, text="text")

    return jax.jit(call)


def copy(address: int) -> None:
    from cupy_flash.jax.frames import read_frame

    frame = read_frame(address)
    assert frame.text == b"text"
    (key,), (given,), (made,) = frame.keys(), frame.addresses, frame.results
    assert frame.result_keys() == (key,)
    assert key[0] == 11
    ctypes.memmove(made, given, 4 * math.prod(key[1]))


def test_an_array_reaches_a_handler_in_c_order() -> None:
    x = jax.numpy.arange(24.0).reshape(2, 3, 4)
    call = registered(copy)
    np.testing.assert_array_equal(call(x), x)
    np.testing.assert_array_equal(call(x.transpose(2, 0, 1)), x.transpose(2, 0, 1))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_becomes_an_error_of_the_computation(error: type[BaseException]) -> None:
    fails = True

    def execute(address: int) -> None:
        if fails:
            raise error("no such thing")
        copy(address)

    call = registered(execute)
    for _ in range(3):
        with pytest.raises(Exception, match=f"{error.__name__}: no such thing"):
            call(jax.numpy.ones(3)).block_until_ready()
    fails = False
    np.testing.assert_array_equal(call(jax.numpy.ones(3)), np.ones(3))


def test_a_handler_may_wait_for_another_one() -> None:
    inner = registered(copy)

    def execute(address: int) -> None:
        np.testing.assert_array_equal(inner(jax.numpy.ones(2)), np.ones(2))
        copy(address)

    call = registered(execute)
    np.testing.assert_array_equal(call(jax.numpy.ones(3)), np.ones(3))


def test_threads_call_attention_at_the_same_time(rng: np.random.Generator) -> None:
    q = jax.numpy.asarray(rng.standard_normal((2, 9, 2, 8)), np.float32)
    step = jax.jit(jax.grad(lambda q: (cj.flash_attention(q, q, q, causal=True) ** 2).sum()))
    expected = np.asarray(step(q))
    found: list[Any] = []

    def work() -> None:
        for _ in range(30):
            found.append(np.asarray(step(q)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 240
    for one in found:
        np.testing.assert_array_equal(one, expected)


def test_signals_do_not_end_the_process() -> None:
    assert run_program("interrupted_calls", "cpu", 1000, JAX_PLATFORMS="cpu") == "all right\n"


def test_the_process_may_end_before_its_computations() -> None:
    assert run_program("unfinished_calls", "cpu", JAX_PLATFORMS="cpu") == "all right\n"


def test_any_number_of_signals_may_be_raised_while_an_error_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals = [KeyboardInterrupt()] * 5

    def failure(error: BaseException) -> int:
        if signals:
            raise signals.pop()
        return 7

    def call(address: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(handlers, "_failure", failure)
    generator = handlers._resumed(call, lambda is_busy: None)
    next(generator)
    assert [generator.send(3), generator.send(3)] == [7, 7]
    assert not signals
