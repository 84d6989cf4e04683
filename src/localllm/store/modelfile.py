"""The Modelfile: Ollama's grammar, read and written.

One instruction per line, of any case and in any order; a value that begins with quotes goes on until a line ends with
them, and knows no escapes. docs/modelfile.md is for those who write one.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from localllm.errors import InvalidRequest

COMMANDS = (
    *("from", "license", "template", "system", "adapter", "draft", "renderer", "parser", "parameter", "message"),
    "requires",
)
ROLES = ("system", "user", "assistant")

_BLANKS = " \t"
_NEWLINES = "\r\n"
_WORD = re.compile(r"[A-Za-z]*")
_PARAMETER = re.compile(r"[A-Za-z0-9_]*")
_END_OF_LINE = re.compile(r"\r\n|\r|\n|\Z")
_BAD_COMMAND = (
    'command must be one of "from", "license", "template", "system", "adapter", "draft", "renderer", "parser", '
    '"parameter", "message", or "requires"'
)
_BAD_ROLE = 'message role must be one of "system", "user", or "assistant"'


@dataclass(frozen=True)
class Instruction:
    """`name` is in lower case; `key` is the name of a PARAMETER or the role of a MESSAGE; `line` counts from 1."""

    name: str
    value: str
    key: str = ""
    line: int = 0

    def render(self) -> str:
        """As `parse` reads it."""
        words = [self.name.upper(), *([self.key] if self.key else []), quoted(self.value)]
        return " ".join(words)


def decode(data: bytes) -> str:
    """The text of a Modelfile in UTF-8, or in UTF-16 if its mark says so. What is not text becomes U+FFFD."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8-sig", "replace")


def parse(text: str) -> tuple[Instruction, ...]:
    """Raises InvalidRequest in Ollama's words, with the line where it went wrong."""
    instructions = tuple(_Reader(text).instructions())
    if not any(instruction.name == "from" for instruction in instructions):
        raise InvalidRequest("no FROM line", hint="Begin with FROM and the name of a model, or a GGUF file.")
    return instructions


def quoted(text: str) -> str:
    """Quotes only where the grammar needs them; it knows no escapes, so they must be longer than any inside."""
    is_plain = text == text.strip() and not any(end in text for end in _NEWLINES) and not text.startswith('"')
    if is_plain:
        return text
    return f'"""{text}"""' if '"' in text else f'"{text}"'


class _Reader:
    """A cursor over the text, without the characters that the grammar drops wherever they are."""

    def __init__(self, text: str) -> None:
        self._text = "".join(c for c in text if c.isprintable() or c in _BLANKS or c in _NEWLINES)
        self._at = 0
        self._line = 1

    def instructions(self) -> list[Instruction]:
        found = []
        while self._skip_to_instruction():
            found.append(self._instruction())
        return found

    def _skip_to_instruction(self) -> bool:
        """Past empty lines and comments; False at the end."""
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in _BLANKS:
                self._at += 1
            elif character in _NEWLINES or character == "#":
                self._rest_of_line()
            else:
                return True
        return False

    def _instruction(self) -> Instruction:
        line = self._line
        name = self._take(_WORD)
        if name.lower() not in COMMANDS or not (self._is_at(_BLANKS) or self._is_at_end()):
            raise self._error(_BAD_COMMAND)
        self._need_blank(name)
        if name.lower() == "parameter":
            key = self._take(_PARAMETER)
            self._need_blank(key)
        elif name.lower() == "message":
            key = self._take(_WORD)
            self._need_blank(key)
            if key not in ROLES:
                raise self._error(_BAD_ROLE)
        else:
            key = ""
        return Instruction(name.lower(), self._value(), key, line)

    def _need_blank(self, word: str) -> None:
        """Past the blanks after a word, without which there is no value."""
        if not self._is_at(_BLANKS):
            raise self._early_end(f"{word} on line {self._line} has no value", "" if self._is_at_end() else word)
        while self._is_at(_BLANKS):
            self._at += 1

    def _value(self) -> str:
        first = self._line
        start = self._at
        line = self._rest_of_line().strip()
        quotes = '"""' if line.startswith('"""') else '"' if line.startswith('"') else ""
        if not quotes:
            return line
        is_long_enough = len(line) >= 2 * len(quotes)
        while not (is_long_enough and line.endswith(quotes)):
            if self._is_at_end():
                raise self._early_end(f"The quotes that are opened on line {first} are not closed.")
            line = self._rest_of_line().rstrip()
            is_long_enough = True
        return self._text[start : self._at].strip()[len(quotes) : -len(quotes)]

    def _rest_of_line(self) -> str:
        """All up to the end of the line, and past it."""
        match = _END_OF_LINE.search(self._text, self._at)
        assert match is not None
        line = self._text[self._at : match.start()]
        self._line += bool(match[0])
        self._at = match.end()
        return line

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match[0]

    def _is_at(self, characters: str) -> bool:
        return not self._is_at_end() and self._text[self._at] in characters

    def _is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def _error(self, message: str) -> InvalidRequest:
        return InvalidRequest(f"(line {self._line}): {message}", line=self._line)

    def _early_end(self, hint: str, text: str = "") -> InvalidRequest:
        return InvalidRequest(f"unexpected EOF: {text}" if text else "unexpected EOF", hint=hint, line=self._line)
