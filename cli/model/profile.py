"""The command `cupy-flash profile`: hardware counters of one call, compared with a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupy_flash.gpu.environment import current_device, gpu_unavailable
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.problem.device import Device, Resources
from cupy_flash.problem.tile import freeze_tile

from ..cases.cases import describe
from ..cases.mod_options import dense_cases, single_mod_options
from ..cases.mods import PLAIN, CaseMods
from ..cases.options import (
    backward_option,
    count_option,
    defaults_of,
    output_option,
    shape_options,
    tile_request,
)
from ..cases.visible import count_pairs
from ..errors import library_errors_as_usage
from ..providers.providers import FAMILY_NAMES
from ..records import environment, report
from . import backward as backward_model
from . import traffic
from .profiler import Call, Kernel, ProfilerError, profile_call

# Shape of the papers' figures on memory traffic.
_DEFAULTS = defaults_of(batch=1, seqlen_q=4096, heads=32, head_dim=128, dtype="bfloat16")

# Names of metrics differ between architectures. If a GPU has several metrics of a tuple, the
# largest value is taken: the other metrics count parts of it, or another number format.
_READ = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
_WRITTEN = ("dram__bytes_write.sum", "dram__bytes_op_write.sum")
_FROM_L2 = ("lts__t_sectors_srcunit_tex_op_read.sum",)
_SECTOR_BYTES = 32
# These metrics count each operation: a multiply-add counts as two.
_TENSOR_FLOPS = tuple(
    f"sm__ops_path_tensor_src_{types}.sum"
    for types in (
        *("bf16_dst_fp32", "fp16", "fp16_dst_fp32", "tf32_dst_fp32", "fp64"),
        "fp16_bf16_tf32_dst_fp32",
    )
)
_TENSOR_PIPE = tuple(
    f"sm__{pipe}_cycles_active.avg.pct_of_peak_sustained_active"
    for pipe in ("pipe_tensor", "pipe_tensor_op_gmma", "pipe_tensor_op_hmma", "pipe_tensor_op_dmma")
)
_FLOPS = {
    f"smsp__sass_thread_inst_executed_op_{letter}{operation}_pred_on.sum": weight
    for letter in "hfd"
    for operation, weight in (("add", 1), ("mul", 1), ("fma", 2))
}
# Warp instructions of the units that compute exponentials and convert between integers and floats.
_SPECIAL = ("smsp__inst_executed_pipe_xu.sum",)
_CONFLICTS = (
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
)
_WAVEFRONTS = ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",)
_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_DURATION = "gpu__time_duration.sum"
_REGISTERS = "launch__registers_per_thread"
_LIMITS = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "threads",
    "launch__occupancy_limit_blocks": "blocks",
}
METRICS = (
    *(_DURATION, *_READ, *_WRITTEN, *_FROM_L2, *_TENSOR_FLOPS, *_TENSOR_PIPE, *_FLOPS, *_SPECIAL),
    *(*_CONFLICTS, *_WAVEFRONTS, _OCCUPANCY, _REGISTERS, *_LIMITS),
)


@dataclass(frozen=True)
class Model:
    """Traffic and operations of a call, according to the model.

    Attributes
    ----------
    hbm
        Traffic of the device memory.
    l2_bytes
        Bytes that the SMs read from the L2 cache; without a cache, they would be read from device
        memory. None for the unfused kernels.
    product_flops
        FLOPs of all products over the visible pairs; for gradients, also of products that a
        kernel recomputes.
    other_flops
        FLOPs of the softmax: for each score a multiply-add and an addition and, in the fused
        kernels, a multiplication of the output for each key tile. Maxima do not count. For
        gradients, see `backward.other_flops`.
    exponentials
        Number of exponentials: one for each score, in each kernel that needs it.
    """

    hbm: traffic.Traffic
    l2_bytes: int | None
    product_flops: float
    other_flops: float
    exponentials: float


def _pairs(plan: Plan, mods: CaseMods) -> float:
    """Return the number of visible pairs over all heads."""
    p = plan.problem
    return p.batch * p.heads_q * count_pairs(p.mask, mods.mod, p.seqlen_k)


def flops_of(plan: Plan, mods: CaseMods) -> float:
    """Return the FLOPs as `Case.flops` counts them."""
    p = plan.problem
    of_dim, of_dim_v = backward_model.USEFUL if p.direction == "backward" else (1, 1)
    return 2.0 * _pairs(plan, mods) * (of_dim * p.head_dim + of_dim_v * p.head_dim_v)


def model_of(plan: Plan, mods: CaseMods = PLAIN) -> Model:
    """Return the model of a plan's problem; `mods` are its modifications."""
    p, tile, scores = plan.problem, plan.tile, _pairs(plan, mods)
    if p.direction == "backward":
        kernels = backward_model.kernels_of(plan)
        return Model(
            hbm=backward_model.fused(p, kernels, mods),
            l2_bytes=backward_model.fused_without_cache(p, kernels, mods).read,
            product_flops=backward_model.product_flops(p, kernels, scores),
            other_flops=backward_model.other_flops(p, kernels, scores),
            exponentials=len(kernels) * scores,
        )
    flops = flops_of(plan, mods)
    if plan.family == "naive":
        # The scores are written, replaced by probabilities in place, and read again.
        inputs = traffic.compulsory(p, mods)
        hbm = dataclasses.replace(
            inputs,
            read=inputs.read + 2 * plan.workspace,
            written=inputs.written + 2 * plan.workspace,
        )
        return Model(hbm, None, flops, 3 * scores, scores)
    return Model(
        hbm=traffic.fused(p, traffic.Schedule.of(plan), mods),
        l2_bytes=traffic.fused_without_cache(p, Br=tile.Br, Bc=tile.Bc, mods=mods).read,
        product_flops=flops,
        other_flops=3 * scores + scores / tile.Bc * p.head_dim_v,
        exponentials=scores,
    )


