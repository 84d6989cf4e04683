"""Which blob an address led to last time, so that an unchanged file is not fetched again to learn its digest.

A note is a hint and no more: it counts only while the blob is in the store and the source tells the same version.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from localllm.errors import StoreError
from localllm.store.blobs import BlobStore, storage_errors


class _Note(msgspec.Struct):
    size: int
    validator: str
    digest: str


class Seen:
    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._folder = blobs.root / ".localllm" / "seen"

    def find(self, key: str, size: int | None, validator: str) -> str:
        """The bare hex digest of the blob that `key` led to in this version, "" when there is none."""
        try:
            note = msgspec.json.decode(self._path(key).read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            return ""
        is_same = bool(validator) and (note.size, note.validator) == (size, validator)
        return note.digest if is_same and self._blobs.has(note.digest) else ""

    def remember(self, key: str, size: int, validator: str, digest: str) -> None:
        path = self._path(key)
        # It only saves a download: no reason for a pull to fail.
        with contextlib.suppress(StoreError), storage_errors("noting a download"):
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".new")
            scratch.write_bytes(msgspec.json.encode(_Note(size, validator, digest)))
            scratch.replace(path)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
