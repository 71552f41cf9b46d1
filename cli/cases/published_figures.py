"""Figures that other projects published for their attention kernels, as they published them.

The presets of `presets.py` time the same shapes and show these beside what was measured. Nothing
here was measured by us, and none of it on the user's GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Case

# What computes attention with the whole score matrix in memory, as the standard algorithm does.
STANDARD_PROVIDERS = frozenset(
    {"cupy-library", "cupy_flash-naive", "numpy-naive", "torch-eager", "torch-math"}
)
# A published time and rate whose product is this far from the shape's FLOPs belong to two shapes.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Published:
    """One figure: what was timed, and what was said about it.

    Attributes
    ----------
    case
        The call, in our terms.
    label
        Whose figure it is, in few letters.
    fused
        False for the algorithm that keeps the score matrix in memory.
    ms
        Published time, if one was.
    gflops
        Published rate in GFLOP/s, if one was, as its authors count FLOPs.
    counts_masked
        Whether they count the pairs that a causal mask hides; we do not.
    note
        What a reader of the figure should know.
    """

    case: Case
    label: str
    fused: bool
    ms: float | None = None
    gflops: float | None = None
    counts_masked: bool = False
    note: str | None = None

    @property
    def _all_flops(self) -> float:
        return 2.0 * self.case.scores * (self.case.head_dim + self.case.head_dim_v)

    @property
    def tflops(self) -> float | None:
        """The rate in TFLOP/s as we count FLOPs; from the time where no rate was published."""
        ours = self.case.problem().flops()
        if self.gflops is not None:
            theirs = self._all_flops if self.counts_masked else ours
            return self.gflops / 1e3 * ours / theirs
        return None if self.ms is None else ours / self.ms / 1e9

    @property
    def _made_gflop(self) -> float | None:
        """What the published time and rate make together."""
        return None if self.ms is None or self.gflops is None else self.ms * self.gflops / 1e3

    @property
    def adds_up(self) -> bool:
        """Whether time and rate, where both were published, make the shape's FLOPs.

        Either count of a causal shape's will do.
        """
        if self._made_gflop is None:
            return True
        counts = (self._all_flops / 1e9, self.case.problem().flops() / 1e9)
        return any(abs(self._made_gflop / gflop - 1) <= _TOLERANCE for gflop in counts)

    @property
    def remark(self) -> str | None:
        """That it does not add up, with the numbers, or else the note."""
        if self.adds_up:
            return self.note
        gflop, seen = self._all_flops / 1e9, self.case.problem().flops() / 1e9
        counts = f"{gflop:.3g}" + (f", or {seen:.3g} without hidden pairs" if seen < gflop else "")
        return (
            f"does not add up: {self.ms:g} ms at {self.gflops:,.0f} GFLOP/s make "
            f"{self._made_gflop:.3g} GFLOP; the shape has {counts}"
        )


@dataclass(frozen=True)
class Source:
    """Where figures come from.

    Attributes
    ----------
    name
        Of the project or article.
    gpu
        What it measured on; None if it does not say.
    figures
        Empty where it gives shapes alone.
    """

    name: str
    gpu: str | None = None
    figures: tuple[Published, ...] = ()

    @property
    def text(self) -> str:
        """Name and GPU."""
        return f"{self.name} ({self.gpu or 'GPU not named'})" if self.figures else self.name

    @property
    def cases(self) -> tuple[Case, ...]:
        """What there are figures for, in their order."""
        return tuple(dict.fromkeys(figure.case for figure in self.figures))

    def of(self, case: Case) -> tuple[Published, ...]:
        """The figures of a case."""
        return tuple(figure for figure in self.figures if figure.case == case)

    def answering(self, case: Case, provider: str) -> Published | None:
        """The best figure of the algorithm, standard or fused, that a provider runs."""
        fused = provider not in STANDARD_PROVIDERS
        found = [figure for figure in self.of(case) if figure.fused == fused]
        return max(found, key=lambda figure: figure.tflops or 0.0, default=None)

    def speedup(self, figure: Published) -> float | None:
        """How many times as fast as the source's own standard algorithm; None if it has none."""
        base = next((other for other in self.of(figure.case) if not other.fused), None)
        if base is None or not base.tflops or not figure.tflops:
            return None
        return figure.tflops / base.tflops


