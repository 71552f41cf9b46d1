"""Random functions on the CPU backend, and as generated CUDA code that is compiled for the CPU."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash.calls.check.modifications import ModificationKey, parse_modifications
from cupy_flash.families.contract import KERNEL_DIR
from cupy_flash.mods.captures import number_of
from cupy_flash.mods.codegen.emit import HEADERS
from cupy_flash.mods.ir.compose import prefixed_text
from cupy_flash.mods.ir.expression import Node
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.mods.trace.traced import Traced
from support.mods.function_oracle import REAL, Expr, Value
from support.mods.generated_cuda import COMPILER, FOLDER, IS_INSIDE, Text
from support.mods.random_functions import Function, Pairs, random_pairs

Batch = Sequence[Function]
# Order of the columns in the table of arguments of a compiled function.
COLUMNS = ("b", "h", "i", "row", "q_start", "k_start", "first_key", "step", "last")
LN_2 = 0.6931471805599453


def modification(
    function: Function, captures: Mapping[str, Any] | None = None
) -> ScoreMod | MaskMod:
    """Return a `ScoreMod` or `MaskMod` of a function, perhaps with other captures."""
    kind = ScoreMod if function.kind == "score" else MaskMod
    called = function.function()
    made = kind(called, **(function.captures if captures is None else captures))
    # The object keeps the values of global variables, even if the program changes them later.
    for name in function.variables:
        called.__globals__[name] = _other_number(called.__globals__[name])
    return made


def _other_number(value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return not value
    return type(value)(2 if value == 3 else 3)


@functools.lru_cache(maxsize=64)
def _kept_numbers(mod_key: ModificationKey) -> dict[str, Any]:
    """Return captured numbers as a call packs them; equal calls get the same object."""
    return {name: number_of(key) for name, key in mod_key.numbers}


def _numbers_of_call(mod: ScoreMod | MaskMod, kind: str) -> dict[str, Any]:
    found = parse_modifications({kind: mod})
    assert found is not None
    return _kept_numbers(found[0])


def _with_other_zeros(function: Function) -> Function | None:
    """Return the function with the sign of captured zeros changed; None if there are no zeros."""
    others = {
        name: -value
        for name, value in function.captures.items()
        if isinstance(value, float) and value == 0
    }
    return replace(function, captures=function.captures | others) if others else None


Rewrite = Callable[[Node], Node]


def text_of(function: Function, rewrite: Rewrite | None = None) -> Text:
    """Return the generated code of a function, with captures named as in calls.

    `rewrite` changes the traced expression before code is generated.
    """
    mod, kind = modification(function), f"{function.kind}_mod"
    if (other := _with_other_zeros(function)) is not None:
        # This makes an earlier call with the other zeros, whose numbers must not be reused.
        _numbers_of_call(modification(other), kind)
    expression, specs = prefixed_text(mod.traced, kind)
    arrays = dict(zip(mod.array_names, mod.arrays, strict=True))
    parts = {
        "traced": Traced(rewrite(expression) if rewrite else expression, specs),
        "captures": arrays | _numbers_of_call(mod, kind),
    }
    for name, part in parts.items():
        object.__setattr__(mod, name, part)
    return Text.of(mod, function.inputs)


@dataclass
class Case:
    """Function with its pairs and their true values."""

    function: Function
    pairs: Pairs
    right: Value

    @classmethod
    def of(cls, function: Function) -> Case:
        pairs = random_pairs(function)
        root = function.root
        if function.kind == "score" and root.type != REAL:
            root = Expr("astype", REAL, (root,))
        right = pairs.oracle(function).value(root)
        of_all = (np.broadcast_to(x, len(pairs.scores)) for x in (right.v, right.e, right.s))
        return cls(function, pairs, Value(*of_all))

    @property
    def share_known(self) -> float:
        """Fraction of the pairs that are compared."""
        error = self.right.e if self.function.kind == "mask" else self.right.s
        return float(np.mean(np.isfinite(error) if self.function.kind == "score" else error == 0))

    # ---- Comparisons, which return None or a description of the difference

    def wrong_mask(self, seen: Any) -> str | None:
        """Compare a mask bit for bit on decided pairs."""
        seen = np.broadcast_to(seen, self.right.v.shape)
        return self._first((self.right.e == 0) & (seen != self.right.v), seen)

    def wrong_on_host(self, new: Any) -> str | None:
        """Compare new scores of the CPU backend: bit for bit where all operations are exact."""
        new = np.broadcast_to(new, self.right.v.shape)
        v, e = self.right.v, self.right.e
        if new.dtype != v.dtype:
            return f"dtype {new.dtype}"
        alike = (new == v) & (np.signbit(new) == np.signbit(v)) | np.isnan(new) & np.isnan(v)
        with np.errstate(all="ignore"):
            near = np.abs(new.astype(np.float64) - v) <= e
        return self._first(~(alike | (e > 0) & (near | np.isinf(e))), new)

    def wrong_score(self, new: Any) -> str | None:
        """Compare new scores: a kernel computes score * log2(e), which is multiplied by ln(2)."""
        v, s = self.right.v.astype(np.float64), self.right.s
        info = np.finfo(self.function.real)
        new = new.astype(np.float64)
        with np.errstate(all="ignore"):
            near = np.abs(new - v) <= s + 3 * info.eps * np.abs(v) + 2.0**-100
            # score * log2(e) exceeds the score, and is clamped to the largest finite number.
            large = np.isfinite(v) & (np.abs(v) >= 0.69 * info.max) & np.isfinite(new)
            near |= large & (new / v > 0.69) & (new / v < 1.01)
        alike = np.where(np.isnan(v), np.isnan(new), new == v)
        return self._first(~np.where(np.isfinite(v), near, alike) & np.isfinite(s), new)

    def _first(self, wrong: np.ndarray, found: np.ndarray) -> str | None:
        if not wrong.any():
            return None
        at = int(np.argmax(wrong))
        places = {name: int(x[at]) for name, x in self.pairs.columns.items()}
        v, e, s = (x[at] for x in (self.right.v, self.right.e, self.right.s))
        return (
            f"{wrong.sum()} of {len(wrong)} pairs, first {places} score="
            f"{self.pairs.scores[at]!r}: found {found[at]!r}, right {v!r} (errors {e:.3g}, {s:.3g})"
        )


def wrong_on_cpu(case: Case) -> str | None:
    """Return how the CPU backend differs from the true values of a function, or None."""
    function, columns = case.function, case.pairs.columns
    places = {name: columns[name] for name in ("b", "h", "i", "j", "q_start", "k_start")}
    try:
        mod = modification(function)
        if isinstance(mod, ScoreMod):
            return case.wrong_on_host(mod.evaluate(case.pairs.scores, **places))
        return case.wrong_mask(mod.evaluate(**places, dtype=function.real))
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"


# ---- Generated code

_PRELUDE = """
#include <setjmp.h>
#include <signal.h>
#define __ldg unchecked_ldg
#include "cuda.h"
#undef __ldg
// Begin and end of the memory of each array that the called function captures.
static const char* const* ranges;
static int range_count, reads_outside;
template <class T>
T __ldg(const T* address) {
  const char* at = reinterpret_cast<const char*>(address);
  for (int n = 0; n < range_count; ++n) {
    if (at >= ranges[2 * n] && at + sizeof(T) <= ranges[2 * n + 1]) return *address;
  }
  ++reads_outside;
  return T{};
}
static sigjmp_buf before;
static void give_up(int number) { siglongjmp(before, number); }
"""

_COMMON = """
// Returns 0, the number of the signal that ended the loop, or minus the number of reads outside.
template <class Mods, class Arguments>
int run_pairs(const Arguments* a, const char* const* bytes, int arrays, int pairs,
              const int* columns, const typename Mods::Real* x, typename Mods::Real* scores,
              bool* seen) {
  ranges = bytes, range_count = arrays, reads_outside = 0;
  for (int number : {SIGFPE, SIGSEGV, SIGBUS}) signal(number, give_up);
  const int number = sigsetjmp(before, 1);
  for (int pair = 0; number == 0 && pair < pairs; ++pair, columns += 9) {
    const typename Mods::Row r = Mods::row(*a, columns[0], columns[1], columns[2], columns[3],
                                           columns[4], columns[5], 0);
    const typename Mods::Keys k = Mods::keys(*a, r, columns[6]);
    const int step = columns[7];
    const bool inside = is_inside<Mods>(*a, r, k, columns[8]);
    if (Mods::changes_scores) {
      scores[pair] = inside ? Mods::template exponent<true>(*a, r, k, step, x[pair])
                            : Mods::exponent(*a, r, k, step, x[pair]);
      scores[pair] *= 0.6931471805599453;
    } else {
      scores[pair] = x[pair];
    }
    seen[pair] = inside ? Mods::template is_visible<true>(*a, r, k, step)
                        : Mods::is_visible(*a, r, k, step);
  }
  for (int other : {SIGFPE, SIGSEGV, SIGBUS}) signal(other, SIG_DFL);
  return number ? number : -reads_outside;
}
"""

_UNIT = """
namespace mod{number} {{
#line 1 "function{number}.cpp"
{text}
static_assert(sizeof(ModArguments) == {size});
}}
extern "C" int run{number}(const void* a, const char* const* bytes, int arrays, int pairs,
                           const int* columns, const void* x, void* scores, bool* seen) {{
  using Mods = mod{number}::Mods;
  return run_pairs<Mods>(static_cast<const mod{number}::ModArguments*>(a), bytes, arrays, pairs,
                         columns, static_cast<const Mods::Real*>(x),
                         static_cast<Mods::Real*>(scores), seen);
}}
"""

_FAILED = re.compile(r"function(\d+)\.cpp:\d+:\d+: (?:fatal )?error: (.*)")


def wrong_on_host_text(
    folder: Path,
    cases: Sequence[Case],
    *,
    batch: int = 100,
    workers: int = 1,
    kernel_dir: Path = KERNEL_DIR,
    rewrite: Rewrite | None = None,
) -> dict[int, str]:
    """Return how generated code, compiled for the CPU, differs, by the numbers of functions.

    `folder` is for sources and libraries, and `kernel_dir` has the headers. `batch` functions are
    compiled together, and `workers` compilers run at a time. For `rewrite` see `text_of`.
    """
    if COMPILER is None:
        pytest.skip("no g++ to compile device text with")
    # The folder is new each time, because a library is not loaded again from the same path.
    folder = Path(tempfile.mkdtemp(dir=folder))
    texts, sources, wrong = generated(cases, _UNIT, rewrite)
    left = [case for case in cases if case.function.number in texts]
    batches = [left[begin : begin + batch] for begin in range(0, len(left), batch)]

    def compiled(numbered: tuple[int, list[Case]]) -> Any:
        n, some = numbered
        numbers = [case.function.number for case in some]
        return _compiled(folder, f"batch{n}", {n: sources[n] for n in numbers}, kernel_dir)

    with ThreadPoolExecutor(workers) as pool:
        for some, (library, failed) in zip(
            batches, pool.map(compiled, enumerate(batches)), strict=True
        ):
            wrong |= failed
            for case in some:
                number = case.function.number
                if number not in failed:
                    run = getattr(library, f"run{number}")
                    if found := _wrong(case, texts[number], run):
                        wrong[number] = found
    return wrong


def generated(
    cases: Iterable[Case], unit: str, rewrite: Rewrite | None = None
) -> tuple[dict[int, Text], dict[int, str], dict[int, str]]:
    """Return by function number: generated texts, `unit` with these texts, and errors."""
    texts: dict[int, Text] = {}
    sources: dict[int, str] = {}
    wrong: dict[int, str] = {}
    for case in cases:
        number = case.function.number
        try:
            text = text_of(case.function, rewrite)
            size = text.dtype().itemsize
            sources[number] = unit.format(number=number, text=text.emitted(), size=size)
            texts[number] = text
        except Exception as error:
            wrong[number] = f"raises {type(error).__name__}: {error}"
    return texts, sources, wrong


def _compiled(
    folder: Path, name: str, sources: dict[int, str], kernel_dir: Path
) -> tuple[ctypes.CDLL | None, dict[int, str]]:
    """Return a library of functions, and the errors of those that do not compile."""
    includes = "".join(f'#include "{header}"\n' for header in HEADERS)
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    failed: dict[int, str] = {}
    options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fwrapv", "-ffp-contract=off"]
    options += [f"-I{FOLDER}", f"-I{kernel_dir}"]
    while left := [source for number, source in sources.items() if number not in failed]:
        text = "".join(left)
        source.write_text(_PRELUDE + includes + IS_INSIDE + _COMMON + text, encoding="utf-8")
        command = [str(COMPILER), *options, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return ctypes.CDLL(str(library)), failed
        found = {int(n): f"does not compile: {why}" for n, why in _FAILED.findall(done.stderr)}
        assert found, done.stderr[:4000]
        failed |= found
    return None, failed


def _wrong(case: Case, text: Text, function: Any) -> str | None:
    columns = case.pairs.columns
    table = np.stack([columns[name] for name in COLUMNS], -1).astype(np.int32)
    scores = np.ascontiguousarray(case.pairs.scores)
    new, seen = np.full_like(scores, np.nan), np.empty(len(scores), bool)
    arguments = text.arguments()
    spans = [bytes_of(x) for x in text.mods[0].captures.values() if isinstance(x, np.ndarray)]
    ranges = np.array(spans, np.uint64).reshape(-1)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (table, scores, new, seen)]
    status = function(
        ctypes.c_void_p(arguments.ctypes.data), ctypes.c_void_p(ranges.ctypes.data),
        len(spans), len(scores), *pointers,
    )  # fmt: skip
    if status:
        return f"signal {status}" if status > 0 else f"{-status} reads outside of its arrays"
    return case.wrong_score(new) if case.function.kind == "score" else case.wrong_mask(seen)


def bytes_of(array: np.ndarray) -> tuple[int, int]:
    """Return the first address of an array's elements, and the end of the last element."""
    ends = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(e for e in ends if e < 0), sum(e for e in ends if e > 0)
    return array.ctypes.data + low, array.ctypes.data + high + array.itemsize


def report(wrong: dict[int, str], functions: Iterable[Function], most: int = 5) -> str:
    """Return a message with the first functions that are wrong, and how."""
    by_number = {function.number: function for function in functions}
    parts = [f"{by_number[n]}{wrong[n]}\n" for n in sorted(wrong)[:most]]
    return f"{len(wrong)} of {len(by_number)} functions: {sorted(wrong)[:50]}\n" + "\n".join(parts)
