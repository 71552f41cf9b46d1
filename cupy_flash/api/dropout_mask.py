"""Public function that returns the random mask of dropout."""

from __future__ import annotations

from typing import Any

from cupy_flash.calls import dropout


def dropout_mask(
    batch: int,
    heads_q: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    dropout_seed: Any,
) -> Any:
    """Return which weights of the softmax a call with dropout keeps.

    Parameters
    ----------
    batch, heads_q, seqlen_q, seqlen_k : int
        Numbers of sequences and query heads, and of queries and keys of a sequence. For packed
        sequences these are the largest numbers: an element of the mask depends on its indices in
        the sequence only.
    dropout_p, dropout_seed
        Arguments of the call, see `flash_attention`.

    Returns
    -------
    bool array, shape (batch, heads_q, seqlen_q, seqlen_k)
        True where a weight is kept, which is then divided by the probability that it is kept. It
        has the array type and the device of dropout_seed, and is a NumPy array if dropout_seed is
        an integer or a list. All elements are True if dropout_p is 0.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value.

    Notes
    -----
    The mask takes one byte for each score of a call, and the function temporarily takes about five
    times as much. Calls of `flash_attention` never store the mask: they compute the parts that they
    need from the seed. docs/guide/masks.md defines the mask, which is the same on every device.

    Examples
    --------
    >>> from cupy_flash import dropout_mask
    >>> dropout_mask(1, 1, 2, 8, dropout_p=0.25, dropout_seed=7).astype(int)[0, 0]
    array([[0, 1, 1, 1, 1, 1, 1, 1],
           [1, 1, 1, 0, 1, 0, 1, 1]])
    """
    return dropout.mask(batch, heads_q, seqlen_q, seqlen_k, dropout_p, dropout_seed)
