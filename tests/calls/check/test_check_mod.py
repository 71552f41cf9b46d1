"""`check_mod`: its unit, and the comparison of CUDA code with the Python function; no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_flash import MaskMod, ScoreMod, UnsupportedError, check_mod
from cupy_flash.calls.check.check_mod import compare, unit_of
from cupy_flash.gpu import environment
from cupy_flash.gpu.compiler import compile_cubin, known_architectures, why_no_compiler
from cupy_flash.problem.device import device_for_arch

TABLE = np.arange(40, dtype=np.float32).reshape(4, 10)
MODS = {
    "text": ScoreMod(
        lambda score, h, i, j, table: score + table[h, (i - j) % 10],
        table=TABLE,
        cuda="return score + table(h, ((i - j) % 10 + 10) % 10);",
    ),
    "traced": ScoreMod(lambda score: 20 * np.tanh(score / 20)),
    "mask": MaskMod(lambda b, i, j: (i >= j) | (b == 1)),
    "mask text": MaskMod(lambda i, j: i % 3 == j % 3, cuda="return i % 3 == j % 3;"),
}


@pytest.mark.parametrize("arch", [75, 90, 120])
@pytest.mark.parametrize("name", MODS)
def test_the_unit_compiles(name: str, arch: int) -> None:
    if reason := why_no_compiler():
        pytest.skip(reason)
    if arch not in known_architectures():
        pytest.skip(f"this NVRTC does not know sm_{arch}")
    cubin = compile_cubin(unit_of(MODS[name]), device_for_arch(arch))
    assert "warning" not in cubin.log


def test_scores_may_differ_by_what_is_rounded_and_no_more(rng: np.random.Generator) -> None:
    mod = ScoreMod(lambda score, h, j: np.where(j == 2, np.inf, score * (h + 1)))
    scores = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    right = np.broadcast_to(scores * np.array([1, 2])[:, None, None], scores.shape).copy()
    right[..., 2] = np.inf
    right = right.astype(np.float32)
    compare(mod, scores, right * np.float32(1 + 2**-18), 0)
    above = right[0, 1, 2, 3] + 1e-3
    for at, value in (((0, 1, 2, 3), above), ((0, 0, 1, 2), 9), ((0, 1, 0, 0), np.nan)):
        wrong = right.copy()
        wrong[at] = value
        place = rf"h={at[1]}, i={at[2] + 5}, j={at[3]}"
        with pytest.raises(ValueError, match=rf"at 1 of 24 pairs, first at score=.*{place}"):
            compare(mod, scores, wrong, 5)


def test_of_masks_every_pair_has_to_agree() -> None:
    mod = MaskMod(lambda i, j: i > j)
    scores = np.zeros((1, 1, 3, 3), np.float32)
    seen = np.tri(3, k=-1, dtype=np.float32)[None, None]
    compare(mod, scores, seen, 0)
    message = "i=1, j=0: the function returns True, the CUDA source False"
    with pytest.raises(ValueError, match=message):
        compare(mod, scores, seen * 0, 0)


def test_what_is_no_modification_and_no_pair_is_refused() -> None:
    with pytest.raises(TypeError, match="mod is a function; expected a ScoreMod or a MaskMod"):
        check_mod(lambda i, j: i > j)
    with pytest.raises(ValueError, match="expected 1 or more"):
        check_mod(MODS["mask"], seqlen_k=0)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if not environment.gpu_unavailable():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError, match="runs on a GPU only"):
        check_mod(MODS["mask"])
