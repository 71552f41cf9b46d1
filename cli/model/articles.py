"""The roofline figures of two articles, recomputed.

CobraML: Padia and Govindan, "Flash Attention Version 1": a table of ridge points and of the
standard algorithm's intensities. The traffic article: on FlashAttention's memory hierarchy, with
byte counts of one head and a roofline for an A100.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from cupy_flash.problem.problem import make_contiguous_problem

from ..records import report
from ..records.report import Column
from . import gpus
from .traffic import Roof, compulsory, standard

_SEQLEN = 4096
_MB = 1e6

# As published: the ridge point in FLOP per byte, the TFLOP/s and TB/s that give it to its last
# digit, and the GPU's name in our table.
_RIDGES = (
    ("A100 SXM", 156.0, 312, 2.0, "A100"),
    ("H100 SXM", 295.5, 990, 3.35, "H100"),
    ("H200", 206.2, 990, 4.8, "H200"),
    ("B200 HGX", 562.5, 4500, 8.0, "B200"),
)
_INTENSITIES = ((64, 32.1), (128, 62.7), (512, 228.1))
# Operations of the softmax per score with which all three published intensities follow.
_SOFTMAX_OPERATIONS = 5

# The traffic article, on an A100: 312 TFLOP/s, "2.0 TB/s".
_A100 = Roof(312e12, 2.0e12)
_HEADS = 32


def ridge_rows() -> list[dict[str, Any]]:
    """CobraML's ridge points: published, recomputed from its inputs, and from the datasheets."""
    rows = []
    for name, published, tflops, tb_per_s, entry in _RIDGES:
        gpu = gpus.find(entry)
        roof = Roof(gpu.peak("bfloat16").flops, gpu.hbm_bytes_per_second)
        rows.append(
            {
                "table": "CobraML, ridge point",
                "what": name,
                "published": published,
                "recomputed": Roof(tflops * 1e12, tb_per_s * 1e12).ridge,
                "from": f"{tflops} / {tb_per_s}",
                "datasheet": roof.ridge,
            }
        )
    return rows


def intensity_rows() -> list[dict[str, Any]]:
    """CobraML's intensities of the standard algorithm, in bfloat16, whatever the GPU.

    (4 d + 5) N^2 operations over 2 (4 N^2 + 4 N d) bytes, with N = 4096.
    """
    rows = []
    for head_dim, published in _INTENSITIES:
        matrix = 4 * _SEQLEN**2 * head_dim
        moved = 2 * (4 * _SEQLEN**2 + 4 * _SEQLEN * head_dim)
        rows.append(
            {
                "table": "CobraML, intensity of the standard algorithm",
                "what": f"d={head_dim}",
                "published": published,
                "recomputed": (matrix + _SOFTMAX_OPERATIONS * _SEQLEN**2) / moved,
                "matrix_only": matrix / moved,
            }
        )
    return rows


