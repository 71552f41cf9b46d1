"""Named sets of benchmark cases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..providers.providers import PAGE_SIZES
from .cases import Case
from .mods import PLAIN, CaseMods
from .sequences import long_tail

# FlashAttention-3 paper, section 4.1: every case has 16384 tokens and a hidden size of 2048.
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
# (query heads, KV heads): groups of 4 and of 8 query heads, each followed by ungrouped heads that
# have the same FLOPs.
_GROUPED_HEADS = ((32, 8), (32, 32), (64, 8), (64, 64))


@dataclass(frozen=True)
class Preset:
    """A named benchmark.

    Attributes
    ----------
    title
        Short description of what the benchmark measures.
    cases
        Cases in the order of the table.
    providers
        Names of the providers; third-party ones that are not installed are left out.
    baseline
        Providers to compare with; speedups are relative to the fastest of them in each case.
    needs_all
        Whether the result is meaningless if one of the providers is missing.
    notes
        Footnotes; for a published benchmark, among them its figures, measured elsewhere.
    """

    title: str
    cases: tuple[Case, ...]
    providers: tuple[str, ...]
    baseline: tuple[str, ...]
    notes: tuple[str, ...] = ()
    needs_all: bool = False


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
    """Return a case with equal sequence lengths and head dims; `heads_kv` defaults to `heads`."""
    return Case(dtype, batch, seqlen, seqlen, heads, heads_kv or heads, head_dim, head_dim, causal)


def _prefills(head_dims: Sequence[int], seqlens: Sequence[int] = (4096, 16384)) -> tuple[Case, ...]:
    """Return bfloat16 cases of these sizes, with full and causal masks."""
    return tuple(
        square("bfloat16", _TOKENS // seqlen, _HIDDEN // head_dim, seqlen, head_dim, causal)
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    )


def _cobraml(*sizes: tuple[int, int, int]) -> tuple[Case, ...]:
    """Return a full and a causal case for each (head_dim, batch, seqlen), as CobraML lists them."""
    return tuple(
        square("float32", batch, 16, seqlen, head_dim, causal)
        for head_dim, batch, seqlen in sizes
        for causal in (False, True)
    )


_COBRAML_NOTE = (
    "CobraML names no dtype; its kernel reads float4 vectors and uses CUDA cores, as "
    "cupy_flash-simt does"
)


def _replit(batch: int, seqlen_q: int, seqlen_k: int, causal: bool = False) -> Case:
    return Case("bfloat16", batch, seqlen_q, seqlen_k, 24, 8, 128, 128, causal)


def _cute_example(causal: bool) -> Case:
    # The example's mask is aligned at the top left.
    q_offset = 0 if causal else None
    sizes = (1, 1280, 1536, 16, 16, 128, 128)
    return Case("float16", *sizes, causal, q_offset=q_offset, softmax_scale=1.0)


def _decode(batch: int, seqlen_k: int) -> Case:
    """Return a decoding case: one query row of a model with grouped heads."""
    return Case("bfloat16", batch, 1, seqlen_k, 32, 8, 128, 128, kind="cache")


def _latent(batch: int, seqlen_k: int, heads: int) -> Case:
    """Return an MLA decoding case: the query row of every head reads the same latent vectors."""
    sizes = (batch, 1, seqlen_k, heads, 1, 576, 512)
    return Case("bfloat16", *sizes, kind="cache", values_in_keys=True)


_DECODE = tuple(
    _decode(batch, seqlen_k) for batch in (1, 8, 64) for seqlen_k in (1024, 8192, 65536)
)
# (batch, seqlen_k) of the mla preset.
_LATENT_SIZES = (
    *((1, 4096), (1, 32768), (16, 4096), (16, 32768)),
    *((128, 4096), (128, 8192), (128, 16384), (128, 32768)),
)
# Lengths of the varlen preset, from 16 to 16384.
_PACKED = long_tail(32, 16384, seed=0)


def _packed(causal: bool) -> Case:
    case = square("bfloat16", len(_PACKED), 16, max(_PACKED), 128, causal)
    return dataclasses.replace(case, kind="varlen", lengths=_PACKED)


# Number of keys in the window of the mods preset, including the one at the query's position.
_WINDOW = 1024
_WINDOWED = CaseMods.parse(f"window {_WINDOW - 1}:0")
_MODIFIED = (
    # causal, modifications
    (False, PLAIN),
    (True, PLAIN),
    (True, _WINDOWED),
    (True, CaseMods(alibi=True)),
    (True, CaseMods(sinks=True)),
    (False, CaseMods(softcap=50.0)),
    (False, CaseMods(bias="heads")),
    (False, CaseMods(bias="shared")),
    (False, CaseMods(mod="documents")),
    (True, CaseMods(mod="documents")),
    (False, CaseMods(mod="t5")),
)


def _modified(head_dim: int, causal: bool, mods: CaseMods) -> Case:
    case = square("bfloat16", 2, _HIDDEN // head_dim, 8192, head_dim, causal)
    return dataclasses.replace(case, mods=mods)


def _long_documents(head_dim: int) -> Case:
    """Return a case whose sequence is long enough for the library to build a block mask."""
    case = square("bfloat16", 1, _HIDDEN // head_dim, 32768, head_dim, causal=True)
    return dataclasses.replace(case, mods=CaseMods(mod="documents"))


_PRESETS = {
    "fa3-grid": Preset(
        "Forward, as in the FlashAttention-3 paper",
        cases=_prefills((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)),
        providers=("cupy_flash", "torch-flash"),
        baseline=("torch-flash",),
    ),
    "float32": Preset(
        "float32, from short sequences to long",
        cases=tuple(square("float32", *row) for row in _FLOAT32_ROWS),
        providers=("cupy_flash", "cupy_flash-simt", "torch-efficient", "torch-math"),
        baseline=("torch-efficient", "torch-math"),
    ),
    "gqa": Preset(
        "Grouped heads, compared with ungrouped heads of the same FLOPs",
        cases=tuple(
            square("bfloat16", batch, heads, seqlen, 128, heads_kv=heads_kv)
            for batch, seqlen in ((2, 8192), (1, 16384))
            for heads, heads_kv in _GROUPED_HEADS
        ),
        providers=("cupy_flash", "torch-cudnn", "torch-flash"),
        baseline=("torch-cudnn", "torch-flash"),
    ),
    "decode": Preset(
        "Decoding: one query row over a key/value cache",
        cases=_DECODE,
        providers=(
            "cupy_flash",
            *(f"cupy_flash-page{size}" for size in PAGE_SIZES),
            "torch-flash",
            "torch-cudnn",
        ),
        baseline=("torch-flash", "torch-cudnn"),
        notes=("cupy_flash-pageN: the rows of the cache in shuffled pages of N",),
    ),
    "decode-quantized": Preset(
        "Decoding: one query row over a cache of 8 bits, compared with 16",
        cases=_DECODE,
        providers=("cupy_flash", "cupy_flash-float8", "cupy_flash-int8"),
        baseline=("cupy_flash",),
        notes=("cupy_flash-float8, -int8: the same cache in 8 bits, a scale for each head",),
    ),
    "mla": Preset(
        "Decoding with multi-head latent attention: values are 512 of the 576 columns of one key",
        cases=tuple(_latent(*sizes, heads) for heads in (16, 128) for sizes in _LATENT_SIZES),
        providers=(
            *("cupy_flash", "cupy_flash-float8", "cupy_flash-int8"),
            *("cupy_flash-page64", "cupy_flash-page16"),
            *("torch-cudnn", "torch-flash", "torch-efficient"),
        ),
        baseline=("torch-cudnn", "torch-flash", "torch-efficient"),
        notes=(
            "GB/s are those of the latent, read once; cupy_flash-float8, -int8: in 8 bits, a scale "
            "for each head; cupy_flash-page64, -page16: in shuffled pages of 64 and 16 rows",
        ),
    ),
    "wide": Preset(
        "Heads of 512 columns, compared with heads of 256 of the same FLOPs",
        cases=_prefills((256, 512)),
        providers=("cupy_flash", "torch-efficient", "torch-math"),
        baseline=("torch-efficient", "torch-math"),
    ),
    "fp8": Preset(
        "q, k and v of float8, compared with 16 bits",
        cases=_prefills((128, 256)),
        providers=("cupy_flash", "cupy_flash-float8"),
        baseline=("cupy_flash",),
        notes=("cupy_flash-float8: q, k and v in e4m3, a scale for each head",),
    ),
    "varlen": Preset(
        "Packed sequences of long-tailed lengths, and equal lengths of the same FLOPs",
        cases=(_packed(causal=False), _packed(causal=True)),
        providers=("cupy_flash", "cupy_flash-uniform"),
        baseline=("cupy_flash-uniform",),
    ),
    "mods": Preset(
        "Masks and score modifications; decoding with a window, and as many keys without one",
        cases=(
            *(_modified(head_dim, *each) for head_dim in (64, 128) for each in _MODIFIED),
            *(_long_documents(head_dim) for head_dim in (64, 128)),
            dataclasses.replace(_decode(1, 65536), mods=_WINDOWED),
            _decode(1, _WINDOW),
        ),
        providers=("cupy_flash", "cupy_flash-anew", "torch-flex", "torch-cudnn", "torch-efficient"),
        baseline=("torch-flex", "torch-cudnn"),
    ),
    "memory": Preset(
        "The standard algorithm and the fused one by sequence length",
        cases=tuple(square("float16", 1, 16, 1024 << doubled, 64) for doubled in range(6)),
        providers=("cupy_flash", "cupy-library", "torch-math"),
        baseline=("cupy-library", "torch-math"),
    ),
    "crossover": Preset(
        "Up to which sequence length library products beat the fused kernel",
        cases=tuple(
            square(dtype, 1, 16, seqlen, head_dim, causal)
            for head_dim, dtype, causal, seqlen in itertools.product(
                (32, 64, 128, 256),
                ("float32", "bfloat16"),
                (False, True),
                (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
            )
        ),
        providers=("cupy_flash", "cupy-library"),
        baseline=("cupy-library",),
        needs_all=True,
    ),
    "cobraml-python": Preset(
        "CobraML FA1 from Python, against eager PyTorch",
        cases=_cobraml((64, 4, 512), (64, 8, 59), (64, 1, 2048)),
        providers=("cupy_flash", "cupy_flash-simt", "torch-eager"),
        baseline=("torch-eager",),
        notes=(
            _COBRAML_NOTE,
            "Published, on an NVIDIA A10G, in this order, ms: CobraML 0.527, 0.660, 0.044, 0.047, "
            "1.670, 1.663; eager PyTorch 1.198, 1.771, 0.170, 0.266, 4.009, 3.868",
        ),
    ),
    "cobraml-cpp": Preset(
        "CobraML FA1, the kernel alone",
        cases=_cobraml((64, 4, 512), (64, 8, 59), (128, 4, 512)),
        providers=("cupy_flash", "cupy_flash-simt", "torch-eager"),
        baseline=("torch-eager",),
        notes=(
            _COBRAML_NOTE,
            "Published, on an NVIDIA A10G, in this order, ms: 0.393, 0.034, 0.032, 0.032, 0.918, "
            "0.857; the second contradicts its 3973 GFLOP/s, by which it took 1.081",
        ),
    ),
    "three-kernel": Preset(
        "Three kernels (scores, softmax, output) against one",
        cases=(square("float32", 1, 1, 4096, 64),),
        providers=("cupy_flash", "cupy_flash-simt", "cupy_flash-naive", "torch-eager"),
        baseline=("cupy_flash-naive",),
        notes=(
            "Published (sanket-pixel/flash_attention), on a GPU that it does not name: three "
            "kernels 21.8565 ms, one 7.1659",
        ),
    ),
    "replit-context": Preset(
        "Replit-3B reading 1000 tokens",
        cases=tuple(
            _replit(batch, 1000, 1000, causal) for batch in (1, 8) for causal in (False, True)
        ),
        providers=("cupy_flash", "torch-flash", "torch-cudnn", "torch-eager"),
        baseline=("torch-flash", "torch-cudnn"),
        notes=("Shapes of the article Matmul to Flash Attention; batch, dtype and mask are ours",),
    ),
    "replit-generation": Preset(
        "Replit-3B writing its i-th token after 1000: one query, 1000 + i keys, all visible",
        cases=tuple(_replit(batch, 1, 1000 + i) for batch in (1, 8) for i in (1, 100, 1000)),
        providers=("cupy_flash", "torch-flash", "torch-cudnn", "torch-eager"),
        baseline=("torch-flash", "torch-cudnn"),
        notes=("Shapes of the article Matmul to Flash Attention; batch, dtype and i are ours",),
    ),
    "cute-example": Preset(
        "The command lines of the CuTe DSL's FlashAttention-2 example",
        cases=(_cute_example(causal=False), _cute_example(causal=True)),
        providers=("cupy_flash", "cupy_flash-mma", "torch-flash", "torch-efficient"),
        baseline=("torch-flash", "torch-efficient"),
        notes=(
            "The example's causal mask is aligned top-left: q_offset 0",
            "The example's tile is --provider cupy_flash-mma --br 128 --bc 128 --warps 4, which is "
            "refused for its registers",
        ),
    ),
    "roofline-article": Preset(
        "N = 4096, d = 128, 32 heads: the standard algorithm and the fused one",
        cases=(square("float16", 1, 32, 4096, 128),),
        providers=("cupy_flash", "torch-flash", "torch-eager"),
        baseline=("torch-eager",),
        notes=("Published, for an NVIDIA A100, TFLOP/s: standard 1.2, FA-1 124, FA-2 156",),
    ),
}


def _backward(name: str, *providers: str, baseline: tuple[str, ...] = ()) -> Preset:
    """Return a preset for the gradients of another preset's cases, except those of caches."""
    named = _PRESETS[name]
    cases = (case for case in named.cases if not case.is_cached)
    return dataclasses.replace(
        named,
        title=f"Gradients: {named.title[0].lower()}{named.title[1:]}",
        cases=tuple(dataclasses.replace(case, direction="backward") for case in cases),
        providers=providers or named.providers,
        baseline=baseline or named.baseline,
    )


