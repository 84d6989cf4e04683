"""The model store as the rest of localllm sees it: names in, models out."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from localllm.errors import InvalidModelFile, ModelNotFound, StoreError
from localllm.store import manifests as m
from localllm.store.blobs import BlobStore
from localllm.store.gguf import GGUFHeader, read_header
from localllm.store.manifests import Layer, Manifest, ManifestStore, ModelConfig, StoredManifest
from localllm.store.names import ModelName
from localllm.store.templates import prompt_template
from localllm.types import Message, PromptTemplate

if TYPE_CHECKING:
    from localllm.store.catalog import Catalog
    from localllm.store.pull import PullEvent

_STORE_LOCK = "store"
# Tags between which a template that knows thinking puts it.
_THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Removed:
    """`shared_with` names, for each blob that stayed, the models that still need it."""

    freed_bytes: int
    shared_with: dict[str, list[str]]


@dataclass(frozen=True)
class StoredModel:
    """A model with all its layers. `digest` is the bare hex sha256 of its manifest, `size` the sum of its layers."""

    name: ModelName
    digest: str
    size: int
    modified_at: datetime
    model_path: Path
    config: ModelConfig
    projector_paths: tuple[Path, ...] = ()
    adapter_paths: tuple[Path, ...] = ()
    template: str = ""
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    licenses: tuple[str, ...] = ()

    @cached_property
    def header(self) -> GGUFHeader:
        """Raises InvalidModelFile when the model file is damaged."""
        stat = self._stat()
        return _read_header_once(self.model_path, *stat)

    def _stat(self) -> tuple[int, int]:
        try:
            stat = self.model_path.stat()
        except OSError:
            raise InvalidModelFile(
                f"the model file of {self.name.display} is missing", hint=f"Run `localllm pull {self.name.display}`."
            ) from None
        return stat.st_size, stat.st_mtime_ns

    @cached_property
    def capabilities(self) -> tuple[str, ...]:
        """What the model can do, by Ollama's rules. Raises InvalidModelFile."""
        if self.header.pooling_type is not None:
            return ("embedding",)
        return tuple(
            name
            for name, is_so in (
                ("completion", True),
                ("tools", self._calls_tools),
                ("insert", ".Suffix" in self.template),
                ("vision", bool(self.projector_paths) or bool(self.header.of_arch("vision.block_count"))),
                ("thinking", self._thinks),
            )
            if is_so
        )

    @property
    def uses_template_layer(self) -> bool:
        """Whether the template of the manifest is used, and not the one in the model file. Raises InvalidModelFile.

        What came with a pull gives way to the model file's own; what somebody asked for does not.
        """
        return bool(self.template) and (self.config.has_explicit_template or not self.header.chat_template)

    @cached_property
    def prompt_template(self) -> PromptTemplate:
        """The template in use; its source is empty where there is none. Raises InvalidModelFile."""
        if self.uses_template_layer:
            return prompt_template(self.template)
        return PromptTemplate("jinja", self.header.chat_template)

    @property
    def _calls_tools(self) -> bool:
        template = self.prompt_template
        if template.language == "go":
            return ".Tools" in template.source
        return any(word in template.source for word in ("tools", "tool_call"))

    @property
    def _thinks(self) -> bool:
        template = self.prompt_template
        source = template.source
        if template.language == "go" and ".Thinking" in source:
            return True
        return (
            any(opener in source and closer in source for opener, closer in _THINKING_TAGS)
            or any(f"split({quote}</think>{quote})" in source for quote in "'\"")
            or ("<|channel|>" in source and "analysis" in source)
        )


def _last(manifest: Manifest, *media_types: str) -> list[Layer]:
    return manifest.of_type(*media_types)[-1:]


@functools.lru_cache(maxsize=64)
def _read_header_once(path: Path, _size: int, _mtime_ns: int) -> GGUFHeader:
    return read_header(path)


