"""Conversion between padded batches and packed sequences, with flash_attn's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
bert_padding = pytest.importorskip("cupy_flash.flash_attn.bert_padding")

MASK_DTYPES = ["bool", "int32", "int64"]


def random_masks(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask with at least one row in use, and a mask of other rows."""
    batch, seqlen = (int(rng.integers(1, n)) for n in (6, 20))
    used = rng.random((batch, seqlen)) < rng.random()
    used[rng.integers(batch), rng.integers(seqlen)] = True
    return used, (rng.random(used.shape) < 0.3) & ~used


@pytest.mark.parametrize("with_unused", [False, True])
@pytest.mark.parametrize("dtype", MASK_DTYPES)
@pytest.mark.parametrize("inner", [(), (3,), (2, 3)])
def test_selected_rows_are_packed_and_padded_again(
    inner: tuple[int, ...], dtype: str, with_unused: bool, device: str, rng: Any
) -> None:
    used, unused = random_masks(rng)
    rows = rng.standard_normal((*used.shape, *inner))
    selected = used | unused if with_unused else used
    masks = [torch.tensor(x).to(getattr(torch, dtype)).to(device) for x in (used, unused)]
    given = torch.tensor(rows, device=device)
    packed, indices, ends, longest, in_use = bert_padding.unpad_input(
        given, *masks[: 1 + with_unused]
    )
    np.testing.assert_array_equal(packed.cpu(), rows[selected])
    np.testing.assert_array_equal(indices.cpu(), np.flatnonzero(selected))
    np.testing.assert_array_equal(ends.cpu(), [0, *np.cumsum(selected.sum(1))])
    np.testing.assert_array_equal(in_use.cpu(), used.sum(1))
    assert ends.dtype == in_use.dtype == torch.int32
    assert longest == selected.sum(1).max()
    assert type(longest) is int
    again = bert_padding.pad_input(packed, indices.int(), *used.shape)
    expected = np.zeros_like(rows)
    expected[selected] = rows[selected]
    np.testing.assert_array_equal(again.cpu(), expected)
    alone = bert_padding.index_first_axis(given.flatten(0, 1), indices.int())
    assert torch.equal(alone, packed)


def test_concatenated_sequences_are_packed(device: str, rng: np.random.Generator) -> None:
    batch, seqlen = 4, 17
    lengths = np.zeros((batch, seqlen), np.int64)
    expected = []
    rows = rng.standard_normal((batch, seqlen, 3))
    for b in range(batch):
        left = seqlen
        for at in range(int(rng.integers(0 if b else 1, 4))):
            lengths[b, at] = rng.integers(1, left // 3 + 1)
            left -= lengths[b, at]
        expected.append(rows[b, : seqlen - left])
    packed, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(
        torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
    )
    sequences = lengths[lengths > 0]
    np.testing.assert_array_equal(packed.cpu(), np.concatenate(expected))
    np.testing.assert_array_equal(ends.cpu(), [0, *np.cumsum(sequences)])
    assert ends.dtype == torch.int32
    assert longest == sequences.max()
    padded = bert_padding.pad_input(packed, indices, batch, seqlen).cpu().numpy()
    for b, sequence in enumerate(expected):
        np.testing.assert_array_equal(padded[b, : len(sequence)], sequence)
        assert not padded[b, len(sequence) :].any()


def test_gradients_pass_through(device: str, rng: np.random.Generator) -> None:
    used, _ = random_masks(rng)
    mask = torch.tensor(used, device=device)
    rows = torch.tensor(rng.standard_normal((*used.shape, 3)), device=device, requires_grad=True)

    def there_and_back(rows: Any) -> Any:
        packed, indices, *_ = bert_padding.unpad_input(rows, mask)
        return bert_padding.pad_input(packed.square(), indices, *used.shape)

    assert torch.autograd.gradcheck(there_and_back, (rows,))
    assert torch.autograd.gradgradcheck(there_and_back, (rows,))
