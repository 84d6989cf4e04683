"""A parser for models that put thinking and tool calls between tags."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from localllm.types import Delta, ToolCall

# Returns None when the text is not (or not yet) a complete call of a known tool.
CallParser = Callable[[str, frozenset[str]], tuple[ToolCall, ...] | None]


@dataclass(frozen=True)
class Tags:
    opener: str
    closer: str


@dataclass(frozen=True)
class ToolSyntax:
    """`closer` None: the call reaches to the end. `is_bare`: an answer that begins with a bracket is a call too."""

    opener: str
    closer: str | None
    parse: CallParser
    is_bare: bool = False


class _State(enum.Enum):
    CONTENT = enum.auto()
    THINKING = enum.auto()
    TOOL = enum.auto()


class TagParser:
    """Thinking and calls come out typed; a call that cannot be understood comes out as the text that it was."""

    needs_special_tokens = True

    def __init__(
        self,
        thinking: Tags | None,
        tools: ToolSyntax | None,
        tool_names: frozenset[str],
        *,
        starts_thinking: bool = False,
    ) -> None:
        self._thinking = thinking
        self._tools = tools
        self._names = tool_names
        self._state = _State.THINKING if starts_thinking else _State.CONTENT
        self._buffer = ""
        self._opened_with = ""
        # White space around the tags belongs to neither part.
        self._strip_next = starts_thinking
        self._has_content = False

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        rest, self._buffer = self._buffer, ""
        if self._state is _State.THINKING:
            return [Delta(thinking=rest)] if rest else []
        if self._state is _State.TOOL:
            return self._close_tool(rest, closer="")
        return [Delta(rest)] if rest else []

    def _advance(self, deltas: list[Delta]) -> bool:
        """Handle what the buffer allows; True when a tag was passed and there may be more to do."""
        if self._strip_next:
            self._buffer = self._buffer.lstrip()
            self._strip_next = not self._buffer
        if self._state is _State.THINKING:
            return self._in_thinking(deltas)
        if self._state is _State.TOOL:
            return self._in_tool(deltas)
        return self._in_content(deltas)

    def _in_content(self, deltas: list[Delta]) -> bool:
        if self._starts_bare_call():
            self._state, self._opened_with = _State.TOOL, ""
            return True
        openers = [tag for tag in (self._thinking_opener(), self._tools.opener if self._tools else "") if tag]
        hits = [(index, tag) for tag in openers if (index := self._buffer.find(tag)) >= 0]
        if not hits:
            self._emit_content(deltas, _safe_length(self._buffer, openers))
            return False
        index, tag = min(hits)
        self._emit_content(deltas, index)
        self._buffer = self._buffer[len(tag) :]
        is_tool = self._tools is not None and tag == self._tools.opener
        self._state = _State.TOOL if is_tool else _State.THINKING
        self._opened_with = tag
        self._strip_next = not is_tool
        return True

    def _thinking_opener(self) -> str:
        """Only what comes before any answer can be thinking: later the tag is text about tags."""
        if self._thinking is None or self._has_content:
            return ""
        opener, start = self._thinking.opener, self._buffer.lstrip()
        return opener if start.startswith(opener) or opener.startswith(start) else ""

    def _starts_bare_call(self) -> bool:
        is_bare = self._tools is not None and self._tools.is_bare
        return is_bare and not self._has_content and self._buffer.lstrip()[:1] in ("{", "[") and bool(self._buffer)

    def _emit_content(self, deltas: list[Delta], length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if text:
            deltas.append(Delta(text))
            self._has_content = self._has_content or not text.isspace()

    def _in_thinking(self, deltas: list[Delta]) -> bool:
        assert self._thinking is not None
        closer = self._thinking.closer
        index = self._buffer.find(closer)
        safe = index if index >= 0 else _safe_length(self._buffer, [closer])
        # White space is held back too: before the closing tag it belongs to neither part.
        text = self._buffer[:safe].rstrip()
        if text:
            deltas.append(Delta(thinking=text))
        if index < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._buffer = self._buffer[index + len(closer) :]
        self._state, self._strip_next = _State.CONTENT, True
        return True

    def _in_tool(self, deltas: list[Delta]) -> bool:
        """At each closing tag try to read the call; a tag inside a JSON string does not end it."""
        assert self._tools is not None
        closer = self._tools.closer
        if closer is None:
            return False
        index = self._buffer.find(closer)
        while index >= 0:
            calls = self._tools.parse(self._buffer[:index], self._names)
            if calls is not None:
                deltas.append(Delta(tool_calls=calls))
                self._buffer = self._buffer[index + len(closer) :]
                self._state, self._strip_next = _State.CONTENT, True
                return True
            index = self._buffer.find(closer, index + 1)
        return False

    def _close_tool(self, body: str, closer: str) -> list[Delta]:
        assert self._tools is not None
        calls = self._tools.parse(body, self._names)
        return [Delta(tool_calls=calls)] if calls else [Delta(f"{self._opened_with}{body}{closer}")]


def _safe_length(text: str, tags: list[str]) -> int:
    """How much of `text` cannot be the beginning of a tag that the next text completes."""
    held = 0
    for tag in tags:
        for length in range(min(len(text), len(tag) - 1), held, -1):
            if text.endswith(tag[:length]):
                held = length
                break
    return len(text) - held
