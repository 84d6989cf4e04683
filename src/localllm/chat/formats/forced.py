"""An answer that was forced to be a tool call, and after what the forcing begins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from localllm.chat.formats.calls import Schemas, parse_json
from localllm.chat.formats.families import call_rule, is_harmony, thinking_tags
from localllm.types import Delta, ThinkLevel

_FINAL = re.compile(r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")


def call_openers(template: str) -> list[str]:
    """The tags that introduce a call, where the model has any."""
    return [] if is_harmony(template) else [block.opener for block in call_rule(template).blocks]


@dataclass(frozen=True)
class Gate:
    """Where an answer begins: after `closer`, if the model thinks at all, which it announces with `opener`.

    `is_inside`: it is thinking from the start, because the prompt ends so or because this kind of model always does.
    """

    opener: str
    closer: re.Pattern[str]
    is_inside: bool


def answer_gate(template: str, prompt: str, think: bool | ThinkLevel | None) -> Gate | None:
    """None when the answer begins with the first token."""
    if is_harmony(template):
        header = prompt[prompt.rfind("<|start|>") :]
        return None if _FINAL.search(header) else Gate("", _FINAL, is_inside=True)
    tags = thinking_tags(template)
    if tags is None:
        return None
    is_inside = prompt.rstrip().endswith(tags.opener)
    if not is_inside and think is False:
        return None
    return Gate(tags.opener, re.compile(re.escape(tags.closer)), is_inside)


def call_prefix(template: str) -> str:
    """What the model writes before a call in JSON, so that it finds itself in a familiar place."""
    if is_harmony(template):
        return ""
    return next((f"{b.opener}\n" for b in call_rule(template).blocks if b.closer and b.parse is parse_json), "")


class Parser(Protocol):
    """An OutputParser, which is defined above this module."""

    needs_special_tokens: bool

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


class ForcedCallParser:
    """Makes the call of an answer that can be nothing else; `inner` tells thinking apart."""

    def __init__(self, inner: Parser, schemas: Schemas) -> None:
        self.needs_special_tokens = inner.needs_special_tokens
        self._inner = inner
        self._schemas = schemas
        self._answer = ""

    def feed(self, text: str) -> list[Delta]:
        return self._keep(self._inner.feed(text))

    def finish(self) -> list[Delta]:
        deltas = self._keep(self._inner.finish())
        start = self._answer.find("{")
        parsed = parse_json(self._answer[start:], self._schemas) if start >= 0 else None
        if parsed is not None:
            deltas.append(Delta(tool_calls=parsed.calls))
        elif self._answer:
            # It was cut short: what there is of it is better than nothing.
            deltas.append(Delta(self._answer))
        return deltas

    def _keep(self, deltas: list[Delta]) -> list[Delta]:
        self._answer += "".join(delta.content for delta in deltas)
        return [Delta(thinking=delta.thinking) for delta in deltas if delta.thinking]
