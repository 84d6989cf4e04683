"""Templates in the style of well-known families, each with that family's peculiarities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.chat.template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

_NUMBER = {"type": "integer"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
    },
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def load(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), bos_token="<s>", eos_token="</s>")