def compiled(plan: Plan, kernels: Sequence[Kernel]) -> Plan:
    """Return the plan with the registers of its main kernel, if that was profiled."""
    for kernel in kernels:
        registers = kernel.values.get(_REGISTERS)
        if registers and plan.main and kernel.name == plan.main.entry:
            return dataclasses.replace(plan, resources=Resources(int(registers), 0, 0))
    return plan


def theoretical_occupancy(plan: Plan, device: Device) -> float | None:
    """Return the percentage of an SM's threads that the main kernel's resident blocks fill.

    None if its registers are not known.
    """
    if plan.resources is None or plan.main is None:
        return None
    most = math.ceil(math.prod(plan.main.grid) / device.sm_count)
    return 100 * min(plan.blocks_per_sm(), most) * plan.threads / device.threads_per_sm


def _sum(kernels: Sequence[Kernel], names: Sequence[str]) -> float | None:
    """Return the largest sum of any of the metrics over the kernels; None if none was measured."""
    sums = [
        sum(kernel.values.get(name, 0.0) for kernel in kernels)
        for name in names
        if any(name in kernel.values for kernel in kernels)
    ]
    return max(sums, default=None)


def _weighted(kernels: Sequence[Kernel], weights: Mapping[str, int]) -> float | None:
    terms = [(_sum(kernels, (name,)), weight) for name, weight in weights.items()]
    known = [value * weight for value, weight in terms if value is not None]
    return sum(known) if known else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def longest(kernels: Sequence[Kernel]) -> Kernel:
    """Return the kernel that took most of the time."""
    return max(kernels, key=lambda kernel: kernel.values.get(_DURATION, 0.0))


