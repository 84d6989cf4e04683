"""Manifests: the JSON files that name a model's blobs, kept byte for byte as they came.

`manifests/<host>/<namespace>/<model>/<tag>`; the sha256 of the file is the model's id.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from localllm.errors import InvalidName, InvalidRequest, StoreError
from localllm.store.blobs import hex_digest, is_file, storage_errors, sync
from localllm.store.names import ModelName

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.ollama.image."
MODEL_LAYER = _LAYER + "model"
PROJECTOR_LAYER = _LAYER + "projector"
ADAPTER_LAYER = _LAYER + "adapter"
TEMPLATE_LAYER = _LAYER + "template"
LEGACY_TEMPLATE_LAYER = _LAYER + "prompt"
SYSTEM_LAYER = _LAYER + "system"
PARAMS_LAYER = _LAYER + "params"
MESSAGES_LAYER = _LAYER + "messages"
LICENSE_LAYER = _LAYER + "license"

MAX_MANIFEST_BYTES = 4 << 20
_PERMISSIONS_HINT = "Check the folder named by LOCALLLM_MODELS and its permissions."

_log = logging.getLogger(__name__)


class Layer(msgspec.Struct, frozen=True, omit_defaults=True, rename={"media_type": "mediaType", "source": "from"}):
    """`digest` is "sha256:" and 64 hex digits; `size` in bytes."""

    media_type: str
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    source: str = ""

    @property
    def hex(self) -> str:
        return hex_digest(self.digest)


class Manifest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"schema_version": "schemaVersion", "media_type": "mediaType"},
):
    """Fields in the order in which Ollama writes them. A model that has no files has null for layers, or no digests."""

    schema_version: int = 2
    media_type: str = MANIFEST_TYPE
    config: Layer
    layers: tuple[Layer, ...] | None = None

    def of_type(self, *media_types: str) -> list[Layer]:
        return [layer for layer in self.layers or () if layer.media_type in media_types]

    @property
    def parts(self) -> tuple[Layer, ...]:
        """The layers, then the config if there is one."""
        return (*(self.layers or ()), *([self.config] if self.config.digest else []))

    @property
    def digests(self) -> set[str]:
        """Bare hex digests of everything that the manifest needs."""
        return {layer.hex for layer in self.parts}

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.parts)


class OwnConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What Ollama's config blob has no word for; it passes over the key.

    `explicit_template`: the template layer is somebody's express wish, so it comes before the one in the model file.
    """

    explicit_template: bool = False


class ModelConfig(msgspec.Struct, frozen=True):
    """The config blob, in Ollama's keys. `model_type` is the parameter size, `file_type` the quantisation."""

    model_format: str = "gguf"
    model_family: str = ""
    model_families: tuple[str, ...] | None = None
    model_type: str = ""
    file_type: str = ""
    renderer: str | UnsetType = UNSET
    parser: str | UnsetType = UNSET
    requires: str | UnsetType = UNSET
    architecture: str = "amd64"
    os: str = "linux"
    localllm: OwnConfig | UnsetType = UNSET

    @property
    def has_explicit_template(self) -> bool:
        return isinstance(self.localllm, OwnConfig) and self.localllm.explicit_template


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
        for layer in manifest.parts:
            hex_digest(layer.digest)
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
        if self._has(name):
            return name
        return next((other for other in self.names() if other.key == name.key), None)

    def _has(self, name: ModelName) -> bool:
        try:
            with _reading(name):
                return stat.S_ISREG(self.path(name).stat().st_mode)
        except FileNotFoundError:
            return False

    def version(self, name: ModelName) -> tuple[int, int, int]:
        """Differs for a manifest that was replaced. Raises FileNotFoundError or StoreError."""
        with _reading(name):
            found = self.path(name).stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def read_bytes(self, name: ModelName) -> bytes:
        """The manifest as it is on disk. Raises FileNotFoundError or StoreError."""
        with _reading(name), self.path(name).open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if len(data) > MAX_MANIFEST_BYTES:
            raise StoreError(f"the manifest of {name.display} is absurdly large")
        return data

    def read(self, name: ModelName) -> StoredManifest:
        """Raises FileNotFoundError, or StoreError when the file is not a manifest."""
        data = self.read_bytes(name)
        with _reading(name):
            modified = self.path(name).stat().st_mtime
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
                sync(path.parent)
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
        """Every name that has a file; files that are no model's are passed over.

        Raises StoreError when the folder itself cannot be read, which must not look like an empty store.
        """
        with storage_errors("reading the list of models"):
            try:
                os.scandir(self.folder).close()
            except FileNotFoundError:
                return
        for path in self.folder.glob("*/*/*/*"):
            if path.name.startswith(".") or not is_file(path):
                continue
            host, namespace, model, tag = path.relative_to(self.folder).parts
            try:
                yield ModelName.parse(f"{host}/{namespace}/{model}:{tag}")
            except InvalidName:
                _log.warning("ignoring %s: not the name of a model", path)


@contextlib.contextmanager
def _reading(name: ModelName) -> Iterator[None]:
    """Turn OSErrors into StoreError, all but FileNotFoundError, which is an answer."""
    try:
        yield
    except OSError as error:
        # No file is where none can be: below a file, or by a name that the file system does not allow.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise FileNotFoundError(*error.args) from None
        raise StoreError(
            f"the manifest of {name.display} cannot be read: {error.strerror}", hint=_PERMISSIONS_HINT
        ) from None
