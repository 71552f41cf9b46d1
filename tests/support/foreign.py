"""Arrays of a library that the package does not know."""

from __future__ import annotations

from typing import Any

import numpy as np


class Foreign:
    """Another library's array, which can be read by DLPack only."""

    def __init__(self, array: np.ndarray, device_type: int = 1) -> None:
        self.array = array
        self.dtype = array.dtype
        self.device_type = device_type

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device_type, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __array_namespace__(self, api_version: str | None = None) -> type[ForeignNamespace]:
        return ForeignNamespace


class ForeignNamespace:
    @staticmethod
    def from_dlpack(array: Any) -> Foreign:
        return Foreign(np.from_dlpack(array))
