"""A parser for models that put thinking and tool calls between tags."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from localllm.chat.formats.calls import CallParser, Parsed, Schemas, is_in_string, may_be_call, parse_json
from localllm.types import Delta


@dataclass(frozen=True)
class Tags:
    opener: str
    closer: str


@dataclass(frozen=True)
class Block:
    """A way to write calls. Without a `closer` it reaches to the end of the answer.

    `is_whole`: `parse` reads the tags too, and so sees whether the call was closed. `is_open` says of the text before a
    closer whether that closer is a part of it.
    """

    opener: str
    closer: str = ""
    parse: CallParser = parse_json
    is_whole: bool = False
    is_open: Callable[[str], bool] = is_in_string


@dataclass(frozen=True)
class Syntax:
    """`bare` reads calls that are the whole answer, without any tag. `wrappers` are tags around the answer."""

    thinking: Tags | None = None
    blocks: tuple[Block, ...] = ()
    bare: CallParser | None = None
    wrappers: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        return self == Syntax()

    @property
    def tags(self) -> list[str]:
        thinking = [self.thinking.opener, self.thinking.closer] if self.thinking else []
        return [*thinking, *(block.opener for block in self.blocks), *self.wrappers]


class _State(enum.Enum):
    CONTENT = enum.auto()
    THINKING = enum.auto()
    CALL = enum.auto()


class TagParser:
    """Thinking and calls come out typed; a call that cannot be understood comes out as the text that it was.

    `_buffer` holds what has not come out yet: the beginning of a tag, white space that may turn out to lie next to one
    (it belongs to neither side), or a call.
    """

    def __init__(self, syntax: Syntax, schemas: Schemas, *, starts_thinking: bool = False) -> None:
        self.needs_special_tokens = bool(syntax.tags)
        self._syntax = syntax
        self._schemas = schemas
        self._thinking = syntax.thinking or Tags("", "")
        self._blocks = {block.opener: block for block in syntax.blocks}
        self._content_tags = TagFinder(syntax.tags)
        self._thinking_tags = TagFinder([self._thinking.closer, *(b.opener for b in syntax.blocks if b.closer)])
        self._state = _State.THINKING if starts_thinking else _State.CONTENT
        self._buffer = ""
        self._strips_next = starts_thinking
        self._has_content = False
        self._has_thinking = False
        self._speaks_of_tags = False
        self._block = Block("")
        self._gap = ""
        self._num_scanned = 0
        self._outer = _State.CONTENT

    def feed(self, text: str) -> list[Delta]:
        if not self._buffer and not self._strips_next and (delta := self._without_tags(text)):
            return [delta]
        self._buffer += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        rest, self._buffer = self._buffer, ""
        if self._state is _State.CALL:
            self._close_call(self._parse(rest, ""), rest, "", deltas)
        else:
            self._emit(rest.rstrip() if self._state is _State.THINKING else rest, deltas)
        return deltas

    def _without_tags(self, text: str) -> Delta | None:
        """The common case, made quick: text in the middle of an answer or a thought in which no tag can begin."""
        if self._state is _State.CONTENT and self._has_content and not self._content_tags.may_begin_in(text):
            return Delta(text)
        is_thought = self._state is _State.THINKING and self._has_thinking and not text[-1].isspace()
        return Delta(thinking=text) if is_thought and not self._thinking_tags.may_begin_in(text) else None

    def _advance(self, deltas: list[Delta]) -> bool:
        """Handles what the buffer allows; True when a tag was passed and there may be more to do."""
        if self._strips_next:
            self._buffer = self._buffer.lstrip()
            self._strips_next = not self._buffer
        if not self._buffer:
            return False
        if self._state is _State.CALL:
            return self._in_call(deltas)
        return self._in_thinking(deltas) if self._state is _State.THINKING else self._in_content(deltas)

    def _in_content(self, deltas: list[Delta]) -> bool:
        if not self._has_content and (self._buffer.isspace() or self._opens_bare_call()):
            return self._state is _State.CALL
        match = self._content_tags.search(self._buffer)
        if match is None:
            length = self._content_tags.safe_length(self._buffer)
            is_gap = not self._has_content and not self._buffer[:length].strip()
            self._emit("" if is_gap else self._take(length), deltas)
            return False
        before, tag = self._take(match.start()), self._take(len(match[0]))
        gap = before if before.isspace() and not self._has_content else ""
        self._emit(before.removeprefix(gap), deltas)
        self._on_tag(tag, gap, deltas)
        return True

    def _opens_bare_call(self) -> bool:
        """True when the buffer is, or may still become, a bare call."""
        if self._syntax.bare is None:
            return False
        verdict = may_be_call(self._buffer, self._schemas)
        if verdict:
            self._begin_call(Block("", parse=self._syntax.bare))
        return verdict is not False

    def _on_tag(self, tag: str, gap: str, deltas: list[Delta]) -> None:
        """In an answer, a tag of thinking is text when the answer speaks of tags, and a slip when it does not."""
        if tag in self._blocks:
            self._begin_call(self._blocks[tag], gap)
        elif tag == self._thinking.opener and not self._has_content:
            self._state, self._strips_next = _State.THINKING, True
        elif tag == self._thinking.opener or (tag == self._thinking.closer and self._speaks_of_tags):
            self._speaks_of_tags = True
            self._emit(tag, deltas)
        else:
            self._strips_next = not self._has_content or tag == self._thinking.closer

    def _in_thinking(self, deltas: list[Delta]) -> bool:
        at = 0
        while match := self._thinking_tags.search(self._buffer, at):
            is_closer = match[0] == self._thinking.closer
            if is_closer or self._begins_line(match.start()):
                before, tag = self._take(match.start()), self._take(len(match[0]))
                self._emit(before.rstrip(), deltas)
                if is_closer:
                    self._state, self._strips_next = _State.CONTENT, True
                else:
                    self._begin_call(self._blocks[tag], before[len(before.rstrip()) :])
                return True
            at = match.end()
        safe = self._buffer[: self._thinking_tags.safe_length(self._buffer)].rstrip()
        self._emit(self._take(len(safe)), deltas)
        return False

    def _begins_line(self, index: int) -> bool:
        """Models forget to end their thoughts before they call a tool, but they also think about calling one."""
        before = self._buffer[:index]
        gap = before[len(before.rstrip()) :]
        return "\n" in gap or (gap == before and not self._has_thinking)

    def _begin_call(self, block: Block, gap: str = "") -> None:
        """`gap` is white space before the call, which is text again if it turns out to be none."""
        self._outer, self._state = self._state, _State.CALL
        self._block, self._gap, self._num_scanned = block, gap, 0

    def _in_call(self, deltas: list[Delta]) -> bool:
        closer = self._block.closer
        if not closer:
            return False
        index = self._buffer.find(closer, self._num_scanned)
        if self._outer is _State.THINKING and self._ends_thought(index):
            # It was only a thought about a call.
            self._state = _State.THINKING
            self._emit(self._gap + self._block.opener, deltas)
            return True
        if index < 0:
            self._num_scanned = max(self._num_scanned, len(self._buffer) - len(closer) + 1)
            return False
        self._num_scanned = index + 1
        body = self._buffer[:index]
        parsed = self._parse(body, closer)
        if parsed or not self._block.is_open(body):
            self._take(index + len(closer))
            self._close_call(parsed, body, closer, deltas)
        return True

    def _ends_thought(self, index: int) -> bool:
        end = self._buffer.find(self._thinking.closer)
        return end >= 0 and (index < 0 or end < index)

    def _parse(self, body: str, closer: str) -> Parsed | None:
        text = f"{self._block.opener}{body}{closer}" if self._block.is_whole else body
        return self._block.parse(text, self._schemas)

    def _close_call(self, parsed: Parsed | None, body: str, closer: str, deltas: list[Delta]) -> None:
        if parsed is None:
            self._state = self._outer
            self._emit(f"{self._gap}{self._block.opener}{body}{closer}", deltas)
            return
        self._state, self._strips_next = _State.CONTENT, True
        deltas.append(Delta(tool_calls=parsed.calls))
        self._emit(parsed.rest if parsed.rest.strip() else "", deltas)

    def _take(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text

    def _emit(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._state is _State.THINKING:
            self._has_thinking = True
            deltas.append(Delta(thinking=text))
        else:
            self._has_content = self._has_content or not text.isspace()
            deltas.append(Delta(text))


class TagFinder:
    """Finds the first of some tags, and how much of a text cannot be the beginning of one."""

    def __init__(self, tags: Iterable[str]) -> None:
        self._tags = sorted({tag for tag in tags if tag}, key=len, reverse=True)
        self._longest = len(self._tags[0]) if self._tags else 0
        self._pattern = re.compile("|".join(map(re.escape, self._tags)) or r"(?!)")
        self._first = re.compile("|".join(re.escape(tag[0]) for tag in self._tags) or r"(?!)")

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def may_begin_in(self, text: str) -> bool:
        return self._first.search(text) is not None

    def safe_length(self, text: str) -> int:
        for match in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            if any(tag.startswith(text[match.start() :]) for tag in self._tags):
                return match.start()
        return len(text)
