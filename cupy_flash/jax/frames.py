"""Call frames of XLA's foreign function interface (FFI), read and answered through ctypes.

The layout of the structs is that of `xla/ffi/api/c_api.h`, which jaxlib installs. It is the same in
all minor versions of major version 0. Fields are 64-bit words of `_MEMORY`, an array over the whole
address space: reading words of it takes a third of the time of a ctypes object for each struct.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

_Word, _Pointer = ctypes.c_int64, ctypes.c_void_p
_LOW = 0xFFFFFFFF
# Word w of the memory is at address `w << _SHIFT`. The structs and their arrays are aligned to it.
_SHIFT = 3
_MEMORY = (_Word * (2**60 - 1)).from_address(0)
# Words of a call frame that this module reads: api, context, arguments, results and attributes.
_FRAME_WORDS = 21
_EXTENSION, _API, _CONTEXT = 1, 2, 3
_ARGUMENT_COUNT, _ARGUMENTS, _RESULT_COUNT, _RESULTS, _ATTRIBUTES = 7, 9, 12, 14, 20
# Words of a buffer: size, extension, dtype (in the low half), address of the data, rank, address of
# the dims.
_BUFFER_WORDS = 6
_DATA = 3
# Byte offsets in the API struct of its version and of the functions that handlers call.
_VERSION, _CREATE_ERROR, _GET_STREAM, _GET_ORDINAL = 32, 48, 80, 184
_METADATA_EXTENSION = 1
# Error code "internal" of the interface, see `absl::StatusCode`.
_INTERNAL = 13
# These functions return at once. Giving up the GIL for them would let other threads take it.
_Function = ctypes.PYFUNCTYPE(_Pointer, _Pointer)


def _numpy_dtypes() -> dict[int, np.dtype]:
    import ml_dtypes

    plain = {1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16"}
    plain |= {8: "uint32", 9: "uint64", 10: "float16", 11: "float32", 12: "float64"}
    return {
        **{code: np.dtype(name) for code, name in plain.items()},
        16: np.dtype(ml_dtypes.bfloat16),
        20: np.dtype(ml_dtypes.float8_e4m3fn),
    }


# NumPy dtypes by the codes of the interface (`XLA_FFI_DataType`).
DTYPES = _numpy_dtypes()


class BufferKey(NamedTuple):
    """Dtype code and shape of the array in a buffer: a prepared call depends on both."""

    dtype: int
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the array in the buffer."""
        return DTYPES[self.dtype]


class Frame(NamedTuple):
    """Call frame of one execution.

    Attributes
    ----------
    api, context
        Addresses of the API struct and of the execution context.
    addresses
        Addresses of the arguments, which are dense buffers in C order. The address of a buffer
        without elements may be 0.
    results
        Addresses of the result buffers.
    text
        String attribute of the call; it has no other attribute.
    argument_pointers, result_pointers
        Addresses of the structs of the buffers.
    """

    api: int
    context: int
    addresses: list[int]
    results: list[int]
    text: bytes
    argument_pointers: list[int]
    result_pointers: list[int]

    def keys(self) -> tuple[BufferKey, ...]:
        """Return the key of each argument."""
        return tuple(map(_buffer_key, self.argument_pointers))

    def result_keys(self) -> tuple[BufferKey, ...]:
        """Return the key of each result."""
        return tuple(map(_buffer_key, self.result_pointers))


def read_frame(address: int) -> Frame:
    """Return the call frame at an address."""
    first = address >> _SHIFT
    words = _MEMORY[first : first + _FRAME_WORDS]
    # The attributes are an array of pointers to values, and the value of a string is a span.
    span = _MEMORY[words[_ATTRIBUTES] >> _SHIFT] >> _SHIFT
    text = ctypes.string_at(*_MEMORY[span : span + 2])
    pointers = words[_ARGUMENTS] >> _SHIFT
    given = _MEMORY[pointers : pointers + words[_ARGUMENT_COUNT]]
    pointers = words[_RESULTS] >> _SHIFT
    made = _MEMORY[pointers : pointers + words[_RESULT_COUNT]]
    addresses = [_MEMORY[(pointer >> _SHIFT) + _DATA] for pointer in given]
    results = [_MEMORY[(pointer >> _SHIFT) + _DATA] for pointer in made]
    return Frame(words[_API], words[_CONTEXT], addresses, results, text, given, made)


