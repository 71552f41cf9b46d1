"""Public check of the CUDA source of a modification against its Python function."""

from __future__ import annotations

from cupy_flash.calls.check.check_mod import require_agreement
from cupy_flash.mods.modification import MaskMod, ScoreMod
from cupy_flash.opaque import untraced


@untraced
def check_mod(
    mod: ScoreMod | MaskMod,
    *,
    batch: int = 2,
    heads: int = 4,
    seqlen_q: int = 60,
    seqlen_k: int = 70,
    q_offset: int | None = None,
) -> None:
    """Compare the CUDA source of a modification with its Python function, pair by pair.

    Source passed as `cuda=` is otherwise not compared with the function; for a traced function this
    checks the generated source. Every (batch, head, query, key) is evaluated with a random score.

    Parameters
    ----------
    mod
        Modification to check. Captured arrays in host memory are copied to the GPU.
    batch, heads, seqlen_q, seqlen_k
        Numbers of sequences, query heads, queries and keys.
    q_offset
        Position of the first query among the keys. By default the last query is at the last key.

    Raises
    ------
    TypeError
        If `mod` is not a `ScoreMod` or `MaskMod`.
    ValueError
        If the results differ; the message shows the first differing pair. Scores may differ by
        2^-16 times the largest of the score, the result and 1. Also if a size is 0.
    UnsupportedError
        If there is no GPU.
    CompileError
        If the source does not compile.
    """
    offset = seqlen_k - seqlen_q if q_offset is None else q_offset
    require_agreement(mod, (batch, heads, seqlen_q, seqlen_k), offset)
