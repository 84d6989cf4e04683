"""PURE: names of models, `[host/][namespace/]model[:tag]`, as Ollama writes them.

Parsed from the right; `hf.co/user/repo[:quant]` is a name like any other, whose host is a source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from localllm.errors import InvalidName

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
HUGGING_FACE_HOSTS = frozenset({"hf.co", "huggingface.co"})

_MAX_SHOWN = 100
_SCHEME = re.compile(r"^https?://", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")


@dataclass(frozen=True)
class ModelName:
    host: str
    namespace: str
    model: str
    tag: str

    _RULES: ClassVar[dict[str, re.Pattern[str]]] = {
        "host": _HOST,
        "namespace": _NAMESPACE,
        "model": _PART,
        "tag": _PART,
    }

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Fill in what `text` leaves out. Raises InvalidName that says which part is wrong."""
        rest = _SCHEME.sub("", text.strip())
        path, colon, tag = rest.rpartition(":")
        if not colon or "/" in tag:
            path, tag, colon = rest, DEFAULT_TAG, ""
        parts = path.split("/")
        if len(parts) > 3:
            raise InvalidName(f"{_quoted(text)} is not a model name: it has too many parts", hint=_HINT)
        model = parts[-1]
        namespace = parts[-2] if len(parts) > 1 else DEFAULT_NAMESPACE
        host = parts[-3] if len(parts) > 2 else DEFAULT_HOST
        name = cls(host, namespace, model, tag)
        name._check(text)
        return name

    def _check(self, text: str) -> None:
        for part, rule in self._RULES.items():
            value = getattr(self, part)
            # The namespace of a Hugging Face repository may hold dots.
            rule = _PART if part == "namespace" and self.is_hugging_face else rule
            if not rule.fullmatch(value):
                what = f"the {part} {_quoted(value)} is not valid" if value else f"the {part} is empty"
                raise InvalidName(f"{_quoted(text)} is not a model name: {what}", hint=_HINT)

    @property
    def is_hugging_face(self) -> bool:
        return self.host.lower() in HUGGING_FACE_HOSTS

    @property
    def is_short(self) -> bool:
        """True for names that say neither host nor namespace: the catalogue's."""
        return (self.host, self.namespace) == (DEFAULT_HOST, DEFAULT_NAMESPACE)

    @property
    def display(self) -> str:
        """The shortest form that means the same, always with its tag."""
        if self.host != DEFAULT_HOST:
            return self.full
        namespace = "" if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/"
        return f"{namespace}{self.model}:{self.tag}"

    @property
    def full(self) -> str:
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Equal for names that differ only in case."""
        return (self.host.lower(), self.namespace.lower(), self.model.lower(), self.tag.lower())

    def with_tag(self, tag: str) -> ModelName:
        return replace(self, tag=tag)


def _quoted(text: str) -> str:
    """For a message: a terminal shows what was typed, and no more of it than helps."""
    shown = "".join(char if char.isprintable() else "?" for char in text[:_MAX_SHOWN])
    return f'"{shown}…"' if len(text) > _MAX_SHOWN else f'"{shown}"'


_HINT = "Names look like llama3.2, llama3.2:1b, user/model:tag or hf.co/user/repo:Q4_K_M."


def name_from_stem(stem: str) -> ModelName:
    """The name under which a GGUF file or URL is kept: its file stem, with what names do not allow replaced."""
    model = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.")[:80].rstrip("-.")
    return ModelName(DEFAULT_HOST, DEFAULT_NAMESPACE, (model or "model").lower(), DEFAULT_TAG)
