"""Content-addressed files: `blobs/sha256-<64 hex>`, Ollama's layout.

A blob is visible only when it is whole: it grows under a partial's name and is renamed after its digest was verified.
Locks live beside the layout, in `.localllm/locks`, since Ollama deletes what it does not know among the blobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import BaseFileLock, FileLock, Timeout

from localllm.errors import InvalidRequest, NoSpace, StoreError

_DIGEST = re.compile(r"(?:sha256[:-])?([0-9a-f]{64})")
_KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")
_CHUNK = 1 << 20
_FICLONE = 0x40049409  # linux/fs.h

LOCK_SECONDS = 30.0


def hex_digest(digest: str) -> str:
    """The bare 64 hex digits of `sha256:…`, `sha256-…` or themselves: the one place where digests are checked.

    Raises InvalidRequest for anything else, so that no path is ever made of unchecked text.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise InvalidRequest(f"invalid digest format: {digest[:80]!r}", hint="A digest is sha256: and 64 hex digits.")
    return match[1]


def hash_file(path: Path, on_progress: Callable[[int], None] = lambda _done: None) -> str:
    """sha256 of a file as bare hex; `on_progress` gets the number of bytes read so far.

    What is appended meanwhile is not followed to its end, which may never come.
    """
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while done <= size and (chunk := file.read(_CHUNK)):
            digest.update(chunk)
            done += len(chunk)
            on_progress(done)
    return digest.hexdigest()


def is_file(path: Path) -> bool:
    """Like Path.is_file, but False also where a folder on the way may not be searched."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def storage_errors(action: str) -> Iterator[None]:
    """Turn OSErrors of the store's own files into errors that a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"{action}: the disk is full", hint="Free some space, for example with `localllm rm`."
            ) from None
        raise StoreError(
            f"{action}: {error.strerror or error}",
            hint="Check the folder named by LOCALLLM_MODELS and its permissions.",
        ) from None


