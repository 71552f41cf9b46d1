"""Names of captures may be any identifiers of Python, even if C++ reserves them."""

from __future__ import annotations

import keyword

import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod, flash_attention, plan
from cupy_flash.calls.check.check_mod import unit_of
from cupy_flash.calls.gpu.block_masks import mask_text, packed_captures
from cupy_flash.families.contract import TranslationUnit
from cupy_flash.gpu.block_masks import block_mask_unit
from cupy_flash.gpu.compiler import compile_cubin, known_architectures, why_no_compiler
from cupy_flash.mods.captures import prefixed
from cupy_flash.problem.device import device_for_arch

# Keywords of C++, alternative tokens, contextual keywords, macros, members of the generated
# structs, names of functions and types in the headers, and letters outside of ASCII.
_WORDS = """
xor true typeid static_assert bitand compl not_eq concept co_await requires final override module
NULL INT_MAX INFINITY linux _x __x x__y
Real Capture Mods Row Keys ModArguments first v0 p0 a r k x step base exponent sees softmax_scale
bias mask tanhf floordiv Ints int4 blockIdx this template
größe α 变量
"""
WORDS = [word for word in _WORDS.split() if not keyword.iskeyword(word)]
# Few are arrays, because each array adds to the compile time.
ARRAYS = ("xor", "NULL", "变量")
CAPTURES = {name: np.zeros(40, np.int32) if name in ARRAYS else 0 for name in WORDS}


def mods() -> tuple[ScoreMod, MaskMod]:
    terms = " + ".join(f"{name}[j]" if name in ARRAYS else name for name in WORDS)
    names = ", ".join(WORDS)
    return (
        ScoreMod(eval(f"lambda score, i, j, {names}: score + {terms}"), **CAPTURES),
        MaskMod(eval(f"lambda i, j, {names}: {terms} == i"), **CAPTURES),
    )


@pytest.mark.slow
def test_captures_of_any_name_compile() -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)
    if 90 not in known_architectures():
        pytest.skip("this NVRTC does not know sm_90")
    score_mod, mask_mod = mods()
    dtype = packed_captures(mask_mod, "float16").dtype
    maps = block_mask_unit(mask_text(mask_mod, "float16"), dtype)
    for unit in (unit_of(score_mod), unit_of(mask_mod), maps):
        assert isinstance(unit, TranslationUnit)
        compile_cubin(unit, device_for_arch(90))


def test_kernels_have_them_under_the_names_of_their_arrays() -> None:
    score_mod, mask_mod = mods()
    q = np.zeros((1, 40, 1, 64), np.float16)
    made = plan(flash_attention, q, q, q, arch="sm_90", score_mod=score_mod, mask_mod=mask_mod)
    assert made.unit is not None
    for name in ("score_mod_xor", "mask_mod_typeid", "score_modu_gr_f6__df_e"):
        assert f" {name};" in made.unit.text
    assert made.unit.text.isascii()


def test_no_two_names_become_one() -> None:
    names = ["α", "_3b1_", "α_", "_3b1__", "u_α", "β", "a_3b1_", "aα", "aα_", "a_α"]
    found = [prefixed(kind, name) for kind in ("score_mod", "mask_mod") for name in names]
    assert len(set(found)) == len(found)
    assert all(name.isidentifier() and name.isascii() for name in found)


def test_a_call_takes_them() -> None:
    score_mod, mask_mod = mods()
    q = np.ones((1, 4, 1, 4), np.float32)
    out = flash_attention(q, q, q, score_mod=score_mod, mask_mod=mask_mod, backend="cpu")
    np.testing.assert_array_equal(out[0, :, 0, 0], [1, 0, 0, 0])


@pytest.mark.parametrize("name", ["xor", "true", "NULL", "Real", "α", "_x", "x__y", "co_await"])
def test_text_in_cuda_takes_names_of_c_only(name) -> None:
    function = eval(f"lambda score, {name}: score + {name}")
    assert ScoreMod(function, **{name: 1.0}).evaluate(np.float32(1), 0, 0, 0, 0) == 2
    with pytest.raises(TypeError, match=r"cannot be the name of a parameter in C\+\+"):
        ScoreMod(function, **{name: 1.0}, cuda="return score;")


@pytest.mark.parametrize("name", ["x", "linux", "module", "final", "x_1_y", "table_"])
def test_text_in_cuda_takes_plain_names(name) -> None:
    function = eval(f"lambda score, {name}: score + {name}")
    mod = ScoreMod(function, **{name: 1.0}, cuda=f"return score + {name};")
    if why_no_compiler() is None and 90 in known_architectures():
        compile_cubin(unit_of(mod), device_for_arch(90))
