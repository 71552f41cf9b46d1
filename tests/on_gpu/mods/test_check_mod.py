"""`check_mod` on a GPU, which compares CUDA source of a modification with its Python function."""

from __future__ import annotations

import numpy as np
import pytest
from support.calls.modified_calls import MASK_MODS, SCORE_MODS
from support.gpu import cupy

from cupy_flash import MaskMod, ScoreMod, check_mod

pytestmark = pytest.mark.gpu

DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 5, (2, 200)))
TABLE = np.random.default_rng(2).standard_normal((4, 41)).astype(np.float32)
CAPTURES = {
    "table": {"table": TABLE},
    "gain": {"gain": TABLE[:, 0], "shift": TABLE[0, :7]},
    "quadratic": {"weight": 0.001},
    "documents": {"doc": DOCUMENTS},
    "dilated": {"step": 3},
}


@pytest.mark.parametrize("name", [*SCORE_MODS, *MASK_MODS])
def test_traced_text_is_what_the_function_is(name: str) -> None:
    kind, table = (ScoreMod, SCORE_MODS) if name in SCORE_MODS else (MaskMod, MASK_MODS)
    mod = kind(table[name], **CAPTURES.get(name, {}))
    check_mod(mod)
    check_mod(mod, batch=1, heads=3, seqlen_q=33, seqlen_k=129, q_offset=-7)


def test_text_that_is_another_function_is_found_out() -> None:
    right = "return score + table(h, min(max(i - j, -20), 20) + 20);"
    captures = {"table": cupy.asarray(TABLE)}
    check_mod(ScoreMod(SCORE_MODS["table"], cuda=right, **captures))
    wrong = ScoreMod(SCORE_MODS["table"], cuda=right.replace("i - j", "j - i"), **captures)
    with pytest.raises(ValueError, match="differs from its CUDA source at"):
        check_mod(wrong)
    with pytest.raises(ValueError, match="the function returns False, the CUDA source True"):
        check_mod(MaskMod(lambda i, j: j < i, cuda="return j <= i;"))
