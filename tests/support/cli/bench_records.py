"""Records in the format of the `bench` command, for tests of the commands that read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result

from cupy_flash.cli.errors import OneLineErrors
from cupy_flash.cli.main import main

METADATA = {
    "date": "2026-01-02T03:04:05+00:00",
    "device": "a GPU",
    "versions": {"cupy_flash": "0.1.0", "torch": "2.11"},
    "flop_convention": "FLOPs = many",
    "baseline": ["torch-flash"],
}


def row(provider: str, seqlen: int, ms: float | None, **more: Any) -> dict[str, Any]:
    """Return a row with quartiles 1% from the median, of 16384 tokens; `more` replaces fields."""
    ours = provider.startswith("cupy_flash")
    family, digest = ("mma", "abc") if ours else (None, None)
    low, high, tflops = (None,) * 3 if ms is None else (0.99 * ms, 1.01 * ms, 100 / ms)
    return {
        "provider": provider, "family": family, "kernel_digest": digest, "dtype": "bfloat16",
        "batch": 16384 // seqlen, "seqlen_q": seqlen, "seqlen_k": seqlen,
        "heads_q": 16, "heads_kv": 16, "head_dim": 128, "head_dim_v": 128, "layout": "bshd",
        "causal": False, "q_offset": 0, "softmax_scale": 128**-0.5,
        "median_ms": ms, "low_quartile_ms": low, "high_quartile_ms": high, "tflops": tflops,
        "check": "passed", "reason": None, "note": None, **more,
    }  # fmt: skip


def write(path: Path, rows: Sequence[Any], **metadata: Any) -> Path:
    """Write a record and return its path; `metadata` replaces fields of the header."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"metadata": METADATA | metadata, "rows": rows})
    path.write_text(text, encoding="utf-8")
    return path


def invoke(command: click.Command, *arguments: str | Path) -> Result:
    """Run a command as a subcommand of `cupy-flash`, with errors printed on one line."""
    # A command caches the names of its help option in the first call, so they are set here, too.
    group = OneLineErrors("cupy-flash", commands=[command], context_settings=main.context_settings)
    line = [command.name or "", *map(str, arguments)]
    return CliRunner().invoke(group, line, prog_name="cupy-flash", catch_exceptions=False)


def refused(command: click.Command, *arguments: str | Path) -> str:
    """Return the one line by which a command refuses its arguments."""
    result = invoke(command, *arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    return result.output