def compare(
    kernels: Sequence[Kernel], plan: Plan, device: Device, mods: CaseMods = PLAIN
) -> list[dict[str, Any]]:
    """Return a row for each quantity: the measured value, the model's value, and their ratio.

    Parameters
    ----------
    kernels
        Kernels of the call. Amounts are sums over the kernels. Percentages and registers are those
        of the kernel that runs longest.
    plan, device, mods
        Plan, device and modifications of the call.
    """
    plan = compiled(plan, kernels)
    model = model_of(plan, mods)
    main = longest(kernels)
    tensor = _sum(kernels, _TENSOR_FLOPS)
    # Without tensor cores, the products count as other operations.
    on_tensor_cores = tensor is None or tensor > 0
    is_planned = plan.main is not None and main.name == plan.main.entry
    conflicts = _weighted(kernels, dict.fromkeys(_CONFLICTS, 1))
    wavefronts = _sum(kernels, _WAVEFRONTS)
    pipe = [main.values[name] for name in _TENSOR_PIPE if name in main.values]
    result: list[tuple[str, str, float | None, float | None]] = [
        ("HBM read", "B", _sum(kernels, _READ), model.hbm.read),
        ("HBM written", "B", _sum(kernels, _WRITTEN), model.hbm.written),
        ("read from L2", "B", _times(_sum(kernels, _FROM_L2), _SECTOR_BYTES), model.l2_bytes),
        ("tensor-core FLOPs", "", tensor, model.product_flops if on_tensor_cores else 0.0),
        (
            "other FLOPs",
            "",
            _weighted(kernels, _FLOPS),
            model.other_flops + (0.0 if on_tensor_cores else model.product_flops),
        ),
        ("special functions", "", _times(_sum(kernels, _SPECIAL), 32), model.exponentials),
        ("tensor pipe active", "%", max(pipe, default=None), None),
        (
            "occupancy",
            "%",
            main.values.get(_OCCUPANCY),
            theoretical_occupancy(plan, device) if is_planned else None,
        ),
        (
            "shared-memory conflicts",
            "%",
            None if conflicts is None or not wavefronts else 100 * conflicts / wavefronts,
            0.0,
        ),
        ("registers per thread", "", main.values.get(_REGISTERS), None),
        ("time", "s", _times(_sum(kernels, (_DURATION,)), 1e-9), None),
    ]
    return [
        {
            "quantity": name,
            "kernel": main.name if unit == "%" or name == "registers per thread" else None,
            "unit": unit,
            "measured": measured,
            "model": modelled,
            "ratio": measured / modelled if measured is not None and modelled else None,
        }
        for name, unit, measured, modelled in result
    ]


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))


def amount(value: float | None, unit: str) -> str:
    """Return four significant digits with an SI prefix: 100700000 B is "100.7 MB"."""
    if value is None:
        return "-"
    if unit == "%":
        return f"{value:.2f} %"
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s), (1.0, ""))
    return f"{value / scale:.4g} {prefix}{unit}".rstrip()


def _limit(kernel: Kernel) -> str:
    """Return a text about what limits the number of thread blocks on an SM."""
    limits = {kernel.values[name]: what for name, what in _LIMITS.items() if name in kernel.values}
    if not limits:
        return ""
    blocks = min(limits)
    return f", at most {blocks:.0f} on an SM by {limits[blocks]}"


