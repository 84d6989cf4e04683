"""What a pull is asked for: from the text that a person wrote to a name and the sources to try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import httpx

from localllm.errors import InvalidName
from localllm.store import catalog as c
from localllm.store.names import ModelName, name_from_stem
from localllm.store.sources import Source
from localllm.store.sources.hf import HuggingFaceSource, hub_file
from localllm.store.sources.local import LocalSource
from localllm.store.sources.pypi import WheelSource
from localllm.store.sources.registry import RegistrySource
from localllm.store.sources.url import UrlSource

_ADDRESS_HINT = "Write https://host/path/file.gguf."


@dataclass(frozen=True)
class Target:
    """Where a pull puts its model, and where it may come from, best first. `hint` is for when nothing helps."""

    name: ModelName
    sources: tuple[Source, ...]
    entry: c.CatalogEntry | None = None
    hint: str = ""


def find_target(text: str, catalog: c.Catalog, *, insecure: bool = False) -> Target:
    """What `text` asks for: a URL of a GGUF, a local path, or a name. Raises InvalidName."""
    text = text.strip()
    url = _gguf_url(text)
    if url is not None:
        spec = hub_file(url)
        source = UrlSource(text) if spec is None else HuggingFaceSource(spec)
        return Target(name_from_stem(Path(url.path).stem), (source,))
    if text.startswith(("/", "./", "../", "~")):
        path = Path(text).expanduser()
        return Target(name_from_stem(path.stem), (LocalSource(path),))
    return _named(ModelName.parse(text), catalog, insecure)


def _named(name: ModelName, catalog: c.Catalog, insecure: bool) -> Target:
    if name.is_hugging_face:
        quant = "" if name.tag == "latest" else name.tag
        return Target(name, (HuggingFaceSource(c.HuggingFaceSource(f"{name.namespace}/{name.model}", quant=quant)),))
    entry = catalog.find(name.model, name.tag) if name.is_short else None
    if entry is not None:
        return Target(name, tuple(map(_source, entry.sources)), entry)
    return Target(name, (RegistrySource(name, insecure=insecure),), hint=_hint(name, catalog))


def _hint(name: ModelName, catalog: c.Catalog) -> str:
    if not name.is_short:
        return ""
    near = catalog.suggest(f"{name.model}:{name.tag}")
    question = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"The catalogue has no {name.display}, so only the registry was asked.{question}"


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


def _source(spec: c.SourceSpec) -> Source:
    if isinstance(spec, c.HuggingFaceSource):
        return HuggingFaceSource(spec)
    if isinstance(spec, c.WheelSource):
        return WheelSource(spec)
    return UrlSource(spec.url, sha256=spec.sha256, size=spec.size)