class BlobStore:
    def __init__(self, root: Path) -> None:
        """`root` is the store's folder; it and what is in it are made when they are first written to."""
        self.root = root
        self.folder = root / "blobs"
        self._locks = root / ".localllm" / "locks"

    def path(self, digest: str) -> Path:
        return self.folder / f"sha256-{hex_digest(digest)}"

    def has(self, digest: str) -> bool:
        return is_file(self.path(digest))

    def size(self, digest: str) -> int:
        """Bytes on disk; 0 when the blob is absent."""
        try:
            return self.path(digest).stat().st_size
        except OSError:
            return 0

    def partial(self, key: str) -> Path:
        """Where the bytes for a digest, or for any other key of plain characters, grow."""
        with contextlib.suppress(InvalidRequest):
            key = f"sha256-{hex_digest(key)}"
        assert _KEY.fullmatch(key), "a partial's key must be usable as a file name"
        self._make_folders()
        return self.folder / f"{key}-partial"

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Exclude other processes and threads from what `key` names. Raises StoreError after LOCK_SECONDS."""
        lock = self.try_lock(key, LOCK_SECONDS)
        if lock is None:
            raise StoreError(
                f"another process has been using {key} for more than {LOCK_SECONDS:g} s",
                hint="Try again when it is done.",
            )
        try:
            yield
        finally:
            lock.release()

    def try_lock(self, key: str, timeout: float = 0.0) -> BaseFileLock | None:
        """The lock of `key`, to be released by the caller; None when somebody else keeps it for `timeout` seconds."""
        assert _KEY.fullmatch(key), "a lock's key must be usable as a file name"
        self._make_folders()
        lock = FileLock(self._locks / key, timeout=timeout, thread_local=False)
        # A Timeout is an OSError too, but it only means that somebody else has the lock.
        with storage_errors("locking the store"):
            try:
                lock.acquire()
            except Timeout:
                return None
        return lock

    def commit(self, partial: Path, digest: str) -> Path:
        """Make a partial visible as the blob of `digest`, which the caller has verified. Survives a power cut."""
        target = self.path(digest)
        with storage_errors("storing a blob"):
            sync(partial)
            partial.replace(target)
            sync(self.folder)
        return target

    def add_bytes(self, data: bytes) -> str:
        """Store `data`; returns its bare hex digest."""
        digest = hashlib.sha256(data).hexdigest()
        if not self.has(digest):
            with storage_errors("storing a blob"), self._scratch() as scratch:
                scratch.write_bytes(data)
                self.commit(scratch, digest)
        return digest

    def add_file(self, source: Path, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, int]:
        """Take in a file without touching it: a reflink, else a hard link, else a copy. Returns hex digest and size.

        Raises InvalidRequest when the file cannot be read or changes meanwhile, NoSpace when it has to be copied and
        does not fit.
        """
        before = _version(source)
        try:
            digest = hash_file(source, on_progress)
        except OSError as error:
            raise InvalidRequest(f"{source} cannot be read: {error.strerror}") from None
        action = f"storing {source.name} ({before.size / 1e6:,.1f} MB)"
        if not self.has(digest):
            with storage_errors(action), self._scratch() as scratch:
                _link_or_copy(source, scratch)
                if _version(source) != before:
                    raise InvalidRequest(f"{source} changed while it was read", hint="Try again when it is complete.")
                self.commit(scratch, digest)
        return digest, before.size

    @contextlib.contextmanager
    def writer(self, digest: str) -> Iterator[BlobWriter]:
        """Takes in bytes as they come; nothing of them stays unless they are committed in the end."""
        with self._scratch() as scratch, storage_errors("storing a blob"), scratch.open("wb") as file:
            yield BlobWriter(file, lambda: self.commit(scratch, digest), hex_digest(digest))

    def remove(self, digest: str) -> int:
        """Delete a blob; returns the bytes that this frees: none while a user's own file is hard-linked to it."""
        path = self.path(digest)
        with storage_errors("removing a blob"):
            try:
                found = path.stat()
                path.unlink()
            except FileNotFoundError:
                return 0
        return found.st_size if found.st_nlink == 1 else 0

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A name in the blobs' folder, on which nothing stays if the block fails."""
        self._make_folders()
        folder = Path(tempfile.mkdtemp(prefix="scratch-", suffix="-partial", dir=self.folder))
        try:
            yield folder / "blob"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _make_folders(self) -> None:
        with storage_errors("making the store's folders"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(parents=True, exist_ok=True)


class BlobWriter:
    def __init__(self, file: BinaryIO, commit: Callable[[], object], digest: str) -> None:
        self._file = file
        self._commit = commit
        self._wanted = digest
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Raises NoSpace or StoreError."""
        self._digest.update(data)
        with storage_errors("storing a blob"):
            self._file.write(data)

    def commit(self) -> None:
        """Make what was written visible. Raises InvalidRequest when it is not what the digest promises."""
        found = self._digest.hexdigest()
        if found != self._wanted:
            raise InvalidRequest(
                f'digest mismatch, expected "sha256:{self._wanted}", got "sha256:{found}"', hint="Send the file again."
            )
        with storage_errors("storing a blob"):
            self._file.flush()
        self._commit()


@dataclass(frozen=True)
class _Version:
    """Differs for a file that was replaced or written to; links to it make no difference."""

    inode: int
    size: int
    mtime_ns: int


def _version(path: Path) -> _Version:
    """Raises InvalidRequest for what is not a regular file: a device or a pipe may never end."""
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"{path} is not a file", hint="Name a GGUF file.")
    return _Version(found.st_ino, found.st_size, found.st_mtime_ns)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_or_copy(source: Path, target: Path) -> None:
    """A reflink shares the bytes until one side changes; a hard link shares the file; a copy always works."""
    if _reflink(source, target):
        return
    try:
        os.link(source.resolve(), target)
    except OSError:
        _check_space(source, target.parent)
        shutil.copyfile(source, target)


def _check_space(source: Path, folder: Path) -> None:
    needed, free = source.stat().st_size, shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpace(
            f"copying {source.name} into the store needs {needed / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB "
            f"free: {(needed - free) / 1e6:,.1f} MB are missing",
            hint="Free some space, for example with `localllm rm`.",
            needed_bytes=needed,
            missing_bytes=needed - free,
        )


def _reflink(source: Path, target: Path) -> bool:
    """Whether the file system could make `target` share the bytes of `source`; if not, there is no `target`."""
    if sys.platform == "darwin":
        clonefile = getattr(ctypes.CDLL(None), "clonefile", None)
        return clonefile is not None and clonefile(os.fsencode(source), os.fsencode(target), 0) == 0
    import fcntl

    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            fcntl.ioctl(writer, _FICLONE, reader.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