def _notes(
    kernels: Sequence[Kernel], plan: Plan, mods: CaseMods, rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    by_name = {row["quantity"]: row["measured"] for row in rows}
    seconds = by_name["time"]
    notes = []
    if len(kernels) > 1 and seconds:
        shares = (f"{k.name} {k.values.get(_DURATION, 0) / seconds / 1e7:.0f}%" for k in kernels)
        notes.append(f"Kernels by time: {', '.join(shares)}. Percentages are of the longest.")
    if seconds:
        bandwidth = ((by_name["HBM read"] or 0) + (by_name["HBM written"] or 0)) / seconds / 1e9
        notes.append(
            f"{flops_of(plan, mods) / seconds / 1e12:.4g} TFLOP/s and {bandwidth:.4g} GB/s, in one "
            "call with cold caches; bench times better."
        )
    main = longest(kernels)
    notes.append(f"{main.name}: {plan.family} tile {report.tile_text(plan.tile)}{_limit(main)}.")
    times = model_of(compiled(plan, kernels), mods).hbm.key_value_reads
    reads = "once" if times == 1 else f"{times:.3g} times"
    others = "q and the output once. FLOPs"
    if plan.problem.direction == "backward":
        others = "in all kernels. FLOPs that several kernels compute count for each; all"
    notes += [
        "Caches were flushed before each kernel, clocks left as they were.",
        "HBM written: what stays in the L2 cache at a kernel's end is not counted.",
        f"Model: keys and values cross the memory bus {reads}, {others} are of visible pairs: "
        "tiles on the edge of a mask or of a sequence count more when measured.",
    ]
    if plan.family != "naive" and plan.problem.dtype == "float32" and by_name["tensor-core FLOPs"]:
        made_of = "six of bfloat16" if plan.family == "hopper" else "three of TF32"
        notes.append(f"float32 on tensor cores: each product is {made_of}.")
    return notes


def _counters(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Return every metric of every kernel as rows of a record."""
    return [
        {"quantity": name, "kernel": kernel.name, "measured": value}
        for kernel in kernels
        for name, value in kernel.values.items()
    ]


_COLUMNS = (
    report.Column("quantity", lambda row: row["quantity"], numeric=False),
    report.Column("measured", lambda row: amount(row["measured"], row["unit"])),
    report.Column("model", lambda row: amount(row["model"], row["unit"])),
    report.Column("measured/model", lambda row: report.number(row["ratio"], ".3f")),
)


@click.command()
@shape_options(_DEFAULTS, single=True)
@single_mod_options
@backward_option
@count_option("--seed", 0, "Seed of random inputs.")
@click.option("--family", type=click.Choice(FAMILY_NAMES), help="Kernel family to profile.")
@click.option(
    "--tile",
    "fields",
    multiple=True,
    metavar="NAME=N",
    help="Force a field of the tile, for example Br=128.",
)
@output_option
def profile(
    backward: bool,
    seed: int,
    family: str | None,
    fields: tuple[str, ...],
    output: Path | None,
    **options: Any,
) -> None:
    """Count one call's memory traffic and operations with Nsight Compute; compare with a model.

    Takes one shape, so each option takes one value. The exit code is 1 if nothing can be measured:
    no GPU, no ncu or no permission.
    """
    cases = dense_cases(options, _DEFAULTS, backward=backward)
    if len(cases) > 1:
        raise click.UsageError(f"the options make {len(cases)} shapes; profile takes one")
    case, tile = cases[0], tile_request({}, fields)
    if case.problem().is_empty:
        raise click.UsageError("the output has no elements; expected a shape that needs a kernel")
    if reason := gpu_unavailable():
        raise ProfilerError(f"there is no GPU to profile on: {reason}")
    device = current_device()
    with library_errors_as_usage():
        plan = make_plan(case.problem(), device, family=family, tile=freeze_tile(tile))
    kernels = profile_call(Call(case, family, tile, seed), METRICS)
    rows = compare(kernels, plan, device, case.mods)
    title = f"{device.name}\n{plan.family}, {describe([case])[0]}"
    head = environment.metadata(device.name) | {
        "case": case.as_record(),
        "family": plan.family,
        "direction": case.direction,
        "kernel_digest": environment.digest_of(plan.family, case.direction),
        "tile": dataclasses.asdict(plan.tile),
        "kernels": ", ".join(kernel.name for kernel in kernels),
    }

    def show() -> None:
        out = report.console()
        report.print_table(out, title, _COLUMNS, [rows])
        report.print_notes(out, _notes(kernels, plan, case.mods, rows))

    report.keep(output, report.Record(head, [*rows, *_counters(kernels)]), show)
