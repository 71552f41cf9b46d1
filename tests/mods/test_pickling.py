"""Pickling and equality of modifications."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cupy_flash import BlockList, MaskMod, ScoreMod, flash_attention
from cupy_flash.calls.check.modifications import parse_modifications

TABLE = np.arange(6, dtype=np.float32)[::2]
SCORE = np.float32(1)


def shrink(score: Any, i: Any, j: Any, rate: Any) -> Any:
    return score - rate * abs(i - j)


def causal(i: Any, j: Any) -> Any:
    return i >= j


def arc(score: Any) -> Any:
    return np.arctan(score)


def mods() -> dict[str, Any]:
    local = np.array([0.0, -0.0, math.nan])
    return {
        "named": ScoreMod(shrink, rate=0.5),
        "lambda": ScoreMod(lambda score, j: score + TABLE[j], differentiable=("TABLE",)),
        "local": MaskMod(lambda i, j, n: (local[j] > -1) & (i > n), n=-3),
        "numbers": ScoreMod(
            lambda score, x, y, z: np.where(x, score * y, z), x=True, y=-0.0, z=math.nan
        ),
        "text": ScoreMod(lambda score: score + 1, cuda="return score + 1;"),
        "untraced text": ScoreMod(arc, cuda="return atanf(score);"),
        "blocks": BlockList(np.eye(2, dtype=bool)[None, None], block=(2, 3)),
        "constant": MaskMod(lambda: True),
    }


@pytest.mark.parametrize("name", mods())
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_modification_is_equal(name, protocol) -> None:
    mod = mods()[name]
    again = pickle.loads(pickle.dumps(mod, protocol))
    assert again == mod
    assert (hash(again), repr(again), type(again)) == (hash(mod), repr(mod), type(mod))
    assert again.expression is mod.expression
    j = np.arange(6, dtype=np.int32)
    given = (SCORE, 0, 0, 3, j) if isinstance(mod, ScoreMod) else (0, 0, 3, j)
    np.testing.assert_array_equal(again.evaluate(*given), mod.evaluate(*given))
    assert pickle.loads(pickle.dumps(again, protocol)) == mod


def test_functions_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(MaskMod(causal))).function is causal
    again = pickle.loads(pickle.dumps(MaskMod(lambda i, j: i >= j)))
    message = "<lambda> is not available, as only its traced form was pickled; use evaluate"
    with pytest.raises(TypeError, match=message):
        again.function(1, 2)


def test_a_function_that_is_gone_is_not_needed(monkeypatch) -> None:
    traced, text = (pickle.dumps(x) for x in (MaskMod(causal), mods()["untraced text"]))
    monkeypatch.delitem(globals(), "causal")
    monkeypatch.delitem(globals(), "arc")
    again = pickle.loads(traced)
    assert again.evaluate(0, 0, 3, np.arange(6)).sum() == 4
    assert repr(again) == "MaskMod(causal)"
    with pytest.raises(TypeError, match=r"test_pickling.arc is not found"):
        pickle.loads(text)


def test_untraced_functions_without_a_name_are_not_pickled() -> None:
    mod = ScoreMod(lambda score: np.arctan(score), cuda="return atanf(score);")
    with pytest.raises(TypeError, match="can be neither traced nor imported by name; define it"):
        pickle.dumps(mod)
    assert copy.deepcopy(mod) == copy.copy(mod) == mod


def test_a_long_chain_is_pickled() -> None:
    def long(score: Any) -> Any:
        for n in range(10_000):
            score = score + n % 7
        return score

    mod = ScoreMod(long)
    assert pickle.loads(pickle.dumps(mod)) == mod


def test_modifications_are_saved_by_torch_and_sent_to_processes() -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(1, 1)
    layer.mod = ScoreMod(shrink, rate=0.5)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).mod == layer.mod


def attended(mask: MaskMod) -> np.ndarray:
    q = np.ones((1, 4, 1, 4), np.float32)
    return flash_attention(q, q, np.cumsum(q, 1), mask_mod=mask, backend="cpu")


def test_a_spawned_process_computes_the_same() -> None:
    limit = np.array([0, 0, 2, 2])
    mask = MaskMod(lambda i, j: j <= limit[i])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(attended, (mask,))
    np.testing.assert_array_equal(found, attended(mask))


def test_another_program_reads_a_pickle_of_what_it_does_not_have(tmp_path) -> None:
    program = """if True:
        import pickle, sys
        import numpy as np
        from cupy_flash import MaskMod
        def banded(i, j):
            return np.abs(i - j) < 2
        open(sys.argv[1], "wb").write(pickle.dumps(MaskMod(banded)))
    """
    path = tmp_path / "mask"
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=120)
    mask = pickle.loads(path.read_bytes())
    assert repr(mask) == "MaskMod(banded)"
    assert mask.evaluate(0, 0, 3, np.arange(6)).sum() == 3


def test_captured_values_tell_modifications_apart() -> None:
    def make(x: Any, n: Any) -> ScoreMod:
        return ScoreMod(lambda score, h, x, n: score + x[h] * n, x=x, n=n)

    x = np.ones(3)
    one = make(x, 1.0)
    assert one == make(x, 1.0) == make(x.copy(), 1.0)
    assert hash(one) == hash(make(x.copy(), 1.0))
    others = [make(x * 2, 1.0), make(np.ones(4), 1.0), make(x, 2.0), make(x, 1), make(x, True)]
    assert one not in others
    assert len({one, make(x, 2.0)}) == 2
    assert make(x, 0.0) != make(x, -0.0)
    assert hash(make(x, 0.0)) != hash(make(x, -0.0))
    assert make(x, math.nan) == make(x, math.nan)
    assert make(np.array([0.0]), 1.0) != make(np.array([-0.0]), 1.0)
    assert one != "text"


def test_text_and_the_function_beside_it_tell_apart() -> None:
    plain = ScoreMod(lambda score: score + 1)
    text = ScoreMod(lambda score: score + 1, cuda="return score + 1;")
    assert plain != text
    assert text == ScoreMod(lambda score: score + 1, cuda="return score + 1;")
    assert text != ScoreMod(lambda score: score + 2, cuda="return score + 1;")
    untraced = [ScoreMod(f, cuda="return 1;") for f in (arc, lambda score: np.arctan(score))]
    assert untraced[0] != untraced[1]
    assert untraced[0] == ScoreMod(arc, cuda="return 1;")


def test_keys_of_calls_tell_zeros_apart_and_hold_no_objects() -> None:
    def key(value: float) -> Any:
        mod = ScoreMod(lambda score, c: np.where(1 / c > 0, score, -score), c=value)
        found = parse_modifications({"score_mod": mod})
        assert found is not None
        return found[0]

    assert key(0.0) != key(-0.0)
    assert key(math.nan) == key(math.nan)
    assert key(1.5) == key(1.5)
