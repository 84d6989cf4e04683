"""Pulling: from a name to verified blobs and a manifest.

A name gives candidate sources in order of preference. The first that answers is used; the manifest is written last, so
a model is in the store whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec

from localllm.errors import (
    DigestMismatch,
    Forbidden,
    InvalidModelFile,
    InvalidName,
    LocalLLMError,
    NotFoundAtSource,
    SourceUnavailable,
    Unauthorized,
)
from localllm.store import catalog as c
from localllm.store import manifests as m
from localllm.store import transfer
from localllm.store.blobs import BlobStore, storage_errors
from localllm.store.gguf import GGUFHeader, read_header
from localllm.store.names import ModelName, name_from_stem
from localllm.store.sources import ArchiveMember, LocalFile, Plan, PlannedFile, Source
from localllm.store.sources.hf import HuggingFaceSource
from localllm.store.sources.local import LocalSource
from localllm.store.sources.pypi import WheelSource
from localllm.store.sources.registry import RegistrySource
from localllm.store.sources.url import UrlSource

if TYPE_CHECKING:
    from localllm.store.library import ModelStore

PROGRESS_SECONDS = 0.1
_ADDRESS_HINT = "Write https://host/path/file.gguf."
_GGUF_LAYERS = frozenset({m.MODEL_LAYER, m.PROJECTOR_LAYER})
# What another source may make good; anything else is about this machine or this request.
_TRY_NEXT = (SourceUnavailable, NotFoundAtSource, Unauthorized, Forbidden)


class PullEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of progress, in Ollama's words; `digest` is "sha256:…", `total` and `completed` are bytes."""

    status: str
    digest: str = ""
    total: int | None = None
    completed: int | None = None


@dataclass(frozen=True)
class Target:
    """Where a pull puts its model, and where it may come from. `hint` is for when nothing helps."""

    name: ModelName
    sources: tuple[Source, ...]
    entry: c.CatalogEntry | None = None
    hint: str = ""


def find_target(text: str, catalog: c.Catalog, *, insecure: bool = False) -> Target:
    """What `text` asks for: a URL of a GGUF, a local path, or a name. Raises InvalidName."""
    text = text.strip()
    url = _gguf_url(text)
    if url is not None:
        return Target(name_from_stem(Path(url.path).stem), (UrlSource(text),))
    if text.startswith(("/", "./", "../", "~")):
        path = Path(text).expanduser()
        return Target(name_from_stem(path.stem), (LocalSource(path),))
    name = ModelName.parse(text)
    if name.is_hugging_face:
        return Target(name, (HuggingFaceSource(_hugging_face_spec(name)),))
    entry = catalog.find(name.model, name.tag) if name.is_short else None
    if entry is not None:
        return Target(name, tuple(map(_source, entry.sources)), entry)
    near = catalog.suggest(f"{name.model}:{name.tag}") if name.is_short else []
    hint = f"Did you mean {' or '.join(near)}?" if near else ""
    if name.is_short and not near:
        hint = "The catalogue has no such name, so only the registry was asked."
    return Target(name, (RegistrySource(name, insecure=insecure),), hint=hint)


def _gguf_url(text: str) -> httpx.URL | None:
    """The address of a GGUF file; None for what is a name. Raises InvalidName for an address that cannot be one."""
    if not text.startswith(("http://", "https://")):
        return None
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise InvalidName(f'"{text}" is not an address: {error}', hint=_ADDRESS_HINT) from None
    if not url.host:
        raise InvalidName(f'"{text}" is not an address: it names no host', hint=_ADDRESS_HINT)
    return url if url.path.lower().endswith(".gguf") else None


def _hugging_face_spec(name: ModelName) -> c.HuggingFaceSource:
    quant = "" if name.tag == "latest" else name.tag
    return c.HuggingFaceSource(f"{name.namespace}/{name.model}", quant=quant)


def _source(spec: c.SourceSpec) -> Source:
    if isinstance(spec, c.HuggingFaceSource):
        return HuggingFaceSource(spec)
    if isinstance(spec, c.WheelSource):
        return WheelSource(spec)
    return UrlSource(spec.url, sha256=spec.sha256, size=spec.size)


