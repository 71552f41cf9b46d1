"""The `decode` family: attention of few query rows over many keys (`forward/decode.cu`)."""

from __future__ import annotations

from cupy_flash.families.decode.forward import DecodeFamily
from cupy_flash.families.decode.tile import DecodeTile

__all__ = ["DecodeFamily", "DecodeTile"]
