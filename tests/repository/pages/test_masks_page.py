"""The gallery of docs/guide/masks.md runs, and gives the results of the reference."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli.benchmark_scripts import CHECKOUT, IN_CHECKOUT, script

import cupy_flash
from cupy_flash import attention_reference, attention_with_kvcache_reference

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

PAGE = CHECKOUT / "docs" / "guide" / "masks.md"


def test_the_picture_is_of_the_masks_that_the_page_names(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    masks = script("masks")
    picture = Path(os.path.relpath(masks.TARGET, PAGE.parent)).as_posix()
    assert f"]({picture})" in PAGE.read_text("utf-8")
    assert masks.TARGET.stat().st_size < 30_000
    masks.main([str(tmp_path / "masks.png")])
    assert (tmp_path / "masks.png").stat().st_size > 5_000
    seen = {}
    for title, options in masks.pictures().items():
        mask = {name: x for name, x in options.items() if name not in ("seqlen_q", "block")}
        seen[title] = cupy_flash.seen_pairs(options.get("seqlen_q", masks.N), masks.N, **mask)
    # Each node of a tree attends to its parent, the parent's ancestors, and itself.
    of_tree = seen["tree"][:, -len(masks._PARENTS) :]
    for node, parent in enumerate(masks._PARENTS):
        above = of_tree[parent].copy() if parent >= 0 else np.zeros(len(masks._PARENTS), bool)
        above[node] = True
        np.testing.assert_array_equal(of_tree[node], above)
    i, j = np.arange(masks.N)[:, None], np.arange(masks.N)
    options = masks.pictures()
    for title, expected in {
        "causal": j <= i,
        "window": (j <= i) & (i - j <= options["window"]["window_size"][0]),
        "padding": (j < options["padding"]["seqlens_k"]) & (i >= 0),
        "documents": masks._DOCUMENTS[i] == masks._DOCUMENTS[j],
        "documents, causal": seen["documents"] & seen["causal"],
        "prefix-LM": (j < options["prefix-LM"]["prefix_lens"]) | (j <= i),
        "Swin": masks._REGIONS[i] == masks._REGIONS[j],
        "dilated": i % 2 == j % 2,
    }.items():
        np.testing.assert_array_equal(seen[title], expected, title)
    assert len({mask.tobytes() for mask in seen.values()}) == len(seen)


def test_whatever_hides_pairs_in_the_gallery_is_in_the_picture() -> None:
    hiding = {"window_size", "mask", "prefix_lens", "tree_mask", "mask_mod", "seqlens_k", "causal"}
    in_gallery = set(re.findall(r"\b(\w+)=", "".join(snippets()))) & hiding
    in_picture = {name for options in script("masks").pictures().values() for name in options}
    assert in_picture & hiding == in_gallery


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_every_snippet_gives_what_the_reference_gives(monkeypatch) -> None:
    calls: list[tuple[Any, Any]] = []

    def beside(function: Any, reference: Any) -> Any:
        def both(*args: Any, **options: Any) -> Any:
            out, truth = function(*args, **options, backend="cpu"), reference(*args, **options)
            calls.append((out, truth[0] if isinstance(truth, tuple) else truth))
            return out

        return both

    for name, reference in (
        ("flash_attention", attention_reference),
        ("flash_attention_with_kvcache", attention_with_kvcache_reference),
    ):
        monkeypatch.setattr(cupy_flash, name, beside(getattr(cupy_flash, name), reference))
    names: dict[str, Any] = {}
    for snippet in snippets():
        before = len(calls)
        exec(compile(snippet, str(PAGE), "exec"), names)
        assert len(calls) == before + 1, snippet
    for out, truth in calls:
        # Scores have standard deviation 1, in float32; 2^-20 is 8 ulps of the largest value.
        np.testing.assert_allclose(out, truth, rtol=0, atol=2**-20 * np.abs(truth).max())
    # Each snippet gives a different result.
    first, *others = (out for out, _ in calls if out.shape == calls[0][0].shape)
    assert all(np.abs(first - other).max() > 1e-3 for other in others)
