"""Five attention kernels, from the plain formula to FlashAttention-3, checked and timed.

    python examples/kernels/ladder.py --seqlen 4096 --causal

Each kernel is compared with NumPy, and its rate with that of `cupy_flash.flash_attention`. Without
a GPU the kernels are only compiled.
"""

from __future__ import annotations

import ctypes
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from cupy_flash import attention_reference, flash_attention
from cupy_flash.reference.dense import attention_naive, error_bound, max_error

FOLDER = Path(__file__).resolve().parent
HEAD_DIM = 128
SHARED_BYTES = 163_912  # dynamic shared memory of the kernels for Hopper


class Rung(NamedTuple):
    """A kernel of the ladder, and how it is launched."""

    file: str
    adds: str
    rows: int  # query rows of a thread block
    threads: int
    oldest: int = 75  # oldest architecture, here sm_75
    hopper: bool = False  # runs on sm_90 only, and takes tensor maps

    def why_not(self, arch: int) -> str | None:
        """Return why the kernel does not run on an architecture, or None if it does."""
        if self.hopper and arch != 90:
            return f"needs sm_90 (Hopper), not sm_{arch}"
        return f"needs sm_{self.oldest} or newer, not sm_{arch}" if arch < self.oldest else None

    def source(self, causal: bool) -> tuple[str, tuple[str, ...]]:
        """Return the code and the compiler options. wgmma and TMA need the target sm_90a."""
        target = ("-arch=sm_90a",) if self.hopper else ()
        code = (FOLDER / self.file).read_text(encoding="utf-8")
        return code, ("-std=c++17", f"-DCAUSAL={int(causal)}", *target)

    def prepare(self, q: Any, k: Any, v: Any, out: Any, causal: bool) -> Callable[[], None]:
        """Return a function that launches the kernel on (batch, seqlen, heads, 128) arrays."""
        import cupy

        code, options = self.source(causal)
        kernel = cupy.RawModule(code=code, options=options).get_function("attention")
        shared_bytes = SHARED_BYTES if self.hopper else 0
        if self.hopper:  # more than 48 KiB have to be allowed
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        batch, seqlen, heads, _ = q.shape
        inputs = [tensor_map(x) for x in (q, k, v)] if self.hopper else [q, k, v]
        scale_log2 = np.float32(math.log2(math.e) / math.sqrt(HEAD_DIM))
        arguments = (*inputs, out, np.int32(seqlen), np.int32(heads), scale_log2)
        grid = (-(-seqlen // self.rows), heads, batch)
        return lambda: kernel(grid, (self.threads,), arguments, shared_mem=shared_bytes)


RUNGS = (
    Rung("1_naive.cu", "the formula, one thread per query row", rows=128, threads=128),
    Rung("2_tiled.cu", "tiles, online softmax", rows=64, threads=256),
    Rung("3_mma.cu", "tensor cores (mma), asynchronous copies", rows=128, threads=256, oldest=80),
    Rung("4_wgmma.cu", "wgmma, TMA, warp specialization", rows=128, threads=384, hopper=True),
    Rung("5_pingpong.cu", "ping-pong scheduling", rows=128, threads=384, hopper=True),
)


def tensor_map(array: Any) -> np.ndarray:
    """Return the record by which TMA loads 128 rows x 64 columns of a head of an array."""
    batch, seqlen, heads, head_dim = array.shape
    batch_stride, row_stride, head_stride, _ = array.strides
    memory = np.zeros(128 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # the driver writes to a multiple of 64 bytes
    record = memory[start : start + 128]
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(record.ctypes.data),
        ctypes.c_int(6),  # float16
        ctypes.c_uint32(4),  # number of axes, of which the contiguous one comes first
        ctypes.c_void_p(array.data.ptr),
        (ctypes.c_uint64 * 4)(head_dim, seqlen, heads, batch),
        (ctypes.c_uint64 * 3)(row_stride, head_stride, batch_stride),  # bytes
        (ctypes.c_uint32 * 4)(64, 128, 1, 1),  # shape of a box
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),  # every element of the box
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(3),  # 128-byte swizzle
        ctypes.c_int(2),  # L2 reads 128 bytes at once
        ctypes.c_int(0),  # zeros for elements outside of the array
    )
    if status:
        raise click.ClickException(f"cuTensorMapEncodeTiled failed with CUresult {status}")
    return record.view("V128")  # CuPy passes an array of one element by value


def random_qkv(batch: int, seqlen: int, heads: int) -> np.ndarray:
    """Return q, k and v, stacked."""
    shape = (3, batch, seqlen, heads, HEAD_DIM)
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)


