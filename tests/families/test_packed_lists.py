"""Lists of query tiles of batches whose sequences have lengths of their own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import MaskMod, flash_attention_backward, flash_attention_varlen_backward, plan
from cupy_flash.families import FAMILIES, backward_common

NEAR = MaskMod(lambda i, j: np.abs(i - j) < 100)
BY_HEAD = MaskMod(lambda h, i, j: np.abs(i - j) < 100 * h)


def rows(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), shape)


def has_lists(family: str, kind: str, batch: int, longest: int, total: int, **how: Any) -> bool:
    """Return whether the kernels of a family read lists.

    Parameters
    ----------
    family, kind
        Name of the family, and kind of the batch: "varlen" or "padded".
    batch, longest, total
        Number of sequences, and numbers of rows of the longest one and of all packed ones.
    **how
        Modifications.
    """
    call = {"family": family, "arch": "sm_90", **how}
    if kind == "padded":
        x = rows(batch, longest, 4, 64)
        lengths = np.full(batch, longest, np.int32)
        made = plan(flash_attention_backward, q=x, k=x, v=x, seqlens_k=lengths, **call)
    else:
        x, starts = rows(total, 4, 64), np.zeros(batch + 1, np.int32)
        call |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        call |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        made = plan(flash_attention_varlen_backward, q=x, k=x, v=x, **call)
    found = FAMILIES["backward"][family]
    lists = found.query_tile_lists(made.problem, made.tile)
    assert found.uses_block_mask(made.problem, made.tile) == (lists is not None)
    return lists is not None


@pytest.mark.parametrize("family", ["hopper", "mma"])
@pytest.mark.parametrize("kind", ["varlen", "padded"])
def test_functions_have_lists_if_the_longest_sequence_has_four_kv_tiles(family, kind) -> None:
    assert has_lists(family, kind, 3, 3 * 128 + 1, 1000, mask_mod=NEAR)
    assert not has_lists(family, kind, 3, 3 * 128, 1000, mask_mod=NEAR)
    assert has_lists(family, kind, 3, 1000, 2000, mask_mod=BY_HEAD)
    assert not has_lists(family, kind, 3, 1000, 2000, softcap=20.0)
    assert not has_lists(family, kind, 3, 1000, 2000, mask_mod=NEAR, q_offset=np.zeros(3, np.int32))


@pytest.mark.parametrize(("family", "Br"), [("hopper", 64), ("mma", 128)])
def test_a_packed_batch_of_mostly_short_sequences_has_no_lists(family, Br) -> None:
    batch, total = 256, 256 * 256
    # The packed batch has this number of query tiles, and the padded batch 16 times as many.
    tiles = total // Br + batch
    longest = 16 * tiles // batch * Br
    assert has_lists(family, "varlen", batch, longest, total, mask_mod=NEAR)
    assert not has_lists(family, "varlen", batch, longest + 1, total, mask_mod=NEAR)


@pytest.mark.parametrize(("family", "Br"), [("hopper", 64), ("mma", 128)])
def test_each_sequence_has_its_own_lists(family, Br, monkeypatch) -> None:
    # Eight sequences have entries of four bytes for their query tiles and KV tiles.
    size = 8 * (1024 // Br) * (1024 // 128) * 4
    monkeypatch.setattr(backward_common, "_LIST_BYTES", size)
    assert has_lists(family, "varlen", 8, 1024, 8 * 1024, mask_mod=NEAR)
    monkeypatch.setattr(backward_common, "_LIST_BYTES", size - 1)
    assert not has_lists(family, "varlen", 8, 1024, 8 * 1024, mask_mod=NEAR)
