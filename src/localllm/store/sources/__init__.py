"""Where models come from: one module per kind of source.

A source resolves to a `Plan`, which says what to fetch; `store.pull` fetches, verifies and stores it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import httpx

from localllm.errors import Unsupported
from localllm.store.web import Remote

_SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)

T = TypeVar("T")


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
    """`label` names the source to a person; sources of one `place` (a server, mostly) are reached or not together."""

    label: str
    place: str

    async def resolve(self, client: httpx.AsyncClient) -> Plan:
        """Ask the source. Raises SourceUnavailable, NotFoundAtSource, Unauthorized, Forbidden or Unsupported."""
        ...


def is_split(name: str) -> bool:
    """Whether a file name is that of one part of a model in several files."""
    return _SPLIT.search(name) is not None


def without_split(name: str) -> str:
    return _SPLIT.sub("", name)


def refuse_split(name: str) -> None:
    """Raises Unsupported for one part of a model in several files."""
    if is_split(name):
        raise Unsupported(
            f"{name} is one part of a model in several files, which cannot be pulled yet",
            hint="Choose a quantisation that is a single file, or join the parts with llama-gguf-split --merge.",
        )


async def call_blocking(function: Callable[[], T], seconds: float) -> T:
    """`function()` on a thread of its own; raises TimeoutError after `seconds`, and leaves the thread to end by itself.

    For clients of other libraries, whose time limits are for each of a server's addresses. The thread is a daemon:
    nobody has to wait for it at exit.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            result = function()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="localllm-source", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(outcome), seconds)
    except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(f"no answer within {seconds:g} s") from None
