"""A download that is not finished: the file that grows, and beside it a journal of which parts of it are there.

Both survive a stop of any kind, so that the next attempt fetches only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from localllm.errors import StoreError
from localllm.store.blobs import storage_errors

_ACTION = "writing the download"
# One for writing while the other waits for the disk to have what was written before.
_NUM_THREADS = 2


class Part(msgspec.Struct):
    """`done` bytes from `offset` on are there; all in bytes."""

    offset: int
    size: int
    done: int = 0


class Journal(msgspec.Struct):
    """`validator` is the ETag or date by which the source tells versions of the file apart."""

    size: int
    validator: str
    parts: list[Part]

    @property
    def done(self) -> int:
        return sum(part.done for part in self.parts)


def journal_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _scratch_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".new")


def read_journal(partial: Path) -> Journal | None:
    """What an earlier attempt has left behind; None when that is nothing, or nothing that makes sense."""
    try:
        journal = msgspec.json.decode(journal_path(partial).read_bytes(), type=Journal)
        has_file = partial.stat().st_size == journal.size
    except (OSError, msgspec.MsgspecError):
        return None
    end = 0
    for part in journal.parts:
        if part.offset != end or not 0 <= part.done <= part.size:
            return None
        end += part.size
    return journal if has_file and end == journal.size else None


def discard(partial: Path) -> None:
    """Forget a partial and its journal."""
    with storage_errors("removing the download"):
        for path in (journal_path(partial), _scratch_path(partial), partial):
            path.unlink(missing_ok=True)


class PartialFile:
    """A partial open for writing. What touches the disk is done on threads of its own, never on the event loop's."""

    def __init__(self, path: Path, journal: Journal, *, size: int) -> None:
        """Opens `path`, makes it `size` bytes long and keeps what is in it. Raises StoreError or NoSpace."""
        self._path = path
        self._journal = journal
        with storage_errors(_ACTION):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.truncate(self._file, size)
            except OSError:
                os.close(self._file)
                raise
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="localllm-download")

    async def write(self, part: Part, data: bytes) -> None:
        """Append to a part. The part counts it when it is written, so a cancelled call costs the data and no more."""
        await self._run(_write_all, self._file, data, part.offset + part.done)
        part.done += len(data)

    async def save(self) -> None:
        """Write the journal of what is there now, once the disk has it."""
        await self._run(self._save, msgspec.json.encode(self._journal))

    async def close(self, *, keep: bool) -> None:
        """Ends all writing; `keep` saves the journal as it is then, otherwise the file is cut to what was written."""
        await asyncio.to_thread(self._close, keep)

    async def _run(self, action: Callable[..., None], *arguments: Any) -> None:
        with storage_errors(_ACTION):
            await asyncio.get_running_loop().run_in_executor(self._threads, action, *arguments)

    def _save(self, journal: bytes) -> None:
        # The bytes before the journal: what it claims must be on disk.
        _flush(self._file)
        scratch = _scratch_path(self._path)
        scratch.write_bytes(journal)
        scratch.replace(journal_path(self._path))

    def _close(self, keep: bool) -> None:
        self._threads.shutdown()
        try:
            # On a full disk the journal of a moment ago has to do.
            with contextlib.suppress(OSError, StoreError):
                if keep:
                    self._save(msgspec.json.encode(self._journal))
                else:
                    os.truncate(self._file, self._journal.done)
        finally:
            os.close(self._file)


def _write_all(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


# macOS has no fdatasync.
_flush: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
