"""The public check of a modification's device text."""

from __future__ import annotations

from cupy_flash.calls.check_mod import require_agreement
from cupy_flash.mods.modification import MaskMod, ScoreMod


def check_mod(
    mod: ScoreMod | MaskMod,
    *,
    batch: int = 2,
    heads: int = 4,
    seqlen_q: int = 60,
    seqlen_k: int = 70,
    q_offset: int | None = None,
) -> None:
    """Compare the device text of a modification with its Python function, pair by pair.

    For `cuda=` text, which nothing else holds against the function; of one that was traced it
    checks the tracing. Pairs are those of every sequence, head, query and key, scores random.

    Parameters
    ----------
    mod
        The modification. Copies of captured arrays are read where they lie in host memory.
    batch, heads, seqlen_q, seqlen_k
        Sequences, query heads, queries and keys.
    q_offset
        Position of the first query among the keys; by default the last stands at the last key.

    Raises
    ------
    TypeError
        For what is no modification.
    ValueError
        Where they differ: naming the first such pair, and both results. Scores may differ by 2^-16
        of the score, the result or 1, whichever is largest. Also without pairs.
    UnsupportedError
        Without a GPU.
    CompileError
        If the text does not compile.
    """
    offset = seqlen_k - seqlen_q if q_offset is None else q_offset
    require_agreement(mod, (batch, heads, seqlen_q, seqlen_k), offset)
