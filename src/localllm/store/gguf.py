"""A bounded reader of GGUF headers: what a model is, without native code and without trusting the file.

Everything is checked against the file's length before it is read, and there are limits to what is kept and what is
skipped, so time and memory are bounded whatever the header claims or holds. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import io
import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from localllm.errors import InvalidModelFile
from localllm.store.gguf_reader import MAX_KEY_BYTES, ArrayInfo, GGUFReader, Tensor
from localllm.store.gguf_types import FILE_TYPES

__all__ = ["ArrayInfo", "GGUFHeader", "Tensor", "human_number", "read_header"]

MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 17


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
        """All elements of an array, also of one that was skipped. [] when the key holds no array.

        Raises InvalidModelFile when it is absurdly long, or the file has changed meanwhile.
        """
        value = self.metadata.get(key)
        if isinstance(value, list):
            return value
        if not isinstance(value, ArrayInfo):
            return []
        with _opened(self.path) as file:
            return GGUFReader(file, value.offset).elements(value.type, value.length)


def human_number(number: int) -> str:
    """1_000_000_000 → "1B", 7_615_616_512 → "7.6B", 134_515_008 → "134.52M" (Ollama's format)."""
    for size, suffix, digits in ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{suffix}"
    return str(number)


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of `path`. Raises InvalidModelFile that says what is wrong with it."""
    with _opened(path) as file:
        return _read(path, GGUFReader(file))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    """An open file, whose OSErrors become InvalidModelFile."""
    try:
        # Before it is opened: that waits for the other end of a pipe.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidModelFile(f"not a GGUF file: {path.name} is no regular file")
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise InvalidModelFile(f"the model file cannot be read: {error.strerror}") from None


def _read(path: Path, reader: GGUFReader) -> GGUFHeader:
    if reader.size < 24:
        raise InvalidModelFile("not a GGUF file: it is shorter than a header")
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
    return GGUFHeader(path, version, metadata, _place(tensors, start, alignment, reader.size))


def _check_version(reader: GGUFReader) -> int:
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
