"""Pulling: from a name to verified blobs and a manifest.

A name gives candidate sources in order of preference. The first that answers is used; the manifest is written last, so
a model is in the store whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import httpx
import msgspec

from localllm.errors import (
    Forbidden,
    InvalidModelFile,
    LocalLLMError,
    NotFoundAtSource,
    SourceUnavailable,
    Unauthorized,
    Unsupported,
)
from localllm.store import manifests as m
from localllm.store import web
from localllm.store.blobs import BlobStore
from localllm.store.catalog import CatalogEntry
from localllm.store.fetch import Fetch, PullEvent, num_bytes_missing
from localllm.store.gguf import GGUFHeader, read_header
from localllm.store.sources import Plan, Source
from localllm.store.target import Target, find_target
from localllm.store.transfer import check_space

if TYPE_CHECKING:
    from localllm.store.library import ModelStore

__all__ = ["PullEvent", "pull"]

# What another source may make good; anything else is about this machine or this request.
_TRY_NEXT = (SourceUnavailable, NotFoundAtSource, Unauthorized, Forbidden, Unsupported, InvalidModelFile)


async def pull(store: ModelStore, text: str, *, insecure: bool = False) -> AsyncGenerator[PullEvent, None]:
    """Fetch what `text` names, reporting as Ollama does and ending with `success`.

    Raises LocalLLMError; when several sources failed, one error that tells of each. Closing the iterator stops the
    transfer and keeps what has arrived.
    """
    target = find_target(text, store.catalog, insecure=insecure)
    yield PullEvent("pulling manifest")
    failures: list[LocalLLMError] = []
    sources = list(target.sources)
    # Reading the certificates takes a while.
    async with await asyncio.to_thread(web.new_client) as client:
        while sources:
            attempt = _pull_from(store, client, target, sources.pop(0))
            try:
                async with contextlib.aclosing(attempt):
                    async for event in attempt:
                        yield event
                return
            except _TRY_NEXT as error:
                failures.append(error)
                sources = [source for source in sources if source.place != error.details.get("place")]
                if sources:
                    yield PullEvent(f"{error.message}; trying the next source: {sources[0].label}")
    raise _all_failed(target, failures)


def _all_failed(target: Target, failures: list[LocalLLMError]) -> LocalLLMError:
    hints = dict.fromkeys(filter(None, (target.hint, *(error.hint for error in failures))))
    name = target.name.display
    if len(failures) == 1:
        error = failures[0]
        message = error.message if name in error.message else f"{name}: {error.message}"
        return type(error)(message, hint=" ".join(hints), **error.details)
    reasons = "; ".join(error.message for error in failures)
    kinds = {type(error) for error in failures}
    kind = kinds.pop() if len(kinds) == 1 else SourceUnavailable
    return kind(
        f"no source of {name} could be used: {reasons}",
        hint=" ".join(hints),
    )


async def _pull_from(
    store: ModelStore, client: httpx.AsyncClient, target: Target, source: Source
) -> AsyncGenerator[PullEvent, None]:
    plan = await source.resolve(client)
    _check_space(store.blobs, target, plan)
    layers: list[m.Layer] = []
    for file in plan.files:
        fetch = Fetch(store.blobs, client, file)
        async with contextlib.aclosing(fetch.run()) as events:
            async for event in events:
                yield event
        layers.append(m.Layer(file.media_type, f"sha256:{fetch.digest}", fetch.size))
    yield PullEvent("writing manifest")
    await asyncio.to_thread(_publish, store, target, plan, layers)
    yield PullEvent("success")


def _check_space(blobs: BlobStore, target: Target, plan: Plan) -> None:
    """Raise NoSpace before the first byte when all files together do not fit."""
    needed = sum(num_bytes_missing(blobs, file) for file in plan.files)
    if needed:
        check_space(blobs.folder, needed, target.name.display)


def _publish(store: ModelStore, target: Target, plan: Plan, layers: list[m.Layer]) -> None:
    data = plan.manifest or _make_manifest(store.blobs, target.entry, layers)
    store.publish(target.name, data)


def _make_manifest(blobs: BlobStore, entry: CatalogEntry | None, layers: list[m.Layer]) -> bytes:
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
    return msgspec.json.encode(m.Manifest(config=config, layers=tuple(layers)))


def _config_of(header: GGUFHeader) -> m.ModelConfig:
    return m.ModelConfig(
        model_format="gguf",
        model_family=header.architecture,
        model_families=(header.architecture,),
        model_type=header.parameter_size,
        file_type=header.file_type,
    )