def square(
    dtype: str,
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int,
    causal: bool = False,
    *,
    heads_kv: int | None = None,
) -> Case:
    """As many queries as keys and values as wide as keys; plain heads without `heads_kv`."""
    return Case(dtype, batch, seqlen, seqlen, heads, heads_kv or heads, head_dim, head_dim, causal)


# CobraML's first FlashAttention, CUDA cores only. Its article names no dtype; the kernel reads
# float4 vectors, so float32. All with 16 heads and head_dim 64, against eager PyTorch.
_COBRAML_PYTHON_ROWS = (
    # batch, seqlen, causal, CobraML ms, PyTorch ms
    (4, 512, False, 0.527, 1.198),
    (4, 512, True, 0.660, 1.771),
    (8, 59, False, 0.044, 0.170),
    (8, 59, True, 0.047, 0.266),
    (1, 2048, False, 1.670, 4.009),
    (1, 2048, True, 1.663, 3.868),
)
# The kernel alone.
_COBRAML_CPP_ROWS = (
    # head_dim, batch, seqlen, causal, ms, GFLOP/s
    (64, 4, 512, False, 0.393, 10925),
    (64, 4, 512, True, 0.034, 3973),
    (64, 8, 59, False, 0.032, 3537),
    (64, 8, 59, True, 0.032, 3514),
    (128, 4, 512, False, 0.918, 9354),
    (128, 4, 512, True, 0.857, 10018),
)

COBRAML_PYTHON = Source(
    "CobraML FA1, called from Python, and eager PyTorch",
    "NVIDIA A10G",
    tuple(
        Published(square("float32", batch, 16, seqlen, 64, causal), label, fused, ms)
        for batch, seqlen, causal, fused_ms, eager_ms in _COBRAML_PYTHON_ROWS
        for label, fused, ms in (("PyTorch", False, eager_ms), ("CobraML", True, fused_ms))
    ),
)
COBRAML_CPP = Source(
    "CobraML FA1, its kernel alone",
    "NVIDIA A10G",
    tuple(
        Published(
            square("float32", batch, 16, seqlen, head_dim, causal),
            "CobraML",
            True,
            ms,
            gflops,
            counts_masked=True,
        )
        for head_dim, batch, seqlen, causal, ms, gflops in _COBRAML_CPP_ROWS
    ),
)

_THREE_KERNEL_CASE = square("float32", 1, 1, 4096, 64)
THREE_KERNEL = Source(
    "FlashAttention in CUDA (sanket-pixel/flash_attention): three kernels, and one fused",
    None,
    (
        Published(_THREE_KERNEL_CASE, "3 kernels", False, 21.8565),
        Published(_THREE_KERNEL_CASE, "fused", True, 7.1659),
    ),
)

_ROOFLINE_CASE = square("float16", 1, 32, 4096, 128)
ROOFLINE_ARTICLE = Source(
    "the roofline table of an article on FlashAttention's memory hierarchy",
    "NVIDIA A100",
    (
        Published(
            _ROOFLINE_CASE,
            "standard",
            False,
            gflops=1_200,
            note="is 229 ms, a hundred times what the article's 4.4 GB take at its 2.0 TB/s",
        ),
        Published(_ROOFLINE_CASE, "FA-1", True, gflops=124_000),
        Published(_ROOFLINE_CASE, "FA-2", True, gflops=156_000),
    ),
)

# These give shapes and no times.
REPLIT = Source("the article Matmul to Flash Attention, shapes of Replit-3B")
CUTE_EXAMPLE = Source("the FlashAttention-2 example of CUTLASS's CuTe DSL")
