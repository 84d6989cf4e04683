"""gpt-oss: OpenAI's harmony format, in which every message names its channel.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`. A tool call is a
message with a recipient, in the role or the channel part of its header:
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from localllm.chat.formats.calls import Schemas, decode_at, find_name, make_call
from localllm.chat.formats.tags import TagFinder
from localllm.types import Delta

_HEADER_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_END_TAGS = ("<|end|>", "<|call|>", "<|return|>")
_FINDER = TagFinder([*_HEADER_TAGS, *_END_TAGS])
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class HarmonyParser:
    needs_special_tokens = True

    def __init__(self, schemas: Schemas, prompt: str) -> None:
        """`prompt` ends within the header of the message that the model writes, or even within its text."""
        self._schemas = schemas
        self._buffer = ""
        # What each tag of the header introduced, and the last such tag.
        self._header: dict[str, str] = {}
        self._part = ""
        self._is_body = False
        self._call = ""
        # Text of the model before its first tag; None once that has come.
        self._lead: str | None = None
        self.feed(prompt[max(0, prompt.rfind("<|start|>")) :] if "<|start|>" in prompt else "<|start|>assistant")
        self._lead = None if self._is_body else ""

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        if "<" not in self._buffer:
            text, self._buffer = self._buffer, ""
            self._take(text, deltas)
            return deltas
        while match := _FINDER.search(self._buffer):
            self._take(self._buffer[: match.start()], deltas)
            self._buffer = self._buffer[match.end() :]
            self._on_tag(match[0], deltas)
        length = _FINDER.safe_length(self._buffer)
        safe, self._buffer = self._buffer[:length], self._buffer[length:]
        self._take(safe, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        rest, self._buffer = self._buffer, ""
        self._take(rest, deltas)
        self._close_message(deltas)
        if self._lead:
            deltas.append(Delta(self._lead))
        return deltas

    def _take(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._lead is not None:
            self._take_lead(text, deltas)
        elif not self._is_body and self._part:
            self._header[self._part] += text
        elif self._tool is not None:
            self._call += text
        elif self._header.get("<|channel|>", "").strip().startswith("analysis"):
            deltas.append(Delta(thinking=text))
        elif self._is_body or not text.isspace():
            deltas.append(Delta(text))

    def _take_lead(self, text: str, deltas: list[Delta]) -> None:
        """Before the first tag there may be a recipient; anything else is an answer without a header."""
        lead = self._lead = (self._lead or "") + text
        if not "to=".startswith(lead.lstrip()[:3]):
            self._lead, self._is_body = None, True
            deltas.append(Delta(lead))

    @property
    def _tool(self) -> str | None:
        """The tool that the message is for."""
        header = f"{self._header.get('<|start|>', '')} {self._header.get('<|channel|>', '')}"
        recipient = _RECIPIENT.search(header)
        return find_name(recipient[1], self._schemas) if recipient else None

    def _on_tag(self, tag: str, deltas: list[Delta]) -> None:
        if self._lead is not None and self._part:
            self._header[self._part] += self._lead
        self._lead = None
        if tag == "<|message|>":
            self._is_body = True
            return
        if self._is_body or tag not in _HEADER_TAGS:
            self._close_message(deltas)
        if tag in _HEADER_TAGS:
            self._part, self._header[tag] = tag, ""

    def _close_message(self, deltas: list[Delta]) -> None:
        text, self._call = self._call, ""
        name = self._tool
        if text and name:
            decoded = decode_at(text.strip(), 0)
            is_call = decoded is not None and isinstance(decoded[0], dict)
            deltas.append(Delta(tool_calls=(make_call(name, decoded[0]),)) if decoded and is_call else Delta(text))
        self._header, self._part, self._is_body = {}, "", False
