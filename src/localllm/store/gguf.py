"""A bounded reader of GGUF headers: what a model is, without native code and without trusting the file.

Everything is checked against the file's length before it is read, so time and memory follow what the header really
holds, never what it claims. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from localllm.errors import InvalidModelFile
from localllm.store.gguf_types import FILE_TYPES, TENSOR_TYPES

MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 16 << 20
MAX_DIMENSIONS = 4
# Longer arrays (a vocabulary) are skipped; `read_array` fetches one on demand.
MAX_KEPT_ELEMENTS = 1024

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


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


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return self._text("general.architecture")

    def of_arch(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _text(self, key: str) -> str:
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""

    def _count(self, key: str) -> int:
        """An architecture's count; the largest where a file gives one per layer; 0 when absent."""
        value = self.of_arch(key, 0)
        if isinstance(value, list):
            value = max((v for v in value if isinstance(v, int)), default=0)
        return value if isinstance(value, int) and value >= 0 else 0

    @property
    def context_length(self) -> int:
        return self._count("context_length")

    @property
    def embedding_length(self) -> int:
        return self._count("embedding_length")

    @property
    def num_layers(self) -> int:
        return self._count("block_count")

    @property
    def num_heads(self) -> int:
        return self._count("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self._count("attention.head_count_kv") or self.num_heads

    @property
    def key_length(self) -> int:
        """Size of one key head."""
        return self._count("attention.key_length") or (self.embedding_length // self.num_heads if self.num_heads else 0)

    @property
    def value_length(self) -> int:
        return self._count("attention.value_length") or self.key_length

    @property
    def pooling_type(self) -> int | None:
        """None for a model that generates; 0 none, 1 mean, 2 CLS, 3 last, 4 rank for one that embeds."""
        value = self.of_arch("pooling_type")
        return value if isinstance(value, int) else None

    @property
    def chat_template(self) -> str:
        return self._text("tokenizer.chat_template")

    def special_token(self, name: str) -> int | None:
        """Id of "bos", "eos", "eot", "unknown", "padding" …, None when the file names none."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    @cached_property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def parameter_size(self) -> str:
        """As Ollama prints it: "134.52M", "7.6B"."""
        return human_number(self.num_parameters)

    @cached_property
    def tensor_bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def file_type(self) -> str:
        """Name of the quantisation: the file's own word, else the type that holds the most weights."""
        number = self.metadata.get("general.file_type")
        if isinstance(number, int) and number in FILE_TYPES:
            return FILE_TYPES[number]
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + math.prod(tensor.shape)
        return max(sizes, key=lambda type: sizes[type], default="unknown")

    def read_array(self, key: str) -> list[Any]:
        """All elements of an array, also of one that was skipped. [] when the key holds no array."""
        value = self.metadata.get(key)
        if isinstance(value, list):
            return value
        if not isinstance(value, ArrayInfo):
            return []
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, value.offset).elements(value.type, value.length)


def human_number(number: int) -> str:
    """1_000_000_000 → "1B", 7_615_616_512 → "7.6B", 134_515_008 → "134.52M" (Ollama's format)."""
    for size, suffix, digits in ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{suffix}"
    return str(number)


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of `path`. Raises InvalidModelFile that says what is wrong with it."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                raise InvalidModelFile("not a GGUF file: it is shorter than a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except OSError as error:
        raise InvalidModelFile(f"the model file cannot be read: {error.strerror}") from None


def _read(path: Path, data: mmap.mmap) -> GGUFHeader:
    reader = _Reader(data, 0)
    version = _check_version(reader)
    num_tensors, num_metadata = reader.scalar("Q"), reader.scalar("Q")
    if num_tensors > MAX_TENSORS:
        raise InvalidModelFile(f"the GGUF header claims {num_tensors} tensors, more than any model has")
    if num_metadata > MAX_METADATA:
        raise InvalidModelFile(f"the GGUF header claims {num_metadata} metadata entries, more than any model has")
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = reader.string(MAX_KEY_BYTES)
        if key in metadata:
            raise InvalidModelFile(f"the GGUF header has the key {key!r} twice")
        metadata[key] = reader.value(reader.scalar("I"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= 1 << 20:
        raise InvalidModelFile(f"the GGUF header has an impossible alignment: {alignment!r}")
    if alignment & (alignment - 1):
        raise InvalidModelFile(f"the GGUF header's alignment {alignment} is not a power of two")
    tensors = [reader.tensor() for _ in range(num_tensors)]
    start = -(-reader.position // alignment) * alignment
    return GGUFHeader(path, version, metadata, _place(tensors, start, alignment, len(data)))


def _check_version(reader: _Reader) -> int:
    if reader.take(4) != b"GGUF":
        raise InvalidModelFile("not a GGUF file: it does not begin with GGUF")
    version = int(reader.scalar("I"))
    if version in (2, 3):
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
        raise InvalidModelFile("big-endian GGUF files are not supported")
    raise InvalidModelFile(f"GGUF version {version} is not supported", hint="Versions 2 and 3 are.")


def _place(tensors: list[Tensor], start: int, alignment: int, file_size: int) -> tuple[Tensor, ...]:
    """Turn offsets into file positions; refuse tensors that lie outside the file, on one another, or unaligned."""
    end = start
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset % alignment:
            raise InvalidModelFile(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
        if start + tensor.offset < end:
            raise InvalidModelFile(f"tensor {tensor.name!r} overlaps another")
        end = start + tensor.offset + tensor.size
        if end > file_size:
            raise InvalidModelFile(
                f"the file is cut off: it has {file_size} bytes and tensor {tensor.name!r} ends at {end}",
                hint="Download or copy it again.",
            )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise InvalidModelFile("two tensors have the same name")
    return tuple(Tensor(t.name, t.type, t.shape, start + t.offset, t.size) for t in tensors)


class _Reader:
    """Little-endian values from a mapped file, each checked against its end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self._size = len(data)
        self.position = position

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > self._size:
            raise InvalidModelFile("the file is cut off inside its header", hint="Download or copy it again.")
        chunk = self._data[self.position : end]
        self.position = end
        return chunk

    def scalar(self, code: str) -> Any:
        form = f"<{code}"
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        length = self.scalar("Q")
        if length > limit:
            raise InvalidModelFile(f"the GGUF header claims a string of {length} bytes")
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
        if length * least > self._size - self.position:
            raise InvalidModelFile(f"the GGUF header claims an array of {length} elements, more than the file holds")
        if length <= MAX_KEPT_ELEMENTS:
            return self.elements(type, length)
        info = ArrayInfo(type, length, self.position)
        self._skip(type, length)
        return info

    def elements(self, type: int, length: int) -> list[Any]:
        if type == _STRING:
            return [self.string() for _ in range(length)]
        form = f"<{length}{_SCALARS[type]}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))

    def _skip(self, type: int, length: int) -> None:
        if type != _STRING:
            self.position += length * struct.calcsize(f"<{_SCALARS[type]}")
            return
        unpack, data, position, limit = struct.Struct("<Q").unpack_from, self._data, self.position, self._size - 8
        for _ in range(length):
            if position > limit:
                raise InvalidModelFile("the file is cut off inside its header", hint="Download or copy it again.")
            position += 8 + unpack(data, position)[0]
        self.position = position

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