class ModelStore:
    """Safe to use from several threads and processes. Reading never creates anything on disk."""

    def __init__(self, root: Path, *, catalog: Catalog | None = None) -> None:
        self.root = root
        self.blobs = BlobStore(root)
        self.manifests = ManifestStore(root)
        self._catalog = catalog
        self._cache: dict[ModelName, tuple[tuple[int, int, int], StoredModel]] = {}

    @property
    def catalog(self) -> Catalog:
        if self._catalog is None:
            from localllm.store.catalog import Catalog

            self._catalog = Catalog()
        return self._catalog

    def resolve(self, text: str) -> StoredModel:
        """The model that `text` names. Raises InvalidName, ModelNotFound with near names, or StoreError."""
        name = ModelName.parse(text)
        stored = self.manifests.find(name)
        model = self._load(stored) if stored else None
        if model is None:
            raise ModelNotFound(f"model '{text}' not found", hint=self._suggestion(name))
        return model

    def _suggestion(self, name: ModelName) -> str:
        if name.is_short and self.catalog.find(name.model, name.tag):
            return f"It can be pulled: localllm pull {name.display}"
        mine = [model.display for model in self.manifests.names()]
        near = [*difflib.get_close_matches(name.display, mine, 3), *self.catalog.suggest(f"{name.model}:{name.tag}")]
        return f"Did you mean {' or '.join(dict.fromkeys(near))}?" if near else "See `localllm list` for what is here."

    def _load(self, name: ModelName) -> StoredModel | None:
        """The model behind a stored name, from memory while its manifest has not changed; None when it is gone."""
        try:
            version = self.manifests.version(name)
            cached = self._cache.get(name)
            if cached is None or cached[0] != version:
                cached = (version, self._build(self.manifests.read(name)))
                self._cache[name] = cached
        except FileNotFoundError:
            self._cache.pop(name, None)
            return None
        return cached[1]

    def _build(self, stored: StoredManifest) -> StoredModel:
        manifest = stored.manifest
        models = manifest.of_type(m.MODEL_LAYER)
        if len(models) != 1:
            raise StoreError(
                f"{stored.name.display} has {len(models)} GGUF files where one is needed",
                hint="Pull or create it again, as a single GGUF file.",
            )
        return StoredModel(
            name=stored.name,
            digest=stored.digest,
            size=manifest.size,
            modified_at=stored.modified_at,
            model_path=self.blobs.path(models[0].digest),
            config=self._json(manifest.config, ModelConfig) if manifest.config.digest else ModelConfig(),
            projector_paths=tuple(self.blobs.path(layer.digest) for layer in manifest.of_type(m.PROJECTOR_LAYER)),
            adapter_paths=tuple(self.blobs.path(layer.digest) for layer in manifest.of_type(m.ADAPTER_LAYER)),
            template="".join(self._text(layer) for layer in _last(manifest, m.TEMPLATE_LAYER, m.LEGACY_TEMPLATE_LAYER)),
            system="".join(self._text(layer) for layer in _last(manifest, m.SYSTEM_LAYER)),
            parameters={k: v for p in manifest.of_type(m.PARAMS_LAYER) for k, v in self._json(p, dict).items()},
            messages=tuple(x for p in manifest.of_type(m.MESSAGES_LAYER) for x in self._json(p, list[Message])),
            licenses=tuple(self._text(layer) for layer in manifest.of_type(m.LICENSE_LAYER)),
        )

    def _bytes(self, layer: Layer) -> bytes:
        try:
            with self.blobs.path(layer.digest).open("rb") as file:
                data = file.read(m.MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise StoreError(
                f"blob sha256:{layer.hex[:12]} cannot be read: {error.strerror}", hint="Pull the model again."
            ) from None
        if len(data) > m.MAX_MANIFEST_BYTES:
            raise StoreError(f"blob sha256:{layer.hex[:12]} is absurdly large for {layer.media_type}")
        return data

    def _text(self, layer: Layer) -> str:
        return self._bytes(layer).decode("utf-8", "replace")

    def _json(self, layer: Layer, type: Any) -> Any:
        try:
            return msgspec.json.decode(self._bytes(layer), type=type)
        except msgspec.MsgspecError as error:
            raise StoreError(f"blob sha256:{layer.hex[:12]} is not what its manifest says: {error}") from None

    def list(self) -> list[StoredModel]:
        """All models, newest first; what cannot be read is logged and left out."""
        models = []
        for name in self.manifests.names():
            try:
                model = self._load(name)
            except StoreError as error:
                _log.warning("leaving %s out of the list: %s", name.display, error)
                continue
            if model is not None:
                models.append(model)
        return sorted(models, key=lambda model: model.modified_at, reverse=True)

    def publish(self, name: ModelName, data: bytes) -> None:
        """Write a manifest once all its blobs are here, and drop blobs that only its predecessor needed.

        Raises StoreError when a blob is missing, for instance because another process removed it meanwhile.
        """
        manifest = m.parse_manifest(data)
        with self.blobs.lock(_STORE_LOCK):
            missing = [digest for digest in manifest.digests if not self.blobs.has(digest)]
            if missing:
                raise StoreError(f"blob sha256:{missing[0][:12]} has vanished from the store", hint="Pull again.")
            target = self.manifests.find(name) or name
            old = self._try_read(target)
            self.manifests.write(target, data)
            if old is not None:
                self._collect(old.digests - manifest.digests)

    def remove(self, text: str) -> Removed:
        """Forget a model and delete the blobs that no other model needs. Raises InvalidName or ModelNotFound."""
        name = ModelName.parse(text)
        with self.blobs.lock(_STORE_LOCK):
            stored = self.manifests.find(name)
            if stored is None:
                raise ModelNotFound(f"model '{text}' not found", hint="See `localllm list` for what is here.")
            manifest = self._try_read(stored)
            self.manifests.delete(stored)
            return self._collect(manifest.digests if manifest else set())

    def copy(self, source: str, destination: str) -> None:
        """Give a model a second name; its blobs are shared. Raises InvalidName or ModelNotFound."""
        old, new = ModelName.parse(source), ModelName.parse(destination)
        stored = self.manifests.find(old) or old
        try:
            data = self.manifests.read_bytes(stored)
        except FileNotFoundError:
            raise ModelNotFound(f'model "{source}" not found', hint="See `localllm list` for what is here.") from None
        if stored.key != new.key:
            self.publish(new, data)

    def _try_read(self, name: ModelName) -> Manifest | None:
        try:
            return self.manifests.read(name).manifest
        except (FileNotFoundError, StoreError):
            return None

    def _collect(self, digests: set[str]) -> Removed:
        """Delete those of `digests` that no manifest mentions. The store's lock is held.

        With an unreadable manifest about, nothing is deleted: it may need any of them.
        """
        users: dict[str, list[str]] = {}
        names = list(self.manifests.names())
        readable = [(name, manifest) for name in names if (manifest := self._try_read(name)) is not None]
        for name, manifest in readable:
            for digest in digests & manifest.digests:
                users.setdefault(digest, []).append(name.display)
        free = digests - users.keys() if len(readable) == len(names) else set()
        return Removed(sum(self.blobs.remove(digest) for digest in free), users)

    async def pull(self, text: str, *, insecure: bool = False) -> AsyncGenerator[PullEvent, None]:
        """Fetch a model; see store.pull. Closing the iterator stops the transfer, whose partial stays for the next."""
        from localllm.store.pull import pull

        events = pull(self, text, insecure=insecure)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
