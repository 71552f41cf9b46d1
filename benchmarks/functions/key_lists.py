"""Times of attention to listed keys.

    python benchmarks/functions/key_lists.py --output benchmarks/results/h200_key_lists.json

Each row is one call on random bfloat16 arrays with latent attention (128 query heads, 576 columns)
or grouped heads. The keys are in pages of 64 rows, and each query has a list of 2048 of them.
`lists` is the call; its results are compared with those of PyTorch over gathered keys. `copy` is a
copy of as many bytes as the call reads of the cache. Graphs are replayed while the GPU is busy;
they alternate, and the times are medians. The script needs a GPU and PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import cupy
import torch
from graph_times import graph_of, medians, write

import cupy_flash
from cupy_flash.cli.measure.timing import GpuTimer
from cupy_flash.cli.records.environment import metadata
from cupy_flash.families import FAMILIES
from cupy_flash.gpu.environment import device_for_id

_PAGE, _ENTRIES, _KEYS = 64, 2048, 32768


class Shape(NamedTuple):
    """Sizes of a call; the values of latent attention are columns of the keys."""

    batch: int
    heads: int
    heads_kv: int
    dim: int
    dim_v: int

    @property
    def is_latent(self) -> bool:
        """Whether the values are columns of the keys."""
        return self.dim != self.dim_v

    @property
    def bytes_read(self) -> int:
        """Bytes of the listed keys and values."""
        columns = self.dim + (0 if self.is_latent else self.dim_v)
        return 2 * self.batch * _ENTRIES * self.heads_kv * columns

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 2.0 * self.batch * self.heads * _ENTRIES * (self.dim + self.dim_v)


# A batch of 4096 sequences with one query each stands for a prefill of as many queries.
_SHAPES = (
    *(Shape(batch, 128, 1, 576, 512) for batch in (4096, 128, 32, 8, 1)),
    Shape(4096, 64, 1, 576, 512),
    *(Shape(batch, 32, 8, 128, 128) for batch in (128, 8)),
)


def measure(timer: GpuTimer, shape: Shape) -> dict[str, Any]:
    """Return the row of the record for one shape."""
    torch.manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    # All sequences have the same pages, in orders of their own.
    pages = _KEYS // _PAGE
    k = normal(pages, _PAGE, shape.heads_kv, shape.dim)
    v = None if shape.is_latent else normal(pages, _PAGE, shape.heads_kv, shape.dim_v)
    q = normal(shape.batch, 1, shape.heads, shape.dim)
    table = torch.rand(shape.batch, pages, device="cuda").argsort(dim=1).int()
    keys = torch.rand(shape.batch, _KEYS, device="cuda").argsort(dim=1)[:, :_ENTRIES].int()
    arrays = [None if x is None else cupy.from_dlpack(x) for x in (q, k, v, table, keys)]

    def lists() -> Any:
        q, k, v, table, keys = arrays
        return cupy_flash.flash_attention_with_kvcache(
            *(q, k, v),
            cache_seqlens=_KEYS,
            block_table=table,
            key_indices=keys[:, None],
            head_dim_v=shape.dim_v if v is None else None,
        )

    rows = torch.gather(table, 1, (keys // _PAGE).long()).long() * _PAGE + keys % _PAGE
    flat = k.flatten(0, 1)

    def formula(some: slice) -> torch.Tensor:
        own = flat[rows[some]].transpose(1, 2)
        values = (
            own[..., : shape.dim_v] if v is None else v.flatten(0, 1)[rows[some]].transpose(1, 2)
        )
        return torch.nn.functional.scaled_dot_product_attention(
            q[some].transpose(1, 2), own, values, enable_gqa=True
        ).transpose(1, 2)

    some = slice(min(shape.batch, 8))
    found = torch.from_dlpack(lists())[some]
    row: dict[str, Any] = shape._asdict() | {"entries": _ENTRIES}
    row["largest difference from formula"] = float((found - formula(some)).abs().max())
    source = torch.empty(shape.bytes_read // 2, device="cuda", dtype=torch.bfloat16)
    from_, to = (cupy.from_dlpack(x) for x in (source, torch.empty_like(source)))
    calls: dict[str, Callable[[], Any]] = {
        "lists": lists,
        "copy": lambda: cupy.copyto(to, from_),
    }
    found_times = medians(timer, {name: graph_of(call) for name, call in calls.items()})
    row |= {f"{name} us": round(1000 * median, 2) for name, median in found_times.items()}
    row["TFLOP/s"] = round(shape.flops / found_times["lists"] / 1e9, 1)
    # A copy reads and writes.
    row["share of the copy's rate"] = round(found_times["copy"] / 2 / found_times["lists"], 3)
    return row


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(output: Path) -> None:
    """Measure attention to listed keys, and write the times as JSON."""
    names = ("hopper", "mma", "decode")
    environment = metadata(device_for_id(0).name) | {
        **{f"{name}_digest": FAMILIES["forward"][name].digest() for name in names},
        "page_size": _PAGE,
        "keys": _KEYS,
        "dtype": "bfloat16",
    }
    timer = GpuTimer()
    rows = [measure(timer, shape) for shape in _SHAPES]
    write(output, environment, rows)


if __name__ == "__main__":
    main()
