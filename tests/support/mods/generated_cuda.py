"""Generated CUDA source of modifications, as text and compiled for the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.mods.base import Modification
from cupy_flash.mods.captures import CaptureSpec
from cupy_flash.mods.codegen.arguments import arguments_dtype, pack_arguments, real_type
from cupy_flash.mods.codegen.emit import HEADERS, SCALE, emit
from cupy_flash.mods.ir.derivative import slopes_of
from cupy_flash.mods.modification import MaskMod, ScoreMod

FOLDER = Path(__file__).resolve().parents[2] / "mods" / "on_cpu"
COMPILER = shutil.which("g++")
# Values that a kernel passes for each pair, in the order of the columns of the argument table.
COLUMNS = ("b", "h", "i", "row", "q_start", "k_start", "first_key", "step")


@dataclass(frozen=True)
class Text:
    """Generated CUDA source of a score function and of a mask, one of which may be missing."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    inputs: str = "float32"  # dtype of queries and keys
    scale: float = 1.0  # factor of the products q k^T
    backward: bool = False  # whether the source includes derivatives

    @classmethod
    def of(cls, mod: Modification, inputs: str = "float32") -> Text:
        return cls(mod, None, inputs) if isinstance(mod, ScoreMod) else cls(None, mod, inputs)

    @property
    def real(self) -> str:
        return real_type(self.inputs)

    @property
    def mods(self) -> list[Modification]:
        return [mod for mod in (self.score_mod, self.mask_mod) if mod is not None]

    @property
    def captures(self) -> dict[str, CaptureSpec]:
        specs = {name: spec for mod in self.mods for name, spec in mod.specs.items()}
        return specs | {SCALE: CaptureSpec("real")}

    def emitted(self) -> str:
        score = self.score_mod and self.score_mod.expression
        seen = self.mask_mod and self.mask_mod.expression
        # Kernels may load the bias of a pair in advance. The source is the same here, without this.
        pairwise = frozenset({"bias"} & self.captures.keys())
        slopes = None
        if self.backward:
            mod = self.score_mod
            slopes = slopes_of(None if mod is None else mod.graph, self.differentiable)
        return emit(score, seen, self.captures, dtype=self.inputs, pairwise=pairwise, slopes=slopes)

    @property
    def differentiable(self) -> tuple[str, ...]:
        return () if self.score_mod is None else self.score_mod.differentiable

    def dtype(self) -> np.dtype:
        return arguments_dtype(self.captures, self.real)

    def arguments(self) -> np.ndarray:
        values = {name: value for mod in self.mods for name, value in mod.captures.items()}
        values[SCALE] = self.scale
        addresses = {
            name: value.ctypes.data
            for name, value in values.items()
            if isinstance(value, np.ndarray)
        }
        return pack_arguments(self.captures, values, addresses, self.real)


Run = Callable[..., tuple[np.ndarray, np.ndarray]]
RunBackward = Callable[..., tuple[np.ndarray, dict[str, np.ndarray]]]

# C++ function that returns whether all elements that a run of keys reads are within bounds.
IS_INSIDE = """
template <class Mods, class Arguments, class Row, class Keys>
bool is_inside(const Arguments& a, const Row& r, const Keys& k, int last) {
  if constexpr (Mods::has_bounds) {
    return Mods::is_inside(a, r, k, last);
  } else {
    return false;
  }
}
"""

_UNIT = """
namespace mod{number} {{
{text}
static_assert(sizeof(ModArguments) == {size});
extern "C" void run{number}(const ModArguments* a, int pairs, const int* columns,
                            const Mods::Real* x, Mods::Real* scores, bool* seen) {{
  for (int pair = 0; pair < pairs; ++pair, columns += {columns}) {{
    const Mods::Row r = {row};
    const Mods::Keys k = Mods::keys(*a, r, columns[6]);
    const int step = columns[7];
    // Like kernels, this omits bounds checks if no access of the run can be out of bounds.
    const bool inside = is_inside<Mods>(*a, r, k, step);
    scores[pair] = x[pair];
    if (Mods::changes_scores) {{
      scores[pair] = inside ? Mods::exponent<true>(*a, r, k, step, x[pair])
                            : Mods::exponent(*a, r, k, step, x[pair]);
      scores[pair] *= 0.6931471805599453;
    }}
    seen[pair] = inside ? Mods::is_visible<true>(*a, r, k, step) : Mods::is_visible(*a, r, k, step);
  }}
}}
{more}
}}
"""

