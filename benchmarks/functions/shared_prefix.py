"""Times of decoding steps whose sequences share a prefix, with and without `shared_prefix_len`.

    python benchmarks/functions/shared_prefix.py --output benchmarks/results/h200_shared_prefix.json

Each row is one step without an append, on random bfloat16 arrays in pages of 64 rows: each sequence
has one query. `plain` reads the prefix for each sequence, and `shared` once. The results are
compared with those of PyTorch over a contiguous copy of all keys. Graphs are replayed while the GPU
is busy; they alternate, and the times are medians. `eager us` is the time that a call takes on the
host. The script needs a GPU and PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import cupy
import torch
from graph_times import graph_of, medians, write

import cupy_flash
from cupy_flash.cli.measure.timing import GpuTimer, spread
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id

_PAGE, _HEAD_DIM = 64, 128
# Batch, keys of the prefix, other keys of each sequence, query heads and KV heads.
_SHAPES = (
    (64, 8192, 256, 32, 8),
    (64, 8192, 256, 32, 32),
    (16, 8192, 256, 32, 8),
    (8, 32768, 1024, 32, 8),
    (256, 2048, 128, 32, 8),
    (64, 1024, 1024, 32, 8),
)


def measure(
    timer: GpuTimer, batch: int, prefix: int, own: int, heads: int, heads_kv: int
) -> dict[str, Any]:
    """Return the row of the record for one shape."""
    shared_pages, own_pages = prefix // _PAGE, own // _PAGE
    pages = shared_pages + batch * own_pages
    torch.manual_seed(0)
    k, v = (
        torch.randn(pages, _PAGE, heads_kv, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    q = torch.randn(batch, 1, heads, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(pages, device="cuda", dtype=torch.int32)
    table = torch.cat(
        [table[:shared_pages].expand(batch, -1), table[shared_pages:].view(batch, -1)], dim=1
    ).contiguous()
    lengths = torch.full((batch,), prefix + own, device="cuda", dtype=torch.int32)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v, table, lengths)]

    def step(shared_prefix_len: int) -> Any:
        q, k, v, table, lengths = arrays
        return cupy_flash.flash_attention_with_kvcache(
            *(q, k, v),
            cache_seqlens=lengths,
            block_table=table,
            shared_prefix_len=shared_prefix_len,
        )

    calls: dict[str, Callable[[], Any]] = {"plain": lambda: step(0), "shared": lambda: step(prefix)}
    plain, shared = (torch.from_dlpack(call()) for call in calls.values())
    copies = [x[table.long()].flatten(1, 2).transpose(1, 2) for x in (k, v)]
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), *copies, enable_gqa=heads != heads_kv
    ).transpose(1, 2)
    difference = max(float((x - dense).abs().max()) for x in (plain, shared))
    row: dict[str, Any] = {"batch": batch, "prefix": prefix, "own": own, "heads": heads}
    row |= {"kv heads": heads_kv, "largest difference from dense": difference}
    found_times = medians(timer, {name: graph_of(call) for name, call in calls.items()})
    row |= {f"{name} us": round(1000 * median, 2) for name, median in found_times.items()}
    row["times as fast"] = round(found_times["plain"] / found_times["shared"], 2)
    return row | {f"{name} eager us": round(host_time(call), 1) for name, call in calls.items()}


def host_time(call: Callable[[], Any]) -> float:
    """Return the median time that a call takes on the host, in microseconds."""
    found = []
    for _ in range(100):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return 1e6 * spread(found).median


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure steps with a shared prefix, and write the times as JSON."""
    environment = metadata(device_for_id(0).name) | {
        **{f"{name}_digest": FAMILIES["forward"][name].digest() for name in ("mma", "decode")},
        "head_dim": _HEAD_DIM,
        "page_size": _PAGE,
        "dtype": "bfloat16",
    }
    timer = GpuTimer()
    rows = [measure(timer, *shape) for shape in _SHAPES]
    write(output, environment, rows)


if __name__ == "__main__":
    main()