def error_ratio(rung: Rung, qkv: np.ndarray, causal: bool) -> float:
    """Return the kernel's largest error over the allowed one, which is above 1 if it is wrong.

    Allowed is twice the error of the formula in float16 and float32, and a few units of rounding.
    """
    import cupy

    q, k, v = map(cupy.asarray, qkv)
    out = cupy.full_like(q, cupy.nan)  # an element that is not written counts as wrong
    rung.prepare(q, k, v, out, causal)()
    reference = attention_reference(*qkv, causal=causal)
    allowed = error_bound(attention_naive(*qkv, causal=causal), reference, np.float16)
    return max_error(out.get(), reference) / allowed


def seconds(call: Callable[[], Any]) -> float:
    """Return the GPU time of a call: the median of five runs of many calls between CUDA events."""
    import cupy

    def run(count: int) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) / 1000 / count

    run(1)
    count = max(1, round(0.05 / run(1)))
    return statistics.median(run(count) for _ in range(5))


def climb(batch: int, seqlen: int, heads: int, causal: bool) -> bool:
    """Print the table, and return whether all results are right."""
    import cupy

    arch = int(cupy.cuda.Device().compute_capability)
    q, k, v = map(cupy.asarray, random_qkv(batch, seqlen, heads))
    out = cupy.empty_like(q)
    pairs = seqlen * (seqlen + 1) // 2 if causal else seqlen**2
    teraflops = 4 * batch * heads * pairs * HEAD_DIM / 1e12
    library = teraflops / seconds(lambda: flash_attention(q, k, v, causal=causal, out=out))
    all_right = True
    name = cupy.cuda.runtime.getDeviceProperties(q.device.id)["name"].decode()
    mask = "causal" if causal else "full"
    click.echo(f"{name}: batch {batch}, seqlen {seqlen}, {heads} heads of {HEAD_DIM}, {mask}")
    click.echo(f"{'rung':<14} {'what it adds':<40} TFLOP/s  of cupy_flash")
    for rung in RUNGS:
        start = f"{rung.file:<14} {rung.adds:<40} "
        if reason := rung.why_not(arch):
            click.echo(start + reason)
        elif (ratio := error_ratio(rung, random_qkv(2, 300, 3), causal)) > 1:
            click.echo(f"{start}wrong: {ratio:.3g} times the allowed error")
            all_right = False
        else:
            rate = teraflops / seconds(rung.prepare(q, k, v, out, causal))
            click.echo(f"{start}{rate:7.1f} {rate / library:14.1%}")
    click.echo(f"{'cupy_flash':<14} {'the library on the same arrays':<40} {library:7.1f}")
    return all_right


def compiler_log(rung: Rung, arch: int, causal: bool) -> str:
    """Compile a kernel without a GPU, and return what the compiler reports."""
    from cupy.cuda import nvrtc

    code, options = rung.source(causal)
    options += ("-ftz=true", "--ptxas-options=-v")  # CuPy adds the first one by itself
    options += () if rung.hopper else (f"-arch=sm_{arch}",)
    if nvrtc.getVersion() >= (13, 0):
        options += ("-no-cache",)  # NVRTC's own cache keeps no reports
    program = nvrtc.createProgram(code, rung.file, (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise click.ClickException(nvrtc.getProgramLog(program)) from error
    log: str = nvrtc.getProgramLog(program)
    return log


@click.command()
@click.option(
    "--batch", default=2, type=click.IntRange(1), show_default=True, help="Number of sequences."
)
@click.option(
    "--seqlen", default=4096, type=click.IntRange(1), show_default=True, help="Tokens per sequence."
)
@click.option(
    "--heads", default=16, type=click.IntRange(1), show_default=True, help="Number of heads."
)
@click.option("--causal", is_flag=True, help="Query i attends to the keys j <= i.")
@click.option("--compile-only", is_flag=True, help="Compile the kernels without running them.")
@click.option(
    "--arch",
    default="sm_90",
    show_default=True,
    help="Architecture to compile for if no kernel runs.",
)
def main(batch: int, seqlen: int, heads: int, causal: bool, compile_only: bool, arch: str) -> None:
    """Check and time the kernels of this folder on float16 arrays with head_dim 128."""
    try:
        import cupy
    except ImportError as error:
        raise click.ClickException(f"the kernels need CuPy: {error}") from error
    if not compile_only and cupy.is_available():
        sys.exit(0 if climb(batch, seqlen, heads, causal) else 1)
    if not re.fullmatch(r"sm_\d+", arch):
        raise click.UsageError(f"--arch is {arch!r}; expected a name such as sm_90")
    if not compile_only:
        click.echo("No GPU here: the kernels are compiled, but not run.")
    for rung in RUNGS:
        result = rung.why_not(int(arch[3:]))
        if result is None:
            log = compiler_log(rung, int(arch[3:]), causal)
            result = f"compiles, {' '.join(re.findall(r'[0-9]+ registers', log))}"
        click.echo(f"{rung.file:<14} {result}")


if __name__ == "__main__":
    main()
