"""PURE: word wrap of text that comes in pieces and is shown at once."""

from __future__ import annotations

from rich.cells import cell_len

_TAB = 8


class WordWrapper:
    """Wraps between words: a word that grows over the edge is taken back and begins the next line."""

    def __init__(self, width: int) -> None:
        """`width` in columns; 0 turns wrapping off."""
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """What to write to the terminal for `text`."""
        return "".join(map(self._place, text)) if self._width else text

    def _place(self, character: str) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        size = _TAB - self._column % _TAB if character == "\t" else cell_len(character)
        if character.isspace() or self._column + size <= self._width:
            self._column += size
            self._word = "" if character.isspace() else self._word + character
            return character
        return self._break_before(character, size)

    def _break_before(self, character: str, size: int) -> str:
        word, self._word = self._word, self._word + character
        self._column = cell_len(self._word)
        if not word or self._column > self._width:
            # Nothing to take back, or one word that is longer than a line: it is broken where it stands.
            self._word, self._column = character, size
            return f"\n{character}"
        return f"\x1b[{cell_len(word)}D\x1b[K\n{word}{character}"
