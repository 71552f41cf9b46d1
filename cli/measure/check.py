"""Compare results with the float64 reference, on all rows or on a sample of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_flash.arrays.strided import array_module
from cupy_flash.reference.dense import attention_naive, attention_reference, error_bound, max_error

from ..cases import sequences
from ..cases.cases import Case
from ..cases.inputs import Inputs, placed_on
from ..cases.mod_arguments import numpy_dtype, restricted

# Number of scores that the reference computes in about a second. On the GPU, about ten passes over
# the float64 scores limit the rate; on the host, exp does.
GPU_SCORES = 2_000_000_000
HOST_SCORES = 40_000_000
# Maximum number of blocks; with more, kernel launches take longer than the arithmetic.
_MOST_BLOCKS = 256
# Size of a sample: at least _LEAST_HEADS heads, and _ROWS_PER_HEAD rows per head in blocks of
# _BLOCK_ROWS, spread over the sequence. SAMPLE_ROWS limits the rows of all heads together.
_LEAST_HEADS = 4
_ROWS_PER_HEAD = 1024
_BLOCK_ROWS = 128
SAMPLE_ROWS = 16384
# Size of a sample if sequences have different lengths: sequences, and rows of all of them together.
_MOST_SEQUENCES = 64
_SEQUENCES_ROWS = 65536
# Limit of a block's float32 scores in bytes.
_BLOCK_BYTES = 1 << 28
# With fewer rows, the naive result may be exact by chance.
_FEW_ROWS = 256


@dataclass(frozen=True)
class Block:
    """Query rows `start` to `stop` of one head of one sequence."""

    batch: int
    head: int
    start: int
    stop: int


def choose_blocks(
    case: Case, seed: int, most_scores: int, most_rows: int | None = None
) -> list[Block]:
    """Return blocks of all rows if that is little work, otherwise of a random sample.

    A sample has the last rows of each chosen head.

    Parameters
    ----------
    case
        Case whose rows are chosen.
    seed
        Seed of the choice.
    most_scores
        Limit of the number of scores that the check computes.
    most_rows
        Size of a sample in rows. If given, all rows are taken only if there are no more than this.
    """
    if case.kind == "varlen":
        return _blocks_of_sequences(case, seed, most_scores, most_rows or _SEQUENCES_ROWS)
    if not case.query_rows:
        return []
    heads = [(b, h) for b in range(case.batch) for h in range(case.heads_q)]
    rows = max(1, min(case.seqlen_q, _BLOCK_BYTES // (4 * max(case.seqlen_k, 1))))
    starts = range(0, case.seqlen_q, rows)
    sample_rows = most_rows or SAMPLE_ROWS
    affordable = case.scores <= most_scores and len(heads) * len(starts) <= _MOST_BLOCKS
    if affordable and (most_rows is None or len(heads) * case.seqlen_q <= most_rows):
        return [Block(b, h, s, min(s + rows, case.seqlen_q)) for b, h in heads for s in starts]
    per_head = min(case.seqlen_q, _ROWS_PER_HEAD, max(1, sample_rows // _LEAST_HEADS))
    if case.seqlen_q > per_head:
        rows = min(rows, _BLOCK_ROWS)
    rng = np.random.default_rng(seed)
    chosen = _sample_heads(case, rng, len(heads), per_head, most_scores, sample_rows)
    last = (case.seqlen_q - 1) // rows
    blocks = []
    for index in chosen:
        others = rng.choice(last, min(last, -(-per_head // rows) - 1), replace=False)
        for block in sorted({last, *others.tolist()}):
            stop = min((block + 1) * rows, case.seqlen_q)
            blocks.append(Block(*heads[index], block * rows, stop))
    return blocks


def _blocks_of_sequences(case: Case, seed: int, most_scores: int, most_rows: int) -> list[Block]:
    """Choose blocks of the longest sequence and of others, each as if it were a dense case."""
    lengths = case.key_lengths
    order = np.random.default_rng(seed).permutation(case.batch).tolist()
    order.sort(key=lambda batch: lengths[batch] < max(lengths))
    chosen = sorted(order[:_MOST_SEQUENCES])
    share = max(len(chosen), 1)
    blocks = []
    for batch in chosen:
        alone = case.as_dense(1, lengths[batch], lengths[batch])
        result = choose_blocks(alone, seed + batch, most_scores // share, most_rows // share)
        blocks += [dataclasses.replace(block, batch=batch) for block in result]
    return blocks


def _sample_heads(
    case: Case,
    rng: np.random.Generator,
    heads: int,
    per_head: int,
    most_scores: int,
    sample_rows: int,
) -> list[int]:
    affordable = most_scores // (per_head * max(case.seqlen_k, 1))
    wanted = max(_LEAST_HEADS, min(affordable, sample_rows // per_head, _MOST_BLOCKS))
    return sorted(rng.choice(heads, min(heads, wanted), replace=False).tolist())


@dataclass(frozen=True)
class Coverage:
    """Extent of a check: query rows over the batch and all heads, and the allowed error.

    Attributes
    ----------
    rows, all_rows
        Number of query rows that were compared, and in total.
    bound
        Largest difference that passes.
    not_finite
        Number of query rows left out because the reference or the naive formula is inf or NaN.
    """

    rows: int
    all_rows: int
    bound: float
    not_finite: int = 0


@functools.cache
def why_no_matmul() -> str | None:
    """Return why cupy.matmul cannot be used, or None if it can."""
    import cupy

    try:
        one = cupy.ones((2, 2), np.float64)
        cupy.matmul(one, one)
    except Exception as error:  # a missing cuBLAS raises one of several exceptions
        return f"cupy.matmul needs the cuBLAS library: {' '.join(str(error).split())[:80]}"
    return None


class Check:
    """Reference of a case's sampled rows, and the error that it allows.

    The rule is that of `error_bound`: twice the error of the naive formula in the same precision on
    the same rows, plus a few units in the last place.

    Attributes
    ----------
    coverage
        Number of rows that are compared, and the largest difference that passes.
    """

    def __init__(
        self, inputs: Inputs, seed: int, *, on_gpu: bool, most_rows: int | None = None
    ) -> None:
        """Compute the reference.

        Parameters
        ----------
        inputs
            Inputs of the case.
        seed
            Seed of the sample.
        on_gpu
            Whether the results will be on the GPU.
        most_rows
            See `choose_blocks`.
        """
        case = inputs.case
        # Without cuBLAS the reference is computed on the host.
        self._on_gpu = on_gpu and why_no_matmul() is None
        self._placed = placed_on(gpu=self._on_gpu)
        self._case, self._more = case, inputs.more
        most_scores = GPU_SCORES if self._on_gpu else HOST_SCORES
        self._blocks = choose_blocks(case, seed, most_scores, most_rows)
        rows = sum(block.stop - block.start for block in self._blocks)
        bound = 0.0
        self._reference: Any = None
        # Bool array (rows,): rows of the blocks that can be compared. None if all can.
        self._finite: Any = None
        if self._blocks:
            bound = self._compute(inputs, on_gpu=on_gpu, few=rows < _FEW_ROWS)
        compared = rows if self._finite is None else int(self._finite.sum())
        self.coverage = Coverage(compared, case.query_rows, bound, not_finite=rows - compared)

    def _compute(self, inputs: Inputs, *, on_gpu: bool, few: bool) -> float:
        """Compute and store the reference; return the bound."""
        case, arrays = inputs.case, inputs.gpu if on_gpu else inputs.host
        modifications = inputs.modifications(on_gpu=self._on_gpu)
        references, lses, naives = [], [], []
        for block in self._blocks:
            head = sequences.head_of(case, arrays, self._more, block.batch, block.head)
            rows = head.q[:, block.start : block.stop]
            rows, keys, values = (self._placed(x) for x in (rows, head.k, head.v))
            options: dict[str, Any] = {
                "causal": case.causal,
                "softmax_scale": case.softmax_scale,
                "q_offset": head.first_query + block.start,
            }
            options |= self._of_block(modifications, block, block.start, block.stop)
            as_float8 = case.is_dense and case.cache_dtype is not None
            naive = attention_naive(rows, keys, values, as_float8=as_float8, **options)
            naives.append(naive.astype(np.float64))
            if case.append:
                out, lse = sequences.appended_reference(
                    *(case, arrays, self._more, block.batch, block.head, self._placed),
                    self._of_block(modifications, block, 0, case.seqlen_q),
                )
                out = out[:, block.start : block.stop]
                lse = lse[:, :, block.start : block.stop]
            else:
                out, lse = attention_reference(rows, keys, values, return_lse=True, **options)
            references.append(out)
            lses.append(lse)
        xp = array_module(references[0])
        reference, naive = xp.concatenate(references, 1), xp.concatenate(naives, 1)
        lse = xp.concatenate(lses, 2)
        finite = (xp.isfinite(reference) & xp.isfinite(naive)).all((0, 2, 3))
        if not finite.all():
            # Where the naive formula overflows, it gives no bound for the result.
            self._finite = finite
            reference, naive, lse = reference[:, finite], naive[:, finite], lse[:, :, finite]
        self._reference = reference
        # `error_bound` needs lse if the naive result's error says little: in float64, in which the
        # reference has the same errors, and of few rows, which may be exact by chance.
        used_lse = lse if few or case.dtype == "float64" else None
        return error_bound(naive, reference, numpy_dtype(case.dtype), lse=used_lse)

    def _of_block(
        self, modifications: Mapping[str, Any], block: Block, start: int, stop: int
    ) -> dict[str, Any]:
        """Return the modifications of some rows of the block's head."""
        return restricted(
            modifications,
            self._case.mods,
            batch=block.batch,
            keys=self._case.key_lengths[block.batch],
            heads=slice(block.head, block.head + 1),
            rows=sequences.rows_in_call(self._case, self._more, block.batch, start, stop),
        )

    def error(self, out: Any) -> float:
        """Return the largest absolute difference between a result and the reference."""
        if not self._blocks:
            return 0.0
        rows = [self._placed(self._rows(out, block)).astype(np.float64) for block in self._blocks]
        result = array_module(rows[0]).concatenate(rows, 1)
        compared = result if self._finite is None else result[:, self._finite]
        return max_error(compared, self._reference)

    def _rows(self, out: Any, block: Block) -> Any:
        """Return the block's rows of a result, (1, rows, 1, dim)."""
        head = slice(block.head, block.head + 1)
        one = sequences.rows_of(self._case, out, self._more, block.batch, head)
        return one[:, block.start : block.stop]
