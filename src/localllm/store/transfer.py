"""One resumable download: ranged, in parallel parts, with a journal of what is there.

The bytes go to a partial; `<partial>.json` says which parts of it are complete. Both survive a stop of any kind, so the
next attempt fetches only what is missing. Whether the result is the right file is decided by its sha256, at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from localllm.errors import DigestMismatch, Forbidden, NoSpace, NotFoundAtSource, SourceUnavailable, Unauthorized
from localllm.store.blobs import hash_file, storage_errors

CONNECTIONS = 4
PART_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
MAX_ATTEMPTS = 6
MAX_REDIRECTS = 10
# A connection that gives no byte for this long is dropped and opened again.
STALL_SECONDS = 30.0
CONNECT_SECONDS = 10.0
JOURNAL_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class Remote:
    """A file to fetch. `headers` may hold credentials: they go to the host of `url` and nowhere else.

    `sha256` is bare hex, "" when the source does not say; `size` in bytes, None likewise.
    """

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    sha256: str = ""
    size: int | None = None


class _Part(msgspec.Struct):
    offset: int
    size: int
    done: int = 0


class _Journal(msgspec.Struct):
    """`validator` is the ETag or date by which the source tells versions of the file apart."""

    size: int
    validator: str
    parts: list[_Part]

    @property
    def done(self) -> int:
        return sum(part.done for part in self.parts)


class _Retry(Exception):
    """Worth another attempt, after `delay` seconds if the server named them."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(reason)
        self.delay = delay


def new_client() -> httpx.AsyncClient:
    timeout = httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS, pool=None)
    # The bytes that the digest is of, not a compressed form of them.
    headers = {"User-Agent": "localllm", "Accept-Encoding": "identity"}
    return httpx.AsyncClient(timeout=timeout, follow_redirects=False, headers=headers)


@contextlib.asynccontextmanager
async def open_url(
    client: httpx.AsyncClient, url: str, headers: dict[str, str], method: str = "GET"
) -> AsyncIterator[httpx.Response]:
    """Send a request and follow redirects by hand: no credentials to another host, none from public to private.

    Raises httpx.TransportError as it comes, SourceUnavailable for a redirect that is refused.
    """
    origin = httpx.URL(url).host
    for _ in range(MAX_REDIRECTS):
        here = httpx.URL(url)
        safe = headers if here.host == origin else {k: v for k, v in headers.items() if k.lower() != "authorization"}
        async with client.stream(method, here, headers=safe) as response:
            if not response.has_redirect_location:
                yield response
                return
            url = str(here.join(response.headers["Location"]))
        await _check_redirect(here.host, httpx.URL(url))
    raise SourceUnavailable(f"{origin} redirects without end")


async def _check_redirect(origin: str, target: httpx.URL) -> None:
    if target.scheme not in ("http", "https"):
        raise SourceUnavailable(f"{origin} redirects to {target.scheme}:, which is refused")
    if target.host != origin and await _is_private(target.host) and not await _is_private(origin):
        raise SourceUnavailable(
            f"{origin} redirects to {target.host}, an address inside a private network, which is refused"
        )


async def _is_private(host: str) -> bool:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_global for entry in found)


def check_status(response: httpx.Response, what: str) -> None:
    """Raise the error that a status means; _Retry for those that may pass."""
    code = response.status_code
    if code in (200, 206):
        return
    if code == 401:
        raise Unauthorized(f"{what} needs credentials", hint="For Hugging Face, log in or set HF_TOKEN.")
    if code == 403:
        raise Forbidden(
            f"access to {what} is refused", hint="Accept its licence where it is published, then try again."
        )
    if code in (404, 410):
        raise NotFoundAtSource(f"{what} does not exist")
    if code in (408, 425, 429) or code >= 500:
        raise _Retry(f"{what}: the server answered {code}", _retry_after(response))
    raise SourceUnavailable(f"{what}: the server answered {code}")


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return min(float(text), MAX_BACKOFF_SECONDS) if text.isdigit() else None


def num_bytes_done(partial: Path) -> int:
    """How much of a download an earlier attempt has left behind."""
    journal = _read_journal(partial)
    return journal.done if journal else 0


def discard(partial: Path) -> None:
    """Forget a partial and its journal."""
    partial.unlink(missing_ok=True)
    _journal_path(partial).unlink(missing_ok=True)


async def download(
    client: httpx.AsyncClient, remote: Remote, partial: Path, report: Callable[[int, int], None]
) -> tuple[str, int]:
    """Fetch `remote` into `partial`; returns the bare hex sha256 and the size of what arrived.

    `report` gets bytes done and bytes in all. Raises DigestMismatch (the partial is gone then), NoSpace (the partial
    stays), SourceUnavailable, NotFoundAtSource, Unauthorized or Forbidden. May be cancelled at any time.
    """
    transfer = _Transfer(client, remote, partial, report)
    await transfer.run()
    digest = await asyncio.to_thread(hash_file, partial)
    if remote.sha256 and digest != remote.sha256:
        discard(partial)
        raise DigestMismatch(
            f"digest mismatch, file must be downloaded again: want sha256:{remote.sha256}, got sha256:{digest}",
            hint="The source or something on the way changed the file.",
        )
    _journal_path(partial).unlink(missing_ok=True)
    return digest, partial.stat().st_size


def _journal_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _read_journal(partial: Path) -> _Journal | None:
    try:
        journal = msgspec.json.decode(_journal_path(partial).read_bytes(), type=_Journal)
    except (OSError, msgspec.MsgspecError):
        return None
    return journal if partial.exists() and partial.stat().st_size == journal.size else None


