"""Manifests: the JSON files that name a model's blobs, kept byte for byte as they came.

`manifests/<host>/<namespace>/<model>/<tag>`; the sha256 of the file is the model's id.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from localllm.errors import InvalidName, InvalidRequest, StoreError
from localllm.store.blobs import hex_digest, storage_errors
from localllm.store.names import ModelName

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.ollama.image."
MODEL_LAYER = _LAYER + "model"
PROJECTOR_LAYER = _LAYER + "projector"
ADAPTER_LAYER = _LAYER + "adapter"
TEMPLATE_LAYER = _LAYER + "template"
SYSTEM_LAYER = _LAYER + "system"
PARAMS_LAYER = _LAYER + "params"
MESSAGES_LAYER = _LAYER + "messages"
LICENSE_LAYER = _LAYER + "license"

MAX_MANIFEST_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class Layer(msgspec.Struct, frozen=True, omit_defaults=True, rename={"media_type": "mediaType", "source": "from"}):
    """`digest` is "sha256:" and 64 hex digits; `size` in bytes."""

    media_type: str
    digest: str
    size: int
    source: str = ""

    @property
    def hex(self) -> str:
        return hex_digest(self.digest)


class Manifest(msgspec.Struct, frozen=True, rename={"schema_version": "schemaVersion", "media_type": "mediaType"}):
    config: Layer
    layers: tuple[Layer, ...] = ()
    schema_version: int = 2
    media_type: str = MANIFEST_TYPE

    def of_type(self, media_type: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.media_type == media_type]

    @property
    def digests(self) -> set[str]:
        """Bare hex digests of everything that the manifest needs."""
        return {layer.hex for layer in (*self.layers, self.config) if layer.digest}

    @property
    def size(self) -> int:
        return sum(layer.size for layer in (*self.layers, self.config))


class ModelConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The config blob, in Ollama's keys. `model_type` is the parameter size, `file_type` the quantisation."""

    model_format: str = "gguf"
    model_family: str = ""
    model_families: tuple[str, ...] | None = None
    model_type: str = ""
    file_type: str = ""
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    architecture: str = "amd64"
    os: str = "linux"


@dataclass(frozen=True)
class StoredManifest:
    name: ModelName
    manifest: Manifest
    digest: str
    modified_at: datetime


def parse_manifest(data: bytes) -> Manifest:
    """Raises StoreError when `data` is not a manifest whose digests can be trusted as file names."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        assert manifest.digests is not None
    except (msgspec.MsgspecError, InvalidRequest) as error:
        raise StoreError(f"the manifest is not valid: {error}", hint="Pull the model again.") from None
    return manifest


class ManifestStore:
    def __init__(self, root: Path) -> None:
        self.folder = root / "manifests"

    def path(self, name: ModelName) -> Path:
        return self.folder / name.host / name.namespace / name.model / name.tag

    def find(self, name: ModelName) -> ModelName | None:
        """The stored name equal to `name` but for case; the exact one first."""
        if self.path(name).is_file():
            return name
        return next((other for other in self.names() if other.key == name.key), None)

    def read(self, name: ModelName) -> StoredManifest:
        """Raises FileNotFoundError, or StoreError when the file is not a manifest."""
        path = self.path(name)
        try:
            data = path.read_bytes()
            modified = path.stat().st_mtime
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"the manifest of {name.display} cannot be read: {error.strerror}") from None
        if len(data) > MAX_MANIFEST_BYTES:
            raise StoreError(f"the manifest of {name.display} is absurdly large")
        when = datetime.fromtimestamp(modified, timezone.utc).astimezone()
        return StoredManifest(name, parse_manifest(data), hashlib.sha256(data).hexdigest(), when)

    def write(self, name: ModelName, data: bytes) -> None:
        """Replace the manifest of `name` at once; a reader sees the old or the new one, never a part."""
        path = self.path(name)
        with storage_errors(f"writing the manifest of {name.display}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(prefix=".", dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                Path(scratch).chmod(0o644)
                Path(scratch).replace(path)
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise

    def delete(self, name: ModelName) -> None:
        """Remove the manifest and the folders that it leaves empty."""
        path = self.path(name)
        with storage_errors(f"removing the manifest of {name.display}"):
            path.unlink(missing_ok=True)
        for folder in list(path.parents)[:3]:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def names(self) -> Iterator[ModelName]:
        """Every name that has a file; files that are no model's are passed over."""
        for path in self.folder.glob("*/*/*/*"):
            if path.name.startswith(".") or not path.is_file():
                continue
            host, namespace, model, tag = path.relative_to(self.folder).parts
            try:
                yield ModelName.parse(f"{host}/{namespace}/{model}:{tag}")
            except InvalidName:
                _log.warning("ignoring %s: not the name of a model", path)

    def all(self) -> Iterator[StoredManifest]:
        """Every readable manifest; one that is broken is logged and passed over."""
        for name in self.names():
            try:
                yield self.read(name)
            except (StoreError, FileNotFoundError) as error:
                _log.warning("ignoring the manifest of %s: %s", name.display, error)
