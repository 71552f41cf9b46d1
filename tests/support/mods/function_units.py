"""Random functions on a GPU: many per translation unit, each called as kernels call it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_flash.errors import CompileError
from cupy_flash.families.contract import TranslationUnit, round_up
from cupy_flash.gpu.by_value import ByValue
from cupy_flash.gpu.compiler import compile_cubin
from cupy_flash.mods.codegen.arguments import pack_arguments
from cupy_flash.mods.codegen.emit import HEADERS, SCALE
from cupy_flash.problem.device import Device
from support.gpu import cupy
from support.mods.function_runs import COLUMNS, Case, bytes_of, generated
from support.mods.generated_cuda import Text

_THREADS = 128

_COMMON = """
struct Pairs {
  const int* columns;  // 9 of each pair
  const void* scores;
  void* results;  // new scores, or 1 and 0
  long long count;
};

// Evaluates one pair per thread.
template <class Mods, class Arguments>
__device__ inline void run_pair(const Pairs& p, const Arguments& a) {
  using Real = typename Mods::Real;
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (pair >= p.count) return;
  const int* at = p.columns + 9 * pair;
  const typename Mods::Row r = Mods::row(a, at[0], at[1], at[2], at[3], at[4], at[5], 0);
  const typename Mods::Keys k = Mods::keys(a, r, at[6]);
  const int step = at[7];
  bool inside = false;
  if constexpr (Mods::has_bounds) inside = Mods::is_inside(a, r, k, at[8]);
  Real& result = static_cast<Real*>(p.results)[pair];
  if constexpr (Mods::changes_scores) {
    const Real x = static_cast<const Real*>(p.scores)[pair];
    const Real exponent = inside ? Mods::template exponent<true>(a, r, k, step, x)
                                 : Mods::exponent(a, r, k, step, x);
    result = exponent * Real(0.6931471805599453);
  } else {
    result = inside ? Mods::template is_visible<true>(a, r, k, step)
                    : Mods::is_visible(a, r, k, step);
  }
}
"""

_UNIT = """
namespace mod{number} {{
#line 1 "function{number}.cpp"
{text}
static_assert(sizeof(ModArguments) == {size}, "");
struct Params {{
  Pairs pairs;
  alignas(8) ModArguments mods;
}};
}}
extern "C" __global__ void __launch_bounds__(128)
run{number}(const __grid_constant__ mod{number}::Params p) {{
  run_pair<mod{number}::Mods>(p.pairs, p.mods);
}}
"""

# NVRTC prints the line in parentheses after the name of the file.
_FAILED = re.compile(r"function(\d+)\.cpp\(\d+\): (?:catastrophic )?error: (.*)")


class Unit:
    """Generated code of many functions in one translation unit.

    `wrong` has the errors of functions that cannot be traced or compiled, by function number.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = list(cases)
        self._texts, self._sources, self.wrong = generated(cases, _UNIT)

    def _unit(self) -> TranslationUnit:
        left = [n for n in self._sources if n not in self.wrong]
        includes = "".join(f'#include "{header}"\n' for header in HEADERS)
        text = includes + _COMMON + "".join(self._sources[n] for n in left)
        entries = tuple(f"run{n}" for n in left)
        return TranslationUnit(text, entries, f"{len(left)} random functions")

    def compiled(self, device: Device) -> bytes:
        """Return the machine code of all functions that compile."""
        while True:
            try:
                return compile_cubin(self._unit(), device).image
            except CompileError as error:
                found = {
                    int(n): f"does not compile: {why}" for n, why in _FAILED.findall(str(error))
                }
                if not found:
                    raise
                self.wrong |= found

    def run(self, image: bytes) -> dict[int, str]:
        """Return how results on the current device differ, by function number."""
        module = cupy.cuda.function.Module()
        module.load(image)
        wrong = dict(self.wrong)
        for case in self._cases:
            number = case.function.number
            if number in self.wrong:
                continue
            found = _results(case, self._texts[number], module.get_function(f"run{number}"))
            is_score = case.function.kind == "score"
            if why := case.wrong_score(found) if is_score else case.wrong_mask(found != 0):
                wrong[number] = why
        return wrong


def _results(case: Case, text: Text, kernel: Any) -> np.ndarray:
    table = np.stack([case.pairs.columns[name] for name in COLUMNS], -1).astype(np.int32)
    count = len(table)
    columns, scores = cupy.asarray(table), cupy.asarray(case.pairs.scores)
    results = cupy.full(count, np.nan, scores.dtype)
    values: dict[str, Any] = dict(text.mods[0].captures) | {SCALE: 1.0}
    buffers, addresses = [], {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            buffer, addresses[name] = on_device(value)
            buffers.append(buffer)
    mods = pack_arguments(text.captures, values, addresses, text.real)
    begin = np.array([columns.data.ptr, scores.data.ptr, results.data.ptr, count], np.int64)
    packed = begin.tobytes() + mods.tobytes()
    packed += bytes(round_up(len(packed), 8) - len(packed))
    arguments = ByValue(bytearray(packed))
    kernel((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), (arguments.pointer,))
    found: np.ndarray = cupy.asnumpy(results)
    return found


def on_device(array: np.ndarray) -> tuple[Any, int]:
    """Return a padded copy with the same strides, and the address of its first element."""
    low, high = bytes_of(array)
    pad = 1024
    flat = np.full(high - low + 2 * pad, 0xA5, np.uint8)
    begin = (ctypes.c_char * (high - low)).from_address(low)
    flat[pad : pad + high - low] = np.frombuffer(begin, np.uint8)
    buffer = cupy.asarray(flat)
    return buffer, buffer.data.ptr + pad + array.ctypes.data - low
