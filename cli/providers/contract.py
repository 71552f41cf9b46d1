"""What every provider answers, and what it makes ready for a case."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from cupy_flash.gpu.environment import gpu_unavailable
from cupy_flash.planning.planner import Plan

from ..cases.cases import Case
from ..cases.inputs import Inputs
from ..measure import memory
from ..measure.timing import Timed, replayed

TileFields = Mapping[str, int] | None


def _same(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Prepared:
    """A provider made ready for one case's inputs.

    Attributes
    ----------
    call
        Computes the output, or gradients of q, k and v.
    to_result
        Turns what `call` returned into a NumPy or CuPy array in the case's layout, or into one for
        each gradient.
    scope
        Entered around calls, outside the timed span.
    plan
        What the library chose; None for other providers.
    kernel_digest
        Of the sources of what runs; None for other providers.
    note
        What a reader of the numbers should know.
    inputs
        What it computes, and is checked by, where that is not what it was made ready for.
    scale
        What its times are multiplied by.
    anew
        Makes `call` once more on the current stream, where it goes by the stream it was made on.
    """

    call: Callable[[], Any]
    to_result: Callable[[Any], Any] = _same
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    plan: Plan | None = None
    kernel_digest: str | None = None
    note: str | None = None
    inputs: Inputs | None = None
    scale: float = 1.0
    anew: Callable[[], Callable[[], Any]] | None = None

    @property
    def tile(self) -> dict[str, int] | None:
        """Fields of the plan's tile."""
        return dataclasses.asdict(self.plan.tile) if self.plan else None

    @property
    def timed(self) -> Timed:
        """What a timer takes."""
        return Timed(self.call, self.scope)


class Provider(ABC):
    """One way to compute attention.

    Attributes
    ----------
    name
        As the option and the results spell it.
    on_gpu
        Whether it takes CuPy arrays; NumPy arrays otherwise.
    ours
        Whether a failed check is ours to answer for.
    """

    name: str
    on_gpu: bool
    ours: bool = False

    @abstractmethod
    def why_not(self, case: Case) -> str | None:
        """Why it cannot compute the case here, or None if it may."""

    @abstractmethod
    def scratch_bytes(self, case: Case) -> int:
        """Estimate of the memory it takes besides inputs and output."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Prepared:
        """Make it ready; raises ValueError or RuntimeError with the reason if it refuses."""

    def missing(self) -> str | None:
        """Why it cannot run on this machine at all, or None if it can."""
        return gpu_unavailable() if self.on_gpu else None

    def replayed(self, prepared: Prepared) -> Timed | None:
        """The call's work as a CUDA graph that is launched; None where there is no such thing."""
        return replayed(prepared.timed) if self.on_gpu else None

    def peak_bytes(self, prepared: Prepared) -> int:
        """Memory that a call takes at its peak besides its inputs; it was called before."""
        measure = memory.cupy_peak_bytes if self.on_gpu else memory.host_peak_bytes
        return measure(prepared.timed)
