"""Records of how a kernel family computes a tile on a device: the KV split and the launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Entry of the main kernel if the family launches other kernels before it.
MAIN_ENTRY = "attention"
# Entries of a backward pass, in order: preprocessing of query rows; dk and dv; dq.
ROW_TERMS, KEY_GRADIENTS, QUERY_GRADIENTS = "row_terms", "key_gradients", "query_gradients"
_MAIN_ENTRIES = (MAIN_ENTRY, KEY_GRADIENTS, QUERY_GRADIENTS)

# TMA requires strides that are multiples of 16 bytes below 2^40.
STRIDE_UNIT = 16
MAX_STRIDE = 2**40

# C++ types of kernel arguments, by their names in `Launch.arguments`.
_TYPES = {
    "params": "Params",
    "quantized_params": "QuantizedParams",
    "float8_params": "Float8Params",
    "gradients": "GradientParams",
    "tangents": "TangentParams",
    "received": "ReceivedParams",
    "maps": "TensorMaps",
    "score_maps": "ScoreMaps",
    "tangent_maps": "TangentMaps",
    "biased_maps": "BiasedTensorMaps",
    "mla_maps": "MlaTensorMaps",
    "gradient_maps": "GradientMaps",
    "bias_gradient_maps": "BiasGradientMaps",
}
# Argument lists that a kernel may have.
_ARGUMENTS = (
    ("params",),
    ("quantized_params",),
    ("maps", "params"),
    ("biased_maps", "params"),
    ("mla_maps", "params"),
    ("float8_params",),
    ("maps", "float8_params"),
    ("gradients",),
    ("tangents",),
    ("received",),
    ("score_maps", "params"),
    ("score_maps", "received"),
    ("tangent_maps", "tangents"),
    ("gradient_maps", "gradients"),
    ("bias_gradient_maps", "gradients"),
)


def main_of(entries: tuple[str, ...]) -> str:
    """Return the name of the main kernel: a name in `_MAIN_ENTRIES`, or else the first entry."""
    return next((name for name in _MAIN_ENTRIES if name in entries), entries[0])


@dataclass(frozen=True)
class Split:
    """Split of the keys of a query tile over thread blocks.

    Attributes
    ----------
    kind
        "none": the keys are not split. "fixed": they are split into `parts` parts, whose results
        are merged. "even": all keys of the batch are divided evenly over the thread blocks.
    parts
        Number of parts, at least 2, if `kind` is "fixed"; otherwise 1.
    """

    kind: Literal["none", "fixed", "even"] = "none"
    parts: int = 1

    @classmethod
    def into(cls, parts: int) -> Split:
        """Return the split into a number of parts; 1 means that the keys are not split."""
        return cls("fixed", parts) if parts > 1 else UNSPLIT

    @property
    def is_unsplit(self) -> bool:
        """Whether the keys are not split, so that no results are merged."""
        return self.kind == "none"


UNSPLIT = Split()
EVEN = Split("even")


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    entry
        Name of the kernel in the translation unit.
    function
        C++ template that the entry calls, with `Config` as its template argument.
    grid, threads
        Number of thread blocks along each axis, at least 1, and number of threads of each: a
        multiple of 32, at most 1024.
    shared_memory
        Dynamic shared memory of a thread block, in bytes.
    min_blocks
        Number of thread blocks per SM in `__launch_bounds__`. If None, the compiler may spill
        registers to reach a higher occupancy.
    cluster
        Number of thread blocks of a cluster along the last axis of the grid; 0 for no clusters.
    arguments
        Names of the kernel's arguments, in order. Forward: the tensor maps, if any ("maps",
        "biased_maps" with the bias, "mla_maps" for MLA), and "params" (`params.py`), which is
        "quantized_params" for an 8-bit KV cache and "float8_params" for float8 inputs. Backward:
        the tensor maps, if any ("gradient_maps", or "bias_gradient_maps" with the bias), and
        "gradients". Tangents: the tensor maps, if any ("tangent_maps"), and "tangents". Sums of
        weights: the tensor maps, if any ("score_maps"), and "received". A log-sum-exp without
        output: "score_maps" and "params".
    source
        File that contains the function, if it is not the family's own `.cu`.
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
        assert self.arguments in _ARGUMENTS, "unknown combination of arguments"

    @classmethod
    def of_gradients(
        cls,
        entry: str,
        function: str,
        blocks: int,
        threads: int,
        shared_memory: int = 0,
        min_blocks: int | None = None,
        *,
        ranks: int = 1,
        cluster: int = 0,
        arguments: tuple[str, ...] = ("gradients",),
        source: str | None = None,
    ) -> Launch:
        """Return a launch of a backward pass: `ranks` thread blocks for each of `blocks` tiles."""
        return cls(
            *(entry, function, (blocks, 1, ranks), threads, shared_memory, min_blocks),
            cluster=cluster,
            arguments=arguments,
            source=source,
        )

    @property
    def takes_maps(self) -> bool:
        """Whether the kernel takes tensor maps."""
        return len(self.arguments) > 1

    def definition(self) -> str:
        """Return the C++ definition of the entry."""
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
    """Tensor map without the address of its array.

    Attributes
    ----------
    dtype
        ``"float16"``, ``"bfloat16"`` or ``"float8_e4m3fn"``.
    shape
        Sizes (dim, seqlen, heads, batch), none of them 0.
    strides
        Strides of seqlen, heads and batch, in bytes: multiples of `STRIDE_UNIT` below `MAX_STRIDE`.
    box
        Number of columns and rows of one TMA box. A box row is 64 or 128 bytes, which is also the
        swizzle width.
    array
        Name of the array, if it differs from the name of the map.
    """

    dtype: str
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int]
    array: str | None = None


@dataclass(frozen=True)
class Schedule:
    """Kernel launches of a call and the device memory that they need; no launches on the CPU.

    Attributes
    ----------
    launches
        Kernel launches, in order.
    split
        Split of the keys over thread blocks.
    workspace
        Number of bytes of temporary memory.
    counters
        Number of 32-bit words of device memory that are zero before a launch and after it.
    section_heads
        Number of query heads whose query tiles are interleaved (`scheduler/tile_coord.cuh`).
    tensor_maps
        Tensor maps that the kernels take, in order, by name.
    workspace_offsets
        Byte offsets into the workspace, by the name of the argument that receives the address.
    params
        Fields of the argument struct that differ from the caller's problem if the kernel computes
        an equivalent problem. The value of a tensor is its strides.
    """

    launches: tuple[Launch, ...]
    split: Split = UNSPLIT
    workspace: int = 0
    counters: int = 0
    section_heads: int = 1
    tensor_maps: Mapping[str, TensorMapSpec] = field(default_factory=dict)
    workspace_offsets: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> Launch | None:
        """Launch of the main kernel (see `main_of`); None on the CPU."""
        if not self.launches:
            return None
        entries = tuple(launch.entry for launch in self.launches)
        return self.launches[entries.index(main_of(entries))]