async def pull(store: ModelStore, text: str, *, insecure: bool = False) -> AsyncGenerator[PullEvent, None]:
    """Fetch what `text` names, reporting as Ollama does and ending with `success`.

    Raises LocalLLMError; when several sources failed, one error that tells of each. Closing the iterator stops the
    transfer and keeps what has arrived.
    """
    target = find_target(text, store.catalog, insecure=insecure)
    yield PullEvent("pulling manifest")
    failures: list[LocalLLMError] = []
    async with transfer.new_client() as client:
        for source in target.sources:
            attempt = _pull_from(store, client, target, source)
            try:
                async with contextlib.aclosing(attempt):
                    async for event in attempt:
                        yield event
                return
            except _TRY_NEXT as error:
                failures.append(error)
                if len(failures) < len(target.sources):
                    yield PullEvent(f"{error.message}; trying the next source")
    raise _all_failed(target, failures)


def _all_failed(target: Target, failures: list[LocalLLMError]) -> LocalLLMError:
    if len(failures) == 1:
        error = failures[0]
        return type(error)(
            error.message if target.name.display in error.message else f"{target.name.display}: {error.message}",
            hint=" ".join(filter(None, (target.hint, error.hint))),
            **error.details,
        )
    reasons = "; ".join(error.message for error in failures)
    return SourceUnavailable(
        f"no source of {target.name.display} could be used: {reasons}", hint="Check the network connection, then retry."
    )


async def _pull_from(
    store: ModelStore, client: httpx.AsyncClient, target: Target, source: Source
) -> AsyncGenerator[PullEvent, None]:
    plan = await source.resolve(client)
    layers: list[m.Layer] = []
    for file in plan.files:
        fetch = _Fetch(store.blobs, client, file)
        async with contextlib.aclosing(fetch.run()) as events:
            async for event in events:
                yield event
        layers.append(m.Layer(file.media_type, f"sha256:{fetch.digest}", fetch.size))
    yield PullEvent("writing manifest")
    await asyncio.to_thread(_publish, store, target, plan, layers)
    yield PullEvent("success")


def _publish(store: ModelStore, target: Target, plan: Plan, layers: list[m.Layer]) -> None:
    data = plan.manifest or _make_manifest(store.blobs, target.entry, layers)
    store.publish(target.name, data)


def _make_manifest(blobs: BlobStore, entry: c.CatalogEntry | None, layers: list[m.Layer]) -> bytes:
    """A manifest as Ollama would write it, for a source that has none; the catalogue's defaults become layers."""

    def add(media_type: str, data: bytes) -> m.Layer:
        return m.Layer(media_type, f"sha256:{blobs.add_bytes(data)}", len(data))

    model = next(layer for layer in layers if layer.media_type == m.MODEL_LAYER)
    header = read_header(blobs.path(model.digest))
    layers = list(layers)
    if entry is not None:
        if entry.parameters:
            layers.append(add(m.PARAMS_LAYER, msgspec.json.encode(entry.parameters)))
        if entry.system:
            layers.append(add(m.SYSTEM_LAYER, entry.system.encode()))
        layers.append(add(m.LICENSE_LAYER, entry.license.encode()))
    config = add(m.CONFIG_TYPE, msgspec.json.encode(_config_of(header)))
    return msgspec.json.encode(m.Manifest(config, tuple(layers)))


def _config_of(header: GGUFHeader) -> m.ModelConfig:
    return m.ModelConfig(
        model_format="gguf",
        model_family=header.architecture,
        model_families=(header.architecture,),
        model_type=header.parameter_size,
        file_type=header.file_type,
    )


