"""The command `cupy-flash info`: hardware, versions, and usable kernel families."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click

from cupy_flash.families import FAMILIES
from cupy_flash.gpu.compiler import CUBINS_VARIABLE, why_no_compiler
from cupy_flash.gpu.environment import gpu_unavailable, kernel_cache_dir
from cupy_flash.planning import tuning
from cupy_flash.problem.arrays import DTYPES
from cupy_flash.problem.device import Device

from .cases.cases import Case
from .providers import providers
from .records import environment


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """Show GPUs, versions, cache paths, kernel families and providers, usable or not and why."""
    details = collect()
    click.echo(json.dumps(details, indent=1) if as_json else _text(details))


def collect() -> dict[str, Any]:
    """Return everything that `info` shows."""
    gpus = environment.gpus()
    missing = {name: providers.provider(name).missing() for name in providers.names()}
    return {
        # The versions are collected after the providers, which may import torch.
        "versions": environment.versions(),
        "cpu": environment.cpu_name(),
        "gpu_unavailable": gpu_unavailable(),
        "gpus": [dataclasses.asdict(gpu) | {"sm": gpu.sm} for gpu in gpus],
        "compiler_unavailable": why_no_compiler(),
        "places": _places(),
        "families": {
            environment.kernel_name(name, direction): _family(name, direction, gpus)
            for direction, families in FAMILIES.items()
            for name in families
        },
        "providers": missing,
    }


def _places() -> dict[str, Any]:
    table = tuning.user_table_path()
    cubins = os.environ.get(CUBINS_VARIABLE)
    try:
        saved: int | str = len(tuning.read_table(table))
    except tuning.TableError as error:
        saved = str(error)
    return {
        "kernel_cache": str(kernel_cache_dir()),
        "tuned_table": str(table),
        "tuned_entries": saved,
        "prebuilt_kernels": cubins,
        "prebuilt_count": len(list(Path(cubins).glob("*.cubin"))) if cubins else 0,
    }


def _family(name: str, direction: str, gpus: list[Device]) -> dict[str, Any]:
    """Return the dtypes that a family serves on the first GPU, and why it serves no others."""
    family = FAMILIES[direction][name]
    if not gpus:
        return {"digest": family.digest(), "dtypes": [], "why_not": {"all": "no GPU"}}
    reasons = {}
    for dtype in DTYPES:
        problem = Case(dtype, 1, 1024, 1024, 8, 8, 64, 64, direction=direction).problem()
        if reason := family.why_not(problem, gpus[0]):
            reasons[dtype] = reason
    return {
        "digest": family.digest(),
        "dtypes": [dtype for dtype in DTYPES if dtype not in reasons],
        "why_not": reasons,
    }


def _text(details: dict[str, Any]) -> str:
    places = details["places"]
    lines = [("versions", ", ".join(f"{k} {v}" for k, v in details["versions"].items()))]
    lines.append(("CPU", details["cpu"]))
    lines += [("GPU", _gpu_text(gpu)) for gpu in details["gpus"]]
    if details["gpu_unavailable"]:
        lines.append(("GPU", f"none: {details['gpu_unavailable']}"))
    lines.append(("compiler", details["compiler_unavailable"] or "NVRTC, no GPU needed to compile"))
    lines.append(("kernel cache", places["kernel_cache"]))
    saved = places["tuned_entries"]
    if isinstance(saved, int):
        saved = f"{places['tuned_table']} ({saved} saved)" if saved else "none saved"
    lines.append(("tuned tiles", saved))
    prebuilt = places["prebuilt_kernels"]
    not_set = f"none: {CUBINS_VARIABLE} is not set"
    count = places["prebuilt_count"]
    lines.append(("prebuilt", f"{prebuilt} ({count} cubins)" if prebuilt else not_set))
    for name, family in details["families"].items():
        served = ", ".join(family["dtypes"]) or "nothing here"
        reasons = "; ".join(dict.fromkeys(family["why_not"].values()))
        lines.append((f"family {name}", served + (f" ({reasons})" if reasons else "")))
    by_reason: dict[str | None, list[str]] = {}
    for name, reason in details["providers"].items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        text = ", ".join(names)
        lines.append(("no provider", f"{text} ({reason})") if reason else ("providers", text))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _gpu_text(gpu: dict[str, Any]) -> str:
    return (
        f"{gpu['name']} ({gpu['sm']}, {gpu['sm_count']} SMs, "
        f"{gpu['shared_memory_per_block'] // 1024} KiB shared memory per block, "
        f"{gpu['l2_cache'] / 2**20:.0f} MiB L2)"
    )
