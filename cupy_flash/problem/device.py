"""What a GPU offers to a kernel."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Device:
    """The limits that tiles are chosen by. Sizes in bytes unless named otherwise.

    Attributes
    ----------
    name
        As the driver reports it, or the architecture's name where no GPU is meant.
    arch
        Compute capability times ten: 90 for sm_90.
    sm_count
        Streaming multiprocessors.
    shared_memory_per_block, shared_memory_per_sm
        The most that one thread block may ask for, and what an SM holds.
    registers_per_sm, threads_per_sm, max_blocks_per_sm
        32-bit registers, resident threads and resident thread blocks.
    l2_cache
        Size of the L2 cache.
    arch_specific
        Whether code can be compiled that only this architecture runs, such as for ``sm_90a``.
    """

    name: str
    arch: int
    sm_count: int
    shared_memory_per_block: int
    shared_memory_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    max_blocks_per_sm: int
    l2_cache: int
    arch_specific: bool = True

    @property
    def sm(self) -> str:
        """The compiler's name of the architecture, such as ``sm_90``."""
        return f"sm_{self.arch}"

    @property
    def reserved_shared_memory(self) -> int:
        """What the system keeps of an SM's shared memory for each resident block."""
        return KIB if self.arch >= 80 else 0

    def blocks_per_sm(self, threads: int, shared_memory: int, registers: int) -> int:
        """Thread blocks that fit an SM at once, by threads, shared memory and registers.

        Registers are allocated to warps in units of 256 (CUDA programming guide, compute
        capabilities).
        """
        per_warp = -(-registers * 32 // 256) * 256
        limits = [
            self.threads_per_sm // threads,
            self.shared_memory_per_sm // (shared_memory + self.reserved_shared_memory or 1),
            self.registers_per_sm // max(1, per_warp * (threads // 32)),
            self.max_blocks_per_sm,
        ]
        return min(limits)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes
    ----------
    registers
        Per thread.
    spill_bytes
        Local memory per thread: what registers were spilled to, and arrays that the compiler
        could not keep in registers.
    static_shared_memory
        Bytes of statically declared shared memory.
    """

    registers: int
    spill_bytes: int
    static_shared_memory: int


# Per architecture: shared memory per block and per SM in KiB, threads and blocks per SM, and for
# planning with no GPU a usual chip's SM count and L2 in MiB (CUDA programming guide, "Compute
# Capabilities"; chips: T4, A100, A10, Orin, L40S, H100, B200, B300, Thor, RTX 5090, GB10).
_ARCHITECTURES = {
    75: (64, 64, 1024, 16, 40, 4),
    80: (163, 164, 2048, 32, 108, 40),
    86: (99, 100, 1536, 16, 72, 6),
    87: (163, 164, 1536, 16, 16, 4),
    88: (99, 100, 1536, 16, 16, 4),
    89: (99, 100, 1536, 24, 142, 96),
    90: (227, 228, 2048, 32, 132, 50),
    100: (227, 228, 2048, 32, 148, 126),
    103: (227, 228, 2048, 32, 148, 126),
    110: (227, 228, 1536, 24, 20, 32),
    120: (99, 100, 1536, 24, 170, 96),
    121: (99, 100, 1536, 24, 48, 24),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


def device_for_arch(arch: str | int) -> Device:
    """A usual GPU of an architecture, for planning and compiling with no GPU at hand.

    Parameters
    ----------
    arch
        Such as ``"sm_90"`` or ``90``.

    Raises
    ------
    ValueError
        If the architecture is not one the kernels are built for.
    """
    text = str(arch).removeprefix("sm_").removesuffix("a")
    if not text.isdecimal() or int(text) not in _ARCHITECTURES:
        known = ", ".join(f"sm_{a}" for a in ARCHITECTURES)
        raise ValueError(f"unknown architecture {arch!r}; expected one of {known}")
    number = int(text)
    per_block, per_sm, threads, blocks, sm_count, l2_mib = _ARCHITECTURES[number]
    return Device(
        name=f"sm_{number}",
        arch=number,
        sm_count=sm_count,
        shared_memory_per_block=per_block * KIB,
        shared_memory_per_sm=per_sm * KIB,
        registers_per_sm=65536,
        threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        l2_cache=l2_mib * KIB * KIB,
    )
