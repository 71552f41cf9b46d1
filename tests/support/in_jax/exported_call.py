"""Program that runs an exported function. Arguments: file of the function, and of its arrays."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from jax import export

import cupy_flash.jax  # noqa: F401

exported = export.deserialize(bytearray(Path(sys.argv[1]).read_bytes()))
arrays = np.load(sys.argv[2])
value, gradient = exported.call(*(arrays[name] for name in ("q", "k", "v")))
np.testing.assert_array_equal(value, arrays["value"])
np.testing.assert_array_equal(gradient, arrays["gradient"])
print("all right")
