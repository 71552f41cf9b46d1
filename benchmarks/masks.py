"""Draw docs/figures/masks.png, the gallery of masks in docs/guide/masks.md.

python benchmarks/masks.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from cupy_flash import MaskMod, plot_mask
from cupy_flash.cli.records.figures import figure

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures" / "masks.png"
N = 48
_DOCUMENTS = np.repeat(np.arange(4), [9, 17, 7, 15])
_REGIONS = np.arange(N) // 12
_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)


def _tree() -> np.ndarray:
    """Return a tree mask in which each drafted token attends to its ancestors and itself."""
    bits: list[int] = []
    for node, parent in enumerate(_PARENTS):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    return np.array([bits], np.uint64)


def pictures() -> dict[str, dict[str, Any]]:
    """Return the arguments of `plot_mask`, except the sizes, by title."""
    same = MaskMod(lambda i, j, doc: doc[i] == doc[j], doc=_DOCUMENTS)
    return {
        "causal": {"causal": True},
        "window": {"causal": True, "window_size": (11, 0)},
        "padding": {"seqlens_k": np.array([31], np.int32)},
        "documents": {"mask_mod": same},
        "documents, causal": {"mask_mod": same, "causal": True},
        "prefix-LM": {"causal": True, "prefix_lens": np.array([18], np.int32)},
        "Swin": {"mask": (_REGIONS[:, None] == _REGIONS)[None, None]},
        "tree": {"tree_mask": _tree(), "seqlen_q": len(_PARENTS)},
        "dilated": {"mask_mod": MaskMod(lambda i, j: (i - j) % 2 == 0)},
        "window, 8 x 6 blocks": {"causal": True, "window_size": (19, 0), "block": (8, 6)},
    }


def main(arguments: list[str]) -> None:
    """Write the picture."""
    target = Path(arguments[0]) if arguments else TARGET
    with figure(target, width=7.5, height=3.4, nrows=2, ncols=5) as axes:
        for ax, (title, options) in zip(axes.flat, pictures().items(), strict=True):
            given = dict(options)
            plot_mask(given.pop("seqlen_q", N), N, ax=ax, **given)
            ax.set_title(title, fontsize=8)
            ax.set(xticks=[], yticks=[], xlabel="", ylabel="")


if __name__ == "__main__":
    main(sys.argv[1:])
