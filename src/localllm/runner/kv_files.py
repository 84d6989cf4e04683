"""KV snapshots as files: written behind, checksummed, read while a request waits, only ever this program's own.

Layout of a file, little-endian: magic and version (8 bytes), key (32), number of tokens (u32), bytes of data (u64),
SHA-256 of everything else (32), the tokens (i32 each), the data as llama.cpp gave it. The folder's name is the key too,
so that another model's, another library's or another setting's memory is never looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import shutil
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_log = logging.getLogger(__name__)

_MAGIC = b"llmKV\0\0\1"
_HEADER = struct.Struct("<8s32sIQ32s")
_SUFFIX = ".kv"
# A cache must not be what fills a disk.
_MIN_FREE_BYTES = 1 << 30
# Data that waits to be written is held in memory; more than this and new files are not taken on.
_MAX_PENDING_BYTES = 1 << 30


@dataclass(frozen=True)
class Fetched:
    """File `id` was read; `data` is None when it is gone or damaged, and then it does not exist any more."""

    id: int
    data: bytes | None


class KVFiles:
    """The files of one key. All file work is done by a thread of its own, in the order in which it was asked for."""

    def __init__(self, folder: Path, key: bytes, budget: int, report: Callable[[Fetched], None]) -> None:
        """`folder` is shared by all models and so is `budget`, in bytes. `report` is called from the thread."""
        assert len(key) == 32
        self._root = folder
        self._folder = folder / key.hex()[:32]
        self._key = key
        self._budget = budget
        self._report = report
        self._paths: dict[int, Path] = {}
        self._next_id = 0
        self._pending_bytes = 0
        self._pending_lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-files", daemon=True)

    def start(self, max_tokens: int) -> dict[int, list[int]]:
        """Look through the folder and start the thread; returns each usable file's tokens by id.

        Files that are damaged are removed; those of more than `max_tokens` are left to whoever has a larger window.
        """
        found = {}
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.name):
                tokens = self._read_tokens(path)
                if tokens is None:
                    _log.warning("removing a damaged prefix file: %s", path)
                    path.unlink(missing_ok=True)
                elif len(tokens) <= max_tokens:
                    found[self._enter(path)] = tokens
        self._thread.start()
        return found

    def read(self, id: int) -> None:
        """Read file `id`; the answer is reported."""
        path = self._paths[id]
        self._work.put(lambda: self._report(Fetched(id, self._load(path))))

    def write(self, tokens: list[int], data: bytes | memoryview) -> int | None:
        """Write a file some time soon; its id, or None when too much is waiting to be written already."""
        with self._pending_lock:
            if self._pending_bytes + len(data) > _MAX_PENDING_BYTES:
                return None
            self._pending_bytes += len(data)
        digest = hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:24]
        path = self._folder / f"{digest}{_SUFFIX}"
        id = self._enter(path)
        self._work.put(lambda: self._store(id, path, tokens, data))
        return id

    def delete(self, id: int) -> None:
        path = self._paths.pop(id)
        if path not in self._paths.values():
            self._work.put(lambda: path.unlink(missing_ok=True))

    def forget(self, id: int) -> None:
        """File `id` is gone."""
        self._paths.pop(id, None)

    def flush(self, seconds: float) -> bool:
        """Wait until all that was asked for is done; False when that takes longer."""
        done = threading.Event()
        self._work.put(done.set)
        return done.wait(seconds)

    def _enter(self, path: Path) -> int:
        self._next_id += 1
        self._paths[self._next_id] = path
        return self._next_id

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except OSError as error:
                _log.warning("the prefix cache on disk: %s", error)

    def _store(self, id: int, path: Path, tokens: list[int], data: bytes | memoryview) -> None:
        partial = path.with_suffix(f".{os.getpid()}.partial")
        is_stored = False
        try:
            if self._make_room(len(data)):
                self._write_file(partial, tokens, data)
                partial.replace(path)
                is_stored = True
        finally:
            with self._pending_lock:
                self._pending_bytes -= len(data)
            if not is_stored:
                self._report(Fetched(id, None))
                partial.unlink(missing_ok=True)

    def _write_file(self, path: Path, tokens: list[int], data: bytes | memoryview) -> None:
        body = np.asarray(tokens, "<i4").tobytes()
        with open(path, "wb", opener=_private) as file:
            file.write(_HEADER.pack(_MAGIC, self._key, len(tokens), len(data), _checksum(self._key, body, data)))
            file.write(body)
            file.write(data)

    def _make_room(self, size: int) -> bool:
        """Delete the files that were used longest ago, of whatever model, until `size` bytes fit the budget."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if size > self._budget or shutil.disk_usage(self._folder).free < size + _MIN_FREE_BYTES:
            return False
        files = []
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(file[1] for file in files)
        for _, file_size, path in sorted(files):
            if total + size <= self._budget:
                break
            path.unlink(missing_ok=True)
            total -= file_size
            for id in [id for id, other in list(self._paths.items()) if other == path]:
                self._report(Fetched(id, None))
        self._remove_strays()
        return True

    def _remove_strays(self) -> None:
        """Partials of runners that died while they wrote."""
        for path in self._root.glob("*/*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()

    def _read_tokens(self, path: Path) -> list[int] | None:
        """The tokens of a file whose header and length are right; the data are checked when they are read."""
        try:
            with path.open("rb") as file:
                head = file.read(_HEADER.size)
                if len(head) < _HEADER.size:
                    return None
                magic, key, num_tokens, size, _ = _HEADER.unpack(head)
                expected = _HEADER.size + 4 * num_tokens + size
                if magic != _MAGIC or key != self._key or os.fstat(file.fileno()).st_size != expected:
                    return None
                return [int(token) for token in np.frombuffer(file.read(4 * num_tokens), "<i4")]
        except OSError:
            return None

    def _load(self, path: Path) -> bytes | None:
        """The data of a file that is right in every byte; a file that is not is removed."""
        try:
            content = path.read_bytes()
            magic, key, num_tokens, size, checksum = _HEADER.unpack_from(content)
            start = _HEADER.size + 4 * num_tokens
            body, data = content[_HEADER.size : start], content[start:]
            if magic == _MAGIC and key == self._key and len(data) == size and checksum == _checksum(key, body, data):
                os.utime(path)
                return data
            _log.warning("removing a damaged prefix file: %s", path)
        except FileNotFoundError:
            return None
        except (OSError, struct.error) as error:
            _log.warning("a prefix file cannot be read: %s", error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _checksum(key: bytes, tokens: bytes, data: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(_MAGIC + key + struct.pack("<IQ", len(tokens) // 4, len(data)))
    digest.update(tokens)
    digest.update(data)
    return digest.digest()
