"""Options and tables of `roofline --gpus`: time of a case by number of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from cupy_flash.mods.keywords import Window
from cupy_flash.parallel.heads import why_not_head_ranks

from ..cases.cases import Case, describe
from ..cases.options import Number, split, with_options
from ..cases.options import refuse as refuse_given
from ..records import report
from ..records.report import Column
from .gpus import Gpu
from .ranks import Links, counts, estimate

Rows = Sequence[Mapping[str, Any]]

# Default bandwidths in GB/s per GPU and direction, and number of GPUs per host. Between two H200 of
# a host, NCCL reaches 303 GB/s of NVLink's 450. The network has 400 Gbit/s for each GPU of a host.
_LINK, _NETWORK, _HOST_GPUS = 300.0, 50.0, 8
# Bounds in GB/s or TFLOP/s; beyond them, times would be practically 0 or infinite.
_RATE = Number(1e-3, 1e9)
# Options for several GPUs.
scaling_options = with_options(
    click.option(
        "--gpus", type=click.IntRange(2, 65536), help="Model time on up to this many GPUs instead."
    ),
    click.option(
        "--link",
        type=_RATE,
        help="Bandwidth from a GPU to others of its host, in GB/s per direction; "
        f"default: {_LINK:g}.",
    ),
    click.option(
        "--network",
        type=_RATE,
        help=f"Bandwidth from a GPU to other hosts, in GB/s per direction; default: {_NETWORK:g}.",
    ),
    click.option(
        "--host-gpus",
        type=click.IntRange(1),
        help=f"Number of GPUs per host; default: {_HOST_GPUS}.",
    ),
    click.option(
        "--rate",
        type=_RATE,
        help="TFLOP/s of attention on one GPU, as bench measures it; default: the roofline's.",
    ),
    click.option(
        "--head-ranks",
        type=click.IntRange(1),
        help="GPUs per head-parallel group; 1 is ring attention only; default: library's choice.",
    ),
)
_DEFAULTS = {"link": _LINK, "network": _NETWORK, "host_gpus": _HOST_GPUS}


def split_scaling(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options for several GPUs from a command's options, and return their values.

    Raise a usage error if any of them was given without --gpus.
    """
    gpus = options.pop("gpus")
    given = split(options, (*_DEFAULTS, "rate", "head_ranks"))
    if gpus is None:
        refuse_given(given, "one GPU; it is for --gpus")
    values = {name: _DEFAULTS.get(name) if v is None else v for name, v in given.items()}
    return {"gpus": gpus, **values}


def refuse(cases: Sequence[Case], scaling: Mapping[str, Any]) -> None:
    """Raise a usage error for cases that are not modelled."""
    requested, most = scaling["head_ranks"], scaling["gpus"]
    for case in cases:
        others = dataclasses.replace(case.mods, window=Window())
        if not case.is_dense or case.seqlen_q != case.seqlen_k or others:
            raise click.UsageError(
                "--gpus models batches of equal length with as many queries as keys, causal or "
                "not, with or without a window"
            )
        if not case.flops():
            raise click.UsageError("--gpus distributes work; expected a case that has some")
        heads = case.heads_q, case.heads_kv
        if requested is not None and (reason := why_not_head_ranks(requested, most, *heads)):
            raise click.UsageError(f"--head-ranks is {requested}, which {reason}")


def numbers_of_gpus(case: Case, scaling: Mapping[str, Any]) -> list[int]:
    """Return 1, 2, 4 and so on up to --gpus, without numbers that --head-ranks does not fit."""
    requested, heads = scaling["head_ranks"], (case.heads_q, case.heads_kv)
    return [
        ranks
        for ranks in counts(scaling["gpus"])
        if requested is None or not why_not_head_ranks(min(requested, ranks), ranks, *heads)
    ]


def rows_of(
    gpu: Gpu, case: Case, attainable: float, scaling: Mapping[str, Any], advance: report.Advance
) -> Rows:
    """Return a row for each number of GPUs.

    `attainable` is the FLOP/s of one GPU, if the option --rate is not given. `advance` is called
    with a text before each row.
    """
    links = Links(scaling["link"] * 1e9, scaling["network"] * 1e9, scaling["host_gpus"])
    rate = attainable if scaling["rate"] is None else scaling["rate"] * 1e12
    rows, alone = [], 0.0
    requested = scaling["head_ranks"]
    for ranks in numbers_of_gpus(case, scaling):
        advance(f"{ranks} GPUs")
        result = estimate(
            *(case, ranks, None if requested is None else min(requested, ranks)),
            *(rate, gpu.hbm_bytes_per_second, links),
        )
        alone = alone or result.seconds
        rows.append(
            {
                "gpu": gpu.name,
                **case.as_record(),
                "one_gpu_tflops": rate / 1e12,
                "link_gb_per_s": scaling["link"],
                "network_gb_per_s": scaling["network"],
                "host_gpus": scaling["host_gpus"],
                "gpus": ranks,
                "head_ranks": result.head_ranks,
                "ms": 1e3 * result.seconds,
                "attention_ms": 1e3 * result.compute,
                "exchange_ms": 1e3 * result.exchange,
                "speedup": alone / result.seconds,
                "efficiency": alone / result.seconds / ranks,
            }
        )
    return rows


def print_rows(groups: Sequence[Rows], cases: Sequence[Case]) -> None:
    """Print a table for each case on each GPU."""
    out = report.console()
    columns = [
        Column("GPUs", lambda row: str(row["gpus"])),
        Column("heads among", lambda row: str(row["head_ranks"])),
        Column("ms", lambda row: report.milliseconds(row["ms"])),
        Column("attention", lambda row: report.milliseconds(row["attention_ms"])),
        Column("waiting", lambda row: report.milliseconds(row["exchange_ms"])),
        Column("speedup", lambda row: f"{row['speedup']:.4g}"),
        Column("of ideal", lambda row: f"{row['efficiency']:.0%}"),
    ]
    shared, labels = describe(list(cases))
    for rows, label in zip(groups, labels, strict=True):
        first = rows[0]
        title = (
            f"{first['gpu']}: {first['one_gpu_tflops']:.4g} TFLOP/s of attention, "
            f"{first['link_gb_per_s']:.4g} GB/s to the {first['host_gpus']} GPUs of a host, "
            f"{first['network_gb_per_s']:.4g} beyond\n{shared} {label}".rstrip()
        )
        report.print_table(out, title, columns, [rows])
    report.print_notes(
        out,
        [
            "heads among: GPUs per head-parallel group; GPUs over that are ranks of a ring.",
            "waiting: time of exchanges that do not overlap with attention.",
        ],
    )