class _Transfer:
    """One attempt at a file: owns the partial, its journal and the open connections."""

    def __init__(
        self, client: httpx.AsyncClient, remote: Remote, partial: Path, report: Callable[[int, int], None]
    ) -> None:
        self._client = client
        self._remote = remote
        self._partial = partial
        self._report = report
        self._what = httpx.URL(remote.url).path.rsplit("/", 1)[-1] or remote.url
        self._journal = _Journal(0, "", [])
        self._file = -1
        self._saved_at = 0.0

    async def run(self) -> None:
        size, validator, has_ranges = await self._retrying(self._probe)
        if self._remote.size is not None and size is not None and size != self._remote.size:
            raise SourceUnavailable(f"{self._what} has {size} bytes where {self._remote.size} were promised")
        size = size if size is not None else self._remote.size
        if not has_ranges or size is None:
            await self._retrying(lambda: self._fetch_whole(size))
            return
        self._open_journal(size, validator)
        try:
            await self._fetch_parts()
        finally:
            self._save_journal()
            os.close(self._file)

    async def _retrying(self, action: Callable[[], Awaitable[T]]) -> T:
        """Await `action()` until it succeeds; gives up after MAX_ATTEMPTS attempts without progress."""
        failures, before = 0, -1
        while True:
            try:
                return await action()
            except (httpx.TransportError, _Retry) as error:
                failures = 1 if self._journal.done > before >= 0 else failures + 1
                before = self._journal.done
                # A host that cannot be reached at all is not worth waiting for: another source may answer.
                if failures >= MAX_ATTEMPTS or (isinstance(error, httpx.ConnectError) and before == 0):
                    raise SourceUnavailable(f"{self._what}: {error or type(error).__name__}") from None
                delay = error.delay if isinstance(error, _Retry) and error.delay is not None else 0.25 * 2**failures
                await asyncio.sleep(min(delay, MAX_BACKOFF_SECONDS))

    async def _probe(self) -> tuple[int | None, str, bool]:
        """Size, validator, and whether ranges work, learnt from asking for the first byte."""
        async with open_url(self._client, self._remote.url, {**self._remote.headers, "Range": "bytes=0-0"}) as response:
            headers = response.headers
            validator = headers.get("ETag") or headers.get("Last-Modified") or ""
            if response.status_code == 206:
                total = headers.get("Content-Range", "").rpartition("/")[2]
                return (int(total) if total.isdigit() else None), validator, True
            check_status(response, self._what)
            length = headers.get("Content-Length", "")
            return (int(length) if length.isdigit() else None), validator, False

    def _open_journal(self, size: int, validator: str) -> None:
        """Go on with an earlier attempt at the same file, or begin anew."""
        journal = _read_journal(self._partial)
        if journal is None or journal.size != size or (journal.validator != validator and not self._remote.sha256):
            discard(self._partial)
            offsets = range(0, size, PART_BYTES)
            journal = _Journal(size, validator, [_Part(o, min(PART_BYTES, size - o)) for o in offsets])
        self._journal = journal
        self._check_space(size - journal.done)
        with storage_errors("writing the download"):
            self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o644)
            os.truncate(self._file, size)
        self._report(journal.done, size)

    def _check_space(self, missing: int) -> None:
        free = shutil.disk_usage(self._partial.parent).free
        if free < missing:
            raise NoSpace(
                f"{self._what} needs {missing} more bytes and the disk has {free} free: {missing - free} are missing",
                hint="Free some space, for example with `localllm rm`; what was downloaded is kept.",
                missing_bytes=missing - free,
            )

    async def _fetch_parts(self) -> None:
        pending = iter([part for part in self._journal.parts if part.done < part.size])

        async def worker() -> None:
            for part in pending:
                await self._retrying(functools.partial(self._fetch_part, part))

        workers = [asyncio.create_task(worker()) for _ in range(CONNECTIONS)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _fetch_part(self, part: _Part) -> None:
        start, end = part.offset + part.done, part.offset + part.size
        headers = {**self._remote.headers, "Range": f"bytes={start}-{end - 1}"}
        async with open_url(self._client, self._remote.url, headers) as response:
            check_status(response, self._what)
            if response.status_code != 206:
                raise _Retry(f"{self._what}: the server stopped honouring ranges")
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise _Retry(f"{self._what}: the server sent another range than it was asked for")
            async for chunk in response.aiter_raw():
                chunk = chunk[: end - part.offset - part.done]
                with storage_errors("writing the download"):
                    os.pwrite(self._file, chunk, part.offset + part.done)
                part.done += len(chunk)
                self._on_progress()
        if part.done < part.size:
            raise _Retry(f"{self._what}: the connection closed early")

    def _on_progress(self) -> None:
        self._report(self._journal.done, self._journal.size)
        if time.monotonic() - self._saved_at > JOURNAL_SECONDS:
            self._save_journal()

    def _save_journal(self) -> None:
        """Bytes before the journal: what it claims must be on disk."""
        self._saved_at = time.monotonic()
        with storage_errors("writing the download"):
            os.fsync(self._file)
            scratch = self._partial.with_name(self._partial.name + ".json.new")
            scratch.write_bytes(msgspec.json.encode(self._journal))
            scratch.replace(_journal_path(self._partial))

    async def _fetch_whole(self, size: int | None) -> None:
        """For servers without ranges: from the beginning, in one stream."""
        discard(self._partial)
        self._check_space(size or 0)
        done = 0
        async with open_url(self._client, self._remote.url, self._remote.headers) as response:
            check_status(response, self._what)
            with storage_errors("writing the download"), self._partial.open("wb") as file:
                async for chunk in response.aiter_raw():
                    file.write(chunk)
                    done += len(chunk)
                    self._report(done, size or done)
        if size is not None and done != size:
            raise _Retry(f"{self._what}: the connection closed early")