def claim_rows() -> list[dict[str, Any]]:
    """The traffic article's claims for 32 heads of 4096 x 128, beside what its byte counts give."""
    head = make_contiguous_problem(
        dtype="float16",
        batch=1,
        seqlen_q=_SEQLEN,
        seqlen_k=_SEQLEN,
        heads_q=1,
        heads_kv=1,
        head_dim=128,
        head_dim_v=128,
    )
    one = _SEQLEN * 128 * 2  # bytes of one of q, k, v and out
    flops, fused = head.flops(), compulsory(head)
    # It loads v with q and k, and once more with P.
    unfused_bytes = standard(head).total + one
    unfused, flash = flops / unfused_bytes, flops / fused.total

    def row(what: str, published: str, value: str, remark: str) -> dict[str, Any]:
        return {
            "table": "traffic article",
            "what": what,
            "published": published,
            "recomputed": value,
            "remark": remark,
        }

    return [
        row(
            "standard, FLOP/byte",
            "2.8",
            f"{unfused:.1f}",
            f"{flops / 1e9:.2f} GFLOP over its {unfused_bytes / _MB:.0f} MB a head.",
        ),
        row(
            "FlashAttention, FLOP/byte",
            "89",
            f"{flash:.0f}",
            f"The same operations over its {fused.total / _MB:.1f} MB a head.",
        ),
        row(
            "FlashAttention-2, FLOP/byte",
            "102",
            f"{flash:.0f}",
            "The article gives it no other byte count.",
        ),
        row(
            "bound at 89 and 102 FLOP/byte",
            "compute",
            _A100.bound(102),
            f"An A100's ridge point is {_A100.ridge:.0f}; at {flash:.0f} compute is the bound.",
        ),
        row(
            "gain in intensity",
            "30x",
            f"{flash / unfused:.1f}x",
            "Its 33x in bytes: the operations are the same.",
        ),
        row(
            "standard, TFLOP/s",
            "1.2",
            f"<= {_A100.attainable(unfused) / 1e12:.0f}",
            "1.2 is 1% of what the bandwidth gives at its own byte count.",
        ),
        row(
            "P and V load, MB a head",
            "34.0",
            f"{(2 * _SEQLEN**2 + one) / _MB:.1f}",
            "A slip; its total of 139 MB holds.",
        ),
        row(
            "FlashAttention reads, MB",
            "134",
            f"{_HEADS * fused.read / _MB:.0f}",
            "134 MB are its reads and writes together.",
        ),
        row(
            "FlashAttention writes, MB",
            "33",
            f"{_HEADS * fused.written / _MB:.0f}",
            "Holds, to rounding.",
        ),
    ]


def all_rows() -> list[dict[str, Any]]:
    """The rows of all three tables."""
    return [*ridge_rows(), *intensity_rows(), *claim_rows()]


def print_articles(out: Console) -> None:
    """Print the three tables with what is to be said of them."""

    def figure(name: str) -> Any:
        return lambda row: f"{row[name]:.1f}"

    def text(name: str) -> Any:
        return lambda row: row[name]

    report.print_table(
        out,
        "CobraML, Flash Attention Version 1: ridge points, BF16, FLOP/byte",
        [
            Column("GPU", text("what"), numeric=False),
            Column("published", figure("published")),
            Column("recomputed", figure("recomputed")),
            Column("from TFLOP/s / TB/s", text("from")),
            Column("datasheet", figure("datasheet")),
        ],
        [ridge_rows()],
    )
    report.print_notes(
        out,
        [
            "recomputed: from the inputs that give the published digits.",
            "datasheet: from the figures that --gpu takes, all without sparsity.",
            "The B200's 4500 TFLOP/s are with sparsity, unlike the others': without, half its "
            "ridge point is left. The A100's 2.0 TB/s are 2.039 for the SXM card of 80 GB.",
            "",
        ],
    )
    report.print_table(
        out,
        f"CobraML: intensity of the standard algorithm, N={_SEQLEN}, FLOP/byte",
        [
            Column("head_dim", text("what"), numeric=False),
            Column("published", figure("published")),
            Column("recomputed", figure("recomputed")),
            Column("products only", figure("matrix_only")),
        ],
        [intensity_rows()],
    )
    report.print_notes(
        out,
        [
            f"recomputed: (4 d + {_SOFTMAX_OPERATIONS}) N^2 FLOP over 2 (4 N^2 + 4 N d) bytes.",
            "products only: 4 d N^2 FLOP, the convention of the papers and of this command.",
            "",
        ],
    )
    claims = claim_rows()
    report.print_table(
        out,
        f"Traffic article, A100, FP16, N={_SEQLEN}, d=128, {_HEADS} heads: by its own byte counts",
        [
            Column("#", text("number")),
            Column("what", text("what"), numeric=False),
            Column("published", text("published")),
            Column("follows", text("recomputed")),
        ],
        [[row | {"number": str(number)} for number, row in enumerate(claims, 1)]],
    )
    report.print_notes(out, [f"{number}: {row['remark']}" for number, row in enumerate(claims, 1)])
