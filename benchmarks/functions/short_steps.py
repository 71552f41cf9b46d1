"""Times of short decoding steps with an append, by cupy_flash and by PyTorch.

    python benchmarks/functions/short_steps.py --output benchmarks/results/h200_short_steps.json

Each row is one step on random bfloat16 arrays: each sequence appends one key and one value to its
cache, and its query attends to all keys. `cupy_flash` is one call. Each other column is a call of
`index_copy_` for the new rows, and `scaled_dot_product_attention` by one of PyTorch's kernels. All
are replayed as CUDA graphs while the GPU is busy; they alternate, and the times are medians. The
script needs a GPU and PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import cupy
import torch
from graph_times import graph_of, medians, write
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupy_flash
from cupy_flash.cli.measure.timing import GpuTimer, Timed
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id

_HEAD_DIM = 128
# Batch, keys with the new one, query heads and KV heads.
_SHAPES = tuple(
    (batch, keys, *heads)
    for heads in ((32, 8), (32, 32), (8, 1))
    for batch, keys in ((1, 1024), (1, 8192), (8, 1024))
)
_BACKENDS = {
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-math": SDPBackend.MATH,
}


def torch_step(
    backend: SDPBackend, arrays: tuple[torch.Tensor, ...], place: torch.Tensor
) -> Timed | None:
    """Return the replay of a step by a kernel of PyTorch, or None if it does not support it."""
    q, k_cache, v_cache, k, v = arrays
    grouped = q.shape[1] != k.shape[1]

    def step() -> torch.Tensor:
        k_cache.index_copy_(2, place, k)
        v_cache.index_copy_(2, place, v)
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k_cache, v_cache, enable_gqa=grouped
            )

    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
    except RuntimeError:
        return None
    # The graph keeps writing to the result.
    return Timed(lambda: (graph.replay(), result)[0])


def measure(timer: GpuTimer, batch: int, keys: int, heads: int, heads_kv: int) -> dict[str, Any]:
    """Return the row of the record for one shape."""
    torch.manual_seed(0)
    q, k_cache, v_cache, k, v = (
        torch.randn(batch, h, n, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for h, n in ((heads, 1), *((heads_kv, n) for n in (keys, keys, 1, 1)))
    )
    place = torch.tensor([keys - 1], device="cuda")
    arrays = q, k_cache, v_cache, k, v
    ours = [cupy.from_dlpack(x.transpose(1, 2).contiguous()) for x in arrays]
    lengths = cupy.full(batch, keys - 1, cupy.int32)

    def step() -> Any:
        return cupy_flash.flash_attention_with_kvcache(*ours, cache_seqlens=lengths)

    graphs = {"cupy_flash": graph_of(step)}
    for name, backend in _BACKENDS.items():
        found = torch_step(backend, arrays, place)
        if found is not None:
            graphs[name] = found
    found_times = medians(timer, graphs)
    row: dict[str, Any] = {"batch": batch, "keys": keys, "heads": heads, "kv heads": heads_kv}
    row |= {f"{name} us": round(1000 * x, 2) for name, x in found_times.items()}
    best = min(x for name, x in found_times.items() if name != "cupy_flash")
    return row | {"times as fast as the best": round(best / found_times["cupy_flash"], 2)}


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure short steps, and write the times as JSON."""
    environment = metadata(device_for_id(0).name) | {
        **{f"{name}_digest": FAMILIES["forward"][name].digest() for name in ("mma", "decode")},
        "head_dim": _HEAD_DIM,
        "dtype": "bfloat16",
    }
    timer = GpuTimer()
    rows = [measure(timer, *shape) for shape in _SHAPES]
    write(output, environment, rows)


if __name__ == "__main__":
    main()
