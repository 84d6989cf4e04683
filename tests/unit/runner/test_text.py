"""Whole characters only, and no part of a stop string ever shown."""

from __future__ import annotations

import itertools

import pytest

from localllm.chat.formats import parser_for
from localllm.runner.text import StopMatcher, TextStream
from localllm.types import Delta, ToolCall


def stream(stops: tuple[str, ...] = ()) -> TextStream:
    """A stream whose tokens are single bytes."""
    return TextStream(lambda token: bytes([token]), stops, parser_for("", tools=(), think=None, prompt=""))


def feed_all(text: TextStream, data: bytes) -> list[str]:
    shown = []
    for byte in data:
        delta = text.feed(byte)
        if delta is not None:
            shown.append(delta.content)
        if text.is_stopped:
            break
    last = text.finish()
    return [*shown, *([last.content] if last else [])]


def test_characters_come_out_whole() -> None:
    assert feed_all(stream(), "añ日🙂".encode()) == ["a", "ñ", "日", "🙂"]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_mark() -> None:
    assert "".join(feed_all(stream(), "a🙂".encode()[:-1])) == "a�"


def test_deltas_account_for_every_token() -> None:
    text = stream()
    deltas = [text.feed(byte) for byte in "🙂!".encode()]
    assert [d.num_tokens for d in deltas if d] == [4, 1]


@pytest.mark.parametrize(
    ("stops", "data", "shown", "stopped"),
    [
        (("four",), "one two three four five", "one two three ", True),
        (("zzz",), "one two", "one two", False),
        (("END", "STOP"), "go STOP END", "go ", True),
        (("aab",), "aaab", "a", True),
        (("日本",), "これは日本", "これは", True),
        (("", "x"), "ax", "a", True),
        (("three four",), "one two three fo", "one two three fo", False),
    ],
)
def test_stop_strings(stops: tuple[str, ...], data: str, shown: str, stopped: bool) -> None:
    text = stream(stops)
    assert "".join(feed_all(text, data.encode())) == shown
    assert text.is_stopped is stopped


def test_stop_matcher_gives_the_same_text_however_the_stream_is_cut() -> None:
    text, stops = "abcabcdab", ("abcd", "dab")
    for cuts in itertools.combinations(range(1, len(text)), 2):
        matcher = StopMatcher(stops)
        parts = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
        shown = ""
        for part in parts:
            shown += matcher.feed(part)
            if matcher.is_stopped:
                break
        assert (shown, matcher.is_stopped) == ("abc", True)


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    matcher = StopMatcher(("###",))
    assert [matcher.feed(part) for part in ("hello", " #", "x#", "#y")] == ["hello", " ", "#x", "##y"]


def test_an_answer_ends_with_the_last_tool_call_that_is_wanted() -> None:
    class Calls:
        needs_special_tokens = False

        def feed(self, text: str) -> list[Delta]:
            return [Delta(tool_calls=tuple(ToolCall(str(i), "f", {}) for i in range(2))), Delta("more")]

        def finish(self) -> list[Delta]:
            return [Delta("rest")]

    stream = TextStream(lambda _token: b"x", (), Calls(), max_tool_calls=1)
    delta = stream.feed(1)
    assert delta is not None and [call.id for call in delta.tool_calls] == ["0"]
    assert stream.is_stopped and stream.finish() is None
