"""The gallery of docs/masks.md runs, and gives what the reference gives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.benchmark_scripts import CHECKOUT, IN_CHECKOUT

import cupy_flash
from cupy_flash import attention_reference, attention_with_kvcache_reference

if not IN_CHECKOUT:
    pytest.skip("the tests stand outside a checkout", allow_module_level=True)

PAGE = CHECKOUT / "docs" / "masks.md"


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
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for snippet in snippets:
        before = len(calls)
        exec(compile(snippet, str(PAGE), "exec"), names)
        assert len(calls) == before + 1, snippet
    for out, truth in calls:
        # float32 scores of standard deviation 1: 2^-20 is 8 units in the last place of the largest.
        np.testing.assert_allclose(out, truth, rtol=0, atol=2**-20 * np.abs(truth).max())
    # Each says something else.
    first, *others = (out for out, _ in calls if out.shape == calls[0][0].shape)
    assert all(np.abs(first - other).max() > 1e-3 for other in others)
