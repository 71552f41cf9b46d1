"""Templates of modifications: handles by which compiled graphs find functions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from cupy_flash import BlockList, MaskMod, ScoreMod
from cupy_flash.mods.template import place, template_of


def documents(ids: Any, width: Any = 3) -> MaskMod:
    return MaskMod(
        lambda i, j, ids, width: (ids[i] == ids[j]) & (i - j < width), ids=ids, width=width
    )


def test_values_of_captures_do_not_change_the_handle() -> None:
    first = documents(np.zeros(4, np.int32))
    for other in (documents(np.ones(9, np.int32), 7), copy.deepcopy(first), copy.copy(first)):
        assert other.template is first.template
    assert pickle.loads(pickle.dumps(first)).template is first.template
    shapes = first.template.arrays, first.template.integers, first.template.reals
    assert shapes == (("ids",), ("width",), ())


def test_other_functions_and_options_have_other_handles() -> None:
    ids = np.zeros(4, np.int32)
    shift = np.zeros(4, np.float32)

    def shifted(score: Any, j: Any, shift: Any) -> Any:
        return score + shift[j]

    mods = [
        documents(ids),
        documents(ids, 2.5),
        MaskMod(lambda i, j: i >= j),
        MaskMod(lambda i, j: i > j),
        MaskMod(lambda i, j: i > j, cuda="return i > j;"),
        ScoreMod(shifted, shift=shift),
        ScoreMod(shifted, shift=shift, differentiable=("shift",)),
        *(BlockList(np.ones((1, 1, 2, 2), bool), (rows, 2)) for rows in (2, 3)),
    ]
    assert len({mod.template.handle for mod in mods}) == len(mods)


def test_a_handle_finds_the_object_whose_block_masks_are_newest() -> None:
    ids = np.zeros(4, np.int32)
    first, second = documents(ids), documents(ids)
    template = template_of(first.template.handle)
    key = [place(ids.ctypes.data, "int32", ids.shape, ids.strides)]
    assert template.modification([ids], key, [3]) is second
    first.refresh()
    assert template.modification([ids], key, [3]) is first
    other = template.modification([ids], key, [4])
    assert other.captures["width"] == 4
    assert other == documents(ids, 4)


def test_an_unknown_handle_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="create it before the graph runs"):
        template_of("MaskMod(missing) 0")
