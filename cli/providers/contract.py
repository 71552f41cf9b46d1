"""Interface of providers, and the record of a provider that is prepared for a case."""

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
    """A provider that is prepared for the inputs of one case.

    Attributes
    ----------
    call
        Function that computes the output, or the gradients of q, k and v.
    to_result
        Function that converts the value of `call` to a NumPy or CuPy array in the case's layout,
        or to one array per gradient.
    scope
        Function that returns a context for calls, entered and left outside the timed span.
    plan
        Plan of the library; None for other providers.
    kernel_digest
        Digest of the kernel's sources; None for other providers.
    note
        Note for readers of the measurements.
    inputs
        Inputs that the call computes and is checked with, if they are not those of the case.
    scale
        Factor on the measured times.
    anew
        Function that makes `call` again for the current stream, if `call` is bound to a stream.
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
        """The call in the form that timers take."""
        return Timed(self.call, self.scope)


class Provider(ABC):
    """A way to compute attention.

    Attributes
    ----------
    name
        Name in options and results.
    on_gpu
        Whether the provider takes CuPy arrays; NumPy arrays otherwise.
    ours
        Whether the provider is part of this project, whose results must pass their check.
    """

    name: str
    on_gpu: bool
    ours: bool = False

    @abstractmethod
    def why_not(self, case: Case) -> str | None:
        """Return why the provider cannot compute the case here, or None if it may."""

    @abstractmethod
    def scratch_bytes(self, case: Case) -> int:
        """Estimate the memory in bytes that a call needs in addition to inputs and output."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Prepared:
        """Prepare the provider for inputs; raise ValueError or RuntimeError if it refuses them."""

    def missing(self) -> str | None:
        """Return why the provider cannot run on this machine at all, or None if it can."""
        return gpu_unavailable() if self.on_gpu else None

    def replayed(self, prepared: Prepared) -> Timed | None:
        """Return the call's work as a CUDA graph to launch; None if it cannot be captured."""
        return replayed(prepared.timed) if self.on_gpu else None

    def peak_bytes(self, prepared: Prepared) -> int:
        """Measure the peak memory of a call that was made before, in addition to its inputs."""
        measure = memory.cupy_peak_bytes if self.on_gpu else memory.host_peak_bytes
        return measure(prepared.timed)
