"""The configuration file: which settings it has, as text, and on which lines. What they mean is config's business.

context_length: 8192
model_settings:
  qwen3:*:
    num_parallel: 2
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import ConfigError

if TYPE_CHECKING:
    from yaml.nodes import Node

SECTION = "model_settings"


@dataclass(frozen=True)
class Setting:
    """A value as it is written, and where: "/home/me/.config/localllm/config.yaml:3"."""

    text: str
    where: str


Settings = dict[str, Setting]


@dataclass(frozen=True)
class FileSettings:
    """`of_models` are pairs of a name, in which `*` stands for anything, and its settings, in the file's order."""

    own: Settings
    of_models: tuple[tuple[str, Settings], ...] = ()


def read(path: Path, known: Collection[str], known_of_models: Collection[str]) -> FileSettings:
    """Nothing when there is no such file. Raises ConfigError that names file, line and field."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return FileSettings({})
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    # Takes a tenth of the time of a short command, and few have the file.
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _unreadable(path, error) from None
    return FileSettings({}) if root is None else _Reader(path, set(known), set(known_of_models)).read(root)


class _Reader:
    def __init__(self, path: Path, known: set[str], known_of_models: set[str]) -> None:
        self._path = path
        self._known = known
        self._known_of_models = known_of_models

    def read(self, root: Node) -> FileSettings:
        own, of_models = {}, []
        for name, node in self._pairs(root, "the file"):
            if name == SECTION:
                of_models = [self._of_model(pattern, inner) for pattern, inner in self._pairs(node, SECTION)]
            else:
                own[name] = self._setting(name, node, self._known | {SECTION})
        return FileSettings(_without_nulls(own), tuple(of_models))

    def _of_model(self, pattern: str, node: Node) -> tuple[str, Settings]:
        where = f"{SECTION}.{pattern}"
        pairs = self._pairs(node, where)
        found = {name: self._setting(name, value, self._known_of_models, f"{where}.") for name, value in pairs}
        return pattern, _without_nulls(found)

    def _pairs(self, node: Node, what: str) -> Iterator[tuple[str, Node]]:
        from yaml.nodes import MappingNode, ScalarNode

        if not isinstance(node, MappingNode):
            raise ConfigError(f"{self._at(node)}: {what} must be a mapping", hint='Write lines like "name: value".')
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or key.value in seen:
                raise ConfigError(f"{self._at(key)}: {key.value} is no name, or is there twice", hint="Remove one.")
            seen.add(key.value)
            yield key.value, value

    def _setting(self, name: str, node: Node, known: set[str], prefix: str = "") -> Setting | None:
        """None for an empty value, which means that nothing is said."""
        from yaml.nodes import ScalarNode, SequenceNode

        where = self._at(node)
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {prefix}{name}", hint=f"Known: {', '.join(sorted(known))}.")
        if isinstance(node, SequenceNode) and all(isinstance(item, ScalarNode) for item in node.value):
            return Setting(",".join(item.value for item in node.value), where)
        if not isinstance(node, ScalarNode):
            raise ConfigError(
                f"{where}: {prefix}{name} must be a value or a list of values", hint="Put it on one line."
            )
        return None if node.tag == "tag:yaml.org,2002:null" else Setting(node.value, where)

    def _at(self, node: Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


def _without_nulls(settings: dict[str, Setting | None]) -> Settings:
    return {name: setting for name, setting in settings.items() if setting is not None}


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {error}", hint="Correct the file or move it away.")
