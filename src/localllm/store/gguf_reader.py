"""The values of a GGUF file's header, one after the other, within bounds of memory and time."""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from typing import Any

from localllm.errors import InvalidModelFile
from localllm.store.gguf_types import TENSOR_TYPES

MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 32 << 20
MAX_DIMENSIONS = 4
# Longer arrays (a vocabulary) are skipped; `read_array` fetches one on demand.
MAX_KEPT_ELEMENTS = 1024
# Of all strings and kept elements of a header together, or of one skipped array that is asked for.
MAX_KEPT_BYTES = 128 << 20
# Of all skipped arrays together. The largest vocabularies have about a million tokens and merges.
MAX_SKIPPED_STRINGS = 1 << 23

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
# An element costs about this much as an object, whatever it takes in the file.
_ELEMENT_BYTES = 64
_WINDOW_BYTES = 1 << 18


@dataclass(frozen=True)
class ArrayInfo:
    """An array that was skipped: its element type, length and position in the file."""

    type: int
    length: int
    offset: int


@dataclass(frozen=True)
class Tensor:
    """`shape` is in GGUF's order (fastest dimension first); `offset` counts from the start of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


class GGUFReader:
    """Little-endian values from a file, each checked against its end.

    It reads a window at a time. A mapping would be simpler, but a file that is cut short while it is mapped kills the
    process.
    """

    def __init__(self, file: io.FileIO, position: int = 0) -> None:
        self._file = file
        self.size = file.seek(0, io.SEEK_END)
        self.position = position
        self._window = b""
        self._window_at = 0
        self._num_kept_bytes = 0
        self._num_skipped_strings = 0

    def _view(self, size: int) -> int:
        """Have the next `size` bytes in the window; returns where in it they are."""
        at = self.position - self._window_at
        if 0 <= at <= len(self._window) - size:
            return at
        if self.position + size <= self.size:
            self._file.seek(self.position)
            self._window = self._file.read(max(size, _WINDOW_BYTES))
            self._window_at = self.position
        if self._window_at != self.position or len(self._window) < size:
            raise _cut_off()
        return 0

    def take(self, size: int) -> bytes:
        at = self._view(size)
        self.position += size
        return self._window[at : at + size]

    def _keep(self, num_bytes: int) -> None:
        self._num_kept_bytes += num_bytes
        if self._num_kept_bytes > MAX_KEPT_BYTES:
            raise InvalidModelFile(f"the GGUF header holds more than {MAX_KEPT_BYTES} bytes, more than any model's")

    def scalar(self, code: str) -> Any:
        form = f"<{code}"
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        length = self.scalar("Q")
        if length > limit:
            raise InvalidModelFile(f"the GGUF header claims a string of {length} bytes")
        self._keep(length)
        return self.take(length).decode("utf-8", "replace")

    def value(self, type: int) -> Any:
        if type == _STRING:
            return self.string()
        if type == _ARRAY:
            return self._array()
        if type not in _SCALARS:
            raise InvalidModelFile(f"the GGUF header has a value of unknown type {type}")
        return self.scalar(_SCALARS[type])

    def _array(self) -> list[Any] | ArrayInfo:
        type, length = self.scalar("I"), self.scalar("Q")
        if type != _STRING and type not in _SCALARS:
            raise InvalidModelFile(f"the GGUF header has an array of unknown or nested type {type}")
        # A string takes at least its 8 bytes of length.
        least = 8 if type == _STRING else struct.calcsize(f"<{_SCALARS[type]}")
        if length * least > self.size - self.position:
            raise InvalidModelFile(f"the GGUF header claims an array of {length} elements, more than the file holds")
        if length <= MAX_KEPT_ELEMENTS:
            return self.elements(type, length)
        info = ArrayInfo(type, length, self.position)
        self._skip(type, length)
        return info

    def elements(self, type: int, length: int) -> list[Any]:
        self._keep(length * _ELEMENT_BYTES)
        if type == _STRING:
            return [self.string() for _ in range(length)]
        form = f"<{length}{_SCALARS[type]}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))

    def _skip(self, type: int, length: int) -> None:
        if type == _STRING:
            self._skip_strings(length)
        else:
            self.position += length * struct.calcsize(f"<{_SCALARS[type]}")

    def _skip_strings(self, length: int) -> None:
        """The innermost loop of reading a header: half a million strings are common."""
        self._num_skipped_strings += length
        if self._num_skipped_strings > MAX_SKIPPED_STRINGS:
            raise InvalidModelFile(f"the GGUF header has lists of more than {MAX_SKIPPED_STRINGS} strings")
        unpack = _LENGTH.unpack_from
        # `at` counts from the window's start; after `last` no length fits into the window.
        start, window, at, last = self.position, b"", 0, -1
        for _ in range(length):
            if at > last:
                self.position = start + at
                at = self._view(_LENGTH.size)
                start, window = self._window_at, self._window
                last = len(window) - _LENGTH.size
            at += _LENGTH.size + unpack(window, at)[0]
        self.position = start + at
        if self.position > self.size:
            raise _cut_off()

    def tensor(self) -> Tensor:
        """One tensor's entry; its offset still counts from the start of the data."""
        name = self.string(MAX_KEY_BYTES)
        num_dimensions = self.scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise InvalidModelFile(f"tensor {name!r} claims {num_dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))
        type, offset = self.scalar("I"), self.scalar("Q")
        if type not in TENSOR_TYPES:
            raise InvalidModelFile(f"tensor {name!r} is of unknown type {type}", hint="The file may be too new.")
        type_name, block, block_bytes = TENSOR_TYPES[type]
        elements = math.prod(shape)
        if elements >= 1 << 60 or (shape and shape[0] % block):
            raise InvalidModelFile(f"tensor {name!r} has an impossible shape {shape} for {type_name}")
        return Tensor(name, type_name, shape, offset, elements // block * block_bytes)


def _cut_off() -> InvalidModelFile:
    return InvalidModelFile("the file is cut off inside its header", hint="Download or copy it again.")