class _Fetch:
    """Brings one planned file into the store; afterwards `digest` (bare hex) and `size` say what it is."""

    def __init__(self, blobs: BlobStore, client: httpx.AsyncClient, file: PlannedFile) -> None:
        self._blobs = blobs
        self._client = client
        self._file = file
        self.digest = ""
        self.size = 0
        self._done = 0
        self._total = 0

    async def run(self) -> AsyncGenerator[PullEvent, None]:
        content = self._file.content
        known = "" if isinstance(content, LocalFile) else content.sha256
        if known and self._blobs.has(known):
            self.digest, self.size = known, self._blobs.size(known)
            yield PullEvent(_title(known), f"sha256:{known}", self.size, self.size)
            return
        work = asyncio.create_task(self._fetch(content))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=PROGRESS_SECONDS)
                if self._total and not work.done():
                    yield self._progress(known)
            self.digest, self.size = work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        yield PullEvent(_title(self.digest), f"sha256:{self.digest}", self.size, self.size)
        yield PullEvent("verifying sha256 digest")

    def _progress(self, known: str) -> PullEvent:
        digest = f"sha256:{known}" if known else ""
        return PullEvent(_title(known), digest, self._total, self._done or None)

    def _report(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    async def _fetch(self, content: transfer.Remote | LocalFile | ArchiveMember) -> tuple[str, int]:
        if isinstance(content, LocalFile):
            self._total = content.path.stat().st_size
            return await asyncio.to_thread(
                self._blobs.add_file, content.path, lambda done: self._report(done, self._total)
            )
        key = f"sha256-{content.sha256}" if content.sha256 else _key_of(content)
        async with _exclusive(self._blobs, key):
            if content.sha256 and self._blobs.has(content.sha256):
                return content.sha256, self._blobs.size(content.sha256)
            partial = self._blobs.partial(key)
            if isinstance(content, ArchiveMember):
                await self._fetch_member(content, partial)
                digest, size = content.sha256, content.size
            else:
                digest, size = await transfer.download(self._client, content, partial, self._report)
            await asyncio.to_thread(self._commit, partial, digest)
            return digest, size

    def _commit(self, partial: Path, digest: str) -> None:
        """Make the verified file visible, unless it claims to be a GGUF and is none."""
        if self._file.media_type in _GGUF_LAYERS:
            try:
                read_header(partial)
            except InvalidModelFile:
                transfer.discard(partial)
                raise
        self._blobs.commit(partial, digest)

    async def _fetch_member(self, content: ArchiveMember, partial: Path) -> None:
        archive = self._blobs.partial(_key_of(content.archive))
        await transfer.download(self._client, content.archive, archive, self._report)
        try:
            await asyncio.to_thread(extract_member, archive, content, partial)
        except BaseException:
            transfer.discard(partial)
            raise
        finally:
            transfer.discard(archive)


def extract_member(archive: Path, content: ArchiveMember, target: Path) -> None:
    """Write the one member to `target` and check it. Raises DigestMismatch or NotFoundAtSource."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(archive) as bundle,
            bundle.open(content.member) as source,
            storage_errors(f"unpacking {content.member}"),
            target.open("wb") as file,
        ):
            while (chunk := source.read(transfer.CHUNK_BYTES)) and size <= content.size:
                size += len(chunk)
                digest.update(chunk)
                file.write(chunk)
    except KeyError:
        raise NotFoundAtSource(f"the package has no file {content.member}") from None
    except zipfile.BadZipFile as error:
        raise DigestMismatch(f"the package is damaged: {error}") from None
    if size != content.size or digest.hexdigest() != content.sha256:
        raise DigestMismatch(
            f"digest mismatch, file must be downloaded again: want sha256:{content.sha256}, "
            f"got sha256:{digest.hexdigest()}",
            hint="The package is not the one that the catalogue means.",
        )


@contextlib.asynccontextmanager
async def _exclusive(blobs: BlobStore, key: str) -> AsyncIterator[None]:
    """Wait, without blocking the loop, until nobody else fetches the same blob."""
    while (lock := blobs.try_lock(key)) is None:  # noqa: ASYNC110 - the other side may be another process
        await asyncio.sleep(PROGRESS_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _key_of(content: transfer.Remote | ArchiveMember) -> str:
    """A file name for what has no digest yet."""
    remote = content.archive if isinstance(content, ArchiveMember) else content
    return f"url-{hashlib.sha256(remote.url.encode()).hexdigest()[:40]}"


def _title(digest: str) -> str:
    return f"pulling {digest[:12]}" if digest else "pulling"