def _buffer_key(pointer: int) -> BufferKey:
    first = pointer >> _SHIFT
    _, _, dtype, _, rank, dims = _MEMORY[first : first + _BUFFER_WORDS]
    first = dims >> _SHIFT
    # The upper half of the dtype's word is padding, which may hold anything.
    return BufferKey(dtype & _LOW, tuple(_MEMORY[first : first + rank]))


def api_of(address: int) -> int:
    """Return the address of the API struct of the frame at an address; 0 if it has none."""
    return _MEMORY[(address >> _SHIFT) + _API]


def answer_metadata(address: int, traits: int) -> bool:
    """Answer a query for metadata, which XLA sends instead of a call when a handler is registered.

    Return whether the frame is such a query.
    """
    extension = _MEMORY[(address >> _SHIFT) + _EXTENSION]
    if not extension:
        return False
    first = extension >> _SHIFT
    kind, _, metadata = _MEMORY[first + 1 : first + 4]
    if kind & _LOW != _METADATA_EXTENSION:
        raise RuntimeError(f"XLA sends a frame with an extension of unknown type {kind & _LOW}")
    # JAX up to 0.6 passes no API struct here, and accepts minor version 1.
    api = api_of(address)
    major, minor = _api_version(api) if api else (0, 1)
    # The fields that follow the size: version (a struct of 24 bytes) and traits.
    version = (ctypes.c_int32 * 2).from_address(metadata + 24)
    version[0], version[1] = major, minor
    ctypes.c_uint32.from_address(metadata + 32).value = traits
    return True


def _api_version(api: int) -> tuple[int, int]:
    major, minor = (ctypes.c_int32 * 2).from_address(api + _VERSION)
    if major != 0:
        raise RuntimeError(
            f"this JAX has version {major}.{minor} of XLA's foreign function interface; "
            "cupy_flash.jax supports major version 0"
        )
    return major, minor


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("size", _Word),
        ("extension", _Pointer),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int32),
    )


def new_error(api: int, message: str) -> int | None:
    """Return the address of a new error, which XLA raises and frees."""
    create = _Function(_Word.from_address(api + _CREATE_ERROR).value)
    # The arguments are referenced until the function has copied them.
    arguments = _ErrorArguments(28, None, message.encode("utf-8", "replace"), _INTERNAL)
    result: int | None = create(ctypes.addressof(arguments))
    return result


class ContextReader:
    """Functions of one API struct that read an execution context: the stream and the device."""

    def __init__(self, api: int) -> None:
        self._stream = _Function(_Word.from_address(api + _GET_STREAM).value)
        size = _Word.from_address(api).value
        has_ordinal = size >= _GET_ORDINAL + 8
        self._ordinal = (
            _Function(_Word.from_address(api + _GET_ORDINAL).value) if has_ordinal else None
        )
        # Structs that no thread uses now. Creating one takes longer than the call.
        self._free: list[tuple[ctypes.Array[ctypes.c_int64], int]] = []

    def stream(self, context: int) -> int:
        """Return the handle of the CUDA stream of a call."""
        return self._ask(self._stream, context, 32)

    def device(self, context: int) -> int | None:
        """Return the CUDA index of a call's device; None if this JAX does not tell."""
        if self._ordinal is None:
            return None
        return self._ask(self._ordinal, context, 28) & _LOW

    def _ask(self, function: object, context: int, size: int) -> int:
        assert callable(function)
        try:
            words, address = self._free.pop()
        except IndexError:
            words = (_Word * 4)()
            address = ctypes.addressof(words)
        words[:] = [size, 0, context, 0]
        error, result = function(address), words[3]
        self._free.append((words, address))
        if error:
            raise RuntimeError(f"XLA returned the error {error:#x} for the context of a call")
        return result
