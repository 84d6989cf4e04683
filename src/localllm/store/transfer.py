"""One resumable download: ranged, in parallel parts, with a journal of what is there.

Whether the result is the right file is decided by its sha256, at the end. A file that changes at its source while it is
downloaded is begun anew; a server that has no ranges is read in one stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from localllm.errors import DigestMismatch, NoSpace, SourceUnavailable
from localllm.store import web
from localllm.store.blobs import storage_errors
from localllm.store.partial import Journal, Part, PartialFile, discard, read_journal
from localllm.store.web import Authorize, Remote, Retry, retrying

CONNECTIONS = 4
# A part is a request; a file has about NUM_PARTS of them, within these bounds (bytes).
NUM_PARTS = 32
MIN_PART_BYTES = 32 << 20
MAX_PART_BYTES = 256 << 20
# What is received is written in blocks of this size (bytes), but not later than after WRITE_SECONDS.
BLOCK_BYTES = 1 << 20
WRITE_SECONDS = 0.2
JOURNAL_SECONDS = 1.0
MAX_RESTARTS = 3
_HASH_BYTES = 32 << 20

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class FileInfo:
    """What the server says about the file: `size` in bytes or None, `validator` to tell its versions apart."""

    size: int | None
    validator: str
    has_ranges: bool


class _Changed(Exception):
    """The file at the source is another one than when the download began."""


class _NoRanges(Exception):
    """The server sends whole files only."""


async def probe(client: httpx.AsyncClient, remote: Remote) -> FileInfo:
    """Ask for the first byte to learn size, version and whether ranges work. Raises what `download` raises."""
    return await _Requests(client, remote).probe()


async def download(
    client: httpx.AsyncClient,
    remote: Remote,
    partial: Path,
    report: Report,
    *,
    on_verify: Callable[[], None] = lambda: None,
    also_needed: int = 0,
) -> tuple[str, int]:
    """Fetch `remote` into `partial`; returns the bare hex sha256 and the size of what arrived.

    `report` gets bytes done and bytes in all, `on_verify` is called before hashing begins, `also_needed` bytes of disk
    must be free besides. Raises DigestMismatch (the partial is gone then), NoSpace (the partial stays),
    SourceUnavailable, NotFoundAtSource, Unauthorized or Forbidden. May be cancelled at any time.
    """
    while True:
        transfer = _Transfer(client, remote, partial, report, also_needed)
        await transfer.run()
        on_verify()
        digest = await hash_partial(partial)
        if remote.sha256 in ("", digest):
            return digest, partial.stat().st_size
        discard(partial)
        # Bytes of an earlier attempt may be to blame; those of this one are the source's.
        if not transfer.was_resumed:
            raise DigestMismatch(
                f"digest mismatch, file must be downloaded again: want sha256:{remote.sha256}, got sha256:{digest}",
                hint="The source or something on the way changed the file.",
            )


async def hash_partial(path: Path) -> str:
    """sha256 of a file as bare hex, read on other threads, a piece at a time so that it can be cancelled."""
    digest = hashlib.sha256()
    with storage_errors("reading the download"), path.open("rb") as file:
        while await asyncio.to_thread(_hash_piece, digest, file):
            pass
    return digest.hexdigest()


def _hash_piece(digest: Any, file: Any) -> bool:
    for _ in range(_HASH_BYTES // BLOCK_BYTES):
        block = file.read(BLOCK_BYTES)
        if not block:
            return False
        digest.update(block)
    return True


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise NoSpace, with the number of bytes that are missing, if fewer than `needed` bytes are free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _no_space(what, needed, free)


def _no_space(what: str, needed: int, free: int) -> NoSpace:
    return NoSpace(
        f"{what} needs {needed / 1e6:,.1f} MB more and the disk has {free / 1e6:,.1f} MB free: "
        f"{(needed - free) / 1e6:,.1f} MB are missing",
        hint="Free some space, for example with `localllm rm`; what was downloaded is kept.",
        needed_bytes=needed,
        missing_bytes=needed - free,
    )


class _Requests:
    """The requests for one file: renews credentials, and knows how to read the answers."""

    def __init__(self, client: httpx.AsyncClient, remote: Remote) -> None:
        self._client = client
        self._remote = remote
        self._headers = remote.headers
        self._renewal = asyncio.Lock()
        self.host = httpx.URL(remote.url).host

    @contextlib.asynccontextmanager
    async def get(self, byte_range: str = "") -> AsyncIterator[httpx.Response]:
        sent = self._headers
        headers = {**sent, "Range": f"bytes={byte_range}"} if byte_range else sent
        async with web.open_url(self._client, self._remote.url, headers) as response:
            if response.status_code == 401 and self._remote.authorize is not None:
                await self._renew(sent, response.headers.get("WWW-Authenticate", ""), self._remote.authorize)
                raise Retry(f"{self.host} does not accept its own credentials for {self._remote.file_name}", 0.0)
            yield response

    async def _renew(self, sent: dict[str, str], challenge: str, authorize: Authorize) -> None:
        """Get new credentials, unless another request has done so since `sent`."""
        async with self._renewal:
            if self._headers is sent:
                self._headers = await authorize(self._client, challenge)

    async def probe(self) -> FileInfo:
        return await retrying(self._probe, self.host)

    async def _probe(self) -> FileInfo:
        async with self.get("0-0") as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code == 206 or (response.status_code == 416 and total == "0"):
                return FileInfo(int(total) if total.isdigit() else None, validator_of(response), total != "0")
            web.check_status(response, self._remote.file_name)
            length = response.headers.get("Content-Length", "")
            return FileInfo(int(length) if length.isdigit() else None, validator_of(response), False)


def validator_of(response: httpx.Response) -> str:
    return str(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


class _Transfer:
    """One attempt at a file: owns the partial, its journal and the open connections."""

    def __init__(
        self, client: httpx.AsyncClient, remote: Remote, partial: Path, report: Report, also_needed: int
    ) -> None:
        self._requests = _Requests(client, remote)
        self._remote = remote
        self._partial = partial
        self._report = report
        self._also_needed = also_needed
        self._what = remote.file_name
        self._size: int | None = None
        self._journal = Journal(0, "", [])
        # Bytes that this attempt has got: the progress that earns a failing connection more patience.
        self._num_received = 0
        self.was_resumed = False

    async def run(self) -> None:
        for _ in range(MAX_RESTARTS):
            info = await self._requests.probe()
            self._size = self._agreed_size(info)
            try:
                if info.has_ranges and self._size is not None:
                    with contextlib.suppress(_NoRanges):
                        return await self._fetch_parts(self._size, info.validator)
                return await retrying(self._fetch_whole, self._requests.host, lambda: self._num_received)
            except _Changed:
                discard(self._partial)
        raise SourceUnavailable(f"{self._what} keeps changing while it is downloaded", hint="Try again later.")

    def _agreed_size(self, info: FileInfo) -> int | None:
        promised = self._remote.size
        if promised is not None and info.size is not None and info.size != promised:
            raise SourceUnavailable(
                f"{self._requests.host} has {info.size} bytes of {self._what} where {promised} were promised"
            )
        return promised if info.size is None else info.size

    async def _fetch_parts(self, size: int, validator: str) -> None:
        self._journal = self._resume(size, validator)
        self._check_space(size - self._journal.done)
        with storage_errors("writing the download"):
            file = PartialFile(self._partial, self._journal, size=size)
        try:
            self._report(self._journal.done, size)
            pending = iter([part for part in self._journal.parts if part.done < part.size])
            await _together(
                [self._work(file, pending) for _ in range(CONNECTIONS)],
                _every(JOURNAL_SECONDS, file.save),
            )
        except NoSpace as error:
            raise self._out_of_space(error) from None
        finally:
            await file.close(keep=True)

    def _resume(self, size: int, validator: str) -> Journal:
        """The journal of an earlier attempt at the same file, or a new one.

        Where the sha256 is known the validator does not matter: mirrors and caches have their own.
        """
        journal = read_journal(self._partial)
        if journal and journal.size == size and (self._remote.sha256 or (validator and journal.validator == validator)):
            self.was_resumed = journal.done > 0
            return journal
        discard(self._partial)
        step = max(MIN_PART_BYTES, min(MAX_PART_BYTES, size // NUM_PARTS))
        return Journal(size, validator, [Part(at, min(step, size - at)) for at in range(0, size, step)])

    async def _work(self, file: PartialFile, pending: Iterator[Part]) -> None:
        for part in pending:
            fetch = functools.partial(self._fetch_part, file, part)
            await retrying(fetch, self._requests.host, lambda: self._num_received)

    async def _fetch_part(self, file: PartialFile, part: Part) -> None:
        start, end = part.offset + part.done, part.offset + part.size
        async with self._requests.get(f"{start}-{end - 1}") as response:
            self._check_part(response, start)
            await self._receive(response, file, part)
        if part.done < part.size:
            raise Retry(f"{self._requests.host} closed the connection before the end of {self._what}")

    def _check_part(self, response: httpx.Response, start: int) -> None:
        if response.status_code == 416:
            raise _Changed
        web.check_status(response, self._what)
        if response.status_code != 206:
            raise _NoRanges
        given, _, total = response.headers.get("Content-Range", "").partition("/")
        has_changed = validator_of(response) != self._journal.validator and not self._remote.sha256
        if has_changed or (total.isdigit() and int(total) != self._journal.size):
            raise _Changed
        if not given.startswith(f"bytes {start}-"):
            raise Retry(f"{self._requests.host} sent another range of {self._what} than it was asked for")

    async def _receive(self, response: httpx.Response, file: PartialFile, part: Part) -> None:
        """Write the body to the part in blocks, and what there is of it when the connection breaks."""
        chunks: list[bytes] = []
        num_bytes, written_at = 0, 0.0
        try:
            async for chunk in response.aiter_raw():
                chunks.append(chunk)
                num_bytes += len(chunk)
                now = time.monotonic()
                if num_bytes >= BLOCK_BYTES or now - written_at >= WRITE_SECONDS:
                    block, chunks, num_bytes, written_at = b"".join(chunks), [], 0, now
                    await self._write(file, part, block)
        finally:
            await self._write(file, part, b"".join(chunks))

    async def _write(self, file: PartialFile, part: Part, block: bytes) -> None:
        # A server may send more than it was asked for.
        data = block[: part.size - part.done]
        if not data:
            return
        await file.write(part, data)
        self._num_received += len(data)
        self._report(self._journal.done, self._journal.size or self._journal.done)

    async def _fetch_whole(self) -> None:
        """For servers without ranges: from the beginning, in one stream."""
        discard(self._partial)
        self._check_space(self._size or 0)
        part = Part(0, self._size if self._size is not None else 1 << 62)
        self._journal = Journal(self._size or 0, "", [part])
        furthest, self._num_received = self._num_received, 0
        file = PartialFile(self._partial, self._journal, size=0)
        try:
            async with self._requests.get() as response:
                web.check_status(response, self._what)
                await self._receive(response, file, part)
        except NoSpace as error:
            raise self._out_of_space(error) from None
        finally:
            # Beginning again is no progress until it is further than before.
            self._num_received = max(self._num_received, furthest)
            await file.close(keep=False)
        if self._size is not None and part.done != self._size:
            raise Retry(f"{self._requests.host} closed the connection before the end of {self._what}")

    def _check_space(self, missing: int) -> None:
        with storage_errors("looking at the disk"):
            check_space(self._partial.parent, missing + self._also_needed, self._what)

    def _out_of_space(self, error: NoSpace) -> NoSpace:
        """The same with numbers, unless a quota makes the free space a lie."""
        free = shutil.disk_usage(self._partial.parent).free
        needed = self._journal.size - self._journal.done + self._also_needed
        return _no_space(self._what, needed, free) if needed > free else error


async def _every(seconds: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await action()


async def _together(workers: list[Coroutine[Any, Any, None]], helper: Coroutine[Any, Any, None]) -> None:
    """Run the workers until all are done or one fails, and the helper meanwhile; nothing of them is left running."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    others = asyncio.create_task(helper)
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, others):
            task.cancel()
        await asyncio.gather(*tasks, others, return_exceptions=True)
