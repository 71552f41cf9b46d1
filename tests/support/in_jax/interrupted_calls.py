"""Program that is interrupted by signals while it computes attention on its main thread.

Arguments: platform of JAX, and number of signals.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import numpy as np

# The handlers guard the main thread wherever they are made.
importing = threading.Thread(target=importlib.import_module, args=("cupy_flash.jax",))
importing.start()
importing.join()
import cupy_flash.jax as cj  # noqa: E402

# Python does not handle this signal if the program was started in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
platform, signals = sys.argv[1], int(sys.argv[2])
(device, *_) = jax.devices(platform)
q = jax.device_put(
    np.random.default_rng(0).standard_normal((1, 4, 2, 8)).astype(np.float32), device
)
escaped: list[Any] = []
sys.unraisablehook = escaped.append
seen: collections.Counter[str] = collections.Counter()


@jax.jit
def one(q: Any) -> Any:
    return cj.flash_attention(q, q, q)


@jax.jit
def several(q: Any) -> Any:
    return jax.lax.fori_loop(0, 20, lambda _, x: cj.flash_attention(x, q, q), q)


expected = np.asarray(one(q)), np.asarray(several(q))


def step() -> None:
    try:
        found = one(q).block_until_ready(), several(q).block_until_ready()
        seen["done"] += 1
    except BaseException as error:
        seen[type(error).__name__] += 1
    else:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


started = threading.Event()


def interrupt() -> None:
    started.wait()
    for i in range(signals):
        time.sleep(0.002 + 0.0003 * (i % 7))
        os.kill(os.getpid(), signal.SIGINT)


sender = threading.Thread(target=interrupt)
sender.start()


def work() -> None:
    # A signal may come in the handling of another one, and outside of a step.
    while sender.is_alive():
        try:
            # `Thread.start` itself must not be interrupted, so the first signal comes after it.
            started.set()
            while sender.is_alive():
                step()
        except KeyboardInterrupt:
            seen["between"] += 1


# A signal may also come where `work` handles one.
while sender.is_alive():
    with contextlib.suppress(KeyboardInterrupt):
        work()
signal.signal(signal.SIGINT, signal.SIG_IGN)
# Each exception that left a callback would have gone to XLA as an undefined result. JAX's hook of
# the garbage collector, which is a Python function, may be interrupted.
ours = [x for x in escaped if getattr(x.object, "__name__", "") != "_xla_gc_callback"]
assert not ours, ours[0]
interrupted = sum(count for name, count in seen.items() if name != "done")
assert seen["done"], seen
assert interrupted >= signals / 4, seen
np.testing.assert_array_equal(one(q), expected[0])
print("all right")
