"""gpt-oss: OpenAI's harmony format, in which every message names its channel.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`. A tool call is a
message on the commentary channel with a recipient:
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
import re

from localllm.chat.formats.tools import make_call
from localllm.types import Delta

_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_TAG = re.compile("|".join(map(re.escape, _TAGS)))
_LONGEST_TAG = max(map(len, _TAGS))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class HarmonyParser:
    needs_special_tokens = True

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._names = tool_names
        self._buffer = ""
        self._header = ""
        self._is_body = False
        self._call = ""

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while match := _TAG.search(self._buffer):
            self._take(self._buffer[: match.start()], deltas)
            self._buffer = self._buffer[match.end() :]
            self._on_tag(match[0], deltas)
        self._take(self._cut_safe(), deltas)
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        rest, self._buffer = self._buffer, ""
        self._take(rest, deltas)
        self._on_tag("<|end|>", deltas)
        return deltas

    def _cut_safe(self) -> str:
        """Take out of the buffer what cannot be the beginning of a tag."""
        start = self._buffer.rfind("<", max(0, len(self._buffer) - _LONGEST_TAG))
        held = start >= 0 and any(tag.startswith(self._buffer[start:]) for tag in _TAGS)
        length = start if held else len(self._buffer)
        safe, self._buffer = self._buffer[:length], self._buffer[length:]
        return safe

    @property
    def _tool_name(self) -> str:
        match = _RECIPIENT.search(self._header)
        return match[1] if match and match[1] in self._names else ""

    def _take(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if not self._is_body:
            self._header += text
        elif self._tool_name:
            self._call += text
        elif "analysis" in self._header:
            deltas.append(Delta(thinking=text))
        else:
            deltas.append(Delta(text))

    def _on_tag(self, tag: str, deltas: list[Delta]) -> None:
        if tag == "<|message|>":
            self._is_body = True
        elif tag in ("<|end|>", "<|call|>", "<|return|>", "<|start|>"):
            self._close_call(deltas)
            self._header, self._is_body = "", False

    def _close_call(self, deltas: list[Delta]) -> None:
        text, self._call = self._call, ""
        if not text:
            return
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            deltas.append(Delta(tool_calls=(make_call(self._tool_name, arguments),)))
        else:
            deltas.append(Delta(text))
