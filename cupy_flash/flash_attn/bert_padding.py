"""Conversion between padded batches and packed sequences, with flash_attn's names and results.

Gradients pass through every function, to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of a batch: pack the rows that a mask selects.

    Parameters
    ----------
    hidden_states : Tensor, shape (batch, seqlen, ...)
        Rows of each sequence, with padding anywhere.
    attention_mask : Tensor, shape (batch, seqlen)
        Nonzero for rows in use, of dtype bool or an integer dtype with values 0 and 1.
    unused_mask : Tensor, shape (batch, seqlen), optional
        Nonzero for further rows that are packed, but not in use.

    Returns
    -------
    packed : Tensor, shape (total, ...)
        Rows that a mask selects.
    indices : Tensor of int64, shape (total,)
        Indices of these rows among all batch * seqlen rows, for `pad_input`.
    cu_seqlens : Tensor of int32, shape (batch + 1,)
        Offset in `packed` at which each sequence begins, then the end of the last.
    max_seqlen : int
        Largest number of packed rows of a sequence. The call waits for the GPU.
    seqused : Tensor of int32, shape (batch,)
        Number of rows in use of each sequence.
    """
    selected = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    lengths = used if unused_mask is None else selected.sum(dim=-1, dtype=torch.int32)
    return (*_packed(hidden_states, selected, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove the padding of a batch whose rows each hold several concatenated sequences.

    Parameters
    ----------
    hidden_states : Tensor, shape (batch, seqlen, ...)
        Concatenated sequences, then padding.
    attention_mask_in_length : Tensor of integers, shape (batch, seqlen)
        Lengths of the sequences of each batch element, in order; zeros are skipped. For example,
        [[2, 3, 0, 0, 0, 0]] describes a sequence of 2 rows, one of 3 rows, and a row of padding.

    Returns
    -------
    packed : Tensor, shape (total, ...)
        Rows of all sequences.
    indices : Tensor of int64, shape (total,)
        Indices of these rows among all batch * seqlen rows, for `pad_input`.
    cu_seqlens : Tensor of int32, shape (sequences + 1,)
        Offset in `packed` at which each sequence begins, then the end of the last.
    max_seqlen : int
        Length of the longest sequence. The call waits for the GPU.
    """
    lengths = attention_mask_in_length
    positions = torch.arange(lengths.shape[-1], device=lengths.device)
    selected = positions < lengths.sum(dim=-1, keepdim=True)
    return _packed(hidden_states, selected, lengths[lengths != 0])


def _packed(
    hidden_states: Tensor, selected: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the selected rows, their indices, and the offsets and maximum of `lengths`."""
    indices = selected.flatten().nonzero().flatten()
    ends = lengths.cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return a padded batch of packed rows; the inverse of `unpad_input`.

    Parameters
    ----------
    hidden_states : Tensor, shape (total, ...)
        Packed rows.
    indices : Tensor of integers, shape (total,)
        Index of each row among all batch * seqlen rows.
    batch, seqlen : int
        Lengths of the first two axes of the result.

    Returns
    -------
    Tensor, shape (batch, seqlen, ...)
        The rows, and zeros for padding.
    """
    row = hidden_states.shape[1:]
    padded = hidden_states.new_zeros((batch * seqlen, *row))
    return padded.index_copy(0, indices.long(), hidden_states).reshape(batch, seqlen, *row)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of a tensor at `indices`.

    Parameters
    ----------
    input : Tensor, shape (rows, ...)
        Rows.
    indices : Tensor of integers, shape (total,)
        Indices of rows.

    Returns
    -------
    Tensor, shape (total, ...)
        Copies of these rows.
    """
    return input.index_select(0, indices)
