"""Tables and records load whose fields and classes have the names that earlier versions wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from cupy_flash.cli.records import records
from cupy_flash.families import FAMILIES
from cupy_flash.planning import planner, tuning
from cupy_flash.planning.problem_class import ProblemClass

VARLEN_TILE = {"Br": 192, "Bc": 80, "stages": 6, "q_stages": 2, "q_steps": 0, "turns": 1}
TUNED = [
    ("simt", "float32 d192 dv128 causal q1024 k1024 rows65536 align16",
     {"Br": 32, "Bc": 64, "threads": 128, "rows_per_thread": 4, "share_kv": 1, "unroll": 2}),
    ("hopper", "bfloat16 d128 dv128 full q1024 k4096 rows65536 align16 packed-page16", VARLEN_TILE),
    ("decode", "bfloat16 d576 dv512 full q1 k4096 rows16 align16 latent-cache",
     {"Br": 16, "Bc": 32, "warps": 8, "stages": 2, "min_blocks": 1, "cluster": 0}),
    ("mma", "bfloat16 d64 dv64 full q256 k256 rows65536 align16 backward",
     {"Br": 128, "Bc": 128, "warps": 4, "key_warps": 4, "columns": 32, "stages": 1, "paired": 0}),
]  # fmt: skip
ROW = {
    "provider": "cupy_flash", "family": "decode", "kernel_digest": "23e15ad1736ee3f4",
    "dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "causal": False, "q_offset": 0,
    "softmax_scale": 128**-0.5, "layout": "bshd", "heads_q": 32, "heads_kv": 8, "seqlen_q": 1,
    "seqlen_k": 1024, "median_ms": 0.0109, "low_quartile_ms": 0.0105, "high_quartile_ms": 0.0111,
    "tflops": 1.53, "page_size": None, "lengths": None, "mods": None, "direction": None,
}  # fmt: skip
CACHE = {"kind": "cache", "batch": 1, "asked_splits": 4, "copy_share": 0.12760702135868}
VARLEN = {"kind": "varlen", "batch": 3, "lengths": [1323, 104, 21], "tile": VARLEN_TILE}
DENSE = {"kind": "dense", "batch": 1, "asked_splits": 0, "share": 0.667, "section_heads": 1}


def test_tables_with_earlier_names_give_classes_and_tiles(tmp_path: Path) -> None:
    rest = {"gpu": "a GPU", "arch": 90, "sm_count": 132, "digest": "3d4060227e655565", "tflops": 9}
    entries = [{"family": f, "problem_class": c, "tile": tile, **rest} for f, c, tile in TUNED]
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"version": 3, "made_by": {}, "entries": entries}))
    assert [dataclasses.asdict(entry) for entry in tuning.read_table(path)] == entries
    classes = [found for _, text, _ in TUNED if (found := ProblemClass.parse(text))]
    assert [one.kind for one in classes] == ["", "packed-page16", "latent-cache", ""]
    assert [one.direction for one in classes] == ["forward", "forward", "forward", "backward"]
    for (family, _, tile), one in zip(TUNED, classes, strict=True):
        tile_type = FAMILIES[one.direction][family].tile_type
        assert planner.tuned_tile(tile_type, tile) == tile_type(**tile)


def test_records_with_earlier_names_give_cases(tmp_path: Path) -> None:
    rows = [ROW | more for more in (CACHE, VARLEN, DENSE)]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"metadata": {}, "rows": rows}))
    record = records.read_bench(path)
    assert record.rows == rows
    cache, varlen, dense = map(records.case_of, record.rows)
    assert [case.kind for case in (cache, varlen, dense)] == ["cache", "varlen", "dense"]
    assert (cache.asked_splits, varlen.asked_splits, varlen.lengths) == (4, 0, (1323, 104, 21))
    assert (cache.heads_kv, dense.seqlen_k, dense.softmax_scale) == (8, 1024, None)
    assert records.kernels(record) == {("decode", "forward", "23e15ad1736ee3f4")}