_ROW = """Mods::row(*a, columns[0], columns[1], columns[2], columns[3], columns[4],
                                  columns[5], 0)"""

_BACKWARD = """
extern "C" void backward{number}(const ModArguments* a, int pairs, const int* columns,
                                 const Mods::Real* x, const Mods::Real* weights,
                                 Mods::Real* slopes, double* const* gradients,
                                 const long long* sizes) {{
  for (int pair = 0; pair < pairs; ++pair, columns += {columns}) {{
    const Mods::Row r = {row};
    const Mods::Keys k = Mods::keys(*a, r, columns[6]);
    const int step = columns[7];
    const auto add = [&](int capture, long long element, Mods::Real gradient) {{
      if (capture >= Mods::differentiable || element < 0 || element >= sizes[capture]) abort();
      gradients[capture][element] += gradient;
    }};
    if (is_inside<Mods>(*a, r, k, step)) {{
      slopes[pair] = Mods::slope<true>(*a, r, k, step, x[pair]);
      Mods::scatter<true>(*a, r, k, step, x[pair], weights[pair], add);
    }} else {{
      slopes[pair] = Mods::slope(*a, r, k, step, x[pair]);
      Mods::scatter(*a, r, k, step, x[pair], weights[pair], add);
    }}
  }}
}}
"""


def compiled_for_host(folder: Path, texts: Sequence[Text]) -> list[Run]:
    """Compile sources together; return for each a function of the pairs' columns and scores."""
    loaded = _compiled(folder, texts)
    return [_run(text, getattr(loaded, f"run{n}")) for n, text in enumerate(texts)]


def derivatives_for_host(folder: Path, texts: Sequence[Text]) -> list[RunBackward]:
    """Compile sources with derivatives; return functions of columns, products and weights."""
    loaded = _compiled(folder, texts)
    return [_run_backward(text, getattr(loaded, f"backward{n}")) for n, text in enumerate(texts)]


def _compiled(folder: Path, texts: Sequence[Text]) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no g++ to compile device text with")
    includes = "".join(f'#include "{header}"\n' for header in ("cuda.h", *HEADERS))
    units = []
    for number, text in enumerate(texts):
        common = {"number": number, "columns": len(COLUMNS), "row": _ROW}
        more = _BACKWARD.format(**common) if text.backward else ""
        size = text.dtype().itemsize
        units.append(_UNIT.format(text=text.emitted(), size=size, more=more, **common))
    source, library = folder / "mods.cpp", folder / "mods.so"
    source.write_text(includes + IS_INSIDE + "".join(units), encoding="utf-8")
    # The stand-in headers come first. Sums of integers wrap, as in NumPy and on a GPU.
    options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fwrapv"]
    options += [f"-I{FOLDER}", f"-I{KERNEL_DIR}"]
    command = [COMPILER, *options, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def _run(text: Text, function: Any) -> Run:
    def run(scores: np.ndarray, **columns: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return new scores, and which pairs are visible, for 1-d arrays."""
        scores = np.ascontiguousarray(scores, _dtype(text))
        new, seen = np.empty_like(scores), np.empty(len(scores), bool)
        _call(text, function, columns, scores, new, seen)
        return new, seen

    return run


def _run_backward(text: Text, function: Any) -> RunBackward:
    def run(
        products: np.ndarray, weights: np.ndarray, **columns: Any
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return slopes, and gradients of captures by name, for 1-d arrays."""
        products, weights = (np.ascontiguousarray(x, _dtype(text)) for x in (products, weights))
        slopes = np.full_like(products, np.nan)
        assert text.score_mod is not None
        gradients = {
            name: np.zeros(text.score_mod.captures[name].shape) for name in text.differentiable
        }
        addresses = np.array([x.ctypes.data for x in gradients.values()], np.uint64)
        sizes = np.array([x.size for x in gradients.values()], np.int64)
        _call(text, function, columns, products, weights, slopes, addresses, sizes)
        return slopes, gradients

    return run


def _dtype(text: Text) -> Any:
    return np.float32 if text.real == "float" else np.float64


def _call(text: Text, function: Any, columns: Mapping[str, Any], *arrays: np.ndarray) -> None:
    """Call a compiled function with a table of the columns and arrays, one row per pair."""
    count = len(arrays[0])
    table = np.zeros((count, len(COLUMNS)), np.int32)
    for place, name in enumerate(COLUMNS):
        table[:, place] = columns.get(name, 0)
    arguments = text.arguments()
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (table, *arrays)]
    function(ctypes.c_void_p(arguments.ctypes.data), count, *pointers)
