"""Compilation of generated CUDA source for GPUs, without a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.mods.generated_cuda import Text
from support.mods.mod_gallery import SCORES, with_gradients

from cupy_flash.families.contract import TranslationUnit
from cupy_flash.families.params import assertions
from cupy_flash.gpu.compiler import Cubin, compile_cubin, known_architectures, why_no_compiler
from cupy_flash.mods.codegen.emit import HEADERS
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.problem.device import device_for_arch

# Scores per lane, threads per block, and fewer scores for modifications that compile slowly.
KEYS, THREADS = 16, 128
FEW = {"everything": 2, "everything_in_double": 1}

SOFTCAP = ScoreMod(lambda score, cap: cap * np.tanh(score / cap), cap=30.0)
ALIBI = ScoreMod(
    lambda score, h, i, j, slope: score - slope[h] * np.abs(i - j), slope=np.ones(4, np.float32)
)
DOCUMENTS = MaskMod(
    lambda b, i, j, doc: (doc[b, i] == doc[b, j]) & (j <= i), doc=np.zeros((2, 9), np.int64)[:, ::2]
)
EVERYTHING = ScoreMod(
    lambda score, b, h, i, j, x, y, z, flags, bytes, words, on: np.where(
        on & flags[j],
        np.exp(score) + np.log(x[b, h, i, j]) + np.sin(y[i, j]) + np.minimum(z[j], i // (j + 1)),
        np.log1p(score % 0.75) + np.expm1(score // 2) + (bytes[j] >> (i & 3)) + words[i] % 5,
    ),
    x=np.ones((2, 2, 2, 2), np.float16),
    y=np.ones((2, 2), ml_dtypes.bfloat16),
    z=np.ones(3),
    flags=np.ones(3, bool),
    bytes=np.ones(3, np.uint8),
    words=np.ones(3, np.uint64),
    on=True,
)
OWN_TEXT = ScoreMod(
    lambda score, i, j, table: score + table[i - j],
    table=np.ones(9, np.float32),
    cuda="return score + table(i - j);",
)
TEXTS = {
    "softcap_of_documents": Text(SOFTCAP, DOCUMENTS),
    "fast_softcap": Text(SOFTCAP, inputs="bfloat16"),
    "alibi": Text(ALIBI),
    "everything": Text(EVERYTHING),
    "everything_in_double": Text(EVERYTHING, DOCUMENTS, inputs="float64"),
    "own_text": Text(OWN_TEXT),
    "nothing": Text(),
}

_KERNEL = """
namespace {name} {{
{text}
extern "C" __global__ void __launch_bounds__({threads})
{name}_kernel(const __grid_constant__ ModArguments a, Mods::Real* scores, int first_key) {{
  const Mods::Row r = Mods::row(a, blockIdx.y, blockIdx.z, threadIdx.x + 5, threadIdx.x, 7, 8, 0);
  const Mods::Keys k = Mods::keys(a, r, first_key);
#pragma unroll
  for (int step = 0; step < {keys}; ++step) {{
    Mods::Real& score = scores[step * {threads} + threadIdx.x];
    if (Mods::is_visible(a, r, k, step)) score = Mods::exponent(a, r, k, step, score);
  }}
}}
}}
"""


# Kernel that adds the gradients of each pair to the captured elements that the pair reads.
_BACKWARD = """
namespace {name} {{
{text}
extern "C" __global__ void __launch_bounds__({threads})
{name}_kernel(const __grid_constant__ ModArguments a, Mods::Real* scores,
              const Mods::Real* weights, float* const* gradients, int first_key) {{
  const Mods::Row r = Mods::row(a, blockIdx.y, blockIdx.z, threadIdx.x + 5, threadIdx.x, 7, 8, 0);
  const Mods::Keys k = Mods::keys(a, r, first_key);
#pragma unroll
  for (int step = 0; step < {keys}; ++step) {{
    const int place = step * {threads} + threadIdx.x;
    const Mods::Real x = scores[place], weight = weights[place];
    Mods::scatter(a, r, k, step, x, weight, [&](int capture, long long element, Mods::Real value) {{
      atomicAdd(gradients[capture] + element, float(value));
    }});
    const Mods::Real y = Mods::exponent(a, r, k, step, x);
    scores[place] = Mods::changes_slope ? y * weight * Mods::slope(a, r, k, step, x) : y * weight;
  }}
}}
}}
"""
BACKWARD = {
    "fast_softcap": Text(SOFTCAP, inputs="float16", backward=True),
    "approximate_softcap": Text(SOFTCAP, DOCUMENTS, inputs="bfloat16", backward=True),
    "softcap_in_double": Text(SOFTCAP, inputs="float64", backward=True),
    "everything": Text(with_gradients(EVERYTHING), inputs="bfloat16", backward=True),
    "everything_in_double": Text(with_gradients(EVERYTHING), inputs="float64", backward=True),
    "own_text": Text(with_gradients(OWN_TEXT), backward=True),
    "nothing": Text(backward=True),
    "gallery_of_functions": Text(SCORES["functions"], inputs="bfloat16", backward=True),
}


def unit(texts: dict[str, Text], kernel: str = _KERNEL) -> TranslationUnit:
    lines = [f'#include "{header}"' for header in HEADERS]
    for name, text in texts.items():
        options = {"keys": FEW.get(name, KEYS), "threads": THREADS}
        lines.append(kernel.format(name=name, text=text.emitted(), **options))
        lines.append(assertions((f"{name}::ModArguments", text.dtype())))
    entries = tuple(f"{name}_kernel" for name in texts)
    return TranslationUnit("\n".join(lines), entries, "modifications")


def compiled(unit: TranslationUnit, arch: int) -> Cubin:
    if reason := why_no_compiler():
        pytest.skip(reason)
    if arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know sm_{arch}")
    cubin = compile_cubin(unit, device_for_arch(arch))
    assert "warning" not in cubin.log
    assert set(cubin.resources) == set(unit.entries)
    return cubin


@pytest.mark.parametrize("arch", [80, 90])
def test_device_text_compiles_without_warnings_and_its_struct_lies_as_numpy_packs_it(arch) -> None:
    texts = TEXTS if arch == 90 else {name: TEXTS[name] for name in TEXTS if name not in FEW}
    cubin = compiled(unit(texts), arch)
    for name in texts.keys() - FEW.keys():
        assert cubin.resources[f"{name}_kernel"].spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_device_text_with_derivatives_compiles_without_warnings(arch) -> None:
    texts = dict(BACKWARD)
    if arch != 90:
        del texts["everything_in_double"]
    if arch == 75:
        # The units with bfloat16 inputs need instructions that Turing lacks.
        texts = {name: text for name, text in texts.items() if text.inputs != "bfloat16"}
    cubin = compiled(unit(texts, _BACKWARD), arch)
    for name in texts.keys() - FEW.keys():
        # Long functions are called instead of inlined, and use a stack of 32 bytes here.
        most = 32 if name == "gallery_of_functions" else 0
        assert cubin.resources[f"{name}_kernel"].spill_bytes <= most


# If sinf() is inlined into each step of an unrolled loop, kernels take minutes to compile. `most`
# limits the bytes of machine code per step: a called sine takes up to 420, an inlined one at
# least 1100.
@pytest.mark.parametrize("inputs", ["bfloat16", "float64"])
@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda score, i, j: score + np.sin(j * 0.5), 800),
        (lambda score, i, j: np.where(np.cos(j * 0.5) < 0, score, 0.0), 800),
        (lambda score, i, j: np.where((i - j) % 2.5 < 1, score, 0.0), 1500),
        (lambda score, i, j: np.where((i - j) // 2.5 < 1, score, 0.0), 3000),
        (lambda score, i, j: np.where(np.abs(score) ** 1.3 < 2, score, 0.0), 570),
    ],
    ids=["sine", "cosine that decides", "remainder", "quotient", "power that decides"],
)
def test_long_functions_are_not_copied_into_every_step(function, most: int, inputs: str) -> None:
    def size(keys: int) -> int:
        text = Text(ScoreMod(function), inputs=inputs).emitted()
        kernel = _KERNEL.format(name="of_long", text=text, keys=keys, threads=THREADS)
        lines = [*(f'#include "{header}"' for header in HEADERS), kernel]
        made = TranslationUnit("\n".join(lines), ("of_long_kernel",), "long functions")
        return len(compiled(made, 90).image)

    assert (size(48) - size(16)) / 32 <= most
