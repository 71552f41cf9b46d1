"""Time the calls of a preset by another checkout and by this one, interleaved in one process.

    git worktree add ../before COMMIT
    python benchmarks/two_checkouts.py ../before mods --only "bias|t5"

GPUs of one model differ by several percent, and so does one GPU from minute to minute. Only
interleaved timings show the effect of a change of 1%.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

PACKAGE = "cupy_flash"
HERE = Path(__file__).resolve().parent.parent
MODULES = ("cases.cases", "cases.presets", "cases.inputs", "providers.providers", "measure.timing")


class Checkout:
    """Library of one checkout; several checkouts can be loaded in one process.

    Parameters
    ----------
    root
        Folder of the checkout.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._modules: dict[str, ModuleType] = {}
        with self.active():
            found = [importlib.import_module(f"{PACKAGE}.cli.{name}") for name in MODULES]
            self.cases, self.presets, self.inputs, self.providers, self.timing = found
            origin = str(importlib.import_module(PACKAGE).__file__)
        if not Path(origin).is_relative_to(root):
            raise click.UsageError(f"{root} has no {PACKAGE}: found {origin}")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this library the one that `import` finds, also when a function imports lazily."""
        others = {name: sys.modules.pop(name) for name in _loaded()}
        sys.modules.update(self._modules)
        sys.path.insert(0, self._root)
        try:
            yield
        finally:
            sys.path.remove(self._root)
            self._modules = {name: sys.modules.pop(name) for name in _loaded()}
            sys.modules.update(others)

    def prepared(self, case: Any) -> Any:
        """Return the call of a case on random inputs, replayed as a CUDA graph where it can be."""
        with self.active():
            provider = self.providers.provider(PACKAGE)
            if reason := provider.why_not(case):
                raise click.ClickException(f"{self._root}: {reason}")
            inputs = self.inputs.random_inputs(case, 0, on_gpu=provider.on_gpu)
            prepared = provider.prepare(inputs)
            # The first call compiles and allocates outside of the graph.
            with prepared.scope():
                prepared.call()
            timed = provider.replayed(prepared) or prepared.timed

        @contextlib.contextmanager
        def scope() -> Iterator[None]:
            with self.active(), timed.scope():
                yield

        return self.timing.Timed(timed.call, scope)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == PACKAGE]


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("preset")
@click.option("--only", default="", metavar="REGEX", help="Time only cases whose label matches.")
@click.option(
    "--repeats",
    default=40,
    show_default=True,
    type=click.IntRange(1),
    help="Number of timed calls per case and checkout.",
)
def main(other: Path, preset: str, only: str, repeats: int) -> None:
    """Time the cases of PRESET with the checkout OTHER and with this one."""
    before, after = Checkout(other.resolve()), Checkout(HERE)
    cases = [checkout.presets.preset(preset).cases for checkout in (before, after)]
    common, labels = after.cases.describe(cases[1])
    on_gpu = after.providers.provider(PACKAGE).on_gpu
    timer = after.timing.GpuTimer() if on_gpu else after.timing.HostTimer()
    click.echo(f"before: {other}\n{common}\n\n before ms   after ms  after / before")
    for case_before, case_after, label in zip(*cases, labels, strict=True):
        if not re.search(only, label):
            continue
        calls = [before.prepared(case_before), after.prepared(case_after)]
        times = timer.interleaved(calls, 3, [repeats] * 2)
        old, new = (after.timing.spread(each).median for each in times)
        click.echo(f"{old:10.4f} {new:10.4f} {new / old:15.4f}  {label}")
        del calls
        with after.active():
            after.providers.release_memory()


if __name__ == "__main__":
    main()
