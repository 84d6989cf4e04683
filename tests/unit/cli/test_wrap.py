from __future__ import annotations

import re

import pytest

from localllm.cli.wrap import WordWrapper


def screen(output: str) -> list[str]:
    """What a terminal shows of it: knows moving left and erasing to the end of the line."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[(?:\d*D|K)|.|\n", output, re.DOTALL):
        if token == "\n":
            lines.append("")
            column = 0
        elif token.endswith("D") and token.startswith("\x1b"):
            column -= int(token[2:-1])
        elif token == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + token
            column += 1
    return [line.rstrip() for line in lines]


def wrap(text: str, width: int, size: int = 1) -> list[str]:
    """Fed in pieces of `size` characters."""
    wrapper = WordWrapper(width)
    return screen("".join(wrapper.feed(text[i : i + size]) for i in range(0, len(text), size)))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_word_that_does_not_fit_begins_the_next_line(size: int) -> None:
    assert wrap("the quick brown fox jumps", 10, size) == ["the quick", "brown fox", "jumps"]


def test_own_line_breaks_stay() -> None:
    assert wrap("one\n\ntwo three", 10) == ["one", "", "two three"]


def test_a_word_longer_than_a_line_is_broken() -> None:
    assert wrap("a 0123456789abc", 10) == ["a", "0123456789", "abc"]


def test_wide_characters_count_twice() -> None:
    assert wrap("日本語日本語", 8) == ["日本語日", "本語"]


def test_no_width_means_no_wrapping() -> None:
    text = "word " * 50
    assert WordWrapper(0).feed(text) == text


def test_text_that_fits_is_untouched() -> None:
    assert WordWrapper(20).feed("short and sweet") == "short and sweet"
