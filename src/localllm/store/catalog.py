"""The catalogue: short names, and where the models behind them come from.

One YAML file per family; docs/catalogue.md describes the format. A family is read when it is asked for.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from localllm.errors import ConfigError

T = TypeVar("T")

Repository = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")]
GGUFFile = Annotated[str, msgspec.Meta(pattern=r"\.(gguf|GGUF)$")]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Tag = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][\w.-]{0,79}$")]
Capability = Literal["completion", "tools", "thinking", "vision", "insert", "embedding"]


class HuggingFaceSource(msgspec.Struct, frozen=True, tag="hf", tag_field="kind", forbid_unknown_fields=True):
    """A file of a repository, by its name or by its quantisation (then the repository is searched for it).

    With both, the quantisation is what helps when the repository has no such file. `size` is in bytes.
    """

    repo: Repository
    file: GGUFFile = ""
    quant: Text = ""
    revision: Text = "main"
    mmproj: GGUFFile = ""
    sha256: Sha256 = ""
    size: Size | None = None


class UrlSource(msgspec.Struct, frozen=True, tag="url", tag_field="kind", forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(pattern="^https://")]
    sha256: Sha256 = ""
    size: Size | None = None


class WheelSource(msgspec.Struct, frozen=True, tag="wheel", tag_field="kind", forbid_unknown_fields=True):
    """A member of a wheel on the Python package index; `sha256` and `size` (bytes) are the member's own."""

    package: Text
    version: Text
    member: GGUFFile
    sha256: Sha256
    size: Size


SourceSpec = HuggingFaceSource | UrlSource | WheelSource


class Parameters(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Defaults that a model's makers recommend; what they leave open is left out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[Text, ...] = ()
    num_ctx: Size | None = None


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One size of a family: either `sources`, or `repos` that hold a file for each of `quants`.

    The file is `<stem><separator><QUANT>.gguf`, or whatever the repository has of that quantisation where there is no
    such file or no `stem`; so a repository may stand in for another that names its files otherwise. Each quantisation
    makes a tag `<size>-<quant>`; the first one is also the tag `<size>`.
    """

    repos: tuple[Repository, ...] = ()
    stem: Text = ""
    separator: Literal["-", "."] = "-"
    quants: tuple[Tag, ...] = ("Q4_K_M", "Q4_0", "Q8_0")
    mmproj: GGUFFile = ""
    sources: tuple[SourceSpec, ...] = ()
    parameters: Parameters = Parameters()
    capabilities: tuple[Capability, ...] = ()
    license: Text = ""

    def __post_init__(self) -> None:
        if bool(self.repos) == bool(self.sources):
            raise ValueError("either repos or sources must be given, and not both")
        if self.sources and (self.stem or self.mmproj):
            raise ValueError("stem and mmproj go with repos; a source names its own files")
        if not self.quants:
            raise ValueError("quants must name one at least")
        for source in self.sources:
            if isinstance(source, HuggingFaceSource) and not (source.file or source.quant):
                raise ValueError(f"the source {source.repo} needs a file or a quant")


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the catalogue. `aliases` maps tags to tags and must name `latest`."""

    family: Tag
    title: Text
    description: Text
    license: Text
    models: dict[Tag, ModelSpec]
    aliases: dict[Tag, Tag]
    capabilities: tuple[Capability, ...] = ("completion",)
    parameters: Parameters = Parameters()
    system: str = ""


@dataclass(frozen=True)
class CatalogEntry:
    """What one tag means. `sources` are in order of preference."""

    family: str
    tag: str
    description: str
    license: str
    capabilities: tuple[Capability, ...]
    parameters: dict[str, Any]
    sources: tuple[SourceSpec, ...]
    system: str = ""


class _Loader(yaml.SafeLoader):
    """YAML where a key that is written twice is an error: the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


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
            document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise _mistake(path.name, error) from None
        models = document.get("models") if isinstance(document, dict) else None
        for size, spec in models.items() if isinstance(models, dict) else ():
            _convert(spec, ModelSpec, f"{path.name}: models.{size}")
        family = _convert(document, Family, path.name)
        _check(family, path)
        return family


def _mistake(where: str, what: object) -> ConfigError:
    return ConfigError(f"{where}: {what}", hint="docs/catalogue.md describes the format.")


def _convert(value: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _mistake(where, error) from None


def _check(family: Family, path: Path) -> None:
    """What the types cannot say. Raises ConfigError."""
    if family.family != path.stem:
        raise _mistake(path.name, f"family is {family.family}, which must be the name of the file")
    entries = _entries(family)
    if len(entries) < sum(len(_sources(size, spec)) for size, spec in family.models.items()):
        raise _mistake(path.name, "models make a tag twice")
    for alias, target in family.aliases.items():
        if alias.lower() in entries:
            raise _mistake(path.name, f"aliases.{alias} is a tag of its own")
        if target.lower() not in entries:
            raise _mistake(path.name, f"aliases.{alias} names the unknown tag {target}")
    if "latest" not in family.aliases:
        raise _mistake(path.name, "aliases must name latest")


def _entries(family: Family) -> dict[str, CatalogEntry]:
    """All tags but the aliases, by their lower-case form."""
    entries = {}
    for size, spec in family.models.items():
        parameters = {**msgspec.to_builtins(family.parameters), **msgspec.to_builtins(spec.parameters)}
        for tag, sources in _sources(size, spec).items():
            entries[tag.lower()] = CatalogEntry(
                family=family.family,
                tag=tag,
                description=family.description,
                license=spec.license or family.license,
                capabilities=spec.capabilities or family.capabilities,
                parameters=parameters,
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
