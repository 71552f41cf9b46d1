"""What a kernel family does with a tile on a device: how keys are shared out, what is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# The main kernel of a family that launches others before it.
MAIN_ENTRY = "attention"
# The kernels of a backward pass, in order: what rows bring, dk and dv, dq.
ROW_TERMS, KEY_GRADIENTS, QUERY_GRADIENTS = "row_terms", "key_gradients", "query_gradients"
_MAIN_ENTRIES = (MAIN_ENTRY, KEY_GRADIENTS, QUERY_GRADIENTS)

# Strides of what a tensor map describes are multiples of 16 bytes below 2^40.
STRIDE_UNIT = 16
MAX_STRIDE = 2**40

# C++ types of what kernels are given, by the names that `Launch.arguments` has.
_TYPES = {
    "params": "Params",
    "quantized_params": "QuantizedParams",
    "float8_params": "Float8Params",
    "gradients": "GradientParams",
    "maps": "TensorMaps",
    "biased_maps": "BiasedTensorMaps",
    "latent_maps": "LatentTensorMaps",
    "gradient_maps": "GradientMaps",
}
# What a kernel may be given, in order.
_ARGUMENTS = (
    ("params",),
    ("quantized_params",),
    ("maps", "params"),
    ("biased_maps", "params"),
    ("latent_maps", "params"),
    ("float8_params",),
    ("maps", "float8_params"),
    ("gradients",),
    ("gradient_maps", "gradients"),
)


def main_of(entries: tuple[str, ...]) -> str:
    """The kernel that attends: the first, unless a later one has the name of such."""
    return next((name for name in _MAIN_ENTRIES if name in entries), entries[0])


@dataclass(frozen=True)
class Split:
    """How the keys of a query tile are shared out over thread blocks.

    Attributes
    ----------
    kind
        "whole": a block has all of them. "parts": a block has one of `parts`, and the results are
        merged. "even": the blocks have equal shares of all keys of the batch, wherever those end.
    parts
        2 or more of "parts", else 1.
    """

    kind: Literal["whole", "parts", "even"] = "whole"
    parts: int = 1

    @classmethod
    def into(cls, parts: int) -> Split:
        """So many parts; one is the whole."""
        return cls("parts", parts) if parts > 1 else WHOLE

    @property
    def is_whole(self) -> bool:
        """Whether nothing is merged."""
        return self.kind == "whole"


WHOLE = Split()
EVEN = Split("even")


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    entry
        Name of the kernel in the unit.
    function
        C++ template that the entry calls, with `Config` as its argument.
    grid, threads
        Thread blocks, at least one along each axis, and threads of each: a multiple of 32, at most
        1024.
    shared_memory
        Dynamic shared memory of a block, in bytes.
    min_blocks
        Blocks per SM that the compiler limits registers for; None leaves it to the compiler, which
        may spill for an occupancy that nobody asked for.
    cluster
        Blocks of a cluster along the grid's last axis; 0 for none.
    arguments
        What the kernel is given, in order: "maps" (the tensor maps), or "biased_maps" with that of
        a bias behind the others, or "latent_maps" with those of columns that are no values, if any;
        and "params" (`params.py`), with scales of a cache of 8 bits "quantized_params", with those
        of float8 "float8_params"; of a backward problem "gradient_maps", if any, and "gradients".
    source
        File that has the function where it is not the family's own.
    """

    entry: str
    function: str
    grid: tuple[int, int, int]
    threads: int
    shared_memory: int = 0
    min_blocks: int | None = None
    cluster: int = 0
    arguments: tuple[str, ...] = ("params",)
    source: str | None = None

    def __post_init__(self) -> None:
        assert self.arguments in _ARGUMENTS, "what launches hand over"

    @property
    def takes_maps(self) -> bool:
        """Whether the kernel is given tensor maps."""
        return len(self.arguments) > 1

    def definition(self) -> str:
        """C++ of the entry."""
        bounds = f"{self.threads}" + (f", {self.min_blocks}" if self.min_blocks else "")
        cluster = f"__cluster_dims__(1, 1, {self.cluster}) " if self.cluster else ""
        parameters = (f"const __grid_constant__ {_TYPES[name]} {name}" for name in self.arguments)
        return (
            f'extern "C" __global__ void {cluster}__launch_bounds__({bounds})\n'
            f"{self.entry}({', '.join(parameters)}) {{\n"
            f"  {self.function}<Config>({', '.join(self.arguments)});\n"
            "}"
        )


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map without its address.

    Attributes
    ----------
    dtype
        ``"float16"``, ``"bfloat16"`` or ``"float8_e4m3fn"``.
    shape
        (dim, seqlen, heads, batch), none of them 0.
    strides
        Of seqlen, heads and batch, in bytes: multiples of `STRIDE_UNIT` below `MAX_STRIDE`.
    box
        Columns and rows of one copy. The columns are one line of shared memory, 64 or 128 bytes,
        which is also the swizzle.
    array
        Name of the array where the map goes by another.
    """

    dtype: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int]
    array: str | None = None


@dataclass(frozen=True)
class Schedule:
    """What a call launches and takes; on the CPU, a workspace at most.

    Attributes
    ----------
    launches
        In order.
    split
        How keys are shared out.
    workspace
        Bytes of device memory besides the arrays.
    counters
        32-bit words of device memory that are zero before a launch and after it.
    section_heads
        Query heads whose query tiles are interleaved (`kernels_cu/grid/schedule.cuh`).
    tensor_maps
        Of which arrays the kernels take tensor maps, in order.
    parts
        Where in the workspace parts begin that kernels are given an address of, by its name.
    params
        Fields of the kernels' argument that are not the problem's own, of a problem that is posed
        to the kernels as another; tensors' are their strides.
    """

    launches: tuple[Launch, ...]
    split: Split = WHOLE
    workspace: int = 0
    counters: int = 0
    section_heads: int = 1
    tensor_maps: Mapping[str, TensorMapSpec] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> Launch | None:
        """The launch that attends (see `main_of`); None on the CPU."""
        if not self.launches:
            return None
        entries = tuple(launch.entry for launch in self.launches)
        return self.launches[entries.index(main_of(entries))]
