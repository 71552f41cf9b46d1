"""Named sets of cases: the benchmarks that results are published for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cases import Case

# FlashAttention-3 paper, section 4.1: 16k tokens and a hidden size of 2048 throughout.
_TOKENS = 16384
_HIDDEN = 2048

_FLOAT32_ROWS = (
    # batch, heads, seqlen, head_dim, causal
    (4, 16, 512, 64, False),
    (4, 16, 512, 64, True),
    (1, 16, 2048, 64, False),
    (1, 16, 2048, 64, True),
    (1, 1, 4096, 64, False),
    (4, 16, 4096, 64, False),
    (4, 16, 4096, 128, False),
    (4, 16, 4096, 128, True),
)


@dataclass(frozen=True)
class Preset:
    """Cases, who runs them, and whom they are compared with: the best of `baseline`."""

    cases: tuple[Case, ...]
    providers: tuple[str, ...]
    baseline: tuple[str, ...]


def _square(dtype: str, batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> Case:
    return Case(dtype, batch, seqlen, seqlen, heads, heads, head_dim, head_dim, causal)


def _fa3_grid(dtypes: Sequence[str] | None) -> Preset:
    return Preset(
        cases=tuple(
            _square(dtype, _TOKENS // seqlen, _HIDDEN // head_dim, seqlen, head_dim, causal)
            for dtype in dtypes or ("bfloat16",)
            for head_dim in (64, 128, 256)
            for causal in (False, True)
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
        ),
        providers=("cupy_flash", "torch-flash"),
        baseline=("torch-flash",),
    )


def _float32(dtypes: Sequence[str] | None) -> Preset:
    return Preset(
        cases=tuple(_square(d, *row) for d in dtypes or ("float32",) for row in _FLOAT32_ROWS),
        providers=("cupy_flash", "cupy_flash-simt", "torch-efficient", "torch-math"),
        baseline=("torch-efficient", "torch-math"),
    )


_PRESETS = {"fa3-grid": _fa3_grid, "float32": _float32}
NAMES = tuple(_PRESETS)


def preset(name: str, dtypes: Sequence[str] | None = None) -> Preset:
    """A preset by name, in the dtypes asked for or its own."""
    return _PRESETS[name](dtypes)
