"""Exported programs with attention: they run in another process that creates the same functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_flash import MaskMod

torch = pytest.importorskip("torch")
ct = pytest.importorskip("cupy_flash.torch")


class Attention(torch.nn.Module):
    """Attention within documents of five tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(40) // 5)
        self.mask = MaskMod(lambda i, j, ids: ids[i] == ids[j], ids=self.ids)
        self.weight = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return ct.flash_attention(self.weight(x), x, x, mask_mod=self.mask, causal=True)


# A program that loads the exported one.
READER = """
import sys
import torch
import cupy_flash.torch
from cupy_flash import MaskMod

folder = sys.argv[1]
program = torch.export.load(f"{folder}/attention.pt2").module()
x, expected = torch.load(f"{folder}/expected.pt")
try:
    program(x)
except RuntimeError as error:
    print("refused" if "create it before the graph runs" in str(error) else error)
same = MaskMod(lambda i, j, ids: ids[i] == ids[j], ids=torch.zeros(40, dtype=torch.int64))
torch.testing.assert_close(program(x), expected, rtol=0, atol=0)
print("computed")
"""


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_runs_with_other_sizes_and_in_another_process(
    strict: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    module, x = Attention(), torch.randn(3, 9, 4, 8)
    sizes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("rows", max=40)}}
    program = torch.export.export(module, (x,), dynamic_shapes=sizes, strict=strict)
    with torch.no_grad():
        for batch, rows in rng.integers(2, 30, (3, 2)).tolist():
            y = torch.randn(batch, rows, 4, 8)
            torch.testing.assert_close(program.module()(y), module(y), rtol=0, atol=0)
        torch.save((x, module(x)), tmp_path / "expected.pt")
    torch.export.save(program, tmp_path / "attention.pt2")
    reader = [sys.executable, "-W", "ignore", "-c", READER, str(tmp_path)]
    done = subprocess.run(reader, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused", "computed"], done.stderr
