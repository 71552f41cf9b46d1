"""Limits of a GPU, and resources of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Device:
    """Limits of a GPU that the choice of a tile depends on. Sizes are in bytes.

    Attributes
    ----------
    name
        Name that the driver reports, or name of the architecture if there is no GPU.
    arch
        Compute capability times ten, such as 90 for sm_90.
    sm_count
        Number of streaming multiprocessors (SMs).
    shared_memory_per_block, shared_memory_per_sm
        Maximum shared memory of one thread block, and total shared memory of an SM.
    registers_per_sm, threads_per_sm, max_blocks_per_sm
        Number of 32-bit registers, of resident threads and of resident thread blocks of an SM.
    l2_cache
        Size of the L2 cache.
    arch_specific
        Whether the compiler can build architecture-specific code, such as ``sm_90a``.
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
        """Name of the architecture for the compiler, such as ``sm_90``."""
        return f"sm_{self.arch}"

    @property
    def reserved_shared_memory(self) -> int:
        """Shared memory of an SM that the system reserves for each resident thread block."""
        return KIB if self.arch >= 80 else 0

    def blocks_per_sm(self, threads: int, shared_memory: int, registers: int) -> int:
        """Return the number of thread blocks that fit on an SM at once.

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
    """Resources that one compiled kernel uses.

    Attributes
    ----------
    registers
        Number of registers per thread.
    spill_bytes
        Bytes of local memory per thread: spilled registers, and arrays that the compiler could not
        keep in registers.
    static_shared_memory
        Bytes of statically declared shared memory.
    """

    registers: int
    spill_bytes: int
    static_shared_memory: int


# Limits by architecture: shared memory per block and per SM in KiB, threads and blocks per SM. For
# planning without a GPU, also the SM count and L2 in MiB of a typical chip (CUDA programming guide,
# "Compute Capabilities"; T4, A100, A10, Orin, L40S, H100, B200, B300, Thor, RTX 5090, GB10).
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
    """Return a typical GPU of an architecture, for planning and compiling without a GPU.

    Parameters
    ----------
    arch
        Name or number of the architecture, such as ``"sm_90"`` or ``90``.

    Raises
    ------
    ValueError
        If the kernels are not built for the architecture.
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