_OF_TORCH = ("torch-cudnn", "torch-flash")
_PRESETS |= {
    "fa3-grid-backward": dataclasses.replace(
        _backward("fa3-grid", "cupy_flash", *_OF_TORCH, baseline=_OF_TORCH),
        title="Backward, on the grid of the FlashAttention-3 paper",
    ),
    "float32-backward": _backward("float32"),
    "gqa-backward": _backward("gqa"),
    "varlen-backward": _backward("varlen"),
    "mods-backward": dataclasses.replace(
        _backward(
            *("mods", "cupy_flash", "torch-cudnn", "torch-efficient"),
            baseline=("torch-cudnn", "torch-efficient"),
        ),
        title="Gradients under masks and score modifications",
    ),
    "documents-backward": Preset(
        "Gradients under a mask function that separates documents",
        cases=tuple(
            dataclasses.replace(
                _modified(head_dim, causal, CaseMods(mod="documents")), direction="backward"
            )
            for head_dim in (64, 128)
            for causal in (False, True)
        ),
        providers=("cupy_flash", "torch-flex"),
        baseline=("torch-flex",),
    ),
}
NAMES = tuple(_PRESETS)


def preset(name: str, dtypes: Sequence[str] | None = None) -> Preset:
    """Return a preset by name, in the given dtypes or, if None, its own."""
    named = _PRESETS[name]
    if dtypes is None:
        return named
    cases = (dataclasses.replace(c, dtype=dtype) for dtype in dtypes for c in named.cases)
    return dataclasses.replace(named, cases=tuple(dict.fromkeys(cases)))
