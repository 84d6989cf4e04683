"""Where models come from: one module per kind of source.

A source resolves to a `Plan`, which says what to fetch; `store.pull` fetches, verifies and stores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from localllm.store.transfer import Remote


@dataclass(frozen=True)
class LocalFile:
    path: Path


@dataclass(frozen=True)
class ArchiveMember:
    """A file inside a zip archive; `sha256` (bare hex) and `size` are the member's."""

    archive: Remote
    member: str
    sha256: str
    size: int


@dataclass(frozen=True)
class PlannedFile:
    """One blob to be: its layer type and where its bytes are."""

    media_type: str
    content: Remote | LocalFile | ArchiveMember


@dataclass(frozen=True)
class Plan:
    """Everything that a model consists of. `manifest` is set when the source has one, to be stored as it is."""

    files: tuple[PlannedFile, ...]
    manifest: bytes | None = None


class Source(Protocol):
    """`label` names the source to a person."""

    label: str

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        """Ask the source. Raises SourceUnavailable, NotFoundAtSource, Unauthorized, Forbidden or Unsupported."""
        ...
